#include "model/weights.h"

#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Looks tensors up by name and remembers which were asked for. */
typedef struct tensor_binder {
    const model_file *file;
    const file_tensor **by_name; /* sorted */
    bool *bound;                 /* parallel to by_name */
    tl_status status;            /* of the first failure; later look-ups do nothing */
} tensor_binder;

static int compare_names(const void *a, const void *b)
{
    const file_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static tl_status binder_init(tensor_binder *b, const model_file *file)
{
    b->file = file;
    b->status = TL_STATUS_OK;
    b->by_name = mem_array(file->n_tensors, sizeof *b->by_name);
    b->bound = mem_zeroed(file->n_tensors, sizeof *b->bound);
    if (b->by_name == NULL || b->bound == NULL)
        return tl_fail_nomem("the tensor names", file->n_tensors * sizeof *b->by_name);
    for (size_t i = 0; i < file->n_tensors; i++)
        b->by_name[i] = &file->tensors[i];
    qsort(b->by_name, file->n_tensors, sizeof *b->by_name, compare_names);
    for (size_t i = 1; i < file->n_tensors; i++)
        if (compare_names(&b->by_name[i - 1], &b->by_name[i]) == 0)
            return tl_fail(TL_STATUS_FORMAT, "the file has two tensors %s", b->by_name[i]->name);
    return TL_STATUS_OK;
}

static void binder_clear(tensor_binder *b)
{
    mem_free(b->by_name);
    mem_free(b->bound);
}

static tl_status check_shape(const file_tensor *tensor, int64_t rows, int64_t columns)
{
    int n_dims = columns > 0 ? 2 : 1;
    if (tensor->n_dims == n_dims && tensor->shape[0] == rows && tensor->shape[1] == columns)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_FORMAT,
                   "tensor %s has %d dimensions [%lld, %lld, ...]; the "
                   "configuration asks for [%lld%s%.0lld]",
                   tensor->name, tensor->n_dims, (long long)tensor->shape[0],
                   (long long)tensor->shape[1], (long long)rows, columns > 0 ? ", " : "",
                   (long long)columns);
}

/* NULL if the file has none of that name. */
static const file_tensor *look_up(tensor_binder *b, const char *name)
{
    file_tensor wanted = {.name = name};
    const file_tensor *key = &wanted;
    const file_tensor **found =
        bsearch(&key, b->by_name, b->file->n_tensors, sizeof *b->by_name, compare_names);
    if (found == NULL)
        return NULL;
    b->bound[found - b->by_name] = true;
    return *found;
}

/* NULL, with binder->status set, if it is not there or not right. columns = 0: a vector. */
static const file_tensor *bind_any(tensor_binder *b, const char *name, int64_t rows,
                                   int64_t columns)
{
    if (b->status != TL_STATUS_OK)
        return NULL;
    const file_tensor *tensor = look_up(b, name);
    b->status = tensor != NULL ? check_shape(tensor, rows, columns)
                               : tl_fail(TL_STATUS_FORMAT, "the file lacks tensor %s", name);
    return tensor;
}

static const file_tensor *bind_float(tensor_binder *b, const char *name, int64_t rows,
                                     int64_t columns)
{
    const file_tensor *tensor = bind_any(b, name, rows, columns);
    if (b->status == TL_STATUS_OK && tensor->dtype == DTYPE_I8)
        b->status = tl_fail(TL_STATUS_FORMAT,
                            "tensor %s is int8, which only weights of linear layers and of "
                            "embeddings may be",
                            name);
    return tensor;
}

/* The scales of an int8 weight, X.scale for X.weight. */
static const file_tensor *bind_scales(tensor_binder *b, const char *name, int64_t rows,
                                      int64_t columns)
{
    char scale_name[TENSOR_NAME_SIZE];
    int stem = (int)(strlen(name) - strlen(".weight"));
    snprintf(scale_name, sizeof scale_name, "%.*s.scale", stem, name);
    const file_tensor *scales = look_up(b, scale_name);
    int64_t groups = (columns + WEIGHT_GROUP - 1) / WEIGHT_GROUP;
    if (scales == NULL)
        b->status = tl_fail(TL_STATUS_FORMAT, "tensor %s is int8, but the file lacks its scales %s",
                            name, scale_name);
    else if (scales->dtype != DTYPE_F32)
        b->status = tl_fail(TL_STATUS_FORMAT, "tensor %s is %s; scales are float32", scale_name,
                            dtype_name(scales->dtype));
    else
        b->status =
            check_shape(scales, rows, scales->shape[1] == groups && groups > 1 ? groups : 1);
    return scales;
}

static weight_matrix bind_matrix(tensor_binder *b, const char *name, int64_t rows, int64_t columns)
{
    weight_matrix matrix = {bind_any(b, name, rows, columns), NULL};
    if (b->status == TL_STATUS_OK && matrix.values->dtype == DTYPE_I8)
        matrix.scales = bind_scales(b, name, rows, columns);
    return matrix;
}

/* ---- a layer ---- */

