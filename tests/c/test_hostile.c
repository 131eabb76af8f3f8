/* Whatever a caller hands over is answered by a status and a message, and harms nothing: every
 * exported function with each pointer NULL, released or of another type (the calls are generated
 * from the header), and callbacks that close, release and call back in. */
#include "base/memory.h"
#include "things.h"

#ifdef TL_DEBUG
enum { TELLS_HANDLES = true };
#else
enum { TELLS_HANDLES = false };
#endif

/* ---- every function, one hostile argument at a time ---- */

typedef struct handles {
    tl_model *model;
    tl_kv_cache *kv_cache;
    tl_prefix_cache *prefix_cache;
    tl_prefix_pool *prefix_pool;
    tl_stream *stream;
} handles;

/* What the generated calls use: valid arguments of every type. */
typedef struct setting {
    handles held, dead, made;
    const char *path;
    size_t size;
    int64_t length;
    int32_t ids[128];
    float numbers[16 * THING_VOCAB];
    float state[3 * THING_HIDDEN];
    const void *data;
    tl_log_callback log;
    tl_interrupt_callback interrupt;
    tl_model_options model_options;
    tl_cache_options cache_options;
    tl_generate_options generate_options;
    tl_prefix_pool_options pool_options;
    tl_model_info model_info;
    tl_counters counters;
    tl_prefix_cache_info cache_info;
} setting;

static void ignore(void *user, int32_t level, const char *message)
{
    (void)user, (void)level, (void)message;
}

static int32_t go_on(void *user)
{
    (void)user;
    return 0;
}

static handles handles_of(const things *t)
{
    return (handles){t->model, t->kv, t->cache, t->pool, t->pool_stream};
}

static setting make_setting(const things *held, const things *dead)
{
    return (setting){
        .held = handles_of(held),
        .dead = handles_of(dead),
        .path = test_model_path(),
        .log = ignore,
        .interrupt = go_on,
        .model_options = tiny_options(1),
        .cache_options = TL_CACHE_OPTIONS_INIT,
        .generate_options = greedy(5),
        .pool_options = TL_PREFIX_POOL_OPTIONS_INIT,
        .model_info = {.size = sizeof(tl_model_info)},
        .counters = {.size = sizeof(tl_counters)},
        .cache_info = {.size = sizeof(tl_prefix_cache_info)},
    };
}

/* Releases what a call made, and takes back what it set. */
static void clean_up(setting *s)
{
    tl_model_release(s->made.model);
    tl_kv_cache_release(s->made.kv_cache);
    tl_prefix_cache_release(s->made.prefix_cache);
    tl_prefix_pool_release(s->made.prefix_pool);
    tl_stream_release(s->made.stream);
    s->made = (handles){0};
    tl_set_log_callback(NULL, NULL);
    tl_set_interrupt_callback(NULL, NULL);
}

static bool makes_nothing(const setting *s)
{
    static const handles none;
    return memcmp(&s->made, &none, sizeof none) == 0;
}

/* The last error begins with `start`, which names the function and mostly the parameter, and has
 * `fault`. */
static void check_message(const char *start, const char *fault, const char *call, int line)
{
    const char *text = tl_last_error();
    test_check(strncmp(text, start, strlen(start)) == 0 && strstr(text, fault) != NULL, __FILE__,
               line, "%s: \"%s\"; wanted \"%s ... %s\"", call, text, start, fault);
}

/* A message of another function, so that one that is left over is seen. */
static void forget_error(void)
{
    tl_kv_cache_truncate(NULL, 0);
}

#define NOT_HELD "that the caller holds: it was released"

