/* The attention block: o(attention(rotate(q), K, V)), with K and V read back from the KV blocks as
 * they are stored there, those of this pass included. */
#include "backend/cpu/cpu.h"

#include <math.h>

/* What the phases of one block share. A row of qkv: q, k, v, output gate, value gate. */
typedef struct attention {
    backend_pass *pass;
    const backend_model *model;
    const cpu_layer *layer;
    const plan_run *run;
    size_t kv_layer;
    size_t stride; /* of a row of qkv */
    size_t group;  /* query heads of a KV head */
    size_t k, v;   /* where they begin in a row */
    size_t out_gate, value_gate;
} attention;

static attention attention_of(backend_pass *pass, const plan_step *step, const plan_run *run)
{
    const backend_model *model = pass->model;
    attention a = {
        .pass = pass,
        .model = model,
        .layer = &model->layers[step->layer],
        .run = run,
        .kv_layer = (size_t)step->kv_layer,
        .stride = model->layers[step->layer].qkv.weight.rows,
        .group = model->n_heads / model->n_kv_heads,
        .k = model->q_width,
        .v = model->q_width + model->kv_width,
        .out_gate = model->q_width + 2 * model->kv_width,
    };
    a.value_gate = a.out_gate + (model->config.attn_out_gate ? model->q_width : 0);
    return a;
}

/* ---- queries, keys and values of a row ---- */

static void rotate_half_split(float *head, const float *cos_sin, size_t pairs)
{
    for (size_t i = 0; i < pairs; i++) {
        float c = cos_sin[i], s = cos_sin[pairs + i];
        float a = head[i], b = head[i + pairs];
        head[i] = a * c - b * s;
        head[i + pairs] = b * c + a * s;
    }
}

static void rotate_interleaved(float *head, const float *cos_sin, size_t pairs)
{
    for (size_t i = 0; i < pairs; i++) {
        float c = cos_sin[i], s = cos_sin[pairs + i];
        float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * c - b * s;
        head[2 * i + 1] = b * c + a * s;
    }
}

/* Norm and rotation of one head, in the model's order, then the scale of a query. `norm`: of each
 * head, or NULL. */
static void prepare_head(const attention *a, float *head, const float *norm, const float *cos_sin,
                         float scale)
{
    const model_config *c = &a->model->config;
    size_t n = a->model->head_dim, pairs = (size_t)c->rotary_dim / 2;
    float eps = (float)c->qk_norm_eps;
    if (norm != NULL && !c->qk_norm_after_rope)
        a->model->kernels->rms_norm(head, head, norm, n, eps);
    if (c->rope_style == ROPE_INTERLEAVED)
        rotate_interleaved(head, cos_sin, pairs);
    else
        rotate_half_split(head, cos_sin, pairs);
    if (norm != NULL && c->qk_norm_after_rope)
        a->model->kernels->rms_norm(head, head, norm, n, eps);
    for (size_t i = 0; scale != 1 && i < n; i++)
        head[i] *= scale;
}

/* v += 2 sigmoid(gate) table[token] */
static void add_value_embedding(const attention *a, const cpu_rows *r, size_t kv_head,
                                const float *qkv, float *v)
{
    float row[CONFIG_MAX_HEAD_DIM], twice = 2;
    size_t hd = a->model->head_dim;
    a->model->kernels->sigmoid_mul(&twice, qkv + a->value_gate + kv_head, 1);
    cpu_matrix_row(&a->layer->value_embed, (size_t)r->span->tokens[r->i], kv_head * hd, hd, row);
    for (size_t i = 0; i < hd; i++)
        v[i] += twice * row[i];
}

static char *block_of(const batch_span *span, int plane, int64_t position)
{
    return span->tables[(size_t)plane * span->table_stride + (size_t)position / KV_BLOCK];
}

