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

tl_status cpu_rope_frequencies(double **out, const model_config *config)
{
    size_t pairs = (size_t)config->head_dim / 2;
    double *frequencies = mem_array(pairs, sizeof *frequencies);
    *out = frequencies;
    if (frequencies == NULL)
        return tl_fail_nomem("rotary frequencies", pairs * sizeof *frequencies);
    for (size_t i = 0; i < pairs; i++) {
        double frequency = pow(config->rope_theta, -2.0 * (double)i / (double)config->rotary_dim);
        if (config->rope_scaling == ROPE_SCALING_LLAMA3)
            frequency = llama3_frequency(config, frequency);
        frequencies[i] = frequency;
    }
    return TL_STATUS_OK;
}

void cpu_rope_row(float *cos_sin, const double *frequencies, size_t pairs, int64_t position)
{
    for (size_t i = 0; i < pairs; i++) {
        double angle = (double)position * frequencies[i];
        cos_sin[i] = (float)cos(angle);
        cos_sin[pairs + i] = (float)sin(angle);
    }
}
