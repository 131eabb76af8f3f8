/* Every allocation of the library goes through here: sizes are checked products, a failure is
 * NULL, live allocations are counted, and tests can make the n-th one fail. */
#ifndef TL_BASE_MEMORY_H
#define TL_BASE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MEM_ALIGNMENT 64 /* bytes: a cache line, a vector register */

void *mem_array(size_t n, size_t size);           /* uninitialised; NULL on overflow */
void *mem_zeroed(size_t n, size_t size);          /* all zero */
void *mem_aligned(size_t n, size_t size);         /* at a multiple of MEM_ALIGNMENT */
void *mem_grow(void *old, size_t n, size_t size); /* realloc; `old` lives on failure */
void mem_free(void *p);                           /* any of the above, or NULL */

bool size_product(size_t *out, size_t a, size_t b); /* false on overflow */
bool size_sum(size_t *out, size_t a, size_t b);

int64_t mem_live(void); /* allocations not yet freed */

/* For tests: the n-th allocation from now on (0 is the next) fails, once; negative: none. */
void mem_fail_at(int64_t n);

#endif
