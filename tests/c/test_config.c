/* model/config.c: every field of the configuration, each value that is refused by its name, and the
 * rules between fields. */
#include "load_check.h"

/* ---- one field at a time, in the standard model ---- */

/* For each field values that are refused, up to the first NAN, which a float field gets too. Fields
 * that take any value at all are not here. */
typedef struct bad_field {
    const char *name;
    double values[4];
} bad_field;

/* clang-format off */
#define SWITCH(name)  {#name, {2, -1, 1e18, NAN}} /* 0 or 1 */
#define UNUSED(name)  {#name, {1, -1, 1e18, NAN}} /* 0 where nothing uses it */
#define STAGE(n)                                                                                   \
    {"stage" #n "_first_layer", {-1, 7, 1e18, NAN}},                                               \
    {"stage" #n "_n_layers", {-1, 65537, 1e18, NAN}}, {"stage" #n "_looped", {-1, 2, 3, NAN}},     \
    {"stage" #n "_end_norm", {-1, 3, 1e18, NAN}}

static const bad_field bad_fields[] = {
    {"vocab_size", {0, -1, 16777217, 1e18}},
    {"hidden_size", {0, -1, 131073, 1e18}},
    {"n_heads", {0, -1, 4097, NAN}},
    {"n_kv_heads", {0, -1, 4097, 1e18}},
    {"head_dim", {0, 3, 258, -2}},
    {"ff_size", {0, -1, 1048577, 1e18}},
    {"max_positions", {-1, 2147483649.0, NAN}},
    {"norm_placement", {4, -1, 1e18, NAN}},
    SWITCH(norm_weightless),
    {"norm_eps", {0, -1e-6, INFINITY, NAN}},
    {"qk_norm", {3, -1, 1e18, NAN}},
    UNUSED(qk_norm_after_rope), UNUSED(qk_norm_weightless), UNUSED(qk_norm_eps),
    SWITCH(q_bias), SWITCH(k_bias), SWITCH(v_bias), SWITCH(o_bias), SWITCH(mlp_bias),
    SWITCH(attn_out_gate), SWITCH(value_embed),
    UNUSED(value_embed_channels),
    SWITCH(mlp_kind),
    {"activation", {4, -1, 1e18, NAN}},
    {"activation_scale", {0, INFINITY, NAN}},
    {"rope_style", {3, -1, 1e18, NAN}},
    {"rope_theta", {0, -1, INFINITY, NAN}},
    {"rotary_dim", {0, 9, 12, -1}},
    {"rope_scaling", {4, -1, 1e18, NAN}},
    UNUSED(rope_factor), UNUSED(rope_low_freq_factor), UNUSED(rope_high_freq_factor),
    UNUSED(rope_original_positions), UNUSED(rope_beta_fast), UNUSED(rope_beta_slow),
    UNUSED(rope_attention_factor),
    {"embed_scale", {0, INFINITY, NAN}},
    SWITCH(tied_head),
    {"logit_scale", {0, INFINITY, NAN}},
    {"logit_softcap", {-1, INFINITY, NAN}},
    SWITCH(mask),
    {"final_norm", {3, -1, 1e18, NAN}},
    {"n_stages", {0, -1, 5, 1e18}},
    STAGE(0), STAGE(1), STAGE(2), STAGE(3),
    {"loops_default", {-1, 1025, NAN}},
    {"loops_min", {-1, 1025, 3, NAN}}, /* 3 is above the default, 2 */
    {"loops_max", {-1, 1025, 1, NAN}},
    {"loops_max_trained", {-1, -1e18, NAN}},
    SWITCH(schedule),
    UNUSED(cycles_high), UNUSED(cycles_low),
    {"restart", {1, -1, NAN}},
    {"damping", {0, 0.5, 2, NAN}},
    {"state_init", {1, 5, -1, NAN}},
    UNUSED(init_std), UNUSED(init_cut), UNUSED(init_scale),
    {"inject", {4, -1, 1e18, NAN}},
    {"inject_source", {0, 2, 3, -1}},
    SWITCH(inject_skip_first), SWITCH(state_out_proj), SWITCH(prelude_norm),
    UNUSED(clp_a), UNUSED(clp_b), UNUSED(clp_shift), UNUSED(loop_norm), UNUSED(feed_normed),
    {"norm_after_last", {3, -1, 1e18, NAN}},
    SWITCH(loop_attention),
    {"loop_window", {-1, -1e18, NAN}},
    UNUSED(gate_input),
    {"exit_mode", {2, 4, -1, NAN}},
    UNUSED(exit_threshold), UNUSED(exit_readout), UNUSED(kv_policy_default),
    UNUSED(lora_rank), UNUSED(lora_alpha), UNUSED(loop_embed),
};
/* clang-format on */

/* Ids and hints: any value does. */
static const char *const free_fields[] = {"bos_id", "pad_id", "kv_policies_allowed"};

/* Values that ask for no other tensors. */
static const setting good_values[] = {
    {"max_positions", 2147483648.0},
    {"activation", ACTIVATION_GELU},
    {"activation", ACTIVATION_GELU_TANH},
    {"activation", ACTIVATION_RELU2},
    {"activation_scale", -2},
    {"rope_style", ROPE_INTERLEAVED},
    {"rope_theta", 1e-3},
    {"rotary_dim", 2},
    {"embed_scale", -1e-3},
    {"logit_scale", -1},
    {"logit_softcap", 1e-3},
    {"mask", 1},
    {"loops_default", 0},
    {"loops_default", 1024},
    {"loops_min", 2},
    {"loops_max", 2},
    {"loops_max_trained", 1e18},
    {"state_init", STATE_INIT_INPUT},
    {"inject_skip_first", 1},
    {"norm_after_last", AFTER_LAST_FINAL_NORM},
    {"loop_window", 1},
    {"loop_window", 1e18},
};

static tl_status load_with_field(tiny_file *file, const char *name, double value)
{
    model_config config = file->config;
    set_field(&config, name, value);
    size_t at = 8 * field_number(name);
    return load_with(file, 64 + at, (char *)&config + at, 8);
}

TEST(every_field_has_its_rule)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++) {
        int n = 0;
        for (size_t k = 0; k < sizeof bad_fields / sizeof *bad_fields; k++)
            n += strcmp(bad_fields[k].name, config_fields[i].name) == 0;
        for (size_t k = 0; k < sizeof free_fields / sizeof *free_fields; k++)
            n += strcmp(free_fields[k], config_fields[i].name) == 0;
        test_check(n == 1, __FILE__, __LINE__, "%s is tested %d times", config_fields[i].name, n);
    }
}

/* Refused, with the field's name as a word of its own. */
static void check_bad_value(tiny_file *file, const char *name, double value)
{
    /* messages about stages name number and field apart */
    const char *named = strncmp(name, "stage", 5) == 0 && name[6] == '_' ? name + 7 : name;
    char word[64];
    snprintf(word, sizeof word, "%s ", named);
    tl_status status = load_with_field(file, name, value);
    if (test_check(refused(status), __FILE__, __LINE__, "%s = %g loads", name, value))
        CHECK_STR_HAS(tl_last_error(), word);
}

TEST(values_that_are_refused_by_name)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < sizeof bad_fields / sizeof *bad_fields; i++) {
        const bad_field *bad = &bad_fields[i];
        bool is_float = config_fields[field_number(bad->name)].is_float, last = false;
        for (size_t v = 0; v < 4 && !last; v++) {
            last = isnan(bad->values[v]);
            if (!last || is_float)
                check_bad_value(file, bad->name, bad->values[v]);
        }
    }
    tiny_free(file);
}

