/* Fields that are data: each changes the numbers, and whatever it says, the law holds. Then what
 * amounts to something simpler. */
#include "backend/cpu/cpu.h"
#include "wiring.h"

__attribute__((constructor)) static void poison(void)
{
    setenv("TINYLOOP_DEBUG_POISON_KV", "1", 1);
}

/* ---- every field ---- */

enum { UNINJECTED = 3 };

/* A model, and what is changed in it. */
typedef struct variant {
    int spec;
    setting base[8], change[8];
} variant;

/* clang-format off */
#define QK_NORM(kind) {"qk_norm", kind}, {"qk_norm_eps", 1e-6}
#define LINEAR {"rope_scaling", 1}, {"rope_factor", 2}
#define LLAMA3 {"rope_scaling", 2}, {"rope_factor", 2}, {"rope_original_positions", 64},           \
    {"rope_low_freq_factor", 1}, {"rope_high_freq_factor", 4}
#define YARN {"rope_scaling", 3}, {"rope_factor", 2}, {"rope_original_positions", 64},             \
    {"rope_beta_fast", 8}, {"rope_beta_slow", 1}, {"rope_attention_factor", 1}
#define NOISE {"state_init", 3}, {"init_std", 1}, {"init_cut", 3}, {"init_scale", 1}
#define VALUES {"value_embed", 1}, {"value_embed_channels", 5}
#define GATED {"loop_attention", 1}
#define EXIT(threshold) {"exit_mode", 1}, {"exit_threshold", threshold}

