#include "kv/sequence.h"

#include "base/memory.h"

#include <string.h>

static size_t blocks_for(int64_t n_positions)
{
    return ((size_t)n_positions + KV_BLOCK - 1) / KV_BLOCK;
}

tl_status kv_sequence_init(kv_sequence *sequence, kv_store *store, int n_planes)
{
    *sequence = (kv_sequence){.store = store, .n_planes = n_planes};
    sequence->planes = mem_zeroed((size_t)n_planes, sizeof *sequence->planes);
    if (sequence->planes == NULL)
        return tl_fail_nomem("a block table", (size_t)n_planes * sizeof *sequence->planes);
    return TL_STATUS_OK;
}

static void drop_blocks(kv_sequence *sequence, int plane, size_t begin, size_t end)
{
    for (size_t b = begin; b < end; b++)
        kv_block_release(sequence->blocks[(size_t)plane * sequence->capacity + b]);
}

/* Of every plane what it has from `begin` on. */
static void drop_end(kv_sequence *sequence, size_t begin)
{
    for (int p = 0; p < sequence->n_planes; p++) {
        size_t first = sequence->planes[p].first_block;
        drop_blocks(sequence, p, begin > first ? begin : first, sequence->n_blocks);
    }
}

void kv_sequence_clear(kv_sequence *sequence)
{
    drop_end(sequence, 0);
    mem_free(sequence->blocks);
    mem_free(sequence->data);
    mem_free(sequence->planes);
    *sequence = (kv_sequence){0};
}

/* ---- tables ---- */

/* Moves the entries into tables of `capacity` blocks a plane. */
static tl_status resize_tables(kv_sequence *sequence, size_t capacity)
{
    size_t n, planes = (size_t)sequence->n_planes;
    if (!size_product(&n, planes, capacity))
        return tl_fail_nomem("a block table", SIZE_MAX);
    kv_block **blocks = mem_array(n, sizeof *blocks);
    void **data = mem_array(n, sizeof *data);
    if (blocks == NULL || data == NULL) {
        mem_free(blocks);
        mem_free(data);
        return tl_fail_nomem("a block table", n * (sizeof *blocks + sizeof *data));
    }
    for (size_t p = 0; p < planes && sequence->n_blocks > 0; p++) {
        size_t first = sequence->planes[p].first_block, count = sequence->n_blocks - first;
        size_t from = p * sequence->capacity + first, to = p * capacity + first;
        memcpy(blocks + to, sequence->blocks + from, count * sizeof *blocks);
        memcpy(data + to, sequence->data + from, count * sizeof *data);
    }
    mem_free(sequence->blocks);
    mem_free(sequence->data);
    sequence->blocks = blocks;
    sequence->data = data;
    sequence->capacity = capacity;
    return TL_STATUS_OK;
}

tl_status kv_sequence_clone(kv_sequence *out, const kv_sequence *sequence)
{
    size_t n_planes = (size_t)sequence->n_planes;
    TL_TRY(kv_sequence_init(out, sequence->store, sequence->n_planes));
    memcpy(out->planes, sequence->planes, n_planes * sizeof *out->planes);
    if (sequence->n_blocks > 0) {
        kv_sequence shared = *sequence;
        size_t n = n_planes * sequence->capacity;
        shared.blocks = mem_array(n, sizeof *shared.blocks);
        shared.data = mem_array(n, sizeof *shared.data);
        if (shared.blocks == NULL || shared.data == NULL) {
            mem_free(shared.blocks);
            mem_free(shared.data);
            kv_sequence_clear(out);
            return tl_fail_nomem("a block table", n * sizeof *shared.blocks);
        }
        memcpy(shared.blocks, sequence->blocks, n * sizeof *shared.blocks);
        memcpy(shared.data, sequence->data, n * sizeof *shared.data);
        shared.planes = out->planes;
        *out = shared;
    }
    for (int p = 0; p < out->n_planes; p++)
        for (size_t b = out->planes[p].first_block; b < out->n_blocks; b++)
            ref_retain(&out->blocks[(size_t)p * out->capacity + b]->references);
    return TL_STATUS_OK;
}

/* ---- writing ---- */

static void set_data(kv_sequence *sequence, int plane, size_t begin, size_t end)
{
    size_t row = (size_t)plane * sequence->capacity;
    for (size_t b = begin; b < end; b++)
        sequence->data[row + b] = sequence->blocks[row + b]->data;
}

