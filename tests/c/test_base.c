/* base/: half floats, CRC-32, random numbers, memory, messages, the thread pool. */
#include "base/crc32.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/status.h"
#include "base/threads.h"

#include "test.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

/* Some tests ask for more memory than there is. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

/* ---- half.h ---- */

/* The value of a finite float16, from its definition. */
static double f16_value(unsigned h)
{
    int exponent = (h >> 10) & 31;
    double fraction = h & 1023;
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

TEST(every_f16_to_float)
{
    for (unsigned h = 0; h < 65536; h++) {
        float f = float_from_f16((uint16_t)h);
        if ((h & 0x7C00) != 0x7C00) {
            double value = f16_value(h);
            if (!CHECK(f == value && !signbit(f) == !(h & 0x8000)))
                return;
            REQUIRE(float_to_f16(f) == h);
        } else if ((h & 1023) == 0) {
            REQUIRE(isinf(f) && !signbit(f) == !(h & 0x8000));
            REQUIRE(float_to_f16(f) == h);
        } else {
            REQUIRE(isnan(f));
            REQUIRE(float_to_f16(f) == (h | 0x200)); /* quiet, its other bits kept */
        }
    }
}

/* To nearest, ties to even, by search among all magnitudes: bit patterns are in order of value,
 * and the one after the largest finite stands for 2^16. */
static unsigned f16_nearest(float f)
{
    double magnitude = fabs((double)f);
    unsigned low = 0, high = 0x7C00;
    if (magnitude >= 65536)
        return high | (signbit(f) ? 0x8000 : 0);
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        *(f16_value(middle) <= magnitude ? &low : &high) = middle;
    }
    double above = high == 0x7C00 ? 65536 : f16_value(high);
    double to_low = magnitude - f16_value(low), to_high = above - magnitude;
    unsigned nearest = to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
    return nearest | (signbit(f) ? 0x8000 : 0);
}

static bool rounds_right(float f)
{
    unsigned got = float_to_f16(f), want = f16_nearest(f);
    return test_check(got == want, __FILE__, __LINE__, "%a becomes %04x, not %04x", (double)f, got,
                      want);
}

TEST(float_to_f16_at_every_boundary)
{
    for (unsigned h = 0; h < 0x7C00; h++) {
        double next = h == 0x7BFF ? 65536 : f16_value(h + 1);
        float low = (float)f16_value(h), tie = (float)((f16_value(h) + next) / 2);
        const float near[] = {low, nextafterf(low, INFINITY), nextafterf(tie, 0),
                              tie, nextafterf(tie, INFINITY), nextafterf((float)next, 0)};
        for (size_t i = 0; i < sizeof near / sizeof *near; i++) {
            REQUIRE(rounds_right(near[i]));
            REQUIRE(rounds_right(-near[i]));
        }
    }
}

TEST(float_to_f16_of_any_float)
{
    uint32_t word[4], counter[4] = {0}, key[2] = {7, 7};
    for (; counter[0] < 50000; counter[0]++) {
        philox4x32(word, counter, key);
        for (int i = 0; i < 4; i++) {
            float f = float_from_bits(word[i]);
            if (isnan(f))
                REQUIRE((float_to_f16(f) & 0x7E00) == 0x7E00);
            else
                REQUIRE(rounds_right(f));
        }
    }
}

TEST(every_bf16_to_float)
{
    for (unsigned h = 0; h < 65536; h++)
        REQUIRE(float_to_bits(float_from_bf16((uint16_t)h)) == h << 16);
}

/* ---- crc32.h ---- */

static uint32_t slow_crc32(const unsigned char *p, size_t size)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < size; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ 0xEDB88320u : crc >> 1;
    }
    return ~crc;
}

TEST(crc32_known_values)
{
    CHECK_EQ(crc32_update(0, "", 0), 0);
    CHECK_EQ(crc32_update(0, "a", 1), 0xE8B7BE43u);
    CHECK_EQ(crc32_update(0, "123456789", 9), 0xCBF43926u);
    CHECK_EQ(crc32_update(0, "The quick brown fox jumps over the lazy dog", 43), 0x414FA339u);
    unsigned char zeros[32] = {0}, ones[32];
    memset(ones, 0xFF, sizeof ones);
    CHECK_EQ(crc32_update(0, zeros, 32), 0x190A55ADu);
    CHECK_EQ(crc32_update(0, ones, 32), 0xFF6CAB0Bu);
}

