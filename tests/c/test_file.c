/* model/file.c and weights.c: what a .tinyloop file may hold; everything else is refused with a
 * message. */
#include "load_check.h"

static const tl_model_options *verify_options(void)
{
    static tl_model_options options;
    options = tiny_options(1);
    options.verify = 1;
    return &options;
}

/* A file of which a part of every kind can be damaged. */
static tiny_file *make_with_blob(void)
{
    const int32_t end_ids[] = {3};
    tiny_spec spec = TINY_SPEC;
    spec.end_ids = end_ids;
    spec.n_end_ids = 1;
    return tiny_make(&spec);
}

/* ---- sound files ---- */

/* Scales of int8 weights are none. */
static int64_t n_parameters(const tiny_file *file)
{
    int64_t n = 0;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const tiny_tensor *t = &file->tensors[i];
        if (strstr(t->name, ".scale") == NULL)
            n += t->rows * (t->columns > 0 ? t->columns : 1);
    }
    return n;
}

TEST(sound_files_load)
{
    for (size_t i = 0; i < TINY_N_SPECS; i++) {
        tiny_file *file = tiny_make(&tiny_specs[i]);
        tl_model *model;
        REQUIRE_OK(tiny_load_bytes(&model, file->bytes, file->size, verify_options()));
        tl_model_info info = {.size = sizeof info};
        CHECK_OK(tl_model_get_info(&info, model));
        const tiny_spec *spec = &tiny_specs[i];
        CHECK_EQ(info.n_parameters, n_parameters(file));
        CHECK_EQ(info.vocab_size, spec->vocab);
        CHECK_EQ(info.hidden_size, spec->hidden);
        CHECK_EQ(info.n_heads, spec->n_heads);
        CHECK_EQ(info.n_kv_heads, spec->n_kv_heads);
        CHECK_EQ(info.head_dim, spec->head_dim);
        CHECK_EQ(info.n_layers, spec->prelude + spec->core + spec->coda);
        const model_config *c = &file->config;
        CHECK_EQ(info.loops_default, spec->core == 0                ? 1
                                     : c->schedule == SCHEDULE_FLAT ? spec->loops
                                                                    : c->cycles_high);
        CHECK_EQ(info.inner_loops_default, c->cycles_low);
        CHECK_EQ(info.two_sided_prefix, c->mask);
        CHECK_EQ(info.loops_min, 1);
        CHECK_EQ(info.loops_max, spec->core > 0 ? 1024 : 1);
        use_model(model);
        tl_model_release(model);
        tiny_free(file);
    }
}

TEST(the_shipped_model_loads)
{
    tl_model *model;
    REQUIRE_OK(tl_model_load(&model, test_model_path(), verify_options()));
    use_model(model);
    tl_model_release(model);
}

TEST(blobs_are_handed_on)
{
    const int32_t end_ids[] = {3, 49};
    tiny_spec spec = TINY_SPEC;
    spec.end_ids = end_ids;
    spec.n_end_ids = 2;
    tl_model *model = tiny_load(&spec, NULL);
    const void *data;
    size_t size;
    CHECK_OK(tl_model_blob(&data, &size, model, "card"));
    CHECK(size == 13 && memcmp(data, "a small model", 13) == 0);
    CHECK_OK(tl_model_blob(&data, &size, model, "end_ids"));
    CHECK(size == sizeof end_ids && memcmp(data, end_ids, sizeof end_ids) == 0);
    CHECK_OK(tl_model_blob(&data, &size, model, "chat_template"));
    CHECK(data == NULL && size == 0);
    tl_model_release(model);
}

TEST(a_file_without_blobs_loads)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_plan(&spec);
    file->n_blobs = 0;
    tiny_fill(file);
    tiny_seal(file);
    CHECK_OK(load_status(file, verify_options()));
    tiny_free(file);
}

/* ---- damage ---- */

TEST(every_flipped_byte_before_the_tensors_is_noticed)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < file->meta_size; i++) {
        unsigned char mask = (unsigned char)(1u << i % 8);
        file->bytes[i] ^= mask;
        bool held = CHECK(refused(load_status(file, NULL)));
        file->bytes[i] ^= mask;
        if (!held)
            break;
    }
    CHECK_OK(load_status(file, NULL));
    tiny_free(file);
}

