/* Models: loading, lives, and what they say of themselves. */
#include "api/call.h"
#include "api/structs.h"

static tl_status check_model_options(const tl_model_options *o)
{
    if (o->max_seq_len < 1 || o->max_seq_len > 1 << 24)
        return tl_fail(TL_STATUS_INVALID, "max_seq_len is %lld; allowed are 1 to %d",
                       (long long)o->max_seq_len, 1 << 24);
    if (o->device < TL_DEVICE_AUTO || o->device > TL_DEVICE_CUDA)
        return tl_fail(TL_STATUS_INVALID, "device is %d; allowed are TL_DEVICE_AUTO, _CPU, _CUDA",
                       o->device);
    if (o->kv_mode < TL_KV_MODE_DEFAULT || o->kv_mode > TL_KV_MODE_FP32)
        return tl_fail(TL_STATUS_INVALID,
                       "kv_mode is %d; allowed are TL_KV_MODE_DEFAULT, _FP16, "
                       "_FP32",
                       o->kv_mode);
    if (o->threads < 0 || o->threads > 256)
        return tl_fail(TL_STATUS_INVALID,
                       "threads is %d; allowed are 1 to 256, and 0 for the "
                       "default",
                       o->threads);
    if (o->prefill_chunk < 0 || o->prefill_chunk > 4096)
        return tl_fail(TL_STATUS_INVALID,
                       "prefill_chunk is %d; allowed are 1 to 4096, and 0 for "
                       "the default",
                       o->prefill_chunk);
    return TL_STATUS_OK;
}

tl_status tl_model_load(tl_model **out, const char *path, const tl_model_options *options)
{
    BEGIN_CALL();
    NOT_NULL(out);
    *out = NULL;
    NOT_NULL(path);
    tl_model_options own = TL_MODEL_OPTIONS_INIT;
    TL_TRY(READ_STRUCT(&own, options, tl_model_options, init_seed));
    TL_TRY(check_model_options(&own));
    TL_TRY(engine_load(out, path, &own));
    GIVE(tl_model, *out);
    return TL_STATUS_OK;
}

void tl_model_close(tl_model *model)
{
    BEGIN_CALL();
    if (model != NULL && handle_check(model, "tl_model", "model") == TL_STATUS_OK)
        atomic_store(&model->closed, true);
}

tl_model *tl_model_retain(tl_model *model)
{
    BEGIN_CALL();
    if (model == NULL || handle_check(model, "tl_model", "model") != TL_STATUS_OK)
        return NULL;
    GIVE(tl_model, model);
    return engine_retain(model);
}

void tl_model_release(tl_model *model)
{
    BEGIN_CALL();
    if (model != NULL && handle_take(model, "tl_model"))
        engine_release(model);
}

tl_status tl_model_get_info(tl_model_info *info, const tl_model *model)
{
    BEGIN_CALL();
    NOT_NULL(info);
    CHECK_HANDLE(tl_model, model);
    const model_config *c = &model->config;
    kv_position_bytes kv = engine_kv_bytes(model);
    tl_model_info own = {
        .vocab_size = c->vocab_size,
        .hidden_size = c->hidden_size,
        .n_layers = config_n_layers(c),
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .max_seq_len = model->max_seq_len,
        .max_positions = c->max_positions,
        .loops_default = model->loops.standard,
        .loops_min = model->loops.minimum,
        .loops_max = model->loops.maximum,
        .loops_max_trained = model->loops.max_trained,
        .inner_loops_default = model->loops.standard_inner,
        .n_states_default = plan_n_states(
            &model->plan, (loop_counts){model->loops.standard, model->loops.standard_inner}),
        .n_parameters = model->n_parameters,
        .weight_bytes = (int64_t)model->backend->weight_bytes(model->weights),
        .kv_block_size = KV_BLOCK,
        .kv_bytes_fixed = kv.fixed,
        .kv_bytes_loop = kv.loop,
        .device = model->backend->device,
        .kv_mode = model->kv_mode,
        .threads = model->backend->n_lanes(model->weights),
        .two_sided_prefix = c->mask != 0,
    };
    return WRITE_STRUCT(info, &own, tl_model_info, two_sided_prefix);
}

tl_status tl_model_blob(const void **data, size_t *size, const tl_model *model, const char *name)
{
    BEGIN_CALL();
    NOT_NULL(data);
    NOT_NULL(size);
    *data = NULL;
    *size = 0;
    CHECK_HANDLE(tl_model, model);
    NOT_NULL(name);
    const model_blob *blob = engine_blob(model, name);
    if (blob != NULL) {
        *data = blob->data;
        *size = blob->size;
    }
    return TL_STATUS_OK;
}

tl_status tl_model_get_counters(tl_counters *counters, const tl_model *model)
{
    BEGIN_CALL();
    NOT_NULL(counters);
    CHECK_HANDLE(tl_model, model);
    tl_counters own = {
        .tokens_prefilled = atomic_load(&model->counters[COUNT_PREFILLED]),
        .tokens_decoded = atomic_load(&model->counters[COUNT_DECODED]),
        .pool_full = atomic_load(&model->counters[COUNT_POOL_FULL]),
        .pool_partial = atomic_load(&model->counters[COUNT_POOL_PARTIAL]),
        .pool_miss = atomic_load(&model->counters[COUNT_POOL_MISS]),
        .pool_fallback = atomic_load(&model->counters[COUNT_POOL_FALLBACK]),
    };
    return WRITE_STRUCT(counters, &own, tl_counters, pool_fallback);
}
