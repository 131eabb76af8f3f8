#include "backend/cpu/cpu.h"

#include "base/memory.h"

#include <string.h>

/* ---- model ---- */

static void model_destroy(backend_model *model)
{
    if (model == NULL)
        return;
    for (size_t i = 0; model->layers != NULL && i < model->n_layers; i++) {
        cpu_layer *layer = &model->layers[i];
        mem_free(layer->attn_norm);
        mem_free(layer->mlp_norm);
        cpu_matrix_clear(&layer->qkv);
        cpu_matrix_clear(&layer->o);
        cpu_matrix_clear(&layer->gate);
        cpu_matrix_clear(&layer->up);
        cpu_matrix_clear(&layer->down);
    }
    mem_free(model->layers);
    cpu_matrix_clear(&model->embed);
    cpu_matrix_clear(&model->head);
    mem_free(model->final_norm);
    for (int s = 0; s < CONFIG_MAX_STAGES; s++)
        mem_free(model->stage_norm[s]);
    mem_free(model->rope_frequencies);
    thread_pool_destroy(model->threads);
    mem_free(model);
}

static tl_status pack(backend_model *model, cpu_matrix *matrix, const file_tensor *const *tensors,
                      int n_tensors)
{
    TL_TRY(cpu_matrix_pack(matrix, tensors, n_tensors, model->threads));
    model->weight_bytes += cpu_matrix_bytes(matrix);
    return TL_STATUS_OK;
}

static tl_status pack_vector(backend_model *model, float **out, const file_tensor *tensor)
{
    TL_TRY(cpu_vector(out, tensor));
    model->weight_bytes += (size_t)tensor->shape[0] * sizeof **out;
    return TL_STATUS_OK;
}

static tl_status pack_layer(backend_model *model, cpu_layer *layer, const layer_weights *weights)
{
    const file_tensor *qkv[] = {weights->q, weights->k, weights->v};
    TL_TRY(pack_vector(model, &layer->attn_norm, weights->attn_norm));
    TL_TRY(pack_vector(model, &layer->mlp_norm, weights->mlp_norm));
    TL_TRY(pack(model, &layer->qkv, qkv, 3));
    TL_TRY(pack(model, &layer->o, &weights->o, 1));
    TL_TRY(pack(model, &layer->gate, &weights->gate, 1));
    TL_TRY(pack(model, &layer->up, &weights->up, 1));
    return pack(model, &layer->down, &weights->down, 1);
}

static tl_status pack_all(backend_model *model, const model_weights *weights)
{
    model->layers = mem_zeroed(model->n_layers, sizeof *model->layers);
    if (model->layers == NULL)
        return tl_fail_nomem("the layer table", model->n_layers * sizeof *model->layers);
    for (size_t i = 0; i < model->n_layers; i++)
        TL_TRY(pack_layer(model, &model->layers[i], &weights->layers[i]));
    TL_TRY(pack(model, &model->embed, &weights->embed, 1));
    if (weights->head != weights->embed)
        TL_TRY(pack(model, &model->head, &weights->head, 1));
    for (int s = 0; s < CONFIG_MAX_STAGES; s++)
        if (weights->stage_norm[s] != NULL)
            TL_TRY(pack_vector(model, &model->stage_norm[s], weights->stage_norm[s]));
    return pack_vector(model, &model->final_norm, weights->final_norm);
}

static tl_status model_create(backend_model **out, const model_file *file,
                              const model_weights *weights, const backend_options *options)
{
    *out = NULL;
    const model_config *c = &file->config;
    backend_model *model = mem_zeroed(1, sizeof *model);
    if (model == NULL)
        return tl_fail_nomem("a model", sizeof *model);
    model->hidden = (size_t)c->hidden_size;
    model->n_heads = (size_t)c->n_heads;
    model->n_kv_heads = (size_t)c->n_kv_heads;
    model->head_dim = (size_t)c->head_dim;
    model->ff = (size_t)c->ff_size;
    model->vocab = (size_t)c->vocab_size;
    model->n_layers = (size_t)config_n_layers(c);
    model->norm_eps = (float)c->norm_eps;
    bool fp32 = options->kv_mode == TL_KV_MODE_FP32;
    model->layout =
        kv_layout_make(options->kv_mode, fp32 ? 4 : 2, model->n_kv_heads, model->head_dim);
    tl_status status = cpu_kernels_choose(&model->kernels);
    if (status == TL_STATUS_OK)
        status = thread_pool_create(&model->threads, options->threads);
    if (status == TL_STATUS_OK)
        status = pack_all(model, weights);
    if (status == TL_STATUS_OK)
        status = cpu_rope_frequencies(&model->rope_frequencies, c);
    if (status != TL_STATUS_OK) {
        model_destroy(model);
        return status;
    }
    *out = model;
    return TL_STATUS_OK;
}

