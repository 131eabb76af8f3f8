/* Products beyond 2^31 elements and 4 GiB, and the edges of max_seq_len. What would take the memory
 * is mocked: addresses without memory behind them, sparse files, reservations. */
#include "backend/cpu/cpu.h"
#include "base/memory.h"
#include "kernel_sets.h"
#include "planes.h"
#include "run/evaluate.h"
#include "test.h"
#include "tiny_model.h"

#define GIBI ((size_t)1 << 30)
#define NOWHERE ((uintptr_t)1 << 44) /* the first of the addresses that nobody may touch */

/* ---- KV ---- */

TEST(offsets_in_a_block)
{
    kv_layout layout = kv_layout_make(TL_KV_MODE_FP32, 4, 4096, CONFIG_MAX_HEAD_DIM);
    size_t part = (size_t)4096 * CONFIG_MAX_HEAD_DIM * KV_BLOCK * 4; /* K of a layer; V too */
    CHECK_EQ(layout.layer_bytes, 2 * part);
    CHECK_EQ(kv_k_offset(&layout, 0, 4095), part / 4096 * 4095);
    CHECK_EQ(kv_v_offset(&layout, 0, 4095), part + part / 4096 * 4095);
    CHECK_EQ(kv_k_offset(&layout, 65535, 4095), 65535 * 2 * part + part / 4096 * 4095);
    CHECK_EQ(kv_v_offset(&layout, 65535, 4095), (65535 * 2 + 1) * part + part / 4096 * 4095);
    CHECK(kv_v_offset(&layout, 65535, 4095) > 4096 * GIBI);
}

typedef struct nowhere {
    size_t n_bytes; /* handed out so far */
    size_t n_copied;
    size_t n_filled;
} nowhere;

static void *nowhere_allocate(void *context, size_t bytes)
{
    nowhere *n = context;
    void *data = (void *)(NOWHERE + n->n_bytes);
    n->n_bytes += bytes;
    return data;
}

static void nowhere_release(void *context, void *data)
{
    CHECK((uintptr_t)data - NOWHERE < ((nowhere *)context)->n_bytes);
}

static void nowhere_copy(void *context, void *to, const void *from, size_t bytes)
{
    CHECK(to != from);
    ((nowhere *)context)->n_copied += bytes;
}

static void nowhere_fill(void *context, void *data, int byte, size_t bytes)
{
    CHECK(data != NULL && byte == 0xFF);
    ((nowhere *)context)->n_filled += bytes;
}

static kv_store *make_store(nowhere *n, const size_t *block_bytes, int n_classes, bool poison)
{
    *n = (nowhere){0};
    kv_memory memory = {nowhere_allocate, nowhere_release, nowhere_copy, nowhere_fill, n};
    kv_store *store;
    CHECK_OK(kv_store_create(&store, memory, block_bytes, n_classes, poison));
    return store;
}

TEST(stores_beyond_4_gib)
{
    nowhere n;
    const size_t block_bytes[] = {6 * GIBI + 64, (1 << 20) + 192};
    kv_store *store = make_store(&n, block_bytes, 2, true);
    enum { N_LARGE = 50, N_SMALL = 6000 };
    static kv_block *large[N_LARGE], *small[N_SMALL];
    REQUIRE_OK(kv_store_take(store, 0, N_LARGE, large));
    for (size_t i = 0; i < N_LARGE; i++)
        CHECK_EQ((uintptr_t)large[i]->data - NOWHERE, i * block_bytes[0]);
    REQUIRE_OK(kv_store_take(store, 1, N_SMALL, small));
    size_t in_use, in_slabs, total = N_LARGE * block_bytes[0] + N_SMALL * block_bytes[1];
    kv_store_bytes(store, &in_use, &in_slabs);
    CHECK(total > 300 * GIBI);
    CHECK_EQ(in_use, total);
    CHECK_EQ(in_slabs, total); /* three small blocks in a slab, none left over */
    CHECK_EQ(n.n_bytes, total);
    CHECK_EQ(n.n_filled, total);
    kv_store_copy(store, large[0], large[1]);
    CHECK_EQ(n.n_copied, block_bytes[0]);
    for (size_t i = 0; i < N_LARGE; i++)
        kv_block_release(large[i]);
    for (size_t i = 0; i < N_SMALL; i++)
        kv_block_release(small[i]);
    kv_store_bytes(store, &in_use, &in_slabs);
    CHECK_EQ(in_use, 0);
    CHECK_EQ(in_slabs, block_bytes[0] + 3 * block_bytes[1]); /* an idle slab of each */
    kv_store_destroy(store);
}

