// kalos_bounds.cuh: scores from the tensor cores, and how far off they may be. No kernel here.
//
// mma adds up 16 columns at a time. Which columns these are does not matter, if rows and queries
// have the same: so the 16 bytes of a row that a lane loads are its share of one multiply (float32)
// or of two (float16), and nothing is moved between lanes.
#ifndef KALOS_BOUNDS_CUH
#define KALOS_BOUNDS_CUH

#include "kalos_recall.cuh"

// ---- How far off the tensor cores are -----------------------------------------------------------
// Let x be a row, q a query as prepared, D <= 4096 dims, u = 2^-24. N >= |x| and M >= |q| are the
// norms that stand here, 2^-56 <= N, M <= 2^62. (Larger ones count as infinite: then nothing is
// known of the row or the query, and its bounds are infinite or NaN.) By Cauchy and Schwarz, sums
// of |x_d q_d| are at most N M.
//
// 1. Operands. x' = 2^a x and q' = 2^b q are scaled so that N' = 2^a N and M' = 2^b M lie in
//    [2^12, 2^13), and rounded to float16, x^ and q^. An element of at least 2^-14 errs by 2^-11 of
//    itself, a smaller one by 2^-14, even if the device takes it for zero. As vectors they err by
//    2^-11 N' + 2^-14 sqrt(D) <= r N' with r = 2^-11 + 2^-20. A float16 row is scaled exactly, but
//    for elements below 2^-14: r = 2^-20. (Its a is at most 15. From a = 10 on all elements are
//    multiples of 2^-14, and exact, so N' may be smaller there.) Hence
//    |x' q' - x^ q^| <= (r_x + r_q + r_x r_q) N' M' <= R N' M',
//    R = 2^-10 + 2^-18 for float32 rows, 2^-11 + 2^-18 for float16 rows.
// 2. Tensor cores. Products are exact. Terms that are added at a time are cut to a last place of
//    2^-23 of the largest of them or better, and so is their sum. In 16 columns there are 16
//    products, at most 4 sums that go on and 4 new ones: 24 cuts of at most 2^-23 S, where S is the
//    sum of |x^_d q^_d| <= (1 + r)^2 N' M'. (How many are added at a time differs; none is known
//    to cut more: Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330; Khattak
//    and Mikaitis, Accurate models of NVIDIA tensor cores, arXiv 2512.07004.) Here 40 cuts are
//    counted: D / 16 steps err by 1.25 D 2^-22 S, and with what errors add to S by
//    1.29 D 2^-22 N' M'.
// 3. The score as defined. D / 32 fused steps and 5 additions err by (D / 32 + 6) u N M, which is
//    below (D 2^-28 + 2^-21) N M. Gradual underflow adds less than 2^-137 <= 2^-23 N M.
// 4. Roundings of the approximate score and of the bounds themselves: fewer than 8 u N M.
//
// Together, for the dot product: |s - s~| <= C N M with
//    C = (float32 rows: 2^-10, float16 rows: 2^-11) + 2^-17 + 21 D 2^-26.
// cosine: the same times the row's factor f. As f is 1 / |x|, rounded, N = 1 / f (1 + 2^-16) will
//    do. Where f = 0 the score is 0, and so are s~ and C N M f.
// l2: s = -(|x|^2 + |q|^2 - 2 x q). |x|^2 lies between N^2 (1 - 2^-13) and N^2, or both are below
//    2^-112; the same for |q|^2. The score's own error is at most (D / 32 + 9) u |x - q|^2, below
//    2^-15 (N^2 + M^2). Hence, with p = x q as approximated,
//    s <= 2 p + 2 C N M - (N^2 + M^2) (1 - 2^-12) + 2^-110 and
//    s >= 2 p - 2 C N M - (N^2 + M^2) (1 + 2^-12) - 2^-110.
template <bool HALF>
__device__ __forceinline__ float error_factor(uint32_t dim) {
  return __fmaf_rn((float)dim, 21.0f * 0x1p-26f, (HALF ? 0x1p-11f : 0x1p-10f) + 0x1p-17f);
}

#define KALOS_INFINITY __uint_as_float(0x7f800000u)

// A norm as the proof wants it.
__device__ __forceinline__ float norm_within(float norm) {
  if (!(norm <= 0x1p62f)) return KALOS_INFINITY;
  return norm < 0x1p-56f ? 0x1p-56f : norm;
}

