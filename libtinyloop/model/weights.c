#include "model/weights.h"

#include "base/memory.h"

#include <stdarg.h>
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

static tl_status check_tensor(const file_tensor *tensor, int64_t rows, int64_t columns)
{
    int n_dims = columns > 0 ? 2 : 1;
    if (tensor->n_dims != n_dims || tensor->shape[0] != rows || tensor->shape[1] != columns)
        return tl_fail(TL_STATUS_FORMAT,
                       "tensor %s has %d dimensions [%lld, %lld, ...]; the "
                       "configuration asks for [%lld%s%.0lld]",
                       tensor->name, tensor->n_dims, (long long)tensor->shape[0],
                       (long long)tensor->shape[1], (long long)rows, columns > 0 ? ", " : "",
                       (long long)columns);
    if (tensor->dtype == DTYPE_I8)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "tensor %s is int8, which this version does not run "
                       "(float32, float16, bfloat16)",
                       tensor->name);
    return TL_STATUS_OK;
}

/* columns = 0: a vector. NULL, with binder->status set, if it is not there or not right. */
static const file_tensor *bind(tensor_binder *b, int64_t rows, int64_t columns, const char *format,
                               ...)
{
    if (b->status != TL_STATUS_OK)
        return NULL;
    char name[96];
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    file_tensor wanted = {.name = name};
    const file_tensor *key = &wanted;
    const file_tensor **found =
        bsearch(&key, b->by_name, b->file->n_tensors, sizeof *b->by_name, compare_names);
    if (found == NULL) {
        b->status = tl_fail(TL_STATUS_FORMAT, "the file lacks tensor %s", name);
        return NULL;
    }
    b->status = check_tensor(*found, rows, columns);
    b->bound[found - b->by_name] = true;
    return *found;
}

static void bind_layer(tensor_binder *b, layer_weights *layer, const model_config *c, int64_t n)
{
    long long i = n;
    int64_t q_width = c->n_heads * c->head_dim, kv_width = c->n_kv_heads * c->head_dim;
    layer->attn_norm = bind(b, c->hidden_size, 0, "layers.%lld.attn_norm.weight", i);
    layer->q = bind(b, q_width, c->hidden_size, "layers.%lld.attn.q.weight", i);
    layer->k = bind(b, kv_width, c->hidden_size, "layers.%lld.attn.k.weight", i);
    layer->v = bind(b, kv_width, c->hidden_size, "layers.%lld.attn.v.weight", i);
    layer->o = bind(b, c->hidden_size, q_width, "layers.%lld.attn.o.weight", i);
    layer->mlp_norm = bind(b, c->hidden_size, 0, "layers.%lld.mlp_norm.weight", i);
    layer->gate = bind(b, c->ff_size, c->hidden_size, "layers.%lld.mlp.gate.weight", i);
    layer->up = bind(b, c->ff_size, c->hidden_size, "layers.%lld.mlp.up.weight", i);
    layer->down = bind(b, c->hidden_size, c->ff_size, "layers.%lld.mlp.down.weight", i);
}

static tl_status bind_all(model_weights *weights, tensor_binder *b)
{
    const model_config *c = &b->file->config;
    weights->embed = bind(b, c->vocab_size, c->hidden_size, "embed.weight");
    weights->head =
        c->tied_head ? weights->embed : bind(b, c->vocab_size, c->hidden_size, "head.weight");
    weights->final_norm = bind(b, c->hidden_size, 0, "final_norm.weight");
    for (int64_t s = 0; s < c->n_stages; s++)
        if (config_stage_at(c, s).end_norm)
            weights->stage_norm[s] =
                bind(b, c->hidden_size, 0, "stages.%lld.norm.weight", (long long)s);
    for (int64_t n = 0; n < config_n_layers(c) && b->status == TL_STATUS_OK; n++)
        bind_layer(b, &weights->layers[n], c, n);
    TL_TRY(b->status);
    for (size_t i = 0; i < b->file->n_tensors; i++) {
        const file_tensor *tensor = b->by_name[i];
        if (!b->bound[i])
            return tl_fail(TL_STATUS_FORMAT,
                           "the file has tensor %s, which its configuration "
                           "does not call for",
                           tensor->name);
        weights->n_parameters += (int64_t)(tensor->size / dtype_size(tensor->dtype));
    }
    return TL_STATUS_OK;
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
