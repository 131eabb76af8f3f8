/* The forward pass: a batch of sequences with any number of new tokens each, walked over the
 * model's plan. Prefill, decode and suffix extension are all this. */
#ifndef TL_RUN_FORWARD_H
#define TL_RUN_FORWARD_H

#include "run/kv_cache.h"

typedef struct run_item {
    tl_kv_cache *kv;       /* extended by n_tokens */
    const int32_t *tokens; /* checked by the caller */
    size_t n_tokens;
    float *hidden;        /* NULL, or [n_tokens, hidden]: final states, before the final norm */
    float *last_hidden;   /* NULL, or [hidden]: of the last token */
    float *states;        /* NULL, or the core's state after each loop, [n_tokens, hidden] at */
    size_t states_stride; /* states + loop * states_stride */
} run_item;

/* The buffers of a pass; belongs to one call at a time. */
typedef struct run_pass run_pass;

tl_status run_pass_create(run_pass **out, tl_model *model, size_t max_rows);
void run_pass_destroy(run_pass *pass);
size_t run_pass_rows(const run_pass *pass);

/* Rows of a pass that a text of n_tokens goes through: it is chunked where it is long. */
static inline size_t run_rows_for(const tl_model *model, size_t n_tokens)
{
    return n_tokens < model->prefill_chunk ? n_tokens : model->prefill_chunk;
}

/* One pass over all items (their tokens together at most the pass's rows; all of the same loops).
 * On failure (NOMEM, INTERRUPTED) every sequence is as it was. */
tl_status run_forward(run_pass *pass, const run_item *items, size_t n_items);

/* One sequence, in as many passes as it takes; counts the tokens under `counter`. On failure the
 * sequence may have lost what its window no longer covers: release it, or see run_extend. */
tl_status run_tokens(run_pass *pass, const run_item *item, counter counter);

/* As run_tokens, but on failure the sequence is as it was: where that takes more than one pass, the
 * blocks that a window leaves behind are kept until the end. */
tl_status run_extend(run_pass *pass, const run_item *item, counter counter);

/* logits [n, vocab] of final states [n, hidden]; n at most the pass's rows. */
tl_status run_head(run_pass *pass, const float *hidden, size_t n, float *logits);

#endif
