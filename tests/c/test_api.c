/* api/: what every exported function does with arguments that it must refuse. */
#include "base/memory.h"
#include "things.h"

#include <sys/wait.h>

static const int32_t *const tokens = thing_tokens;
enum { VOCAB = THING_VOCAB };

TEST(null_where_nothing_is_fine)
{
    things t = make_things();
    tl_model_close(NULL);
    CHECK(tl_model_retain(NULL) == NULL);
    tl_model_release(NULL);
    tl_kv_cache_release(NULL);
    tl_prefix_cache_release(NULL);
    tl_prefix_pool_release(NULL);
    tl_stream_release(NULL);
    CHECK_EQ(tl_kv_cache_length(NULL) + tl_kv_cache_bytes(NULL), 0);
    CHECK_EQ(tl_prefix_pool_size(NULL) + tl_prefix_pool_total_cached_tokens(NULL), 0);
    int32_t out[128];
    size_t n;
    tl_prefix_pool *pool;
    CHECK_OK(tl_generate(out, 128, &n, t.model, tokens, 3, NULL)); /* 128 is the default */
    CHECK_EQ(n, 128);
    CHECK_OK(tl_generate_from_prefix_cache(out, 128, &n, t.model, t.cache, NULL, 0, NULL));
    CHECK_OK(tl_prefix_pool_create(&pool, NULL));
    tl_prefix_pool_release(pool);
    release_things(&t);
}

TEST(outputs_of_failures)
{
    int64_t length = 9;
    size_t n = 9;
    int32_t token = 9;
    const void *data = &n;
    tl_model *model = (tl_model *)&n;
    tl_prefix_pool *pool = (tl_prefix_pool *)&n;
    tl_kv_cache *kv = (tl_kv_cache *)&n;
    tl_prefix_cache *cache = (tl_prefix_cache *)&n;
    tl_stream *stream = (tl_stream *)&n;
    const tl_prefix_pool_options wrong = {sizeof wrong, -1};
    CHECK(tl_model_load(&model, NULL, NULL) && model == NULL);
    CHECK(tl_prefix_pool_create(&pool, &wrong) && pool == NULL);
    CHECK(tl_kv_cache_create(&kv, NULL, NULL) && kv == NULL);
    kv = (tl_kv_cache *)&n;
    CHECK(tl_kv_cache_clone(&kv, NULL) && kv == NULL);
    CHECK(tl_build_prefix_cache(&cache, NULL, tokens, 3, NULL) && cache == NULL);
    CHECK(tl_stream_create(&stream, NULL, NULL, tokens, 3, NULL) && stream == NULL);
    stream = (tl_stream *)&n;
    CHECK(tl_stream_create_from_prefix_cache(&stream, NULL, NULL, tokens, 3, NULL) && !stream);
    CHECK(tl_prefix_pool_register(&length, NULL, NULL, tokens, 3, NULL) && length == 0);
    CHECK(tl_generate(&token, 1, &n, NULL, tokens, 3, NULL) && n == 0);
    n = 9;
    CHECK(tl_generate_from_prefix_cache(&token, 1, &n, NULL, NULL, tokens, 3, NULL) && n == 0);
    n = 9;
    CHECK(tl_prefix_pool_generate(&token, 1, &n, NULL, NULL, tokens, 3, NULL) && n == 0);
    n = 9;
    CHECK(tl_model_blob(&data, &n, NULL, "card") && data == NULL && n == 0);
    CHECK(tl_stream_next(&token, NULL) && token == -1);
}

/* ---- structs with a size ---- */

/* A struct of another version: longer by 16 bytes, of which the last is `tail`; or shorter. */
#define OTHER_SIZE(TYPE, STANDARD, DIFFERENCE, TAIL)                                               \
    union {                                                                                        \
        TYPE known;                                                                                \
        unsigned char bytes[sizeof(TYPE) + 16];                                                    \
    } other;                                                                                       \
    memset(&other, 0, sizeof other);                                                               \
    other.known = (STANDARD);                                                                      \
    other.known.size = (size_t)((int)sizeof(TYPE) + (DIFFERENCE));                                 \
    other.bytes[sizeof(TYPE) + 15] = (TAIL)

