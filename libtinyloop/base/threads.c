#include "base/threads.h"

#include "base/memory.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 2000        /* before a waiter sleeps: some tens of microseconds */
#define PIECES_PER_LANE 8 /* enough for an even share, few enough to cost little */

/* How far a lane's share of the pieces is given out: phase << 32 | the next piece's number in the
 * share. On a cache line of its own, which other lanes touch only when they have nothing left. */
typedef struct lane_ticket {
    _Alignas(64) _Atomic uint64_t next;
} lane_ticket;

struct thread_pool {
    int n_lanes;
    int n_started; /* workers that run; guarded by `busy` */
    pthread_t *workers;
    atomic_flag busy;
    _Atomic uint32_t sleepers;
    bool stopping;
    lane_function function;
    void *arg;
    uint32_t first_phase;       /* of the region */
    _Atomic uint32_t epoch;     /* a region starts when it changes */
    _Atomic uint32_t leaving;   /* workers that have left the region */
    _Atomic uint32_t n_done;    /* pieces of the phase that are done */
    _Atomic uint32_t completed; /* phases that are done */
    lane_ticket *tickets;       /* [n_lanes] */
    thread_pool *next;          /* in all_pools */
};

/* ---- waiting ---- */

static inline void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for_change(thread_pool *pool, _Atomic uint32_t *word, uint32_t old)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != old)
            return;
        spin_pause();
    }
    /* The count is seen by whoever changes the word next, or the kernel sees the new word. */
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(word) == old)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void change(thread_pool *pool, _Atomic uint32_t *word)
{
    atomic_fetch_add(word, 1);
    if (atomic_load(&pool->sleepers) > 0)
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* ---- phases ---- */

/* One region of a single lane: the phase is one piece. */
static bool next_alone(lane *self, size_t n, size_t *begin, size_t *end)
{
    self->alone_done = !self->alone_done;
    *begin = 0;
    *end = n;
    return self->alone_done;
}

/* Rounded up, so that a single piece is the caller's, who is surely awake. */
static uint32_t share_begin(const lane *self, int owner, uint32_t n_pieces)
{
    uint64_t count = (uint64_t)self->count;
    return (uint32_t)((n_pieces * (uint64_t)owner + count - 1) / count);
}

/* A piece of `owner`'s share in the lane's phase; false if all are given out or the phase is over.
 * A ticket of an earlier phase stands for a share of which nothing is given out. */
static bool take_piece(const lane *self, int owner, uint32_t n_pieces, uint32_t *piece)
{
    uint32_t first = share_begin(self, owner, n_pieces);
    uint32_t size = share_begin(self, owner + 1, n_pieces) - first;
    _Atomic uint64_t *ticket = &self->pool->tickets[owner].next;
    uint64_t now = atomic_load_explicit(ticket, memory_order_acquire);
    while (size > 0) {
        int32_t age = (int32_t)(self->phase - (uint32_t)(now >> 32));
        uint32_t next = age > 0 ? 0 : (uint32_t)now;
        if (age < 0 || next >= size)
            return false;
        if (atomic_compare_exchange_weak_explicit(ticket, &now,
                                                  (uint64_t)self->phase << 32 | (next + 1),
                                                  memory_order_acq_rel, memory_order_acquire)) {
            *piece = first + next;
            return true;
        }
    }
    return false;
}

/* Of the lane's own share as long as there are any, so that in the next loop over the same weights
 * it finds those in its cache that it had; then of the others' shares. */
static bool take_any_piece(const lane *self, uint32_t n_pieces, uint32_t *piece)
{
    if (take_piece(self, self->index, n_pieces, piece))
        return true;
    for (int i = 1; i < self->count; i++) {
        if (atomic_load_explicit(&self->pool->completed, memory_order_relaxed) != self->phase)
            return false; /* the phase is over */
        if (take_piece(self, (self->index + i) % self->count, n_pieces, piece))
            return true;
    }
    return false;
}

/* The lane that finishes the last pieces opens the next phase. */
static void finish_pieces(thread_pool *pool, uint32_t n, uint32_t n_pieces)
{
    if (atomic_fetch_add(&pool->n_done, n) + n < n_pieces)
        return;
    atomic_store(&pool->n_done, 0);
    change(pool, &pool->completed);
}

bool lane_next(lane *self, size_t n, size_t least, size_t *begin, size_t *end)
{
    if (n == 0)
        return false;
    if (self->count == 1)
        return next_alone(self, n, begin, end);
    thread_pool *pool = self->pool;
    size_t share = ((size_t)self->count * PIECES_PER_LANE) * least;
    size_t size = (n + share - 1) / share * least;
    uint32_t n_pieces = (uint32_t)((n + size - 1) / size), piece;
    if (take_any_piece(self, n_pieces, &piece)) {
        self->n_taken++;
        *begin = piece * size;
        *end = *begin + size < n ? *begin + size : n;
        return true;
    }
    if (self->n_taken > 0)
        finish_pieces(pool, self->n_taken, n_pieces);
    /* phases complete one by one, so `completed` is this phase's number until it is done */
    wait_for_change(pool, &pool->completed, self->phase);
    self->n_taken = 0;
    self->phase++;
    return false;
}

/* ---- workers ---- */

typedef struct worker_start {
    thread_pool *pool;
    int index;
    uint32_t epoch;
} worker_start;

/* Phases are counted on from region to region; every lane leaves with the same count. */
static void run_region(thread_pool *pool, int index, uint32_t phase)
{
    lane self = {.pool = pool, .index = index, .count = pool->n_lanes, .phase = phase};
    pool->function(pool->arg, &self);
}

static void *worker_main(void *arg)
{
    worker_start start = *(worker_start *)arg;
    mem_free(arg);
    thread_pool *pool = start.pool;
    for (uint32_t seen = start.epoch;; seen++) {
        wait_for_change(pool, &pool->epoch, seen);
        if (pool->stopping)
            return NULL;
        run_region(pool, start.index, pool->first_phase);
        change(pool, &pool->leaving);
    }
}

static bool start_worker(thread_pool *pool, int index)
{
    worker_start *start = mem_array(1, sizeof *start);
    if (start == NULL)
        return false;
    *start = (worker_start){pool, index, atomic_load(&pool->epoch)};
    /* Signals belong to the program's own threads. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&pool->workers[index - 1], NULL, worker_main, start);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed)
        mem_free(start);
    return !failed;
}

/* All or none: a region waits for every lane to leave. */
static bool start_workers(thread_pool *pool)
{
    while (pool->n_started < pool->n_lanes - 1) {
        if (!start_worker(pool, pool->n_started + 1))
            return false;
        pool->n_started++;
    }
    return true;
}

static void stop_workers(thread_pool *pool)
{
    pool->stopping = true;
    change(pool, &pool->epoch);
    for (int i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i], NULL);
    pool->n_started = 0;
    pool->stopping = false;
}

/* ---- fork ---- */

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static thread_pool *all_pools;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&pools_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&pools_lock);
}

