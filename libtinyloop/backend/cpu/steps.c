/* The steps but attention. Lanes share the rows of what is done row by row, and the output panels
 * of a linear layer. */
#include "backend/cpu/cpu.h"

#include <string.h>

#define ELEMENTS 1024 /* of the residual stream, at least, that a lane takes at once */

void cpu_linear(const backend_pass *pass, const cpu_matrix *w, const float *x, float *y, bool add,
                size_t n_rows, lane *self)
{
    size_t begin, end;
    while (lane_next(self, w->n_panels, 1, &begin, &end))
        pass->model->kernels->linear(w, begin, end, x, w->columns, n_rows, y, w->rows, add);
}

/* out[r] = norm of x[r] for rows [begin, end) */
static void norm_rows(const backend_pass *pass, float *out, const float *weight, size_t begin,
                      size_t end)
{
    const backend_model *model = pass->model;
    for (size_t r = begin; r < end; r++)
        model->kernels->rms_norm(out + r * model->hidden, pass->x + r * model->hidden, weight,
                                 model->hidden, model->norm_eps);
}

static void norm_rows_phase(backend_pass *pass, float *out, const float *weight, size_t n,
                            lane *self)
{
    size_t begin, end;
    while (lane_next(self, n, 1, &begin, &end))
        norm_rows(pass, out, weight, begin, end);
}

/* The norm of x, rows [0, n), as a phase's input. Of few rows each lane makes its own, in the phase
 * and holding a piece of it: only then is x sure to stay. */
typedef struct normed_input {
    const float *weight;
    size_t n;
    const float *rows; /* [n][hidden], or NULL: not made yet */
} normed_input;

static normed_input begin_normed(backend_pass *pass, const float *weight, size_t n, lane *self)
{
    normed_input input = {weight, n, NULL};
    if (n > CPU_OWN_ROWS) {
        norm_rows_phase(pass, pass->normed, weight, n, self);
        input.rows = pass->normed;
    }
    return input;
}

static const float *normed_rows(backend_pass *pass, normed_input *input, const lane *self)
{
    if (input->rows == NULL) {
        float *own = pass->own + (size_t)self->index * pass->own_rows * pass->model->hidden;
        norm_rows(pass, own, input->weight, 0, input->n);
        input->rows = own;
    }
    return input->rows;
}

void cpu_normed_linear(backend_pass *pass, const cpu_matrix *w, const float *norm_weight, float *y,
                       size_t n, lane *self)
{
    normed_input input = begin_normed(pass, norm_weight, n, self);
    size_t begin, end;
    while (lane_next(self, w->n_panels, 1, &begin, &end))
        pass->model->kernels->linear(w, begin, end, normed_rows(pass, &input, self), w->columns, n,
                                     y, w->rows, false);
}

/* What a row needs of its token and of its position. */
static void begin_row(backend_pass *pass, const batch_span *span, size_t row)
{
    const backend_model *model = pass->model;
    size_t i = row - span->first_row;
    cpu_matrix_row(&model->embed, (size_t)span->tokens[i], pass->x + row * model->hidden);
    cpu_rope_row(pass->rope + row * model->head_dim, model->rope_frequencies, model->head_dim / 2,
                 span->first_position + (int64_t)i);
}

void cpu_step_embed(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    (void)step;
    (void)plane;
    size_t begin, end;
    while (lane_next(self, pass->n_rows, 1, &begin, &end)) {
        for (size_t s = 0; s < pass->n_spans; s++) {
            const batch_span *span = &pass->spans[s];
            size_t last = span->first_row + span->n_rows;
            size_t row = begin > span->first_row ? begin : span->first_row;
            for (; row < end && row < last; row++)
                begin_row(pass, span, row);
        }
    }
}

void cpu_step_init(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    (void)plane;
    size_t begin, end;
    while (lane_next(self, pass->n_rows * pass->model->hidden, ELEMENTS, &begin, &end)) {
        memcpy(pass->e + begin, pass->x + begin, (end - begin) * sizeof(float));
        if (step->zeros)
            memset(pass->x + begin, 0, (end - begin) * sizeof(float));
    }
}

void cpu_step_inject(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    (void)step;
    (void)plane;
    size_t begin, end;
    while (lane_next(self, pass->n_rows * pass->model->hidden, ELEMENTS, &begin, &end))
        for (size_t i = begin; i < end; i++)
            pass->x[i] += pass->e[i];
}

void cpu_step_norm(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    (void)plane;
    norm_rows_phase(pass, pass->x, pass->model->stage_norm[step->stage], pass->n_rows, self);
}

/* gate = silu(gate x) * (up x), for the outputs of panels [begin, end) */
static void gate_and_up(backend_pass *pass, const cpu_layer *layer, const float *normed,
                        size_t begin, size_t end)
{
    const backend_model *model = pass->model;
    const cpu_kernels *kernels = model->kernels;
    size_t ff = model->ff, first = begin * CPU_PANEL;
    size_t last = end * CPU_PANEL < ff ? end * CPU_PANEL : ff;
    kernels->linear(&layer->gate, begin, end, normed, model->hidden, pass->n_rows, pass->gate, ff,
                    false);
    kernels->linear(&layer->up, begin, end, normed, model->hidden, pass->n_rows, pass->up, ff,
                    false);
    for (size_t r = 0; r < pass->n_rows; r++)
        kernels->silu_mul(pass->gate + r * ff + first, pass->up + r * ff + first, last - first);
}

void cpu_step_mlp(backend_pass *pass, const plan_step *step, int plane, lane *self)
{
    (void)plane;
    const cpu_layer *layer = &pass->model->layers[step->layer];
    normed_input input = begin_normed(pass, layer->mlp_norm, pass->n_rows, self);
    size_t begin, end;
    while (lane_next(self, layer->gate.n_panels, 1, &begin, &end))
        gate_and_up(pass, layer, normed_rows(pass, &input, self), begin, end);
    cpu_linear(pass, &layer->down, pass->gate, pass->x, true, pass->n_rows, self);
}

void cpu_read_rows(backend_pass *pass, size_t first, size_t n, float *out, lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, n, 1, &begin, &end))
        memcpy(out + begin * hidden, pass->x + (first + begin) * hidden,
               (end - begin) * hidden * sizeof *out);
}

void cpu_write_rows(backend_pass *pass, size_t n, const float *in, lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, n, 1, &begin, &end))
        memcpy(pass->x + begin * hidden, in + begin * hidden, (end - begin) * hidden * sizeof *in);
}

void cpu_head(backend_pass *pass, size_t n, float *logits, lane *self)
{
    const backend_model *model = pass->model;
    const cpu_matrix *head = model->head.data != NULL ? &model->head : &model->embed;
    cpu_normed_linear(pass, head, model->final_norm, logits, n, self);
}
