// The constants with which the GPU puts a run's checksum together from those of its pieces
// (kalos_crc_powers, gather.cu).
#ifndef KALOS_CRC_POWERS_H
#define KALOS_CRC_POWERS_H

#include "kalos_launch.h"

// a * b modulo the polynomial of CRC-32C, both reflected: bit 31 is x^0.
static inline uint32_t kalos_crc_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 31; i >= 0; --i) {
    if (a >> i & 1u) product ^= b;
    b = b >> 1 ^ (b & 1u ? 0x82f63b78u : 0u);
  }
  return product;
}

static inline void kalos_crc_powers_of(uint32_t factor, uint32_t* out, uint32_t count) {
  out[0] = 0x80000000u;
  for (uint32_t i = 1; i < count; ++i) out[i] = kalos_crc_multiply(out[i - 1], factor);
}

static inline void kalos_crc_powers_fill(kalos_crc_powers* powers) {
  uint32_t token = 0x80000000u;  // x^32: four zero bytes
  for (int i = 0; i < 32; ++i) token = token >> 1 ^ (token & 1u ? 0x82f63b78u : 0u);
  kalos_crc_powers_of(token, powers->near, KALOS_CRC_NEAR);
  const uint32_t piece = powers->near[KALOS_PIECE_TOKENS];
  kalos_crc_powers_of(piece, powers->far, KALOS_CRC_FAR);
  kalos_crc_powers_of(kalos_crc_multiply(powers->far[KALOS_CRC_FAR - 1], piece), powers->farther,
                      KALOS_CRC_FAR);
}

#endif  // KALOS_CRC_POWERS_H
