/* generate/: every way to generate gives the same tokens, and the counters tell the work. */
#include "generate/sampler.h"
#include "outputs.h"
#include "run/engine.h"

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

enum { N_PROMPT = 45, N_NEW = 20 };

/* ---- the same tokens ---- */

/* All ways, with the first k tokens of the prompt cached. */
static void check_ways(tl_model *model, const int32_t *prompt, size_t k,
                       const tl_generate_options *options, const output *want)
{
    const tl_cache_options key = tiny_key(model, options->loops, options->cache_window);
    tl_prefix_pool *pool = make_pool(4);
    enter(pool, model, prompt, k, &key);
    tl_counters before = counters_of(model);
    CHECK_OUTPUT(generate_pooled(pool, model, prompt, N_PROMPT, options), want);
    if (k == N_PROMPT)
        CHECK_WORK(&before, model, 0, (int64_t)want->n - 1, 1, 0, 0, 0);
    else
        CHECK_WORK(&before, model, N_PROMPT - (int64_t)k, (int64_t)want->n - 1, 0, 1, 0, 0);
    CHECK_OUTPUT(generate_streamed(pool, model, prompt, N_PROMPT, options), want);
    tl_prefix_pool_release(pool);

    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, k, &key));
    for (int again = 0; again < 2; again++) /* the cache is not used up */
        CHECK_OUTPUT(generate_cached(cache, model, prompt + k, N_PROMPT - k, options), want);
    CHECK_OUTPUT(generate_cache_streamed(cache, model, prompt + k, N_PROMPT - k, options), want);
    tl_prefix_cache_release(cache);
}

static void check_options(tl_model *model, const int32_t *prompt,
                          const tl_generate_options *options, size_t step)
{
    tl_counters before = counters_of(model);
    output want = generate_plain(model, prompt, N_PROMPT, options);
    CHECK_OK(want.status);
    CHECK_EQ(want.n, options->max_tokens);
    CHECK_WORK(&before, model, N_PROMPT, (int64_t)want.n - 1, 0, 0, 0, 0);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, options), &want);
    CHECK_OUTPUT(generate_streamed(NULL, model, prompt, N_PROMPT, options), &want);
    for (size_t k = N_PROMPT; k >= 1; k -= k > step ? step : k)
        check_ways(model, prompt, k, options, &want);
    if (N_PROMPT % step != 1)
        check_ways(model, prompt, 1, options, &want);
}

TEST(all_ways_give_the_same_tokens)
{
    static const int64_t windows[] = {0, 10, 1, 44, 45, 46};
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tl_model_options loading = tiny_options(1 + (int)s % 3);
        loading.prefill_chunk = s % 2 ? 9 : 0;
        tl_model *model = tiny_load(&tiny_specs[s], &loading);
        int32_t prompt[N_PROMPT];
        tiny_tokens(prompt, N_PROMPT, tiny_specs[s].vocab, s);
        for (int w = 0; w < (s < 5 ? 6 : 2); w++) { /* the others are large, or take long */
            tl_generate_options options = w % 2 ? greedy(N_NEW) : sampled(N_NEW, (uint64_t)w);
            const tl_cache_options key =
                tiny_key(model, tiny_specs[s].core > 0 ? w : 0, windows[w]);
            tiny_set_key(&options, &key);
            check_options(model, prompt, &options, s == 0 && w < 2 ? 1 : 22);
        }
        tl_model_release(model);
    }
}

/* The tokens are those that the sampler picks from the logits of the whole text, which has seen the
 * prompt and what was generated. */
static void check_against_sampler(tl_model *model, const tl_generate_options *o)
{
    int32_t text[N_PROMPT + N_NEW];
    tiny_tokens(text, N_PROMPT, 50, 3);
    output got = generate_plain(model, text, N_PROMPT, o);
    CHECK_EQ(got.n, N_NEW);
    memcpy(text + N_PROMPT, got.tokens, sizeof text - N_PROMPT * sizeof *text);
    static float logits[(N_PROMPT + N_NEW) * 50];
    CHECK_OK(tl_model_logits(logits, model, text, N_PROMPT + N_NEW, NULL, NULL));
    const sampling s = {o->temperature,        o->top_k, o->top_p, o->min_p,
                        o->repetition_penalty, o->seed};
    for (size_t n = N_PROMPT; n < N_PROMPT + N_NEW; n++) {
        sampler *made;
        int32_t token = -1;
        REQUIRE_OK(sampler_create(&made, 50, s));
        for (size_t i = 0; i < n; i++)
            sampler_see(made, text[i]);
        CHECK_OK(sampler_pick(&token, made, logits + (n - 1) * 50, (int64_t)n));
        CHECK_EQ(token, text[n]);
        sampler_destroy(made);
    }
}

