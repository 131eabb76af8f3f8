/* The exported functions: check the arguments, call inward. */
#include "generate/generation.h"
#include "run/evaluate.h"
#include "run/interrupt.h"

#include <string.h>

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

#define NOT_NULL(argument)                                                                         \
    do {                                                                                           \
        if ((argument) == NULL)                                                                    \
            return tl_fail(TL_STATUS_INVALID, #argument " is NULL");                               \
    } while (0)

uint32_t tl_version(void)
{
    return TL_VERSION_MAJOR * 10000u + TL_VERSION_MINOR * 100u + TL_VERSION_PATCH;
}

const char *tl_version_string(void)
{
    return VERSION_TEXT(TL_VERSION_MAJOR, TL_VERSION_MINOR, TL_VERSION_PATCH);
}

const char *tl_last_error(void)
{
    return status_last_error();
}

void tl_set_log_callback(tl_log_callback callback, void *user)
{
    log_set_callback(callback, user);
}

void tl_set_interrupt_callback(tl_interrupt_callback callback, void *user)
{
    interrupt_set(callback, user);
}

/* ---- structs with a size ---- */

#define MAX_STRUCT_SIZE 4096 /* far above any version's: a larger size was never set */

static tl_status check_size(size_t size, size_t own_size, const char *name)
{
    if (size >= own_size && size <= MAX_STRUCT_SIZE)
        return TL_STATUS_OK;
    return tl_fail(
        TL_STATUS_INVALID,
        "%s.size is %zu; it must be its sizeof, at least %zu (start from the INIT macro)", name,
        size, own_size);
}

/* `own` holds the defaults and keeps them where `given` is NULL. What this version does not know
 * of a longer struct must be zero. */
static tl_status read_struct(void *own, size_t own_size, const void *given, const char *name)
{
    if (given == NULL)
        return TL_STATUS_OK;
    size_t size;
    memcpy(&size, given, sizeof size);
    TL_TRY(check_size(size, own_size, name));
    for (size_t i = own_size; i < size; i++)
        if (((const unsigned char *)given)[i] != 0)
            return tl_fail(TL_STATUS_UNSUPPORTED,
                           "%s has a field at byte %zu that this version, "
                           "%s, does not know",
                           name, i, tl_version_string());
    memcpy(own, given, own_size);
    return TL_STATUS_OK;
}

/* Fills the caller's struct, whose size it set; a longer one's tail becomes zero. */
static tl_status write_struct(void *out, const void *own, size_t own_size, const char *name)
{
    size_t size;
    memcpy(&size, out, sizeof size);
    TL_TRY(check_size(size, own_size, name));
    memset(out, 0, size);
    memcpy(out, own, own_size);
    memcpy(out, &size, sizeof size);
    return TL_STATUS_OK;
}

static tl_status check_reserved(int32_t reserved, const char *name)
{
    if (reserved == 0)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_UNSUPPORTED, "%s.reserved is %d; this version, %s, knows 0 only", name,
                   reserved, tl_version_string());
}

/* The key of a cache for a text of n_tokens. Unless prefix_len is stated, all of them see each
 * other in a prefix-LM, or with `causal` none. */
static tl_status resolve_options(cache_key *key, tl_model *model, const tl_cache_options *options,
                                 size_t n_tokens, bool causal)
{
    tl_cache_options own = TL_CACHE_OPTIONS_INIT;
    TL_TRY(read_struct(&own, sizeof own, options, "tl_cache_options"));
    TL_TRY(check_reserved(own.reserved, "tl_cache_options"));
    bool stated = own.has_prefix_len != 0;
    key_request request = {
        .loops = own.loops,
        .inner_loops = own.inner_loops,
        .window = own.cache_window,
        .has_prefix_len = stated || causal,
        .prefix_len = stated ? own.prefix_len : 0,
    };
    return engine_resolve(key, model, &request, n_tokens);
}

/* ---- model ---- */

