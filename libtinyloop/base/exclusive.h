/* Use by one call at a time, of an object that another call may release meanwhile: a callback of the
 * very call that uses it, or another thread. */
#ifndef TL_BASE_EXCLUSIVE_H
#define TL_BASE_EXCLUSIVE_H

#include <stdatomic.h>
#include <stdbool.h>

typedef _Atomic int exclusive; /* zero: free */

enum { EXCLUSIVE_FREE, EXCLUSIVE_USED, EXCLUSIVE_RELEASED };

/* False if another call uses it. */
static inline bool exclusive_begin(exclusive *use)
{
    int expected = EXCLUSIVE_FREE;
    return atomic_compare_exchange_strong(use, &expected, EXCLUSIVE_USED);
}

/* True if it was released meanwhile: who used it last destroys it. */
static inline bool exclusive_end(exclusive *use)
{
    int expected = EXCLUSIVE_USED;
    return !atomic_compare_exchange_strong(use, &expected, EXCLUSIVE_FREE);
}

/* True if nobody uses it: who releases it destroys it. */
static inline bool exclusive_release(exclusive *use)
{
    return atomic_exchange(use, EXCLUSIVE_RELEASED) == EXCLUSIVE_FREE;
}

#endif
