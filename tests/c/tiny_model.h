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
#include "tiny_specs.h"

#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { TINY_MAX_TENSORS = 160, TINY_MAX_BLOBS = 4 };

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

/* ---- what the file holds --------------------------------------------------------------------- */

/* columns = 0: a vector. Only matrices are int8, and bring their scales: one for each row, or in
 * files of an even seed groups of 128 columns. */
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
    if (dtype != DTYPE_I8)
        return;
    if (columns == 0 || strstr(tensor->name, "_gate") != NULL ||
        strncmp(tensor->name, "exit", 4) == 0) {
        tensor->dtype = DTYPE_F32;
        return;
    }
    tiny_tensor *scale = &file->tensors[file->n_tensors++];
    *scale = *tensor;
    strcpy(strstr(scale->name, ".weight"), ".scale");
    scale->columns = file->seed % 2 != 0 ? 1 : (columns + 127) / 128;
    scale->dtype = DTYPE_F32;
}

static inline void tiny_add_norms(tiny_file *file, int dtype, long long n)
{
    const model_config *c = &file->config;
    bool in = !c->norm_weightless && c->norm_placement != NORM_POST_BRANCH;
    bool out = !c->norm_weightless && c->norm_placement != NORM_PRE;
    for (int i = 0; i < 2; i++) {
        const char *block = i == 0 ? "attn" : "mlp";
        if (in)
            tiny_add(file, dtype, c->hidden_size, 0, "layers.%lld.%s_norm.weight", n, block);
        if (out)
            tiny_add(file, dtype, c->hidden_size, 0, "layers.%lld.%s_out_norm.weight", n, block);
    }
}

static inline bool tiny_is_looped(const model_config *c, int64_t layer)
{
    int64_t s = 0;
    while (layer >= config_stage_at(c, s).first_layer + config_stage_at(c, s).n_layers)
        s++;
    return config_stage_at(c, s).looped != 0;
}

static inline void tiny_add_attention(tiny_file *file, int dtype, long long n)
{
    const model_config *c = &file->config;
    int64_t hidden = c->hidden_size, hd = c->head_dim;
    int64_t q = c->n_heads * hd, kv = c->n_kv_heads * hd;
    bool full = c->qk_norm == QK_NORM_FULL;
    tiny_add(file, dtype, q, hidden, "layers.%lld.attn.q.weight", n);
    tiny_add(file, dtype, kv, hidden, "layers.%lld.attn.k.weight", n);
    tiny_add(file, dtype, kv, hidden, "layers.%lld.attn.v.weight", n);
    tiny_add(file, dtype, hidden, q, "layers.%lld.attn.o.weight", n);
    if (c->q_bias)
        tiny_add(file, dtype, q, 0, "layers.%lld.attn.q.bias", n);
    if (c->k_bias)
        tiny_add(file, dtype, kv, 0, "layers.%lld.attn.k.bias", n);
    if (c->v_bias)
        tiny_add(file, dtype, kv, 0, "layers.%lld.attn.v.bias", n);
    if (c->o_bias)
        tiny_add(file, dtype, hidden, 0, "layers.%lld.attn.o.bias", n);
    if (c->qk_norm && !c->qk_norm_weightless) {
        tiny_add(file, dtype, full ? q : hd, 0, "layers.%lld.attn.q_norm.weight", n);
        tiny_add(file, dtype, full ? kv : hd, 0, "layers.%lld.attn.k_norm.weight", n);
    }
    if (c->attn_out_gate)
        tiny_add(file, dtype, q, hidden, "layers.%lld.attn.gate.weight", n);
    if (c->value_embed && n % 2 != 0) {
        tiny_add(file, dtype, c->n_kv_heads, c->value_embed_channels,
                 "layers.%lld.attn.value_gate.weight", n);
        tiny_add(file, dtype, c->vocab_size, kv, "layers.%lld.attn.value_embed.weight", n);
    }
    if (c->loop_attention && tiny_is_looped(c, n)) {
        tiny_add(file, dtype, c->n_heads, hd, "layers.%lld.attn.loop_gate.weight", n);
        tiny_add(file, dtype, c->n_heads, 0, "layers.%lld.attn.loop_gate.bias", n);
    }
}

static inline void tiny_add_mlp(tiny_file *file, int dtype, long long n)
{
    const model_config *c = &file->config;
    int64_t hidden = c->hidden_size, ff = c->ff_size;
    if (c->mlp_kind == MLP_GATED)
        tiny_add(file, dtype, ff, hidden, "layers.%lld.mlp.gate.weight", n);
    tiny_add(file, dtype, ff, hidden, "layers.%lld.mlp.up.weight", n);
    tiny_add(file, dtype, hidden, ff, "layers.%lld.mlp.down.weight", n);
    if (c->mlp_bias && c->mlp_kind == MLP_GATED)
        tiny_add(file, dtype, ff, 0, "layers.%lld.mlp.gate.bias", n);
    if (c->mlp_bias) {
        tiny_add(file, dtype, ff, 0, "layers.%lld.mlp.up.bias", n);
        tiny_add(file, dtype, hidden, 0, "layers.%lld.mlp.down.bias", n);
    }
}