TEST(values_that_load)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < sizeof good_values / sizeof *good_values; i++)
        CHECK_OK(load_with_field(file, good_values[i].name, good_values[i].value));
    for (size_t i = 0; i < sizeof free_fields / sizeof *free_fields; i++) {
        CHECK_OK(load_with_field(file, free_fields[i], -1));
        CHECK_OK(load_with_field(file, free_fields[i], 1e18));
    }
    tiny_free(file);
}

/* ---- several fields, in a model of each wiring ---- */

enum { MAX_SETTINGS = 12, PLAIN = 4, UNINJECTED = 3 };

typedef struct combination {
    int spec;
    setting settings[MAX_SETTINGS];
    const char *named; /* in the message; NULL: it loads */
} combination;

/* clang-format off */
#define LINEAR {"rope_scaling", 1}, {"rope_factor", 2}
#define LLAMA3 {"rope_scaling", 2}, {"rope_factor", 2}, {"rope_original_positions", 64},           \
    {"rope_low_freq_factor", 1}, {"rope_high_freq_factor", 4}
#define YARN {"rope_scaling", 3}, {"rope_factor", 2}, {"rope_original_positions", 64},             \
    {"rope_beta_fast", 32}, {"rope_beta_slow", 1}, {"rope_attention_factor", 1}
