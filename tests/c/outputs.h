/* Every way to generate, with its outcome as a value that can be compared, and what a model counts
 * meanwhile. */
#ifndef TINYLOOP_OUTPUTS_H
#define TINYLOOP_OUTPUTS_H

#include "run/engine.h"
#include "test.h"
#include "tiny_model.h"

enum { MAX_OUTPUT = 64, WARM_CHUNK = 16 };

typedef struct output {
    tl_status status;
    size_t n;
    int32_t tokens[MAX_OUTPUT];
} output;

static inline tl_generate_options greedy(int64_t max_tokens)
{
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = max_tokens;
    options.temperature = 0;
    options.has_seed = 1;
    return options;
}

/* With all of the sampling chain. */
static inline tl_generate_options sampled(int64_t max_tokens, uint64_t seed)
{
    tl_generate_options options = greedy(max_tokens);
    options.temperature = 1.2;
    options.top_k = 20;
    options.top_p = 0.95;
    options.min_p = 0.01;
    options.repetition_penalty = 1.1;
    options.seed = seed;
    return options;
}

static inline output generate_plain(tl_model *model, const int32_t *prompt, size_t n,
                                    const tl_generate_options *options)
{
    output o = {0};
    o.status = tl_generate(o.tokens, MAX_OUTPUT, &o.n, model, prompt, n, options);
    return o;
}

static inline output generate_pooled(tl_prefix_pool *pool, tl_model *model, const int32_t *prompt,
                                     size_t n, const tl_generate_options *options)
{
    output o = {0};
    o.status = tl_prefix_pool_generate(o.tokens, MAX_OUTPUT, &o.n, pool, model, prompt, n, options);
    return o;
}

static inline output generate_cached(tl_prefix_cache *cache, tl_model *model, const int32_t *suffix,
                                     size_t n, const tl_generate_options *options)
{
    output o = {0};
    o.status =
        tl_generate_from_prefix_cache(o.tokens, MAX_OUTPUT, &o.n, model, cache, suffix, n, options);
    return o;
}

/* Runs the stream to its end; does not release it. */
static inline output drain(tl_stream *stream)
{
    output o = {0};
    int32_t token;
    while ((o.status = tl_stream_next(&token, stream)) == TL_STATUS_OK && token >= 0)
        o.tokens[o.n++] = token;
    if (o.status != TL_STATUS_OK)
        o.n = 0;
    return o;
}

/* pool may be NULL. */
static inline output generate_streamed(tl_prefix_pool *pool, tl_model *model, const int32_t *prompt,
                                       size_t n, const tl_generate_options *options)
{
    output o = {0};
    tl_stream *stream;
    o.status = tl_stream_create(&stream, model, pool, prompt, n, options);
    if (o.status == TL_STATUS_OK)
        o = drain(stream);
    tl_stream_release(stream);
    return o;
}

static inline output generate_cache_streamed(tl_prefix_cache *cache, tl_model *model,
                                             const int32_t *suffix, size_t n,
                                             const tl_generate_options *options)
{
    output o = {0};
    tl_stream *stream;
    o.status = tl_stream_create_from_prefix_cache(&stream, model, cache, suffix, n, options);
    if (o.status == TL_STATUS_OK)
        o = drain(stream);
    tl_stream_release(stream);
    return o;
}

static inline bool same_output(const output *a, const output *b)
{
    return a->status == b->status && a->n == b->n &&
           memcmp(a->tokens, b->tokens, a->n * sizeof *a->tokens) == 0;
}

#define CHECK_OUTPUT(GOT, WANT)                                                                    \
    do {                                                                                           \
        output check_got = (GOT);                                                                  \
        test_check(same_output(&check_got, (WANT)), __FILE__, __LINE__,                            \
                   "%s: status %d, %zu tokens; wanted %d, %zu (last error: %s)", #GOT,             \
                   check_got.status, check_got.n, (WANT)->status, (WANT)->n, tl_last_error());     \
    } while (0)

/* A model whose KV store has met every size of block, so that idle slabs no longer come or go;
 * small passes, so that 40 tokens take several. */
static inline tl_model *load_warm_spec(int spec)
{
    tl_model_options options = tiny_options(2);
    options.prefill_chunk = WARM_CHUNK;
    tl_model *model = tiny_load(&tiny_specs[spec], &options);
    const int32_t prompt[] = {1, 2, 3};
    tl_generate_options generating = greedy(1);
    CHECK_OK(generate_plain(model, prompt, 3, &generating).status);
    return model;
}

static inline tl_model *load_warm(void)
{
    return load_warm_spec(0);
}

/* Bytes of the blocks that are in use. */
static inline size_t blocks_in_use(const tl_model *model)
{
    size_t in_use, in_slabs;
    kv_store_bytes(model->kv, &in_use, &in_slabs);
    return in_use;
}

static inline tl_counters counters_of(const tl_model *model)
{
    tl_counters counters = {.size = sizeof counters};
    CHECK_OK(tl_model_get_counters(&counters, model));
    return counters;
}

/* Tokens prefilled and decoded, and pool requests that ended full, partial, missed, fallen back,
 * since `before`. */
typedef struct work {
    int64_t prefilled, decoded, full, partial, miss, fallback;
} work;

static inline work work_since(const tl_counters *before, const tl_model *model)
{
    tl_counters now = counters_of(model);
    return (work){(int64_t)(now.tokens_prefilled - before->tokens_prefilled),
                  (int64_t)(now.tokens_decoded - before->tokens_decoded),
                  (int64_t)(now.pool_full - before->pool_full),
                  (int64_t)(now.pool_partial - before->pool_partial),
                  (int64_t)(now.pool_miss - before->pool_miss),
                  (int64_t)(now.pool_fallback - before->pool_fallback)};
}

#define CHECK_WORK(BEFORE, MODEL, ...)                                                             \
    do {                                                                                           \
        work check_done = work_since((BEFORE), (MODEL)), check_want = {__VA_ARGS__};               \
        test_check(memcmp(&check_done, &check_want, sizeof check_done) == 0, __FILE__, __LINE__,   \
                   "prefilled %d, decoded %d, full %d, partial %d, miss %d, fallback %d; "         \
                   "wanted " #__VA_ARGS__,                                                         \
                   (int)check_done.prefilled, (int)check_done.decoded, (int)check_done.full,       \
                   (int)check_done.partial, (int)check_done.miss, (int)check_done.fallback);       \
    } while (0)

static inline tl_prefix_pool *make_pool(int64_t capacity)
{
    tl_prefix_pool_options options = TL_PREFIX_POOL_OPTIONS_INIT;
    options.capacity = capacity;
    tl_prefix_pool *pool;
    CHECK_OK(tl_prefix_pool_create(&pool, &options));
    return pool;
}

static inline void enter(tl_prefix_pool *pool, tl_model *model, const int32_t *tokens, size_t n,
                         const tl_cache_options *options)
{
    int64_t length;
    CHECK_OK(tl_prefix_pool_register(&length, pool, model, tokens, n, options));
    CHECK_EQ(length, n);
}

#endif
