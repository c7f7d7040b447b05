// The score of a row, in four ways that give the same bits. DESIGN.md ("The score, defined") words
// the definition:
//   p[j] = +0; for d ascending with d % 32 == j: p[j] = fma(x[d], q[d], p[j])   (l2: fma(e, e,
//   p[j]), e = x - q) for h in 16, 8, 4, 2, 1: p[j] = p[j] + p[j + h] for j < h cosine: p[0] *
//   factor; ip: p[0]; l2: -p[0];  then -0 becomes +0 and NaN becomes -inf
// The vector ways fill the lanes behind the last dim with zeros. fma(0, 0, p) differs from p only
// where p is -0, and the sign of a zero cannot reach the result: it is +0 in the end whatever it
// was.
#ifndef KALOS_SCORE_H
#define KALOS_SCORE_H

#include "_recall.h"
#include "_rowmath.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define KALOS_X86 1
#else
#define KALOS_X86 0
#endif

// Scores of num_rows rows against num_queries queries: out[q * out_stride + r]. Queries are padded.
typedef void (*kalos_score_fn)(const void* const* rows, uint32_t num_rows, const float* queries,
                               uint32_t num_queries, uint32_t dim, float* out, uint32_t out_stride);

// ---- Reference ------------------------------------------------------------------------------
// Correctly rounded fmaf without the instruction: the product is exact in double; the sum is
// rounded to odd, after which rounding to float32 cannot round twice (Boldo and Melquiond, 2008).
static inline float kalos_fmaf(float x, float y, float z) {
  double product = (double)x * (double)y;
  double sum = product + (double)z;
  double part = sum - product;
  double error = (product - (sum - part)) + ((double)z - part);
  uint64_t bits;
  memcpy(&bits, &sum, 8);
  int finite = (bits & 0x7FF0000000000000u) != 0x7FF0000000000000u;
  if (finite && error != 0.0 && !(bits & 1u)) {
    bits += ((error > 0.0) == (sum > 0.0)) ? 1u : (uint64_t)-1;
    memcpy(&sum, &bits, 8);
  }
  return (float)sum;
}

static inline float kalos_row_value(const void* row, int half, uint32_t d) {
  return half ? kalos_half_to_float(((const uint16_t*)row)[d]) : ((const float*)row)[d];
}

static inline float kalos_tree(float* p) {
  for (int h = 16; h >= 1; h /= 2)
    for (int j = 0; j < h; ++j) p[j] = p[j] + p[j + h];
  return p[0];
}

static inline void kalos_score_plain(const void* const* rows, uint32_t num_rows,
                                     const float* queries, uint32_t num_queries, uint32_t dim,
                                     float* out, uint32_t out_stride, int l2, int half) {
  for (uint32_t q = 0; q < num_queries; ++q) {
    const float* query = queries + q * KALOS_PADDED_DIM(dim);
    for (uint32_t r = 0; r < num_rows; ++r) {
      float p[KALOS_SCORE_LANES] = {0};
      for (uint32_t d = 0; d < dim; ++d) {
        float x = kalos_row_value(rows[r], half, d);
        float* sum = &p[d % KALOS_SCORE_LANES];
        *sum = l2 ? kalos_fmaf(x - query[d], x - query[d], *sum) : kalos_fmaf(x, query[d], *sum);
      }
      out[q * out_stride + r] = kalos_tree(p);
    }
  }
}

// ---- The compiler's vectors: NEON on aarch64 ------------------------------------------------
#if defined(__FP_FAST_FMAF)
#define KALOS_HAVE_NATIVE 1
static inline void kalos_step_native(const float* x, const float* q, float* p, uint32_t n, int l2) {
  for (uint32_t j = 0; j < n; ++j) {
    float left = l2 ? x[j] - q[j] : x[j];
    p[j] = __builtin_fmaf(left, l2 ? left : q[j], p[j]);
  }
}

static inline void kalos_score_native(const void* const* rows, uint32_t num_rows,
                                      const float* queries, uint32_t num_queries, uint32_t dim,
                                      float* out, uint32_t out_stride, int l2, int half) {
  const uint32_t whole = dim / KALOS_SCORE_LANES * KALOS_SCORE_LANES;
  for (uint32_t q = 0; q < num_queries; ++q) {
    const float* query = queries + q * KALOS_PADDED_DIM(dim);
    for (uint32_t r = 0; r < num_rows; ++r) {
      float p[KALOS_SCORE_LANES] = {0}, wide[KALOS_SCORE_LANES];
      for (uint32_t d = 0; d < dim; d += KALOS_SCORE_LANES) {
        uint32_t n = d < whole ? KALOS_SCORE_LANES : dim - d;
        const float* x = (const float*)rows[r] + d;
        if (half) {
          for (uint32_t j = 0; j < n; ++j) wide[j] = kalos_row_value(rows[r], 1, d + j);
          x = wide;
        }
        if (n == KALOS_SCORE_LANES)
          kalos_step_native(x, query + d, p, KALOS_SCORE_LANES, l2);
        else
          kalos_step_native(x, query + d, p, n, l2);
      }
      out[q * out_stride + r] = kalos_tree(p);
    }
  }
}
#else
#define KALOS_HAVE_NATIVE 0
#endif

