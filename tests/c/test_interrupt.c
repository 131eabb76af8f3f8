/* A callback ends every call at every forward pass: the status says so, nothing is lost, leaked or
 * changed, and the same call afterwards gives the right result. */
#include "base/memory.h"
#include "law.h"
#include "outputs.h"

#include <pthread.h>

enum { CHUNK = WARM_CHUNK, N_PROMPT = 70, N_NEW = 6, N_PREFIX = 35, MAX_ASKS = 100 };

typedef struct asker {
    int64_t n_asked;
    int64_t stop_at;           /* the ask that is answered with stop: 0 the first; negative: none */
    tl_model *call;            /* NULL, or generate with it in each ask ... */
    tl_interrupt_callback set; /* ... with this callback, unless NULL */
    output called;
    tl_model *close; /* NULL, or to be closed */
} asker;

static int32_t ask(void *user)
{
    asker *a = user;
    tl_model_close(a->close);
    if (a->call != NULL) {
        const int32_t prompt[] = {4, 5, 6};
        tl_generate_options options = greedy(3);
        if (a->set != NULL)
            tl_set_interrupt_callback(a->set, NULL);
        a->called = generate_plain(a->call, prompt, 3, &options);
    }
    return a->n_asked++ == a->stop_at;
}

/* The body runs with ask 0, 1, 2 ... answered with stop, until there are no more: `interrupted`
 * tells whether there was one. */
#define EACH_STOP(n)                                                                               \
    bool interrupted = true;                                                                       \
    for (int64_t n = 0; interrupted && CHECK(n < MAX_ASKS); n++)

#define WITH_STOP(n, ...)                                                                          \
    do {                                                                                           \
        asker stopping = {.stop_at = n};                                                           \
        tl_set_interrupt_callback(ask, &stopping);                                                 \
        __VA_ARGS__;                                                                               \
        tl_set_interrupt_callback(NULL, NULL);                                                     \
        interrupted = stopping.n_asked > n;                                                        \
        CHECK_EQ(stopping.n_asked, interrupted ? n + 1 : n); /* nobody asks again */               \
    } while (0)

static bool right_status(tl_status status, bool interrupted)
{
    if (!interrupted)
        return CHECK_OK(status);
    return CHECK_STATUS(status, TL_STATUS_INTERRUPTED) &&
           CHECK_STR_HAS(tl_last_error(), ": interrupted");
}

static int64_t passes(int64_t n_tokens)
{
    return (n_tokens + CHUNK - 1) / CHUNK;
}

/* What n asks have let through of a text of n_tokens. */
static int64_t tokens_of(int64_t n_asks, int64_t n_tokens)
{
    return n_asks * CHUNK < n_tokens ? n_asks * CHUNK : n_tokens;
}

/* ---- every call ---- */

/* Tokens that see each other go through the layers in one pass. */
static int64_t passes_of(const tl_model *model, int64_t n_prompt)
{
    return model->config.mask ? 1 : passes(n_prompt);
}

