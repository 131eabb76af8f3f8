/* The kernels, written once over the sixteen lanes of simd.h. Each isa_*.c compiles them for its
 * instruction set and tells how many rows a register tile has:
 *   TILE_ROWS    rows of a linear layer's tile (its accumulators: 2 x TILE_ROWS vectors)
 *   TILE_QUERIES queries of an attention tile
 * A tile's shape decides speed only: no sum depends on it. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

#define PANEL_VECTORS (CPU_PANEL / CPU_LANES)

_Static_assert(PANEL_VECTORS == 2, "linear_tile keeps two vectors a panel");
_Static_assert(CPU_KG % 2 == 0, "columns go in pairs");
_Static_assert(KV_BLOCK == 2 * CPU_LANES, "scores of a block are two vectors");
_Static_assert(KV_V_ALIGN == CPU_LANES, "values are read by whole vectors");
_Static_assert(CONFIG_MAX_HEAD_DIM % (2 * CPU_LANES) == 0, "values are written by whole vectors");

/* ---- linear ---- */

/* Vector v of the panel's columns c and c + 1 (c even). */
SIMD_INLINE void load_pair(tensor_dtype dtype, const char *panel, size_t c, int v, vf *even,
                           vf *odd)
{
    if (dtype == DTYPE_BF16) {
        vi pair = vi_load(panel + c * CPU_PANEL * 2 + (size_t)v * CPU_LANES * 4);
        *even = vf_bf16_low(pair);
        *odd = vf_bf16_high(pair);
    } else if (dtype == DTYPE_F16) {
        const uint16_t *p = (const uint16_t *)panel + c * CPU_PANEL + v * CPU_LANES;
        *even = vf_load_f16(p);
        *odd = vf_load_f16(p + CPU_PANEL);
    } else {
        const float *p = (const float *)panel + c * CPU_PANEL + v * CPU_LANES;
        *even = vf_load(p);
        *odd = vf_load(p + CPU_PANEL);
    }
}

/* The last column of an odd number. */
SIMD_INLINE vf load_last(tensor_dtype dtype, const char *panel, size_t c, int v)
{
    if (dtype == DTYPE_BF16)
        return vf_bf16_low(vi_load(panel + c * CPU_PANEL * 2 + (size_t)v * CPU_LANES * 4));
    if (dtype == DTYPE_F16)
        return vf_load_f16((const uint16_t *)panel + c * CPU_PANEL + v * CPU_LANES);
    return vf_load((const float *)panel + c * CPU_PANEL + v * CPU_LANES);
}

SIMD_INLINE void put_output(float *y, vf value, size_t n, bool add)
{
    if (n >= CPU_LANES) {
        vf_store(y, add ? vf_add(vf_load(y), value) : value);
    } else if (n > 0) {
        vf_store_n(y, add ? vf_add(vf_load_n(y, n), value) : value, n);
    }
}

typedef vf tile_sums[TILE_ROWS][PANEL_VECTORS * CPU_PANELS_AT_ONCE];

/* One group of columns from a fresh accumulator. `rows` and `vectors` are constants where it is
 * inlined. */
SIMD_INLINE void sum_group(tensor_dtype dtype, int rows, int vectors, tile_sums sum,
                           const char *panel, size_t panel_bytes, size_t begin, size_t end,
                           const float *x, size_t x_stride)
{
    size_t even_end = end - (end & 1);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (size_t c = begin; c < even_end; c += 2) {
        for (int v = 0; v < vectors; v++) {
            vf even, odd;
            load_pair(dtype, panel + (size_t)(v / PANEL_VECTORS) * panel_bytes, c,
                      v % PANEL_VECTORS, &even, &odd);
            for (int r = 0; r < rows; r++)
                sum[r][v] = vf_fma(even, vf_set1(x[(size_t)r * x_stride + c]), sum[r][v]);
            for (int r = 0; r < rows; r++)
                sum[r][v] = vf_fma(odd, vf_set1(x[(size_t)r * x_stride + c + 1]), sum[r][v]);
        }
    }
    for (int v = 0; v < vectors && even_end < end; v++) {
        vf last = load_last(dtype, panel + (size_t)(v / PANEL_VECTORS) * panel_bytes, even_end,
                            v % PANEL_VECTORS);
        for (int r = 0; r < rows; r++)
            sum[r][v] = vf_fma(last, vf_set1(x[(size_t)r * x_stride + even_end]), sum[r][v]);
    }
}

