/* backend/cpu/: the attention kernel against float64, and bit equality of instruction sets and
 * tiles. */
#include "base/half.h"
#include "kernel_sets.h"
#include "test.h"

enum { N_POSITIONS = 96, N_BLOCKS = (N_POSITIONS + KV_BLOCK - 1) / KV_BLOCK, N_KV_HEADS = 2 };

/* Two layers and two KV heads of random K and V, of which the tests use the last: positions that
 * were not written hold NaN, as does the padding. */
typedef struct kv_memory_image {
    kv_layout layout;
    char *data;
    void *blocks[N_BLOCKS];
    float k[N_POSITIONS][256]; /* as stored */
    float v[N_POSITIONS][256];
} kv_memory_image;

static float as_stored(const kv_layout *layout, float value)
{
    return layout->mode == TL_KV_MODE_FP32 ? value : float_from_f16(float_to_f16(value));
}

static void write_position(kv_memory_image *image, size_t position, const float *k, const float *v)
{
    const kv_layout *layout = &image->layout;
    char *block = image->blocks[position / KV_BLOCK];
    size_t slot = position % KV_BLOCK, head_dim = layout->head_dim;
    char *to_k = block + kv_k_offset(layout, 1, 1) + slot * layout->element_size;
    char *to_v = block + kv_v_offset(layout, 1, 1) + slot * layout->v_stride * layout->element_size;
    cpu_kernels_portable.store_kv(to_k, k, head_dim, KV_BLOCK, layout);
    cpu_kernels_portable.store_kv(to_v, v, head_dim, 1, layout);
    for (size_t d = 0; d < head_dim; d++) {
        image->k[position][d] = as_stored(layout, k[d]);
        image->v[position][d] = as_stored(layout, v[d]);
    }
}

static kv_memory_image *make_image(int32_t mode, size_t head_dim, size_t n_written)
{
    kv_memory_image *image = calloc(1, sizeof *image);
    kv_layout *layout = &image->layout;
    *layout = kv_layout_make(mode, mode == TL_KV_MODE_FP32 ? 4 : 2, N_KV_HEADS, head_dim);
    size_t block_bytes = 2 * layout->layer_bytes;
    image->data = aligned_alloc(64, N_BLOCKS * block_bytes);
    memset(image->data, 0xFF, N_BLOCKS * block_bytes);
    for (size_t b = 0; b < N_BLOCKS; b++)
        image->blocks[b] = image->data + b * block_bytes;
    for (size_t p = 0; p < n_written; p++) {
        float k[256], v[256];
        fill(k, head_dim, 1000 + p);
        fill(v, head_dim, 2000 + p);
        write_position(image, p, k, v);
    }
    return image;
}

static void free_image(kv_memory_image *image)
{
    free(image->data);
    free(image);
}

/* The positions that a query sees. */
typedef struct seen {
    int64_t first, last;
} seen;

static void exact_attention(double *out, const kv_memory_image *image, const float *q, seen s)
{
    size_t head_dim = image->layout.head_dim;
    double scores[N_POSITIONS], largest = -INFINITY, sum = 0;
    for (int64_t p = s.first; p <= s.last; p++) {
        scores[p] = 0;
        for (size_t d = 0; d < head_dim; d++)
            scores[p] += (double)q[d] * image->k[p][d];
        largest = fmax(largest, scores[p]);
    }
    for (size_t d = 0; d < head_dim; d++)
        out[d] = 0;
    for (int64_t p = s.first; p <= s.last; p++) {
        double weight = exp(scores[p] - largest);
        sum += weight;
        for (size_t d = 0; d < head_dim; d++)
            out[d] += weight * image->v[p][d];
    }
    for (size_t d = 0; d < head_dim; d++)
        out[d] /= sum;
}

/* out[i] for query i, which sees s[i], in tiles of `tile` queries. */
static void attend_in_tiles(const cpu_kernels *set, const kv_memory_image *image, const float *q,
                            size_t n, const seen *s, size_t tile, float *out)
{
    size_t head_dim = image->layout.head_dim;
    for (size_t begin = 0; begin < n; begin += tile) {
        attend_query queries[CPU_ATTEND_QUERIES];
        size_t count = n - begin < tile ? n - begin : tile;
        for (size_t i = 0; i < count; i++)
            queries[i] = (attend_query){.q = q + (begin + i) * head_dim,
                                        .out = out + (begin + i) * head_dim,
                                        .first = s[begin + i].first,
                                        .last = s[begin + i].last};
        attend_args args = {.queries = queries,
                            .n_queries = count,
                            .blocks = image->blocks,
                            .k_offset = kv_k_offset(&image->layout, 1, 1),
                            .v_offset = kv_v_offset(&image->layout, 1, 1),
                            .layout = &image->layout};
        set->attend(&args);
    }
}

