/* backend/cpu/: the kernels but attention against float64, and bit equality of instruction sets
 * and tiles. */
#include "base/half.h"
#include "base/memory.h"
#include "kernel_sets.h"
#include "test.h"
#include "tiny_model.h"

#define SIMD_PORTABLE
#include "backend/cpu/simd.h"

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

/* Frees the matrix. */
static void check_matrix(test_matrix *matrix)
{
    test_matrix m = *matrix;
    size_t columns = m.columns;
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
        test_part parts[] = {{.dtype = (tensor_dtype)dtype, .rows = 61, .width = 140},
                             {.dtype = (tensor_dtype)dtype, .rows = 3, .width = 5}};
        test_matrix m = make_of_parts(parts, 2, 140);
        check_matrix(&m);
    }
}

TEST(packed_rows_can_be_read)
{
    for (int dtype = DTYPE_F32; dtype <= DTYPE_I8; dtype++) {
        test_matrix m = make_matrix(&(size_t){71}, 1, 133, &(tensor_dtype){(tensor_dtype)dtype});
        float row[133];
        for (size_t r = 0; r < m.rows; r++) {
            cpu_matrix_row(&m.packed, r, 0, 133, row);
            CHECK_MEM_EQ(row, m.values + r * 133, sizeof row);
            cpu_matrix_row(&m.packed, r, 127, 4, row);
            CHECK_MEM_EQ(row, m.values + r * 133 + 127, 4 * sizeof *row);
        }
        free_matrix(&m);
    }
}

TEST(packing_without_memory)
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
    for (int64_t n = 0; n < 4; n++) { /* data, scales, and both of a lane's buffers */
        mem_fail_at(n);
        CHECK_STATUS(cpu_matrix_pack(&matrix, &part, 1, 100, threads), TL_STATUS_NOMEM);
        CHECK(matrix.data == NULL && matrix.scales == NULL);
        CHECK_EQ(mem_live(), live);
    }
    mem_fail_at(-1);
    /* panels larger than the address space */
    value.tensor.dtype = DTYPE_F32;
    CHECK_STATUS(cpu_matrix_pack(&matrix, &part, 1, INT64_MAX, threads), TL_STATUS_NOMEM);
    CHECK(matrix.data == NULL);
    thread_pool_destroy(threads);
    close(value.file.fd);
    close(scale.file.fd);
}

/* ---- rows ---- */

TEST(rms_norm)
{
    for (size_t n = 1; n <= 150; n += 1 + n / 20) {
        float x[160], weight[160], first[160], out[160];
        fill(x, n, n);
        fill(weight, n, n + 1000);
        double squares = 0;
        for (size_t i = 0; i < n; i++)
            squares += (double)x[i] * x[i];
        double scale = 1 / sqrt(squares / (double)n + 1e-5);
        EACH_SET(set)
        {
            for (size_t i = 0; i < 160; i++)
                out[i] = 12345;
            set->rms_norm(out, x, weight, n, 1e-5f);
            for (size_t i = 0; i < n; i++) {
                double exact = x[i] * scale * weight[i];
                CHECK_NEAR(out[i], exact, fabs(exact) * 16 * 0x1p-24);
            }
            for (size_t i = n; i < 160; i++)
                CHECK(out[i] == 12345);
            if (set_index == 0)
                memcpy(first, out, sizeof first);
            CHECK_MEM_EQ(out, first, n * sizeof *out);
            memcpy(out, x, n * sizeof *out);
            set->rms_norm(out, out, weight, n, 1e-5f); /* in place */
            CHECK_MEM_EQ(out, first, n * sizeof *out);
        }
    }
}

/* Units in the last place between a float and the exact value. */
static double ulps(float got, double exact)
{
    int exponent;
    frexp(exact, &exponent);
    return fabs(got - exact) / ldexp(1, exponent - 24);
}

TEST(exp_is_within_two_ulps)
{
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        float x = (float)(-87.3 + 175.6 * i / 200000);
        worst = fmax(worst, ulps(vf_exp(vf_set1(x)).lane[i % 16], exp(x)));
    }
    CHECK(worst <= 2);
    CHECK(vf_exp(vf_zero()).lane[3] == 1);
    CHECK(vf_exp(vf_set1(-INFINITY)).lane[0] == vf_exp(vf_set1(-87.3f)).lane[0]);
    CHECK(isinf(vf_exp(vf_set1(88.4f)).lane[0]) && isinf(vf_exp(vf_set1(INFINITY)).lane[0]));
    CHECK(isnan(vf_exp(vf_set1(NAN)).lane[0]));
}

/* ---- activations ---- */

