/* prefix/index.c: the radix index against a linear scan. */
#include "base/memory.h"
#include "base/random.h"
#include "prefix/index.h"
#include "test.h"

#include <time.h>

enum { MAX_KEY = 12, MAX_ENTRIES = 200, N_SPACES = 6 };

static const char model_a, model_b;
static const index_space spaces[N_SPACES] = {{.model = &model_a, .loops = 8},
                                             {.model = &model_a, .loops = 8, .window = 5},
                                             {.model = &model_a, .loops = 4},
                                             {.model = &model_b, .loops = 8},
                                             {.model = &model_a, .loops = 8, .inner_loops = 3},
                                             {.model = &model_a, .loops = 8, .prefix_len = 5}};

typedef struct key {
    int space;
    size_t n;
    int32_t tokens[MAX_KEY];
} key;

/* The index and the same entries as a plain list; an entry is its place in the list. */
typedef struct scan {
    prefix_index *index;
    key entries[MAX_ENTRIES];
    bool there[MAX_ENTRIES];
} scan;

static bool starts_with(const key *longer, const key *shorter)
{
    return longer->space == shorter->space && longer->n >= shorter->n &&
           memcmp(longer->tokens, shorter->tokens, shorter->n * sizeof *shorter->tokens) == 0;
}

static const key *scan_find(const scan *s, const key *wanted)
{
    for (size_t i = 0; i < MAX_ENTRIES; i++)
        if (s->there[i] && s->entries[i].n == wanted->n && starts_with(wanted, &s->entries[i]))
            return &s->entries[i];
    return NULL;
}

static const key *scan_longest(const scan *s, const key *prompt)
{
    const key *longest = NULL;
    for (size_t i = 0; i < MAX_ENTRIES; i++)
        if (s->there[i] && starts_with(prompt, &s->entries[i]) &&
            (longest == NULL || s->entries[i].n > longest->n))
            longest = &s->entries[i];
    return longest;
}

static const key *index_find(const scan *s, const key *wanted)
{
    return prefix_index_find(s->index, spaces[wanted->space], wanted->tokens, wanted->n);
}

static const key *index_longest(const scan *s, const key *prompt)
{
    return prefix_index_longest(s->index, spaces[prompt->space], prompt->tokens, prompt->n);
}

/* Two tokens, so that keys nest and share; the values are far apart and one is negative, as the
 * index itself does not care. */
static key random_key(uint64_t seed, size_t least)
{
    key made = {.space = (int)(random_uniform(seed, 100) * N_SPACES)};
    made.n = least + (size_t)(random_uniform(seed, 101) * (double)(MAX_KEY + 1 - least));
    for (size_t i = 0; i < made.n; i++)
        made.tokens[i] = random_uniform(seed, i) < 0.6 ? 0 : INT32_MAX - (int32_t)i % 2;
    return made;
}

static tl_status insert(scan *s, size_t at, const key *made)
{
    s->entries[at] = *made;
    tl_status status =
        prefix_index_insert(s->index, spaces[made->space], made->tokens, made->n, &s->entries[at]);
    s->there[at] = status == TL_STATUS_OK;
    return status;
}

static void take_out(scan *s, size_t at)
{
    const key *gone = &s->entries[at];
    prefix_index_remove(s->index, spaces[gone->space], gone->tokens, gone->n);
    s->there[at] = false;
}

static size_t n_there(const scan *s)
{
    size_t n = 0;
    for (size_t i = 0; i < MAX_ENTRIES; i++)
        n += s->there[i];
    return n;
}

/* A node but a root has an entry or two children at least: below each root there are fewer inner
 * nodes than entries. */
static bool nodes_are_few(const scan *s)
{
    size_t n = 0;
    for (int space = 0; space < N_SPACES; space++) {
        size_t entries = 0;
        for (size_t i = 0; i < MAX_ENTRIES; i++)
            entries += s->there[i] && s->entries[i].space == space;
        n += entries > 0 ? 2 * entries : 0; /* the root, the entries, entries - 1 inner ones */
    }
    return prefix_index_n_nodes(s->index) <= n;
}

static bool agrees(const scan *s, uint64_t seed)
{
    for (uint64_t i = 0; i < 6; i++) {
        key wanted = random_key(seed * 6 + i + 1000000, 0);
        if (index_find(s, &wanted) != scan_find(s, &wanted) ||
            index_longest(s, &wanted) != scan_longest(s, &wanted))
            return false;
    }
    return true;
}

static bool all_are_found(const scan *s)
{
    for (size_t i = 0; i < MAX_ENTRIES; i++)
        if (s->there[i] && index_find(s, &s->entries[i]) != &s->entries[i])
            return false;
    return true;
}

