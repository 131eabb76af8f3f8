/* model/config.c: every field of the configuration, and each value that is refused by its name. */
#include "load_check.h"

typedef struct field {
    const char *name;
    bool is_float;
} field;

static const field fields[] = {
#define FIELD_I(name) {#name, false},
#define FIELD_F(name) {#name, true},
    CONFIG_FIELDS(FIELD_I, FIELD_F)};

/* For each field values that are refused, up to the first NAN, which a float field gets too. Fields
 * that take any value at all are not here. */
typedef struct bad_field {
    const char *name;
    double values[4];
} bad_field;

#define STAGE(n)                                                                                   \
    {"stage" #n "_first_layer", {-1, 7, 1e18, NAN}},                                               \
        {"stage" #n "_n_layers", {-1, 65537, 1e18, NAN}}, {"stage" #n "_looped", {-1, 2, 3, NAN}}, \
    {                                                                                              \
        "stage" #n "_end_norm",                                                                    \
        {                                                                                          \
            -1, 2, 3, NAN                                                                          \
        }                                                                                          \
    }

static const bad_field bad_fields[] = {
    {"vocab_size", {0, -1, 16777217, 1e18}},
    {"hidden_size", {0, -1, 131073, 1e18}},
    {"n_heads", {0, -1, 4097, NAN}},
    {"n_kv_heads", {0, -1, 4097, 1e18}},
    {"head_dim", {0, 3, 258, -2}},
    {"ff_size", {0, -1, 1048577, 1e18}},
    {"max_positions", {-1, 2147483649.0, NAN}},
    {"norm_placement", {1, 2, 3, -1}},
    {"norm_weightless", {1, -1, NAN}},
    {"norm_eps", {0, -1e-6, INFINITY, NAN}},
    {"qk_norm", {1, 2, -1, NAN}},
    {"qk_norm_after_rope", {1, -1, NAN}},
    {"qk_norm_weightless", {1, -1, NAN}},
    {"qk_norm_eps", {1e-6, -1, INFINITY, NAN}},
    {"q_bias", {1, -1, NAN}},
    {"k_bias", {1, -1, NAN}},
    {"v_bias", {1, -1, NAN}},
    {"o_bias", {1, -1, NAN}},
    {"mlp_bias", {1, -1, NAN}},
    {"attn_out_gate", {1, -1, NAN}},
    {"value_embed", {1, -1, NAN}},
    {"value_embed_channels", {1, -1, NAN}},
    {"mlp_kind", {1, -1, NAN}},
    {"activation", {1, 2, 3, -1}},
    {"activation_scale", {0, 2, -1, INFINITY}},
    {"rope_style", {1, 2, -1, NAN}},
    {"rope_theta", {0, -1, INFINITY, NAN}},
    {"rotary_dim", {0, 8, 12, -1}},
    {"rope_scaling", {1, 3, -1, 4}},
    {"rope_beta_fast", {1, NAN}},
    {"rope_beta_slow", {1, NAN}},
    {"rope_attention_factor", {1, NAN}},
    {"embed_scale", {0, 2, NAN}},
    {"tied_head", {2, -1, NAN}},
    {"logit_scale", {0, 2, NAN}},
    {"logit_softcap", {30, -1, NAN}},
    {"mask", {1, -1, NAN}},
    {"final_norm", {0, 2, -1, NAN}},
    {"n_stages", {0, -1, 5, 1e18}},
    STAGE(0),
    STAGE(1),
    STAGE(2),
    STAGE(3),
    {"loops_default", {-1, 1025, NAN}},
    {"loops_min", {-1, 1025, 3, NAN}}, /* 3 is above the default, 2 */
    {"loops_max", {-1, 1025, 1, NAN}},
    {"loops_max_trained", {-1, -1e18, NAN}},
    {"schedule", {1, -1, NAN}},
    {"cycles_high", {1, -1, NAN}},
    {"cycles_low", {1, -1, NAN}},
    {"restart", {1, -1, NAN}},
    {"damping", {0, 0.5, 2, NAN}},
    {"state_init", {1, 3, 4, -1}},
    {"init_std", {1, NAN}},
    {"init_cut", {1, NAN}},
    {"init_scale", {1, NAN}},
    {"inject", {2, 3, 4, -1}},
    {"inject_source", {0, 2, -1, NAN}},
    {"inject_skip_first", {1, -1, NAN}},
    {"state_out_proj", {1, -1, NAN}},
    {"prelude_norm", {1, -1, NAN}},
    {"clp_a", {1, NAN}},
    {"clp_b", {1, NAN}},
    {"clp_shift", {1, NAN}},
    {"loop_norm", {1, -1, NAN}},
    {"feed_normed", {1, -1, NAN}},
    {"norm_after_last", {1, 2, -1, NAN}},
    {"loop_attention", {1, -1, NAN}},
    {"loop_window", {1, -1, NAN}},
    {"gate_input", {1, -1, NAN}},
    {"exit_mode", {1, 2, 4, -1}},
    {"exit_threshold", {1, NAN}},
    {"exit_readout", {1, -1, NAN}},
    {"kv_policy_default", {1, -1, NAN}},
    {"lora_rank", {1, -1, NAN}},
    {"lora_alpha", {1, NAN}},
    {"loop_embed", {1, -1, NAN}},
};

/* Of no meaning for the model at hand, so any value does: ids and hints, and the scaling of rotary
 * frequencies while rope_scaling is 0. */
static const char *const free_fields[] = {"bos_id",
                                          "pad_id",
                                          "rope_factor",
                                          "rope_low_freq_factor",
                                          "rope_high_freq_factor",
                                          "rope_original_positions",
                                          "kv_policies_allowed"};

static size_t field_offset(const char *name, bool *is_float)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++) {
        if (strcmp(fields[i].name, name) == 0) {
            *is_float = fields[i].is_float;
            return 64 + 8 * i;
        }
    }
    fprintf(stderr, "no field is named %s\n", name);
    exit(2);
}

