/* Reader of .tinyloop files (docs/format.md). The file is mapped; nothing of it is believed before
 * it was checked. */
#ifndef TL_MODEL_FILE_H
#define TL_MODEL_FILE_H

#include "model/config.h"

#include <stdbool.h>

typedef enum tensor_dtype {
    DTYPE_F32 = 0,
    DTYPE_F16 = 1,
    DTYPE_BF16 = 2,
    DTYPE_I8 = 3,
} tensor_dtype;

typedef struct file_tensor {
    const char *name;
    const void *data; /* in the mapping */
    size_t size;      /* bytes */
    int64_t shape[4]; /* unused ones are 0 */
    int n_dims;
    tensor_dtype dtype;
    uint32_t crc;
} file_tensor;

typedef struct file_blob {
    const char *name;
    const void *data;
    size_t size;
} file_blob;

typedef struct model_file {
    void *map;
    size_t size;
    model_config config; /* not yet checked by config_check */
    file_tensor *tensors;
    size_t n_tensors;
    file_blob *blobs;
    size_t n_blobs;
} model_file;

/* Errors: IO, FORMAT, NOMEM. `verify`: the tensors' checksums too. */
tl_status model_file_open(model_file *file, const char *path, bool verify);
void model_file_close(model_file *file);

/* Nobody reads the tensor any more: its pages need not stay in memory. */
void file_tensor_done(const file_tensor *tensor);

size_t dtype_size(tensor_dtype dtype);
const char *dtype_name(tensor_dtype dtype);

#endif
