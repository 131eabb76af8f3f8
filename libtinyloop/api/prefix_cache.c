/* Prefix caches. */
#include "api/call.h"
#include "api/keys.h"
#include "api/structs.h"
#include "prefix/cache.h"

tl_status tl_build_prefix_cache(tl_prefix_cache **out, tl_model *model, const int32_t *tokens,
                                size_t n_tokens, const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(tokens);
    COMPUTE_WITH(model);
    cache_key key;
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(key_resolve(&key, model, options, n_tokens, false));
    TL_TRY(prefix_cache_build(out, model, tokens, n_tokens, key));
    GIVE(tl_prefix_cache, *out);
    return TL_STATUS_OK;
}

tl_status tl_prefix_cache_get_info(tl_prefix_cache_info *info, const tl_prefix_cache *cache)
{
    BEGIN_CALL();
    NOT_NULL(info);
    CHECK_HANDLE(tl_prefix_cache, cache);
    tl_prefix_cache_info own = {
        .length = (int64_t)cache->n_tokens,
        .loops = cache->kv->key.loops,
        .cache_window = cache->kv->key.window,
        .inner_loops = cache->kv->key.inner_loops,
        .prefix_len = cache->kv->key.prefix_len,
        .bytes = (int64_t)prefix_cache_bytes(cache),
    };
    return WRITE_STRUCT(info, &own, tl_prefix_cache_info, bytes);
}

void tl_prefix_cache_release(tl_prefix_cache *cache)
{
    BEGIN_CALL();
    if (cache != NULL && handle_take(cache, "tl_prefix_cache"))
        prefix_cache_release(cache);
}
