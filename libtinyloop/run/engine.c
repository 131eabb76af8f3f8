#include "run/engine.h"

#include "base/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_THREADS 64 /* that a default takes */

/* ---- loading ---- */

static tl_status copy_blobs(tl_model *model, const model_file *file)
{
    model->blobs = mem_zeroed(file->n_blobs, sizeof *model->blobs);
    if (model->blobs == NULL)
        return tl_fail_nomem("the blobs", file->n_blobs * sizeof *model->blobs);
    model->n_blobs = file->n_blobs;
    for (size_t i = 0; i < file->n_blobs; i++) {
        const file_blob *from = &file->blobs[i];
        model_blob *to = &model->blobs[i];
        size_t name_size = strlen(from->name) + 1;
        to->size = from->size;
        to->name = mem_array(name_size, 1);
        to->data = mem_array(from->size, 1);
        if (to->name == NULL || to->data == NULL)
            return tl_fail_nomem(from->name, from->size);
        memcpy(to->name, from->name, name_size);
        memcpy(to->data, from->data, from->size);
    }
    return TL_STATUS_OK;
}

static tl_status find_end_ids(tl_model *model)
{
    const model_blob *blob = engine_blob(model, "end_ids");
    if (blob == NULL)
        return TL_STATUS_OK;
    if (blob->size % sizeof(int32_t) != 0)
        return tl_fail(TL_STATUS_FORMAT, "blob end_ids has %zu bytes; ids take 4 each", blob->size);
    model->end_ids = blob->data;
    model->n_end_ids = blob->size / sizeof(int32_t);
    for (size_t i = 0; i < model->n_end_ids; i++)
        if (model->end_ids[i] < 0 || model->end_ids[i] >= model->config.vocab_size)
            return tl_fail(TL_STATUS_FORMAT, "blob end_ids holds %d; token ids are 0 to %lld",
                           model->end_ids[i], (long long)model->config.vocab_size - 1);
    return TL_STATUS_OK;
}

static tl_status create_store(tl_model *model)
{
    const model_plan *plan = &model->plan;
    kv_layout layout = model->backend->kv_layout(model->weights);
    size_t block_bytes[CONFIG_MAX_STAGES];
    for (int s = 0; s < plan->n_stages; s++)
        block_bytes[s] = (size_t)plan->stages[s].n_layers * layout.layer_bytes;
    const char *poison = getenv("TINYLOOP_DEBUG_POISON_KV");
    return kv_store_create(&model->kv, model->backend->kv_memory(model->weights), block_bytes,
                           plan->n_stages, poison != NULL && strcmp(poison, "1") == 0);
}

static int default_threads(void)
{
    int threads = threads_available();
    return threads < MAX_THREADS ? threads : MAX_THREADS;
}

/* Only models that start from noise have a use for init_scale. */
static tl_status resolve_init_scale(double *scale, const model_config *config,
                                    const tl_model_options *options)
{
    *scale = config->init_scale;
    if (config->state_init != STATE_INIT_NOISE || !options->has_init_scale)
        return TL_STATUS_OK;
    *scale = options->init_scale;
    if (isfinite(*scale) && *scale >= 0)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID, "init_scale is %g; it must be finite and 0 or more", *scale);
}

static tl_status load_weights(tl_model *model, const model_file *file,
                              const tl_model_options *options)
{
    backend_options own = {
        .threads = options->threads > 0 ? options->threads : default_threads(),
        .kv_mode = model->kv_mode,
        .init_seed = options->init_seed,
    };
    TL_TRY(resolve_init_scale(&own.init_scale, &file->config, options));
    model_weights weights;
    TL_TRY(model_weights_bind(&weights, file));
    model->n_parameters = weights.n_parameters;
    tl_status status = model->backend->model_create(&model->weights, file, &weights, &own);
    model_weights_clear(&weights);
    return status;
}

