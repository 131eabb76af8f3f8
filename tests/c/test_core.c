/* The core's begin and end: initial states, its noise, the exit. */
#include "backend/cpu/cpu.h"
#include "model/noise.h"
#include "wiring.h"

#define EXIT(threshold)                                                                            \
    {"exit_mode", 1},                                                                              \
    {                                                                                              \
        "exit_threshold", threshold                                                                \
    }

/* ---- initial states ---- */

/* The state that the model starts from, as its file says: [N, hidden]; the caller frees. */
static float *own_state(const tl_model *model, double scale, uint64_t seed)
{
    const model_config *c = &model->config;
    size_t hidden = (size_t)c->hidden_size;
    float *state = calloc(N * hidden, sizeof *state);
    for (size_t i = 0; i < N && c->state_init == STATE_INIT_NOISE; i++)
        noise_row(state + i * hidden, hidden, seed, (int64_t)i, scale * c->init_std, c->init_cut);
    for (size_t i = 0; i < N * hidden && c->state_init == STATE_INIT_TENSOR; i++)
        state[i] = model->weights->core.init[i % hidden];
    return state;
}

/* Logits and states from a given state, which must be those of the model's own. */
static void check_given_state(tl_model *model, const float *state)
{
    int32_t tokens[N];
    tiny_tokens(tokens, N, model->config.vocab_size, 7);
    float *own = logits_of(model), *given = logits_from(model, state, NULL);
    CHECK_MEM_EQ(given, own, N * (size_t)model->config.vocab_size * sizeof *own);
    free(own);
    free(given);
    size_t n = (size_t)model->loops.standard * N * (size_t)model->config.hidden_size;
    own = malloc(n * sizeof *own);
    given = malloc(n * sizeof *given);
    CHECK_OK(tl_model_states(own, model, tokens, N, NULL, NULL));
    CHECK_OK(tl_model_states(given, model, tokens, N, state, NULL));
    CHECK_MEM_EQ(given, own, n * sizeof *own);
    free(own);
    free(given);
}

TEST(a_given_state_is_as_good_as_the_own)
{
    static const int specs[] = {0, 2, TINY_HUGINN, TINY_OLMO, TINY_PARCAE};
    static const double scales[] = {1, 0.5, 0};
    for (size_t i = 0; i < 5; i++) {
        for (size_t k = 0; k < 3; k++) {
            tl_model_options options = tiny_options(2);
            options.prefill_chunk = k == 0 ? 7 : 0;
            options.has_init_scale = 1;
            options.init_scale = scales[k];
            options.init_seed = 99;
            tl_model *model = tiny_load(&tiny_specs[specs[i]], &options);
            float *state = own_state(model, scales[k], 99);
            check_given_state(model, state);
            free(state);
            tl_model_release(model);
        }
    }
    tl_model *model = LOAD(0, {"state_init", STATE_INIT_TENSOR});
    float *state = own_state(model, 0, 0);
    check_given_state(model, state);
    free(state);
    tl_model_release(model);
}

/* A core that starts from its input starts from what the prelude ends with. */
TEST(the_input_as_a_state)
{
    tiny_spec spec = TINY_SPEC, prelude = TINY_SPEC;
    prelude.core = prelude.coda = 0;
    prelude.inject = false;
    int32_t tokens[N];
    tiny_tokens(tokens, N, spec.vocab, 7);
    tl_model *model = tiny_load(&prelude, NULL);
    float *state = malloc(N * (size_t)spec.hidden * sizeof *state);
    CHECK_OK(tl_model_states(state, model, tokens, N, NULL, NULL));
    tl_model_release(model);
    model = LOAD(0, {"state_init", STATE_INIT_INPUT});
    check_given_state(model, state);
    tl_model_release(model);
    free(state);
}

TEST(a_given_state_counts)
{
    tl_model *model = LOAD(TINY_HUGINN);
    size_t hidden = (size_t)model->config.hidden_size, vocab = (size_t)model->config.vocab_size;
    float *state = own_state(model, 1, 0), *first = logits_from(model, state, NULL);
    state[20 * hidden] += 1; /* position 20 sees it, and what follows */
    float *second = logits_from(model, state, NULL);
    CHECK_MEM_EQ(first, second, 20 * vocab * sizeof *first);
    for (size_t i = 20; i < N; i++)
        CHECK(!same_floats(first + i * vocab, second + i * vocab, vocab));
    free(state);
    free(first);
    free(second);
    tl_model_release(model);
}

