/* Values of arguments: ranges, edges, contradictions. */
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

static tl_status load_with(int spec, const tl_model_options *options)
{
    tiny_file *file = tiny_make(&tiny_specs[spec]);
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, file->bytes, file->size, options);
    tl_model_release(model);
    tiny_free(file);
    return status;
}

#define CHECK_OPTION_OF(SPEC, FIELD, VALUE, STATUS)                                                \
    do {                                                                                           \
        tl_model_options options = tiny_options(1);                                                \
        options.has_init_scale = 1;                                                                \
        options.FIELD = (VALUE);                                                                   \
        if (CHECK_STATUS(load_with(SPEC, &options), STATUS) && (STATUS) != TL_STATUS_OK)           \
            CHECK_STR_HAS(tl_last_error(), (STATUS) == TL_STATUS_INVALID ? #FIELD : "device");     \
    } while (0)

#define CHECK_MODEL_OPTION(FIELD, VALUE, STATUS) CHECK_OPTION_OF(1, FIELD, VALUE, STATUS)

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
    CHECK_OK(load_with(1, NULL));
}

/* Only a model that starts from a random state looks at its scale. */
TEST(init_scales)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY, -1, -DBL_TRUE_MIN};
    for (int i = 0; i < 5; i++) {
        CHECK_OPTION_OF(TINY_HUGINN, init_scale, bad[i], TL_STATUS_INVALID);
        CHECK_OPTION_OF(1, init_scale, bad[i], TL_STATUS_OK);
        CHECK_OPTION_OF(TINY_HRM, init_scale, bad[i], TL_STATUS_OK);
        tl_model_options options = tiny_options(1);
        options.init_scale = bad[i]; /* not stated: the file's */
        CHECK_OK(load_with(TINY_HUGINN, &options));
    }
    CHECK_OPTION_OF(TINY_HUGINN, init_scale, 0, TL_STATUS_OK);
    CHECK_OPTION_OF(TINY_HUGINN, init_scale, DBL_MAX, TL_STATUS_OK);
    CHECK_OPTION_OF(TINY_HUGINN, init_seed, UINT64_MAX, TL_STATUS_OK);
}

enum { MAX_LOGITS = 6 * VOCAB };

/* The logits of the tokens in a model that starts from `scale` times noise of a seed; NAN: from
 * what the file says. */
static void logits_with(float *logits, int spec, double scale, uint64_t seed)
{
    tl_model_options options = tiny_options(1);
    options.has_init_scale = !isnan(scale);
    options.init_scale = scale;
    options.init_seed = seed;
    tl_model *model = tiny_load(&tiny_specs[spec], &options);
    memset(logits, 0, MAX_LOGITS * sizeof *logits);
    CHECK_OK(tl_model_logits(logits, model, tokens, 6, NULL, NULL));
    tl_model_release(model);
}

TEST(init_scale_and_seed_change_noise_alone)
{
    float first[MAX_LOGITS], other[MAX_LOGITS];
    for (int spec = 0; spec < TINY_N_SPECS; spec++) {
        if (spec == TINY_LARGE || tiny_specs[spec].vocab < 10)
            continue;
        bool noise = tiny_config(&tiny_specs[spec]).state_init == STATE_INIT_NOISE;
        static const struct {
            double scale;
            uint64_t seed;
            bool differs;
        } ways[] = {{1, 0, false}, {NAN, 1, true},          {0.5, 0, true},
                    {0, 0, true},  {NAN, 1ull << 32, true}, {NAN, UINT64_MAX, true}};
        logits_with(first, spec, NAN, 0);
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            logits_with(other, spec, ways[i].scale, ways[i].seed);
            CHECK_EQ(memcmp(first, other, sizeof first) != 0, noise && ways[i].differs);
        }
        logits_with(first, spec, 0, 0); /* no noise at all has no seed */
        logits_with(other, spec, 0, 7);
        CHECK_MEM_EQ(first, other, sizeof first);
    }
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

static tl_model_info info_of(int spec)
{
    tl_model *model = tiny_load(&tiny_specs[spec], NULL);
    tl_model_info info = {.size = sizeof info};
    CHECK_OK(tl_model_get_info(&info, model));
    tl_model_release(model);
    return info;
}

