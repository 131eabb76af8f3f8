/* KV caches: one sequence each. */
#include "api/call.h"
#include "api/keys.h"
#include "run/evaluate.h"

/* A call that uses the cache has it for itself until it ends; released meanwhile, it goes then. */
#define USE_ALONE(kv)                                                                              \
    CHECK_HANDLE(tl_kv_cache, kv);                                                                 \
    TL_TRY(begin_use((tl_kv_cache *)(kv)));                                                        \
    __attribute__((cleanup(end_use), unused)) tl_kv_cache *used = (tl_kv_cache *)(kv)

static tl_status begin_use(tl_kv_cache *kv)
{
    if (exclusive_begin(&kv->use))
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_BUSY, "kv is in use by another call; one at a time may use it");
}

/* What those who ask see, also while a call uses the cache. */
static void show(tl_kv_cache *kv)
{
    atomic_store(&kv->shown_length, kv->sequence.length);
    atomic_store(&kv->shown_bytes, (int64_t)kv_sequence_bytes(&kv->sequence));
}

static void end_use(tl_kv_cache **kv)
{
    show(*kv);
    if (exclusive_end(&(*kv)->use))
        kv_cache_release(*kv);
}

static bool is_cache(const tl_kv_cache *kv)
{
    return kv != NULL && handle_check(kv, "tl_kv_cache", "kv") == TL_STATUS_OK;
}

tl_status tl_kv_cache_create(tl_kv_cache **out, tl_model *model, const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    CHECK_HANDLE(tl_model, model);
    COMPUTE_WITH(model);
    cache_key key;
    TL_TRY(key_resolve(&key, model, options, (size_t)model->max_seq_len, true));
    TL_TRY(kv_cache_create(out, model, key));
    GIVE(tl_kv_cache, *out);
    return TL_STATUS_OK;
}

tl_status tl_kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    USE_ALONE(kv);
    TL_TRY(kv_cache_clone(out, kv));
    show(*out);
    GIVE(tl_kv_cache, *out);
    return TL_STATUS_OK;
}

tl_status tl_kv_cache_truncate(tl_kv_cache *kv, int64_t length)
{
    BEGIN_CALL();
    USE_ALONE(kv);
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
    BEGIN_CALL();
    return is_cache(kv) ? atomic_load(&kv->shown_length) : 0;
}

int64_t tl_kv_cache_bytes(const tl_kv_cache *kv)
{
    BEGIN_CALL();
    return is_cache(kv) ? atomic_load(&kv->shown_bytes) : 0;
}

void tl_kv_cache_release(tl_kv_cache *kv)
{
    BEGIN_CALL();
    if (kv != NULL && handle_take(kv, "tl_kv_cache") && exclusive_release(&kv->use))
        kv_cache_release(kv);
}

tl_status tl_decode_with_kv_cache_capture(float *hidden, tl_kv_cache *kv, const int32_t *tokens,
                                          size_t n_tokens)
{
    BEGIN_CALL();
    NOT_NULL(hidden);
    USE_ALONE(kv);
    NOT_NULL(tokens);
    TL_TRY(engine_check_open(kv->model));
    TL_TRY(engine_check_tokens(kv->model, "tokens", tokens, n_tokens));
    int64_t left = kv->model->max_seq_len - kv->sequence.length;
    if ((int64_t)n_tokens > left)
        return tl_fail(TL_STATUS_INVALID,
                       "%lld positions in the cache + %zu tokens is more than "
                       "max_seq_len %lld",
                       (long long)kv->sequence.length, n_tokens, (long long)kv->model->max_seq_len);
    return evaluate_extend(hidden, kv, tokens, n_tokens);
}
