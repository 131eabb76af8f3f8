#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "base/memory.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static float element(tensor_dtype dtype, const void *data, size_t index)
{
    if (dtype == DTYPE_F32)
        return ((const float *)data)[index];
    if (dtype == DTYPE_I8)
        return ((const int8_t *)data)[index];
    uint16_t half = ((const uint16_t *)data)[index];
    return dtype == DTYPE_F16 ? float_from_f16(half) : float_from_bf16(half);
}

typedef struct pack_job {
    cpu_matrix *matrix;
    const weight_matrix *parts;
    int n_parts;
    atomic_flag failed;
    tl_status status;                  /* of the first failure, */
    char message[STATUS_MESSAGE_SIZE]; /* and what it said, on whichever thread */
} pack_job;

static size_t n_groups(const cpu_matrix *matrix)
{
    return (matrix->columns + CPU_KG - 1) / CPU_KG;
}

/* Where the matrix's row lies: a part, and its row there. */
static const weight_matrix *find_row(const pack_job *job, size_t row, size_t *part_row)
{
    int p = 0;
    for (; row >= (size_t)job->parts[p].values->shape[0]; p++)
        row -= (size_t)job->parts[p].values->shape[0];
    *part_row = row;
    return &job->parts[p];
}

/* One row of n numbers of `dtype` into its place in the panel, the rest of which is zero. `scales`:
 * of the row's groups, where an int8 row becomes float32. */
static void pack_row(const cpu_matrix *matrix, void *panel, size_t row, tensor_dtype dtype,
                     const void *from, size_t n, const float *scales)
{
    const uint16_t *halves = from;
    uint16_t *to = panel;
    if (matrix->dtype == DTYPE_F32) {
        for (size_t c = 0; c < n; c++)
            ((float *)panel)[c * CPU_PANEL + row] =
                element(dtype, from, c) * (scales != NULL ? scales[c / CPU_KG] : 1);
    } else if (matrix->dtype == DTYPE_F16) {
        for (size_t c = 0; c < n; c++)
            to[c * CPU_PANEL + row] = halves[c];
    } else if (matrix->dtype == DTYPE_I8) {
        for (size_t c = 0; c < n; c++)
            ((int8_t *)panel)[c * CPU_PANEL + row] = ((const int8_t *)from)[c];
    } else {
        for (size_t c = 0; c < n; c += 2)
            memcpy(to + c * CPU_PANEL + row * 2, halves + c, (c + 1 < n ? 2 : 1) * sizeof *to);
    }
}

/* The scales of rows [first, first + n) of an int8 part, a row's groups side by side. A row's only
 * scale is that of each group; groups beyond the part's columns have 0. */
static tl_status read_scales(float *scales, const pack_job *job, const weight_matrix *part,
                             size_t first, size_t n)
{
    size_t groups = n_groups(job->matrix), stored = (size_t)part->scales->shape[1];
    TL_TRY(file_tensor_read(part->scales, scales, first * stored * sizeof *scales,
                            n * stored * sizeof *scales));
    for (size_t i = n * groups; i-- > 0;) { /* in place, so from the end */
        size_t row = i / groups, group = stored == 1 ? 0 : i % groups;
        scales[i] = group < stored ? scales[row * stored + group] : 0;
    }
    return TL_STATUS_OK;
}

/* Memory of a lane that packs: a panel's rows as the file has them, and their scales. */
typedef struct pack_memory {
    char *rows;
    float *scales; /* [CPU_PANEL][groups], or NULL */
} pack_memory;