static const variant variants[] = {
    /* layers */
    {0, {}, {{"norm_placement", 1}}},
    {0, {}, {{"norm_placement", 2}}},
    {0, {}, {{"norm_placement", 3}}},
    {0, {}, {{"norm_weightless", 1}}},
    {0, {{"norm_placement", 2}}, {{"norm_weightless", 1}}},
    {0, {}, {{"norm_eps", 0.1}}},
    {0, {}, {QK_NORM(1)}},
    {0, {}, {QK_NORM(2)}},
    {0, {QK_NORM(1)}, {{"qk_norm_after_rope", 1}}},
    {0, {QK_NORM(1)}, {{"qk_norm_weightless", 1}}},
    {0, {QK_NORM(2)}, {{"qk_norm_weightless", 1}}},
    {0, {QK_NORM(1)}, {{"qk_norm_eps", 0.1}}},
    {0, {}, {{"q_bias", 1}}},
    {0, {}, {{"k_bias", 1}}},
    {0, {}, {{"v_bias", 1}}},
    {0, {}, {{"o_bias", 1}}},
    {0, {{"norm_placement", 1}}, {{"o_bias", 1}}},
    {0, {}, {{"mlp_bias", 1}}},
    {0, {{"mlp_kind", 1}}, {{"mlp_bias", 1}}},
    {0, {}, {{"attn_out_gate", 1}}},
    {0, {}, {VALUES}},
    {0, {VALUES}, {{"value_embed_channels", 6}}},
    {0, {VALUES}, {{"attn_out_gate", 1}}},
    {0, {}, {{"mlp_kind", 1}}},
    {0, {}, {{"activation", 1}}},
    {0, {}, {{"activation", 3}}},
    {0, {{"activation", 1}}, {{"activation", 2}}},
    {0, {{"mlp_kind", 1}}, {{"activation", 3}}},
    {0, {}, {{"activation_scale", -2}}},
    /* rotation */
    {0, {}, {{"rope_style", 1}}},
    {0, {}, {{"rope_style", 2}, {"rope_theta", 0}, {"rotary_dim", 0}}},
    {0, {}, {{"rope_theta", 100}}},
    {0, {}, {{"rotary_dim", 4}}},
    {0, {{"rope_style", 1}}, {{"rotary_dim", 4}}},
    {0, {}, {LINEAR}},
    {0, {LINEAR}, {{"rope_factor", 3}}},
    {0, {}, {LLAMA3}},
    {0, {LLAMA3}, {{"rope_factor", 3}}},
    {0, {LLAMA3}, {{"rope_original_positions", 32}}},
    {0, {LLAMA3}, {{"rope_low_freq_factor", 1.5}}},
    {0, {LLAMA3}, {{"rope_high_freq_factor", 8}}},
    {0, {}, {YARN}},
    {0, {YARN}, {{"rope_factor", 3}}},
    {0, {YARN}, {{"rope_original_positions", 16}}},
    {0, {YARN}, {{"rope_beta_fast", 1.5}}},
    {0, {YARN}, {{"rope_beta_slow", 0.05}}},
    {0, {YARN}, {{"rope_attention_factor", 1.2}}},
    /* in and out */
    {0, {}, {{"embed_scale", 3}}},
    {0, {}, {{"tied_head", 0}}},
    {0, {}, {{"logit_scale", -0.5}}},
    {0, {}, {{"logit_softcap", 2}}},
    {0, {{"logit_softcap", 2}}, {{"logit_scale", 3}}},
    {0, {}, {{"final_norm", 0}}},
    {0, {}, {{"final_norm", 2}}},
    /* stages */
    {0, {}, {{"stage0_end_norm", 1}}},
    {0, {}, {{"stage0_end_norm", 2}}},
    {0, {}, {{"stage1_end_norm", 0}}},
    {0, {}, {{"stage1_end_norm", 2}}},
    {0, {}, {{"stage2_end_norm", 1}}},
    {0, {}, {{"loops_default", 3}}},
    /* the core */
    {0, {}, {{"state_init", 0}}},
    {0, {}, {{"state_init", 4}}},
    {0, {}, {NOISE}},
    {0, {NOISE}, {{"init_std", 2}}},
    {0, {NOISE}, {{"init_cut", 0.5}}},
    {0, {NOISE}, {{"init_scale", 0.5}}},
    {0, {}, {{"state_init", 0}, {"inject", 0}, {"inject_source", 0}}},
    {0, {}, {{"inject", 2}}},
    {0, {}, {{"inject", 3}}},
    {0, {{"inject", 2}, NOISE}, {{"inject_skip_first", 1}}},
    {0, {{"state_init", 4}}, {{"inject_skip_first", 1}}},
    {0, {}, {{"prelude_norm", 1}}},
    {0, {{"inject", 2}}, {{"prelude_norm", 1}}},
    {0, {{"inject", 3}}, {{"prelude_norm", 1}}},
    {0, {}, {{"state_out_proj", 1}}},
    {0, {}, {{"norm_after_last", 1}}},
    {0, {}, {{"norm_after_last", 2}}},
    {0, {{"state_out_proj", 1}}, {{"norm_after_last", 2}}},
    {0, {}, {GATED}},
    {0, {}, {{"loop_window", 5}}},
    {0, {GATED}, {{"loop_window", 5}}},
    {0, {GATED, {"loop_window", 5}}, {{"loop_window", 6}}},
    {0, {}, {EXIT(0.7)}},
    {0, {EXIT(0.7)}, {{"exit_threshold", 0.8}}},
    /* where the core is all there is */
    {UNINJECTED, {}, {GATED, {"loop_window", 33}}},
    {TINY_OURO, {}, {{"exit_threshold", 0.8}}},
    {TINY_OURO, {}, {{"stage0_end_norm", 2}}},
    {TINY_HUGINN, {}, {{"norm_placement", 1}}},
    {TINY_HUGINN, {}, {{"inject", 3}}},
    {TINY_OLMO, {}, {{"inject_skip_first", 0}}},
    {TINY_PARCAE, {}, {{"qk_norm_after_rope", 0}}},
    {TINY_PARCAE, {}, {{"logit_softcap", 0}}},
    {TINY_IQUEST, {}, {{"loop_window", 0}}},
    {TINY_IQUEST, {}, {{"loop_attention", 0}}},
    /* nested */
    {TINY_HRM, {}, {{"cycles_high", 1}}},
    {TINY_HRM, {}, {{"cycles_low", 1}}},
    {TINY_HRM, {}, {{"state_init", 2}}},
    {TINY_HRM, {}, {{"stage0_end_norm", 0}}},
    {TINY_HRM, {}, {{"stage1_end_norm", 1}}},
    {TINY_HRM, {}, {{"embed_scale", 50}}},
    {TINY_HRM, {}, {{"attn_out_gate", 0}}},
    {TINY_HRM, {}, {VALUES}},
};
/* clang-format on */