/* clang-format off */
#define REFUSED(CALL, START, FAULT)                                                                \
    forget_error();                                                                                \
    CHECK_STATUS(CALL, TL_STATUS_INVALID);                                                         \
    CHECK(makes_nothing(&s));                                                                      \
    check_message(START, FAULT, #CALL, __LINE__);                                                  \
    n_calls++;
#define NULL_IN(CALL, FUNCTION, PARAMETER) REFUSED(CALL, #FUNCTION ": " #PARAMETER " is NULL", "")
#define NULLS_IN(CALL, FUNCTION) REFUSED(CALL, #FUNCTION ": ", " is NULL")
#define NULL_FOR(CALL, FUNCTION)                                                                   \
    CHECK_OK(CALL);                                                                                \
    clean_up(&s);                                                                                  \
    n_calls++;
#define NULL_FOR_WITHOUT_STATUS(CALL, FUNCTION)                                                    \
    (void)(CALL);                                                                                  \
    clean_up(&s);                                                                                  \
    n_calls++;
#define DEAD_IN(CALL, FUNCTION, PARAMETER)                                                         \
    if (TELLS_HANDLES) {                                                                           \
        REFUSED(CALL, #FUNCTION ": " #PARAMETER " is ", NOT_HELD)                                  \
    }
#define DEAD_IN_WITHOUT_STATUS(CALL, FUNCTION, PARAMETER)                                          \
    if (TELLS_HANDLES) {                                                                           \
        forget_error();                                                                            \
        (void)(CALL);                                                                              \
        check_message(#FUNCTION ": ", NOT_HELD, #CALL, __LINE__);                                  \
        n_calls++;                                                                                 \
    }
#define OTHER_IN DEAD_IN
#define OTHER_IN_WITHOUT_STATUS DEAD_IN_WITHOUT_STATUS
/* clang-format on */

TEST(every_function_refuses_what_it_cannot_use)
{
    int64_t live = mem_live();
    things held = make_things(), dead = make_things();
    release_things(&dead);
    setting s = make_setting(&held, &dead);
    tl_generate_options options = greedy(5);
    output want = generate_plain(held.model, thing_tokens, N_THING_TOKENS, &options);
    int n_calls = 0;

#include "hostile_calls.h"

    CHECK(n_calls > (TELLS_HANDLES ? 180 : 100));
    CHECK_OUTPUT(generate_plain(held.model, thing_tokens, N_THING_TOKENS, &options), &want);
    CHECK_OUTPUT(generate_pooled(held.pool, held.model, thing_tokens, N_THING_TOKENS, &options),
                 &want);
    CHECK_OUTPUT(generate_cached(held.cache, held.model, thing_tokens + 3, 3, &options), &want);
    CHECK_EQ(tl_kv_cache_length(held.kv), 3);
    release_things(&held);
    CHECK_EQ(mem_live(), live);
}

/* ---- callbacks that release everything during the call that asks ---- */

/* What the call under way was given, and what it makes. */
typedef struct scene {
    things things;
    bool released;
    tl_kv_cache *kv_out;
    tl_prefix_cache *cache_out;
    tl_stream *stream_out;
    float numbers[16 * THING_VOCAB];
    int32_t ids[8];
    size_t n_ids;
    int64_t length;
    tl_cache_options depth; /* above the trained one, so that the log has something to say */
    tl_generate_options generating;
} scene;

static void release_all(scene *s)
{
    if (s->released)
        return;
    s->released = true;
    tl_model_close(s->things.model);
    release_things(&s->things);
}

static void release_at_log(void *user, int32_t level, const char *message)
{
    (void)level, (void)message;
    release_all(user);
}

static int32_t release_at_pass(void *user)
{
    release_all(user);
    return 0;
}

static int32_t release_at_token(void *user, int32_t token)
{
    (void)token;
    release_all(user);
    return 0;
}

static tl_status call_logits(scene *s)
{
    return tl_model_logits(s->numbers, s->things.model, thing_tokens, 3, NULL, &s->depth);
}

static tl_status call_states(scene *s)
{
    return tl_model_states(s->numbers, s->things.model, thing_tokens, 3, NULL, &s->depth);
}

static tl_status call_exit_logits(scene *s)
{
    return tl_model_exit_logits(s->numbers, s->things.model, thing_tokens, 3, &s->depth);
}

static tl_status call_kv_create(scene *s)
{
    return tl_kv_cache_create(&s->kv_out, s->things.model, &s->depth);
}

static tl_status call_decode(scene *s)
{
    return tl_decode_with_kv_cache_capture(s->numbers, s->things.kv, thing_tokens, 3);
}

static tl_status call_build(scene *s)
{
    return tl_build_prefix_cache(&s->cache_out, s->things.model, thing_tokens, 3, &s->depth);
}

static tl_status call_register(scene *s)
{
    return tl_prefix_pool_register(&s->length, s->things.pool, s->things.model, thing_tokens, 5,
                                   &s->depth);
}

static tl_status call_generate(scene *s)
{
    return tl_generate(s->ids, 8, &s->n_ids, s->things.model, thing_tokens, 6, &s->generating);
}

static tl_status call_generate_pooled(scene *s)
{
    return tl_prefix_pool_generate(s->ids, 8, &s->n_ids, s->things.pool, s->things.model,
                                   thing_tokens, 6, &s->generating);
}

static tl_status call_generate_cached(scene *s)
{
    s->generating.loops = 0; /* the cache's */
    return tl_generate_from_prefix_cache(s->ids, 8, &s->n_ids, s->things.model, s->things.cache,
                                         thing_tokens, 3, &s->generating);
}

static tl_status call_stream_create(scene *s)
{
    return tl_stream_create(&s->stream_out, s->things.model, s->things.pool, thing_tokens, 6,
                            &s->generating);
}

static tl_status call_pool_stream(scene *s)
{
    return tl_stream_next(s->ids, s->things.pool_stream);
}

static tl_status call_cache_stream(scene *s)
{
    return tl_stream_next(s->ids, s->things.cache_stream);
}

enum { LOG = 1, PASS = 2, TOKEN = 4 };

/* Every call that computes, and which callbacks it has. */
static const struct computing_call {
    const char *name;
    tl_status (*run)(scene *s);
    int callbacks;
} computing_calls[] = {
    {"logits", call_logits, LOG | PASS},
    {"states", call_states, LOG | PASS},
    {"exit_logits", call_exit_logits, LOG | PASS},
    {"kv_create", call_kv_create, LOG},
    {"decode", call_decode, PASS},
    {"build", call_build, LOG | PASS},
    {"register", call_register, LOG | PASS},
    {"generate", call_generate, LOG | PASS | TOKEN},
    {"generate_pooled", call_generate_pooled, LOG | PASS | TOKEN},
    {"generate_cached", call_generate_cached, PASS | TOKEN},
    {"stream_create", call_stream_create, LOG},
    {"pool_stream", call_pool_stream, PASS},
    {"cache_stream", call_cache_stream, PASS},
};
enum { N_COMPUTING_CALLS = sizeof computing_calls / sizeof *computing_calls };

static scene make_scene(int64_t loops)
{
    scene s = {.things = make_things(), .depth = TL_CACHE_OPTIONS_INIT, .generating = greedy(5)};
    s.depth.loops = s.generating.loops = loops;
    return s;
}

static void end_scene(scene *s)
{
    tl_kv_cache_release(s->kv_out);
    tl_prefix_cache_release(s->cache_out);
    tl_stream_release(s->stream_out);
    if (!s->released)
        release_things(&s->things);
}

static tl_status run_with(const struct computing_call *call, int callback, scene *s)
{
    if (callback == LOG)
        tl_set_log_callback(release_at_log, s);
    if (callback == PASS)
        tl_set_interrupt_callback(release_at_pass, s);
    if (callback == TOKEN) {
        s->generating.on_token = release_at_token;
        s->generating.user = s;
    }
    tl_status status = call->run(s);
    tl_set_log_callback(NULL, NULL);
    tl_set_interrupt_callback(NULL, NULL);
    return status;
}

/* The call ends as if nothing had happened, and then nothing is left. */
static void check_released_meanwhile(const struct computing_call *call, int callback)
{
    int64_t live = mem_live();
    int64_t loops = callback == LOG ? THING_LOOPS_TRAINED + 1 : 0;
    scene quiet = make_scene(loops), s = make_scene(loops);
    CHECK_OK(call->run(&quiet));
    test_check(run_with(call, callback, &s) == TL_STATUS_OK && s.released, __FILE__, __LINE__,
               "%s, callback %d: %s", call->name, callback, tl_last_error());
    CHECK_MEM_EQ(s.numbers, quiet.numbers, sizeof s.numbers);
    CHECK_MEM_EQ(s.ids, quiet.ids, sizeof s.ids);
    CHECK_EQ(s.n_ids, quiet.n_ids);
    CHECK_EQ(s.length, quiet.length);
    end_scene(&quiet);
    end_scene(&s);
    CHECK_EQ(mem_live(), live);
}

TEST(callbacks_release_everything)
{
    for (int i = 0; i < N_COMPUTING_CALLS; i++)
        for (int callback = LOG; callback <= TOKEN; callback *= 2)
            if (computing_calls[i].callbacks & callback)
                check_released_meanwhile(&computing_calls[i], callback);
}

/* What a callback made for the scene's model after it was closed and released is refused. */
TEST(a_stream_of_a_model_that_a_callback_closed)
{
    scene s = make_scene(THING_LOOPS_TRAINED + 1);
    CHECK_OK(run_with(&(struct computing_call){.run = call_stream_create}, LOG, &s));
    int32_t token;
    CHECK_STATUS(tl_stream_next(&token, s.stream_out), TL_STATUS_CLOSED);
    CHECK_EQ(token, -1);
    end_scene(&s);
}

/* ---- callbacks that call back in ---- */

typedef struct reentry {
    things things;
    output plain, pooled, cached, *outer;
    int64_t length;
    tl_status status[4];
    char message[200];
} reentry;

static int32_t use_everything(void *user, int32_t token)
{
    reentry *r = user;
    (void)token;
    tl_generate_options options = greedy(5);
    r->plain = generate_plain(r->things.model, thing_tokens, 6, &options);
    r->pooled = generate_pooled(r->things.pool, r->things.model, thing_tokens, 6, &options);
    r->cached = generate_cached(r->things.cache, r->things.model, thing_tokens + 3, 3, &options);
    r->status[0] =
        tl_prefix_pool_register(&r->length, r->things.pool, r->things.model, thing_tokens, 4, NULL);
    r->outer->n = 1000; /* the outer call does not count in it */
    return 1;           /* and that was enough */
}

TEST(a_token_callback_calls_back_in_and_stops)
{
    int64_t live = mem_live();
    reentry r = {.things = make_things()};
    tl_generate_options options = greedy(5), outer = greedy(5);
    output all = generate_plain(r.things.model, thing_tokens, 6, &options), one = all;
    one.n = 1;
    outer.on_token = use_everything;
    outer.user = &r;
    output got = {0};
    r.outer = &got;
    got.status = tl_prefix_pool_generate(got.tokens, MAX_OUTPUT, &got.n, r.things.pool,
                                         r.things.model, thing_tokens, 6, &outer);
    CHECK_OUTPUT(got, &one);
    CHECK_OUTPUT(r.plain, &all);
    CHECK_OUTPUT(r.pooled, &all);
    CHECK_OUTPUT(r.cached, &all);
    CHECK_OK(r.status[0]);
    CHECK_EQ(r.length, 4);
    release_things(&r.things);
    CHECK_EQ(mem_live(), live);
}

static int32_t use_kv(void *user)
{
    reentry *r = user;
    float hidden[THING_HIDDEN];
    tl_kv_cache *clone;
    r->status[0] = tl_decode_with_kv_cache_capture(hidden, r->things.kv, thing_tokens, 1);
    r->status[1] = tl_kv_cache_clone(&clone, r->things.kv);
    r->status[2] = tl_kv_cache_truncate(r->things.kv, 0);
    snprintf(r->message, sizeof r->message, "%s", tl_last_error());
    r->length = tl_kv_cache_length(r->things.kv);
    return 0;
}

TEST(a_kv_cache_is_one_calls_at_a_time)
{
    reentry r = {.things = make_things()}, quiet = {.things = make_things()};
    float hidden[THING_HIDDEN], want[THING_HIDDEN];
    tl_set_interrupt_callback(use_kv, &r);
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, r.things.kv, thing_tokens, 3));
    tl_set_interrupt_callback(NULL, NULL);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(r.status[i], TL_STATUS_BUSY);
    CHECK_STR_EQ(r.message, "tl_kv_cache_truncate: kv is in use by another call; one at a time may "
                            "use it");
    CHECK_EQ(r.length, 3); /* as before the call */
    CHECK_OK(tl_decode_with_kv_cache_capture(want, quiet.things.kv, thing_tokens, 3));
    CHECK_MEM_EQ(hidden, want, sizeof want);
    CHECK_OK(tl_kv_cache_truncate(r.things.kv, 0));
    release_things(&r.things);
    release_things(&quiet.things);
}

static int32_t use_stream(void *user)
{
    reentry *r = user;
    int32_t token;
    r->status[0] = tl_stream_next(&token, r->things.pool_stream);
    snprintf(r->message, sizeof r->message, "%s", tl_last_error());
    return 0;
}

TEST(a_stream_is_one_calls_at_a_time)
{
    reentry r = {.things = make_things()};
    tl_generate_options options = greedy(5);
    output want = generate_plain(r.things.model, thing_tokens, 6, &options);
    tl_set_interrupt_callback(use_stream, &r);
    CHECK_OUTPUT(drain(r.things.pool_stream), &want);
    tl_set_interrupt_callback(NULL, NULL);
    CHECK_EQ(r.status[0], TL_STATUS_BUSY);
    CHECK_STR_EQ(r.message, "tl_stream_next: stream is in use by another call; one at a time may "
                            "use it");
    release_things(&r.things);
}