/* Rows [first, first + n) of a part into the panel's rows from `row` on. */
static tl_status pack_part(const pack_job *job, size_t p, size_t row, const weight_matrix *part,
                           size_t first, size_t n, const pack_memory *memory)
{
    const cpu_matrix *matrix = job->matrix;
    const file_tensor *values = part->values;
    size_t groups = n_groups(matrix), columns = (size_t)values->shape[1];
    size_t row_bytes = columns * dtype_size(values->dtype);
    bool scaled = values->dtype == DTYPE_I8, dequantise = scaled && matrix->dtype == DTYPE_F32;
    TL_TRY(file_tensor_read(values, memory->rows, first * row_bytes, n * row_bytes));
    if (scaled)
        TL_TRY(read_scales(memory->scales, job, part, first, n));
    for (size_t i = 0; i < n; i++) {
        const float *scales = scaled ? memory->scales + i * groups : NULL;
        pack_row(matrix, (char *)matrix->data + p * matrix->panel_bytes, row + i, values->dtype,
                 memory->rows + i * row_bytes, columns, dequantise ? scales : NULL);
        for (size_t g = 0; matrix->scales != NULL && g < groups; g++)
            matrix->scales[(p * groups + g) * CPU_PANEL + row + i] = scales[g];
    }
    return TL_STATUS_OK;
}

/* Whether the parts leave columns of a panel unwritten. */
static bool has_padding(const pack_job *job)
{
    bool padded = job->matrix->columns % 2 != 0;
    for (int p = 0; p < job->n_parts; p++)
        padded = padded || (size_t)job->parts[p].values->shape[1] < job->matrix->columns;
    return padded;
}

static tl_status pack_panel(const pack_job *job, size_t p, const pack_memory *memory)
{
    const cpu_matrix *matrix = job->matrix;
    size_t row = p * CPU_PANEL, left = matrix->rows - row;
    if (left < CPU_PANEL || has_padding(job))
        memset((char *)matrix->data + p * matrix->panel_bytes, 0, matrix->panel_bytes);
    left = left < CPU_PANEL ? left : CPU_PANEL;
    for (size_t n; left > 0; row += n, left -= n) {
        size_t first;
        const weight_matrix *part = find_row(job, row, &first);
        n = (size_t)part->values->shape[0] - first;
        n = n < left ? n : left;
        TL_TRY(pack_part(job, p, row % CPU_PANEL, part, first, n, memory));
    }
    return TL_STATUS_OK;
}

/* Both or none. */
static tl_status allocate_memory(pack_memory *memory, const pack_job *job)
{
    size_t row_bytes = 0, scale_bytes = 0;
    for (int p = 0; p < job->n_parts; p++) {
        const file_tensor *values = job->parts[p].values;
        size_t bytes = (size_t)values->shape[1] * dtype_size(values->dtype);
        row_bytes = bytes > row_bytes ? bytes : row_bytes;
        if (values->dtype == DTYPE_I8)
            scale_bytes = n_groups(job->matrix) * sizeof *memory->scales;
    }
    memory->rows = mem_array(CPU_PANEL, row_bytes);
    memory->scales = scale_bytes > 0 ? mem_array(CPU_PANEL, scale_bytes) : NULL;
    if (memory->rows != NULL && (memory->scales != NULL || scale_bytes == 0))
        return TL_STATUS_OK;
    mem_free(memory->rows);
    mem_free(memory->scales);
    *memory = (pack_memory){NULL, NULL};
    return tl_fail_nomem("reading weights", CPU_PANEL * (row_bytes + scale_bytes));
}

static void pack_panels(void *arg, lane *self)
{
    pack_job *job = arg;
    pack_memory memory = {NULL, NULL};
    size_t begin, end;
    while (lane_next(self, job->matrix->n_panels, 1, &begin, &end)) {
        tl_status status = memory.rows == NULL ? allocate_memory(&memory, job) : TL_STATUS_OK;
        for (size_t p = begin; p < end && status == TL_STATUS_OK; p++)
            status = pack_panel(job, p, &memory);
        if (status != TL_STATUS_OK && !atomic_flag_test_and_set(&job->failed)) {
            job->status = status;
            snprintf(job->message, sizeof job->message, "%s", status_sentence());
        }
    }
    mem_free(memory.rows);
    mem_free(memory.scales);
}