TEST(sequences_of_large_blocks)
{
    nowhere n;
    const size_t block_bytes[] = {6 * GIBI, 5 * GIBI};
    kv_store *store = make_store(&n, block_bytes, 2, false);
    kv_sequence sequence, clone;
    REQUIRE_OK(init_planes(&sequence, store, (const int[]){0, 1, 1}, 3, 0));
    REQUIRE_OK(kv_sequence_reserve(&sequence, 99 * KV_BLOCK + 7));
    kv_sequence_commit(&sequence, 99 * KV_BLOCK + 7);
    CHECK_EQ(kv_sequence_bytes(&sequence), 100 * 16 * GIBI);
    uintptr_t last = (uintptr_t)kv_sequence_table(&sequence, 2)[99];
    CHECK_EQ(last - NOWHERE, 100 * 11 * GIBI + 99 * 5 * GIBI);
    REQUIRE_OK(kv_sequence_clone(&clone, &sequence));
    REQUIRE_OK(kv_sequence_reserve(&clone, 1));
    CHECK_EQ(n.n_copied, 16 * GIBI); /* the half-filled block of each plane */
    kv_sequence_clear(&clone);
    kv_sequence_clear(&sequence);
    kv_store_destroy(store);
}

/* A window keeps few blocks, but tables are indexed by position. */
TEST(sequences_beyond_2_31_positions)
{
    nowhere n;
    kv_store *store = make_store(&n, (const size_t[]){1 << 20}, 1, false);
    kv_sequence sequence;
    int64_t start = (INT64_C(1) << 31) + 5 * KV_BLOCK;
    size_t block = (size_t)start / KV_BLOCK;
    REQUIRE_OK(init_planes(&sequence, store, (const int[]){0}, 1, 40));
    sequence.planes[0].first_block = sequence.n_blocks =
        block; /* as a window of long ago left it */
    sequence.length = start;
    REQUIRE_OK(kv_sequence_reserve(&sequence, 3 * KV_BLOCK + 1));
    CHECK_EQ(sequence.n_blocks, block + 4);
    CHECK_EQ(kv_sequence_bytes(&sequence), 4 << 20);
    for (size_t b = 0; b < 4; b++)
        CHECK_EQ((uintptr_t)kv_sequence_table(&sequence, 0)[block + b], NOWHERE + (b << 20));
    kv_sequence_commit(&sequence, 3 * KV_BLOCK + 1);
    CHECK_EQ(sequence.length, start + 3 * KV_BLOCK + 1);
    CHECK_EQ(sequence.planes[0].first_block, block + 1); /* 40 back from 97 is 58 */
    CHECK_OK(kv_sequence_truncate(&sequence, start + 2 * KV_BLOCK + 8));
    CHECK_EQ(sequence.n_blocks, block + 3);
    CHECK_EQ(kv_sequence_bytes(&sequence), 2 << 20);
    CHECK_STATUS(kv_sequence_truncate(&sequence, start), TL_STATUS_INVALID);
    CHECK_OK(kv_sequence_truncate(&sequence, 0));
    kv_sequence_clear(&sequence);
    kv_store_destroy(store);
}

TEST(tables_larger_than_the_address_space)
{
    nowhere n;
    kv_store *store = make_store(&n, (const size_t[]){1 << 20}, 1, false);
    kv_sequence sequence;
    static const int planes[1024];
    REQUIRE_OK(init_planes(&sequence, store, planes, 1024, 0));
    CHECK_STATUS(kv_sequence_reserve(&sequence, INT64_MAX - 1), TL_STATUS_NOMEM);
    CHECK_EQ(sequence.n_blocks, 0);
    kv_sequence_clear(&sequence);
    kv_store_destroy(store);
    CHECK_EQ(n.n_bytes, 0);
}

/* ---- outputs: where they go, with a backend that writes nothing ---- */

typedef struct output_log {
    const float *base;
    size_t n_calls;
    size_t first[300]; /* elements from the base */
    size_t n_rows[300];
} output_log;

static output_log written;

static void log_output(const float *at, size_t n)
{
    if (!CHECK(written.n_calls < 300))
        return;
    written.first[written.n_calls] = ((uintptr_t)at - (uintptr_t)written.base) / sizeof *at;
    written.n_rows[written.n_calls++] = n;
}