/* Binds tensors whose names begin alike. */
typedef struct name_scope {
    tensor_binder *binder;
    char name[TENSOR_NAME_SIZE];
    size_t prefix; /* length of what they share */
} name_scope;

static const char *name_in(name_scope *scope, const char *rest)
{
    snprintf(scope->name + scope->prefix, sizeof scope->name - scope->prefix, "%s", rest);
    return scope->name;
}

static const file_tensor *vector_if(bool wanted, name_scope *scope, const char *name, int64_t n)
{
    return wanted ? bind_float(scope->binder, name_in(scope, name), n, 0) : NULL;
}

static weight_matrix matrix_if(bool wanted, name_scope *scope, const char *name, int64_t rows,
                               int64_t columns)
{
    if (!wanted)
        return (weight_matrix){NULL, NULL};
    return bind_matrix(scope->binder, name_in(scope, name), rows, columns);
}

static weight_matrix small_matrix(name_scope *scope, const char *name, int64_t rows,
                                  int64_t columns)
{
    return (weight_matrix){bind_float(scope->binder, name_in(scope, name), rows, columns), NULL};
}

static bool layer_is_looped(const model_config *c, int64_t layer)
{
    for (int64_t s = 0; s < c->n_stages; s++) {
        config_stage stage = config_stage_at(c, s);
        if (layer >= stage.first_layer && layer < stage.first_layer + stage.n_layers)
            return stage.looped != 0;
    }
    return false;
}

static void bind_attention(name_scope *scope, layer_weights *layer, const model_config *c,
                           bool looped)
{
    int64_t hidden = c->hidden_size, q_width = c->n_heads * c->head_dim;
    int64_t kv_width = c->n_kv_heads * c->head_dim;
    bool qk_norm = c->qk_norm != QK_NORM_NONE && !c->qk_norm_weightless;
    bool full = c->qk_norm == QK_NORM_FULL;
    layer->q = matrix_if(true, scope, "attn.q.weight", q_width, hidden);
    layer->k = matrix_if(true, scope, "attn.k.weight", kv_width, hidden);
    layer->v = matrix_if(true, scope, "attn.v.weight", kv_width, hidden);
    layer->o = matrix_if(true, scope, "attn.o.weight", hidden, q_width);
    layer->q_bias = vector_if(c->q_bias, scope, "attn.q.bias", q_width);
    layer->k_bias = vector_if(c->k_bias, scope, "attn.k.bias", kv_width);
    layer->v_bias = vector_if(c->v_bias, scope, "attn.v.bias", kv_width);
    layer->o_bias = vector_if(c->o_bias, scope, "attn.o.bias", hidden);
    layer->q_norm = vector_if(qk_norm, scope, "attn.q_norm.weight", full ? q_width : c->head_dim);
    layer->k_norm = vector_if(qk_norm, scope, "attn.k_norm.weight", full ? kv_width : c->head_dim);
    layer->out_gate = matrix_if(c->attn_out_gate, scope, "attn.gate.weight", q_width, hidden);
    if (c->value_embed && look_up(scope->binder, name_in(scope, "attn.value_gate.weight"))) {
        layer->value_gate =
            small_matrix(scope, "attn.value_gate.weight", c->n_kv_heads, c->value_embed_channels);
        layer->value_embed =
            matrix_if(true, scope, "attn.value_embed.weight", c->vocab_size, kv_width);
    }
    if (looped && c->loop_attention == LOOP_ATTENTION_GATED) {
        layer->loop_gate = small_matrix(scope, "attn.loop_gate.weight", c->n_heads, c->head_dim);
        layer->loop_gate_bias = vector_if(true, scope, "attn.loop_gate.bias", c->n_heads);
    }
}

static void bind_mlp(name_scope *scope, layer_weights *layer, const model_config *c)
{
    int64_t hidden = c->hidden_size, ff = c->ff_size;
    bool gated = c->mlp_kind == MLP_GATED;
    layer->gate = matrix_if(gated, scope, "mlp.gate.weight", ff, hidden);
    layer->up = matrix_if(true, scope, "mlp.up.weight", ff, hidden);
    layer->down = matrix_if(true, scope, "mlp.down.weight", hidden, ff);
    layer->gate_bias = vector_if(gated && c->mlp_bias, scope, "mlp.gate.bias", ff);
    layer->up_bias = vector_if(c->mlp_bias, scope, "mlp.up.bias", ff);
    layer->down_bias = vector_if(c->mlp_bias, scope, "mlp.down.bias", hidden);
}

static void bind_layer(tensor_binder *b, layer_weights *layer, const model_config *c, int64_t n)
{
    name_scope scope = {.binder = b};
    int length = snprintf(scope.name, sizeof scope.name, "layers.%lld.", (long long)n);
    scope.prefix = (size_t)length;
    bool in = !c->norm_weightless && c->norm_placement != NORM_POST_BRANCH;
    bool out = !c->norm_weightless && c->norm_placement != NORM_PRE;
    layer->attn_norm = vector_if(in, &scope, "attn_norm.weight", c->hidden_size);
    layer->mlp_norm = vector_if(in, &scope, "mlp_norm.weight", c->hidden_size);
    layer->attn_out_norm = vector_if(out, &scope, "attn_out_norm.weight", c->hidden_size);
    layer->mlp_out_norm = vector_if(out, &scope, "mlp_out_norm.weight", c->hidden_size);
    bind_attention(&scope, layer, c, layer_is_looped(c, n));
    bind_mlp(&scope, layer, c);
}