static kv_layout layout_of(const backend_model *model)
{
    return model->layout;
}

static size_t weight_bytes(const backend_model *model)
{
    return model->weight_bytes;
}

static int n_lanes(const backend_model *model)
{
    return thread_pool_size(model->threads);
}

static void run(backend_model *model, lane_function walk, void *arg)
{
    thread_pool_run(model->threads, walk, arg);
}

/* ---- KV memory ---- */

static void *kv_allocate(void *context, size_t bytes)
{
    (void)context;
    return mem_aligned(1, bytes);
}

static void kv_release(void *context, void *data)
{
    (void)context;
    mem_free(data);
}

static void kv_copy(void *context, void *to, const void *from, size_t bytes)
{
    (void)context;
    memcpy(to, from, bytes);
}

static void kv_fill(void *context, void *data, int byte, size_t bytes)
{
    (void)context;
    memset(data, byte, bytes);
}

static kv_memory memory_of(backend_model *model)
{
    (void)model;
    return (kv_memory){kv_allocate, kv_release, kv_copy, kv_fill, NULL};
}

/* ---- pass ---- */

static void pass_destroy(backend_pass *pass)
{
    if (pass == NULL)
        return;
    mem_free(pass->x);
    mem_free(pass->e);
    mem_free(pass->normed);
    mem_free(pass->own);
    mem_free(pass->qkv);
    mem_free(pass->mixed);
    mem_free(pass->gate);
    mem_free(pass->up);
    mem_free(pass->rope);
    mem_free(pass);
}

static tl_status pass_create(backend_pass **out, backend_model *model, size_t max_rows)
{
    *out = NULL;
    backend_pass *pass = mem_zeroed(1, sizeof *pass);
    if (pass == NULL)
        return tl_fail_nomem("a forward pass", sizeof *pass);
    pass->model = model;
    pass->max_rows = max_rows;
    size_t q_width = model->n_heads * model->head_dim;
    size_t qkv_width = q_width + 2 * model->n_kv_heads * model->head_dim;
    pass->x = mem_aligned(max_rows, model->hidden * sizeof(float));
    pass->e = mem_aligned(max_rows, model->hidden * sizeof(float));
    pass->normed = mem_aligned(max_rows, model->hidden * sizeof(float));
    pass->own_rows = max_rows < CPU_OWN_ROWS ? max_rows : CPU_OWN_ROWS;
    size_t own_rows = (size_t)thread_pool_size(model->threads) * pass->own_rows;
    pass->own = mem_aligned(own_rows, model->hidden * sizeof(float));
    pass->qkv = mem_aligned(max_rows, qkv_width * sizeof(float));
    pass->mixed = mem_aligned(max_rows, q_width * sizeof(float));
    pass->gate = mem_aligned(max_rows, model->ff * sizeof(float));
    pass->up = mem_aligned(max_rows, model->ff * sizeof(float));
    pass->rope = mem_aligned(max_rows, model->head_dim * sizeof(float));
    if (!pass->x || !pass->e || !pass->normed || !pass->own || !pass->qkv || !pass->mixed ||
        !pass->gate || !pass->up || !pass->rope) {
        pass_destroy(pass);
        size_t row = 3 * model->hidden + qkv_width + q_width + 2 * model->ff + model->head_dim;
        return tl_fail_nomem("a forward pass",
                             (max_rows * row + own_rows * model->hidden) * sizeof(float));
    }
    *out = pass;
    return TL_STATUS_OK;
}

static void pass_begin(backend_pass *pass, const batch_span *spans, size_t n_spans)
{
    pass->spans = spans;
    pass->n_spans = n_spans;
    pass->n_rows = n_spans > 0 ? spans[n_spans - 1].first_row + spans[n_spans - 1].n_rows : 0;
}

const backend_ops cpu_backend = {
    .name = "cpu",
    .device = TL_DEVICE_CPU,
    .model_create = model_create,
    .model_destroy = model_destroy,
    .kv_memory = memory_of,
    .kv_layout = layout_of,
    .weight_bytes = weight_bytes,
    .n_lanes = n_lanes,
    .pass_create = pass_create,
    .pass_destroy = pass_destroy,
    .pass_begin = pass_begin,
    .run = run,
    .step =
        {
            [STEP_EMBED] = cpu_step_embed,
            [STEP_INIT] = cpu_step_init,
            [STEP_INJECT] = cpu_step_inject,
            [STEP_ATTENTION] = cpu_step_attention,
            [STEP_MLP] = cpu_step_mlp,
            [STEP_NORM] = cpu_step_norm,
        },
    .read_rows = cpu_read_rows,
    .write_rows = cpu_write_rows,
    .head = cpu_head,
};