static inline void tiny_add_core(tiny_file *file, int dtype)
{
    const model_config *c = &file->config;
    int64_t hidden = c->hidden_size;
    if (c->norm_after_last == AFTER_LAST_OWN_NORM)
        tiny_add(file, dtype, hidden, 0, "after_last_norm.weight");
    if (c->state_init == STATE_INIT_TENSOR)
        tiny_add(file, dtype, hidden, 0, "state_init.weight");
    if (c->prelude_norm)
        tiny_add(file, dtype, hidden, 0, "prelude_norm.weight");
    if (c->inject == INJECT_CONCAT_LINEAR)
        tiny_add(file, dtype, hidden, 2 * hidden, "inject.weight");
    if (c->inject == INJECT_DIAGONAL) {
        tiny_add(file, dtype, hidden, 0, "inject.a_log");
        tiny_add(file, dtype, hidden, 0, "inject.dt_bias");
        tiny_add(file, dtype, hidden, hidden, "inject.b.weight");
    }
    if (c->state_out_proj)
        tiny_add(file, dtype, hidden, hidden, "state_out.weight");
    if (c->exit_mode) {
        tiny_add(file, dtype, 1, hidden, "exit.weight");
        tiny_add(file, dtype, 1, 0, "exit.bias");
    }
}

/* All that the configuration calls for. The spec, whose own configuration may be another, gives
 * dtype, seed and end_ids; the last are borrowed until tiny_fill. */
static inline tiny_file *tiny_plan_for(const tiny_spec *spec, const model_config *config)
{
    tiny_file *file = calloc(1, sizeof *file);
    file->config = *config;
    file->seed = spec->seed;
    const model_config *c = &file->config;
    tiny_add(file, spec->dtype, c->vocab_size, c->hidden_size, "embed.weight");
    if (!c->tied_head)
        tiny_add(file, spec->dtype, c->vocab_size, c->hidden_size, "head.weight");
    if (c->final_norm == NORM_WITH_WEIGHT)
        tiny_add(file, spec->dtype, c->hidden_size, 0, "final_norm.weight");
    for (int64_t s = 0; s < c->n_stages; s++)
        if (config_stage_at(c, s).end_norm == NORM_WITH_WEIGHT)
            tiny_add(file, spec->dtype, c->hidden_size, 0, "stages.%d.norm.weight", (int)s);
    tiny_add_core(file, spec->dtype);
    for (int64_t n = 0; n < config_n_layers(c); n++) {
        tiny_add_norms(file, spec->dtype, n);
        tiny_add_attention(file, spec->dtype, n);
        tiny_add_mlp(file, spec->dtype, n);
    }
    file->blobs[file->n_blobs++] = (tiny_blob){"card", "a small model", 13};
    if (spec->n_end_ids > 0)
        file->blobs[file->n_blobs++] =
            (tiny_blob){"end_ids", spec->end_ids, spec->n_end_ids * sizeof *spec->end_ids};
    return file;
}

static inline tiny_file *tiny_plan(const tiny_spec *spec)
{
    const model_config config = tiny_config(spec);
    return tiny_plan_for(spec, &config);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

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
    if (strstr(tensor->name, ".scale"))
        scale = 0.01 / sqrt((double)tensor->rows);
    size_t n = tensor->size / dtype_size((tensor_dtype)tensor->dtype);
    for (size_t i = 0; i < n; i++) {
        float value = (float)(centre + scale * (2 * random_uniform(key, i) - 1));
        uint16_t half = tensor->dtype == DTYPE_F16 ? float_to_f16(value)
                                                   : (uint16_t)(float_to_bits(value) >> 16);
        if (tensor->dtype == DTYPE_F32)
            memcpy(to + 4 * i, &value, sizeof value);
        else if (tensor->dtype == DTYPE_I8)
            to[i] = (unsigned char)(int8_t)(127 * (2 * random_uniform(key, i) - 1));
        else
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

/* ---- loading --------------------------------------------------------------------------------- */

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

/* ---- keys ------------------------------------------------------------------------------------ */

/* `loops` of 0 are the file's; a nested schedule has as many inner loops. Tokens see only what is
 * before them, also in a prefix-LM: then a text may come in parts. */
static inline tl_cache_options tiny_key(const tl_model *model, int64_t loops, int64_t window)
{
    tl_model_info info = {.size = sizeof info};
    tl_model_get_info(&info, model);
    return (tl_cache_options){.size = sizeof(tl_cache_options),
                              .loops = loops,
                              .inner_loops = info.inner_loops_default > 0 ? loops : 0,
                              .cache_window = window,
                              .has_prefix_len = 1};
}

static inline void tiny_set_key(tl_generate_options *options, const tl_cache_options *key)
{
    options->loops = key->loops;
    options->inner_loops = key->inner_loops;
    options->cache_window = key->cache_window;
    options->prefix_len = key->prefix_len;
    options->has_prefix_len = key->has_prefix_len;
}

/* n token ids of a small vocabulary, the same for the same seed. */
static inline void tiny_tokens(int32_t *tokens, size_t n, int64_t vocab, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        tokens[i] = (int32_t)(random_uniform(seed, i) * (double)vocab);
}

#endif