/* Blocks [n_blocks, end) of every plane, or of none. */
static tl_status append_blocks(kv_sequence *sequence, size_t end)
{
    size_t begin = sequence->n_blocks;
    for (int p = 0; p < sequence->n_planes; p++) {
        kv_block **blocks = sequence->blocks + (size_t)p * sequence->capacity + begin;
        tl_status status =
            kv_store_take(sequence->store, sequence->planes[p].class, end - begin, blocks);
        if (status != TL_STATUS_OK) {
            while (p-- > 0)
                for (size_t b = begin; b < end; b++)
                    kv_block_release(sequence->blocks[(size_t)p * sequence->capacity + b]);
            return status;
        }
        set_data(sequence, p, begin, end);
    }
    return TL_STATUS_OK;
}

/* Replaces a shared block by a copy of its own. */
static tl_status own_block(kv_sequence *sequence, int plane, size_t b)
{
    kv_block **slot = &sequence->blocks[(size_t)plane * sequence->capacity + b];
    if (ref_is_sole(&(*slot)->references))
        return TL_STATUS_OK;
    kv_block *copy;
    TL_TRY(kv_store_take(sequence->store, sequence->planes[plane].class, 1, &copy));
    kv_store_copy(sequence->store, copy, *slot);
    kv_block_release(*slot);
    *slot = copy;
    set_data(sequence, plane, b, b + 1);
    return TL_STATUS_OK;
}

tl_status kv_sequence_reserve(kv_sequence *sequence, int64_t n)
{
    size_t end = blocks_for(sequence->length + n);
    if (end > sequence->capacity)
        TL_TRY(resize_tables(sequence, end + end / 2 + 4));
    size_t partial = sequence->n_blocks; /* the half-filled last block, if there is one */
    if (sequence->length % KV_BLOCK != 0)
        partial = (size_t)sequence->length / KV_BLOCK;
    for (int p = 0; p < sequence->n_planes && partial < sequence->n_blocks; p++)
        TL_TRY(own_block(sequence, p, partial));
    if (end > sequence->n_blocks) {
        TL_TRY(append_blocks(sequence, end));
        sequence->n_blocks = end;
    }
    return TL_STATUS_OK;
}

void kv_sequence_commit(kv_sequence *sequence, int64_t n)
{
    sequence->length += n;
    for (int p = 0; p < sequence->n_planes; p++) {
        kv_plane *plane = &sequence->planes[p];
        size_t first = (size_t)kv_first_visible(sequence->length, plane->window) / KV_BLOCK;
        if (first > sequence->n_blocks)
            first = sequence->n_blocks;
        if (first > plane->first_block) {
            drop_blocks(sequence, p, plane->first_block, first);
            plane->first_block = first;
        }
    }
}

/* The shortest length at which every plane still has what the next position attends to. */
static int64_t least_length(const kv_sequence *sequence)
{
    int64_t least = 0;
    for (int p = 0; p < sequence->n_planes; p++) {
        const kv_plane *plane = &sequence->planes[p];
        int64_t own = (int64_t)plane->first_block * KV_BLOCK + plane->window - 1;
        if (plane->first_block > 0 && own > least)
            least = own;
    }
    return least;
}

tl_status kv_sequence_truncate(kv_sequence *sequence, int64_t length)
{
    int64_t least = least_length(sequence);
    if (length > 0 && length < least)
        return tl_fail(TL_STATUS_INVALID,
                       "length is %lld: a window has dropped positions that the next one attends "
                       "to; allowed are 0 and %lld to %lld",
                       (long long)length, (long long)least, (long long)sequence->length);
    size_t end = blocks_for(length);
    if (end < sequence->n_blocks) {
        drop_end(sequence, end);
        sequence->n_blocks = end;
    }
    for (int p = 0; length == 0 && p < sequence->n_planes; p++)
        sequence->planes[p].first_block = 0;
    sequence->length = length;
    return TL_STATUS_OK;
}

size_t kv_sequence_bytes(const kv_sequence *sequence)
{
    size_t bytes = 0;
    for (int p = 0; p < sequence->n_planes; p++) {
        const kv_plane *plane = &sequence->planes[p];
        bytes += (sequence->n_blocks - plane->first_block) *
                 kv_store_block_bytes(sequence->store, plane->class);
    }
    return bytes;
}
