#include "prefix/cache.h"

#include "base/memory.h"

#include <string.h>

static tl_status run_prefix(tl_prefix_cache *cache, tl_model *model, cache_key key)
{
    TL_TRY(kv_cache_create(&cache->kv, model, key));
    run_pass *pass;
    TL_TRY(run_pass_create(&pass, model, run_rows_for(cache->kv, cache->n_tokens)));
    run_item item = {.kv = cache->kv,
                     .tokens = cache->tokens,
                     .n_tokens = cache->n_tokens,
                     .last_hidden = cache->hidden};
    tl_status status = run_tokens(pass, &item, COUNT_PREFILLED);
    run_pass_destroy(pass);
    return status;
}

static void destroy(tl_prefix_cache *cache)
{
    kv_cache_release(cache->kv);
    mem_free(cache->tokens);
    mem_free(cache->hidden);
    mem_free(cache);
}

tl_status prefix_cache_build(tl_prefix_cache **out, tl_model *model, const int32_t *tokens,
                             size_t n_tokens, cache_key key)
{
    *out = NULL;
    tl_prefix_cache *cache = mem_zeroed(1, sizeof *cache);
    if (cache == NULL)
        return tl_fail_nomem("a prefix cache", sizeof *cache);
    atomic_init(&cache->references, 1);
    cache->n_tokens = n_tokens;
    cache->tokens = mem_array(n_tokens, sizeof *tokens);
    cache->hidden = mem_array((size_t)model->config.hidden_size, sizeof *cache->hidden);
    tl_status status = TL_STATUS_OK;
    if (cache->tokens == NULL || cache->hidden == NULL)
        status = tl_fail_nomem("a prefix cache", n_tokens * sizeof *tokens);
    if (status == TL_STATUS_OK) {
        memcpy(cache->tokens, tokens, n_tokens * sizeof *tokens);
        status = run_prefix(cache, model, key);
    }
    if (status != TL_STATUS_OK) {
        destroy(cache);
        return status;
    }
    *out = cache;
    return TL_STATUS_OK;
}

tl_prefix_cache *prefix_cache_retain(tl_prefix_cache *cache)
{
    ref_retain(&cache->references);
    return cache;
}

void prefix_cache_release(tl_prefix_cache *cache)
{
    if (cache != NULL && ref_release(&cache->references))
        destroy(cache);
}

size_t prefix_cache_bytes(const tl_prefix_cache *cache)
{
    size_t hidden = (size_t)cache->kv->model->config.hidden_size;
    return kv_sequence_bytes(&cache->kv->sequence) + hidden * sizeof *cache->hidden +
           cache->n_tokens * sizeof *cache->tokens;
}