static void check_generate(int spec)
{
    int64_t live = mem_live();
    tl_model *model = load_warm_spec(spec);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, model->config.vocab_size, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    int64_t warm = mem_live(), n_stopped = 0, n_start = passes_of(model, N_PROMPT);
    EACH_STOP(n)
    {
        tl_counters before = counters_of(model);
        output got;
        WITH_STOP(n, got = generate_plain(model, prompt, N_PROMPT, &options));
        right_status(got.status, interrupted);
        CHECK_EQ(got.n, interrupted ? 0 : want.n);
        CHECK_WORK(&before, model, n >= n_start ? N_PROMPT : tokens_of(n, N_PROMPT),
                   n < n_start ? 0 : n - n_start, 0, 0, 0, 0);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
        if (!interrupted)
            CHECK_OUTPUT(got, &want);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, n_start + N_NEW - 1);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(generate)
{
    check_generate(0);
    for (int spec = TINY_OURO; spec < TINY_N_SPECS; spec++)
        check_generate(spec);
}

/* A request that is stopped before its first token is none of the pool's outcomes, and never falls
 * back to plain generation. */
static void check_pool_request(tl_model *model, size_t n_cached)
{
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    tl_prefix_pool *pool = make_pool(4);
    if (n_cached > 0)
        enter(pool, model, prompt, n_cached, NULL);
    int64_t n_start = passes((int64_t)(N_PROMPT - n_cached)), n_stopped = 0;
    int64_t warm = mem_live(), n_entries = tl_prefix_pool_size(pool);
    size_t in_use = blocks_in_use(model);
    EACH_STOP(n)
    {
        tl_counters before = counters_of(model);
        output got;
        WITH_STOP(n, got = generate_pooled(pool, model, prompt, N_PROMPT, &options));
        right_status(got.status, interrupted);
        bool started = n >= n_start;
        CHECK_WORK(&before, model, tokens_of(n, (int64_t)(N_PROMPT - n_cached)),
                   started ? n - n_start : 0, started && n_cached == N_PROMPT,
                   started && n_cached > 0 && n_cached < N_PROMPT, started && n_cached == 0, 0);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), in_use);
        CHECK_EQ(tl_prefix_pool_size(pool), n_entries);
        if (!interrupted)
            CHECK_OUTPUT(got, &want);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, n_start + N_NEW - 1);
    CHECK_OUTPUT(generate_pooled(pool, model, prompt, N_PROMPT, &options), &want);
    tl_prefix_pool_release(pool);
    CHECK_EQ(blocks_in_use(model), 0);
}

TEST(pool_generate)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    static const size_t n_cached[] = {0, 1, 33, 64, N_PROMPT - 1, N_PROMPT};
    for (size_t i = 0; i < sizeof n_cached / sizeof *n_cached; i++)
        check_pool_request(model, n_cached[i]);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(pool_register)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    int32_t tokens[N_PROMPT];
    tiny_tokens(tokens, N_PROMPT, 50, 3);
    tl_prefix_pool *pool = make_pool(1);
    enter(pool, model, tokens, 2, NULL);
    int64_t warm = mem_live(), n_stopped = 0;
    size_t in_use = blocks_in_use(model);
    tl_generate_options options = greedy(1);
    EACH_STOP(n)
    {
        int64_t length = 7;
        tl_status status;
        WITH_STOP(n,
                  status = tl_prefix_pool_register(&length, pool, model, tokens, N_PREFIX, NULL));
        right_status(status, interrupted);
        CHECK_EQ(length, interrupted ? 0 : N_PREFIX);
        CHECK_EQ(tl_prefix_pool_size(pool), 1);
        CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), interrupted ? 2 : N_PREFIX);
        if (interrupted) {
            CHECK_EQ(mem_live(), warm);
            CHECK_EQ(blocks_in_use(model), in_use);
        }
        tl_counters before = counters_of(model);
        CHECK_OK(generate_pooled(pool, model, tokens, N_PROMPT, &options).status);
        CHECK_WORK(&before, model, N_PROMPT - (interrupted ? 2 : N_PREFIX), 0, 0, 1, 0, 0);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, passes(N_PREFIX));
    tl_prefix_pool_release(pool);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(build_and_generate_from_prefix_caches)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    tl_prefix_cache *cache = NULL;
    int64_t warm = mem_live(), n_stopped = 0;
    EACH_STOP(n)
    {
        tl_status status;
        WITH_STOP(n, status = tl_build_prefix_cache(&cache, model, prompt, N_PREFIX, NULL));
        right_status(status, interrupted);
        CHECK_EQ(cache == NULL, interrupted);
        if (interrupted) {
            CHECK_EQ(mem_live(), warm);
            CHECK_EQ(blocks_in_use(model), 0);
        }
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, passes(N_PREFIX));
    REQUIRE(cache != NULL);
    warm = mem_live();
    n_stopped = 0;
    interrupted = true;
    for (int64_t n = 0; interrupted && CHECK(n < MAX_ASKS); n++) {
        output got;
        WITH_STOP(n, got = generate_cached(cache, model, prompt + N_PREFIX, N_PROMPT - N_PREFIX,
                                           &options));
        right_status(got.status, interrupted);
        if (!interrupted)
            CHECK_OUTPUT(got, &want);
        CHECK_EQ(mem_live(), warm);
        CHECK_OUTPUT(
            generate_cached(cache, model, prompt + N_PREFIX, N_PROMPT - N_PREFIX, &options), &want);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, passes(N_PROMPT - N_PREFIX) + N_NEW - 1);
    tl_prefix_cache_release(cache);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(logits_and_states)
{
    tl_model *model = load_warm();
    int32_t tokens[N_PROMPT];
    tiny_tokens(tokens, N_PROMPT, 50, 3);
    enum { N_LOGITS = N_PROMPT * 50, N_STATES = 2 * N_PROMPT * 20 };
    static float want[N_LOGITS + N_STATES], got[N_LOGITS + N_STATES];
    CHECK_OK(tl_model_logits(want, model, tokens, N_PROMPT, NULL, NULL));
    CHECK_OK(tl_model_states(want + N_LOGITS, model, tokens, N_PROMPT, NULL, NULL));
    int64_t warm = mem_live(), n_stopped = 0;
    EACH_STOP(n)
    {
        tl_status logits, states;
        WITH_STOP(n, logits = tl_model_logits(got, model, tokens, N_PROMPT, NULL, NULL));
        right_status(logits, interrupted);
        WITH_STOP(n, states = tl_model_states(got + N_LOGITS, model, tokens, N_PROMPT, NULL, NULL));
        right_status(states, interrupted);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, passes(N_PROMPT));
    CHECK_MEM_EQ(got, want, sizeof want);
    tl_model_release(model);
}

