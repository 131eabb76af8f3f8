/* What this processor can do at most: reading a block of memory, and multiplying and adding. Each
 * function is one thread's part; limits.py builds the file for the machine and runs the threads. */
#include <stddef.h>
#include <stdint.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef float floats __attribute__((vector_size(64)));
typedef uint64_t words __attribute__((vector_size(64)));

/* Reads the block `passes` times; `bytes` is a multiple of 1024. Returns a digest. */
uint64_t probe_read(const void *block, size_t bytes, size_t passes)
{
    enum { STREAMS = 16 };
    words sums[STREAMS] = {0}, all = {0};
    for (size_t pass = 0; pass < passes; pass++) {
        const words *p = block, *end = p + bytes / sizeof *p;
        __asm__ volatile("" : : : "memory"); /* the next pass reads again */
        for (; p < end; p += STREAMS)
            for (int i = 0; i < STREAMS; i++)
                sums[i] += p[i];
    }
    for (int i = 0; i < STREAMS; i++)
        all ^= sums[i];
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}

enum { CHAINS = 16 }; /* enough independent sums to hide an operation's latency */

/* `steps` x 512 floating-point operations: multiply-adds of float32. */
float probe_fma(size_t steps)
{
    floats sums[CHAINS], all = {0}, a = all + 0.5f, b = all + 0.25f;
    for (int i = 0; i < CHAINS; i++)
        sums[i] = all + (float)i; /* unlike each other, or one would do for all */
    for (size_t step = 0; step < steps; step++) {
        for (int i = 0; i < CHAINS; i++)
            sums[i] = sums[i] * a + b;
        __asm__ volatile("" : "+x"(a), "+x"(b));
    }
    for (int i = 0; i < CHAINS; i++)
        all += sums[i];
    return all[0] + all[15];
}

/* `steps` x 1024 floating-point operations: dot products of bfloat16 pairs, summed in float32.
 * Returns a negative number where the processor has none. */
float probe_bf16(size_t steps)
{
#ifdef __AVX512BF16__
    __m512 sums[CHAINS], all = _mm512_setzero_ps();
    __m512i a = _mm512_set1_epi16(0x3F80), b = _mm512_set1_epi16(0x3F00); /* 1.0, 0.5 */
    for (int i = 0; i < CHAINS; i++)
        sums[i] = _mm512_set1_ps((float)i);
    for (size_t step = 0; step < steps; step++) {
        for (int i = 0; i < CHAINS; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
        __asm__ volatile("" : "+v"(a), "+v"(b));
    }
    for (int i = 0; i < CHAINS; i++)
        all = _mm512_add_ps(all, sums[i]);
    return _mm512_reduce_add_ps(all);
#else
    (void)steps;
    return -1.0f;
#endif
}