TEST(generation_is_the_sampler_over_the_logits)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    for (uint64_t seed = 0; seed < 10; seed++) {
        tl_generate_options options = seed % 2 ? sampled(N_NEW, seed) : greedy(N_NEW);
        options.repetition_penalty = 1 + 0.3 * (double)(seed / 2);
        check_against_sampler(model, &options);
    }
    tl_model_release(model);
}

TEST(seeds)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 5);
    output first = generate_plain(model, prompt, N_PROMPT, &options);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &first);
    options.seed = 6;
    output second = generate_plain(model, prompt, N_PROMPT, &options);
    CHECK(!same_output(&first, &second));
    options.has_seed = 0; /* a fresh one each time */
    first = generate_plain(model, prompt, N_PROMPT, &options);
    second = generate_plain(model, prompt, N_PROMPT, &options);
    CHECK(!same_output(&first, &second));
    tl_model_release(model);
}

/* The part of the prompt that is in the cache counts too. */
TEST(a_penalty_that_rules_the_prompt_out)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    int32_t prompt[30];
    for (int32_t i = 0; i < 30; i++)
        prompt[i] = i;
    tl_generate_options options = greedy(10);
    options.repetition_penalty = 1e6;
    output want = generate_plain(model, prompt, 30, &options);
    CHECK_EQ(want.n, 10);
    for (size_t i = 0; i < want.n; i++)
        CHECK(want.tokens[i] >= 30);
    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, 30, NULL));
    CHECK_OUTPUT(generate_cached(cache, model, NULL, 0, &options), &want);
    tl_prefix_cache_release(cache);
    tl_model_release(model);
}

/* ---- ends ---- */

TEST(no_tokens_at_all)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    tl_prefix_pool *pool = make_pool(1);
    const int32_t prompt[] = {1, 2, 3};
    tl_generate_options options = greedy(0);
    tl_counters before = counters_of(model);
    output none = {0};
    CHECK_OUTPUT(generate_plain(model, prompt, 3, &options), &none);
    CHECK_OUTPUT(generate_pooled(pool, model, prompt, 3, &options), &none);
    CHECK_OUTPUT(generate_streamed(pool, model, prompt, 3, &options), &none);
    size_t n = 7;
    CHECK_OK(tl_generate(NULL, 0, &n, model, prompt, 3, &options)); /* no array is needed */
    CHECK_EQ(n, 0);
    CHECK_WORK(&before, model, 0, 0, 0, 0, 0, 0);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(lengths_up_to_max_seq_len)
{
    tl_model_options loading = tiny_options(1);
    loading.max_seq_len = N_PROMPT + 5;
    tl_model *model = tiny_load(&tiny_specs[0], &loading);
    int32_t prompt[N_PROMPT + 6];
    tiny_tokens(prompt, N_PROMPT + 6, 50, 1);
    tl_generate_options options = greedy(5);
    output o = generate_plain(model, prompt, N_PROMPT, &options);
    CHECK_OK(o.status);
    CHECK_EQ(o.n, 5);
    tl_prefix_pool *pool = make_pool(1);
    enter(pool, model, prompt, N_PROMPT + 5, NULL); /* a prefix of all positions */
    o = generate_pooled(pool, model, prompt, N_PROMPT + 1, &options);
    CHECK_EQ(o.status, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "46");
    CHECK_STR_HAS(tl_last_error(), "5");
    CHECK_STR_HAS(tl_last_error(), "50");
    options.max_tokens = 0;
    CHECK_OK(generate_pooled(pool, model, prompt, N_PROMPT + 5, &options).status);
    CHECK_EQ(generate_plain(model, prompt, N_PROMPT + 6, &options).status, TL_STATUS_INVALID);
    options.max_tokens = INT64_MAX;
    CHECK_EQ(generate_plain(model, prompt, 1, &options).status, TL_STATUS_INVALID);
    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, N_PROMPT, NULL));
    options.max_tokens = 5;
    CHECK_OK(generate_cached(cache, model, NULL, 0, &options).status);
    CHECK_EQ(generate_cached(cache, model, prompt, 1, &options).status, TL_STATUS_INVALID);
    tl_prefix_cache_release(cache);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(stop_tokens)
{
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    tl_generate_options options = sampled(N_NEW, 5);
    output all = generate_plain(model, prompt, N_PROMPT, &options);
    for (size_t stop = 0; stop < N_NEW; stop++) {
        const int32_t stops[] = {all.tokens[stop], all.tokens[stop]};
        output want = all;
        for (want.n = 1; want.tokens[want.n - 1] != stops[0];)
            want.n++;
        options.has_stop_tokens = 1;
        options.stop_tokens = stops;
        options.n_stop_tokens = 1 + stop % 2;
        CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
        CHECK_OUTPUT(generate_streamed(NULL, model, prompt, N_PROMPT, &options), &want);
        /* the same as the file's end ids */
        tiny_spec spec = TINY_SPEC;
        spec.end_ids = stops;
        spec.n_end_ids = 2;
        tl_model *ending = tiny_load(&spec, NULL);
        options.has_stop_tokens = 0;
        CHECK_OUTPUT(generate_plain(ending, prompt, N_PROMPT, &options), &want);
        options.has_stop_tokens = 1; /* none */
        options.n_stop_tokens = 0;
        options.stop_tokens = NULL;
        CHECK_OUTPUT(generate_plain(ending, prompt, N_PROMPT, &options), &all);
        tl_model_release(ending);
    }
    tl_model_release(model);
}

