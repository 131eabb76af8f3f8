/* libFuzzer target over the reader of .tinyloop files: any bytes are refused with a sentence, or
 * are a model that can generate. */
#include "../c/tiny_model.h"

#include "tinyloop.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);

static void require(bool held, const char *what, tl_status status)
{
    if (held)
        return;
    fprintf(stderr, "%s: status %d, %s\n", what, (int)status, tl_last_error());
    abort();
}

/* A few tokens, so that prefill, decode and the head run. */
static void use(tl_model *model)
{
    tl_model_info info = {.size = sizeof info};
    require(tl_model_get_info(&info, model) == TL_STATUS_OK, "info", 0);
    const int32_t prompt[3] = {0, (int32_t)(info.vocab_size - 1), 0};
    int32_t tokens[3];
    size_t n_tokens;
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = 3;
    options.temperature = 0;
    tl_cache_options key = tiny_key(model, info.loops_min, 0);
    key.inner_loops = info.inner_loops_default > 0;
    tiny_set_key(&options, &key);
    options.has_prefix_len = 0; /* in a prefix-LM the prompt sees all of itself */
    tl_status status = tl_generate(tokens, 3, &n_tokens, model, prompt, 3, &options);
    require(status == TL_STATUS_OK || status == TL_STATUS_NUMERIC, "generate", status);
    float *gates = malloc((size_t)info.loops_min * 3 * sizeof *gates);
    status = tl_model_exit_logits(gates, model, prompt, 3, &key);
    require(status == TL_STATUS_OK || status == TL_STATUS_INVALID, "exit logits", status);
    free(gates);
    const void *card;
    size_t size;
    require(tl_model_blob(&card, &size, model, "card") == TL_STATUS_OK, "blob", 0);
    /* AddressSanitizer sees each byte being read */
    require(card == NULL || crc32_update(0, card, size) <= UINT32_MAX, "blob", 0);
}

static bool loads(const uint8_t *data, size_t size, bool verify)
{
    tl_model_options options = TL_MODEL_OPTIONS_INIT;
    options.max_seq_len = 6;
    options.threads = 1;
    options.verify = verify;
    options.kv_mode = verify ? TL_KV_MODE_FP32 : TL_KV_MODE_FP16;
    tl_model *model;
    tl_status status = tiny_load_bytes(&model, data, size, &options);
    require((status == TL_STATUS_OK) == (model != NULL), "load", status);
    require(model != NULL || status == TL_STATUS_FORMAT || status == TL_STATUS_UNSUPPORTED, "load",
            status);
    require(model != NULL || *tl_last_error() != '\0', "load says nothing", status);
    if (model != NULL)
        use(model);
    tl_model_release(model);
    return model != NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    bool plain = loads(data, size, false), verified = loads(data, size, true);
    require(plain || !verified, "verify passes what does not load", 0);
    return 0;
}

/* ---- mutation: what is changed blindly mostly gets its sizes and checksums made right ---- */

static uint64_t get_u64(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void repair_tensor_crcs(uint8_t *data, size_t size)
{
    uint64_t n_tensors = get_u64(data + 40);
    for (size_t i = 0; i < n_tensors && tiny_tensor_entry(i + 1) <= size; i++) {
        uint8_t *entry = data + tiny_tensor_entry(i);
        uint64_t offset = get_u64(entry + 136), bytes = get_u64(entry + 144);
        if (offset <= size && bytes <= size - offset)
            tiny_put_u32(entry + 152, crc32_update(0, data + offset, bytes));
    }
}

static void repair(uint8_t *data, size_t size, unsigned seed)
{
    if (size < 64)
        return;
    if (seed % 16 != 0)
        tiny_put_u64(data + 16, size);
    if (seed / 16 % 2 != 0)
        repair_tensor_crcs(data, size);
    uint64_t meta_size = get_u64(data + 24);
    if (seed / 32 % 16 != 0 && meta_size >= 16 && meta_size <= size)
        tiny_put_u32(data + 12, crc32_update(0, data + 16, meta_size - 16));
}

/* One aligned word of header, config or directories becomes a number that breaks sums. */
static void put_edge(uint8_t *data, size_t size, unsigned seed)
{
    static const uint64_t edges[] = {0,          1,          2,          1ull << 31, 1ull << 32,
                                     1ull << 62, 1ull << 63, UINT64_MAX, INT64_MAX};
    size_t n_words = (size < 4096 ? size : 4096) / 8;
    if (n_words == 0)
        return;
    uint8_t *word = data + (size_t)(random_uniform(1, seed) * (double)n_words) * 8;
    uint64_t old = get_u64(word), pick = (uint64_t)(random_uniform(2, seed) * 14);
    uint64_t near[] = {old + 1, old - 1, old + 64, old - 64, old * 2};
    tiny_put_u64(word, pick < 9 ? edges[pick] : near[pick - 9]);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    if (random_uniform(3, seed) < 0.5)
        put_edge(data, size, seed);
    else
        size = LLVMFuzzerMutate(data, size, max_size);
    repair(data, size, seed);
    return size;
}
