/* Prefix-LMs: the first prefix_len tokens see each other. They go through the layers together, and
 * a cache of them serves nothing but exactly them. */
#include "base/memory.h"
#include "law.h"
#include "outputs.h"
#include "run/forward.h"

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

enum { N = 45, N_NEW = 6, VOCAB = 33, HIDDEN = 20, CHUNK = 7, MAX_FAULTS = 500 };

/* A flat looped model, odd in every way, whose tokens may see each other. */
static void two_sided(model_config *config)
{
    config->mask = 1;
}

static const tiny_spec flat_spec = {.vocab = VOCAB,
                                    .hidden = HIDDEN,
                                    .n_heads = 2,
                                    .n_kv_heads = 1,
                                    .head_dim = 10,
                                    .ff = 19,
                                    .prelude = 1,
                                    .core = 1,
                                    .coda = 1,
                                    .inject = true,
                                    .core_norm = true,
                                    .tied = true,
                                    .dtype = DTYPE_F32,
                                    .loops = 2,
                                    .seed = 21,
                                    .wiring = two_sided};

/* The flat one and the nested one. */
static tl_model *load(bool nested, int threads, int chunk)
{
    tl_model_options options = tiny_options(threads);
    options.prefill_chunk = chunk;
    return tiny_load(nested ? &tiny_specs[TINY_HRM] : &flat_spec, &options);
}

static tl_cache_options key_of(int64_t prefix_len, int64_t window)
{
    return (tl_cache_options){.size = sizeof(tl_cache_options),
                              .cache_window = window,
                              .prefix_len = prefix_len,
                              .has_prefix_len = 1};
}

static void make_tokens(int32_t *tokens)
{
    tiny_tokens(tokens, N, VOCAB, 4);
}

/* Of N tokens. */
typedef struct logits {
    float at[N][VOCAB];
} logits;

static logits logits_of(tl_model *model, const int32_t *tokens, int64_t prefix_len, int64_t window)
{
    logits made;
    const tl_cache_options key = key_of(prefix_len, window);
    CHECK_OK(tl_model_logits(made.at[0], model, tokens, N, NULL, &key));
    return made;
}

/* ---- who sees whom ---- */

/* Where the logits differ after the token at `changed` became another: [N]. */
static void find_seers(bool *sees, tl_model *model, size_t changed, int64_t prefix, int64_t window)
{
    int32_t tokens[N];
    make_tokens(tokens);
    logits before = logits_of(model, tokens, prefix, window);
    tokens[changed] = (tokens[changed] + 1) % VOCAB;
    logits after = logits_of(model, tokens, prefix, window);
    for (size_t i = 0; i < N; i++)
        sees[i] = memcmp(before.at[i], after.at[i], sizeof before.at[i]) != 0;
}

TEST(tokens_of_the_prefix_see_each_other_and_the_rest_what_is_before)
{
    static const size_t prefixes[] = {0, 1, 2, 31, 32, 33, N};
    for (int nested = 0; nested < 2; nested++) {
        tl_model *model = load(nested, 2, 0);
        for (size_t p = 0; p < sizeof prefixes / sizeof *prefixes; p++) {
            for (size_t changed = 0; changed < N; changed += 4) {
                bool sees[N];
                find_seers(sees, model, changed, (int64_t)prefixes[p], 0);
                for (size_t i = 0; i < N; i++)
                    test_check(sees[i] ==
                                   (i >= changed || (i < prefixes[p] && changed < prefixes[p])),
                               __FILE__, __LINE__, "prefix %zu: %zu %s %zu", prefixes[p], i,
                               sees[i] ? "sees" : "does not see", changed);
            }
        }
        tl_model_release(model);
    }
}