static void mock_head(backend_pass *pass, size_t n, float *logits, lane *self)
{
    (void)pass;
    (void)self;
    log_output(logits, n);
}

static void mock_read_rows(backend_pass *pass, size_t first, size_t n, float *out, lane *self)
{
    (void)pass;
    (void)first;
    (void)self;
    log_output(out, n);
}

static tl_model *load_mocked(const backend_ops *ops)
{
    tl_model_options options = tiny_options(1);
    options.max_seq_len = 1024;
    tl_model *model = tiny_load(&tiny_specs[1], &options);
    model->backend = ops;
    written = (output_log){.base = (const float *)NOWHERE};
    return model;
}

TEST(logits_beyond_2_31)
{
    backend_ops ops = cpu_backend;
    ops.head = mock_head;
    tl_model *model = load_mocked(&ops);
    model->config.vocab_size = 1 << 24; /* what the mocked head is taken to write */
    const int32_t tokens[700] = {0};
    CHECK_OK(evaluate_logits(
        (float *)NOWHERE, model,
        &(evaluation){.tokens = tokens, .n_tokens = 700, .key = (cache_key){.loops = 1}}));
    CHECK_EQ(written.n_calls, 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK_EQ(written.first[i], (i << 8) << 24); /* 2^33 at the third */
        CHECK_EQ(written.n_rows[i], i < 2 ? 256 : 700 - 512);
    }
    tl_model_release(model);
}

TEST(states_beyond_2_31)
{
    backend_ops ops = cpu_backend;
    ops.read_rows = mock_read_rows;
    tl_model *model = load_mocked(&ops);
    model->config.hidden_size = 1 << 17;
    const int32_t tokens[700] = {0};
    enum { N_LOOPS = 64 };
    CHECK_OK(evaluate_states(
        (float *)NOWHERE, NULL, model,
        &(evaluation){.tokens = tokens, .n_tokens = 700, .key = (cache_key){.loops = N_LOOPS}}));
    CHECK_EQ(written.n_calls, 3 * N_LOOPS);
    for (size_t i = 0; i < written.n_calls; i++) {
        size_t chunk = i / N_LOOPS, loop = i % N_LOOPS;
        CHECK_EQ(written.first[i], (loop * 700 + (chunk << 8)) << 17);
    }
    CHECK(written.first[3 * N_LOOPS - 1] > (size_t)1 << 32);
    tl_model_release(model);
}

/* ---- weights ---- */

static void *reserve(size_t size)
{
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return data == MAP_FAILED ? NULL : data;
}

/* Small whole numbers: every dtype holds them, and their sums are exact in any order. */
static float weight_at(size_t row, size_t column)
{
    return (float)((row * 7 + column * 5) % 9) - 4;
}

static float input_at(size_t row, size_t column)
{
    return (float)((row * 3 + column * 4) % 11) - 5;
}

/* The scale of an int8 weight's column. */
static float scale_at(const cpu_matrix *m, size_t column)
{
    return m->dtype == DTYPE_I8 && column < CPU_KG ? 0.5f : 1;
}

/* The rest of the matrix is zeros without memory behind them. */
static void fill_last_panel(const cpu_matrix *m)
{
    char *panel = (char *)m->data + (m->n_panels - 1) * m->panel_bytes;
    size_t n_groups = (m->columns + CPU_KG - 1) / CPU_KG;
    for (size_t c = 0; c < m->columns; c++) {
        for (size_t o = 0; o < CPU_PANEL; o++) {
            float value = weight_at(o, c) / scale_at(m, c);
            size_t i = c * CPU_PANEL + o, pair = (c / 2 * CPU_PANEL + o) * 2 + c % 2;
            if (m->dtype == DTYPE_F32)
                ((float *)panel)[i] = value;
            else if (m->dtype == DTYPE_F16)
                ((uint16_t *)panel)[i] = float_to_f16(value);
            else if (m->dtype == DTYPE_I8)
                ((int8_t *)panel)[i] = (int8_t)value;
            else
                ((uint16_t *)panel)[pair] = (uint16_t)(float_to_bits(value) >> 16);
        }
    }
    for (size_t i = 0; m->dtype == DTYPE_I8 && i < n_groups * CPU_PANEL; i++)
        m->scales[(m->n_panels - 1) * n_groups * CPU_PANEL + i] =
            scale_at(m, i / CPU_PANEL * CPU_KG);
}

