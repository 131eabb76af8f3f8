/* Loading files that are changed in one place: what test_file.c and test_config.c share. */
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
    tl_cache_options options = TL_CACHE_OPTIONS_INIT;
    options.loops = info.loops_min;
    CHECK_OK(tl_model_logits(logits, model, tokens, 3, &options));
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
