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

/* The pair that turns `rotations` times over the original positions. */
static double yarn_pair(const model_config *c, double rotations)
{
    double dim = (double)c->rotary_dim;
    return dim * log((double)c->rope_original_positions / (rotations * 2 * M_PI)) /
           (2 * log(c->rope_theta));
}

/* YaRN (Peng, Quesnelle, Fan and Shippole, 2023): pairs that turn often keep their frequency, those
 * that turn seldom are slowed by `factor`, with a ramp between. */
static double yarn_frequency(const model_config *c, double frequency, size_t pair)
{
    double low = fmax(floor(yarn_pair(c, c->rope_beta_fast)), 0);
    double high = fmin(ceil(yarn_pair(c, c->rope_beta_slow)), (double)c->rotary_dim - 1);
    double width = high > low ? high - low : 0.001;
    double slowed = fmin(fmax(((double)pair - low) / width, 0), 1);
    return slowed * frequency / c->rope_factor + (1 - slowed) * frequency;
}

static double scaled_frequency(const model_config *c, double frequency, size_t pair)
{
    switch (c->rope_scaling) {
    case ROPE_SCALING_LINEAR:
        return frequency / c->rope_factor;
    case ROPE_SCALING_LLAMA3:
        return llama3_frequency(c, frequency);
    case ROPE_SCALING_YARN:
        return yarn_frequency(c, frequency, pair);
    default:
        return frequency;
    }
}

tl_status cpu_rope_frequencies(double **out, const model_config *config)
{
    size_t pairs = (size_t)config->rotary_dim / 2;
    double *frequencies = mem_array(pairs + 1, sizeof *frequencies); /* +1: there may be no pairs */
    *out = frequencies;
    if (frequencies == NULL)
        return tl_fail_nomem("rotary frequencies", pairs * sizeof *frequencies);
    for (size_t i = 0; i < pairs; i++) {
        double frequency = pow(config->rope_theta, -2.0 * (double)i / (double)config->rotary_dim);
        frequencies[i] = scaled_frequency(config, frequency, i);
    }
    return TL_STATUS_OK;
}

void cpu_rope_row(float *cos_sin, const double *frequencies, size_t pairs, int64_t position,
                  double factor)
{
    for (size_t i = 0; i < pairs; i++) {
        double angle = (double)position * frequencies[i];
        cos_sin[i] = (float)(cos(angle) * factor);
        cos_sin[pairs + i] = (float)(sin(angle) * factor);
    }
}