/* Makes a row's queries and key of one KV head ready, and stores key and value. */
static void prepare_and_store(const attention *a, const cpu_rows *r, size_t kv_head)
{
    const backend_model *model = a->model;
    const kv_layout *layout = &model->layout;
    size_t hd = model->head_dim, element = layout->element_size;
    int64_t position = r->span->first_position + (int64_t)r->i;
    size_t slot = (size_t)position % KV_BLOCK;
    bool each = model->config.qk_norm == QK_NORM_HEAD;
    const float *cos_sin = a->pass->rope + r->row * (size_t)model->config.rotary_dim;
    float *qkv = a->pass->qkv + r->row * a->stride;
    for (size_t head = kv_head * a->group; head < (kv_head + 1) * a->group; head++)
        prepare_head(a, qkv + head * hd, each ? a->layer->q_norm : NULL, cos_sin,
                     1.0f / sqrtf((float)hd));
    float *k = qkv + a->k + kv_head * hd, *v = qkv + a->v + kv_head * hd;
    prepare_head(a, k, each ? a->layer->k_norm : NULL, cos_sin, 1);
    if (a->layer->value_embed.data != NULL)
        add_value_embedding(a, r, kv_head, qkv, v);
    char *block = block_of(r->span, a->run->plane, position);
    char *to_k = block + kv_k_offset(layout, a->kv_layer, kv_head);
    char *to_v = block + kv_v_offset(layout, a->kv_layer, kv_head);
    model->kernels->store_kv(to_k + slot * element, k, hd, KV_BLOCK, layout);
    model->kernels->store_kv(to_v + slot * layout->v_stride * element, v, hd, 1, layout);
}

/* A phase: prepare_and_store of all rows and KV heads. */
static void prepare_and_store_all(const attention *a, lane *self)
{
    size_t begin, end, heads = a->model->n_kv_heads;
    while (lane_next(self, a->pass->n_rows, 1, &begin, &end))
        for (cpu_rows r = cpu_rows_begin(a->pass, begin, end); cpu_rows_next(&r);)
            for (size_t h = 0; h < heads; h++)
                prepare_and_store(a, &r, h);
}

/* A phase: norms over the whole width of q and of k. */
static void norm_full_width(const attention *a, lane *self)
{
    const backend_model *model = a->model;
    float eps = (float)model->config.qk_norm_eps;
    size_t begin, end;
    while (lane_next(self, a->pass->n_rows, 1, &begin, &end)) {
        for (size_t r = begin; r < end; r++) {
            float *q = a->pass->qkv + r * a->stride, *k = q + a->k;
            model->kernels->rms_norm(q, q, a->layer->q_norm, model->q_width, eps);
            model->kernels->rms_norm(k, k, a->layer->k_norm, model->kv_width, eps);
        }
    }
}

/* ---- attention of queries that share a KV head ---- */

/* A span's queries over one KV head are numbered: query i is row i / group, head i % group of the
 * KV head's group. */
typedef struct query_tile {
    const batch_span *span;
    size_t kv_head;
    size_t first, n;
} query_tile;

static size_t tile_row(const attention *a, const query_tile *tile, size_t i)
{
    return tile->span->first_row + (tile->first + i) / a->group;
}

static size_t tile_head(const attention *a, const query_tile *tile, size_t i)
{
    return tile->kv_head * a->group + (tile->first + i) % a->group;
}

/* out: [n][out_stride] */
static void attend_plane(const attention *a, const query_tile *tile, int plane, int64_t window,
                         float *const *out)
{
    const backend_model *model = a->model;
    attend_query queries[CPU_ATTEND_QUERIES];
    for (size_t i = 0; i < tile->n; i++) {
        int64_t at = (int64_t)((tile->first + i) / a->group);
        int64_t position = tile->span->first_position + at, prefix = tile->span->prefix_len;
        queries[i] = (attend_query){
            .q = a->pass->qkv + tile_row(a, tile, i) * a->stride +
                 tile_head(a, tile, i) * model->head_dim,
            .out = out[i],
            .first = kv_first_visible(position, window),
            .last = position < prefix ? prefix - 1 : position,
        };
    }
    attend_args args = {
        .queries = queries,
        .n_queries = tile->n,
        .blocks = tile->span->tables + (size_t)plane * tile->span->table_stride,
        .k_offset = kv_k_offset(&model->layout, a->kv_layer, tile->kv_head),
        .v_offset = kv_v_offset(&model->layout, a->kv_layer, tile->kv_head),
        .layout = &model->layout,
    };
    model->kernels->attend(&args);
}

/* out = g out + (1 - g) local, with g = sigmoid(loop_gate q + bias) of the unscaled query */
static void mix(const attention *a, const query_tile *tile, size_t i, float *out,
                const float *local)
{
    const backend_model *model = a->model;
    size_t hd = model->head_dim, head = tile_head(a, tile, i);
    const float *q = a->pass->qkv + tile_row(a, tile, i) * a->stride + head * hd;
    float dot = model->kernels->dot(q, a->layer->loop_gate + head * hd, hd), g = 1;
    float gate = dot * sqrtf((float)hd) + a->layer->loop_gate_bias[head];
    model->kernels->sigmoid_mul(&g, &gate, 1);
    for (size_t d = 0; d < hd; d++)
        out[d] = g * out[d] + (1 - g) * local[d];
}

