# cython: language_level=3, embedsignature=True, auto_pickle=False, autotestdict=False
"""The objects of tinyloop over the C API. See the package's documentation for what they do.

The rules for the GIL and for handles stand in _caches.pyx.
"""

import os
import warnings

import numpy as np

from libc.stdint cimport int32_t, int64_t

from ._caches cimport (
    ModelHandle,
    PrefixCache,
    PrefixPool,
    RuntimeKVCache,
    cache_options,
    check,
    closed_error,
    first,
    get_info,
    watch_signals,
)
from .libtinyloop cimport *

from ._caches import _PRIVATE, decode_with_kv_cache_capture
from .arguments import (
    MAX_INT64,
    allocate,
    as_integer,
    as_loops,
    as_number,
    as_states,
    as_tokens,
)
from .errors import ArgumentTypeError, Error, InvalidArgumentError, OutOfMemoryError, failure


__all__ = ["Model", "TokenStream", "library_version"]


# ---- arguments --------------------------------------------------------------------------------

cdef class Options:
    """tl_generate_options of a call's arguments, with the arrays that it points into."""

    cdef tl_generate_options c
    cdef const int32_t[::1] stops

    def __cinit__(self, max_tokens, loops, temperature, top_k, cache_window, top_p, min_p,
                  repetition_penalty, seed, stop_token_ids, prefix_len):
        self.c.size = sizeof(tl_generate_options)
        self.c.max_tokens = as_integer("max_tokens", max_tokens, 0, MAX_INT64)
        self.c.loops, self.c.inner_loops = as_loops(loops)
        self.c.cache_window = as_integer("cache_window", cache_window, 0, MAX_INT64)
        self.c.top_k = as_integer("top_k", top_k, 0, MAX_INT64)
        self.c.temperature = as_number("temperature", temperature)
        self.c.top_p = as_number("top_p", top_p)
        self.c.min_p = as_number("min_p", min_p)
        self.c.repetition_penalty = as_number("repetition_penalty", repetition_penalty)
        self.c.has_prefix_len = prefix_len is not None
        self.c.prefix_len = 0
        if prefix_len is not None:
            self.c.prefix_len = as_integer("prefix_len", prefix_len, 0, MAX_INT64)
        self.c.reserved = 0
        self.c.has_seed = seed is not None
        self.c.seed = 0 if seed is None else as_integer("seed", seed, 0, 2**64 - 1)
        self.c.on_token = NULL
        self.c.user = NULL
        self.c.has_stop_tokens = stop_token_ids is not None
        self.c.n_stop_tokens = 0
        self.c.stop_tokens = NULL
        if stop_token_ids is not None:
            self.stops = as_tokens("stop_token_ids", stop_token_ids)
            self.c.n_stop_tokens = self.stops.shape[0]
            if self.stops.shape[0] > 0:
                self.c.stop_tokens = &self.stops[0]


# ---- model ------------------------------------------------------------------------------------

_DEVICES = {"auto": TL_DEVICE_AUTO, "cpu": TL_DEVICE_CPU, "cuda": TL_DEVICE_CUDA}
_KV_MODES = {None: TL_KV_MODE_DEFAULT, "fp16": TL_KV_MODE_FP16, "fp32": TL_KV_MODE_FP32}


def _choice(name, value, allowed):
    if value is not None and not isinstance(value, str):
        raise failure(ArgumentTypeError, f"{name} is {value!r}; it must be a string")
    if value not in allowed:
        names = ", ".join(repr(key) for key in allowed)
        raise failure(InvalidArgumentError, f"{name} is {value!r}; allowed are {names}")
    return allowed[value]


