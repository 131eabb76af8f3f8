/* What run/ needs of a backend: a model's weights in the backend's own form, memory for KV blocks,
 * and one function for each kind of step.
 *
 * A pass is one forward pass's rows: the activations of a batch. Row r of a pass is one token of
 * one sequence. A walk runs inside backend_ops.run, on every lane of the backend at once; all
 * lanes call the same steps in the same order; a step is one or more phases of base/threads.h. */
#ifndef TL_BACKEND_H
#define TL_BACKEND_H

#include "base/threads.h"
#include "kv/layout.h"
#include "kv/store.h"
#include "model/plan.h"
#include "model/weights.h"

typedef struct backend_model backend_model;
typedef struct backend_pass backend_pass;

/* One sequence's share of a pass: rows [first_row, first_row + n_rows) are its tokens at positions
 * first_position and up. */
typedef struct batch_span {
    size_t first_row;
    size_t n_rows;
    int64_t first_position;
    int64_t window;          /* 0: none */
    int64_t prefix_len;      /* positions below see all of each other */
    const int32_t *tokens;   /* [n_rows] */
    const float *init_state; /* [n_rows, hidden], or NULL: the model's own */
    void *const *tables;     /* block addresses: plane p's begin at tables + p * table_stride */
    size_t table_stride;
} batch_span;

typedef struct backend_options {
    int threads;
    int32_t kv_mode;   /* TL_KV_MODE_FP16 or TL_KV_MODE_FP32 */
    double init_scale; /* of a random initial state */
    uint64_t init_seed;
} backend_options;

typedef struct backend_ops {
    const char *name;
    int32_t device; /* TL_DEVICE_* */

    /* Packs the weights; the file may be closed afterwards. */
    tl_status (*model_create)(backend_model **out, const model_file *file,
                              const model_weights *weights, const backend_options *options);
    void (*model_destroy)(backend_model *model);
    kv_memory (*kv_memory)(backend_model *model);
    kv_layout (*kv_layout)(const backend_model *model);
    size_t (*weight_bytes)(const backend_model *model);
    int (*n_lanes)(const backend_model *model);

    /* A pass for up to max_rows rows. */
    tl_status (*pass_create)(backend_pass **out, backend_model *model, size_t max_rows);
    void (*pass_destroy)(backend_pass *pass);
    /* The batch of the next walk; borrowed until it ends. */
    void (*pass_begin)(backend_pass *pass, const batch_span *spans, size_t n_spans);

    void (*run)(backend_model *model, lane_function walk, void *arg);
    void (*step[STEP_KINDS])(backend_pass *pass, const plan_step *step, const plan_run *run,
                             lane *self);

    /* x of rows [first, first + n) to or from float32 [n, hidden] of the host. */
    void (*read_rows)(backend_pass *pass, size_t first, size_t n, float *out, lane *self);
    void (*write_rows)(backend_pass *pass, size_t n, const float *in, lane *self);

    /* What the last STEP_EXIT read of rows [first, first + n), before the sigmoid. */
    void (*read_exits)(backend_pass *pass, size_t first, size_t n, float *out, lane *self);

    /* Final norm and head of rows [0, n): float32 [n, vocab] of the host. */
    void (*head)(backend_pass *pass, size_t n, float *logits, lane *self);
} backend_ops;

extern const backend_ops cpu_backend;

#endif
