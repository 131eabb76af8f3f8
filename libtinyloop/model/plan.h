/* A model as a flat list of block-sized steps, and the order in which its stages run. The forward
 * pass walks them and knows no family. */
#ifndef TL_MODEL_PLAN_H
#define TL_MODEL_PLAN_H

#include "model/config.h"

#include <stdbool.h>

/* x is the residual stream; e is what the core gets from outside: what is injected, or the other
 * state of a nested schedule. */
typedef enum step_kind {
    STEP_EMBED,     /* x = embedding of the tokens */
    STEP_INIT,      /* e = x as it will be injected, then x = the initial state */
    STEP_SWAP,      /* x and e change places */
    STEP_INJECT,    /* x = what the injection makes of x and e */
    STEP_ATTENTION, /* the attention block */
    STEP_MLP,       /* the MLP block */
    STEP_NORM,      /* x = norm(x) */
    STEP_STATE_OUT, /* x = state_out x */
    STEP_EXIT,      /* reads the exit gate, and keeps x where the token leaves with it */
    STEP_LEAVE,     /* x = what STEP_EXIT has kept */
    STEP_KINDS,
} step_kind;

typedef enum norm_id {
    NORM_OF_STAGE, /* its end_norm */
    NORM_FINAL,
    NORM_AFTER_LAST,
} norm_id;

typedef struct plan_step {
    step_kind kind;
    int layer;    /* physical layer, of attention and MLP */
    int kv_layer; /* its place in the stage's KV blocks */
    int stage;
    norm_id norm;
} plan_step;

/* Steps [once, enter) before the first run, [enter, begin) when the walk comes from another stage,
 * [begin, end) in each run, [end, leave) after the last run. */
typedef struct plan_stage {
    int once, enter, begin, end, leave;
    int n_layers;
    bool looped;
} plan_stage;

typedef struct model_plan {
    plan_step *steps;
    int n_steps;
    plan_stage stages[CONFIG_MAX_STAGES];
    int n_stages;
    bool nested;
    int looped_stage; /* of a flat schedule; -1: none */
    int core_stage;   /* of a flat schedule, whose runs model_states reads: the looped one, else the
                         last */
    int64_t loop_window;
    bool loop_gated;
} model_plan;

/* How often the looped stages run. `inner`: of a nested schedule, else 0. */
typedef struct loop_counts {
    int64_t loops;
    int64_t inner;
} loop_counts;

/* One run of one stage. Its KV has a plane of its own. */
typedef struct plan_run {
    int stage;
    int64_t index;    /* 0 in the first run of the stage */
    bool last;        /* of the stage's runs */
    int plane;        /* planes of stages that run once come first, so that no other number of
                           loops moves them */
    int64_t window;   /* positions that this plane's KV shows; 0: all */
    int global_plane; /* -1, or the first loop's, which a gate mixes in */
} plan_run;

tl_status model_plan_build(model_plan *plan, const model_config *config);
void model_plan_clear(model_plan *plan);

/* Runs, and planes, of a walk. */
int plan_n_runs(const model_plan *plan, loop_counts counts);
plan_run plan_run_at(const model_plan *plan, loop_counts counts, int i);

/* Runs whose states model_states reads, and whether it reads this one. */
int plan_n_states(const model_plan *plan, loop_counts counts);
static inline bool plan_has_state(const model_plan *plan, const plan_run *run)
{
    return plan->nested || run->stage == plan->core_stage;
}

#endif
