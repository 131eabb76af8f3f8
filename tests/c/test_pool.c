/* prefix/pool.c: what a pool holds, what it evicts, what matches. */
#include "base/random.h"
#include "outputs.h"
#include "run/engine.h"

enum { N_PROMPT = 40 };

/* How many tokens of the prompt the pool saved: what was not prefilled. */
static int64_t matched(tl_prefix_pool *pool, tl_model *model, const int32_t *prompt, size_t n,
                       int64_t loops, int64_t window)
{
    tl_generate_options options = greedy(1);
    options.loops = loops;
    options.cache_window = window;
    tl_counters before = counters_of(model);
    CHECK_OK(generate_pooled(pool, model, prompt, n, &options).status);
    work done = work_since(&before, model);
    CHECK_EQ(done.full + done.partial + done.miss, 1);
    CHECK_EQ(done.full, done.prefilled == 0);
    CHECK_EQ(done.miss, done.prefilled == (int64_t)n);
    return (int64_t)n - done.prefilled;
}

TEST(the_longest_match_wins)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    int32_t prompt[N_PROMPT], other[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 7, 1);
    tl_prefix_pool *pool = make_pool(16);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 0, 0), 0);
    static const size_t lengths[] = {20, 3, 33, N_PROMPT};
    int64_t total = 0;
    for (int i = 0; i < 4; i++) {
        enter(pool, model, prompt, lengths[i], NULL);
        total += (int64_t)lengths[i];
        CHECK_EQ(tl_prefix_pool_size(pool), i + 1);
        CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), total);
    }
    for (size_t n = 1; n <= N_PROMPT; n++) {
        int64_t want = n >= 40 ? 40 : n >= 33 ? 33 : n >= 20 ? 20 : n >= 3 ? 3 : 0;
        CHECK_EQ(matched(pool, model, prompt, n, 0, 0), want);
    }
    for (size_t at = 0; at < N_PROMPT; at++) { /* one token differs */
        memcpy(other, prompt, sizeof other);
        other[at] = (other[at] + 1) % 7;
        int64_t want = at >= 33 ? 33 : at >= 20 ? 20 : at >= 3 ? 3 : 0;
        CHECK_EQ(matched(pool, model, other, N_PROMPT, 0, 0), want);
    }
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(keys_are_tokens_loops_window_and_model)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL), *twin = tiny_load(&tiny_specs[1], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 7, 1);
    tl_prefix_pool *pool = make_pool(16);
    const tl_cache_options two_loops = {.size = sizeof two_loops, .loops = 2},
                           narrow = {.size = sizeof narrow, .cache_window = 9};
    enter(pool, model, prompt, 10, NULL);
    enter(pool, model, prompt, 20, &two_loops);
    enter(pool, model, prompt, 30, &narrow);
    enter(pool, twin, prompt, 35, NULL);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 0, 0), 10);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 3, 0), 10); /* the default, by number */
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 2, 0), 20);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 0, 9), 30);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 1, 0), 0);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 2, 9), 0);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 0, 10), 0);
    CHECK_EQ(matched(pool, twin, prompt, N_PROMPT, 0, 0), 35);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
    tl_model_release(twin);
}

TEST(the_same_key_again_changes_nothing)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 7, 1);
    tl_prefix_pool *pool = make_pool(2);
    enter(pool, model, prompt, 10, NULL);
    int32_t other[10];
    memcpy(other, prompt, sizeof other);
    other[0] = (other[0] + 1) % 7;
    enter(pool, model, other, 10, NULL);
    tl_counters before = counters_of(model);
    const tl_cache_options by_number = {.size = sizeof by_number, .loops = 3};
    enter(pool, model, prompt, 10, NULL);
    enter(pool, model, prompt, 10, &by_number);
    CHECK_WORK(&before, model, 0, 0, 0, 0, 0, 0); /* nothing was built */
    CHECK_EQ(tl_prefix_pool_size(pool), 2);
    CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), 20);
    enter(pool, model, prompt, 20, NULL); /* still the first of equally short ones goes */
    CHECK_EQ(matched(pool, model, prompt, 10, 0, 0), 0);
    CHECK_EQ(matched(pool, model, other, 10, 0, 0), 10);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(capacity_zero_is_one)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 7, 1);
    tl_prefix_pool *pool = make_pool(0);
    enter(pool, model, prompt, 20, NULL);
    CHECK_EQ(tl_prefix_pool_size(pool), 1);
    enter(pool, model, prompt, 5, NULL); /* the new one is never the victim, however short */
    CHECK_EQ(tl_prefix_pool_size(pool), 1);
    CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), 5);
    CHECK_EQ(matched(pool, model, prompt, N_PROMPT, 0, 0), 5);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

