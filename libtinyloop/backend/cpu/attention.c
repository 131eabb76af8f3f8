/* The attention block: x += o(attention(rotate(q), K, V)), with K and V read back from the KV
 * blocks as they are stored there, those of this pass included. */
#include "backend/cpu/cpu.h"

#include <math.h>

/* Rotates pairs (i, i + head_dim / 2) of one head and scales it. */
static void rotate(float *head, const float *cos_sin, size_t head_dim, float scale)
{
    size_t half = head_dim / 2;
    for (size_t i = 0; i < half; i++) {
        float c = cos_sin[i], s = cos_sin[half + i];
        float a = head[i], b = head[i + half];
        head[i] = (a * c - b * s) * scale;
        head[i + half] = (b * c + a * s) * scale;
    }
}

/* Rotates a row's queries and key of one KV head, and stores key and value. */
static void rotate_and_store(backend_pass *pass, const plan_step *step, int plane,
                             const batch_span *span, size_t row, size_t kv_head)
{
    const backend_model *model = pass->model;
    const kv_layout *layout = &model->layout;
    size_t hd = model->head_dim, group = model->n_heads / model->n_kv_heads;
    size_t position = (size_t)span->first_position + row - span->first_row;
    size_t slot = position % KV_BLOCK, element = layout->element_size;
    char *block = span->tables[(size_t)plane * span->table_stride + position / KV_BLOCK];
    const float *cos_sin = pass->rope + row * hd;
    float *qkv = pass->qkv + row * (model->n_heads + 2 * model->n_kv_heads) * hd;
    for (size_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        rotate(qkv + head * hd, cos_sin, hd, 1.0f / sqrtf((float)hd));
    float *k = qkv + (model->n_heads + kv_head) * hd;
    const float *v = k + model->n_kv_heads * hd;
    rotate(k, cos_sin, hd, 1.0f);
    char *to_k = block + kv_k_offset(layout, (size_t)step->kv_layer, kv_head);
    char *to_v = block + kv_v_offset(layout, (size_t)step->kv_layer, kv_head);
    model->kernels->store_kv(to_k + slot * element, k, hd, KV_BLOCK, layout);
    model->kernels->store_kv(to_v + slot * layout->v_stride * element, v, hd, 1, layout);
}

/* A phase: rotate_and_store of all rows and KV heads. */
static void rotate_and_store_all(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    size_t begin, end, heads = pass->model->n_kv_heads;
    while (lane_next(self, pass->n_rows * heads, heads, &begin, &end)) {
        for (size_t s = 0; s < pass->n_spans; s++) {
            const batch_span *span = &pass->spans[s];
            size_t low = span->first_row * heads, high = low + span->n_rows * heads;
            size_t from = begin > low ? begin : low, to = end < high ? end : high;
            for (size_t i = from; i < to; i++)
                rotate_and_store(pass, step, plane, span, i / heads, i % heads);
        }
    }
}

/* Queries [first, first + n) of a span over one KV head; query i is row i / group, head i % group
 * of the head's group. */
static void attend_tile(backend_pass *pass, const plan_step *step, int plane,
                        const batch_span *span, size_t kv_head, size_t first, size_t n)
{
    const backend_model *model = pass->model;
    size_t hd = model->head_dim, group = model->n_heads / model->n_kv_heads;
    size_t q_width = model->n_heads * hd;
    size_t qkv_width = q_width + 2 * model->n_kv_heads * hd;
    attend_query queries[CPU_ATTEND_QUERIES];
    for (size_t i = 0; i < n; i++) {
        size_t row = span->first_row + (first + i) / group;
        size_t head = kv_head * group + (first + i) % group;
        queries[i] = (attend_query){
            .q = pass->qkv + row * qkv_width + head * hd,
            .out = pass->mixed + row * q_width + head * hd,
            .position = span->first_position + (int64_t)((first + i) / group),
        };
    }
    attend_args args = {
        .queries = queries,
        .n_queries = n,
        .window = span->window,
        .blocks = span->tables + (size_t)plane * span->table_stride,
        .k_offset = kv_k_offset(&model->layout, (size_t)step->kv_layer, kv_head),
        .v_offset = kv_v_offset(&model->layout, (size_t)step->kv_layer, kv_head),
        .layout = &model->layout,
    };
    model->kernels->attend(&args);
}

/* Tiles that the queries of one KV head make. */
static size_t tiles_of(const batch_span *span, size_t group)
{
    return (span->n_rows * group + CPU_ATTEND_QUERIES - 1) / CPU_ATTEND_QUERIES;
}

/* Tile `tile` of a span, counted through its KV heads. A KV head's only tile stores its keys and
 * values itself; where there are several, rotate_and_store_all has been there before. */
static void attend_nth(backend_pass *pass, const plan_step *step, int plane, const batch_span *span,
                       size_t tile, bool one_tile)
{
    size_t kv_heads = pass->model->n_kv_heads, group = pass->model->n_heads / kv_heads;
    size_t first = tile / kv_heads * CPU_ATTEND_QUERIES, left = span->n_rows * group - first;
    if (one_tile)
        for (size_t r = 0; r < span->n_rows; r++)
            rotate_and_store(pass, step, plane, span, span->first_row + r, tile % kv_heads);
    attend_tile(pass, step, plane, span, tile % kv_heads, first,
                left < CPU_ATTEND_QUERIES ? left : CPU_ATTEND_QUERIES);
}

static void attend_all(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    const backend_model *model = pass->model;
    size_t group = model->n_heads / model->n_kv_heads, n_tiles = 0, begin, end;
    bool one_tile = true;
    for (size_t s = 0; s < pass->n_spans; s++) {
        size_t tiles = tiles_of(&pass->spans[s], group);
        n_tiles += tiles * model->n_kv_heads;
        one_tile = one_tile && tiles == 1;
    }
    if (!one_tile)
        rotate_and_store_all(pass, step, plane, self);
    while (lane_next(self, n_tiles, 1, &begin, &end)) {
        size_t low = 0;
        for (size_t s = 0; s < pass->n_spans && low < end; s++) {
            const batch_span *span = &pass->spans[s];
            size_t high = low + tiles_of(span, group) * model->n_kv_heads;
            for (size_t t = begin > low ? begin : low; t < end && t < high; t++)
                attend_nth(pass, step, plane, span, t - low, one_tile);
            low = high;
        }
    }
}

void cpu_step_attention(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    const cpu_layer *layer = &pass->model->layers[step->layer];
    cpu_normed_linear(pass, &layer->qkv, layer->attn_norm, pass->qkv, pass->n_rows, self);
    attend_all(pass, step, plane, self);
    cpu_linear(pass, &layer->o, pass->mixed, pass->x, true, pass->n_rows, self);
}