TEST(verify_notices_a_flipped_weight)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t t = 0; t < file->n_tensors; t++) {
        const tiny_tensor *tensor = &file->tensors[t];
        const size_t at[] = {tensor->offset, tensor->offset + tensor->size / 2,
                             tensor->offset + tensor->size - 1};
        for (size_t i = 0; i < 3; i++) {
            file->bytes[at[i]] ^= 1; /* never the float's exponent: the model stays usable */
            CHECK_STATUS(load_status(file, verify_options()), TL_STATUS_FORMAT);
            CHECK_STR_HAS(tl_last_error(), tensor->name);
            CHECK_OK(load_status(file, NULL));
            file->bytes[at[i]] ^= 1;
        }
    }
    CHECK_OK(load_status(file, verify_options()));
    tiny_free(file);
}

TEST(verify_notices_a_wrong_checksum)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t t = 0; t < file->n_tensors; t++) {
        unsigned char *crc = file->bytes + tiny_tensor_entry(t) + 152;
        *crc ^= 1;
        tiny_seal_meta(file);
        CHECK_STATUS(load_status(file, verify_options()), TL_STATUS_FORMAT);
        CHECK_STR_HAS(tl_last_error(), file->tensors[t].name);
        CHECK_OK(load_status(file, NULL));
        *crc ^= 1;
        tiny_seal_meta(file);
    }
    tiny_free(file);
}

TEST(gaps_are_zero)
{
    tiny_file *file = make_with_blob();
    size_t n_gaps = 0;
    for (size_t t = 1; t < file->n_tensors; t++) {
        size_t begin = file->tensors[t - 1].offset + file->tensors[t - 1].size;
        size_t end = file->tensors[t].offset;
        for (size_t at = begin; at < end; at += at + 1 < end ? end - 1 - begin : 1, n_gaps++) {
            file->bytes[at] = 1;
            CHECK_STATUS(load_status(file, verify_options()), TL_STATUS_FORMAT);
            CHECK_STR_HAS(tl_last_error(), "gap before tensor");
            CHECK_OK(load_status(file, NULL));
            file->bytes[at] = 0;
        }
    }
    CHECK(n_gaps > 20);
    /* those around the blobs are under the checksum of the header: always checked */
    size_t card = tiny_blob_entry(file, file->n_blobs);
    CHECK_REFUSED(load_with(file, card + 13, "\1", 1), "gap before blob end_ids");
    CHECK_REFUSED(load_with(file, card + 16 + 4, "\1", 1), "gap after");
    CHECK_REFUSED(load_with(file, file->meta_size - 1, "\1", 1), "gap after");
    tiny_free(file);
}

/* ---- a sound checksum over unsound fields ---- */

/* Numbers that break sums and products of `bits` bits, and the neighbours of the real one. */
#define HOSTILE(value, bits)                                                                       \
    0, 1, 2, (value) + 1, (value)-1, (value) + 64, (value)-64, (value)*2, (value) / 2,             \
        UINT##bits##_C(1) << 31, UINT##bits##_C(1) << (bits - 2), UINT##bits##_C(1) << (bits - 1), \
        UINT##bits##_C(1) << bits / 2, (UINT##bits##_C(1) << bits / 2) - 1, INT##bits##_MAX,       \
        UINT##bits##_MAX, UINT##bits##_MAX - 1

static void check_u64s_refused(tiny_file *file, size_t at, const char *what)
{
    uint64_t value;
    memcpy(&value, file->bytes + at, sizeof value);
    const uint64_t bad[] = {HOSTILE(value, 64), UINT64_MAX - 63};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        test_check(bad[i] == value || refused(load_with(file, at, &bad[i], 8)), __FILE__, __LINE__,
                   "%s at byte %zu: %llu instead of %llu", what, at, (unsigned long long)bad[i],
                   (unsigned long long)value);
}

static void check_u32s_refused(tiny_file *file, size_t at, const char *what)
{
    uint32_t value;
    memcpy(&value, file->bytes + at, sizeof value);
    const uint32_t bad[] = {HOSTILE(value, 32), 100};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        test_check(bad[i] == value || refused(load_with(file, at, &bad[i], 4)), __FILE__, __LINE__,
                   "%s at byte %zu: %u instead of %u", what, at, bad[i], value);
}