// The exponent a, or b: 2^12 <= 2^a norm < 2^13. Any for an infinite norm.
__device__ __forceinline__ int scale_of(float norm) {
  if (!(norm <= 0x1p62f)) return -50;
  return 12 + 127 - (int)(__float_as_uint(norm) >> 23);
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

// What the bounds of a score take from its row, and from its query.
struct score_terms {
  float scale;  // sums * row.scale * query.scale is the approximate score
  float error;  // row.error * query.error is how far off it may be
  float upper;  // row.upper + query.upper is added for the upper bound
  float lower;
};

__device__ __forceinline__ float add_square(float norm, float around) {
  return __fmul_rn(-__fmul_rn(norm, norm), around);
}

template <bool HALF>
__device__ __forceinline__ int row_scale(float norm) {
  const int scale = scale_of(norm);
  if (!HALF) return scale;
  return scale > 15 ? 15 : scale < -14 ? -14 : scale;
}

__device__ __forceinline__ float row_norm(uint32_t metric, float length) {
  if (metric != KALOS_METRIC_COSINE) return norm_within(length);
  return length == 0.0f ? 0x1p-56f : norm_within(__fmul_rn(__frcp_rn(length), 1.0f + 0x1p-16f));
}

template <bool HALF>
__device__ __forceinline__ score_terms row_terms(uint32_t metric, uint32_t dim, float length) {
  const float norm = row_norm(metric, length);
  score_terms terms = {power_of_two(-row_scale<HALF>(norm)),
                       __fmul_rn(error_factor<HALF>(dim), norm), 0.0f, 0.0f};
  if (metric == KALOS_METRIC_COSINE) {
    terms.scale = __fmul_rn(terms.scale, length);
    terms.error = __fmul_rn(terms.error, length);
  }
  if (metric == KALOS_METRIC_L2) {
    terms.scale = __fmul_rn(terms.scale, 2.0f);
    terms.error = __fmul_rn(terms.error, 2.0f);
    terms.upper = __fadd_rn(add_square(norm, 1.0f - 0x1p-12f), 0x1p-110f);
    terms.lower = __fsub_rn(add_square(norm, 1.0f + 0x1p-12f), 0x1p-110f);
  }
  return terms;
}

__device__ __forceinline__ score_terms query_terms(uint32_t metric, float norm) {
  score_terms terms = {power_of_two(-scale_of(norm)), norm, 0.0f, 0.0f};
  if (metric == KALOS_METRIC_L2) {
    terms.upper = add_square(norm, 1.0f - 0x1p-12f);
    terms.lower = add_square(norm, 1.0f + 0x1p-12f);
  }
  return terms;
}

// NaN where nothing is known: as an upper bound it counts as infinite, as a lower one as none.
__device__ __forceinline__ float upper_bound(float sum, const score_terms& row,
                                             const score_terms& query) {
  const float score = __fmul_rn(__fmul_rn(sum, row.scale), query.scale);
  return __fadd_rn(__fadd_rn(score, __fmul_rn(row.error, query.error)),
                   __fadd_rn(row.upper, query.upper));
}
__device__ __forceinline__ float lower_bound(float sum, const score_terms& row,
                                             const score_terms& query) {
  const float score = __fmul_rn(__fmul_rn(sum, row.scale), query.scale);
  return __fadd_rn(__fsub_rn(score, __fmul_rn(row.error, query.error)),
                   __fadd_rn(row.lower, query.lower));
}

// ---- Operands -----------------------------------------------------------------------------------
// The power of two for a row's elements, as `row_words` takes it.
template <bool HALF>
__device__ __forceinline__ uint32_t scale_word(uint32_t metric, float length) {
  const int exponent = row_scale<HALF>(row_norm(metric, length));
  if (HALF) return (uint32_t)(exponent + 15) * 0x04000400u;
  return __float_as_uint(power_of_two(exponent));
}

// A lane's share of a multiply, of its 16 bytes of a row: one word holds columns 0 and 1 of those
// that `query_words` gives, the other columns 2 and 3.
template <bool HALF>
__device__ __forceinline__ void row_words(const uint4* from, uint32_t multiply, uint32_t scale,
                                          uint32_t* words) {
  if constexpr (HALF) {
    const uint2 load = ((const uint2*)from)[multiply];
    words[0] = kalos_multiply_halves(load.x, scale);
    words[1] = kalos_multiply_halves(load.y, scale);
  } else {
    const uint4 load = *from;
    const float factor = __uint_as_float(scale);
    words[0] = kalos_pack_halves(__fmul_rn(__uint_as_float(load.x), factor),
                                 __fmul_rn(__uint_as_float(load.y), factor));
    words[1] = kalos_pack_halves(__fmul_rn(__uint_as_float(load.z), factor),
                                 __fmul_rn(__uint_as_float(load.w), factor));
  }
}

// The share of lane `quarter` of four in a multiply, of one query; zeros where there is none.
template <bool HALF>
__device__ __forceinline__ void query_words(const float* query, uint32_t multiply, uint32_t quarter,
                                            float norm, uint32_t* words) {
  const uint32_t column =
      HALF ? multiply / 2 * 32 + quarter * 8 + multiply % 2 * 4 : multiply * 16 + quarter * 4;
  float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
  if (query) x = *(const float4*)(query + column);
  const float scale = power_of_two(scale_of(norm));
  words[0] = kalos_pack_halves(__fmul_rn(x.x, scale), __fmul_rn(x.y, scale));
  words[1] = kalos_pack_halves(__fmul_rn(x.z, scale), __fmul_rn(x.w, scale));
}

// At least the norm of a query; by a warp.
__device__ __forceinline__ float query_norm(const float* query, uint32_t dim) {
  float sum = 0.0f;
  for (uint32_t d = threadIdx.x % KALOS_WARP * 4; d < dim; d += KALOS_WARP * 4) {
    const float4 x = *(const float4*)(query + d);
    sum = __fmaf_rn(x.x, x.x, sum);
    sum = __fmaf_rn(x.y, x.y, sum);
    sum = __fmaf_rn(x.z, x.z, sum);
    sum = __fmaf_rn(x.w, x.w, sum);
  }
#pragma unroll
  for (uint32_t step = KALOS_WARP / 2; step; step /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(KALOS_ALL_LANES, sum, step));
  return kalos_norm_above(sum);
}

#endif  // KALOS_BOUNDS_CUH
