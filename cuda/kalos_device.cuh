// kalos_device.cuh: what the kernels share. Everything here is CUDA C++ that NVRTC compiles without
// a header of the toolkit; tests compile the same kernels for the CPU with an emulator that gives
// the same names.
#ifndef KALOS_DEVICE_CUH
#define KALOS_DEVICE_CUH

#include "kalos_launch.h"

#define KALOS_WARP 32u
#define KALOS_ALL_LANES 0xffffffffu

#ifndef KALOS_EMULATED
// A load that does not stay in the L1 cache: rows are read once.
__device__ __forceinline__ uint4 kalos_load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Memory that the host or another process may write while the kernel reads it.
__device__ __forceinline__ uint4 kalos_load_shared_memory(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Visible to the host after everything that this thread ordered before it.
__device__ __forceinline__ void kalos_publish(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Adds one and returns what was there; orders what came before it in the block and what comes
// after.
__device__ __forceinline__ uint32_t kalos_count_up(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// The shared memory that the launch asked for.
extern __shared__ uint4 kalos_dynamic_memory[];
template <class T>
__device__ __forceinline__ T* kalos_dynamic_shared() {
  return (T*)kalos_dynamic_memory;
}

// float16 to float32, exact, subnormals kept.
__device__ __forceinline__ float kalos_half_low(uint32_t pair) {
  float f;
  asm("{.reg .f16 h, g; mov.b32 {h, g}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(pair));
  return f;
}
__device__ __forceinline__ float kalos_half_high(uint32_t pair) {
  float f;
  asm("{.reg .f16 h, g; mov.b32 {h, g}, %1; cvt.f32.f16 %0, g;}" : "=f"(f) : "r"(pair));
  return f;
}

// Two float32 to float16, rounded to nearest even; the first in the low half.
__device__ __forceinline__ uint32_t kalos_pack_halves(float low, float high) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
  asm("{.reg .f16 h, g; cvt.rn.f16.f32 h, %1; cvt.rn.f16.f32 g, %2; mov.b32 %0, {h, g};}"
      : "=r"(pair)
      : "f"(low), "f"(high));
#endif
  return pair;
}

// Products of two pairs of float16, rounded to nearest even.
__device__ __forceinline__ uint32_t kalos_multiply_halves(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

// sums += rows [16][16] * queries [16][8] in float16, sums in float32, as fragments of the warp.
// Lane 4 * g + t gives: rows g and g + 8 at columns 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9 (a2,
// a3); of query g the same columns (b0, b1). It gets: row g of queries 2t, 2t + 1, then row g + 8.
__device__ __forceinline__ void kalos_multiply_tiles(float* sums, uint32_t a0, uint32_t a1,
                                                     uint32_t a2, uint32_t a3, uint32_t b0,
                                                     uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%8}, "
      "{%0, %1, %2, %3};\n\t"
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%6, %7}, {%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Copies into shared memory that go on while the thread does other work: 16 bytes that are read
// once, or 4 bytes. Devices before sm_80 copy at once.
__device__ __forceinline__ void kalos_copy_16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(shared)),
               "l"(global)
               : "memory");
#else
  *(uint4*)shared = kalos_load_once((const uint4*)global);
#endif
}
__device__ __forceinline__ void kalos_copy_4(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
      "l"(global)
      : "memory");
#else
  *(uint32_t*)shared = *(const uint32_t*)global;
#endif
}
// Ends a group of copies; waits until at most `left` of this thread's newest groups are not done.
__device__ __forceinline__ void kalos_copies_end() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <uint32_t left>
__device__ __forceinline__ void kalos_copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#endif
}

// A word that other blocks change meanwhile.
__device__ __forceinline__ uint32_t kalos_peek(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
#endif

// From a sum of at most 4,096 squares in float32, in chains of at most 128: a norm that is at least
// the true one and above it by less than 2^-14 of it. Each step errs by 2^-24, the sum by less than
// 2^-16.9, its root by less than 2^-17.8. Where squares underflow, norms below 2^-56 are not told
// from one another; who uses them takes 2^-56 for them.
__device__ __forceinline__ float kalos_norm_above(float sum_of_squares) {
  return __fmul_rn(__fsqrt_rn(sum_of_squares), 1.0f + 1.0f / 32768.0f);
}

// Whether this block is the last of `blocks` to come here; the counter is zero again then. What the
// others wrote before is visible to the last one, and to the host once it publishes: a release is
// cumulative over what barrier and acquire have ordered before it (PTX ISA, "Memory Consistency
// Model").
__device__ inline bool kalos_last_block(uint32_t* counter, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = kalos_count_up(counter) + 1 == blocks;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

#endif  // KALOS_DEVICE_CUH