/* A sequence of n_before tokens that gets n_new more: as it was, or extended. */
static void check_decode(tl_model *model, int64_t window, size_t n_before, size_t n_new)
{
    int32_t tokens[200];
    tiny_tokens(tokens, 200, model->config.vocab_size, 5);
    const tl_cache_options key = tiny_key(model, 3, window);
    float want[20], got[20];
    tl_kv_cache *kv, *whole, *extended;
    REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
    CHECK_OK(tl_decode_with_kv_cache_capture(want, kv, tokens, n_before));
    REQUIRE_OK(tl_kv_cache_clone(&whole, kv));
    REQUIRE_OK(tl_kv_cache_clone(&extended, kv));
    CHECK_OK(tl_decode_with_kv_cache_capture(want, extended, tokens + n_before, n_new));
    int64_t bytes = tl_kv_cache_bytes(kv), live = mem_live(), n_stopped = 0;
    size_t in_use = blocks_in_use(model);
    EACH_STOP(n)
    {
        tl_status status;
        tl_counters before = counters_of(model);
        WITH_STOP(n, status = tl_decode_with_kv_cache_capture(got, kv, tokens + n_before, n_new));
        right_status(status, interrupted);
        CHECK_WORK(&before, model, 0, tokens_of(n, (int64_t)n_new), 0, 0, 0, 0);
        CHECK_EQ(tl_kv_cache_length(kv), interrupted ? n_before : n_before + n_new);
        if (interrupted) {
            CHECK_EQ(tl_kv_cache_bytes(kv), bytes);
            CHECK_EQ(mem_live(), live);
            CHECK_EQ(blocks_in_use(model), in_use);
            CHECK(same_kv(kv, whole));
        }
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, passes((int64_t)n_new));
    CHECK_MEM_EQ(got, want, hidden_bytes(model));
    CHECK(same_kv(kv, extended));
    tl_kv_cache_release(kv);
    tl_kv_cache_release(whole);
    tl_kv_cache_release(extended);
    CHECK_EQ(blocks_in_use(model), 0);
}

