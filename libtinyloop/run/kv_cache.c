#include "run/kv_cache.h"

#include "base/memory.h"

static tl_kv_cache *new_cache(tl_model *model, cache_key key)
{
    tl_kv_cache *kv = mem_zeroed(1, sizeof *kv);
    if (kv == NULL) {
        tl_fail_nomem("a KV cache", sizeof *kv);
        return NULL;
    }
    kv->model = engine_retain(model);
    kv->key = key;
    return kv;
}

static tl_status hand_over(tl_kv_cache **out, tl_kv_cache *kv, tl_status status)
{
    *out = kv;
    if (status != TL_STATUS_OK) {
        engine_release(kv->model);
        mem_free(kv);
        *out = NULL;
    }
    return status;
}

tl_status kv_cache_create(tl_kv_cache **out, tl_model *model, cache_key key)
{
    *out = NULL;
    tl_kv_cache *kv = new_cache(model, key);
    if (kv == NULL)
        return TL_STATUS_NOMEM;
    tl_status status = kv_sequence_init(&kv->sequence, model->kv, model->plane_classes,
                                        plan_n_planes(&model->plan, key.loops), key.window);
    return hand_over(out, kv, status);
}

tl_status kv_cache_clone(tl_kv_cache **out, const tl_kv_cache *kv)
{
    *out = NULL;
    tl_kv_cache *clone = new_cache(kv->model, kv->key);
    if (clone == NULL)
        return TL_STATUS_NOMEM;
    return hand_over(out, clone, kv_sequence_clone(&clone->sequence, &kv->sequence));
}

void kv_cache_release(tl_kv_cache *kv)
{
    if (kv == NULL)
        return;
    kv_sequence_clear(&kv->sequence);
    engine_release(kv->model);
    mem_free(kv);
}
