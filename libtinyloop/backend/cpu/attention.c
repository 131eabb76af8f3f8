/* The attention block: x += o(attention(rotate(q), K, V)), with K and V read back from the KV
 * blocks as they are stored there, those of this pass included. */
#include "backend/cpu/cpu.h"

#include <math.h>

/* Rotates pairs (i, i + head_dim / 2) of one head and scales it. */
static void rotate(float *head, const float *cos_sin, size_t head_dim, float scale)
{
    size_t half = head_dim / 2;
    for (size_t i = 0; i < half; i++) {
        float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
        float a = head[i], b = head[i + half];
        head[i] = (a * c - b * s) * scale;
        head[i + half] = (b * c + a * s) * scale;
    }
}

typedef struct attention_row {
    float *qkv;           /* of the row */
    const float *cos_sin; /* of its position */
    char *block;          /* where its K and V go */
    size_t slot;          /* position in the block */
} attention_row;

static void store_head(const backend_model *model, const plan_step *step, const attention_row *row,
                       size_t head)
{
    const kv_layout *layout = &model->layout;
    size_t hd = model->head_dim, element = layout->element_size;
    float *k = row->qkv + (model->n_heads + head) * hd;
    const float *v = k + model->n_kv_heads * hd;
    rotate(k, row->cos_sin, hd, 1.0f);
    char *to_k = row->block + kv_k_offset(layout, (size_t)step->kv_layer, head);
    char *to_v = row->block + kv_v_offset(layout, (size_t)step->kv_layer, head);
    model->kernels->store_kv(to_k + row->slot * element, k, hd, KV_BLOCK, layout);
    model->kernels->store_kv(to_v + row->slot * layout->v_stride * element, v, hd, 1, layout);
}

/* Rotates q and k and stores k and v, for (row, head) pairs [begin, end) of one span. */
static void rotate_pairs(backend_pass *pass, const plan_step *step, int plane,
                         const batch_span *span, size_t begin, size_t end)
{
    const backend_model *model = pass->model;
    size_t hd = model->head_dim, heads = model->n_heads + model->n_kv_heads;
    size_t qkv_width = (model->n_heads + 2 * model->n_kv_heads) * hd;
    float scale = 1.0f / sqrtf((float)hd);
    for (size_t i = begin; i < end; i++) {
        size_t row = i / heads, head = i % heads;
        size_t position = (size_t)span->first_position + row - span->first_row;
        attention_row at = {
            .qkv = pass->qkv + row * qkv_width,
            .cos_sin = pass->rope + row * hd,
            .block = span->tables[(size_t)plane * span->table_stride + position / KV_BLOCK],
            .slot = position % KV_BLOCK,
        };
        if (head < model->n_heads)
            rotate(at.qkv + head * hd, at.cos_sin, hd, scale);
        else
            store_head(model, step, &at, head - model->n_heads);
    }
}

static void rotate_and_store(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    const backend_model *model = pass->model;
    size_t begin, end, heads = model->n_heads + model->n_kv_heads;
    while (lane_next(self, pass->n_rows * heads, heads, &begin, &end)) {
        for (size_t s = 0; s < pass->n_spans; s++) {
            const batch_span *span = &pass->spans[s];
            size_t low = span->first_row * heads, high = low + span->n_rows * heads;
            size_t from = begin > low ? begin : low, to = end < high ? end : high;
            if (from < to)
                rotate_pairs(pass, step, plane, span, from, to);
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

static size_t tiles_of(const batch_span *span, size_t group)
{
    return (span->n_rows * group + CPU_ATTEND_QUERIES - 1) / CPU_ATTEND_QUERIES;
}

/* Tile `tile` of a span, counted through its KV heads. */
static void attend_nth(backend_pass *pass, const plan_step *step, int plane, const batch_span *span,
                       size_t tile)
{
    size_t kv_heads = pass->model->n_kv_heads, group = pass->model->n_heads / kv_heads;
    size_t first = tile / kv_heads * CPU_ATTEND_QUERIES, left = span->n_rows * group - first;
    attend_tile(pass, step, plane, span, tile % kv_heads, first,
                left < CPU_ATTEND_QUERIES ? left : CPU_ATTEND_QUERIES);
}

static void attend_all(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    const backend_model *model = pass->model;
    size_t group = model->n_heads / model->n_kv_heads, n_tiles = 0, begin, end;
    for (size_t s = 0; s < pass->n_spans; s++)
        n_tiles += tiles_of(&pass->spans[s], group) * model->n_kv_heads;
    while (lane_next(self, n_tiles, 1, &begin, &end)) {
        size_t low = 0;
        for (size_t s = 0; s < pass->n_spans && low < end; s++) {
            const batch_span *span = &pass->spans[s];
            size_t high = low + tiles_of(span, group) * model->n_kv_heads;
            for (size_t t = begin > low ? begin : low; t < end && t < high; t++)
                attend_nth(pass, step, plane, span, t - low);
            low = high;
        }
    }
}

void cpu_step_attention(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    const cpu_layer *layer = &pass->model->layers[step->layer];
    cpu_norm_rows(pass, pass->normed, layer->attn_norm, pass->n_rows, self);
    cpu_linear(pass, &layer->qkv, pass->normed, pass->qkv, false, pass->n_rows, self);
    rotate_and_store(pass, step, plane, self);
    attend_all(pass, step, plane, self);
    cpu_linear(pass, &layer->o, pass->mixed, pass->x, true, pass->n_rows, self);
}