static tl_status check_model_options(const tl_model_options *o)
{
    if (o->max_seq_len < 1 || o->max_seq_len > 1 << 24)
        return tl_fail(TL_STATUS_INVALID, "max_seq_len is %lld; allowed are 1 to %d",
                       (long long)o->max_seq_len, 1 << 24);
    if (o->device < TL_DEVICE_AUTO || o->device > TL_DEVICE_CUDA)
        return tl_fail(TL_STATUS_INVALID, "device is %d; allowed are TL_DEVICE_AUTO, _CPU, _CUDA",
                       o->device);
    if (o->kv_mode < TL_KV_MODE_DEFAULT || o->kv_mode > TL_KV_MODE_FP32)
        return tl_fail(TL_STATUS_INVALID,
                       "kv_mode is %d; allowed are TL_KV_MODE_DEFAULT, _FP16, "
                       "_FP32",
                       o->kv_mode);
    if (o->threads < 0 || o->threads > 256)
        return tl_fail(TL_STATUS_INVALID,
                       "threads is %d; allowed are 1 to 256, and 0 for the "
                       "default",
                       o->threads);
    if (o->prefill_chunk < 0 || o->prefill_chunk > 4096)
        return tl_fail(TL_STATUS_INVALID,
                       "prefill_chunk is %d; allowed are 1 to 4096, and 0 for "
                       "the default",
                       o->prefill_chunk);
    return TL_STATUS_OK;
}

tl_status tl_model_load(tl_model **out, const char *path, const tl_model_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(path);
    tl_model_options own = TL_MODEL_OPTIONS_INIT;
    TL_TRY(read_struct(&own, sizeof own, options, "tl_model_options"));
    TL_TRY(check_model_options(&own));
    return engine_load(out, path, &own);
}

void tl_model_close(tl_model *model)
{
    if (model != NULL)
        atomic_store(&model->closed, true);
}

tl_model *tl_model_retain(tl_model *model)
{
    return model != NULL ? engine_retain(model) : NULL;
}

void tl_model_release(tl_model *model)
{
    engine_release(model);
}

tl_status tl_model_get_info(tl_model_info *info, const tl_model *model)
{
    NOT_NULL(info);
    NOT_NULL(model);
    const model_config *c = &model->config;
    kv_position_bytes kv = engine_kv_bytes(model);
    tl_model_info own = {
        .vocab_size = c->vocab_size,
        .hidden_size = c->hidden_size,
        .n_layers = config_n_layers(c),
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .max_seq_len = model->max_seq_len,
        .max_positions = c->max_positions,
        .loops_default = model->loops.standard,
        .loops_min = model->loops.minimum,
        .loops_max = model->loops.maximum,
        .loops_max_trained = model->loops.max_trained,
        .inner_loops_default = model->loops.standard_inner,
        .n_states_default = plan_n_states(
            &model->plan, (loop_counts){model->loops.standard, model->loops.standard_inner}),
        .n_parameters = model->n_parameters,
        .weight_bytes = (int64_t)model->backend->weight_bytes(model->weights),
        .kv_block_size = KV_BLOCK,
        .kv_bytes_fixed = kv.fixed,
        .kv_bytes_loop = kv.loop,
        .device = model->backend->device,
        .kv_mode = model->kv_mode,
        .threads = model->backend->n_lanes(model->weights),
        .two_sided_prefix = c->mask != 0,
    };
    return write_struct(info, &own, sizeof own, "tl_model_info");
}

tl_status tl_model_blob(const void **data, size_t *size, const tl_model *model, const char *name)
{
    NOT_NULL(data);
    NOT_NULL(size);
    *data = NULL;
    *size = 0;
    NOT_NULL(model);
    NOT_NULL(name);
    const model_blob *blob = engine_blob(model, name);
    if (blob != NULL) {
        *data = blob->data;
        *size = blob->size;
    }
    return TL_STATUS_OK;
}

