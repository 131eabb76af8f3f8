#include "generate/options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static tl_status check_count(const char *name, int64_t value, const char *range)
{
    if (value >= 0)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID, "%s is %lld; it must be %s", name, (long long)value, range);
}

static tl_status check_number(const char *name, double value, bool allowed, const char *range)
{
    char text[32];
    if (allowed)
        return TL_STATUS_OK;
    snprintf(text, sizeof text, "%.15g", value);
    if (strtod(text, NULL) != value) /* just outside must not look like the limit */
        snprintf(text, sizeof text, "%.17g", value);
    return tl_fail(TL_STATUS_INVALID, "%s is %s; it must be %s", name, text, range);
}

tl_status generate_options_check(const tl_generate_options *o, const tl_model *model)
{
    TL_TRY(check_count("max_tokens", o->max_tokens, "0 or more"));
    TL_TRY(check_number("temperature", o->temperature,
                        isfinite(o->temperature) && o->temperature >= 0, "finite and 0 or more"));
    TL_TRY(check_count("top_k", o->top_k, "0 (off) or more"));
    TL_TRY(check_number("top_p", o->top_p, o->top_p > 0 && o->top_p <= 1, "above 0 and at most 1"));
    TL_TRY(check_number("min_p", o->min_p, o->min_p >= 0 && o->min_p <= 1, "0 to 1"));
    TL_TRY(check_number("repetition_penalty", o->repetition_penalty,
                        isfinite(o->repetition_penalty) && o->repetition_penalty > 0,
                        "finite and above 0"));
    if (!o->has_stop_tokens)
        return TL_STATUS_OK;
    if (o->n_stop_tokens > 0 && o->stop_tokens == NULL)
        return tl_fail(TL_STATUS_INVALID,
                       "stop_tokens is NULL, but n_stop_tokens is %zu; give an array or 0",
                       o->n_stop_tokens);
    for (size_t i = 0; i < o->n_stop_tokens; i++)
        if (o->stop_tokens[i] < 0 || o->stop_tokens[i] >= model->config.vocab_size)
            return tl_fail(TL_STATUS_INVALID, "stop_tokens[%zu] is %d; token ids are 0 to %lld", i,
                           o->stop_tokens[i], (long long)model->config.vocab_size - 1);
    return TL_STATUS_OK;
}
