/* The steps around the loops: initial state, injection, the other state, exit. */
#include "backend/cpu/cpu.h"

#include "model/noise.h"

#include <string.h>

#define ELEMENTS 1024 /* of the residual stream, at least, that a lane takes at once */

/* ---- the begin of the core ---- */

/* Puts what will be injected, [rows][hidden] at `from`, into place, as far as it stays the same in
 * every loop. */
static void keep_input(backend_pass *pass, const float *from, lane *self)
{
    const cpu_core *core = &pass->model->core;
    size_t begin, end, hidden = pass->model->hidden;
    if (core->inject_b.data != NULL) {
        while (lane_next(self, core->inject_b.n_panels, 1, &begin, &end)) {
            size_t last = end * CPU_PANEL < hidden ? end * CPU_PANEL : hidden;
            pass->model->kernels->linear(&core->inject_b, begin, end, from, hidden, pass->n_rows,
                                         pass->e, hidden, false);
            for (size_t r = 0; r < pass->n_rows; r++)
                for (size_t o = begin * CPU_PANEL; o < last; o++)
                    pass->e[r * hidden + o] *= core->dt[o];
        }
        return;
    }
    size_t offset = pass->pair != NULL ? hidden : 0,
           stride = pass->pair != NULL ? 2 * hidden : hidden;
    float *to = pass->pair != NULL ? pass->pair : pass->e;
    while (lane_next(self, pass->n_rows, 1, &begin, &end))
        for (size_t r = begin; r < end; r++)
            memcpy(to + r * stride + offset, from + r * hidden, hidden * sizeof *to);
}

static void put_initial_state(const backend_pass *pass, const cpu_rows *r)
{
    const backend_model *model = pass->model;
    float *x = pass->x + r->row * model->hidden;
    int64_t position = r->span->first_position + (int64_t)r->i;
    int64_t kind = model->config.state_init;
    if (r->span->init_state != NULL)
        memcpy(x, r->span->init_state + r->i * model->hidden, model->hidden * sizeof *x);
    else if (kind == STATE_INIT_TENSOR)
        memcpy(x, model->core.init, model->hidden * sizeof *x);
    else if (kind == STATE_INIT_NOISE && model->init_scale > 0)
        noise_row(x, model->hidden, model->init_seed, position,
                  model->init_scale * model->config.init_std, model->config.init_cut);
    else if (kind != STATE_INIT_INPUT)
        memset(x, 0, model->hidden * sizeof *x);
}

void cpu_step_init(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    (void)run;
    const float *from = pass->x, *norm = pass->model->core.prelude_norm;
    if (norm != NULL) {
        cpu_norm_phase(pass, pass->branch, norm, self);
        from = pass->branch;
    }
    keep_input(pass, from, self);
    size_t begin, end;
    while (lane_next(self, pass->n_rows, 1, &begin, &end))
        for (cpu_rows r = cpu_rows_begin(pass, begin, end); cpu_rows_next(&r);)
            put_initial_state(pass, &r);
}

void cpu_step_swap(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    (void)run;
    size_t begin, end;
    while (lane_next(self, pass->n_rows * pass->model->hidden, ELEMENTS, &begin, &end)) {
        for (size_t i = begin; i < end; i++) {
            float x = pass->x[i];
            pass->x[i] = pass->e[i];
            pass->e[i] = x;
        }
    }
}

/* ---- each loop ---- */

/* y = w from, after `from` was filled from x by its own phase */
static void linear_of_copy(backend_pass *pass, const cpu_matrix *w, float *copy, size_t stride,
                           lane *self)
{
    size_t begin, end, hidden = pass->model->hidden;
    while (lane_next(self, pass->n_rows, 1, &begin, &end))
        for (size_t r = begin; r < end; r++)
            memcpy(copy + r * stride, pass->x + r * hidden, hidden * sizeof *copy);
    while (lane_next(self, w->n_panels, 1, &begin, &end))
        pass->model->kernels->linear(w, begin, end, copy, stride, pass->n_rows, pass->x, hidden,
                                     false);
}

void cpu_step_inject(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    const backend_model *model = pass->model;
    const float *decay = model->core.decay;
    if (run->index == 0 && model->config.inject_skip_first)
        return;
    if (model->config.inject == INJECT_CONCAT_LINEAR) {
        linear_of_copy(pass, &model->core.inject, pass->pair, 2 * model->hidden, self);
        return;
    }
    size_t begin, end;
    while (lane_next(self, pass->n_rows * model->hidden, ELEMENTS, &begin, &end))
        for (size_t i = begin; i < end; i++)
            pass->x[i] =
                (decay != NULL ? pass->x[i] * decay[i % model->hidden] : pass->x[i]) + pass->e[i];
}

/* ---- the end of the core ---- */

void cpu_step_state_out(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    (void)run;
    linear_of_copy(pass, &pass->model->core.state_out, pass->branch, pass->model->hidden, self);
}

/* A token leaves with the state of the first loop at which the summed probabilities reach the
 * threshold, or with that of the last: until then each loop's state replaces the one before. */
static void exit_row(backend_pass *pass, const plan_run *run, size_t row)
{
    const backend_model *model = pass->model;
    const float *x = pass->x + row * model->hidden;
    float logit = model->kernels->dot(x, model->core.exit_weight, model->hidden);
    pass->exit[row] = logit + model->core.exit_bias;
    if (pass->chosen == NULL)
        return;
    float lambda = 1, threshold = (float)model->config.exit_threshold;
    model->kernels->sigmoid_mul(&lambda, &pass->exit[row], 1);
    float left = run->index == 0 ? 1 : pass->left[row];
    float before = run->index == 0 ? 0 : pass->sum[row];
    if (run->index == 0 || !(before >= threshold)) /* also a sum that is NaN goes on to the end */
        memcpy(pass->chosen + row * model->hidden, x, model->hidden * sizeof *x);
    pass->sum[row] = before + left * lambda;
    pass->left[row] = left * (1 - lambda);
}

void cpu_step_exit(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    size_t begin, end;
    while (lane_next(self, pass->n_rows, 1, &begin, &end))
        for (size_t row = begin; row < end; row++)
            exit_row(pass, run, row);
}

void cpu_step_leave(backend_pass *pass, const plan_step *step, const plan_run *run, lane *self)
{
    (void)step;
    (void)run;
    size_t begin, end;
    while (lane_next(self, pass->n_rows * pass->model->hidden, ELEMENTS, &begin, &end))
        memcpy(pass->x + begin, pass->chosen + begin, (end - begin) * sizeof *pass->x);
}
