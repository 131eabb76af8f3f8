/* The steps but attention. Lanes share the rows of what is done row by row, and the output panels
 * of a linear layer. */
#include "backend/cpu/cpu.h"

#include <string.h>

void cpu_linear(const backend_pass *pass, const cpu_matrix *w, const float *x, float *y, bool add,
                size_t n_rows, const lane *self)
{
    size_t begin, end;
    lane_share(self, w->n_panels, &begin, &end);
    pass->model->kernels->linear(w, begin, end, x, w->columns, n_rows, y, w->rows, add);
}

void cpu_norm_rows(backend_pass *pass, float *out, const float *weight, size_t n, const lane *self)
{
    const backend_model *model = pass->model;
    size_t begin, end;
    lane_share(self, n, &begin, &end);
    for (size_t r = begin; r < end; r++)
        model->kernels->rms_norm(out + r * model->hidden, pass->x + r * model->hidden, weight,
                                 model->hidden, model->norm_eps);
    lane_barrier(self);
}

void cpu_step_embed(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    (void)step;
    (void)plane;
    const backend_model *model = pass->model;
    size_t begin, end;
    lane_share(self, pass->n_rows, &begin, &end);
    for (size_t s = 0; s < pass->n_spans; s++) {
        const batch_span *span = &pass->spans[s];
        for (size_t i = 0; i < span->n_rows; i++) {
            size_t row = span->first_row + i;
            if (row >= begin && row < end)
                cpu_matrix_row(&model->embed, (size_t)span->tokens[i],
                               pass->x + row * model->hidden);
        }
    }
    lane_barrier(self);
}

/* This lane's rows of the residual stream, as one run of floats. */
static void stream_share(const backend_pass *pass, const lane *self, size_t *begin, size_t *n)
{
    size_t end;
    lane_share(self, pass->n_rows, begin, &end);
    *n = (end - *begin) * pass->model->hidden;
    *begin *= pass->model->hidden;
}

void cpu_step_init(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    (void)plane;
    size_t begin, n;
    stream_share(pass, self, &begin, &n);
    memcpy(pass->e + begin, pass->x + begin, n * sizeof(float));
    if (step->zeros)
        memset(pass->x + begin, 0, n * sizeof(float));
    lane_barrier(self);
}

void cpu_step_inject(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    (void)step;
    (void)plane;
    size_t begin, n;
    stream_share(pass, self, &begin, &n);
    for (size_t i = begin; i < begin + n; i++)
        pass->x[i] += pass->e[i];
    lane_barrier(self);
}

void cpu_step_norm(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    (void)plane;
    cpu_norm_rows(pass, pass->x, pass->model->stage_norm[step->stage], pass->n_rows, self);
}

void cpu_step_mlp(backend_pass *pass, const plan_step *step, int plane, const lane *self)
{
    (void)plane;
    const backend_model *model = pass->model;
    const cpu_layer *layer = &model->layers[step->layer];
    cpu_norm_rows(pass, pass->normed, layer->mlp_norm, pass->n_rows, self);
    /* gate and up have the same panels, so a lane's share of both is the same columns */
    cpu_linear(pass, &layer->gate, pass->normed, pass->gate, false, pass->n_rows, self);
    cpu_linear(pass, &layer->up, pass->normed, pass->up, false, pass->n_rows, self);
    size_t begin, end;
    lane_share(self, layer->gate.n_panels, &begin, &end);
    begin *= CPU_PANEL;
    end = end * CPU_PANEL < model->ff ? end * CPU_PANEL : model->ff;
    for (size_t r = 0; r < pass->n_rows && begin < end; r++)
        model->kernels->silu_mul(pass->gate + r * model->ff + begin,
                                 pass->up + r * model->ff + begin, end - begin);
    lane_barrier(self);
    cpu_linear(pass, &layer->down, pass->gate, pass->x, true, pass->n_rows, self);
    lane_barrier(self);
}

void cpu_read_rows(backend_pass *pass, size_t first, size_t n, float *out, const lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    lane_share(self, n, &begin, &end);
    memcpy(out + begin * hidden, pass->x + (first + begin) * hidden,
           (end - begin) * hidden * sizeof *out);
    lane_barrier(self);
}

void cpu_write_rows(backend_pass *pass, size_t n, const float *in, const lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    lane_share(self, n, &begin, &end);
    memcpy(pass->x + begin * hidden, in + begin * hidden, (end - begin) * hidden * sizeof *in);
    lane_barrier(self);
}

void cpu_head(backend_pass *pass, size_t n, float *logits, const lane *self)
{
    const backend_model *model = pass->model;
    cpu_norm_rows(pass, pass->normed, model->final_norm, n, self);
    const cpu_matrix *head = model->head.data != NULL ? &model->head : &model->embed;
    cpu_linear(pass, head, pass->normed, logits, false, n, self);
    lane_barrier(self);
}
