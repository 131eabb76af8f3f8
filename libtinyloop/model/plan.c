#include "model/plan.h"

#include "base/memory.h"

static void add_step(model_plan *plan, plan_step step)
{
    plan->steps[plan->n_steps++] = step;
}

static void add_stage(model_plan *plan, const model_config *config, int s)
{
    config_stage stage = config_stage_at(config, s);
    plan_stage *out = &plan->stages[s];
    out->once = plan->n_steps;
    out->looped = stage.looped != 0;
    out->n_layers = (int)stage.n_layers;
    if (s == 0)
        add_step(plan, (plan_step){.kind = STEP_EMBED, .stage = s});
    bool inject = out->looped && config->inject == INJECT_ADD;
    if (inject)
        add_step(plan, (plan_step){.kind = STEP_INIT,
                                   .stage = s,
                                   .zeros = config->state_init == STATE_INIT_ZEROS});
    out->begin = plan->n_steps;
    if (inject)
        add_step(plan, (plan_step){.kind = STEP_INJECT, .stage = s});
    for (int i = 0; i < out->n_layers; i++) {
        int layer = (int)stage.first_layer + i;
        add_step(plan, (plan_step){STEP_ATTENTION, layer, i, s, 0});
        add_step(plan, (plan_step){STEP_MLP, layer, i, s, 0});
    }
    if (stage.end_norm)
        add_step(plan, (plan_step){.kind = STEP_NORM, .stage = s});
    out->end = plan->n_steps;
}

tl_status model_plan_build(model_plan *plan, const model_config *config)
{
    *plan = (model_plan){.looped_stage = -1};
    plan->n_stages = (int)config->n_stages;
    size_t n_steps = 1 + 2 * (size_t)config_n_layers(config) + 3 * (size_t)plan->n_stages;
    plan->steps = mem_array(n_steps, sizeof *plan->steps);
    if (plan->steps == NULL)
        return tl_fail_nomem("the plan", n_steps * sizeof *plan->steps);
    for (int s = 0; s < plan->n_stages; s++) {
        add_stage(plan, config, s);
        if (plan->stages[s].looped)
            plan->looped_stage = s;
        else
            plan->stages[s].plane = plan->n_fixed_planes++;
    }
    plan->core_stage = plan->looped_stage >= 0 ? plan->looped_stage : plan->n_stages - 1;
    if (plan->looped_stage >= 0)
        plan->stages[plan->looped_stage].plane = plan->n_fixed_planes;
    return TL_STATUS_OK;
}

void model_plan_clear(model_plan *plan)
{
    mem_free(plan->steps);
    *plan = (model_plan){0};
}