static double exact_activation(int64_t kind, double x)
{
    switch (kind) {
    case ACTIVATION_SILU:
        return x / (1 + exp(-x));
    case ACTIVATION_GELU:
        return 0.5 * x * erfc(-x / sqrt(2));
    case ACTIVATION_GELU_TANH:
        return x / (1 + exp(-2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
        return x > 0 ? x * x : 0;
    }
}

/* silu: e^x, an addition, a division, two multiplications. The others have a polynomial: of erfc
 * within 1.5e-7, times |x| / 2; or of what goes into e^x, whose error grows with it. */
static bool is_near(int64_t kind, float got, double exact, double x)
{
    if (kind == ACTIVATION_SILU || kind == ACTIVATION_RELU2)
        return exact == 0 ? got == 0 : ulps(got, exact) <= 5;
    return fabs(got - exact) <= 2.5e-7 * fmax(fabs(x), 0.1);
}

/* x over the range of e^x, and closely around 0. */
static void check_activation(int64_t kind, bool gated)
{
    enum { N = 4001 };
    static float gate[N], up[N], first[N], out[N];
    for (size_t i = 0; i < N; i++) {
        gate[i] = (float)(i % 2 ? -87 + 187.0 * (double)i / (N - 1) : -8 + 16.0 * i / (N - 1));
        up[i] = 1 + uniform(3, i) / 2;
    }
    EACH_SET(set)
    {
        memcpy(out, gate, sizeof out);
        set->activate(kind, 0.5f, out, gated ? up : NULL, N);
        for (size_t i = 0; i < N; i++) {
            double factor = gated ? 0.5 * up[i] : 0.5;
            double exact = exact_activation(kind, gate[i]) * factor;
            if (!test_check(is_near(kind, out[i], exact, gate[i]), __FILE__, __LINE__,
                            "activation %d of %g: %g, not %g", (int)kind, (double)gate[i],
                            (double)out[i], exact))
                break;
        }
        if (set_index == 0)
            memcpy(first, out, sizeof out);
        CHECK_MEM_EQ(out, first, sizeof out);
        for (size_t n = 1; n < 40; n++) {
            memcpy(out, gate, sizeof out);
            set->activate(kind, 0.5f, out, gated ? up : NULL, n);
            CHECK_MEM_EQ(out, first, n * sizeof *out);
            CHECK_MEM_EQ(out + n, gate + n, sizeof out - n * sizeof *out);
        }
    }
}

TEST(activations)
{
    for (int64_t kind = ACTIVATION_SILU; kind <= ACTIVATION_RELU2; kind++) {
        check_activation(kind, true);
        check_activation(kind, false);
    }
}

TEST(activations_of_huge_numbers)
{
    static const float far[] = {-100, -1e3f, -1e10f, -1e18f};
    for (int64_t kind = ACTIVATION_SILU; kind <= ACTIVATION_RELU2; kind++) {
        for (size_t i = 0; i < sizeof far / sizeof *far; i++) {
            EACH_SET(set)
            {
                float gate = far[i], up = 1, nan = NAN;
                set->activate(kind, 1, &gate, &up, 1);
                CHECK_NEAR(gate, 0, 1e-30); /* below float's normal numbers, exactly */
                gate = -far[i];
                set->activate(kind, 1, &gate, NULL, 1);
                CHECK(gate == (kind == ACTIVATION_RELU2 ? far[i] * far[i] : -far[i]));
                set->activate(kind, 1, &nan, NULL, 1);
                CHECK(isnan(nan));
            }
        }
    }
}

TEST(sigmoid_mul)
{
    enum { N = 301 };
    float gate[N], x[N], first[N], out[N];
    for (size_t i = 0; i < N; i++)
        gate[i] = (float)(-90 + 180.0 * (double)i / (N - 1));
    fill(x, N, 6);
    EACH_SET(set)
    {
        for (size_t n = 1; n <= N; n += 1 + n / 7) {
            memcpy(out, x, sizeof out);
            set->sigmoid_mul(out, gate, n);
            for (size_t i = 0; i < n; i++)
                CHECK_NEAR(out[i], x[i] / (1 + exp(-(double)gate[i])), 3e-7 * fabs(x[i]) + 1e-38);
            CHECK_MEM_EQ(out + n, x + n, (N - n) * sizeof *out);
        }
        set->sigmoid_mul(memcpy(out, x, sizeof out), gate, N);
        if (set_index == 0)
            memcpy(first, out, sizeof out);
        CHECK_MEM_EQ(out, first, sizeof out);
    }
}

TEST(dot)
{
    float a[160], b[160], first = 0;
    fill(a, 160, 1);
    fill(b, 160, 2);
    for (size_t n = 1; n <= 160; n += 1 + n / 20) {
        double exact = 0;
        for (size_t i = 0; i < n; i++)
            exact += (double)a[i] * b[i];
        EACH_SET(set)
        {
            float sum = set->dot(a, b, n);
            CHECK_NEAR(sum, exact, 1e-6 * (double)n);
            if (set_index == 0)
                first = sum;
            CHECK(sum == first);
        }
    }
}

TEST(store_kv)
{
    float x[40];
    for (size_t i = 0; i < 40; i++)
        x[i] = uniform(5, i) * ldexpf(1, (int)(i % 40) - 26); /* subnormal halves too */
    x[7] = 70000;
    x[8] = -65520;
    x[9] = -0.0f;
    kv_layout half = kv_layout_make(TL_KV_MODE_FP16, 2, 1, 40);
    kv_layout full = kv_layout_make(TL_KV_MODE_FP32, 4, 1, 40);
    for (size_t n = 1; n <= 40; n++) {
        for (size_t stride = 1; stride <= 3; stride++) {
            EACH_SET(set)
            {
                uint16_t halves[120];
                float floats[120];
                for (size_t i = 0; i < 120; i++) {
                    halves[i] = 0xABCD;
                    floats[i] = 12345;
                }
                set->store_kv(halves, x, n, stride, &half);
                set->store_kv(floats, x, n, stride, &full);
                for (size_t i = 0; i < 120; i++) {
                    bool written = i % stride == 0 && i / stride < n;
                    REQUIRE(halves[i] == (written ? float_to_f16(x[i / stride]) : 0xABCD));
                    REQUIRE(floats[i] == (written ? x[i / stride] : 12345));
                }
            }
        }
    }
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
