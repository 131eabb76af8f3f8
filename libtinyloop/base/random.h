/* Counter-based random numbers: the same (seed, position) gives the same number, whatever was
 * drawn before. Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy
 * as 1, 2, 3" (SC'11). */
#ifndef TL_BASE_RANDOM_H
#define TL_BASE_RANDOM_H

#include <stdint.h>

void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

/* Uniform in [0, 1), 53 bits. */
double random_uniform(uint64_t seed, uint64_t position);

/* A seed that no other call is likely to get. */
uint64_t random_fresh_seed(void);

#endif
