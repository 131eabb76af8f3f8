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

#define SPINS 2000 /* about 50 microseconds before a waiter sleeps */

struct thread_pool {
    int n_lanes;
    int n_started; /* workers that run; guarded by `busy` */
    pthread_t *workers;
    atomic_flag busy;
    _Atomic uint32_t epoch;      /* a region starts when it changes */
    _Atomic uint32_t generation; /* a barrier opens when it changes */
    _Atomic uint32_t arrived;
    _Atomic uint32_t sleepers;
    bool stopping;
    lane_function function;
    void *arg;
    thread_pool *next; /* in all_pools */
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

void lane_barrier(const lane *self)
{
    if (self->count == 1)
        return;
    thread_pool *pool = self->pool;
    uint32_t generation = atomic_load(&pool->generation);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == (uint32_t)self->count) {
        atomic_store(&pool->arrived, 0);
        change(pool, &pool->generation);
    } else {
        wait_for_change(pool, &pool->generation, generation);
    }
}

void lane_share(const lane *self, size_t n, size_t *begin, size_t *end)
{
    size_t count = (size_t)self->count, index = (size_t)self->index;
    size_t each = n / count, extra = n % count;
    *begin = index * each + (index < extra ? index : extra);
    *end = *begin + each + (index < extra ? 1 : 0);
}

/* ---- workers ---- */

typedef struct worker_start {
    thread_pool *pool;
    int index;
    int count;
    uint32_t epoch;
} worker_start;

static void *worker_main(void *arg)
{
    worker_start start = *(worker_start *)arg;
    mem_free(arg);
    thread_pool *pool = start.pool;
    lane self = {start.index, start.count, pool};
    uint32_t seen = start.epoch;
    for (;;) {
        wait_for_change(pool, &pool->epoch, seen);
        seen++;
        if (pool->stopping)
            return NULL;
        pool->function(pool->arg, &self);
        lane_barrier(&self);
    }
}

static bool start_worker(thread_pool *pool, int index)
{
    worker_start *start = mem_array(1, sizeof *start);
    if (start == NULL)
        return false;
    *start = (worker_start){pool, index, pool->n_lanes, atomic_load(&pool->epoch)};
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

/* All or none: a region needs the lane count that its barriers were made for. */
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
        atomic_store(&pool->arrived, 0);
        atomic_store(&pool->sleepers, 0);
        atomic_flag_clear(&pool->busy);
    }
    pthread_mutex_unlock(&pools_lock);
}

static void install_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* ---- pool ---- */

tl_status thread_pool_create(thread_pool **out, int n_lanes)
{
    *out = NULL;
    thread_pool *pool = mem_zeroed(1, sizeof *pool);
    pthread_t *workers = mem_zeroed((size_t)n_lanes, sizeof *workers);
    if (pool == NULL || workers == NULL) {
        mem_free(workers);
        mem_free(pool);
        return tl_fail_nomem("a thread pool", sizeof *pool);
    }
    pool->n_lanes = n_lanes;
    pool->workers = workers;
    atomic_flag_clear(&pool->busy);
    if (!start_workers(pool)) {
        int n_started = pool->n_started;
        stop_workers(pool);
        mem_free(workers);
        mem_free(pool);
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
    mem_free(pool->workers);
    mem_free(pool);
}

int thread_pool_size(const thread_pool *pool)
{
    return pool->n_lanes;
}

void thread_pool_run(thread_pool *pool, lane_function function, void *arg)
{
    lane alone = {0, 1, pool};
    if (pool->n_lanes == 1 || atomic_flag_test_and_set(&pool->busy)) {
        function(arg, &alone);
        return;
    }
    if (start_workers(pool)) {
        lane self = {0, pool->n_lanes, pool};
        pool->function = function;
        pool->arg = arg;
        change(pool, &pool->epoch);
        function(arg, &self);
        lane_barrier(&self);
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