#define NO_ROPE {"rope_style", ROPE_NONE}, {"rope_theta", 0}, {"rotary_dim", 0}
#define QK_NORM(kind) {"qk_norm", kind}, {"qk_norm_eps", 1e-6}
#define NOISE {"state_init", 3}, {"init_std", 1}, {"init_cut", 3}, {"init_scale", 1}
#define NO_INJECT {"state_init", 0}, {"inject", 0}, {"inject_source", 0}
#define NESTED_MESSAGE "a nested schedule with another injection"

static const combination combinations[] = {
    /* shapes */
    {0, {{"n_heads", 3}, {"n_kv_heads", 2}}, "n_heads is 3"},
    {0, {{"n_heads", 1}, {"n_kv_heads", 2}}, "n_heads is 1"},
    {0, {{"head_dim", 9}, {"rotary_dim", 8}}, "head_dim is 9"},
    {0, {{"head_dim", 256}, {"rotary_dim", 256}}, NULL},
    {0, {{"vocab_size", 1}, {"hidden_size", 1}, {"ff_size", 1}}, NULL},
    /* norms */
    {0, {{"norm_placement", 1}}, NULL},
    {0, {{"norm_placement", 2}}, NULL},
    {0, {{"norm_placement", 3}, {"norm_weightless", 1}}, NULL},
    {0, {{"final_norm", 0}}, NULL},
    {0, {{"final_norm", 2}, {"norm_after_last", 2}}, NULL},
    {0, {{"final_norm", 0}, {"norm_after_last", 1}}, "norm_after_last is 1"},
    {0, {{"final_norm", 2}, {"norm_after_last", 1}}, "norm_after_last is 1"},
    {0, {{"stage0_end_norm", 2}, {"stage1_end_norm", 0}, {"stage2_end_norm", 1}}, NULL},
    {0, {QK_NORM(1)}, NULL},
    {0, {QK_NORM(1), {"qk_norm_after_rope", 1}, {"qk_norm_weightless", 1}}, NULL},
    {0, {QK_NORM(2), {"qk_norm_weightless", 1}}, NULL},
    {0, {QK_NORM(2), {"qk_norm_after_rope", 1}}, "qk_norm 2 (full width)"},
    {0, {{"qk_norm", 1}}, "qk_norm_eps is 0"},
    {0, {{"qk_norm", 2}, {"qk_norm_eps", -1}}, "qk_norm_eps is -1"},
    /* attention */
    {0, {{"q_bias", 1}, {"k_bias", 1}, {"v_bias", 1}, {"o_bias", 1}, {"mlp_bias", 1}}, NULL},
    {0, {{"k_bias", 1}, {"mlp_kind", 1}, {"mlp_bias", 1}}, NULL},
    {0, {{"attn_out_gate", 1}}, NULL},
    {0, {{"value_embed", 1}, {"value_embed_channels", 20}}, NULL},
    {0, {{"value_embed", 1}}, "value_embed_channels is 0"},
    {0, {{"value_embed", 1}, {"value_embed_channels", 21}}, "value_embed_channels is 21"},
    /* rotation */
    {0, {NO_ROPE}, NULL},
    {0, {NO_ROPE, QK_NORM(1), {"qk_norm_after_rope", 1}}, NULL},
    {0, {{"rope_style", 2}, {"rotary_dim", 0}}, "rope_theta is 10000"},
    {0, {{"rope_style", 2}, {"rope_theta", 0}}, "rotary_dim is 10"},
    {0, {NO_ROPE, LINEAR}, "rope_scaling is 1"},
    {0, {LINEAR}, NULL},
    {0, {LINEAR, {"rope_factor", 0}}, "rope_factor is 0"},
    {0, {LINEAR, {"rope_factor", -1}}, "rope_factor is -1"},
    {0, {LINEAR, {"rope_original_positions", 64}}, "rope_original_positions is 64"},
    {0, {LINEAR, {"rope_low_freq_factor", 1}}, "rope_low_freq_factor is 1"},
    {0, {LINEAR, {"rope_beta_fast", 32}}, "rope_beta_fast is 32"},
    {0, {LLAMA3}, NULL},
    {0, {LLAMA3, {"rope_factor", 0}}, "rope_factor is 0"},
    {0, {LLAMA3, {"rope_factor", INFINITY}}, "rope_factor is inf"},
    {0, {LLAMA3, {"rope_original_positions", 0}}, "rope_original_positions is 0"},
    {0, {LLAMA3, {"rope_original_positions", 2147483649.0}}, "rope_original_positions is 21"},
    {0, {LLAMA3, {"rope_low_freq_factor", 0}}, "rope_low_freq_factor is 0"},
    {0, {LLAMA3, {"rope_high_freq_factor", 0}}, "rope_high_freq_factor is 0"},
    {0, {LLAMA3, {"rope_high_freq_factor", 1}}, "rope_high_freq_factor is 1"},
    {0, {LLAMA3, {"rope_high_freq_factor", INFINITY}}, "rope_high_freq_factor is inf"},
    {0, {LLAMA3, {"rope_beta_slow", 1}}, "rope_beta_slow is 1"},
    {0, {LLAMA3, {"rope_attention_factor", 1}}, "rope_attention_factor is 1"},
    {0, {YARN}, NULL},
    {0, {YARN, {"rope_factor", 0}}, "rope_factor is 0"},
    {0, {YARN, {"rope_original_positions", -1}}, "rope_original_positions is -1"},
    {0, {YARN, {"rope_beta_fast", 0}}, "rope_beta_fast is 0"},
    {0, {YARN, {"rope_beta_slow", 0}}, "rope_beta_slow is 0"},
    {0, {YARN, {"rope_attention_factor", 0}}, "rope_attention_factor is 0"},
    {0, {YARN, {"rope_beta_slow", 32}}, "rope_beta_fast above rope_beta_slow"},
    {0, {YARN, {"rope_theta", 1}}, "rope_theta above 1"},
    {0, {YARN, {"rope_high_freq_factor", 4}}, "rope_high_freq_factor is 4"},
    /* stages */
    {0, {{"n_stages", 2}}, "stage 2"},
    {0, {{"n_stages", 4}}, "stage 3"},
    {0, {{"n_stages", 4}, {"stage3_first_layer", 4}, {"stage3_n_layers", 1}}, NULL},
    {0, {{"n_stages", 4}, {"stage3_first_layer", 5}, {"stage3_n_layers", 1}}, "stage 3"},
    {0, {{"stage1_n_layers", 3}}, "stage 2"},
    {0, {{"stage1_looped", 0}}, "state_init is 2"},
    {0, {{"stage0_looped", 1}}, "more than one looped stage"},
    /* what only a looped stage uses */
    {PLAIN, {{"loops_default", 0}}, NULL},
    {PLAIN, {{"state_init", 2}}, "state_init is 2"},
    {PLAIN, {{"inject", 1}}, "inject is 1"},
    {PLAIN, {{"inject_source", 1}}, "inject_source is 1"},
    {PLAIN, {{"inject_skip_first", 1}}, "inject_skip_first is 1"},
    {PLAIN, {{"prelude_norm", 1}}, "prelude_norm is 1"},
    {PLAIN, {{"state_out_proj", 1}}, "state_out_proj is 1"},
    {PLAIN, {{"norm_after_last", 2}}, "norm_after_last is 2"},
    {PLAIN, {{"loop_attention", 1}}, "loop_attention is 1"},
    {PLAIN, {{"loop_window", 7}}, "loop_window is 7; it must be 0 where nothing uses it"},
    {PLAIN, {{"exit_mode", 1}, {"exit_threshold", 1}}, "exit_mode is 1"},
    {PLAIN, {{"exit_threshold", 1}}, "exit_threshold is 1; it must be 0 where nothing uses it"},
    {PLAIN, {{"schedule", 1}}, "a nested schedule has two stages"},
    /* the core's begin */
    {0, {{"state_init", 4}}, NULL},
    {0, {NOISE}, NULL},
    {0, {NOISE, {"init_scale", 0}}, NULL},
    {0, {NOISE, {"init_scale", -1}}, "init_scale is -1"},
    {0, {NOISE, {"init_std", 0}}, "init_std is 0"},
    {0, {NOISE, {"init_cut", 0}}, "init_cut is 0"},
    {0, {NOISE, {"init_cut", -1}}, "init_cut is -1"},
    {0, {{"state_init", 1}}, "state_init 1 (prelude)"},
    {UNINJECTED, {{"state_init", 2}}, "state_init is 2 without an injection"},
    {UNINJECTED, {{"state_init", 4}}, "state_init is 4 without an injection"},
    {UNINJECTED, {NOISE}, "state_init is 3 without an injection"},
    {UNINJECTED, {{"inject_source", 1}}, "inject_source is 1"},
    {UNINJECTED, {{"inject_skip_first", 1}}, "inject_skip_first is 1"},
    {UNINJECTED, {{"prelude_norm", 1}}, "prelude_norm is 1"},
    {0, {NO_INJECT}, NULL},
    {0, {{"inject", 2}}, NULL},
    {0, {{"inject", 3}, {"inject_skip_first", 1}, {"prelude_norm", 1}}, NULL},
    {0, {{"inject", 3}, {"inject_source", 2}}, "inject_source other than 1"},
    /* and its end */
    {0, {{"state_out_proj", 1}, {"norm_after_last", 1}}, NULL},
    {0, {{"loop_attention", 1}, {"loop_window", 3}}, NULL},
    {0, {{"exit_mode", 1}}, "exit_threshold is 0"},
    {0, {{"exit_mode", 1}, {"exit_threshold", -1}}, "exit_threshold is -1"},
    {0, {{"exit_mode", 1}, {"exit_threshold", 2}}, NULL},
    /* loops */
    {0, {{"loops_min", 3}, {"loops_default", 2}}, "loops_min 3"},
    {0, {{"loops_min", 9}, {"loops_default", 0}}, "loops_min 9"}, /* not stated: 8 */
    {0, {{"loops_max", 5}, {"loops_default", 0}}, NULL},
    {0, {{"loops_max", 5}, {"loops_default", 6}}, "loops_max 5"},
    {0, {{"cycles_high", 1}, {"cycles_low", 1}}, "cycles_high is 1"},
    /* nested schedules */
    {TINY_HRM, {{"state_init", 2}}, NULL},
    {TINY_HRM, {{"mask", 0}, {"stage1_end_norm", 1}, {"final_norm", 2}}, NULL},
    {TINY_HRM, {{"cycles_high", 1}, {"cycles_low", 1024}}, NULL},
    {TINY_HRM, {{"cycles_high", 0}}, "cycles_high is 0"},
    {TINY_HRM, {{"cycles_low", 0}}, "cycles_low is 0"},
    {TINY_HRM, {{"cycles_high", 1025}}, "cycles_high is 1025"},
    {TINY_HRM, {{"cycles_low", 1025}}, "cycles_low is 1025"},
    {TINY_HRM, {{"loops_max", 1}}, "above loops_max 1,"},
    {TINY_HRM, {{"cycles_low", 1024}, {"cycles_high", 1024}}, "more than 65536 runs"},
    {TINY_HRM, {{"loops_default", 7}}, "loops_default is 7; it must be 0 or 2"},
    {TINY_HUGINN, {{"init_cut", 0.09}}, "init_cut is 0.09"},
    {TINY_HUGINN, {{"norm_eps", 1e-60}}, "norm_eps"},
    {TINY_HUGINN, {{"embed_scale", 1e-60}}, "embed_scale"},
    {TINY_OURO, {{"exit_threshold", 1e-50}}, "exit_threshold"},
    {TINY_OURO, {{"activation_scale", 1e300}}, "activation_scale"},
    {TINY_HRM, {{"loops_min", 3}}, "loops_min 3"},
    {TINY_HRM, {{"stage0_looped", 0}}, "1 of them looped"},
    {TINY_HRM, {{"n_stages", 3}, {"stage2_first_layer", 2}, {"stage2_n_layers", 1}}, "has 3"},
    {TINY_HRM, {{"n_stages", 1}, {"stage1_first_layer", 0}, {"stage1_n_layers", 0},
                {"stage1_looped", 0}, {"stage1_end_norm", 0}}, "has 1"},
    {TINY_HRM, {{"state_init", 0}}, "whose low state starts"},
    {TINY_HRM, {NOISE}, "whose low state starts"},
    {TINY_HRM, {{"inject", 0}}, NESTED_MESSAGE},
    {TINY_HRM, {{"inject", 2}}, NESTED_MESSAGE},
    {TINY_HRM, {{"inject_source", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"inject_skip_first", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"prelude_norm", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"state_out_proj", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"norm_after_last", 2}}, NESTED_MESSAGE},
    {TINY_HRM, {{"loop_attention", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"loop_window", 1}}, NESTED_MESSAGE},
    {TINY_HRM, {{"exit_mode", 1}, {"exit_threshold", 1}}, NESTED_MESSAGE},
};
/* clang-format on */

