/* Logits, states and exits of whole texts. */
#include "run/evaluate.h"
#include "api/call.h"
#include "api/keys.h"

static tl_status resolve_evaluation(evaluation *what, tl_model *model, const int32_t *tokens,
                                    size_t n_tokens, const float *init_state,
                                    const tl_cache_options *options)
{
    *what = (evaluation){.tokens = tokens, .n_tokens = n_tokens, .init_state = init_state};
    TL_TRY(engine_check_tokens(model, "tokens", tokens, n_tokens));
    TL_TRY(key_resolve(&what->key, model, options, n_tokens, true));
    if (init_state != NULL && (model->plan.nested || model->config.inject == INJECT_NONE))
        return tl_fail(TL_STATUS_INVALID, "init_state is given, but this model %s; leave it out",
                       model->plan.nested ? "has a nested schedule, which takes none"
                                          : "has a core that starts from its input alone");
    return TL_STATUS_OK;
}

tl_status tl_model_logits(float *logits, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          const float *init_state, const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(logits);
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(tokens);
    COMPUTE_WITH(model);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, init_state, options));
    return evaluate_logits(logits, model, &what);
}

tl_status tl_model_states(float *states, tl_model *model, const int32_t *tokens, size_t n_tokens,
                          const float *init_state, const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(states);
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(tokens);
    COMPUTE_WITH(model);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, init_state, options));
    return evaluate_states(states, NULL, model, &what);
}

tl_status tl_model_exit_logits(float *logits, tl_model *model, const int32_t *tokens,
                               size_t n_tokens, const tl_cache_options *options)
{
    BEGIN_CALL();
    NOT_NULL(logits);
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(tokens);
    COMPUTE_WITH(model);
    evaluation what;
    TL_TRY(resolve_evaluation(&what, model, tokens, n_tokens, NULL, options));
    if (model->config.exit_mode == EXIT_NONE)
        return tl_fail(TL_STATUS_INVALID, "this model has no exit gate (config field exit_mode)");
    return evaluate_states(NULL, logits, model, &what);
}