tl_status tl_model_get_counters(tl_counters *counters, const tl_model *model)
{
    NOT_NULL(counters);
    NOT_NULL(model);
    tl_counters own = {
        .tokens_prefilled = atomic_load(&model->counters[COUNT_PREFILLED]),
        .tokens_decoded = atomic_load(&model->counters[COUNT_DECODED]),
        .pool_full = atomic_load(&model->counters[COUNT_POOL_FULL]),
        .pool_partial = atomic_load(&model->counters[COUNT_POOL_PARTIAL]),
        .pool_miss = atomic_load(&model->counters[COUNT_POOL_MISS]),
        .pool_fallback = atomic_load(&model->counters[COUNT_POOL_FALLBACK]),
    };
    return write_struct(counters, &own, sizeof own, "tl_counters");
}

/* ---- evaluation ---- */

static tl_status resolve_evaluation(evaluation *what, tl_model *model, const int32_t *tokens,
                                    size_t n_tokens, const float *init_state,
                                    const tl_cache_options *options, const char *function)
{
    *what = (evaluation){.tokens = tokens, .n_tokens = n_tokens, .init_state = init_state};
    TL_TRY(engine_check_open(model, function));
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(resolve_options(&what->key, model, options, n_tokens, true));
    if (init_state != NULL && (model->plan.nested || model->config.inject == INJECT_NONE))
        return tl_fail(TL_STATUS_INVALID, "init_state is given, but this model %s; leave it out",
                       model->plan.nested ? "has a nested schedule, which takes none"
                                          : "has a core that starts from its input alone");
    return TL_STATUS_OK;
}

tl_status tl_model_logits(float *logits, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          const float *init_state, const tl_cache_options *options)
{
    NOT_NULL(logits);
    NOT_NULL(model);
    NOT_NULL(tokens);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, init_state, options, __func__));
    return evaluate_logits(logits, model, &what);
}

tl_status tl_model_states(float *states, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          const float *init_state, const tl_cache_options *options)
{
    NOT_NULL(states);
    NOT_NULL(model);
    NOT_NULL(tokens);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, init_state, options, __func__));
    return evaluate_states(states, NULL, model, &what);
}

tl_status tl_model_exit_logits(float *logits, tl_model *model, const int32_t *tokens,
                               size_t n_tokens, const tl_cache_options *options)
{
    NOT_NULL(logits);
    NOT_NULL(model);
    NOT_NULL(tokens);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, NULL, options, __func__));
    if (model->config.exit_mode == EXIT_NONE)
        return tl_fail(TL_STATUS_INVALID, "this model has no exit gate (config field exit_mode)");
    return evaluate_states(NULL, logits, model, &what);
}

/* ---- KV cache ---- */

tl_status tl_kv_cache_create(tl_kv_cache **out, tl_model *model, const tl_cache_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(model);
    TL_TRY(engine_check_open(model, __func__));
    cache_key key;
    TL_TRY(resolve_options(&key, model, options, (size_t)model->max_seq_len, true));
    return kv_cache_create(out, model, key);
}

tl_status tl_kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(kv);
    return kv_cache_clone(out, kv);
}

tl_status tl_kv_cache_truncate(tl_kv_cache *kv, int64_t length)
{
    NOT_NULL(kv);
    if (length < 0 || length > kv->sequence.length)
        return tl_fail(TL_STATUS_INVALID, "length is %lld; the cache has %lld positions",
                       (long long)length, (long long)kv->sequence.length);
    if (length > 0 && length < kv->sequence.length && length < kv->key.prefix_len)
        return tl_fail(TL_STATUS_INVALID,
                       "length is %lld; the first %lld positions have seen each other and go "
                       "together: allowed are 0 and %lld to %lld",
                       (long long)length, (long long)kv->key.prefix_len,
                       (long long)kv->key.prefix_len, (long long)kv->sequence.length);
    return kv_sequence_truncate(&kv->sequence, length);
}

int64_t tl_kv_cache_length(const tl_kv_cache *kv)
{
    return kv != NULL ? kv->sequence.length : 0;
}

