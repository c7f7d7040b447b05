// One GPU as Kalos holds it: the primary context, modules, memory. Plain C and C++, no Python and
// no GIL, so that the end of an exported array may come on any thread, after everything else.
// Every holder counts; the last one gives the context back. A process that was forked off never
// calls the driver: what it holds is left alone.
#ifndef KALOS_GPU_H
#define KALOS_GPU_H

#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include "_driver.h"

#define KALOS_CU_NOT_INITIALIZED 3
// The two streams that need no creation.
#define KALOS_CU_STREAM_LEGACY ((kalos_cu_handle)0x1)
#define KALOS_CU_STREAM_PER_THREAD ((kalos_cu_handle)0x2)

// What is counted, for tests and for `Device.counts`.
enum {
  KALOS_GPU_DEVICE_ALLOCATIONS,
  KALOS_GPU_DEVICE_NBYTES,  // allocated now
  KALOS_GPU_PINNED_ALLOCATIONS,
  KALOS_GPU_PINNED_NBYTES,  // allocated now
  KALOS_GPU_LAUNCHES,
  KALOS_GPU_COPIES,
  KALOS_GPU_COUNTS
};

typedef struct kalos_gpu {
  const kalos_driver* driver;
  kalos_cu_handle context;
  kalos_cu_handle stream;    // set-up, zero fills, batches; waits for no other stream by itself
  kalos_cu_handle* modules;  // unloaded at the end
  uint32_t num_modules;
  kalos_cu_device device;
  int32_t ordinal;
  pid_t pid;                          // of the process that opened it
  uint32_t refs;                      // atomic
  uint64_t counts[KALOS_GPU_COUNTS];  // atomic
} kalos_gpu;

static inline void kalos_gpu_count(kalos_gpu* gpu, int what, uint64_t by) {
  __atomic_fetch_add(&gpu->counts[what], by, __ATOMIC_RELAXED);
}

static inline int kalos_gpu_is_here(const kalos_gpu* gpu) { return gpu->pid == getpid(); }

// Make the context current until kalos_gpu_leave; the caller's own comes back then. May be nested.
static inline kalos_cu_result kalos_gpu_enter(const kalos_gpu* gpu) {
  if (!kalos_gpu_is_here(gpu)) return KALOS_CU_NOT_INITIALIZED;
  return gpu->driver->ctx_push(gpu->context);
}

static inline void kalos_gpu_leave(const kalos_gpu* gpu) {
  kalos_cu_handle context;
  gpu->driver->ctx_pop(&context);
}

// ---- Memory: each enters the context by itself ------------------------------------------------
static inline kalos_cu_result kalos_gpu_alloc(kalos_gpu* gpu, kalos_cu_ptr* address,
                                              size_t nbytes) {
  kalos_cu_result code = kalos_gpu_enter(gpu);
  if (code) return code;
  code = gpu->driver->mem_alloc(address, nbytes);
  kalos_gpu_leave(gpu);
  if (code) return code;
  kalos_gpu_count(gpu, KALOS_GPU_DEVICE_ALLOCATIONS, 1);
  kalos_gpu_count(gpu, KALOS_GPU_DEVICE_NBYTES, nbytes);
  return 0;
}

static inline void kalos_gpu_free(kalos_gpu* gpu, kalos_cu_ptr address, size_t nbytes) {
  if (!address || kalos_gpu_enter(gpu)) return;
  gpu->driver->mem_free(address);
  kalos_gpu_leave(gpu);
  kalos_gpu_count(gpu, KALOS_GPU_DEVICE_NBYTES, (uint64_t)0 - nbytes);
}

static inline void kalos_gpu_free_pinned(kalos_gpu* gpu, void* memory, size_t nbytes) {
  if (!memory || kalos_gpu_enter(gpu)) return;
  gpu->driver->host_free(memory);
  kalos_gpu_leave(gpu);
  kalos_gpu_count(gpu, KALOS_GPU_PINNED_NBYTES, (uint64_t)0 - nbytes);
}

// Pinned host memory that every context sees; `mapped` is its address on the device.
static inline kalos_cu_result kalos_gpu_pin(kalos_gpu* gpu, void** memory, kalos_cu_ptr* mapped,
                                            size_t nbytes) {
  kalos_cu_result code = kalos_gpu_enter(gpu);
  if (code) return code;
  code = gpu->driver->host_alloc(memory, nbytes, KALOS_CU_HOST_PORTABLE | KALOS_CU_HOST_DEVICEMAP);
  if (code == 0) {
    kalos_gpu_count(gpu, KALOS_GPU_PINNED_ALLOCATIONS, 1);
    kalos_gpu_count(gpu, KALOS_GPU_PINNED_NBYTES, nbytes);
    code = gpu->driver->host_pointer(mapped, *memory, 0);
    if (code) {
      kalos_gpu_free_pinned(gpu, *memory, nbytes);
      *memory = NULL;
    }
  }
  kalos_gpu_leave(gpu);
  return code;
}

