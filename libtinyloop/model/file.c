#include "model/file.h"

#include "base/crc32.h"
#include "base/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_SIZE 64
#define TENSOR_ENTRY_SIZE 160
#define TENSOR_NAME_SIZE 96
#define BLOB_ENTRY_SIZE 64
#define BLOB_NAME_SIZE 48
#define MAX_TENSORS 65536
#define MAX_BLOBS 64
#define TENSOR_ALIGNMENT 64
#define BLOB_ALIGNMENT 8

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

/* ---- mapping ---- */

static tl_status map_file(model_file *file, const char *path)
{
    /* O_NONBLOCK: a named pipe must not make the call wait for a writer */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return tl_fail(TL_STATUS_IO, "cannot open %s: %s", path, strerror(errno));
    struct stat info;
    tl_status status = TL_STATUS_OK;
    if (fstat(fd, &info) != 0)
        status = tl_fail(TL_STATUS_IO, "cannot read %s: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        status = tl_fail(TL_STATUS_IO, "%s is not a regular file", path);
    else if (info.st_size < HEADER_SIZE)
        status = tl_fail(TL_STATUS_FORMAT, "%s has %lld bytes; a .tinyloop file has at least %d",
                         path, (long long)info.st_size, HEADER_SIZE);
    if (status == TL_STATUS_OK) {
        file->size = (size_t)info.st_size;
        file->map = mmap(NULL, file->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (file->map == MAP_FAILED) {
            file->map = NULL;
            status = tl_fail(TL_STATUS_IO, "cannot map %s: %s", path, strerror(errno));
        }
    }
    close(fd);
    return status;
}

void model_file_close(model_file *file)
{
    if (file->map != NULL)
        munmap(file->map, file->size);
    mem_free(file->tensors);
    mem_free(file->blobs);
    *file = (model_file){0};
}

void file_tensor_done(const file_tensor *tensor)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)tensor->data + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)tensor->data + tensor->size) / page * page;
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

/* ---- header ---- */

typedef struct file_header {
    uint64_t meta_size;
    uint64_t n_tensors;
    uint64_t n_blobs;
    size_t tensors_at;
    size_t blobs_at;
    size_t contents_at; /* of the first blob */
} file_header;

static tl_status read_header(file_header *header, const model_file *file, const char *path)
{
    const unsigned char *p = file->map;
    if (memcmp(p, "TINYLOOP", 8) != 0)
        return tl_fail(TL_STATUS_FORMAT, "%s is not a .tinyloop file (its first bytes differ)",
                       path);
    if (read_u32(p + 8) != 1)
        return tl_fail(TL_STATUS_UNSUPPORTED, "%s has format version %u; this library reads 1",
                       path, read_u32(p + 8));
    if (read_u64(p + 16) != file->size)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s has %zu bytes, but its header says %llu: it is cut "
                       "off or was added to",
                       path, file->size, (unsigned long long)read_u64(p + 16));
    header->meta_size = read_u64(p + 24);
    if (header->meta_size < HEADER_SIZE || header->meta_size > file->size ||
        header->meta_size % TENSOR_ALIGNMENT != 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: meta_size %llu is outside the file or not a multiple "
                       "of %d",
                       path, (unsigned long long)header->meta_size, TENSOR_ALIGNMENT);
    uint32_t crc = crc32_update(0, p + 16, (size_t)header->meta_size - 16);
    if (crc != read_u32(p + 12))
        return tl_fail(TL_STATUS_FORMAT,
                       "%s is damaged: the checksum of its header and "
                       "directories is %08x, not %08x",
                       path, crc, read_u32(p + 12));
    header->n_tensors = read_u64(p + 40);
    header->n_blobs = read_u64(p + 48);
    if (read_u64(p + 32) != CONFIG_N_FIELDS || header->n_tensors > MAX_TENSORS ||
        header->n_blobs > MAX_BLOBS || read_u64(p + 56) != 0)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: %llu config fields, %llu tensors, %llu blobs; "
                       "allowed are exactly %d, at most %d and at most %d",
                       path, (unsigned long long)read_u64(p + 32),
                       (unsigned long long)header->n_tensors, (unsigned long long)header->n_blobs,
                       CONFIG_N_FIELDS, MAX_TENSORS, MAX_BLOBS);
    header->tensors_at = HEADER_SIZE + sizeof(model_config);
    header->blobs_at = header->tensors_at + (size_t)header->n_tensors * TENSOR_ENTRY_SIZE;
    header->contents_at = header->blobs_at + (size_t)header->n_blobs * BLOB_ENTRY_SIZE;
    if (header->contents_at > header->meta_size)
        return tl_fail(TL_STATUS_FORMAT, "%s: its directories do not fit into meta_size %llu", path,
                       (unsigned long long)header->meta_size);
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