/* `rows` rows times `panels` panels: the groups' sums added in ascending order. */
SIMD_INLINE void linear_tile(tensor_dtype dtype, int rows, int panels, const cpu_matrix *w,
                             size_t first_panel, const float *x, size_t x_stride, float *y,
                             size_t y_stride, bool add)
{
    const char *panel = (const char *)w->data + first_panel * w->panel_bytes;
    int vectors = panels * PANEL_VECTORS;
    size_t columns = w->columns, end = columns < CPU_KG ? columns : CPU_KG;
    tile_sums total, sum;
    sum_group(dtype, rows, vectors, total, panel, w->panel_bytes, 0, end, x, x_stride);
    for (size_t begin = end; begin < columns; begin = end) {
        end = begin + CPU_KG < columns ? begin + CPU_KG : columns;
        sum_group(dtype, rows, vectors, sum, panel, w->panel_bytes, begin, end, x, x_stride);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                total[r][v] = vf_add(total[r][v], sum[r][v]);
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            size_t o = first_panel * CPU_PANEL + (size_t)v * CPU_LANES;
            size_t n = o < w->rows ? w->rows - o : 0;
            put_output(y + (size_t)r * y_stride + o, total[r][v], n, add);
        }
    }
}

SIMD_INLINE void linear_rows(tensor_dtype dtype, const cpu_matrix *w, size_t panel, const float *x,
                             size_t x_stride, size_t n_rows, float *y, size_t y_stride, bool add)
{
#define TILE(rows)                                                                                 \
    for (; n_rows >= (rows); n_rows -= (rows), x += (rows)*x_stride, y += (rows)*y_stride)         \
    linear_tile(dtype, rows, 1, w, panel, x, x_stride, y, y_stride, add)
    TILE(TILE_ROWS);
#if TILE_ROWS > 4
    TILE(4);
#endif
#if TILE_ROWS > 2
    TILE(2);
#endif
    TILE(1);
#undef TILE
}

SIMD_INLINE void linear_dtype(tensor_dtype dtype, const cpu_matrix *w, size_t begin, size_t end,
                              const float *x, size_t x_stride, size_t n_rows, float *y,
                              size_t y_stride, bool add)
{
    size_t panel = begin;
    for (; n_rows == 1 && panel + CPU_PANELS_AT_ONCE <= end; panel += CPU_PANELS_AT_ONCE)
        linear_tile(dtype, 1, CPU_PANELS_AT_ONCE, w, panel, x, x_stride, y, y_stride, add);
    for (; panel < end; panel++)
        linear_rows(dtype, w, panel, x, x_stride, n_rows, y, y_stride, add);
}

static void linear(const cpu_matrix *w, size_t begin, size_t end, const float *x, size_t x_stride,
                   size_t n_rows, float *y, size_t y_stride, bool add)
{
    if (w->dtype == DTYPE_BF16)
        linear_dtype(DTYPE_BF16, w, begin, end, x, x_stride, n_rows, y, y_stride, add);
    else if (w->dtype == DTYPE_F16)
        linear_dtype(DTYPE_F16, w, begin, end, x, x_stride, n_rows, y, y_stride, add);
    else
        linear_dtype(DTYPE_F32, w, begin, end, x, x_stride, n_rows, y, y_stride, add);
}

/* ---- rows ---- */

