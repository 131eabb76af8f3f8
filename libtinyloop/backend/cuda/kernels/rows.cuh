/* Row by row and element by element: embedding, norms, injections, exits. */
#pragma once

#include "common.cuh"

KERNEL void __launch_bounds__(256) embed(cuda_embed_args a)
{
    int row = blockIdx.x, token = a.batch.tokens[row];
    for (int i = threadIdx.x; i < a.hidden; i += 256) {
        float v = from_16(a.embed.data[weight_at(a.embed.columns, token, i)], a.type);
        a.x[(int64_t)row * a.hidden + i] = a.scale == 1 ? v : v * a.scale;
    }
    const cuda_span &span = a.batch.spans[a.batch.row_spans[row]];
    double position = (double)(span.first_position + row - span.first_row);
    for (int i = threadIdx.x; i < a.pairs; i += 256) {
        double angle = position * a.frequencies[i];
        float *to = a.rope + (int64_t)row * 2 * a.pairs + i;
        to[0] = (float)(cos(angle) * a.rope_factor);
        to[a.pairs] = (float)(sin(angle) * a.rope_factor);
    }
}

KERNEL void __launch_bounds__(256) rows(cuda_rows_args a)
{
    int row = blockIdx.x;
    const float *from = a.from + row * a.from_stride;
    float factor = 1;
    if (a.weight) {
        float sum = 0;
        for (int i = threadIdx.x; i < a.n; i += 256)
            sum = __fmaf_rn(from[i], from[i], sum);
        factor = 1.0f / sqrtf(__fadd_rn(block_sum(sum) / (float)a.n, a.eps));
    }
    for (int i = threadIdx.x; i < a.n; i += 256) {
        float v = from[i];
        if (a.weight)
            v = __fmul_rn(__fmul_rn(v, factor), a.weight[i]);
        if (a.add)
            v = __fadd_rn(a.to[row * a.to_stride + i], v);
        if (a.to)
            a.to[row * a.to_stride + i] = v;
        if (a.operand.data)
            a.operand.data[operand_at(a.operand, row, a.column + i)] = to_16(v, a.operand.type);
    }
    for (int i = a.column + a.n + threadIdx.x; i < a.fill; i += 256)
        a.operand.data[operand_at(a.operand, row, i)] = 0;
}

KERNEL void __launch_bounds__(256) point(cuda_point_args a)
{
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < a.n; i += gridDim.x * 256ll) {
        float x = a.x[i];
        switch (a.kind) {
        case POINT_ADD:
            x = __fadd_rn(x, a.e[i]);
            break;
        case POINT_DECAY_ADD:
            x = __fadd_rn(__fmul_rn(x, a.v[i % a.hidden]), a.e[i]);
            break;
        case POINT_SWAP: {
            float e = a.e[i];
            a.e[i] = x;
            x = e;
            break;
        }
        case POINT_COPY:
            x = a.e[i];
            break;
        case POINT_BROADCAST:
            x = a.v[i % a.hidden];
            break;
        default:
            x = 0;
        }
        a.x[i] = x;
    }
}

/* A token leaves with the state of the first loop at which the summed probabilities reach the
 * threshold; until then each loop's state replaces the one before. */
KERNEL void __launch_bounds__(256) exits(cuda_exit_args a)
{
    int row = blockIdx.x;
    const float *x = a.x + (int64_t)row * a.hidden;
    float dot = 0;
    for (int i = threadIdx.x; i < a.hidden; i += 256)
        dot = __fmaf_rn(x[i], a.weight[i], dot);
    float logit = __fadd_rn(block_sum(dot), a.bias);
    float left = a.first || !a.chosen ? 1 : a.left[row];
    float before = a.first || !a.chosen ? 0 : a.sum[row];
    __syncthreads();
    if (a.chosen && (a.first || !(before >= a.threshold)))
        for (int i = threadIdx.x; i < a.hidden; i += 256)
            a.chosen[(int64_t)row * a.hidden + i] = x[i];
    if (threadIdx.x > 0)
        return;
    a.exit[row] = logit;
    if (a.chosen) {
        float lambda = sigmoid(logit);
        a.sum[row] = __fadd_rn(before, __fmul_rn(left, lambda));
        a.left[row] = __fmul_rn(left, __fsub_rn(1, lambda));
    }
}

KERNEL void __launch_bounds__(256) finish_logits(cuda_logits_args a)
{
    for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < a.n; i += gridDim.x * 256ll) {
        float v = __fmul_rn(a.logits[i], a.scale);
        a.logits[i] = a.softcap > 0 ? (float)(a.softcap * tanh(v / a.softcap)) : v;
    }
}
