/* Every allocation of every operation fails once: the result is right or there is an error, and
 * nothing is lost, leaked or changed. */
#include "base/memory.h"
#include "law.h"
#include "outputs.h"
#include "run/forward.h"

enum { N_PROMPT = 40, N_NEW = 30, MAX_ALLOCATIONS = 2000 };

/* True if the failure that mem_fail_at(n) ordered is still to come; it comes no more. */
static bool disarm(int64_t n)
{
    bool armed = false;
    for (int64_t i = 0; i <= n && !armed; i++) {
        void *p = mem_array(1, 1);
        armed = p == NULL;
        mem_free(p);
    }
    mem_fail_at(-1);
    return armed;
}

/* The body runs with allocation 0, 1, 2 ... failing, until there are no more. */
#define EACH_FAULT(n)                                                                              \
    bool more = true;                                                                              \
    for (int64_t n = 0; more && CHECK(n < MAX_ALLOCATIONS); n++)

/* Statements under the fault; `more` tells afterwards whether it came about. */
#define WITH_FAULT(n, ...)                                                                         \
    do {                                                                                           \
        mem_fail_at(n);                                                                            \
        __VA_ARGS__;                                                                               \
        more = !disarm(n);                                                                         \
    } while (0)

/* OK, or a failure that says what it is; of a call of the C API, after the name of the call. */
static bool sound(tl_status status)
{
    if (status == TL_STATUS_OK)
        return true;
    const char *text = tl_last_error(), *sentence = strstr(text, "out of memory: ");
    const char *prefix = strstr(text, ": ");
    return CHECK_EQ(status, TL_STATUS_NOMEM) &&
           test_check(sentence != NULL && (sentence == text || sentence == prefix + 2), __FILE__,
                      __LINE__, "\"%s\"", text);
}

static void make_prompt(int32_t *prompt)
{
    tiny_tokens(prompt, N_PROMPT + N_NEW, 50, 3);
}

/* The standard model and one of each other wiring. */
static const int wirings[] = {0,           TINY_OURO,   TINY_HUGINN, TINY_OLMO,
                              TINY_PARCAE, TINY_IQUEST, TINY_HRM};
enum { N_WIRINGS = sizeof wirings / sizeof *wirings };

TEST(load)
{
    const int32_t end_ids[] = {1, 2};
    int64_t live = mem_live();
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tiny_spec spec = tiny_specs[s];
        spec.end_ids = end_ids;
        spec.n_end_ids = 2;
        tiny_file *file = tiny_make(&spec);
        tl_model_options options = tiny_options(2);
        options.verify = 1;
        int64_t n_failed = 0;
        EACH_FAULT(n)
        {
            tl_model *model;
            tl_status status;
            WITH_FAULT(n, status = tiny_load_bytes(&model, file->bytes, file->size, &options));
            CHECK(sound(status));
            CHECK_EQ(status == TL_STATUS_OK, model != NULL);
            CHECK_EQ(status == TL_STATUS_OK, !more); /* nothing here is dispensable */
            tl_model_release(model);
            CHECK_EQ(mem_live(), live);
            n_failed += more;
        }
        CHECK(n_failed > 20);
        tiny_free(file);
    }
}