TEST(header_fields)
{
    tiny_file *file = make_with_blob();
    check_u32s_refused(file, 8, "version");
    CHECK_STATUS(load_with(file, 8, &(uint32_t){2}, 4), TL_STATUS_UNSUPPORTED);
    check_u64s_refused(file, 16, "file_size");
    check_u64s_refused(file, 32, "n_fields");
    check_u64s_refused(file, 40, "n_tensors");
    check_u64s_refused(file, 48, "n_blobs");
    check_u64s_refused(file, 56, "reserved");
    CHECK_STATUS(load_with(file, 0, "TINYLOOQ", 8), TL_STATUS_FORMAT);
    uint64_t zero = 0;
    CHECK(refused(load_with(file, 40, &zero, 8)));
    CHECK(refused(load_with(file, 48, &zero, 8)));
    /* the checksum covers what meta_size says, so each value needs its own */
    uint64_t meta_size = file->meta_size;
    const uint64_t bad[] = {0,
                            1,
                            63,
                            64,
                            meta_size - 64,
                            meta_size - 1,
                            meta_size + 1,
                            meta_size + 64,
                            file->size / 64 * 64,
                            file->size,
                            UINT64_MAX - 63};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tiny_put_u64(file->bytes + 24, bad[i]);
        if (bad[i] > 16 && bad[i] <= file->size)
            tiny_put_u32(file->bytes + 12, crc32_update(0, file->bytes + 16, bad[i] - 16));
        CHECK_STATUS(load_status(file, NULL), TL_STATUS_FORMAT);
    }
    tiny_free(file);
}

TEST(tensor_directory_fields)
{
    for (size_t s = 0; s < 2; s++) {
        tiny_file *file = tiny_make(&tiny_specs[s]);
        for (size_t i = 0; i < file->n_tensors; i++) {
            size_t entry = tiny_tensor_entry(i);
            check_u32s_refused(file, entry + 100, "n_dims");
            for (size_t d = 0; d < 4; d++)
                check_u64s_refused(file, entry + 104 + 8 * d, "shape");
            check_u64s_refused(file, entry + 136, "offset");
            check_u64s_refused(file, entry + 144, "size");
            check_u32s_refused(file, entry + 156, "reserved");
            /* another dtype of another width disagrees with the size */
            uint32_t dtype = (uint32_t)file->tensors[i].dtype;
            const uint32_t other[] = {dtype == 0 ? 1u : 0u, 3, 4, UINT32_MAX};
            for (size_t k = 0; k < 4; k++)
                CHECK(refused(load_with(file, entry + 96, &other[k], 4)));
        }
        tiny_free(file);
    }
}

TEST(tensor_names)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < file->n_tensors; i++) {
        char name[96] = {0};
        CHECK(refused(load_with(file, tiny_tensor_entry(i), name, 96))); /* empty */
        memset(name, 'n', 96);
        CHECK(refused(load_with(file, tiny_tensor_entry(i), name, 96))); /* not ended */
        memcpy(name, file->tensors[i].name, 96);
        name[95] = 'x';
        CHECK(refused(load_with(file, tiny_tensor_entry(i), name, 96))); /* a second word */
        memcpy(name, file->tensors[i].name, 96);
        name[0] ^= 0x80;
        CHECK(refused(load_with(file, tiny_tensor_entry(i), name, 96))); /* another name */
        const char *other = file->tensors[i == 0 ? 1 : 0].name;
        CHECK(refused(load_with(file, tiny_tensor_entry(i), other, 96))); /* twice */
        CHECK_STR_HAS(tl_last_error(), "two tensors");
    }
    tiny_free(file);
}

TEST(blob_directory_fields)
{
    tiny_file *file = make_with_blob();
    for (size_t i = 0; i < file->n_blobs; i++) {
        size_t entry = tiny_blob_entry(file, i);
        check_u64s_refused(file, entry + 48, "offset");
        const uint64_t bad[] = {0, 1ull << 20, 1ull << 32, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
        for (size_t k = 0; k < sizeof bad / sizeof *bad; k++)
            CHECK(refused(load_with(file, entry + 56, &bad[k], 8)));
        char name[48] = {0};
        CHECK(refused(load_with(file, entry, name, 48)));
        memset(name, 'n', 48);
        CHECK(refused(load_with(file, entry, name, 48)));
        memcpy(name, file->blobs[i].name, 48);
        name[47] = 'x';
        CHECK(refused(load_with(file, entry, name, 48)));
    }
    tiny_free(file);
}

/* Entries of which each is sound, but not where it stands. */
TEST(parts_that_overlap_or_change_places)
{
    const int32_t end_ids[] = {3, 4};
    tiny_spec spec = TINY_SPEC;
    spec.end_ids = end_ids;
    spec.n_end_ids = 2;
    tiny_file *file = tiny_make(&spec);
    unsigned char *sound = malloc(file->size);
    memcpy(sound, file->bytes, file->size);
    for (size_t i = 1; i < file->n_tensors; i++) {
        size_t entry = tiny_tensor_entry(i), other = tiny_tensor_entry(i - 1);
        CHECK_REFUSED(load_with(file, entry + 136, sound + other + 136, 8), "next free");
        memcpy(file->bytes + entry, sound + other, 160);
        memcpy(file->bytes + other, sound + entry, 160);
        tiny_seal_meta(file);
        CHECK_REFUSED(load_status(file, NULL), "next free");
        memcpy(file->bytes, sound, file->meta_size);
    }
    size_t card = tiny_blob_entry(file, 0), ids = tiny_blob_entry(file, 1);
    CHECK_REFUSED(load_with(file, ids + 48, sound + card + 48, 8), "blob end_ids");
    memcpy(file->bytes + card, sound + ids, 64);
    memcpy(file->bytes + ids, sound + card, 64);
    tiny_seal_meta(file);
    CHECK_REFUSED(load_status(file, NULL), "blob end_ids");
    free(sound);
    tiny_free(file);
}

TEST(blobs_of_one_name)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_plan(&spec);
    file->blobs[file->n_blobs++] = (tiny_blob){"card", "another", 7};
    tiny_fill(file);
    tiny_seal(file);
    CHECK_REFUSED(load_status(file, NULL), "two blobs card");
    tiny_free(file);
}

