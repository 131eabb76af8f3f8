/* The tensors that a configuration calls for, found in a file: all of them, in the right shape,
 * and no others. */
#ifndef TL_MODEL_WEIGHTS_H
#define TL_MODEL_WEIGHTS_H

#include "model/file.h"

typedef struct layer_weights {
    const file_tensor *attn_norm; /* [hidden] */
    const file_tensor *q;         /* [n_heads * head_dim, hidden] */
    const file_tensor *k;         /* [n_kv_heads * head_dim, hidden] */
    const file_tensor *v;         /* [n_kv_heads * head_dim, hidden] */
    const file_tensor *o;         /* [hidden, n_heads * head_dim] */
    const file_tensor *mlp_norm;  /* [hidden] */
    const file_tensor *gate;      /* [ff, hidden] */
    const file_tensor *up;        /* [ff, hidden] */
    const file_tensor *down;      /* [hidden, ff] */
} layer_weights;

typedef struct model_weights {
    const file_tensor *embed;                         /* [vocab, hidden] */
    const file_tensor *head;                          /* [vocab, hidden]; the embedding if tied */
    const file_tensor *final_norm;                    /* [hidden] */
    const file_tensor *stage_norm[CONFIG_MAX_STAGES]; /* [hidden] or NULL */
    layer_weights *layers;                            /* [n_layers] */
    int64_t n_parameters;
} model_weights;

/* Borrows the file's tensors. Errors: FORMAT with the tensor's name; UNSUPPORTED for int8. */
tl_status model_weights_bind(model_weights *weights, const model_file *file);
void model_weights_clear(model_weights *weights);

#endif
