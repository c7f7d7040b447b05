// Vectors as they enter: exact half conversion, the norm, the factor of a stored row, the prepared
// query. Plain C and C++, no Python, no allocation; DESIGN.md ("The score, defined") words the
// definitions. Everything here runs once a row or once a query, so it is written to be the same on
// every machine before it is written to be fast.
#ifndef KALOS_ROWMATH_H
#define KALOS_ROWMATH_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kalos_layout.h"

#define KALOS_SCORE_LANES \
  32u  // partial sums of a score; prepared queries are padded to a multiple of it
#define KALOS_PADDED_DIM(dim) \
  (((uint64_t)(dim) + KALOS_SCORE_LANES - 1) / KALOS_SCORE_LANES * KALOS_SCORE_LANES)

// Arithmetic that stands between kalos_fp_enter and kalos_fp_leave is in functions of its own: the
// compiler knows nothing of the mode and may otherwise move it across.
#define KALOS_NOINLINE __attribute__((noinline))

#define KALOS_QUERY_ZERO (-2)  // cosine of a zero vector is not defined: nothing is recalled

// ---- Floating-point environment
// ----------------------------------------------------------------------- A library built with
// -ffast-math turns flush-to-zero on for the thread that loads it, and fesetround is per thread
// too. Scores may not depend on either, so every entry point runs between these two calls.
static inline uint64_t kalos_fp_enter(void) {
#if defined(__x86_64__)
  unsigned old = _mm_getcsr();
  _mm_setcsr(0x1F80u);  // all exceptions masked, round to nearest even, subnormals kept
  return old;
#elif defined(__aarch64__)
  uint64_t old, plain = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(old));
  __asm__ volatile("msr fpcr, %0" : : "r"(plain));
  return old;
#else
  return 0;
#endif
}

static inline void kalos_fp_leave(uint64_t old) {
#if defined(__x86_64__)
  _mm_setcsr((unsigned)old);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(old));
#else
  (void)old;
#endif
}

// ---- float16 --------------------------------------------------------------------------------
static inline float kalos_half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1Fu;
  uint32_t mantissa = half & 0x3FFu;
  uint32_t bits;
  float value;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in float32
    value = (float)mantissa * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7F800000u | (mantissa << 13);
  } else {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  }
  memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even; a magnitude of 65520 or more becomes infinity.
