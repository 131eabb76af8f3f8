/* kv/store.c: slabs on demand, exact byte counts, no memory. */
#include "base/memory.h"
#include "base/random.h"
#include "test.h"
#include "watched_memory.h"

enum { MEBI = 1 << 20, SLAB_BLOCKS = 4 }; /* blocks of 1 MiB: four in a slab */

static void check_bytes(kv_store *store, size_t in_use, size_t in_slabs)
{
    size_t use, slabs;
    kv_store_bytes(store, &use, &slabs);
    CHECK_EQ(use, in_use);
    CHECK_EQ(slabs, in_slabs);
}

TEST(slabs_come_on_demand_and_go)
{
    watched w;
    kv_store *store;
    REQUIRE_OK(
        kv_store_create(&store, watched_memory(&w), (const size_t[]){MEBI, 9 * MEBI}, 2, false));
    check_bytes(store, 0, 0);
    CHECK_EQ(w.n_allocated, 0);
    kv_block *blocks[20], *large[3];
    REQUIRE_OK(kv_store_take(store, 0, 1, blocks));
    check_bytes(store, MEBI, 4 * MEBI);
    REQUIRE_OK(kv_store_take(store, 0, 19, blocks + 1));
    check_bytes(store, 20 * MEBI, 20 * MEBI);
    CHECK_EQ(w.n_live, 5);
    REQUIRE_OK(kv_store_take(store, 1, 3, large)); /* larger than a slab: one each */
    check_bytes(store, 47 * MEBI, 47 * MEBI);
    CHECK_EQ(w.n_live, 8);
    for (int i = 0; i < 3; i++)
        kv_block_release(large[i]);
    check_bytes(store, 20 * MEBI, 29 * MEBI); /* one of them idles */
    for (int i = 0; i < 20; i += 4)           /* a hole in each slab: nothing to give back */
        kv_block_release(blocks[i]);
    check_bytes(store, 15 * MEBI, 29 * MEBI);
    CHECK_EQ(w.n_live, 6);
    for (int i = 0; i < 20; i++)
        if (i % 4 != 0)
            kv_block_release(blocks[i]);
    check_bytes(store, 0, 4 * MEBI + 9 * MEBI);
    CHECK_EQ(w.n_live, 2);
    kv_store_destroy(store);
    CHECK_EQ(w.n_live, 0);
    CHECK_EQ(w.n_filled, 0);
}

TEST(blocks_are_apart_and_writable)
{
    watched w;
    kv_store *store;
    REQUIRE_OK(kv_store_create(&store, watched_memory(&w), (const size_t[]){320}, 1, false));
    enum { N = 3000 }; /* more than a slab's 1024 */
    kv_block **blocks = malloc(N * sizeof *blocks);
    REQUIRE_OK(kv_store_take(store, 0, N, blocks));
    CHECK_EQ(kv_store_block_bytes(store, 0), 320);
    check_bytes(store, N * 320, 3 * 1024 * 320);
    for (int i = 0; i < N; i++)
        memset(blocks[i]->data, i % 251, 320);
    for (int i = 0; i < N; i++)
        for (int b = 0; b < 320; b++)
            REQUIRE(((unsigned char *)blocks[i]->data)[b] == i % 251);
    for (int i = 0; i < N; i++)
        kv_block_release(blocks[i]);
    free(blocks);
    check_bytes(store, 0, 1024 * 320);
    kv_store_destroy(store);
}

TEST(a_sequence_at_a_slabs_edge_does_not_allocate_each_time)
{
    watched w;
    kv_store *store;
    REQUIRE_OK(kv_store_create(&store, watched_memory(&w), (const size_t[]){MEBI}, 1, false));
    kv_block *held[SLAB_BLOCKS], *next;
    REQUIRE_OK(kv_store_take(store, 0, SLAB_BLOCKS, held));
    for (int i = 0; i < 100; i++) {
        REQUIRE_OK(kv_store_take(store, 0, 1, &next));
        kv_block_release(next);
    }
    CHECK_EQ(w.n_allocated, 2);
    for (int i = 0; i < SLAB_BLOCKS; i++)
        kv_block_release(held[i]);
    kv_store_destroy(store);
}

