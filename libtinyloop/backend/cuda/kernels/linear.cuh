/* Linear layers. Every output is a sum over groups of CUDA_KG columns in ascending order, each group
 * from a fresh accumulator that advances 16 columns at a time: so all kernels here give the same
 * bits, and the number of rows only chooses the fastest. Weights are the first factor, so that one
 * row of x and many are the same instruction. */
#pragma once

#include "common.cuh"

/* Outputs m and m + 8 of row n. */
DEVICE void finish_pair(const cuda_linear_args &a, int m, int n, float low, float high)
{
    if (n >= a.n)
        return;
    if (a.bias) {
        low = __fadd_rn(low, a.bias[m]);
        high = __fadd_rn(high, a.bias[m + 8]);
    }
    if (a.mode == LINEAR_ACTIVATE_GATED) {
        float v = __fmul_rn(__fmul_rn(activate(low, a.activation), a.activation_scale), high);
        a.out.data[operand_at(a.out, n, m / 16 * 8 + m % 8)] = to_16(v, a.out.type);
        return;
    }
    if (a.mode == LINEAR_ACTIVATE) {
        float first = __fmul_rn(activate(low, a.activation), a.activation_scale);
        float second = __fmul_rn(activate(high, a.activation), a.activation_scale);
        a.out.data[operand_at(a.out, n, m)] = to_16(first, a.out.type);
        a.out.data[operand_at(a.out, n, m + 8)] = to_16(second, a.out.type);
        return;
    }
    float *y = a.y + n * a.y_stride + m;
    if (m < a.m) {
        low = a.scale ? __fmul_rn(low, a.scale[m]) : low;
        y[0] = a.mode == LINEAR_ADD ? __fadd_rn(y[0], low) : low;
    }
    if (m + 8 < a.m) {
        high = a.scale ? __fmul_rn(high, a.scale[m + 8]) : high;
        y[8] = a.mode == LINEAR_ADD ? __fadd_rn(y[8], high) : high;
    }
}

/* ---- few rows: a block has 16 outputs, and its 8 warps share the groups ---- */

enum { KG16 = CUDA_KG / 16, K_CHUNK = CUDA_WEIGHT_ROWS * 4 }; /* u32 of 8 columns of a tile */

/* One group: columns 16 [begin, end). */
template <int TYPE, int NT>
DEVICE void few_group(const cuda_linear_args &a, const u32 *w, int begin, int end,
                      float (&acc)[NT][4])
{
    int lane = threadIdx.x % 32;
    const u32 *x = (const u32 *)a.x.data + lane;
    int64_t x_chunk = (int64_t)a.x.rows * 4;
    u32 fragment[KG16][4];
#pragma unroll
    for (int k = 0; k < KG16; k++)
        if (begin + k < end) {
            const u32 *at = w + (int64_t)(begin + k) * 2 * K_CHUNK;
            fragment[k][0] = at[0];
            fragment[k][1] = at[32];
            fragment[k][2] = at[K_CHUNK];
            fragment[k][3] = at[K_CHUNK + 32];
        }
#pragma unroll
    for (int k = 0; k < KG16; k++)
        if (begin + k < end)
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const u32 *at = x + (begin + k) * 2 * x_chunk + j * 32;
                u32 b[2] = {at[0], at[x_chunk]};
                mma<TYPE>(acc[j], fragment[k], b);
            }
}