TEST(crc32_in_pieces_and_unaligned)
{
    unsigned char data[257];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (unsigned char)(i * 151 + i / 7);
    for (size_t begin = 0; begin < 9; begin++) {
        for (size_t size = 0; begin + size <= sizeof data; size += 1 + size / 9) {
            uint32_t want = slow_crc32(data + begin, size);
            REQUIRE(crc32_update(0, data + begin, size) == want);
            for (size_t cut = 0; cut <= size; cut += 1 + cut / 3) {
                uint32_t first = crc32_update(0, data + begin, cut);
                REQUIRE(crc32_update(first, data + begin + cut, size - cut) == want);
            }
        }
    }
}

/* ---- random.h ---- */

TEST(philox_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        philox4x32(out, known[i].counter, known[i].key);
        CHECK_MEM_EQ(out, known[i].out, sizeof out);
    }
}

TEST(random_uniform_is_keyed_by_seed_and_position)
{
    /* the published answer for zeros, its first 53 bits */
    CHECK(random_uniform(0, 0) == (double)(0x6627e8d5e169c58dull >> 11) * 0x1p-53);
    CHECK(random_uniform(UINT64_MAX, UINT64_MAX) != random_uniform(UINT64_MAX, UINT32_MAX));
    CHECK(random_uniform(1, 5) != random_uniform(1ull << 32 | 1, 5));
    double sum = 0, squares = 0, least = 1, most = 0;
    int n = 20000;
    for (int i = 0; i < n; i++) {
        double u = random_uniform(12345, (uint64_t)i);
        least = fmin(least, u);
        most = fmax(most, u);
        sum += u;
        squares += u * u;
    }
    CHECK(least >= 0 && least < 0.001 && most < 1 && most > 0.999);
    CHECK_NEAR(sum / n, 0.5, 0.01);
    CHECK_NEAR(squares / n, 1.0 / 3, 0.01);
}

TEST(fresh_seeds_differ)
{
    uint64_t a = random_fresh_seed(), b = random_fresh_seed(), c = random_fresh_seed();
    CHECK(a != b && b != c && a != c);
}

/* ---- memory.h ---- */

TEST(sizes_are_checked)
{
    size_t out;
    CHECK(size_product(&out, SIZE_MAX, 1) && out == SIZE_MAX);
    CHECK(!size_product(&out, SIZE_MAX / 2 + 1, 2));
    CHECK(size_sum(&out, SIZE_MAX - 1, 1) && out == SIZE_MAX);
    CHECK(!size_sum(&out, SIZE_MAX, 1));
    int64_t live = mem_live();
    CHECK(mem_array(SIZE_MAX, 2) == NULL);
    CHECK(mem_zeroed(SIZE_MAX, 2) == NULL);
    CHECK(mem_aligned(SIZE_MAX, 2) == NULL);
    CHECK(mem_aligned(SIZE_MAX, 1) == NULL);
    CHECK(mem_grow(NULL, SIZE_MAX, 2) == NULL);
    CHECK_EQ(mem_live(), live);
}

TEST(allocations_of_nothing_are_something)
{
    void *p[] = {mem_array(0, 8), mem_zeroed(0, 8), mem_aligned(0, 8), mem_grow(NULL, 0, 8)};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++) {
        CHECK(p[i] != NULL);
        mem_free(p[i]);
    }
}

