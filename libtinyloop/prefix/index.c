#include "prefix/index.h"

#include "base/memory.h"

#include <string.h>

/* A node stands for the tokens on the way to it; its label is the last part of them. The root of a
 * space has no label. Every other node has an entry or at least two children. */
typedef struct node {
    struct node *parent; /* NULL: a root */
    index_space space;   /* of a root */
    void *entry;         /* NULL: none ends here */
    struct node *first_child;
    struct node *next; /* siblings */
    struct node *previous;
    size_t n_label;
    int32_t *label; /* [n_label] */
} node;

/* Edges by (parent, first token of the label), roots by (NULL, 0) and their space: open addressing
 * with linear probing, at most half full. */
struct prefix_index {
    node **slots;
    size_t n_slots; /* a power of two, or 0 */
    size_t n_nodes;
};

static uint64_t mix(uint64_t h, uint64_t value)
{
    h = (h ^ value) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 32);
}

static uint64_t edge_hash(const node *parent, int32_t token)
{
    return mix(mix(1, (uintptr_t)parent), (uint32_t)token);
}

static bool same_space(index_space a, index_space b)
{
    return a.model == b.model && a.loops == b.loops && a.window == b.window &&
           a.inner_loops == b.inner_loops && a.prefix_len == b.prefix_len;
}

static uint64_t root_hash(index_space space)
{
    uint64_t h = mix(mix(2, (uintptr_t)space.model), (uint64_t)space.loops);
    h = mix(mix(h, (uint64_t)space.window), (uint64_t)space.inner_loops);
    return mix(h, (uint64_t)space.prefix_len);
}

static uint64_t node_hash(const node *node)
{
    return node->parent != NULL ? edge_hash(node->parent, node->label[0]) : root_hash(node->space);
}

static node *find_child(const prefix_index *index, const node *parent, int32_t token)
{
    if (index->n_slots == 0)
        return NULL;
    size_t mask = index->n_slots - 1;
    for (size_t i = (size_t)edge_hash(parent, token) & mask;; i = (i + 1) & mask) {
        node *found = index->slots[i];
        if (found == NULL || (found->parent == parent && found->label[0] == token))
            return found;
    }
}

static node *find_root(const prefix_index *index, index_space space)
{
    if (index->n_slots == 0)
        return NULL;
    size_t mask = index->n_slots - 1;
    for (size_t i = (size_t)root_hash(space) & mask;; i = (i + 1) & mask) {
        node *found = index->slots[i];
        if (found == NULL || (found->parent == NULL && same_space(found->space, space)))
            return found;
    }
}

/* ---- the table ---- */

static void put(node **slots, size_t n_slots, node *node)
{
    size_t i = (size_t)node_hash(node) & (n_slots - 1);
    while (slots[i] != NULL)
        i = (i + 1) & (n_slots - 1);
    slots[i] = node;
}

/* Room for `more` nodes. */
static tl_status make_room(prefix_index *index, size_t more)
{
    size_t n_slots = index->n_slots > 0 ? index->n_slots : 16;
    while (n_slots < 2 * (index->n_nodes + more))
        n_slots *= 2;
    if (n_slots == index->n_slots)
        return TL_STATUS_OK;
    node **slots = mem_zeroed(n_slots, sizeof *slots);
    if (slots == NULL)
        return tl_fail_nomem("the prefix index", n_slots * sizeof *slots);
    for (size_t i = 0; i < index->n_slots; i++)
        if (index->slots[i] != NULL)
            put(slots, n_slots, index->slots[i]);
    mem_free(index->slots);
    index->slots = slots;
    index->n_slots = n_slots;
    return TL_STATUS_OK;
}

static void add_node(prefix_index *index, node *node)
{
    put(index->slots, index->n_slots, node);
    index->n_nodes++;
    if (node->parent == NULL)
        return;
    node->previous = NULL;
    node->next = node->parent->first_child;
    if (node->next != NULL)
        node->next->previous = node;
    node->parent->first_child = node;
}

/* Takes the node out of the table; later ones of the same run move up, so no probe breaks. */
static void take_node(prefix_index *index, const node *node)
{
    size_t mask = index->n_slots - 1, hole = (size_t)node_hash(node) & mask;
    while (index->slots[hole] != node)
        hole = (hole + 1) & mask;
    for (size_t i = (hole + 1) & mask; index->slots[i] != NULL; i = (i + 1) & mask) {
        size_t home = (size_t)node_hash(index->slots[i]) & mask;
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            index->slots[hole] = index->slots[i];
            hole = i;
        }
    }
    index->slots[hole] = NULL;
    index->n_nodes--;
    if (node->next != NULL)
        node->next->previous = node->previous;
    if (node->previous != NULL)
        node->previous->next = node->next;
    else if (node->parent != NULL)
        node->parent->first_child = node->next;
}

static node *new_node(const int32_t *label, size_t n_label)
{
    node *made = mem_zeroed(1, sizeof *made);
    int32_t *copy = mem_array(n_label, sizeof *copy);
    if (made == NULL || copy == NULL) {
        mem_free(made);
        mem_free(copy);
        tl_fail_nomem("the prefix index", sizeof *made + n_label * sizeof *copy);
        return NULL;
    }
    if (n_label > 0)
        memcpy(copy, label, n_label * sizeof *copy);
    made->label = copy;
    made->n_label = n_label;
    return made;
}

