#include "prefix/pool.h"

#include "base/lock.h"
#include "base/memory.h"
#include "prefix/index.h"

typedef struct pool_entry {
    tl_prefix_cache *cache; /* retained */
    uint64_t order;         /* of registration */
} pool_entry;

struct tl_prefix_pool {
    handle handle;
    ref_count references;
    lock lock;
    size_t capacity;
    size_t size;
    size_t allocated;  /* of `heap` */
    pool_entry **heap; /* a binary heap: the next to be evicted is heap[0] */
    prefix_index *index;
    uint64_t next_order;
    int64_t total_tokens;
};

tl_status prefix_pool_create(tl_prefix_pool **out, size_t capacity)
{
    *out = NULL;
    tl_prefix_pool *pool = mem_zeroed(1, sizeof *pool);
    if (pool == NULL)
        return tl_fail_nomem("a prefix pool", sizeof *pool);
    tl_status status = prefix_index_create(&pool->index);
    if (status != TL_STATUS_OK) {
        mem_free(pool);
        return status;
    }
    atomic_init(&pool->references, 1);
    lock_init(&pool->lock);
    pool->capacity = capacity > 0 ? capacity : 1;
    *out = pool;
    return TL_STATUS_OK;
}

tl_prefix_pool *prefix_pool_retain(tl_prefix_pool *pool)
{
    ref_retain(&pool->references);
    return pool;
}

static void free_entry(pool_entry *entry)
{
    if (entry != NULL)
        prefix_cache_release(entry->cache);
    mem_free(entry);
}

void prefix_pool_release(tl_prefix_pool *pool)
{
    if (pool == NULL || !ref_release(&pool->references))
        return;
    for (size_t i = 0; i < pool->size; i++)
        free_entry(pool->heap[i]);
    prefix_index_destroy(pool->index);
    lock_destroy(&pool->lock);
    mem_free(pool->heap);
    mem_free(pool);
}

/* Readers lock too; the lock is no part of what const promises. */
static void enter(const tl_prefix_pool *pool)
{
    lock_take((lock *)&pool->lock);
}

static void leave(const tl_prefix_pool *pool)
{
    lock_give((lock *)&pool->lock);
}

size_t prefix_pool_size(const tl_prefix_pool *pool)
{
    enter(pool);
    size_t size = pool->size;
    leave(pool);
    return size;
}

int64_t prefix_pool_total_tokens(const tl_prefix_pool *pool)
{
    enter(pool);
    int64_t total = pool->total_tokens;
    leave(pool);
    return total;
}

/* ---- eviction order; the lock is held ---- */

/* Shorter ones go first, then those registered first. */
static bool goes_before(const pool_entry *a, const pool_entry *b)
{
    if (a->cache->n_tokens != b->cache->n_tokens)
        return a->cache->n_tokens < b->cache->n_tokens;
    return a->order < b->order;
}

static void heap_swap(pool_entry **heap, size_t i, size_t j)
{
    pool_entry *entry = heap[i];
    heap[i] = heap[j];
    heap[j] = entry;
}

static void heap_push(tl_prefix_pool *pool, pool_entry *entry)
{
    size_t i = pool->size++;
    pool->heap[i] = entry;
    for (; i > 0 && goes_before(pool->heap[i], pool->heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap_swap(pool->heap, i, (i - 1) / 2);
}

static pool_entry *heap_pop(tl_prefix_pool *pool)
{
    pool_entry *first = pool->heap[0];
    pool->heap[0] = pool->heap[--pool->size];
    for (size_t i = 0;;) {
        size_t child = 2 * i + 1;
        if (child >= pool->size)
            return first;
        if (child + 1 < pool->size && goes_before(pool->heap[child + 1], pool->heap[child]))
            child++;
        if (!goes_before(pool->heap[child], pool->heap[i]))
            return first;
        heap_swap(pool->heap, i, child);
        i = child;
    }
}

static tl_status heap_reserve(tl_prefix_pool *pool)
{
    if (pool->size < pool->allocated)
        return TL_STATUS_OK;
    size_t n = pool->allocated > 0 ? 2 * pool->allocated : 16;
    pool_entry **heap = mem_grow(pool->heap, n, sizeof *heap);
    if (heap == NULL)
        return tl_fail_nomem("a prefix pool", n * sizeof *heap);
    pool->heap = heap;
    pool->allocated = n;
    return TL_STATUS_OK;
}

/* ---- entries ---- */

static index_space space_of(const tl_model *model, cache_key key)
{
    return (index_space){model, key.loops, key.window, key.inner_loops, key.prefix_len};
}

static pool_entry *evict(tl_prefix_pool *pool)
{
    pool_entry *victim = heap_pop(pool);
    const tl_kv_cache *kv = victim->cache->kv;
    prefix_index_remove(pool->index, space_of(kv->model, kv->key), victim->cache->tokens,
                        victim->cache->n_tokens);
    pool->total_tokens -= (int64_t)victim->cache->n_tokens;
    return victim;
}

/* Enters the entry; *loser is what the caller frees outside the lock: the evicted one, or the
 * entry itself if another thread has registered its key meanwhile. */
static tl_status insert(tl_prefix_pool *pool, pool_entry *entry, pool_entry **loser)
{
    const tl_prefix_cache *cache = entry->cache;
    index_space space = space_of(cache->kv->model, cache->kv->key);
    *loser = entry;
    if (prefix_index_find(pool->index, space, cache->tokens, cache->n_tokens) != NULL)
        return TL_STATUS_OK;
    TL_TRY(heap_reserve(pool));
    TL_TRY(prefix_index_insert(pool->index, space, cache->tokens, cache->n_tokens, entry));
    *loser = pool->size == pool->capacity ? evict(pool) : NULL;
    entry->order = pool->next_order++;
    heap_push(pool, entry);
    pool->total_tokens += (int64_t)cache->n_tokens;
    return TL_STATUS_OK;
}

tl_status prefix_pool_register(tl_prefix_pool *pool, tl_model *model, const int32_t *tokens,
                               size_t n_tokens, cache_key key)
{
    enter(pool);
    bool known = prefix_index_find(pool->index, space_of(model, key), tokens, n_tokens) != NULL;
    leave(pool);
    if (known)
        return TL_STATUS_OK;
    pool_entry *entry = mem_zeroed(1, sizeof *entry);
    if (entry == NULL)
        return tl_fail_nomem("a prefix pool", sizeof *entry);
    tl_status status = prefix_cache_build(&entry->cache, model, tokens, n_tokens, key);
    pool_entry *loser = entry;
    if (status == TL_STATUS_OK) {
        enter(pool);
        status = insert(pool, entry, &loser);
        leave(pool);
    }
    free_entry(loser);
    return status;
}

tl_prefix_cache *prefix_pool_match(tl_prefix_pool *pool, const tl_model *model,
                                   const int32_t *prompt, size_t n_prompt, cache_key key)
{
    enter(pool);
    const pool_entry *entry =
        prefix_index_longest(pool->index, space_of(model, key), prompt, n_prompt);
    tl_prefix_cache *cache = entry != NULL ? prefix_cache_retain(entry->cache) : NULL;
    leave(pool);
    return cache;
}
