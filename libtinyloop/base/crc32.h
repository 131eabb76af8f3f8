/* CRC-32 as zlib's (reflected polynomial 0xEDB88320). Start with 0; continue with the result. */
#ifndef TL_BASE_CRC32_H
#define TL_BASE_CRC32_H

#include <stddef.h>
#include <stdint.h>

uint32_t crc32_update(uint32_t crc, const void *data, size_t size);

#endif
