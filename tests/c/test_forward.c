/* run/: the law. The numbers of a position depend on the model, the loops, the window and the ids
 * up to it, and on nothing else, bit for bit. Fresh blocks hold NaN here. */
#include "base/memory.h"
#include "law.h"
#include "run/evaluate.h"
#include "test.h"

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

enum { N = 75 }; /* tokens: over two block edges */

typedef struct run {
    tl_kv_cache *kv;
    float *hidden; /* [N, hidden] */
} run;

/* The tokens of a seed in one pass, or in passes of `chunk`. */
static run run_in_chunks(tl_model *model, const int32_t *tokens, cache_key key, size_t chunk)
{
    run made = {.hidden = malloc(N * hidden_bytes(model))};
    run_pass *pass = NULL;
    CHECK_OK(kv_cache_create(&made.kv, model, key));
    CHECK_OK(run_pass_create(&pass, model, chunk));
    run_item item = {.kv = made.kv, .tokens = tokens, .n_tokens = N, .hidden = made.hidden};
    CHECK_OK(run_tokens(pass, &item, COUNT_PREFILLED));
    run_pass_destroy(pass);
    return made;
}

static void free_run(run *r)
{
    kv_cache_release(r->kv);
    free(r->hidden);
}

static void make_tokens(int32_t *tokens, const tl_model *model, uint64_t seed)
{
    tiny_tokens(tokens, N, model->config.vocab_size, seed);
}

/* ---- chunks and threads ---- */

TEST(chunks)
{
    static const int64_t windows[] = {0, 1, 20};
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tl_model *model = tiny_load(&tiny_specs[s], NULL);
        int32_t tokens[N];
        make_tokens(tokens, model, s);
        for (size_t w = 0; w < 3; w++) {
            cache_key key = {model->loops.standard, windows[w]};
            run whole = run_in_chunks(model, tokens, key, N);
            /* each chunk size for the first, smallest and quickest; else the ones at edges */
            for (size_t chunk = 1; chunk < N; chunk += s == 0 ? 1 : chunk < 4 ? 1 : 14) {
                run r = run_in_chunks(model, tokens, key, chunk);
                CHECK_MEM_EQ(r.hidden, whole.hidden, N * hidden_bytes(model));
                CHECK(same_kv(r.kv, whole.kv));
                free_run(&r);
            }
            free_run(&whole);
        }
        tl_model_release(model);
    }
}

TEST(threads)
{
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        float *first = NULL;
        for (int threads = 1; threads <= 4; threads++) {
            tl_model_options options = tiny_options(threads);
            tl_model *model = tiny_load(&tiny_specs[s], &options);
            int32_t tokens[N];
            make_tokens(tokens, model, s);
            size_t size = N * (size_t)model->config.vocab_size * sizeof(float);
            float *logits = malloc(size);
            CHECK_OK(tl_model_logits(logits, model, tokens, N, NULL));
            if (first == NULL) {
                first = logits;
            } else {
                CHECK_MEM_EQ(logits, first, size);
                free(logits);
            }
            tl_model_release(model);
        }
        free(first);
    }
}

TEST(instruction_sets)
{
    static const char *const sets[] = {"portable", "avx2", "avx512"};
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        float *first = NULL;
        for (size_t i = 0; i < 3; i++) {
            setenv("TINYLOOP_CPU_ISA", sets[i], 1);
            const cpu_kernels *kernels;
            if (cpu_kernels_choose(&kernels) != TL_STATUS_OK)
                continue; /* not on this machine */
            tl_model *model = tiny_load(&tiny_specs[s], NULL);
            int32_t tokens[N];
            make_tokens(tokens, model, s);
            size_t size = N * (size_t)model->config.vocab_size * sizeof(float);
            float *logits = malloc(size);
            CHECK_OK(tl_model_logits(logits, model, tokens, N, NULL));
            if (first == NULL)
                first = logits;
            else
                CHECK_MEM_EQ(logits, first, size);
            if (first != logits)
                free(logits);
            tl_model_release(model);
        }
        unsetenv("TINYLOOP_CPU_ISA");
        free(first);
    }
}

