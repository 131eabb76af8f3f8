/* Values of arguments and settings: ranges, edges, contradictions, warnings. */
#include "outputs.h"

#include <float.h>

static const int32_t tokens[] = {4, 5, 6, 7, 8, 9};
enum { VOCAB = 50, MAX_SEQ_LEN = 64 };

static tl_model *load(void)
{
    tl_model_options options = tiny_options(1);
    options.max_seq_len = MAX_SEQ_LEN;
    return tiny_load(&tiny_specs[0], &options);
}

#define CHECK_INVALID(CALL, PART)                                                                  \
    do {                                                                                           \
        if (CHECK_STATUS(CALL, TL_STATUS_INVALID))                                                 \
            CHECK_STR_HAS(tl_last_error(), PART);                                                  \
    } while (0)

/* ---- loading ---- */

static tl_status load_with(const tl_model_options *options)
{
    tiny_file *file = tiny_make(&tiny_specs[1]);
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, file->bytes, file->size, options);
    tl_model_release(model);
    tiny_free(file);
    return status;
}

#define CHECK_MODEL_OPTION(FIELD, VALUE, STATUS)                                                   \
    do {                                                                                           \
        tl_model_options options = tiny_options(1);                                                \
        options.has_init_scale = 1;                                                                \
        options.FIELD = (VALUE);                                                                   \
        if (CHECK_STATUS(load_with(&options), STATUS) && (STATUS) != TL_STATUS_OK)                 \
            CHECK_STR_HAS(tl_last_error(), (STATUS) == TL_STATUS_INVALID ? #FIELD : "device");     \
    } while (0)

TEST(model_options)
{
    static const int64_t bad_lengths[] = {0, -1, (1 << 24) + 1, INT64_MIN, INT64_MAX};
    for (int i = 0; i < 5; i++)
        CHECK_MODEL_OPTION(max_seq_len, bad_lengths[i], TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(max_seq_len, 1, TL_STATUS_OK);
    CHECK_MODEL_OPTION(max_seq_len, 100000, TL_STATUS_OK);
    CHECK_MODEL_OPTION(device, 3, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(device, -1, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(device, TL_DEVICE_CPU, TL_STATUS_OK);
    CHECK_MODEL_OPTION(device, TL_DEVICE_CUDA, TL_STATUS_UNSUPPORTED);
    CHECK_MODEL_OPTION(kv_mode, 3, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(kv_mode, -1, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(kv_mode, TL_KV_MODE_FP32, TL_STATUS_OK);
    CHECK_MODEL_OPTION(threads, -1, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(threads, 257, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(threads, 256, TL_STATUS_OK);
    CHECK_MODEL_OPTION(threads, 0, TL_STATUS_OK);
    CHECK_MODEL_OPTION(prefill_chunk, -1, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(prefill_chunk, 4097, TL_STATUS_INVALID);
    CHECK_MODEL_OPTION(prefill_chunk, 4096, TL_STATUS_OK);
    /* no kind that this version runs starts from a random state */
    CHECK_MODEL_OPTION(init_scale, 1e6, TL_STATUS_OK);
    CHECK_MODEL_OPTION(init_scale, NAN, TL_STATUS_OK);
    CHECK_MODEL_OPTION(init_seed, UINT64_MAX, TL_STATUS_OK);
    CHECK_OK(load_with(NULL));
}

TEST(what_a_model_says_of_itself)
{
    tl_model_options options = tiny_options(3);
    options.kv_mode = TL_KV_MODE_FP32;
    tl_model *model = tiny_load(&tiny_specs[0], &options);
    tl_model_info info = {.size = sizeof info};
    CHECK_OK(tl_model_get_info(&info, model));
    CHECK_EQ(info.threads, 3);
    CHECK_EQ(info.device, TL_DEVICE_CPU);
    CHECK_EQ(info.kv_mode, TL_KV_MODE_FP32);
    CHECK_EQ(info.max_seq_len, 256);
    CHECK_EQ(info.kv_block_size, 32);
    /* one KV head of 10 channels, V padded to 16: 26 numbers of 4 bytes a layer */
    CHECK_EQ(info.kv_bytes_fixed, 2 * 26 * 4);
    CHECK_EQ(info.kv_bytes_loop, 2 * 26 * 4);
    CHECK(info.weight_bytes >= info.n_parameters * 4);
    tl_model_release(model);
    model = load();
    CHECK_OK(tl_model_get_info(&info, model));
    CHECK_EQ(info.kv_mode, TL_KV_MODE_FP16);
    CHECK_EQ(info.kv_bytes_loop, 2 * 26 * 2);
    tl_model_release(model);
}

/* ---- tokens, loops, windows ---- */

/* Every function that takes tokens; each must refuse the same. */
static void check_tokens_refused(tl_model *model, const int32_t *t, size_t n, const char *part)
{
    float numbers[20];
    static float logits[(MAX_SEQ_LEN + 1) * VOCAB];
    int32_t token;
    int64_t length;
    size_t n_out;
    tl_prefix_pool *pool = make_pool(1);
    tl_prefix_cache *cache;
    tl_kv_cache *kv;
    tl_stream *stream;
    tl_generate_options o = greedy(1);
    REQUIRE_OK(tl_kv_cache_create(&kv, model, NULL));
    CHECK_INVALID(tl_model_logits(logits, model, t, n, NULL), part);
    CHECK_INVALID(tl_model_states(logits, model, t, n, NULL), part);
    CHECK_INVALID(tl_decode_with_kv_cache_capture(numbers, kv, t, n), part);
    CHECK_INVALID(tl_generate(&token, 1, &n_out, model, t, n, &o), part);
    CHECK_INVALID(tl_build_prefix_cache(&cache, model, t, n, NULL), part);
    CHECK_INVALID(tl_prefix_pool_register(&length, pool, model, t, n, NULL), part);
    CHECK_INVALID(tl_prefix_pool_generate(&token, 1, &n_out, pool, model, t, n, &o), part);
    CHECK_INVALID(tl_stream_create(&stream, model, pool, t, n, &o), part);
    CHECK_EQ(tl_prefix_pool_size(pool), 0);
    CHECK_EQ(tl_kv_cache_length(kv), 0);
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, tokens, 3, NULL));
    if (n > 0) { /* a suffix may be empty */
        CHECK_INVALID(tl_generate_from_prefix_cache(&token, 1, &n_out, model, cache, t, n, &o),
                      part);
        CHECK_INVALID(tl_stream_create_from_prefix_cache(&stream, model, cache, t, n, &o), part);
    }
    tl_prefix_cache_release(cache);
    tl_kv_cache_release(kv);
    tl_prefix_pool_release(pool);
}

TEST(token_ids)
{
    tl_model *model = load();
    static const int32_t bad[] = {-1, VOCAB, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < 4; i++) {
        for (size_t at = 0; at < 3; at++) {
            int32_t t[3] = {0, VOCAB - 1, 1};
            char place[8], value[16];
            t[at] = bad[i];
            snprintf(place, sizeof place, "[%zu]", at);
            snprintf(value, sizeof value, "%d", bad[i]);
            check_tokens_refused(model, t, 3, place);
            CHECK_STR_HAS(tl_last_error(), value);
            CHECK_STR_HAS(tl_last_error(), "0 to 49");
        }
    }
    check_tokens_refused(model, tokens, 0, "empty");
    static const int32_t many[MAX_SEQ_LEN + 1] = {0};
    check_tokens_refused(model, many, MAX_SEQ_LEN + 1, "64");
    check_tokens_refused(model, many, SIZE_MAX, "64");
    tl_model_release(model);
}

TEST(loops_and_windows)
{
    tl_model *model = load(), *plain = tiny_load(&tiny_specs[4], NULL);
    static const int64_t bad_loops[] = {-1, 1025, INT64_MIN, INT64_MAX};
    tl_kv_cache *kv;
    for (int i = 0; i < 4; i++) {
        const tl_cache_options key = {sizeof key, bad_loops[i], 0};
        tl_generate_options options = greedy(1);
        options.loops = bad_loops[i];
        CHECK_INVALID(tl_kv_cache_create(&kv, model, &key), "loops");
        CHECK_STR_HAS(tl_last_error(), "1 to 1024");
        CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
    }
    tl_cache_options key = {sizeof key, 2, 0};
    CHECK_INVALID(tl_kv_cache_create(&kv, plain, &key), "loops is 2");
    static const int64_t bad_windows[] = {-1, INT64_MIN};
    for (int i = 0; i < 2; i++) {
        key = (tl_cache_options){sizeof key, 0, bad_windows[i]};
        tl_generate_options options = greedy(1);
        options.cache_window = bad_windows[i];
        CHECK_INVALID(tl_kv_cache_create(&kv, model, &key), "cache_window");
        CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "cache_window");
    }
    key = (tl_cache_options){sizeof key, 1024, INT64_MAX};
    float hidden[20];
    REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, 3));
    tl_kv_cache_release(kv);
    tl_model_release(model);
    tl_model_release(plain);
}

TEST(sequences)
{
    tl_model *model = load();
    tl_kv_cache *kv;
    float hidden[20];
    static const int32_t many[MAX_SEQ_LEN] = {0};
    REQUIRE_OK(tl_kv_cache_create(&kv, model, NULL));
    CHECK_EQ(tl_kv_cache_bytes(kv), 0);
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, many, MAX_SEQ_LEN - 3));
    CHECK_INVALID(tl_decode_with_kv_cache_capture(hidden, kv, many, 4), "61 positions");
    CHECK_STR_HAS(tl_last_error(), "max_seq_len 64");
    CHECK_EQ(tl_kv_cache_length(kv), 61);
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, many, 3));
    CHECK_INVALID(tl_decode_with_kv_cache_capture(hidden, kv, many, 1), "max_seq_len 64");
    CHECK_INVALID(tl_kv_cache_truncate(kv, 65), "length is 65");
    CHECK_INVALID(tl_kv_cache_truncate(kv, -1), "length is -1");
    CHECK_INVALID(tl_kv_cache_truncate(kv, INT64_MIN), "length");
    CHECK_OK(tl_kv_cache_truncate(kv, 64));
    CHECK_OK(tl_kv_cache_truncate(kv, 0));
    CHECK_EQ(tl_kv_cache_length(kv) + tl_kv_cache_bytes(kv), 0);
    tl_kv_cache_release(kv);
    tl_model_release(model);
}