static void rms_norm(float *out, const float *x, const float *weight, size_t n, float eps)
{
    vf squares = vf_zero();
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES) {
        vf a = vf_load(x + i);
        squares = vf_fma(a, a, squares);
    }
    if (i < n) {
        vf a = vf_load_n(x + i, n - i);
        squares = vf_fma(a, a, squares);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)n + eps));
    for (i = 0; i + CPU_LANES <= n; i += CPU_LANES)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
    if (i < n)
        vf_store_n(out + i,
                   vf_mul(vf_mul(vf_load_n(x + i, n - i), scale), vf_load_n(weight + i, n - i)),
                   n - i);
}

SIMD_INLINE vf silu(vf a)
{
    return vf_div(a, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), a))));
}

static void silu_mul(float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES)
        vf_store(gate + i, vf_mul(silu(vf_load(gate + i)), vf_load(up + i)));
    if (i < n)
        vf_store_n(gate + i, vf_mul(silu(vf_load_n(gate + i, n - i)), vf_load_n(up + i, n - i)),
                   n - i);
}

static void store_kv(void *to, const float *from, size_t n, size_t stride, const kv_layout *layout)
{
    if (layout->mode == TL_KV_MODE_FP32) {
        for (size_t i = 0; i < n; i++)
            ((float *)to)[i * stride] = from[i];
        return;
    }
    for (size_t i = 0; i < n; i += CPU_LANES) {
        size_t count = n - i < CPU_LANES ? n - i : CPU_LANES;
        uint16_t half[CPU_LANES];
        vf_store_f16(half, vf_load_n(from + i, count));
        for (size_t j = 0; j < count; j++)
            ((uint16_t *)to)[(i + j) * stride] = half[j];
    }
}

/* ---- attention ---- */

/* What a query has gathered over the blocks so far: sum of exp(score - max), and the values
 * weighted by the same. */
typedef struct attend_state {
    float max[CPU_LANES];
    float sum[CPU_LANES];
    float values[CPU_ATTEND_QUERIES][CONFIG_MAX_HEAD_DIM];
    bool started[CPU_ATTEND_QUERIES];
} attend_state;

SIMD_INLINE vf load_kv(int32_t mode, const void *base, size_t index)
{
    return mode == TL_KV_MODE_FP32 ? vf_load((const float *)base + index)
                                   : vf_load_f16((const uint16_t *)base + index);
}

/* scores[q][position of the block] = q . k; n queries, a constant where it is inlined. */
SIMD_INLINE void score_queries(int32_t mode, int n, const attend_query *queries, const void *k,
                               size_t head_dim, float (*scores)[KV_BLOCK])
{
    vf low[CPU_ATTEND_QUERIES], high[CPU_ATTEND_QUERIES];
    for (int q = 0; q < n; q++)
        low[q] = high[q] = vf_zero();
    for (size_t d = 0; d < head_dim; d++) {
        vf k_low = load_kv(mode, k, d * KV_BLOCK);
        vf k_high = load_kv(mode, k, d * KV_BLOCK + CPU_LANES);
        for (int q = 0; q < n; q++) {
            vf a = vf_set1(queries[q].q[d]);
            low[q] = vf_fma(k_low, a, low[q]);
            high[q] = vf_fma(k_high, a, high[q]);
        }
    }
    for (int q = 0; q < n; q++) {
        vf_store(scores[q], low[q]);
        vf_store(scores[q] + CPU_LANES, high[q]);
    }
}

/* values[q] = sum over positions [begin, end) of weights[q][position] v[position]. */
SIMD_INLINE void weigh_values(int32_t mode, int n, const void *v, const kv_layout *layout,
                              size_t begin, size_t end, float (*weights)[KV_BLOCK],
                              float (*values)[CONFIG_MAX_HEAD_DIM])
{
    for (size_t d = 0; d < layout->v_stride; d += 2 * CPU_LANES) {
        bool two = d + CPU_LANES < layout->v_stride;
        vf low[CPU_ATTEND_QUERIES], high[CPU_ATTEND_QUERIES];
        for (int q = 0; q < n; q++)
            low[q] = high[q] = vf_zero();
        for (size_t p = begin; p < end; p++) {
            vf v_low = load_kv(mode, v, p * layout->v_stride + d);
            vf v_high = two ? load_kv(mode, v, p * layout->v_stride + d + CPU_LANES) : v_low;
            for (int q = 0; q < n; q++) {
                vf a = vf_set1(weights[q][p]);
                low[q] = vf_fma(v_low, a, low[q]);
                high[q] = vf_fma(v_high, a, high[q]);
            }
        }
        for (int q = 0; q < n; q++) {
            vf_store(values[q] + d, low[q]);
            if (two)
                vf_store(values[q] + d + CPU_LANES, high[q]);
        }
    }
}

