// kalos_bounds.cuh: scores from the tensor cores, and how far off they may be. No kernel here.
//
// mma adds up 16 columns at a time. Which columns these are does not matter, if rows and queries have
// the same: so the 16 bytes of a row that a lane loads are its share of one multiply (float32) or of
// two (float16), and nothing is moved between lanes.
#ifndef KALOS_BOUNDS_CUH
#define KALOS_BOUNDS_CUH

#include "kalos_recall.cuh"

// ---- How far off the tensor cores are ------------------------------------------------------------
// Let x be a row, q a query as prepared, D dims, u = 2^-24. N >= |x| and M >= |q| are the norms that
// stand here, 2^-56 <= N, M <= 2^62 (row_terms and query_terms take larger ones for infinite: then
// nothing is known of the row or the query, and the bounds are infinite). By Cauchy and Schwarz, sums
// of |x_d q_d| are at most N M.
//
// 1. Operands. x' = 2^a x and q' = 2^b q are scaled so that N' = 2^a N and M' = 2^b M lie in
//    [2^12, 2^13), and rounded to float16: an element above 2^-14 errs by 2^-11 of itself, one below
//    by at most 2^-14, even if the device takes it for zero. Together, as vectors, by
//    2^-11 N' + 2^-14 sqrt(D) <= r N', r = 2^-11 + 2^-20 (D <= 4096, so 2^-14 sqrt(D) <= 2^-8).
//    A float16 row is scaled exactly, but for elements below 2^-14: r = 2^-20. (Its a is at most 15;
//    where that leaves N' < 2^12, all elements are multiples of 2^-9 and exact.)
//    So |x'q' - x^q^| <= (r_x + r_q + r_x r_q) N' M' <= (2^-10 + 2^-18) N' M' for float32 rows and
//    (2^-11 + 2^-18) N' M' for float16 rows.
// 2. Tensor cores. Products are exact. Of what is added at a time, each term is cut to a last place of
//    2^-23 of the largest term or better, and a sum again. Of 16 columns there are at most 16 products,
//    4 intermediate sums and 4 of these cut again (devices differ in how many they add at a time: see
//    Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, and Khattak and
//    Mikaitis, Accurate models of NVIDIA tensor cores, arXiv 2512.07004): 24 cuts of 2^-23 S, S the
//    sum of |x^_d q^_d| <= (1 + r)^2 N' M'. Here they count as 40 such: D / 16 steps err by at most
//    1.25 D 2^-22 S, and 1.29 D 2^-22 N' M' covers what the errors add to S.
// 3. The score as defined: |s - x q| <= (D / 32 + 6) u 1.01 N M <= (D 2^-28 + 2^-21) N M: D / 32 fused
//    steps and 5 additions, in gradual underflow, which adds less than 2^-137 <= 2^-23 * 2^-112.
// 4. Roundings of what is computed from the sums and the bounds here: fewer than 8 of u (N M).
// Together, for dot products: |s - s~| <= C N M,
//    C = (2^-10 or 2^-11) + 2^-17 + 21 D 2^-26.
// cosine: both sides times the factor f. f is rounded from 1 / |x|, so N = 1 / f (1 + 2^-16) will do;
//    f = 0 gives the score 0, and C N M f = 0.
// l2: s = -(|x|^2 + |q|^2 - 2 x q) and s~ = 2 x q~ - |x|^2 - |q|^2, where |x|^2 lies between
//    N^2 (1 - 2^-13) and N^2, or below 2^-112. The score's own error is at most (D / 32 + 9) u of
//    |x - q|^2 <= 2 (N^2 + M^2), so below 2^-15.8 (N^2 + M^2). Hence
//    s <= 2 x q~ + 2 C N M - (N^2 + M^2) (1 - 2^-12) + 2^-110 and
//    s >= 2 x q~ - 2 C N M - (N^2 + M^2) (1 + 2^-12) - 2^-110.
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

// ---- Operands ------------------------------------------------------------------------------------
// The power of two for a row's elements, as `row_words` takes it.
template <bool HALF>
__device__ __forceinline__ uint32_t scale_word(uint32_t metric, float length) {
  const int exponent = row_scale<HALF>(row_norm(metric, length));
  if (HALF) return (uint32_t)(exponent + 15) * 0x04000400u;
  return __float_as_uint(power_of_two(exponent));
}

// A lane's 16 bytes of a row: two words a multiply, of which one holds columns 0 and 1 of those that
// `query_words` gives for it, and the other columns 2 and 3.
template <bool HALF>
__device__ __forceinline__ void row_words(uint4 load, uint32_t scale, uint32_t* words) {
  if constexpr (HALF) {
    words[0] = kalos_multiply_halves(load.x, scale);
    words[1] = kalos_multiply_halves(load.y, scale);
    words[2] = kalos_multiply_halves(load.z, scale);
    words[3] = kalos_multiply_halves(load.w, scale);
  } else {
    const float factor = __uint_as_float(scale);
    words[0] = kalos_pack_halves(__fmul_rn(__uint_as_float(load.x), factor),
                                 __fmul_rn(__uint_as_float(load.y), factor));
    words[1] = kalos_pack_halves(__fmul_rn(__uint_as_float(load.z), factor),
                                 __fmul_rn(__uint_as_float(load.w), factor));
  }
}

// The share of lane `quarter` of four in a multiply, of one query; zeros where there is none.
template <bool HALF>
__device__ __forceinline__ void query_words(const float* query, uint32_t multiply,
                                            uint32_t quarter, float norm, uint32_t* words) {
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
