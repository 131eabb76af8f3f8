#include "model/config.h"

#include <math.h>
#include <stdbool.h>
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
    RULE(norm_placement, 0, 0),
    RULE(norm_weightless, 0, 0),
    RULE(qk_norm, 0, 0),
    RULE(qk_norm_after_rope, 0, 0),
    RULE(qk_norm_weightless, 0, 0),
    RULE(q_bias, 0, 0),
    RULE(k_bias, 0, 0),
    RULE(v_bias, 0, 0),
    RULE(o_bias, 0, 0),
    RULE(mlp_bias, 0, 0),
    RULE(attn_out_gate, 0, 0),
    RULE(value_embed, 0, 0),
    RULE(value_embed_channels, 0, 0),
    RULE(mlp_kind, 0, 0),
    RULE(activation, 0, 0),
    RULE(rope_style, 0, 0),
    RULE(mask, 0, 0),
    RULE(final_norm, 1, 1),
    RULE(schedule, 0, 0),
    RULE(cycles_high, 0, 0),
    RULE(cycles_low, 0, 0),
    RULE(restart, 0, 0),
    RULE(inject, INJECT_NONE, INJECT_ADD),
    RULE(inject_skip_first, 0, 0),
    RULE(state_out_proj, 0, 0),
    RULE(prelude_norm, 0, 0),
    RULE(clp_shift, 0, 0),
    RULE(loop_norm, 0, 0),
    RULE(feed_normed, 0, 0),
    RULE(norm_after_last, 0, 0),
    RULE(loop_attention, 0, 0),
    RULE(loop_window, 0, 0),
    RULE(gate_input, 0, 0),
    RULE(exit_mode, 0, 0),
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

static const float_rule float_rules[] = {
#define FLOAT_RULE(field, value)                                                                   \
    {                                                                                              \
        #field, offsetof(model_config, field), value                                               \
    }
    FLOAT_RULE(qk_norm_eps, 0),    FLOAT_RULE(activation_scale, 1),
    FLOAT_RULE(rope_beta_fast, 0), FLOAT_RULE(rope_beta_slow, 0),
    FLOAT_RULE(embed_scale, 1),    FLOAT_RULE(rope_attention_factor, 0),
    FLOAT_RULE(logit_scale, 1),    FLOAT_RULE(logit_softcap, 0),
    FLOAT_RULE(damping, 1),        FLOAT_RULE(init_std, 0),
    FLOAT_RULE(init_cut, 0),       FLOAT_RULE(init_scale, 0),
    FLOAT_RULE(clp_a, 0),          FLOAT_RULE(clp_b, 0),
    FLOAT_RULE(exit_threshold, 0), FLOAT_RULE(lora_alpha, 0),
#undef FLOAT_RULE
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
    if (!(c->norm_eps > 0) || !isfinite(c->norm_eps))
        return tl_fail(TL_STATUS_FORMAT, "config field norm_eps is %g; it must be above 0",
                       c->norm_eps);
    return TL_STATUS_OK;
}

static tl_status check_rope(const model_config *c)
{
    if (!(c->rope_theta > 0) || !isfinite(c->rope_theta))
        return tl_fail(TL_STATUS_FORMAT, "config field rope_theta is %g; it must be above 0",
                       c->rope_theta);
    if (c->rotary_dim != c->head_dim)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "config field rotary_dim is %lld; this version "
                       "rotates whole heads, %lld",
                       (long long)c->rotary_dim, (long long)c->head_dim);
    if (c->rope_scaling == ROPE_SCALING_NONE)
        return TL_STATUS_OK;
    if (c->rope_scaling != ROPE_SCALING_LLAMA3)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "config field rope_scaling is %lld, which this "
                       "version does not run (0 none, 2 llama3)",
                       (long long)c->rope_scaling);
    bool sound = c->rope_factor > 0 && isfinite(c->rope_factor) && c->rope_low_freq_factor > 0 &&
                 c->rope_high_freq_factor > c->rope_low_freq_factor &&
                 isfinite(c->rope_high_freq_factor) && c->rope_original_positions >= 1;
    if (!sound)
        return tl_fail(TL_STATUS_FORMAT,
                       "llama3 rope scaling needs rope_factor > 0, "
                       "0 < rope_low_freq_factor < rope_high_freq_factor and "
                       "rope_original_positions >= 1; the file has %g, %g, %g, %lld",
                       c->rope_factor, c->rope_low_freq_factor, c->rope_high_freq_factor,
                       (long long)c->rope_original_positions);
    return TL_STATUS_OK;
}

