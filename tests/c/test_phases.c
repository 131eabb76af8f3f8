/* base/threads.c: whose pieces a lane begins with, and phase numbers that turn over. The source is
 * included so that the test can set the number. */
#include "base/threads.c"

#include "test.h"

enum { MAX_LANES = 8, MAX_ITEMS = MAX_LANES * PIECES_PER_LANE, N_PHASES = 6, TIME_LIMIT = 20 };

/* Every phase is meant to end: one that does not would hang. */
static thread_pool *make_pool(int n_lanes)
{
    thread_pool *pool;
    alarm(TIME_LIMIT);
    CHECK_OK(thread_pool_create(&pool, n_lanes));
    return pool;
}

static void end_pool(thread_pool *pool)
{
    thread_pool_destroy(pool);
    alarm(0);
}

/* ---- shares ---- */

typedef struct firsts {
    size_t n;
    pthread_barrier_t all_have_one;
    size_t begin[N_PHASES][MAX_LANES];
    atomic_int n_taken[MAX_ITEMS]; /* in all phases */
} firsts;

static void hold_the_first(void *arg, lane *self)
{
    firsts *f = arg;
    for (int phase = 0; phase < N_PHASES; phase++) {
        size_t begin, end;
        for (bool first = true; lane_next(self, f->n, 1, &begin, &end); first = false) {
            for (size_t i = begin; i < end; i++)
                atomic_fetch_add(&f->n_taken[i], 1);
            if (!first)
                continue;
            f->begin[phase][self->index] = begin;
            pthread_barrier_wait(&f->all_have_one);
        }
    }
}

/* As many pieces as items: shares of n / n_lanes, rounded in favour of the first lanes. */
static void check_firsts(thread_pool *pool, size_t n)
{
    size_t n_lanes = (size_t)thread_pool_size(pool);
    firsts f = {.n = n};
    REQUIRE(pthread_barrier_init(&f.all_have_one, NULL, (unsigned)n_lanes) == 0);
    thread_pool_run(pool, hold_the_first, &f);
    pthread_barrier_destroy(&f.all_have_one);
    for (int phase = 0; phase < N_PHASES; phase++)
        for (size_t i = 0; i < n_lanes; i++)
            CHECK_EQ(f.begin[phase][i], (n * i + n_lanes - 1) / n_lanes);
    for (size_t i = 0; i < n; i++)
        CHECK_EQ(f.n_taken[i], N_PHASES);
}

TEST(a_lane_begins_with_its_own_share)
{
    for (int n_lanes = 2; n_lanes <= MAX_LANES; n_lanes++) {
        thread_pool *pool = make_pool(n_lanes);
        for (size_t n = (size_t)n_lanes; n <= (size_t)n_lanes * PIECES_PER_LANE; n += 1 + n / 8)
            check_firsts(pool, n);
        end_pool(pool);
    }
}

/* ---- items of many phases ---- */

typedef struct counting {
    size_t n[N_PHASES]; /* items of each phase */
    atomic_int n_taken[N_PHASES][MAX_ITEMS];
} counting;

static void count_items(void *arg, lane *self)
{
    counting *c = arg;
    size_t begin, end;
    for (int phase = 0; phase < N_PHASES; phase++)
        while (lane_next(self, c->n[phase], 1, &begin, &end))
            for (size_t i = begin; i < end; i++)
                atomic_fetch_add(&c->n_taken[phase][i], 1);
}

/* Phases of `few` and of `many` items by turns. */
static bool each_item_once(thread_pool *pool, size_t few, size_t many)
{
    counting c = {0};
    for (int phase = 0; phase < N_PHASES; phase++)
        c.n[phase] = phase % 2 ? many : few;
    thread_pool_run(pool, count_items, &c);
    bool once = true;
    for (int phase = 0; phase < N_PHASES; phase++)
        for (size_t i = 0; i < MAX_ITEMS; i++)
            once &= c.n_taken[phase][i] == (i < c.n[phase]);
    return once;
}

TEST(fewer_pieces_than_lanes)
{
    for (int n_lanes = 2; n_lanes <= MAX_LANES; n_lanes++) {
        thread_pool *pool = make_pool(n_lanes);
        for (size_t few = 1; few < (size_t)n_lanes; few++)
            for (size_t many = few; many < (size_t)n_lanes; many++)
                CHECK(each_item_once(pool, few, many));
        end_pool(pool);
    }
}

/* The single piece is the caller's: of that phase all other shares are empty, and their tickets
 * grow old. */
TEST(phase_numbers_turn_over)
{
    static const uint32_t numbers[] = {0,
                                       INT32_MAX - 3u,
                                       (uint32_t)INT32_MAX + 1,
                                       UINT32_MAX - 3,
                                       1,
                                       (uint32_t)INT32_MAX + 2,
                                       UINT32_MAX,
                                       INT32_MAX,
                                       UINT32_MAX - 3};
    static const size_t items[][2] = {{1, 1}, {64, 64}, {1, 64}, {64, 1}};
    for (int n_lanes = 2; n_lanes <= 4; n_lanes++) {
        for (size_t k = 0; k < sizeof items / sizeof *items; k++) {
            thread_pool *pool = make_pool(n_lanes);
            for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
                atomic_store(&pool->completed, numbers[i]);
                CHECK(each_item_once(pool, items[k][0], items[k][1]));
                CHECK_EQ(pool->completed, (uint32_t)(numbers[i] + N_PHASES));
                CHECK(each_item_once(pool, items[k][1], items[k][0]));
            }
            end_pool(pool);
        }
    }
}
