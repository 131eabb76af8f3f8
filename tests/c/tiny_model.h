/* Small .tinyloop files made in memory: any shape, weights from the library's own generator, sound
 * checksums. tiny_plan() lists what a file will hold, so that a test can change the list;
 * tiny_fill() lays it out; tiny_seal() computes the checksums. tiny_make() does all three.
 *
 * A tensor's values depend on its name, its shape and the seed alone, so two models that share
 * names share weights. */
#ifndef TINYLOOP_TINY_MODEL_H
#define TINYLOOP_TINY_MODEL_H

#include "base/crc32.h"
#include "base/half.h"
#include "base/random.h"
#include "model/file.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { TINY_MIXED = -1, TINY_MAX_TENSORS = 80, TINY_MAX_BLOBS = 4 };

typedef struct tiny_spec {
    int64_t vocab, hidden, n_heads, n_kv_heads, head_dim, ff;
    int64_t prelude, core, coda; /* layers; a stage with none is left out; only the core loops */
    bool inject;                 /* the core starts from zeros and gets its input in each loop */
    bool core_norm;              /* a norm ends each loop */
    bool tied;
    bool llama3;   /* rescaled rotary frequencies */
    int dtype;     /* tensor_dtype, or TINY_MIXED: tensor i has dtype i % 3 */
    int64_t loops; /* loops_default */
    int64_t loops_max_trained, max_positions; /* 0: unknown */
    const int32_t *end_ids;
    size_t n_end_ids;
    uint64_t seed;
} tiny_spec;

/* Odd in every way; float32 so that a float64 reference can come close. */
#define TINY_SPEC                                                                                  \
    {                                                                                              \
        .vocab = 50, .hidden = 20, .n_heads = 2, .n_kv_heads = 1, .head_dim = 10, .ff = 19,        \
        .prelude = 1, .core = 2, .coda = 1, .inject = true, .core_norm = true, .tied = true,       \
        .dtype = DTYPE_F32, .loops = 2, .seed = 1                                                  \
    }

/* Every size that is not a multiple of something; groups of 1, 2, 3 and 9 query heads; all
 * dtypes; with and without prelude, coda, injection and loop. */
/* clang-format off */
static const tiny_spec tiny_specs[] = {
    TINY_SPEC,
    {.vocab = 7, .hidden = 6, .n_heads = 3, .n_kv_heads = 1, .head_dim = 2, .ff = 5,
     .prelude = 1, .core = 1, .coda = 1, .inject = true, .core_norm = true,
     .dtype = DTYPE_F16, .loops = 3, .seed = 2},
    {.vocab = 33, .hidden = 17, .n_heads = 2, .n_kv_heads = 2, .head_dim = 6, .ff = 19,
     .core = 2, .coda = 1, .inject = true, .tied = true,
     .dtype = DTYPE_BF16, .loops = 2, .seed = 3},
    {.vocab = 50, .hidden = 17, .n_heads = 6, .n_kv_heads = 2, .head_dim = 6, .ff = 5,
     .prelude = 2, .core = 1, .llama3 = true, .core_norm = true,
     .dtype = TINY_MIXED, .loops = 4, .seed = 4},
    {.vocab = 33, .hidden = 20, .n_heads = 4, .n_kv_heads = 2, .head_dim = 10, .ff = 19,
     .prelude = 3, .llama3 = true,
     .dtype = DTYPE_F32, .loops = 1, .seed = 5},
    /* more query heads to a KV head than attention takes at once */
    {.vocab = 7, .hidden = 6, .n_heads = 9, .n_kv_heads = 1, .head_dim = 2, .ff = 5,
     .core = 1, .inject = true, .core_norm = true, .tied = true,
     .dtype = DTYPE_F32, .loops = 2, .seed = 7},
    /* more than one group of columns and more than one panel in every linear layer */
    {.vocab = 70, .hidden = 131, .n_heads = 2, .n_kv_heads = 1, .head_dim = 66, .ff = 133,
     .prelude = 1, .core = 1, .coda = 1, .inject = true, .core_norm = true, .tied = true,
     .dtype = DTYPE_BF16, .loops = 2, .seed = 6},
};
/* clang-format on */
enum { TINY_N_SPECS = sizeof tiny_specs / sizeof *tiny_specs };

typedef struct tiny_tensor {
    char name[96];
    int64_t rows, columns; /* columns = 0: a vector */
    int dtype;
    size_t offset, size;
} tiny_tensor;

