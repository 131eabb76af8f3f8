/* Writes the fuzzer's seeds: the smallest models of each kind that the reader tells apart.
 *     make_seeds FOLDER */
#include "../c/tiny_model.h"

/* clang-format off */
static const struct { const char *name; tiny_spec spec; } seeds[] = {
    {"looped_f32", {.vocab = 3, .hidden = 2, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ff = 1,
                    .core = 1, .inject = true, .core_norm = true, .tied = true,
                    .dtype = DTYPE_F32, .loops = 2, .seed = 1}},
    {"plain_f16_llama3", {.vocab = 4, .hidden = 3, .n_heads = 2, .n_kv_heads = 1, .head_dim = 2,
                          .ff = 2, .prelude = 1, .llama3 = true,
                          .dtype = DTYPE_F16, .loops = 1, .seed = 2}},
    {"looped_bf16_untied", {.vocab = 5, .hidden = 3, .n_heads = 2, .n_kv_heads = 2, .head_dim = 2,
                            .ff = 3, .core = 1,
                            .dtype = DTYPE_BF16, .loops = 3, .loops_max_trained = 2, .seed = 3}},
    {"mixed_two_stages", {.vocab = 3, .hidden = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2,
                          .ff = 1, .prelude = 1, .core = 1, .inject = true, .tied = true,
                          .dtype = TINY_MIXED, .loops = 1, .seed = 4}},
    {"ouro", {.vocab = 3, .hidden = 2, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ff = 1,
              .core = 1, .dtype = DTYPE_F32, .loops = 3, .seed = 5, .wiring = tiny_ouro}},
    {"huginn", {.vocab = 3, .hidden = 2, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ff = 1,
                .prelude = 1, .core = 1, .tied = true,
                .dtype = DTYPE_BF16, .loops = 2, .seed = 6, .wiring = tiny_huginn}},
    {"olmo_int8", {.vocab = 3, .hidden = 2, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ff = 2,
                   .core = 1, .coda = 1,
                   .dtype = DTYPE_I8, .loops = 2, .seed = 7, .wiring = tiny_olmo}},
    {"parcae", {.vocab = 3, .hidden = 5, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ff = 2,
                .prelude = 1, .core = 1, .tied = true,
                .dtype = DTYPE_F16, .loops = 2, .seed = 8, .wiring = tiny_parcae}},
    {"iquest", {.vocab = 3, .hidden = 2, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ff = 1,
                .core = 1, .dtype = DTYPE_F32, .loops = 2, .seed = 9, .wiring = tiny_iquest}},
    {"hrm", {.vocab = 3, .hidden = 2, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2, .ff = 1,
             .prelude = 1, .core = 1, .dtype = DTYPE_BF16, .seed = 10, .wiring = tiny_hrm}},
};
/* clang-format on */

static bool write_seed(const char *folder, const char *name, const tiny_file *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *stream = fopen(path, "wb");
    bool written = stream != NULL && fwrite(file->bytes, file->size, 1, stream) == 1;
    if (stream != NULL && fclose(stream) != 0)
        written = false;
    if (!written)
        perror(path);
    return written;
}

int main(int argc, char **argv)
{
    static const int32_t end_ids[] = {0, 2};
    if (argc != 2) {
        fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 2;
    }
    for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) {
        tiny_spec spec = seeds[i].spec;
        spec.end_ids = end_ids;
        spec.n_end_ids = 1 + i % 2;
        tiny_file *file = tiny_make(&spec);
        bool written = write_seed(argv[1], seeds[i].name, file);
        tiny_free(file);
        if (!written)
            return 1;
    }
    return 0;
}
