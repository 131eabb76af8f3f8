/* Loading files that are changed in one place: what the tests of files and configurations share. */
#ifndef TINYLOOP_LOAD_CHECK_H
#define TINYLOOP_LOAD_CHECK_H

#include "test.h"
#include "tiny_model.h"

/* Runs a little of a model that loaded, so that a wrong field that slipped through shows. */
static inline void use_model(tl_model *model)
{
    tl_model_info info = {.size = sizeof info};
    CHECK_OK(tl_model_get_info(&info, model));
    float *logits = malloc(3 * (size_t)info.vocab_size * sizeof *logits);
    const int32_t tokens[3] = {0};
    tl_cache_options options = tiny_key(model, info.loops_min, 0);
    options.inner_loops = info.inner_loops_default > 0;
    CHECK_OK(tl_model_logits(logits, model, tokens, 3, NULL, &options));
    free(logits);
}

/* Loads and gives the status; a refusal must say why, a model that loads must be usable. */
static inline tl_status load_status(const tiny_file *file, const tl_model_options *options)
{
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, file->bytes, file->size, options);
    if (status == TL_STATUS_OK)
        use_model(model);
    else
        CHECK(model == NULL && *tl_last_error() != '\0');
    tl_model_release(model);
    return status;
}

/* As load_status, with `size` bytes (at most 96, before the tensors) at `at` replaced and the
 * header's checksum right. */
static inline tl_status load_with(tiny_file *file, size_t at, const void *bytes, size_t size)
{
    unsigned char old[96];
    memcpy(old, file->bytes + at, size);
    memcpy(file->bytes + at, bytes, size);
    tiny_seal_meta(file);
    tl_status status = load_status(file, NULL);
    memcpy(file->bytes + at, old, size);
    tiny_seal_meta(file);
    return status;
}

/* ---- fields by name ---- */

typedef struct config_field {
    const char *name;
    bool is_float;
} config_field;

static const config_field config_fields[] = {
#define FIELD_I(name) {#name, false},
#define FIELD_F(name) {#name, true},
    CONFIG_FIELDS(FIELD_I, FIELD_F)
#undef FIELD_I
#undef FIELD_F
};

/* Its number; ends the program if no field has the name. */
static inline size_t field_number(const char *name)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++)
        if (strcmp(config_fields[i].name, name) == 0)
            return i;
    fprintf(stderr, "no field is named %s\n", name);
    exit(2);
}

static inline void set_field(model_config *config, const char *name, double value)
{
    size_t i = field_number(name);
    int64_t whole = config_fields[i].is_float ? 0 : (int64_t)value;
    memcpy((char *)config + 8 * i, config_fields[i].is_float ? (void *)&value : (void *)&whole, 8);
}

/* A field and its value; a list of them ends with a NULL name. */
typedef struct setting {
    const char *name;
    double value;
} setting;

static inline model_config config_with(const tiny_spec *spec, const setting *settings)
{
    model_config config = tiny_config(spec);
    for (; settings->name != NULL; settings++)
        set_field(&config, settings->name, settings->value);
    return config;
}

/* A file of that configuration, with the tensors that it calls for. */
static inline tiny_file *make_with(const tiny_spec *spec, const setting *settings)
{
    const model_config config = config_with(spec, settings);
    tiny_file *file = tiny_plan_for(spec, &config);
    tiny_fill(file);
    tiny_seal(file);
    return file;
}

/* ---- refusals ---- */

static inline bool refused(tl_status status)
{
    return status == TL_STATUS_FORMAT || status == TL_STATUS_UNSUPPORTED;
}

#define CHECK_REFUSED(STATUS, PART)                                                                \
    do {                                                                                           \
        if (CHECK(refused(STATUS)))                                                                \
            CHECK_STR_HAS(tl_last_error(), PART);                                                  \
    } while (0)

#endif