template <int TYPE, int NT> DEVICE void linear_few(const cuda_linear_args &a)
{
    enum { AT_ONCE = NT > 2 ? 8 : 32 }; /* groups whose sums wait in shared memory */
    __shared__ float parts[AT_ONCE][NT][8][16];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x * 16;
    int k16 = a.w.columns / 16, n_groups = (k16 + KG16 - 1) / KG16;
    const u32 *w = (const u32 *)(a.w.data + weight_at(a.w.columns, first, 0)) + lane;
    float low[NT], high[NT]; /* this thread's outputs: m = thread % 8, n = thread / 8 + 32 i */
    enum { PER = (NT * 64 + 255) / 256 };
#pragma unroll
    for (int i = 0; i < PER; i++)
        low[i] = high[i] = 0;
    for (int done = 0; done < n_groups; done += AT_ONCE) {
        for (int g = warp; g < AT_ONCE && done + g < n_groups; g += 8) {
            float acc[NT][4] = {};
            int begin = (done + g) * KG16;
            few_group<TYPE, NT>(a, w, begin, min(begin + KG16, k16), acc);
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    parts[g][j][lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = acc[j][i];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int m = threadIdx.x % 8, n = threadIdx.x / 8 + 32 * i;
            if (n < NT * 8)
                for (int g = 0; g < AT_ONCE && done + g < n_groups; g++) {
                    low[i] = __fadd_rn(low[i], parts[g][n / 8][n % 8][m]);
                    high[i] = __fadd_rn(high[i], parts[g][n / 8][n % 8][m + 8]);
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int n = threadIdx.x / 8 + 32 * i;
        if (n < NT * 8)
            finish_pair(a, first + threadIdx.x % 8, n, low[i], high[i]);
    }
}

#define LINEAR_FEW(NAME, TYPE, NT)                                                                 \
    KERNEL void __launch_bounds__(256) NAME(cuda_linear_args a)                                    \
    {                                                                                              \
        linear_few<TYPE, NT>(a);                                                                   \
    }

LINEAR_FEW(linear_bf16_8, CUDA_BF16, 1)
LINEAR_FEW(linear_bf16_16, CUDA_BF16, 2)
LINEAR_FEW(linear_bf16_32, CUDA_BF16, 4)
LINEAR_FEW(linear_bf16_64, CUDA_BF16, 8)
LINEAR_FEW(linear_f16_8, CUDA_F16, 1)
LINEAR_FEW(linear_f16_16, CUDA_F16, 2)
LINEAR_FEW(linear_f16_32, CUDA_F16, 4)
LINEAR_FEW(linear_f16_64, CUDA_F16, 8)

/* ---- many rows: a block has a tile of 128 outputs by 128 rows, a warp 32 by 64 of it ---- */

enum { TILE_COLUMNS = 64, TILE_STAGES = 3, TILE_BYTES = 128 * TILE_COLUMNS * 2 };

DEVICE u32 shared_address(const void *p)
{
    return (u32)__cvta_generic_to_shared(p);
}

DEVICE void copy_16(u32 to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void load_matrices(u32 (&r)[4], u32 address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* Columns 64 k of both factors into shared memory; those beyond the last 16 are not loaded. */
DEVICE void load_tile(const cuda_linear_args &a, u32 to, int tile_m, int tile_n, int k)
{
    int chunks = min(a.w.columns / 8 - k * 8, 8);
    const uint16_t *w = a.w.data + weight_at(a.w.columns, tile_m * 128, k * 64);
    for (int i = threadIdx.x; i < chunks * 128; i += 256) {
        copy_16(to + i * 16, w + i * 8);
        const uint16_t *x = a.x.data + ((int64_t)(k * 8 + i / 128) * a.x.rows + tile_n * 128) * 8;
        copy_16(to + TILE_BYTES + i * 16, x + i % 128 * 8);
    }
}

template <int TYPE>
DEVICE void multiply_16(u32 at, int c, int m, int n, float (&acc)[2][8][4])
{
    int lane = threadIdx.x % 32;
    u32 w[2][4], x[4][4];
#pragma unroll
    for (int i = 0; i < 2; i++) /* matrices: rows 0-7 and 8-15 of columns 0-7, then of 8-15 */
        load_matrices(w[i], at + ((c + lane / 16) * 128 + m + 16 * i + lane % 16) * 16);
#pragma unroll
    for (int j = 0; j < 4; j++) /* columns 0-7 and 8-15 of rows 0-7, then of rows 8-15 */
        load_matrices(x[j], at + TILE_BYTES + ((c + lane / 8 % 2) * 128 + n + 16 * j +
                                               lane / 16 * 8 + lane % 8) * 16);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 b[2] = {x[j / 2][j % 2 * 2], x[j / 2][j % 2 * 2 + 1]};
            mma<TYPE>(acc[i][j], w[i], b);
        }
}

template <int TYPE> DEVICE void linear_many(const cuda_linear_args &a)
{
    extern __shared__ __align__(128) char shared[];
    u32 base = shared_address(shared);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp / 2 * 32, n = warp % 2 * 64;
    int k16 = a.w.columns / 16, n_tiles = (k16 + 3) / 4;
    float acc[2][8][4] = {}, sum[2][8][4] = {};
    for (int k = 0; k < TILE_STAGES - 1; k++) {
        if (k < n_tiles)
            load_tile(a, base + k * 2 * TILE_BYTES, blockIdx.x, blockIdx.y, k);
        asm volatile("cp.async.commit_group;");
    }
    for (int k = 0; k < n_tiles; k++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(TILE_STAGES - 2));
        __syncthreads();
        int next = k + TILE_STAGES - 1;
        if (next < n_tiles)
            load_tile(a, base + next % TILE_STAGES * 2 * TILE_BYTES, blockIdx.x, blockIdx.y, next);
        asm volatile("cp.async.commit_group;");
        int steps = min(k16 - k * 4, 4);
        for (int s = 0; s < steps; s++)
            multiply_16<TYPE>(base + k % TILE_STAGES * 2 * TILE_BYTES, 2 * s, m, n, acc);
        if ((k * 4 + steps) % KG16 == 0 || k + 1 == n_tiles)
#pragma unroll
            for (int i = 0; i < 64; i++) {
                float *s = &sum[0][0][0] + i, *c = &acc[0][0][0] + i;
                *s = __fadd_rn(*s, *c);
                *c = 0;
            }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int out = blockIdx.x * 128 + m + 16 * i + lane / 4;
                int row = blockIdx.y * 128 + n + 8 * j + lane % 4 * 2 + c;
                if (out < a.w.rows)
                    finish_pair(a, out, row, sum[i][j][c], sum[i][j][c + 2]);
            }
}

KERNEL void __launch_bounds__(256) linear_bf16_many(cuda_linear_args a)
{
    linear_many<CUDA_BF16>(a);
}

KERNEL void __launch_bounds__(256) linear_f16_many(cuda_linear_args a)
{
    linear_many<CUDA_F16>(a);
}
