/* The steps but attention and those around the loops, and the way in and out of a pass. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <string.h>

/* ---- rows of spans ---- */

cpu_rows cpu_rows_begin(const backend_pass *pass, size_t begin, size_t end)
{
    const batch_span *span = pass->spans;
    while (begin < end && begin >= span->first_row + span->n_rows)
        span++;
    return (cpu_rows){.pass = pass, .span = span, .row = begin - 1, .end = end};
}

bool cpu_rows_next(cpu_rows *rows)
{
    if (++rows->row >= rows->end)
        return false;
    if (rows->row == rows->span->first_row + rows->span->n_rows)
        rows->span++;
    rows->i = rows->row - rows->span->first_row;
    return true;
}

/* ---- steps ---- */

/* What a row needs of its token and of its position. */
static void begin_row(const backend_pass *pass, const cpu_rows *r)
{
    const backend_model *model = pass->model;
    float *x = pass->x + r->row * model->hidden, scale = (float)model->config.embed_scale;
    size_t pairs = (size_t)model->config.rotary_dim / 2;
    cpu_matrix_row(&model->embed, (size_t)r->span->tokens[r->i], 0, model->hidden, x);
    for (size_t i = 0; scale != 1 && i < model->hidden; i++)
        x[i] *= scale;
    double factor =
        model->config.rope_scaling == ROPE_SCALING_YARN ? model->config.rope_attention_factor : 1;
    cpu_rope_row(pass->rope + r->row * 2 * pairs, model->rope_frequencies, pairs,
                 r->span->first_position + (int64_t)r->i, factor);
}

void cpu_step_embed(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    (void)run;
    size_t begin, end;
    while (lane_next(self, pass->n_rows, 1, &begin, &end))
        for (cpu_rows r = cpu_rows_begin(pass, begin, end); cpu_rows_next(&r);)
            begin_row(pass, &r);
}

void cpu_step_norm(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)run;
    const backend_model *model = pass->model;
    const float *weight = step->norm == NORM_OF_STAGE ? model->stage_norm[step->stage]
                          : step->norm == NORM_FINAL  ? model->final_norm
                                                      : model->after_last_norm;
    cpu_norm_phase(pass, pass->x, weight, self);
}

/* gate = activation(gate x) * (up x), or activation(up x), for outputs of panels [begin, end) */
static void activate_piece(backend_pass *pass, const cpu_layer *layer, const float *input,
                           size_t begin, size_t end)
{
    const backend_model *model = pass->model;
    bool gated = layer->gate.weight.data != NULL;
    size_t ff = model->ff, first = begin * CPU_PANEL;
    size_t last = end * CPU_PANEL < ff ? end * CPU_PANEL : ff;
    cpu_linear_piece(pass, gated ? &layer->gate : &layer->up, begin, end, input, pass->n_rows,
                     pass->gate, false);
    if (gated)
        cpu_linear_piece(pass, &layer->up, begin, end, input, pass->n_rows, pass->up, false);
    for (size_t r = 0; r < pass->n_rows; r++)
        model->kernels->activate(model->config.activation, (float)model->config.activation_scale,
                                 pass->gate + r * ff + first,
                                 gated ? pass->up + r * ff + first : NULL, last - first);
}

void cpu_step_mlp(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)run;
    const cpu_layer *layer = &pass->model->layers[step->layer];
    cpu_normed input = cpu_normed_begin(pass, layer->mlp_norms.in, pass->n_rows, self);
    size_t begin, end;
    while (lane_next(self, layer->up.weight.n_panels, 1, &begin, &end))
        activate_piece(pass, layer, cpu_normed_rows(pass, &input, self), begin, end);
    cpu_add_block(pass, &layer->down, pass->gate, &layer->mlp_norms, self);
}

/* ---- in and out ---- */

void cpu_read_rows(backend_pass *pass, size_t first, size_t n, float *out, lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, n, 1, &begin, &end))
        memcpy(out + begin * hidden, pass->x + (first + begin) * hidden,
               (end - begin) * hidden * sizeof *out);
}

void cpu_read_exits(backend_pass *pass, size_t first, size_t n, float *out, lane *self)
{
    size_t begin, end;
    while (lane_next(self, n, n, &begin, &end))
        memcpy(out + begin, pass->exit + first + begin, (end - begin) * sizeof *out);
}

void cpu_write_rows(backend_pass *pass, size_t n, const float *in, lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, n, 1, &begin, &end))
        memcpy(pass->x + begin * hidden, in + begin * hidden, (end - begin) * hidden * sizeof *in);
}

/* Scale and cap of logits [first, last) of all rows. */
static void finish_logits(const backend_model *model, float *logits, size_t n, size_t first,
                          size_t last)
{
    float scale = (float)model->config.logit_scale;
    double cap = model->config.logit_softcap;
    if (scale == 1 && cap == 0)
        return;
    for (size_t r = 0; r < n; r++) {
        float *row = logits + r * model->vocab;
        for (size_t o = first; o < last; o++) {
            row[o] *= scale;
            if (cap > 0)
                row[o] = (float)(cap * tanh(row[o] / cap));
        }
    }
}

void cpu_head(backend_pass *pass, size_t n, float *logits, lane *self)
{
    const backend_model *model = pass->model;
    const cpu_matrix *head = model->head.data != NULL ? &model->head : &model->embed;
    cpu_normed input = cpu_normed_begin(pass, model->final_norm, n, self);
    size_t begin, end;
    while (lane_next(self, head->n_panels, 1, &begin, &end)) {
        size_t last = end * CPU_PANEL < model->vocab ? end * CPU_PANEL : model->vocab;
        model->kernels->linear(head, begin, end, cpu_normed_rows(pass, &input, self), head->columns,
                               n, logits, model->vocab, false);
        finish_logits(model, logits, n, begin * CPU_PANEL, last);
    }
}
