/* The kernels, written once over the sixteen lanes of simd.h. Each isa_*.c compiles them for its
 * instruction set and tells the shapes of its register tiles:
 *   TILE_4_VECTORS, TILE_2_VECTORS  of a linear layer: vectors of outputs that four rows, and two
 *                                   rows, have at once
 *   TILE_QUERIES                    queries of an attention tile
 * A tile's shape decides speed only: no sum depends on it. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/simd.h"

#define PANEL_VECTORS (CPU_PANEL / CPU_LANES)

_Static_assert(CPU_KG % 2 == 0, "columns go in pairs");
_Static_assert(KV_BLOCK == 2 * CPU_LANES, "scores of a block are two vectors");
_Static_assert(KV_V_ALIGN == CPU_LANES, "values are read by whole vectors");
_Static_assert(CONFIG_MAX_HEAD_DIM % (2 * CPU_LANES) == 0, "values are written by whole vectors");

/* ---- linear ---- */

/* Where a vector of outputs has its weights. */
SIMD_INLINE const char *vector_weights(const cpu_matrix *w, tensor_dtype dtype, size_t vector)
{
    size_t in_step = dtype == DTYPE_BF16 ? 2 : 1; /* columns side by side */
    return (const char *)w->data + vector / PANEL_VECTORS * w->panel_bytes +
           vector % PANEL_VECTORS * CPU_LANES * in_step * (dtype == DTYPE_F32 ? 4 : 2);
}

/* Columns c and c + 1 (c even) of a vector. */
SIMD_INLINE void load_pair(tensor_dtype dtype, const char *weights, size_t c, vf *even, vf *odd)
{
    if (dtype == DTYPE_BF16) {
        vi pair = vi_load(weights + c * CPU_PANEL * 2);
        *even = vf_bf16_low(pair);
        *odd = vf_bf16_high(pair);
    } else if (dtype == DTYPE_F16) {
        const uint16_t *p = (const uint16_t *)weights + c * CPU_PANEL;
        *even = vf_load_f16(p);
        *odd = vf_load_f16(p + CPU_PANEL);
    } else {
        const float *p = (const float *)weights + c * CPU_PANEL;
        *even = vf_load(p);
        *odd = vf_load(p + CPU_PANEL);
    }
}

/* The last column of an odd number. */
SIMD_INLINE vf load_last(tensor_dtype dtype, const char *weights, size_t c)
{
    if (dtype == DTYPE_BF16)
        return vf_bf16_low(vi_load(weights + c * CPU_PANEL * 2));
    if (dtype == DTYPE_F16)
        return vf_load_f16((const uint16_t *)weights + c * CPU_PANEL);
    return vf_load((const float *)weights + c * CPU_PANEL);
}

SIMD_INLINE void put_output(float *y, vf value, size_t n, bool add)
{
    if (n >= CPU_LANES)
        vf_store(y, add ? vf_add(vf_load(y), value) : value);
    else
        vf_store_n(y, add ? vf_add(vf_load_n(y, n), value) : value, n);
}

typedef vf tile_sums[4][PANEL_VECTORS];

/* The sums of columns [begin, end), at most a group, from fresh accumulators; begin is even. `rows`
 * and `vectors` are constants where it is inlined. Vectors innermost: an x is needed for a moment
 * only, and the compiler keeps all sums in registers. */
SIMD_INLINE void sum_group(tensor_dtype dtype, int rows, int vectors, tile_sums sum,
                           const char *const *weights, size_t begin, size_t end, const float *x,
                           size_t x_stride)
{
    size_t even_end = end - (end & 1);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (size_t c = begin; c < even_end; c += 2) {
        vf even[PANEL_VECTORS], odd[PANEL_VECTORS];
        for (int v = 0; v < vectors; v++)
            load_pair(dtype, weights[v], c, &even[v], &odd[v]);
        for (int r = 0; r < rows; r++) {
            vf a = vf_set1(x[(size_t)r * x_stride + c]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(even[v], a, sum[r][v]);
        }
        for (int r = 0; r < rows; r++) {
            vf a = vf_set1(x[(size_t)r * x_stride + c + 1]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(odd[v], a, sum[r][v]);
        }
    }
    for (int v = 0; v < vectors && even_end < end; v++) {
        vf last = load_last(dtype, weights[v], even_end);
        for (int r = 0; r < rows; r++)
            sum[r][v] = vf_fma(last, vf_set1(x[(size_t)r * x_stride + even_end]), sum[r][v]);
    }
}

typedef struct linear_args {
    const cpu_matrix *w;
    size_t vector; /* the first of the tile's outputs / CPU_LANES */
    const float *x;
    size_t x_stride;
    float *y;
    size_t y_stride;
    bool add;
} linear_args;

/* `rows` rows times `vectors` vectors of outputs: the groups' sums added in ascending order. */
SIMD_INLINE void linear_tile(tensor_dtype dtype, int rows, int vectors, const linear_args *args)
{
    const cpu_matrix *w = args->w;
    const char *weights[PANEL_VECTORS];
    for (int v = 0; v < vectors; v++)
        weights[v] = vector_weights(w, dtype, args->vector + (size_t)v);
    tile_sums total, sum;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] = vf_zero();
    for (size_t begin = 0; begin < w->columns; begin += CPU_KG) {
        size_t end = begin + CPU_KG < w->columns ? begin + CPU_KG : w->columns;
        sum_group(dtype, rows, vectors, sum, weights, begin, end, args->x, args->x_stride);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                total[r][v] = vf_add(total[r][v], sum[r][v]);
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            size_t o = (args->vector + (size_t)v) * CPU_LANES;
            if (o < w->rows) /* the panel's last vectors may be padding */
                put_output(args->y + (size_t)r * args->y_stride + o, total[r][v], w->rows - o,
                           args->add);
        }
    }
}

