#include "model/noise.h"

#include "base/random.h"

#include <math.h>

/* Box and Muller's method, "A Note on the Generation of Random Normal Deviates" (1958). */
static double normal(const uint32_t word[4])
{
    double u = ((double)word[0] + 0.5) * 0x1p-32, v = (double)word[1] * 0x1p-32;
    return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

static double truncated_normal(const uint32_t key[2], uint32_t channel, uint64_t position,
                               double cut)
{
    for (uint32_t attempt = 0;; attempt++) {
        uint32_t counter[4] = {channel, attempt, (uint32_t)position, (uint32_t)(position >> 32)};
        uint32_t word[4];
        philox4x32(word, counter, key);
        double z = normal(word);
        if (fabs(z) <= cut)
            return z;
    }
}

void noise_row(float *out, size_t n, uint64_t seed, int64_t position, double scale, double cut)
{
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (size_t i = 0; i < n; i++)
        out[i] = (float)(scale * truncated_normal(key, (uint32_t)i, (uint64_t)position, cut));
}
