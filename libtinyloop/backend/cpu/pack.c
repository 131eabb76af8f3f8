#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "base/memory.h"

#include <string.h>

static float element(const file_tensor *tensor, size_t index)
{
    if (tensor->dtype == DTYPE_F32)
        return ((const float *)tensor->data)[index];
    uint16_t half = ((const uint16_t *)tensor->data)[index];
    return tensor->dtype == DTYPE_F16 ? float_from_f16(half) : float_from_bf16(half);
}

typedef struct pack_job {
    cpu_matrix *matrix;
    const file_tensor *const *tensors;
    int n_tensors;
} pack_job;

/* Where the matrix's row lies: a tensor, and its row there; NULL beyond the last. */
static const file_tensor *find_row(const pack_job *job, size_t row, size_t *tensor_row)
{
    for (int t = 0; t < job->n_tensors; t++) {
        size_t n = (size_t)job->tensors[t]->shape[0];
        if (row < n) {
            *tensor_row = row;
            return job->tensors[t];
        }
        row -= n;
    }
    return NULL;
}

/* One row into its place in the panel; lane = row % CPU_PANEL. */
static void pack_row(const cpu_matrix *matrix, void *panel, size_t lane_index,
                     const file_tensor *tensor, size_t row)
{
    size_t columns = matrix->columns;
    if (matrix->dtype == DTYPE_F32) {
        float *to = (float *)panel + lane_index;
        for (size_t c = 0; c < columns; c++)
            to[c * CPU_PANEL] = element(tensor, row * columns + c);
        return;
    }
    const uint16_t *from = (const uint16_t *)tensor->data + row * columns;
    uint16_t *to = panel;
    if (matrix->dtype == DTYPE_F16) {
        for (size_t c = 0; c < columns; c++)
            to[c * CPU_PANEL + lane_index] = from[c];
    } else {
        for (size_t c = 0; c < columns; c++)
            to[(c / 2 * CPU_PANEL + lane_index) * 2 + c % 2] = from[c];
    }
}

static void pack_panel(const pack_job *job, size_t p)
{
    const cpu_matrix *matrix = job->matrix;
    char *panel = (char *)matrix->data + p * matrix->panel_bytes;
    bool padded = (p + 1) * CPU_PANEL > matrix->rows || matrix->columns % 2 != 0;
    if (padded)
        memset(panel, 0, matrix->panel_bytes);
    for (size_t i = 0; i < CPU_PANEL; i++) {
        size_t row;
        const file_tensor *tensor = find_row(job, p * CPU_PANEL + i, &row);
        if (tensor != NULL)
            pack_row(matrix, panel, i, tensor, row);
    }
}

static void pack_panels(void *arg, lane *self)
{
    const pack_job *job = arg;
    size_t begin, end;
    while (lane_next(self, job->matrix->n_panels, 1, &begin, &end))
        for (size_t p = begin; p < end; p++)
            pack_panel(job, p);
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
    pack_job job = {matrix, tensors, n_tensors};
    thread_pool_run(threads, pack_panels, &job);
    for (int t = 0; t < n_tensors; t++)
        file_tensor_done(tensors[t]);
    return TL_STATUS_OK;
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

float *cpu_vector(const file_tensor *tensor)
{
    size_t n = (size_t)tensor->shape[0];
    float *out = mem_aligned(n, sizeof *out);
    for (size_t i = 0; out != NULL && i < n; i++)
        out[i] = element(tensor, i);
    return out;
}