cdef class Model(ModelHandle):
    """A looped language model, loaded from a `.tinyloop` file.

    Args:
        path: the file.
        max_seq_len: positions a sequence may have, prompt and generated tokens together.
        device: "auto", "cpu" or "cuda".
        kv_mode: how K and V are stored: "fp16", "fp32", or None for what the environment's
            TINYLOOP_KV_* variables ask for, else "fp16".
        threads: 1 to 256; None is one for each CPU that the process may use, 64 at most.
        init_scale, init_seed: of a random initial state, for models that start from one; others
            ignore them. None is the file's own scale, 0 starts from zero.
        verify: check the tensors' checksums and the gaps between them too.

    A model may be used from any number of threads. It is a context manager; `close()` ends its
    use, and its memory returns when the last cache, pool entry or stream that needs it is gone.

    Raises:
        Error: the file cannot be read, is damaged, or needs what this version does not have.
        ValueError, TypeError: an argument (both are also `Error`).
        MemoryError: also an `Error`; the text contains "out of memory".
    """

    def __cinit__(self, path, max_seq_len=2048, *, device="auto", kv_mode=None, threads=None,
                  init_scale=None, init_seed=0, verify=False):
        cdef tl_model_options options
        cdef tl_model *handle = NULL
        cdef tl_status status
        options.size = sizeof(tl_model_options)
        options.max_seq_len = as_integer("max_seq_len", max_seq_len, 1, 1 << 24)
        if device is None:
            raise failure(ArgumentTypeError, "device is None; it must be a string")
        options.device = _choice("device", device, _DEVICES)
        options.kv_mode = _choice("kv_mode", kv_mode, _KV_MODES)
        options.threads = 0 if threads is None else as_integer("threads", threads, 1, 256)
        options.verify = bool(verify)
        options.prefill_chunk = 0
        options.has_init_scale = init_scale is not None
        options.init_scale = 0.0 if init_scale is None else as_number("init_scale", init_scale)
        options.init_seed = as_integer("init_seed", init_seed, 0, 2**64 - 1)
        try:
            name = os.fsencode(path)
        except TypeError:
            raise failure(ArgumentTypeError, f"path is {path!r}; it must be a path") from None
        if b"\0" in name:
            raise failure(InvalidArgumentError, f"path {path!r} contains a zero byte")
        cdef const char *c_name = name
        with nogil:
            status = tl_model_load(&handle, c_name, &options)
        self.handle = handle
        check(status, "Model")

    @classmethod
    def from_arrays(cls, config, tensors, blobs=None, **arguments):
        """A model made of a Config and arrays by tensor name, as `tinyloop_py.save` takes them;
        `arguments` are those of Model but the path. No file is written."""
        from .arrays import memory_file  # whose import serving has no use for

        with memory_file(config, tensors, blobs) as path:
            return cls(path, **arguments)

    def __enter__(self):
        if self.handle == NULL:
            raise closed_error("__enter__")
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """Ends the use of the model: later calls raise, those under way end normally. May be
        called again."""
        cdef tl_model *handle = self.handle
        self.handle = NULL
        if handle != NULL:
            with nogil:
                tl_model_close(handle)
                tl_model_release(handle)

    @property
    def closed(self):
        """Whether close() was called."""
        return self.handle == NULL

    def __repr__(self):
        if self.handle == NULL:
            return "<tinyloop.Model, closed>"
        info = self.info
        return (f"<tinyloop.Model: {info['n_parameters']:,} parameters, {info['n_layers']} layers, "
                f"loops {info['loops_default']}, {info['device']}, KV {info['kv_mode']}>")

    @property
    def info(self):
        """What the model is, as a new dict: sizes, loops (default, range, trained maximum, default
        inner loops of a nested schedule, else 0), KV bytes a position needs outside the loops and
        in each loop, device, kv_mode, threads, and whether it is a prefix-LM."""
        if self.handle == NULL:
            raise closed_error("info")
        cdef tl_model_info info = get_info(self.handle)
        return {
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "n_layers": info.n_layers,
            "n_heads": info.n_heads,
            "n_kv_heads": info.n_kv_heads,
            "head_dim": info.head_dim,
            "max_seq_len": info.max_seq_len,
            "max_positions": info.max_positions,
            "loops_default": info.loops_default,
            "loops_min": info.loops_min,
            "loops_max": info.loops_max,
            "loops_max_trained": info.loops_max_trained,
            "inner_loops_default": info.inner_loops_default,
            "n_parameters": info.n_parameters,
            "weight_bytes": info.weight_bytes,
            "kv_block_size": info.kv_block_size,
            "kv_bytes_fixed": info.kv_bytes_fixed,
            "kv_bytes_loop": info.kv_bytes_loop,
            "device": "cpu" if info.device == TL_DEVICE_CPU else "cuda",
            "kv_mode": "fp16" if info.kv_mode == TL_KV_MODE_FP16 else "fp32",
            "threads": info.threads,
            "two_sided_prefix": info.two_sided_prefix != 0,
        }

    def blob(self, name):
        """The file's blob `name` ("tokenizer.json", "chat_template", "card", "end_ids") as bytes,
        or None."""
        cdef const void *data = NULL
        cdef size_t size = 0
        if not isinstance(name, str):
            raise failure(ArgumentTypeError, f"name is {name!r}; it must be a string")
        if self.handle == NULL:
            raise closed_error("blob")
        encoded = name.encode()
        cdef const char *c_name = encoded
        check(tl_model_blob(&data, &size, self.handle, c_name), "blob")
        return None if data == NULL else (<const char *> data)[:size]

    def counters(self):
        """Monotonic totals since the model was loaded, as a new dict of str to int.

        `tokens_prefilled` and `tokens_decoded` count tokens that have gone through the layers
        (which a generation's last one never does); `pool_full`, `pool_partial`, `pool_miss` and
        `pool_fallback` count requests with a pool by what became of them, once they have started
        (not those that are refused).
        """
        cdef tl_counters counters
        counters.size = sizeof(tl_counters)
        if self.handle == NULL:
            raise closed_error("counters")
        check(tl_model_get_counters(&counters, self.handle), "counters")
        return {
            "tokens_prefilled": counters.tokens_prefilled,
            "tokens_decoded": counters.tokens_decoded,
            "pool_full": counters.pool_full,
            "pool_partial": counters.pool_partial,
            "pool_miss": counters.pool_miss,
            "pool_fallback": counters.pool_fallback,
        }

    # ---- evaluation ----

    def logits(self, tokens, loops=None, cache_window=0, *, prefix_len=0, init_state=None):
        """The logits at every position: float32 [n, vocab].

        Args:
            tokens: ids [n].
            loops: times the core runs, None for the file's default; of a nested schedule a pair
                (H, L).
            cache_window: position p attends to p - cache_window + 1 .. p only; 0 to all.
            prefix_len: of a prefix-LM, the first so many tokens see each other; 0 elsewhere.
            init_state: [n, hidden], what the core starts from in place of the model's own initial
                state. For models that inject their input into each loop.
        """
        return run_evaluation(self, "logits", tokens, init_state,
                              cache_options(loops, cache_window, prefix_len))

    def states(self, tokens, loops=None, cache_window=0, *, prefix_len=0, init_state=None):
        """The core's state after each loop and its norm: float32 [loops, n, hidden]. Of a nested
        schedule, the state after each run of a stage, in order. A model without loops has one: the
        state before the final norm. Arguments as for `logits`."""
        return run_evaluation(self, "states", tokens, init_state,
                              cache_options(loops, cache_window, prefix_len))

    def exit_logits(self, tokens, loops=None, cache_window=0):
        """What the exit gate says after each loop, before the sigmoid: float32 [loops, n]. Only for
        models that have one. Arguments as for `logits`."""
        return run_evaluation(self, "exit_logits", tokens, None,
                              cache_options(loops, cache_window, 0))

    # ---- generation ----

    def generate(self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50,
                 cache_window=0, *, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=None,
                 stop_token_ids=None, prefix_len=None, pool=None):
        """Continues the prompt; returns prompt + generated ids as a list.

        Args:
            prompt: token ids [n]; n + max_tokens <= max_seq_len.
            max_tokens: tokens at most; 0 returns the prompt.
            loops: times the core runs, None for the file's default; of a nested schedule a pair
                (H, L).
            temperature: 0 is greedy (ties go to the lowest id).
            top_k: 0 is off.
            cache_window: position p attends to p - cache_window + 1 .. p only; 0 to all.
            top_p, min_p, repetition_penalty: the penalty (on ids that the text so far has) comes
                first, then temperature, top_k, top_p and min_p.
            seed: the same seed draws the same tokens, cached or not; None takes a fresh one.
            stop_token_ids: None is the file's end ids, () none. The one that ends a generation
                belongs to the result.
            prefix_len: of a prefix-LM, the first so many tokens see each other; None is the whole
                prompt. Other models take 0 or None.
            pool: a PrefixPool whose longest match saves its part of the prefill.

        Raises:
            Error: the model is closed, the lengths exceed max_seq_len, or logits are not finite.
            ValueError, TypeError, MemoryError: all are also `Error`.
        """
        options = Options(max_tokens, loops, temperature, top_k, cache_window, top_p, min_p,
                          repetition_penalty, seed, stop_token_ids, prefix_len)
        return run_generation(self, pool, as_tokens("prompt", prompt), options, "generate")

    def generate_with_pool(self, pool, prompt, max_tokens=128, loops=None, temperature=1.0,
                           top_k=50, cache_window=0, *, top_p=1.0, min_p=0.0,
                           repetition_penalty=1.0, seed=None, stop_token_ids=None,
                           prefix_len=None):
        """As `generate`, token for token, reusing the longest entry of the pool that the prompt
        starts with (of the same model, loops, cache_window and prefix_len)."""
        if not isinstance(pool, PrefixPool):
            raise failure(ArgumentTypeError, f"pool is {pool!r}; it must be a PrefixPool")
        options = Options(max_tokens, loops, temperature, top_k, cache_window, top_p, min_p,
                          repetition_penalty, seed, stop_token_ids, prefix_len)
        ids = as_tokens("prompt", prompt)
        return run_generation(self, pool, ids, options, "generate_with_pool")

    def generate_stream(self, prompt, max_tokens=128, loops=None, temperature=1.0, top_k=50,
                        cache_window=0, *, top_p=1.0, min_p=0.0, repetition_penalty=1.0,
                        seed=None, stop_token_ids=None, prefix_len=None, pool=None):
        """The tokens that `generate` would add, one at a time, as an iterator.

        Arguments are checked at once; the first token's work is done when it is asked for.
        Dropping or closing the iterator at any time frees what the generation held.
        """
        options = Options(max_tokens, loops, temperature, top_k, cache_window, top_p, min_p,
                          repetition_penalty, seed, stop_token_ids, prefix_len)
        ids = as_tokens("prompt", prompt)
        return open_stream(self, pool, ids, options, "generate_stream")

    def generate_from_prefix_cache(self, cache, suffix=None, max_tokens=128, loops=None,
                                   temperature=1.0, top_k=50, cache_window=None, *, top_p=1.0,
                                   min_p=0.0, repetition_penalty=1.0, seed=None,
                                   stop_token_ids=None, prefix_len=None):
        """Continues cache + suffix; returns cached, suffix and generated ids as a list.

        The cache is not changed. `loops` and `cache_window` are the cache's; where they are
        given they must be equal to it. In a prefix-LM None for `prefix_len` is the whole prompt,
        as everywhere, and what the cache has seen is only its own part of that: with a suffix it
        raises, unless the cache was built with the `prefix_len` that is given. Otherwise as
        `generate`.
        """
        if not isinstance(cache, PrefixCache):
            raise failure(ArgumentTypeError, f"cache is {cache!r}; it must be a PrefixCache")
        cdef PrefixCache prefix = cache
        options = Options(max_tokens, loops, temperature, top_k,
                          prefix.match_window(cache_window), top_p, min_p, repetition_penalty,
                          seed, stop_token_ids, prefix_len)
        ids = as_tokens("suffix", () if suffix is None else suffix)
        return prefix.tokens.tolist() + run_generation(self, prefix, ids, options,
                                                       "generate_from_prefix_cache")

    # ---- prefixes ----

    def build_prefix_cache(self, tokens, loops=None, cache_window=0, *, prefix_len=None):
        """Runs the tokens and returns a PrefixCache that generations can start from. In a
        prefix-LM None for `prefix_len` is all of them."""
        cdef const int32_t[::1] ids = as_tokens("tokens", tokens)
        cdef tl_cache_options options = cache_options(loops, cache_window, prefix_len)
        cdef PrefixCache cache = PrefixCache.__new__(PrefixCache, _token=_PRIVATE)
        cdef tl_status status
        cdef size_t n = ids.shape[0]
        cdef const int32_t *data = first(ids)
        cdef tl_model *model = self.use("build_prefix_cache")
        with nogil:
            status = tl_build_prefix_cache(&cache.handle, model, data, n, &options)
            tl_model_release(model)
        check(status, "build_prefix_cache")
        cache.tokens = np.array(ids)
        return cache

    def register_prefix(self, pool, tokens, loops=None, cache_window=0, *, prefix_len=None):
        """Builds the prefix's cache and enters it into the pool; returns its number of tokens.

        The same (tokens, loops, cache_window, prefix_len) again changes nothing and returns the
        same. In a prefix-LM None for `prefix_len` is all tokens, so that the entry serves the
        prompt of exactly these. What
        cannot be registered (no tokens, too many, an id, loops or window out of range, no pool)
        returns 0 with a RuntimeWarning that says why.

        Raises:
            Error: the model is closed.
            MemoryError: out of memory.
            TypeError: tokens or pool of a wrong type.
        """
        if self.handle == NULL:
            raise closed_error("register_prefix")
        if pool is not None and not isinstance(pool, PrefixPool):
            raise failure(ArgumentTypeError, f"pool is {pool!r}; it must be a PrefixPool")
        cdef int64_t length = 0
        cdef tl_status status
        try:
            status = self.run_registration(&length, pool, tokens,
                                           cache_options(loops, cache_window, prefix_len))
            if status != TL_STATUS_INTERRUPTED:
                check(status, "register_prefix")
        except (ArgumentTypeError, OutOfMemoryError):
            raise
        except Error as error:
            if self.handle == NULL:
                raise
            reason = str(error)
        else:
            if status == TL_STATUS_INTERRUPTED:
                check(status, "register_prefix")  # what a signal handler raised is no refusal
            return length
        warnings.warn(f"register_prefix: {reason}", RuntimeWarning, stacklevel=1)
        return 0

    cdef tl_status run_registration(self, int64_t *length, PrefixPool pool, object tokens,
                                    tl_cache_options options) except *:
        cdef const int32_t[::1] ids = as_tokens("tokens", tokens)
        cdef tl_status status
        cdef size_t n = ids.shape[0]
        cdef const int32_t *data = first(ids)
        if pool is None:
            raise failure(InvalidArgumentError, "pool is None; it must be a PrefixPool")
        cdef tl_prefix_pool *handle = pool.handle
        cdef tl_model *model = self.use("register_prefix")
        with nogil:
            status = tl_prefix_pool_register(length, handle, model, data, n, &options)
            tl_model_release(model)
        return status

    def decode_with_kv_cache_capture(self, kv, tokens):
        """As the function of that name, for a cache of this model."""
        if self.handle == NULL:
            raise closed_error("decode_with_kv_cache_capture")
        if not isinstance(kv, RuntimeKVCache):
            raise failure(ArgumentTypeError, f"kv is {kv!r}; it must be a RuntimeKVCache")
        if (<RuntimeKVCache> kv).model is not self:
            raise failure(InvalidArgumentError, "kv belongs to another model")
        return decode_with_kv_cache_capture(kv, tokens)