TEST(end_ids_must_be_token_ids)
{
    static const int32_t wrong[][2] = {{0, 50}, {-1, 0}, {INT32_MAX, 0}, {0, INT32_MIN}};
    for (size_t i = 0; i < 4; i++) {
        tiny_spec spec = TINY_SPEC;
        spec.end_ids = wrong[i];
        spec.n_end_ids = 2;
        tiny_file *file = tiny_make(&spec);
        CHECK_REFUSED(load_status(file, NULL), "end_ids");
        tiny_free(file);
    }
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_plan(&spec);
    file->blobs[file->n_blobs++] = (tiny_blob){"end_ids", "\0\0\0\0\0", 5};
    tiny_fill(file);
    tiny_seal(file);
    CHECK_REFUSED(load_status(file, NULL), "end_ids");
    tiny_free(file);
}

/* Removes a tensor from the list, or gives it another shape or dtype. False: it is as it was. */
static bool change_tensor(tiny_file *file, size_t i, int change)
{
    tiny_tensor *tensor = &file->tensors[i], old = *tensor;
    switch (change) {
    case 0:
        memmove(tensor, tensor + 1, (--file->n_tensors - i) * sizeof *tensor);
        return true;
    case 1:
        tensor->rows++;
        break;
    case 2:
        tensor->columns = tensor->columns > 1 ? tensor->columns - 1 : 1;
        break;
    case 3:
        tensor->columns = 0;
        break;
    default:
        tensor->dtype = DTYPE_I8;
    }
    return memcmp(&old, tensor, sizeof old) != 0;
}

/* Whether a layer has a value embedding is told by its gate alone. */
static const char *named_when_missing(const tiny_file *file, size_t i)
{
    bool gate = strstr(file->tensors[i].name, "value_gate") != NULL;
    return file->tensors[gate ? i + 1 : i].name;
}

TEST(tensors_that_are_missing_extra_or_misshaped)
{
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        if (s == TINY_LARGE)
            continue;
        tiny_file *whole = tiny_plan(&tiny_specs[s]);
        for (size_t i = 0; i < whole->n_tensors; i++) {
            for (int change = 0; change < 5; change++) {
                tiny_file *file = tiny_plan(&tiny_specs[s]);
                bool changed = change_tensor(file, i, change);
                tiny_fill(file);
                tiny_seal(file);
                if (changed)
                    CHECK_REFUSED(load_status(file, NULL), change > 0
                                                               ? whole->tensors[i].name
                                                               : named_when_missing(whole, i));
                tiny_free(file);
            }
        }
        tiny_free(whole);
        tiny_file *file = tiny_plan(&tiny_specs[s]);
        tiny_add(file, DTYPE_F32, 1, 1, "layers.99.attn.q.weight");
        tiny_fill(file);
        tiny_seal(file);
        CHECK_REFUSED(load_status(file, NULL), "layers.99.attn.q.weight");
        tiny_free(file);
    }
}

/* ---- int8 ---- */

/* Columns that are more than one group, so that a weight may have two kinds of scales. */
static tiny_file *plan_int8(void)
{
    tiny_spec spec = tiny_specs[TINY_LARGE];
    spec.dtype = DTYPE_I8;
    return tiny_plan(&spec);
}

