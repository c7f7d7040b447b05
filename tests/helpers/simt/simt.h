// simt.h: CUDA kernels on the CPU: how threads meet, how kernels are known and launched.
//
// A launch runs its blocks one after the other. The threads of a block are fibers of one operating
// system thread: each runs until it meets the others (__syncthreads, __syncwarp, a shuffle, a vote)
// or ends, so a kernel that forgets a barrier reads what nobody wrote yet. Shared memory is filled
// with KALOS_SIMT_POISON before each block for the same reason. Launches of a process exclude one
// another, since all state of the running thread is global.
// simt_cuda.h is what a source sees.
#ifndef KALOS_SIMT_H
#define KALOS_SIMT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#define KALOS_SIMT_WARP 32
#define KALOS_SIMT_POISON 0xCD

#include "simt_types.h"

// The running thread, as CUDA names it.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace kalos_simt {

// ---- Meeting others (simt.cpp) ------------------------------------------------------------------
enum class meeting : uint8_t {
  sync,
  shuffle,
  ballot,
  match,
  add,
  smallest,
  smallest_signed,
  largest,
  largest_signed,
  bits_and,
  bits_or,
  bits_xor,
};
enum class barrier : uint8_t { plain, any, all, count };

// Wait for the lanes of `mask` that have not ended. `from` is the lane whose value a shuffle wants.
uint64_t meet_warp(meeting kind, unsigned mask, uint64_t value, unsigned from);
int meet_block(barrier kind, int predicate);
unsigned lane();
[[noreturn]] void trap(const char* text);
// A place for each lane of the caller's warp, by which `exchange` shows where values lie.
const void** lane_places();

// Gives each lane the values of all 32, which must call it together: for what the tensor cores do.
template <class T>
static inline void exchange(const T& mine, T (&all)[KALOS_SIMT_WARP]) {
  const void** places = lane_places();
  places[lane()] = &mine;
  if ((unsigned)meet_warp(meeting::ballot, ~0u, 1, 0) != ~0u) trap("lanes of the warp have ended");
  for (unsigned i = 0; i < KALOS_SIMT_WARP; ++i) all[i] = *(const T*)places[i];
  meet_warp(meeting::sync, ~0u, 0, 0);  // the values lie on stacks that go on now
}

// Lets the other threads of the block run; a block in which all threads only pause is stuck.
void pause();
// A place where another thread may come in between when the order of threads is shuffled.
void maybe_pause();
char* dynamic_shared();

// ---- Kernels ------------------------------------------------------------------------------------
// What a source tells of a kernel when the library is loaded.
struct kernel {
  const char* name;
  void (*call)(const void* packed);               // the kernel as one thread runs it
  void (*pack)(void* packed, void** parameters);  // from cuLaunchKernel's array
  size_t packed_nbytes;
  size_t num_parameters;
  size_t (*parameter)(size_t place, size_t* nbytes);  // offset that CUDA gives the parameter
  char* shared_begin;
  char* shared_end;
  int max_threads;  // of __launch_bounds__
  kernel* next;
};
void add_kernel(kernel* one);

template <auto function>
struct entry;

template <class... P, void (*function)(P...)>
struct entry<function> {
  using arguments = std::tuple<P...>;

  static void call(const void* packed) { std::apply(function, *(const arguments*)packed); }
  template <size_t... I>
  static void fill(void* packed, void** parameters, std::index_sequence<I...>) {
    new (packed) arguments(*(const P*)parameters[I]...);
  }
  static void pack(void* packed, void** parameters) {
    fill(packed, parameters, std::index_sequence_for<P...>());
  }
  static size_t parameter(size_t place, size_t* nbytes) {
    const size_t sizes[] = {sizeof(P)...};
    const size_t aligns[] = {alignof(P)...};
    size_t offset = 0;
    for (size_t i = 0; i <= place; ++i) {
      offset = (offset + aligns[i] - 1) / aligns[i] * aligns[i];
      if (i < place) offset += sizes[i];
    }
    *nbytes = sizes[place];
    return offset;
  }
};

template <auto function>
struct registered {
  registered(const char* name, char* shared_begin, char* shared_end, int max_threads) {
    using one = entry<function>;
    using arguments = typename one::arguments;
    static_assert(std::is_trivially_destructible_v<arguments>, "kernel parameters are plain data");
    static kernel self = {
        name,           one::call,    one::pack,  sizeof(arguments), std::tuple_size_v<arguments>,
        one::parameter, shared_begin, shared_end, max_threads,       nullptr};
    add_kernel(&self);
  }
};

// ---- Launches (fake_launch.cpp calls them) ------------------------------------------------------
const kernel* find_kernel(const char* name);
struct shape {
  unsigned x, y, z;
};
// 0, or the CUDA error code of a launch that got stuck (702) or trapped (719); `text` says why.
int run(const kernel& one, shape grid, shape block, size_t dynamic_nbytes, const void* packed,
        const char** text);

}  // namespace kalos_simt

#endif  // KALOS_SIMT_H
