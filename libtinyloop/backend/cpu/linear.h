/* Linear layers. Part of kernels.h.
 *
 * An including file tells the shapes of its register tiles:
 *   TILE_4_VECTORS, TILE_2_VECTORS  vectors of outputs that four rows, and two rows, have at once
 * A tile's shape decides speed only: no sum depends on it. */
#define PANEL_VECTORS (CPU_PANEL / CPU_LANES)

_Static_assert(CPU_KG % 2 == 0, "columns go in pairs");
_Static_assert(CPU_KG == WEIGHT_GROUP, "a group of columns has one scale");

/* Where a vector of outputs has its weights. */
SIMD_INLINE const char *vector_weights(const cpu_matrix *w, tensor_dtype dtype, size_t vector)
{
    size_t in_step = dtype == DTYPE_BF16 ? 2 : 1; /* columns side by side */
    size_t element = dtype == DTYPE_F32 ? 4 : dtype == DTYPE_I8 ? 1 : 2;
    return (const char *)w->data + vector / PANEL_VECTORS * w->panel_bytes +
           vector % PANEL_VECTORS * CPU_LANES * in_step * element;
}

/* And the scales of its first group; those of the next are CPU_PANEL further on. */
SIMD_INLINE const float *vector_scales(const cpu_matrix *w, size_t vector)
{
    size_t n_groups = (w->columns + CPU_KG - 1) / CPU_KG;
    return w->scales + vector / PANEL_VECTORS * n_groups * CPU_PANEL +
           vector % PANEL_VECTORS * CPU_LANES;
}

/* Columns c and c + 1 (c even) of a vector. */
SIMD_INLINE void load_pair(tensor_dtype dtype, const char *weights, size_t c, vf *even, vf *odd)
{
    if (dtype == DTYPE_BF16) {
        vi pair = vi_load(weights + c * CPU_PANEL * 2);
        *even = vf_bf16_low(pair);
        *odd = vf_bf16_high(pair);
    } else if (dtype == DTYPE_F16) {
        const uint16_t *p = (const uint16_t *)weights + c * CPU_PANEL;
        *even = vf_load_f16(p);
        *odd = vf_load_f16(p + CPU_PANEL);
    } else if (dtype == DTYPE_I8) {
        const int8_t *p = (const int8_t *)weights + c * CPU_PANEL;
        *even = vf_load_i8(p);
        *odd = vf_load_i8(p + CPU_PANEL);
    } else {
        const float *p = (const float *)weights + c * CPU_PANEL;
        *even = vf_load(p);
        *odd = vf_load(p + CPU_PANEL);
    }
}

/* The last column of an odd number. */
SIMD_INLINE vf load_last(tensor_dtype dtype, const char *weights, size_t c)
{
    if (dtype == DTYPE_BF16)
        return vf_bf16_low(vi_load(weights + c * CPU_PANEL * 2));
    if (dtype == DTYPE_F16)
        return vf_load_f16((const uint16_t *)weights + c * CPU_PANEL);
    if (dtype == DTYPE_I8)
        return vf_load_i8((const int8_t *)weights + c * CPU_PANEL);
    return vf_load((const float *)weights + c * CPU_PANEL);
}

SIMD_INLINE void put_output(float *y, vf value, size_t n, bool add)
{
    if (n >= CPU_LANES)
        vf_store(y, add ? vf_add(vf_load(y), value) : value);
    else
        vf_store_n(y, add ? vf_add(vf_load_n(y, n), value) : value, n);
}

typedef vf tile_sums[4][PANEL_VECTORS];

/* The sums of columns [begin, end), at most a group, from fresh accumulators; begin is even. `rows`
 * and `vectors` are constants where it is inlined. Vectors innermost: an x is needed for a moment
 * only, and the compiler keeps all sums in registers. */
