/* A file's tensors in the backend's own form. */
#include "backend/cpu/cpu.h"

#include "base/memory.h"

#include <math.h>

static tl_status load_matrix(backend_model *model, cpu_matrix *out, const weight_matrix *parts,
                             int n_parts, size_t columns)
{
    TL_TRY(cpu_matrix_pack(out, parts, n_parts, columns, model->threads));
    model->weight_bytes += cpu_matrix_bytes(out);
    return TL_STATUS_OK;
}

/* Where the file has none it stays empty. */
static tl_status load_optional(backend_model *model, cpu_matrix *out, const weight_matrix *weight)
{
    if (weight->values == NULL)
        return TL_STATUS_OK;
    return load_matrix(model, out, weight, 1, (size_t)weight->values->shape[1]);
}

static tl_status load_vector(backend_model *model, float **out, const file_tensor *tensor)
{
    if (tensor == NULL)
        return TL_STATUS_OK;
    TL_TRY(cpu_vector(out, tensor));
    model->weight_bytes += tensor->size / dtype_size(tensor->dtype) * sizeof **out;
    return TL_STATUS_OK;
}

/* A norm without weight has ones: a product with 1 changes no bit. */
static tl_status load_norm(backend_model *model, float **out, const file_tensor *tensor,
                           bool weightless, size_t n)
{
    if (!weightless)
        return load_vector(model, out, tensor);
    *out = mem_aligned(n, sizeof **out);
    if (*out == NULL)
        return tl_fail_nomem("a norm", n * sizeof **out);
    for (size_t i = 0; i < n; i++)
        (*out)[i] = 1;
    model->weight_bytes += n * sizeof **out;
    return TL_STATUS_OK;
}

/* ---- layers ---- */

static tl_status load_block_norms(backend_model *model, cpu_block_norms *norms,
                                  const file_tensor *in, const file_tensor *out)
{
    const model_config *c = &model->config;
    bool weightless = c->norm_weightless != 0;
    float **of_out = c->norm_placement == NORM_SANDWICH_SUM ? &norms->sum : &norms->branch;
    if (c->norm_placement != NORM_POST_BRANCH)
        TL_TRY(load_norm(model, &norms->in, in, weightless, model->hidden));
    if (c->norm_placement != NORM_PRE)
        TL_TRY(load_norm(model, of_out, out, weightless, model->hidden));
    return TL_STATUS_OK;
}

static tl_status load_linear(backend_model *model, cpu_linear *out, const weight_matrix *weight,
                             const file_tensor *bias)
{
    TL_TRY(load_optional(model, &out->weight, weight));
    return load_vector(model, &out->bias, bias);
}

/* One bias for q, k, v and gates: zero where there is none. */
static tl_status load_qkv_bias(backend_model *model, cpu_linear *qkv, const layer_weights *weights)
{
    const file_tensor *biases[] = {weights->q_bias, weights->k_bias, weights->v_bias};
    size_t widths[] = {model->q_width, model->kv_width, model->kv_width}, at = 0;
    if (biases[0] == NULL && biases[1] == NULL && biases[2] == NULL)
        return TL_STATUS_OK;
    qkv->bias = mem_zeroed(qkv->weight.rows, sizeof *qkv->bias);
    if (qkv->bias == NULL)
        return tl_fail_nomem("a bias", qkv->weight.rows * sizeof *qkv->bias);
    model->weight_bytes += qkv->weight.rows * sizeof *qkv->bias;
    for (int i = 0; i < 3; at += widths[i++]) {
        float *bias = NULL;
        if (biases[i] == NULL)
            continue;
        tl_status status = cpu_vector(&bias, biases[i]);
        for (size_t o = 0; status == TL_STATUS_OK && o < widths[i]; o++)
            qkv->bias[at + o] = bias[o];
        mem_free(bias);
        TL_TRY(status);
    }
    return TL_STATUS_OK;
}

static tl_status load_attention(backend_model *model, cpu_layer *layer,
                                const layer_weights *weights)
{
    weight_matrix parts[5] = {weights->q, weights->k, weights->v};
    int n_parts = 3;
    if (weights->out_gate.values != NULL)
        parts[n_parts++] = weights->out_gate;
    if (weights->value_gate.values != NULL)
        parts[n_parts++] = weights->value_gate;
    TL_TRY(load_matrix(model, &layer->qkv.weight, parts, n_parts, model->hidden));
    TL_TRY(load_qkv_bias(model, &layer->qkv, weights));
    if (layer->qkv.weight.rows > model->qkv_width)
        model->qkv_width = layer->qkv.weight.rows;
    bool full = model->config.qk_norm == QK_NORM_FULL;
    bool ones = model->config.qk_norm != QK_NORM_NONE && model->config.qk_norm_weightless;
    TL_TRY(load_norm(model, &layer->q_norm, weights->q_norm, ones,
                     full ? model->q_width : model->head_dim));
    TL_TRY(load_norm(model, &layer->k_norm, weights->k_norm, ones,
                     full ? model->kv_width : model->head_dim));
    TL_TRY(load_linear(model, &layer->o, &weights->o, weights->o_bias));
    TL_TRY(load_optional(model, &layer->value_embed, &weights->value_embed));
    TL_TRY(load_vector(model, &layer->loop_gate, weights->loop_gate.values));
    return load_vector(model, &layer->loop_gate_bias, weights->loop_gate_bias);
}

