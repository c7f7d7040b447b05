// test_batch_bounds: the bounds of kalos_tensor.cuh, of every row for up to 16 queries.
#include "kalos_bounds.cuh"

struct test_bounds_args {
  uint64_t rows, lengths, queries, lower, upper;  // lower, upper: float [num_rows][num_queries]
  uint32_t dim, metric, half, num_rows, num_queries, reserved;
};

template <bool HALF>
__device__ __forceinline__ void bounds_of_tile(const test_bounds_args& args, uint32_t tile) {
  constexpr uint32_t MULTIPLIES = HALF ? 2 : 1;
  const uint32_t lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const float* lengths = (const float*)args.lengths;
  float norms[2], sums[2][4] = {};
  for (uint32_t q = 0; q < 16; ++q) {
    float norm = 0.0f;
    if (q < args.num_queries)
      norm = query_norm((const float*)args.queries + q * args.dim, args.dim);
    for (uint32_t n = 0; n < 2; ++n)
      if (n * 8 + g == q) norms[n] = norm_within(norm);
  }
  for (uint32_t at = 0; at < args.dim * (HALF ? 2 : 4); at += 64) {
    for (uint32_t m = 0; m < MULTIPLIES; ++m) {
      uint32_t words[2][2] = {};
      for (uint32_t i = 0; i < 2; ++i) {
        const uint64_t row = tile + g + 8 * i;
        if (row >= args.num_rows) continue;
        const uint64_t from = args.rows + row * args.dim * (HALF ? 2 : 4) + at + t * 16;
        row_words<HALF>((const uint4*)from, m, scale_word<HALF>(args.metric, lengths[row]),
                        words[i]);
      }
      for (uint32_t n = 0; n < 2; ++n) {
        const uint32_t q = n * 8 + g;
        uint32_t query[2];
        query_words<HALF>(
            q < args.num_queries ? (const float*)args.queries + q * args.dim : nullptr,
            at / 64 * MULTIPLIES + m, t, norms[n], query);
        kalos_multiply_tiles(sums[n], words[0][0], words[1][0], words[0][1], words[1][1], query[0],
                             query[1]);
      }
    }
  }
  for (uint32_t n = 0; n < 2; ++n) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = tile + g + i / 2 * 8, q = n * 8 + 2 * t + i % 2;
      const float norm = __shfl_sync(KALOS_ALL_LANES, norms[n], (2 * t + i % 2) * 4);
      if (row >= args.num_rows || q >= args.num_queries) continue;
      const score_terms mine = row_terms<HALF>(args.metric, args.dim, lengths[row]);
      const score_terms query = query_terms(args.metric, norm);
      const uint32_t place = row * args.num_queries + q;
      ((float*)args.lower)[place] = lower_bound(sums[n][i], mine, query);
      ((float*)args.upper)[place] = upper_bound(sums[n][i], mine, query);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32)
    test_batch_bounds(const __grid_constant__ test_bounds_args args) {
  if (args.half)
    bounds_of_tile<true>(args, blockIdx.x * 16);
  else
    bounds_of_tile<false>(args, blockIdx.x * 16);
}
