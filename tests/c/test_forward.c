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

/* A nested schedule has as many inner loops. */
static cache_key key_of(const tl_model *model, int64_t loops, int64_t window)
{
    int64_t inner = model->plan.nested ? loops : 0;
    return (cache_key){.loops = loops, .window = window, .inner_loops = inner};
}

static size_t n_states(const tl_model *model, cache_key key)
{
    return (size_t)plan_n_states(&model->plan, key_loop_counts(key));
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
            cache_key key = key_of(model, model->loops.standard, windows[w]);
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
            CHECK_OK(tl_model_logits(logits, model, tokens, N, NULL, NULL));
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
            CHECK_OK(tl_model_logits(logits, model, tokens, N, NULL, NULL));
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
        const tl_cache_options cache = {.size = sizeof cache, .loops = 3, .cache_window = 17};
        CHECK_OK(tl_model_logits(all, model, tokens, N, NULL, &cache));
        CHECK_OK(tl_model_states(states, model, tokens, N, NULL, &cache));
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
                .key = key_of(model, loops, windows[(int)(random_uniform(seed, 3) * 5)])};
    make_tokens(m.tokens, model, seed);
    m.alone = run_in_chunks(model, m.tokens, m.key, N);
    CHECK_OK(kv_cache_create(&m.kv, model, m.key));
    m.hidden = malloc(m.n_new * hidden_bytes(model));
    m.states = malloc(n_states(model, m.key) * m.n_new * hidden_bytes(model));
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
    for (size_t i = 0; i < n_states(model, m->key); i++)
        CHECK_MEM_EQ(m->states + i * m->n_new * width, all_states + (i * N + m->n_before) * width,
                     m->n_new * row);
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
    float *states = malloc(n_states(model, members[0].key) * N * hidden_bytes(model));
    for (size_t i = 0; i < n; i++) {
        member *m = &members[i];
        CHECK_OK(evaluate_states(states, NULL, model,
                                 &(evaluation){.tokens = m->tokens, .n_tokens = N, .key = m->key}));
        check_member(m, states);
        CHECK_EQ(m->kv->sequence.length, m->n_before + m->n_new);
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
    REQUIRE_OK(kv_cache_create(&a, model, (cache_key){.loops = 2}));
    REQUIRE_OK(kv_cache_create(&b, model, (cache_key){.loops = 3}));
    REQUIRE_OK(run_pass_create(&pass, model, 4));
    run_item items[] = {{.kv = a, .tokens = tokens, .n_tokens = 2},
                        {.kv = b, .tokens = tokens, .n_tokens = 2}};
    CHECK_STATUS(run_forward(pass, items, 2), TL_STATUS_INTERNAL); /* other loops */
    items[0].n_tokens = 0;
    CHECK_STATUS(run_forward(pass, items, 1), TL_STATUS_INTERNAL);
    items[0].n_tokens = 5; /* rows of the pass: 4 */
    CHECK_STATUS(run_forward(pass, items, 1), TL_STATUS_INTERNAL);
    CHECK_STATUS(run_head(pass, NULL, 5, NULL), TL_STATUS_INTERNAL);
    CHECK_EQ(a->sequence.length, 0);
    CHECK_EQ(kv_sequence_bytes(&a->sequence), 0);
    run_pass_destroy(pass);
    kv_cache_release(a);
    kv_cache_release(b);
    tl_model_release(model);
}

