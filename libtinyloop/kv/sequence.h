/* One sequence's KV: a block table for each plane.
 *
 * Invariant: a plane has exactly the blocks [its first_block, n_blocks), which cover the positions
 * that a later token may attend to there. Blocks may be shared with other sequences; a shared one
 * is never written. */
#ifndef TL_KV_SEQUENCE_H
#define TL_KV_SEQUENCE_H

#include "kv/layout.h"
#include "kv/store.h"

typedef struct kv_plane {
    int class;      /* of its blocks */
    int64_t window; /* 0: none */
    size_t first_block;
} kv_plane;

typedef struct kv_sequence {
    kv_store *store;
    kv_plane *planes; /* [n_planes] */
    int n_planes;
    int64_t length; /* positions that are written */
    size_t n_blocks;
    size_t capacity;   /* of the tables, blocks */
    kv_block **blocks; /* [n_planes][capacity] */
    void **data;       /* [n_planes][capacity], the blocks' memory */
} kv_sequence;

/* For n_planes planes, whose class and window the caller then sets. */
tl_status kv_sequence_init(kv_sequence *sequence, kv_store *store, int n_planes);
void kv_sequence_clear(kv_sequence *sequence);

/* `out` shares all blocks of `sequence`. */
tl_status kv_sequence_clone(kv_sequence *out, const kv_sequence *sequence);

/* Makes positions length .. length + n - 1 writable: blocks are there, and not shared. On failure
 * the sequence is as it was. */
tl_status kv_sequence_reserve(kv_sequence *sequence, int64_t n);

/* The reserved positions are written: they count, and what the window has left behind goes. */
void kv_sequence_commit(kv_sequence *sequence, int64_t n);

/* length <= sequence->length. INVALID where a window has dropped what position `length` needs. */
tl_status kv_sequence_truncate(kv_sequence *sequence, int64_t length);

size_t kv_sequence_bytes(const kv_sequence *sequence);

static inline void **kv_sequence_table(const kv_sequence *sequence, int plane)
{
    return sequence->data + (size_t)plane * sequence->capacity;
}

#endif
