/* The random initial state of a core: a truncated normal, keyed by (seed, position), so that a
 * cached prefix and a recomputed one agree. */
#ifndef TL_MODEL_NOISE_H
#define TL_MODEL_NOISE_H

#include <stddef.h>
#include <stdint.h>

/* out[i] = scale times a standard normal number within [-cut, cut], by rejection: a cut of
 * CONFIG_LEAST_INIT_CUT takes a dozen attempts. */
void noise_row(float *out, size_t n, uint64_t seed, int64_t position, double scale, double cut);

#endif
