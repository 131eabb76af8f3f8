/* tl_cache_options as the key of a cache. */
#ifndef TL_API_KEYS_H
#define TL_API_KEYS_H

#include "run/engine.h"

/* The key for a text of n_tokens. Unless prefix_len is stated, all of them see each other in a
 * prefix-LM, or with `causal` none. */
tl_status key_resolve(cache_key *key, tl_model *model, const tl_cache_options *options,
                      size_t n_tokens, bool causal);

#endif
