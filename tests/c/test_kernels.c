/* backend/cpu/: linear layers against float64, and bit equality of instruction sets and tiles; how
 * their weights are packed; the choice of a set. */
#include "base/half.h"
#include "base/memory.h"
#include "kernel_sets.h"
#include "test.h"
#include "tiny_model.h"

/* ---- linear ---- */

/* A matrix with its values, which every dtype holds exactly after rounding. */
typedef struct test_matrix {
    cpu_matrix packed;
    float *values; /* [rows, columns] */
    size_t rows, columns;
} test_matrix;

static void put_value(void *data, tensor_dtype dtype, size_t i, float value)
{
    uint16_t half =
        dtype == DTYPE_F16 ? float_to_f16(value) : (uint16_t)(float_to_bits(value) >> 16);
    if (dtype == DTYPE_F32)
        ((float *)data)[i] = value;
    else if (dtype == DTYPE_I8)
        ((int8_t *)data)[i] = (int8_t)floorf(128 * value); /* -128 to 127 */
    else
        ((uint16_t *)data)[i] = half;
}

static float rounded(tensor_dtype dtype, float value)
{
    if (dtype == DTYPE_F32)
        return value;
    if (dtype == DTYPE_I8)
        return floorf(128 * value);
    return dtype == DTYPE_F16 ? float_from_f16(float_to_f16(value))
                              : float_from_bits(float_to_bits(value) & 0xFFFF0000u);
}

/* A tensor in a file of its own. */
typedef struct stored_tensor {
    model_file file;
    file_tensor tensor;
} stored_tensor;

static void store_tensor(stored_tensor *out, const void *data, tensor_dtype dtype, size_t rows,
                         size_t columns)
{
    char path[64];
    size_t size = rows * columns * dtype_size(dtype);
    out->file = (model_file){.path = "w", .fd = tiny_open(path, data, size)};
    out->tensor = (file_tensor){.name = "w",
                                .file = &out->file,
                                .size = size,
                                .shape = {(int64_t)rows, (int64_t)columns},
                                .n_dims = 2,
                                .dtype = dtype};
}

/* A part of a matrix: rows [first, first + rows), of `width` columns; the rest is zero. An int8
 * part of an odd number of rows has a scale for each group of columns, else one for each row. */
typedef struct test_part {
    tensor_dtype dtype;
    size_t rows, width;
    stored_tensor values, scales;
} test_part;

static void make_part(test_matrix *m, size_t first, test_part *part)
{
    size_t groups = (part->width + WEIGHT_GROUP - 1) / WEIGHT_GROUP;
    size_t n_scales = part->rows % 2 != 0 ? groups : 1;
    void *data = malloc(part->rows * part->width * 4);
    float *scales = malloc(part->rows * n_scales * sizeof *scales);
    for (size_t i = 0; i < part->rows * n_scales; i++)
        scales[i] = (1.5f + uniform(23, i)) / 128;
    for (size_t r = 0; r < part->rows; r++) {
        for (size_t c = 0; c < part->width; c++) {
            float value = uniform(7, (first + r) * m->columns + c);
            float scale = part->dtype != DTYPE_I8
                              ? 1
                              : scales[r * n_scales + (n_scales > 1 ? c / WEIGHT_GROUP : 0)];
            put_value(data, part->dtype, r * part->width + c, value);
            m->values[(first + r) * m->columns + c] = rounded(part->dtype, value) * scale;
        }
    }
    store_tensor(&part->values, data, part->dtype, part->rows, part->width);
    store_tensor(&part->scales, scales, DTYPE_F32, part->rows, n_scales);
    free(data);
    free(scales);
}