/* ---- generation ---- */

#define CHECK_GENERATE_OPTION(MODEL, FIELD, VALUE, STATUS)                                         \
    do {                                                                                           \
        tl_generate_options options = greedy(3);                                                   \
        options.FIELD = (VALUE);                                                                   \
        if (CHECK_EQ(generate_plain(MODEL, tokens, 3, &options).status, STATUS) &&                 \
            (STATUS) != TL_STATUS_OK)                                                              \
            CHECK_STR_HAS(tl_last_error(), #FIELD);                                                \
    } while (0)

TEST(generate_options)
{
    tl_model *model = load();
    static const double never[] = {NAN, -1, -DBL_TRUE_MIN, INFINITY, -INFINITY};
    for (int i = 0; i < 5; i++) {
        CHECK_GENERATE_OPTION(model, temperature, never[i], TL_STATUS_INVALID);
        CHECK_GENERATE_OPTION(model, top_p, never[i], TL_STATUS_INVALID);
        CHECK_GENERATE_OPTION(model, min_p, never[i], TL_STATUS_INVALID);
        CHECK_GENERATE_OPTION(model, repetition_penalty, never[i], TL_STATUS_INVALID);
    }
    CHECK_GENERATE_OPTION(model, top_p, 0, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, top_p, 1.0001, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, top_p, DBL_TRUE_MIN, TL_STATUS_OK);
    CHECK_GENERATE_OPTION(model, min_p, 1.0001, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, min_p, 1, TL_STATUS_OK);
    CHECK_GENERATE_OPTION(model, repetition_penalty, 0, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, repetition_penalty, DBL_MAX, TL_STATUS_OK);
    CHECK_GENERATE_OPTION(model, temperature, DBL_MAX, TL_STATUS_OK);
    CHECK_GENERATE_OPTION(model, top_k, -1, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, top_k, INT64_MAX, TL_STATUS_OK);
    CHECK_GENERATE_OPTION(model, max_tokens, -1, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, max_tokens, INT64_MIN, TL_STATUS_INVALID);
    CHECK_GENERATE_OPTION(model, max_tokens, 62, TL_STATUS_INVALID); /* 3 + 62 > 64 */
    CHECK_GENERATE_OPTION(model, max_tokens, 61, TL_STATUS_OK);
    tl_model_release(model);
}

TEST(stop_tokens_must_be_token_ids)
{
    tl_model *model = load();
    tl_generate_options options = greedy(3);
    static const int32_t bad[][2] = {{0, VOCAB}, {-1, 0}, {0, INT32_MAX}};
    options.has_stop_tokens = 1;
    options.n_stop_tokens = 2;
    for (int i = 0; i < 3; i++) {
        options.stop_tokens = bad[i];
        CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "stop_token");
        CHECK_STR_HAS(tl_last_error(), "0 to 49");
    }
    options.stop_tokens = NULL;
    CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "stop_tokens is NULL");
    options.has_stop_tokens = 0; /* then nobody looks at them */
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    tl_model_release(model);
}

