# What the bindings need of the C API; the header documents it.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "tinyloop.h" nogil:
    ctypedef int32_t tl_status

    enum:
        TL_STATUS_OK
        TL_STATUS_INVALID
        TL_STATUS_NOMEM
        TL_STATUS_CLOSED
        TL_STATUS_IO
        TL_STATUS_FORMAT
        TL_STATUS_UNSUPPORTED
        TL_STATUS_NUMERIC
        TL_STATUS_INTERRUPTED
        TL_LOG_INFO
        TL_LOG_WARNING
        TL_DEVICE_AUTO
        TL_DEVICE_CPU
        TL_DEVICE_CUDA
        TL_KV_MODE_DEFAULT
        TL_KV_MODE_FP16
        TL_KV_MODE_FP32
        TL_VERSION_MAJOR

    uint32_t tl_version()
    const char *tl_version_string()
    const char *tl_last_error()

    ctypedef void (*tl_log_callback)(void *user, int32_t level, const char *message) noexcept
    void tl_set_log_callback(tl_log_callback callback, void *user)

    ctypedef int32_t (*tl_interrupt_callback)(void *user) noexcept
    void tl_set_interrupt_callback(tl_interrupt_callback callback, void *user)

    ctypedef struct tl_model:
        pass
    ctypedef struct tl_model_options:
        size_t size
        int64_t max_seq_len
        int32_t device
        int32_t kv_mode
        int32_t threads
        int32_t verify
        int32_t has_init_scale
        int32_t prefill_chunk
        double init_scale
        uint64_t init_seed
    tl_status tl_model_load(tl_model **out, const char *path, const tl_model_options *options)
    void tl_model_close(tl_model *model)
    tl_model *tl_model_retain(tl_model *model)
    void tl_model_release(tl_model *model)

    ctypedef struct tl_model_info:
        size_t size
        int64_t vocab_size
        int64_t hidden_size
        int64_t n_layers
        int64_t n_heads
        int64_t n_kv_heads
        int64_t head_dim
        int64_t max_seq_len
        int64_t max_positions
        int64_t loops_default
        int64_t loops_min
        int64_t loops_max
        int64_t loops_max_trained
        int64_t inner_loops_default
        int64_t n_states_default
        int64_t n_parameters
        int64_t weight_bytes
        int64_t kv_block_size
        int64_t kv_bytes_fixed
        int64_t kv_bytes_loop
        int32_t device
        int32_t kv_mode
        int32_t threads
        int32_t two_sided_prefix
    tl_status tl_model_get_info(tl_model_info *info, const tl_model *model)
    tl_status tl_model_blob(const void **data, size_t *size, const tl_model *model,
                            const char *name)

    ctypedef struct tl_counters:
        size_t size
        uint64_t tokens_prefilled
        uint64_t tokens_decoded
        uint64_t pool_full
        uint64_t pool_partial
        uint64_t pool_miss
        uint64_t pool_fallback
    tl_status tl_model_get_counters(tl_counters *counters, const tl_model *model)

    ctypedef struct tl_cache_options:
        size_t size
        int64_t loops
        int64_t cache_window
        int64_t inner_loops
        int64_t prefix_len
        int32_t has_prefix_len
        int32_t reserved
    tl_status tl_model_logits(float *logits, tl_model *model, const int32_t *tokens,
                              size_t n_tokens, const float *init_state,
                              const tl_cache_options *options)
    tl_status tl_model_states(float *states, tl_model *model, const int32_t *tokens,
                              size_t n_tokens, const float *init_state,
                              const tl_cache_options *options)
    tl_status tl_model_exit_logits(float *logits, tl_model *model, const int32_t *tokens,
                                   size_t n_tokens, const tl_cache_options *options)

    ctypedef struct tl_kv_cache:
        pass
    tl_status tl_kv_cache_create(tl_kv_cache **out, tl_model *model,
                                 const tl_cache_options *options)
    tl_status tl_kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv)
    tl_status tl_kv_cache_truncate(tl_kv_cache *kv, int64_t length)
    int64_t tl_kv_cache_length(const tl_kv_cache *kv)
    int64_t tl_kv_cache_bytes(const tl_kv_cache *kv)
    void tl_kv_cache_release(tl_kv_cache *kv)
    tl_status tl_decode_with_kv_cache_capture(float *hidden, tl_kv_cache *kv,
                                              const int32_t *tokens, size_t n_tokens)

    ctypedef int32_t (*tl_token_callback)(void *user, int32_t token) noexcept
    ctypedef struct tl_generate_options:
        size_t size
        int64_t max_tokens
        int64_t loops
        int64_t inner_loops
        int64_t cache_window
        int64_t prefix_len
        int64_t top_k
        double temperature
        double top_p
        double min_p
        double repetition_penalty
        uint64_t seed
        int32_t has_seed
        int32_t has_stop_tokens
        int32_t has_prefix_len
        int32_t reserved
        const int32_t *stop_tokens
        size_t n_stop_tokens
        tl_token_callback on_token
        void *user

    tl_status tl_generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                          const int32_t *prompt, size_t n_prompt,
                          const tl_generate_options *options)

    ctypedef struct tl_prefix_cache:
        pass
    ctypedef struct tl_prefix_cache_info:
        size_t size
        int64_t length
        int64_t loops
        int64_t cache_window
        int64_t inner_loops
        int64_t prefix_len
        int64_t bytes
    tl_status tl_build_prefix_cache(tl_prefix_cache **out, tl_model *model,
                                    const int32_t *tokens, size_t n_tokens,
                                    const tl_cache_options *options)
    tl_status tl_prefix_cache_get_info(tl_prefix_cache_info *info, const tl_prefix_cache *cache)
    void tl_prefix_cache_release(tl_prefix_cache *cache)
    tl_status tl_generate_from_prefix_cache(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                            tl_model *model, tl_prefix_cache *cache,
                                            const int32_t *suffix, size_t n_suffix,
                                            const tl_generate_options *options)

    ctypedef struct tl_prefix_pool:
        pass
    ctypedef struct tl_prefix_pool_options:
        size_t size
        int64_t capacity
    tl_status tl_prefix_pool_create(tl_prefix_pool **out, const tl_prefix_pool_options *options)
    void tl_prefix_pool_release(tl_prefix_pool *pool)
    int64_t tl_prefix_pool_size(const tl_prefix_pool *pool)
    int64_t tl_prefix_pool_total_cached_tokens(const tl_prefix_pool *pool)
    tl_status tl_prefix_pool_register(int64_t *length, tl_prefix_pool *pool, tl_model *model,
                                      const int32_t *tokens, size_t n_tokens,
                                      const tl_cache_options *options)

    tl_status tl_prefix_pool_generate(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                      tl_prefix_pool *pool, tl_model *model,
                                      const int32_t *prompt, size_t n_prompt,
                                      const tl_generate_options *options)

    ctypedef struct tl_stream:
        pass
    tl_status tl_stream_create(tl_stream **out, tl_model *model, tl_prefix_pool *pool,
                               const int32_t *prompt, size_t n_prompt,
                               const tl_generate_options *options)
    tl_status tl_stream_next(int32_t *token, tl_stream *stream)
    void tl_stream_release(tl_stream *stream)
