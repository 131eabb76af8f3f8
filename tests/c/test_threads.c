/* Models and one pool under eight threads: every output is the serial one. Meant for
 * ThreadSanitizer too. */
#include "base/memory.h"
#include "base/random.h"
#include "outputs.h"

#include <pthread.h>
#include <semaphore.h>
#include <sys/wait.h>
#include <unistd.h>

enum { N_THREADS = 8, N_ROUNDS = 30, N_TEXTS = 6, N_PROMPT = 36, N_NEW = 6 };

/* Each text has a prompt, options and the output that it must give, whoever asks. */
typedef struct canary {
    int32_t prompt[N_PROMPT];
    tl_generate_options options;
    output want;
} canary;

typedef struct shared {
    tl_model *model;
    tl_model *closing; /* of the same weights; thread 0 closes it half-way */
    tl_prefix_pool *pool;
    canary canaries[N_TEXTS];
    atomic_int n_requests; /* of `model` through the pool */
    atomic_int n_closed;   /* answers of `closing` that it is closed */
} shared;

typedef struct worker {
    shared *shared;
    uint64_t index;
    pthread_t thread;
    /* in the order of the checks: */
    int n_failed, n_wrong;
} worker;

static void judge(worker *w, output got, const output *want)
{
    w->n_failed += got.status != TL_STATUS_OK;
    w->n_wrong += !same_output(&got, want);
}

static void register_some(worker *w, const canary *c, double u)
{
    const tl_cache_options key = {
        .size = sizeof key, .loops = c->options.loops, .cache_window = c->options.cache_window};
    size_t n = 1 + (size_t)(u * (N_PROMPT - 1));
    int64_t length;
    w->n_failed += tl_prefix_pool_register(&length, w->shared->pool, w->shared->model, c->prompt, n,
                                           &key) != TL_STATUS_OK;
    w->n_failed += length != (int64_t)n;
}

static void build_and_use(worker *w, const canary *c, double u)
{
    const tl_cache_options key = {
        .size = sizeof key, .loops = c->options.loops, .cache_window = c->options.cache_window};
    size_t n = 1 + (size_t)(u * (N_PROMPT - 1));
    tl_prefix_cache *cache;
    w->n_failed +=
        tl_build_prefix_cache(&cache, w->shared->model, c->prompt, n, &key) != TL_STATUS_OK;
    judge(w, generate_cached(cache, w->shared->model, c->prompt + n, N_PROMPT - n, &c->options),
          &c->want);
    tl_prefix_cache_release(cache);
}

/* Takes some tokens, which are the first of the text's, and drops the stream. */
static void drop_stream(worker *w, const canary *c, double u)
{
    tl_stream *stream;
    w->n_failed += tl_stream_create(&stream, w->shared->model, w->shared->pool, c->prompt, N_PROMPT,
                                    &c->options) != TL_STATUS_OK;
    for (size_t i = 0, n = 1 + (size_t)(u * (N_NEW - 1)); i < n; i++) {
        int32_t token = -1;
        w->n_failed += tl_stream_next(&token, stream) != TL_STATUS_OK;
        w->n_wrong += token != (i < c->want.n ? c->want.tokens[i] : -1);
    }
    tl_stream_release(stream);
}

/* Until it is closed, the other model fills the pool and answers from it; then it says so. */
static void use_the_closing_model(worker *w, const canary *c, double u)
{
    shared *s = w->shared;
    const tl_cache_options key = {
        .size = sizeof key, .loops = c->options.loops, .cache_window = c->options.cache_window};
    size_t n = 1 + (size_t)(u * (N_PROMPT - 1));
    int64_t length;
    tl_status status = tl_prefix_pool_register(&length, s->pool, s->closing, c->prompt, n, &key);
    w->n_failed += status != TL_STATUS_OK && status != TL_STATUS_CLOSED;
    output got = generate_pooled(s->pool, s->closing, c->prompt, N_PROMPT, &c->options);
    if (got.status == TL_STATUS_CLOSED)
        atomic_fetch_add(&s->n_closed, 1);
    else
        judge(w, got, &c->want);
}

static void close_amid(worker *w, const canary *c, double u)
{
    use_the_closing_model(w, c, u);
    tl_model_close(w->shared->closing);
    use_the_closing_model(w, c, u);
}

