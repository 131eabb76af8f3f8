/* A small thread pool for short parallel regions.
 *
 * A region runs one function on every lane; lane 0 is the calling thread. All lanes walk through
 * the same phases in the same order, and share each phase's work by taking pieces of it:
 *
 *     size_t begin, end;
 *     while (lane_next(self, n, least, &begin, &end))
 *         work on items [begin, end);
 *
 * The loop ends when all pieces of the phase are done, whoever did them, and what was written is
 * then visible to every lane. So a lane that the system has put aside holds the others up only
 * while it has pieces to report, and nothing may be written outside phases. A lane begins with a
 * share of its own, the same each time, and then helps the others. Waiting spins for some tens of
 * microseconds and then sleeps in the kernel. If another thread has the pool, the region runs on
 * the caller's lane alone: results must not depend on who does which piece. After fork() the child
 * starts its own workers at its first region. */
#ifndef TL_BASE_THREADS_H
#define TL_BASE_THREADS_H

#include "base/status.h"

#include <stdbool.h>

typedef struct thread_pool thread_pool;

typedef struct lane {
    thread_pool *pool;
    int index;        /* 0 .. count - 1, a number of the lane's own in its region */
    int count;        /* lanes of the region */
    uint32_t phase;   /* that this lane is in */
    uint32_t n_taken; /* pieces of the phase that it took, and reports when it finds no more */
    bool alone_done;  /* of a region of one lane: the phase's only piece was given out */
} lane;

typedef void (*lane_function)(void *arg, lane *self);

tl_status thread_pool_create(thread_pool **out, int n_lanes);
void thread_pool_destroy(thread_pool *pool);
int thread_pool_size(const thread_pool *pool);
void thread_pool_run(thread_pool *pool, lane_function function, void *arg);

/* The next piece of the phase's n items: `least` of them or a multiple of it, but for the last
 * piece. False at the end of the phase. */
bool lane_next(lane *self, size_t n, size_t least, size_t *begin, size_t *end);

/* CPUs that this process may run on, at least 1. */
int threads_available(void);

#endif
