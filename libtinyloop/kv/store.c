#include "kv/store.h"

#include "base/lock.h"
#include "base/memory.h"

#define SLAB_BYTES ((size_t)4 << 20) /* about; at least one block */
#define SLAB_MAX_BLOCKS 1024

typedef struct slab_class {
    size_t block_bytes;
    size_t blocks_per_slab;
    kv_slab *slabs;  /* those with a free block; the others are found through their blocks */
    size_t n_in_use; /* blocks */
    size_t n_slabs;
    size_t n_idle_slabs; /* with no block in use */
} slab_class;

struct kv_slab {
    kv_store *store;
    slab_class *class;
    kv_slab *next;
    kv_slab *previous;
    void *data;
    kv_block *free_blocks;
    size_t n_in_use;
    kv_block blocks[];
};

struct kv_store {
    lock lock;
    kv_memory memory;
    bool poison;
    int n_classes;
    slab_class classes[KV_MAX_CLASSES];
};

tl_status kv_store_create(kv_store **out, kv_memory memory, const size_t *block_bytes,
                          int n_classes, bool poison)
{
    *out = NULL;
    kv_store *store = mem_zeroed(1, sizeof *store);
    if (store == NULL)
        return tl_fail_nomem("the KV store", sizeof *store);
    lock_init(&store->lock);
    store->memory = memory;
    store->poison = poison;
    store->n_classes = n_classes;
    for (int i = 0; i < n_classes; i++) {
        size_t n = SLAB_BYTES / block_bytes[i];
        store->classes[i].block_bytes = block_bytes[i];
        store->classes[i].blocks_per_slab = n < 1 ? 1 : n > SLAB_MAX_BLOCKS ? SLAB_MAX_BLOCKS : n;
    }
    *out = store;
    return TL_STATUS_OK;
}

/* ---- slabs; the lock is held ---- */

static void link_first(slab_class *class, kv_slab *slab)
{
    slab->previous = NULL;
    slab->next = class->slabs;
    if (slab->next != NULL)
        slab->next->previous = slab;
    class->slabs = slab;
}

static void unlink_slab(slab_class *class, kv_slab *slab)
{
    if (slab->previous != NULL)
        slab->previous->next = slab->next;
    else
        class->slabs = slab->next;
    if (slab->next != NULL)
        slab->next->previous = slab->previous;
}

static kv_slab *add_slab(kv_store *store, slab_class *class)
{
    size_t n = class->blocks_per_slab;
    kv_slab *slab = mem_array(1, sizeof *slab + n * sizeof slab->blocks[0]);
    if (slab == NULL)
        return NULL;
    slab->data = store->memory.allocate(store->memory.context, n * class->block_bytes);
    if (slab->data == NULL) {
        mem_free(slab);
        return NULL;
    }
    slab->store = store;
    slab->class = class;
    slab->n_in_use = 0;
    slab->free_blocks = NULL;
    for (size_t i = n; i-- > 0;) {
        kv_block *block = &slab->blocks[i];
        *block =
            (kv_block){0, slab, (char *)slab->data + i * class->block_bytes, slab->free_blocks};
        slab->free_blocks = block;
    }
    link_first(class, slab);
    class->n_slabs++;
    class->n_idle_slabs++;
    return slab;
}

static void remove_slab(kv_store *store, kv_slab *slab)
{
    slab_class *class = slab->class;
    unlink_slab(class, slab);
    class->n_slabs--;
    class->n_idle_slabs--;
    store->memory.release(store->memory.context, slab->data);
    mem_free(slab);
}

static kv_block *take_one(kv_store *store, slab_class *class)
{
    kv_slab *slab = class->slabs;
    if (slab == NULL || slab->free_blocks == NULL)
        slab = add_slab(store, class);
    if (slab == NULL)
        return NULL;
    kv_block *block = slab->free_blocks;
    slab->free_blocks = block->next_free;
    if (slab->n_in_use++ == 0)
        class->n_idle_slabs--;
    class->n_in_use++;
    if (slab->free_blocks == NULL)
        unlink_slab(class, slab);
    atomic_store_explicit(&block->references, 1, memory_order_relaxed);
    return block;
}

/* One idle slab of a class is kept, so that a sequence at a slab's edge does not allocate and
 * free it at each step. */
static void give_one(kv_store *store, kv_block *block)
{
    kv_slab *slab = block->slab;
    slab_class *class = slab->class;
    if (slab->free_blocks == NULL)
        link_first(class, slab);
    block->next_free = slab->free_blocks;
    slab->free_blocks = block;
    class->n_in_use--;
    if (--slab->n_in_use == 0 && ++class->n_idle_slabs > 1)
        remove_slab(store, slab);
}

/* ---- public ---- */

tl_status kv_store_take(kv_store *store, int class_index, size_t n, kv_block **blocks)
{
    slab_class *class = &store->classes[class_index];
    size_t taken = 0;
    lock_take(&store->lock);
    while (taken < n && (blocks[taken] = take_one(store, class)) != NULL)
        taken++;
    bool complete = taken == n;
    while (!complete && taken > 0)
        give_one(store, blocks[--taken]);
    lock_give(&store->lock);
    if (!complete)
        return tl_fail_nomem("KV blocks", class->blocks_per_slab * class->block_bytes);
    for (size_t i = 0; store->poison && i < n; i++)
        store->memory.fill(store->memory.context, blocks[i]->data, 0xFF, class->block_bytes);
    return TL_STATUS_OK;
}

void kv_block_release(kv_block *block)
{
    if (!ref_release(&block->references))
        return;
    kv_store *store = block->slab->store;
    lock_take(&store->lock);
    give_one(store, block);
    lock_give(&store->lock);
}

void kv_store_copy(kv_store *store, const kv_block *to, const kv_block *from)
{
    store->memory.copy(store->memory.context, to->data, from->data, to->slab->class->block_bytes);
}

size_t kv_store_block_bytes(const kv_store *store, int class)
{
    return store->classes[class].block_bytes;
}

void kv_store_bytes(kv_store *store, size_t *in_use, size_t *in_slabs)
{
    *in_use = *in_slabs = 0;
    lock_take(&store->lock);
    for (int i = 0; i < store->n_classes; i++) {
        const slab_class *class = &store->classes[i];
        *in_use += class->n_in_use * class->block_bytes;
        *in_slabs += class->n_slabs * class->blocks_per_slab * class->block_bytes;
    }
    lock_give(&store->lock);
}

void kv_store_destroy(kv_store *store)
{
    if (store == NULL)
        return;
    for (int i = 0; i < store->n_classes; i++)
        while (store->classes[i].slabs != NULL)
            remove_slab(store, store->classes[i].slabs);
    lock_destroy(&store->lock);
    mem_free(store);
}
