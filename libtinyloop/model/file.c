#include "model/file.h"

#include "base/crc32.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_SIZE 64
#define TENSORS_AT (HEADER_SIZE + sizeof(model_config))
#define TENSOR_ENTRY_SIZE 160
#define BLOB_ENTRY_SIZE 64
#define BLOB_NAME_SIZE 48
#define MAX_META_SIZE (256 << 20) /* read whole before its checksum is known */
#define MAX_TENSORS 65536
#define MAX_BLOBS 64
#define TENSOR_ALIGNMENT 64
#define BLOB_ALIGNMENT 8
#define MAX_SHOWN_PATH 200 /* bytes of it that a message has, so that the reason fits too */
#define VERIFY_PIECE 16384 /* bytes, on the stack */

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the reader takes the file's little-endian numbers as they are"
#endif

static uint32_t read_u32(const unsigned char *p)
{
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

static uint64_t read_u64(const unsigned char *p)
{
    uint64_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

size_t dtype_size(tensor_dtype dtype)
{
    static const size_t size[] = {4, 2, 2, 1};
    return size[dtype];
}

const char *dtype_name(tensor_dtype dtype)
{
    static const char *const name[] = {"float32", "float16", "bfloat16", "int8"};
    return name[dtype];
}

/* ---- reading ---- */

static tl_status open_file(model_file *file, const char *path)
{
    /* O_NONBLOCK: a named pipe must not make the call wait for a writer */
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fd < 0)
        return tl_fail(TL_STATUS_IO, "cannot open \"%s\": %s", file->path, strerror(errno));
    struct stat info;
    if (fstat(file->fd, &info) != 0)
        return tl_fail(TL_STATUS_IO, "cannot read %s: %s", file->path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return tl_fail(TL_STATUS_IO, "%s is not a regular file", file->path);
    if (info.st_size < HEADER_SIZE)
        return tl_fail(TL_STATUS_FORMAT, "%s has %lld bytes; a .tinyloop file has at least %d",
                       file->path, (long long)info.st_size, HEADER_SIZE);
    file->size = (size_t)info.st_size;
    return TL_STATUS_OK;
}

/* All `size` bytes or a failure that names `part`. */
static tl_status read_at(const model_file *file, const char *part, void *to, size_t size,
                         uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(file->fd, (char *)to + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return tl_fail(TL_STATUS_IO,
                           "%s: cannot read %zu bytes of %s at offset %llu: got %zu, "
                           "then %s",
                           file->path, size, part, (unsigned long long)offset, done,
                           n < 0 ? strerror(errno) : "the file ends (it was cut off just now)");
        done += (size_t)n;
    }
    return TL_STATUS_OK;
}

tl_status file_tensor_read(const file_tensor *tensor, void *to, size_t at, size_t size)
{
    return read_at(tensor->file, tensor->name, to, size, tensor->offset + at);
}

void model_file_close(model_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    mem_free(file->meta);
    mem_free(file->tensors);
    mem_free(file->blobs);
    *file = (model_file){.fd = -1};
}

/* ---- header ---- */

static tl_status check_header(const model_file *file, const unsigned char *p)
{
    if (memcmp(p, "TINYLOOP", 8) != 0)
        return tl_fail(TL_STATUS_FORMAT, "%s is not a .tinyloop file (its first bytes differ)",
                       file->path);
    if (read_u32(p + 8) != 1)
        return tl_fail(TL_STATUS_UNSUPPORTED, "%s has format version %u; this library reads 1",
                       file->path, read_u32(p + 8));
    if (read_u64(p + 16) != file->size)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s has %zu bytes, but its header says %llu: it is cut "
                       "off or was added to",
                       file->path, file->size, (unsigned long long)read_u64(p + 16));
    uint64_t meta_size = read_u64(p + 24);
    if (meta_size < HEADER_SIZE || meta_size > file->size || meta_size % TENSOR_ALIGNMENT != 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: meta_size %llu is outside the file or not a multiple "
                       "of %d",
                       file->path, (unsigned long long)meta_size, TENSOR_ALIGNMENT);
    if (meta_size > MAX_META_SIZE)
        return tl_fail(TL_STATUS_FORMAT, "%s: meta_size is %llu; at most %d are allowed",
                       file->path, (unsigned long long)meta_size, MAX_META_SIZE);
    return TL_STATUS_OK;
}

/* What lies before the tensors, with a sound checksum. */
static tl_status read_meta(model_file *file)
{
    unsigned char header[HEADER_SIZE];
    TL_TRY(read_at(file, "the header", header, HEADER_SIZE, 0));
    TL_TRY(check_header(file, header));
    file->meta_size = (size_t)read_u64(header + 24);
    file->meta = mem_array(file->meta_size, 1);
    if (file->meta == NULL)
        return tl_fail_nomem("the directories of a model file", file->meta_size);
    memcpy(file->meta, header, HEADER_SIZE);
    TL_TRY(read_at(file, "the directories", file->meta + HEADER_SIZE, file->meta_size - HEADER_SIZE,
                   HEADER_SIZE));
    uint32_t crc = crc32_update(0, file->meta + 16, file->meta_size - 16);
    if (crc != read_u32(header + 12))
        return tl_fail(TL_STATUS_FORMAT,
                       "%s is damaged: the checksum of its header and "
                       "directories is %08x, not %08x",
                       file->path, crc, read_u32(header + 12));
    return TL_STATUS_OK;
}

static size_t blobs_at(const model_file *file)
{
    return TENSORS_AT + file->n_tensors * TENSOR_ENTRY_SIZE;
}

/* Of the first blob's contents. */
static size_t contents_at(const model_file *file)
{
    return blobs_at(file) + file->n_blobs * BLOB_ENTRY_SIZE;
}

static tl_status read_counts(model_file *file)
{
    const unsigned char *p = file->meta;
    uint64_t n_fields = read_u64(p + 32), n_tensors = read_u64(p + 40), n_blobs = read_u64(p + 48);
    if (n_fields != CONFIG_N_FIELDS || n_tensors > MAX_TENSORS || n_blobs > MAX_BLOBS ||
        read_u64(p + 56) != 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: %llu config fields, %llu tensors, %llu blobs, reserved field %llu; "
                       "allowed are exactly %d, at most %d, at most %d and 0",
                       file->path, (unsigned long long)n_fields, (unsigned long long)n_tensors,
                       (unsigned long long)n_blobs, (unsigned long long)read_u64(p + 56),
                       CONFIG_N_FIELDS, MAX_TENSORS, MAX_BLOBS);
    file->n_tensors = (size_t)n_tensors;
    file->n_blobs = (size_t)n_blobs;
    if (contents_at(file) > file->meta_size)
        return tl_fail(TL_STATUS_FORMAT, "%s: its directories do not fit into meta_size %zu",
                       file->path, file->meta_size);
    memcpy(&file->config, p + HEADER_SIZE, sizeof file->config);
    return TL_STATUS_OK;
}

/* ---- directories ---- */

/* Offsets follow from sizes, so a part begins at the aligned end of the one before. */
static bool next_part(uint64_t *end, uint64_t offset, uint64_t size, uint64_t alignment,
                      uint64_t limit)
{
    uint64_t begin = (*end + alignment - 1) / alignment * alignment;
    if (offset != begin || begin > limit || size > limit - begin)
        return false;
    *end = begin + size;
    return true;
}

static bool all_zero(const unsigned char *p, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if (p[i] != 0)
            return false;
    return true;
}

static bool sound_name(const unsigned char *p, size_t field)
{
    size_t length = strnlen((const char *)p, field);
    return length > 0 && length < field && all_zero(p + length, field - length);
}

static bool read_shape(file_tensor *tensor, const unsigned char *entry)
{
    uint32_t dtype = read_u32(entry + 96), n_dims = read_u32(entry + 100);
    if (dtype > DTYPE_I8 || n_dims < 1 || n_dims > 4)
        return false;
    tensor->dtype = (tensor_dtype)dtype;
    tensor->n_dims = (int)n_dims;
    size_t size = dtype_size(tensor->dtype);
    for (uint32_t d = 0; d < 4; d++) {
        uint64_t extent = read_u64(entry + 104 + 8 * d);
        if ((d < n_dims) != (extent > 0) || extent > INT64_MAX)
            return false;
        if (d < n_dims && !size_product(&size, size, (size_t)extent))
            return false;
        tensor->shape[d] = (int64_t)extent;
    }
    tensor->size = size;
    return read_u64(entry + 144) == size && read_u32(entry + 156) == 0;
}

static tl_status read_tensors(model_file *file)
{
    uint64_t end = file->meta_size;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const unsigned char *entry = file->meta + TENSORS_AT + i * TENSOR_ENTRY_SIZE;
        file_tensor *tensor = &file->tensors[i];
        if (!sound_name(entry, TENSOR_NAME_SIZE))
            return tl_fail(TL_STATUS_FORMAT, "%s: tensor %zu has no sound name", file->path, i);
        tensor->name = (const char *)entry;
        if (!read_shape(tensor, entry))
            return tl_fail(TL_STATUS_FORMAT, "%s: dtype, shape and size of tensor %s do not agree",
                           file->path, tensor->name);
        tensor->file = file;
        tensor->offset = read_u64(entry + 136);
        if (!next_part(&end, tensor->offset, tensor->size, TENSOR_ALIGNMENT, file->size))
            return tl_fail(TL_STATUS_FORMAT,
                           "%s: offset %llu of tensor %s (%zu bytes) is not the "
                           "next free one, or outside the file",
                           file->path, (unsigned long long)tensor->offset, tensor->name,
                           tensor->size);
        tensor->crc = read_u32(entry + 152);
    }
    if (end != file->size)
        return tl_fail(TL_STATUS_FORMAT, "%s: the tensors end at byte %llu, the file at %zu",
                       file->path, (unsigned long long)end, file->size);
    return TL_STATUS_OK;
}

