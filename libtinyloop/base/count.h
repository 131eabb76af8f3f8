/* An atomic reference count. */
#ifndef TL_BASE_COUNT_H
#define TL_BASE_COUNT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef _Atomic int32_t ref_count;

static inline void ref_retain(ref_count *count)
{
    atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
}

/* True when this was the last one: the caller frees. */
static inline bool ref_release(ref_count *count)
{
    return atomic_fetch_sub_explicit(count, 1, memory_order_acq_rel) == 1;
}

/* True if the caller holds the only reference, so that nobody else can see the object. */
static inline bool ref_is_sole(const ref_count *count)
{
    return atomic_load_explicit(count, memory_order_acquire) == 1;
}

#endif