/* The window bounds what is before a position, not what comes after it in the prefix. */
TEST(a_window_over_a_prefix)
{
    /* in three layers, each run once, a change goes on by three times what a window shows */
    enum { PREFIX = 12, WINDOW = 3, REACH = 3 * (WINDOW - 1) };
    tiny_spec spec = flat_spec;
    spec.loops = 1;
    tl_model *model = tiny_load(&spec, NULL);
    bool sees[N];
    for (size_t changed = 0; changed < N; changed++) {
        find_seers(sees, model, changed, PREFIX, WINDOW);
        for (size_t i = 0; i < N; i++) {
            bool inside = changed < PREFIX && i < PREFIX;
            CHECK_EQ(sees[i], (inside || i >= changed) && i <= changed + REACH);
        }
    }
    tl_model_release(model);
}

TEST(no_prefix_is_causal)
{
    tiny_spec causal = flat_spec;
    causal.wiring = NULL;
    tl_model *a = load(false, 1, 0), *b = tiny_load(&causal, NULL);
    int32_t tokens[N];
    make_tokens(tokens);
    logits x = logits_of(a, tokens, 0, 0), y = logits_of(b, tokens, 0, 0), unstated, one;
    CHECK_MEM_EQ(&x, &y, sizeof x);
    CHECK_OK(tl_model_logits(unstated.at[0], a, tokens, N, NULL, NULL));
    CHECK_MEM_EQ(&x, &unstated, sizeof x);
    one = logits_of(a, tokens, 1, 0); /* a token that sees itself */
    CHECK_MEM_EQ(&x, &one, sizeof x);
    tl_model_release(a);
    tl_model_release(b);
}

/* Of generations and of what makes a cache, the whole prompt is the prefix unless stated. */
TEST(the_default_prefix)
{
    tl_model *model = load(true, 1, 0);
    int32_t tokens[N];
    make_tokens(tokens);
    tl_generate_options options = greedy(N_NEW);
    output unstated = generate_plain(model, tokens, N, &options);
    options.has_prefix_len = 1;
    options.prefix_len = N;
    CHECK_OUTPUT(generate_plain(model, tokens, N, &options), &unstated);
    logits whole = logits_of(model, tokens, N, 0);
    int32_t best = 0;
    for (int32_t i = 1; i < VOCAB; i++)
        best = whole.at[N - 1][i] > whole.at[N - 1][best] ? i : best;
    CHECK_EQ(unstated.tokens[0], best);
    tl_prefix_cache *cache;
    tl_prefix_cache_info info = {.size = sizeof info};
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, tokens, N, NULL));
    CHECK_OK(tl_prefix_cache_get_info(&info, cache));
    CHECK_EQ(info.prefix_len, N);
    CHECK_EQ(info.loops, 2);
    CHECK_EQ(info.inner_loops, 2);
    tl_prefix_cache_release(cache);
    tl_model_release(model);
}

/* ---- the law ---- */

TEST(chunks_and_threads)
{
    static const int chunks[] = {0, 1, 7, 20, 33};
    static const int64_t prefixes[] = {0, 2, 8, 33, N}, windows[] = {0, 9};
    int32_t tokens[N];
    make_tokens(tokens);
    for (int nested = 0; nested < 2; nested++) {
        for (int p = 0; p < 10; p++) {
            logits first = {0};
            for (int c = 0; c < 5; c++) {
                tl_model *model = load(nested, 1 + c % 3, chunks[c]);
                logits made = logits_of(model, tokens, prefixes[p / 2], windows[p % 2]);
                if (c == 0)
                    first = made;
                CHECK_MEM_EQ(&made, &first, sizeof made);
                tl_model_release(model);
            }
        }
    }
}

