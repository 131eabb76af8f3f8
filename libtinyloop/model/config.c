#include "model/config.h"

#include <math.h>
#include <stddef.h>

_Static_assert(CONFIG_N_FIELDS == 96, "docs/format.md has 96 fields");
_Static_assert(sizeof(model_config) == 8 * CONFIG_N_FIELDS, "fields are 8 bytes each");

#define MAX_LOOPS 1024

typedef struct int_rule {
    const char *name;
    size_t offset;
    int64_t low, high;
} int_rule;

#define RULE(field, low, high)                                                                     \
    {                                                                                              \
        #field, offsetof(model_config, field), low, high                                           \
    }

/* What is no sound file at all. */
static const int_rule format_rules[] = {
    RULE(vocab_size, 1, 1 << 24),
    RULE(hidden_size, 1, 1 << 17),
    RULE(n_heads, 1, 4096),
    RULE(n_kv_heads, 1, 4096),
    RULE(head_dim, 2, CONFIG_MAX_HEAD_DIM),
    RULE(ff_size, 1, 1 << 20),
    RULE(max_positions, 0, INT64_C(1) << 31),
    RULE(tied_head, 0, 1),
    RULE(n_stages, 1, CONFIG_MAX_STAGES),
    RULE(loops_default, 0, MAX_LOOPS),
    RULE(loops_min, 0, MAX_LOOPS),
    RULE(loops_max, 0, MAX_LOOPS),
    RULE(loops_max_trained, 0, INT64_MAX),
};

/* What the format knows and this version does not run. */
static const int_rule support_rules[] = {
    RULE(norm_placement, NORM_PRE, NORM_POST_BRANCH),
    RULE(norm_weightless, 0, 1),
    RULE(qk_norm, QK_NORM_NONE, QK_NORM_FULL),
    RULE(qk_norm_after_rope, 0, 1),
    RULE(qk_norm_weightless, 0, 1),
    RULE(q_bias, 0, 1),
    RULE(k_bias, 0, 1),
    RULE(v_bias, 0, 1),
    RULE(o_bias, 0, 1),
    RULE(mlp_bias, 0, 1),
    RULE(attn_out_gate, 0, 1),
    RULE(value_embed, 0, 1),
    RULE(mlp_kind, MLP_GATED, MLP_PLAIN),
    RULE(activation, ACTIVATION_SILU, ACTIVATION_RELU2),
    RULE(rope_style, ROPE_HALF_SPLIT, ROPE_NONE),
    RULE(rope_scaling, ROPE_SCALING_NONE, ROPE_SCALING_YARN),
    RULE(mask, 0, 1),
    RULE(final_norm, NORM_NONE, NORM_WEIGHTLESS),
    RULE(schedule, SCHEDULE_FLAT, SCHEDULE_NESTED),
    RULE(restart, 0, 0),
    RULE(state_init, STATE_INIT_INPUT, STATE_INIT_TENSOR),
    RULE(inject, INJECT_NONE, INJECT_DIAGONAL),
    RULE(inject_skip_first, 0, 1),
    RULE(state_out_proj, 0, 1),
    RULE(prelude_norm, 0, 1),
    RULE(clp_shift, 0, 0),
    RULE(loop_norm, 0, 0),
    RULE(feed_normed, 0, 0),
    RULE(norm_after_last, AFTER_LAST_NONE, AFTER_LAST_OWN_NORM),
    RULE(loop_attention, LOOP_ATTENTION_OWN, LOOP_ATTENTION_GATED),
    RULE(gate_input, 0, 0),
    RULE(exit_mode, EXIT_NONE, EXIT_SIGMOID_CDF),
    RULE(exit_readout, 0, 0),
    RULE(kv_policy_default, 0, 0),
    RULE(lora_rank, 0, 0),
    RULE(loop_embed, 0, 0),
};

typedef struct float_rule {
    const char *name;
    size_t offset;
    double value;
} float_rule;

/* clang-format off */
#define FLOAT_RULE(field, value) {#field, offsetof(model_config, field), value}
#define SKIP(field)
#define ANY_FLOAT(field) FLOAT_RULE(field, 0),
/* clang-format on */