TEST(combinations_of_fields)
{
    for (size_t i = 0; i < sizeof combinations / sizeof *combinations; i++) {
        const combination *c = &combinations[i];
        tiny_file *file = make_with(&tiny_specs[c->spec], c->settings);
        tl_status status = load_status(file, NULL);
        if (c->named == NULL)
            test_check(status == TL_STATUS_OK, __FILE__, __LINE__, "combination %zu: %s", i,
                       tl_last_error());
        else if (test_check(refused(status), __FILE__, __LINE__, "combination %zu loads (%s)", i,
                            c->named))
            CHECK_STR_HAS(tl_last_error(), c->named);
        tiny_free(file);
    }
}

/* What one file asks of two versions: not sound, or sound but not run here. */
TEST(unsound_and_unsupported_are_told_apart)
{
    static const struct {
        combination what;
        tl_status status;
    } cases[] = {
        {{0, {{"vocab_size", 0}}, NULL}, TL_STATUS_FORMAT},
        {{0, {{"norm_placement", 9}}, NULL}, TL_STATUS_UNSUPPORTED},
        {{0, {{"restart", 1}}, NULL}, TL_STATUS_UNSUPPORTED},
        {{0, {{"damping", 0.5}}, NULL}, TL_STATUS_UNSUPPORTED},
        {{0, {{"damping", NAN}}, NULL}, TL_STATUS_FORMAT},
        {{0, {{"init_std", 1}}, NULL}, TL_STATUS_FORMAT},
        {{0, {{"stage0_looped", 1}}, NULL}, TL_STATUS_UNSUPPORTED},
        {{UNINJECTED, {{"state_init", 2}}, NULL}, TL_STATUS_FORMAT},
        {{TINY_HRM, {{"exit_mode", 1}, {"exit_threshold", 1}}, NULL}, TL_STATUS_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tiny_file *file = make_with(&tiny_specs[cases[i].what.spec], cases[i].what.settings);
        CHECK_STATUS(load_status(file, NULL), cases[i].status);
        tiny_free(file);
    }
}
