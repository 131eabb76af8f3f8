# cython: language_level=3, embedsignature=True, auto_pickle=False, autotestdict=False
"""What is kept of runs: KV caches, prefix caches and prefix pools, and what all bindings share.

Rules of the bindings: the GIL is dropped around every C call that computes, locks or frees, and is
the outermost lock; each such call holds a reference of its own to the handle it uses, so that a
close() on another thread cannot free it; lifetimes live in C, so no destructor touches a Python
attribute.
"""

import threading
import warnings

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t

from .libtinyloop cimport *

from .arguments import MAX_INT64, allocate, as_integer, as_loops, as_tokens
from .errors import ArgumentTypeError, Error, InvalidArgumentError, OutOfMemoryError, failure

__all__ = [
    "ModelHandle",
    "PrefixCache",
    "PrefixPool",
    "RuntimeKVCache",
    "decode_with_kv_cache_capture",
]

_PRIVATE = object()  # what the makers of objects without a public constructor hand over


# ---- warnings ---------------------------------------------------------------------------------

_messages = threading.local()


cdef void collect_message(void *user, int32_t level, const char *message) noexcept with gil:
    # on the thread of the call; warn() follows when the call has returned
    if level == TL_LOG_WARNING:
        try:
            _messages.__dict__.setdefault("pending", []).append(message.decode("utf-8", "replace"))
        except MemoryError:
            pass


cdef int warn() except -1:
    """Issues what the library said during the last call on this thread as RuntimeWarnings."""
    pending = _messages.__dict__.pop("pending", None)
    if pending:
        for text in pending:
            warnings.warn(text, RuntimeWarning, stacklevel=1)
    return 0


# ---- signals ----------------------------------------------------------------------------------

# Python handles signals on its main thread alone (which is another thread after some forks), so
# only that one's calls stop to look for them.

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()

cdef object interruption = None  # what a signal handler raised during a call


cdef int32_t handle_signals() noexcept with gil:
    global interruption
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        interruption = error
        return 1
    return 0


cdef int32_t check_signals(void *user) noexcept nogil:
    """Between the forward passes of a call: non-zero ends it, so that Ctrl-C does within a step."""
    # a program that embeds Python may go on without it
    return handle_signals() if Py_IsInitialized() else 0


cdef int watch_signals() except -1:
    """Lets signals interrupt this thread's calls from now on. May run any Python code."""
    if threading.get_ident() == threading.main_thread().ident:
        tl_set_interrupt_callback(check_signals, NULL)
    return 0


cdef object take_interruption():
    global interruption
    error = interruption
    interruption = None
    return error


# ---- errors -----------------------------------------------------------------------------------

cdef object closed_error(str method):
    return failure(Error, f"tinyloop.Model is closed; cannot call {method}")


cdef int check(tl_status status, str method) except -1:
    """Raises what a status stands for; on the thread whose call gave it."""
    if status == TL_STATUS_OK:
        return warn()
    # "tl_function: what was wrong"; here the traceback names the function
    text = tl_last_error().decode("utf-8", "replace").partition(": ")[2]
    text = text.replace("stop_tokens[", "stop_token_ids[")  # the one parameter with two names
    try:
        warn()  # a warning that comes once must not be lost with the call
    except RuntimeWarning:
        pass  # where warnings are errors, the call's own error says more
    if status == TL_STATUS_INTERRUPTED:
        raise take_interruption()
    if status == TL_STATUS_CLOSED:
        raise closed_error(method)
    if status == TL_STATUS_NOMEM:
        raise failure(OutOfMemoryError, text)
    if status == TL_STATUS_INVALID:
        raise failure(InvalidArgumentError, text)
    raise failure(Error, text)


# ---- arguments --------------------------------------------------------------------------------

cdef tl_cache_options cache_options(object loops, object cache_window,
                                    object prefix_len) except *:
    cdef tl_cache_options options
    options.size = sizeof(tl_cache_options)
    options.loops, options.inner_loops = as_loops(loops)
    options.cache_window = as_integer("cache_window", cache_window, 0, MAX_INT64)
    options.has_prefix_len = prefix_len is not None
    options.prefix_len = 0
    if prefix_len is not None:
        options.prefix_len = as_integer("prefix_len", prefix_len, 0, MAX_INT64)
    options.reserved = 0
    return options