typedef struct tiny_blob {
    char name[48];
    const void *data;
    size_t size;
} tiny_blob;

typedef struct tiny_file {
    model_config config;
    tiny_tensor tensors[TINY_MAX_TENSORS];
    size_t n_tensors;
    tiny_blob blobs[TINY_MAX_BLOBS];
    size_t n_blobs;
    uint64_t seed;
    unsigned char *bytes; /* [size]; NULL before tiny_fill */
    size_t size;
    size_t meta_size;
} tiny_file;

/* ---- what the file holds ---------------------------------------------------------------------- */

static inline model_config tiny_config(const tiny_spec *spec)
{
    model_config c = {
        .vocab_size = spec->vocab,
        .hidden_size = spec->hidden,
        .n_heads = spec->n_heads,
        .n_kv_heads = spec->n_kv_heads,
        .head_dim = spec->head_dim,
        .ff_size = spec->ff,
        .max_positions = spec->max_positions,
        .bos_id = -1,
        .pad_id = -1,
        .norm_eps = 1e-6,
        .activation_scale = 1,
        .rope_theta = 10000,
        .rotary_dim = spec->head_dim,
        .embed_scale = 1,
        .tied_head = spec->tied,
        .logit_scale = 1,
        .final_norm = 1,
        .loops_default = spec->core > 0 ? spec->loops : 0,
        .loops_max_trained = spec->loops_max_trained,
        .damping = 1,
        .state_init = spec->inject ? STATE_INIT_ZEROS : STATE_INIT_INPUT,
        .inject = spec->inject ? INJECT_ADD : INJECT_NONE,
        .inject_source = spec->inject,
    };
    if (spec->llama3) {
        c.rope_scaling = ROPE_SCALING_LLAMA3;
        c.rope_factor = 4;
        c.rope_low_freq_factor = 1;
        c.rope_high_freq_factor = 4;
        c.rope_original_positions = 64;
    }
    const int64_t layers[] = {spec->prelude, spec->core, spec->coda};
    int64_t first = 0;
    for (int i = 0; i < 3; i++) {
        if (layers[i] == 0)
            continue;
        int64_t *stage = &c.stage0_first_layer + 4 * c.n_stages++;
        stage[0] = first;
        stage[1] = layers[i];
        stage[2] = i == 1;
        stage[3] = i == 1 && spec->core_norm;
        first += layers[i];
    }
    return c;
}

/* columns = 0: a vector. */
__attribute__((format(printf, 5, 6))) static inline void
tiny_add(tiny_file *file, int dtype, int64_t rows, int64_t columns, const char *format, ...)
{
    tiny_tensor *tensor = &file->tensors[file->n_tensors];
    memset(tensor, 0, sizeof *tensor);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(tensor->name, sizeof tensor->name, format, arguments);
    va_end(arguments);
    tensor->rows = rows;
    tensor->columns = columns;
    tensor->dtype = dtype == TINY_MIXED ? (int)(file->n_tensors % 3) : dtype;
    file->n_tensors++;
}

static inline void tiny_add_layer(tiny_file *file, int dtype, long long n)
{
    const model_config *c = &file->config;
    int64_t q = c->n_heads * c->head_dim, kv = c->n_kv_heads * c->head_dim;
    int64_t hidden = c->hidden_size, ff = c->ff_size;
    tiny_add(file, dtype, hidden, 0, "layers.%lld.attn_norm.weight", n);
    tiny_add(file, dtype, q, hidden, "layers.%lld.attn.q.weight", n);
    tiny_add(file, dtype, kv, hidden, "layers.%lld.attn.k.weight", n);
    tiny_add(file, dtype, kv, hidden, "layers.%lld.attn.v.weight", n);
    tiny_add(file, dtype, hidden, q, "layers.%lld.attn.o.weight", n);
    tiny_add(file, dtype, hidden, 0, "layers.%lld.mlp_norm.weight", n);
    tiny_add(file, dtype, ff, hidden, "layers.%lld.mlp.gate.weight", n);
    tiny_add(file, dtype, ff, hidden, "layers.%lld.mlp.up.weight", n);
    tiny_add(file, dtype, hidden, ff, "layers.%lld.mlp.down.weight", n);
}

