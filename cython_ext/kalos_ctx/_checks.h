// _checks.h: CRC32C (Castagnoli), the keyed 64-bit hash of names, and the 16-bit check that makes a
// word prove itself. Host only.
#ifndef KALOS_CHECKS_H
#define KALOS_CHECKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#include <wmmintrin.h>
#endif

// Table for one byte at a time, polynomial 0x1EDC6F41 reflected; filled at load, before any thread.
static uint32_t kalos_crc_table[256];

__attribute__((constructor)) static void kalos_crc_fill(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int k = 0; k < 8; k++) c = (c & 1) ? (c >> 1) ^ 0x82F63B78u : c >> 1;
    kalos_crc_table[i] = c;
  }
}

static inline uint32_t kalos_crc32c_portable(uint32_t crc, const void* data, size_t n) {
  const uint8_t* p = (const uint8_t*)data;
  crc = ~crc;
  while (n--) crc = kalos_crc_table[(crc ^ *p++) & 0xff] ^ (crc >> 8);
  return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t kalos_crc32c_sse42(uint32_t crc, const void* data,
                                                                     size_t n) {
  const uint8_t* p = (const uint8_t*)data;
  uint64_t c = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    c = _mm_crc32_u64(c, word);
  }
  uint32_t c32 = (uint32_t)c;
  while (n--) c32 = _mm_crc32_u8(c32, *p++);
  return ~c32;
}
#endif

#if defined(__x86_64__)
// crc * x^(8 * n), the CRC moved over n zero bytes: the instruction multiplies by x^32 and the
// product of two reflected words by one more x, so k is x^(8 * n - 33) mod P, reflected.
__attribute__((target("sse4.2,pclmul"))) static inline uint64_t kalos_crc_moved(uint64_t crc,
                                                                                uint32_t k) {
  __m128i product =
      _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)crc), _mm_cvtsi32_si128((int)k), 0);
  return _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

// The CRC instruction takes three cycles and one can start in each: three streams of `step` bytes
// side by side, joined by moving the first over two steps and the second over one.
__attribute__((target("sse4.2,pclmul"))) static inline uint64_t kalos_crc_three(
    uint64_t c, const uint8_t* p, size_t step, uint32_t k1, uint32_t k2) {
  uint64_t c1 = 0, c2 = 0, word;
  for (size_t i = 0; i < step; i += 8) {
    memcpy(&word, p + i, 8);
    c = _mm_crc32_u64(c, word);
    memcpy(&word, p + step + i, 8);
    c1 = _mm_crc32_u64(c1, word);
    memcpy(&word, p + 2 * step + i, 8);
    c2 = _mm_crc32_u64(c2, word);
  }
  return kalos_crc_moved(c, k2) ^ kalos_crc_moved(c1, k1) ^ c2;
}

#define KALOS_CRC_SHORT 64u
#define KALOS_CRC_LONG 1024u
__attribute__((target("sse4.2,pclmul"))) static uint32_t kalos_crc32c_clmul(uint32_t crc,
                                                                            const void* data,
                                                                            size_t n) {
  const uint8_t* p = (const uint8_t*)data;
  uint64_t c = (uint32_t)~crc;
  for (; n >= 3 * KALOS_CRC_LONG; n -= 3 * KALOS_CRC_LONG, p += 3 * KALOS_CRC_LONG)
    c = kalos_crc_three(c, p, KALOS_CRC_LONG, 0x170076fau, 0xa51b6135u);
  for (; n >= 3 * KALOS_CRC_SHORT; n -= 3 * KALOS_CRC_SHORT, p += 3 * KALOS_CRC_SHORT)
    c = kalos_crc_three(c, p, KALOS_CRC_SHORT, 0x9e4addf8u, 0x0d3b6092u);
  return kalos_crc32c_sse42(~(uint32_t)c, p, n);
}
#endif

// CRC32C of n bytes, continued from crc (0 to begin).
static inline uint32_t kalos_crc32c(uint32_t crc, const void* data, size_t n) {
#if defined(__x86_64__)
  if (n >= 3 * KALOS_CRC_SHORT && __builtin_cpu_supports("pclmul") &&
      __builtin_cpu_supports("sse4.2"))
    return kalos_crc32c_clmul(crc, data, n);
  if (__builtin_cpu_supports("sse4.2")) return kalos_crc32c_sse42(crc, data, n);
#endif
  return kalos_crc32c_portable(crc, data, n);
}

// Multiply and fold, the step of wyhash (public domain, Wang Yi).
static inline uint64_t kalos_mix(uint64_t a, uint64_t b) {
  __uint128_t m = (__uint128_t)a * b;
  return (uint64_t)m ^ (uint64_t)(m >> 64);
}

static inline uint64_t kalos_hash_bytes(uint64_t h, const void* data, size_t n) {
  const uint8_t* p = (const uint8_t*)data;
  uint64_t word;
  h = kalos_mix(h ^ 0xa0761d6478bd642fULL ^ n, 0xe7037ed1a0b428dbULL);
  for (; n >= 8; n -= 8, p += 8) {
    memcpy(&word, p, 8);
    h = kalos_mix(h ^ word, 0x8ebc6af09c88c6e3ULL);
  }
  word = 0;
  memcpy(&word, p, n);
  return kalos_mix(h ^ word, 0x589965cc75374cc3ULL);
}

// Keyed hash of a slot's identity. The key is the store's salt, so that a stranger cannot choose
// names that collide; equal hashes are told apart by the names themselves. Never 0.
static inline uint64_t kalos_hash_name(uint64_t salt, uint32_t kind, const void* tenant,
                                       size_t tenant_len, const void* name, size_t name_len) {
  uint64_t h = kalos_hash_bytes(salt ^ kind, tenant, tenant_len);
  h = kalos_hash_bytes(h, name, name_len);
  return h ? h : 1;
}

// 48 bits of value with 16 bits of check over value and context. Never 0 and never ~0.
static inline uint64_t kalos_seal(uint64_t value, uint64_t context) {
  uint64_t pair[2] = {value, context};
  uint64_t check = (kalos_crc32c(0x6b616c6f, pair, 16) & 0x7fff) | 0x8000;
  if (check == 0xffff) check = 0xfffe;
  return (check << 48) | value;
}

// 1 and the value, or 0 where the word does not prove itself.
static inline int kalos_unseal(uint64_t word, uint64_t context, uint64_t* value) {
  *value = word & (((uint64_t)1 << 48) - 1);
  return kalos_seal(*value, context) == word;
}

#endif  // KALOS_CHECKS_H
