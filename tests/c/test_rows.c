/* backend/cpu/rows.h: what is done row by row, against float64, and bit equality of instruction
 * sets. */
#include "base/half.h"
#include "kernel_sets.h"
#include "test.h"

#define SIMD_PORTABLE
#include "backend/cpu/simd.h"

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

/* A scale of 1 changes nothing: x / (1 + e^-x) times `up`, each operation rounded. */
TEST(silu_is_these_operations)
{
    enum { N = 1003 };
    float gate[N], up[N], out[N];
    for (size_t i = 0; i < N; i++)
        gate[i] = 100 * uniform(9, i);
    fill(up, N, 10);
    EACH_SET(set)
    {
        set->activate(ACTIVATION_SILU, 1, memcpy(out, gate, sizeof out), up, N);
        for (size_t i = 0; i < N; i++) {
            float power = vf_exp(vf_set1(-gate[i])).lane[0];
            CHECK(out[i] == gate[i] / (1 + power) * up[i]);
        }
    }
}

/* In the lower tail the result is small, and not the difference of large numbers. */
TEST(gelu_has_a_tail)
{
    EACH_SET(set)
    {
        for (float x = -1; x > -13; x -= 0.37f) {
            float gate = x;
            double exact = exact_activation(ACTIVATION_GELU, x);
            set->activate(ACTIVATION_GELU, 1, &gate, NULL, 1);
            CHECK_NEAR(gate, exact, 0.05 * -exact);
        }
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

TEST(activations_of_infinity)
{
    EACH_SET(set)
    {
        for (int64_t kind = ACTIVATION_SILU; kind <= ACTIVATION_RELU2; kind++) {
            float x[2] = {INFINITY, -INFINITY};
            set->activate(kind, 2, x, NULL, 2);
            CHECK(x[0] == INFINITY);
            bool is_limit = kind == ACTIVATION_GELU || kind == ACTIVATION_RELU2;
            CHECK(is_limit ? x[1] == 0 : isnan(x[1])); /* the others divide infinities */
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
        float far[] = {3, 3, 3, NAN, 3}, far_gate[] = {INFINITY, -INFINITY, NAN, 1, 1e30f};
        set->sigmoid_mul(far, far_gate, 5);
        CHECK(far[0] == 3 && far[1] == 0 && isnan(far[2]) && isnan(far[3]) && far[4] == 3);
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
            float last = b[n - 1];
            b[n - 1] = NAN;
            CHECK(isnan(set->dot(a, b, n)));
            CHECK(n == 1 || set->dot(a, b, n - 1) < INFINITY); /* what follows is not read */
            b[n - 1] = last;
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