TEST(scales_of_rows_or_of_groups)
{
    for (int64_t columns = 1; columns <= 3; columns++) {
        tiny_file *file = plan_int8();
        tiny_tensor *scale = tiny_find(file, "layers.1.mlp.down.scale"); /* of 133 columns */
        REQUIRE(scale != NULL && scale->columns == 2);
        scale->columns = columns;
        tiny_fill(file);
        tiny_seal(file);
        if (columns <= 2)
            CHECK_OK(load_status(file, verify_options()));
        else
            CHECK_REFUSED(load_status(file, NULL), "layers.1.mlp.down.scale");
        tiny_free(file);
    }
}

TEST(scales_that_are_wrong)
{
    for (int dtype = DTYPE_F16; dtype <= DTYPE_I8; dtype++) {
        tiny_file *file = plan_int8();
        tiny_find(file, "embed.scale")->dtype = dtype;
        tiny_fill(file);
        tiny_seal(file);
        CHECK_REFUSED(load_status(file, NULL), "embed.scale");
        CHECK_STR_HAS(tl_last_error(), "float32");
        tiny_free(file);
    }
    tiny_file *file = plan_int8(); /* of a weight that is not int8 */
    tiny_find(file, "layers.0.attn.q.weight")->dtype = DTYPE_BF16;
    tiny_fill(file);
    tiny_seal(file);
    CHECK_REFUSED(load_status(file, NULL), "layers.0.attn.q.scale");
    tiny_free(file);
}

/* ---- anything at all ---- */

static void check_change(tiny_file *file, size_t at, const void *bytes, size_t size)
{
    tl_status status = load_with(file, at, bytes, size);
    test_check(status == TL_STATUS_OK || refused(status), __FILE__, __LINE__,
               "another word of %zu bytes at %zu: status %d", size, at, (int)status);
}

/* Every word from the header to the last blob takes every hostile value, under a sound checksum:
 * refused, or a model that can be used. */
TEST(hostile_words_never_crash)
{
    const int32_t end_ids[] = {3};
    const tiny_spec spec = {.vocab = 5,
                            .hidden = 4,
                            .n_heads = 2,
                            .n_kv_heads = 1,
                            .head_dim = 2,
                            .ff = 3,
                            .core = 1,
                            .inject = true,
                            .core_norm = true,
                            .tied = true,
                            .dtype = DTYPE_BF16,
                            .loops = 2,
                            .end_ids = end_ids,
                            .n_end_ids = 1};
    tiny_file *file = tiny_make(&spec);
    for (size_t at = 16; at < file->meta_size; at += 8) {
        uint64_t value;
        memcpy(&value, file->bytes + at, 8);
        const uint64_t words[] = {HOSTILE(value, 64)};
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            check_change(file, at, &words[i], 8);
        for (size_t half = at; half < at + 8; half += 4) {
            const uint32_t low = (uint32_t)(value >> 8 * (half - at)),
                           halves[] = {HOSTILE(low, 32)};
            for (size_t i = 0; i < sizeof halves / sizeof *halves; i++)
                check_change(file, half, &halves[i], 4);
        }
    }
    CHECK_OK(load_status(file, verify_options()));
    tiny_free(file);
}

/* Random words over the config and the directories, under a sound checksum: refused, or a model
 * that can be used; its logits may be anything. */
TEST(random_changes_never_crash)
{
    enum { N_FILES = TINY_N_SPECS, N_ROUNDS = 2600 };
    for (uint64_t f = 0; f < N_FILES; f++) {
        if (f == TINY_LARGE)
            continue;
        tiny_file *file = tiny_make(&tiny_specs[f]);
        unsigned char *sound = malloc(file->meta_size);
        memcpy(sound, file->bytes, file->meta_size);
        for (uint64_t round = f; round < N_ROUNDS; round += N_FILES) {
            for (uint64_t i = 0; i <= round % 3; i++) {
                double u[3];
                for (uint64_t k = 0; k < 3; k++)
                    u[k] = random_uniform(99, (round * 3 + i) * 3 + k);
                size_t at = 24 + (size_t)(u[0] * (double)(file->meta_size - 24 - 8));
                size_t width = u[1] < 0.3 ? 1 : u[1] < 0.6 ? 4 : 8;
                const uint64_t words[] = {
                    0, 1, 2, 65536, UINT64_MAX, 1ull << 63, 1ull << 32, (uint64_t)(u[2] * 1e18)};
                memcpy(file->bytes + (width > 1 ? at - at % 4 : at), &words[(int)(u[2] * 8)],
                       width);
            }
            tiny_seal_meta(file);
            tl_status status = load_status(file, NULL);
            test_check(status == TL_STATUS_OK || refused(status), __FILE__, __LINE__,
                       "round %d: status %d", (int)round, (int)status);
            memcpy(file->bytes, sound, file->meta_size);
        }
        free(sound);
        tiny_free(file);
    }
}