TEST(an_empty_index)
{
    prefix_index *index;
    int64_t live = mem_live();
    REQUIRE_OK(prefix_index_create(&index));
    const int32_t token = 1;
    CHECK(prefix_index_find(index, spaces[0], &token, 1) == NULL);
    CHECK(prefix_index_longest(index, spaces[0], &token, 1) == NULL);
    CHECK(prefix_index_longest(index, spaces[0], &token, 0) == NULL);
    CHECK_EQ(prefix_index_n_nodes(index), 0);
    prefix_index_destroy(index);
    prefix_index_destroy(NULL);
    CHECK_EQ(mem_live(), live);
}

TEST(nested_prefixes)
{
    prefix_index *index;
    REQUIRE_OK(prefix_index_create(&index));
    const int32_t t[] = {1, 2, 3, 4, 5, 6};
    char entry[7];
    for (size_t n = 6; n > 0; n -= 2)
        REQUIRE_OK(prefix_index_insert(index, spaces[0], t, n, &entry[n]));
    CHECK(prefix_index_longest(index, spaces[0], t, 6) == &entry[6]);
    CHECK(prefix_index_longest(index, spaces[0], t, 5) == &entry[4]);
    CHECK(prefix_index_longest(index, spaces[0], t, 3) == &entry[2]);
    CHECK(prefix_index_longest(index, spaces[0], t, 1) == NULL);
    CHECK(prefix_index_find(index, spaces[0], t, 3) == NULL);
    const int32_t other[] = {1, 2, 3, 9, 9, 9};
    CHECK(prefix_index_longest(index, spaces[0], other, 6) == &entry[2]);
    for (int s = 1; s < N_SPACES; s++)
        CHECK(prefix_index_longest(index, spaces[s], t, 6) == NULL);
    prefix_index_remove(index, spaces[0], t, 4);
    CHECK(prefix_index_longest(index, spaces[0], t, 5) == &entry[2]);
    CHECK(prefix_index_longest(index, spaces[0], t, 6) == &entry[6]);
    CHECK_EQ(prefix_index_n_nodes(index), 3);
    prefix_index_remove(index, spaces[0], t, 2);
    prefix_index_remove(index, spaces[0], t, 6);
    CHECK_EQ(prefix_index_n_nodes(index), 0);
    prefix_index_destroy(index);
}

/* So many that some share a slot of the table: they must be told apart by each part. */
TEST(many_spaces)
{
    enum { N = 8, N_ALL = N * N * N };
    static char models[2 * N], entries[N_ALL];
    const int32_t t[] = {1, 2, 3};
    prefix_index *index;
    REQUIRE_OK(prefix_index_create(&index));
    for (int i = 0; i < N_ALL; i++) {
        index_space space = {.model = &models[i % N], .loops = i / N % N, .window = i / N / N};
        CHECK(prefix_index_longest(index, space, t, 3) == NULL);
        REQUIRE_OK(prefix_index_insert(index, space, t, 2, &entries[i]));
    }
    for (int i = 0; i < N_ALL; i++) {
        index_space space = {.model = &models[i % N], .loops = i / N % N, .window = i / N / N};
        CHECK(prefix_index_longest(index, space, t, 3) == &entries[i]);
        for (int part = 0; part < 5; part++) {
            index_space other = {.model = &models[i % N + N * (part == 0)],
                                 .loops = i / N % N + N * (part == 1),
                                 .window = i / N / N + N * (part == 2),
                                 .inner_loops = part == 3,
                                 .prefix_len = part == 4};
            CHECK(prefix_index_longest(index, other, t, 3) == NULL);
        }
    }
    prefix_index_destroy(index);
}

TEST(random_changes_against_a_scan)
{
    static scan s;
    memset(&s, 0, sizeof s);
    int64_t live = mem_live();
    REQUIRE_OK(prefix_index_create(&s.index));
    for (uint64_t i = 0; i < 20000; i++) {
        size_t at = (size_t)(random_uniform(5, i) * MAX_ENTRIES);
        /* up and down: a full index, an almost empty one */
        bool grows = random_uniform(6, i) < (i / 2000 % 2 ? 0.25 : 0.75);
        key made = random_key(i, 1);
        if (s.there[at] && !grows)
            take_out(&s, at);
        else if (!s.there[at] && grows && scan_find(&s, &made) == NULL)
            REQUIRE_OK(insert(&s, at, &made));
        REQUIRE(agrees(&s, i));
        REQUIRE(nodes_are_few(&s));
        if (i % 100 == 0)
            REQUIRE(all_are_found(&s));
    }
    for (size_t at = 0; at < MAX_ENTRIES; at++)
        if (s.there[at])
            take_out(&s, at);
    CHECK_EQ(prefix_index_n_nodes(s.index), 0);
    prefix_index_destroy(s.index);
    CHECK_EQ(mem_live(), live);
}

