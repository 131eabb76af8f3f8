/* What the tests of kernels share: the instruction sets of this machine, and numbers to feed. */
#ifndef TINYLOOP_KERNEL_SETS_H
#define TINYLOOP_KERNEL_SETS_H

#include "backend/cpu/cpu.h"
#include "base/random.h"

/* The instruction sets that this machine has; the first is portable. */
static inline const cpu_kernels *const *kernel_sets(size_t *n)
{
    static const cpu_kernels *sets[3];
    size_t count = 0;
    sets[count++] = &cpu_kernels_portable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        sets[count++] = &cpu_kernels_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        sets[count++] = &cpu_kernels_avx512;
#endif
    *n = count;
    return sets;
}

#define EACH_SET(set)                                                                              \
    size_t n_sets = 0, set_index = 0;                                                              \
    const cpu_kernels *const *sets = kernel_sets(&n_sets);                                         \
    for (const cpu_kernels *set = sets[0]; set_index < n_sets;                                     \
         set = ++set_index < n_sets ? sets[set_index] : NULL)

/* Uniform in [-1, 1). */
static inline float uniform(uint64_t seed, size_t i)
{
    return (float)(2 * random_uniform(seed, i) - 1);
}

static inline void fill(float *to, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        to[i] = uniform(seed, i);
}

#endif
