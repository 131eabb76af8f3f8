/* Weights as they are kept, from tensors as the file has them. */
#pragma once

#include "common.cuh"

DEVICE float read_number(const void *from, int64_t i, int dtype)
{
    if (dtype == PACK_F32)
        return ((const float *)from)[i];
    if (dtype == PACK_I8)
        return (float)((const signed char *)from)[i];
    return from_16(((const uint16_t *)from)[i], dtype == PACK_F16 ? CUDA_F16 : CUDA_BF16);
}

KERNEL void pack(cuda_pack_args a)
{
    int64_t n = (int64_t)a.n * a.columns;
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
        int64_t row = i / a.columns;
        int column = (int)(i % a.columns);
        float v = read_number(a.from, i, a.dtype);
        if (a.dtype == PACK_I8)
            v *= a.scales[row * a.n_scales + (a.n_scales > 1 ? column / 128 : 0)];
        int64_t to = a.step == 16 ? row / 8 * 16 + row % 8 + a.first : row + a.first;
        a.to[weight_at(a.to_columns, to, column)] = to_16(v, a.type);
    }
}

KERNEL void widen(cuda_widen_args a)
{
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < a.n; i += gridDim.x * 256ll)
        a.to[i] = read_number(a.from, i, a.dtype);
}
