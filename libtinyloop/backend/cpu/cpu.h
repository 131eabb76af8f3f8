/* The CPU backend: packed weights, the kernel table of an instruction set, the pass buffers. */
#ifndef TL_CPU_H
#define TL_CPU_H

#include "backend/backend.h"

#include <stdbool.h>

#define CPU_LANES 16 /* float lanes of every kernel, on every instruction set */
/* Output rows that are packed side by side: one row of x reads a panel as one stream of memory, and
 * its sums are enough to keep the adders busy. */
#define CPU_PANEL 64
#define CPU_OWN_ROWS 4 /* up to so many a lane norms for itself, sooner than waiting for others */
#define CPU_KG 128     /* elements of K that share an accumulator (docs/numerics.md) */

/* A linear layer's weight [rows, columns], packed in panels of CPU_PANEL rows. A panel holds its
 * columns in ascending order; bfloat16 in pairs of columns, so that one 32-bit word has two
 * columns of one row: [columns / 2][CPU_PANEL][2] (an odd last column is paired with zeros).
 * float16 and float32: [columns][CPU_PANEL]. Rows beyond `rows` are zero. */
typedef struct cpu_matrix {
    void *data;
    size_t rows;
    size_t columns;
    size_t n_panels;
    size_t panel_bytes;
    tensor_dtype dtype;
} cpu_matrix;

/* One query's part in attention over one KV head. */
typedef struct attend_query {
    const float *q; /* [head_dim], rotated and scaled */
    float *out;     /* [head_dim] */
    int64_t position;
} attend_query;

typedef struct attend_args {
    const attend_query *queries; /* ascending positions */
    size_t n_queries;            /* 1 .. CPU_ATTEND_QUERIES */
    int64_t window;              /* 0: none */
    void *const *blocks;         /* of the plane */
    size_t k_offset;             /* of the layer and KV head, bytes in a block */
    size_t v_offset;
    const kv_layout *layout;
} attend_args;

#define CPU_ATTEND_QUERIES 8

/* The kernels of one instruction set. Every set gives the same bits: the lanes, the order of each
 * sum and the roundings are part of the definition (docs/numerics.md), only the speed differs. */
typedef struct cpu_kernels {
    const char *name;

    /* y[r][o] = sum over columns of w[o][c] x[r][c], for outputs of panels [begin, end); with
     * `add` the sum is added to y. Strides in floats. */
    void (*linear)(const cpu_matrix *w, size_t begin, size_t end, const float *x, size_t x_stride,
                   size_t n_rows, float *y, size_t y_stride, bool add);

    /* out = x / sqrt(mean(x^2) + eps) * weight; out may be x. */
    void (*rms_norm)(float *out, const float *x, const float *weight, size_t n, float eps);

    /* gate = silu(gate) * up */
    void (*silu_mul)(float *gate, const float *up, size_t n);

    void (*attend)(const attend_args *args);

    /* n floats as stored in a KV block, `stride` elements apart. */
    void (*store_kv)(void *to, const float *from, size_t n, size_t stride, const kv_layout *layout);
} cpu_kernels;

extern const cpu_kernels cpu_kernels_portable;
extern const cpu_kernels cpu_kernels_avx2;
extern const cpu_kernels cpu_kernels_avx512;

/* The fastest set that this processor has; TINYLOOP_CPU_ISA = portable, avx2 or avx512 asks for
 * one by name. UNSUPPORTED if the processor lacks it, INVALID for another name. */
tl_status cpu_kernels_choose(const cpu_kernels **out);

/* ---- packing ---- */

/* The rows of up to three tensors with equal columns, one after the other, as one matrix. Tensors
 * of different dtypes are packed as float32. Each lane reads a panel's rows at a time. */
tl_status cpu_matrix_pack(cpu_matrix *matrix, const file_tensor *const *tensors, int n_tensors,
                          thread_pool *threads);
