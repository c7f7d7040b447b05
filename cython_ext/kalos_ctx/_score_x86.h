// AVX2 and AVX-512 sums for _score.h. Four rows at a time: one row's chain of fused multiply-adds
// waits four cycles a step, four rows keep the units busy, and their four trees share their
// shuffles.
#ifndef KALOS_SCORE_X86_H
#define KALOS_SCORE_X86_H

#define KALOS_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define KALOS_TARGET_AVX512 __attribute__((target("avx512f,avx2,fma,f16c")))
#define KALOS_INLINE static inline __attribute__((always_inline))
#define KALOS_UNROLL4 _Pragma("GCC unroll 4")  // else the sums live in memory and not in registers

// The last, partial stretch of a row, filled with zeros. n < 32 values from dim d on.
KALOS_INLINE const void* kalos_tail(const void* row, uint32_t d, uint32_t n, int half, void* room) {
  uint32_t size = half ? 2 : 4;
  memset(room, 0, KALOS_SCORE_LANES * size);
  memcpy(room, (const char*)row + (uint64_t)d * size, (uint64_t)n * size);
  return room;
}

// ---- AVX2 -----------------------------------------------------------------------------------
KALOS_TARGET_AVX2 KALOS_INLINE __m256 kalos_load8(const void* x, uint32_t j, int half) {
  if (half) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)x + j)));
  return _mm256_loadu_ps((const float*)x + j);
}

KALOS_TARGET_AVX2 KALOS_INLINE void kalos_step_avx2(const void* x, const float* q, __m256* p,
                                                    int l2, int half) {
  for (uint32_t i = 0; i < 4; ++i) {
    __m256 left = kalos_load8(x, 8 * i, half);
    __m256 right = _mm256_loadu_ps(q + 8 * i);
    if (l2) left = right = _mm256_sub_ps(left, right);
    p[i] = _mm256_fmadd_ps(left, right, p[i]);
  }
}

// Sums of two rows as far as eight partials each: 16 registers do not hold the 16 sums of four
// rows.
KALOS_TARGET_AVX2 KALOS_INLINE void kalos_pair_avx2(const void* a, const void* b,
                                                    const float* query, uint32_t dim, __m256* sums,
                                                    int l2, int half) {
  __m256 p[4], r[4];
  for (int i = 0; i < 4; ++i) p[i] = r[i] = _mm256_setzero_ps();
  uint32_t d = 0, size = half ? 2 : 4;
  for (; d + KALOS_SCORE_LANES <= dim; d += KALOS_SCORE_LANES) {
    kalos_step_avx2((const char*)a + (uint64_t)d * size, query + d, p, l2, half);
    kalos_step_avx2((const char*)b + (uint64_t)d * size, query + d, r, l2, half);
  }
  if (d < dim) {
    float room[KALOS_SCORE_LANES];
    kalos_step_avx2(kalos_tail(a, d, dim - d, half, room), query + d, p, l2, half);
    kalos_step_avx2(kalos_tail(b, d, dim - d, half, room), query + d, r, l2, half);
  }
  sums[0] = _mm256_add_ps(_mm256_add_ps(p[0], p[2]), _mm256_add_ps(p[1], p[3]));  // h = 16, then 8
  sums[1] = _mm256_add_ps(_mm256_add_ps(r[0], r[2]), _mm256_add_ps(r[1], r[3]));
}

KALOS_TARGET_AVX2 KALOS_INLINE __m128 kalos_four_avx2(const void* const* rows, const float* query,
                                                      uint32_t dim, int l2, int half) {
  __m256 s[4];
  kalos_pair_avx2(rows[0], rows[1], query, dim, s, l2, half);
  kalos_pair_avx2(rows[2], rows[3], query, dim, s + 2, l2, half);
  // h = 4: the upper half of each row onto its lower half; two rows a register.
  __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(s[0], s[1], 0x20),
                            _mm256_permute2f128_ps(s[0], s[1], 0x31));
  __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(s[2], s[3], 0x20),
                            _mm256_permute2f128_ps(s[2], s[3], 0x31));
  // h = 2: lanes become (a0+a2, a1+a3, c0+c2, c1+c3) and the same of b and d.
  __m256 z = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  __m256 sum = _mm256_add_ps(z, _mm256_permute_ps(z, 0xB1));  // h = 1
  __m128 acbd = _mm_shuffle_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1), 0x88);
  return _mm_permute_ps(acbd, 0xD8);
}

// ---- AVX-512 --------------------------------------------------------------------------------
KALOS_TARGET_AVX512 KALOS_INLINE __m512 kalos_load16(const void* x, uint32_t j, int half) {
  if (half) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)((const uint16_t*)x + j)));
  return _mm512_loadu_ps((const float*)x + j);
}