static void check_generate(int spec, int64_t max_tokens)
{
    int64_t live = mem_live();
    tl_model *model = load_warm_spec(spec);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, model->config.vocab_size, 3);
    tl_generate_options options = sampled(max_tokens, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    CHECK_EQ(want.n, max_tokens);
    output streamed = generate_streamed(NULL, model, prompt, N_PROMPT, &options);
    CHECK_OUTPUT(streamed, &want);
    int64_t warm = mem_live(), n_failed = 0;
    EACH_FAULT(n)
    {
        output got;
        WITH_FAULT(n, got = n % 2 ? generate_plain(model, prompt, N_PROMPT, &options)
                                  : generate_streamed(NULL, model, prompt, N_PROMPT, &options));
        CHECK(sound(got.status));
        if (got.status == TL_STATUS_OK)
            CHECK_OUTPUT(got, &want);
        CHECK_EQ(got.status == TL_STATUS_OK, !more);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
        n_failed += more;
    }
    CHECK(n_failed > 20);
    CHECK_OUTPUT(generate_plain(model, prompt, N_PROMPT, &options), &want);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(generate)
{
    for (int i = 0; i < N_WIRINGS; i++)
        check_generate(wirings[i], i == 0 ? N_NEW : 2);
}

/* One failure anywhere after the request was taken must not show: the plain path follows. */
static void check_pool_request(tl_model *model, size_t n_cached, int64_t max_tokens)
{
    int32_t prompt[N_PROMPT + N_NEW];
    make_prompt(prompt);
    tl_generate_options options = sampled(max_tokens, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    tl_prefix_pool *pool = make_pool(4);
    enter(pool, model, prompt, n_cached, NULL);
    int64_t warm = mem_live(), n_fallbacks = 0;
    size_t in_use = blocks_in_use(model);
    EACH_FAULT(n)
    {
        output got;
        tl_counters before = counters_of(model);
        CHECK_STATUS(tl_kv_cache_truncate(NULL, 0), TL_STATUS_INVALID);
        WITH_FAULT(n, got = n % 2 ? generate_pooled(pool, model, prompt, N_PROMPT, &options)
                                  : generate_streamed(pool, model, prompt, N_PROMPT, &options));
        work done = work_since(&before, model);
        int64_t n_outcomes = done.full + done.partial + done.miss + done.fallback;
        CHECK(sound(got.status));
        if (got.status == TL_STATUS_OK)
            CHECK_OUTPUT(got, &want);
        CHECK_EQ(done.miss, 0);
        CHECK(n_outcomes <= 1);
        if (!more) {
            CHECK_OK(got.status);
            CHECK_EQ(n_cached == N_PROMPT ? done.full : done.partial, 1);
        } else if (got.status == TL_STATUS_OK) {
            CHECK_EQ(done.fallback, 1);
        } else if (max_tokens == 1) {
            /* decoding may need more memory, but here was nothing to decode */
            test_check(n_outcomes == 0, __FILE__, __LINE__,
                       "allocation %d, %zu of %d tokens cached: an error where plain generation "
                       "could have followed",
                       (int)n, n_cached, N_PROMPT);
        }
        n_fallbacks += done.fallback;
        if (got.status == TL_STATUS_OK) /* a fallback is no failure of the call */
            CHECK_STR_EQ(tl_last_error(), "tl_kv_cache_truncate: kv is NULL");
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), in_use);
        CHECK_EQ(tl_prefix_pool_size(pool), 1);
    }
    CHECK(n_fallbacks > 3);
    CHECK_OUTPUT(generate_pooled(pool, model, prompt, N_PROMPT, &options), &want);
    tl_prefix_pool_release(pool);
}

TEST(pool_generate)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    static const size_t n_cached[] = {N_PROMPT, N_PROMPT - 1, 33, 32, 7, 1};
    for (size_t i = 0; i < 6; i++) {
        check_pool_request(model, n_cached[i], 1);
        check_pool_request(model, n_cached[i], N_NEW);
    }
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* What a prompt matches, by what is not prefilled. */
static int64_t matched(tl_prefix_pool *pool, tl_model *model, const int32_t *prompt, size_t n)
{
    tl_generate_options options = greedy(1);
    tl_counters before = counters_of(model);
    CHECK_OK(generate_pooled(pool, model, prompt, n, &options).status);
    return (int64_t)n - work_since(&before, model).prefilled;
}