TEST(what_kinds_of_models_say_of_themselves)
{
    tl_model_info plain = info_of(4), looped = info_of(0), nested = info_of(TINY_HRM);
    CHECK_EQ(plain.loops_default, 1);
    CHECK_EQ(plain.inner_loops_default, 0);
    CHECK_EQ(plain.n_states_default, 1);
    CHECK_EQ(plain.two_sided_prefix, 0);
    CHECK_EQ(plain.kv_bytes_loop, 0);
    CHECK_EQ(looped.loops_default, 2);
    CHECK_EQ(looped.inner_loops_default, 0);
    CHECK_EQ(looped.n_states_default, 2);
    CHECK_EQ(looped.two_sided_prefix, 0);
    CHECK_EQ(nested.loops_default, 2);
    CHECK_EQ(nested.inner_loops_default, 2);
    CHECK_EQ(nested.n_states_default, 2 * (2 + 1));
    CHECK_EQ(nested.loops_min, 1);
    CHECK_EQ(nested.loops_max, 1024);
    CHECK_EQ(nested.two_sided_prefix, 1);
    CHECK_EQ(nested.kv_bytes_fixed, 0);
    /* two KV heads of 10 channels, V padded to 16; one low layer twice, one high layer */
    CHECK_EQ(nested.kv_bytes_loop, 3 * 2 * 26 * 2);
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
    CHECK_INVALID(tl_model_logits(logits, model, t, n, NULL, NULL), part);
    CHECK_INVALID(tl_model_states(logits, model, t, n, NULL, NULL), part);
    CHECK_INVALID(tl_model_exit_logits(logits, model, t, n, NULL), part);
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
        const tl_cache_options key = {.size = sizeof key, .loops = bad_loops[i]};
        tl_generate_options options = greedy(1);
        options.loops = bad_loops[i];
        CHECK_INVALID(tl_kv_cache_create(&kv, model, &key), "loops");
        CHECK_STR_HAS(tl_last_error(), "1 to 1024");
        CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
    }
    tl_cache_options key = {.size = sizeof key, .loops = 2};
    CHECK_INVALID(tl_kv_cache_create(&kv, plain, &key), "loops is 2");
    static const int64_t bad_windows[] = {-1, INT64_MIN};
    for (int i = 0; i < 2; i++) {
        key = (tl_cache_options){.size = sizeof key, .cache_window = bad_windows[i]};
        tl_generate_options options = greedy(1);
        options.cache_window = bad_windows[i];
        CHECK_INVALID(tl_kv_cache_create(&kv, model, &key), "cache_window");
        CHECK_EQ(generate_plain(model, tokens, 3, &options).status, TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "cache_window");
    }
    key = (tl_cache_options){.size = sizeof key, .loops = 1024, .cache_window = INT64_MAX};
    float hidden[20];
    REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens, 3));
    tl_kv_cache_release(kv);
    tl_model_release(model);
    tl_model_release(plain);
}

#define CHECK_KEY(MODEL, KEY, STATUS, PART)                                                        \
    do {                                                                                           \
        tl_generate_options checked_options = greedy(1);                                           \
        tiny_set_key(&checked_options, &(KEY));                                                    \
        tl_kv_cache *checked;                                                                      \
        if (CHECK_STATUS(tl_kv_cache_create(&checked, MODEL, &(KEY)), STATUS) &&                   \
            (STATUS) != TL_STATUS_OK)                                                              \
            CHECK_STR_HAS(tl_last_error(), PART);                                                  \
        tl_kv_cache_release(checked);                                                              \
        CHECK_EQ(generate_plain(MODEL, tokens, 3, &checked_options).status, STATUS);               \
        if ((STATUS) != TL_STATUS_OK)                                                              \
            CHECK_STR_HAS(tl_last_error(), PART);                                                  \
    } while (0)

