#include "base/random.h"

#include <stdatomic.h>
#include <sys/random.h>
#include <time.h>

static void philox_round(uint32_t c[4], const uint32_t key[2])
{
    uint64_t p0 = (uint64_t)0xD2511F53u * c[0];
    uint64_t p1 = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t next[4] = {
        (uint32_t)(p1 >> 32) ^ c[1] ^ key[0],
        (uint32_t)p1,
        (uint32_t)(p0 >> 32) ^ c[3] ^ key[1],
        (uint32_t)p0,
    };
    for (int i = 0; i < 4; i++)
        c[i] = next[i];
}

void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2])
{
    uint32_t k[2] = {key[0], key[1]};
    for (int i = 0; i < 4; i++)
        out[i] = counter[i];
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            k[0] += 0x9E3779B9u;
            k[1] += 0xBB67AE85u;
        }
        philox_round(out, k);
    }
}

double random_uniform(uint64_t seed, uint64_t position)
{
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t word[4];
    philox4x32(word, counter, key);
    uint64_t bits = ((uint64_t)word[0] << 32 | word[1]) >> 11;
    return (double)bits * 0x1p-53;
}

uint64_t random_fresh_seed(void)
{
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, GRND_NONBLOCK) == (ssize_t)sizeof seed)
        return seed;
    static _Atomic uint64_t calls;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return ((uint64_t)now.tv_sec << 32) ^ (uint64_t)now.tv_nsec ^
           (atomic_fetch_add(&calls, 1) * 0x9E3779B97F4A7C15u);
}
