/* One sequence of one model: the public tl_kv_cache. */
#ifndef TL_RUN_KV_CACHE_H
#define TL_RUN_KV_CACHE_H

#include "base/exclusive.h"
#include "kv/sequence.h"
#include "run/engine.h"

struct tl_kv_cache {
    handle handle;
    exclusive use;
    tl_model *model; /* retained */
    cache_key key;
    kv_sequence sequence;
    _Atomic int64_t shown_length,
        shown_bytes; /* after the last call of the C API; read at any time */
};

tl_status kv_cache_create(tl_kv_cache **out, tl_model *model, cache_key key);
tl_status kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv);
void kv_cache_release(tl_kv_cache *kv);

#endif
