/* Memory of KV blocks: slabs on demand, reference counts, exact byte counts. Safe for threads. */
#ifndef TL_KV_STORE_H
#define TL_KV_STORE_H

#include "base/count.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

#define KV_MAX_CLASSES 4

/* Where blocks live; a backend's. `allocate` gives NULL if there is no memory. */
typedef struct kv_memory {
    void *(*allocate)(void *context, size_t bytes);
    void (*release)(void *context, void *data);
    void (*copy)(void *context, void *to, const void *from, size_t bytes);
    void (*fill)(void *context, void *data, int byte, size_t bytes);
    void *context;
} kv_memory;

typedef struct kv_slab kv_slab;

typedef struct kv_block {
    ref_count references;
    kv_slab *slab;
    void *data;
    struct kv_block *next_free;
} kv_block;

typedef struct kv_store kv_store;

/* One class of equally large blocks for each stage; block_bytes: [n_classes]. With `poison`, fresh
 * blocks are filled with 0xFF, which is NaN in every float format. */
tl_status kv_store_create(kv_store **out, kv_memory memory, const size_t *block_bytes,
                          int n_classes, bool poison);
void kv_store_destroy(kv_store *store); /* all blocks must have been released */

/* n blocks with one reference each, or none and NOMEM. */
tl_status kv_store_take(kv_store *store, int class, size_t n, kv_block **blocks);
void kv_block_release(kv_block *block);
void kv_store_copy(kv_store *store, const kv_block *to, const kv_block *from);

size_t kv_store_block_bytes(const kv_store *store, int class);

/* Bytes of the blocks in use, and of the slabs that hold them. */
void kv_store_bytes(kv_store *store, size_t *in_use, size_t *in_slabs);

#endif