cdef int32_t no_token = 0


cdef const int32_t *first(const int32_t[::1] tokens) noexcept:
    # an empty view has no element, but C wants an address
    return &tokens[0] if tokens.shape[0] > 0 else &no_token


# ---- models -----------------------------------------------------------------------------------

cdef tl_model_info get_info(tl_model *model) except *:
    cdef tl_model_info info
    info.size = sizeof(tl_model_info)
    check(tl_model_get_info(&info, model), "info")
    return info


cdef class ModelHandle:
    """A reference to a loaded model: what its caches need of a `Model`."""

    def __dealloc__(self):
        cdef tl_model *handle = self.handle
        if handle != NULL:
            with nogil:
                tl_model_release(handle)

    cdef tl_model *use(self, str method) except NULL:
        """A reference for one call, which the caller releases; raises if the model is closed."""
        watch_signals()
        if self.handle == NULL:
            raise closed_error(method)
        return tl_model_retain(self.handle)


# ---- KV cache ---------------------------------------------------------------------------------

cdef class RuntimeKVCache:
    """One sequence's KV, empty at first, for `decode_with_kv_cache_capture`.

    `prefix_len`: of a prefix-LM, the first so many tokens see each other and must come in one call;
    0 elsewhere. For one thread at a time. Keeps its model's memory alive.
    """

    def __cinit__(self, model, loops=None, cache_window=0, *, prefix_len=0):
        cdef tl_cache_options options
        cdef tl_model *handle
        cdef tl_status status
        if model is _PRIVATE:
            return
        if not isinstance(model, ModelHandle):
            raise failure(ArgumentTypeError, f"model is {model!r}; it must be a Model")
        options = cache_options(loops, cache_window, prefix_len)
        handle = (<ModelHandle> model).use("RuntimeKVCache")
        with nogil:
            status = tl_kv_cache_create(&self.handle, handle, &options)
            tl_model_release(handle)
        check(status, "RuntimeKVCache")
        self.model = model

    def __dealloc__(self):
        cdef tl_kv_cache *handle = self.handle
        if handle != NULL:
            with nogil:
                tl_kv_cache_release(handle)

    cdef int check_free(self) except -1:
        if self.busy:
            raise failure(Error, "this RuntimeKVCache is in use on another thread; give each "
                                 "thread a clone")
        return 0

    cdef int begin(self) except -1:
        self.check_free()
        self.busy = True
        return 0

    def length(self):
        """Positions that are written."""
        self.check_free()
        return tl_kv_cache_length(self.handle)

    def __len__(self):
        return self.length()

    def bytes(self):
        """Bytes of the KV blocks that it refers to, those it shares included."""
        self.check_free()
        return tl_kv_cache_bytes(self.handle)

    def clone(self):
        """A cache with the same content; the two share blocks until one writes into them."""
        cdef RuntimeKVCache clone = RuntimeKVCache.__new__(RuntimeKVCache, _PRIVATE)
        cdef tl_status status
        self.begin()
        with nogil:
            status = tl_kv_cache_clone(&clone.handle, self.handle)
        self.busy = False
        clone.model = self.model
        check(status, "clone")
        return clone

    def truncate(self, length):
        """Forgets positions `length` and later."""
        cdef int64_t to = as_integer("length", length, 0, MAX_INT64)
        cdef tl_status status
        self.begin()
        with nogil:
            status = tl_kv_cache_truncate(self.handle, to)
        self.busy = False
        check(status, "truncate")


