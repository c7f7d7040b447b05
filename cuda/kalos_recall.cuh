// kalos_recall.cuh: what the kernels of recall share: keys, lists of the best, the score of
// DESIGN.md, scopes. No kernel here.
//
// Eight lanes share a float32 row, four a float16 row: each lane owns 4 or 8 of the score's 32
// partial sums, so that a 16-byte load is one step of each, and the tree's first levels are
// shuffles. A lane group works on two rows at a time and hands each half of itself one of them when
// the tree begins.
#ifndef KALOS_RECALL_CUH
#define KALOS_RECALL_CUH

#include "kalos_device.cuh"

#define KALOS_SCORE_LANES 32u
#define KALOS_ROWS_TOGETHER 2u   // rows a lane group works on at a time
#define KALOS_STEPS_TOGETHER 4u  // steps of 32 dims whose loads are in flight together
#define KALOS_BLOCK_WARPS (KALOS_RECALL_BLOCK / KALOS_WARP)
#define KALOS_MANY_KEYS 2048u  // a block's buffer: at least 8 * KALOS_RECALL_BLOCK

// ---- Keys -------------------------------------------------------------------------------------
__device__ __forceinline__ uint64_t key_floor(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return (uint64_t)ordered << 32;
}

__device__ __forceinline__ uint64_t key_of(float score, uint32_t row) {
  return key_floor(score) | (uint32_t)~row;
}

// ---- Lists of a block ---------------------------------------------------------------------------
template <uint32_t KEYS>
struct key_buffer {
  uint64_t keys[KEYS];
  uint64_t bound;  // keys at or below it are of no use
  uint32_t count;
};
template <>
struct key_buffer<0> {};  // lists in registers need none

// The larger of two keys where `larger`, else the smaller one.
__device__ __forceinline__ uint64_t pick(uint64_t a, uint64_t b, bool larger) {
  return (a > b) == larger ? a : b;
}

// Steps of a bitonic sort within a warp, one key a lane, from `STEP` down to 1: the keys of places
// whose bit `width` is not set fall, the others rise.
template <uint32_t STEP>
__device__ __forceinline__ uint64_t sort_lanes(uint64_t key, uint32_t place, uint32_t width) {
#pragma unroll
  for (uint32_t step = STEP; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(KALOS_ALL_LANES, key, step);
    key = pick(key, other, ((place & width) == 0) == ((place & step) == 0));
  }
  return key;
}

// Sorts keys that come in any order, one a lane, up to runs of a warp.
__device__ __forceinline__ uint64_t sort_warp(uint64_t key, uint32_t place, uint32_t last_width) {
  key = sort_lanes<1>(key, place, 2);
  key = sort_lanes<2>(key, place, 4);
  key = sort_lanes<4>(key, place, 8);
  key = sort_lanes<8>(key, place, 16);
  return sort_lanes<16>(key, place, last_width);
}
__device__ __forceinline__ uint64_t sort_warp(uint64_t key) {
  return sort_warp(key, threadIdx.x % KALOS_WARP, 0);
}

// Sorts keys[0..EACH * block) so that the largest comes first: a bitonic sort whose steps below a
// warp's width are shuffles, those above a block's are between a thread's own keys. The whole
// block. Not inlined and hardly unrolled: it is called from many places, and compiling it counts.
template <uint32_t EACH>
__device__ __noinline__ void sort_keys(uint64_t* keys) {
  constexpr uint32_t BLOCK = KALOS_RECALL_BLOCK, SIZE = EACH * BLOCK;
  uint64_t own[EACH];  // key e is at place e * block + thread
#pragma unroll
  for (uint32_t e = 0; e < EACH; ++e) own[e] = keys[e * BLOCK + threadIdx.x];
#pragma unroll
  for (uint32_t e = 0; e < EACH; ++e)
    own[e] = sort_warp(own[e], e * BLOCK + threadIdx.x, KALOS_WARP);
#pragma unroll 1
  for (uint32_t width = 2 * KALOS_WARP; width <= SIZE; width *= 2) {
#pragma unroll
    for (uint32_t apart = EACH / 2; apart; apart /= 2) {
      if (apart * BLOCK >= width) continue;
#pragma unroll
      for (uint32_t e = 0; e < EACH; ++e) {
        if (e & apart) continue;
        const uint64_t a = own[e], b = own[e | apart];
        const bool falls = (e * BLOCK & width) == 0;
        own[e] = pick(a, b, falls);
        own[e | apart] = pick(a, b, !falls);
      }
    }
#pragma unroll 1
    for (uint32_t step = width < BLOCK ? width / 2 : BLOCK / 2; step >= KALOS_WARP; step /= 2) {
      __syncthreads();
#pragma unroll
      for (uint32_t e = 0; e < EACH; ++e) keys[e * BLOCK + threadIdx.x] = own[e];
      __syncthreads();
#pragma unroll
      for (uint32_t e = 0; e < EACH; ++e) {
        const uint32_t place = e * BLOCK + threadIdx.x;
        own[e] = pick(own[e], keys[place ^ step], ((place & width) == 0) == ((place & step) == 0));
      }
    }
#pragma unroll
    for (uint32_t e = 0; e < EACH; ++e)
      own[e] = sort_lanes<KALOS_WARP / 2>(own[e], e * BLOCK + threadIdx.x, width);
  }
  __syncthreads();
#pragma unroll
  for (uint32_t e = 0; e < EACH; ++e) keys[e * BLOCK + threadIdx.x] = own[e];
  __syncthreads();
}

