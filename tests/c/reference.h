/* A looped decoder in float64, straight from the definition and without any cache: what the
 * library's numbers are held against. Reads the weights of a tiny file. */
#ifndef TINYLOOP_REFERENCE_H
#define TINYLOOP_REFERENCE_H

#include "tiny_model.h"

#include <math.h>

typedef struct reference {
    tiny_file *file;
    size_t n; /* tokens */
    int64_t window;
    double *x; /* [n, hidden] the residual stream */
} reference;

/* A tensor's values; the caller frees. */
static inline double *reference_weight(tiny_file *file, const char *name)
{
    const tiny_tensor *tensor = tiny_find(file, name);
    size_t n = tensor->size / dtype_size((tensor_dtype)tensor->dtype);
    const unsigned char *bytes = file->bytes + tensor->offset;
    double *values = malloc(n * sizeof *values);
    for (size_t i = 0; i < n; i++) {
        float wide;
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof half);
        if (tensor->dtype == DTYPE_F32)
            memcpy(&wide, bytes + 4 * i, sizeof wide);
        else
            wide = tensor->dtype == DTYPE_F16 ? float_from_f16(half) : float_from_bf16(half);
        values[i] = wide;
    }
    return values;
}

static inline double *reference_layer_weight(tiny_file *file, int64_t layer, const char *part)
{
    char name[96];
    snprintf(name, sizeof name, "layers.%d.%s.weight", (int)layer, part);
    return reference_weight(file, name);
}

/* y [n, rows] = x [n, columns] times the weight; the caller frees. Takes the weight. */
static inline double *reference_linear(double *weight, const double *x, size_t n, size_t rows,
                                       size_t columns)
{
    double *y = calloc(n * rows, sizeof *y);
    for (size_t i = 0; i < n; i++)
        for (size_t o = 0; o < rows; o++)
            for (size_t c = 0; c < columns; c++)
                y[i * rows + o] += weight[o * columns + c] * x[i * columns + c];
    free(weight);
    return y;
}

/* The caller frees. Takes the weight. */
static inline double *reference_norm(double *weight, const double *x, size_t n, size_t width,
                                     double eps)
{
    double *y = malloc(n * width * sizeof *y);
    for (size_t i = 0; i < n; i++) {
        double squares = 0;
        for (size_t c = 0; c < width; c++)
            squares += x[i * width + c] * x[i * width + c];
        double scale = 1 / sqrt(squares / (double)width + eps);
        for (size_t c = 0; c < width; c++)
            y[i * width + c] = x[i * width + c] * scale * weight[c];
    }
    free(weight);
    return y;
}

/* Radians per position of channel pair i. */
static inline double reference_frequency(const model_config *c, size_t i)
{
    double frequency = pow(c->rope_theta, -2.0 * (double)i / (double)c->head_dim);
    if (c->rope_scaling == 0)
        return frequency;
    double turns = (double)c->rope_original_positions * frequency / (2 * acos(-1));
    double kept =
        (turns - c->rope_low_freq_factor) / (c->rope_high_freq_factor - c->rope_low_freq_factor);
    kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return kept * frequency + (1 - kept) * frequency / c->rope_factor;
}

static inline void reference_rotate(double *head, const model_config *c, size_t position)
{
    size_t half = (size_t)c->head_dim / 2;
    for (size_t i = 0; i < half; i++) {
        double angle = (double)position * reference_frequency(c, i);
        double a = head[i], b = head[i + half];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + half] = a * sin(angle) + b * cos(angle);
    }
}

/* out [head_dim] for the query of row `row` over one KV head; k and v: [n, kv_width] from there. */
static inline void reference_attend(double *out, const reference *r, const double *q,
                                    const double *k, const double *v, size_t kv_width, size_t row)
{
    size_t head_dim = (size_t)r->file->config.head_dim;
    size_t first = r->window > 0 && (int64_t)row >= r->window ? row + 1 - (size_t)r->window : 0;
    double *weights = malloc((row + 1) * sizeof *weights), largest = -INFINITY, sum = 0;
    for (size_t p = first; p <= row; p++) {
        weights[p] = 0;
        for (size_t d = 0; d < head_dim; d++)
            weights[p] += q[d] * k[p * kv_width + d] / sqrt((double)head_dim);
        largest = fmax(largest, weights[p]);
    }
    for (size_t p = first; p <= row; p++)
        sum += weights[p] = exp(weights[p] - largest);
    for (size_t d = 0; d < head_dim; d++) {
        out[d] = 0;
        for (size_t p = first; p <= row; p++)
            out[d] += weights[p] / sum * v[p * kv_width + d];
    }
    free(weights);
}

