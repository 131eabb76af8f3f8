/* The law inside a generation: whatever it started from, its KV, its final states and its logits
 * are the same bits after every token. The source is included so that the test sees them. */
#include "generate/generation.c"

#include "law.h"
#include "test.h"

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

enum { N_PROMPT = 70, N_COMPARED = 3 };

/* Two generations of the same prompt side by side. */
static bool same_steps(generation *a, generation *b)
{
    size_t vocab = (size_t)a->model->config.vocab_size;
    for (int i = 0; i < N_COMPARED; i++) {
        int32_t x, y;
        if (generation_next(&x, a) != TL_STATUS_OK || generation_next(&y, b) != TL_STATUS_OK)
            return false;
        if (x < 0 || x != y || !same_kv(a->kv, b->kv) ||
            memcmp(a->hidden, b->hidden, hidden_bytes(a->model)) != 0 ||
            memcmp(a->logits, b->logits, vocab * sizeof *a->logits) != 0)
            return false;
    }
    return true;
}

static generation *create(tl_model *model, const generation_source *source,
                          const tl_cache_options *key)
{
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = N_COMPARED + 1; /* a finished generation lets go of its buffers */
    tiny_set_key(&options, key);
    options.has_seed = 1;
    options.seed = 9;
    options.has_stop_tokens = 1;
    generation *g = NULL;
    CHECK_OK(generation_create(&g, model, source, &options));
    return g;
}

/* Plain against pool and prefix cache, with the first k tokens cached. */
static bool same_from_caches(tl_model *plain_model, tl_model *model, const int32_t *prompt,
                             size_t k, int64_t window)
{
    tl_cache_options key = tiny_key(model, 0, window);
    tl_prefix_pool *pool;
    tl_prefix_cache *cache;
    int64_t length;
    CHECK_OK(tl_prefix_pool_create(&pool, NULL));
    CHECK_OK(tl_prefix_pool_register(&length, pool, model, prompt, k, &key));
    CHECK_OK(tl_build_prefix_cache(&cache, model, prompt, k, &key));
    generation_source sources[] = {
        {.pool = pool, .tokens = prompt, .n_tokens = N_PROMPT},
        {.cache = cache, .tokens = prompt + k, .n_tokens = N_PROMPT - k},
    };
    generation_source whole = {.tokens = prompt, .n_tokens = N_PROMPT};
    bool same = true;
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        generation *plain = create(plain_model, &whole, &key);
        generation *cached = create(model, &sources[i], &key);
        same &= plain != NULL && cached != NULL && same_steps(plain, cached);
        generation_destroy(plain);
        generation_destroy(cached);
    }
    tl_prefix_cache_release(cache);
    tl_prefix_pool_release(pool);
    return same;
}

TEST(caches_give_the_bits_of_plain_generation)
{
    static const int64_t windows[] = {0, 1, 20, 33, 69, 70, 71};
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tl_model_options plain_options = tiny_options(1), options = tiny_options(1 + (int)s % 4);
        options.prefill_chunk = s % 2 ? 11 : 0;
        tl_model *plain_model = tiny_load(&tiny_specs[s], &plain_options);
        tl_model *model = tiny_load(&tiny_specs[s], &options);
        int32_t prompt[N_PROMPT];
        tiny_tokens(prompt, N_PROMPT, tiny_specs[s].vocab, s);
        /* every other one for those that take long */
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w += s < TINY_LARGE ? 1 : 2)
            for (size_t k = N_PROMPT; k >= 1; k -= k > 6 ? 6 : 1)
                if (!test_check(same_from_caches(plain_model, model, prompt, k, windows[w]),
                                __FILE__, __LINE__, "model %zu, window %lld, %zu of %d cached", s,
                                (long long)windows[w], k, N_PROMPT))
                    break;
        tl_model_release(model);
        tl_model_release(plain_model);
    }
}