// ---- Work: between kalos_gpu_enter and kalos_gpu_leave ----------------------------------------
static inline kalos_cu_result kalos_gpu_launch_2d(kalos_gpu* gpu, kalos_cu_handle function,
                                                  unsigned blocks_x, unsigned blocks_y,
                                                  unsigned threads, unsigned shared_nbytes,
                                                  kalos_cu_handle stream, void* args) {
  void* params[1] = {args};
  kalos_gpu_count(gpu, KALOS_GPU_LAUNCHES, 1);
  return gpu->driver->launch(function, blocks_x, blocks_y, 1, threads, 1, 1, shared_nbytes, stream,
                             params, NULL);
}

static inline kalos_cu_result kalos_gpu_launch(kalos_gpu* gpu, kalos_cu_handle function,
                                               unsigned blocks, unsigned threads,
                                               unsigned shared_nbytes, kalos_cu_handle stream,
                                               void* args) {
  return kalos_gpu_launch_2d(gpu, function, blocks, 1, threads, shared_nbytes, stream, args);
}

static inline kalos_cu_result kalos_gpu_to_device(kalos_gpu* gpu, kalos_cu_ptr to, const void* from,
                                                  size_t nbytes, kalos_cu_handle stream) {
  kalos_gpu_count(gpu, KALOS_GPU_COPIES, 1);
  return nbytes ? gpu->driver->copy_to_device(to, from, nbytes, stream) : 0;
}

static inline kalos_cu_result kalos_gpu_to_host(kalos_gpu* gpu, void* to, kalos_cu_ptr from,
                                                size_t nbytes, kalos_cu_handle stream) {
  kalos_gpu_count(gpu, KALOS_GPU_COPIES, 1);
  return nbytes ? gpu->driver->copy_to_host(to, from, nbytes, stream) : 0;
}

static inline kalos_cu_result kalos_gpu_copy(kalos_gpu* gpu, kalos_cu_ptr to, kalos_cu_ptr from,
                                             size_t nbytes, kalos_cu_handle stream) {
  kalos_gpu_count(gpu, KALOS_GPU_COPIES, 1);
  return nbytes ? gpu->driver->copy_on_device(to, from, nbytes, stream) : 0;
}

// ---- Beginning and end ------------------------------------------------------------------------
static inline void kalos_gpu_ref(kalos_gpu* gpu) {
  __atomic_fetch_add(&gpu->refs, 1, __ATOMIC_RELAXED);
}

// Streams and modules before the context they live in. At the process's end the driver may be gone
// already; its refusals then change nothing.
static inline void kalos_gpu_unref(kalos_gpu* gpu) {
  if (!gpu || __atomic_sub_fetch(&gpu->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
  if (gpu->context && kalos_gpu_enter(gpu) == 0) {
    if (gpu->stream) {
      gpu->driver->stream_synchronize(gpu->stream);
      gpu->driver->stream_destroy(gpu->stream);
    }
    for (uint32_t i = 0; i < gpu->num_modules; ++i) gpu->driver->module_unload(gpu->modules[i]);
    kalos_gpu_leave(gpu);
    gpu->driver->ctx_release(gpu->device);
  }
  free(gpu->modules);
  free(gpu);
}

// An entry for a GPU that kalos_gpu_start has still to open. NULL: no memory.
static inline kalos_gpu* kalos_gpu_new(const kalos_driver* driver, int32_t ordinal,
                                       uint32_t max_modules) {
  kalos_gpu* gpu = (kalos_gpu*)calloc(1, sizeof *gpu);
  kalos_cu_handle* modules = (kalos_cu_handle*)calloc(max_modules + 1, sizeof *modules);
  if (!gpu || !modules) {
    free(gpu);
    free(modules);
    return NULL;
  }
  gpu->driver = driver;
  gpu->modules = modules;
  gpu->ordinal = ordinal;
  gpu->pid = getpid();
  gpu->refs = 1;
  return gpu;
}

// Retain the primary context and make the stream. What succeeded before a failure is given back by
// kalos_gpu_unref.
static inline kalos_cu_result kalos_gpu_start(kalos_gpu* gpu) {
  kalos_cu_result code = gpu->driver->device_get(&gpu->device, gpu->ordinal);
  if (code == 0) code = gpu->driver->ctx_retain(&gpu->context, gpu->device);
  if (code) {
    gpu->context = NULL;
    return code;
  }
  code = kalos_gpu_enter(gpu);
  if (code) return code;
  code = gpu->driver->stream_create(&gpu->stream, KALOS_CU_STREAM_NON_BLOCKING, 0);
  if (code) gpu->stream = NULL;
  kalos_gpu_leave(gpu);
  return code;
}

#endif  // KALOS_GPU_H
