/* Answers that need no sampling: logits and states of a text, one more piece of a sequence. */
#ifndef TL_RUN_EVALUATE_H
#define TL_RUN_EVALUATE_H

#include "run/forward.h"

/* A text, and how it is run. */
typedef struct evaluation {
    const int32_t *tokens;
    size_t n_tokens;
    const float *init_state; /* NULL, or [n_tokens, hidden] */
    cache_key key;
} evaluation;

/* logits: [n_tokens, vocab]. */
tl_status evaluate_logits(float *logits, tl_model *model, const evaluation *what);

/* states: [plan_n_states, n_tokens, hidden] after each run of the core; or NULL.
 * exits: [loops, n_tokens] what the exit gate says after each; or NULL. */
tl_status evaluate_states(float *states, float *exits, tl_model *model, const evaluation *what);

/* Extends kv by the tokens; hidden: [hidden], the last one's final state. */
tl_status evaluate_extend(float *hidden, tl_kv_cache *kv, const int32_t *tokens, size_t n_tokens);

#endif