TEST(noise)
{
    enum { WIDTH = 20000 };
    static float row[WIDTH], other[WIDTH];
    noise_row(row, WIDTH, 5, 3, 2, 1.5);
    double sum = 0, squares = 0, largest = 0;
    for (size_t i = 0; i < WIDTH; i++) {
        sum += row[i];
        squares += (double)row[i] * row[i];
        largest = fmax(largest, fabs(row[i]));
    }
    CHECK(largest <= 2 * 1.5 && largest > 2 * 1.49);
    CHECK_NEAR(sum / WIDTH, 0, 0.05);
    /* of a standard normal cut at 1.5: 1 - 2 * 1.5 * density(1.5) / (0.8664 inside) = 0.5515 */
    CHECK_NEAR(squares / WIDTH, 4 * 0.5515, 0.05);
    noise_row(other, WIDTH / 2, 5, 3, 2, 1.5); /* a channel's number is its own */
    CHECK_MEM_EQ(row, other, WIDTH / 2 * sizeof *row);
    static const struct {
        uint64_t seed;
        int64_t position;
    } others[] = {{6, 3}, {5, 4}, {5 + (1ull << 32), 3}, {5, 3 + (INT64_C(1) << 32)}};
    for (size_t k = 0; k < 4; k++) {
        noise_row(other, WIDTH, others[k].seed, others[k].position, 2, 1.5);
        size_t n_same = 0;
        for (size_t i = 0; i < WIDTH; i++)
            n_same += row[i] == other[i];
        CHECK(n_same < 10);
    }
}

/* ---- the exit ---- */

static float *exit_logits_of(tl_model *model, int64_t loops)
{
    int32_t tokens[N];
    tiny_tokens(tokens, N, model->config.vocab_size, 7);
    const tl_cache_options key = tiny_key(model, loops, 0);
    float *logits = malloc((size_t)loops * N * sizeof *logits);
    CHECK_OK(tl_model_exit_logits(logits, model, tokens, N, &key));
    return logits;
}

static float *states_of(tl_model *model, int64_t loops)
{
    int32_t tokens[N];
    tiny_tokens(tokens, N, model->config.vocab_size, 7);
    const tl_cache_options key = tiny_key(model, loops, 0);
    float *states = malloc((size_t)(loops * N * model->config.hidden_size) * sizeof *states);
    CHECK_OK(tl_model_states(states, model, tokens, N, NULL, &key));
    return states;
}

TEST(a_threshold_of_one_takes_all_loops)
{
    static const double thresholds[] = {1, 1.5, 1e30};
    for (size_t i = 0; i < 3; i++) {
        CHECK(same_logits(LOAD(TINY_OURO, {"exit_threshold", thresholds[i]}),
                          LOAD(TINY_OURO, {"exit_mode", 0}, {"exit_threshold", 0})));
        CHECK(same_logits(LOAD(0, EXIT(thresholds[i])), LOAD(0)));
    }
}

TEST(a_tiny_threshold_takes_one_loop)
{
    static const int specs[] = {0, TINY_OURO};
    for (size_t i = 0; i < 2; i++) { /* with a coda and without */
        tl_model *model = LOAD(specs[i], EXIT(1e-30));
        const tl_cache_options one = tiny_key(model, 1, 0);
        float *all = logits_of(model), *first = logits_from(model, NULL, &one);
        CHECK_MEM_EQ(all, first, N * (size_t)model->config.vocab_size * sizeof *all);
        free(all);
        free(first);
        tl_model_release(model);
    }
}

/* A gate that always says one half: the sums are 1/2, 3/4, ... and all are exact. */
TEST(a_sum_that_is_the_threshold_reaches_it)
{
    static const double thresholds[] = {0.5, 0.75, 0.875};
    for (int64_t i = 0; i < 6; i++) { /* with one more loop than it takes, and with two */
        int64_t taken = i % 3 + 1, loops = taken + 1 + i / 3;
        tl_model *model =
            LOAD_MADE_OF(zero, "exit.", "", TINY_OURO, {"exit_threshold", thresholds[i % 3]});
        const tl_cache_options more = tiny_key(model, loops, 0), fewer = tiny_key(model, taken, 0);
        float *all = logits_from(model, NULL, &more), *first = logits_from(model, NULL, &fewer);
        CHECK_MEM_EQ(all, first, N * (size_t)model->config.vocab_size * sizeof *all);
        free(all);
        free(first);
        tl_model_release(model);
    }
}

static float not_a_number(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return NAN;
}

/* A gate that says nothing keeps no token: each leaves with the last loop's state. */
TEST(a_gate_that_is_nan_takes_all_loops)
{
    tl_model *broken = LOAD_MADE_OF(not_a_number, "exit.", "bias", TINY_OURO);
    CHECK(same_logits(broken, LOAD(TINY_OURO, {"exit_threshold", 1})));
}

