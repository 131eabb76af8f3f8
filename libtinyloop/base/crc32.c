#include "base/crc32.h"

#include <pthread.h>
#include <string.h>

/* table[k][b]: the effect of byte b followed by k zero bytes, so eight bytes go in one step. */
static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void make_table(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0);
        table[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++)
            table[k][b] = (table[k - 1][b] >> 8) ^ table[0][table[k - 1][b] & 255];
}

static uint32_t eight_bytes(uint32_t crc, const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, sizeof word);
    word ^= crc;
    uint32_t next = 0;
    for (int i = 0; i < 8; i++)
        next ^= table[7 - i][(word >> (8 * i)) & 255];
    return next;
}

uint32_t crc32_update(uint32_t crc, const void *data, size_t size)
{
    pthread_once(&table_once, make_table);
    const unsigned char *p = data;
    crc = ~crc;
    for (; size >= 8; size -= 8, p += 8)
        crc = eight_bytes(crc, p);
    for (; size > 0; size--, p++)
        crc = (crc >> 8) ^ table[0][(crc ^ *p) & 255];
    return ~crc;
}