TEST(the_prefill_chunk_option)
{
    static const int32_t chunks[] = {1, 2, 31, 32, 33, 74, 75, 4096};
    int32_t tokens[N];
    float *first = NULL;
    for (size_t i = 0; i < 8; i++) {
        tl_model_options options = tiny_options(2);
        options.prefill_chunk = chunks[i];
        tl_model *model = tiny_load(&tiny_specs[0], &options);
        make_tokens(tokens, model, 9);
        size_t vocab = (size_t)model->config.vocab_size, hidden = hidden_bytes(model);
        size_t logits_size = N * vocab * sizeof(float), states_size = 3 * N * hidden;
        float *all = malloc(logits_size + states_size), *states = all + N * vocab;
        const tl_cache_options cache = {sizeof cache, 3, 17};
        CHECK_OK(tl_model_logits(all, model, tokens, N, &cache));
        CHECK_OK(tl_model_states(states, model, tokens, N, &cache));
        /* the same through decode capture: the last token's state gives the last logits */
        tl_kv_cache *kv;
        float *last = malloc(hidden), *logits = malloc(vocab * sizeof *logits);
        run_pass *pass;
        REQUIRE_OK(tl_kv_cache_create(&kv, model, &cache));
        CHECK_OK(tl_decode_with_kv_cache_capture(last, kv, tokens, N));
        REQUIRE_OK(run_pass_create(&pass, model, 1));
        CHECK_OK(run_head(pass, last, 1, logits));
        CHECK_MEM_EQ(logits, all + (N - 1) * vocab, vocab * sizeof *logits);
        run_pass_destroy(pass);
        tl_kv_cache_release(kv);
        free(last);
        free(logits);
        if (first == NULL)
            first = all;
        else
            CHECK_MEM_EQ(all, first, logits_size + states_size);
        if (first != all)
            free(all);
        tl_model_release(model);
    }
    free(first);
}

/* ---- batches ---- */

enum { MAX_BATCH = 5 };

/* One sequence of a batch: what it has before, what comes new. */
typedef struct member {
    int32_t tokens[N];
    size_t n_before, n_new;
    cache_key key;
    run alone;
    tl_kv_cache *kv;
    float *hidden;
    float *states;
} member;

static member make_member(tl_model *model, uint64_t seed, int64_t loops)
{
    static const int64_t windows[] = {0, 1, 7, 32, 50};
    member m = {.n_before = (size_t)(random_uniform(seed, 1) * 60),
                .n_new = 1 + (size_t)(random_uniform(seed, 2) * 14),
                .key = {loops, windows[(int)(random_uniform(seed, 3) * 5)]}};
    make_tokens(m.tokens, model, seed);
    m.alone = run_in_chunks(model, m.tokens, m.key, N);
    CHECK_OK(kv_cache_create(&m.kv, model, m.key));
    m.hidden = malloc(m.n_new * hidden_bytes(model));
    m.states = malloc((size_t)loops * m.n_new * hidden_bytes(model));
    if (m.n_before == 0)
        return m;
    run_pass *pass;
    CHECK_OK(run_pass_create(&pass, model, 16));
    run_item item = {.kv = m.kv, .tokens = m.tokens, .n_tokens = m.n_before};
    CHECK_OK(run_tokens(pass, &item, COUNT_PREFILLED));
    run_pass_destroy(pass);
    return m;
}

static void check_member(const member *m, const float *all_states)
{
    const tl_model *model = m->kv->model;
    size_t row = hidden_bytes(model), width = row / sizeof(float);
    CHECK_MEM_EQ(m->hidden, m->alone.hidden + m->n_before * width, m->n_new * row);
    for (size_t loop = 0; loop < (size_t)m->key.loops; loop++)
        CHECK_MEM_EQ(m->states + loop * m->n_new * width,
                     all_states + (loop * N + m->n_before) * width, m->n_new * row);
    CHECK(same_common_kv(m->kv, m->alone.kv));
}

static void free_member(member *m)
{
    free_run(&m->alone);
    kv_cache_release(m->kv);
    free(m->hidden);
    free(m->states);
}

static void check_batch(tl_model *model, uint64_t seed)
{
    size_t n = 1 + seed % MAX_BATCH, n_rows = 0;
    int64_t loops = model->loops.maximum > 1 ? 1 + (int64_t)(seed % 3) : 1;
    member members[MAX_BATCH];
    run_item items[MAX_BATCH];
    for (size_t i = 0; i < n; i++) {
        member *m = &members[i];
        *m = make_member(model, seed * MAX_BATCH + i, loops);
        items[i] = (run_item){.kv = m->kv,
                              .tokens = m->tokens + m->n_before,
                              .n_tokens = m->n_new,
                              .hidden = m->hidden,
                              .states = m->states,
                              .states_stride = m->n_new * (size_t)model->config.hidden_size};
        n_rows += m->n_new;
    }
    run_pass *pass;
    CHECK_OK(run_pass_create(&pass, model, n_rows));
    CHECK_OK(run_forward(pass, items, n));
    run_pass_destroy(pass);
    float *states = malloc((size_t)loops * N * hidden_bytes(model));
    for (size_t i = 0; i < n; i++) {
        member *m = &members[i];
        CHECK_OK(evaluate_states(states, model, m->tokens, N, m->key));
        check_member(m, states);
        CHECK_EQ(tl_kv_cache_length(m->kv), m->n_before + m->n_new);
        free_member(m);
    }
    free(states);
}