static size_t padded_columns(const cpu_matrix *matrix)
{
    return matrix->columns + (matrix->dtype == DTYPE_BF16 ? matrix->columns % 2 : 0);
}

static tl_status allocate_matrix(cpu_matrix *matrix)
{
    size_t panel = CPU_PANEL * dtype_size(matrix->dtype), scales = 0;
    bool fits = size_product(&matrix->panel_bytes, padded_columns(matrix), panel);
    matrix->data = fits ? mem_aligned(matrix->n_panels, matrix->panel_bytes) : NULL;
    if (matrix->dtype == DTYPE_I8) {
        scales = n_groups(matrix) * CPU_PANEL * sizeof *matrix->scales;
        matrix->scales = mem_zeroed(matrix->n_panels, scales);
    }
    if (matrix->data != NULL && (matrix->scales != NULL || scales == 0))
        return TL_STATUS_OK;
    size_t bytes = matrix->n_panels * (matrix->panel_bytes + scales);
    cpu_matrix_clear(matrix);
    return tl_fail_nomem("packed weights", bytes);
}

tl_status cpu_matrix_pack(cpu_matrix *matrix, const weight_matrix *parts, int n_parts,
                          size_t columns, thread_pool *threads)
{
    *matrix = (cpu_matrix){.columns = columns, .dtype = parts[0].values->dtype};
    for (int p = 0; p < n_parts; p++) {
        matrix->rows += (size_t)parts[p].values->shape[0];
        if (parts[p].values->dtype != matrix->dtype)
            matrix->dtype = DTYPE_F32;
    }
    matrix->n_panels = (matrix->rows + CPU_PANEL - 1) / CPU_PANEL;
    TL_TRY(allocate_matrix(matrix));
    pack_job job = {matrix, parts, n_parts, ATOMIC_FLAG_INIT, TL_STATUS_OK, ""};
    thread_pool_run(threads, pack_panels, &job);
    if (job.status == TL_STATUS_OK)
        return TL_STATUS_OK;
    cpu_matrix_clear(matrix);
    return tl_fail(job.status, "%s", job.message);
}

void cpu_matrix_clear(cpu_matrix *matrix)
{
    mem_free(matrix->data);
    mem_free(matrix->scales);
    *matrix = (cpu_matrix){0};
}

size_t cpu_matrix_bytes(const cpu_matrix *matrix)
{
    size_t scales = matrix->scales != NULL ? n_groups(matrix) * CPU_PANEL * sizeof(float) : 0;
    return matrix->n_panels * (matrix->panel_bytes + scales);
}

void cpu_matrix_row(const cpu_matrix *matrix, size_t row, size_t first, size_t n, float *out)
{
    size_t p = row / CPU_PANEL, i = row % CPU_PANEL;
    const void *panel = (const char *)matrix->data + p * matrix->panel_bytes;
    const float *scales =
        matrix->scales != NULL ? matrix->scales + p * n_groups(matrix) * CPU_PANEL + i : NULL;
    for (size_t c = first; c < first + n; c++) {
        size_t at =
            matrix->dtype == DTYPE_BF16 ? (c / 2 * CPU_PANEL + i) * 2 + c % 2 : c * CPU_PANEL + i;
        float scale = scales != NULL ? scales[c / CPU_KG * CPU_PANEL] : 1;
        out[c - first] = element(matrix->dtype, panel, at) * scale;
    }
}

tl_status cpu_vector(float **out, const file_tensor *tensor)
{
    size_t n = tensor->size / dtype_size(tensor->dtype);
    void *stored = mem_array(1, tensor->size);
    *out = mem_aligned(n, sizeof **out);
    tl_status status = stored != NULL && *out != NULL
                           ? file_tensor_read(tensor, stored, 0, tensor->size)
                           : tl_fail_nomem(tensor->name, n * sizeof **out);
    for (size_t i = 0; status == TL_STATUS_OK && i < n; i++)
        (*out)[i] = element(tensor->dtype, stored, i);
    mem_free(stored);
    return status;
}
