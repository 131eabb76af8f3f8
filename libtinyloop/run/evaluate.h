/* Answers that need no sampling: logits and states of a text, one more piece of a sequence. */
#ifndef TL_RUN_EVALUATE_H
#define TL_RUN_EVALUATE_H

#include "run/forward.h"

/* logits: [n_tokens, vocab]. */
tl_status evaluate_logits(float *logits, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          cache_key key);

/* states: [loops, n_tokens, hidden] after each run of the core. */
tl_status evaluate_states(float *states, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          cache_key key);

/* Extends kv by the tokens; hidden: [hidden], the last one's final state. */
tl_status evaluate_extend(float *hidden, tl_kv_cache *kv, const int32_t *tokens, size_t n_tokens);

#endif
