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
    loop_counts counts = key_loop_counts(key);
    int n_runs = plan_n_runs(&model->plan, counts);
    tl_status status = kv_sequence_init(&kv->sequence, model->kv, n_runs);
    for (int i = 0; status == TL_STATUS_OK && i < n_runs; i++) {
        plan_run run = plan_run_at(&model->plan, counts, i);
        kv_plane *plane = &kv->sequence.planes[run.plane];
        plane->class = run.stage;
        plane->window = kv_narrower(key.window, run.window);
    }
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
