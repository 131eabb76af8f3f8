#include "generate/generation.h"

#include "base/exclusive.h"
#include "base/memory.h"
#include "base/random.h"
#include "generate/options.h"

#include <string.h>

struct tl_stream {
    handle handle;
    exclusive use;
    tl_model *model;        /* retained; NULL at the end, like all that follows */
    tl_prefix_pool *pool;   /* retained, or NULL */
    tl_prefix_cache *cache; /* retained, or NULL */
    cache_key key;
    sampler *sampler;
    int32_t *stop_tokens;
    size_t n_stop_tokens;
    int32_t *prompt; /* [n_prompt], the cache's tokens included */
    size_t n_prompt;
    size_t n_left; /* tokens that may still come */
    bool started;
    int32_t last;     /* the last token, not yet run through the layers */
    int64_t position; /* of the next token */
    tl_kv_cache *kv;
    run_pass *pass;
    float *hidden; /* [hidden] of the last token that was run */
    float *logits; /* [vocab] */
};

/* ---- making ---- */

static tl_status check_lengths(const tl_model *model, size_t n_prompt, int64_t max_tokens)
{
    if (max_tokens <= model->max_seq_len && (int64_t)n_prompt <= model->max_seq_len - max_tokens)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID,
                   "%zu prompt tokens + max_tokens %lld is more than "
                   "max_seq_len %lld",
                   n_prompt, (long long)max_tokens, (long long)model->max_seq_len);
}

/* A key that a call gives for a cache, which has its own. */
static tl_status check_same(const char *name, int64_t value, int64_t of_cache)
{
    if (value == of_cache)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID, "%s is %lld, but the prefix cache was built with %lld", name,
                   (long long)value, (long long)of_cache);
}

/* What the call does not state of the cache's key is the cache's; but prefix_len, by default, is
 * the whole prompt here too. */
static tl_status check_cache_key(generation *g, key_request request)
{
    const tl_kv_cache *kv = g->cache->kv;
    if (kv->model != g->model)
        return tl_fail(TL_STATUS_INVALID,
                       "cache was built with another model; only the one that built it can use it");
    if (request.loops == 0 && request.inner_loops == 0) {
        request.loops = kv->key.loops;
        request.inner_loops = kv->key.inner_loops;
    }
    if (request.window == 0)
        request.window = kv->key.window;
    TL_TRY(engine_resolve(&g->key, g->model, &request, g->n_prompt));
    TL_TRY(check_same("loops", g->key.loops, kv->key.loops));
    TL_TRY(check_same("inner_loops", g->key.inner_loops, kv->key.inner_loops));
    TL_TRY(check_same("cache_window", g->key.window, kv->key.window));
    if (g->key.prefix_len == kv->key.prefix_len)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID,
                   "prefix_len is %lld (the whole prompt unless stated), but the prefix cache was "
                   "built with %lld: its tokens have not seen the rest",
                   (long long)g->key.prefix_len, (long long)kv->key.prefix_len);
}

static tl_status resolve_key(generation *g, const tl_generate_options *options)
{
    key_request request = {
        .loops = options->loops,
        .inner_loops = options->inner_loops,
        .window = options->cache_window,
        .has_prefix_len = options->has_prefix_len != 0,
        .prefix_len = options->prefix_len,
    };
    return g->cache != NULL ? check_cache_key(g, request)
                            : engine_resolve(&g->key, g->model, &request, g->n_prompt);
}

static tl_status check_source(generation *g, const generation_source *source,
                              const tl_generate_options *options)
{
    size_t n_cached = g->cache != NULL ? g->cache->n_tokens : 0;
    g->n_prompt = n_cached + source->n_tokens;
    TL_TRY(generate_options_check(options, g->model));
    TL_TRY(check_lengths(g->model, g->n_prompt, options->max_tokens));
    if (g->cache == NULL || source->n_tokens > 0)
        TL_TRY(engine_check_tokens(g->model, g->cache != NULL ? "suffix" : "prompt", source->tokens,
                                   source->n_tokens));
    return resolve_key(g, options);
}

