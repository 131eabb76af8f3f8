/* The tensors that a configuration calls for, found in a file: all of them, in the right shape,
 * and no others. */
#ifndef TL_MODEL_WEIGHTS_H
#define TL_MODEL_WEIGHTS_H

#include "model/file.h"

#define WEIGHT_GROUP 128 /* columns that share a scale of an int8 weight */

/* A tensor of two dimensions; `scales` only where it is int8: [rows, 1] or
 * [rows, ceil(columns / WEIGHT_GROUP)]. */
typedef struct weight_matrix {
    const file_tensor *values;
    const file_tensor *scales;
} weight_matrix;

/* Shapes as docs/format.md has them; what the configuration does not call for is NULL. */
typedef struct layer_weights {
    const file_tensor *attn_norm, *attn_out_norm; /* [hidden] */
    weight_matrix q, k, v, o;
    const file_tensor *q_bias, *k_bias, *v_bias, *o_bias;
    const file_tensor *q_norm, *k_norm;
    weight_matrix out_gate;    /* [q_width, hidden] */
    weight_matrix value_gate;  /* [n_kv_heads, value_embed_channels]; not in every layer */
    weight_matrix value_embed; /* [vocab, kv_width] */
    weight_matrix loop_gate;   /* [n_heads, head_dim] */
    const file_tensor *loop_gate_bias;
    const file_tensor *mlp_norm, *mlp_out_norm;
    weight_matrix gate, up, down;
    const file_tensor *gate_bias, *up_bias, *down_bias;
} layer_weights;

typedef struct model_weights {
    weight_matrix embed; /* [vocab, hidden] */
    weight_matrix head;  /* [vocab, hidden]; the embedding if tied */
    const file_tensor *final_norm;
    const file_tensor *stage_norm[CONFIG_MAX_STAGES];
    const file_tensor *after_last_norm;
    const file_tensor *state_init;
    const file_tensor *prelude_norm;
    weight_matrix inject;               /* [hidden, 2 hidden] */
    const file_tensor *a_log, *dt_bias; /* [hidden] */
    weight_matrix inject_b;             /* [hidden, hidden] */
    weight_matrix state_out;            /* [hidden, hidden] */
    weight_matrix exit;                 /* [1, hidden] */
    const file_tensor *exit_bias;       /* [1] */
    layer_weights *layers;              /* [n_layers] */
    int64_t n_parameters;
} model_weights;

/* Borrows the file's tensors. Errors: FORMAT with the tensor's name. */
tl_status model_weights_bind(model_weights *weights, const model_file *file);
void model_weights_clear(model_weights *weights);

#endif