/* The spec's end_ids are borrowed until tiny_fill. */
static inline tiny_file *tiny_plan(const tiny_spec *spec)
{
    tiny_file *file = calloc(1, sizeof *file);
    file->config = tiny_config(spec);
    file->seed = spec->seed;
    const model_config *c = &file->config;
    tiny_add(file, spec->dtype, c->vocab_size, c->hidden_size, "embed.weight");
    if (!c->tied_head)
        tiny_add(file, spec->dtype, c->vocab_size, c->hidden_size, "head.weight");
    tiny_add(file, spec->dtype, c->hidden_size, 0, "final_norm.weight");
    for (int64_t s = 0; s < c->n_stages; s++)
        if (config_stage_at(c, s).end_norm)
            tiny_add(file, spec->dtype, c->hidden_size, 0, "stages.%d.norm.weight", (int)s);
    for (int64_t n = 0; n < config_n_layers(c); n++)
        tiny_add_layer(file, spec->dtype, n);
    file->blobs[file->n_blobs++] = (tiny_blob){"card", "a small model", 13};
    if (spec->n_end_ids > 0)
        file->blobs[file->n_blobs++] =
            (tiny_blob){"end_ids", spec->end_ids, spec->n_end_ids * sizeof *spec->end_ids};
    return file;
}

/* ---- bytes ------------------------------------------------------------------------------------ */

static inline void tiny_put_u32(unsigned char *to, uint32_t value)
{
    memcpy(to, &value, sizeof value);
}

static inline void tiny_put_u64(unsigned char *to, uint64_t value)
{
    memcpy(to, &value, sizeof value);
}

static inline size_t tiny_align(size_t offset, size_t alignment)
{
    return (offset + alignment - 1) / alignment * alignment;
}

/* Offsets of the directories' entries in the file. */
static inline size_t tiny_tensor_entry(size_t i)
{
    return 64 + sizeof(model_config) + i * 160;
}

static inline size_t tiny_blob_entry(const tiny_file *file, size_t i)
{
    return tiny_tensor_entry(file->n_tensors) + i * 64;
}

/* Outputs of a matrix keep about the size of its inputs; norm weights lie around 1. */
static inline void tiny_put_weights(unsigned char *to, const tiny_tensor *tensor, uint64_t seed)
{
    uint64_t key = seed << 32 | crc32_update(0, tensor->name, strlen(tensor->name));
    bool table = strstr(tensor->name, "embed") || strstr(tensor->name, "head");
    double scale = table ? 1 : sqrt(3.0 / (double)(tensor->columns > 0 ? tensor->columns : 12));
    double centre = tensor->columns > 0 ? 0 : 1;
    size_t n = tensor->size / dtype_size((tensor_dtype)tensor->dtype);
    for (size_t i = 0; i < n; i++) {
        float value = (float)(centre + scale * (2 * random_uniform(key, i) - 1));
        uint16_t half = tensor->dtype == DTYPE_F16 ? float_to_f16(value)
                                                   : (uint16_t)(float_to_bits(value) >> 16);
        if (tensor->dtype == DTYPE_F32)
            memcpy(to + 4 * i, &value, sizeof value);
        else if (tensor->dtype != DTYPE_I8)
            memcpy(to + 2 * i, &half, sizeof half);
    }
}

static inline void tiny_put_directory(tiny_file *file)
{
    unsigned char *at = file->bytes;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const tiny_tensor *tensor = &file->tensors[i];
        unsigned char *entry = at + tiny_tensor_entry(i);
        memcpy(entry, tensor->name, sizeof tensor->name);
        tiny_put_u32(entry + 96, (uint32_t)tensor->dtype);
        tiny_put_u32(entry + 100, tensor->columns > 0 ? 2 : 1);
        tiny_put_u64(entry + 104, (uint64_t)tensor->rows);
        tiny_put_u64(entry + 112, (uint64_t)tensor->columns);
        tiny_put_u64(entry + 136, tensor->offset);
        tiny_put_u64(entry + 144, tensor->size);
    }
    size_t offset = tiny_blob_entry(file, file->n_blobs);
    for (size_t i = 0; i < file->n_blobs; i++) {
        unsigned char *entry = at + tiny_blob_entry(file, i);
        offset = tiny_align(offset, 8);
        memcpy(entry, file->blobs[i].name, sizeof file->blobs[i].name);
        tiny_put_u64(entry + 48, offset);
        tiny_put_u64(entry + 56, file->blobs[i].size);
        memcpy(at + offset, file->blobs[i].data, file->blobs[i].size);
        offset += file->blobs[i].size;
    }
}