TEST(inner_loops)
{
    tl_model *flat = load(), *plain = tiny_load(&tiny_specs[4], NULL);
    tl_model *nested = tiny_load(&tiny_specs[TINY_HRM], NULL);
    static const int64_t inner_of_flat[] = {1, -1, INT64_MIN, INT64_MAX};
    for (int i = 0; i < 4; i++) {
        tl_cache_options key = {.size = sizeof key, .inner_loops = inner_of_flat[i]};
        CHECK_KEY(flat, key, TL_STATUS_INVALID, "inner_loops");
        CHECK_KEY(plain, key, TL_STATUS_INVALID, "inner_loops");
        key.loops = 2;
        CHECK_KEY(flat, key, TL_STATUS_INVALID, "inner_loops");
    }
    static const struct {
        int64_t loops, inner;
        tl_status status;
        const char *part;
    } pairs[] = {
        {0, 0, TL_STATUS_OK, NULL},
        {1, 1, TL_STATUS_OK, NULL},
        {3, 1, TL_STATUS_OK, NULL},
        {1, 1024, TL_STATUS_OK, NULL},
        {2, 0, TL_STATUS_INVALID, "give both"},
        {0, 2, TL_STATUS_INVALID, "give both"},
        {0, -1, TL_STATUS_INVALID, "give both"},
        {-1, 1, TL_STATUS_INVALID, "loops is -1"},
        {1025, 1, TL_STATUS_INVALID, "loops is 1025"},
        {INT64_MAX, 1, TL_STATUS_INVALID, "loops is"},
        {1, -1, TL_STATUS_INVALID, "inner_loops -1"},
        {1, 1025, TL_STATUS_INVALID, "inner_loops 1025"},
        {1, INT64_MAX, TL_STATUS_INVALID, "inner_loops 9223372036854775807"},
        {1024, 1024, TL_STATUS_INVALID, "at most 65536"},
        {1024, 64, TL_STATUS_INVALID, "at most 65536"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        const tl_cache_options key = {
            .size = sizeof key, .loops = pairs[i].loops, .inner_loops = pairs[i].inner};
        CHECK_KEY(nested, key, pairs[i].status, pairs[i].part);
    }
    const tl_cache_options most = {.size = sizeof most, .loops = 1024, .inner_loops = 63};
    tl_kv_cache *kv; /* 65536 runs; to run them would take long */
    CHECK_OK(tl_kv_cache_create(&kv, nested, &most));
    tl_kv_cache_release(kv);
    tl_model_release(flat);
    tl_model_release(plain);
    tl_model_release(nested);
}

TEST(prefix_lengths)
{
    tl_model *causal = load(), *two_sided = tiny_load(&tiny_specs[TINY_HRM], NULL);
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, 257}; /* max_seq_len 256 */
    tl_cache_options key = {.size = sizeof key, .has_prefix_len = 1};
    CHECK_KEY(causal, key, TL_STATUS_OK, NULL);
    CHECK_KEY(two_sided, key, TL_STATUS_OK, NULL);
    for (int i = 0; i < 4; i++) {
        key.prefix_len = bad[i];
        key.has_prefix_len = 1;
        CHECK_KEY(causal, key, TL_STATUS_INVALID, "it takes 0");
        CHECK_KEY(two_sided, key, TL_STATUS_INVALID, "prefix_len is");
        key.has_prefix_len = 0; /* then nobody looks at it */
        CHECK_KEY(causal, key, TL_STATUS_OK, NULL);
        CHECK_KEY(two_sided, key, TL_STATUS_OK, NULL);
    }
    key.has_prefix_len = key.prefix_len = 1;
    CHECK_KEY(causal, key, TL_STATUS_INVALID, "it takes 0");
    static float logits[3 * VOCAB];
    for (key.prefix_len = 0; key.prefix_len <= 4; key.prefix_len++) { /* of 3 tokens */
        tl_status want = key.prefix_len <= 3 ? TL_STATUS_OK : TL_STATUS_INVALID;
        tl_generate_options options = greedy(1);
        tiny_set_key(&options, &key);
        CHECK_STATUS(tl_model_logits(logits, two_sided, tokens, 3, NULL, &key), want);
        CHECK_EQ(generate_plain(two_sided, tokens, 3, &options).status, want);
    }
    CHECK_STR_HAS(tl_last_error(), "prefix_len is 4");
    CHECK_STR_HAS(tl_last_error(), "0 to the number of tokens, 3");
    tl_model_release(causal);
    tl_model_release(two_sided);
}

/* ---- what only some kinds of models have ---- */

TEST(initial_states)
{
    static float state[6 * 20], numbers[6 * 6 * VOCAB];
    for (int spec = 0; spec < TINY_N_SPECS; spec++) {
        if (spec == TINY_LARGE || tiny_specs[spec].vocab < 10)
            continue;
        const model_config c = tiny_config(&tiny_specs[spec]);
        bool has_state = c.inject != INJECT_NONE && c.schedule == SCHEDULE_FLAT;
        tl_model *model = tiny_load(&tiny_specs[spec], NULL);
        tl_status want = has_state ? TL_STATUS_OK : TL_STATUS_INVALID;
        CHECK_STATUS(tl_model_logits(numbers, model, tokens, 6, state, NULL), want);
        if (!has_state)
            CHECK_STR_HAS(tl_last_error(), "init_state");
        CHECK_STATUS(tl_model_states(numbers, model, tokens, 6, state, NULL), want);
        tl_model_release(model);
    }
}

TEST(exit_gates)
{
    static float numbers[6 * 6];
    for (int spec = 0; spec < TINY_N_SPECS; spec++) {
        if (tiny_specs[spec].vocab < 10)
            continue;
        tl_model *model = tiny_load(&tiny_specs[spec], NULL);
        tl_status status = tl_model_exit_logits(numbers, model, tokens, 6, NULL);
        CHECK_EQ(status, spec == TINY_OURO ? TL_STATUS_OK : TL_STATUS_INVALID);
        if (status != TL_STATUS_OK)
            CHECK_STR_HAS(tl_last_error(), "exit gate");
        tl_model_release(model);
    }
}

/* ---- sequences ---- */

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

TEST(numbers_are_told_as_they_are)
{
    tl_model *model = load();
    CHECK_GENERATE_OPTION(model, top_p, 1.1, TL_STATUS_INVALID);
    CHECK_STR_EQ(tl_last_error(), "tl_generate: top_p is 1.1; it must be above 0 and at most 1");
    CHECK_GENERATE_OPTION(model, top_p, 1 + DBL_EPSILON, TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "top_p is 1.0000000000000002; ");
    CHECK_GENERATE_OPTION(model, top_k, -16777217, TL_STATUS_INVALID);
    CHECK_STR_EQ(tl_last_error(), "tl_generate: top_k is -16777217; it must be 0 (off) or more");
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
        CHECK_STR_HAS(tl_last_error(), "stop_tokens[");
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
    const tl_cache_options key = {.size = sizeof key, .loops = 3, .cache_window = 7};
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