TEST(the_capacity_of_the_output)
{
    tl_model *model = load();
    int32_t out[10];
    size_t n = 9;
    tl_generate_options options = greedy(10);
    CHECK_INVALID(tl_generate(out, 9, &n, model, tokens, 3, &options), "capacity");
    CHECK_EQ(n, 0);
    CHECK_OK(tl_generate(out, 10, &n, model, tokens, 3, &options));
    CHECK_EQ(n, 10);
    tl_model_release(model);
}

TEST(a_prefix_cache_for_something_else)
{
    tl_model *model = load(), *twin = load();
    const tl_cache_options key = {sizeof key, 3, 7};
    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, tokens, 3, &key));
    tl_generate_options options = greedy(3);
    CHECK_EQ(generate_cached(cache, twin, tokens, 3, &options).status, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "another model");
    options.loops = 2;
    CHECK_EQ(generate_cached(cache, model, tokens, 3, &options).status, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "loops is 2");
    options.loops = 3;
    options.cache_window = 8;
    CHECK_EQ(generate_cached(cache, model, tokens, 3, &options).status, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "cache_window is 8");
    options.cache_window = 7;
    output named = generate_cached(cache, model, tokens, 3, &options);
    options.loops = options.cache_window = 0; /* the cache's own */
    CHECK_OUTPUT(generate_cached(cache, model, tokens, 3, &options), &named);
    CHECK_OK(named.status);
    tl_prefix_cache_release(cache);
    tl_model_release(model);
    tl_model_release(twin);
}