# ---- evaluations ------------------------------------------------------------------------------

_MAX_RUNS = 65536  # of a nested schedule; the library refuses more


cdef object evaluation_shape(str what, tl_model_info info, size_t n, tl_cache_options options):
    """Of the result; with a 0 in it where the library will refuse before it writes."""
    if n > <size_t> info.max_seq_len or options.loops > info.loops_max or \
            options.inner_loops > info.loops_max or \
            options.loops * (options.inner_loops + 1) > _MAX_RUNS:
        n = 0
    if what == "logits":
        return n, info.vocab_size
    loops, inner = options.loops, options.inner_loops
    n_states = loops * (inner + 1) if loops else info.n_states_default
    if what == "exit_logits":
        return n_states, n
    return n_states if n else 0, n, info.hidden_size


cdef object run_evaluation(Model model, str what, object tokens, object init_state,
                           tl_cache_options options):
    cdef const int32_t[::1] ids = as_tokens("tokens", tokens)
    cdef const int32_t *data = first(ids)
    cdef size_t n = ids.shape[0]
    cdef const float[:, ::1] state
    cdef const float *state_data = NULL
    cdef float[::1] view
    cdef tl_status status
    cdef tl_model *handle = model.use(what)
    cdef tl_model_info info
    cdef bint logits = what == "logits", states = what == "states"
    try:
        info = get_info(handle)
        if init_state is not None:
            state = as_states("init_state", init_state)
            if <size_t> state.shape[0] != n or state.shape[1] != info.hidden_size or n == 0:
                raise failure(InvalidArgumentError,
                              f"init_state has shape [{state.shape[0]}, {state.shape[1]}]; it must "
                              f"be [{n}, {info.hidden_size}], a row for each token")
            state_data = &state[0, 0]
        out = allocate(*evaluation_shape(what, info, n, options))
        view = out.reshape(-1) if out.size > 0 else allocate(1)
        with nogil:
            if logits:
                status = tl_model_logits(&view[0], handle, data, n, state_data, &options)
            elif states:
                status = tl_model_states(&view[0], handle, data, n, state_data, &options)
            else:
                status = tl_model_exit_logits(&view[0], handle, data, n, &options)
        check(status, what)
    finally:
        with nogil:
            tl_model_release(handle)
    return out