/* Turns the scores of the visible positions [begin, end) into weights exp(score - max); all other
 * lanes are selected to zero, whatever unwritten memory made of them. */
SIMD_INLINE void softmax_block(float *scores, size_t begin, size_t end, float *max, float *sum)
{
    size_t end_low = end < CPU_LANES ? end : CPU_LANES;
    size_t begin_low = begin < CPU_LANES ? begin : CPU_LANES;
    size_t begin_high = begin > CPU_LANES ? begin - CPU_LANES : 0;
    size_t end_high = end > CPU_LANES ? end - CPU_LANES : 0;
    vf none = vf_set1(-INFINITY);
    vf low = vf_select(begin_low, end_low, vf_load(scores), none);
    vf high = vf_select(begin_high, end_high, vf_load(scores + CPU_LANES), none);
    *max = vf_largest(vf_max(low, high));
    vf shift = vf_set1(*max);
    low = vf_select(begin_low, end_low, vf_exp(vf_sub(low, shift)), vf_zero());
    high = vf_select(begin_high, end_high, vf_exp(vf_sub(high, shift)), vf_zero());
    *sum = vf_sum(vf_add(low, high));
    vf_store(scores, low);
    vf_store(scores + CPU_LANES, high);
}

/* Adds a block's finished (max, sum, values) to what came before it. */
SIMD_INLINE void merge_block(attend_state *state, size_t n, const float *max, const float *sum,
                             float (*values)[CONFIG_MAX_HEAD_DIM], const bool *visible,
                             size_t width)
{
    float scale_old[CPU_LANES], scale_new[CPU_LANES];
    vf old_max = vf_load(state->max), new_max = vf_load(max);
    vf both = vf_max(old_max, new_max);
    vf_store(scale_old, vf_exp(vf_sub(old_max, both)));
    vf_store(scale_new, vf_exp(vf_sub(new_max, both)));
    float merged_max[CPU_LANES];
    vf_store(merged_max, both);
    for (size_t q = 0; q < n; q++) {
        if (!visible[q])
            continue;
        float *kept = state->values[q];
        if (!state->started[q]) {
            state->started[q] = true;
            state->max[q] = max[q];
            state->sum[q] = sum[q];
            memcpy(kept, values[q], width * sizeof *kept);
            continue;
        }
        state->max[q] = merged_max[q];
        state->sum[q] = __builtin_fmaf(state->sum[q], scale_old[q], sum[q] * scale_new[q]);
        vf a = vf_set1(scale_old[q]), b = vf_set1(scale_new[q]);
        for (size_t d = 0; d < width; d += CPU_LANES)
            vf_store(kept + d, vf_fma(vf_load(kept + d), a, vf_mul(vf_load(values[q] + d), b)));
    }
}

/* The part [*begin, *end) of a block that starts at position `first` which a query sees. */
SIMD_INLINE bool visible_part(int64_t position, int64_t window, int64_t first, size_t *begin,
                              size_t *end)
{
    int64_t low = window > 0 && position >= window ? position - window + 1 : 0;
    int64_t from = low > first ? low - first : 0;
    int64_t to = position - first + 1 < KV_BLOCK ? position - first + 1 : KV_BLOCK;
    if (from >= to)
        return false;
    *begin = (size_t)from;
    *end = (size_t)to;
    return true;
}