TEST(batches)
{
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tl_model_options options = tiny_options(1 + (int)s % 3);
        tl_model *model = tiny_load(&tiny_specs[s], &options);
        for (uint64_t seed = 0; seed < 6; seed++)
            check_batch(model, s * 100 + seed);
        size_t in_use, in_slabs;
        kv_store_bytes(model->kv, &in_use, &in_slabs);
        CHECK_EQ(in_use, 0);
        tl_model_release(model);
    }
}

TEST(batches_that_cannot_be)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    int32_t tokens[N];
    make_tokens(tokens, model, 1);
    tl_kv_cache *a, *b;
    run_pass *pass;
    REQUIRE_OK(kv_cache_create(&a, model, (cache_key){2, 0}));
    REQUIRE_OK(kv_cache_create(&b, model, (cache_key){3, 0}));
    REQUIRE_OK(run_pass_create(&pass, model, 4));
    run_item items[] = {{.kv = a, .tokens = tokens, .n_tokens = 2},
                        {.kv = b, .tokens = tokens, .n_tokens = 2}};
    CHECK_STATUS(run_forward(pass, items, 2), TL_STATUS_INTERNAL); /* other loops */
    items[0].n_tokens = 0;
    CHECK_STATUS(run_forward(pass, items, 1), TL_STATUS_INTERNAL);
    items[0].n_tokens = 5; /* rows of the pass: 4 */
    CHECK_STATUS(run_forward(pass, items, 1), TL_STATUS_INTERNAL);
    CHECK_STATUS(run_head(pass, NULL, 5, NULL), TL_STATUS_INTERNAL);
    CHECK_EQ(tl_kv_cache_length(a) + tl_kv_cache_bytes(a), 0);
    run_pass_destroy(pass);
    kv_cache_release(a);
    kv_cache_release(b);
    tl_model_release(model);
}

TEST(the_head_of_many_rows)
{
    tl_model_options options = tiny_options(3);
    tl_model *model = tiny_load(&tiny_specs[TINY_N_SPECS - 1], &options);
    int32_t tokens[N];
    make_tokens(tokens, model, 4);
    run r = run_in_chunks(model, tokens, (cache_key){2, 0}, N);
    size_t vocab = (size_t)model->config.vocab_size, hidden = (size_t)model->config.hidden_size;
    float *all = malloc(N * vocab * sizeof *all), *one = malloc(vocab * sizeof *one);
    run_pass *pass;
    REQUIRE_OK(run_pass_create(&pass, model, N));
    CHECK_OK(run_head(pass, r.hidden, N, all));
    for (size_t i = 0; i < N; i++) {
        CHECK_OK(run_head(pass, r.hidden + i * hidden, 1, one));
        CHECK_MEM_EQ(one, all + i * vocab, vocab * sizeof *one);
    }
    run_pass_destroy(pass);
    free(all);
    free(one);
    free_run(&r);
    tl_model_release(model);
}

/* ---- clones, truncation ---- */

static void extend(tl_kv_cache *kv, const int32_t *tokens, size_t n, float *hidden)
{
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, n));
}

TEST(clones_diverge)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    size_t row = hidden_bytes(model), width = row / sizeof(float);
    for (uint64_t split = 1; split < N; split += 8) {
        int32_t left[N], right[N];
        make_tokens(left, model, 1);
        make_tokens(right, model, 2);
        memcpy(right, left, split * sizeof *left);
        cache_key key = {3, split % 2 ? 0 : 12};
        run want_left = run_in_chunks(model, left, key, N);
        run want_right = run_in_chunks(model, right, key, N);
        tl_kv_cache *kv, *clone;
        float *hidden = malloc(row);
        REQUIRE_OK(kv_cache_create(&kv, model, key));
        extend(kv, left, split, hidden);
        REQUIRE_OK(tl_kv_cache_clone(&clone, kv));
        CHECK_EQ(tl_kv_cache_bytes(clone), tl_kv_cache_bytes(kv));
        for (size_t i = split; i < N; i++) { /* in turn */
            extend(clone, right + i, 1, hidden);
            CHECK_MEM_EQ(hidden, want_right.hidden + i * width, row);
            extend(kv, left + i, 1, hidden);
            CHECK_MEM_EQ(hidden, want_left.hidden + i * width, row);
        }
        CHECK(same_kv(kv, want_left.kv));
        tl_kv_cache_release(kv);
        CHECK(same_kv(clone, want_right.kv));
        tl_kv_cache_release(clone);
        free(hidden);
        free_run(&want_left);
        free_run(&want_right);
    }
    tl_model_release(model);
}