static bool sound_name(const unsigned char *p, size_t field)
{
    size_t length = strnlen((const char *)p, field);
    if (length == 0 || length == field)
        return false;
    for (size_t i = length; i < field; i++)
        if (p[i] != 0)
            return false;
    return true;
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

static tl_status read_tensors(model_file *file, const file_header *header, const char *path)
{
    const unsigned char *base = file->map;
    uint64_t end = header->meta_size;
    for (size_t i = 0; i < file->n_tensors; i++) {
        const unsigned char *entry = base + header->tensors_at + i * TENSOR_ENTRY_SIZE;
        file_tensor *tensor = &file->tensors[i];
        if (!sound_name(entry, TENSOR_NAME_SIZE))
            return tl_fail(TL_STATUS_FORMAT, "%s: tensor %zu has no sound name", path, i);
        tensor->name = (const char *)entry;
        if (!read_shape(tensor, entry))
            return tl_fail(TL_STATUS_FORMAT, "%s: dtype, shape and size of tensor %s do not agree",
                           path, tensor->name);
        uint64_t offset = read_u64(entry + 136);
        if (!next_part(&end, offset, tensor->size, TENSOR_ALIGNMENT, file->size))
            return tl_fail(TL_STATUS_FORMAT,
                           "%s: offset %llu of tensor %s (%zu bytes) is not the "
                           "next free one, or outside the file",
                           path, (unsigned long long)offset, tensor->name, tensor->size);
        tensor->data = base + offset;
        tensor->crc = read_u32(entry + 152);
    }
    if (end != file->size)
        return tl_fail(TL_STATUS_FORMAT, "%s: the tensors end at byte %llu, the file at %zu", path,
                       (unsigned long long)end, file->size);
    return TL_STATUS_OK;
}

static tl_status read_blobs(model_file *file, const file_header *header, const char *path)
{
    const unsigned char *base = file->map;
    uint64_t end = header->contents_at;
    for (size_t i = 0; i < file->n_blobs; i++) {
        const unsigned char *entry = base + header->blobs_at + i * BLOB_ENTRY_SIZE;
        file_blob *blob = &file->blobs[i];
        if (!sound_name(entry, BLOB_NAME_SIZE))
            return tl_fail(TL_STATUS_FORMAT, "%s: blob %zu has no sound name", path, i);
        blob->name = (const char *)entry;
        for (size_t j = 0; j < i; j++)
            if (strcmp(file->blobs[j].name, blob->name) == 0)
                return tl_fail(TL_STATUS_FORMAT, "%s has two blobs %s", path, blob->name);
        uint64_t offset = read_u64(entry + 48), size = read_u64(entry + 56);
        if (size == 0 || !next_part(&end, offset, size, BLOB_ALIGNMENT, header->meta_size))
            return tl_fail(TL_STATUS_FORMAT, "%s: offset %llu or size %llu of blob %s is wrong",
                           path, (unsigned long long)offset, (unsigned long long)size, blob->name);
        blob->data = base + offset;
        blob->size = (size_t)size;
    }
    uint64_t meta_size = (end + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
    if (meta_size != header->meta_size)
        return tl_fail(TL_STATUS_FORMAT,
                       "%s: the blobs end at byte %llu, which does not agree "
                       "with meta_size %llu",
                       path, (unsigned long long)end, (unsigned long long)header->meta_size);
    return TL_STATUS_OK;
}

static tl_status verify_tensors(const model_file *file, const char *path)
{
    for (size_t i = 0; i < file->n_tensors; i++) {
        const file_tensor *tensor = &file->tensors[i];
        uint32_t crc = crc32_update(0, tensor->data, tensor->size);
        if (crc != tensor->crc)
            return tl_fail(TL_STATUS_FORMAT,
                           "%s is damaged: the checksum of tensor %s is %08x, "
                           "not %08x",
                           path, tensor->name, crc, tensor->crc);
    }
    return TL_STATUS_OK;
}

static tl_status read_all(model_file *file, const char *path, bool verify)
{
    TL_TRY(map_file(file, path));
    file_header header = {0};
    TL_TRY(read_header(&header, file, path));
    memcpy(&file->config, (const char *)file->map + HEADER_SIZE, sizeof file->config);
    file->n_tensors = (size_t)header.n_tensors;
    file->n_blobs = (size_t)header.n_blobs;
    file->tensors = mem_zeroed(file->n_tensors, sizeof *file->tensors);
    file->blobs = mem_zeroed(file->n_blobs, sizeof *file->blobs);
    if (file->tensors == NULL || file->blobs == NULL)
        return tl_fail_nomem("the directories of a model file",
                             file->n_tensors * sizeof *file->tensors);
    TL_TRY(read_tensors(file, &header, path));
    TL_TRY(read_blobs(file, &header, path));
    return verify ? verify_tensors(file, path) : TL_STATUS_OK;
}

tl_status model_file_open(model_file *file, const char *path, bool verify)
{
    *file = (model_file){0};
    tl_status status = read_all(file, path, verify);
    if (status != TL_STATUS_OK)
        model_file_close(file);
    return status;
}
