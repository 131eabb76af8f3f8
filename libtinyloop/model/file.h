/* Reader of .tinyloop files (docs/format.md). Nothing of a file is believed before it was checked.
 * It is read, never mapped: a mapped file that shrinks would raise SIGBUS in the host program. */
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

#define TENSOR_NAME_SIZE 96 /* with the zero byte at its end */

typedef struct model_file model_file;

typedef struct file_tensor {
    const char *name;
    const model_file *file;
    uint64_t offset;  /* in the file */
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

struct model_file {
    const char *path; /* for messages: borrowed, and where it is long, its end alone */
    int fd;
    size_t size;
    unsigned char *meta; /* [meta_size] all before the tensors; names and blobs lie in it */
    size_t meta_size;
    model_config config; /* not yet checked by config_check */
    file_tensor *tensors;
    size_t n_tensors;
    file_blob *blobs;
    size_t n_blobs;
};

/* Errors: IO, FORMAT, NOMEM. `verify`: the tensors' checksums and the gaps between them too. */
tl_status model_file_open(model_file *file, const char *path, bool verify);
void model_file_close(model_file *file);

/* Bytes [at, at + size) of a tensor; safe for threads. IO also where the file has shrunk. */
tl_status file_tensor_read(const file_tensor *tensor, void *to, size_t at, size_t size);

size_t dtype_size(tensor_dtype dtype);
const char *dtype_name(tensor_dtype dtype);

#endif