static void attend_tile(const attention *a, const query_tile *tile)
{
    const backend_model *model = a->model;
    size_t hd = model->head_dim;
    float *out[CPU_ATTEND_QUERIES], *local[CPU_ATTEND_QUERIES];
    float local_values[CPU_ATTEND_QUERIES][CONFIG_MAX_HEAD_DIM];
    for (size_t i = 0; i < tile->n; i++) {
        out[i] =
            a->pass->mixed + tile_row(a, tile, i) * model->q_width + tile_head(a, tile, i) * hd;
        local[i] = local_values[i];
    }
    int64_t window = kv_narrower(tile->span->window, a->run->window);
    if (a->run->global_plane >= 0) {
        attend_plane(a, tile, a->run->global_plane, tile->span->window, out);
        attend_plane(a, tile, a->run->plane, window, local);
        for (size_t i = 0; i < tile->n; i++)
            mix(a, tile, i, out[i], local[i]);
    } else {
        attend_plane(a, tile, a->run->plane, window, out);
    }
    for (size_t i = 0; model->config.attn_out_gate && i < tile->n; i++)
        model->kernels->sigmoid_mul(out[i],
                                    a->pass->qkv + tile_row(a, tile, i) * a->stride + a->out_gate +
                                        tile_head(a, tile, i) * hd,
                                    hd);
}

/* Tiles that the queries of one KV head make. */
static size_t tiles_of(const attention *a, const batch_span *span)
{
    return (span->n_rows * a->group + CPU_ATTEND_QUERIES - 1) / CPU_ATTEND_QUERIES;
}

/* Tile `number` of a span, counted through its KV heads. A KV head's only tile stores its keys and
 * values itself; where there are several, prepare_and_store_all has been there before. */
static void attend_nth(const attention *a, const batch_span *span, size_t number, bool one_tile)
{
    size_t kv_heads = a->model->n_kv_heads;
    query_tile tile = {.span = span,
                       .kv_head = number % kv_heads,
                       .first = number / kv_heads * CPU_ATTEND_QUERIES};
    size_t left = span->n_rows * a->group - tile.first;
    tile.n = left < CPU_ATTEND_QUERIES ? left : CPU_ATTEND_QUERIES;
    if (one_tile) {
        size_t end = span->first_row + span->n_rows;
        for (cpu_rows r = cpu_rows_begin(a->pass, span->first_row, end); cpu_rows_next(&r);)
            prepare_and_store(a, &r, tile.kv_head);
    }
    attend_tile(a, &tile);
}

static void attend_all(const attention *a, lane *self)
{
    const backend_pass *pass = a->pass;
    size_t n_tiles = 0, begin, end;
    bool one_tile = true;
    for (size_t s = 0; s < pass->n_spans; s++) {
        size_t tiles = tiles_of(a, &pass->spans[s]);
        n_tiles += tiles * a->model->n_kv_heads;
        one_tile = one_tile && tiles == 1;
    }
    if (!one_tile)
        prepare_and_store_all(a, self);
    while (lane_next(self, n_tiles, 1, &begin, &end)) {
        size_t low = 0;
        for (size_t s = 0; s < pass->n_spans && low < end; s++) {
            const batch_span *span = &pass->spans[s];
            size_t high = low + tiles_of(a, span) * a->model->n_kv_heads;
            for (size_t t = begin > low ? begin : low; t < end && t < high; t++)
                attend_nth(a, span, t - low, one_tile);
            low = high;
        }
    }
}

void cpu_step_attention(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    attention a = attention_of(pass, step, run);
    const cpu_linear *qkv = &a.layer->qkv;
    cpu_normed input = cpu_normed_begin(pass, a.layer->attn_norms.in, pass->n_rows, self);
    size_t begin, end;
    while (lane_next(self, qkv->weight.n_panels, 1, &begin, &end))
        cpu_linear_piece(pass, qkv, begin, end, cpu_normed_rows(pass, &input, self), pass->n_rows,
                         pass->qkv, false);
    if (pass->model->config.qk_norm == QK_NORM_FULL)
        norm_full_width(&a, self);
    attend_all(&a, self);
    cpu_add_block(pass, &a.layer->o, pass->mixed, &a.layer->attn_norms, self);
}