void cpu_matrix_clear(cpu_matrix *matrix);
size_t cpu_matrix_bytes(const cpu_matrix *matrix);
void cpu_matrix_row(const cpu_matrix *matrix, size_t row, float *out); /* [columns] */

/* A vector as float32, the caller's; also on failure, where it may be NULL. */
tl_status cpu_vector(float **out, const file_tensor *tensor);

/* rope.c: radians a position of each pair of channels [head_dim / 2], and a position's row of
 * cosines and sines [2][head_dim / 2], computed in float64 and rounded once. */
tl_status cpu_rope_frequencies(double **out, const model_config *config);
void cpu_rope_row(float *cos_sin, const double *frequencies, size_t pairs, int64_t position);

/* ---- model and pass ---- */

typedef struct cpu_layer {
    float *attn_norm; /* [hidden] */
    float *mlp_norm;  /* [hidden] */
    cpu_matrix qkv;   /* [(n_heads + 2 n_kv_heads) head_dim, hidden]: q, k, v */
    cpu_matrix o;     /* [hidden, n_heads head_dim] */
    cpu_matrix gate;  /* [ff, hidden] */
    cpu_matrix up;    /* [ff, hidden] */
    cpu_matrix down;  /* [hidden, ff] */
} cpu_layer;

struct backend_model {
    const cpu_kernels *kernels;
    thread_pool *threads;
    kv_layout layout;
    size_t hidden, n_heads, n_kv_heads, head_dim, ff, vocab, n_layers;
    float norm_eps;
    cpu_layer *layers; /* [n_layers] */
    cpu_matrix embed;  /* [vocab, hidden] */
    cpu_matrix head;   /* empty if it is the embedding */
    float *final_norm; /* [hidden] */
    float *stage_norm[CONFIG_MAX_STAGES];
    double *rope_frequencies; /* [head_dim / 2] */
    size_t weight_bytes;
};

struct backend_pass {
    backend_model *model;
    size_t max_rows;
    size_t own_rows; /* at most CPU_OWN_ROWS */
    size_t n_rows;
    const batch_span *spans;
    size_t n_spans;
    float *x;      /* [rows][hidden] the residual stream */
    float *e;      /* [rows][hidden] what is injected */
    float *normed; /* [rows][hidden] */
    float *own;    /* [lanes][own_rows][hidden] for each lane by itself */
    float *qkv;    /* [rows][(n_heads + 2 n_kv_heads) head_dim] */
    float *mixed;  /* [rows][n_heads head_dim] attention's output */
    float *gate;   /* [rows][ff] */
    float *up;     /* [rows][ff] */
    float *rope;   /* [rows][cos, sin][head_dim / 2] of the rows' positions */
};

/* steps.c */
void cpu_step_embed(backend_pass *pass, const plan_step *step, int plane, lane *self);
void cpu_step_init(backend_pass *pass, const plan_step *step, int plane, lane *self);
void cpu_step_inject(backend_pass *pass, const plan_step *step, int plane, lane *self);
void cpu_step_mlp(backend_pass *pass, const plan_step *step, int plane, lane *self);
void cpu_step_norm(backend_pass *pass, const plan_step *step, int plane, lane *self);
void cpu_read_rows(backend_pass *pass, size_t first, size_t n, float *out, lane *self);
void cpu_write_rows(backend_pass *pass, size_t n, const float *in, lane *self);
void cpu_head(backend_pass *pass, size_t n, float *logits, lane *self);

/* y = w norm(x) over rows [0, n). */
void cpu_normed_linear(backend_pass *pass, const cpu_matrix *w, const float *norm_weight, float *y,
                       size_t n, lane *self);
/* A phase: y = w x, or y += w x, over rows [0, n_rows). */
void cpu_linear(const backend_pass *pass, const cpu_matrix *w, const float *x, float *y, bool add,
                size_t n_rows, lane *self);

/* attention.c */
void cpu_step_attention(backend_pass *pass, const plan_step *step, int plane, lane *self);

#endif
