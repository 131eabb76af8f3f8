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
    uint16_t half = ((const uint16_t *)data)[index];
    return dtype == DTYPE_F16 ? float_from_f16(half) : float_from_bf16(half);
}

typedef struct pack_job {
    cpu_matrix *matrix;
    const file_tensor *const *tensors;
    int n_tensors;
    atomic_flag failed;
    tl_status status;  /* of the first failure, */
    char message[512]; /* and what it said, on whichever thread */
} pack_job;

/* Where the matrix's row lies: a tensor, and its row there. */
static const file_tensor *find_row(const pack_job *job, size_t row, size_t *tensor_row)
{
    int t = 0;
    for (; row >= (size_t)job->tensors[t]->shape[0]; t++)
        row -= (size_t)job->tensors[t]->shape[0];
    *tensor_row = row;
    return job->tensors[t];
}

/* One row, of `dtype`, into its place in the panel. */
static void pack_row(const cpu_matrix *matrix, void *panel, size_t row, tensor_dtype dtype,
                     const void *from)
{
    size_t columns = matrix->columns;
    const uint16_t *halves = from;
    uint16_t *to = panel;
    if (matrix->dtype == DTYPE_F32) {
        for (size_t c = 0; c < columns; c++)
            ((float *)panel)[c * CPU_PANEL + row] = element(dtype, from, c);
    } else if (matrix->dtype == DTYPE_F16) {
        for (size_t c = 0; c < columns; c++)
            to[c * CPU_PANEL + row] = halves[c];
    } else {
        for (size_t c = 0; c < columns; c += 2)
            memcpy(to + c * CPU_PANEL + row * 2, halves + c,
                   (c + 1 < columns ? 2 : 1) * sizeof *to);
    }
}

/* `rows`: memory for a panel's rows as the file has them. */
static tl_status pack_panel(const pack_job *job, size_t p, char *rows)
{
    const cpu_matrix *matrix = job->matrix;
    char *panel = (char *)matrix->data + p * matrix->panel_bytes;
    size_t row = p * CPU_PANEL, left = matrix->rows - row;
    if (left < CPU_PANEL || matrix->columns % 2 != 0)
        memset(panel, 0, matrix->panel_bytes);
    left = left < CPU_PANEL ? left : CPU_PANEL;
    for (size_t n; left > 0; row += n, left -= n) {
        size_t first;
        const file_tensor *tensor = find_row(job, row, &first);
        size_t row_bytes = matrix->columns * dtype_size(tensor->dtype);
        n = (size_t)tensor->shape[0] - first;
        n = n < left ? n : left;
        TL_TRY(file_tensor_read(tensor, rows, first * row_bytes, n * row_bytes));
        for (size_t i = 0; i < n; i++)
            pack_row(matrix, panel, (row + i) % CPU_PANEL, tensor->dtype, rows + i * row_bytes);
    }
    return TL_STATUS_OK;
}

static void pack_panels(void *arg, lane *self)
{
    pack_job *job = arg;
    char *rows = NULL;
    size_t begin, end;
    while (lane_next(self, job->matrix->n_panels, 1, &begin, &end)) {
        if (rows == NULL)
            rows = mem_array(1, job->matrix->panel_bytes);
        tl_status status = rows != NULL
                               ? TL_STATUS_OK
                               : tl_fail_nomem("reading weights", job->matrix->panel_bytes);
        for (size_t p = begin; p < end && status == TL_STATUS_OK; p++)
            status = pack_panel(job, p, rows);
        if (status != TL_STATUS_OK && !atomic_flag_test_and_set(&job->failed)) {
            job->status = status;
            snprintf(job->message, sizeof job->message, "%s", status_last_error());
        }
    }
    mem_free(rows);
}

static size_t padded_columns(const cpu_matrix *matrix)
{
    return matrix->columns + (matrix->dtype == DTYPE_BF16 ? matrix->columns % 2 : 0);
}

tl_status cpu_matrix_pack(cpu_matrix *matrix, const file_tensor *const *tensors, int n_tensors,
                          thread_pool *threads)
{
    *matrix = (cpu_matrix){.columns = (size_t)tensors[0]->shape[1], .dtype = tensors[0]->dtype};
    for (int t = 0; t < n_tensors; t++) {
        matrix->rows += (size_t)tensors[t]->shape[0];
        if (tensors[t]->dtype != matrix->dtype)
            matrix->dtype = DTYPE_F32;
    }
    matrix->n_panels = (matrix->rows + CPU_PANEL - 1) / CPU_PANEL;
    size_t element_bytes = dtype_size(matrix->dtype);
    bool fits =
        size_product(&matrix->panel_bytes, padded_columns(matrix), CPU_PANEL * element_bytes);
    matrix->data = fits ? mem_aligned(matrix->n_panels, matrix->panel_bytes) : NULL;
    if (matrix->data == NULL) {
        size_t bytes = matrix->n_panels * matrix->panel_bytes;
        *matrix = (cpu_matrix){0};
        return tl_fail_nomem("packed weights", bytes);
    }
    pack_job job = {matrix, tensors, n_tensors, ATOMIC_FLAG_INIT, TL_STATUS_OK, ""};
    thread_pool_run(threads, pack_panels, &job);
    if (job.status == TL_STATUS_OK)
        return TL_STATUS_OK;
    cpu_matrix_clear(matrix);
    return tl_fail(job.status, "%s", job.message);
}

void cpu_matrix_clear(cpu_matrix *matrix)
{
    mem_free(matrix->data);
    *matrix = (cpu_matrix){0};
}

size_t cpu_matrix_bytes(const cpu_matrix *matrix)
{
    return matrix->n_panels * matrix->panel_bytes;
}

void cpu_matrix_row(const cpu_matrix *matrix, size_t row, float *out)
{
    const void *panel = (const char *)matrix->data + row / CPU_PANEL * matrix->panel_bytes;
    size_t i = row % CPU_PANEL;
    for (size_t c = 0; c < matrix->columns; c++) {
        if (matrix->dtype == DTYPE_F32)
            out[c] = ((const float *)panel)[c * CPU_PANEL + i];
        else if (matrix->dtype == DTYPE_F16)
            out[c] = float_from_f16(((const uint16_t *)panel)[c * CPU_PANEL + i]);
        else
            out[c] =
                float_from_bf16(((const uint16_t *)panel)[(c / 2 * CPU_PANEL + i) * 2 + c % 2]);
    }
}

tl_status cpu_vector(float **out, const file_tensor *tensor)
{
    size_t n = (size_t)tensor->shape[0];
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