TEST(pool_capacities)
{
    static const int64_t good[] = {0, 1, 1000000000000, INT64_MAX};
    static const int64_t bad[] = {-1, INT64_MIN};
    for (int i = 0; i < 4; i++)
        tl_prefix_pool_release(make_pool(good[i]));
    for (int i = 0; i < 2; i++) {
        const tl_prefix_pool_options options = {sizeof options, bad[i]};
        tl_prefix_pool *pool;
        CHECK_INVALID(tl_prefix_pool_create(&pool, &options), "capacity");
    }
}

/* ---- the log ---- */

typedef struct heard {
    int n;
    int32_t level;
    char message[300];
} heard;

static void hear(void *user, int32_t level, const char *message)
{
    heard *h = user;
    h->n++;
    h->level = level;
    snprintf(h->message, sizeof h->message, "%s", message);
}

TEST(one_warning_above_the_trained_loops)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.loops_max_trained = 4;
    tl_model *model = tiny_load(&spec, NULL);
    tl_generate_options options = greedy(1);
    tl_set_log_callback(hear, &h);
    options.loops = 4;
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 0);
    options.loops = 5;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(generate_plain(model, tokens, 3, &options).status);
        CHECK_EQ(h.n, 1);
    }
    CHECK_EQ(h.level, TL_LOG_WARNING);
    CHECK_STR_HAS(h.message, "loops 5");
    CHECK_STR_HAS(h.message, "4");
    tl_model_release(model);
    model = tiny_load(&spec, NULL); /* another model warns anew */
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 2);
    tl_model_release(model);
    tl_set_log_callback(NULL, NULL);
    model = tiny_load(&spec, NULL); /* to nobody */
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 2);
    tl_model_release(model);
}