/* Sequences with prefixes of their own, of any length, side by side. */
TEST(batches)
{
    static const struct {
        size_t n_before, n;
        int64_t prefix;
    } members[] = {{0, 20, 20}, {0, 20, 3}, {12, 5, 12}, {9, 3, 0}, {0, 1, 1}};
    enum { N_MEMBERS = sizeof members / sizeof *members };
    for (int nested = 0; nested < 2; nested++) {
        tl_model *model = load(nested, 3, 0);
        int32_t tokens[N];
        make_tokens(tokens);
        size_t hidden = (size_t)model->config.hidden_size;
        run_pass *pass;
        run_item items[N_MEMBERS];
        float *want[N_MEMBERS];
        REQUIRE_OK(run_pass_create(&pass, model, 64));
        for (size_t i = 0; i < N_MEMBERS; i++) {
            size_t before = members[i].n_before, n = members[i].n;
            cache_key key = {
                .loops = 2, .inner_loops = nested ? 2 : 0, .prefix_len = members[i].prefix};
            tl_kv_cache *alone;
            want[i] = malloc((before + n) * hidden * sizeof *want[i]);
            REQUIRE_OK(kv_cache_create(&alone, model, key));
            run_item whole = {
                .kv = alone, .tokens = tokens, .n_tokens = before + n, .hidden = want[i]};
            CHECK_OK(run_forward(pass, &whole, 1));
            kv_cache_release(alone);
            items[i] = (run_item){.tokens = tokens, .n_tokens = before};
            REQUIRE_OK(kv_cache_create(&items[i].kv, model, key));
            if (before > 0)
                CHECK_OK(run_forward(pass, &items[i], 1));
            items[i].tokens += before;
            items[i].n_tokens = n;
            items[i].hidden = malloc(n * hidden * sizeof(float));
        }
        CHECK_OK(run_forward(pass, items, N_MEMBERS));
        for (size_t i = 0; i < N_MEMBERS; i++) {
            CHECK_MEM_EQ(items[i].hidden, want[i] + members[i].n_before * hidden,
                         members[i].n * hidden * sizeof(float));
            free(items[i].hidden);
            free(want[i]);
            kv_cache_release(items[i].kv);
        }
        run_pass_destroy(pass);
        tl_model_release(model);
    }
}

/* ---- sequences ---- */

static tl_kv_cache *create(tl_model *model, int64_t prefix_len, int64_t window)
{
    const tl_cache_options key = key_of(prefix_len, window);
    tl_kv_cache *kv;
    CHECK_OK(tl_kv_cache_create(&kv, model, &key));
    return kv;
}

TEST(a_sequence_gets_its_whole_prefix_in_one_call)
{
    tl_model *model = load(false, 2, CHUNK);
    int32_t tokens[N];
    make_tokens(tokens);
    float hidden[HIDDEN], want[HIDDEN];
    tl_kv_cache *kv = create(model, 20, 0), *whole = create(model, 20, 0);
    for (size_t n = 1; n < 20; n += 6) {
        CHECK_STATUS(tl_decode_with_kv_cache_capture(hidden, kv, tokens, n), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "prefix_len is 20");
        CHECK_EQ(tl_kv_cache_length(kv) + tl_kv_cache_bytes(kv), 0);
    }
    CHECK_OK(tl_decode_with_kv_cache_capture(want, whole, tokens, N));
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, 20));
    for (size_t i = 20; i < N; i++)
        CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens + i, 1));
    CHECK_MEM_EQ(hidden, want, sizeof want);
    CHECK(same_kv(kv, whole));
    tl_kv_cache_release(kv);
    tl_kv_cache_release(whole);
    tl_model_release(model);
}

TEST(truncation_inside_of_the_prefix_is_refused)
{
    tl_model *model = load(false, 1, 0);
    int32_t tokens[N];
    make_tokens(tokens);
    float hidden[HIDDEN], want[HIDDEN];
    tl_kv_cache *kv = create(model, 20, 0), *clone;
    CHECK_OK(tl_decode_with_kv_cache_capture(want, kv, tokens, N));
    REQUIRE_OK(tl_kv_cache_clone(&clone, kv));
    for (int64_t length = 1; length < 20; length++) {
        CHECK_STATUS(tl_kv_cache_truncate(kv, length), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "allowed are 0 and 20 to 45");
        CHECK_EQ(tl_kv_cache_length(kv), N);
    }
    CHECK(same_kv(kv, clone));
    CHECK_OK(tl_kv_cache_truncate(kv, 20));
    CHECK_STATUS(tl_kv_cache_truncate(kv, 19), TL_STATUS_INVALID);
    CHECK_OK(tl_kv_cache_truncate(kv, 20)); /* what it has */
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens + 20, N - 20));
    CHECK_MEM_EQ(hidden, want, sizeof want);
    CHECK_OK(tl_kv_cache_truncate(kv, 0));
    CHECK_STATUS(tl_decode_with_kv_cache_capture(hidden, kv, tokens, 19), TL_STATUS_INVALID);
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, N));
    CHECK_MEM_EQ(hidden, want, sizeof want);
    /* a clone is as strict */
    CHECK_STATUS(tl_kv_cache_truncate(clone, 7), TL_STATUS_INVALID);
    tl_kv_cache_release(kv);
    tl_kv_cache_release(clone);
    tl_model_release(model);
}