static tl_status read_blobs(model_file *file)
{
    uint64_t end = contents_at(file);
    for (size_t i = 0; i < file->n_blobs; i++) {
        const unsigned char *entry = file->meta + blobs_at(file) + i * BLOB_ENTRY_SIZE;
        file_blob *blob = &file->blobs[i];
        if (!sound_name(entry, BLOB_NAME_SIZE))
            return tl_fail(TL_STATUS_FORMAT, "%s: blob %zu has no sound name", file->path, i);
        blob->name = (const char *)entry;
        for (size_t j = 0; j < i; j++)
            if (strcmp(file->blobs[j].name, blob->name) == 0)
                return tl_fail(TL_STATUS_FORMAT, "%s has two blobs %s", file->path, blob->name);
        uint64_t offset = read_u64(entry + 48), size = read_u64(entry + 56), gap_at = end;
        if (size == 0 || !next_part(&end, offset, size, BLOB_ALIGNMENT, file->meta_size))
            return tl_fail(TL_STATUS_FORMAT, "%s: offset %llu or size %llu of blob %s is wrong",
                           file->path, (unsigned long long)offset, (unsigned long long)size,
                           blob->name);
        if (!all_zero(file->meta + gap_at, offset - gap_at))
            return tl_fail(TL_STATUS_FORMAT, "%s: the gap before blob %s is not zero", file->path,
                           blob->name);
        blob->data = file->meta + offset;
        blob->size = (size_t)size;
    }
    uint64_t meta_size = (end + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
    if (meta_size != file->meta_size || !all_zero(file->meta + end, meta_size - end))
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: the blobs end at byte %llu, which does not agree "
                       "with meta_size %zu, or the gap after them is not zero",
                       file->path, (unsigned long long)end, file->meta_size);
    return TL_STATUS_OK;
}

