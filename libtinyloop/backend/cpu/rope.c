#include "backend/cpu/cpu.h"
#include "base/memory.h"

#include <math.h>

/* Llama 3's rescaling: long wavelengths are stretched by `factor`, short ones kept, and those
 * between blended. */
static double llama3_frequency(const model_config *c, double frequency)
{
    double wavelength = 2 * M_PI / frequency;
    double original = (double)c->rope_original_positions;
    if (wavelength < original / c->rope_high_freq_factor)
        return frequency;
    if (wavelength > original / c->rope_low_freq_factor)
        return frequency / c->rope_factor;
    double blend = (original / wavelength - c->rope_low_freq_factor) /
                   (c->rope_high_freq_factor - c->rope_low_freq_factor);
    return (1 - blend) * frequency / c->rope_factor + blend * frequency;
}

tl_status cpu_rope_table(float **out, const model_config *config, int64_t n_positions)
{
    size_t pairs = (size_t)config->head_dim / 2;
    float *table = mem_aligned((size_t)n_positions, pairs * 2 * sizeof *table);
    *out = table;
    if (table == NULL)
        return tl_fail_nomem("the rotary table", (size_t)n_positions * pairs * 2 * sizeof *table);
    for (size_t i = 0; i < pairs; i++) {
        double frequency = pow(config->rope_theta, -2.0 * (double)i / (double)config->rotary_dim);
        if (config->rope_scaling == ROPE_SCALING_LLAMA3)
            frequency = llama3_frequency(config, frequency);
        for (size_t p = 0; p < (size_t)n_positions; p++) {
            double angle = (double)p * frequency;
            table[(p * pairs + i) * 2] = (float)cos(angle);
            table[(p * pairs + i) * 2 + 1] = (float)sin(angle);
        }
    }
    return TL_STATUS_OK;
}