static void read_statistics(worker *w)
{
    const shared *s = w->shared;
    tl_model_info info = {.size = sizeof info};
    tl_counters counters = {.size = sizeof counters};
    w->n_failed += tl_model_get_info(&info, s->model) != TL_STATUS_OK;
    w->n_failed += tl_model_get_counters(&counters, s->model) != TL_STATUS_OK;
    w->n_failed += tl_prefix_pool_size(s->pool) > 3;
    w->n_failed += tl_prefix_pool_total_cached_tokens(s->pool) > 3 * N_PROMPT;
    w->n_failed += counters.pool_fallback != 0;
    /* a failure of this thread's own: its message must be its own */
    char text[32];
    snprintf(text, sizeof text, "loops is %d;", 5000 + (int)w->index);
    const tl_cache_options wrong = {.size = sizeof wrong, .loops = 5000 + (int64_t)w->index};
    int64_t length;
    tl_prefix_pool_register(&length, s->pool, s->model, s->canaries[0].prompt, 1, &wrong);
    w->n_wrong += strstr(tl_last_error(), text) == NULL;
}

static void *work_hard(void *arg)
{
    worker *w = arg;
    shared *s = w->shared;
    for (uint64_t i = 0; i < N_ROUNDS; i++) {
        double u[3];
        for (uint64_t k = 0; k < 3; k++)
            u[k] = random_uniform(w->index * 3 + k, i);
        const canary *c = &s->canaries[(int)(u[0] * N_TEXTS)];
        int action = (int)(u[1] * 9);
        if (w->index == 0 && i == N_ROUNDS / 2)
            close_amid(w, c, u[2]);
        if (action < 2) {
            register_some(w, c, u[2]);
        } else if (action < 4) {
            atomic_fetch_add(&s->n_requests, 1);
            judge(w, generate_pooled(s->pool, s->model, c->prompt, N_PROMPT, &c->options),
                  &c->want);
        } else if (action == 4) {
            atomic_fetch_add(&s->n_requests, 1);
            judge(w, generate_streamed(s->pool, s->model, c->prompt, N_PROMPT, &c->options),
                  &c->want);
        } else if (action == 5) {
            build_and_use(w, c, u[2]);
        } else if (action == 6) {
            atomic_fetch_add(&s->n_requests, 1);
            drop_stream(w, c, u[2]);
        } else if (action == 7) {
            use_the_closing_model(w, c, u[2]);
        } else {
            read_statistics(w);
        }
    }
    return NULL;
}