static tl_status load_with_field(tiny_file *file, const char *name, double value)
{
    bool is_float;
    size_t at = field_offset(name, &is_float);
    int64_t whole = is_float ? 0 : (int64_t)value;
    return is_float ? load_with(file, at, &value, 8) : load_with(file, at, &whole, 8);
}

TEST(every_field_has_its_rule)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++) {
        int n = 0;
        for (size_t k = 0; k < sizeof bad_fields / sizeof *bad_fields; k++)
            n += strcmp(bad_fields[k].name, fields[i].name) == 0;
        for (size_t k = 0; k < sizeof free_fields / sizeof *free_fields; k++)
            n += strcmp(free_fields[k], fields[i].name) == 0;
        test_check(n == 1, __FILE__, __LINE__, "%s is tested %d times", fields[i].name, n);
    }
}

TEST(unsupported_fields_are_refused_by_name)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < sizeof bad_fields / sizeof *bad_fields; i++) {
        const bad_field *bad = &bad_fields[i];
        bool is_float, last = false;
        field_offset(bad->name, &is_float);
        /* messages about stages name number and field apart */
        const char *named =
            strncmp(bad->name, "stage0", 5) == 0 && bad->name[6] == '_' ? bad->name + 7 : bad->name;
        for (size_t v = 0; v < 4 && !last; v++) {
            last = isnan(bad->values[v]);
            if (last && !is_float)
                break;
            tl_status status = load_with_field(file, bad->name, bad->values[v]);
            if (test_check(refused(status), __FILE__, __LINE__, "%s = %g loads", bad->name,
                           bad->values[v]))
                CHECK_STR_HAS(tl_last_error(), named);
        }
    }
    for (size_t i = 0; i < sizeof free_fields / sizeof *free_fields; i++) {
        CHECK_OK(load_with_field(file, free_fields[i], -1));
        CHECK_OK(load_with_field(file, free_fields[i], 1e18));
    }
    CHECK_OK(load_with_field(file, "loops_max_trained", 1e18));
    CHECK_OK(load_with_field(file, "max_positions", 2147483648.0));
    tiny_free(file);
}

TEST(fields_that_contradict_each_other)
{
    tiny_spec spec = TINY_SPEC;
    spec.n_heads = 3;
    spec.n_kv_heads = 2;
    tiny_file *file = tiny_make(&spec);
    CHECK_REFUSED(load_status(file, NULL), "n_heads");
    tiny_free(file);

    tiny_spec plain = tiny_specs[4];
    file = tiny_make(&plain);
    CHECK_REFUSED(load_with_field(file, "state_init", 2), "state_init");
    CHECK_REFUSED(load_with_field(file, "inject", 1), "inject");
    tiny_free(file);

    spec = (tiny_spec)TINY_SPEC;
    spec.inject = false;
    file = tiny_make(&spec);
    CHECK_REFUSED(load_with_field(file, "state_init", 2), "state_init");
    CHECK_REFUSED(load_with_field(file, "stage0_looped", 1), "looped");
    CHECK(refused(load_with_field(file, "n_stages", 2)));
    CHECK(refused(load_with_field(file, "n_stages", 4)));
    tiny_free(file);
}

TEST(llama3_scaling_needs_its_numbers)
{
    static const struct {
        const char *name;
        double values[3];
    } wrong[] = {{"rope_factor", {0, -1, NAN}},
                 {"rope_low_freq_factor", {0, -1, NAN}},
                 {"rope_high_freq_factor", {1, 0, NAN}}, /* not above low */
                 {"rope_original_positions", {0, -1, -1e18}}};
    tiny_spec spec = TINY_SPEC;
    spec.llama3 = true;
    tiny_file *file = tiny_make(&spec);
    CHECK_OK(load_status(file, NULL));
    for (size_t i = 0; i < 4; i++) {
        for (size_t v = 0; v < 3; v++)
            CHECK_REFUSED(load_with_field(file, wrong[i].name, wrong[i].values[v]), wrong[i].name);
    }
    CHECK(refused(load_with_field(file, "rope_factor", INFINITY)));
    CHECK(refused(load_with_field(file, "rope_high_freq_factor", INFINITY)));
    tiny_free(file);
}
