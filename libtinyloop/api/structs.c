#include "api/structs.h"

#include <string.h>

enum { MAX_SIZE = 4096 }; /* far above any version's: a larger size was never set */

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static tl_status read_size(size_t *size, const void *given, size_t first_size, const char *name)
{
    memcpy(size, given, sizeof *size);
    if (*size >= first_size && *size <= MAX_SIZE)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_INVALID, "%s.size is %zu; it must be its sizeof, at least %zu", name,
                   *size, first_size);
}

tl_status struct_read(void *own, size_t own_size, size_t first_size, const void *given,
                      const char *name)
{
    if (given == NULL)
        return TL_STATUS_OK;
    size_t size;
    TL_TRY(read_size(&size, given, first_size, name));
    for (size_t i = own_size; i < size; i++)
        if (((const unsigned char *)given)[i] != 0)
            return tl_fail(TL_STATUS_UNSUPPORTED,
                           "%s has a field at byte %zu that this version, %s, does not know", name,
                           i, tl_version_string());
    memcpy(own, given, smaller(size, own_size));
    return TL_STATUS_OK;
}

tl_status struct_write(void *out, const void *own, size_t own_size, size_t first_size,
                       const char *name)
{
    size_t size;
    TL_TRY(read_size(&size, out, first_size, name));
    memset(out, 0, size);
    memcpy(out, own, smaller(size, own_size));
    memcpy(out, &size, sizeof size);
    return TL_STATUS_OK;
}

tl_status struct_check_reserved(int32_t reserved, const char *name)
{
    if (reserved == 0)
        return TL_STATUS_OK;
    return tl_fail(TL_STATUS_UNSUPPORTED, "%s.reserved is %d; this version, %s, knows 0 only", name,
                   reserved, tl_version_string());
}