static inline uint16_t kalos_float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: counts of 2^-24
    uint32_t exponent = magnitude >> 23;
    if (exponent < 102u) return sign;  // below 2^-25
    uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
    uint32_t shift = 126u - exponent;
    uint32_t rounded = mantissa >> shift;
    uint32_t rest = mantissa & ((1u << shift) - 1u);
    uint32_t middle = 1u << (shift - 1u);
    rounded += rest > middle || (rest == middle && (rounded & 1u));
    return (uint16_t)(sign | rounded);
  }
  uint32_t odd = (magnitude >> 13) & 1u;
  return (uint16_t)(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

// ---- Norms
// -------------------------------------------------------------------------------------------- Sum
// of squares in double: the square of a float32 is exact there. Eight strided sums, then a tree.
KALOS_NOINLINE static double kalos_sum_of_squares(const float* row, uint64_t dim) {
  double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  uint64_t d = 0;
  for (; d + 8 <= dim; d += 8)
    for (int j = 0; j < 8; ++j) sums[j] += (double)row[d + j] * (double)row[d + j];
  for (; d < dim; ++d) sums[d & 7] += (double)row[d] * (double)row[d];
  for (int half = 4; half >= 1; half /= 2)
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

// What a dot product is multiplied with under cosine; 0 for a zero row. A row so short that the
// factor would overflow (norm below about 2.9e-39) counts as a zero row.
KALOS_NOINLINE static float kalos_factor_of(double sum_of_squares) {
  if (sum_of_squares == 0.0) return 0.0f;
  float factor = (float)(1.0 / sqrt(sum_of_squares));
  return factor <= 3.402823466e+38f ? factor : 0.0f;
}

// Index of the first value that is not finite, or -1.
static int64_t kalos_first_nonfinite(const float* values, uint64_t count) {
  uint64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    uint32_t bad = 0, bits[64];
    memcpy(bits, values + i, sizeof bits);
    for (int j = 0; j < 64; ++j) bad |= (bits[j] & 0x7F800000u) == 0x7F800000u;
    if (bad) break;
  }
  for (; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    if ((bits & 0x7F800000u) == 0x7F800000u) return (int64_t)i;
  }
  return -1;
}

KALOS_NOINLINE static int64_t kalos_round_row(const float* row, uint64_t dim, uint16_t* half,
                                              float* back) {
  for (uint64_t d = 0; d < dim; ++d) {
    half[d] = kalos_float_to_half(row[d]);
    back[d] = kalos_half_to_float(half[d]);
  }
  return kalos_first_nonfinite(back, dim);
}

// Check num_rows rows of dim values, give the factor of each row as it is stored, flag zero rows.
//   halves   NULL, or room for the rows rounded to float16; then factors are those of the rounded
//   rows scratch  dim floats, used only with halves factors, zero   one a row, either may be NULL
// Returns -1, or row * dim + column of the first value that is not finite once stored.
static int64_t kalos_check_rows(const float* rows, uint64_t num_rows, uint64_t dim,
                                uint16_t* halves, float* scratch, float* factors, uint8_t* zero) {
  uint64_t old = kalos_fp_enter();
  int64_t bad = -1;
  for (uint64_t r = 0; r < num_rows && bad < 0; ++r) {
    const float* row = rows + r * dim;
    bad = halves ? kalos_round_row(row, dim, halves + r * dim, scratch)
                 : kalos_first_nonfinite(row, dim);
    if (bad >= 0) {
      bad += (int64_t)(r * dim);
      break;
    }
    float factor = kalos_factor_of(kalos_sum_of_squares(halves ? scratch : row, dim));
    if (factors) factors[r] = factor;
    if (zero) zero[r] = factor == 0.0f;
  }
  kalos_fp_leave(old);
  return bad;
}

// The factor of a row as it is stored. Call between kalos_fp_enter and kalos_fp_leave.
static float kalos_stored_factor(const void* row, uint64_t dim, int half, float* scratch) {
  if (!half) return kalos_factor_of(kalos_sum_of_squares((const float*)row, dim));
  for (uint64_t d = 0; d < dim; ++d) scratch[d] = kalos_half_to_float(((const uint16_t*)row)[d]);
  return kalos_factor_of(kalos_sum_of_squares(scratch, dim));
}

// False where the norm is zero.
KALOS_NOINLINE static int kalos_normalise(const float* query, uint64_t dim, float* prepared) {
  double norm = sqrt(kalos_sum_of_squares(query, dim));
  if (norm == 0.0) return 0;
  for (uint64_t d = 0; d < dim; ++d) prepared[d] = (float)((double)query[d] / norm);
  return 1;
}

// Make the query that scans take: dim values (cosine: divided by the norm, rounded once), zeros
// behind them up to KALOS_PADDED_DIM. Returns -1 for a good query, KALOS_QUERY_ZERO, or the place
// of a value that is not finite.
static int64_t kalos_prepare_query(const float* query, uint64_t dim, int metric, float* prepared) {
  int64_t bad = kalos_first_nonfinite(query, dim);
  if (bad >= 0) return bad;
  uint64_t old = kalos_fp_enter();
  memset(prepared, 0, KALOS_PADDED_DIM(dim) * sizeof(float));
  if (metric == KALOS_METRIC_COSINE) {
    if (!kalos_normalise(query, dim, prepared)) bad = KALOS_QUERY_ZERO;
  } else {
    memcpy(prepared, query, dim * sizeof(float));
  }
  kalos_fp_leave(old);
  return bad;
}

#endif  // KALOS_ROWMATH_H
