/* Many prefix caches under one roof: exact keys, longest match, eviction by length. Safe for
 * threads: a lock guards the tables for short times and is never held while something computes. */
#ifndef TL_PREFIX_POOL_H
#define TL_PREFIX_POOL_H

#include "prefix/cache.h"

tl_status prefix_pool_create(tl_prefix_pool **out, size_t capacity);
tl_prefix_pool *prefix_pool_retain(tl_prefix_pool *pool);
void prefix_pool_release(tl_prefix_pool *pool);

size_t prefix_pool_size(const tl_prefix_pool *pool);
int64_t prefix_pool_total_tokens(const tl_prefix_pool *pool);

/* Builds and enters the prefix, unless its key is there. The tokens are checked by the caller. */
tl_status prefix_pool_register(tl_prefix_pool *pool, tl_model *model, const int32_t *tokens,
                               size_t n_tokens, cache_key key);

/* The longest entry that the prompt starts with, with a reference for the caller; or NULL. */
tl_prefix_cache *prefix_pool_match(tl_prefix_pool *pool, const tl_model *model,
                                   const int32_t *prompt, size_t n_prompt, cache_key key);

#endif