TEST(the_head_of_many_rows)
{
    tl_model_options options = tiny_options(3);
    tl_model *model = tiny_load(&tiny_specs[TINY_LARGE], &options);
    int32_t tokens[N];
    make_tokens(tokens, model, 4);
    run r = run_in_chunks(model, tokens, (cache_key){.loops = 2}, N);
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
    CHECK_OK(evaluate_extend(hidden, kv, tokens, n));
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
        cache_key key = {.loops = 3, .window = split % 2 ? 0 : 12};
        run want_left = run_in_chunks(model, left, key, N);
        run want_right = run_in_chunks(model, right, key, N);
        tl_kv_cache *kv, *clone;
        float *hidden = malloc(row);
        REQUIRE_OK(kv_cache_create(&kv, model, key));
        extend(kv, left, split, hidden);
        REQUIRE_OK(kv_cache_clone(&clone, kv));
        CHECK_EQ(kv_sequence_bytes(&clone->sequence), kv_sequence_bytes(&kv->sequence));
        for (size_t i = split; i < N; i++) { /* in turn */
            extend(clone, right + i, 1, hidden);
            CHECK_MEM_EQ(hidden, want_right.hidden + i * width, row);
            extend(kv, left + i, 1, hidden);
            CHECK_MEM_EQ(hidden, want_left.hidden + i * width, row);
        }
        CHECK(same_kv(kv, want_left.kv));
        kv_cache_release(kv);
        CHECK(same_kv(clone, want_right.kv));
        kv_cache_release(clone);
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
        cache_key key = {.loops = 2};
        run want = run_in_chunks(model, second, key, N), r = run_in_chunks(model, first, key, 9);
        CHECK_OK(kv_sequence_truncate(&r.kv->sequence, (int64_t)cut));
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
    run all = run_in_chunks(model, tokens, (cache_key){.loops = 2}, 16);
    static const int64_t windows[] = {N, N + 1, 1000, INT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        run r = run_in_chunks(model, tokens, (cache_key){.loops = 2, .window = windows[i]}, 16);
        CHECK_MEM_EQ(r.hidden, all.hidden, N * hidden_bytes(model));
        free_run(&r);
    }
    run less = run_in_chunks(model, tokens, (cache_key){.loops = 2, .window = N - 1}, 16);
    size_t row = hidden_bytes(model);
    CHECK_MEM_EQ(less.hidden, all.hidden, (N - 1) * row);
    CHECK(memcmp((char *)less.hidden + (N - 1) * row, (char *)all.hidden + (N - 1) * row, row));
    free_run(&less);
    free_run(&all);
    tl_model_release(model);
}

/* ---- loops ---- */

/* Whether more loops change nothing in a run of fewer: those of the core and before it. */
static bool is_common(const plan_run *run, const model_plan *plan)
{
    return plan->nested || run->stage <= plan->looped_stage;
}

static float *states_of(tl_model *model, const int32_t *tokens, cache_key key)
{
    float *states = malloc(n_states(model, key) * N * hidden_bytes(model));
    evaluation what = {.tokens = tokens, .n_tokens = N, .key = key};
    CHECK_OK(evaluate_states(states, NULL, model, &what));
    return states;
}

static void check_depth(tl_model *model, const int32_t *tokens, cache_key key, const run *deepest,
                        const float *deepest_states)
{
    const model_plan *plan = &model->plan;
    loop_counts counts = key_loop_counts(key), deepest_counts = key_loop_counts(deepest->kv->key);
    run r = run_in_chunks(model, tokens, key, 20);
    for (int i = 0; i < plan_n_runs(plan, counts); i++) {
        plan_run here = plan_run_at(plan, counts, i);
        plan_run there = plan_run_at(plan, deepest_counts, i);
        if (!is_common(&here, plan))
            continue;
        CHECK(here.stage == there.stage && here.index == there.index);
        if (CHECK_EQ(here.plane, there.plane))
            CHECK(same_plane(r.kv, deepest->kv, here.plane));
    }
    float *states = states_of(model, tokens, key);
    CHECK_MEM_EQ(states, deepest_states, n_states(model, key) * N * hidden_bytes(model));
    free(states);
    free_run(&r);
}

TEST(deeper_loops_leave_the_shallower_planes)
{
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        if (tiny_specs[s].core == 0 || s == TINY_LARGE)
            continue;
        tl_model *model = tiny_load(&tiny_specs[s], NULL);
        int32_t tokens[N];
        make_tokens(tokens, model, s);
        cache_key key = {.loops = 5, .inner_loops = model->loops.standard_inner};
        run deepest = run_in_chunks(model, tokens, key, 20);
        float *deepest_states = states_of(model, tokens, key);
        for (key.loops = 1; key.loops <= 5; key.loops++)
            check_depth(model, tokens, key, &deepest, deepest_states);
        free(deepest_states);
        free_run(&deepest);
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
    run one = run_in_chunks(a, tokens, (cache_key){.loops = 1}, N);
    run plain_run = run_in_chunks(b, tokens, (cache_key){.loops = 1}, N);
    CHECK_MEM_EQ(one.hidden, plain_run.hidden, N * hidden_bytes(a));
    run two = run_in_chunks(a, tokens, (cache_key){.loops = 2}, N);
    CHECK(memcmp(two.hidden, one.hidden, N * hidden_bytes(a)) != 0);
    free_run(&one);
    free_run(&two);
    free_run(&plain_run);
    tl_model_release(a);
    tl_model_release(b);
}
