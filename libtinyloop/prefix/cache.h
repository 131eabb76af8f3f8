/* A prefix that has been run: its KV, and the final hidden state of its last token. Immutable, so
 * any number of threads may start from it at once. */
#ifndef TL_PREFIX_CACHE_H
#define TL_PREFIX_CACHE_H

#include "run/forward.h"

struct tl_prefix_cache {
    handle handle;
    ref_count references;
    tl_kv_cache *kv; /* never extended: users clone it */
    size_t n_tokens;
    int32_t *tokens; /* [n_tokens] */
    float *hidden;   /* [hidden], before the final norm */
};

/* Copies the tokens, which the caller has checked. */
tl_status prefix_cache_build(tl_prefix_cache **out, tl_model *model, const int32_t *tokens,
                             size_t n_tokens, cache_key key);
tl_prefix_cache *prefix_cache_retain(tl_prefix_cache *cache);
void prefix_cache_release(tl_prefix_cache *cache);

/* Blocks, final hidden state and token ids. */
size_t prefix_cache_bytes(const tl_prefix_cache *cache);

#endif