/* ---- callbacks ---- */

typedef struct listener {
    size_t n, stop_at;
    int32_t heard[MAX_OUTPUT];
    tl_model *close, *call; /* on each token, if there */
    output called;
} listener;

static int32_t listen(void *user, int32_t token)
{
    listener *l = user;
    l->heard[l->n++] = token;
    tl_model_close(l->close);
    if (l->call != NULL) {
        tl_generate_options options = greedy(3);
        const int32_t prompt[] = {4, 5, 6};
        l->called = generate_plain(l->call, prompt, 3, &options);
    }
    return l->n == l->stop_at;
}

TEST(a_callback_hears_and_stops)
{
    tl_model_options loading = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[0], &loading);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_prefix_pool *pool = make_pool(1);
    enter(pool, model, prompt, 20, NULL);
    tl_generate_options options = sampled(N_NEW, 5);
    output all = generate_plain(model, prompt, N_PROMPT, &options);
    for (size_t stop = 0; stop <= N_NEW; stop++) {
        listener l = {.stop_at = stop};
        options.on_token = listen;
        options.user = &l;
        output want = all;
        want.n = stop > 0 ? stop : N_NEW;
        tl_counters before = counters_of(model);
        CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
        CHECK_WORK(&before, model, N_PROMPT, (int64_t)want.n - 1, 0, 0, 0, 0);
        CHECK_EQ(l.n, want.n);
        CHECK_MEM_EQ(l.heard, all.tokens, want.n * sizeof *l.heard);
        l.n = 0;
        CHECK_OUTPUT(generate_pooled(pool, model, prompt, N_PROMPT, &options), &want);
        CHECK_EQ(l.n, want.n);
    }
    listener l = {0};
    options.user = &l;
    CHECK_OUTPUT(generate_streamed(pool, model, prompt, N_PROMPT, &options), &all);
    CHECK_EQ(l.n, 0); /* a stream calls nobody */
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

TEST(a_callback_may_generate)
{
    tl_model_options loading = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[0], &loading);
    const int32_t prompt[] = {4, 5, 6};
    tl_generate_options options = greedy(3);
    output inner = generate_plain(model, prompt, 3, &options);
    options = greedy(10);
    output want = generate_plain(model, prompt + 1, 2, &options);
    listener l = {.call = model};
    options.on_token = listen;
    options.user = &l;
    CHECK_OUTPUT(generate_plain(model, prompt + 1, 2, &options), &want);
    CHECK_OUTPUT(l.called, &inner);
    tl_model_release(model);
}

/* Closing ends what comes, not what is under way. */
TEST(a_model_that_is_closed_during_a_generation)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    const int32_t prompt[] = {4, 5, 6};
    tl_generate_options options = greedy(10);
    output want = generate_plain(model, prompt, 3, &options);
    tl_stream *stream;
    int32_t token;
    REQUIRE_OK(tl_stream_create(&stream, model, NULL, prompt, 3, &options));
    CHECK_OK(tl_stream_next(&token, stream));
    CHECK_EQ(token, want.tokens[0]);
    listener l = {.close = model};
    options.on_token = listen;
    options.user = &l;
    CHECK_OUTPUT(generate_plain(model, prompt, 3, &options), &want);
    CHECK_STATUS(tl_stream_next(&token, stream), TL_STATUS_CLOSED);
    CHECK_EQ(token, -1);
    CHECK_OK(tl_stream_next(&token, stream)); /* it has ended */
    CHECK_EQ(token, -1);
    tl_stream_release(stream);
    tl_model_release(model);
}

