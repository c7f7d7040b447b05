// selftest.cu: small kernels by which test_simt.py looks at the emulator itself.
#include "kalos_device.cuh"

#define ALL 0xffffffffu

// ---- Warps --------------------------------------------------------------------------------------
// out uint32 [6][32]: a shuffle of the lane numbers by each way, with `width` lanes a part.
extern "C" __global__ void __launch_bounds__(32) test_shuffles(uint32_t* out, int width) {
  const uint32_t lane = threadIdx.x;
  out[lane] = __shfl_sync(ALL, lane, 3, width);
  out[32 + lane] = __shfl_up_sync(ALL, lane, 2, width);
  out[64 + lane] = __shfl_down_sync(ALL, lane, 2, width);
  out[96 + lane] = __shfl_xor_sync(ALL, lane, 5, width);
  out[128 + lane] = (uint32_t)(__shfl_sync(ALL, (uint64_t)lane << 40, 31 - (int)lane) >> 40);
  out[160 + lane] = (uint32_t)__shfl_xor_sync(ALL, (float)lane, 1);
}

// out uint32 [10][32]: votes and reductions of `in` among the even and the odd lanes.
extern "C" __global__ void __launch_bounds__(32) test_votes(const uint32_t* in, uint32_t* out) {
  const uint32_t lane = threadIdx.x, value = in[lane];
  const uint32_t mask = lane % 2 ? 0xaaaaaaaau : 0x55555555u;
  uint32_t* row = out + lane;
  if (lane % 2) {
    row[0] = __ballot_sync(mask, value & 1);
  } else {
    row[0] = __ballot_sync(mask, value & 2);
  }
  row[32] = (uint32_t)__any_sync(mask, value == 7);
  row[64] = (uint32_t)__all_sync(mask, value < 90);
  row[96] = __reduce_add_sync(mask, value);
  row[128] = __reduce_min_sync(mask, value);
  row[160] = (uint32_t)__reduce_max_sync(mask, -(int)value);
  row[192] = __reduce_xor_sync(mask, value);
  row[224] = __reduce_or_sync(mask, value);
  row[256] = __match_any_sync(mask, value % 4);
  row[288] = __shfl_sync(ALL, value, 40);
}

// ---- Blocks -------------------------------------------------------------------------------------
__device__ inline uint32_t warp_sum(uint32_t value) {
  for (unsigned step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
  return value;
}

// totals uint32 [blocks]: the sum of each block's share of `in`; result uint32 [1]: of all of them,
// made by the block that comes last. counter uint32 [1], zero.
extern "C" __global__ void __launch_bounds__(256)
    test_sum(const uint32_t* in, uint32_t count, uint32_t* totals, uint32_t* counter,
             uint32_t* result) {
  __shared__ uint32_t warps[8];
  __shared__ bool last;
  uint32_t sum = 0;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    sum += in[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; ++i) sum += warps[i];
    totals[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(counter, 1u) + 1 == gridDim.x;
  }
  __syncthreads();
  if (!last || threadIdx.x >= 32) return;
  sum = 0;
  for (uint32_t i = threadIdx.x; i < gridDim.x; i += 32) sum += totals[i];
  sum = warp_sum(sum);
  if (threadIdx.x == 0) *result = sum;
}

// out int [3][threads]: votes of a block; threads from `early` on have ended before.
extern "C" __global__ void __launch_bounds__(1024) test_block_votes(int* out, uint32_t early) {
  const uint32_t at = threadIdx.x + threadIdx.y * blockDim.x;
  if (at >= early) return;
  const uint32_t threads = blockDim.x * blockDim.y;
  out[at] = __syncthreads_count(at % 3 == 0);
  out[threads + at] = __syncthreads_or(at == 1);
  out[2 * threads + at] = __syncthreads_and(at != 1);
}

// out uint32 [threads]: the word that the next thread writes into dynamic shared memory, where
// `barrier` is 0 without waiting for it.
extern "C" __global__ void __launch_bounds__(256) test_neighbour(uint32_t* out, int barrier) {
  extern __shared__ uint32_t words[];
  words[threadIdx.x] = threadIdx.x;
  if (barrier) __syncthreads();
  out[threadIdx.x] = words[(threadIdx.x + 1) % blockDim.x];
}

// out uint32 [blocks]: a shared word that nobody wrote.
extern "C" __global__ void __launch_bounds__(32) test_unwritten(uint32_t* out) {
  __shared__ uint32_t word;
  out[blockIdx.x] = word;
  __syncthreads();
  word = blockIdx.x;
}

// words uint32 [8] and wide uint64 [4]: what each thread does to them is told apart at the end.
extern "C" __global__ void __launch_bounds__(256)
    test_atomics(uint32_t* words, uint64_t* wide, float* single) {
  const uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&words[0], at);
  atomicSub(&words[1], 1u);
  atomicMax(&words[2], at);
  atomicMin((int*)&words[3], -(int)at);
  atomicOr(&words[4], 1u << at % 32);
  atomicXor(&words[5], at);
  if (atomicCAS(&words[6], 0u, at + 1) == 0) atomicExch(&words[7], at + 1);
  atomicAdd(&wide[0], (uint64_t)at << 32);
  atomicMax(&wide[1], (uint64_t)at << 32);
  atomicAdd(single, 0.5f);
}