def decode_with_kv_cache_capture(kv, tokens):
    """Runs the tokens at the next positions of a RuntimeKVCache and extends it by them.

    Returns the last one's final hidden state, before the final norm: float32 [hidden]. On failure
    the cache is as it was.
    """
    if not isinstance(kv, RuntimeKVCache):
        raise failure(ArgumentTypeError, f"kv is {kv!r}; it must be a RuntimeKVCache")
    cdef RuntimeKVCache cache = kv
    cdef const int32_t[::1] ids = as_tokens("tokens", tokens)
    cdef const int32_t *data = first(ids)
    cdef size_t n = ids.shape[0]
    cdef tl_status status
    cdef tl_model *model = (<ModelHandle> cache.model).use("decode_with_kv_cache_capture")
    cdef float[::1] view
    try:
        hidden = allocate(get_info(model).hidden_size)
        view = hidden
        cache.begin()
        with nogil:
            status = tl_decode_with_kv_cache_capture(&view[0], cache.handle, data, n)
        cache.busy = False
        check(status, "decode_with_kv_cache_capture")
    finally:
        with nogil:
            tl_model_release(model)
    return hidden


# ---- prefix cache and pool --------------------------------------------------------------------

cdef class PrefixCache:
    """One prefix that has been run, from `Model.build_prefix_cache`: its KV and the final hidden
    state of its last token. Immutable; any number of generations may start from it."""

    def __cinit__(self, *, _token=None):
        if _token is not _PRIVATE:
            raise failure(ArgumentTypeError,
                          "a PrefixCache is made by Model.build_prefix_cache")

    def __dealloc__(self):
        cdef tl_prefix_cache *handle = self.handle
        if handle != NULL:
            with nogil:
                tl_prefix_cache_release(handle)

    cdef tl_prefix_cache_info own_info(self) except *:
        cdef tl_prefix_cache_info info
        info.size = sizeof(tl_prefix_cache_info)
        check(tl_prefix_cache_get_info(&info, self.handle), "PrefixCache")
        return info

    cdef object match_window(self, object cache_window):
        """None is the cache's own window; in Python 0 is a window that may differ from it."""
        own = self.own_info().cache_window
        if cache_window is None:
            return own
        given = as_integer("cache_window", cache_window, 0, MAX_INT64)
        if given != own:
            raise failure(InvalidArgumentError, f"cache_window is {given}, but the prefix cache "
                                                f"was built with {own}")
        return own

    def length(self):
        """Number of tokens."""
        return self.own_info().length

    def __len__(self):
        return self.own_info().length

    def bytes(self):
        """Bytes of its KV blocks, final hidden state and token ids."""
        return self.own_info().bytes

    @property
    def loops(self):
        """Times the core ran; of a nested schedule a pair (H, L)."""
        info = self.own_info()
        if info.inner_loops > 0:
            return info.loops, info.inner_loops
        return info.loops

    @property
    def prefix_len(self):
        """Of a prefix-LM: the tokens that have seen each other; 0 elsewhere."""
        return self.own_info().prefix_len

    @property
    def cache_window(self):
        """0: none."""
        return self.own_info().cache_window


cdef class PrefixPool:
    """At most `capacity` registered prefixes (0 becomes 1); see `Model.register_prefix` and
    `Model.generate_with_pool`. Creating one takes no KV memory. Safe to use from any number of
    threads. Entries live until they are evicted or the pool is gone, also after their model was
    closed."""

    def __cinit__(self, capacity=16):
        cdef tl_prefix_pool_options options
        options.size = sizeof(tl_prefix_pool_options)
        options.capacity = as_integer("capacity", capacity, 0, MAX_INT64)
        check(tl_prefix_pool_create(&self.handle, &options), "PrefixPool")

    def __dealloc__(self):
        cdef tl_prefix_pool *handle = self.handle
        if handle != NULL:
            with nogil:
                tl_prefix_pool_release(handle)

    def size(self):
        """How many entries it has."""
        cdef int64_t size
        with nogil:
            size = tl_prefix_pool_size(self.handle)
        return size

    def total_cached_tokens(self):
        """How many tokens its entries hold in all."""
        cdef int64_t total
        with nogil:
            total = tl_prefix_pool_total_cached_tokens(self.handle)
        return total

    def __repr__(self):
        return (f"<tinyloop.PrefixPool: {self.size()} entries, "
                f"{self.total_cached_tokens()} cached tokens>")


tl_set_log_callback(collect_message, NULL)
