/* A model as a flat list of block-sized steps. The forward pass walks it and knows no family. */
#ifndef TL_MODEL_PLAN_H
#define TL_MODEL_PLAN_H

#include "model/config.h"

#include <stdbool.h>

typedef enum step_kind {
    STEP_EMBED,     /* x = embedding of the tokens */
    STEP_INIT,      /* e = x, then x = the initial state */
    STEP_INJECT,    /* x += e */
    STEP_ATTENTION, /* x += attention(norm(x)) */
    STEP_MLP,       /* x += mlp(norm(x)) */
    STEP_NORM,      /* x = norm(x) */
    STEP_KINDS,
} step_kind;

typedef struct plan_step {
    step_kind kind;
    int layer;    /* physical layer, of attention and MLP */
    int kv_layer; /* its place in the stage's KV blocks */
    int stage;
    int zeros; /* of STEP_INIT: the state starts from zeros, else it stays x */
} plan_step;

typedef struct plan_stage {
    int once;  /* steps [once, begin) run once, before the first run */
    int begin; /* steps [begin, end) are one run */
    int end;
    int n_layers;
    int plane; /* KV plane of its (first) run; run i of the looped stage has plane + i */
    bool looped;
} plan_stage;

typedef struct model_plan {
    plan_step *steps;
    int n_steps;
    plan_stage stages[CONFIG_MAX_STAGES];
    int n_stages;
    int n_fixed_planes; /* of the stages that run once; the looped stage's planes come after, so
                           that a change of loops moves none */
    int looped_stage;   /* -1: none */
    int core_stage;     /* whose runs model_states reads: the looped one, else the last */
} model_plan;

tl_status model_plan_build(model_plan *plan, const model_config *config);
void model_plan_clear(model_plan *plan);

static inline int plan_n_planes(const model_plan *plan, int64_t loops)
{
    return plan->n_fixed_planes + (plan->looped_stage >= 0 ? (int)loops : 0);
}

/* The stage whose block layout a plane has. */
static inline int plan_plane_stage(const model_plan *plan, int plane)
{
    if (plane >= plan->n_fixed_planes)
        return plan->looped_stage;
    return plan->looped_stage >= 0 && plane >= plan->looped_stage ? plane + 1 : plane;
}

#endif