// order uint32 [blocks * threads]: which thread came when; counter uint32 [1], zero.
extern "C" __global__ void __launch_bounds__(64) test_order(uint32_t* order, uint32_t* counter) {
  order[atomicAdd(counter, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}

// ---- One thread ---------------------------------------------------------------------------------
// out uint32 [14][threads] of pairs in [2][threads].
extern "C" __global__ void __launch_bounds__(256) test_bits(const uint32_t* in, uint32_t* out) {
  const uint32_t count = blockDim.x, at = threadIdx.x;
  const uint32_t a = in[at], b = in[count + at];
  const uint64_t both = (uint64_t)b << 32 | a;
  out += at;
  out[0] = (uint32_t)__popc(a);
  out[count] = (uint32_t)__popcll(both);
  out[2 * count] = (uint32_t)__ffs((int)a);
  out[3 * count] = (uint32_t)__clz((int)a);
  out[4 * count] = (uint32_t)__clzll((int64_t)both);
  out[5 * count] = __brev(a);
  out[6 * count] = __byte_perm(a, b, 0x2541);
  out[7 * count] = __funnelshift_l(a, b, a);
  out[8 * count] = __funnelshift_r(a, b, a);
  out[9 * count] = (uint32_t)__dp4a((int)a, (int)b, 5);
  out[10 * count] = min(a, b);
  out[11 * count] = (uint32_t)max((int)a, (int)b);
  out[12 * count] = __float_as_uint(kalos_half_low(a));
  out[13 * count] = __float_as_uint(kalos_half_high(a));
}

// ---- What goes wrong ----------------------------------------------------------------------------
// One half of a warp waits for all of it, the other half for the block.
extern "C" __global__ void __launch_bounds__(64) test_stuck() {
  if (threadIdx.x % 32 < 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(32) test_endless(volatile uint32_t* word) {
  while (*word == 0) __nanosleep(100);
}

extern "C" __global__ void __launch_bounds__(32) test_wrong_mask() { __syncwarp(1u); }

extern "C" __global__ void __launch_bounds__(32) test_trap() { __trap(); }

// Accesses that are one element out where `at` is the number of threads.
extern "C" __global__ void __launch_bounds__(64) test_store(uint32_t* out, uint32_t at) {
  if (threadIdx.x == 0) out[at] = 1;
}

extern "C" __global__ void __launch_bounds__(64) test_shared_load(uint32_t* out, uint32_t at) {
  __shared__ uint32_t words[64];
  words[threadIdx.x] = threadIdx.x;
  __syncthreads();
  const uint32_t* first = words;
  out[threadIdx.x] = first[at];
}
