/* A small thread pool for short parallel regions.
 *
 * A region runs one function on every lane; lane 0 is the calling thread. Inside, lanes meet at
 * barriers. Waiting spins for some microseconds and then sleeps in the kernel. If another thread
 * has the pool, the region runs on the caller's lane alone: work must not depend on how many
 * lanes it gets. After fork() the child starts its own workers at its first region. */
#ifndef TL_BASE_THREADS_H
#define TL_BASE_THREADS_H

#include "base/status.h"

typedef struct thread_pool thread_pool;

typedef struct lane {
    int index; /* 0 .. count - 1 */
    int count;
    thread_pool *pool;
} lane;

typedef void (*lane_function)(void *arg, const lane *self);

tl_status thread_pool_create(thread_pool **out, int n_lanes);
void thread_pool_destroy(thread_pool *pool);
int thread_pool_size(const thread_pool *pool);
void thread_pool_run(thread_pool *pool, lane_function function, void *arg);

/* Returns when every lane of the region is here; what they wrote before is then visible. */
void lane_barrier(const lane *self);

/* This lane's share [*begin, *end) of n items. */
void lane_share(const lane *self, size_t n, size_t *begin, size_t *end);

/* CPUs that this process may run on, at least 1. */
int threads_available(void);

#endif
