/* Structs that begin with their own size, so that programs and libraries of different versions
 * understand each other: fields are only ever appended, and those that one side lacks are at their
 * defaults (options) or 0 (infos). */
#ifndef TL_API_STRUCTS_H
#define TL_API_STRUCTS_H

#include "base/status.h"

#include <stddef.h>

/* `last` is the last field that the struct had in its first version: no program has a shorter one.
 * `given` may be NULL. Unknown fields of a longer struct must be zero, else UNSUPPORTED. */
#define READ_STRUCT(own, given, type, last)                                                        \
    struct_read(own, sizeof(type), STRUCT_SIZE_UP_TO(type, last), given, #type)
#define WRITE_STRUCT(out, own, type, last)                                                         \
    struct_write(out, own, sizeof(type), STRUCT_SIZE_UP_TO(type, last), #type)
#define STRUCT_SIZE_UP_TO(type, last) (offsetof(type, last) + sizeof(((type *)NULL)->last))

/* Copies what the caller's struct has into `own`, which holds the defaults. */
tl_status struct_read(void *own, size_t own_size, size_t first_size, const void *given,
                      const char *name);

/* Fills the caller's struct, whose size it has set, as far as it goes; a longer one's tail becomes
 * zero. */
tl_status struct_write(void *out, const void *own, size_t own_size, size_t first_size,
                       const char *name);

/* A field for later versions. */
tl_status struct_check_reserved(int32_t reserved, const char *name);

#endif
