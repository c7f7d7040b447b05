// kalos_row_norms: for rows [begin, end) a float that is at least the row's norm, and above it by
// less than 2^-14 of it. Where that does not hold the norm is below 2^-56 or infinite.
//   args.rows   rows of dim elements (float32 or float16), stride_nbytes apart   device
//   args.norms  float by row                                                     device
// Grid: any. Block: KALOS_NORMS_BLOCK. Shared memory: none. Bound: the rows at the device's
// bandwidth. kalos_tensor.cuh tells from the norms how far its first look at a row may be off.
#include "kalos_recall.cuh"

template <bool HALF>
__device__ __forceinline__ float sum_of_squares(const char* row, uint32_t dim) {
  constexpr uint32_t EACH = HALF ? 8 : 4;
  float sum = 0.0f;
  for (uint32_t d = threadIdx.x % KALOS_WARP * EACH; d < dim; d += KALOS_WARP * EACH) {
    float x[EACH];
    widen<HALF>(kalos_load_once((const uint4*)(row + (uint64_t)d * (HALF ? 2 : 4))), x);
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  }
#pragma unroll
  for (uint32_t step = KALOS_WARP / 2; step; step /= 2)
    sum = __fadd_rn(sum, __shfl_xor_sync(KALOS_ALL_LANES, sum, step));
  return sum;
}

extern "C" __global__ void __launch_bounds__(KALOS_NORMS_BLOCK)
    kalos_row_norms(const __grid_constant__ kalos_row_norms_args args) {
  constexpr uint32_t WARPS = KALOS_NORMS_BLOCK / KALOS_WARP;
  const uint64_t stride = (uint64_t)gridDim.x * WARPS;
  for (uint64_t row = args.begin + (uint64_t)blockIdx.x * WARPS + threadIdx.x / KALOS_WARP;
       row < args.end; row += stride) {
    const char* at = (const char*)args.rows + row * args.stride_nbytes;
    const float sum =
        args.half ? sum_of_squares<true>(at, args.dim) : sum_of_squares<false>(at, args.dim);
    if (threadIdx.x % KALOS_WARP == 0) ((float*)args.norms)[row] = kalos_norm_above(sum);
  }
}