TEST(states_and_gates_know_no_threshold)
{
    tl_model *early = LOAD(TINY_OURO, {"exit_threshold", 1e-30});
    tl_model *late = LOAD(TINY_OURO, {"exit_threshold", 1});
    size_t hidden = (size_t)early->config.hidden_size;
    float *a = states_of(early, 3), *b = states_of(late, 3);
    CHECK_MEM_EQ(a, b, 3 * N * hidden * sizeof *a);
    float *x = exit_logits_of(early, 3), *y = exit_logits_of(late, 3), *z = exit_logits_of(late, 2);
    CHECK_MEM_EQ(x, y, 3 * N * sizeof *x);
    CHECK_MEM_EQ(x, z, 2 * N * sizeof *x);
    const cpu_core *core = &late->weights->core;
    for (size_t i = 0; i < 3 * N; i++) { /* what the gate says is read off the state */
        double want = core->exit_bias;
        for (size_t k = 0; k < hidden; k++)
            want += (double)core->exit_weight[k] * a[i * hidden + k];
        CHECK_NEAR(x[i], want, 1e-5);
    }
    free(a);
    free(b);
    free(x);
    free(y);
    free(z);
    tl_model_release(early);
    tl_model_release(late);
}

/* The loop, from 0, at which a token leaves; logits: of the gate, [loops, N], from its own on. */
static size_t leaves_at(const float *logits, size_t loops, double threshold)
{
    double left = 1, sum = 0;
    for (size_t i = 0; i < loops - 1; i++) {
        double lambda = 1 / (1 + exp(-(double)logits[i * N]));
        sum += left * lambda;
        left *= 1 - lambda;
        if (sum >= threshold)
            return i;
    }
    return loops - 1;
}

TEST(each_token_leaves_where_the_sum_reaches_the_threshold)
{
    enum { LOOPS = 5 };
    static const double thresholds[] = {0.1, 0.3, 0.6, 0.7, 0.9, 0.97};
    int n_left_at[LOOPS] = {0};
    for (size_t t = 0; t < 6; t++) {
        tl_model *model =
            LOAD_MADE_OF(minus_one, "exit.", "bias", TINY_OURO, {"exit_threshold", thresholds[t]});
        size_t hidden = (size_t)model->config.hidden_size;
        float *states = states_of(model, LOOPS), *gates = exit_logits_of(model, LOOPS);
        int32_t tokens[N];
        tiny_tokens(tokens, N, model->config.vocab_size, 7);
        const tl_cache_options key = tiny_key(model, LOOPS, 0);
        tl_kv_cache *kv;
        REQUIRE_OK(tl_kv_cache_create(&kv, model, &key));
        float *last = malloc(hidden * sizeof *last);
        for (size_t i = 0; i < N; i++) {
            size_t at = leaves_at(gates + i, LOOPS, thresholds[t]);
            n_left_at[at]++;
            CHECK_OK(tl_decode_with_kv_cache_capture(last, kv, tokens + i, 1));
            CHECK_MEM_EQ(last, states + (at * N + i) * hidden, hidden * sizeof *last);
        }
        free(last);
        free(states);
        free(gates);
        tl_kv_cache_release(kv);
        tl_model_release(model);
    }
    for (int i = 0; i < LOOPS; i++)
        CHECK(n_left_at[i] > 0);
}

/* ---- nested schedules ---- */

/* One cycle, whose low state starts from zeros: low = stage(embedding), as in a model of that stage
 * alone; then high = stage(embedding + low), as in a core that starts from a given embedding. */
TEST(one_nested_cycle_is_made_of_flat_parts)
{
    tl_model *nested =
        LOAD(TINY_HRM, {"state_init", STATE_INIT_ZEROS}, {"cycles_high", 1}, {"cycles_low", 1});
    tl_model *low = LOAD(TINY_HRM, {"schedule", 0}, {"cycles_high", 0}, {"cycles_low", 0},
                         {"state_init", 0}, {"inject", 0}, {"inject_source", 0}, {"n_stages", 1},
                         {"stage0_looped", 0}, {"stage1_first_layer", 0}, {"stage1_n_layers", 0},
                         {"stage1_looped", 0}, {"stage1_end_norm", 0});
    tl_model *high = LOAD(TINY_HRM, {"schedule", 0}, {"cycles_high", 0}, {"cycles_low", 0},
                          {"state_init", STATE_INIT_ZEROS}, {"inject_source", SOURCE_PRELUDE},
                          {"stage0_looped", 0}, {"loops_default", 1});
    size_t hidden = (size_t)nested->config.hidden_size, size = N * hidden;
    int32_t tokens[N];
    tiny_tokens(tokens, N, nested->config.vocab_size, 7);
    float *embedded = malloc(size * sizeof *embedded), *both = malloc(2 * size * sizeof *both);
    float *part = malloc(size * sizeof *part);
    for (size_t i = 0; i < N; i++)
        cpu_matrix_row(&nested->weights->embed, (size_t)tokens[i], 0, hidden,
                       embedded + i * hidden);
    CHECK_OK(tl_model_states(both, nested, tokens, N, NULL, NULL));
    CHECK_OK(tl_model_states(part, low, tokens, N, NULL, NULL));
    CHECK_MEM_EQ(both, part, size * sizeof *part);
    CHECK_OK(tl_model_states(part, high, tokens, N, embedded, NULL));
    CHECK_MEM_EQ(both + size, part, size * sizeof *part);
    free(embedded);
    free(both);
    free(part);
    tl_model_release(nested);
    tl_model_release(low);
    tl_model_release(high);
}