# ---- generations ------------------------------------------------------------------------------

cdef tl_prefix_pool *pool_handle(object pool) except? NULL:
    if pool is not None and not isinstance(pool, PrefixPool):
        raise failure(ArgumentTypeError, f"pool is {pool!r}; it must be a PrefixPool or None")
    return NULL if pool is None else (<PrefixPool> pool).handle


cdef list run_generation(Model model, object source, object ids, Options options, str method):
    """The ids and what is generated after them; `source` is a PrefixPool, a PrefixCache or None."""
    cdef const int32_t[::1] prompt = ids
    cdef const int32_t *data = first(prompt)
    cdef size_t n = prompt.shape[0], n_generated = 0, capacity
    cdef tl_prefix_cache *cache = NULL
    cdef tl_prefix_pool *pool = NULL
    cdef tl_status status
    if isinstance(source, PrefixCache):
        cache = (<PrefixCache> source).handle
    else:
        pool = pool_handle(source)
    cdef tl_model *handle = model.use(method)
    cdef int32_t[::1] view
    try:
        # above max_seq_len the library refuses before it writes
        capacity = min(options.c.max_tokens, get_info(handle).max_seq_len)
        generated = np.empty(max(capacity, 1), np.int32)
        view = generated
        with nogil:
            if cache != NULL:
                status = tl_generate_from_prefix_cache(&view[0], capacity, &n_generated, handle,
                                                       cache, data, n, &options.c)
            elif pool != NULL:
                status = tl_prefix_pool_generate(&view[0], capacity, &n_generated, pool, handle,
                                                 data, n, &options.c)
            else:
                status = tl_generate(&view[0], capacity, &n_generated, handle, data, n,
                                     &options.c)
        check(status, method)
    finally:
        with nogil:
            tl_model_release(handle)
    return ids.tolist() + generated[:n_generated].tolist()