static tl_status load_from(tl_model *model, const model_file *file, const tl_model_options *options)
{
    TL_TRY(config_check(&file->config));
    model->config = file->config;
    model->loops = config_loop_limits(&model->config);
    TL_TRY(load_weights(model, file, options));
    TL_TRY(model_plan_build(&model->plan, &model->config));
    TL_TRY(create_store(model));
    TL_TRY(copy_blobs(model, file));
    TL_TRY(find_end_ids(model));
    if (model->config.max_positions > 0 && model->max_seq_len > model->config.max_positions)
        log_message(TL_LOG_WARNING,
                    "max_seq_len %lld is above the %lld positions that the model "
                    "was trained for; results beyond them may be poor",
                    (long long)model->max_seq_len, (long long)model->config.max_positions);
    return TL_STATUS_OK;
}

static void destroy(tl_model *model)
{
    kv_store_destroy(model->kv);
    if (model->weights != NULL)
        model->backend->model_destroy(model->weights);
    model_plan_clear(&model->plan);
    for (size_t i = 0; model->blobs != NULL && i < model->n_blobs; i++) {
        mem_free(model->blobs[i].name);
        mem_free(model->blobs[i].data);
    }
    mem_free(model->blobs);
    mem_free(model);
}

tl_status engine_load(tl_model **out, const char *path, const tl_model_options *options)
{
    *out = NULL;
    if (options->device == TL_DEVICE_CUDA)
        return tl_fail(TL_STATUS_UNSUPPORTED, "device cuda: this build of the library has no CUDA "
                                              "backend; use auto or cpu");
    int32_t kv_mode;
    TL_TRY(kv_mode_resolve(&kv_mode, options->kv_mode));
    tl_model *model = mem_zeroed(1, sizeof *model);
    if (model == NULL)
        return tl_fail_nomem("a model", sizeof *model);
    atomic_init(&model->references, 1);
    model->backend = &cpu_backend;
    model->kv_mode = kv_mode;
    model->max_seq_len = options->max_seq_len;
    model->prefill_chunk = options->prefill_chunk > 0 ? (size_t)options->prefill_chunk : 256;
    model_file file;
    tl_status status = model_file_open(&file, path, options->verify != 0);
    if (status == TL_STATUS_OK) {
        status = load_from(model, &file, options);
        model_file_close(&file);
    }
    if (status != TL_STATUS_OK) {
        destroy(model);
        return status;
    }
    *out = model;
    return TL_STATUS_OK;
}

tl_model *engine_retain(tl_model *model)
{
    ref_retain(&model->references);
    return model;
}

void engine_release(tl_model *model)
{
    if (model != NULL && ref_release(&model->references))
        destroy(model);
}

/* ---- checks ---- */

tl_status engine_check_open(const tl_model *model)
{
    if (!atomic_load(&model->closed))
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_CLOSED, "the model is closed; it can be looked at and released");
}

static tl_status resolve_loops(cache_key *key, const tl_model *model, const key_request *request)
{
    const loop_limits *limits = &model->loops;
    int64_t loops = request->loops, inner = request->inner_loops;
    bool nested = limits->standard_inner > 0;
    if (!nested && inner != 0)
        return tl_fail(TL_STATUS_INVALID,
                       "inner_loops is %lld; only models of a nested schedule "
                       "have inner loops, this one takes 0",
                       (long long)inner);
    if (nested && (loops == 0) != (inner == 0))
        return tl_fail(TL_STATUS_INVALID,
                       "loops is %lld and inner_loops %lld; this model's "
                       "schedule is nested: give both, or none for (%lld, %lld)",
                       (long long)loops, (long long)inner, (long long)limits->standard,
                       (long long)limits->standard_inner);
    if (loops == 0) {
        loops = limits->standard;
        inner = limits->standard_inner;
    }
    if (loops < limits->minimum || loops > limits->maximum)
        return tl_fail(TL_STATUS_INVALID, "loops is %lld; this model takes %lld to %lld",
                       (long long)loops, (long long)limits->minimum, (long long)limits->maximum);
    if (nested && (inner < 1 || inner > limits->maximum || loops * (inner + 1) > CONFIG_MAX_RUNS))
        return tl_fail(TL_STATUS_INVALID,
                       "loops is %lld and inner_loops %lld; inner_loops may be 1 to %lld, and "
                       "loops * (inner_loops + 1) at most %d",
                       (long long)loops, (long long)inner, (long long)limits->maximum,
                       CONFIG_MAX_RUNS);
    key->loops = loops;
    key->inner_loops = inner;
    return TL_STATUS_OK;
}