// Adds a key where it is of use. There must be room.
template <uint32_t KEYS>
__device__ __forceinline__ void offer(key_buffer<KEYS>& buffer, uint64_t key) {
  if (key > buffer.bound) buffer.keys[atomicAdd(&buffer.count, 1u)] = key;
}

// Sorts the buffer and keeps the best k. The whole block.
template <uint32_t KEYS>
__device__ __noinline__ void settle(key_buffer<KEYS>& buffer, uint32_t k) {
  __syncthreads();
  const uint32_t count = buffer.count;
  uint32_t size = KALOS_RECALL_BLOCK;
  while (size < count) size *= 2;
  for (uint32_t i = count + threadIdx.x; i < size; i += KALOS_RECALL_BLOCK) buffer.keys[i] = 0;
  __syncthreads();
  switch (size / KALOS_RECALL_BLOCK) {
    case 1:
      sort_keys<1>(buffer.keys);
      break;
    case 2:
      sort_keys<2>(buffer.keys);
      break;
    case 4:
      sort_keys<4>(buffer.keys);
      break;
    default:
      sort_keys<8>(buffer.keys);
  }
  if (threadIdx.x == 0 && count >= k) {
    buffer.count = k;
    if (buffer.keys[k - 1] > buffer.bound) buffer.bound = buffer.keys[k - 1];
  }
  __syncthreads();
}

// ---- Lists of warps
// ------------------------------------------------------------------------------ A warp's best 32
// keys, one a lane, the best in lane 0. Enters the keys of those lanes whose key beats `bound`, the
// k-th; returns the new bound.
__device__ __forceinline__ uint64_t enter(uint64_t& list, uint64_t key, uint64_t bound,
                                          uint32_t k) {
  const uint32_t lane = threadIdx.x % KALOS_WARP;
  uint32_t left = __ballot_sync(KALOS_ALL_LANES, key > bound);
  while (left) {
    const uint64_t one = __shfl_sync(KALOS_ALL_LANES, key, __ffs(left) - 1);
    left &= left - 1;
    const uint64_t above = __shfl_up_sync(KALOS_ALL_LANES, list, 1);
    if (one > list) list = lane == 0 || above > one ? one : above;
  }
  const uint64_t kth = __shfl_sync(KALOS_ALL_LANES, list, k - 1);
  return kth > bound ? kth : bound;
}

// The best 32 of all warps' lists, in the first warp. The whole block.
__device__ inline uint64_t join_warps(uint64_t list) {
  __shared__ uint64_t given[KALOS_BLOCK_WARPS / 2][KALOS_WARP];
  const uint32_t lane = threadIdx.x % KALOS_WARP, warp = threadIdx.x / KALOS_WARP;
#pragma unroll
  for (uint32_t half = KALOS_BLOCK_WARPS / 2; half; half /= 2) {
    if (warp >= half && warp < 2 * half) given[warp - half][lane] = list;
    __syncthreads();
    if (warp < half) {
      // The larger of a falling and a rising list, place by place, are the best 32, bitonic.
      const uint64_t other = given[warp][KALOS_WARP - 1 - lane];
      list = sort_lanes<KALOS_WARP / 2>(other > list ? other : list, lane, 0);
    }
    __syncthreads();
  }
  return list;
}

// ---- Scores -------------------------------------------------------------------------------------
// What differs between row types: how many lanes share a row, and what they load.
template <bool HALF>
struct row_type {
  static constexpr uint32_t LANES = HALF ? 4 : 8;
  static constexpr uint32_t SUMS = KALOS_SCORE_LANES / LANES;  // of a lane, = elements of a load
  static constexpr uint32_t GROUPS = KALOS_WARP / LANES;
  static constexpr uint32_t TILE = GROUPS * KALOS_ROWS_TOGETHER;  // rows of a warp at a time
};

