/* What the kernels are called with; read by C and by CUDA C. Pointers are the device's.
 *
 * 16-bit matrices lie in chunks of 8 columns, because a tensor core reads them so:
 *   an operand (activations) [rows, columns]: [columns / 8][operand rows][8]
 *   a weight [rows, columns]:                 [rows / 128][columns / 8][128][8]
 * Columns are filled up with zeros to a multiple of 16, rows of weights to one of 128. */
#ifndef TL_CUDA_ARGS_H
#define TL_CUDA_ARGS_H

#ifdef __CUDACC_RTC__
typedef unsigned short uint16_t;
typedef int int32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

enum {
    CUDA_BLOCK = 32,        /* positions of a KV block */
    CUDA_CHUNK = 256,       /* positions whose attention is computed from zero, then merged */
    CUDA_KG = 128,          /* columns that share an accumulator in a linear layer */
    CUDA_WEIGHT_ROWS = 128, /* rows of a weight's tile */
    CUDA_FEW = 64,          /* rows that the kernel for few rows takes at most */
    CUDA_TILE_ROWS = 128    /* operands have a multiple of so many rows, whatever they hold */
};

/* 16-bit types of operands and weights. */
enum { CUDA_BF16, CUDA_F16 };

/* One sequence of a batch; see batch_span. */
typedef struct cuda_span {
    int64_t first_position, window, prefix_len;
    int32_t first_row, n_rows;
    void *const *tables; /* plane p's blocks at tables + p * table_stride */
    int64_t table_stride;
} cuda_span;

/* Queries [first, ...) of a span over one KV head: query i is row i / group, head i % group. */
typedef struct cuda_tile {
    int32_t span, first;
} cuda_tile;

typedef struct cuda_batch {
    const cuda_span *spans;
    const int32_t *row_spans; /* [rows] */
    const int32_t *tokens;    /* [rows] */
    const cuda_tile *tiles;
} cuda_batch;

typedef struct cuda_weight {
    const uint16_t *data;
    int32_t rows, columns; /* with what fills them up */
} cuda_weight;

typedef struct cuda_operand {
    uint16_t *data;
    int32_t rows; /* that it has room for */
    int32_t type;
} cuda_operand;

/* ---- load ---- */

enum { PACK_F32, PACK_F16, PACK_BF16, PACK_I8 }; /* as tensor_dtype */

/* Rows [0, n) of a tensor, given in the file's dtype, into rows of a weight: source row r becomes
 * row first + r, or with `step` 16 that of gate and up by turns, 8 rows each. */
typedef struct cuda_pack_args {
    const void *from;
    const float *scales; /* int8: [n][n_scales] */
    uint16_t *to;
    int64_t first;
    int32_t n, columns, to_columns;
    int32_t dtype, type, n_scales, step;
} cuda_pack_args;

typedef struct cuda_widen_args {
    const void *from;
    float *to;
    int64_t n;
    int32_t dtype;
} cuda_widen_args;

/* ---- rows ---- */

/* x = embedding * scale, and cosines and sines of the row's position. */
typedef struct cuda_embed_args {
    cuda_batch batch;
    cuda_weight embed;
    float *x;
    float *rope; /* [rows][2][pairs] */
    const double *frequencies;
    double rope_factor;
    float scale;
    int32_t hidden, pairs, type;
} cuda_embed_args;

/* v = norm(from) with a weight, else from; with `add`, v += to. Written to `to`, to columns
 * [column, column + n) of the operand, or to both; zeros up to `fill`. */
typedef struct cuda_rows_args {
    const float *from;
    const float *weight;
    float *to;
    cuda_operand operand;
    int64_t from_stride, to_stride;
    int32_t n, column, fill, add;
    float eps;
} cuda_rows_args;

/* Elementwise steps over [rows][hidden]. */
enum { POINT_ADD, POINT_DECAY_ADD, POINT_SWAP, POINT_COPY, POINT_BROADCAST, POINT_ZERO };

typedef struct cuda_point_args {
    float *x;
    float *e;
    const float *v; /* [hidden]: the decay, or what is broadcast */
    int64_t n;      /* elements */
    int32_t hidden, kind;
} cuda_point_args;

typedef struct cuda_exit_args {
    const float *x;
    const float *weight;
    float *exit, *left, *sum, *chosen; /* chosen: NULL if no token leaves early */
    float bias, threshold;
    int32_t hidden, first;
} cuda_exit_args;

typedef struct cuda_logits_args {
    float *logits;
    int64_t n;
    double softcap;
    float scale;
} cuda_logits_args;

/* ---- linear ---- */

enum { LINEAR_STORE, LINEAR_ADD, LINEAR_ACTIVATE, LINEAR_ACTIVATE_GATED };

/* y[r][o] = w x, + bias, * scale; to y, added to y, or through the activation to an operand. Where
 * it is gated, w has gate and up by turns, 8 rows each. */
typedef struct cuda_linear_args {
    cuda_weight w;
    cuda_operand x;
    cuda_operand out;
    const float *bias;
    const float *scale;
    float *y;
    int64_t y_stride;
    int32_t n; /* rows of x */
    int32_t m; /* outputs that are written */
    int32_t mode, activation;
    float activation_scale;
} cuda_linear_args;

/* ---- attention ---- */

typedef struct cuda_prepare_args {
    cuda_batch batch;
    float *qkv; /* [rows][stride]: q, k, v, output gate, value gate */
    const float *rope;
    const float *q_norm, *k_norm; /* of each head, or NULL */
    cuda_weight value_embed;      /* data NULL: none */
    const float *loop_gate;       /* [heads][head_dim], or NULL */
    const float *loop_gate_bias;
    uint16_t *q;       /* float16 [rows][heads][padded] */
    float *loop_gates; /* [rows][heads] */
    int64_t stride, layer_offset;
    int32_t n_heads, n_kv_heads, head_dim, padded, pairs;
    int32_t value_gate, plane, interleaved, norm_after_rope, rotate, type;
    float eps;
} cuda_prepare_args;

/* A query's attention over some positions: their largest score, the sum of exp(score - that), and
 * the values weighted so: [padded] floats, then the two. */
typedef struct cuda_attend_args {
    cuda_batch batch;
    const uint16_t *q;
    float *parts; /* [rows][heads][n_slots][padded + 2] */
    int64_t layer_offset, window;
    int32_t n_heads, n_kv_heads, head_dim, padded;
    int32_t plane, n_slots; /* 1: all chunks are merged there; else chunk c goes to slot c */
} cuda_attend_args;

/* Merges what cuda_attend_args left, and applies gates. */
typedef struct cuda_merge_args {
    cuda_batch batch;
    const float *parts, *global_parts; /* global: NULL, or what the loop gate mixes in */
    const float *loop_gates;
    const float *qkv; /* of the output gates */
    cuda_operand out;
    int64_t stride, window;
    int32_t n_heads, head_dim, padded, n_slots, out_gate, fill; /* out_gate: column, 0: none */
} cuda_merge_args;

#endif