TEST(memory_is_counted_aligned_and_zeroed)
{
    int64_t live = mem_live();
    unsigned char *zeroed = mem_zeroed(100, 3);
    char *grown = mem_grow(NULL, 3, 1);
    void *aligned = mem_aligned(3, 7);
    REQUIRE(zeroed != NULL && grown != NULL && aligned != NULL);
    CHECK_EQ(mem_live(), live + 3);
    CHECK_EQ((uintptr_t)aligned % MEM_ALIGNMENT, 0);
    for (int i = 0; i < 300; i++)
        CHECK_EQ(zeroed[i], 0);
    memcpy(grown, "abc", 3);
    grown = mem_grow(grown, 5000, 1);
    REQUIRE(grown != NULL);
    CHECK_MEM_EQ(grown, "abc", 3);
    CHECK_EQ(mem_live(), live + 3);
    mem_free(zeroed);
    mem_free(grown);
    mem_free(aligned);
    mem_free(NULL);
    CHECK_EQ(mem_live(), live);
}

TEST(the_nth_allocation_fails_once)
{
    for (int64_t n = 0; n < 4; n++) {
        mem_fail_at(n);
        void *p[5] = {mem_array(1, 1), mem_zeroed(1, 1), mem_aligned(1, 1), mem_grow(NULL, 1, 1),
                      mem_array(1, 1)};
        for (int i = 0; i < 5; i++) {
            CHECK((p[i] == NULL) == (i == n));
            mem_free(p[i]);
        }
    }
    char *old = mem_array(4, 1);
    REQUIRE(old != NULL);
    memcpy(old, "old", 4);
    mem_fail_at(0);
    CHECK(mem_grow(old, 100, 1) == NULL);
    CHECK_STR_EQ(old, "old");
    mem_fail_at(0);
    mem_fail_at(-1);
    char *again = mem_grow(old, 100, 1);
    CHECK(again != NULL);
    mem_free(again);
}

/* ---- status.h ---- */

static void *fail_elsewhere(void *arg)
{
    bool *was_empty = arg;
    *was_empty = *status_last_error() == '\0';
    tl_fail(TL_STATUS_INVALID, "of the other thread");
    return NULL;
}

TEST(messages_are_cut_and_belong_to_a_thread)
{
    char text[2000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    CHECK_EQ(tl_fail(TL_STATUS_IO, "%s", text), TL_STATUS_IO);
    CHECK(strlen(status_last_error()) < sizeof text - 1);
    CHECK(strlen(status_last_error()) > 200);
    CHECK_EQ(tl_fail_nomem("a thing", 77), TL_STATUS_NOMEM);
    CHECK_STR_HAS(status_last_error(), "out of memory");
    CHECK_STR_HAS(status_last_error(), "77 bytes for a thing");
    bool was_empty = false;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, fail_elsewhere, &was_empty) == 0);
    pthread_join(thread, NULL);
    CHECK(was_empty);
    CHECK_STR_HAS(status_last_error(), "a thing");
}

/* ---- threads.h ---- */

enum { MAX_ITEMS = 500 };

/* What the pieces of one phase were. */
typedef struct cover {
    size_t n, least;
    atomic_int n_taken[MAX_ITEMS];
    atomic_int n_odd; /* pieces that are no multiple of `least`, before the last item */
    atomic_int n_regions;
} cover;

static void take_pieces(void *arg, lane *self)
{
    cover *c = arg;
    size_t begin, end;
    atomic_fetch_add(&c->n_regions, 1);
    while (lane_next(self, c->n, c->least, &begin, &end)) {
        if (begin >= end || end > c->n || begin % c->least || (end % c->least && end != c->n))
            atomic_fetch_add(&c->n_odd, 1);
        for (size_t i = begin; i < end && i < MAX_ITEMS; i++)
            atomic_fetch_add(&c->n_taken[i], 1);
    }
}

TEST(pieces_cover_exactly)
{
    static cover c;
    for (int n_lanes = 1; n_lanes <= 8; n_lanes++) {
        thread_pool *pool;
        REQUIRE_OK(thread_pool_create(&pool, n_lanes));
        CHECK_EQ(thread_pool_size(pool), n_lanes);
        for (size_t n = 0; n < MAX_ITEMS; n += 1 + n / 2) {
            for (size_t least = 1; least <= 9; least += 4) {
                memset(&c, 0, sizeof c);
                c.n = n;
                c.least = least;
                thread_pool_run(pool, take_pieces, &c);
                CHECK_EQ(c.n_regions, n_lanes); /* nobody is inside any more */
                CHECK_EQ(c.n_odd, 0);
                for (size_t i = 0; i < MAX_ITEMS; i++)
                    REQUIRE(c.n_taken[i] == (i < n));
            }
        }
        thread_pool_destroy(pool);
    }
}