static tl_status check_stages(const model_config *c)
{
    int64_t next_layer = 0, n_looped = 0;
    for (int64_t s = 0; s < CONFIG_MAX_STAGES; s++) {
        config_stage stage = config_stage_at(c, s);
        bool used = s < c->n_stages;
        bool sound =
            used ? stage.first_layer == next_layer && stage.n_layers >= 1 &&
                       stage.n_layers <= 65536 && (stage.looped & ~1) == 0 && stage.end_norm >= 0 &&
                       stage.end_norm <= 2
                 : !stage.first_layer && !stage.n_layers && !stage.looped && !stage.end_norm;
        if (!sound)
            return tl_fail(TL_STATUS_FORMAT,
                           "config stage %lld (first_layer %lld, n_layers %lld, "
                           "looped %lld, end_norm %lld) is not sound: stages follow each other "
                           "without gaps, and unused ones are zero",
                           (long long)s, (long long)stage.first_layer, (long long)stage.n_layers,
                           (long long)stage.looped, (long long)stage.end_norm);
        if (stage.end_norm == 2)
            return tl_fail(TL_STATUS_UNSUPPORTED,
                           "config field stage%lld_end_norm is 2 "
                           "(weightless), which this version does not run",
                           (long long)s);
        next_layer += stage.n_layers;
        n_looped += stage.looped;
    }
    if (n_looped == 0 && (c->inject != INJECT_NONE || c->state_init != STATE_INIT_INPUT))
        return tl_fail(TL_STATUS_FORMAT,
                       "inject %lld and state_init %lld need a looped stage; "
                       "the file has none",
                       (long long)c->inject, (long long)c->state_init);
    if (n_looped > 1)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "the file has %lld looped stages; this version runs "
                       "at most one",
                       (long long)n_looped);
    return TL_STATUS_OK;
}

static tl_status check_loops(const model_config *c)
{
    bool zero_init = c->state_init == STATE_INIT_ZEROS;
    if (c->state_init != STATE_INIT_INPUT && !zero_init)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "config field state_init is %lld, which this version "
                       "does not run (0 the stage's input, 2 zeros)",
                       (long long)c->state_init);
    if (c->inject == INJECT_ADD && c->inject_source != 1)
        return tl_fail(TL_STATUS_UNSUPPORTED,
                       "config field inject_source is %lld, which this "
                       "version does not run (1, the prelude's output)",
                       (long long)c->inject_source);
    if (zero_init && c->inject == INJECT_NONE)
        return tl_fail(TL_STATUS_FORMAT, "state_init 2 (zeros) without an injection would make "
                                         "every output the same");
    loop_limits limits = config_loop_limits(c);
    if (limits.minimum > limits.standard || limits.standard > limits.maximum)
        return tl_fail(TL_STATUS_FORMAT,
                       "loops_min %lld, loops_default %lld and loops_max %lld "
                       "are not in order",
                       (long long)limits.minimum, (long long)limits.standard,
                       (long long)limits.maximum);
    return TL_STATUS_OK;
}

tl_status config_check(const model_config *config)
{
    TL_TRY(check_ranges(config));
    TL_TRY(check_shape(config));
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

loop_limits config_loop_limits(const model_config *c)
{
    bool looped = false;
    for (int64_t s = 0; s < c->n_stages; s++)
        looped |= config_stage_at(c, s).looped != 0;
    if (!looped)
        return (loop_limits){1, 1, 1, 0};
    loop_limits limits = {c->loops_min, c->loops_max, c->loops_default, c->loops_max_trained};
    if (limits.minimum == 0)
        limits.minimum = 1;
    if (limits.maximum == 0)
        limits.maximum = MAX_LOOPS;
    if (limits.standard == 0)
        limits.standard = 8 < limits.maximum ? 8 : limits.maximum;
    return limits;
}
