/* Shapes and wirings of small models: every size that is not a multiple of something, and each
 * family's wiring. */
#ifndef TINYLOOP_TINY_SPECS_H
#define TINYLOOP_TINY_SPECS_H

#include "model/file.h"

enum { TINY_MIXED = -1 };

typedef struct tiny_spec {
    int64_t vocab, hidden, n_heads, n_kv_heads, head_dim, ff;
    int64_t prelude, core, coda; /* layers; a stage with none is left out; only the core loops */
    bool inject;                 /* the core starts from zeros and gets its input in each loop */
    bool core_norm;              /* a norm ends each loop */
    bool tied;
    bool llama3;   /* rescaled rotary frequencies */
    int dtype;     /* tensor_dtype, or TINY_MIXED: tensor i has dtype i % 3 */
    int64_t loops; /* loops_default */
    int64_t loops_max_trained, max_positions; /* 0: unknown */
    const int32_t *end_ids;
    size_t n_end_ids;
    uint64_t seed;
    void (*wiring)(model_config *config); /* NULL, or what makes it another family's */
} tiny_spec;

/* Odd in every way; float32 so that a float64 reference can come close. */
#define TINY_SPEC                                                                                  \
    {                                                                                              \
        .vocab = 50, .hidden = 20, .n_heads = 2, .n_kv_heads = 1, .head_dim = 10, .ff = 19,        \
        .prelude = 1, .core = 2, .coda = 1, .inject = true, .core_norm = true, .tied = true,       \
        .dtype = DTYPE_F32, .loops = 2, .seed = 1                                                  \
    }

/* ---- other families' wiring, on top of tiny_config() ----------------------------------------- */

static inline void tiny_ouro(model_config *c)
{
    c->norm_placement = NORM_SANDWICH_BRANCH;
    c->stage0_end_norm = NORM_WITH_WEIGHT;
    c->final_norm = NORM_NONE;
    c->exit_mode = EXIT_SIGMOID_CDF;
    c->exit_threshold = 0.6;
}

static inline void tiny_huginn(model_config *c)
{
    c->norm_placement = NORM_SANDWICH_SUM;
    c->rope_style = ROPE_INTERLEAVED;
    c->q_bias = c->k_bias = 1;
    c->embed_scale = 3;
    c->inject = INJECT_CONCAT_LINEAR;
    c->inject_source = SOURCE_PRELUDE;
    c->state_init = STATE_INIT_NOISE;
    c->init_std = 0.5;
    c->init_cut = 3;
    c->init_scale = 1;
    c->norm_after_last = AFTER_LAST_FINAL_NORM;
}

static inline void tiny_olmo(model_config *c)
{
    tiny_huginn(c);
    c->norm_placement = NORM_POST_BRANCH;
    c->rope_style = ROPE_HALF_SPLIT;
    c->rotary_dim = 4;
    c->qk_norm = QK_NORM_FULL;
    c->qk_norm_eps = 1e-5;
    c->norm_after_last = AFTER_LAST_OWN_NORM;
    c->inject_skip_first = 1;
    c->v_bias = c->o_bias = c->mlp_bias = 1;
    c->activation = ACTIVATION_GELU;
}

static inline void tiny_parcae(model_config *c)
{
    tiny_huginn(c);
    c->norm_placement = NORM_PRE;
    c->q_bias = c->k_bias = 0;
    c->qk_norm = QK_NORM_HEAD;
    c->qk_norm_after_rope = c->qk_norm_weightless = 1;
    c->qk_norm_eps = 1e-6;
    c->value_embed = 1;
    c->value_embed_channels = 5;
    c->mlp_kind = MLP_PLAIN;
    c->activation = ACTIVATION_RELU2;
    c->activation_scale = 0.5;
    c->inject = INJECT_DIAGONAL;
    c->state_out_proj = c->prelude_norm = 1;
    c->norm_after_last = AFTER_LAST_NONE;
    c->logit_softcap = 4;
    c->logit_scale = 0.5;
}

static inline void tiny_iquest(model_config *c)
{
    c->loop_attention = LOOP_ATTENTION_GATED;
    c->loop_window = 7;
    c->rope_scaling = ROPE_SCALING_YARN;
    c->rope_factor = 4;
    c->rope_original_positions = 32;
    c->rope_beta_fast = 32;
    c->rope_beta_slow = 1;
    c->rope_attention_factor = 1.1;
}

static inline void tiny_hrm(model_config *c)
{
    c->norm_weightless = 1;
    c->stage0_looped = c->stage1_looped = 1;
    c->stage0_end_norm = c->stage1_end_norm = NORM_WEIGHTLESS;
    c->final_norm = NORM_NONE;
    c->attn_out_gate = 1;
    c->inject = INJECT_ADD;
    c->inject_source = SOURCE_OTHER_STATE;
    c->state_init = STATE_INIT_TENSOR;
    c->schedule = 1;
    c->cycles_high = c->cycles_low = 2;
    c->mask = 1;
    c->rope_scaling = ROPE_SCALING_LINEAR;
    c->rope_factor = 2;
}

/* Every size that is not a multiple of something; groups of 1, 2, 3 and 9 query heads; all
 * dtypes; with and without prelude, coda, injection and loop. */