/* ---- verifying ---- */

static tl_status compute_crc(uint32_t *crc, const file_tensor *tensor)
{
    unsigned char piece[VERIFY_PIECE];
    *crc = 0;
    for (size_t done = 0, n; done < tensor->size; done += n) {
        n = tensor->size - done < sizeof piece ? tensor->size - done : sizeof piece;
        TL_TRY(file_tensor_read(tensor, piece, done, n));
        *crc = crc32_update(*crc, piece, n);
    }
    return TL_STATUS_OK;
}

static tl_status verify_tensors(const model_file *file)
{
    uint64_t end = file->meta_size;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const file_tensor *tensor = &file->tensors[i];
        unsigned char gap[TENSOR_ALIGNMENT];
        TL_TRY(read_at(file, tensor->name, gap, tensor->offset - end, end));
        if (!all_zero(gap, tensor->offset - end))
            return tl_fail(TL_STATUS_FORMAT, "%s is damaged: the gap before tensor %s is not zero",
                           file->path, tensor->name);
        uint32_t crc;
        TL_TRY(compute_crc(&crc, tensor));
        if (crc != tensor->crc)
            return tl_fail(TL_STATUS_FORMAT,
                           "%s is damaged: the checksum of tensor %s is %08x, "
                           "not %08x",
                           file->path, tensor->name, crc, tensor->crc);
        end = tensor->offset + tensor->size;
    }
    return TL_STATUS_OK;
}

/* ---- opening ---- */

static tl_status read_all(model_file *file, const char *path, bool verify)
{
    TL_TRY(open_file(file, path));
    TL_TRY(read_meta(file));
    TL_TRY(read_counts(file));
    file->tensors = mem_zeroed(file->n_tensors, sizeof *file->tensors);
    file->blobs = mem_zeroed(file->n_blobs, sizeof *file->blobs);
    if (file->tensors == NULL || file->blobs == NULL)
        return tl_fail_nomem("the directories of a model file",
                             file->n_tensors * sizeof *file->tensors);
    TL_TRY(read_tensors(file));
    TL_TRY(read_blobs(file));
    return verify ? verify_tensors(file) : TL_STATUS_OK;
}

tl_status model_file_open(model_file *file, const char *path, bool verify)
{
    size_t size = strlen(path);
    *file =
        (model_file){.path = size > MAX_SHOWN_PATH ? path + size - MAX_SHOWN_PATH : path, .fd = -1};
    tl_status status = read_all(file, path, verify);
    if (status != TL_STATUS_OK)
        model_file_close(file);
    return status;
}
