/* Memory of KV blocks that counts what it is asked for and can fail. */
#ifndef TINYLOOP_WATCHED_MEMORY_H
#define TINYLOOP_WATCHED_MEMORY_H

#include "kv/store.h"

#include <stdlib.h>
#include <string.h>

typedef struct watched {
    int64_t n_live; /* slabs */
    int64_t n_allocated;
    int64_t n_copied; /* blocks */
    int64_t n_filled;
    int64_t fail_in; /* the allocation that fails: 0 the next; negative: none */
} watched;

static inline void *watched_allocate(void *context, size_t bytes)
{
    watched *w = context;
    if (w->fail_in >= 0 && w->fail_in-- == 0)
        return NULL;
    w->n_live++;
    w->n_allocated++;
    return malloc(bytes);
}

static inline void watched_release(void *context, void *data)
{
    ((watched *)context)->n_live--;
    free(data);
}

static inline void watched_copy(void *context, void *to, const void *from, size_t bytes)
{
    ((watched *)context)->n_copied++;
    memcpy(to, from, bytes);
}

static inline void watched_fill(void *context, void *data, int byte, size_t bytes)
{
    ((watched *)context)->n_filled++;
    memset(data, byte, bytes);
}

static inline kv_memory watched_memory(watched *w)
{
    *w = (watched){.fail_in = -1};
    return (kv_memory){watched_allocate, watched_release, watched_copy, watched_fill, w};
}

#endif