static inline void reference_attention(reference *r, int64_t layer)
{
    const model_config *c = &r->file->config;
    size_t hidden = (size_t)c->hidden_size, hd = (size_t)c->head_dim, n = r->n;
    size_t heads = (size_t)c->n_heads, kv_heads = (size_t)c->n_kv_heads;
    double *normed = reference_norm(reference_layer_weight(r->file, layer, "attn_norm"), r->x, n,
                                    hidden, c->norm_eps);
    double *q = reference_linear(reference_layer_weight(r->file, layer, "attn.q"), normed, n,
                                 heads * hd, hidden);
    double *k = reference_linear(reference_layer_weight(r->file, layer, "attn.k"), normed, n,
                                 kv_heads * hd, hidden);
    double *v = reference_linear(reference_layer_weight(r->file, layer, "attn.v"), normed, n,
                                 kv_heads * hd, hidden);
    double *mixed = malloc(n * heads * hd * sizeof *mixed);
    for (size_t i = 0; i < n; i++) {
        for (size_t h = 0; h < kv_heads; h++)
            reference_rotate(k + (i * kv_heads + h) * hd, c, i);
        for (size_t h = 0; h < heads; h++) {
            size_t kv = h / (heads / kv_heads) * hd, at = (i * heads + h) * hd;
            reference_rotate(q + at, c, i);
            reference_attend(mixed + at, r, q + at, k + kv, v + kv, kv_heads * hd, i);
        }
    }
    double *out = reference_linear(reference_layer_weight(r->file, layer, "attn.o"), mixed, n,
                                   hidden, heads * hd);
    for (size_t i = 0; i < n * hidden; i++)
        r->x[i] += out[i];
    free(normed);
    free(q);
    free(k);
    free(v);
    free(mixed);
    free(out);
}

static inline void reference_mlp(reference *r, int64_t layer)
{
    const model_config *c = &r->file->config;
    size_t hidden = (size_t)c->hidden_size, ff = (size_t)c->ff_size, n = r->n;
    double *normed = reference_norm(reference_layer_weight(r->file, layer, "mlp_norm"), r->x, n,
                                    hidden, c->norm_eps);
    double *gate =
        reference_linear(reference_layer_weight(r->file, layer, "mlp.gate"), normed, n, ff, hidden);
    double *up =
        reference_linear(reference_layer_weight(r->file, layer, "mlp.up"), normed, n, ff, hidden);
    for (size_t i = 0; i < n * ff; i++)
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    double *out =
        reference_linear(reference_layer_weight(r->file, layer, "mlp.down"), gate, n, hidden, ff);
    for (size_t i = 0; i < n * hidden; i++)
        r->x[i] += out[i];
    free(normed);
    free(gate);
    free(up);
    free(out);
}

/* One run of a stage over all tokens. */
static inline void reference_run(reference *r, int64_t stage_index)
{
    const model_config *c = &r->file->config;
    config_stage stage = config_stage_at(c, stage_index);
    for (int64_t layer = stage.first_layer; layer < stage.first_layer + stage.n_layers; layer++) {
        reference_attention(r, layer);
        reference_mlp(r, layer);
    }
    if (stage.end_norm == 0)
        return;
    char name[96];
    snprintf(name, sizeof name, "stages.%d.norm.weight", (int)stage_index);
    double *normed = reference_norm(reference_weight(r->file, name), r->x, r->n,
                                    (size_t)c->hidden_size, c->norm_eps);
    free(r->x);
    r->x = normed;
}

/* logits: [n, vocab]; states: [loops, n, hidden] after each run of the looped stage, or NULL. */
static inline void reference_forward(double *logits, double *states, tiny_file *file,
                                     const int32_t *tokens, size_t n, int64_t loops, int64_t window)
{
    const model_config *c = &file->config;
    size_t hidden = (size_t)c->hidden_size, size = n * hidden;
    reference r = {file, n, window, malloc(size * sizeof(double))};
    double *embed = reference_weight(file, "embed.weight"), *input = malloc(size * sizeof *input);
    for (size_t i = 0; i < n; i++)
        memcpy(r.x + i * hidden, embed + (size_t)tokens[i] * hidden, hidden * sizeof *embed);
    for (int64_t s = 0; s < c->n_stages; s++) {
        bool looped = config_stage_at(c, s).looped, inject = looped && c->inject == INJECT_ADD;
        memcpy(input, r.x, size * sizeof *input);
        for (size_t i = 0; i < size && inject && c->state_init == STATE_INIT_ZEROS; i++)
            r.x[i] = 0;
        for (int64_t run = 0; run < (looped ? loops : 1); run++) {
            for (size_t i = 0; i < size && inject; i++)
                r.x[i] += input[i];
            reference_run(&r, s);
            if (looped && states != NULL)
                memcpy(states + (size_t)run * size, r.x, size * sizeof *states);
        }
    }
    double *normed =
        reference_norm(reference_weight(file, "final_norm.weight"), r.x, n, hidden, c->norm_eps);
    double *out =
        reference_linear(reference_weight(file, c->tied_head ? "embed.weight" : "head.weight"),
                         normed, n, (size_t)c->vocab_size, hidden);
    memcpy(logits, out, n * (size_t)c->vocab_size * sizeof *logits);
    free(embed);
    free(input);
    free(normed);
    free(out);
    free(r.x);
}

#endif
