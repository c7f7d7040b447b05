// simt_cuda.h: CUDA's language and built-in functions for a source that g++ compiles.
//
// A generated file (helpers/emulated_cuda.py) defines KALOS_SIMT_SECTION, the linker section of the
// source's shared variables, includes this, and then the source within an unnamed namespace: what
// lies in a named section must not be shared with other sources.
#ifndef KALOS_SIMT_CUDA_H
#define KALOS_SIMT_CUDA_H

#include <stdio.h>

#include "simt.h"

#define KALOS_EMULATED 1
#define __CUDACC__ 1
#define __CUDA_ARCH__ 900

#define __host__
#define __device__
#define __global__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(nbytes) __attribute__((aligned(nbytes)))
// In a block the storage of a shared variable is the function's own, in a section that the launch
// fills anew for each block. `extern __shared__ T name[];` is rewritten by the generator.
#define __shared__ static __attribute__((section(KALOS_SIMT_SECTION)))

static const int warpSize __attribute__((unused)) = KALOS_SIMT_WARP;

#include "simt_math.h"
#include "simt_warp.h"

#endif  // KALOS_SIMT_CUDA_H