/* Plain variables: that a phase is over alone makes the others' writes visible. */
typedef struct rounds {
    int n_rounds, n_items;
    bool slow;
    int written[64];
    int n_wrong[64];
} rounds;

static void write_and_read(void *arg, lane *self)
{
    rounds *r = arg;
    size_t begin, end, n = (size_t)r->n_items;
    for (int round = 1; round <= r->n_rounds; round++) {
        while (lane_next(self, n, 1, &begin, &end)) {
            if (r->slow && round % 8 == 0 && begin == 0)
                usleep(200); /* the others run ahead to the end of the phase */
            for (size_t i = begin; i < end; i++)
                r->written[i] = round;
        }
        while (lane_next(self, 0, 1, &begin, &end)) /* no phase at all */
            r->n_wrong[0]++;
        while (lane_next(self, n, 1, &begin, &end))
            for (size_t i = begin; i < end; i++)
                for (size_t k = 0; k < n; k++)
                    r->n_wrong[i] += r->written[k] != round;
    }
}

static int64_t count_wrong(const rounds *r)
{
    int64_t n = 0;
    for (size_t i = 0; i < 64; i++)
        n += r->n_wrong[i];
    return n;
}

TEST(phases_order_writes)
{
    static const int n_items[] = {1, 2, 5, 16, 64};
    for (int n_lanes = 1; n_lanes <= 8; n_lanes++) {
        thread_pool *pool;
        REQUIRE_OK(thread_pool_create(&pool, n_lanes));
        for (int i = 0; i < 10; i++) {
            rounds r = {.n_rounds = 24, .n_items = n_items[i / 2], .slow = i % 2};
            for (int region = 0; region < 3; region++)
                thread_pool_run(pool, write_and_read, &r);
            CHECK_EQ(count_wrong(&r), 0);
            CHECK_EQ(r.written[r.n_items - 1], r.n_rounds);
        }
        thread_pool_destroy(pool);
    }
}

typedef struct summing {
    int64_t *squares; /* [n] */
    size_t n;
} summing;

static void put_squares(void *arg, lane *self)
{
    summing *s = arg;
    size_t begin, end;
    while (lane_next(self, s->n, 10, &begin, &end))
        for (size_t i = begin; i < end; i++)
            s->squares[i] += (int64_t)(i * i);
}

enum { N_SQUARES = 1000 };

/* Regions of one pool from this thread, each checked; gives the number of wrong elements. */
static int64_t run_regions(thread_pool *pool, int n_regions)
{
    int64_t squares[N_SQUARES] = {0}, wrong = 0;
    summing s = {squares, N_SQUARES};
    for (int r = 1; r <= n_regions; r++) {
        thread_pool_run(pool, put_squares, &s);
        for (int64_t i = 0; i < N_SQUARES; i++)
            wrong += squares[i] != r * i * i;
    }
    return wrong;
}

static void *run_regions_thread(void *pool)
{
    return (void *)(intptr_t)run_regions(pool, 200);
}

TEST(several_threads_share_a_pool)
{
    for (int n = 1; n <= 4; n++) {
        thread_pool *pool;
        REQUIRE_OK(thread_pool_create(&pool, n));
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            REQUIRE(pthread_create(&threads[i], NULL, run_regions_thread, pool) == 0);
        for (int i = 0; i < 4; i++) {
            void *wrong;
            pthread_join(threads[i], &wrong);
            CHECK_EQ((intptr_t)wrong, 0);
        }
        thread_pool_destroy(pool);
    }
}

typedef struct nesting {
    thread_pool *pool;
    atomic_int n_inner;
    atomic_int n_inner_lanes;
} nesting;