TEST(a_failed_insert_changes_nothing)
{
    static scan s;
    memset(&s, 0, sizeof s);
    REQUIRE_OK(prefix_index_create(&s.index));
    key first = random_key(0, 1); /* from now on there is a table, which a failure may replace */
    REQUIRE_OK(insert(&s, 0, &first));
    int64_t n_failed = 0;
    for (uint64_t i = 1; i < 150; i++) {
        key made = random_key(i, 1);
        if (scan_find(&s, &made) != NULL)
            continue;
        for (int64_t n = 0;; n++) {
            size_t nodes = prefix_index_n_nodes(s.index);
            int64_t live = mem_live();
            mem_fail_at(n);
            tl_status status = insert(&s, i, &made);
            mem_fail_at(-1);
            if (status == TL_STATUS_OK)
                break;
            n_failed++;
            REQUIRE(status == TL_STATUS_NOMEM);
            CHECK_STR_HAS(tl_last_error(), "out of memory");
            CHECK_EQ(prefix_index_n_nodes(s.index), nodes);
            CHECK_EQ(mem_live(), live);
            CHECK(index_find(&s, &made) == NULL);
            REQUIRE(all_are_found(&s) && agrees(&s, i));
            REQUIRE(n < 20);
        }
    }
    CHECK(n_failed > 200);
    prefix_index_destroy(s.index);
}

/* Without memory two nodes stay apart that could be one: more nodes, the same answers. */
TEST(removal_cannot_fail)
{
    static scan s;
    memset(&s, 0, sizeof s);
    int64_t live = mem_live();
    REQUIRE_OK(prefix_index_create(&s.index));
    for (int round = 0; round < 20; round++) {
        for (uint64_t i = 0; i < MAX_ENTRIES; i++) {
            key made = random_key((uint64_t)round * 1000 + i, 1);
            if (!s.there[i] && scan_find(&s, &made) == NULL)
                REQUIRE_OK(insert(&s, i, &made));
        }
        for (size_t i = 0; i < MAX_ENTRIES; i++) {
            if (!s.there[i] || random_uniform(9, (uint64_t)round * 1000 + i) < 0.3)
                continue;
            mem_fail_at(0);
            take_out(&s, i);
            mem_fail_at(-1);
            REQUIRE(agrees(&s, i));
        }
        REQUIRE(all_are_found(&s));
    }
    for (size_t i = 0; i < MAX_ENTRIES; i++)
        if (s.there[i])
            take_out(&s, i);
    CHECK_EQ(n_there(&s), 0);
    CHECK_EQ(prefix_index_n_nodes(s.index), 0);
    prefix_index_destroy(s.index);
    CHECK_EQ(mem_live(), live);
}

/* ---- many ---- */

enum { MANY = 100000, LONG_KEY = 24 };

/* Entry i: 8 tokens that many share, then i in base 10, so that all keys differ and some nest. */
static size_t many_key(int32_t *tokens, size_t i)
{
    size_t n = 0;
    for (; n < 8; n++)
        tokens[n] = (int32_t)(i % (n + 1));
    for (size_t rest = i; rest > 0; rest /= 10)
        tokens[n++] = (int32_t)(rest % 10) + 100;
    return n;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

TEST(a_hundred_thousand_entries)
{
    prefix_index *index;
    static char entries[MANY];
    int32_t tokens[LONG_KEY];
    REQUIRE_OK(prefix_index_create(&index));
    double begin = seconds();
    for (size_t i = 0; i < MANY; i++) {
        size_t n = many_key(tokens, i);
        REQUIRE_OK(prefix_index_insert(index, spaces[i % 2], tokens, n, &entries[i]));
    }
    CHECK(prefix_index_n_nodes(index) <= 2 * MANY);
    for (size_t i = 0; i < MANY; i++) {
        size_t n = many_key(tokens, i);
        REQUIRE(prefix_index_find(index, spaces[i % 2], tokens, n) == &entries[i]);
        tokens[n] = 7; /* nothing goes on like this */
        REQUIRE(prefix_index_longest(index, spaces[i % 2], tokens, n + 1) == &entries[i]);
        REQUIRE(prefix_index_find(index, spaces[1 - i % 2], tokens, n) == NULL);
    }
    for (size_t i = 0; i < MANY; i += 2) {
        size_t n = many_key(tokens, i);
        prefix_index_remove(index, spaces[0], tokens, n);
    }
    for (size_t i = 0; i < MANY; i++) {
        size_t n = many_key(tokens, i);
        char *want = i % 2 ? &entries[i] : NULL;
        REQUIRE(prefix_index_find(index, spaces[i % 2], tokens, n) == want);
    }
    CHECK(prefix_index_n_nodes(index) <= MANY);
    /* a scan would take minutes */
    CHECK(seconds() - begin < 30);
    prefix_index_destroy(index);
}