static test_matrix make_of_parts(test_part *parts, int n_parts, size_t columns)
{
    test_matrix m = {.columns = columns};
    weight_matrix weights[3];
    for (int p = 0; p < n_parts; p++)
        m.rows += parts[p].rows;
    m.values = calloc(m.rows * columns, sizeof *m.values);
    size_t row = 0;
    for (int p = 0; p < n_parts; row += parts[p++].rows) {
        make_part(&m, row, &parts[p]);
        bool scaled = parts[p].dtype == DTYPE_I8;
        weights[p] =
            (weight_matrix){&parts[p].values.tensor, scaled ? &parts[p].scales.tensor : NULL};
    }
    thread_pool *threads;
    CHECK_OK(thread_pool_create(&threads, 2));
    CHECK_OK(cpu_matrix_pack(&m.packed, weights, n_parts, columns, threads));
    thread_pool_destroy(threads);
    for (int p = 0; p < n_parts; p++) {
        close(parts[p].values.file.fd);
        close(parts[p].scales.file.fd);
    }
    return m;
}

/* One tensor of int8 and its scales, both of which are closed. */
static cpu_matrix pack_whole(stored_tensor *values, stored_tensor *scales)
{
    cpu_matrix matrix;
    thread_pool *threads;
    CHECK_OK(thread_pool_create(&threads, 1));
    CHECK_OK(cpu_matrix_pack(&matrix, &(weight_matrix){&values->tensor, &scales->tensor}, 1,
                             (size_t)values->tensor.shape[1], threads));
    thread_pool_destroy(threads);
    close(values->file.fd);
    close(scales->file.fd);
    return matrix;
}

/* Tensors one above the other (the first may be all), the i-th of dtypes[i]. */
static test_matrix make_matrix(const size_t *rows, int n_tensors, size_t columns,
                               const tensor_dtype *dtypes)
{
    test_part parts[3];
    for (int t = 0; t < n_tensors; t++)
        parts[t] = (test_part){.dtype = dtypes[t], .rows = rows[t], .width = columns};
    return make_of_parts(parts, n_tensors, columns);
}

static void free_matrix(test_matrix *m)
{
    cpu_matrix_clear(&m->packed);
    free(m->values);
}

/* How far a float32 sum in groups of CPU_KG may be from the exact one: half a unit in the last
 * place for each rounding that a term goes through. */
static double sum_bound(const test_matrix *m, size_t row, const float *x)
{
    double magnitude = 0;
    for (size_t c = 0; c < m->columns; c++)
        magnitude += fabs((double)m->values[row * m->columns + c] * x[c]);
    size_t group = m->columns < CPU_KG ? m->columns : CPU_KG;
    return (double)(group + m->columns / CPU_KG + 2) * 0x1p-24 * magnitude;
}

static void check_linear_values(const test_matrix *m, const float *x, const float *y, size_t n_rows)
{
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t o = 0; o < m->rows; o++) {
            double exact = 0;
            for (size_t c = 0; c < m->columns; c++)
                exact += (double)m->values[o * m->columns + c] * x[r * m->columns + c];
            if (!CHECK_NEAR(y[r * m->rows + o], exact, sum_bound(m, o, x + r * m->columns)))
                return;
        }
    }
}

enum { MAX_ROWS = 25 };

/* y of all rows at once against y of each count of rows, of single rows, and of parts of the
 * panels; nothing outside the output is written. */
static void check_linear_tiles(const cpu_kernels *set, const test_matrix *m, const float *x,
                               const float *y)
{
    size_t size = MAX_ROWS * m->rows, panels = m->packed.n_panels, rows = m->rows;
    float *part = malloc((size + 1) * sizeof *part);
    for (size_t n = 1; n <= MAX_ROWS; n++) {
        for (size_t i = 0; i <= size; i++)
            part[i] = 12345;
        set->linear(&m->packed, 0, panels, x, m->columns, n, part, rows, false);
        CHECK_MEM_EQ(part, y, n * rows * sizeof *y);
        for (size_t i = n * rows; i <= size; i++)
            if (!CHECK(part[i] == 12345))
                break;
        set->linear(&m->packed, 0, panels, x + (n - 1) * m->columns, m->columns, 1, part, rows,
                    false);
        CHECK_MEM_EQ(part, y + (n - 1) * rows, rows * sizeof *y);
    }
    for (size_t cut = 0; cut <= panels; cut++) {
        for (size_t i = 0; i <= size; i++)
            part[i] = 12345;
        set->linear(&m->packed, cut, panels, x, m->columns, 3, part, rows, false);
        CHECK(cut == 0 || part[0] == 12345);
        set->linear(&m->packed, 0, cut, x, m->columns, 3, part, rows, false);
        CHECK_MEM_EQ(part, y, 3 * rows * sizeof *y);
    }
    free(part);
}

