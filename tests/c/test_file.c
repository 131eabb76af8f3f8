/* model/: what a .tinyloop file may be, and that everything else is refused with a message. */
#include "test.h"
#include "tiny_model.h"

#include <sys/stat.h>
#include <sys/wait.h>

/* ---- helpers ---- */

static const tl_model_options *verify_options(void)
{
    static tl_model_options options;
    options = tiny_options(1);
    options.verify = 1;
    return &options;
}

/* Runs a little of a model that loaded, so that a wrong field that slipped through shows. */
static void use_model(tl_model *model)
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

/* The status of loading, NOT OK with a message; a model that loads nevertheless is used. */
static tl_status load_status(const tiny_file *file, const tl_model_options *options)
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

static bool refused(tl_status status)
{
    return status == TL_STATUS_FORMAT || status == TL_STATUS_UNSUPPORTED;
}

#define CHECK_REFUSED(FILE, PART)                                                                  \
    do {                                                                                           \
        CHECK(refused(load_status(FILE, NULL)));                                                   \
        CHECK_STR_HAS(tl_last_error(), PART);                                                      \
    } while (0)

static tl_status load_path(const char *path)
{
    tl_model *model;
    tl_status status = tl_model_load(&model, path, NULL);
    tl_model_release(model);
    return status;
}

/* ---- sound files ---- */