/* y has rows beyond 4 GiB too. */
static void check_last_panel(const cpu_kernels *set, const cpu_matrix *m)
{
    enum { N_ROWS = 34 };
    float *x = malloc(N_ROWS * m->columns * sizeof *x);
    for (size_t i = 0; i < N_ROWS * m->columns; i++)
        x[i] = input_at(i / m->columns, i % m->columns);
    size_t size = N_ROWS * m->rows * sizeof(float), first = m->rows - CPU_PANEL;
    float *y = reserve(size);
    REQUIRE(y != NULL);
    set->linear(m, m->n_panels - 1, m->n_panels, x, m->columns, N_ROWS, y, m->rows, false);
    size_t n_wrong = 0;
    for (size_t r = 0; r < N_ROWS; r++) {
        for (size_t o = 0; o < CPU_PANEL; o++) {
            float sum = 0;
            for (size_t c = 0; c < m->columns; c++)
                sum += weight_at(o, c) * x[r * m->columns + c];
            n_wrong += y[r * m->rows + first + o] != sum;
        }
    }
    test_check(n_wrong == 0, __FILE__, __LINE__, "%s, dtype %d: %zu sums are wrong", set->name,
               (int)m->dtype, n_wrong);
    munmap(y, size);
    free(x);
}

TEST(rows_of_a_matrix_beyond_4_gib)
{
    enum { COLUMNS = 131 }; /* two groups */
    static const size_t bytes_of[] = {4, 2, 2, 1};
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        size_t columns = COLUMNS + (dtype == DTYPE_BF16); /* pairs */
        cpu_matrix m = {.rows = (size_t)1 << 25, .columns = COLUMNS, .dtype = (tensor_dtype)dtype};
        m.n_panels = m.rows / CPU_PANEL;
        m.panel_bytes = columns * CPU_PANEL * bytes_of[dtype];
        size_t size = (columns << 25) * bytes_of[dtype], scale_size = (size_t)2 << 25 << 2;
        CHECK(size > 4 * GIBI);
        CHECK_EQ(cpu_matrix_bytes(&m), size);
        m.data = reserve(size);
        REQUIRE(m.data != NULL);
        if (dtype == DTYPE_I8) {
            m.scales = reserve(scale_size);
            REQUIRE(m.scales != NULL);
            CHECK_EQ(cpu_matrix_bytes(&m), size + scale_size);
        }
        fill_last_panel(&m);
        float row[COLUMNS];
        for (size_t o = 0; o < CPU_PANEL; o++) {
            cpu_matrix_row(&m, m.rows - CPU_PANEL + o, 0, COLUMNS, row);
            for (size_t c = 0; c < COLUMNS; c++)
                CHECK(row[c] == weight_at(o, c));
        }
        EACH_SET(set)
        {
            check_last_panel(set, &m);
        }
        munmap(m.data, size);
        if (m.scales != NULL)
            munmap(m.scales, scale_size);
    }
}

/* A sparse file whose embedding has rows x columns; its other tensors are small. */
static int open_sparse(char path[64], tiny_file **made, int64_t rows, int64_t columns)
{
    tiny_spec spec = {.vocab = 1,
                      .hidden = 1,
                      .n_heads = 1,
                      .n_kv_heads = 1,
                      .head_dim = 2,
                      .ff = 1,
                      .prelude = 1,
                      .tied = true,
                      .dtype = DTYPE_F32};
    tiny_file *file = tiny_plan(&spec);
    tiny_tensor embed = file->tensors[0]; /* to the end, so that the rest lies in its place */
    memmove(file->tensors, file->tensors + 1, --file->n_tensors * sizeof embed);
    file->tensors[file->n_tensors++] = embed;
    file->config.vocab_size = rows;
    for (size_t i = 0; i < file->n_tensors; i++) {
        tiny_tensor *tensor = &file->tensors[i];
        if (strstr(tensor->name, "norm") || strstr(tensor->name, "o.w") ||
            strstr(tensor->name, "down"))
            tensor->rows = columns;
        else
            tensor->columns = columns;
    }
    file->config.hidden_size = columns;
    tiny_fill(file); /* with one row of the embedding */
    size_t last = file->n_tensors - 1, row_bytes = file->tensors[last].size;
    size_t size = file->tensors[last].offset + row_bytes * (size_t)rows;
    tiny_put_u64(file->bytes + tiny_tensor_entry(last) + 104, (uint64_t)rows);
    tiny_put_u64(file->bytes + tiny_tensor_entry(last) + 144, row_bytes * (size_t)rows);
    tiny_put_u64(file->bytes + 16, size);
    tiny_seal_meta(file);
    int fd = tiny_open(path, file->bytes, file->size);
    off_t end = (off_t)(size - row_bytes); /* the last row is as the first */
    bool held =
        fd >= 0 && ftruncate(fd, (off_t)size) == 0 &&
        pwrite(fd, file->bytes + file->tensors[last].offset, row_bytes, end) == (ssize_t)row_bytes;
    CHECK(held);
    *made = file;
    return fd;
}

