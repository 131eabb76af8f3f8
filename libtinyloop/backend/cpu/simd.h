/* Sixteen float lanes, the same on every instruction set. An including file defines one of
 * SIMD_AVX512, SIMD_AVX2, SIMD_PORTABLE. All operations round as IEEE 754 says, vf_fma once; so
 * the sets differ in speed and not in bits. In vf_min and vf_max a NaN in `b` comes through. */
#ifndef TL_CPU_SIMD_H
#define TL_CPU_SIMD_H

#include "base/half.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define SIMD_INLINE static inline __attribute__((always_inline))

#if defined(SIMD_AVX512)

#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;

SIMD_INLINE vf vf_zero(void)
{
    return _mm512_setzero_ps();
}
SIMD_INLINE vf vf_set1(float a)
{
    return _mm512_set1_ps(a);
}
SIMD_INLINE vf vf_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
SIMD_INLINE void vf_store(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}
SIMD_INLINE vf vf_load_n(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
SIMD_INLINE void vf_store_n(float *p, vf a, size_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a);
}
SIMD_INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
SIMD_INLINE vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}
SIMD_INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
SIMD_INLINE vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}
SIMD_INLINE vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
SIMD_INLINE vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
SIMD_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
SIMD_INLINE vf vf_round(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
SIMD_INLINE vf vf_exp2i(vf n) /* 2^n for whole n in -126 .. 128 */
{
    __m512i i = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(i, 23));
}
SIMD_INLINE vf vf_select(size_t begin, size_t end, vf inside, vf outside)
{
    __mmask16 mask = (__mmask16)(((1u << end) - 1) & ~((1u << begin) - 1));
    return _mm512_mask_blend_ps(mask, outside, inside);
}
SIMD_INLINE vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
SIMD_INLINE void vf_store_f16(uint16_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p,
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SIMD_INLINE vf vf_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
SIMD_INLINE vi vi_load(const void *p)
{
    return _mm512_loadu_si512(p);
}
SIMD_INLINE vf vf_bf16_low(vi a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
}
SIMD_INLINE vf vf_bf16_high(vi a)
{
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xFFFF0000u)));
}
SIMD_INLINE __m256 vf_low_half(vf a)
{
    return _mm512_castps512_ps256(a);
}
SIMD_INLINE __m256 vf_high_half(vf a)
{
    return _mm512_extractf32x8_ps(a, 1);
}

#elif defined(SIMD_AVX2)

#include <immintrin.h>

typedef struct vf {
    __m256 a, b;
} vf;
typedef struct vi {
    __m256i a, b;
} vi;