/* n_before entries of lengths 2, 3, ... of a text each, then one of 35 tokens more, with faults. */
static void check_register(tl_model *model, size_t n_before, int64_t capacity)
{
    int32_t prompt[N_PROMPT + N_NEW];
    make_prompt(prompt);
    int64_t warm = mem_live();
    EACH_FAULT(n)
    {
        tl_prefix_pool *pool = make_pool(capacity);
        int64_t length = 7;
        tl_status status;
        for (size_t i = 0; i < n_before; i++)
            enter(pool, model, prompt + i % 3, 2 + i, NULL);
        int64_t size = tl_prefix_pool_size(pool), live = mem_live();
        int64_t total = tl_prefix_pool_total_cached_tokens(pool);
        size_t in_use = blocks_in_use(model);
        WITH_FAULT(n, status = tl_prefix_pool_register(&length, pool, model, prompt + 3, 35, NULL));
        CHECK(sound(status));
        if (status == TL_STATUS_OK) {
            CHECK_EQ(length, 35);
            CHECK_EQ(matched(pool, model, prompt + 3, N_PROMPT), 35);
        } else {
            CHECK_EQ(length, 0);
            CHECK_EQ(tl_prefix_pool_size(pool), size);
            CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), total);
            CHECK_EQ(blocks_in_use(model), in_use);
            CHECK(mem_live() <= live + 2); /* the pool may have its first tables by now */
            for (size_t i = 0; i < n_before; i++) {
                int64_t longest = matched(pool, model, prompt + i % 3, N_PROMPT);
                CHECK(longest >= 2 + (int64_t)i || (int64_t)n_before > capacity);
            }
            CHECK_EQ(matched(pool, model, prompt + 3, N_PROMPT), 0);
            enter(pool, model, prompt + 3, 35, NULL); /* usable after */
            CHECK_EQ(matched(pool, model, prompt + 3, N_PROMPT), 35);
        }
        CHECK_EQ(tl_prefix_pool_size(pool), size < capacity ? size + 1 : size);
        tl_prefix_pool_release(pool);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
    }
}

TEST(pool_register)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    check_register(model, 0, 4);
    check_register(model, 3, 4);
    check_register(model, 4, 4);   /* one must go */
    check_register(model, 16, 20); /* the tables must grow */
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

TEST(build_and_generate_from_prefix_caches)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT + N_NEW];
    make_prompt(prompt);
    tl_generate_options options = sampled(N_NEW, 1);
    output want = generate_plain(model, prompt, N_PROMPT, &options);
    int64_t warm = mem_live();
    EACH_FAULT(n)
    {
        tl_prefix_cache *cache;
        tl_status status;
        WITH_FAULT(n, status = tl_build_prefix_cache(&cache, model, prompt, 35, NULL));
        CHECK(sound(status));
        CHECK_EQ(status == TL_STATUS_OK, cache != NULL);
        if (cache != NULL)
            CHECK_OUTPUT(generate_cached(cache, model, prompt + 35, N_PROMPT - 35, &options),
                         &want);
        tl_prefix_cache_release(cache);
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
    }
    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, 35, NULL));
    warm = mem_live();
    more = true;
    for (int64_t n = 0; more && CHECK(n < MAX_ALLOCATIONS); n++) {
        output got;
        WITH_FAULT(n,
                   got = n % 2 ? generate_cached(cache, model, prompt + 35, N_PROMPT - 35, &options)
                               : generate_cache_streamed(cache, model, prompt + 35, N_PROMPT - 35,
                                                         &options));
        CHECK(sound(got.status));
        if (got.status == TL_STATUS_OK)
            CHECK_OUTPUT(got, &want);
        CHECK_EQ(mem_live(), warm);
        CHECK_OUTPUT(generate_cached(cache, model, prompt + 35, N_PROMPT - 35, &options), &want);
    }
    tl_prefix_cache_release(cache);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* Logits, from the model's own state and from a given one, states, and what the exit gate says. */
enum { N_EVALUATIONS = 4, MAX_NUMBERS = N_PROMPT * 6 * 20 };

typedef struct evaluations {
    tl_status status[N_EVALUATIONS]; /* a model that has no such thing refuses */
    float numbers[N_EVALUATIONS][MAX_NUMBERS];
} evaluations;

static void evaluate_all(evaluations *e, tl_model *model, const int32_t *prompt)
{
    static const float state[N_PROMPT * 20];
    memset(e, 0, sizeof *e);
    e->status[0] = tl_model_logits(e->numbers[0], model, prompt, N_PROMPT, NULL, NULL);
    e->status[1] = tl_model_logits(e->numbers[1], model, prompt, N_PROMPT, state, NULL);
    e->status[2] = tl_model_states(e->numbers[2], model, prompt, N_PROMPT, NULL, NULL);
    e->status[3] = tl_model_exit_logits(e->numbers[3], model, prompt, N_PROMPT, NULL);
}