enum { N_QUERIES = 16 };

static void check_attention(const kv_memory_image *image, const seen *s)
{
    size_t head_dim = image->layout.head_dim, size = N_QUERIES * head_dim * sizeof(float);
    float *q = malloc(size), *want = malloc(size), *out = malloc(size);
    for (size_t i = 0; i < N_QUERIES * head_dim; i++)
        q[i] = 4 * uniform(77, i) / sqrtf((float)head_dim); /* scores of some units */
    attend_in_tiles(&cpu_kernels_portable, image, q, N_QUERIES, s, 1, want);
    for (size_t i = 0; i < N_QUERIES; i++) {
        double exact[256];
        exact_attention(exact, image, q + i * head_dim, s[i]);
        for (size_t d = 0; d < head_dim; d++)
            if (!CHECK_NEAR(want[i * head_dim + d], exact[d], 4e-6))
                goto done;
    }
    EACH_SET(set)
    {
        for (size_t tile = 1; tile <= CPU_ATTEND_QUERIES; tile++) {
            memset(out, 0, size);
            attend_in_tiles(set, image, q, N_QUERIES, s, tile, out);
            if (!test_check(memcmp(out, want, size) == 0, __FILE__, __LINE__,
                            "%s, tile %zu, head_dim %zu, from %lld .. %lld to %lld .. %lld: other "
                            "bits",
                            set->name, tile, head_dim, (long long)s[0].first, (long long)s[0].last,
                            (long long)s[N_QUERIES - 1].first, (long long)s[N_QUERIES - 1].last))
                goto done;
        }
    }
done:
    free(q);
    free(want);
    free(out);
}

/* `group` queries at each position from `first` on, with a window, or with the two-sided positions
 * below `prefix`. */
static void check_positions(const kv_memory_image *image, int64_t first, size_t group,
                            int64_t window, int64_t prefix)
{
    seen s[N_QUERIES];
    for (size_t i = 0; i < N_QUERIES; i++) {
        int64_t position = first + (int64_t)(i / group);
        s[i].first = kv_first_visible(position, window);
        s[i].last = position < prefix ? prefix - 1 : position;
    }
    check_attention(image, s);
}

/* Positions at the start, over a block's edge, at the end of the last block; windows from one
 * position to more than there are, 70 slides over two whole blocks. Nothing is written beyond the
 * last query. */
static void check_attention_at(int32_t mode, size_t head_dim)
{
    static const int64_t firsts[] = {0, 25, 31, 60, 80};
    static const int64_t windows[] = {0, 1, 5, 32, 33, 40, 70, 1000};
    for (size_t f = 0; f < sizeof firsts / sizeof *firsts; f++) {
        for (size_t group = 1; group <= 3; group++) {
            int64_t first = firsts[f], n = first + (N_QUERIES - 1) / (int64_t)group + 1;
            kv_memory_image *image = make_image(mode, head_dim, (size_t)n);
            for (size_t w = 0; w < sizeof windows / sizeof *windows; w++)
                check_positions(image, first, group, windows[w], 0);
            for (int64_t prefix = n; prefix > first; prefix -= 5)
                check_positions(image, first, group, 0, prefix);
            free_image(image);
        }
    }
}

/* Anything that ascends: both ends stay, step and jump, also over whole blocks, and neighbours may
 * have nothing in common. */