static void inner(void *arg, lane *self)
{
    nesting *n = arg;
    size_t begin, end;
    atomic_fetch_add(&n->n_inner_lanes, self->count);
    while (lane_next(self, 7, 1, &begin, &end))
        atomic_fetch_add(&n->n_inner, (int)(end - begin));
}

static void outer(void *arg, lane *self)
{
    nesting *n = arg;
    size_t begin, end;
    while (lane_next(self, 3, 1, &begin, &end))
        for (size_t i = begin; i < end; i++)
            thread_pool_run(n->pool, inner, n);
}

TEST(a_region_inside_a_region_runs_alone)
{
    nesting n = {NULL, 0, 0};
    REQUIRE_OK(thread_pool_create(&n.pool, 3));
    thread_pool_run(n.pool, outer, &n);
    CHECK_EQ(atomic_load(&n.n_inner), 3 * 7);
    CHECK_EQ(atomic_load(&n.n_inner_lanes), 3);
    thread_pool_destroy(n.pool);
}

#if !defined(__SANITIZE_THREAD__) /* which cannot follow threads that a child process starts */

/* Exit status of a child that runs regions on the pool and on one of its own. */
static int child_runs_regions(thread_pool *pool)
{
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        rounds r = {.n_rounds = 20, .n_items = 16};
        thread_pool_run(pool, write_and_read, &r);
        int64_t wrong = run_regions(pool, 20) + count_wrong(&r);
        thread_pool *own;
        if (thread_pool_create(&own, 2) != TL_STATUS_OK)
            _exit(9);
        wrong += run_regions(own, 20);
        thread_pool_destroy(own);
        thread_pool_destroy(pool);
        _exit(wrong == 0 ? 0 : 8);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(a_child_process_runs_regions)
{
    thread_pool *pool;
    REQUIRE_OK(thread_pool_create(&pool, 4));
    CHECK_EQ(child_runs_regions(pool), 0); /* before the first region of the parent */
    CHECK_EQ(run_regions(pool, 20), 0);
    CHECK_EQ(child_runs_regions(pool), 0);
    CHECK_EQ(run_regions(pool, 20), 0);
    thread_pool_destroy(pool);
}

typedef struct busy_thread {
    thread_pool *pool;
    atomic_bool stop;
    int64_t wrong;
} busy_thread;

static void *keep_busy(void *arg)
{
    busy_thread *busy = arg;
    while (!atomic_load(&busy->stop))
        busy->wrong += run_regions(busy->pool, 1);
    return NULL;
}

TEST(a_fork_while_another_thread_is_in_a_region)
{
    busy_thread busy = {.wrong = 0};
    REQUIRE_OK(thread_pool_create(&busy.pool, 3));
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, keep_busy, &busy) == 0);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(child_runs_regions(busy.pool), 0);
    atomic_store(&busy.stop, true);
    pthread_join(thread, NULL);
    CHECK_EQ(busy.wrong, 0);
    thread_pool_destroy(busy.pool);
}

#endif

TEST(a_pool_that_finds_no_memory)
{
    int64_t live = mem_live();
    thread_pool *pool;
    int64_t n = 0;
    for (;; n++) {
        mem_fail_at(n);
        tl_status status = thread_pool_create(&pool, 4);
        mem_fail_at(-1);
        if (status == TL_STATUS_OK)
            break;
        CHECK_EQ(status, TL_STATUS_NOMEM);
        CHECK_STR_HAS(status_last_error(), "out of memory");
        CHECK(pool == NULL);
        REQUIRE(n < 100);
    }
    CHECK(n >= 3); /* the pool, its table, a worker's start */
    CHECK_EQ(run_regions(pool, 10), 0);
    thread_pool_destroy(pool);
    thread_pool_destroy(NULL);
    CHECK_EQ(mem_live(), live);
}

TEST(cpus_are_counted)
{
    CHECK(threads_available() >= 1);
    cpu_set_t before, one;
    REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
    CHECK_EQ(threads_available(), CPU_COUNT(&before));
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before))
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK_EQ(threads_available(), 1);
    sched_setaffinity(0, sizeof before, &before);
}
