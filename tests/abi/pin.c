/* The ABI of tinyloop.h, written down a second time: programs that were built against the header
 * hold these types and numbers, so what fails to compile here would break those programs.
 *
 * Appending is no break: functions, constants, and fields at the end of a struct, whose size grows
 * with them. test_abi.py asks that they get their lines here. */
#include "tinyloop.h"

#define CONSTANT(name, value) _Static_assert((name) == (value), #name)
#define TYPE(name, ...) _Static_assert(_Generic((name)0, __VA_ARGS__: 1, default: 0), #name)
#define STRUCT(name, size) _Static_assert(sizeof(name) == (size), #name)
#define FIELD(owner, offset, type, name)                                                           \
    _Static_assert(offsetof(owner, name) == (offset) &&                                            \
                       _Generic(&((owner *)0)->name, type *: 1, default: 0),                       \
                   #owner "." #name)

_Static_assert(sizeof(int) == 4 && sizeof(long) == 8 && sizeof(void *) == 8 && sizeof(size_t) == 8,
               "LP64, which the numbers below are for");

/* ---- Version ------------------------------------------------------------------------------ */

uint32_t (*const pin_tl_version)(void) = tl_version;
const char *(*const pin_tl_version_string)(void) = tl_version_string;

/* ---- Status ------------------------------------------------------------------------------- */

TYPE(tl_status, int32_t);

CONSTANT(TL_STATUS_OK, 0);
CONSTANT(TL_STATUS_INVALID, 1);
CONSTANT(TL_STATUS_NOMEM, 2);
CONSTANT(TL_STATUS_CLOSED, 3);
CONSTANT(TL_STATUS_IO, 4);
CONSTANT(TL_STATUS_FORMAT, 5);
CONSTANT(TL_STATUS_UNSUPPORTED, 6);
CONSTANT(TL_STATUS_NUMERIC, 7);
CONSTANT(TL_STATUS_INTERRUPTED, 8);
CONSTANT(TL_STATUS_BUSY, 9);
CONSTANT(TL_STATUS_INTERNAL, 100);

const char *(*const pin_tl_last_error)(void) = tl_last_error;

/* ---- Log ---------------------------------------------------------------------------------- */

CONSTANT(TL_LOG_INFO, 1);
CONSTANT(TL_LOG_WARNING, 2);

TYPE(tl_log_callback, void (*)(void *user, int32_t level, const char *message));

void (*const pin_tl_set_log_callback)(tl_log_callback callback, void *user) = tl_set_log_callback;

/* ---- Interruption ------------------------------------------------------------------------- */

TYPE(tl_interrupt_callback, int32_t (*)(void *user));

void (*const pin_tl_set_interrupt_callback)(tl_interrupt_callback callback,
                                            void *user) = tl_set_interrupt_callback;

/* ---- Model -------------------------------------------------------------------------------- */

CONSTANT(TL_DEVICE_AUTO, 0);
CONSTANT(TL_DEVICE_CPU, 1);
CONSTANT(TL_DEVICE_CUDA, 2);

CONSTANT(TL_KV_MODE_DEFAULT, 0);
CONSTANT(TL_KV_MODE_FP16, 1);
CONSTANT(TL_KV_MODE_FP32, 2);

STRUCT(tl_model_options, 56);
FIELD(tl_model_options, 0, size_t, size);
FIELD(tl_model_options, 8, int64_t, max_seq_len);
FIELD(tl_model_options, 16, int32_t, device);
FIELD(tl_model_options, 20, int32_t, kv_mode);
FIELD(tl_model_options, 24, int32_t, threads);
FIELD(tl_model_options, 28, int32_t, verify);
FIELD(tl_model_options, 32, int32_t, has_init_scale);
FIELD(tl_model_options, 36, int32_t, prefill_chunk);
FIELD(tl_model_options, 40, double, init_scale);
FIELD(tl_model_options, 48, uint64_t, init_seed);

STRUCT(tl_model_info, 176);
FIELD(tl_model_info, 0, size_t, size);
FIELD(tl_model_info, 8, int64_t, vocab_size);
FIELD(tl_model_info, 16, int64_t, hidden_size);
FIELD(tl_model_info, 24, int64_t, n_layers);
FIELD(tl_model_info, 32, int64_t, n_heads);
FIELD(tl_model_info, 40, int64_t, n_kv_heads);
FIELD(tl_model_info, 48, int64_t, head_dim);
FIELD(tl_model_info, 56, int64_t, max_seq_len);
FIELD(tl_model_info, 64, int64_t, max_positions);
FIELD(tl_model_info, 72, int64_t, loops_default);
FIELD(tl_model_info, 80, int64_t, loops_min);
FIELD(tl_model_info, 88, int64_t, loops_max);
FIELD(tl_model_info, 96, int64_t, loops_max_trained);
FIELD(tl_model_info, 104, int64_t, inner_loops_default);
FIELD(tl_model_info, 112, int64_t, n_states_default);
FIELD(tl_model_info, 120, int64_t, n_parameters);
FIELD(tl_model_info, 128, int64_t, weight_bytes);
FIELD(tl_model_info, 136, int64_t, kv_block_size);
FIELD(tl_model_info, 144, int64_t, kv_bytes_fixed);
FIELD(tl_model_info, 152, int64_t, kv_bytes_loop);
FIELD(tl_model_info, 160, int32_t, device);
FIELD(tl_model_info, 164, int32_t, kv_mode);
FIELD(tl_model_info, 168, int32_t, threads);
FIELD(tl_model_info, 172, int32_t, two_sided_prefix);

STRUCT(tl_counters, 56);
FIELD(tl_counters, 0, size_t, size);
FIELD(tl_counters, 8, uint64_t, tokens_prefilled);
FIELD(tl_counters, 16, uint64_t, tokens_decoded);
FIELD(tl_counters, 24, uint64_t, pool_full);
FIELD(tl_counters, 32, uint64_t, pool_partial);
FIELD(tl_counters, 40, uint64_t, pool_miss);
FIELD(tl_counters, 48, uint64_t, pool_fallback);

tl_status (*const pin_tl_model_load)(tl_model **out, const char *path,
                                     const tl_model_options *options) = tl_model_load;
void (*const pin_tl_model_close)(tl_model *model) = tl_model_close;
tl_model *(*const pin_tl_model_retain)(tl_model *model) = tl_model_retain;
void (*const pin_tl_model_release)(tl_model *model) = tl_model_release;
tl_status (*const pin_tl_model_get_info)(tl_model_info *info,
                                         const tl_model *model) = tl_model_get_info;
tl_status (*const pin_tl_model_blob)(const void **data, size_t *size, const tl_model *model,
                                     const char *name) = tl_model_blob;
tl_status (*const pin_tl_model_get_counters)(tl_counters *counters,
                                             const tl_model *model) = tl_model_get_counters;

/* ---- Evaluation --------------------------------------------------------------------------- */

STRUCT(tl_cache_options, 48);
FIELD(tl_cache_options, 0, size_t, size);
FIELD(tl_cache_options, 8, int64_t, loops);
FIELD(tl_cache_options, 16, int64_t, cache_window);
FIELD(tl_cache_options, 24, int64_t, inner_loops);
FIELD(tl_cache_options, 32, int64_t, prefix_len);
FIELD(tl_cache_options, 40, int32_t, has_prefix_len);
FIELD(tl_cache_options, 44, int32_t, reserved);

tl_status (*const pin_tl_model_logits)(float *logits, tl_model *model, const int32_t *tokens,
                                       size_t n_tokens, const float *init_state,
                                       const tl_cache_options *options) = tl_model_logits;
tl_status (*const pin_tl_model_states)(float *states, tl_model *model, const int32_t *tokens,
                                       size_t n_tokens, const float *init_state,
                                       const tl_cache_options *options) = tl_model_states;
tl_status (*const pin_tl_model_exit_logits)(float *logits, tl_model *model, const int32_t *tokens,
                                            size_t n_tokens,
                                            const tl_cache_options *options) = tl_model_exit_logits;

/* ---- KV cache ----------------------------------------------------------------------------- */

tl_status (*const pin_tl_kv_cache_create)(tl_kv_cache **out, tl_model *model,
                                          const tl_cache_options *options) = tl_kv_cache_create;
tl_status (*const pin_tl_kv_cache_clone)(tl_kv_cache **out,
                                         const tl_kv_cache *kv) = tl_kv_cache_clone;
tl_status (*const pin_tl_kv_cache_truncate)(tl_kv_cache *kv, int64_t length) = tl_kv_cache_truncate;
int64_t (*const pin_tl_kv_cache_length)(const tl_kv_cache *kv) = tl_kv_cache_length;
int64_t (*const pin_tl_kv_cache_bytes)(const tl_kv_cache *kv) = tl_kv_cache_bytes;
void (*const pin_tl_kv_cache_release)(tl_kv_cache *kv) = tl_kv_cache_release;
tl_status (*const pin_tl_decode_with_kv_cache_capture)(float *hidden, tl_kv_cache *kv,
                                                       const int32_t *tokens, size_t n_tokens) =
    tl_decode_with_kv_cache_capture;

/* ---- Generation --------------------------------------------------------------------------- */

TYPE(tl_token_callback, int32_t (*)(void *user, int32_t token));

STRUCT(tl_generate_options, 144);
FIELD(tl_generate_options, 0, size_t, size);
FIELD(tl_generate_options, 8, int64_t, max_tokens);
FIELD(tl_generate_options, 16, int64_t, loops);
FIELD(tl_generate_options, 24, int64_t, inner_loops);
FIELD(tl_generate_options, 32, int64_t, cache_window);
FIELD(tl_generate_options, 40, int64_t, prefix_len);
FIELD(tl_generate_options, 48, int64_t, top_k);
FIELD(tl_generate_options, 56, double, temperature);
FIELD(tl_generate_options, 64, double, top_p);
FIELD(tl_generate_options, 72, double, min_p);
FIELD(tl_generate_options, 80, double, repetition_penalty);
FIELD(tl_generate_options, 88, uint64_t, seed);
FIELD(tl_generate_options, 96, int32_t, has_seed);
FIELD(tl_generate_options, 100, int32_t, has_stop_tokens);
FIELD(tl_generate_options, 104, int32_t, has_prefix_len);
FIELD(tl_generate_options, 108, int32_t, reserved);
FIELD(tl_generate_options, 112, const int32_t *, stop_tokens);
FIELD(tl_generate_options, 120, size_t, n_stop_tokens);
FIELD(tl_generate_options, 128, tl_token_callback, on_token);
FIELD(tl_generate_options, 136, void *, user);

tl_status (*const pin_tl_generate)(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                   tl_model *model, const int32_t *prompt, size_t n_prompt,
                                   const tl_generate_options *options) = tl_generate;

/* ---- Prefix cache ------------------------------------------------------------------------- */

STRUCT(tl_prefix_cache_info, 56);
FIELD(tl_prefix_cache_info, 0, size_t, size);
FIELD(tl_prefix_cache_info, 8, int64_t, length);
FIELD(tl_prefix_cache_info, 16, int64_t, loops);
FIELD(tl_prefix_cache_info, 24, int64_t, cache_window);
FIELD(tl_prefix_cache_info, 32, int64_t, inner_loops);
FIELD(tl_prefix_cache_info, 40, int64_t, prefix_len);
FIELD(tl_prefix_cache_info, 48, int64_t, bytes);

tl_status (*const pin_tl_build_prefix_cache)(
    tl_prefix_cache **out, tl_model *model, const int32_t *tokens, size_t n_tokens,
    const tl_cache_options *options) = tl_build_prefix_cache;
tl_status (*const pin_tl_prefix_cache_get_info)(
    tl_prefix_cache_info *info, const tl_prefix_cache *cache) = tl_prefix_cache_get_info;
void (*const pin_tl_prefix_cache_release)(tl_prefix_cache *cache) = tl_prefix_cache_release;
tl_status (*const pin_tl_generate_from_prefix_cache)(
    int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model, tl_prefix_cache *cache,
    const int32_t *suffix, size_t n_suffix,
    const tl_generate_options *options) = tl_generate_from_prefix_cache;

/* ---- Prefix pool -------------------------------------------------------------------------- */

STRUCT(tl_prefix_pool_options, 16);
FIELD(tl_prefix_pool_options, 0, size_t, size);
FIELD(tl_prefix_pool_options, 8, int64_t, capacity);

tl_status (*const pin_tl_prefix_pool_create)(
    tl_prefix_pool **out, const tl_prefix_pool_options *options) = tl_prefix_pool_create;
void (*const pin_tl_prefix_pool_release)(tl_prefix_pool *pool) = tl_prefix_pool_release;
int64_t (*const pin_tl_prefix_pool_size)(const tl_prefix_pool *pool) = tl_prefix_pool_size;
int64_t (*const pin_tl_prefix_pool_total_cached_tokens)(const tl_prefix_pool *pool) =
    tl_prefix_pool_total_cached_tokens;
tl_status (*const pin_tl_prefix_pool_register)(
    int64_t *length, tl_prefix_pool *pool, tl_model *model, const int32_t *tokens, size_t n_tokens,
    const tl_cache_options *options) = tl_prefix_pool_register;
tl_status (*const pin_tl_prefix_pool_generate)(
    int32_t *tokens, size_t capacity, size_t *n_tokens, tl_prefix_pool *pool, tl_model *model,
    const int32_t *prompt, size_t n_prompt,
    const tl_generate_options *options) = tl_prefix_pool_generate;

/* ---- Stream ------------------------------------------------------------------------------- */

tl_status (*const pin_tl_stream_create)(tl_stream **out, tl_model *model, tl_prefix_pool *pool,
                                        const int32_t *prompt, size_t n_prompt,
                                        const tl_generate_options *options) = tl_stream_create;
tl_status (*const pin_tl_stream_create_from_prefix_cache)(
    tl_stream **out, tl_model *model, tl_prefix_cache *cache, const int32_t *suffix,
    size_t n_suffix, const tl_generate_options *options) = tl_stream_create_from_prefix_cache;
tl_status (*const pin_tl_stream_next)(int32_t *token, tl_stream *stream) = tl_stream_next;
void (*const pin_tl_stream_release)(tl_stream *stream) = tl_stream_release;