// One load into float32.
template <bool HALF>
__device__ __forceinline__ void widen(uint4 load, float* x) {
  const uint32_t words[4] = {load.x, load.y, load.z, load.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (HALF) {
      x[2 * i] = kalos_half_low(words[i]);
      x[2 * i + 1] = kalos_half_high(words[i]);
    } else {
      x[i] = __uint_as_float(words[i]);
    }
  }
}

template <bool L2>
__device__ __forceinline__ float step_sum(float x, float q, float sum) {
  if (!L2) return __fmaf_rn(x, q, sum);
  const float e = __fsub_rn(x, q);
  return __fmaf_rn(e, e, sum);
}

// One step of 32 dims of two rows for each query.
template <bool HALF, bool L2, uint32_t TOGETHER>
__device__ __forceinline__ void add_step(
    const uint4* loads, const float* query, uint32_t dim,
    float sums[KALOS_ROWS_TOGETHER][TOGETHER][row_type<HALF>::SUMS]) {
  constexpr uint32_t SUMS = row_type<HALF>::SUMS;
#pragma unroll
  for (uint32_t q = 0; q < TOGETHER; ++q) {
    float values[SUMS];
#pragma unroll
    for (uint32_t i = 0; i < SUMS; i += 4) {
      const float4 four = *(const float4*)(query + q * dim + i);
      values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
    }
#pragma unroll
    for (uint32_t u = 0; u < KALOS_ROWS_TOGETHER; ++u) {
      float x[SUMS];
      widen<HALF>(loads[u], x);
#pragma unroll
      for (uint32_t i = 0; i < SUMS; ++i)
        sums[u][q][i] = step_sum<L2>(x[i], values[i], sums[u][q][i]);
    }
  }
}

__device__ __forceinline__ float swap_lanes(float keep, float give, uint32_t mask) {
  return __fadd_rn(keep, __shfl_xor_sync(KALOS_ALL_LANES, give, mask));
}

// The tree over 32 partial sums of two rows that lie in the lanes of a group. Lanes whose bit
// LANES / 2 is set get the second row's, the others the first row's.
template <bool HALF>
__device__ __forceinline__ float tree(const float first[row_type<HALF>::SUMS],
                                      const float second[row_type<HALF>::SUMS]) {
  constexpr uint32_t SUMS = row_type<HALF>::SUMS, LANES = row_type<HALF>::LANES;
  const uint32_t lane = threadIdx.x % KALOS_WARP;
  const bool upper = lane & (LANES / 2), odd = lane & (LANES / 4);
  float p[SUMS];
#pragma unroll
  for (uint32_t i = 0; i < SUMS; ++i)  // h = 16
    p[i] = swap_lanes(upper ? second[i] : first[i], upper ? first[i] : second[i], LANES / 2);
  // h = 8: an odd lane goes on with the odd sums, an even one with the even sums.
#pragma unroll
  for (uint32_t i = 0; i < SUMS; i += 2)
    p[i / 2] = swap_lanes(odd ? p[i + 1] : p[i], odd ? p[i] : p[i + 1], LANES / 4);
  if (HALF) {
    // Eight sums 0, 2, 4, 6 (or 1, 3, 5, 7) are four here.
    p[0] = __fadd_rn(p[0], p[2]);  // h = 4
    p[1] = __fadd_rn(p[1], p[3]);
    p[0] = __fadd_rn(p[0], p[1]);  // h = 2
  } else {
    // Sums 0 and 2 (or 1 and 3), of which a pair of lanes holds two halves.
    const bool last = lane & 1;
    p[0] = swap_lanes(last ? p[1] : p[0], last ? p[0] : p[1], 1);       // h = 4
    p[0] = __fadd_rn(p[0], __shfl_xor_sync(KALOS_ALL_LANES, p[0], 1));  // h = 2
  }
  return __fadd_rn(p[0], __shfl_xor_sync(KALOS_ALL_LANES, p[0], LANES / 4));  // h = 1
}

__device__ __forceinline__ float finish(float sum, uint32_t metric, float factor) {
  float score = sum;
  if (metric == KALOS_METRIC_COSINE) score = __fmul_rn(sum, factor);
  if (metric == KALOS_METRIC_L2) score = -sum;
  score = __fadd_rn(score, 0.0f);
  return score == score ? score : -__uint_as_float(0x7f800000u);
}

// ---- Scopes -------------------------------------------------------------------------------------
__device__ __forceinline__ bool in_extents(const kalos_recall_scope& scope, uint32_t row) {
  bool inside = false;
  for (uint32_t i = 0; i < scope.num_extents; ++i)
    inside |= row >= scope.extents[i].begin && row < scope.extents[i].end;
  return inside;
}

__device__ __forceinline__ bool bit_of(uint64_t bitmap, uint32_t row) {
  return ((const uint32_t*)bitmap)[row / 32] >> (row % 32) & 1u;
}

#endif  // KALOS_RECALL_CUH