static const float_rule all_floats[] = {CONFIG_FIELDS(SKIP, ANY_FLOAT)};

static const float_rule float_rules[] = {
    FLOAT_RULE(damping, 1),
    FLOAT_RULE(clp_a, 0),
    FLOAT_RULE(clp_b, 0),
    FLOAT_RULE(lora_alpha, 0),
};

static int64_t int_field(const model_config *config, size_t offset)
{
    return *(const int64_t *)((const char *)config + offset);
}

static double float_field(const model_config *config, size_t offset)
{
    return *(const double *)((const char *)config + offset);
}

static tl_status check_ranges(const model_config *config)
{
    for (size_t i = 0; i < sizeof format_rules / sizeof *format_rules; i++) {
        const int_rule *rule = &format_rules[i];
        int64_t value = int_field(config, rule->offset);
        if (value < rule->low || value > rule->high)
            return tl_fail(TL_STATUS_FORMAT, "config field %s is %lld; allowed are %lld to %lld",
                           rule->name, (long long)value, (long long)rule->low,
                           (long long)rule->high);
    }
    for (size_t i = 0; i < sizeof support_rules / sizeof *support_rules; i++) {
        const int_rule *rule = &support_rules[i];
        int64_t value = int_field(config, rule->offset);
        if (value < rule->low || value > rule->high)
            return tl_fail(
                TL_STATUS_UNSUPPORTED,
                "config field %s is %lld, which this version does not run (%lld to %lld)",
                rule->name, (long long)value, (long long)rule->low, (long long)rule->high);
    }
    for (size_t i = 0; i < sizeof all_floats / sizeof *all_floats; i++)
        if (!isfinite(float_field(config, all_floats[i].offset)))
            return tl_fail(TL_STATUS_FORMAT, "config field %s is %g; it must be finite",
                           all_floats[i].name, float_field(config, all_floats[i].offset));
    for (size_t i = 0; i < sizeof float_rules / sizeof *float_rules; i++) {
        const float_rule *rule = &float_rules[i];
        double value = float_field(config, rule->offset);
        if (!(value == rule->value))
            return tl_fail(TL_STATUS_UNSUPPORTED,
                           "config field %s is %g, which this version does not run (only %g)",
                           rule->name, value, rule->value);
    }
    return TL_STATUS_OK;
}

/* ---- rules between fields ---- */

/* A field that must be within limits where `used`, else 0. */
static tl_status int_if(bool used, const char *name, int64_t value, int64_t low, int64_t high)
{
    if (used ? value >= low && value <= high : value == 0)
        return TL_STATUS_OK;
    if (!used)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field %s is %lld; it must be 0 where nothing "
                       "uses it",
                       name, (long long)value);
    return tl_fail(TL_STATUS_FORMAT, "config field %s is %lld; allowed are %lld to %lld", name,
                   (long long)value, (long long)low, (long long)high);
}

/* Neither 0 nor infinite where it is used, as a float. */
static bool is_factor(double value)
{
    return isfinite((float)value) && (float)value != 0;
}

/* As int_if; where used it must be above 0. */
static tl_status positive_if(bool used, const char *name, double value)
{
    if (used ? value > 0 && is_factor(value) : value == 0)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_FORMAT, "config field %s is %g; it must be %s", name, value,
                   used ? "above 0, within the range of float32" : "0 where nothing uses it");
}

static tl_status not_zero(const char *name, double value)
{
    if (is_factor(value))
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_FORMAT,
                   "config field %s is %g; it is a factor within the range of float32, 1 for none",
                   name, value);
}

static tl_status unsupported(const char *what)
{
    return tl_fail(TL_STATUS_UNSUPPORTED, "this version does not run %s", what);
}

static tl_status check_shape(const model_config *c)
{
    if (c->n_heads % c->n_kv_heads != 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field n_heads is %lld; it must be a multiple of "
                       "n_kv_heads, %lld",
                       (long long)c->n_heads, (long long)c->n_kv_heads);
    if (c->head_dim % 2 != 0)
        return tl_fail(TL_STATUS_FORMAT, "config field head_dim is %lld; it must be even",
                       (long long)c->head_dim);
    TL_TRY(positive_if(true, "norm_eps", c->norm_eps));
    TL_TRY(not_zero("activation_scale", c->activation_scale));
    TL_TRY(not_zero("embed_scale", c->embed_scale));
    TL_TRY(not_zero("logit_scale", c->logit_scale));
    if (c->logit_softcap < 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field logit_softcap is %g; it must be 0 (none) "
                       "or above",
                       c->logit_softcap);
    return TL_STATUS_OK;
}