/* Each shape of tile is a function of its own for each dtype: a compiler that inlines several into
 * one runs out of registers in all of them. */
#define FUNCTION(dtype, name, rows, vectors)                                                       \
    static __attribute__((noinline)) void name##_##dtype(const linear_args *args)                  \
    {                                                                                              \
        linear_tile(DTYPE_##dtype, rows, vectors, args);                                           \
    }
#define TILE(name, rows, vectors)                                                                  \
    FUNCTION(BF16, name, rows, vectors)                                                            \
    FUNCTION(F16, name, rows, vectors)                                                             \
    FUNCTION(F32, name, rows, vectors)
#define SHAPE(name, rows, vectors)                                                                 \
    {                                                                                              \
        rows, vectors,                                                                             \
        {                                                                                          \
            [DTYPE_BF16] = name##_BF16, [DTYPE_F16] = name##_F16, [DTYPE_F32] = name##_F32         \
        }                                                                                          \
    }

TILE(tile_4, 4, TILE_4_VECTORS)
TILE(tile_2, 2, TILE_2_VECTORS)
TILE(tile_1, 1, PANEL_VECTORS)

static const struct linear_shape {
    size_t rows, vectors;
    void (*run[DTYPE_I8])(const linear_args *args); /* by dtype; I8 is the last */
} linear_shapes[] = {
    SHAPE(tile_4, 4, TILE_4_VECTORS),
    SHAPE(tile_2, 2, TILE_2_VECTORS),
    SHAPE(tile_1, 1, PANEL_VECTORS),
};
#undef FUNCTION
#undef TILE
#undef SHAPE

/* A panel's outputs for all rows. */
static void linear_panel(linear_args args, size_t n_rows)
{
    size_t first = args.vector;
    for (const struct linear_shape *shape = linear_shapes; n_rows > 0; shape++) {
        for (; n_rows >= shape->rows; n_rows -= shape->rows) {
            for (size_t v = 0; v < PANEL_VECTORS; v += shape->vectors) {
                args.vector = first + v;
                shape->run[args.w->dtype](&args);
            }
            args.x += shape->rows * args.x_stride;
            args.y += shape->rows * args.y_stride;
        }
    }
}

static void linear(const cpu_matrix *w, size_t begin, size_t end, const float *x, size_t x_stride,
                   size_t n_rows, float *y, size_t y_stride, bool add)
{
    linear_args args = {w, 0, x, x_stride, y, y_stride, add};
    for (size_t panel = begin; panel < end; panel++) {
        args.vector = panel * PANEL_VECTORS;
        linear_panel(args, n_rows);
    }
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

/* Attention takes its queries over one block after the other, or, if they are few, over several
 * blocks at once, so that an addition needn't wait for the one before. What belongs to a query and
 * a block has the index block * n_queries + query. */

/* What a query has gathered over the blocks so far: sum of exp(score - max), and the values
 * weighted by the same. */
typedef struct attend_state {
    float max[CPU_LANES];
    float sum[CPU_LANES];
    float values[CPU_ATTEND_QUERIES][CONFIG_MAX_HEAD_DIM];
    bool started[CPU_ATTEND_QUERIES];
} attend_state;

typedef struct attend_blocks {
    const attend_args *args;
    size_t n;      /* blocks at once */
    int64_t first; /* number of the first one */
    int64_t last;  /* number of the last of all */
    float max[CPU_LANES];
    float sum[CPU_LANES];
    float scores[CPU_ATTEND_QUERIES][KV_BLOCK]; /* later the weights */
    float values[CPU_ATTEND_QUERIES][CONFIG_MAX_HEAD_DIM];
    size_t begin[CPU_ATTEND_QUERIES], end[CPU_ATTEND_QUERIES]; /* of the visible part */
} attend_blocks;

SIMD_INLINE bool is_visible(const attend_blocks *blocks, size_t i)
{
    return blocks->begin[i] < blocks->end[i];
}

#define CACHE_LINE 64

/* KV lies in pieces of a few KiB, too short for the processor to see them coming. While a block's
 * keys are read its values are fetched, and while those are, the next block's keys: in fp16 a line
 * of memory for each channel. Into the second level; the first is full of what is in use. */
SIMD_INLINE void fetch_ahead(const char *p)
{
    __builtin_prefetch(p, 0, 2);
}

SIMD_INLINE vf load_kv(int32_t mode, const void *base, size_t index)
{
    return mode == TL_KV_MODE_FP32 ? vf_load((const float *)base + index)
                                   : vf_load_f16((const uint16_t *)base + index);
}

/* scores = q . k of queries first .. first + n_queries and of all positions. The numbers of
 * queries and blocks are constants where it is inlined. */
SIMD_INLINE void score_tile(int32_t mode, int n_queries, int n_blocks, attend_blocks *blocks,
                            size_t first)
{
    const attend_args *args = blocks->args;
    vf low[CPU_ATTEND_QUERIES], high[CPU_ATTEND_QUERIES];
    const char *k[CPU_ATTEND_QUERIES], *v[CPU_ATTEND_QUERIES];
    for (int b = 0; b < n_blocks; b++) {
        k[b] = (const char *)args->blocks[blocks->first + b] + args->k_offset;
        v[b] = (const char *)args->blocks[blocks->first + b] + args->v_offset;
    }
    for (int i = 0; i < n_blocks * n_queries; i++)
        low[i] = high[i] = vf_zero();
    for (size_t d = 0; d < args->layout->head_dim; d++) {
        for (int b = 0; b < n_blocks; b++) {
            fetch_ahead(v[b] + d * CACHE_LINE);
            vf k_low = load_kv(mode, k[b], d * KV_BLOCK);
            vf k_high = load_kv(mode, k[b], d * KV_BLOCK + CPU_LANES);
            for (int q = 0; q < n_queries; q++) {
                int i = b * n_queries + q;
                vf a = vf_set1(args->queries[first + (size_t)q].q[d]);
                low[i] = vf_fma(k_low, a, low[i]);
                high[i] = vf_fma(k_high, a, high[i]);
            }
        }
    }
    for (int i = 0; i < n_blocks * n_queries; i++) {
        vf_store(blocks->scores[first + (size_t)i], low[i]);
        vf_store(blocks->scores[first + (size_t)i] + CPU_LANES, high[i]);
    }
}

/* Channels [d, d + n_vectors lanes) of values = sum over positions of weight times v. */
SIMD_INLINE void weigh_channels(int32_t mode, int n_queries, int n_blocks, int n_vectors,
                                attend_blocks *blocks, size_t first, size_t d)
{
    const attend_args *args = blocks->args;
    const float(*weights)[KV_BLOCK] = blocks->scores + first;
    size_t stride = args->layout->v_stride, begin = blocks->begin[first], end = blocks->end[first];
    vf sum[CPU_ATTEND_QUERIES][4];
    const char *v[CPU_ATTEND_QUERIES], *next_k[CPU_ATTEND_QUERIES];
    for (int b = 0; b < n_blocks; b++) {
        int64_t block = blocks->first + b, next = block + n_blocks;
        v[b] = (const char *)args->blocks[block] + args->v_offset;
        next_k[b] = (const char *)args->blocks[next <= blocks->last ? next : block] +
                    args->k_offset + d * CACHE_LINE;
    }
    for (int i = 0; i < n_blocks * n_queries; i++)
        for (int j = 0; j < n_vectors; j++)
            sum[i][j] = vf_zero();
    for (size_t p = begin; p < end; p++) {
        for (int b = 0; b < n_blocks; b++) {
            vf value[4];
            for (int j = 0; j < n_vectors; j += 2)
                fetch_ahead(next_k[b] + (p * (size_t)n_vectors + (size_t)j) / 2 * CACHE_LINE);
            for (int j = 0; j < n_vectors; j++)
                value[j] = load_kv(mode, v[b], p * stride + d + (size_t)j * CPU_LANES);
            for (int q = 0; q < n_queries; q++) {
                int i = b * n_queries + q;
                vf a = vf_set1(weights[i][p]);
                for (int j = 0; j < n_vectors; j++)
                    sum[i][j] = vf_fma(value[j], a, sum[i][j]);
            }
        }
    }
    for (int i = 0; i < n_blocks * n_queries; i++)
        for (int j = 0; j < n_vectors; j++)
            vf_store(blocks->values[first + (size_t)i] + d + j * CPU_LANES, sum[i][j]);
}

/* values of queries that see the same positions */
SIMD_INLINE void weigh_tile(int32_t mode, int n_queries, int n_blocks, attend_blocks *blocks,
                            size_t first)
{
    const int most = n_queries * n_blocks * 4 <= 2 * TILE_QUERIES ? 4 : 2;
    size_t d = 0, width = blocks->args->layout->v_stride;
    for (; d + (size_t)most * CPU_LANES <= width; d += (size_t)most * CPU_LANES)
        weigh_channels(mode, n_queries, n_blocks, most, blocks, first, d);
    for (; d < width; d += CPU_LANES)
        weigh_channels(mode, n_queries, n_blocks, 1, blocks, first, d);
}

typedef void (*attend_tile)(attend_blocks *blocks, size_t first);

/* Functions of their own, as with linear layers. */
#define FUNCTION(step, mode, queries, blocks_at_once)                                              \
    static __attribute__((noinline)) void step##_##mode##_##queries##x##blocks_at_once(            \
        attend_blocks *blocks, size_t first)                                                       \
    {                                                                                              \
        step##_tile(TL_KV_MODE_##mode, queries, blocks_at_once, blocks, first);                    \
    }
#define TILE(queries, blocks_at_once)                                                              \
    FUNCTION(score, FP16, queries, blocks_at_once)                                                 \
    FUNCTION(score, FP32, queries, blocks_at_once)                                                 \
    FUNCTION(weigh, FP16, queries, blocks_at_once)                                                 \
    FUNCTION(weigh, FP32, queries, blocks_at_once)
#define MODES(step, shape)                                                                         \
    {                                                                                              \
        [TL_KV_MODE_FP16] = step##_FP16_##shape, [TL_KV_MODE_FP32] = step##_FP32_##shape           \
    }
#define SHAPE(queries, blocks_at_once)                                                             \
    {                                                                                              \
        queries, blocks_at_once, MODES(score, queries##x##blocks_at_once),                         \
            MODES(weigh, queries##x##blocks_at_once)                                               \
    }
#if TILE_QUERIES >= 8
TILE(8, 1)
TILE(4, 1)
TILE(3, 1)
TILE(2, 2)
#endif
TILE(2, 1)
TILE(1, 2)
TILE(1, 1)

static const struct attend_shape {
    size_t queries, blocks;
    attend_tile score[TL_KV_MODE_FP32 + 1], weigh[TL_KV_MODE_FP32 + 1]; /* by KV mode */
} attend_shapes[] = {
#if TILE_QUERIES >= 8
    SHAPE(8, 1), SHAPE(4, 1), SHAPE(3, 1), SHAPE(2, 2),
#endif
    SHAPE(2, 1), SHAPE(1, 2), SHAPE(1, 1),
};
#undef FUNCTION
#undef TILE
#undef MODES
#undef SHAPE

/* The largest tile of at most n queries over so many blocks. */
static const struct attend_shape *attend_shape_of(size_t n, size_t n_blocks)
{
    const struct attend_shape *shape = attend_shapes;
    while (shape->queries > n || shape->blocks != n_blocks)
        shape++;
    return shape;
}

/* How many blocks n queries take at once. */
static size_t attend_blocks_of(size_t n)
{
    for (size_t i = 0; i < sizeof attend_shapes / sizeof *attend_shapes; i++)
        if (attend_shapes[i].queries == n)
            return attend_shapes[i].blocks;
    return 1;
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

/* Adds the blocks' finished (max, sum, values), in ascending order, to what came before them. */
SIMD_INLINE void merge_blocks(attend_state *state, const attend_blocks *blocks)
{
    size_t n = blocks->args->n_queries, width = blocks->args->layout->v_stride;
    float scale_old[CPU_LANES], scale_new[CPU_LANES], merged[CPU_LANES] = {0};
    float old[CPU_LANES] = {0}, new[CPU_LANES] = {0};
    for (size_t i = 0; i < blocks->n * n; i++) {
        if (!is_visible(blocks, i))
            continue;
        float *max = &state->max[i % n];
        new[i] = blocks->max[i];
        old[i] = state->started[i % n] ? *max : new[i];
        merged[i] = *max = old[i] > new[i] ? old[i] : new[i];
        state->started[i % n] = true;
    }
    vf both = vf_load(merged);
    vf_store(scale_old, vf_exp(vf_sub(vf_load(old), both)));
    vf_store(scale_new, vf_exp(vf_sub(vf_load(new), both)));
    for (size_t i = 0; i < blocks->n * n; i++) {
        if (!is_visible(blocks, i))
            continue;
        float *sum = &state->sum[i % n], *kept = state->values[i % n];
        const float *values = blocks->values[i];
        *sum = __builtin_fmaf(*sum, scale_old[i], blocks->sum[i] * scale_new[i]);
        vf a = vf_set1(scale_old[i]), c = vf_set1(scale_new[i]);
        for (size_t d = 0; d < width; d += CPU_LANES)
            vf_store(kept + d, vf_fma(vf_load(kept + d), a, vf_mul(vf_load(values + d), c)));
    }
}

/* Finds the part of the i-th (query, block) that the query sees. */
static void find_visible(attend_blocks *blocks, size_t i)
{
    const attend_args *args = blocks->args;
    int64_t position = args->queries[i % args->n_queries].position;
    int64_t block = (blocks->first + (int64_t)(i / args->n_queries)) * KV_BLOCK;
    int64_t low = kv_first_visible(position, args->window);
    int64_t from = low > block ? low - block : 0;
    int64_t to = position - block + 1 < KV_BLOCK ? position - block + 1 : KV_BLOCK;
    blocks->begin[i] = (size_t)from;
    blocks->end[i] = from < to ? (size_t)to : (size_t)from;
}

static void score_blocks(attend_blocks *blocks)
{
    const attend_args *args = blocks->args;
    for (size_t q = 0; q < args->n_queries;) {
        const struct attend_shape *shape = attend_shape_of(args->n_queries - q, blocks->n);
        shape->score[args->layout->mode](blocks, q);
        q += shape->queries;
    }
    for (size_t i = 0; i < blocks->n * args->n_queries; i++)
        if (is_visible(blocks, i))
            softmax_block(blocks->scores[i], blocks->begin[i], blocks->end[i], &blocks->max[i],
                          &blocks->sum[i]);
}

/* Neighbours that see the same positions share the reads. */
static void weigh_blocks(attend_blocks *blocks)
{
    const attend_args *args = blocks->args;
    for (size_t q = 0; q < args->n_queries;) {
        size_t same = 1;
        while (q + same < args->n_queries && blocks->begin[q + same] == blocks->begin[q] &&
               blocks->end[q + same] == blocks->end[q])
            same++;
        const struct attend_shape *shape = attend_shape_of(same, blocks->n);
        shape->weigh[args->layout->mode](blocks, q);
        q += shape->queries;
    }
}

/* True if every query sees the whole of n blocks from `first` on. */
static bool all_visible(const attend_args *args, int64_t first, size_t n)
{
    const attend_query *queries = args->queries;
    int64_t last = queries[args->n_queries - 1].position;
    return (first + (int64_t)n) * KV_BLOCK <= queries[0].position + 1 &&
           kv_first_visible(last, args->window) <= first * KV_BLOCK;
}

static void attend(const attend_args *args)
{
    attend_state state;
    memset(state.sum, 0, sizeof state.sum);
    memset(state.started, 0, sizeof state.started);
    for (size_t q = 0; q < args->n_queries; q++)
        memset(state.values[q], 0, args->layout->v_stride * sizeof(float));
    attend_blocks blocks;
    blocks.args = args;
    size_t at_once = attend_blocks_of(args->n_queries);
    int64_t first = args->queries[0].position, last = args->queries[args->n_queries - 1].position;
    blocks.last = last / KV_BLOCK;
    for (int64_t b = kv_first_visible(first, args->window) / KV_BLOCK; b <= blocks.last;
         b += (int64_t)blocks.n) {
        blocks.first = b;
        blocks.n = all_visible(args, b, at_once) ? at_once : 1;
        for (size_t i = 0; i < blocks.n * args->n_queries; i++)
            find_visible(&blocks, i);
        score_blocks(&blocks);
        weigh_blocks(&blocks);
        merge_blocks(&state, &blocks);
    }
    for (size_t q = 0; q < args->n_queries; q++)
        for (size_t d = 0; d < args->layout->head_dim; d++)
            args->queries[q].out[d] = state.values[q][d] / state.sum[q];
}

#define CPU_KERNELS(set)                                                                           \
    {                                                                                              \
        .name = #set, .linear = linear, .rms_norm = rms_norm, .silu_mul = silu_mul,                \
        .attend = attend, .store_kv = store_kv,                                                    \
    }