TEST(tensors_are_read_beyond_4_gib)
{
    char path[64];
    tiny_file *tiny;
    int fd = open_sparse(path, &tiny, 1 << 24, 131);
    size_t row_bytes = 131 * sizeof(float), at = (((size_t)1 << 24) - 1) * row_bytes;
    model_file file;
    REQUIRE_OK(model_file_open(&file, path, false));
    const file_tensor *embed = &file.tensors[file.n_tensors - 1];
    CHECK_EQ(embed->size, row_bytes << 24);
    CHECK(embed->size > 8 * GIBI);
    unsigned char row[131 * sizeof(float)];
    CHECK_OK(file_tensor_read(embed, row, at, row_bytes));
    CHECK_MEM_EQ(row, tiny->bytes + embed->offset, row_bytes);
    CHECK_STATUS(file_tensor_read(embed, row, at + 1, row_bytes), TL_STATUS_IO);
    model_weights weights;
    CHECK_OK(model_weights_bind(&weights, &file));
    CHECK(weights.n_parameters > INT64_C(131) << 24);
    model_weights_clear(&weights);
    model_file_close(&file);
    close(fd);
    tiny_free(tiny);
}

/* Each allocation fails once, up to the large one: nothing of that size is ever there. */
TEST(weights_that_do_not_fit_into_memory)
{
    char path[64], wanted[96];
    tiny_file *tiny;
    int fd = open_sparse(path, &tiny, (1 << 24) - 3, 300); /* rounded up to whole panels */
    snprintf(wanted, sizeof wanted, "cannot allocate %zu bytes for packed weights",
             ((size_t)300 << 24) * sizeof(float));
    tl_model_options options = tiny_options(1);
    int64_t live = mem_live();
    bool reached = false;
    for (int64_t n = 0; !reached && CHECK(n < 100); n++) {
        tl_model *model;
        mem_fail_at(n);
        tl_status status = tl_model_load(&model, path, &options);
        mem_fail_at(-1);
        if (!CHECK_STATUS(status, TL_STATUS_NOMEM))
            break;
        CHECK(model == NULL);
        CHECK_EQ(mem_live(), live);
        reached = strstr(tl_last_error(), wanted) != NULL;
    }
    CHECK(reached);
    close(fd);
    tiny_free(tiny);
}

TEST(shapes_whose_product_wraps)
{
    static const uint64_t shapes[][4] = {
        {1ull << 32, 1ull << 32}, {1ull << 62, 1}, {1ull << 16, 1ull << 16, 1ull << 16, 1ull << 16},
        {INT64_MAX, INT64_MAX},   {1ull << 63, 2}, {(1ull << 32) + 1, 1ull << 32}};
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    unsigned char *entry = file->bytes + tiny_tensor_entry(0);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        uint64_t size = 4, n_dims = 0;
        for (; n_dims < 4 && shapes[i][n_dims] > 0; n_dims++)
            size *= shapes[i][n_dims]; /* modulo 2^64 */
        memcpy(entry + 104, shapes[i], sizeof shapes[i]);
        tiny_put_u32(entry + 100, (uint32_t)n_dims);
        tiny_put_u64(entry + 144, size);
        tiny_seal_meta(file);
        tl_model *model;
        CHECK_STATUS(tiny_load_bytes(&model, file->bytes, file->size, NULL), TL_STATUS_FORMAT);
        CHECK_STR_HAS(tl_last_error(), file->tensors[0].name);
    }
    tiny_free(file);
}

/* ---- max_seq_len ---- */

static tl_status load_for(tl_model **model, int64_t max_seq_len)
{
    tiny_spec spec = TINY_SPEC;
    tiny_file *file = tiny_make(&spec);
    tl_model_options options = tiny_options(1);
    options.max_seq_len = max_seq_len;
    tl_status status = tiny_load_bytes(model, file->bytes, file->size, &options);
    tiny_free(file);
    return status;
}