static void run_workers(shared *s)
{
    worker workers[N_THREADS];
    for (uint64_t i = 0; i < N_THREADS; i++) {
        workers[i] = (worker){.shared = s, .index = i};
        REQUIRE(pthread_create(&workers[i].thread, NULL, work_hard, &workers[i]) == 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_EQ(workers[i].n_failed, 0);
        CHECK_EQ(workers[i].n_wrong, 0);
    }
}

static void check_model(const tiny_spec *spec, int threads)
{
    static shared s;
    memset(&s, 0, sizeof s);
    tl_model_options options = tiny_options(threads);
    options.prefill_chunk = 8;
    s.model = tiny_load(spec, &options);
    s.closing = tiny_load(spec, &options);
    s.pool = make_pool(3);
    for (uint64_t t = 0; t < N_TEXTS; t++) {
        canary *c = &s.canaries[t];
        tiny_tokens(c->prompt, N_PROMPT, spec->vocab, t / 2); /* two of each: shared prefixes */
        c->prompt[N_PROMPT - 1 - t % 2] = (int32_t)t;
        c->options = t % 3 ? sampled(N_NEW, t) : greedy(N_NEW);
        c->options.loops = spec->core > 0 ? 1 + (int64_t)t % 3 : 0;
        c->options.cache_window = t % 2 ? 0 : 9;
        c->want = generate_plain(s.model, c->prompt, N_PROMPT, &c->options);
        CHECK_OK(c->want.status);
    }
    run_workers(&s);
    tl_counters counters = counters_of(s.model);
    CHECK_EQ(counters.pool_full + counters.pool_partial + counters.pool_miss, s.n_requests);
    CHECK(counters.pool_partial > 0);
    CHECK(s.n_closed > 0);
    CHECK(counters_of(s.closing).tokens_decoded > 0);
    tl_prefix_pool_release(s.pool);
    CHECK_EQ(blocks_in_use(s.model), 0);
    tl_model_release(s.model);
    tl_model_release(s.closing);
}

TEST(one_lane)
{
    check_model(&tiny_specs[0], 1);
}

TEST(three_lanes)
{
    check_model(&tiny_specs[1], 3);
}

/* ---- sequences that share blocks ---- */

typedef struct forker {
    tl_kv_cache *kv; /* own clone */
    const int32_t *tokens;
    const float *want; /* [n, hidden] after each token */
    size_t n;
    int n_wrong;
    pthread_t thread;
} forker;

static void *go_on(void *arg)
{
    forker *f = arg;
    float hidden[20];
    for (size_t i = 0; i < f->n; i++) {
        f->n_wrong += tl_decode_with_kv_cache_capture(hidden, f->kv, f->tokens + i, 1) != 0;
        f->n_wrong += memcmp(hidden, f->want + i * 20, sizeof hidden) != 0;
    }
    tl_kv_cache_release(f->kv);
    return NULL;
}

/* Eight clones of one half-filled block, each extended on a thread of its own. */
TEST(clones_on_threads)
{
    enum { N_BEFORE = 20, N_AFTER = 20 };
    tl_model_options options = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[0], &options);
    int32_t tokens[N_THREADS][N_AFTER], before[N_BEFORE];
    static float want[N_THREADS][N_AFTER][20];
    tiny_tokens(before, N_BEFORE, 50, 1);
    tl_kv_cache *kv, *alone;
    float hidden[20];
    REQUIRE_OK(tl_kv_cache_create(&kv, model, NULL));
    REQUIRE_OK(tl_decode_with_kv_cache_capture(hidden, kv, before, N_BEFORE));
    for (size_t t = 0; t < N_THREADS; t++) {
        tiny_tokens(tokens[t], N_AFTER, 50, 2 + t);
        REQUIRE_OK(tl_kv_cache_create(&alone, model, NULL));
        REQUIRE_OK(tl_decode_with_kv_cache_capture(hidden, alone, before, N_BEFORE));
        for (size_t i = 0; i < N_AFTER; i++)
            REQUIRE_OK(tl_decode_with_kv_cache_capture(want[t][i], alone, tokens[t] + i, 1));
        tl_kv_cache_release(alone);
    }
    forker forkers[N_THREADS];
    for (size_t t = 0; t < N_THREADS; t++) {
        forkers[t] = (forker){.tokens = tokens[t], .want = want[t][0], .n = N_AFTER};
        REQUIRE_OK(tl_kv_cache_clone(&forkers[t].kv, kv));
    }
    tl_kv_cache_release(kv); /* the last one to write may do so in place */
    for (size_t t = 0; t < N_THREADS; t++)
        REQUIRE(pthread_create(&forkers[t].thread, NULL, go_on, &forkers[t]) == 0);
    for (size_t t = 0; t < N_THREADS; t++) {
        pthread_join(forkers[t].thread, NULL);
        CHECK_EQ(forkers[t].n_wrong, 0);
    }
    tl_model_release(model);
}

/* ---- the same key at once, and the end of a model ---- */

typedef struct racer {
    tl_model *model;
    tl_prefix_pool *pool;
    const int32_t *tokens;
    int n_wrong;
    pthread_t thread;
} racer;

static pthread_barrier_t start_line;

static void *register_and_release(void *arg)
{
    racer *r = arg;
    int64_t length;
    for (size_t n = 1; n <= 20; n++) {
        pthread_barrier_wait(&start_line); /* so that most find the key missing, and build */
        r->n_wrong += tl_prefix_pool_register(&length, r->pool, r->model, r->tokens, n, NULL) != 0;
    }
    tl_model_release(r->model);
    return NULL;
}

TEST(the_same_keys_from_all_threads)
{
    tl_model_options options = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[1], &options);
    tl_prefix_pool *pool = make_pool(20);
    int32_t tokens[20];
    tiny_tokens(tokens, 20, 7, 1);
    racer racers[N_THREADS];
    REQUIRE(pthread_barrier_init(&start_line, NULL, N_THREADS) == 0);
    for (int t = 0; t < N_THREADS; t++) {
        racers[t] = (racer){tl_model_retain(model), pool, tokens, 0, 0};
        REQUIRE(pthread_create(&racers[t].thread, NULL, register_and_release, &racers[t]) == 0);
    }
    tl_model_release(model); /* whoever is last destroys nothing that the pool still needs */
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(racers[t].thread, NULL);
        CHECK_EQ(racers[t].n_wrong, 0);
    }
    pthread_barrier_destroy(&start_line);
    CHECK_EQ(tl_prefix_pool_size(pool), 20);
    CHECK_EQ(tl_prefix_pool_total_cached_tokens(pool), 210);
    tl_prefix_pool_release(pool);
}

static void *generate_until_closed(void *arg)
{
    racer *r = arg;
    tl_generate_options options = greedy(3);
    output got;
    do {
        got = generate_pooled(r->pool, r->model, r->tokens, 10, &options);
        r->n_wrong += got.status == TL_STATUS_OK ? got.n != 3 : got.status != TL_STATUS_CLOSED;
    } while (got.status == TL_STATUS_OK);
    return NULL;
}