/* ---- eviction against a list ---- */

enum { CAPACITY = 6, N_TEXTS = 3 };

typedef struct listed {
    int text;
    size_t n;
    int64_t loops;
} listed;

typedef struct list {
    listed entries[CAPACITY]; /* in order of registration */
    size_t n;
} list;

static void list_register(list *l, listed wanted)
{
    for (size_t i = 0; i < l->n; i++)
        if (memcmp(&l->entries[i], &wanted, sizeof wanted) == 0)
            return;
    if (l->n == CAPACITY) {
        size_t victim = 0;
        for (size_t i = 1; i < l->n; i++)
            victim = l->entries[i].n < l->entries[victim].n ? i : victim;
        memmove(l->entries + victim, l->entries + victim + 1,
                (--l->n - victim) * sizeof *l->entries);
    }
    l->entries[l->n++] = wanted;
}

static size_t list_longest(const list *l, int text, size_t n, int64_t loops)
{
    size_t longest = 0;
    for (size_t i = 0; i < l->n; i++)
        if (l->entries[i].text == text && l->entries[i].loops == loops && l->entries[i].n <= n &&
            l->entries[i].n > longest)
            longest = l->entries[i].n;
    return longest;
}

TEST(random_registrations_against_a_list)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    int32_t texts[N_TEXTS][N_PROMPT];
    for (int32_t t = 0; t < N_TEXTS; t++) {
        tiny_tokens(texts[t], N_PROMPT, 7, (uint64_t)t);
        texts[t][0] = t;
    }
    tl_prefix_pool *pool = make_pool(CAPACITY);
    list l = {.n = 0};
    for (uint64_t i = 0; i < 1500; i++) {
        listed wanted;
        memset(&wanted, 0, sizeof wanted);
        wanted.text = (int)(random_uniform(1, i) * N_TEXTS);
        wanted.n = 1 + (size_t)(random_uniform(2, i) * 12);
        wanted.loops = 1 + (int64_t)(random_uniform(3, i) * 2);
        if (random_uniform(4, i) < 0.5) {
            const tl_cache_options key = {.size = sizeof key, .loops = wanted.loops};
            enter(pool, model, texts[wanted.text], wanted.n, &key);
            list_register(&l, wanted);
        }
        int64_t total = 0;
        for (size_t k = 0; k < l.n; k++)
            total += (int64_t)l.entries[k].n;
        REQUIRE(tl_prefix_pool_size(pool) == (int64_t)l.n);
        REQUIRE(tl_prefix_pool_total_cached_tokens(pool) == total);
        size_t n = 1 + (size_t)(random_uniform(5, i) * (N_PROMPT - 1));
        REQUIRE(matched(pool, model, texts[wanted.text], n, wanted.loops, 0) ==
                (int64_t)list_longest(&l, wanted.text, n, wanted.loops));
    }
    tl_prefix_pool_release(pool);
    CHECK_EQ(blocks_in_use(model), 0);
    tl_model_release(model);
}

