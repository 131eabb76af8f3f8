/* What all kernels use: conversions, sums with one order, tensor-core products. */
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#include "../args.h"

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__

/* ---- 16-bit numbers ---- */

DEVICE float from_f16(uint16_t v)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}

DEVICE uint16_t to_f16(float f)
{
    uint16_t v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}

DEVICE float from_16(uint16_t v, int type)
{
    return type == CUDA_F16 ? from_f16(v) : __uint_as_float((u32)v << 16);
}

DEVICE uint16_t to_16(float f, int type)
{
    uint16_t v;
    if (type == CUDA_F16)
        return to_f16(f);
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}

/* ---- places ---- */

DEVICE int64_t operand_at(const cuda_operand &o, int row, int column)
{
    return ((int64_t)(column >> 3) * o.rows + row) * 8 + (column & 7);
}

DEVICE int64_t weight_at(int columns, int64_t row, int column)
{
    int64_t tile = (row >> 7) * (columns >> 3) + (column >> 3);
    return (tile * CUDA_WEIGHT_ROWS + (row & 127)) * 8 + (column & 7);
}

/* ---- sums: one tree, whatever the launch ---- */

DEVICE float warp_sum(float v)
{
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(~0u, v, i);
    return v;
}

/* Of a block of 256 threads; every thread gets it. */
DEVICE float block_sum(float v)
{
    __shared__ float warps[8];
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < 8; i++)
        sum += warps[i];
    return sum;
}

/* ---- functions ---- */

DEVICE float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* 2^x; exact for whole x, 0 for -infinity */
DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU2 }; /* as ACTIVATION_* */

DEVICE float activate(float x, int kind)
{
    if (kind == ACT_SILU)
        return x / (1.0f + expf(-x));
    if (kind == ACT_GELU)
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (kind == ACT_GELU_TANH)
        return 0.5f * x * (1.0f + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    float r = fmaxf(x, 0.0f);
    return r * r;
}

/* ---- tensor cores ---- */

/* c += a b, a 16 x 16, b 16 x 8. Lane l has of c: rows g and g + 8, columns 2t and 2t + 1, with
 * g = l / 4, t = l % 4. */
template <int TYPE> DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2])
{
    if (TYPE == CUDA_F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