int64_t tl_kv_cache_bytes(const tl_kv_cache *kv)
{
    return kv != NULL ? (int64_t)kv_sequence_bytes(&kv->sequence) : 0;
}

void tl_kv_cache_release(tl_kv_cache *kv)
{
    kv_cache_release(kv);
}

tl_status tl_decode_with_kv_cache_capture(float *hidden, tl_kv_cache *kv, const int32_t *tokens,
                                          size_t n_tokens)
{
    NOT_NULL(hidden);
    NOT_NULL(kv);
    NOT_NULL(tokens);
    TL_TRY(engine_check_open(kv->model, __func__));
    TL_TRY(engine_check_tokens(kv->model, "tokens", tokens, n_tokens));
    int64_t left = kv->model->max_seq_len - kv->sequence.length;
    if ((int64_t)n_tokens > left)
        return tl_fail(TL_STATUS_INVALID,
                       "%lld positions in the cache + %zu tokens is more than "
                       "max_seq_len %lld",
                       (long long)kv->sequence.length, n_tokens, (long long)kv->model->max_seq_len);
    return evaluate_extend(hidden, kv, tokens, n_tokens);
}

/* ---- generation ---- */

static tl_status read_generate_options(tl_generate_options *own, const tl_generate_options *given)
{
    *own = (tl_generate_options)TL_GENERATE_OPTIONS_INIT;
    TL_TRY(read_struct(own, sizeof *own, given, "tl_generate_options"));
    return check_reserved(own->reserved, "tl_generate_options");
}

static tl_status generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                          const generation_source *source, const tl_generate_options *options,
                          const char *function)
{
    tl_generate_options own;
    TL_TRY(read_generate_options(&own, options));
    TL_TRY(engine_check_open(model, function));
    return generation_run(tokens, capacity, n_tokens, model, source, &own);
}

tl_status tl_generate(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                      const int32_t *prompt, size_t n_prompt, const tl_generate_options *options)
{
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    NOT_NULL(model);
    NOT_NULL(prompt);
    generation_source source = {.tokens = prompt, .n_tokens = n_prompt};
    return generate(tokens, capacity, n_tokens, model, &source, options, __func__);
}

tl_status tl_generate_from_prefix_cache(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                        tl_model *model, tl_prefix_cache *cache,
                                        const int32_t *suffix, size_t n_suffix,
                                        const tl_generate_options *options)
{
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    NOT_NULL(model);
    NOT_NULL(cache);
    if (n_suffix > 0)
        NOT_NULL(suffix);
    generation_source source = {.cache = cache, .tokens = suffix, .n_tokens = n_suffix};
    return generate(tokens, capacity, n_tokens, model, &source, options, __func__);
}

tl_status tl_prefix_pool_generate(int32_t *tokens, size_t capacity, size_t *n_tokens,
                                  tl_prefix_pool *pool, tl_model *model, const int32_t *prompt,
                                  size_t n_prompt, const tl_generate_options *options)
{
    NOT_NULL(n_tokens);
    *n_tokens = 0;
    NOT_NULL(pool);
    NOT_NULL(model);
    NOT_NULL(prompt);
    generation_source source = {.pool = pool, .tokens = prompt, .n_tokens = n_prompt};
    return generate(tokens, capacity, n_tokens, model, &source, options, __func__);
}

/* ---- streams ---- */

static tl_status create_stream(tl_stream **out, tl_model *model, const generation_source *source,
                               const tl_generate_options *options, const char *function)
{
    tl_generate_options own;
    TL_TRY(read_generate_options(&own, options));
    TL_TRY(engine_check_open(model, function));
    return generation_create(out, model, source, &own);
}

tl_status tl_stream_create(tl_stream **out, tl_model *model, tl_prefix_pool *pool,
                           const int32_t *prompt, size_t n_prompt,
                           const tl_generate_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(model);
    NOT_NULL(prompt);
    generation_source source = {.pool = pool, .tokens = prompt, .n_tokens = n_prompt};
    return create_stream(out, model, &source, options, __func__);
}