TEST(closing_while_others_generate)
{
    tl_model_options options = tiny_options(2);
    tl_model *model = tiny_load(&tiny_specs[1], &options);
    tl_prefix_pool *pool = make_pool(2);
    int32_t tokens[20];
    tiny_tokens(tokens, 20, 7, 1);
    enter(pool, model, tokens, 6, NULL);
    racer racers[N_THREADS];
    for (int t = 0; t < N_THREADS; t++) {
        racers[t] = (racer){model, pool, tokens, 0, 0};
        REQUIRE(pthread_create(&racers[t].thread, NULL, generate_until_closed, &racers[t]) == 0);
    }
    while (counters_of(model).pool_partial < 50)
        sched_yield();
    tl_model_close(model);
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(racers[t].thread, NULL);
        CHECK_EQ(racers[t].n_wrong, 0);
    }
    tl_prefix_pool_release(pool);
    tl_model_release(model);
}

/* ---- one KV cache, one stream, and many threads ---- */

typedef struct sharer {
    tl_kv_cache *kv;
    tl_stream *stream;
    int64_t n_done, n_busy, n_wrong;
    pthread_t thread;
} sharer;

/* All threads together stay below max_seq_len, also if no call ever finds another. */
enum { N_SHARED = 60, N_EXTENDED = 30 };

static void tally(sharer *s, tl_status status)
{
    s->n_done += status == TL_STATUS_OK;
    s->n_busy += status == TL_STATUS_BUSY;
    s->n_wrong += status != TL_STATUS_OK && status != TL_STATUS_BUSY;
}

static void *extend_shared(void *arg)
{
    sharer *s = arg;
    const int32_t token = 3;
    float hidden[20];
    for (int i = 0; i < N_EXTENDED; i++) {
        int64_t before = tl_kv_cache_length(s->kv);
        tally(s, tl_decode_with_kv_cache_capture(hidden, s->kv, &token, 1));
        s->n_wrong += tl_kv_cache_length(s->kv) < before || tl_kv_cache_bytes(s->kv) < 0;
    }
    return NULL;
}

static void *draw_shared(void *arg)
{
    sharer *s = arg;
    int32_t token = 0;
    for (;;) {
        tl_status status = tl_stream_next(&token, s->stream);
        if (status == TL_STATUS_OK && token < 0)
            return NULL;
        tally(s, status);
        if (s->n_wrong > 0)
            return NULL;
    }
}

static int64_t run_sharers(sharer *sharers, sharer shared, void *(*run)(void *))
{
    int64_t n_done = 0;
    for (int t = 0; t < N_THREADS; t++) {
        sharers[t] = shared;
        CHECK_EQ(pthread_create(&sharers[t].thread, NULL, run, &sharers[t]), 0);
    }
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(sharers[t].thread, NULL);
        CHECK_EQ(sharers[t].n_wrong, 0);
        n_done += sharers[t].n_done;
    }
    return n_done;
}

/* Each call is done, or finds the other and changes nothing. */
TEST(one_kv_cache_and_one_stream_for_all_threads)
{
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    sharer sharers[N_THREADS], shared = {0};
    const int32_t prompt[] = {4, 5, 6};
    tl_generate_options options = greedy(N_SHARED);
    options.has_stop_tokens = 1;
    REQUIRE_OK(tl_kv_cache_create(&shared.kv, model, NULL));
    REQUIRE_OK(tl_stream_create(&shared.stream, model, NULL, prompt, 3, &options));
    int64_t n_done = run_sharers(sharers, shared, extend_shared);
    CHECK_EQ(tl_kv_cache_length(shared.kv), n_done);
    CHECK_EQ(run_sharers(sharers, shared, draw_shared), N_SHARED);
    tl_kv_cache_release(shared.kv);
    tl_stream_release(shared.stream);
    tl_model_release(model);
}

/* A call that waits in its interrupt callback until another thread has released what it uses. */
typedef struct waiter {
    sem_t begun, released;
} waiter;

static int32_t wait_for_release(void *user)
{
    waiter *w = user;
    sem_post(&w->begun);
    while (sem_wait(&w->released) != 0)
        continue;
    return 0;
}

typedef struct released_call {
    waiter waiter;
    tl_kv_cache *kv;
    tl_stream *stream;
    tl_status status;
} released_call;

