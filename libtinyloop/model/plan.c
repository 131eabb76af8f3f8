#include "model/plan.h"

#include "base/memory.h"

#include <assert.h>

/* Beside attention and MLP of each layer a stage has at most: init, swap, inject, end norm, exit,
 * leave, state_out, norm after the last loop. */
#define EXTRA_STEPS 8

static void add_step(model_plan *plan, plan_step step)
{
    plan->steps[plan->n_steps++] = step;
}

static void add_kind(model_plan *plan, step_kind kind, int stage)
{
    add_step(plan, (plan_step){.kind = kind, .stage = stage});
}

static void add_norm(model_plan *plan, norm_id norm, int stage)
{
    add_step(plan, (plan_step){.kind = STEP_NORM, .stage = stage, .norm = norm});
}

static void add_stage(model_plan *plan, const model_config *config, int s)
{
    config_stage stage = config_stage_at(config, s);
    plan_stage *out = &plan->stages[s];
    out->looped = stage.looped != 0;
    out->n_layers = (int)stage.n_layers;
    bool inject = out->looped && config->inject != INJECT_NONE;
    out->once = plan->n_steps;
    if (s == 0)
        add_kind(plan, STEP_EMBED, s);
    if (inject && !(plan->nested && s > 0))
        add_kind(plan, STEP_INIT, s);
    out->enter = plan->n_steps;
    if (plan->nested)
        add_kind(plan, STEP_SWAP, s);
    out->begin = plan->n_steps;
    if (inject)
        add_kind(plan, STEP_INJECT, s);
    for (int i = 0; i < out->n_layers; i++) {
        int layer = (int)stage.first_layer + i;
        add_step(plan, (plan_step){STEP_ATTENTION, layer, i, s, 0});
        add_step(plan, (plan_step){STEP_MLP, layer, i, s, 0});
    }
    if (stage.end_norm != NORM_NONE)
        add_norm(plan, NORM_OF_STAGE, s);
    if (out->looped && config->exit_mode != EXIT_NONE)
        add_kind(plan, STEP_EXIT, s);
    out->end = plan->n_steps;
    if (out->looped && config_leaves_early(config))
        add_kind(plan, STEP_LEAVE, s);
    if (out->looped && config->state_out_proj)
        add_kind(plan, STEP_STATE_OUT, s);
    if (out->looped && config->norm_after_last != AFTER_LAST_NONE)
        add_norm(plan,
                 config->norm_after_last == AFTER_LAST_FINAL_NORM ? NORM_FINAL : NORM_AFTER_LAST,
                 s);
    out->leave = plan->n_steps;
}

tl_status model_plan_build(model_plan *plan, const model_config *config)
{
    *plan = (model_plan){
        .n_stages = (int)config->n_stages,
        .nested = config->schedule == SCHEDULE_NESTED,
        .looped_stage = -1,
        .loop_window = config->loop_window,
        .loop_gated = config->loop_attention == LOOP_ATTENTION_GATED,
    };
    size_t n_steps = 1 + 2 * (size_t)config_n_layers(config) + EXTRA_STEPS * (size_t)plan->n_stages;
    plan->steps = mem_array(n_steps, sizeof *plan->steps);
    if (plan->steps == NULL)
        return tl_fail_nomem("the plan", n_steps * sizeof *plan->steps);
    for (int s = 0; s < plan->n_stages; s++) {
        add_stage(plan, config, s);
        if (plan->stages[s].looped)
            plan->looped_stage = s;
    }
    assert((size_t)plan->n_steps <= n_steps);
    plan->core_stage = plan->looped_stage >= 0 ? plan->looped_stage : plan->n_stages - 1;
    return TL_STATUS_OK;
}

void model_plan_clear(model_plan *plan)
{
    mem_free(plan->steps);
    *plan = (model_plan){0};
}

/* ---- runs ---- */

int plan_n_runs(const model_plan *plan, loop_counts counts)
{
    if (plan->nested)
        return (int)(counts.loops * (counts.inner + 1));
    return plan->n_stages + (plan->looped_stage >= 0 ? (int)counts.loops - 1 : 0);
}

int plan_n_states(const model_plan *plan, loop_counts counts)
{
    return plan->nested              ? plan_n_runs(plan, counts)
           : plan->looped_stage >= 0 ? (int)counts.loops
                                     : 1;
}

/* `inner` runs of stage 0, then one of stage 1. */
static plan_run nested_run(loop_counts counts, int i)
{
    int low_runs = (int)counts.inner;
    int cycle = i / (low_runs + 1), at = i % (low_runs + 1);
    bool low = at < low_runs;
    return (plan_run){
        .stage = low ? 0 : 1,
        .index = low ? cycle * low_runs + at : cycle,
        .last = cycle == counts.loops - 1 && (!low || at == low_runs - 1),
        .plane = i,
        .global_plane = -1,
    };
}

plan_run plan_run_at(const model_plan *plan, loop_counts counts, int i)
{
    if (plan->nested)
        return nested_run(counts, i);
    int core = plan->looped_stage, loops = core >= 0 ? (int)counts.loops : 1;
    if (core < 0 || i < core)
        return (plan_run){.stage = i, .last = true, .plane = i, .global_plane = -1};
    if (i >= core + loops)
        return (plan_run){
            .stage = i - loops + 1, .last = true, .plane = i - loops, .global_plane = -1};
    int first_plane = plan->n_stages - 1;
    plan_run run = {
        .stage = core,
        .index = i - core,
        .last = i == core + loops - 1,
        .plane = first_plane + i - core,
        .global_plane = -1,
    };
    if (run.index > 0) {
        run.window = plan->loop_window;
        run.global_plane = plan->loop_gated ? first_plane : -1;
    }
    return run;
}
