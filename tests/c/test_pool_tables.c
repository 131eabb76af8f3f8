/* The pool's own tables after every one of very many random calls: its order of eviction, its
 * index, its sums and its memory tell of the same entries. The source is included so that the test
 * sees them. TINYLOOP_TEST_CALLS: another number of calls. */
#include "prefix/pool.c"

#include "base/random.h"
#include "law.h"
#include "test.h"

enum { N_TEXTS = 4, N_TEXT = 70, N_MODELS = 2 };

typedef struct trial {
    tl_model *models[N_MODELS];
    tl_prefix_pool *pool;
    int32_t texts[N_TEXTS][N_TEXT]; /* all begin with the same 20 tokens */
} trial;

/* One entry: in its place of the heap, found by its key, and held by the pool alone. */
static bool entry_is_sound(const tl_prefix_pool *pool, size_t i)
{
    const pool_entry *entry = pool->heap[i];
    const tl_prefix_cache *cache = entry->cache;
    index_space space = space_of(cache->kv->model, cache->kv->key);
    return (i == 0 || !goes_before(entry, pool->heap[(i - 1) / 2])) &&
           prefix_index_find(pool->index, space, cache->tokens, cache->n_tokens) == entry &&
           ref_is_sole(&cache->references);
}

static bool tables_agree(const trial *t)
{
    const tl_prefix_pool *pool = t->pool;
    int64_t tokens = 0;
    size_t held = 0, in_use = 0;
    for (size_t i = 0; i < pool->size; i++) {
        if (!entry_is_sound(pool, i))
            return false;
        tokens += (int64_t)pool->heap[i]->cache->n_tokens;
        held += kv_sequence_bytes(&pool->heap[i]->cache->kv->sequence);
    }
    for (size_t m = 0; m < N_MODELS; m++) {
        size_t bytes, in_slabs;
        kv_store_bytes(t->models[m]->kv, &bytes, &in_slabs);
        in_use += bytes;
    }
    /* below each root there are fewer inner nodes than entries */
    size_t n_nodes = prefix_index_n_nodes(pool->index);
    return pool->size <= pool->capacity && tl_prefix_pool_size(pool) == (int64_t)pool->size &&
           tl_prefix_pool_total_cached_tokens(pool) == tokens && held == in_use &&
           n_nodes >= pool->size && n_nodes <= 2 * pool->size;
}

static void call_once(trial *t, uint64_t i)
{
    double u[6];
    for (uint64_t k = 0; k < 6; k++)
        u[k] = random_uniform(20 + k, i);
    tl_model *model = t->models[u[0] < 0.3];
    const int32_t *text = t->texts[(int)(u[1] * N_TEXTS)];
    size_t n = 1 + (size_t)(u[2] * u[2] * (N_TEXT - 1));
    const tl_cache_options key = {
        .size = sizeof key, .loops = 1 + (int64_t)(u[3] * 2), .cache_window = u[4] < 0.7 ? 0 : 9};
    int64_t length;
    if (u[5] < 0.5) {
        CHECK_OK(tl_prefix_pool_register(&length, t->pool, model, text, n, &key));
        CHECK_EQ(length, n);
    } else if (u[5] < 0.6) {
        const int32_t bad[] = {text[0], 1000};
        CHECK_STATUS(tl_prefix_pool_register(&length, t->pool, model, bad, 2, &key),
                     TL_STATUS_INVALID);
    } else {
        int32_t tokens[2];
        size_t n_tokens;
        tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
        options.max_tokens = 1 + (u[5] < 0.7);
        options.loops = key.loops;
        options.cache_window = key.cache_window;
        CHECK_OK(tl_prefix_pool_generate(tokens, 2, &n_tokens, t->pool, model, text, n, &options));
    }
}

static uint64_t n_calls(void)
{
    const char *wanted = getenv("TINYLOOP_TEST_CALLS");
    return wanted != NULL ? strtoull(wanted, NULL, 10) : 20000;
}

TEST(tables_agree_after_every_call)
{
    static const int64_t capacities[] = {1, 2, 7, 40};
    int64_t live = mem_live();
    trial t;
    for (size_t m = 0; m < N_MODELS; m++)
        t.models[m] = tiny_load(&tiny_specs[1], NULL);
    for (uint64_t text = 0; text < N_TEXTS; text++) {
        tiny_tokens(t.texts[text], N_TEXT, 7, text);
        memcpy(t.texts[text], t.texts[0], 20 * sizeof(int32_t));
    }
    for (uint64_t c = 0; c < 4; c++) {
        tl_prefix_pool_options options = {sizeof options, capacities[c]};
        REQUIRE_OK(tl_prefix_pool_create(&t.pool, &options));
        for (uint64_t i = 0; i < n_calls() / 4; i++) {
            call_once(&t, c << 40 | i);
            REQUIRE(tables_agree(&t));
        }
        CHECK_EQ(tl_prefix_pool_size(t.pool), capacities[c]);
        tl_prefix_pool_release(t.pool);
    }
    for (size_t m = 0; m < N_MODELS; m++) {
        size_t in_use, in_slabs;
        kv_store_bytes(t.models[m]->kv, &in_use, &in_slabs);
        CHECK_EQ(in_use, 0);
        tl_model_release(t.models[m]);
    }
    CHECK_EQ(mem_live(), live);
}

/* ---- keys ---- */

enum { N_IDS = 4, N_STRINGS = N_IDS + N_IDS * N_IDS + N_IDS * N_IDS * N_IDS, N_SPACES = 24 };

/* The i-th string of one to three of the ids 0 to 3. */
static size_t string(int32_t *tokens, size_t i)
{
    size_t n = 1, count = N_IDS;
    for (; i >= count; n++) {
        i -= count;
        count *= N_IDS;
    }
    for (size_t k = 0; k < n; k++, i /= N_IDS)
        tokens[k] = (int32_t)(i % N_IDS);
    return n;
}

static index_space space(size_t i)
{
    static const char models[2];
    return (index_space){
        .model = &models[i % 2], .loops = (int64_t)(i / 2 % 3), .window = (int64_t)(i / 6)};
}

/* Ids, loops and windows are the same small numbers, so that keys differ only in what is what:
 * two million pairs of them, and no two are taken for one. */
TEST(no_two_keys_are_one)
{
    static char entries[N_SPACES][N_STRINGS];
    prefix_index *index;
    int32_t tokens[4];
    REQUIRE_OK(prefix_index_create(&index));
    for (size_t s = 0; s < N_SPACES; s++)
        for (size_t i = 0; i < N_STRINGS; i++) {
            size_t n = string(tokens, i);
            CHECK(prefix_index_find(index, space(s), tokens, n) == NULL);
            REQUIRE_OK(prefix_index_insert(index, space(s), tokens, n, &entries[s][i]));
        }
    for (size_t s = 0; s < N_SPACES; s += 2) /* one model's */
        for (size_t i = s % 3; i < N_STRINGS; i += 3)
            prefix_index_remove(index, space(s), tokens, string(tokens, i));
    for (size_t s = 0; s < N_SPACES; s++)
        for (size_t i = 0; i < N_STRINGS; i++) {
            bool gone = s % 2 == 0 && i % 3 == s % 3;
            size_t n = string(tokens, i);
            CHECK(prefix_index_find(index, space(s), tokens, n) == (gone ? NULL : &entries[s][i]));
            tokens[n] = N_IDS; /* nothing goes on like this */
            if (!gone)
                CHECK(prefix_index_longest(index, space(s), tokens, n + 1) == &entries[s][i]);
        }
    prefix_index_destroy(index);
}
