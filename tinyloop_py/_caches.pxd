# What _core.pyx takes from _caches.pyx.
from libc.stdint cimport int32_t, int64_t

from .libtinyloop cimport (
    tl_cache_options,
    tl_kv_cache,
    tl_model,
    tl_model_info,
    tl_prefix_cache,
    tl_prefix_cache_info,
    tl_prefix_pool,
    tl_status,
)


cdef int watch_signals() except -1
cdef object closed_error(str method)
cdef int check(tl_status status, str method) except -1
cdef tl_cache_options cache_options(object loops, object cache_window,
                                    object prefix_len) except *
cdef const int32_t *first(const int32_t[::1] tokens) noexcept
cdef tl_model_info get_info(tl_model *model) except *


cdef class ModelHandle:
    cdef tl_model *handle  # NULL: closed
    cdef object __weakref__

    cdef tl_model *use(self, str method) except NULL


cdef class RuntimeKVCache:
    cdef tl_kv_cache *handle
    cdef readonly object model
    cdef bint busy  # on some thread
    cdef object __weakref__

    cdef int check_free(self) except -1
    cdef int begin(self) except -1


cdef class PrefixCache:
    cdef tl_prefix_cache *handle
    cdef object tokens  # int32 [n]
    cdef object __weakref__

    cdef tl_prefix_cache_info own_info(self) except *
    cdef object match_window(self, object cache_window)


cdef class PrefixPool:
    cdef tl_prefix_pool *handle
    cdef object __weakref__
