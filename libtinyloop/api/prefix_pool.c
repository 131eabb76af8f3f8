/* Prefix pools. */
#include "api/call.h"
#include "api/keys.h"
#include "api/structs.h"
#include "prefix/pool.h"

static bool is_pool(const tl_prefix_pool *pool)
{
    return pool != NULL && handle_check(pool, "tl_prefix_pool", "pool") == TL_STATUS_OK;
}

static void let_go(tl_prefix_pool **pool)
{
    prefix_pool_release(*pool);
}

tl_status tl_prefix_pool_create(tl_prefix_pool **out, const tl_prefix_pool_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    tl_prefix_pool_options own = TL_PREFIX_POOL_OPTIONS_INIT;
    TL_TRY(READ_STRUCT(&own, options, tl_prefix_pool_options, capacity));
    if (own.capacity < 0)
        return tl_fail(TL_STATUS_INVALID, "capacity is %lld; it must be 0 (taken as 1) or more",
                       (long long)own.capacity);
    TL_TRY(prefix_pool_create(out, (size_t)own.capacity));
    GIVE(tl_prefix_pool, *out);
    return TL_STATUS_OK;
}

void tl_prefix_pool_release(tl_prefix_pool *pool)
{
    BEGIN_CALL();
    if (pool != NULL && handle_take(pool, "tl_prefix_pool"))
        prefix_pool_release(pool);
}

int64_t tl_prefix_pool_size(const tl_prefix_pool *pool)
{
    BEGIN_CALL();
    return is_pool(pool) ? (int64_t)prefix_pool_size(pool) : 0;
}

int64_t tl_prefix_pool_total_cached_tokens(const tl_prefix_pool *pool)
{
    BEGIN_CALL();
    return is_pool(pool) ? prefix_pool_total_tokens(pool) : 0;
}

tl_status tl_prefix_pool_register(int64_t *length, tl_prefix_pool *pool, tl_model *model,
                                  const int32_t *tokens, size_t n_tokens,
                                  const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(length);
    *length = 0;
    CHECK_HANDLE(tl_prefix_pool, pool);
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(tokens);
    COMPUTE_WITH(model);
    __attribute__((cleanup(let_go), unused)) tl_prefix_pool *kept_pool = prefix_pool_retain(pool);
    cache_key key;
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(key_resolve(&key, model, options, n_tokens, false));
    TL_TRY(prefix_pool_register(pool, model, tokens, n_tokens, key));
    *length = (int64_t)n_tokens;
    return TL_STATUS_OK;
}