/* ---- the rest ---- */

static void bind_core(model_weights *weights, tensor_binder *b, const model_config *c)
{
    name_scope scope = {.binder = b};
    int64_t hidden = c->hidden_size;
    bool diagonal = c->inject == INJECT_DIAGONAL, exits = c->exit_mode != EXIT_NONE;
    weights->after_last_norm = vector_if(c->norm_after_last == AFTER_LAST_OWN_NORM, &scope,
                                         "after_last_norm.weight", hidden);
    weights->state_init =
        vector_if(c->state_init == STATE_INIT_TENSOR, &scope, "state_init.weight", hidden);
    weights->prelude_norm = vector_if(c->prelude_norm, &scope, "prelude_norm.weight", hidden);
    weights->inject =
        matrix_if(c->inject == INJECT_CONCAT_LINEAR, &scope, "inject.weight", hidden, 2 * hidden);
    weights->a_log = vector_if(diagonal, &scope, "inject.a_log", hidden);
    weights->dt_bias = vector_if(diagonal, &scope, "inject.dt_bias", hidden);
    weights->inject_b = matrix_if(diagonal, &scope, "inject.b.weight", hidden, hidden);
    weights->state_out = matrix_if(c->state_out_proj, &scope, "state_out.weight", hidden, hidden);
    if (exits)
        weights->exit = small_matrix(&scope, "exit.weight", 1, hidden);
    weights->exit_bias = vector_if(exits, &scope, "exit.bias", 1);
}

static bool is_scale(const char *name)
{
    const char *end = strrchr(name, '.');
    return end != NULL && strcmp(end, ".scale") == 0;
}

static tl_status check_all_bound(model_weights *weights, const tensor_binder *b)
{
    for (size_t i = 0; i < b->file->n_tensors; i++) {
        const file_tensor *tensor = b->by_name[i];
        if (!b->bound[i])
            return tl_fail(TL_STATUS_FORMAT,
                           "the file has tensor %s, which its configuration "
                           "does not call for",
                           tensor->name);
        if (!is_scale(tensor->name))
            weights->n_parameters += (int64_t)(tensor->size / dtype_size(tensor->dtype));
    }
    return TL_STATUS_OK;
}

static tl_status bind_all(model_weights *weights, tensor_binder *b)
{
    const model_config *c = &b->file->config;
    name_scope scope = {.binder = b};
    weights->embed = matrix_if(true, &scope, "embed.weight", c->vocab_size, c->hidden_size);
    weights->head = c->tied_head
                        ? weights->embed
                        : matrix_if(true, &scope, "head.weight", c->vocab_size, c->hidden_size);
    weights->final_norm =
        vector_if(c->final_norm == NORM_WITH_WEIGHT, &scope, "final_norm.weight", c->hidden_size);
    for (int64_t s = 0; s < c->n_stages; s++) {
        char name[TENSOR_NAME_SIZE];
        snprintf(name, sizeof name, "stages.%lld.norm.weight", (long long)s);
        weights->stage_norm[s] = vector_if(config_stage_at(c, s).end_norm == NORM_WITH_WEIGHT,
                                           &scope, name, c->hidden_size);
    }
    bind_core(weights, b, c);
    for (int64_t n = 0; n < config_n_layers(c) && b->status == TL_STATUS_OK; n++)
        bind_layer(b, &weights->layers[n], c, n);
    TL_TRY(b->status);
    return check_all_bound(weights, b);
}

tl_status model_weights_bind(model_weights *weights, const model_file *file)
{
    *weights = (model_weights){0};
    size_t n_layers = (size_t)config_n_layers(&file->config);
    /* each layer needs tensors, so a wild n_layers ends here and not in a huge allocation */
    if (n_layers > file->n_tensors)
        return tl_fail(TL_STATUS_FORMAT,
                       "the configuration has %zu layers, but the file only %zu "
                       "tensors",
                       n_layers, file->n_tensors);
    weights->layers = mem_zeroed(n_layers, sizeof *weights->layers);
    if (weights->layers == NULL)
        return tl_fail_nomem("the layer table", n_layers * sizeof *weights->layers);
    tensor_binder binder = {0};
    tl_status status = binder_init(&binder, file);
    if (status == TL_STATUS_OK)
        status = bind_all(weights, &binder);
    binder_clear(&binder);
    if (status != TL_STATUS_OK)
        model_weights_clear(weights);
    return status;
}

void model_weights_clear(model_weights *weights)
{
    mem_free(weights->layers);
    *weights = (model_weights){0};
}