#if KALOS_X86
#include "_score_x86.h"
#endif

// ---- Choice ---------------------------------------------------------------------------------
#define KALOS_SCORE_VARIANT(name, body, attributes, l2, half)                                 \
  KALOS_NOINLINE attributes static void name(const void* const* rows, uint32_t num_rows,      \
                                             const float* queries, uint32_t num_queries,      \
                                             uint32_t dim, float* out, uint32_t out_stride) { \
    body(rows, num_rows, queries, num_queries, dim, out, out_stride, l2, half);               \
  }
#define KALOS_SCORE_VARIANTS(name, body, attributes)                                          \
  KALOS_SCORE_VARIANT(name##_dot_f32, body, attributes, 0, 0)                                 \
  KALOS_SCORE_VARIANT(name##_dot_f16, body, attributes, 0, 1)                                 \
  KALOS_SCORE_VARIANT(name##_l2_f32, body, attributes, 1, 0)                                  \
  KALOS_SCORE_VARIANT(name##_l2_f16, body, attributes, 1, 1)                                  \
  static const kalos_score_fn name##_fns[4] = {name##_dot_f32, name##_dot_f16, name##_l2_f32, \
                                               name##_l2_f16};

KALOS_SCORE_VARIANTS(kalos_reference, kalos_score_plain, )
#if KALOS_HAVE_NATIVE
KALOS_SCORE_VARIANTS(kalos_native, kalos_score_native, )
#endif
#if KALOS_X86
KALOS_SCORE_VARIANTS(kalos_avx2, kalos_score_avx2, KALOS_TARGET_AVX2)
KALOS_SCORE_VARIANTS(kalos_avx512, kalos_score_avx512, KALOS_TARGET_AVX512)
#endif

// 1 where this machine can run the level.
static int kalos_level_works(int level) {
  if (level == KALOS_LEVEL_REFERENCE) return 1;
  if (level == KALOS_LEVEL_NATIVE) return KALOS_HAVE_NATIVE;
#if KALOS_X86
  unsigned a, b, c = 0, d;
  int half = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1u);  // F16C
  int avx2 = half && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (level == KALOS_LEVEL_AVX2) return avx2;
  if (level == KALOS_LEVEL_AVX512) return avx2 && __builtin_cpu_supports("avx512f");
#endif
  return 0;
}

static int kalos_best_level(void) {
  static int best = KALOS_LEVEL_AUTO;  // every thread finds the same, so the race is harmless
  int level = __atomic_load_n(&best, __ATOMIC_RELAXED);
  if (level != KALOS_LEVEL_AUTO) return level;
  level = KALOS_LEVEL_AVX512;
  while (!kalos_level_works(level)) --level;
  __atomic_store_n(&best, level, __ATOMIC_RELAXED);
  return level;
}

// The level must work here (kalos_level_works) or be KALOS_LEVEL_AUTO.
static kalos_score_fn kalos_score_function(int level, int metric, int half) {
  int which = (metric == KALOS_METRIC_L2 ? 2 : 0) + (half ? 1 : 0);
  if (level == KALOS_LEVEL_AUTO) level = kalos_best_level();
#if KALOS_X86
  if (level == KALOS_LEVEL_AVX512) return kalos_avx512_fns[which];
  if (level == KALOS_LEVEL_AVX2) return kalos_avx2_fns[which];
#endif
#if KALOS_HAVE_NATIVE
  if (level == KALOS_LEVEL_NATIVE) return kalos_native_fns[which];
#endif
  return kalos_reference_fns[which];
}

// From sums to scores, in place. factors: one a row, read only for cosine.
KALOS_NOINLINE static void kalos_finish_scores(float* sums, const float* factors, uint32_t count,
                                               int metric) {
  for (uint32_t i = 0; i < count; ++i) {
    float score = sums[i];
    if (metric == KALOS_METRIC_COSINE) score = score * factors[i];
    if (metric == KALOS_METRIC_L2) score = -score;
    score = score + 0.0f;
    sums[i] = score == score ? score : -INFINITY;
  }
}

#endif  // KALOS_SCORE_H