static void free_node(node *node)
{
    if (node != NULL)
        mem_free(node->label);
    mem_free(node);
}

/* ---- walking ---- */

static size_t common_length(const int32_t *a, const int32_t *b, size_t n)
{
    size_t i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

/* How far the tokens lead: the deepest node whose tokens they start with, their number, and the
 * child whose label they follow a part of (NULL: none). */
typedef struct descent {
    node *at;
    size_t depth;
    node *child;
    size_t n_shared; /* of the child's label */
    void *longest;   /* the last entry on the way */
} descent;

static descent descend(const prefix_index *index, node *root, const int32_t *tokens,
                       size_t n_tokens)
{
    descent d = {.at = root, .longest = root != NULL ? root->entry : NULL};
    while (d.at != NULL && d.depth < n_tokens) {
        node *child = find_child(index, d.at, tokens[d.depth]);
        if (child == NULL)
            break;
        size_t left = n_tokens - d.depth;
        size_t n = child->n_label < left ? child->n_label : left;
        size_t shared = common_length(child->label, tokens + d.depth, n);
        if (shared < child->n_label) {
            d.child = child;
            d.n_shared = shared;
            break;
        }
        d.at = child;
        d.depth += shared;
        if (child->entry != NULL)
            d.longest = child->entry;
    }
    return d;
}

void *prefix_index_find(const prefix_index *index, index_space space, const int32_t *tokens,
                        size_t n_tokens)
{
    descent d = descend(index, find_root(index, space), tokens, n_tokens);
    return d.at != NULL && d.depth == n_tokens ? d.at->entry : NULL;
}

void *prefix_index_longest(const prefix_index *index, index_space space, const int32_t *tokens,
                           size_t n_tokens)
{
    return descend(index, find_root(index, space), tokens, n_tokens).longest;
}

/* ---- changing ---- */

/* Splits child's label after n_shared tokens: `middle` takes the first part and child's place. */
static void split(prefix_index *index, node *child, node *middle)
{
    size_t n = middle->n_label;
    take_node(index, child);
    middle->parent = child->parent;
    child->parent = middle;
    memmove(child->label, child->label + n, (child->n_label - n) * sizeof *child->label);
    child->n_label -= n;
    add_node(index, middle);
    add_node(index, child);
}

tl_status prefix_index_insert(prefix_index *index, index_space space, const int32_t *tokens,
                              size_t n_tokens, void *entry)
{
    /* everything that can fail comes before the first change */
    TL_TRY(make_room(index, 3));
    node *root = find_root(index, space), *new_root = NULL, *middle = NULL, *leaf = NULL;
    descent d = descend(index, root, tokens, n_tokens);
    bool failed = root == NULL && (new_root = new_node(NULL, 0)) == NULL;
    if (!failed && d.child != NULL)
        failed = (middle = new_node(d.child->label, d.n_shared)) == NULL;
    size_t reached = d.depth + d.n_shared;
    if (!failed && reached < n_tokens)
        failed = (leaf = new_node(tokens + reached, n_tokens - reached)) == NULL;
    if (failed) {
        free_node(new_root);
        free_node(middle);
        return TL_STATUS_NOMEM;
    }
    node *at = d.at;
    if (new_root != NULL) {
        new_root->space = space;
        add_node(index, new_root);
        at = new_root;
    }
    if (middle != NULL) {
        split(index, d.child, middle);
        at = middle;
    }
    if (leaf != NULL) {
        leaf->parent = at;
        add_node(index, leaf);
        at = leaf;
    }
    at->entry = entry;
    return TL_STATUS_OK;
}

/* Joins a node without an entry and its only child. If there is no memory for the longer label
 * the two stay apart, which is as right and only less compact. */
static void join_child(prefix_index *index, node *upper)
{
    node *lower = upper->first_child;
    size_t n = upper->n_label + lower->n_label;
    int32_t *label = mem_array(n, sizeof *label);
    if (label == NULL)
        return;
    memcpy(label, upper->label, upper->n_label * sizeof *label);
    memcpy(label + upper->n_label, lower->label, lower->n_label * sizeof *label);
    take_node(index, lower);
    take_node(index, upper);
    mem_free(lower->label);
    lower->label = label;
    lower->n_label = n;
    lower->parent = upper->parent;
    add_node(index, lower);
    free_node(upper);
}

void prefix_index_remove(prefix_index *index, index_space space, const int32_t *tokens,
                         size_t n_tokens)
{
    node *at = descend(index, find_root(index, space), tokens, n_tokens).at;
    at->entry = NULL;
    while (at->entry == NULL && at->first_child == NULL) {
        node *parent = at->parent;
        take_node(index, at);
        free_node(at);
        if (parent == NULL)
            return;
        at = parent;
    }
    bool one_child = at->first_child != NULL && at->first_child->next == NULL;
    if (at->entry == NULL && one_child && at->parent != NULL)
        join_child(index, at);
}

tl_status prefix_index_create(prefix_index **out)
{
    *out = mem_zeroed(1, sizeof **out);
    return *out != NULL ? TL_STATUS_OK : tl_fail_nomem("the prefix index", sizeof **out);
}

void prefix_index_destroy(prefix_index *index)
{
    if (index == NULL)
        return;
    for (size_t i = 0; i < index->n_slots; i++)
        free_node(index->slots[i]);
    mem_free(index->slots);
    mem_free(index);
}

size_t prefix_index_n_nodes(const prefix_index *index)
{
    return index->n_nodes;
}
