/* From logits to a token: repetition penalty, temperature, top_k, top_p, min_p, and a draw keyed by
 * (seed, position). A pure function of its inputs. */
#ifndef TL_GENERATE_SAMPLER_H
#define TL_GENERATE_SAMPLER_H

#include "base/status.h"

#include <stdbool.h>

typedef struct sampling {
    double temperature; /* 0: greedy */
    int64_t top_k;      /* 0: off */
    double top_p;
    double min_p;
    double repetition_penalty;
    uint64_t seed;
} sampling;

typedef struct sampler sampler;

tl_status sampler_create(sampler **out, size_t vocab, sampling sampling);
void sampler_destroy(sampler *sampler);

/* The token is part of the text from now on, for the repetition penalty. */
void sampler_see(sampler *sampler, int32_t token);

/* The token for `position`. logits: [vocab]. NUMERIC if one is not finite. */
tl_status sampler_pick(int32_t *token, sampler *sampler, const float *logits, int64_t position);

#endif