KALOS_TARGET_AVX512 KALOS_INLINE void kalos_step_avx512(const void* x, __m512 q0, __m512 q1,
                                                        __m512* p, int l2, int half) {
  __m512 x0 = kalos_load16(x, 0, half), x1 = kalos_load16(x, 16, half);
  if (l2) {
    x0 = q0 = _mm512_sub_ps(x0, q0);
    x1 = q1 = _mm512_sub_ps(x1, q1);
  }
  p[0] = _mm512_fmadd_ps(x0, q0, p[0]);
  p[1] = _mm512_fmadd_ps(x1, q1, p[1]);
}

KALOS_TARGET_AVX512 KALOS_INLINE __m128 kalos_tree_avx512(__m512 a, __m512 b, __m512 c, __m512 d) {
  // h = 8: two rows a register, then h = 4: one row a 128-bit lane.
  __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
  __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));  // h = 2
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));  // h = 1
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v));
}

KALOS_TARGET_AVX512 KALOS_INLINE __m128 kalos_four_avx512(const void* const* rows,
                                                          const float* query, uint32_t dim, int l2,
                                                          int half) {
  __m512 p[4][2];
  KALOS_UNROLL4 for (int r = 0; r < 4; ++r) p[r][0] = p[r][1] = _mm512_setzero_ps();
  uint32_t d = 0, size = half ? 2 : 4;
  for (; d + KALOS_SCORE_LANES <= dim; d += KALOS_SCORE_LANES) {
    __m512 q0 = _mm512_loadu_ps(query + d), q1 = _mm512_loadu_ps(query + d + 16);
    KALOS_UNROLL4 for (int r = 0; r < 4; ++r)
        kalos_step_avx512((const char*)rows[r] + (uint64_t)d * size, q0, q1, p[r], l2, half);
  }
  if (d < dim) {
    __m512 q0 = _mm512_loadu_ps(query + d), q1 = _mm512_loadu_ps(query + d + 16);
    float room[KALOS_SCORE_LANES];
    KALOS_UNROLL4 for (int r = 0; r < 4; ++r)
        kalos_step_avx512(kalos_tail(rows[r], d, dim - d, half, room), q0, q1, p[r], l2, half);
  }
  return kalos_tree_avx512(_mm512_add_ps(p[0][0], p[0][1]), _mm512_add_ps(p[1][0], p[1][1]),
                           _mm512_add_ps(p[2][0], p[2][1]),
                           _mm512_add_ps(p[3][0], p[3][1]));  // h = 16
}

// ---- Reading ahead
// ------------------------------------------------------------------------------------ Four rows at
// a time are four short streams, which the hardware's prefetcher loses at each row's end. Asking
// for the rows of a later group made one thread 1.2 to 1.35 times as fast at 128 and 384 float32,
// out of DRAM. Rows of more than 3 KiB are long enough for the hardware, and eight of them would
// not fit its first level.
#define KALOS_LINE 64u
KALOS_INLINE void kalos_read_ahead(const void* const* rows, uint32_t r, uint32_t num_rows,
                                   uint32_t nbytes) {
  uint32_t ahead = nbytes <= 1536 ? 8 : 4;
  if (nbytes > 3072) return;
  for (uint32_t i = r + ahead; i < r + ahead + 4 && i < num_rows; ++i)
    for (uint32_t b = 0; b < nbytes; b += KALOS_LINE)
      _mm_prefetch((const char*)rows[i] + b, _MM_HINT_T0);
}

// ---- Rows by four, queries inside: the rows of a group stay in the first-level cache for all
// queries ----
#define KALOS_SCORE_X86(name, four, attributes)                                               \
  attributes KALOS_INLINE void name(const void* const* rows, uint32_t num_rows,               \
                                    const float* queries, uint32_t num_queries, uint32_t dim, \
                                    float* out, uint32_t out_stride, int l2, int half) {      \
    for (uint32_t r = 0; r < num_rows; r += 4) {                                              \
      const void* group[4];                                                                   \
      kalos_read_ahead(rows, r, num_rows, dim * (half ? 2u : 4u));                            \
      for (uint32_t i = 0; i < 4; ++i) group[i] = rows[r + i < num_rows ? r + i : r];         \
      for (uint32_t q = 0; q < num_queries; ++q) {                                            \
        float sums[4];                                                                        \
        _mm_storeu_ps(sums, four(group, queries + q * KALOS_PADDED_DIM(dim), dim, l2, half)); \
        uint32_t n = num_rows - r < 4 ? num_rows - r : 4;                                     \
        memcpy(out + (uint64_t)q * out_stride + r, sums, n * sizeof(float));                  \
      }                                                                                       \
    }                                                                                         \
  }
KALOS_SCORE_X86(kalos_score_avx2, kalos_four_avx2, KALOS_TARGET_AVX2)
KALOS_SCORE_X86(kalos_score_avx512, kalos_four_avx512, KALOS_TARGET_AVX512)

#endif  // KALOS_SCORE_X86_H
