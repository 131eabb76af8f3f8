/* Models of any configuration, made of the small ones by changing fields and weights, and their
 * logits. */
#ifndef TINYLOOP_WIRING_H
#define TINYLOOP_WIRING_H

#include "load_check.h"
#include "run/engine.h"

enum { N = 40 }; /* tokens: over a block edge */

static inline tl_model *load_file(tiny_file *file, const tl_model_options *options)
{
    tl_model *model;
    CHECK_OK(tiny_load_bytes(&model, file->bytes, file->size, options));
    tiny_free(file);
    return model;
}

static inline tl_model *load_setting(int spec, const setting *settings)
{
    tl_model_options options = tiny_options(2);
    return load_file(make_with(&tiny_specs[spec], settings), &options);
}

#define LOAD(SPEC, ...) load_setting(SPEC, (const setting[]){__VA_ARGS__ __VA_OPT__(, ){NULL, 0}})

/* Of N tokens, [N, vocab]; the caller frees. */
static inline float *logits_from(tl_model *model, const float *init_state,
                                 const tl_cache_options *key)
{
    int32_t tokens[N];
    tiny_tokens(tokens, N, model->config.vocab_size, 7);
    float *logits = malloc(N * (size_t)model->config.vocab_size * sizeof *logits);
    CHECK_OK(tl_model_logits(logits, model, tokens, N, init_state, key));
    return logits;
}

static inline float *logits_of(tl_model *model)
{
    return logits_from(model, NULL, NULL);
}

/* As floats: a zero has two signs. */
static inline bool same_floats(const float *a, const float *b, size_t n)
{
    size_t i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i == n;
}

/* Releases both. */
static inline bool same_logits(tl_model *a, tl_model *b)
{
    float *x = logits_of(a), *y = logits_of(b);
    bool same = same_floats(x, y, N * (size_t)a->config.vocab_size);
    free(x);
    free(y);
    tl_model_release(a);
    tl_model_release(b);
    return same;
}

/* ---- weights of one kind ---- */

/* Writes a number for each element of a float32 tensor. */
typedef float (*element)(const tiny_tensor *tensor, size_t row, size_t column);

static inline float zero(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return 0;
}

static inline float one(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return 1;
}

static inline float most(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return 1e4f;
}

static inline float minus_one(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return -1;
}

static inline float least(const tiny_tensor *tensor, size_t row, size_t column)
{
    (void)tensor, (void)row, (void)column;
    return -1e4f;
}

/* Identities side by side. */
static inline float identity(const tiny_tensor *tensor, size_t row, size_t column)
{
    return column % (size_t)tensor->rows == row;
}

/* The file, with all tensors whose name begins and goes on so made of `value`. */
static inline tl_model *load_made_of(int spec, const setting *settings, const char *begin,
                                     const char *part, element value)
{
    tiny_file *file = make_with(&tiny_specs[spec], settings);
    size_t n_found = 0;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const tiny_tensor *t = &file->tensors[i];
        size_t columns = t->columns > 0 ? (size_t)t->columns : 1;
        if (strncmp(t->name, begin, strlen(begin)) != 0 || strstr(t->name, part) == NULL)
            continue;
        n_found++;
        CHECK_EQ(t->dtype, DTYPE_F32);
        for (size_t k = 0; k < (size_t)t->rows * columns; k++) {
            float number = value(t, k / columns, k % columns);
            memcpy(file->bytes + t->offset + 4 * k, &number, sizeof number);
        }
    }
    CHECK(n_found > 0);
    tiny_seal(file);
    tl_model_options options = tiny_options(1);
    return load_file(file, &options);
}

#define LOAD_MADE_OF(VALUE, BEGIN, PART, SPEC, ...)                                                \
    load_made_of(SPEC, (const setting[]){__VA_ARGS__ __VA_OPT__(, ){NULL, 0}}, BEGIN, PART, VALUE)

#endif
