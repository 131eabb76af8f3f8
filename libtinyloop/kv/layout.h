/* How a block stores K and V.
 *
 * A block holds KV_BLOCK consecutive positions of all layers of one plane:
 *   for each layer:  K [n_kv_heads][head_dim][KV_BLOCK]   transposed: one channel's positions lie
 *                                                         side by side, so a score vector needs no
 *                                                         horizontal sum
 *                    V [n_kv_heads][KV_BLOCK][v_stride]   head_dim channels, then padding
 */
#ifndef TL_KV_LAYOUT_H
#define TL_KV_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#define KV_BLOCK 32   /* positions; also the position block of attention */
#define KV_V_ALIGN 16 /* elements */

typedef struct kv_layout {
    int32_t mode; /* TL_KV_MODE_FP16 or TL_KV_MODE_FP32 */
    size_t element_size;
    size_t n_heads; /* KV heads */
    size_t head_dim;
    size_t v_stride;
    size_t layer_bytes;
} kv_layout;

static inline kv_layout kv_layout_make(int32_t mode, size_t element_size, size_t n_heads,
                                       size_t head_dim)
{
    size_t v_stride = (head_dim + KV_V_ALIGN - 1) / KV_V_ALIGN * KV_V_ALIGN;
    size_t layer_bytes = n_heads * KV_BLOCK * (head_dim + v_stride) * element_size;
    return (kv_layout){mode, element_size, n_heads, head_dim, v_stride, layer_bytes};
}

/* The first position that a position attends to; window 0: none. */
static inline int64_t kv_first_visible(int64_t position, int64_t window)
{
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* The smaller of two windows, of which 0 is the widest. */
static inline int64_t kv_narrower(int64_t a, int64_t b)
{
    return a == 0 || (b > 0 && b < a) ? b : a;
}

/* Byte offsets in a block. */
static inline size_t kv_k_offset(const kv_layout *layout, size_t layer, size_t head)
{
    return layer * layout->layer_bytes + head * layout->head_dim * KV_BLOCK * layout->element_size;
}

static inline size_t kv_v_offset(const kv_layout *layout, size_t layer, size_t head)
{
    return layer * layout->layer_bytes +
           (layout->n_heads * layout->head_dim * KV_BLOCK + head * KV_BLOCK * layout->v_stride) *
               layout->element_size;
}

#endif
