/* What is done row by row. Part of kernels.h. */

static void rms_norm(float *out, const float *x, const float *weight, size_t n, float eps)
{
    vf squares = vf_zero();
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES) {
        vf a = vf_load(x + i);
        squares = vf_fma(a, a, squares);
    }
    if (i < n) {
        vf a = vf_load_n(x + i, n - i);
        squares = vf_fma(a, a, squares);
    }
    vf scale = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)n + eps));
    for (i = 0; i + CPU_LANES <= n; i += CPU_LANES)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), scale), vf_load(weight + i)));
    if (i < n)
        vf_store_n(out + i,
                   vf_mul(vf_mul(vf_load_n(x + i, n - i), scale), vf_load_n(weight + i, n - i)),
                   n - i);
}

SIMD_INLINE vf sigmoid(vf a)
{
    return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), a))));
}

SIMD_INLINE vf silu(vf a)
{
    return vf_div(a, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), a))));
}

/* x times half of erfc(|x| / sqrt 2), by Abramowitz and Stegun 7.1.26, whose error is below 1.5e-7
 * of 1; from both sides of 0, so nothing cancels in the tail. */
SIMD_INLINE vf gelu(vf x)
{
    vf size = vf_max(vf_sub(vf_zero(), x), x);
    vf t = vf_div(vf_set1(1.0f), vf_fma(size, vf_set1(0.3275911f * 0x1.6a09e6p-1f), vf_set1(1.0f)));
    vf p = vf_set1(1.061405429f);
    p = vf_fma(p, t, vf_set1(-1.453152027f));
    p = vf_fma(p, t, vf_set1(1.421413741f));
    p = vf_fma(p, t, vf_set1(-0.284496736f));
    p = vf_fma(p, t, vf_set1(0.254829592f));
    vf half_square = vf_mul(vf_mul(x, vf_set1(-0.5f)), x);
    vf tail = vf_mul(vf_mul(p, t), vf_exp(half_square)); /* 0 from x = 14 on, also times infinity */
    tail = vf_mul(tail, vf_mul(vf_min(vf_set1(100.0f), size), vf_set1(0.5f)));
    return vf_sub(vf_max(vf_zero(), x), tail); /* x - tail, or -tail below 0 */
}

/* 0.5 x (1 + tanh(u)) is x sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3). */
SIMD_INLINE vf gelu_tanh(vf x)
{
    vf inner = vf_fma(vf_mul(x, x), vf_set1(0.044715f), vf_set1(1.0f));
    vf u = vf_mul(vf_mul(x, vf_set1(1.5957691216f)), inner);
    return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), u))));
}

SIMD_INLINE vf relu2(vf x)
{
    vf positive = vf_max(vf_zero(), x);
    return vf_mul(positive, positive);
}

SIMD_INLINE vf activation_of(int64_t activation, vf x)
{
    return activation == ACTIVATION_SILU        ? silu(x)
           : activation == ACTIVATION_GELU      ? gelu(x)
           : activation == ACTIVATION_GELU_TANH ? gelu_tanh(x)
                                                : relu2(x);
}

/* `activation` and `gated` are constants where it is inlined. */
SIMD_INLINE void activate_all(int64_t activation, bool gated, float scale, float *gate,
                              const float *up, size_t n)
{
    vf factor = vf_set1(scale);
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES) {
        vf a = vf_mul(activation_of(activation, vf_load(gate + i)), factor);
        vf_store(gate + i, gated ? vf_mul(a, vf_load(up + i)) : a);
    }
    if (i < n) {
        vf a = vf_mul(activation_of(activation, vf_load_n(gate + i, n - i)), factor);
        vf_store_n(gate + i, gated ? vf_mul(a, vf_load_n(up + i, n - i)) : a, n - i);
    }
}

static void activate(int64_t activation, float scale, float *gate, const float *up, size_t n)
{
    switch (activation * 2 + (up != NULL)) {
#define ACTIVATE(kind)                                                                             \
    case kind * 2:                                                                                 \
        activate_all(kind, false, scale, gate, up, n);                                             \
        break;                                                                                     \
    case kind * 2 + 1:                                                                             \
        activate_all(kind, true, scale, gate, up, n);                                              \
        break
        ACTIVATE(ACTIVATION_SILU);
        ACTIVATE(ACTIVATION_GELU);
        ACTIVATE(ACTIVATION_GELU_TANH);
        ACTIVATE(ACTIVATION_RELU2);
#undef ACTIVATE
    }
}

static void sigmoid_mul(float *x, const float *gate, size_t n)
{
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES)
        vf_store(x + i, vf_mul(vf_load(x + i), sigmoid(vf_load(gate + i))));
    if (i < n)
        vf_store_n(x + i, vf_mul(vf_load_n(x + i, n - i), sigmoid(vf_load_n(gate + i, n - i))),
                   n - i);
}

static float dot(const float *a, const float *b, size_t n)
{
    vf sum = vf_zero();
    size_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES)
        sum = vf_fma(vf_load(a + i), vf_load(b + i), sum);
    if (i < n)
        sum = vf_fma(vf_load_n(a + i, n - i), vf_load_n(b + i, n - i), sum);
    return vf_sum(sum);
}

static void store_kv(void *to, const float *from, size_t n, size_t stride, const kv_layout *layout)
{
    if (layout->mode == TL_KV_MODE_FP32) {
        for (size_t i = 0; i < n; i++)
            ((float *)to)[i * stride] = from[i];
        return;
    }
    for (size_t i = 0; i < n; i += CPU_LANES) {
        size_t count = n - i < CPU_LANES ? n - i : CPU_LANES;
        uint16_t half[CPU_LANES];
        vf_store_f16(half, vf_load_n(from + i, count));
        for (size_t j = 0; j < count; j++)
            ((uint16_t *)to)[(i + j) * stride] = half[j];
    }
}