/* With `add`, the same sum goes onto y in one addition. */
static void check_linear_add(const cpu_kernels *set, const test_matrix *m, const float *x,
                             const float *y)
{
    size_t n = 7, size = n * m->rows;
    float *added = malloc(size * sizeof *added);
    fill(added, size, 33);
    set->linear(&m->packed, 0, m->packed.n_panels, x, m->columns, n, added, m->rows, true);
    for (size_t i = 0; i < size; i++)
        if (!CHECK(added[i] == uniform(33, i) + y[i]))
            break;
    free(added);
}

/* A packed row gives the values back, and any part of it does. */
static void check_packed_rows(const test_matrix *m)
{
    float *row = malloc(m->columns * sizeof *row);
    for (size_t r = 0; r < m->rows; r++) {
        const float *values = m->values + r * m->columns;
        for (size_t first = 0; first < m->columns; first = 2 * first + 1) {
            size_t n = (m->columns - first + 1) / (first % 4 + 1);
            n = n < m->columns - first ? n : m->columns - first;
            cpu_matrix_row(&m->packed, r, first, n, row);
            CHECK_MEM_EQ(row, values + first, n * sizeof *row);
        }
    }
    free(row);
}

/* Frees the matrix. */
static void check_matrix(test_matrix *matrix)
{
    test_matrix m = *matrix;
    size_t columns = m.columns;
    check_packed_rows(&m);
    float *x = malloc(MAX_ROWS * columns * sizeof *x);
    fill(x, MAX_ROWS * columns, 11);
    size_t size = MAX_ROWS * m.rows * sizeof(float);
    float *first = malloc(size), *y = malloc(size);
    EACH_SET(set)
    {
        set->linear(&m.packed, 0, m.packed.n_panels, x, columns, MAX_ROWS, y, m.rows, false);
        if (set_index == 0) {
            memcpy(first, y, size);
            check_linear_values(&m, x, y, MAX_ROWS);
        }
        test_check(memcmp(y, first, size) == 0, __FILE__, __LINE__, "%s differs from portable",
                   set->name);
        check_linear_tiles(set, &m, x, y);
        check_linear_add(set, &m, x, y);
    }
    free(first);
    free(y);
    free(x);
    free_matrix(&m);
}

static void check_linear(const size_t *rows, int n_tensors, size_t columns,
                         const tensor_dtype *dtypes)
{
    test_matrix m = make_matrix(rows, n_tensors, columns, dtypes);
    check_matrix(&m);
}