static void check_jumps(int32_t mode, size_t head_dim)
{
    static const int64_t firsts[][N_QUERIES] = {
        {0, 0, 0, 0, 33, 33, 64, 64, 64, 90, 95, 95, 95, 95, 95, 95},
        {0, 0, 70, 70, 70, 71, 72, 73, 94, 94, 94, 95, 95, 95, 95, 95},
        {0, 0, 0, 31, 31, 32, 32, 63, 64, 64, 65, 65, 65, 65, 65, 66},
        {0, 1, 2, 31, 64, 64, 65, 65, 65, 65, 65, 65, 65, 65, 65, 65},
    };
    static const int64_t lasts[][N_QUERIES] = {
        {0, 0, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95},
        {10, 10, 80, 80, 80, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95, 95},
        {63, 63, 63, 63, 64, 64, 64, 64, 90, 90, 90, 90, 95, 95, 95, 95},
        {31, 31, 31, 31, 64, 64, 65, 95, 95, 95, 95, 95, 95, 95, 95, 95},
    };
    kv_memory_image *image = make_image(mode, head_dim, N_POSITIONS);
    for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
        seen s[N_QUERIES];
        for (size_t q = 0; q < N_QUERIES; q++)
            s[q] = (seen){firsts[i][q], lasts[i][q]};
        check_attention(image, s);
    }
    free_image(image);
}

TEST(attend_jumps)
{
    for (size_t head_dim = 2; head_dim <= 66; head_dim += 16) {
        check_jumps(TL_KV_MODE_FP16, head_dim);
        check_jumps(TL_KV_MODE_FP32, head_dim);
    }
}

TEST(attend_fp16)
{
    static const size_t head_dims[] = {2, 6, 10, 16, 34, 256};
    for (size_t i = 0; i < 6; i++)
        check_attention_at(TL_KV_MODE_FP16, head_dims[i]);
}

TEST(attend_fp32)
{
    static const size_t head_dims[] = {2, 6, 18, 32, 66};
    for (size_t i = 0; i < 5; i++)
        check_attention_at(TL_KV_MODE_FP32, head_dims[i]);
}

/* Blocks that a window has passed are gone: their addresses must not be followed. */
TEST(attend_leaves_dropped_blocks_alone)
{
    kv_memory_image *image = make_image(TL_KV_MODE_FP32, 6, N_POSITIONS);
    void *first_block = image->blocks[0];
    float q[6], with[6], without[6];
    seen s = {32, 64};
    fill(q, 6, 4);
    EACH_SET(set)
    {
        image->blocks[0] = first_block;
        attend_in_tiles(set, image, q, 1, &s, 1, with);
        image->blocks[0] = NULL;
        attend_in_tiles(set, image, q, 1, &s, 1, without);
        CHECK_MEM_EQ(with, without, sizeof with);
    }
    free_image(image);
}

/* NaN at a position that some of the queries see reaches those only. */
TEST(attend_keeps_queries_apart)
{
    static const int64_t lasts[] = {62, 63, 64, 64}, firsts[] = {0, 32, 33, 34};
    float nan[6], q[4 * 6], out[4 * 6], alone[4 * 6];
    for (size_t d = 0; d < 6; d++)
        nan[d] = NAN;
    fill(q, 24, 4);
    for (size_t begins = 0; begins < 2; begins++) {
        kv_memory_image *image = make_image(TL_KV_MODE_FP32, 6, N_POSITIONS);
        int64_t bad = begins ? 33 : 63;
        write_position(image, (size_t)bad, nan, nan);
        seen s[4];
        for (size_t i = 0; i < 4; i++)
            s[i] = begins ? (seen){firsts[i], 95} : (seen){0, lasts[i]};
        EACH_SET(set)
        {
            for (size_t tile = 1; tile <= 4; tile++) {
                attend_in_tiles(set, image, q, 4, s, tile, out);
                attend_in_tiles(set, image, q, 4, s, 1, alone);
                for (size_t i = 0; i < 24; i++) {
                    bool sees = s[i / 6].first <= bad && bad <= s[i / 6].last;
                    CHECK(sees ? isnan(out[i]) : out[i] == alone[i]);
                }
            }
        }
        free_image(image);
    }
}

TEST(attend_with_scores_far_apart)
{
    kv_memory_image *image = make_image(TL_KV_MODE_FP32, 6, N_POSITIONS);
    float q[6], out[6];
    seen s = {0, 95};
    for (size_t d = 0; d < 6; d++)
        q[d] = 400 * uniform(8, d);
    double exact[6];
    exact_attention(exact, image, q, s);
    EACH_SET(set)
    {
        attend_in_tiles(set, image, q, 1, &s, 1, out);
        for (size_t d = 0; d < 6; d++)
            CHECK_NEAR(out[d], exact[d], 1e-3);
    }
    free_image(image);
}