static void *call_and_lose(void *arg)
{
    released_call *call = arg;
    const int32_t tokens[] = {1, 2, 3};
    float hidden[20];
    int32_t token;
    tl_set_interrupt_callback(wait_for_release, &call->waiter);
    call->status = call->kv != NULL ? tl_decode_with_kv_cache_capture(hidden, call->kv, tokens, 3)
                                    : tl_stream_next(&token, call->stream);
    return NULL;
}

static void release_during(released_call *call)
{
    pthread_t thread;
    CHECK_EQ(sem_init(&call->waiter.begun, 0, 0) + sem_init(&call->waiter.released, 0, 0), 0);
    CHECK_EQ(pthread_create(&thread, NULL, call_and_lose, call), 0);
    while (sem_wait(&call->waiter.begun) != 0)
        continue;
    tl_kv_cache_release(call->kv);
    tl_stream_release(call->stream);
    sem_post(&call->waiter.released);
    pthread_join(thread, NULL);
    CHECK_OK(call->status);
    sem_destroy(&call->waiter.begun);
    sem_destroy(&call->waiter.released);
}

TEST(another_thread_releases_what_a_call_uses)
{
    int64_t live = mem_live();
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    const int32_t prompt[] = {4, 5, 6};
    tl_generate_options options = greedy(5);
    released_call with_kv = {0}, with_stream = {0};
    REQUIRE_OK(tl_kv_cache_create(&with_kv.kv, model, NULL));
    REQUIRE_OK(tl_stream_create(&with_stream.stream, model, NULL, prompt, 3, &options));
    release_during(&with_kv);
    release_during(&with_stream);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live);
}

/* ---- the log ---- */

static atomic_int n_messages;

static void count_message(void *user, int32_t level, const char *message)
{
    (void)user;
    if (level == TL_LOG_WARNING && strstr(message, "loops 9"))
        atomic_fetch_add(&n_messages, 1);
}

static void *warn(void *arg)
{
    racer *r = arg;
    tl_generate_options options = greedy(1);
    options.loops = 9;
    for (int i = 0; i < 5; i++) {
        tl_set_log_callback(count_message, NULL); /* at any time, from anywhere */
        r->n_wrong += generate_plain(r->model, r->tokens, 3, &options).status != TL_STATUS_OK;
    }
    return NULL;
}

TEST(one_warning_for_all_threads)
{
    tiny_spec spec = tiny_specs[1];
    spec.loops_max_trained = 8;
    tl_model_options options = tiny_options(2);
    tl_model *model = tiny_load(&spec, &options);
    tl_set_log_callback(count_message, NULL);
    const int32_t tokens[] = {1, 2, 3};
    racer racers[N_THREADS];
    for (int t = 0; t < N_THREADS; t++) {
        racers[t] = (racer){.model = model, .tokens = tokens};
        REQUIRE(pthread_create(&racers[t].thread, NULL, warn, &racers[t]) == 0);
    }
    for (int t = 0; t < N_THREADS; t++) {
        pthread_join(racers[t].thread, NULL);
        CHECK_EQ(racers[t].n_wrong, 0);
    }
    CHECK_EQ(n_messages, 1);
    tl_set_log_callback(NULL, NULL);
    tl_model_release(model);
}

/* ---- fork ---- */

typedef struct pollers {
    tl_model *model;
    tl_prefix_pool *pool;
    atomic_bool stop;
} pollers;

/* Takes the locks of pool and block store as often as it can. */
static void *poll_locks(void *arg)
{
    pollers *p = arg;
    while (!atomic_load(&p->stop)) {
        size_t in_use, in_slabs;
        tl_prefix_pool_size(p->pool);
        kv_store_bytes(p->model->kv, &in_use, &in_slabs);
    }
    return NULL;
}

TEST(a_fork_leaves_no_lock_behind)
{
    enum { N_FORKS = 300, N_THREADS = 2 };
    pollers p = {.model = tiny_load(&tiny_specs[0], NULL)};
    REQUIRE_OK(tl_prefix_pool_create(&p.pool, NULL));
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, poll_locks, &p) == 0);
    int n_good = 0;
    for (int i = 0; i < N_FORKS; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            int32_t tokens[3] = {1, 2, 3};
            int64_t length;
            tl_set_log_callback(NULL, NULL);
            tl_status status = tl_prefix_pool_register(&length, p.pool, p.model, tokens, 3, NULL);
            _exit(status == TL_STATUS_OK && tl_prefix_pool_size(p.pool) == 1 ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        n_good += WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    CHECK_EQ(n_good, N_FORKS);
    atomic_store(&p.stop, true);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    tl_prefix_pool_release(p.pool);
    tl_model_release(p.model);
}
