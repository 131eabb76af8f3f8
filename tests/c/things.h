/* One of everything that a caller of the C API can hold. */
#ifndef TINYLOOP_THINGS_H
#define TINYLOOP_THINGS_H

#include "outputs.h"

static const int32_t thing_tokens[] = {4, 5, 6, 7, 8, 9};
enum { N_THING_TOKENS = 6, THING_VOCAB = 50, THING_HIDDEN = 20, THING_LOOPS_TRAINED = 2 };

typedef struct things {
    tl_model *model;
    tl_prefix_pool *pool;   /* has an entry of 3 tokens */
    tl_prefix_cache *cache; /* of 3 tokens */
    tl_kv_cache *kv;        /* of 3 tokens */
    tl_stream *pool_stream;
    tl_stream *cache_stream;
} things;

static inline void thing_wiring(model_config *config)
{
    config->exit_mode = EXIT_SIGMOID_CDF;
    config->exit_threshold = 1;
}

static inline things make_things(void)
{
    things t;
    float hidden[THING_HIDDEN];
    tl_generate_options options = greedy(5);
    tiny_spec spec = TINY_SPEC;
    spec.wiring = thing_wiring;
    spec.loops_max_trained = THING_LOOPS_TRAINED;
    t.model = tiny_load(&spec, NULL);
    t.pool = make_pool(2);
    enter(t.pool, t.model, thing_tokens, 3, NULL);
    CHECK_OK(tl_build_prefix_cache(&t.cache, t.model, thing_tokens, 3, NULL));
    CHECK_OK(tl_kv_cache_create(&t.kv, t.model, NULL));
    CHECK_OK(tl_decode_with_kv_cache_capture(hidden, t.kv, thing_tokens, 3));
    CHECK_OK(tl_stream_create(&t.pool_stream, t.model, t.pool, thing_tokens, 6, &options));
    CHECK_OK(tl_stream_create_from_prefix_cache(&t.cache_stream, t.model, t.cache, thing_tokens, 3,
                                                &options));
    return t;
}

enum { N_THINGS = 6 };

static inline void release_thing(things *t, int which)
{
    switch (which) {
    case 0:
        tl_model_release(t->model);
        break;
    case 1:
        tl_prefix_pool_release(t->pool);
        break;
    case 2:
        tl_prefix_cache_release(t->cache);
        break;
    case 3:
        tl_kv_cache_release(t->kv);
        break;
    case 4:
        tl_stream_release(t->pool_stream);
        break;
    default:
        tl_stream_release(t->cache_stream);
    }
}

static inline void release_things(things *t)
{
    for (int i = 0; i < N_THINGS; i++)
        release_thing(t, i);
}

#endif