/* The window lets go of a prefix's blocks as of any, and what comes after is the same in parts. */
TEST(a_sequence_with_window_and_prefix)
{
    tl_model *model = load(true, 2, CHUNK);
    int32_t tokens[N];
    make_tokens(tokens);
    float hidden[18], want[18];
    static const int64_t windows[] = {1, 5, 31, 32, 44, 45};
    for (size_t w = 0; w < 6; w++) {
        tl_kv_cache *whole = create(model, 40, windows[w]), *kv = create(model, 40, windows[w]);
        CHECK_OK(tl_decode_with_kv_cache_capture(want, whole, tokens, N));
        CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, 40));
        for (size_t i = 40; i < N; i++)
            CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens + i, 1));
        CHECK_MEM_EQ(hidden, want, sizeof want);
        CHECK(same_kv(kv, whole));
        CHECK_EQ(tl_kv_cache_bytes(kv), tl_kv_cache_bytes(whole));
        tl_kv_cache_release(kv);
        tl_kv_cache_release(whole);
    }
    tl_model_release(model);
}

/* ---- prefix caches ---- */

TEST(a_prefix_cache_is_for_its_prefix_alone)
{
    for (int nested = 0; nested < 2; nested++) {
        tl_model *model = load(nested, 2, CHUNK);
        int32_t tokens[N];
        make_tokens(tokens);
        tl_generate_options options = sampled(N_NEW, 3);
        output want = generate_plain(model, tokens, 30, &options);
        tl_prefix_cache *cache;
        REQUIRE_OK(tl_build_prefix_cache(&cache, model, tokens, 30, NULL));
        CHECK_OUTPUT(generate_cached(cache, model, NULL, 0, &options), &want);
        CHECK_OUTPUT(generate_cache_streamed(cache, model, NULL, 0, &options), &want);
        output refused = {.status = TL_STATUS_INVALID};
        CHECK_OUTPUT(generate_cached(cache, model, tokens + 30, 5, &options), &refused);
        CHECK_STR_HAS(tl_last_error(), "prefix_len is 35 (the whole prompt unless stated)");
        CHECK_STR_HAS(tl_last_error(), "built with 30");
        CHECK_OUTPUT(generate_cache_streamed(cache, model, tokens + 30, 5, &options), &refused);
        /* where the call says so, the suffix sees the prefix but is not seen */
        options.has_prefix_len = 1;
        options.prefix_len = 30;
        want = generate_plain(model, tokens, 35, &options);
        CHECK_OK(want.status);
        CHECK_OUTPUT(generate_cached(cache, model, tokens + 30, 5, &options), &want);
        options.prefix_len = 0;
        CHECK_OUTPUT(generate_cached(cache, model, tokens + 30, 5, &options), &refused);
        tl_prefix_cache_release(cache);

        const tl_cache_options causal = key_of(0, 0);
        REQUIRE_OK(tl_build_prefix_cache(&cache, model, tokens, 30, &causal));
        want = generate_plain(model, tokens, 35, &options);
        CHECK_OUTPUT(generate_cached(cache, model, tokens + 30, 5, &options), &want);
        options.has_prefix_len = 0; /* the whole prompt */
        CHECK_OUTPUT(generate_cached(cache, model, tokens + 30, 5, &options), &refused);
        CHECK_OUTPUT(generate_cached(cache, model, NULL, 0, &options), &refused);
        tl_prefix_cache_release(cache);
        tl_model_release(model);
    }
}

/* ---- pools ---- */

typedef struct heard {
    int n;
    char message[300];
} heard;