static tiny_file *make_variant(const variant *v, bool changed)
{
    model_config config = config_with(&tiny_specs[v->spec], v->base);
    for (size_t i = 0; changed && v->change[i].name != NULL; i++)
        set_field(&config, v->change[i].name, v->change[i].value);
    tiny_file *file = tiny_plan_for(&tiny_specs[v->spec], &config);
    tiny_fill(file);
    tiny_seal(file);
    return file;
}

static const struct {
    const char *isa;
    int threads, chunk;
} ways[] = {{"portable", 1, 0}, {"portable", 3, 7}, {"avx2", 1, 1}, {"avx512", 2, 0}};

/* The logits of the variant's changed model, which are the same in every way; the caller frees. */
static float *lawful_logits(const variant *v)
{
    float *first = NULL;
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const cpu_kernels *kernels;
        setenv("TINYLOOP_CPU_ISA", ways[i].isa, 1);
        if (cpu_kernels_choose(&kernels) != TL_STATUS_OK)
            continue; /* not on this machine */
        tl_model_options options = tiny_options(ways[i].threads);
        options.prefill_chunk = ways[i].chunk;
        tl_model *model = load_file(make_variant(v, true), &options);
        float *logits = logits_of(model);
        if (first == NULL)
            first = logits;
        else
            CHECK_MEM_EQ(logits, first, N * (size_t)model->config.vocab_size * sizeof *logits);
        if (first != logits)
            free(logits);
        tl_model_release(model);
    }
    unsetenv("TINYLOOP_CPU_ISA");
    return first;
}

TEST(each_field_changes_the_numbers_and_keeps_the_law)
{
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        const variant *v = &variants[i];
        int failures = atomic_load(&test_failures);
        tl_model_options options = tiny_options(1);
        tl_model *model = load_file(make_variant(v, false), &options);
        size_t n = N * (size_t)model->config.vocab_size;
        float *base = logits_of(model), *changed = lawful_logits(v);
        bool differ = !same_floats(base, changed, n), finite = true;
        for (size_t k = 0; k < n; k++)
            finite = finite && isfinite(changed[k]);
        CHECK(differ && finite);
        if (atomic_load(&test_failures) > failures)
            fprintf(stderr, "in variant %zu: %s = %g in model %d\n", i, v->change[0].name,
                    v->change[0].value, v->spec);
        free(base);
        free(changed);
        tl_model_release(model);
    }
}

/* ---- runs ---- */

TEST(every_run_has_a_plane_of_its_own)
{
    for (int s = 0; s < TINY_N_SPECS; s++) {
        tl_model *model = LOAD(s);
        const model_plan *plan = &model->plan;
        int64_t most = model->loops.maximum > 1 ? 4 : 1;
        for (int64_t loops = 1; loops <= most; loops++) {
            loop_counts counts = {loops, plan->nested ? 5 - loops : 0};
            int n = plan_n_runs(plan, counts), n_states = 0, n_last = 0;
            int64_t n_of_stage[CONFIG_MAX_STAGES] = {0};
            bool taken[64] = {false};
            for (int i = 0; i < n; i++) {
                plan_run run = plan_run_at(plan, counts, i);
                REQUIRE(run.plane >= 0 && run.plane < n && !taken[run.plane]);
                taken[run.plane] = true;
                CHECK_EQ(run.index, n_of_stage[run.stage]++);
                CHECK(run.global_plane < 0 || taken[run.global_plane]);
                n_states += plan_has_state(plan, &run);
                n_last += run.last;
            }
            CHECK_EQ(n_states, plan_n_states(plan, counts));
            CHECK_EQ(n_last, plan->n_stages);
            if (plan->nested) {
                CHECK_EQ(n_of_stage[0], loops * counts.inner);
                CHECK_EQ(n_of_stage[1], loops);
            }
        }
        tl_model_release(model);
    }
}

/* Planes after the first loop's hold what their own window shows; the first one's, which all loops
 * see, holds everything. */