/* The child has none of the workers, and nobody is inside a region. */
static void after_fork_in_child(void)
{
    for (thread_pool *pool = all_pools; pool != NULL; pool = pool->next) {
        pool->n_started = 0;
        atomic_store(&pool->sleepers, 0);
        atomic_store(&pool->n_done, 0);
        atomic_store(&pool->completed, 0);
        atomic_flag_clear(&pool->busy);
    }
    pthread_mutex_unlock(&pools_lock);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- pool ---- */

static void free_pool(thread_pool *pool)
{
    mem_free(pool->workers);
    mem_free(pool->tickets);
    mem_free(pool);
}

tl_status thread_pool_create(thread_pool **out, int n_lanes)
{
    *out = NULL;
    thread_pool *pool = mem_zeroed(1, sizeof *pool);
    if (pool == NULL)
        return tl_fail_nomem("a thread pool", sizeof *pool);
    pool->n_lanes = n_lanes;
    pool->workers = mem_zeroed((size_t)n_lanes, sizeof *pool->workers);
    pool->tickets = mem_aligned((size_t)n_lanes, sizeof *pool->tickets);
    if (pool->workers == NULL || pool->tickets == NULL) {
        free_pool(pool);
        return tl_fail_nomem("a thread pool", (size_t)n_lanes * sizeof *pool->tickets);
    }
    for (int i = 0; i < n_lanes; i++)
        atomic_init(&pool->tickets[i].next, 0);
    atomic_flag_clear(&pool->busy);
    if (!start_workers(pool)) {
        int n_started = pool->n_started;
        stop_workers(pool);
        free_pool(pool);
        return tl_fail(TL_STATUS_NOMEM, "out of memory: the system started %d of %d threads",
                       n_started, n_lanes - 1);
    }
    pthread_once(&fork_once, install_fork_handlers);
    pthread_mutex_lock(&pools_lock);
    pool->next = all_pools;
    all_pools = pool;
    pthread_mutex_unlock(&pools_lock);
    *out = pool;
    return TL_STATUS_OK;
}

void thread_pool_destroy(thread_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pools_lock);
    thread_pool **link = &all_pools;
    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    pthread_mutex_unlock(&pools_lock);
    stop_workers(pool);
    free_pool(pool);
}

int thread_pool_size(const thread_pool *pool)
{
    return pool->n_lanes;
}

/* The workers may still be on their way through phases that others have done: what the region
 * uses must outlive them. */
static void wait_for_workers(thread_pool *pool, uint32_t before)
{
    uint32_t all = before + (uint32_t)pool->n_lanes - 1;
    for (uint32_t now = atomic_load(&pool->leaving); now != all; now = atomic_load(&pool->leaving))
        wait_for_change(pool, &pool->leaving, now);
}

void thread_pool_run(thread_pool *pool, lane_function function, void *arg)
{
    lane alone = {.pool = pool, .count = 1};
    if (pool->n_lanes == 1 || atomic_flag_test_and_set(&pool->busy)) {
        function(arg, &alone);
        return;
    }
    if (start_workers(pool)) {
        uint32_t leaving = atomic_load(&pool->leaving);
        pool->function = function;
        pool->arg = arg;
        pool->first_phase = atomic_load(&pool->completed);
        /* a share without pieces keeps its ticket: no ticket may grow old beyond counting */
        for (int i = 0; i < pool->n_lanes; i++)
            atomic_store(&pool->tickets[i].next, (uint64_t)pool->first_phase << 32);
        change(pool, &pool->epoch);
        run_region(pool, 0, pool->first_phase);
        wait_for_workers(pool, leaving);
    } else {
        function(arg, &alone);
    }
    atomic_flag_clear(&pool->busy);
}

int threads_available(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
    return 1;
}
