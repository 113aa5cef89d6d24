// The checksum of chunks: CRC-32C (Castagnoli, as in RFC 3720), by the processor where it can.

#include <string.h>

#include "crc32c.h"

static uint32_t table[256];

__attribute__((constructor)) static void fill_table(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; bit++) value = value >> 1 ^ (value & 1 ? 0x82f63b78u : 0);
    table[i] = value;
  }
}

static uint32_t by_table(const uint8_t *data, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 255];
  return ~crc;
}

#if defined __x86_64__
__attribute__((target("sse4.2"))) static uint32_t by_processor(const uint8_t *data, size_t size) {
  uint64_t crc = ~0u;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  while (size--) crc = __builtin_ia32_crc32qi((uint32_t)crc, *data++);
  return ~(uint32_t)crc;
}

uint32_t checksum(const uint8_t *data, size_t size) {
  return __builtin_cpu_supports("sse4.2") ? by_processor(data, size) : by_table(data, size);
}
#else
uint32_t checksum(const uint8_t *data, size_t size) { return by_table(data, size); }
#endif
