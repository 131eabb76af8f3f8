/* The forward pass: a batch of sequences with any number of new tokens each, walked over the
 * model's plan. Prefill, decode and suffix extension are all this. */
#ifndef TL_RUN_FORWARD_H
#define TL_RUN_FORWARD_H

#include "run/kv_cache.h"

typedef struct run_item {
    tl_kv_cache *kv;       /* extended by n_tokens */
    const int32_t *tokens; /* checked by the caller */
    size_t n_tokens;
    const float *init_state; /* NULL, or [n_tokens, hidden]: the core's, in place of its own */
    float *hidden;           /* NULL, or [n_tokens, hidden]: final states, before the final norm */
    float *last_hidden;      /* NULL, or [hidden]: of the last token */
    float *states;           /* NULL, or the core's state after each run, [n_tokens, hidden] at */
    size_t states_stride;    /* states + run * states_stride */
    float *exits;            /* NULL, or the exit gate after each loop, [n_tokens] at */
    size_t exits_stride;     /* exits + loop * exits_stride */
} run_item;

/* The buffers of a pass; belongs to one call at a time. */
typedef struct run_pass run_pass;

tl_status run_pass_create(run_pass **out, tl_model *model, size_t max_rows);
void run_pass_destroy(run_pass *pass);
size_t run_pass_rows(const run_pass *pass);

/* Rows of a pass that the sequence's next n_tokens go through. A long text goes in chunks; tokens
 * that see each other go together. */
static inline size_t run_rows_for(const tl_kv_cache *kv, size_t n_tokens)
{
    size_t prefix = kv->sequence.length == 0 ? (size_t)kv->key.prefix_len : 0;
    prefix = prefix < n_tokens ? prefix : n_tokens;
    size_t rows = n_tokens < kv->model->prefill_chunk ? n_tokens : kv->model->prefill_chunk;
    return rows > prefix ? rows : prefix;
}

/* One pass over all items (their tokens together at most the pass's rows; all of the same loops).
 * On failure (NOMEM, INTERRUPTED, or INVALID where less comes than the tokens that see each other)
 * every sequence is as it was. */
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
