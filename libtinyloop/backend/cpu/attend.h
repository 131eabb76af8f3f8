/* Attention of some queries over one KV head. Part of kernels.h.
 *
 * The queries go over one block after the other, or, if they are few, over several blocks at once,
 * so that an addition needn't wait for the one before. What belongs to a query and a block has the
 * index block * n_queries + query. An including file tells TILE_QUERIES, the queries of a register
 * tile; it decides speed only. */
_Static_assert(KV_BLOCK == 2 * CPU_LANES, "scores of a block are two vectors");
_Static_assert(KV_V_ALIGN == CPU_LANES, "values are read by whole vectors");
_Static_assert(CONFIG_MAX_HEAD_DIM % (2 * CPU_LANES) == 0, "values are written by whole vectors");

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
    const attend_query *query = &args->queries[i % args->n_queries];
    int64_t block = (blocks->first + (int64_t)(i / args->n_queries)) * KV_BLOCK;
    int64_t from = query->first > block ? query->first - block : 0;
    int64_t to = query->last - block + 1 < KV_BLOCK ? query->last - block + 1 : KV_BLOCK;
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
    return (first + (int64_t)n) * KV_BLOCK <= queries[0].last + 1 &&
           queries[args->n_queries - 1].first <= first * KV_BLOCK;
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
    blocks.last = args->queries[args->n_queries - 1].last / KV_BLOCK;
    for (int64_t b = args->queries[0].first / KV_BLOCK; b <= blocks.last; b += (int64_t)blocks.n) {
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