static tl_status check_attention(const model_config *c)
{
    bool normed = c->qk_norm != QK_NORM_NONE;
    TL_TRY(positive_if(normed, "qk_norm_eps", c->qk_norm_eps));
    TL_TRY(int_if(normed, "qk_norm_after_rope", c->qk_norm_after_rope, 0, 1));
    TL_TRY(int_if(normed, "qk_norm_weightless", c->qk_norm_weightless, 0, 1));
    if (c->qk_norm == QK_NORM_FULL && c->qk_norm_after_rope)
        return unsupported("qk_norm 2 (full width) with qk_norm_after_rope 1");
    return int_if(c->value_embed != 0, "value_embed_channels", c->value_embed_channels, 1,
                  c->hidden_size);
}

static tl_status check_rope(const model_config *c)
{
    bool rotates = c->rope_style != ROPE_NONE;
    int64_t scaling = c->rope_scaling;
    bool llama3 = scaling == ROPE_SCALING_LLAMA3, yarn = scaling == ROPE_SCALING_YARN;
    TL_TRY(positive_if(rotates, "rope_theta", c->rope_theta));
    TL_TRY(int_if(rotates, "rotary_dim", c->rotary_dim, 2, c->head_dim));
    TL_TRY(int_if(rotates, "rope_scaling", scaling, 0, ROPE_SCALING_YARN));
    if (c->rotary_dim % 2 != 0)
        return tl_fail(TL_STATUS_FORMAT, "config field rotary_dim is %lld; it must be even",
                       (long long)c->rotary_dim);
    TL_TRY(positive_if(scaling != ROPE_SCALING_NONE, "rope_factor", c->rope_factor));
    TL_TRY(int_if(llama3 || yarn, "rope_original_positions", c->rope_original_positions, 1,
                  INT64_C(1) << 31));
    TL_TRY(positive_if(llama3, "rope_low_freq_factor", c->rope_low_freq_factor));
    TL_TRY(positive_if(llama3, "rope_high_freq_factor", c->rope_high_freq_factor));
    TL_TRY(positive_if(yarn, "rope_beta_fast", c->rope_beta_fast));
    TL_TRY(positive_if(yarn, "rope_beta_slow", c->rope_beta_slow));
    TL_TRY(positive_if(yarn, "rope_attention_factor", c->rope_attention_factor));
    if (llama3 && c->rope_high_freq_factor <= c->rope_low_freq_factor)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field rope_high_freq_factor is %g; it must be "
                       "above rope_low_freq_factor, %g",
                       c->rope_high_freq_factor, c->rope_low_freq_factor);
    if (yarn && (c->rope_beta_fast <= c->rope_beta_slow || c->rope_theta <= 1))
        return tl_fail(TL_STATUS_FORMAT,
                       "yarn needs rope_beta_fast above rope_beta_slow and "
                       "rope_theta above 1; the file has %g, %g and %g",
                       c->rope_beta_fast, c->rope_beta_slow, c->rope_theta);
    return TL_STATUS_OK;
}

static tl_status check_stages(const model_config *c)
{
    int64_t next_layer = 0;
    for (int64_t s = 0; s < CONFIG_MAX_STAGES; s++) {
        config_stage stage = config_stage_at(c, s);
        bool used = s < c->n_stages;
        bool sound =
            used ? stage.first_layer == next_layer && stage.n_layers >= 1 &&
                       stage.n_layers <= 65536 && (stage.looped & ~1) == 0 &&
                       stage.end_norm >= NORM_NONE && stage.end_norm <= NORM_WEIGHTLESS
                 : !stage.first_layer && !stage.n_layers && !stage.looped && !stage.end_norm;
        if (!sound)
            return tl_fail(TL_STATUS_FORMAT,
                           "config stage %lld (first_layer %lld, n_layers %lld, "
                           "looped %lld, end_norm %lld) is not sound: stages follow each other "
                           "without gaps, and unused ones are zero",
                           (long long)s, (long long)stage.first_layer, (long long)stage.n_layers,
                           (long long)stage.looped, (long long)stage.end_norm);
        next_layer += stage.n_layers;
    }
    return TL_STATUS_OK;
}

