/* What has gone wrong in prefix caches elsewhere and can only be seen from inside: memory that is
 * given back too late, entries that their users change, positions that are resumed wrongly, numbers
 * that nobody wrote. */
#include "base/memory.h"
#include "law.h"
#include "outputs.h"
#include "prefix/pool.h"
#include "run/engine.h"

enum { N_PROMPT = 40, N_NEW = 4, N_MAX = 160 };

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

/* ---- what is left half-way ---- */

/* What a generation can start from. */
typedef struct start {
    tl_model *model;
    int32_t prompt[N_PROMPT];
    size_t n_cached; /* 0: nothing */
    int64_t window;
    tl_prefix_pool *pool;
    tl_prefix_cache *cache; /* NULL where nothing is cached */
} start;

static start make_start(tl_model *model, size_t n_cached, int64_t window)
{
    start s = {.model = model, .n_cached = n_cached, .window = window, .pool = make_pool(1)};
    const tl_cache_options key = {.size = sizeof key, .cache_window = window};
    tiny_tokens(s.prompt, N_PROMPT, 50, 3);
    if (n_cached > 0) {
        enter(s.pool, model, s.prompt, n_cached, &key);
        CHECK_OK(tl_build_prefix_cache(&s.cache, model, s.prompt, n_cached, &key));
    }
    return s;
}

static void end_start(start *s)
{
    tl_prefix_cache_release(s->cache);
    tl_prefix_pool_release(s->pool);
    CHECK_EQ(blocks_in_use(s->model), 0);
}

static tl_generate_options start_options(const start *s)
{
    tl_generate_options options = greedy(N_NEW);
    options.cache_window = s->window;
    options.has_stop_tokens = 1;
    return options;
}

static tl_stream *open_stream(const start *s, bool pooled)
{
    tl_generate_options options = start_options(s);
    tl_stream *stream;
    if (pooled)
        CHECK_OK(tl_stream_create(&stream, s->model, s->pool, s->prompt, N_PROMPT, &options));
    else
        CHECK_OK(tl_stream_create_from_prefix_cache(&stream, s->model, s->cache,
                                                    s->prompt + s->n_cached, N_PROMPT - s->n_cached,
                                                    &options));
    return stream;
}

/* Takes n_steps tokens of a stream and drops it. With `evict` its entry goes meanwhile. */
static void drop_after(start *s, bool pooled, int n_steps, bool evict)
{
    const tl_cache_options key = {.size = sizeof key, .cache_window = s->window};
    size_t in_use = blocks_in_use(s->model);
    tl_stream *stream = open_stream(s, pooled);
    int32_t token;
    for (int i = 0; i < n_steps; i++)
        CHECK_OK(tl_stream_next(&token, stream));
    int n_sharing = s->n_cached == N_PROMPT; /* steps of a full hit that take no block */
    CHECK_EQ(blocks_in_use(s->model) > in_use, n_steps > n_sharing && n_steps < N_NEW);
    if (evict) {
        const int32_t other[] = {1};
        enter(s->pool, s->model, other, 1, &key);
    }
    tl_stream_release(stream);
    if (evict) /* the other entry goes in its turn */
        enter(s->pool, s->model, s->prompt, s->n_cached, &key);
    CHECK_EQ(blocks_in_use(s->model), in_use);
}

#define EACH_START(S, MODEL)                                                                       \
    static const int64_t windows[] = {0, 9, 33};                                                   \
    static const size_t n_cached[] = {0, 1, 32, 33, N_PROMPT};                                     \
    for (size_t i = 0; i < 15; i++)                                                                \
        for (start S = make_start((MODEL), n_cached[i / 3], windows[i % 3]); S.model != NULL;      \
             end_start(&S), S.model = NULL)

TEST(a_stream_that_is_dropped_gives_back_at_once)
{
    int64_t live = mem_live();
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    EACH_START(s, model)
    {
        for (int n_steps = 0; n_steps <= N_NEW + 1; n_steps++) {
            drop_after(&s, true, n_steps, false);
            if (s.cache != NULL) {
                drop_after(&s, false, n_steps, false);
                drop_after(&s, true, n_steps, true);
            }
        }
    }
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* A callback that makes the pool drop the entry in use, looks, and stops. */
typedef struct meddler {
    start *start;
    int n_left;
    size_t in_use;
} meddler;

static int32_t meddle(void *user, int32_t token)
{
    meddler *m = user;
    const tl_cache_options key = {.size = sizeof key, .cache_window = m->start->window};
    enter(m->start->pool, m->start->model, &token, 1, &key);
    m->in_use = blocks_in_use(m->start->model);
    return --m->n_left == 0;
}

TEST(a_callback_that_stops_gives_back_at_once)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    EACH_START(s, model)
    {
        const tl_cache_options key = {.size = sizeof key, .cache_window = s.window};
        tl_generate_options options = start_options(&s);
        output all = generate_plain(model, s.prompt, N_PROMPT, &options);
        for (int n = 1; n < N_NEW; n++) {
            meddler m = {.start = &s, .n_left = n};
            output want = all;
            want.n = (size_t)n;
            options.on_token = meddle;
            options.user = &m;
            CHECK_OUTPUT(generate_pooled(s.pool, model, s.prompt, N_PROMPT, &options), &want);
            size_t after = blocks_in_use(model);
            CHECK(after < m.in_use);
            if (s.cache != NULL) {
                m.n_left = n;
                CHECK_OUTPUT(generate_cached(s.cache, model, s.prompt + s.n_cached,
                                             N_PROMPT - s.n_cached, &options),
                             &want);
                CHECK_EQ(blocks_in_use(model), after);
                enter(s.pool, model, s.prompt, s.n_cached, &key);
            }
        }
    }
    tl_model_release(model);
}

