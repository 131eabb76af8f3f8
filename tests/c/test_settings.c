/* The log and the environment: warnings, and settings that contradict each other. */
#include "outputs.h"

static const int32_t tokens[] = {4, 5, 6};

/* ---- the log ---- */

typedef struct heard {
    int n;
    int32_t level;
    char message[300];
} heard;

static void hear(void *user, int32_t level, const char *message)
{
    heard *h = user;
    h->n++;
    h->level = level;
    snprintf(h->message, sizeof h->message, "%s", message);
}

TEST(one_warning_above_the_trained_loops)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.loops_max_trained = 4;
    tl_model *model = tiny_load(&spec, NULL);
    tl_generate_options options = greedy(1);
    tl_set_log_callback(hear, &h);
    options.loops = 4;
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 0);
    options.loops = 5;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(generate_plain(model, tokens, 3, &options).status);
        CHECK_EQ(h.n, 1);
    }
    CHECK_EQ(h.level, TL_LOG_WARNING);
    CHECK_STR_HAS(h.message, "loops 5");
    CHECK_STR_HAS(h.message, "4");
    tl_model_release(model);
    model = tiny_load(&spec, NULL); /* another model warns anew */
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 2);
    tl_model_release(model);
    tl_set_log_callback(NULL, NULL);
    model = tiny_load(&spec, NULL); /* to nobody */
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 2);
    tl_model_release(model);
}

static void hear_once(void *user, int32_t level, const char *message)
{
    tl_set_log_callback(NULL, NULL); /* no lock is held that this would wait for */
    hear(user, level, message);
}

TEST(a_log_callback_may_call_the_library)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.max_positions = 10;
    tl_set_log_callback(hear_once, &h);
    for (int i = 0; i < 2; i++)
        tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 1);
}

TEST(one_warning_above_the_trained_positions)
{
    heard h = {0};
    tiny_spec spec = TINY_SPEC;
    spec.max_positions = 256;
    tl_set_log_callback(hear, &h);
    tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 0);
    spec.max_positions = 255;
    tl_model *model = tiny_load(&spec, NULL);
    CHECK_EQ(h.n, 1);
    CHECK_EQ(h.level, TL_LOG_WARNING);
    CHECK_STR_HAS(h.message, "max_seq_len 256");
    CHECK_STR_HAS(h.message, "255");
    tl_generate_options options = greedy(3);
    CHECK_OK(generate_plain(model, tokens, 3, &options).status);
    CHECK_EQ(h.n, 1);
    tl_model_release(model);
    spec.max_positions = 0; /* unknown */
    tl_model_release(tiny_load(&spec, NULL));
    CHECK_EQ(h.n, 1);
    tl_set_log_callback(NULL, NULL);
}

/* ---- the environment ---- */

typedef struct setting {
    const char *first, *second; /* NAME=VALUE, or NULL */
    int32_t kv_mode;
    tl_status status;
    const char *named[2]; /* in the message */
} setting;

static const setting settings[] = {
    {NULL, NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_H_MODE=", "TINYLOOP_KV_INT8=0", 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_ANYTHING=0", NULL, TL_KV_MODE_FP32, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_KV_H_MODE=1", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_H_MODE", NULL}},
    {"TINYLOOP_KV_INT8=1", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT8", NULL}},
    {"TINYLOOP_KV_INT4=yes", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT4", NULL}},
    {"TINYLOOP_KV_INT4=00", NULL, 0, TL_STATUS_UNSUPPORTED, {"TINYLOOP_KV_INT4", NULL}},
    {"TINYLOOP_KV_INT16=1", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_KV_INT16", "INT8"}},
    {"TINYLOOP_KV_=1", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_KV_", "INT8"}},
    {"TINYLOOP_KV_INT8=1",
     "TINYLOOP_KV_INT4=1",
     0,
     TL_STATUS_INVALID,
     {"TINYLOOP_KV_INT8", "TINYLOOP_KV_INT4"}},
    {"TINYLOOP_KV_H_MODE=1",
     "TINYLOOP_KV_INT4=1",
     0,
     TL_STATUS_INVALID,
     {"TINYLOOP_KV_H_MODE", "TINYLOOP_KV_INT4"}},
    {"TINYLOOP_KV_INT8=1", NULL, TL_KV_MODE_FP16, TL_STATUS_INVALID, {"TINYLOOP_KV_INT8", "fp16"}},
    {"TINYLOOP_KV_INT8=1", NULL, TL_KV_MODE_FP32, TL_STATUS_INVALID, {"TINYLOOP_KV_INT8", "fp32"}},
    {"TINYLOOP_CPU_ISA=portable", NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_CPU_ISA=", NULL, 0, TL_STATUS_OK, {NULL, NULL}},
    {"TINYLOOP_CPU_ISA=mmx", NULL, 0, TL_STATUS_INVALID, {"TINYLOOP_CPU_ISA=mmx", "portable"}},
};

/* Sets NAME=VALUE, or takes NAME away. */
static void put(const char *text, bool there)
{
    if (text == NULL)
        return;
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(text, "="), text);
    if (there)
        setenv(name, strchr(text, '=') + 1, 1);
    else
        unsetenv(name);
}

static tl_status load_with(const tl_model_options *options)
{
    tiny_file *file = tiny_make(&tiny_specs[1]);
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, file->bytes, file->size, options);
    tl_model_release(model);
    tiny_free(file);
    return status;
}

TEST(environment)
{
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const setting *s = &settings[i];
        tl_model_options options = tiny_options(1);
        options.kv_mode = s->kv_mode;
        put(s->first, true);
        put(s->second, true);
        tl_status status = load_with(&options);
        put(s->first, false);
        put(s->second, false);
        test_check(status == s->status, __FILE__, __LINE__, "%s: status %d",
                   s->first ? s->first : "(nothing)", (int)status);
        for (int n = 0; n < 2; n++)
            if (s->named[n] != NULL)
                CHECK_STR_HAS(tl_last_error(), s->named[n]);
    }
    CHECK_OK(load_with(NULL));
}