SIMD_INLINE vf vf_zero(void)
{
    return (vf){_mm256_setzero_ps(), _mm256_setzero_ps()};
}
SIMD_INLINE vf vf_set1(float x)
{
    return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
SIMD_INLINE vf vf_load(const float *p)
{
    return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
SIMD_INLINE void vf_store(float *p, vf v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
SIMD_INLINE vf vf_load_n(const float *p, size_t n)
{
    float lanes[16] = {0};
    memcpy(lanes, p, n * sizeof *p);
    return vf_load(lanes);
}
SIMD_INLINE void vf_store_n(float *p, vf v, size_t n)
{
    float lanes[16];
    vf_store(lanes, v);
    memcpy(p, lanes, n * sizeof *p);
}
SIMD_INLINE vf vf_add(vf x, vf y)
{
    return (vf){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_sub(vf x, vf y)
{
    return (vf){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_mul(vf x, vf y)
{
    return (vf){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_div(vf x, vf y)
{
    return (vf){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_min(vf x, vf y)
{
    return (vf){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_max(vf x, vf y)
{
    return (vf){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
SIMD_INLINE vf vf_fma(vf x, vf y, vf z)
{
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
SIMD_INLINE vf vf_round(vf x)
{
    return (vf){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
SIMD_INLINE __m256 simd_exp2i_half(__m256 n)
{
    __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
SIMD_INLINE vf vf_exp2i(vf n)
{
    return (vf){simd_exp2i_half(n.a), simd_exp2i_half(n.b)};
}
SIMD_INLINE __m256 simd_select_half(int first, int begin, int end, __m256 inside, __m256 outside)
{
    __m256i lane =
        _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    __m256i in = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(begin - 1)),
                                  _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
    return _mm256_blendv_ps(outside, inside, _mm256_castsi256_ps(in));
}
SIMD_INLINE vf vf_select(size_t begin, size_t end, vf inside, vf outside)
{
    return (vf){simd_select_half(0, (int)begin, (int)end, inside.a, outside.a),
                simd_select_half(8, (int)begin, (int)end, inside.b, outside.b)};
}
SIMD_INLINE vf vf_load_f16(const uint16_t *p)
{
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
SIMD_INLINE void vf_store_f16(uint16_t *p, vf v)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8),
                     _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
SIMD_INLINE vf vf_load_i8(const int8_t *p)
{
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
SIMD_INLINE vi vi_load(const void *p)
{
    const __m256i *q = p;
    return (vi){_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
SIMD_INLINE vf vf_bf16_low(vi x)
{
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 16))};
}
SIMD_INLINE vf vf_bf16_high(vi x)
{
    __m256i mask = _mm256_set1_epi32((int)0xFFFF0000u);
    return (vf){_mm256_castsi256_ps(_mm256_and_si256(x.a, mask)),
                _mm256_castsi256_ps(_mm256_and_si256(x.b, mask))};
}
SIMD_INLINE __m256 vf_low_half(vf v)
{
    return v.a;
}
SIMD_INLINE __m256 vf_high_half(vf v)
{
    return v.b;
}

#else /* SIMD_PORTABLE */

typedef struct vf {
    float lane[16];
} vf;
typedef struct vi {
    uint32_t lane[16];
} vi;

#define SIMD_EACH(expression)                                                                      \
    vf r;                                                                                          \
    for (int i = 0; i < 16; i++)                                                                   \
        r.lane[i] = (expression);                                                                  \
    return r

SIMD_INLINE vf vf_set1(float x)
{
    SIMD_EACH(x);
}
SIMD_INLINE vf vf_zero(void)
{
    return vf_set1(0.0f);
}
SIMD_INLINE vf vf_load(const float *p)
{
    SIMD_EACH(p[i]);
}
SIMD_INLINE void vf_store(float *p, vf v)
{
    memcpy(p, v.lane, sizeof v.lane);
}
SIMD_INLINE vf vf_load_n(const float *p, size_t n)
{
    SIMD_EACH((size_t)i < n ? p[i] : 0.0f);
}
SIMD_INLINE void vf_store_n(float *p, vf v, size_t n)
{
    memcpy(p, v.lane, n * sizeof *p);
}
SIMD_INLINE vf vf_add(vf x, vf y)
{
    SIMD_EACH(x.lane[i] + y.lane[i]);
}
SIMD_INLINE vf vf_sub(vf x, vf y)
{
    SIMD_EACH(x.lane[i] - y.lane[i]);
}
SIMD_INLINE vf vf_mul(vf x, vf y)
{
    SIMD_EACH(x.lane[i] * y.lane[i]);
}
SIMD_INLINE vf vf_div(vf x, vf y)
{
    SIMD_EACH(x.lane[i] / y.lane[i]);
}
SIMD_INLINE vf vf_min(vf x, vf y)
{
    SIMD_EACH(x.lane[i] < y.lane[i] ? x.lane[i] : y.lane[i]);
}
SIMD_INLINE vf vf_max(vf x, vf y)
{
    SIMD_EACH(x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i]);
}
#if defined(FP_FAST_FMAF)
SIMD_INLINE
#else /* sixteen calls of fmaf(): once is enough code */
static __attribute__((noinline))
#endif
vf vf_fma(vf x, vf y, vf z)
{
    SIMD_EACH(__builtin_fmaf(x.lane[i], y.lane[i], z.lane[i]));
}
SIMD_INLINE vf vf_round(vf x)
{
    SIMD_EACH(rintf(x.lane[i]));
}
SIMD_INLINE vf vf_exp2i(vf n)
{
    /* a NaN has no integer; what it multiplies is NaN already */
    SIMD_EACH(n.lane[i] == n.lane[i] ? float_from_bits((uint32_t)((int32_t)n.lane[i] + 127) << 23)
                                     : 1.0f);
}
SIMD_INLINE vf vf_select(size_t begin, size_t end, vf inside, vf outside)
{
    SIMD_EACH((size_t)i >= begin && (size_t)i < end ? inside.lane[i] : outside.lane[i]);
}
SIMD_INLINE vf vf_load_f16(const uint16_t *p)
{
    SIMD_EACH(float_from_f16(p[i]));
}
SIMD_INLINE void vf_store_f16(uint16_t *p, vf v)
{
    for (int i = 0; i < 16; i++)
        p[i] = float_to_f16(v.lane[i]);
}
SIMD_INLINE vf vf_load_i8(const int8_t *p)
{
    SIMD_EACH((float)p[i]);
}
SIMD_INLINE vi vi_load(const void *p)
{
    vi r;
    memcpy(r.lane, p, sizeof r.lane);
    return r;
}
SIMD_INLINE vf vf_bf16_low(vi x)
{
    SIMD_EACH(float_from_bits(x.lane[i] << 16));
}
SIMD_INLINE vf vf_bf16_high(vi x)
{
    SIMD_EACH(float_from_bits(x.lane[i] & 0xFFFF0000u));
}

#endif

/* Lanes i and i + 8, then i + 4, + 2, + 1. */
#if defined(SIMD_PORTABLE)

SIMD_INLINE float vf_sum(vf v)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            v.lane[i] += v.lane[i + half];
    return v.lane[0];
}
SIMD_INLINE float vf_largest(vf v)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            v.lane[i] = v.lane[i] > v.lane[i + half] ? v.lane[i] : v.lane[i + half];
    return v.lane[0];
}

#else

SIMD_INLINE float vf_sum(vf v)
{
    __m256 eight = _mm256_add_ps(vf_low_half(v), vf_high_half(v));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
SIMD_INLINE float vf_largest(vf v)
{
    __m256 eight = _mm256_max_ps(vf_low_half(v), vf_high_half(v));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

/* ---- the same code on every set ---- */

/* e^x within 2 units in the last place; below -87.3 it stays there, from 88.4 on it is infinite.
 * x = n ln 2 + r with |r| <= ln 2 / 2 (ln 2 in two parts, so r is exact enough), and e^r by its
 * Taylor polynomial to r^7. */
SIMD_INLINE vf vf_exp(vf x)
{
    x = vf_max(vf_set1(-87.3f), x);
    x = vf_min(vf_set1(89.0f), x); /* n = 128, whose 2^n has the bits of infinity */
    vf n = vf_round(vf_mul(x, vf_set1(0x1.715476p+0f)));
    vf r = vf_fma(n, vf_set1(-0x1.62e4p-1f), x);
    r = vf_fma(n, vf_set1(-0x1.7f7d1cp-20f), r);
    vf p = vf_set1(1.0f / 5040);
    p = vf_fma(p, r, vf_set1(1.0f / 720));
    p = vf_fma(p, r, vf_set1(1.0f / 120));
    p = vf_fma(p, r, vf_set1(1.0f / 24));
    p = vf_fma(p, r, vf_set1(1.0f / 6));
    p = vf_fma(p, r, vf_set1(0.5f));
    p = vf_fma(p, r, vf_set1(1.0f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_mul(p, vf_exp2i(n));
}

#endif