static tl_status copy_inputs(generation *g, const generation_source *source,
                             const tl_generate_options *options)
{
    bool own_stops = options->has_stop_tokens != 0;
    const int32_t *stops = own_stops ? options->stop_tokens : g->model->end_ids;
    g->n_stop_tokens = own_stops ? options->n_stop_tokens : g->model->n_end_ids;
    g->stop_tokens = mem_array(g->n_stop_tokens, sizeof *stops);
    g->prompt = mem_array(g->n_prompt, sizeof *g->prompt);
    g->hidden = mem_array((size_t)g->model->config.hidden_size, sizeof *g->hidden);
    g->logits = mem_array((size_t)g->model->config.vocab_size, sizeof *g->logits);
    if (!g->stop_tokens || !g->prompt || !g->hidden || !g->logits)
        return tl_fail_nomem("a generation", g->n_prompt * sizeof *g->prompt);
    if (g->n_stop_tokens > 0)
        memcpy(g->stop_tokens, stops, g->n_stop_tokens * sizeof *stops);
    size_t n_cached = g->n_prompt - source->n_tokens;
    if (n_cached > 0)
        memcpy(g->prompt, g->cache->tokens, n_cached * sizeof *g->prompt);
    if (source->n_tokens > 0)
        memcpy(g->prompt + n_cached, source->tokens, source->n_tokens * sizeof *g->prompt);
    sampling sampling = {
        .temperature = options->temperature,
        .top_k = options->top_k,
        .top_p = options->top_p,
        .min_p = options->min_p,
        .repetition_penalty = options->repetition_penalty,
        .seed = options->has_seed ? options->seed : random_fresh_seed(),
    };
    TL_TRY(sampler_create(&g->sampler, (size_t)g->model->config.vocab_size, sampling));
    for (size_t i = 0; i < g->n_prompt; i++)
        sampler_see(g->sampler, g->prompt[i]);
    g->n_left = (size_t)options->max_tokens;
    g->position = (int64_t)g->n_prompt;
    return TL_STATUS_OK;
}

tl_status generation_create(generation **out, tl_model *model, const generation_source *source,
                            const tl_generate_options *options)
{
    *out = NULL;
    generation *g = mem_zeroed(1, sizeof *g);
    if (g == NULL)
        return tl_fail_nomem("a generation", sizeof *g);
    g->model = engine_retain(model);
    g->pool = source->pool != NULL ? prefix_pool_retain(source->pool) : NULL;
    g->cache = source->cache != NULL ? prefix_cache_retain(source->cache) : NULL;
    tl_status status = check_source(g, source, options);
    if (status == TL_STATUS_OK)
        status = copy_inputs(g, source, options);
    if (status != TL_STATUS_OK) {
        generation_destroy(g);
        return status;
    }
    *out = g;
    return TL_STATUS_OK;
}

static void drop_run(generation *g)
{
    run_pass_destroy(g->pass);
    kv_cache_release(g->kv);
    g->pass = NULL;
    g->kv = NULL;
}

/* Everything but the handle itself: what a finished generation has no more use for. */
static void let_go(generation *g)
{
    g->n_left = 0;
    drop_run(g);
    sampler_destroy(g->sampler);
    prefix_cache_release(g->cache);
    prefix_pool_release(g->pool);
    engine_release(g->model);
    mem_free(g->stop_tokens);
    mem_free(g->prompt);
    mem_free(g->hidden);
    mem_free(g->logits);
    g->sampler = NULL;
    g->cache = NULL;
    g->pool = NULL;
    g->model = NULL;
    g->stop_tokens = g->prompt = NULL;
    g->hidden = g->logits = NULL;
}

void generation_destroy(generation *g)
{
    if (g == NULL)
        return;
    let_go(g);
    mem_free(g);
}

/* ---- running ---- */

/* Runs tokens through the layers, extends the KV, and leaves the last one's state in hidden. */
static tl_status feed(generation *g, const int32_t *tokens, size_t n, counter kind)
{
    if (g->pass == NULL)
        TL_TRY(run_pass_create(&g->pass, g->model, run_rows_for(g->kv, n)));
    run_item item = {.kv = g->kv, .tokens = tokens, .n_tokens = n, .last_hidden = g->hidden};
    return run_tokens(g->pass, &item, kind);
}

/* Shares the cache's KV and runs the rest of the prompt. */
static tl_status start_from_cache(generation *g, const tl_prefix_cache *cache)
{
    size_t hidden_bytes = (size_t)g->model->config.hidden_size * sizeof *g->hidden;
    TL_TRY(kv_cache_clone(&g->kv, cache->kv));
    memcpy(g->hidden, cache->hidden, hidden_bytes);
    size_t n_rest = g->n_prompt - cache->n_tokens;
    if (n_rest == 0) /* no layer runs before the first token, only the head */
        return run_pass_create(&g->pass, g->model, 1);
    return feed(g, g->prompt + cache->n_tokens, n_rest, COUNT_PREFILLED);
}

static tl_status start_plainly(generation *g)
{
    TL_TRY(kv_cache_create(&g->kv, g->model, g->key));
    return feed(g, g->prompt, g->n_prompt, COUNT_PREFILLED);
}

/* The pool saves time and nothing else: whatever fails in its path, the plain one follows. A
 * request counts once it has started. */