static int64_t n_looped_stages(const model_config *c)
{
    int64_t n = 0;
    for (int64_t s = 0; s < c->n_stages; s++)
        n += config_stage_at(c, s).looped;
    return n;
}

/* What only a looped stage has a use for. */
static tl_status check_core(const model_config *c)
{
    bool looped = n_looped_stages(c) > 0, noise = c->state_init == STATE_INIT_NOISE;
    TL_TRY(int_if(looped, "state_init", c->state_init, 0, STATE_INIT_TENSOR));
    TL_TRY(int_if(looped, "inject", c->inject, 0, INJECT_DIAGONAL));
    TL_TRY(int_if(looped, "state_out_proj", c->state_out_proj, 0, 1));
    TL_TRY(int_if(looped, "norm_after_last", c->norm_after_last, 0, AFTER_LAST_OWN_NORM));
    TL_TRY(int_if(looped, "loop_attention", c->loop_attention, 0, 1));
    TL_TRY(int_if(looped, "loop_window", c->loop_window, 0, INT64_MAX));
    TL_TRY(int_if(looped, "exit_mode", c->exit_mode, 0, 1));
    TL_TRY(positive_if(c->exit_mode != EXIT_NONE, "exit_threshold", c->exit_threshold));
    TL_TRY(int_if(c->inject != INJECT_NONE, "inject_skip_first", c->inject_skip_first, 0, 1));
    TL_TRY(int_if(c->inject != INJECT_NONE, "prelude_norm", c->prelude_norm, 0, 1));
    TL_TRY(positive_if(noise, "init_std", c->init_std));
    TL_TRY(positive_if(noise, "init_cut", c->init_cut));
    if (noise && c->init_cut < CONFIG_LEAST_INIT_CUT)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "config field init_cut is %g; this version takes "
                       "%g and above",
                       c->init_cut, CONFIG_LEAST_INIT_CUT);
    if (noise ? c->init_scale < 0 : c->init_scale != 0)
        return tl_fail(TL_STATUS_FORMAT, "config field init_scale is %g; it must be %s",
                       c->init_scale, noise ? "0 or above" : "0 where nothing uses it");
    if (c->state_init == STATE_INIT_PRELUDE)
        return unsupported("state_init 1 (prelude); 0, the stage's input, is the prelude's output");
    if (c->norm_after_last == AFTER_LAST_FINAL_NORM && c->final_norm != NORM_WITH_WEIGHT)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field norm_after_last is 1 (the final norm), but "
                       "final_norm is %lld",
                       (long long)c->final_norm);
    return TL_STATUS_OK;
}

static tl_status check_flat(const model_config *c)
{
    TL_TRY(int_if(false, "cycles_high", c->cycles_high, 0, 0));
    TL_TRY(int_if(false, "cycles_low", c->cycles_low, 0, 0));
    if (n_looped_stages(c) > 1)
        return unsupported("more than one looped stage in a flat schedule (config field schedule)");
    TL_TRY(int_if(c->inject != INJECT_NONE, "inject_source", c->inject_source, 0, 2));
    if (c->inject != INJECT_NONE && c->inject_source != SOURCE_PRELUDE)
        return unsupported("inject_source other than 1, the prelude's output, in a flat schedule");
    if (c->state_init != STATE_INIT_INPUT && c->inject == INJECT_NONE)
        return tl_fail(TL_STATUS_FORMAT,
                       "config field state_init is %lld without an injection; "
                       "no output would depend on its token",
                       (long long)c->state_init);
    return TL_STATUS_OK;
}