/* Many entries, so that the heap and the index have some depth; each goes in its turn. */
TEST(a_thousand_entries_leave_in_order)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    enum { MANY = 1000 };
    tl_prefix_pool *pool = make_pool(MANY);
    int32_t tokens[12] = {0};
    for (int32_t i = 0; i < MANY; i++) {
        for (int32_t digit = 0, rest = i; digit < 4; digit++, rest /= 7)
            tokens[digit] = rest % 7;
        enter(pool, model, tokens, 4 + (size_t)(i * 37 % 3), NULL);
    }
    CHECK_EQ(tl_prefix_pool_size(pool), MANY);
    int32_t longer[12] = {6, 6, 6, 6, 6, 6, 6, 6};
    for (int64_t length = 4; length <= 6; length++) {
        for (int32_t i = 0; i < MANY; i++) {
            if (4 + i * 37 % 3 != length)
                continue;
            for (int32_t digit = 0, rest = i; digit < 4; digit++, rest /= 7)
                tokens[digit] = longer[8 + digit] = rest % 7;
            CHECK_EQ(matched(pool, model, tokens, (size_t)length, 0, 0), length);
            enter(pool, model, longer, 12, NULL);
            CHECK_EQ(matched(pool, model, tokens, (size_t)length, 0, 0), 0);
        }
    }
    CHECK_EQ(tl_prefix_pool_size(pool), MANY);
    CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), 12 * MANY);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

/* ---- lives ---- */

TEST(an_evicted_entry_lives_for_its_generation)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 1);
    tl_generate_options options = sampled(20, 3);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    tl_prefix_pool *pool = make_pool(1);
    enter(pool, model, prompt, 33, NULL);
    tl_stream *stream;
    int32_t token;
    REQUIRE_OK(tl_stream_create(&stream, model, pool, prompt, N_PROMPT, &options));
    CHECK_OK(tl_stream_next(&token, stream));
    CHECK_EQ(token, want.tokens[0]);
    enter(pool, model, prompt + 1, 5, NULL); /* the entry goes, and the pool */
    tl_prefix_pool_release(pool);
    output rest = drain(stream), want_rest = {.n = want.n - 1};
    memcpy(want_rest.tokens, want.tokens + 1, want_rest.n * sizeof *want.tokens);
    CHECK_OUTPUT(rest, &want_rest);
    tl_stream_release(stream);
    CHECK_EQ(blocks_in_use(model), 0);
    tl_model_release(model);
}

TEST(a_pool_outlives_the_close_of_its_model)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    const int32_t prompt[] = {1, 2, 3};
    tl_prefix_pool *pool = make_pool(2);
    enter(pool, model, prompt, 3, NULL);
    tl_model_close(model);
    int64_t length = 9;
    CHECK_STATUS(tl_prefix_pool_register(&length, pool, model, prompt, 2, NULL), TL_STATUS_CLOSED);
    CHECK_EQ(length, 0);
    CHECK_EQ(tl_prefix_pool_size(pool), 1);
    CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), 3);
    tl_model_release(model);
    tl_prefix_pool_release(pool);
}

TEST(cached_bytes_are_exact)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    tl_model_info info = {.size = sizeof info};
    REQUIRE_OK(tl_model_get_info(&info, model));
    int32_t prompt[100];
    tiny_tokens(prompt, 100, 50, 1);
    for (size_t n = 1; n <= 100; n += 11) {
        for (int64_t loops = 1; loops <= 3; loops++) {
            const tl_cache_options key = {.size = sizeof key, .loops = loops};
            tl_prefix_cache *cache;
            tl_prefix_cache_info cached = {.size = sizeof cached};
            REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, n, &key));
            CHECK_OK(tl_prefix_cache_get_info(&cached, cache));
            int64_t positions = (int64_t)(n + 31) / 32 * 32;
            int64_t blocks = positions * (info.kv_bytes_fixed + loops * info.kv_bytes_loop);
            CHECK_EQ(blocks_in_use(model), blocks);
            CHECK_EQ(cached.bytes, blocks + 4 * 20 + 4 * (int64_t)n);
            CHECK_EQ(cached.length, n);
            CHECK_EQ(cached.loops, loops);
            CHECK_EQ(cached.cache_window, 0);
            tl_prefix_cache_release(cache);
        }
    }
    tl_model_release(model);
}
