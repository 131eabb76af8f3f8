#include "backend/cpu/cpu.h"

#include "base/memory.h"

#include <string.h>

/* ---- model ---- */

static void model_destroy(backend_model *model)
{
    if (model == NULL)
        return;
    cpu_free_weights(model);
    mem_free(model->rope_frequencies);
    thread_pool_destroy(model->threads);
    mem_free(model);
}

static backend_model *new_model(const model_config *c, const backend_options *options)
{
    backend_model *model = mem_zeroed(1, sizeof *model);
    if (model == NULL)
        return NULL;
    model->config = *c;
    model->hidden = (size_t)c->hidden_size;
    model->n_heads = (size_t)c->n_heads;
    model->n_kv_heads = (size_t)c->n_kv_heads;
    model->head_dim = (size_t)c->head_dim;
    model->q_width = model->n_heads * model->head_dim;
    model->kv_width = model->n_kv_heads * model->head_dim;
    model->ff = (size_t)c->ff_size;
    model->vocab = (size_t)c->vocab_size;
    model->n_layers = (size_t)config_n_layers(c);
    model->norm_eps = (float)c->norm_eps;
    model->init_scale = options->init_scale;
    model->init_seed = options->init_seed;
    size_t element = options->kv_mode == TL_KV_MODE_FP32 ? 4 : 2;
    model->layout = kv_layout_make(options->kv_mode, element, model->n_kv_heads, model->head_dim);
    return model;
}

static tl_status model_create(backend_model **out, const model_file *file,
                              const model_weights *weights, const backend_options *options)
{
    *out = NULL;
    backend_model *model = new_model(&file->config, options);
    if (model == NULL)
        return tl_fail_nomem("a model", sizeof *model);
    tl_status status = cpu_kernels_choose(&model->kernels);
    if (status == TL_STATUS_OK)
        status = thread_pool_create(&model->threads, options->threads);
    if (status == TL_STATUS_OK)
        status = cpu_load_weights(model, weights);
    if (status == TL_STATUS_OK)
        status = cpu_rope_frequencies(&model->rope_frequencies, &file->config);
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

/* A buffer of the pass: floats in a row, rows. A width of 0 is a buffer that is not needed. */
typedef struct pass_buffer {
    float **data;
    size_t rows, width;
} pass_buffer;

enum { PASS_BUFFERS = 15 };

static void list_buffers(pass_buffer out[PASS_BUFFERS], backend_pass *pass)
{
    const backend_model *m = pass->model;
    size_t rows = pass->max_rows, own = (size_t)thread_pool_size(m->threads) * pass->own_rows;
    bool joint = m->core.inject.data != NULL, exits = m->core.exit_weight != NULL;
    bool leaves = config_leaves_early(&m->config);
    const pass_buffer buffers[PASS_BUFFERS] = {
        {&pass->x, rows, m->hidden},
        {&pass->e, rows, m->hidden},
        {&pass->normed, rows, m->hidden},
        {&pass->branch, rows, m->hidden},
        {&pass->pair, rows, joint ? 2 * m->hidden : 0},
        {&pass->own, own, m->hidden},
        {&pass->qkv, rows, m->qkv_width},
        {&pass->mixed, rows, m->q_width},
        {&pass->gate, rows, m->ff},
        {&pass->up, rows, m->ff},
        {&pass->rope, rows, m->head_dim},
        {&pass->exit, rows, exits},
        {&pass->left, rows, leaves},
        {&pass->sum, rows, leaves},
        {&pass->chosen, rows, leaves ? m->hidden : 0},
    };
    memcpy(out, buffers, sizeof buffers);
}

static void pass_destroy(backend_pass *pass)
{
    if (pass == NULL)
        return;
    pass_buffer buffers[PASS_BUFFERS];
    list_buffers(buffers, pass);
    for (int i = 0; i < PASS_BUFFERS; i++)
        mem_free(*buffers[i].data);
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
    pass->own_rows = max_rows < CPU_OWN_ROWS ? max_rows : CPU_OWN_ROWS;
    pass_buffer buffers[PASS_BUFFERS];
    list_buffers(buffers, pass);
    for (int i = 0; i < PASS_BUFFERS; i++) {
        const pass_buffer *b = &buffers[i];
        if (b->width > 0 && (*b->data = mem_aligned(b->rows, b->width * sizeof(float))) == NULL) {
            pass_destroy(pass);
            return tl_fail_nomem("a forward pass", b->rows * b->width * sizeof(float));
        }
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
            [STEP_SWAP] = cpu_step_swap,
            [STEP_INJECT] = cpu_step_inject,
            [STEP_ATTENTION] = cpu_step_attention,
            [STEP_MLP] = cpu_step_mlp,
            [STEP_NORM] = cpu_step_norm,
            [STEP_STATE_OUT] = cpu_step_state_out,
            [STEP_EXIT] = cpu_step_exit,
            [STEP_LEAVE] = cpu_step_leave,
        },
    .read_rows = cpu_read_rows,
    .read_exits = cpu_read_exits,
    .write_rows = cpu_write_rows,
    .head = cpu_head,
};
