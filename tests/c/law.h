/* Comparison of KV caches bit by bit, over the positions that a later token can see. */
#ifndef TINYLOOP_LAW_H
#define TINYLOOP_LAW_H

#include "backend/cpu/cpu.h"
#include "run/kv_cache.h"
#include "tiny_model.h"

static inline size_t hidden_bytes(const tl_model *model)
{
    return (size_t)model->config.hidden_size * sizeof(float);
}

/* The first position that a plane must still have, and that it has. */
static inline int64_t first_held(const tl_kv_cache *kv, int plane)
{
    int64_t window = kv->sequence.planes[plane].window, length = kv->sequence.length;
    return window > 0 && length >= window ? length - window + 1 : 0;
}

static inline int64_t first_kept(const tl_kv_cache *kv, int plane)
{
    return (int64_t)kv->sequence.planes[plane].first_block * KV_BLOCK;
}

/* K and V of one position in one plane of both, all layers and heads. */
static inline bool same_position(const tl_kv_cache *a, const tl_kv_cache *b, int plane, int64_t p)
{
    kv_layout layout = a->model->backend->kv_layout(a->model->weights);
    size_t element = layout.element_size, slot = (size_t)p % KV_BLOCK;
    const char *x = kv_sequence_table(&a->sequence, plane)[p / KV_BLOCK];
    const char *y = kv_sequence_table(&b->sequence, plane)[p / KV_BLOCK];
    int stage = a->sequence.planes[plane].class;
    for (size_t layer = 0; layer < (size_t)a->model->plan.stages[stage].n_layers; layer++) {
        for (size_t head = 0; head < layout.n_heads; head++) {
            size_t k = kv_k_offset(&layout, layer, head) + slot * element;
            for (size_t d = 0; d < layout.head_dim; d++, k += KV_BLOCK * element)
                if (memcmp(x + k, y + k, element) != 0)
                    return false;
            size_t v = kv_v_offset(&layout, layer, head) + slot * layout.v_stride * element;
            if (memcmp(x + v, y + v, layout.head_dim * element) != 0)
                return false;
        }
    }
    return true;
}

static inline bool same_positions(const tl_kv_cache *a, const tl_kv_cache *b, int plane,
                                  int64_t begin, int64_t end)
{
    for (int64_t p = begin; p < end; p++)
        if (!same_position(a, b, plane, p))
            return false;
    return true;
}

static inline bool same_plane(const tl_kv_cache *a, const tl_kv_cache *b, int plane)
{
    return a->sequence.length == b->sequence.length &&
           same_positions(a, b, plane, first_held(a, plane), a->sequence.length);
}

static inline bool same_kv(const tl_kv_cache *a, const tl_kv_cache *b)
{
    bool same = a->sequence.n_planes == b->sequence.n_planes;
    for (int plane = 0; same && plane < a->sequence.n_planes; plane++)
        same = same_plane(a, b, plane);
    return same;
}

/* Of different lengths: the positions that both still hold. */
static inline bool same_common_kv(const tl_kv_cache *a, const tl_kv_cache *b)
{
    int64_t end_a = a->sequence.length, end_b = b->sequence.length;
    bool same = a->sequence.n_planes == b->sequence.n_planes;
    for (int plane = 0; same && plane < a->sequence.n_planes; plane++) {
        int64_t begin_a = first_kept(a, plane), begin_b = first_kept(b, plane);
        same = same_positions(a, b, plane, begin_a > begin_b ? begin_a : begin_b,
                              end_a < end_b ? end_a : end_b);
    }
    return same;
}

#endif