static tl_status check_nested(const model_config *c)
{
    if (c->n_stages != 2 || n_looped_stages(c) != 2)
        return tl_fail(TL_STATUS_FORMAT,
                       "a nested schedule has two stages, the low and the high "
                       "one, both looped; the file has %lld, %lld of them looped",
                       (long long)c->n_stages, (long long)n_looped_stages(c));
    TL_TRY(int_if(true, "cycles_high", c->cycles_high, 1, MAX_LOOPS));
    TL_TRY(int_if(true, "cycles_low", c->cycles_low, 1, MAX_LOOPS));
    if (c->inject != INJECT_ADD || c->inject_source != SOURCE_OTHER_STATE || c->inject_skip_first ||
        c->prelude_norm || c->state_out_proj || c->norm_after_last || c->loop_attention ||
        c->loop_window || c->exit_mode)
        return unsupported("a nested schedule with another injection than 1 (add) from source 2 "
                           "(the other state), nor with inject_skip_first, prelude_norm, "
                           "state_out_proj, norm_after_last, loop_attention, loop_window or "
                           "exit_mode");
    if (c->state_init != STATE_INIT_ZEROS && c->state_init != STATE_INIT_TENSOR)
        return unsupported("a nested schedule whose low state starts as anything but 2 (zeros) or "
                           "4 (tensor)");
    return TL_STATUS_OK;
}

static tl_status check_loops(const model_config *c)
{
    TL_TRY(check_core(c));
    TL_TRY(c->schedule == SCHEDULE_NESTED ? check_nested(c) : check_flat(c));
    int64_t stated = c->loops_default;
    bool nested = c->schedule == SCHEDULE_NESTED;
    if (stated != 0 &&
        ((n_looped_stages(c) == 0 && stated != 1) || (nested && stated != c->cycles_high)))
        return tl_fail(TL_STATUS_FORMAT, "config field loops_default is %lld; it must be 0 or %lld",
                       (long long)stated, (long long)(nested ? c->cycles_high : 1));
    loop_limits limits = config_loop_limits(c);
    if (limits.standard_inner > limits.maximum ||
        limits.standard * (limits.standard_inner + 1) > CONFIG_MAX_RUNS)
        return tl_fail(TL_STATUS_FORMAT,
                       "config fields cycles_high %lld and cycles_low %lld are above loops_max "
                       "%lld, or make more than %d runs",
                       (long long)limits.standard, (long long)limits.standard_inner,
                       (long long)limits.maximum, CONFIG_MAX_RUNS);
    if (limits.minimum > limits.standard || limits.standard > limits.maximum)
        return tl_fail(TL_STATUS_FORMAT,
                       "loops_min %lld, the default %lld and loops_max %lld are not in order",
                       (long long)limits.minimum, (long long)limits.standard,
                       (long long)limits.maximum);
    return TL_STATUS_OK;
}

tl_status config_check(const model_config *config)
{
    TL_TRY(check_ranges(config));
    TL_TRY(check_shape(config));
    TL_TRY(check_attention(config));
    TL_TRY(check_rope(config));
    TL_TRY(check_stages(config));
    return check_loops(config);
}

config_stage config_stage_at(const model_config *config, int64_t stage)
{
    const int64_t *field = &config->stage0_first_layer + 4 * stage;
    return (config_stage){field[0], field[1], field[2], field[3]};
}

int64_t config_n_layers(const model_config *config)
{
    config_stage last = config_stage_at(config, config->n_stages - 1);
    return last.first_layer + last.n_layers;
}

bool config_leaves_early(const model_config *config)
{
    return config->exit_mode != EXIT_NONE && config->exit_threshold < 1;
}

loop_limits config_loop_limits(const model_config *c)
{
    if (n_looped_stages(c) == 0)
        return (loop_limits){1, 1, 1, 0, 0};
    loop_limits limits = {
        .minimum = c->loops_min,
        .maximum = c->loops_max,
        .standard = c->loops_default,
        .max_trained = c->loops_max_trained,
    };
    if (limits.minimum == 0)
        limits.minimum = 1;
    if (limits.maximum == 0)
        limits.maximum = MAX_LOOPS;
    if (limits.standard == 0)
        limits.standard = 8 < limits.maximum ? 8 : limits.maximum;
    if (c->schedule == SCHEDULE_NESTED) {
        limits.standard = c->cycles_high;
        limits.standard_inner = c->cycles_low;
    }
    return limits;
}