#define CHECK_OPTIONS_SIZE(TYPE, INIT, CALL)                                                       \
    do {                                                                                           \
        const TYPE standard = INIT;                                                                \
        {                                                                                          \
            OTHER_SIZE(TYPE, standard, 16, 0);                                                     \
            const TYPE *options = &other.known;                                                    \
            CHECK_OK(CALL);                                                                        \
        }                                                                                          \
        {                                                                                          \
            OTHER_SIZE(TYPE, standard, 16, 1);                                                     \
            const TYPE *options = &other.known;                                                    \
            if (CHECK_STATUS(CALL, TL_STATUS_UNSUPPORTED))                                         \
                CHECK_STR_HAS(tl_last_error(), #TYPE);                                             \
        }                                                                                          \
        for (int difference = -1; difference > -(int)sizeof(TYPE); difference -= 7) {              \
            OTHER_SIZE(TYPE, standard, difference, 0);                                             \
            const TYPE *options = &other.known;                                                    \
            if (CHECK_STATUS(CALL, TL_STATUS_INVALID))                                             \
                CHECK_STR_HAS(tl_last_error(), #TYPE ".size");                                     \
        }                                                                                          \
    } while (0)

/* Releases what a call made, so that it can be made again. */
static tl_status load_and_release(const tl_model_options *options)
{
    tiny_file *file = tiny_make(&tiny_specs[1]);
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, file->bytes, file->size, options);
    tl_model_release(model);
    tiny_free(file);
    return status;
}

static tl_status create_pool_and_release(const tl_prefix_pool_options *options)
{
    tl_prefix_pool *pool;
    tl_status status = tl_prefix_pool_create(&pool, options);
    tl_prefix_pool_release(pool);
    return status;
}

static tl_status create_kv_and_release(tl_model *model, const tl_cache_options *options)
{
    tl_kv_cache *kv;
    tl_status status = tl_kv_cache_create(&kv, model, options);
    tl_kv_cache_release(kv);
    return status;
}

static tl_status build_and_release(tl_model *model, const tl_cache_options *options)
{
    tl_prefix_cache *cache;
    tl_status status = tl_build_prefix_cache(&cache, model, tokens, 3, options);
    tl_prefix_cache_release(cache);
    return status;
}

static tl_status stream_and_release(tl_model *model, const tl_generate_options *options)
{
    tl_stream *stream;
    tl_status status = tl_stream_create(&stream, model, NULL, tokens, 3, options);
    tl_stream_release(stream);
    return status;
}

TEST(options_of_other_versions)
{
    things t = make_things();
    tl_model *gated = tiny_load(&tiny_specs[TINY_OURO], NULL);
    float numbers[6 * VOCAB];
    int32_t out[128];
    int64_t length;
    size_t n;
    CHECK_OPTIONS_SIZE(tl_model_options, TL_MODEL_OPTIONS_INIT, load_and_release(options));
    CHECK_OPTIONS_SIZE(tl_prefix_pool_options, TL_PREFIX_POOL_OPTIONS_INIT,
                       create_pool_and_release(options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       create_kv_and_release(t.model, options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       build_and_release(t.model, options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       tl_model_logits(numbers, t.model, tokens, 3, NULL, options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       tl_model_states(numbers, t.model, tokens, 3, NULL, options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       tl_model_exit_logits(numbers, gated, tokens, 3, options));
    CHECK_OPTIONS_SIZE(tl_cache_options, TL_CACHE_OPTIONS_INIT,
                       tl_prefix_pool_register(&length, t.pool, t.model, tokens, 3, options));
    CHECK_OPTIONS_SIZE(tl_generate_options, TL_GENERATE_OPTIONS_INIT,
                       tl_generate(out, 128, &n, t.model, tokens, 3, options));
    CHECK_OPTIONS_SIZE(
        tl_generate_options, TL_GENERATE_OPTIONS_INIT,
        tl_generate_from_prefix_cache(out, 128, &n, t.model, t.cache, tokens, 3, options));
    CHECK_OPTIONS_SIZE(tl_generate_options, TL_GENERATE_OPTIONS_INIT,
                       tl_prefix_pool_generate(out, 128, &n, t.pool, t.model, tokens, 3, options));
    CHECK_OPTIONS_SIZE(tl_generate_options, TL_GENERATE_OPTIONS_INIT,
                       stream_and_release(t.model, options));
    tl_model_release(gated);
    release_things(&t);
}

/* What is reserved in today's structs is some later version's: only 0 is known. */
TEST(reserved_fields_are_zero)
{
    things t = make_things();
    float numbers[6 * VOCAB];
    int32_t token;
    int64_t length;
    size_t n;
    static const int32_t values[] = {1, -1, INT32_MIN};
#define CHECK_RESERVED(TYPE, CALL)                                                                 \
    do {                                                                                           \
        if (CHECK_STATUS(CALL, TL_STATUS_UNSUPPORTED))                                             \
            CHECK_STR_HAS(tl_last_error(), TYPE ".reserved is");                                   \
    } while (0)
    for (size_t i = 0; i < 3; i++) {
        tl_cache_options key = TL_CACHE_OPTIONS_INIT;
        tl_generate_options o = greedy(1);
        key.reserved = o.reserved = values[i];
        CHECK_RESERVED("tl_cache_options", create_kv_and_release(t.model, &key));
        CHECK_RESERVED("tl_cache_options", build_and_release(t.model, &key));
        CHECK_RESERVED("tl_cache_options",
                       tl_model_logits(numbers, t.model, tokens, 3, NULL, &key));
        CHECK_RESERVED("tl_cache_options",
                       tl_model_states(numbers, t.model, tokens, 3, NULL, &key));
        CHECK_RESERVED("tl_cache_options", tl_model_exit_logits(numbers, t.model, tokens, 3, &key));
        CHECK_RESERVED("tl_cache_options",
                       tl_prefix_pool_register(&length, t.pool, t.model, tokens, 3, &key));
        CHECK_RESERVED("tl_generate_options", tl_generate(&token, 1, &n, t.model, tokens, 3, &o));
        CHECK_RESERVED("tl_generate_options", tl_generate_from_prefix_cache(
                                                  &token, 1, &n, t.model, t.cache, tokens, 3, &o));
        CHECK_RESERVED("tl_generate_options",
                       tl_prefix_pool_generate(&token, 1, &n, t.pool, t.model, tokens, 3, &o));
        CHECK_RESERVED("tl_generate_options", stream_and_release(t.model, &o));
    }
#undef CHECK_RESERVED
    release_things(&t);
}

/* The INIT macros list their fields by place. */
TEST(init_macros_hold_the_defaults)
{
    const tl_model_options m = TL_MODEL_OPTIONS_INIT;
    CHECK(m.size == sizeof m && m.max_seq_len == 2048 && m.device == TL_DEVICE_AUTO);
    CHECK(m.kv_mode == TL_KV_MODE_DEFAULT && m.threads == 0 && m.verify == 0);
    CHECK(m.has_init_scale == 0 && m.prefill_chunk == 0 && m.init_scale == 0 && m.init_seed == 0);
    const tl_cache_options c = TL_CACHE_OPTIONS_INIT;
    CHECK(c.size == sizeof c && c.loops == 0 && c.cache_window == 0 && c.inner_loops == 0);
    CHECK(c.prefix_len == 0 && c.has_prefix_len == 0 && c.reserved == 0);
    const tl_generate_options g = TL_GENERATE_OPTIONS_INIT;
    CHECK(g.size == sizeof g && g.max_tokens == 128 && g.loops == 0 && g.inner_loops == 0);
    CHECK(g.cache_window == 0 && g.prefix_len == 0 && g.has_prefix_len == 0 && g.reserved == 0);
    CHECK(g.top_k == 50 && g.temperature == 1 && g.top_p == 1 && g.min_p == 0);
    CHECK(g.repetition_penalty == 1 && g.seed == 0 && g.has_seed == 0 && g.has_stop_tokens == 0);
    CHECK(g.stop_tokens == NULL && g.n_stop_tokens == 0 && g.on_token == NULL && g.user == NULL);
    const tl_prefix_pool_options p = TL_PREFIX_POOL_OPTIONS_INIT;
    CHECK(p.size == sizeof p && p.capacity == 16);
}

/* A longer struct of a newer program: its tail is cleared, its size stays. */
#define CHECK_INFO_SIZE(TYPE, CALL)                                                                \
    do {                                                                                           \
        OTHER_SIZE(TYPE, (TYPE){0}, 16, 77);                                                       \
        TYPE *info = &other.known;                                                                 \
        CHECK_OK(CALL);                                                                            \
        CHECK_EQ(info->size, sizeof(TYPE) + 16);                                                   \
        CHECK_EQ(other.bytes[sizeof(TYPE) + 15], 0);                                               \
        for (size_t size = 0; size < sizeof(TYPE); size += 5) {                                    \
            info->size = size;                                                                     \
            if (CHECK_STATUS(CALL, TL_STATUS_INVALID))                                             \
                CHECK_STR_HAS(tl_last_error(), #TYPE ".size");                                     \
            CHECK_EQ(info->size, size);                                                            \
        }                                                                                          \
    } while (0)

TEST(infos_of_other_versions)
{
    things t = make_things();
    CHECK_INFO_SIZE(tl_model_info, tl_model_get_info(info, t.model));
    CHECK_INFO_SIZE(tl_counters, tl_model_get_counters(info, t.model));
    CHECK_INFO_SIZE(tl_prefix_cache_info, tl_prefix_cache_get_info(info, t.cache));
    release_things(&t);
}

/* A size that nobody set must be refused too, not followed. */
TEST(a_size_beyond_all_reason)
{
    things t = make_things();
    pid_t child = fork();
    if (child == 0) {
        tl_generate_options options = greedy(1);
        options.size = SIZE_MAX;
        tl_status status = stream_and_release(t.model, &options);
        tl_model_info info = {.size = SIZE_MAX};
        _exit(status == TL_STATUS_OK || tl_model_get_info(&info, t.model) == TL_STATUS_OK);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    release_things(&t);
}

/* ---- the version, the last error ---- */

TEST(version)
{
    char text[32];
    uint32_t v = tl_version();
    snprintf(text, sizeof text, "%u.%u.%u", v / 10000, v / 100 % 100, v % 100);
    CHECK_STR_EQ(tl_version_string(), text);
    CHECK_EQ(v, TL_VERSION_MAJOR * 10000 + TL_VERSION_MINOR * 100 + TL_VERSION_PATCH);
}

TEST(the_last_error_stays_until_the_next)
{
    things t = make_things();
    CHECK_STATUS(tl_model_get_info(NULL, t.model), TL_STATUS_INVALID);
    tl_model_info info = {.size = sizeof info};
    CHECK_OK(tl_model_get_info(&info, t.model));
    CHECK_STR_HAS(tl_last_error(), "info is NULL");
    CHECK_STATUS(tl_kv_cache_truncate(NULL, 0), TL_STATUS_INVALID);
    CHECK(strstr(tl_last_error(), "info") == NULL);
    release_things(&t);
}

/* ---- lives ---- */

/* The k-th order of n things. */
static void order(int *to, int n, int k)
{
    int rest[N_THINGS];
    for (int i = 0; i < n; i++)
        rest[i] = i;
    for (int i = n; i > 0; i--, k /= i + 1) {
        int at = k % i;
        *to++ = rest[at];
        for (int j = at; j < i - 1; j++)
            rest[j] = rest[j + 1];
    }
}

TEST(releases_in_every_order)
{
    int64_t live = mem_live();
    for (int k = 0; k < 720; k++) {
        things t = make_things();
        int32_t token;
        if (k % 2) { /* streams that have begun, or not */
            CHECK_OK(tl_stream_next(&token, t.pool_stream));
            CHECK_OK(tl_stream_next(&token, t.cache_stream));
        }
        if (k % 3 == 0)
            tl_model_close(t.model);
        int way[N_THINGS];
        order(way, N_THINGS, k);
        for (int i = 0; i < N_THINGS; i++)
            release_thing(&t, way[i]);
        REQUIRE(mem_live() == live);
    }
}

TEST(a_finished_stream_keeps_nothing)
{
    int64_t live = mem_live();
    tl_generate_options options = greedy(3);
    tl_stream *stream;
    tl_model *model = tiny_load(&tiny_specs[0], NULL);
    REQUIRE_OK(tl_stream_create(&stream, model, NULL, tokens, 3, &options));
    CHECK_OK(drain(stream).status);
    tl_model_release(model);
    CHECK_EQ(mem_live(), live + 1); /* the stream itself */
    CHECK_EQ(drain(stream).n, 0);
    tl_stream_release(stream);
    CHECK_EQ(mem_live(), live);
}

TEST(what_is_left_still_works)
{
    tl_generate_options options = greedy(5);
    things t = make_things();
    output want = generate_plain(t.model, tokens, 6, &options);
    tl_kv_cache *clone;
    float hidden[20];
    REQUIRE_OK(tl_kv_cache_clone(&clone, t.kv));
    tl_model_release(t.model);
    tl_prefix_pool_release(t.pool);
    tl_prefix_cache_release(t.cache);
    tl_kv_cache_release(t.kv);
    CHECK_OUTPUT(drain(t.pool_stream), &want);
    tl_stream_release(t.pool_stream);
    tl_stream_release(t.cache_stream);
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, clone, tokens, 3));
    CHECK_EQ(tl_kv_cache_length(clone), 6);
    tl_kv_cache_release(clone);
}

TEST(a_closed_model)
{
    things t = make_things();
    float numbers[6 * VOCAB];
    int32_t token;
    int64_t length;
    size_t n;
    const void *data;
    tl_model_info info = {.size = sizeof info};
    tl_generate_options o = greedy(1);
    tl_model_close(t.model);
    tl_model_close(t.model);
#define CHECK_CLOSED(FUNCTION, CALL)                                                               \
    do {                                                                                           \
        if (CHECK_STATUS(CALL, TL_STATUS_CLOSED))                                                  \
            CHECK_STR_HAS(tl_last_error(), FUNCTION);                                              \
    } while (0)
    CHECK_CLOSED("tl_model_logits", tl_model_logits(numbers, t.model, tokens, 3, NULL, NULL));
    CHECK_CLOSED("tl_model_states", tl_model_states(numbers, t.model, tokens, 3, NULL, NULL));
    CHECK_CLOSED("tl_model_exit_logits", tl_model_exit_logits(numbers, t.model, tokens, 3, NULL));
    CHECK_CLOSED("tl_kv_cache_create", create_kv_and_release(t.model, NULL));
    CHECK_CLOSED("tl_decode_with_kv_cache_capture",
                 tl_decode_with_kv_cache_capture(numbers, t.kv, tokens, 3));
    CHECK_CLOSED("tl_generate", tl_generate(&token, 1, &n, t.model, tokens, 3, &o));
    CHECK_CLOSED("tl_build_prefix_cache", build_and_release(t.model, NULL));
    CHECK_CLOSED("tl_generate_from_prefix_cache",
                 tl_generate_from_prefix_cache(&token, 1, &n, t.model, t.cache, tokens, 3, &o));
    CHECK_CLOSED("tl_prefix_pool_register",
                 tl_prefix_pool_register(&length, t.pool, t.model, tokens, 3, NULL));
    CHECK_CLOSED("tl_prefix_pool_generate",
                 tl_prefix_pool_generate(&token, 1, &n, t.pool, t.model, tokens, 3, &o));
    CHECK_CLOSED("tl_stream_create", stream_and_release(t.model, &o));
    CHECK_CLOSED("tl_stream_next", tl_stream_next(&token, t.pool_stream));
#undef CHECK_CLOSED
    CHECK_EQ(tl_kv_cache_length(t.kv), 3);
    CHECK_OK(tl_model_get_info(&info, t.model)); /* what asks nothing of it */
    CHECK_OK(tl_model_blob(&data, &n, t.model, "card"));
    CHECK_EQ(counters_of(t.model).tokens_decoded, 3);
    release_things(&t);
}