TEST(decode_capture)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    static const int64_t windows[] = {0, 5, 33};
    for (size_t w = 0; w < 3; w++) {
        check_decode(model, windows[w], 40, 1);
        check_decode(model, windows[w], 40, CHUNK);
        check_decode(model, windows[w], 40, 70);
        check_decode(model, windows[w], 126, 50);
    }
    tl_model_release(model);
    static const int many_planes[] = {TINY_IQUEST, TINY_HRM};
    for (int i = 0; i < 2; i++) {
        model = load_warm_spec(many_planes[i]);
        check_decode(model, 0, 126, 50);
        check_decode(model, 5, 40, 70);
        tl_model_release(model);
    }
    CHECK_EQ(mem_live(), live);
}

/* ---- streams go on ---- */

/* Asks for tokens until the end, or until a failure. */
static output pull(tl_stream *stream, output got)
{
    int32_t token;
    while ((got.status = tl_stream_next(&token, stream)) == TL_STATUS_OK && token >= 0)
        got.tokens[got.n++] = token;
    CHECK_EQ(token, -1);
    return got;
}

/* One stream is dropped where it was stopped, another goes on there. */
static void check_stream(tl_model *model, tl_prefix_pool *pool, size_t n_cached)
{
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    int64_t n_start = passes((int64_t)(N_PROMPT - n_cached)), n_stopped = 0, live = mem_live();
    size_t in_use = blocks_in_use(model);
    EACH_STOP(n)
    {
        tl_stream *dropped, *stream;
        output none = {0}, got;
        REQUIRE_OK(tl_stream_create(&dropped, model, pool, prompt, N_PROMPT, &options));
        WITH_STOP(n, pull(dropped, none));
        tl_stream_release(dropped);
        CHECK_EQ(mem_live(), live);
        CHECK_EQ(blocks_in_use(model), in_use);

        REQUIRE_OK(tl_stream_create(&stream, model, pool, prompt, N_PROMPT, &options));
        tl_counters before = counters_of(model);
        WITH_STOP(n, got = pull(stream, none));
        right_status(got.status, interrupted);
        if (interrupted) {
            CHECK_EQ(got.n, n < n_start ? 0 : n - n_start + 1);
            if (got.n == 0) /* what the start had made is gone */
                CHECK_EQ(blocks_in_use(model), in_use);
            got = pull(stream, got);
        }
        CHECK_OUTPUT(got, &want);
        work done = work_since(&before, model);
        CHECK_EQ(done.decoded, N_NEW - 1);
        CHECK_EQ(done.full + done.partial + done.miss, pool != NULL);
        CHECK_EQ(done.fallback, 0);
        tl_stream_release(stream);
        n_stopped += interrupted;
    }
    CHECK_EQ(n_stopped, n_start + N_NEW - 1);
}

TEST(streams)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    check_stream(model, NULL, 0);
    static const size_t n_cached[] = {0, N_PREFIX, N_PROMPT};
    for (size_t i = 0; i < 3; i++) {
        tl_prefix_pool *pool = make_pool(1);
        if (n_cached[i] > 0)
            enter(pool, model, prompt, n_cached[i], NULL);
        check_stream(model, pool, n_cached[i]);
        tl_prefix_pool_release(pool);
    }
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* ---- the callback ---- */

static int32_t stop(void *user)
{
    (void)user;
    return 1;
}