static void hear(void *user, int32_t level, const char *message)
{
    heard *h = user;
    h->n++;
    CHECK_EQ(level, TL_LOG_INFO);
    snprintf(h->message, sizeof h->message, "%s", message);
}

/* The outcome of a request for n tokens, which gives what plain generation gives: 0 a miss, 1 a
 * part, 2 all. */
static int outcome(tl_prefix_pool *pool, tl_model *model, size_t n,
                   const tl_generate_options *options)
{
    int32_t tokens[N];
    make_tokens(tokens);
    output want = generate_plain(model, tokens, n, options);
    CHECK_OK(want.status);
    tl_counters before = counters_of(model);
    CHECK_OUTPUT(generate_pooled(pool, model, tokens, n, options), &want);
    work done = work_since(&before, model);
    CHECK_OUTPUT(generate_streamed(pool, model, tokens, n, options), &want);
    CHECK_EQ(done.full + done.partial + done.miss, 1);
    CHECK_EQ(done.fallback, 0);
    return (int)(2 * done.full + done.partial);
}

TEST(only_an_entry_of_exactly_the_prompt_serves_it)
{
    for (int nested = 0; nested < 2; nested++) {
        tl_model *model = load(nested, 2, CHUNK);
        int32_t tokens[N];
        make_tokens(tokens);
        heard h = {0};
        tl_prefix_pool *pool = make_pool(8);
        enter(pool, model, tokens, 10, NULL);
        enter(pool, model, tokens, 30, NULL);
        tl_generate_options options = sampled(N_NEW, 3);
        tl_set_log_callback(hear, &h);
        CHECK_EQ(outcome(pool, model, 30, &options), 2);
        CHECK_EQ(outcome(pool, model, 10, &options), 2);
        CHECK_EQ(h.n, 0);
        CHECK_EQ(outcome(pool, model, 31, &options), 0);
        CHECK_EQ(h.n, 2); /* of both ways */
        CHECK_STR_HAS(h.message, "no entry has the same prefix_len");
        CHECK_EQ(outcome(pool, model, 29, &options), 0);
        CHECK_EQ(outcome(pool, model, 1, &options), 0);
        CHECK_EQ(h.n, 6);
        options.has_prefix_len = 1; /* causal requests have nothing to do with those entries */
        CHECK_EQ(outcome(pool, model, 30, &options), 0);
        CHECK_EQ(h.n, 6);
        tl_set_log_callback(NULL, NULL);
        options.prefix_len = 30; /* a longer text with the same prefix */
        CHECK_EQ(outcome(pool, model, 40, &options), 1);
        options.prefix_len = 10;
        CHECK_EQ(outcome(pool, model, 40, &options), 1);
        options.prefix_len = 11;
        CHECK_EQ(outcome(pool, model, 40, &options), 0);
        tl_prefix_pool_release(pool);
        tl_model_release(model);
    }
}