static void hear_once(void *user, int32_t level, const char *message)
{
    tl_set_log_callback(NULL, NULL); /* no lock is held that this would wait for */
    hear(user, level, message);
}

TEST(a_log_callback_may_call_the_library)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.max_positions = 10;
    tl_set_log_callback(hear_once, &h);
    for (int i = 0; i < 2; i++)
        tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 1);
}

TEST(one_warning_above_the_trained_positions)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.max_positions = 256;
    tl_set_log_callback(hear, &h);
    tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 0);
    spec.max_positions = 255;
    tl_model *model = tiny_load(&spec, NULL);
    CHECK_EQ(h.n, 1);
    CHECK_EQ(h.level, TL_LOG_WARNING);
    CHECK_STR_HAS(h.message, "max_seq_len 256");
    CHECK_STR_HAS(h.message, "255");
    tl_generate_options options = greedy(3);
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 1);
    tl_model_release(model);
    spec.max_positions = 0; /* unknown */
    tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 1);
    tl_set_log_callback(NULL, NULL);
}

/* ---- the environment ---- */

typedef struct setting {
    const char *first, *second; /* NAME=VALUE, or NULL */
    int32_t kv_mode;
    tl_status status;
    const char *named[2]; /* in the message */
} setting;

static const setting settings[] = {
    {NULL, NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_H_MODE=", "TINYLOOP_KV_INT8=0", 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_ANYTHING=0", NULL, TL_KV_MODE_FP32, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_H_MODE=1", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_H_MODE", NULL}},
    {"TINYLOOP_KV_INT8=1", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT8", NULL}},
    {"TINYLOOP_KV_INT4=yes", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT4", NULL}},
    {"TINYLOOP_KV_INT4=00", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT4", NULL}},
    {"TINYLOOP_KV_INT16=1", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_KV_INT16", "INT8"}},
    {"TINYLOOP_KV_=1", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_KV_", "INT8"}},
    {"TINYLOOP_KV_INT8=1",
     "TINYLOOP_KV_INT4=1",
     0,
     TL_STATUS_INVALID,
     {"TINYLOOP_KV_INT8", "TINYLOOP_KV_INT4"}},
    {"TINYLOOP_KV_H_MODE=1",
     "TINYLOOP_KV_INT4=1",
     0,
     TL_STATUS_INVALID,
     {"TINYLOOP_KV_H_MODE", "TINYLOOP_KV_INT4"}},
    {"TINYLOOP_KV_INT8=1", NULL, TL_KV_MODE_FP16, TL_STATUS_INVALID, {"TINYLOOP_KV_INT8", "fp16"}},
    {"TINYLOOP_KV_INT8=1", NULL, TL_KV_MODE_FP32, TL_STATUS_INVALID, {"TINYLOOP_KV_INT8", "fp32"}},
    {"TINYLOOP_CPU_ISA=portable", NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_CPU_ISA=", NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_CPU_ISA=mmx", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_CPU_ISA=mmx", "portable"}},
};

/* Sets NAME=VALUE, or takes NAME away. */
static void put(const char *text, bool there)
{
    if (text == NULL)
        return;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "="), text);
    if (there)
        setenv(name, strchr(text, '=') + 1, 1);
    else
        unsetenv(name);
}

TEST(environment)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const setting *s = &settings[i];
        tl_model_options options = tiny_options(1);
        options.kv_mode = s->kv_mode;
        put(s->first, true);
        put(s->second, true);
        tl_status status = load_with(&options);
        put(s->first, false);
        put(s->second, false);
        test_check(status == s->status, __FILE__, __LINE__, "%s: status %d",
                   s->first ? s->first : "(nothing)", (int)status);
        for (int n = 0; n < 2; n++)
            if (s->named[n] != NULL)
                CHECK_STR_HAS(tl_last_error(), s->named[n]);
    }
    CHECK_OK(load_with(NULL));
}