tl_status tl_stream_create_from_prefix_cache(tl_stream **out, tl_model *model,
                                             tl_prefix_cache *cache, const int32_t *suffix,
                                             size_t n_suffix, const tl_generate_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(model);
    NOT_NULL(cache);
    if (n_suffix > 0)
        NOT_NULL(suffix);
    generation_source source = {.cache = cache, .tokens = suffix, .n_tokens = n_suffix};
    return create_stream(out, model, &source, options, __func__);
}

tl_status tl_stream_next(int32_t *token, tl_stream *stream)
{
    NOT_NULL(token);
    *token = -1;
    NOT_NULL(stream);
    return generation_stream_next(token, stream);
}

void tl_stream_release(tl_stream *stream)
{
    generation_destroy(stream);
}

/* ---- prefix cache ---- */

tl_status tl_build_prefix_cache(tl_prefix_cache **out, tl_model *model, const int32_t *tokens,
                                size_t n_tokens, const tl_cache_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(model);
    NOT_NULL(tokens);
    TL_TRY(engine_check_open(model, __func__));
    cache_key key;
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(resolve_options(&key, model, options, n_tokens, false));
    return prefix_cache_build(out, model, tokens, n_tokens, key);
}

tl_status tl_prefix_cache_get_info(tl_prefix_cache_info *info, const tl_prefix_cache *cache)
{
    NOT_NULL(info);
    NOT_NULL(cache);
    tl_prefix_cache_info own = {
        .length = (int64_t)cache->n_tokens,
        .loops = cache->kv->key.loops,
        .cache_window = cache->kv->key.window,
        .inner_loops = cache->kv->key.inner_loops,
        .prefix_len = cache->kv->key.prefix_len,
        .bytes = (int64_t)prefix_cache_bytes(cache),
    };
    return write_struct(info, &own, sizeof own, "tl_prefix_cache_info");
}

void tl_prefix_cache_release(tl_prefix_cache *cache)
{
    prefix_cache_release(cache);
}

/* ---- prefix pool ---- */

tl_status tl_prefix_pool_create(tl_prefix_pool **out, const tl_prefix_pool_options *options)
{
    NOT_NULL(out);
    *out = NULL;
    tl_prefix_pool_options own = TL_PREFIX_POOL_OPTIONS_INIT;
    TL_TRY(read_struct(&own, sizeof own, options, "tl_prefix_pool_options"));
    if (own.capacity < 0)
        return tl_fail(TL_STATUS_INVALID, "capacity is %lld; it must be 0 (taken as 1) or more",
                       (long long)own.capacity);
    return prefix_pool_create(out, (size_t)own.capacity);
}

void tl_prefix_pool_release(tl_prefix_pool *pool)
{
    prefix_pool_release(pool);
}

int64_t tl_prefix_pool_size(const tl_prefix_pool *pool)
{
    return pool != NULL ? (int64_t)prefix_pool_size(pool) : 0;
}

int64_t tl_prefix_pool_total_cached_tokens(const tl_prefix_pool *pool)
{
    return pool != NULL ? prefix_pool_total_tokens(pool) : 0;
}

tl_status tl_prefix_pool_register(int64_t *length, tl_prefix_pool *pool, tl_model *model,
                                  const int32_t *tokens, size_t n_tokens,
                                  const tl_cache_options *options)
{
    NOT_NULL(length);
    *length = 0;
    NOT_NULL(pool);
    NOT_NULL(model);
    TL_TRY(engine_check_open(model, __func__));
    NOT_NULL(tokens);
    cache_key key;
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(resolve_options(&key, model, options, n_tokens, false));
    TL_TRY(prefix_pool_register(pool, model, tokens, n_tokens, key));
    *length = (int64_t)n_tokens;
    return TL_STATUS_OK;
}