TEST(random_takes_and_releases)
{
    watched w;
    kv_store *store;
    REQUIRE_OK(
        kv_store_create(&store, watched_memory(&w), (const size_t[]){MEBI, MEBI / 2}, 2, false));
    enum { N = 60 };
    kv_block *held[2][N];
    size_t n_held[2] = {0};
    for (uint64_t i = 0; i < 4000; i++) {
        int class = random_uniform(1, i) < 0.5;
        size_t *n = &n_held[class];
        size_t wanted = (size_t)(random_uniform(2, i) * 9);
        if (random_uniform(3, i) < 0.5 && *n + wanted <= N) {
            REQUIRE_OK(kv_store_take(store, class, wanted, held[class] + *n));
            *n += wanted;
        } else if (*n > 0) {
            size_t at = (size_t)(random_uniform(4, i) * (double)*n);
            kv_block_release(held[class][at]);
            held[class][at] = held[class][--*n];
        }
        size_t use, slabs;
        kv_store_bytes(store, &use, &slabs);
        REQUIRE(use == n_held[0] * MEBI + n_held[1] * (MEBI / 2));
        REQUIRE(slabs >= use && slabs == (size_t)w.n_live * 4 * MEBI);
    }
    for (int class = 0; class < 2; class ++)
        while (n_held[class] > 0)
            kv_block_release(held[class][--n_held[class]]);
    check_bytes(store, 0, 8 * MEBI);
    kv_store_destroy(store);
}

TEST(a_store_without_memory)
{
    watched w;
    kv_store *store;
    mem_fail_at(0);
    CHECK_STATUS(kv_store_create(&store, watched_memory(&w), (const size_t[]){MEBI}, 1, false),
                 TL_STATUS_NOMEM);
    CHECK(store == NULL);
    for (int64_t n = 0; n < 4; n++) { /* two slabs are missing: each a table and its memory */
        REQUIRE_OK(kv_store_create(&store, watched_memory(&w), (const size_t[]){MEBI}, 1, false));
        kv_block *blocks[10];
        REQUIRE_OK(kv_store_take(store, 0, 1, blocks));
        if (n % 2 == 0)
            w.fail_in = n / 2;
        else
            mem_fail_at(n / 2);
        CHECK_STATUS(kv_store_take(store, 0, 9, blocks + 1), TL_STATUS_NOMEM);
        CHECK_STR_HAS(tl_last_error(), "out of memory");
        check_bytes(store, MEBI, n < 2 ? 4 * MEBI : 8 * MEBI); /* one idle slab may stay */
        REQUIRE_OK(kv_store_take(store, 0, 9, blocks + 1));
        for (int i = 0; i < 10; i++)
            kv_block_release(blocks[i]);
        kv_store_destroy(store);
        CHECK_EQ(w.n_live, 0);
    }
}

TEST(poison_fills_fresh_blocks)
{
    watched w;
    kv_store *store;
    REQUIRE_OK(kv_store_create(&store, watched_memory(&w), (const size_t[]){256}, 1, true));
    kv_block *blocks[2];
    unsigned char poison[256];
    memset(poison, 0xFF, sizeof poison);
    for (int round = 0; round < 3; round++) {
        REQUIRE_OK(kv_store_take(store, 0, 2, blocks));
        for (int i = 0; i < 2; i++) {
            CHECK_MEM_EQ(blocks[i]->data, poison, sizeof poison);
            memset(blocks[i]->data, round, sizeof poison); /* seen again if it is not filled */
        }
        for (int i = 0; i < 2; i++)
            kv_block_release(blocks[i]);
    }
    CHECK_EQ(w.n_filled, 6);
    kv_store_destroy(store);
}