static tl_status load_layer(backend_model *model, cpu_layer *layer, const layer_weights *weights)
{
    TL_TRY(load_block_norms(model, &layer->attn_norms, weights->attn_norm, weights->attn_out_norm));
    TL_TRY(load_block_norms(model, &layer->mlp_norms, weights->mlp_norm, weights->mlp_out_norm));
    TL_TRY(load_attention(model, layer, weights));
    TL_TRY(load_linear(model, &layer->gate, &weights->gate, weights->gate_bias));
    TL_TRY(load_linear(model, &layer->up, &weights->up, weights->up_bias));
    return load_linear(model, &layer->down, &weights->down, weights->down_bias);
}

static void free_linear(cpu_linear *linear)
{
    cpu_matrix_clear(&linear->weight);
    mem_free(linear->bias);
}

static void free_norms(cpu_block_norms *norms)
{
    mem_free(norms->in);
    mem_free(norms->branch);
    mem_free(norms->sum);
}

static void free_layer(cpu_layer *layer)
{
    free_norms(&layer->attn_norms);
    free_norms(&layer->mlp_norms);
    free_linear(&layer->qkv);
    free_linear(&layer->o);
    free_linear(&layer->gate);
    free_linear(&layer->up);
    free_linear(&layer->down);
    mem_free(layer->q_norm);
    mem_free(layer->k_norm);
    cpu_matrix_clear(&layer->value_embed);
    mem_free(layer->loop_gate);
    mem_free(layer->loop_gate_bias);
}

/* ---- the core ---- */

/* s exp(-dt A) + dt (b e), with dt = softplus(dt_bias) and A = exp(a_log): decay and dt from the
 * file's two vectors, in float64, rounded once. */
static tl_status load_diagonal(backend_model *model, const model_weights *weights)
{
    if (weights->a_log == NULL)
        return TL_STATUS_OK;
    cpu_core *core = &model->core;
    TL_TRY(load_vector(model, &core->decay, weights->a_log));
    TL_TRY(load_vector(model, &core->dt, weights->dt_bias));
    for (size_t i = 0; i < model->hidden; i++) {
        double bias = core->dt[i], dt = bias > 30 ? bias : log1p(exp(bias));
        core->decay[i] = (float)exp(-dt * exp((double)core->decay[i]));
        core->dt[i] = (float)dt;
    }
    return TL_STATUS_OK;
}

static tl_status load_exit(backend_model *model, const model_weights *weights)
{
    if (weights->exit.values == NULL)
        return TL_STATUS_OK;
    float *bias = NULL;
    TL_TRY(load_vector(model, &model->core.exit_weight, weights->exit.values));
    tl_status status = cpu_vector(&bias, weights->exit_bias);
    if (status == TL_STATUS_OK)
        model->core.exit_bias = bias[0];
    mem_free(bias);
    return status;
}

static tl_status load_core(backend_model *model, const model_weights *weights)
{
    cpu_core *core = &model->core;
    TL_TRY(load_vector(model, &core->prelude_norm, weights->prelude_norm));
    TL_TRY(load_vector(model, &core->init, weights->state_init));
    TL_TRY(load_optional(model, &core->inject, &weights->inject));
    TL_TRY(load_optional(model, &core->inject_b, &weights->inject_b));
    TL_TRY(load_optional(model, &core->state_out, &weights->state_out));
    TL_TRY(load_diagonal(model, weights));
    return load_exit(model, weights);
}

static void free_core(cpu_core *core)
{
    mem_free(core->prelude_norm);
    mem_free(core->init);
    cpu_matrix_clear(&core->inject);
    cpu_matrix_clear(&core->inject_b);
    cpu_matrix_clear(&core->state_out);
    mem_free(core->decay);
    mem_free(core->dt);
    mem_free(core->exit_weight);
}

/* ---- all ---- */

tl_status cpu_load_weights(backend_model *model, const model_weights *weights)
{
    const model_config *c = &model->config;
    model->layers = mem_zeroed(model->n_layers, sizeof *model->layers);
    if (model->layers == NULL)
        return tl_fail_nomem("the layer table", model->n_layers * sizeof *model->layers);
    for (size_t i = 0; i < model->n_layers; i++)
        TL_TRY(load_layer(model, &model->layers[i], &weights->layers[i]));
    TL_TRY(load_core(model, weights));
    TL_TRY(load_optional(model, &model->embed, &weights->embed));
    if (!c->tied_head)
        TL_TRY(load_optional(model, &model->head, &weights->head));
    for (int s = 0; s < (int)c->n_stages; s++)
        TL_TRY(load_norm(model, &model->stage_norm[s], weights->stage_norm[s],
                         config_stage_at(c, s).end_norm == NORM_WEIGHTLESS, model->hidden));
    TL_TRY(load_vector(model, &model->after_last_norm, weights->after_last_norm));
    return load_norm(model, &model->final_norm, weights->final_norm,
                     c->final_norm == NORM_WEIGHTLESS, model->hidden);
}

void cpu_free_weights(backend_model *model)
{
    for (size_t i = 0; model->layers != NULL && i < model->n_layers; i++)
        free_layer(&model->layers[i]);
    mem_free(model->layers);
    free_core(&model->core);
    cpu_matrix_clear(&model->embed);
    cpu_matrix_clear(&model->head);
    for (int s = 0; s < CONFIG_MAX_STAGES; s++)
        mem_free(model->stage_norm[s]);
    mem_free(model->after_last_norm);
    mem_free(model->final_norm);
}