static tl_status resolve_prefix(cache_key *key, const tl_model *model, const key_request *request,
                                size_t n_tokens)
{
    bool two_sided = model->config.mask != 0;
    int64_t prefix_len = two_sided ? (int64_t)n_tokens : 0;
    if (request->has_prefix_len)
        prefix_len = request->prefix_len;
    if (!two_sided && prefix_len != 0)
        return tl_fail(TL_STATUS_INVALID,
                       "prefix_len is %lld; this model's attention is causal, "
                       "it takes 0",
                       (long long)prefix_len);
    if (prefix_len < 0 || (uint64_t)prefix_len > n_tokens)
        return tl_fail(TL_STATUS_INVALID,
                       "prefix_len is %lld; allowed are 0 to the number of "
                       "tokens, %zu",
                       (long long)prefix_len, n_tokens);
    key->prefix_len = prefix_len;
    return TL_STATUS_OK;
}

tl_status engine_resolve(cache_key *key, tl_model *model, const key_request *request,
                         size_t n_tokens)
{
    const loop_limits *limits = &model->loops;
    TL_TRY(resolve_loops(key, model, request));
    TL_TRY(resolve_prefix(key, model, request, n_tokens));
    if (request->window < 0)
        return tl_fail(TL_STATUS_INVALID, "cache_window is %lld; it must be 0 (off) or more",
                       (long long)request->window);
    key->window = request->window;
    if (limits->max_trained > 0 && key->loops > limits->max_trained &&
        !atomic_exchange(&model->warned_loops, true))
        log_message(TL_LOG_WARNING,
                    "loops %lld is above the %lld that the model was trained for; "
                    "results may be poor",
                    (long long)key->loops, (long long)limits->max_trained);
    return TL_STATUS_OK;
}

tl_status engine_check_tokens(const tl_model *model, const char *name, const int32_t *tokens,
                              size_t n)
{
    if (n == 0)
        return tl_fail(TL_STATUS_INVALID, "%s is empty; it needs at least one token", name);
    if (n > (size_t)model->max_seq_len)
        return tl_fail(TL_STATUS_INVALID, "%s has %zu tokens; max_seq_len is %lld", name, n,
                       (long long)model->max_seq_len);
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= model->config.vocab_size)
            return tl_fail(TL_STATUS_INVALID, "%s[%zu] is %d; token ids are 0 to %lld", name, i,
                           tokens[i], (long long)model->config.vocab_size - 1);
    return TL_STATUS_OK;
}

kv_position_bytes engine_kv_bytes(const tl_model *model)
{
    kv_layout layout = model->backend->kv_layout(model->weights);
    int64_t layer_bytes = (int64_t)(layout.layer_bytes / KV_BLOCK);
    kv_position_bytes bytes = {0, 0};
    for (int s = 0; s < model->plan.n_stages; s++) {
        int64_t n = model->plan.stages[s].n_layers * layer_bytes;
        if (model->plan.nested)
            bytes.loop += s == 0 ? n * model->loops.standard_inner : n;
        else if (model->plan.stages[s].looped)
            bytes.loop += n;
        else
            bytes.fixed += n;
    }
    return bytes;
}

const model_blob *engine_blob(const tl_model *model, const char *name)
{
    for (size_t i = 0; i < model->n_blobs; i++)
        if (strcmp(model->blobs[i].name, name) == 0)
            return &model->blobs[i];
    return NULL;
}

void engine_count(tl_model *model, counter counter, uint64_t n)
{
    atomic_fetch_add_explicit(&model->counters[counter], n, memory_order_relaxed);
}