TEST(sound_files_load)
{
    for (size_t i = 0; i < TINY_N_SPECS; i++) {
        tiny_file *file = tiny_make(&tiny_specs[i]);
        tl_model *model;
        REQUIRE_OK(tiny_load_bytes(&model, file->bytes, file->size, verify_options()));
        tl_model_info info = {.size = sizeof info};
        CHECK_OK(tl_model_get_info(&info, model));
        int64_t n_parameters = 0;
        for (size_t t = 0; t < file->n_tensors; t++)
            n_parameters += file->tensors[t].rows *
                            (file->tensors[t].columns > 0 ? file->tensors[t].columns : 1);
        const tiny_spec *spec = &tiny_specs[i];
        CHECK_EQ(info.n_parameters, n_parameters);
        CHECK_EQ(info.vocab_size, spec->vocab);
        CHECK_EQ(info.hidden_size, spec->hidden);
        CHECK_EQ(info.n_heads, spec->n_heads);
        CHECK_EQ(info.n_kv_heads, spec->n_kv_heads);
        CHECK_EQ(info.head_dim, spec->head_dim);
        CHECK_EQ(info.n_layers, spec->prelude + spec->core + spec->coda);
        CHECK_EQ(info.loops_default, spec->core > 0 ? spec->loops : 1);
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

TEST(other_sizes_are_refused)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    tl_model *model;
    for (size_t size = 0; size < file->size; size += size < 200 ? 1 : 1 + size / 50) {
        CHECK_STATUS(tiny_load_bytes(&model, file->bytes, size, NULL), TL_STATUS_FORMAT);
        CHECK(model == NULL);
    }
    CHECK_STATUS(tiny_load_bytes(&model, file->bytes, file->size - 1, NULL), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "cut");
    unsigned char *longer = calloc(1, file->size + 64);
    memcpy(longer, file->bytes, file->size);
    CHECK_STATUS(tiny_load_bytes(&model, longer, file->size + 1, NULL), TL_STATUS_FORMAT);
    /* with a header that agrees, it is the tensors that do not */
    tiny_put_u64(longer + 16, file->size + 64);
    tiny_put_u32(longer + 12, crc32_update(0, longer + 16, file->meta_size - 16));
    CHECK_STATUS(tiny_load_bytes(&model, longer, file->size + 64, NULL), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "the tensors end");
    free(longer);
    tiny_free(file);
}

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

/* ---- a sound checksum over unsound fields ---- */

/* Writes `size` bytes at `at`, seals, loads, undoes. */
static tl_status load_with(tiny_file *file, size_t at, const void *bytes, size_t size)
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

static void check_u64s_refused(tiny_file *file, size_t at, const char *what)
{
    uint64_t value;
    memcpy(&value, file->bytes + at, sizeof value);
    const uint64_t bad[] = {value + 1, value - 1, value + 64, value * 2 + 1, 1ull << 31, 1ull << 62,
                            1ull << 63, UINT64_MAX, UINT64_MAX - 63};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        test_check(refused(load_with(file, at, &bad[i], 8)), __FILE__, __LINE__,
                   "%s at byte %zu: %llu instead of %llu", what, at, (unsigned long long)bad[i],
                   (unsigned long long)value);
}

static void check_u32s_refused(tiny_file *file, size_t at, const char *what)
{
    uint32_t value;
    memcpy(&value, file->bytes + at, sizeof value);
    const uint32_t bad[] = {value + 1, value + 2, value + 4, value - 1, 100, UINT32_MAX, 1u << 31};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        test_check(refused(load_with(file, at, &bad[i], 4)), __FILE__, __LINE__,
                   "%s at byte %zu: %u instead of %u", what, at, bad[i], value);
}

TEST(header_fields)
{
    const int32_t end_ids[] = {3};
    tiny_spec spec = TINY_SPEC;
    spec.end_ids = end_ids;
    spec.n_end_ids = 1;
    tiny_file *file = tiny_make(&spec);
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
    const uint64_t bad[] = {0,  1,  63, 64, meta_size - 64, meta_size - 1, meta_size + 1,
                            meta_size + 64, file->size / 64 * 64, file->size, UINT64_MAX - 63};
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
    const int32_t end_ids[] = {3};
    tiny_spec spec = TINY_SPEC;
    spec.end_ids = end_ids;
    spec.n_end_ids = 1;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < file->n_blobs; i++) {
        size_t entry = tiny_blob_entry(file, i);
        check_u64s_refused(file, entry + 48, "offset");
        const uint64_t bad[] = {0, 1ull << 20, 1ull << 63, UINT64_MAX, UINT64_MAX - 7};
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

TEST(end_ids_must_be_token_ids)
{
    static const int32_t wrong[][2] = {{0, 50}, {-1, 0}, {INT32_MAX, 0}, {0, INT32_MIN}};
    for (size_t i = 0; i < 4; i++) {
        tiny_spec spec = TINY_SPEC;
        spec.end_ids = wrong[i];
        spec.n_end_ids = 2;
        tiny_file *file = tiny_make(&spec);
        CHECK_REFUSED(file, "end_ids");
        tiny_free(file);
    }
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_plan(&spec);
    file->blobs[file->n_blobs++] = (tiny_blob){"end_ids", "\0\0\0\0\0", 5};
    tiny_fill(file);
    tiny_seal(file);
    CHECK_REFUSED(file, "end_ids");
    tiny_free(file);
}

TEST(tensors_that_are_missing_extra_or_misshaped)
{
    for (size_t s = 0; s < TINY_N_SPECS; s++) {
        tiny_file *whole = tiny_plan(&tiny_specs[s]);
        for (size_t i = 0; i < whole->n_tensors; i++) {
            for (int change = 0; change < 5; change++) {
                tiny_file *file = tiny_plan(&tiny_specs[s]);
                tiny_tensor *tensor = &file->tensors[i];
                char name[96];
                memcpy(name, tensor->name, sizeof name);
                if (change == 0) /* missing */
                    memmove(tensor, tensor + 1, (--file->n_tensors - i) * sizeof *tensor);
                else if (change == 1)
                    tensor->rows++;
                else if (change == 2)
                    tensor->columns = tensor->columns > 1 ? tensor->columns - 1 : 1;
                else if (change == 3)
                    tensor->columns = 0;
                else
                    tensor->dtype = DTYPE_I8;
                bool changed = change != 3 || whole->tensors[i].columns > 0;
                tiny_fill(file);
                tiny_seal(file);
                if (changed)
                    CHECK_REFUSED(file, name);
                tiny_free(file);
            }
        }
        tiny_free(whole);
        tiny_file *file = tiny_plan(&tiny_specs[s]);
        tiny_add(file, DTYPE_F32, 1, 1, "layers.99.attn.q.weight");
        tiny_fill(file);
        tiny_seal(file);
        CHECK_REFUSED(file, "layers.99.attn.q.weight");
        tiny_free(file);
    }
}

/* ---- the configuration ---- */

typedef struct field {
    const char *name;
    bool is_float;
} field;

static const field fields[] = {
#define FIELD_I(name) {#name, false},
#define FIELD_F(name) {#name, true},
    CONFIG_FIELDS(FIELD_I, FIELD_F)};

/* For each field values that are refused, and what the message names if not the field itself.
 * Fields that take any value at all are not here. */
typedef struct bad_field {
    const char *name;
    double values[4]; /* up to the first that is NAN; then the float fields get NaN too */
    const char *named;
} bad_field;

#define STAGE(n)                                                                                   \
    {"stage" #n "_first_layer", {-1, 7, 1e18, NAN}, "first_layer"},                                \
        {"stage" #n "_n_layers", {-1, 65537, 1e18, NAN}, "n_layers"},                              \
        {"stage" #n "_looped", {-1, 2, 3, NAN}, "looped"},                                         \
    {                                                                                              \
        "stage" #n "_end_norm", {-1, 2, 3, NAN}, "end_norm"                                        \
    }

static const bad_field bad_fields[] = {
    {"vocab_size", {0, -1, 16777217, 1e18}, NULL},
    {"hidden_size", {0, -1, 131073, 1e18}, NULL},
    {"n_heads", {0, -1, 4097, NAN}, NULL},
    {"n_kv_heads", {0, -1, 4097, 1e18}, NULL},
    {"head_dim", {0, 3, 258, -2}, NULL},
    {"ff_size", {0, -1, 1048577, 1e18}, NULL},
    {"max_positions", {-1, 2147483649.0, NAN}, NULL},
    {"norm_placement", {1, 2, 3, -1}, NULL},
    {"norm_weightless", {1, -1, NAN}, NULL},
    {"norm_eps", {0, -1e-6, INFINITY, NAN}, NULL},
    {"qk_norm", {1, 2, -1, NAN}, NULL},
    {"qk_norm_after_rope", {1, -1, NAN}, NULL},
    {"qk_norm_weightless", {1, -1, NAN}, NULL},
    {"qk_norm_eps", {1e-6, -1, INFINITY, NAN}, NULL},
    {"q_bias", {1, -1, NAN}, NULL},
    {"k_bias", {1, -1, NAN}, NULL},
    {"v_bias", {1, -1, NAN}, NULL},
    {"o_bias", {1, -1, NAN}, NULL},
    {"mlp_bias", {1, -1, NAN}, NULL},
    {"attn_out_gate", {1, -1, NAN}, NULL},
    {"value_embed", {1, -1, NAN}, NULL},
    {"value_embed_channels", {1, -1, NAN}, NULL},
    {"mlp_kind", {1, -1, NAN}, NULL},
    {"activation", {1, 2, 3, -1}, NULL},
    {"activation_scale", {0, 2, -1, INFINITY}, NULL},
    {"rope_style", {1, 2, -1, NAN}, NULL},
    {"rope_theta", {0, -1, INFINITY, NAN}, NULL},
    {"rotary_dim", {0, 8, 12, -1}, NULL},
    {"rope_scaling", {1, 3, -1, 4}, NULL},
    {"rope_beta_fast", {1, NAN}, NULL},
    {"rope_beta_slow", {1, NAN}, NULL},
    {"rope_attention_factor", {1, NAN}, NULL},
    {"embed_scale", {0, 2, NAN}, NULL},
    {"tied_head", {2, -1, NAN}, NULL},
    {"logit_scale", {0, 2, NAN}, NULL},
    {"logit_softcap", {30, -1, NAN}, NULL},
    {"mask", {1, -1, NAN}, NULL},
    {"final_norm", {0, 2, -1, NAN}, NULL},
    {"n_stages", {0, -1, 5, 1e18}, NULL},
    STAGE(0),
    STAGE(1),
    STAGE(2),
    STAGE(3),
    {"loops_default", {-1, 1025, NAN}, NULL},
    {"loops_min", {-1, 1025, 3, NAN}, NULL}, /* 3 is above the default, 2 */
    {"loops_max", {-1, 1025, 1, NAN}, NULL},
    {"loops_max_trained", {-1, -1e18, NAN}, NULL},
    {"schedule", {1, -1, NAN}, NULL},
    {"cycles_high", {1, -1, NAN}, NULL},
    {"cycles_low", {1, -1, NAN}, NULL},
    {"restart", {1, -1, NAN}, NULL},
    {"damping", {0, 0.5, 2, NAN}, NULL},
    {"state_init", {1, 3, 4, -1}, NULL},
    {"init_std", {1, NAN}, NULL},
    {"init_cut", {1, NAN}, NULL},
    {"init_scale", {1, NAN}, NULL},
    {"inject", {2, 3, 4, -1}, NULL},
    {"inject_source", {0, 2, -1, NAN}, NULL},
    {"inject_skip_first", {1, -1, NAN}, NULL},
    {"state_out_proj", {1, -1, NAN}, NULL},
    {"prelude_norm", {1, -1, NAN}, NULL},
    {"clp_a", {1, NAN}, NULL},
    {"clp_b", {1, NAN}, NULL},
    {"clp_shift", {1, NAN}, NULL},
    {"loop_norm", {1, -1, NAN}, NULL},
    {"feed_normed", {1, -1, NAN}, NULL},
    {"norm_after_last", {1, 2, -1, NAN}, NULL},
    {"loop_attention", {1, -1, NAN}, NULL},
    {"loop_window", {1, -1, NAN}, NULL},
    {"gate_input", {1, -1, NAN}, NULL},
    {"exit_mode", {1, 2, 4, -1}, NULL},
    {"exit_threshold", {1, NAN}, NULL},
    {"exit_readout", {1, -1, NAN}, NULL},
    {"kv_policy_default", {1, -1, NAN}, NULL},
    {"lora_rank", {1, -1, NAN}, NULL},
    {"lora_alpha", {1, NAN}, NULL},
    {"loop_embed", {1, -1, NAN}, NULL},
};

/* Of no meaning for the model at hand, so any value does: ids and hints, and the scaling of rotary
 * frequencies while rope_scaling is 0. */
static const char *const free_fields[] = {
    "bos_id",      "pad_id",
    "rope_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_original_positions",
    "kv_policies_allowed"};

static size_t field_offset(const char *name, bool *is_float)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++) {
        if (strcmp(fields[i].name, name) == 0) {
            *is_float = fields[i].is_float;
            return 64 + 8 * i;
        }
    }
    fprintf(stderr, "no field is named %s\n", name);
    exit(2);
}

static tl_status load_with_field(tiny_file *file, const char *name, double value)
{
    bool is_float;
    size_t at = field_offset(name, &is_float);
    int64_t whole = is_float ? 0 : (int64_t)value;
    return is_float ? load_with(file, at, &value, 8) : load_with(file, at, &whole, 8);
}

TEST(every_field_has_its_rule)
{
    for (size_t i = 0; i < CONFIG_N_FIELDS; i++) {
        int n = 0;
        for (size_t k = 0; k < sizeof bad_fields / sizeof *bad_fields; k++)
            n += strcmp(bad_fields[k].name, fields[i].name) == 0;
        for (size_t k = 0; k < sizeof free_fields / sizeof *free_fields; k++)
            n += strcmp(free_fields[k], fields[i].name) == 0;
        test_check(n == 1, __FILE__, __LINE__, "%s is tested %d times", fields[i].name, n);
    }
}

TEST(unsupported_fields_are_refused_by_name)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    for (size_t i = 0; i < sizeof bad_fields / sizeof *bad_fields; i++) {
        const bad_field *bad = &bad_fields[i];
        bool is_float;
        field_offset(bad->name, &is_float);
        for (size_t v = 0; v < 4; v++) {
            if (isnan(bad->values[v]) && !is_float)
                break;
            if (!test_check(refused(load_with_field(file, bad->name, bad->values[v])), __FILE__,
                            __LINE__, "%s = %g loads", bad->name, bad->values[v]))
                continue;
            CHECK_STR_HAS(tl_last_error(), bad->named ? bad->named : bad->name);
            if (isnan(bad->values[v]))
                break;
        }
    }
    for (size_t i = 0; i < sizeof free_fields / sizeof *free_fields; i++) {
        CHECK_OK(load_with_field(file, free_fields[i], -1));
        CHECK_OK(load_with_field(file, free_fields[i], 1e18));
    }
    CHECK_OK(load_with_field(file, "loops_max_trained", 1e18));
    CHECK_OK(load_with_field(file, "max_positions", 2147483648.0));
    tiny_free(file);
}

TEST(fields_that_contradict_each_other)
{
    tiny_spec spec = TINY_SPEC;
    spec.n_heads = 3;
    spec.n_kv_heads = 2;
    tiny_file *file = tiny_make(&spec);
    CHECK_REFUSED(file, "n_heads");
    tiny_free(file);

    tiny_spec plain = tiny_specs[4];
    file = tiny_make(&plain);
    CHECK(refused(load_with_field(file, "state_init", 2)));
    CHECK_STR_HAS(tl_last_error(), "state_init");
    CHECK(refused(load_with_field(file, "inject", 1)));
    CHECK_STR_HAS(tl_last_error(), "inject");
    tiny_free(file);

    spec = (tiny_spec)TINY_SPEC;
    spec.inject = false;
    file = tiny_make(&spec);
    CHECK(refused(load_with_field(file, "state_init", 2)));
    CHECK_STR_HAS(tl_last_error(), "state_init");
    CHECK(refused(load_with_field(file, "stage0_looped", 1)));
    CHECK_STR_HAS(tl_last_error(), "looped");
    CHECK(refused(load_with_field(file, "n_stages", 2)));
    CHECK(refused(load_with_field(file, "n_stages", 4)));
    tiny_free(file);
}

TEST(llama3_scaling_needs_its_numbers)
{
    static const struct {
        const char *name;
        double values[3];
    } wrong[] = {{"rope_factor", {0, -1, NAN}},
                 {"rope_low_freq_factor", {0, -1, NAN}},
                 {"rope_high_freq_factor", {1, 0, NAN}}, /* not above low */
                 {"rope_original_positions", {0, -1, -1e18}}};
    tiny_spec spec = TINY_SPEC;
    spec.llama3 = true;
    tiny_file *file = tiny_make(&spec);
    CHECK_OK(load_status(file, NULL));
    for (size_t i = 0; i < 4; i++) {
        for (size_t v = 0; v < 3; v++) {
            CHECK(refused(load_with_field(file, wrong[i].name, wrong[i].values[v])));
            CHECK_STR_HAS(tl_last_error(), wrong[i].name);
        }
    }
    CHECK(refused(load_with_field(file, "rope_factor", INFINITY)));
    CHECK(refused(load_with_field(file, "rope_high_freq_factor", INFINITY)));
    tiny_free(file);
}

/* ---- anything at all ---- */

/* Random words over the config and the directories, under a sound checksum: refused, or a model
 * that can be used; its logits may be anything. */
TEST(random_changes_never_crash)
{
    for (uint64_t round = 0; round < 3000; round++) {
        tiny_file *file = tiny_make(&tiny_specs[round % 5]);
        int n_changes = 1 + (int)(round % 3);
        for (int i = 0; i < n_changes; i++) {
            double u[3];
            for (uint64_t k = 0; k < 3; k++)
                u[k] = random_uniform(99, (round * 3 + (uint64_t)i) * 3 + k);
            size_t at = 24 + (size_t)(u[0] * (double)(file->meta_size - 24 - 8));
            size_t width = u[1] < 0.3 ? 1 : u[1] < 0.6 ? 4 : 8;
            const uint64_t words[] = {0, 1, 2, 65536, UINT64_MAX, 1ull << 63, 1ull << 32,
                                      (uint64_t)(u[2] * 1e18)};
            if (width > 1)
                at -= at % 4;
            memcpy(file->bytes + at, &words[(int)(u[2] * 8)], width);
        }
        tiny_seal_meta(file);
        tl_status status = load_status(file, NULL);
        bool known = status == TL_STATUS_OK || refused(status);
        test_check(known, __FILE__, __LINE__, "round %llu: status %d", (unsigned long long)round,
                   (int)status);
        tiny_free(file);
    }
}

/* ---- paths ---- */

TEST(paths_that_cannot_be_read)
{
    CHECK_STATUS(load_path("no/such/file.tinyloop"), TL_STATUS_IO);
    CHECK_STR_HAS(tl_last_error(), "no/such/file.tinyloop");
    CHECK_STATUS(load_path(""), TL_STATUS_IO);
    CHECK_STATUS(load_path("/"), TL_STATUS_IO);
    CHECK_STR_HAS(tl_last_error(), "regular");
    CHECK_STATUS(load_path("/dev/null"), TL_STATUS_IO);
    char path[64];
    int fd = tiny_open(path, "", 0);
    CHECK_STATUS(load_path(path), TL_STATUS_FORMAT);
    CHECK_STR_HAS(tl_last_error(), "0 bytes");
    char below[80];
    snprintf(below, sizeof below, "%s/x", path);
    CHECK_STATUS(load_path(below), TL_STATUS_IO);
    close(fd);
    char longest[5000];
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    CHECK_STATUS(load_path(longest), TL_STATUS_IO);
    CHECK(*tl_last_error() != '\0');
}

/* Only someone without special rights is kept out of a file; a child gives them up. */
TEST(a_file_without_read_permission)
{
    char folder[] = P_tmpdir "/tinyloop-test-XXXXXX", path[80];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/model", folder);
    FILE *stream = fopen(path, "w");
    REQUIRE(stream != NULL);
    fclose(stream);
    chmod(folder, 0755);
    chmod(path, 0);
    pid_t child = fork();
    if (child == 0) {
        bool dropped = geteuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0);
        _exit(dropped ? load_path(path) : 99);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == TL_STATUS_IO);
    unlink(path);
    rmdir(folder);
}

/* A pipe that nobody writes to must be refused, not waited for. */
TEST(a_named_pipe_is_refused_at_once)
{
    char folder[] = P_tmpdir "/tinyloop-test-XXXXXX", path[80];
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/pipe", folder);
    REQUIRE(mkfifo(path, 0600) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(5);
        _exit(load_path(path));
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == TL_STATUS_IO);
    unlink(path);
    rmdir(folder);
}