static tl_status generate(tl_model *model, const int32_t *prompt, size_t n_prompt,
                          int64_t max_tokens)
{
    int32_t tokens[64];
    size_t n_tokens = 99;
    tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
    options.max_tokens = max_tokens;
    tl_status status = tl_generate(tokens, 64, &n_tokens, model, prompt, n_prompt, &options);
    CHECK_EQ(n_tokens, status == TL_STATUS_OK ? max_tokens : 0);
    return status;
}

TEST(lengths_that_a_model_takes)
{
    static const int64_t bad[] = {
        0, -1, (1 << 24) + 1, INT64_C(1) << 31, INT64_C(1) << 32, INT64_MAX, INT64_MIN};
    tl_model *model;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_STATUS(load_for(&model, bad[i]), TL_STATUS_INVALID);
    const int32_t prompt[2] = {1, 2};
    float logits[2 * 50];
    REQUIRE_OK(load_for(&model, 1));
    CHECK_OK(tl_model_logits(logits, model, prompt, 1, NULL, NULL));
    CHECK_STATUS(tl_model_logits(logits, model, prompt, 2, NULL, NULL), TL_STATUS_INVALID);
    CHECK_OK(generate(model, prompt, 1, 0));
    CHECK_STATUS(generate(model, prompt, 1, 1), TL_STATUS_INVALID);
    tl_model_release(model);
    REQUIRE_OK(load_for(&model, 1 << 24));
    CHECK_OK(generate(model, prompt, 2, 3));
    CHECK_STATUS(generate(model, prompt, 2, 1 << 24), TL_STATUS_INVALID);
    tl_model_release(model);
}

TEST(prompts_at_the_edge)
{
    enum { LENGTH = 45 };
    tl_model *model;
    REQUIRE_OK(load_for(&model, LENGTH));
    int32_t prompt[LENGTH + 1];
    tiny_tokens(prompt, LENGTH + 1, 50, 3);
    CHECK_OK(generate(model, prompt, LENGTH, 0));
    CHECK_STATUS(generate(model, prompt, LENGTH, 1), TL_STATUS_INVALID);
    CHECK_OK(generate(model, prompt, LENGTH - 1, 1));
    CHECK_OK(generate(model, prompt, LENGTH - 1, 0));
    CHECK_STATUS(generate(model, prompt, LENGTH + 1, 0), TL_STATUS_INVALID);
    CHECK_OK(generate(model, prompt, 1, LENGTH - 1));
    CHECK_STATUS(generate(model, prompt, 1, LENGTH), TL_STATUS_INVALID);
    /* sums that leave int64 or size_t */
    static const int64_t many[] = {INT64_MAX, INT64_MAX - 1, INT64_MAX - LENGTH, INT64_MIN};
    static const size_t long_prompts[] = {SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 2 + 1, SIZE_MAX - 44,
                                          (size_t)1 << 32};
    for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        CHECK_STATUS(generate(model, prompt, 1, many[i]), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), "max_tokens");
        CHECK_STATUS(generate(model, prompt, LENGTH, many[i]), TL_STATUS_INVALID);
        CHECK_STR_HAS(tl_last_error(), many[i] > 0 ? "max_seq_len" : "max_tokens");
    }
    tl_prefix_cache *cache;
    REQUIRE_OK(tl_build_prefix_cache(&cache, model, prompt, LENGTH - 1, NULL));
    for (size_t i = 0; i < sizeof long_prompts / sizeof *long_prompts; i++) {
        size_t n = long_prompts[i], n_tokens;
        int32_t token;
        tl_stream *stream;
        tl_generate_options options = TL_GENERATE_OPTIONS_INIT;
        for (int64_t max_tokens = 0; max_tokens <= 1; max_tokens++) {
            CHECK_STATUS(generate(model, prompt, n, max_tokens), TL_STATUS_INVALID);
            options.max_tokens = max_tokens;
            CHECK_STATUS(tl_generate_from_prefix_cache(&token, 1, &n_tokens, model, cache, prompt,
                                                       n, &options),
                         TL_STATUS_INVALID);
            CHECK_STATUS(tl_stream_create(&stream, model, NULL, prompt, n, &options),
                         TL_STATUS_INVALID);
        }
        CHECK_STATUS(tl_model_logits((float *)NOWHERE, model, prompt, n, NULL, NULL),
                     TL_STATUS_INVALID);
    }
    tl_prefix_cache_release(cache);
    tl_model_release(model);
}
