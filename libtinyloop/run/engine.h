/* A loaded model: weights in a backend, the plan, the KV store, the counters. */
#ifndef TL_RUN_ENGINE_H
#define TL_RUN_ENGINE_H

#include "backend/backend.h"
#include "base/count.h"
#include "base/handle.h"

typedef enum counter {
    COUNT_PREFILLED, /* tokens */
    COUNT_DECODED,
    COUNT_POOL_FULL, /* requests */
    COUNT_POOL_PARTIAL,
    COUNT_POOL_MISS,
    COUNT_POOL_FALLBACK,
    COUNTERS,
} counter;

typedef struct model_blob {
    char *name;
    void *data;
    size_t size;
} model_blob;

struct tl_model {
    handle handle;
    ref_count references;
    atomic_bool closed;
    const backend_ops *backend;
    backend_model *weights;
    model_config config;
    model_plan plan;
    loop_limits loops;
    kv_store *kv;
    int32_t kv_mode;
    int64_t max_seq_len;
    size_t prefill_chunk; /* tokens of a pass */
    int64_t n_parameters;
    model_blob *blobs;
    size_t n_blobs;
    const int32_t *end_ids; /* in the blob of that name */
    size_t n_end_ids;
    atomic_bool warned_loops;
    _Atomic uint64_t counters[COUNTERS];
};

tl_status engine_load(tl_model **out, const char *path, const tl_model_options *options);
tl_model *engine_retain(tl_model *model);
void engine_release(tl_model *model);

/* CLOSED after tl_model_close. */
tl_status engine_check_open(const tl_model *model);

/* What caches are keyed by. */
typedef struct cache_key {
    int64_t loops;
    int64_t window;      /* 0: none */
    int64_t inner_loops; /* of a nested schedule, else 0 */
    int64_t prefix_len;  /* positions below see each other; 0 where attention is causal */
} cache_key;

/* What a call asks for; 0 loops are the file's default. */
typedef struct key_request {
    int64_t loops;
    int64_t inner_loops;
    int64_t window;
    bool has_prefix_len; /* else all tokens see each other, if the model is of that kind */
    int64_t prefix_len;
} key_request;

/* For a text of n_tokens, the prefix included. Warns once above the trained loops. */
tl_status engine_resolve(cache_key *key, tl_model *model, const key_request *request,
                         size_t n_tokens);

static inline loop_counts key_loop_counts(cache_key key)
{
    return (loop_counts){key.loops, key.inner_loops};
}

/* 1 <= n <= max_seq_len and all ids in the vocabulary; `name` is the parameter's. */
tl_status engine_check_tokens(const tl_model *model, const char *name, const int32_t *tokens,
                              size_t n);

const model_blob *engine_blob(const tl_model *model, const char *name); /* or NULL */

/* KV bytes that a position takes: outside the loops, and in each. (Of a nested schedule, in each
 * outer loop with the default inner ones.) A plane with a window holds no more than that. */
typedef struct kv_position_bytes {
    int64_t fixed;
    int64_t loop;
} kv_position_bytes;

kv_position_bytes engine_kv_bytes(const tl_model *model);

void engine_count(tl_model *model, counter counter, uint64_t n);

/* kv_mode.c: the option and the environment's TINYLOOP_KV_* as one mode. */
tl_status kv_mode_resolve(int32_t *mode, int32_t option);

#endif
