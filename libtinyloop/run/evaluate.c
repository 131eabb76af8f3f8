#include "run/evaluate.h"

#include "base/memory.h"

/* A fresh sequence and a pass for it; both or none. */
static tl_status begin(tl_kv_cache **kv, run_pass **pass, tl_model *model, const evaluation *what)
{
    TL_TRY(kv_cache_create(kv, model, what->key));
    tl_status status = run_pass_create(pass, model, run_rows_for(*kv, what->n_tokens));
    if (status != TL_STATUS_OK)
        kv_cache_release(*kv);
    return status;
}

/* The head's share of a text, chunk by chunk: only one chunk of final states is ever held. */
static tl_status logits_by_chunks(float *logits, run_pass *pass, tl_kv_cache *kv,
                                  const evaluation *what, float *hidden)
{
    const model_config *c = &kv->model->config;
    size_t width = (size_t)c->hidden_size, vocab = (size_t)c->vocab_size;
    size_t rows = run_pass_rows(pass);
    for (size_t done = 0; done < what->n_tokens; done += rows) {
        size_t n = what->n_tokens - done < rows ? what->n_tokens - done : rows;
        run_item item = {.kv = kv,
                         .tokens = what->tokens + done,
                         .n_tokens = n,
                         .init_state = what->init_state ? what->init_state + done * width : NULL,
                         .hidden = hidden};
        TL_TRY(run_tokens(pass, &item, COUNT_PREFILLED));
        TL_TRY(run_head(pass, hidden, n, logits + done * vocab));
    }
    return TL_STATUS_OK;
}

tl_status evaluate_logits(float *logits, tl_model *model, const evaluation *what)
{
    tl_kv_cache *kv;
    run_pass *pass;
    TL_TRY(begin(&kv, &pass, model, what));
    size_t row = (size_t)model->config.hidden_size * sizeof(float);
    float *hidden = mem_array(run_pass_rows(pass), row);
    tl_status status = hidden != NULL ? logits_by_chunks(logits, pass, kv, what, hidden)
                                      : tl_fail_nomem("final states", run_pass_rows(pass) * row);
    mem_free(hidden);
    run_pass_destroy(pass);
    kv_cache_release(kv);
    return status;
}

tl_status evaluate_states(float *states, float *exits, tl_model *model, const evaluation *what)
{
    tl_kv_cache *kv;
    run_pass *pass;
    TL_TRY(begin(&kv, &pass, model, what));
    run_item item = {.kv = kv,
                     .tokens = what->tokens,
                     .n_tokens = what->n_tokens,
                     .init_state = what->init_state,
                     .states = states,
                     .states_stride = what->n_tokens * (size_t)model->config.hidden_size,
                     .exits = exits,
                     .exits_stride = what->n_tokens};
    tl_status status = run_tokens(pass, &item, COUNT_PREFILLED);
    run_pass_destroy(pass);
    kv_cache_release(kv);
    return status;
}

tl_status evaluate_extend(float *hidden, tl_kv_cache *kv, const int32_t *tokens, size_t n_tokens)
{
    run_pass *pass;
    TL_TRY(run_pass_create(&pass, kv->model, run_rows_for(kv, n_tokens)));
    run_item item = {.kv = kv, .tokens = tokens, .n_tokens = n_tokens, .last_hidden = hidden};
    tl_status status = run_extend(pass, &item, COUNT_DECODED);
    run_pass_destroy(pass);
    return status;
}