cdef class TokenStream:
    """The tokens of one generation, in order. For one thread at a time."""

    cdef tl_stream *handle
    cdef str method
    cdef bint busy
    cdef object __weakref__

    def __cinit__(self, *, _token=None):
        if _token is not _PRIVATE:
            raise failure(ArgumentTypeError, "a stream is made by Model.generate_stream")

    def __dealloc__(self):
        cdef tl_stream *handle = self.handle
        if handle != NULL:
            with nogil:
                tl_stream_release(handle)

    def __iter__(self):
        return self

    def __next__(self):
        cdef int32_t token = self.next_token()
        if token < 0:
            raise StopIteration
        return token

    def close(self):
        """Ends the generation and frees what it held. May be called again."""
        if self.busy:
            raise failure(Error, "the stream is in use on another thread")
        cdef tl_stream *handle = self.handle
        self.handle = NULL
        if handle != NULL:
            with nogil:
                tl_stream_release(handle)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    cdef int32_t next_token(self) except -2:
        cdef int32_t token = -1
        cdef tl_status status
        watch_signals()
        if self.busy:
            raise failure(Error, "the stream is in use on another thread")
        if self.handle == NULL:
            return -1
        self.busy = True
        with nogil:
            status = tl_stream_next(&token, self.handle)
        self.busy = False
        check(status, self.method)
        return token


cdef TokenStream open_stream(Model model, object pool, const int32_t[::1] prompt, Options options,
                             str method):
    cdef tl_prefix_pool *shared = pool_handle(pool)
    cdef TokenStream stream = TokenStream.__new__(TokenStream, _token=_PRIVATE)
    cdef const int32_t *data = first(prompt)
    cdef size_t n = prompt.shape[0]
    cdef tl_status status
    cdef tl_model *handle = model.use(method)
    stream.method = method
    with nogil:
        status = tl_stream_create(&stream.handle, handle, shared, data, n, &options.c)
        tl_model_release(handle)
    check(status, method)
    return stream


# ---- module -----------------------------------------------------------------------------------

def library_version():
    """The version of the loaded libtinyloop, as text."""
    return tl_version_string().decode()


if tl_version() // 10000 != TL_VERSION_MAJOR:
    raise ImportError(f"libtinyloop {library_version()} is not the major version "
                      f"{TL_VERSION_MAJOR} that this module was built for")