/* ---- entries belong to nobody ---- */

/* Every byte of a cache's blocks, also those that no position has yet. */
static size_t copy_blocks(char *to, const tl_prefix_cache *cache)
{
    const kv_sequence *kv = &cache->kv->sequence;
    size_t size = 0;
    for (int plane = 0; plane < kv->n_planes; plane++)
        for (size_t b = kv->planes[plane].first_block; b < kv->n_blocks; b++) {
            size_t n = kv_store_block_bytes(kv->store, kv->planes[plane].class);
            memcpy(to + size, kv_sequence_table(kv, plane)[b], n);
            size += n;
        }
    return size;
}

TEST(no_user_changes_an_entry)
{
    static char before[1 << 20], after[1 << 20];
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    EACH_START(s, model)
    {
        if (s.cache == NULL)
            continue;
        tl_prefix_cache *entry =
            prefix_pool_match(s.pool, model, s.prompt, N_PROMPT, s.cache->kv->key);
        REQUIRE(entry != NULL);
        handle_give(&entry->handle, "tl_prefix_cache"); /* to be generated from, as if built */
        size_t size = copy_blocks(before, entry);
        for (uint64_t seed = 0; seed < 3; seed++) {
            tl_generate_options options = sampled(50, seed);
            options.cache_window = s.window;
            output want = generate_plain(model, s.prompt, N_PROMPT, &options);
            CHECK_OUTPUT(generate_pooled(s.pool, model, s.prompt, N_PROMPT, &options), &want);
            CHECK_OUTPUT(generate_streamed(s.pool, model, s.prompt, N_PROMPT, &options), &want);
            CHECK_OUTPUT(generate_cached(entry, model, s.prompt + s.n_cached, N_PROMPT - s.n_cached,
                                         &options),
                         &want);
            CHECK_EQ(copy_blocks(after, entry), size);
            CHECK_MEM_EQ(after, before, size);
        }
        CHECK_MEM_EQ(entry->hidden, s.cache->hidden, hidden_bytes(model));
        tl_prefix_cache_release(entry);
    }
    tl_model_release(model);
}

/* ---- resuming ---- */

static tl_kv_cache *run(tl_model *model, int64_t loops, const int32_t *tokens, size_t n_first,
                        size_t n_second, float *hidden)
{
    const tl_cache_options key = {.size = sizeof key, .loops = loops};
    tl_kv_cache *first, *kv;
    CHECK_OK(tl_kv_cache_create(&first, model, &key));
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, first, tokens, n_first));
    CHECK_OK(tl_kv_cache_clone(&kv, first)); /* as a hit does */
    if (n_second > 0)
        CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens + n_first, n_second));
    tl_kv_cache_release(first);
    return kv;
}

/* Positions and masks go on where the prefix ended, in each loop: KV of every position, loop and
 * layer, and the final state, are those of one run. */
TEST(a_suffix_goes_on_in_every_loop)
{
    static const size_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65};
    tl_model_options options = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[0], &options);
    int32_t tokens[N_MAX];
    float hidden[20], want[20];
    tiny_tokens(tokens, N_MAX, 50, 1);
    for (int64_t loops = 1; loops <= 4; loops++)
        for (size_t p = 0; p < 11; p++)
            for (size_t s = 0; s < 11; s++) {
                size_t n = lengths[p] + lengths[s];
                tl_kv_cache *whole = run(model, loops, tokens, n, 0, want);
                tl_kv_cache *resumed = run(model, loops, tokens, lengths[p], lengths[s], hidden);
                test_check(same_kv(whole, resumed) && memcmp(hidden, want, sizeof want) == 0,
                           __FILE__, __LINE__, "loops %d, %zu + %zu tokens", (int)loops, lengths[p],
                           lengths[s]);
                tl_kv_cache_release(whole);
                tl_kv_cache_release(resumed);
            }
    tl_model_release(model);
}

/* ---- outputs for every position ---- */

static bool all_finite(const float *values, size_t n)
{
    size_t i = 0;
    while (i < n && isfinite(values[i]))
        i++;
    return i == n;
}

/* Whatever a pool holds of a text, logits and states come for all of its positions: nothing of
 * what the caller's array held before is left. */
TEST(every_position_has_its_outputs)
{
    enum { VOCAB = 50, HIDDEN = 20, LOOPS = 3 };
    static float logits[N_MAX * VOCAB], states[LOOPS * N_MAX * HIDDEN];
    tl_model_options options = tiny_options(2);
    options.prefill_chunk = 16;
    tl_model *model = tiny_load(&tiny_specs[0], &options);
    int32_t tokens[N_MAX];
    tiny_tokens(tokens, N_MAX, VOCAB, 1);
    tl_prefix_pool *pool = make_pool(4);
    static const size_t lengths[] = {1, 15, 16, 17, 100, N_MAX};
    for (int64_t window = 0; window < 10; window += 9)
        for (size_t i = 0; i < 6; i++) {
            const tl_cache_options key = {
                .size = sizeof key, .loops = LOOPS, .cache_window = window};
            size_t n = lengths[i];
            enter(pool, model, tokens, n, &key);
            memset(logits, 0xFF, sizeof logits); /* NaN */
            memset(states, 0xFF, sizeof states);
            CHECK_OK(tl_model_logits(logits, model, tokens, n, NULL, &key));
            CHECK_OK(tl_model_states(states, model, tokens, n, NULL, &key));
            CHECK(all_finite(logits, n * VOCAB));
            CHECK(all_finite(states, LOOPS * n * HIDDEN));
            CHECK(n == N_MAX || isnan(logits[n * VOCAB]));
            CHECK(n == N_MAX || isnan(states[LOOPS * n * HIDDEN]));
        }
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}