/* ---- numbers that overflow ---- */

static tl_model *load_with_infinity(const char *tensor_name)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    const float infinity = INFINITY;
    memcpy(file->bytes + tiny_find(file, tensor_name)->offset, &infinity, sizeof infinity);
    tiny_seal(file);
    tl_model *model;
    tl_model_options options = tiny_options(1);
    CHECK_OK(tiny_load_bytes(&model, file->bytes, file->size, &options));
    tiny_free(file);
    return model;
}

TEST(logits_that_are_not_finite)
{
    static const char *const tensors[] = {"final_norm.weight", "layers.1.attn.q.weight",
                                          "layers.3.mlp.down.weight", "stages.1.norm.weight"};
    for (size_t i = 0; i < 4; i++) {
        tl_model *model = load_with_infinity(tensors[i]);
        tl_prefix_pool *pool = make_pool(1);
        const int32_t prompt[] = {4, 5, 6};
        enter(pool, model, prompt, 2, NULL);
        tl_generate_options options = i % 2 ? greedy(5) : sampled(5, 1);
        output numeric = {.status = TL_STATUS_NUMERIC};
        CHECK_OUTPUT(generate_plain(model, prompt, 3, &options), &numeric);
        CHECK_STR_HAS(tl_last_error(), "position 3");
        CHECK_OUTPUT(generate_pooled(pool, model, prompt, 3, &options), &numeric);
        CHECK_OUTPUT(generate_pooled(pool, model, prompt, 2, &options), &numeric);
        CHECK_OUTPUT(generate_streamed(NULL, model, prompt, 3, &options), &numeric);
        tl_stream *stream;
        int32_t token;
        REQUIRE_OK(tl_stream_create(&stream, model, pool, prompt, 3, &options));
        CHECK_STATUS(tl_stream_next(&token, stream), TL_STATUS_NUMERIC);
        CHECK_EQ(token, -1);
        CHECK_OK(tl_stream_next(&token, stream));
        CHECK_EQ(token, -1);
        tl_stream_release(stream);
        tl_prefix_pool_release(pool);
        tl_model_release(model);
    }
}

/* ---- streams ---- */

TEST(streams_side_by_side)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    enum { N_STREAMS = 5 };
    tl_stream *streams[N_STREAMS];
    output want[N_STREAMS], got[N_STREAMS] = {0};
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 7, 3);
    for (size_t i = 0; i < N_STREAMS; i++) {
        tl_generate_options options = sampled(N_NEW, i);
        want[i] = generate_plain(model, prompt, N_PROMPT - i, &options);
        int32_t own[N_PROMPT], stops[] = {100};
        memcpy(own, prompt, sizeof own);
        stops[0] = 6;
        options.has_stop_tokens = 1;
        options.stop_tokens = stops;
        options.n_stop_tokens = 1;
        for (size_t k = 0; k < want[i].n; k++)
            if (want[i].tokens[k] == 6)
                want[i].n = k + 1;
        REQUIRE_OK(tl_stream_create(&streams[i], model, NULL, own, N_PROMPT - i, &options));
        memset(own, 0, sizeof own); /* everything was copied */
        stops[0] = 0;
    }
    for (size_t step = 0; step < N_NEW + 1; step++) {
        for (size_t i = 0; i < N_STREAMS; i++) {
            int32_t token;
            CHECK_OK(tl_stream_next(&token, streams[i]));
            if (token >= 0)
                got[i].tokens[got[i].n++] = token;
        }
    }
    for (size_t i = 0; i < N_STREAMS; i++) {
        CHECK_OUTPUT(got[i], &want[i]);
        tl_stream_release(streams[i]);
    }
    tl_model_release(model);
}

/* What a generation held is free at its end, and a stream may be left at any point. */
TEST(streams_give_back)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = greedy(5);
    for (int n_steps = 0; n_steps <= 6; n_steps++) {
        tl_stream *stream;
        int32_t token;
        REQUIRE_OK(tl_stream_create(&stream, model, NULL, prompt, N_PROMPT, &options));
        for (int i = 0; i < n_steps; i++)
            CHECK_OK(tl_stream_next(&token, stream));
        CHECK((blocks_in_use(model) == 0) == (n_steps == 0 || n_steps >= 5));
        tl_stream_release(stream);
        CHECK_EQ(blocks_in_use(model), 0);
    }
    tl_model_release(model);
}
