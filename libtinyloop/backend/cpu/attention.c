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

/* Rotates q and k and stores k and v; lanes share (row, head) pairs. */
static void rotate_and_store(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    const backend_model *model = pass->model;
    size_t hd = model->head_dim, heads = model->n_heads + model->n_kv_heads;
    size_t qkv_width = (model->n_heads + 2 * model->n_kv_heads) * hd;
    float scale = 1.0f / sqrtf((float)hd);
    size_t begin, end;
    lane_share(self, pass->n_rows * heads, &begin, &end);
    for (size_t s = 0; s < pass->n_spans; s++) {
        const batch_span *span = &pass->spans[s];
        size_t low = span->first_row * heads, high = low + span->n_rows * heads;
        for (size_t i = begin > low ? begin : low; i < end && i < high; i++) {
            size_t row = i / heads, head = i % heads;
            int64_t position = span->first_position + (int64_t)(row - span->first_row);
            attention_row at = {
                .qkv = pass->qkv + row * qkv_width,
                .cos_sin = model->rope + (size_t)position * hd,
                .block =
                    span->tables[(size_t)plane * span->table_stride + (size_t)position / KV_BLOCK],
                .slot = (size_t)position % KV_BLOCK,
            };
            if (head < model->n_heads)
                rotate(at.qkv + head * hd, at.cos_sin, hd, scale);
            else
                store_head(model, step, &at, head - model->n_heads);
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

/* Lanes take tiles in turn: later tiles see more positions, so each lane gets short and long. */
static void attend_all(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    const backend_model *model = pass->model;
    size_t group = model->n_heads / model->n_kv_heads, task = 0;
    for (size_t s = 0; s < pass->n_spans; s++) {
        const batch_span *span = &pass->spans[s];
        size_t n_queries = span->n_rows * group;
        for (size_t first = 0; first < n_queries; first += CPU_ATTEND_QUERIES) {
            size_t n =
                n_queries - first < CPU_ATTEND_QUERIES ? n_queries - first : CPU_ATTEND_QUERIES;
            for (size_t head = 0; head < model->n_kv_heads; head++, task++)
                if (task % (size_t)self->count == (size_t)self->index)
                    attend_tile(pass, step, plane, span, head, first, n);
        }
    }
}

void cpu_step_attention(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    const cpu_layer *layer = &pass->model->layers[step->layer];
    cpu_norm_rows(pass, pass->normed, layer->attn_norm, pass->n_rows, self);
    cpu_linear(pass, &layer->qkv, pass->normed, pass->qkv, false, pass->n_rows, self);
    lane_barrier(self);
    rotate_and_store(pass, step, plane, self);
    lane_barrier(self);
    attend_all(pass, step, plane, self);
    lane_barrier(self);
    cpu_linear(pass, &layer->o, pass->mixed, pass->x, true, pass->n_rows, self);
    lane_barrier(self);
}
