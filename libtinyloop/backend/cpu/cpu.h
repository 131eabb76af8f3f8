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
 * The others: [columns][CPU_PANEL]. Rows beyond `rows` are zero. */
typedef struct cpu_matrix {
    void *data;
    float *scales; /* int8: [n_panels][ceil(columns / CPU_KG)][CPU_PANEL] */
    size_t rows;
    size_t columns;
    size_t n_panels;
    size_t panel_bytes;
    tensor_dtype dtype;
} cpu_matrix;

/* One query's part in attention over one KV head. */
typedef struct attend_query {
    const float *q;      /* [head_dim], rotated and scaled */
    float *out;          /* [head_dim] */
    int64_t first, last; /* the positions that it sees */
} attend_query;

typedef struct attend_args {
    const attend_query *queries; /* `first` and `last` both ascend */
    size_t n_queries;            /* 1 .. CPU_ATTEND_QUERIES */
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

    /* gate = scale * activation(gate), times `up` unless that is NULL. ACTIVATION_*. */
    void (*activate)(int64_t activation, float scale, float *gate, const float *up, size_t n);

    /* x = x / (1 + exp(-gate)) */
    void (*sigmoid_mul)(float *x, const float *gate, size_t n);

    float (*dot)(const float *a, const float *b, size_t n);

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

/* The rows of several tensors, one after the other, as one matrix of so many columns; tensors with
 * fewer are filled up with zeros. Tensors of different dtypes are packed as float32. A lane reads a
 * panel's rows at a time. */
tl_status cpu_matrix_pack(cpu_matrix *matrix, const weight_matrix *parts, int n_parts,
                          size_t columns, thread_pool *threads);
void cpu_matrix_clear(cpu_matrix *matrix);
size_t cpu_matrix_bytes(const cpu_matrix *matrix);

/* Columns [first, first + n) of a row. */
void cpu_matrix_row(const cpu_matrix *matrix, size_t row, size_t first, size_t n, float *out);

/* All numbers of a tensor as float32, the caller's; also on failure, where it may be NULL. */
tl_status cpu_vector(float **out, const file_tensor *tensor);

/* rope.c: radians a position of each pair of channels [rotary_dim / 2], and a position's row of
 * cosines and sines [2][pairs] times `factor`, computed in float64 and rounded once. */
tl_status cpu_rope_frequencies(double **out, const model_config *config);
void cpu_rope_row(float *cos_sin, const double *frequencies, size_t pairs, int64_t position,
                  double factor);

/* ---- model ---- */

typedef struct cpu_linear {
    cpu_matrix weight;
    float *bias; /* [rows], or NULL */
} cpu_linear;

/* A block's norms, [hidden]; NULL where there is none. */
typedef struct cpu_block_norms {
    float *in;     /* before the block */
    float *branch; /* of what the block adds to x */
    float *sum;    /* of x, after that */
} cpu_block_norms;

typedef struct cpu_layer {
    cpu_block_norms attn_norms, mlp_norms;
    cpu_linear qkv;         /* q, k, v, then where there are: output gate, value gate */
    cpu_linear o;           /* [hidden, q_width] */
    cpu_linear gate;        /* [ff, hidden]; empty in a plain MLP */
    cpu_linear up;          /* [ff, hidden] */
    cpu_linear down;        /* [hidden, ff] */
    float *q_norm, *k_norm; /* [head_dim] or the whole width; NULL: none */
    cpu_matrix value_embed; /* [vocab, kv_width]; empty: none */
    float *loop_gate;       /* [n_heads, head_dim]; NULL: none */
    float *loop_gate_bias;  /* [n_heads] */
} cpu_layer;

/* What happens around the loops. */
typedef struct cpu_core {
    float *prelude_norm; /* [hidden], or NULL */
    float *init;         /* [hidden], the state's initial value, or NULL */
    cpu_matrix inject;   /* [hidden, 2 hidden], or empty */
    cpu_matrix inject_b; /* [hidden, hidden], or empty */
    float *decay, *dt;   /* [hidden], or NULL */
    cpu_matrix state_out;
    float *exit_weight; /* [hidden], or NULL */
    float exit_bias;
} cpu_core;

struct backend_model {
    const cpu_kernels *kernels;
    thread_pool *threads;
    kv_layout layout;
    model_config config;
    size_t hidden, n_heads, n_kv_heads, head_dim, ff, vocab, n_layers;
    size_t q_width, kv_width;
    float norm_eps;
    cpu_layer *layers; /* [n_layers] */
    cpu_core core;
    cpu_matrix embed;                     /* [vocab, hidden] */
    cpu_matrix head;                      /* empty if it is the embedding */
    float *final_norm;                    /* [hidden], or NULL */
    float *stage_norm[CONFIG_MAX_STAGES]; /* [hidden], or NULL */
    float *after_last_norm;               /* [hidden], or NULL */
    double *rope_frequencies;             /* [rotary_dim / 2] */
    double init_scale;
    uint64_t init_seed;
    size_t qkv_width; /* the widest layer's */
    size_t weight_bytes;
};

/* load.c: everything of a model but its threads and kernels. */
tl_status cpu_load_weights(backend_model *model, const model_weights *weights);
void cpu_free_weights(backend_model *model);

/* ---- pass ---- */

struct backend_pass {
    backend_model *model;
    size_t max_rows;
    size_t own_rows; /* at most CPU_OWN_ROWS */
    size_t n_rows;
    const batch_span *spans;
    size_t n_spans;
    float *x;      /* [rows][hidden] the residual stream */
    float *e;      /* [rows][hidden] what is injected, or the other state */
    float *normed; /* [rows][hidden] */
    float *branch; /* [rows][hidden] a block's output before its norm; scratch */
    float *pair;   /* [rows][2][hidden] state and input of a joint injection, or NULL */
    float *own;    /* [lanes][own_rows][hidden] for each lane by itself */
    float *qkv;    /* [rows][width of the layer's qkv] */
    float *mixed;  /* [rows][q_width] attention's output */
    float *gate;   /* [rows][ff] */
    float *up;     /* [rows][ff] */
    float *rope;   /* [rows][cos, sin][rotary_dim / 2] of the rows' positions; has head_dim a row */
    float *exit;   /* [rows] what the exit gate says */
    float *left;   /* [rows] the probability that no earlier loop has taken */
    float *sum;    /* [rows] the others' sum */
    float *chosen; /* [rows][hidden] the state that a row leaves with; NULL: always the last one */
};

/* The rows of a piece [begin, end), span by span:
 *     for (cpu_rows r = cpu_rows_begin(pass, begin, end); cpu_rows_next(&r);)
 *         row r.row is token r.i of r.span */
typedef struct cpu_rows {
    const backend_pass *pass;
    const batch_span *span;
    size_t row, end;
    size_t i;
} cpu_rows;

cpu_rows cpu_rows_begin(const backend_pass *pass, size_t begin, size_t end);
bool cpu_rows_next(cpu_rows *rows);

/* linear.c. Phases of their own but for the first; over rows [0, n). */

/* Outputs of panels [begin, end): y = w x + bias, or y += that. */
void cpu_linear_piece(const backend_pass *pass, const cpu_linear *linear, size_t begin, size_t end,
                      const float *x, size_t n, float *y, bool add);
void cpu_linear_phase(const backend_pass *pass, const cpu_linear *linear, const float *x, size_t n,
                      float *y, bool add, lane *self);

/* The norm of x as a phase's input; NULL: x itself. Of few rows each lane makes its own, in the
 * phase and holding a piece of it: only then is x sure to stay. */
typedef struct cpu_normed {
    const float *weight;
    size_t n;
    const float *rows; /* [n][hidden], or NULL: not made yet */
} cpu_normed;

cpu_normed cpu_normed_begin(backend_pass *pass, const float *weight, size_t n, lane *self);
const float *cpu_normed_rows(backend_pass *pass, cpu_normed *input, const lane *self);

/* out = norm(x), all rows. */
void cpu_norm_phase(backend_pass *pass, float *out, const float *weight, lane *self);

/* The end of a block: x += linear(input), with the block's norms. */
void cpu_add_block(backend_pass *pass, const cpu_linear *linear, const float *input,
                   const cpu_block_norms *norms, lane *self);

/* core.c */
void cpu_step_init(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_swap(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_inject(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_state_out(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_exit(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_leave(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);

/* steps.c */
void cpu_step_embed(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_mlp(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_step_norm(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);
void cpu_read_rows(backend_pass *pass, size_t first, size_t n, float *out, lane *self);
void cpu_read_exits(backend_pass *pass, size_t first, size_t n, float *out, lane *self);
void cpu_write_rows(backend_pass *pass, size_t n, const float *in, lane *self);
void cpu_head(backend_pass *pass, size_t n, float *logits, lane *self);

/* attention.c */
void cpu_step_attention(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self);

#endif