static tl_status start_from_pool(generation *g)
{
    char last_error[STATUS_MESSAGE_SIZE];
    status_save(last_error);
    tl_prefix_cache *match = prefix_pool_match(g->pool, g->model, g->prompt, g->n_prompt, g->key);
    counter outcome = match == NULL                    ? COUNT_POOL_MISS
                      : match->n_tokens == g->n_prompt ? COUNT_POOL_FULL
                                                       : COUNT_POOL_PARTIAL;
    tl_status status = match != NULL ? start_from_cache(g, match) : start_plainly(g);
    prefix_cache_release(match);
    if (match == NULL && g->key.prefix_len > 0)
        log_message(TL_LOG_INFO,
                    "pool miss: the first %lld tokens of the prompt see each other, and no entry "
                    "has the same prefix_len (by default an entry's and a prompt's whole length)",
                    (long long)g->key.prefix_len);
    bool failed = status != TL_STATUS_OK && status != TL_STATUS_INTERRUPTED;
    if (failed && outcome != COUNT_POOL_MISS) {
        outcome = COUNT_POOL_FALLBACK;
        drop_run(g);
        status = start_plainly(g);
        if (status == TL_STATUS_OK)
            status_restore(last_error);
    }
    if (status == TL_STATUS_OK)
        engine_count(g->model, outcome, 1);
    return status;
}

/* On failure nothing of it is left: it can be tried again. */
static tl_status start(generation *g)
{
    tl_status status = g->cache != NULL  ? start_from_cache(g, g->cache)
                       : g->pool != NULL ? start_from_pool(g)
                                         : start_plainly(g);
    if (status == TL_STATUS_OK && run_pass_rows(g->pass) > g->model->prefill_chunk) {
        /* tokens that see each other took a large one; the next come one by one */
        run_pass_destroy(g->pass);
        g->pass = NULL;
        status = run_pass_create(&g->pass, g->model, 1);
    }
    if (status != TL_STATUS_OK)
        drop_run(g);
    return status;
}

static bool is_stop(const generation *g, int32_t token)
{
    for (size_t i = 0; i < g->n_stop_tokens; i++)
        if (g->stop_tokens[i] == token)
            return true;
    return false;
}

static tl_status compute_next(generation *g)
{
    TL_TRY(g->started ? feed(g, &g->last, 1, COUNT_DECODED) : start(g));
    g->started = true;
    TL_TRY(run_head(g->pass, g->hidden, 1, g->logits));
    return sampler_pick(&g->last, g->sampler, g->logits, g->position);
}

tl_status generation_next(int32_t *token, generation *g)
{
    *token = -1;
    if (g->n_left == 0) {
        let_go(g);
        return TL_STATUS_OK;
    }
    tl_status status = compute_next(g);
    if (status == TL_STATUS_INTERRUPTED)
        return status;
    if (status != TL_STATUS_OK) {
        let_go(g);
        return status;
    }
    *token = g->last;
    g->position++;
    g->n_left--;
    sampler_see(g->sampler, g->last);
    if (is_stop(g, g->last) || g->n_left == 0)
        let_go(g);
    return TL_STATUS_OK;
}

static tl_status next_if_open(int32_t *token, generation *g)
{
    tl_status status = g->n_left > 0 ? engine_check_open(g->model) : TL_STATUS_OK;
    if (status == TL_STATUS_OK)
        return generation_next(token, g);
    let_go(g);
    return status;
}

tl_status generation_stream_next(int32_t *token, generation *g)
{
    *token = -1;
    if (!exclusive_begin(&g->use))
        return tl_fail(TL_STATUS_BUSY,
                       "stream is in use by another call; one at a time may use it");
    tl_status status = next_if_open(token, g);
    if (exclusive_end(&g->use))
        generation_destroy(g);
    return status;
}

void generation_stream_release(generation *g)
{
    if (exclusive_release(&g->use))
        generation_destroy(g);
}

tl_status generation_run(int32_t *tokens, size_t capacity, size_t *n_tokens, tl_model *model,
                         const generation_source *source, const tl_generate_options *options)
{
    *n_tokens = 0;
    generation *g;
    TL_TRY(generation_create(&g, model, source, options));
    if (g->n_left > capacity || (g->n_left > 0 && tokens == NULL)) {
        generation_destroy(g);
        return tl_fail(TL_STATUS_INVALID,
                       "tokens is %s with a capacity of %zu ids; max_tokens "
                       "%lld needs as many",
                       tokens == NULL ? "NULL" : "an array", capacity,
                       (long long)options->max_tokens);
    }
    tl_status status;
    int32_t token;
    size_t n = 0; /* not the caller's, which a callback may change */
    while ((status = generation_next(&token, g)) == TL_STATUS_OK && token >= 0) {
        tokens[n++] = token;
        if (options->on_token != NULL && options->on_token(options->user, token) != 0)
            break;
    }
    *n_tokens = status == TL_STATUS_OK ? n : 0;
    generation_destroy(g);
    return status;
}
