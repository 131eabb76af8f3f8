#include "base/memory.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic int64_t live;
static _Atomic int64_t fail_countdown = -1;

bool size_product(size_t *out, size_t a, size_t b)
{
    return !__builtin_mul_overflow(a, b, out);
}

bool size_sum(size_t *out, size_t a, size_t b)
{
    return !__builtin_add_overflow(a, b, out);
}

static bool injected_failure(void)
{
    if (atomic_load_explicit(&fail_countdown, memory_order_relaxed) < 0)
        return false;
    return atomic_fetch_sub_explicit(&fail_countdown, 1, memory_order_relaxed) == 0;
}

static void *counted(void *p)
{
    if (p != NULL)
        atomic_fetch_add_explicit(&live, 1, memory_order_relaxed);
    return p;
}

void *mem_array(size_t n, size_t size)
{
    size_t bytes;
    if (!size_product(&bytes, n, size) || injected_failure())
        return NULL;
    return counted(malloc(bytes > 0 ? bytes : 1));
}

void *mem_zeroed(size_t n, size_t size)
{
    if (injected_failure())
        return NULL;
    return counted(calloc(n > 0 ? n : 1, size > 0 ? size : 1));
}

void *mem_aligned(size_t n, size_t size)
{
    size_t bytes;
    if (!size_product(&bytes, n, size) || !size_sum(&bytes, bytes, MEM_ALIGNMENT - 1))
        return NULL;
    bytes -= bytes % MEM_ALIGNMENT;
    if (injected_failure())
        return NULL;
    return counted(aligned_alloc(MEM_ALIGNMENT, bytes > 0 ? bytes : MEM_ALIGNMENT));
}

void *mem_grow(void *old, size_t n, size_t size)
{
    size_t bytes;
    if (!size_product(&bytes, n, size) || injected_failure())
        return NULL;
    void *p = realloc(old, bytes > 0 ? bytes : 1);
    return old == NULL ? counted(p) : p;
}

void mem_free(void *p)
{
    if (p == NULL)
        return;
    atomic_fetch_sub_explicit(&live, 1, memory_order_relaxed);
    free(p);
}

int64_t mem_live(void)
{
    return atomic_load(&live);
}

void mem_fail_at(int64_t n)
{
    atomic_store(&fail_countdown, n);
}
