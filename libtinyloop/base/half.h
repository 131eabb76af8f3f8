/* Scalar conversions of 16-bit floats; to nearest, ties to even, as the hardware converts. */
#ifndef TL_BASE_HALF_H
#define TL_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t float_to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float float_from_bf16(uint16_t h)
{
    return float_from_bits((uint32_t)h << 16);
}

static inline float float_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t fraction = h & 1023u;
    if (exponent == 31)
        return float_from_bits(sign | 0x7F800000u | (fraction << 13));
    if (exponent != 0)
        return float_from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
    /* subnormal: fraction * 2^-24 is exact in float */
    float magnitude = (float)fraction * 0x1p-24f;
    return float_from_bits(sign | float_to_bits(magnitude));
}

static inline uint16_t float_to_f16(float f)
{
    uint32_t bits = float_to_bits(f);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x7F800000u) /* inf, or NaN with its payload's top bits, made quiet */
        return (uint16_t)(sign | 0x7C00u |
                          (magnitude > 0x7F800000u ? 0x200u | ((magnitude >> 13) & 0x3FFu) : 0u));
    if (magnitude >= 0x477FF000u) /* rounds to 2^16 or more */
        return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {
        /* below the smallest normal: adding 0.5 aligns the result's last bit with float's */
        float shifted = float_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (float_to_bits(shifted) - 0x3F000000u));
    }
    uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

#endif
