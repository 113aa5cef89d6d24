// The checksum of chunks and frames: CRC-32C.

#ifndef NP_CRC32C_H
#define NP_CRC32C_H

#include <stddef.h>
#include <stdint.h>

uint32_t checksum(const uint8_t *data, size_t size);

#endif