static inline void tiny_fill(tiny_file *file)
{
    size_t end = tiny_blob_entry(file, file->n_blobs);
    for (size_t i = 0; i < file->n_blobs; i++)
        end = tiny_align(end, 8) + file->blobs[i].size;
    file->meta_size = end = tiny_align(end, 64);
    for (size_t i = 0; i < file->n_tensors; i++) {
        tiny_tensor *tensor = &file->tensors[i];
        size_t n = (size_t)(tensor->rows * (tensor->columns > 0 ? tensor->columns : 1));
        tensor->offset = tiny_align(end, 64);
        tensor->size = n * dtype_size((tensor_dtype)tensor->dtype);
        end = tensor->offset + tensor->size;
    }
    file->size = end;
    file->bytes = calloc(1, file->size);
    memcpy(file->bytes, "TINYLOOP", 8);
    tiny_put_u32(file->bytes + 8, 1);
    tiny_put_u64(file->bytes + 16, file->size);
    tiny_put_u64(file->bytes + 24, file->meta_size);
    tiny_put_u64(file->bytes + 32, CONFIG_N_FIELDS);
    tiny_put_u64(file->bytes + 40, file->n_tensors);
    tiny_put_u64(file->bytes + 48, file->n_blobs);
    memcpy(file->bytes + 64, &file->config, sizeof file->config);
    tiny_put_directory(file);
    for (size_t i = 0; i < file->n_tensors; i++)
        tiny_put_weights(file->bytes + file->tensors[i].offset, &file->tensors[i], file->seed);
}

/* The header's checksum, after a change of the bytes before the tensors. */
static inline void tiny_seal_meta(tiny_file *file)
{
    tiny_put_u32(file->bytes + 12, crc32_update(0, file->bytes + 16, file->meta_size - 16));
}

static inline void tiny_seal(tiny_file *file)
{
    for (size_t i = 0; i < file->n_tensors; i++)
        tiny_put_u32(file->bytes + tiny_tensor_entry(i) + 152,
                     crc32_update(0, file->bytes + file->tensors[i].offset, file->tensors[i].size));
    tiny_seal_meta(file);
}

static inline tiny_file *tiny_make(const tiny_spec *spec)
{
    tiny_file *file = tiny_plan(spec);
    tiny_fill(file);
    tiny_seal(file);
    return file;
}

static inline void tiny_free(tiny_file *file)
{
    free(file->bytes);
    free(file);
}

/* The tensor of that name; NULL if there is none. */
static inline tiny_tensor *tiny_find(tiny_file *file, const char *name)
{
    for (size_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].name, name) == 0)
            return &file->tensors[i];
    return NULL;
}

/* ---- loading ---------------------------------------------------------------------------------- */

/* A file of these bytes that lives in memory only, as long as the descriptor that is returned;
 * -1 if the system gives none. */
static inline int tiny_open(char path[64], const void *bytes, size_t size)
{
    int fd = memfd_create("tiny.tinyloop", MFD_CLOEXEC);
    size_t done = 0;
    while (fd >= 0 && done < size) {
        ssize_t n = write(fd, (const char *)bytes + done, size - done);
        if (n <= 0) {
            close(fd);
            return -1;
        }
        done += (size_t)n;
    }
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

static inline tl_status tiny_load_bytes(tl_model **out, const void *bytes, size_t size,
                                        const tl_model_options *options)
{
    char path[64];
    *out = NULL;
    int fd = tiny_open(path, bytes, size);
    if (fd < 0)
        return TL_STATUS_INTERNAL;
    tl_status status = tl_model_load(out, path, options);
    close(fd);
    return status;
}

/* Options for tests: short sequences, few threads. */
static inline tl_model_options tiny_options(int threads)
{
    tl_model_options options = TL_MODEL_OPTIONS_INIT;
    options.max_seq_len = 256;
    options.threads = threads;
    return options;
}

/* NULL options: tiny_options(1). Ends the program if the model does not load: no test can go on
 * without one. */
static inline tl_model *tiny_load(const tiny_spec *spec, const tl_model_options *options)
{
    tl_model_options standard = tiny_options(1);
    tiny_file *file = tiny_make(spec);
    tl_model *model;
    tl_status status =
        tiny_load_bytes(&model, file->bytes, file->size, options ? options : &standard);
    tiny_free(file);
    if (status != TL_STATUS_OK) {
        fprintf(stderr, "a tiny model does not load: %s\n", tl_last_error());
        exit(2);
    }
    return model;
}

/* n token ids of a small vocabulary, the same for the same seed. */
static inline void tiny_tokens(int32_t *tokens, size_t n, int64_t vocab, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(random_uniform(seed, i) * (double)vocab);
}

#endif