TEST(a_loop_window_bounds_the_kv_of_later_loops)
{
    enum { LOOPS = 3, WINDOW = 7, LENGTH = 240 };
    static const size_t chunks[] = {1, 5, 40};
    tl_model_info info = {.size = sizeof info};
    tl_model *model = LOAD(TINY_IQUEST);
    CHECK_EQ(model->config.loop_window, WINDOW);
    CHECK_OK(tl_model_get_info(&info, model));
    int32_t tokens[LENGTH];
    tiny_tokens(tokens, LENGTH, model->config.vocab_size, 7);
    const tl_cache_options key = tiny_key(model, LOOPS, 0);
    for (size_t c = 0; c < 3; c++) {
        tl_kv_cache *kv;
        float hidden[18];
        REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
        for (size_t n = 0; n < LENGTH; n += chunks[c]) {
            CHECK_OK(tl_decode_with_kv_cache_capture(hidden, kv, tokens + n, chunks[c]));
            int64_t length = (int64_t)(n + chunks[c]);
            int64_t all = (length + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK;
            int64_t seen_from = length < WINDOW ? 0 : length - WINDOW + 1;
            int64_t some = all - seen_from / KV_BLOCK * KV_BLOCK;
            CHECK(some < WINDOW + 2 * KV_BLOCK);
            CHECK_EQ(tl_kv_cache_bytes(kv), info.kv_bytes_loop * (all + (LOOPS - 1) * some));
        }
        CHECK_STATUS(tl_kv_cache_truncate(kv, LENGTH / 2), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "a window has dropped positions");
        CHECK_OK(tl_kv_cache_truncate(kv, LENGTH - 1));
        size_t in_use, in_slabs;
        kv_store_bytes(model->kv, &in_use, &in_slabs);
        CHECK_EQ(in_use, tl_kv_cache_bytes(kv));
        tl_kv_cache_release(kv);
    }
    tl_model_release(model);
}

/* ---- what amounts to something simpler ---- */

#define NO_INJECT                                                                                  \
    {"state_init", 0}, {"inject", 0},                                                              \
    {                                                                                              \
        "inject_source", 0                                                                         \
    }

/* The same layers, run once. */
static tl_model *load_unlooped(int spec)
{
    tiny_spec plain = tiny_specs[spec];
    plain.prelude += plain.core + plain.coda;
    plain.core = plain.coda = 0;
    model_config config = config_with(&plain, (const setting[]){NO_INJECT, {NULL, 0}});
    config.exit_mode = config.loop_attention = config.loop_window = config.stage0_end_norm = 0;
    config.exit_threshold = 0;
    tiny_file *file = tiny_plan_for(&plain, &config);
    tiny_fill(file);
    tiny_seal(file);
    tl_model_options options = tiny_options(1);
    return load_file(file, &options);
}

TEST(one_loop_of_a_core_that_gets_nothing_is_a_plain_model)
{
    static const int specs[] = {0, TINY_OURO, TINY_IQUEST};
    for (size_t i = 0; i < 3; i++) {
        tl_model *plain = load_unlooped(specs[i]);
        tl_model *looped = LOAD(specs[i], NO_INJECT, {"loops_default", 1}, {"stage0_end_norm", 0},
                                {"stage1_end_norm", 0});
        CHECK_EQ(plain->plan.looped_stage, -1);
        CHECK(looped->plan.looped_stage >= 0);
        CHECK(same_logits(plain, looped));
    }
}

TEST(an_injection_that_skips_the_first_loop)
{
    CHECK(same_logits(LOAD(0, {"state_init", 0}, {"inject_skip_first", 1}, {"loops_default", 1}),
                      LOAD(0, NO_INJECT, {"loops_default", 1})));
    CHECK(!same_logits(LOAD(0, {"state_init", 0}, {"inject_skip_first", 1}), LOAD(0, NO_INJECT)));
    CHECK(!same_logits(LOAD(0, {"state_init", 0}, {"inject_skip_first", 1}),
                       LOAD(0, {"state_init", 0})));
}

TEST(a_norm_without_weight_is_one_of_ones)
{
    for (int p = 0; p < 4; p++)
        CHECK(same_logits(LOAD_MADE_OF(one, "layers.", "_norm", 0, {"norm_placement", p}),
                          LOAD(0, {"norm_placement", p}, {"norm_weightless", 1})));
    for (int kind = 1; kind <= 2; kind++)
        CHECK(same_logits(
            LOAD_MADE_OF(one, "layers.", "_norm", 0, QK_NORM(kind), {"norm_weightless", 1}),
            LOAD(0, QK_NORM(kind), {"norm_weightless", 1}, {"qk_norm_weightless", 1})));
    CHECK(same_logits(LOAD_MADE_OF(one, "stages.1.", "norm", 0),
                      LOAD(0, {"stage1_end_norm", NORM_WEIGHTLESS})));
    CHECK(same_logits(LOAD_MADE_OF(one, "final_norm", "weight", 0),
                      LOAD(0, {"final_norm", NORM_WEIGHTLESS})));
}

TEST(a_bias_of_zeros_is_none)
{
    static const char *const fields[] = {"q_bias", "k_bias", "v_bias", "o_bias", "mlp_bias"};
    for (size_t i = 0; i < 5; i++)
        CHECK(same_logits(LOAD_MADE_OF(zero, "layers.", ".bias", 0, {fields[i], 1}), LOAD(0)));
    CHECK(same_logits(LOAD_MADE_OF(zero, "layers.", "value_embed", 0, VALUES), LOAD(0)));
}

TEST(an_injection_that_joins_is_a_sum_of_identities)
{
    CHECK(same_logits(LOAD_MADE_OF(identity, "inject.", "weight", 0, {"inject", 2}), LOAD(0)));
    CHECK(same_logits(LOAD_MADE_OF(identity, "state_out.", "weight", 0, {"state_out_proj", 1}),
                      LOAD(0)));
}

/* A gate that is open shows the first loop's KV alone, whatever the window; one that is shut shows
 * the loop's own. */
TEST(gates_that_are_open_or_shut)
{
    CHECK(same_logits(
        LOAD_MADE_OF(most, "layers.", "loop_gate.bias", TINY_IQUEST),
        LOAD_MADE_OF(most, "layers.", "loop_gate.bias", TINY_IQUEST, {"loop_window", 3})));
    CHECK(same_logits(LOAD_MADE_OF(least, "layers.", "loop_gate.bias", TINY_IQUEST),
                      LOAD(TINY_IQUEST, {"loop_attention", 0})));
    CHECK(!same_logits(LOAD_MADE_OF(most, "layers.", "loop_gate.bias", TINY_IQUEST),
                       LOAD_MADE_OF(least, "layers.", "loop_gate.bias", TINY_IQUEST)));
}

TEST(a_loop_window_that_sees_all_is_none)
{
    CHECK(
        same_logits(LOAD(TINY_IQUEST, {"loop_window", N}), LOAD(TINY_IQUEST, {"loop_window", 0})));
    CHECK(same_logits(LOAD(TINY_IQUEST, {"loop_window", 1e18}),
                      LOAD(TINY_IQUEST, {"loop_window", 0})));
    CHECK(!same_logits(LOAD(TINY_IQUEST, {"loop_window", N - 1}),
                       LOAD(TINY_IQUEST, {"loop_window", 0})));
}

TEST(a_factor_of_one_is_no_scaling)
{
    CHECK(same_logits(LOAD(0, LINEAR, {"rope_factor", 1}), LOAD(0)));
}

TEST(logits_are_scaled_then_capped)
{
    tl_model *plain = LOAD(0), *scaled = LOAD(0, {"logit_scale", 0.5});
    tl_model *capped = LOAD(0, {"logit_scale", 0.5}, {"logit_softcap", 3});
    float *a = logits_of(plain), *b = logits_of(scaled), *c = logits_of(capped);
    for (size_t i = 0; i < N * (size_t)plain->config.vocab_size; i++) {
        CHECK(b[i] == a[i] / 2);
        CHECK_NEAR(c[i], 3 * tanh((double)b[i] / 3), 1e-6);
    }
    free(a);
    free(b);
    free(c);
    tl_model_release(plain);
    tl_model_release(scaled);
    tl_model_release(capped);
}