/* One panel and less, several, more than a wide tile; one group of columns and less, several. */
static const size_t shapes[][2] = {{1, 1},    {5, 2},     {63, 3},   {64, 17},
                                   {65, 127}, {128, 128}, {70, 129}, {127, 20},
                                   {161, 33}, {40, 256},  {17, 257}, {20, 389}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

TEST(linear_f32)
{
    for (size_t i = 0; i < N_SHAPES; i++)
        check_linear(&shapes[i][0], 1, shapes[i][1], &(tensor_dtype){DTYPE_F32});
}

TEST(linear_f16)
{
    for (size_t i = 0; i < N_SHAPES; i++)
        check_linear(&shapes[i][0], 1, shapes[i][1], &(tensor_dtype){DTYPE_F16});
}

TEST(linear_bf16)
{
    for (size_t i = 0; i < N_SHAPES; i++)
        check_linear(&shapes[i][0], 1, shapes[i][1], &(tensor_dtype){DTYPE_BF16});
}

TEST(linear_i8)
{
    for (size_t i = 0; i < N_SHAPES; i++)
        check_linear(&shapes[i][0], 1, shapes[i][1], &(tensor_dtype){DTYPE_I8});
}

TEST(linear_of_three_tensors)
{
    const tensor_dtype int8[] = {DTYPE_I8, DTYPE_I8, DTYPE_I8};
    const tensor_dtype some_int8[] = {DTYPE_I8, DTYPE_BF16, DTYPE_I8};
    const size_t rows[] = {40, 3, 21};
    const tensor_dtype same[] = {DTYPE_BF16, DTYPE_BF16, DTYPE_BF16};
    const tensor_dtype mixed[] = {DTYPE_F16, DTYPE_BF16, DTYPE_F32};
    check_linear(rows, 3, 19, same);
    check_linear(rows, 3, 130, mixed);
    check_linear(rows, 3, 300, int8);
    check_linear(rows, 3, 300, some_int8);
}

/* A part with fewer columns: what it lacks is zero, not what the panel's memory held. */
TEST(linear_of_a_narrow_part)
{
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        static const size_t widths[] = {5, 128, 140, 257};
        for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
            test_part parts[] = {{.dtype = (tensor_dtype)dtype, .rows = 61, .width = 300},
                                 {.dtype = (tensor_dtype)dtype, .rows = 3, .width = widths[i]}};
            test_matrix m = make_of_parts(parts, 2, 300);
            check_matrix(&m);
        }
    }
}

/* Sums that float32 holds exactly, of the largest int8 numbers. */
TEST(linear_of_extreme_int8)
{
    enum { ROWS = 3, COLUMNS = 300, N_GROUPS = 3 };
    int8_t values[ROWS][COLUMNS];
    float x[COLUMNS], y[ROWS], scales[ROWS][N_GROUPS] = {{1, 0.5f, 2}, {-1, 0, 4}, {8, 8, 8}};
    for (size_t c = 0; c < COLUMNS; c++) {
        values[0][c] = -128;
        values[1][c] = 127;
        values[2][c] = c % 2 ? 127 : -128;
        x[c] = (float)(c % 5) - 1;
    }
    stored_tensor value, scale;
    store_tensor(&value, values, DTYPE_I8, ROWS, COLUMNS);
    store_tensor(&scale, scales, DTYPE_F32, ROWS, N_GROUPS);
    cpu_matrix matrix = pack_whole(&value, &scale);
    EACH_SET(set)
    {
        set->linear(&matrix, 0, 1, x, COLUMNS, 1, y, ROWS, false);
        for (size_t o = 0; o < ROWS; o++) {
            double exact = 0;
            for (size_t c = 0; c < COLUMNS; c++)
                exact += (double)values[o][c] * scales[o][c / CPU_KG] * x[c];
            CHECK(y[o] == exact);
        }
    }
    cpu_matrix_clear(&matrix);
}

/* What is not finite stays in its own row of x, whichever tile it is in. */
TEST(linear_keeps_rows_apart)
{
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        enum { N_ROWS = 7, COLUMNS = 133 };
        test_matrix m =
            make_matrix(&(size_t){20}, 1, COLUMNS, &(tensor_dtype){(tensor_dtype)dtype});
        float x[N_ROWS * COLUMNS], clean[N_ROWS * 20], y[N_ROWS * 20];
        EACH_SET(set)
        {
            for (size_t r = 0; r < N_ROWS; r++) {
                fill(x, N_ROWS * COLUMNS, 11);
                set->linear(&m.packed, 0, 1, x, COLUMNS, N_ROWS, clean, 20, false);
                x[r * COLUMNS + 20 * r] = NAN;
                x[(r + 2) % N_ROWS * COLUMNS + COLUMNS - 1] = INFINITY;
                set->linear(&m.packed, 0, 1, x, COLUMNS, N_ROWS, y, 20, false);
                for (size_t i = 0; i < N_ROWS * 20; i++) {
                    size_t row = i / 20;
                    CHECK(row == r                  ? isnan(y[i])
                          : row == (r + 2) % N_ROWS ? !isfinite(y[i])
                                                    : y[i] == clean[i]);
                }
            }
        }
        free_matrix(&m);
    }
}