TEST(truncation_and_another_way_on)
{
    tl_model *model = tiny_load(&tiny_specs[1], NULL);
    size_t row = hidden_bytes(model), width = row / sizeof(float);
    int32_t first[N], second[N];
    make_tokens(first, model, 1);
    for (size_t cut = 0; cut < N; cut += 5) {
        make_tokens(second, model, 2);
        memcpy(second, first, cut * sizeof *first);
        cache_key key = {2, 0};
        run want = run_in_chunks(model, second, key, N), r = run_in_chunks(model, first, key, 9);
        CHECK_OK(tl_kv_cache_truncate(r.kv, (int64_t)cut));
        float *hidden = malloc(row);
        extend(r.kv, second + cut, N - cut, hidden);
        CHECK_MEM_EQ(hidden, want.hidden + (N - 1) * width, row);
        CHECK(same_kv(r.kv, want.kv));
        free(hidden);
        free_run(&want);
        free_run(&r);
    }
    tl_model_release(model);
}

TEST(a_window_that_sees_all_is_none)
{
    tl_model *model = tiny_load(&tiny_specs[2], NULL);
    int32_t tokens[N];
    make_tokens(tokens, model, 3);
    run all = run_in_chunks(model, tokens, (cache_key){2, 0}, 16);
    static const int64_t windows[] = {N, N + 1, 1000, INT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        run r = run_in_chunks(model, tokens, (cache_key){2, windows[i]}, 16);
        CHECK_MEM_EQ(r.hidden, all.hidden, N * hidden_bytes(model));
        free_run(&r);
    }
    run less = run_in_chunks(model, tokens, (cache_key){2, N - 1}, 16);
    size_t row = hidden_bytes(model);
    CHECK_MEM_EQ(less.hidden, all.hidden, (N - 1) * row);
    CHECK(memcmp((char *)less.hidden + (N - 1) * row, (char *)all.hidden + (N - 1) * row, row));
    free_run(&less);
    free_run(&all);
    tl_model_release(model);
}

/* ---- loops ---- */

TEST(deeper_loops_leave_the_shallower_planes)
{
    for (size_t s = 0; s < 4; s++) {
        tl_model *model = tiny_load(&tiny_specs[s], NULL);
        int32_t tokens[N];
        make_tokens(tokens, model, s);
        size_t row = hidden_bytes(model);
        float *deep = malloc(5 * N * row), *shallow = malloc(5 * N * row);
        run deepest = run_in_chunks(model, tokens, (cache_key){5, 0}, 20);
        CHECK_OK(evaluate_states(deep, model, tokens, N, (cache_key){5, 0}));
        for (int64_t loops = 1; loops <= 5; loops++) {
            run r = run_in_chunks(model, tokens, (cache_key){loops, 0}, 20);
            int first_loop = model->plan.n_fixed_planes;
            for (int i = 0; i < loops; i++)
                CHECK(same_plane(r.kv, deepest.kv, first_loop + i));
            for (int p = 0; p < first_loop; p++) /* before the core, not behind it */
                if (plan_plane_stage(&model->plan, p) < model->plan.looped_stage)
                    CHECK(same_plane(r.kv, deepest.kv, p));
            CHECK_OK(evaluate_states(shallow, model, tokens, N, (cache_key){loops, 0}));
            CHECK_MEM_EQ(shallow, deep, (size_t)loops * N * row);
            free_run(&r);
        }
        free_run(&deepest);
        free(deep);
        free(shallow);
        tl_model_release(model);
    }
}

TEST(one_loop_is_a_plain_model)
{
    tiny_spec looped = TINY_SPEC;
    looped.inject = looped.core_norm = false;
    tiny_spec plain = looped;
    plain.prelude = looped.prelude + looped.core + looped.coda;
    plain.core = plain.coda = 0;
    tl_model *a = tiny_load(&looped, NULL), *b = tiny_load(&plain, NULL);
    int32_t tokens[N];
    make_tokens(tokens, a, 1);
    run one = run_in_chunks(a, tokens, (cache_key){1, 0}, N);
    run plain_run = run_in_chunks(b, tokens, (cache_key){1, 0}, N);
    CHECK_MEM_EQ(one.hidden, plain_run.hidden, N * hidden_bytes(a));
    run two = run_in_chunks(a, tokens, (cache_key){2, 0}, N);
    CHECK(memcmp(two.hidden, one.hidden, N * hidden_bytes(a)) != 0);
    free_run(&one);
    free_run(&two);
    free_run(&plain_run);
    tl_model_release(a);
    tl_model_release(b);
}
