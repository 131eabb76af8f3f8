/* The configuration of a model: the fields of docs/format.md, in the file's order. */
#ifndef TL_MODEL_CONFIG_H
#define TL_MODEL_CONFIG_H

#include "base/status.h"

#include <stdbool.h>

#define CONFIG_MAX_STAGES 4
#define CONFIG_MAX_HEAD_DIM 256
#define CONFIG_MAX_RUNS 65536     /* of a nested schedule */
#define CONFIG_LEAST_INIT_CUT 0.1 /* of noise that is cut by trying again */

/* I: signed 64-bit integer, F: double. The position in this list is the field's number. */
/* clang-format off */
#define CONFIG_FIELDS(I, F)                                                                        \
    I(vocab_size) I(hidden_size) I(n_heads) I(n_kv_heads) I(head_dim) I(ff_size)                   \
    I(max_positions) I(bos_id) I(pad_id)                                                           \
    I(norm_placement) I(norm_weightless) F(norm_eps)                                               \
    I(qk_norm) I(qk_norm_after_rope) I(qk_norm_weightless) F(qk_norm_eps)                          \
    I(q_bias) I(k_bias) I(v_bias) I(o_bias) I(mlp_bias)                                            \
    I(attn_out_gate) I(value_embed) I(value_embed_channels)                                        \
    I(mlp_kind) I(activation) F(activation_scale)                                                  \
    I(rope_style) F(rope_theta) I(rotary_dim) I(rope_scaling) F(rope_factor)                       \
    F(rope_low_freq_factor) F(rope_high_freq_factor) I(rope_original_positions)                    \
    F(rope_beta_fast) F(rope_beta_slow) F(rope_attention_factor)                                   \
    F(embed_scale) I(tied_head) F(logit_scale) F(logit_softcap) I(mask) I(final_norm)              \
    I(n_stages)                                                                                    \
    I(stage0_first_layer) I(stage0_n_layers) I(stage0_looped) I(stage0_end_norm)                   \
    I(stage1_first_layer) I(stage1_n_layers) I(stage1_looped) I(stage1_end_norm)                   \
    I(stage2_first_layer) I(stage2_n_layers) I(stage2_looped) I(stage2_end_norm)                   \
    I(stage3_first_layer) I(stage3_n_layers) I(stage3_looped) I(stage3_end_norm)                   \
    I(loops_default) I(loops_min) I(loops_max) I(loops_max_trained)                                \
    I(schedule) I(cycles_high) I(cycles_low) I(restart) F(damping)                                 \
    I(state_init) F(init_std) F(init_cut) F(init_scale)                                            \
    I(inject) I(inject_source) I(inject_skip_first) I(state_out_proj) I(prelude_norm)              \
    F(clp_a) F(clp_b) I(clp_shift)                                                                 \
    I(loop_norm) I(feed_normed) I(norm_after_last)                                                 \
    I(loop_attention) I(loop_window) I(gate_input)                                                 \
    I(exit_mode) F(exit_threshold) I(exit_readout)                                                 \
    I(kv_policy_default) I(kv_policies_allowed) I(lora_rank) F(lora_alpha) I(loop_embed)
/* clang-format on */

#define CONFIG_COUNT_FIELD(name) +1
enum { CONFIG_N_FIELDS = 0 CONFIG_FIELDS(CONFIG_COUNT_FIELD, CONFIG_COUNT_FIELD) };

typedef struct config_stage {
    int64_t first_layer;
    int64_t n_layers;
    int64_t looped;
    int64_t end_norm;
} config_stage;

typedef struct model_config {
#define CONFIG_DECLARE_I(name) int64_t name;
#define CONFIG_DECLARE_F(name) double name;
    CONFIG_FIELDS(CONFIG_DECLARE_I, CONFIG_DECLARE_F)
#undef CONFIG_DECLARE_I
#undef CONFIG_DECLARE_F
} model_config;

enum { NORM_PRE, NORM_SANDWICH_BRANCH, NORM_SANDWICH_SUM, NORM_POST_BRANCH };
enum { NORM_NONE, NORM_WITH_WEIGHT, NORM_WEIGHTLESS }; /* end_norm, final_norm */
enum { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_FULL };
enum { MLP_GATED, MLP_PLAIN };
enum { ACTIVATION_SILU, ACTIVATION_GELU, ACTIVATION_GELU_TANH, ACTIVATION_RELU2 };
enum { ROPE_HALF_SPLIT, ROPE_INTERLEAVED, ROPE_NONE };
enum { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3, ROPE_SCALING_YARN };
enum { SCHEDULE_FLAT, SCHEDULE_NESTED };
enum {
    STATE_INIT_INPUT,
    STATE_INIT_PRELUDE,
    STATE_INIT_ZEROS,
    STATE_INIT_NOISE,
    STATE_INIT_TENSOR
};
enum { INJECT_NONE, INJECT_ADD, INJECT_CONCAT_LINEAR, INJECT_DIAGONAL };
enum { SOURCE_EMBEDDING, SOURCE_PRELUDE, SOURCE_OTHER_STATE };
enum { AFTER_LAST_NONE, AFTER_LAST_FINAL_NORM, AFTER_LAST_OWN_NORM };
enum { LOOP_ATTENTION_OWN, LOOP_ATTENTION_GATED };
enum { EXIT_NONE, EXIT_SIGMOID_CDF };

/* Refuses, by field, what is outside docs/format.md (FORMAT) or not built here (UNSUPPORTED). */
tl_status config_check(const model_config *config);

config_stage config_stage_at(const model_config *config, int64_t stage);
int64_t config_n_layers(const model_config *config);
bool config_leaves_early(const model_config *config); /* a token may leave before the last loop */

/* Range and default of `loops` after the rules for what the file leaves at 0. */
typedef struct loop_limits {
    int64_t minimum;
    int64_t maximum;
    int64_t standard;
    int64_t max_trained;    /* 0: unknown */
    int64_t standard_inner; /* of a nested schedule's inner loops, 1 .. maximum; 0: it is flat */
} loop_limits;

loop_limits config_loop_limits(const model_config *config);

#endif