SIMD_INLINE void sum_group(tensor_dtype dtype, int rows, int vectors, tile_sums sum,
                           const char *const *weights, size_t begin, size_t end, const float *x,
                           size_t x_stride)
{
    size_t even_end = end - (end & 1);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (size_t c = begin; c < even_end; c += 2) {
        vf even[PANEL_VECTORS], odd[PANEL_VECTORS];
        for (int v = 0; v < vectors; v++)
            load_pair(dtype, weights[v], c, &even[v], &odd[v]);
        for (int r = 0; r < rows; r++) {
            vf a = vf_set1(x[(size_t)r * x_stride + c]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(even[v], a, sum[r][v]);
        }
        for (int r = 0; r < rows; r++) {
            vf a = vf_set1(x[(size_t)r * x_stride + c + 1]);
            for (int v = 0; v < vectors; v++)
                sum[r][v] = vf_fma(odd[v], a, sum[r][v]);
        }
    }
    for (int v = 0; v < vectors && even_end < end; v++) {
        vf last = load_last(dtype, weights[v], even_end);
        for (int r = 0; r < rows; r++)
            sum[r][v] = vf_fma(last, vf_set1(x[(size_t)r * x_stride + even_end]), sum[r][v]);
    }
}

typedef struct linear_args {
    const cpu_matrix *w;
    size_t vector; /* the first of the tile's outputs / CPU_LANES */
    const float *x;
    size_t x_stride;
    float *y;
    size_t y_stride;
    bool add;
} linear_args;

/* `rows` rows times `vectors` vectors of outputs: the groups' sums added in ascending order, those
 * of int8 weights times the group's scales. */
SIMD_INLINE void linear_tile(tensor_dtype dtype, int rows, int vectors, const linear_args *args)
{
    const cpu_matrix *w = args->w;
    const char *weights[PANEL_VECTORS];
    const float *scales[PANEL_VECTORS];
    for (int v = 0; v < vectors; v++) {
        weights[v] = vector_weights(w, dtype, args->vector + (size_t)v);
        scales[v] = dtype == DTYPE_I8 ? vector_scales(w, args->vector + (size_t)v) : NULL;
    }
    tile_sums total, sum;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] = vf_zero();
    for (size_t begin = 0; begin < w->columns; begin += CPU_KG) {
        size_t end = begin + CPU_KG < w->columns ? begin + CPU_KG : w->columns;
        sum_group(dtype, rows, vectors, sum, weights, begin, end, args->x, args->x_stride);
        for (int v = 0; v < vectors && dtype == DTYPE_I8; v++) {
            vf scale = vf_load(scales[v] + begin / CPU_KG * CPU_PANEL);
            for (int r = 0; r < rows; r++)
                total[r][v] = vf_fma(sum[r][v], scale, total[r][v]);
        }
        for (int r = 0; r < rows && dtype != DTYPE_I8; r++)
            for (int v = 0; v < vectors; v++)
                total[r][v] = vf_add(total[r][v], sum[r][v]);
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            size_t o = (args->vector + (size_t)v) * CPU_LANES;
            if (o < w->rows) /* the panel's last vectors may be padding */
                put_output(args->y + (size_t)r * args->y_stride + o, total[r][v], w->rows - o,
                           args->add);
        }
    }
}

/* Each shape of tile is a function of its own for each dtype: a compiler that inlines several into
 * one runs out of registers in all of them. */
#define FUNCTION(dtype, name, rows, vectors)                                                       \
    static __attribute__((noinline)) void name##_##dtype(const linear_args *args)                  \
    {                                                                                              \
        linear_tile(DTYPE_##dtype, rows, vectors, args);                                           \
    }
#define TILE(name, rows, vectors)                                                                  \
    FUNCTION(BF16, name, rows, vectors)                                                            \
    FUNCTION(F16, name, rows, vectors)                                                             \
    FUNCTION(F32, name, rows, vectors)                                                             \
    FUNCTION(I8, name, rows, vectors)
#define SHAPE(name, rows, vectors)                                                                 \
    {                                                                                              \
        rows, vectors,                                                                             \
        {                                                                                          \
            [DTYPE_BF16] = name##_BF16, [DTYPE_F16] = name##_F16, [DTYPE_F32] = name##_F32,        \
            [DTYPE_I8] = name##_I8                                                                 \
        }                                                                                          \
    }

TILE(tile_4, 4, TILE_4_VECTORS)
TILE(tile_2, 2, TILE_2_VECTORS)
TILE(tile_1, 1, PANEL_VECTORS)

static const struct linear_shape {
    size_t rows, vectors;
    void (*run[DTYPE_I8 + 1])(const linear_args *args); /* by dtype; I8 is the last */
} linear_shapes[] = {
    SHAPE(tile_4, 4, TILE_4_VECTORS),
    SHAPE(tile_2, 2, TILE_2_VECTORS),
    SHAPE(tile_1, 1, PANEL_VECTORS),
};
#undef FUNCTION
#undef TILE
#undef SHAPE

/* A panel's outputs for all rows. */
static void linear_panel(linear_args args, size_t n_rows)
{
    size_t first = args.vector;
    for (const struct linear_shape *shape = linear_shapes; n_rows > 0; shape++) {
        for (; n_rows >= shape->rows; n_rows -= shape->rows) {
            for (size_t v = 0; v < PANEL_VECTORS; v += shape->vectors) {
                args.vector = first + v;
                shape->run[args.w->dtype](&args);
            }
            args.x += shape->rows * args.x_stride;
            args.y += shape->rows * args.y_stride;
        }
    }
}

static void linear(const cpu_matrix *w, size_t begin, size_t end, const float *x, size_t x_stride,
                   size_t n_rows, float *y, size_t y_stride, bool add)
{
    linear_args args = {w, 0, x, x_stride, y, y_stride, add};
    for (size_t panel = begin; panel < end; panel++) {
        args.vector = panel * PANEL_VECTORS;
        linear_panel(args, n_rows);
    }
}