static void check_evaluate(int spec)
{
    tl_model *model = load_warm_spec(spec);
    int32_t prompt[N_PROMPT];
    tiny_tokens(prompt, N_PROMPT, model->config.vocab_size, 3);
    static evaluations want, got;
    evaluate_all(&want, model, prompt);
    CHECK_OK(want.status[0]);
    CHECK_OK(want.status[2]);
    int64_t warm = mem_live(), n_failed = 0;
    EACH_FAULT(n)
    {
        WITH_FAULT(n, evaluate_all(&got, model, prompt));
        for (int i = 0; i < N_EVALUATIONS; i++) {
            if (got.status[i] == want.status[i])
                CHECK_MEM_EQ(got.numbers[i], want.numbers[i], sizeof *want.numbers);
            else
                CHECK_EQ(got.status[i], TL_STATUS_NOMEM);
        }
        CHECK_EQ(mem_live(), warm);
        CHECK_EQ(blocks_in_use(model), 0);
        n_failed += more;
    }
    CHECK(n_failed > 10);
    tl_model_release(model);
}

TEST(logits_and_states)
{
    for (int i = 0; i < N_WIRINGS; i++)
        check_evaluate(wirings[i]);
}

/* ---- sequences ---- */

/* A sequence of n_before tokens that gets n_new more with faults: as it was, or extended. */
static void check_decode(tl_model *model, int64_t window, size_t n_before, size_t n_new,
                         bool shared)
{
    int32_t tokens[200];
    tiny_tokens(tokens, 200, model->config.vocab_size, 5);
    const tl_cache_options key = tiny_key(model, 3, window);
    float want[20], got[20];
    size_t hidden_size = hidden_bytes(model);
    tl_kv_cache *whole, *extended;
    REQUIRE_OK(tl_kv_cache_create(&whole, model, &key));
    if (n_before > 0)
        CHECK_OK(tl_decode_with_kv_cache_capture(want, whole, tokens, n_before));
    REQUIRE_OK(tl_kv_cache_clone(&extended, whole));
    CHECK_OK(tl_decode_with_kv_cache_capture(want, extended, tokens + n_before, n_new));
    EACH_FAULT(n)
    {
        tl_kv_cache *kv, *other = NULL;
        tl_status status;
        REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
        if (n_before > 0)
            CHECK_OK(tl_decode_with_kv_cache_capture(got, kv, tokens, n_before));
        if (shared)
            REQUIRE_OK(tl_kv_cache_clone(&other, kv));
        int64_t bytes = tl_kv_cache_bytes(kv), live = mem_live();
        WITH_FAULT(n, status = tl_decode_with_kv_cache_capture(got, kv, tokens + n_before, n_new));
        CHECK(sound(status));
        if (status != TL_STATUS_OK) {
            CHECK_EQ(tl_kv_cache_length(kv), n_before);
            CHECK_EQ(tl_kv_cache_bytes(kv), bytes);
            CHECK_EQ(mem_live(), live);
            CHECK(same_kv(kv, whole));
            CHECK_OK(tl_decode_with_kv_cache_capture(got, kv, tokens + n_before, n_new));
        }
        CHECK_MEM_EQ(got, want, hidden_size);
        CHECK_EQ(tl_kv_cache_bytes(kv), tl_kv_cache_bytes(extended));
        CHECK(same_kv(kv, extended));
        CHECK(other == NULL || same_kv(other, whole));
        tl_kv_cache_release(other);
        tl_kv_cache_release(kv);
    }
    tl_kv_cache_release(whole);
    tl_kv_cache_release(extended);
    CHECK_EQ(blocks_in_use(model), 0);
}

