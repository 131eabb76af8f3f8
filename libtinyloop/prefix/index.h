/* Which entry is the longest whose tokens a prompt starts with: a compressed radix tree for each
 * (model, loops, window, ...), its edges in one hash table. A look-up costs the prompt's length,
 * whatever the number of entries. Not locked: the pool's lock guards it. */
#ifndef TL_PREFIX_INDEX_H
#define TL_PREFIX_INDEX_H

#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>

/* What divides entries beyond their tokens. */
typedef struct index_space {
    const void *model;
    int64_t loops;
    int64_t window;
    int64_t inner_loops;
    int64_t prefix_len;
} index_space;

typedef struct prefix_index prefix_index;

tl_status prefix_index_create(prefix_index **out);
void prefix_index_destroy(prefix_index *index); /* does not touch the entries */

/* NOMEM leaves the index as it was. The key must not be there yet; `entry` is not NULL. */
tl_status prefix_index_insert(prefix_index *index, index_space space, const int32_t *tokens,
                              size_t n_tokens, void *entry);

/* Removes the key, which must be there. Cannot fail. */
void prefix_index_remove(prefix_index *index, index_space space, const int32_t *tokens,
                         size_t n_tokens);

/* The entry of exactly these tokens, or NULL. */
void *prefix_index_find(const prefix_index *index, index_space space, const int32_t *tokens,
                        size_t n_tokens);

/* The longest entry that the tokens start with, or NULL. */
void *prefix_index_longest(const prefix_index *index, index_space space, const int32_t *tokens,
                           size_t n_tokens);

size_t prefix_index_n_nodes(const prefix_index *index); /* for tests */

#endif
