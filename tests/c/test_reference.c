/* Logits and states of whole models against a float64 implementation of the definition. */
#include "reference.h"
#include "test.h"

enum { N = 41 };

/* The largest difference, in units of the reference's root mean square. */
static double distance(const float *got, const double *want, size_t n)
{
    double largest = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        double difference = fabs(got[i] - want[i]);
        largest = difference <= largest ? largest : difference; /* NaN stays */
        squares += want[i] * want[i];
    }
    return largest / sqrt(squares / (double)n);
}

/* Logits, and states where there is a loop. */
static void check_model(tiny_file *file, int32_t kv_mode, int64_t loops, int64_t window,
                        double tolerance)
{
    tl_model_options options = tiny_options(2);
    options.kv_mode = kv_mode;
    options.prefill_chunk = 7;
    tl_model *model;
    if (!CHECK_OK(tiny_load_bytes(&model, file->bytes, file->size, &options)))
        return;
    size_t vocab = (size_t)file->config.vocab_size, hidden = (size_t)file->config.hidden_size;
    size_t n_logits = N * vocab, n_states = (size_t)loops * N * hidden;
    float *logits = malloc(n_logits * sizeof *logits), *states = malloc(n_states * sizeof *states);
    double *want_logits = malloc(n_logits * sizeof *want_logits);
    double *want_states = malloc(n_states * sizeof *want_states);
    int32_t tokens[N];
    tiny_tokens(tokens, N, (int64_t)vocab, 17);
    const tl_cache_options cache = {.size = sizeof cache, .loops = loops, .cache_window = window};
    CHECK_OK(tl_model_logits(logits, model, tokens, N, NULL, &cache));
    CHECK_OK(tl_model_states(states, model, tokens, N, NULL, &cache));
    reference_forward(want_logits, want_states, file, tokens, N, loops, window);
    CHECK_NEAR(distance(logits, want_logits, n_logits), 0, tolerance);
    if (file->config.n_stages > 1)
        CHECK_NEAR(distance(states, want_states, n_states), 0, tolerance);
    free(logits);
    free(states);
    free(want_logits);
    free(want_states);
    tl_model_release(model);
}

TEST(every_small_model)
{
    static const int64_t windows[] = {0, 1, 9, 1000};
    for (size_t s = 0; s < TINY_N_PLAIN; s++) {
        tiny_file *file = tiny_make(&tiny_specs[s]);
        for (int64_t loops = 1; loops <= (tiny_specs[s].core > 0 ? 4 : 1); loops += 3) {
            for (size_t w = 0; w < 4; w++) {
                check_model(file, TL_KV_MODE_FP32, loops, windows[w], 2e-5);
                check_model(file, TL_KV_MODE_FP16, loops, windows[w], 1e-2);
            }
        }
        tiny_free(file);
    }
}

/* The state may begin as the stage's input, with the input added in each loop too; and any stage
 * may end with a norm. */
TEST(other_configurations)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_plan(&spec);
    file->config.state_init = STATE_INIT_INPUT;
    file->config.stage0_end_norm = file->config.stage2_end_norm = 1;
    tiny_add(file, DTYPE_F16, spec.hidden, 0, "stages.0.norm.weight");
    tiny_add(file, DTYPE_F32, spec.hidden, 0, "stages.2.norm.weight");
    tiny_fill(file);
    tiny_seal(file);
    check_model(file, TL_KV_MODE_FP32, 3, 0, 2e-5);
    tiny_free(file);

    file = tiny_plan(&spec);
    file->config.rope_theta = 123.5;
    file->config.norm_eps = 0.25;
    tiny_fill(file);
    tiny_seal(file);
    check_model(file, TL_KV_MODE_FP32, 3, 0, 2e-5);
    tiny_free(file);
}