/* clang-format off */
static const tiny_spec tiny_specs[] = {
    TINY_SPEC,
    {.vocab = 7, .hidden = 6, .n_heads = 3, .n_kv_heads = 1, .head_dim = 2, .ff = 5,
     .prelude = 1, .core = 1, .coda = 1, .inject = true, .core_norm = true,
     .dtype = DTYPE_F16, .loops = 3, .seed = 2},
    {.vocab = 33, .hidden = 17, .n_heads = 2, .n_kv_heads = 2, .head_dim = 6, .ff = 19,
     .core = 2, .coda = 1, .inject = true, .tied = true,
     .dtype = DTYPE_BF16, .loops = 2, .seed = 3},
    {.vocab = 50, .hidden = 17, .n_heads = 6, .n_kv_heads = 2, .head_dim = 6, .ff = 5,
     .prelude = 2, .core = 1, .llama3 = true, .core_norm = true,
     .dtype = TINY_MIXED, .loops = 4, .seed = 4},
    {.vocab = 33, .hidden = 20, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ff = 19,
     .prelude = 3, .llama3 = true,
     .dtype = DTYPE_F32, .loops = 1, .seed = 5},
    /* more query heads to a KV head than attention takes at once */
    {.vocab = 7, .hidden = 6, .n_heads = 9, .n_kv_heads = 1, .head_dim = 2, .ff = 5,
     .core = 1, .inject = true, .core_norm = true, .tied = true,
     .dtype = DTYPE_F32, .loops = 2, .seed = 7},
    /* more than one group of columns and more than one panel in every linear layer */
    {.vocab = 70, .hidden = 131, .n_heads = 2, .n_kv_heads = 1, .head_dim = 66, .ff = 133,
     .prelude = 1, .core = 1, .coda = 1, .inject = true, .core_norm = true, .tied = true,
     .dtype = DTYPE_BF16, .loops = 2, .seed = 6},
    {.vocab = 50, .hidden = 20, .n_heads = 3, .n_kv_heads = 3, .head_dim = 6, .ff = 19,
     .core = 2, .dtype = DTYPE_F32, .loops = 3, .seed = 8, .wiring = tiny_ouro},
    {.vocab = 33, .hidden = 18, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6, .ff = 21,
     .prelude = 1, .core = 2, .coda = 1, .tied = true,
     .dtype = DTYPE_F32, .loops = 3, .seed = 9, .wiring = tiny_huginn},
    {.vocab = 33, .hidden = 18, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6, .ff = 21,
     .prelude = 1, .core = 1, .coda = 1,
     .dtype = DTYPE_I8, .loops = 3, .seed = 10, .wiring = tiny_olmo},
    {.vocab = 33, .hidden = 18, .n_heads = 4, .n_kv_heads = 2, .head_dim = 6, .ff = 21,
     .prelude = 1, .core = 2, .coda = 1, .tied = true,
     .dtype = TINY_MIXED, .loops = 2, .seed = 11, .wiring = tiny_parcae},
    {.vocab = 33, .hidden = 18, .n_heads = 4, .n_kv_heads = 1, .head_dim = 8, .ff = 21,
     .core = 2, .dtype = DTYPE_F32, .loops = 2, .seed = 12, .wiring = tiny_iquest},
    {.vocab = 33, .hidden = 18, .n_heads = 2, .n_kv_heads = 2, .head_dim = 10, .ff = 21,
     .prelude = 1, .core = 1, .dtype = DTYPE_BF16, .seed = 13, .wiring = tiny_hrm},
};
/* clang-format on */
enum {
    TINY_N_SPECS = sizeof tiny_specs / sizeof *tiny_specs,
    TINY_N_PLAIN = 7, /* the first so many have no wiring of their own */
    TINY_LARGE = 6,   /* larger than the others */
    TINY_OURO = TINY_N_PLAIN,
    TINY_HUGINN,
    TINY_OLMO,
    TINY_PARCAE,
    TINY_IQUEST,
    TINY_HRM,
};

static inline model_config tiny_config(const tiny_spec *spec)
{
    model_config c = {
        .vocab_size = spec->vocab,
        .hidden_size = spec->hidden,
        .n_heads = spec->n_heads,
        .n_kv_heads = spec->n_kv_heads,
        .head_dim = spec->head_dim,
        .ff_size = spec->ff,
        .max_positions = spec->max_positions,
        .bos_id = -1,
        .pad_id = -1,
        .norm_eps = 1e-6,
        .activation_scale = 1,
        .rope_theta = 10000,
        .rotary_dim = spec->head_dim,
        .embed_scale = 1,
        .tied_head = spec->tied,
        .logit_scale = 1,
        .final_norm = 1,
        .loops_default = spec->core > 0 ? spec->loops : 0,
        .loops_max_trained = spec->loops_max_trained,
        .damping = 1,
        .state_init = spec->inject ? STATE_INIT_ZEROS : STATE_INIT_INPUT,
        .inject = spec->inject ? INJECT_ADD : INJECT_NONE,
        .inject_source = spec->inject,
    };
    if (spec->llama3) {
        c.rope_scaling = ROPE_SCALING_LLAMA3;
        c.rope_factor = 4;
        c.rope_low_freq_factor = 1;
        c.rope_high_freq_factor = 4;
        c.rope_original_positions = 64;
    }
    const int64_t layers[] = {spec->prelude, spec->core, spec->coda};
    int64_t first = 0;
    for (int i = 0; i < 3; i++) {
        if (layers[i] == 0)
            continue;
        int64_t *stage = &c.stage0_first_layer + 4 * c.n_stages++;
        stage[0] = first;
        stage[1] = layers[i];
        stage[2] = i == 1;
        stage[3] = i == 1 && spec->core_norm;
        first += layers[i];
    }
    if (spec->wiring != NULL)
        spec->wiring(&c);
    return c;
}

#endif
