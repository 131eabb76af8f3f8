/* Linear layers and norms as phases. Lanes share the output panels of a linear layer, and the rows
 * of what is done row by row. */
#include "backend/cpu/cpu.h"

/* y = bias, or y += bias, for outputs [begin, end) */
static void put_bias(const float *bias, size_t begin, size_t end, size_t width, size_t n, float *y,
                     bool add)
{
    for (size_t r = 0; r < n; r++)
        for (size_t o = begin; o < end; o++)
            y[r * width + o] = add ? y[r * width + o] + bias[o] : bias[o];
}

void cpu_linear_piece(const backend_pass *pass, const cpu_linear *linear, size_t begin, size_t end,
                      const float *x, size_t n, float *y, bool add)
{
    const cpu_matrix *w = &linear->weight;
    if (linear->bias != NULL) {
        size_t last = end * CPU_PANEL < w->rows ? end * CPU_PANEL : w->rows;
        put_bias(linear->bias, begin * CPU_PANEL, last, w->rows, n, y, add);
        add = true;
    }
    pass->model->kernels->linear(w, begin, end, x, w->columns, n, y, w->rows, add);
}

void cpu_linear_phase(const backend_pass *pass, const cpu_linear *linear, const float *x, size_t n,
                      float *y, bool add, lane *self)
{
    size_t begin, end;
    while (lane_next(self, linear->weight.n_panels, 1, &begin, &end))
        cpu_linear_piece(pass, linear, begin, end, x, n, y, add);
}

/* ---- norms ---- */

/* out[r] = norm of x[r] for rows [begin, end) */
static void norm_rows(const backend_pass *pass, float *out, const float *x, const float *weight,
                      size_t begin, size_t end)
{
    const backend_model *model = pass->model;
    for (size_t r = begin; r < end; r++)
        model->kernels->rms_norm(out + r * model->hidden, x + r * model->hidden, weight,
                                 model->hidden, model->norm_eps);
}

static void norm_some(const backend_pass *pass, float *out, const float *weight, size_t n,
                      lane *self)
{
    size_t begin, end;
    while (lane_next(self, n, 1, &begin, &end))
        norm_rows(pass, out, pass->x, weight, begin, end);
}

void cpu_norm_phase(backend_pass *pass, float *out, const float *weight, lane *self)
{
    norm_some(pass, out, weight, pass->n_rows, self);
}

cpu_normed cpu_normed_begin(backend_pass *pass, const float *weight, size_t n, lane *self)
{
    cpu_normed input = {weight, n, NULL};
    if (weight == NULL) {
        input.rows = pass->x;
    } else if (n > CPU_OWN_ROWS) {
        norm_some(pass, pass->normed, weight, n, self);
        input.rows = pass->normed;
    }
    return input;
}

const float *cpu_normed_rows(backend_pass *pass, cpu_normed *input, const lane *self)
{
    if (input->rows == NULL) {
        float *own = pass->own + (size_t)self->index * pass->own_rows * pass->model->hidden;
        norm_rows(pass, own, pass->x, input->weight, 0, input->n);
        input->rows = own;
    }
    return input->rows;
}

/* ---- the end of a block ---- */

/* x += norm(branch), row by row */
static void add_normed_branch(backend_pass *pass, const float *weight, lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, pass->n_rows, 1, &begin, &end)) {
        norm_rows(pass, pass->branch, pass->branch, weight, begin, end);
        for (size_t i = begin * hidden; i < end * hidden; i++)
            pass->x[i] += pass->branch[i];
    }
}

void cpu_add_block(backend_pass *pass, const cpu_linear *linear, const float *input,
                   const cpu_block_norms *norms, lane *self)
{
    if (norms->branch != NULL) {
        cpu_linear_phase(pass, linear, input, pass->n_rows, pass->branch, false, self);
        add_normed_branch(pass, norms->branch, self);
    } else {
        cpu_linear_phase(pass, linear, input, pass->n_rows, pass->x, true, self);
    }
    if (norms->sum != NULL)
        cpu_norm_phase(pass, pass->x, norms->sum, self);
}