TEST(decode_capture)
{
    int64_t live = mem_live();
    tl_model *model = load_warm(); /* passes of 16 tokens */
    static const int64_t windows[] = {0, 5, 33};
    for (size_t w = 0; w < 3; w++) {
        for (int shared = 0; shared < 2; shared++) {
            check_decode(model, windows[w], 0, 5, shared);
            check_decode(model, windows[w], 40, 1, shared);
            check_decode(model, windows[w], 40, 16, shared);
            check_decode(model, windows[w], 40, 70, shared);
            check_decode(model, windows[w], 64, 65, shared);
            check_decode(model, windows[w], 126, 50, shared); /* tables grow in the third pass */
        }
    }
    tl_model_release(model);
    static const int many_planes[] = {TINY_IQUEST, TINY_HRM};
    for (int i = 0; i < 2; i++) {
        model = load_warm_spec(many_planes[i]);
        check_decode(model, 0, 40, 1, true);
        check_decode(model, 5, 40, 70, false);
        tl_model_release(model);
    }
    CHECK_EQ(mem_live(), live);
}

TEST(create_and_clone_sequences)
{
    int64_t live = mem_live();
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT + N_NEW];
    make_prompt(prompt);
    float hidden[20];
    tl_kv_cache *kv, *made;
    EACH_FAULT(n)
    {
        tl_status status;
        WITH_FAULT(n, status = tl_kv_cache_create(&kv, model, NULL));
        CHECK(sound(status));
        CHECK_EQ(status == TL_STATUS_OK, kv != NULL);
        tl_kv_cache_release(more ? kv : NULL);
    }
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, prompt, N_PROMPT));
    int64_t warm = mem_live();
    more = true;
    for (int64_t n = 0; more && CHECK(n < MAX_ALLOCATIONS); n++) {
        tl_status status;
        WITH_FAULT(n, status = tl_kv_cache_clone(&made, kv));
        CHECK(sound(status));
        CHECK_EQ(status == TL_STATUS_OK, made != NULL);
        CHECK(made == NULL || same_kv(made, kv));
        tl_kv_cache_release(made);
        CHECK_EQ(mem_live(), warm);
    }
    tl_kv_cache_release(kv);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* All sequences of a batch are as they were, whichever of them found no memory. */
TEST(batches)
{
    tl_model *model = load_warm();
    int32_t prompt[N_PROMPT + N_NEW];
    make_prompt(prompt);
    run_pass *pass;
    REQUIRE_OK(run_pass_create(&pass, model, 60));
    int64_t n_failed = 0;
    EACH_FAULT(n)
    {
        tl_kv_cache *kv[3], *before[3];
        run_item items[3];
        for (size_t i = 0; i < 3; i++) {
            REQUIRE_OK(
                kv_cache_create(&kv[i], model, (cache_key){.loops = 2, .window = i == 1 ? 9 : 0}));
            /* the first needs a new block, the others their first tables */
            run_item item = {.kv = kv[i], .tokens = prompt + i, .n_tokens = 20};
            if (i == 0)
                CHECK_OK(run_forward(pass, &item, 1));
            REQUIRE_OK(kv_cache_clone(&before[i], kv[i]));
            items[i] = (run_item){.kv = kv[i], .tokens = prompt, .n_tokens = 14 + i};
        }
        tl_status status;
        WITH_FAULT(n, status = run_forward(pass, items, 3));
        CHECK(sound(status));
        for (size_t i = 0; i < 3; i++) {
            if (status != TL_STATUS_OK) {
                CHECK(same_kv(kv[i], before[i]));
                CHECK_EQ(tl_kv_cache_bytes(kv[i]), tl_kv_cache_bytes(before[i]));
            }
            CHECK_EQ(kv[i]->sequence.length,
                     (i == 0 ? 20 : 0) + (status == TL_STATUS_OK ? 14 + i : 0));
            kv_cache_release(kv[i]);
            kv_cache_release(before[i]);
        }
        n_failed += status != TL_STATUS_OK;
    }
    CHECK(n_failed >= 3);
    run_pass_destroy(pass);
    CHECK_EQ(blocks_in_use(model), 0);
    tl_model_release(model);
}

TEST(create_pools)
{
    int64_t live = mem_live();
    EACH_FAULT(n)
    {
        tl_prefix_pool *pool;
        tl_status status;
        WITH_FAULT(n, status = tl_prefix_pool_create(&pool, NULL));
        CHECK(sound(status));
        CHECK_EQ(status == TL_STATUS_OK, pool != NULL);
        tl_prefix_pool_release(pool);
        CHECK_EQ(mem_live(), live);
    }
}