TEST(packing_that_fails)
{
    int8_t values[200] = {1};
    float scales[2] = {1, 1};
    stored_tensor value, scale;
    store_tensor(&value, values, DTYPE_I8, 2, 100);
    store_tensor(&scale, scales, DTYPE_F32, 2, 1);
    weight_matrix part = {&value.tensor, &scale.tensor};
    thread_pool *threads;
    REQUIRE_OK(thread_pool_create(&threads, 1));
    cpu_matrix matrix;
    int64_t live = mem_live();
    for (int64_t n = 0; n <= 4; n++) { /* data, scales, and both of a lane's buffers; all is well */
        mem_fail_at(n);
        CHECK_STATUS(cpu_matrix_pack(&matrix, &part, 1, 100, threads),
                     n < 4 ? TL_STATUS_NOMEM : TL_STATUS_OK);
        CHECK((matrix.data != NULL && matrix.scales != NULL) == (n == 4));
        cpu_matrix_clear(&matrix);
        CHECK_EQ(mem_live(), live);
    }
    mem_fail_at(-1);
    for (int i = 0; i < 2; i++) { /* a file that has become shorter */
        stored_tensor *cut = i == 0 ? &value : &scale;
        REQUIRE(ftruncate(cut->file.fd, (off_t)cut->tensor.size - 1) == 0);
        CHECK_STATUS(cpu_matrix_pack(&matrix, &part, 1, 100, threads), TL_STATUS_IO);
        CHECK(matrix.data == NULL && matrix.scales == NULL);
        CHECK_EQ(mem_live(), live);
        REQUIRE(ftruncate(cut->file.fd, (off_t)cut->tensor.size) == 0);
    }
    /* panels larger than the address space */
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        value.tensor.dtype = (tensor_dtype)dtype;
        CHECK_STATUS(cpu_matrix_pack(&matrix, &part, 1, INT64_MAX, threads), TL_STATUS_NOMEM);
        CHECK(matrix.data == NULL && matrix.scales == NULL);
        CHECK_EQ(mem_live(), live);
    }
    thread_pool_destroy(threads);
    close(value.file.fd);
    close(scale.file.fd);
}

/* ---- the choice of a set ---- */

TEST(sets_are_chosen_by_name)
{
    const cpu_kernels *chosen = NULL;
    EACH_SET(set)
    {
        setenv("TINYLOOP_CPU_ISA", set->name, 1);
        CHECK_OK(cpu_kernels_choose(&chosen));
        CHECK(chosen == set);
    }
    setenv("TINYLOOP_CPU_ISA", "sse9", 1);
    CHECK_STATUS(cpu_kernels_choose(&chosen), TL_STATUS_INVALID);
    CHECK_STR_HAS(tl_last_error(), "sse9");
    CHECK_STR_HAS(tl_last_error(), "portable");
    setenv("TINYLOOP_CPU_ISA", "", 1);
    CHECK_OK(cpu_kernels_choose(&chosen));
    CHECK(chosen == sets[n_sets - 1]); /* the fastest */
    unsetenv("TINYLOOP_CPU_ISA");
    CHECK_OK(cpu_kernels_choose(&chosen));
    CHECK(chosen == sets[n_sets - 1]);
}