SIMD_INLINE void score_block(int32_t mode, const attend_args *args, const void *k,
                             float (*scores)[KV_BLOCK])
{
    const attend_query *queries = args->queries;
    size_t n = args->n_queries, head_dim = args->layout->head_dim;
#define SCORE(count)                                                                               \
    for (; n >= (count); n -= (count), queries += (count), scores += (count))                      \
    score_queries(mode, count, queries, k, head_dim, scores)
    SCORE(TILE_QUERIES);
#if TILE_QUERIES > 4
    SCORE(4);
#endif
#if TILE_QUERIES > 2
    SCORE(3);
    SCORE(2);
#endif
    SCORE(1);
#undef SCORE
}

SIMD_INLINE void weigh_block(int32_t mode, const attend_args *args, const void *v,
                             const size_t *begin, const size_t *end, const bool *visible,
                             float (*weights)[KV_BLOCK], float (*values)[CONFIG_MAX_HEAD_DIM])
{
    size_t q = 0;
    while (q < args->n_queries) {
        /* neighbours that see the same positions share the reads */
        size_t same = 1;
        while (visible[q] && q + same < args->n_queries && same < TILE_QUERIES &&
               visible[q + same] && begin[q + same] == begin[q] && end[q + same] == end[q])
            same++;
#define WEIGH(count)                                                                               \
    weigh_values(mode, count, v, args->layout, begin[q], end[q], weights + q, values + q)
        if (!visible[q]) {
            q++;
            continue;
        }
        if (same == TILE_QUERIES) {
            WEIGH(TILE_QUERIES);
#if TILE_QUERIES > 4
        } else if (same >= 4) {
            same = 4;
            WEIGH(4);
#endif
#if TILE_QUERIES > 2
        } else if (same == 3) {
            WEIGH(3);
        } else if (same == 2) {
            WEIGH(2);
#endif
        } else {
            same = 1;
            WEIGH(1);
        }
#undef WEIGH
        q += same;
    }
}

SIMD_INLINE void attend_mode(int32_t mode, const attend_args *args)
{
    attend_state state;
    memset(state.max, 0, sizeof state.max);
    memset(state.sum, 0, sizeof state.sum);
    memset(state.started, 0, sizeof state.started);
    float scores[CPU_ATTEND_QUERIES][KV_BLOCK], values[CPU_ATTEND_QUERIES][CONFIG_MAX_HEAD_DIM];
    int64_t first = args->queries[0].position, last = args->queries[args->n_queries - 1].position;
    int64_t low = args->window > 0 && first >= args->window ? first - args->window + 1 : 0;
    for (int64_t b = low / KV_BLOCK; b <= last / KV_BLOCK; b++) {
        float max[CPU_LANES] = {0}, sum[CPU_LANES] = {0};
        size_t begin[CPU_ATTEND_QUERIES], end[CPU_ATTEND_QUERIES];
        bool visible[CPU_ATTEND_QUERIES];
        const char *block = args->blocks[b];
        score_block(mode, args, block + args->k_offset, scores);
        for (size_t q = 0; q < args->n_queries; q++) {
            visible[q] = visible_part(args->queries[q].position, args->window, b * KV_BLOCK,
                                      &begin[q], &end[q]);
            if (visible[q])
                softmax_block(scores[q], begin[q], end[q], &max[q], &sum[q]);
        }
        weigh_block(mode, args, block + args->v_offset, begin, end, visible, scores, values);
        merge_block(&state, args->n_queries, max, sum, values, visible, args->layout->v_stride);
    }
    for (size_t q = 0; q < args->n_queries; q++)
        for (size_t d = 0; d < args->layout->head_dim; d++)
            args->queries[q].out[d] = state.values[q][d] / state.sum[q];
}

static void attend(const attend_args *args)
{
    if (args->layout->mode == TL_KV_MODE_FP32)
        attend_mode(TL_KV_MODE_FP32, args);
    else
        attend_mode(TL_KV_MODE_FP16, args);
}

#define CPU_KERNELS(set)                                                                           \
    {                                                                                              \
        .name = #set, .linear = linear, .rms_norm = rms_norm, .silu_mul = silu_mul,                \
        .attend = attend, .store_kv = store_kv,                                                    \
    }
