#include "generate/options.h"

#include <math.h>

static tl_status check_number(const char *name, double value, bool allowed, const char *range)
{
    if (allowed)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID, "%s is %g; it must be %s", name, value, range);
}

tl_status generate_options_check(const tl_generate_options *o, const tl_model *model)
{
    TL_TRY(check_number("max_tokens", (double)o->max_tokens, o->max_tokens >= 0, "0 or more"));
    TL_TRY(check_number("temperature", o->temperature,
                        isfinite(o->temperature) && o->temperature >= 0, "finite and 0 or more"));
    TL_TRY(check_number("top_k", (double)o->top_k, o->top_k >= 0, "0 (off) or more"));
    TL_TRY(check_number("top_p", o->top_p, o->top_p > 0 && o->top_p <= 1, "above 0 and at most 1"));
    TL_TRY(check_number("min_p", o->min_p, o->min_p >= 0 && o->min_p <= 1, "0 to 1"));
    TL_TRY(check_number("repetition_penalty", o->repetition_penalty,
                        isfinite(o->repetition_penalty) && o->repetition_penalty > 0,
                        "finite and above 0"));
    if (!o->has_stop_tokens)
        return TL_STATUS_OK;
    if (o->n_stop_tokens > 0 && o->stop_tokens == NULL)
        return tl_fail(TL_STATUS_INVALID, "stop_tokens is NULL, but n_stop_tokens is %zu",
                       o->n_stop_tokens);
    for (size_t i = 0; i < o->n_stop_tokens; i++)
        if (o->stop_tokens[i] < 0 || o->stop_tokens[i] >= model->config.vocab_size)
            return tl_fail(TL_STATUS_INVALID, "stop_token_ids[%zu] is %d; token ids are 0 to %lld",
                           i, o->stop_tokens[i], (long long)model->config.vocab_size - 1);
    return TL_STATUS_OK;
}