/* In its calls no callback is asked but one that it has set, and what it sets ends with it. */
TEST(a_callback_may_generate)
{
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    const int32_t called[] = {4, 5, 6};
    tl_generate_options options = greedy(3);
    output inner = generate_plain(model, called, 3, &options);
    options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    asker a = {.stop_at = -1, .call = model};
    tl_set_interrupt_callback(ask, &a);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
    CHECK_EQ(a.n_asked, passes(N_PROMPT) + N_NEW - 1);
    CHECK_OUTPUT(a.called, &inner);
    a.set = stop;
    a.n_asked = 0;
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
    CHECK_EQ(a.n_asked, passes(N_PROMPT) + N_NEW - 1);
    CHECK_STATUS(a.called.status, TL_STATUS_INTERRUPTED);
    tl_set_interrupt_callback(NULL, NULL);
    tl_model_release(model);
}

TEST(a_callback_may_close_the_model)
{
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    asker a = {.stop_at = -1, .close = model};
    tl_set_interrupt_callback(ask, &a);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
    CHECK_STATUS(generate_plain(model, prompt, N_PROMPT, &options).status, TL_STATUS_CLOSED);
    CHECK_EQ(a.n_asked, passes(N_PROMPT) + N_NEW - 1);
    tl_set_interrupt_callback(NULL, NULL);
    tl_model_release(model);
}

/* What runs nothing is not asked about. */
TEST(only_forward_passes_are_interrupted)
{
    tl_model *model = load_warm();
    const int32_t prompt[] = {4, 5, 6};
    tl_prefix_pool *pool = make_pool(1);
    tl_prefix_cache *cache;
    tl_kv_cache *kv;
    int64_t length;
    enter(pool, model, prompt, 3, NULL);
    CHECK_OK(tl_build_prefix_cache(&cache, model, prompt, 3, NULL));
    tl_generate_options options = greedy(1);
    output want = generate_plain(model, prompt, 3, &options);
    tl_set_interrupt_callback(stop, NULL);
    CHECK_OUTPUT(generate_cached(cache, model, NULL, 0, &options), &want);
    CHECK_OUTPUT(generate_pooled(pool, model, prompt, 3, &options), &want);
    CHECK_OK(tl_prefix_pool_register(&length, pool, model, prompt, 3, NULL));
    CHECK_OK(tl_kv_cache_create(&kv, model, NULL));
    CHECK_STATUS(generate_plain(model, prompt, 3, &options).status, TL_STATUS_INTERRUPTED);
    tl_set_interrupt_callback(NULL, NULL);
    tl_kv_cache_release(kv);
    tl_prefix_cache_release(cache);
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

typedef struct worker {
    tl_model *model;
    asker asker;
    output got;
    pthread_t asked_on, thread;
} worker;

static int32_t ask_worker(void *user)
{
    worker *w = user;
    w->asked_on = pthread_self();
    return ask(&w->asker);
}

static void *work_alone(void *user)
{
    worker *w = user;
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, 50, 3);
    tl_generate_options options = sampled(N_NEW, 1);
    if (w->asker.stop_at >= 0)
        tl_set_interrupt_callback(ask_worker, w);
    for (int i = 0; i < 20; i++) {
        w->asker.n_asked = 0;
        w->got = generate_plain(w->model, prompt, N_PROMPT, &options);
    }
    return NULL;
}

/* Each thread is asked for itself, on itself; one that ends leaves nothing behind. */
TEST(threads)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    enum { N_WORKERS = 4 };
    worker workers[N_WORKERS] = {0};
    asker a = {.stop_at = 0};
    tl_set_interrupt_callback(ask, &a);
    for (int i = 0; i < N_WORKERS; i++) {
        workers[i].model = model;
        workers[i].asker.stop_at = i - 1;
        REQUIRE(pthread_create(&workers[i].thread, NULL, work_alone, &workers[i]) == 0);
    }
    for (int i = 0; i < N_WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_STATUS(workers[i].got.status, i == 0 ? TL_STATUS_OK : TL_STATUS_INTERRUPTED);
        CHECK_EQ(workers[i].asker.n_asked, i);
        CHECK(i == 0 || pthread_equal(workers[i].asked_on, workers[i].thread));
    }
    CHECK_EQ(a.n_asked, 0);
    tl_set_interrupt_callback(NULL, NULL);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}