TEST(causal_entries_serve_causal_requests)
{
    tl_model *model = load(true, 1, CHUNK);
    int32_t tokens[N];
    make_tokens(tokens);
    const tl_cache_options causal = key_of(0, 0);
    tl_prefix_pool *pool = make_pool(8);
    enter(pool, model, tokens, 20, &causal);
    enter(pool, model, tokens, 30, &causal);
    tl_generate_options options = sampled(N_NEW, 3);
    CHECK_EQ(outcome(pool, model, 30, &options), 0);
    options.has_prefix_len = 1;
    CHECK_EQ(outcome(pool, model, 30, &options), 2);
    CHECK_EQ(outcome(pool, model, 25, &options), 1);
    CHECK_EQ(outcome(pool, model, 40, &options), 1);
    CHECK_EQ(outcome(pool, model, 19, &options), 0);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(keys_have_both_loops_and_the_prefix)
{
    tl_model *model = load(true, 1, 0);
    int32_t tokens[N];
    make_tokens(tokens);
    tl_prefix_pool *pool = make_pool(8);
    tl_cache_options key = {.size = sizeof key, .loops = 3, .inner_loops = 1};
    enter(pool, model, tokens, 20, &key);
    tl_generate_options options = greedy(N_NEW);
    tiny_set_key(&options, &key);
    CHECK_EQ(outcome(pool, model, 20, &options), 2);
    options.inner_loops = 2;
    CHECK_EQ(outcome(pool, model, 20, &options), 0);
    options.loops = 1;
    options.inner_loops = 3;
    CHECK_EQ(outcome(pool, model, 20, &options), 0);
    options.loops = options.inner_loops = 0;
    CHECK_EQ(outcome(pool, model, 20, &options), 0);
    key.inner_loops = 2;
    enter(pool, model, tokens, 20, &key); /* beside the first */
    key.prefix_len = 7;
    key.has_prefix_len = 1;
    enter(pool, model, tokens, 20, &key);
    CHECK_EQ(tl_prefix_pool_size(pool), 3);
    tl_cache_options standard = {.size = sizeof standard, .loops = 2, .inner_loops = 2};
    enter(pool, model, tokens, 20, &standard);
    enter(pool, model, tokens, 20, NULL); /* the same, unstated */
    CHECK_EQ(tl_prefix_pool_size(pool), 4);
    CHECK_EQ(outcome(pool, model, 20, &options), 2);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

/* ---- no memory ---- */

/* Every allocation of a request fails once: the plain path follows, or there is an error;
 * afterwards all is as it was. */
TEST(requests_without_memory)
{
    tl_model *model = load(true, 2, CHUNK);
    int32_t tokens[N];
    make_tokens(tokens);
    tl_generate_options options = greedy(N_NEW);
    output want = generate_plain(model, tokens, 30, &options);
    tl_prefix_pool *pool = make_pool(2);
    enter(pool, model, tokens, 30, NULL);
    CHECK_OUTPUT(generate_pooled(pool, model, tokens, 30, &options), &want);
    int64_t live = mem_live(), n_failed = 0;
    size_t in_use = blocks_in_use(model);
    for (int64_t n = 0; n < MAX_FAULTS; n++) {
        mem_fail_at(n);
        output got = generate_pooled(pool, model, tokens, 30 - (size_t)(n % 2), &options);
        mem_fail_at(-1);
        CHECK(got.status == TL_STATUS_OK || got.status == TL_STATUS_NOMEM);
        if (got.status == TL_STATUS_OK && n % 2 == 0)
            CHECK_OUTPUT(got, &want);
        CHECK_EQ(mem_live(), live);
        CHECK_EQ(blocks_in_use(model), in_use);
        CHECK_EQ(tl_prefix_pool_size(pool), 1);
        n_failed += got.status != TL_STATUS_OK;
    }
    CHECK(n_failed > 10);
    CHECK_OUTPUT(generate_pooled(pool, model, tokens, 30, &options), &want);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(sequences_without_memory)
{
    tl_model *model = load(false, 2, CHUNK);
    int32_t tokens[N];
    make_tokens(tokens);
    float hidden[HIDDEN], want[HIDDEN];
    tl_kv_cache *whole = create(model, 20, 0), *kv = create(model, 20, 0);
    CHECK_OK(tl_decode_with_kv_cache_capture(want, whole, tokens, 40));
    int64_t n_failed = 0;
    for (int64_t n = 0; n < MAX_FAULTS && tl_kv_cache_length(kv) == 0; n++, n_failed++) {
        mem_fail_at(n);
        tl_status status = tl_decode_with_kv_cache_capture(hidden, kv, tokens, 40);
        mem_fail_at(-1);
        CHECK(status == TL_STATUS_OK || status == TL_STATUS_NOMEM);
        CHECK_EQ(tl_kv_cache_length(kv), status == TL_STATUS_OK ? 40 : 0);
        CHECK(status == TL_STATUS_OK || tl_kv_cache_bytes(kv) == 0);
    }
    CHECK(n_failed > 10);
    CHECK_MEM_EQ(hidden, want, sizeof want);
    CHECK(same_kv(kv, whole));
    tl_kv_cache_release(kv);
    tl_kv_cache_release(whole);
    tl_model_release(model);
}
