// The CUDA driver's C entry points that Kalos calls, and a table of them that is filled at run
// time. Types and constants are those of cuda.h (CUDA Driver API reference, 12.0 and later); they
// are declared here so that building needs no CUDA toolkit.
#ifndef KALOS_DRIVER_H
#define KALOS_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int kalos_cu_result;  // 0: success
typedef int kalos_cu_device;
typedef uint64_t kalos_cu_ptr;
typedef struct kalos_cu_opaque* kalos_cu_handle;  // context, stream, event, module, function
typedef unsigned long long kalos_cu_allocation;   // CUmemGenericAllocationHandle

#define KALOS_CU_NOT_READY 600
#define KALOS_CU_OUT_OF_MEMORY 2

#define KALOS_CU_STREAM_NON_BLOCKING 1u
#define KALOS_CU_EVENT_DISABLE_TIMING 2u
#define KALOS_CU_HOST_PORTABLE 1u
#define KALOS_CU_HOST_DEVICEMAP 2u
#define KALOS_CU_REGISTER_PORTABLE 1u
#define KALOS_CU_REGISTER_DEVICEMAP 2u
#define KALOS_CU_REGISTER_READ_ONLY 8u

#define KALOS_CU_MEM_PINNED 1           // CU_MEM_ALLOCATION_TYPE_PINNED
#define KALOS_CU_MEM_DEVICE 1           // CU_MEM_LOCATION_TYPE_DEVICE
#define KALOS_CU_MEM_FILE_DESCRIPTOR 1  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
#define KALOS_CU_MEM_READ_WRITE 3       // CU_MEM_ACCESS_FLAGS_PROT_READWRITE

typedef struct kalos_cu_location {
  int type;
  int id;
} kalos_cu_location;

typedef struct kalos_cu_mem_prop {  // CUmemAllocationProp
  int type;
  int handle_types;
  kalos_cu_location location;
  void* win32;
  struct {
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
} kalos_cu_mem_prop;

typedef struct kalos_cu_mem_access {  // CUmemAccessDesc
  kalos_cu_location location;
  int flags;
} kalos_cu_mem_access;

// X(member, symbol, parameters). The symbol is what cuGetProcAddress is asked for; it gives the
// newest variant (_v2) that CUDA 12.0 knows.
#define KALOS_CU_FUNCTIONS(X)                                                                     \
  X(ctx_push, "cuCtxPushCurrent", (kalos_cu_handle))                                              \
  X(ctx_pop, "cuCtxPopCurrent", (kalos_cu_handle*))                                               \
  X(ctx_retain, "cuDevicePrimaryCtxRetain", (kalos_cu_handle*, kalos_cu_device))                  \
  X(ctx_release, "cuDevicePrimaryCtxRelease", (kalos_cu_device))                                  \
  X(ctx_synchronize, "cuCtxSynchronize", (void))                                                  \
  X(ctx_priorities, "cuCtxGetStreamPriorityRange", (int*, int*))                                  \
  X(device_get, "cuDeviceGet", (kalos_cu_device*, int))                                           \
  X(device_attribute, "cuDeviceGetAttribute", (int*, int, kalos_cu_device))                       \
  X(mem_info, "cuMemGetInfo", (size_t*, size_t*))                                                 \
  X(mem_alloc, "cuMemAlloc", (kalos_cu_ptr*, size_t))                                             \
  X(mem_free, "cuMemFree", (kalos_cu_ptr))                                                        \
  X(host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned))                                     \
  X(host_free, "cuMemFreeHost", (void*))                                                          \
  X(host_register, "cuMemHostRegister", (void*, size_t, unsigned))                                \
  X(host_unregister, "cuMemHostUnregister", (void*))                                              \
  X(host_pointer, "cuMemHostGetDevicePointer", (kalos_cu_ptr*, void*, unsigned))                  \
  X(copy_to_device, "cuMemcpyHtoDAsync", (kalos_cu_ptr, const void*, size_t, kalos_cu_handle))    \
  X(copy_to_host, "cuMemcpyDtoHAsync", (void*, kalos_cu_ptr, size_t, kalos_cu_handle))            \
  X(copy_on_device, "cuMemcpyDtoDAsync", (kalos_cu_ptr, kalos_cu_ptr, size_t, kalos_cu_handle))   \
  X(fill_bytes, "cuMemsetD8Async", (kalos_cu_ptr, unsigned char, size_t, kalos_cu_handle))        \
  X(stream_create, "cuStreamCreateWithPriority", (kalos_cu_handle*, unsigned, int))               \
  X(stream_destroy, "cuStreamDestroy", (kalos_cu_handle))                                         \
  X(stream_synchronize, "cuStreamSynchronize", (kalos_cu_handle))                                 \
  X(stream_query, "cuStreamQuery", (kalos_cu_handle))                                             \
  X(stream_wait, "cuStreamWaitEvent", (kalos_cu_handle, kalos_cu_handle, unsigned))               \
  X(stream_write, "cuStreamWriteValue32", (kalos_cu_handle, kalos_cu_ptr, uint32_t, unsigned))    \
  X(event_create, "cuEventCreate", (kalos_cu_handle*, unsigned))                                  \
  X(event_destroy, "cuEventDestroy", (kalos_cu_handle))                                           \
  X(event_record, "cuEventRecord", (kalos_cu_handle, kalos_cu_handle))                            \
  X(event_query, "cuEventQuery", (kalos_cu_handle))                                               \
  X(event_synchronize, "cuEventSynchronize", (kalos_cu_handle))                                   \
  X(module_load, "cuModuleLoadData", (kalos_cu_handle*, const void*))                             \
  X(module_unload, "cuModuleUnload", (kalos_cu_handle))                                           \
  X(module_function, "cuModuleGetFunction", (kalos_cu_handle*, kalos_cu_handle, const char*))     \
  X(function_set, "cuFuncSetAttribute", (kalos_cu_handle, int, int))                              \
  X(launch, "cuLaunchKernel",                                                                     \
    (kalos_cu_handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,       \
     kalos_cu_handle, void**, void**))                                                            \
  X(vm_granularity, "cuMemGetAllocationGranularity", (size_t*, const kalos_cu_mem_prop*, int))    \
  X(vm_reserve, "cuMemAddressReserve", (kalos_cu_ptr*, size_t, size_t, kalos_cu_ptr, uint64_t))   \
  X(vm_free, "cuMemAddressFree", (kalos_cu_ptr, size_t))                                          \
  X(vm_create, "cuMemCreate", (kalos_cu_allocation*, size_t, const kalos_cu_mem_prop*, uint64_t)) \
  X(vm_release, "cuMemRelease", (kalos_cu_allocation))                                            \
  X(vm_map, "cuMemMap", (kalos_cu_ptr, size_t, size_t, kalos_cu_allocation, uint64_t))            \
  X(vm_unmap, "cuMemUnmap", (kalos_cu_ptr, size_t))                                               \
  X(vm_access, "cuMemSetAccess", (kalos_cu_ptr, size_t, const kalos_cu_mem_access*, size_t))      \
  X(vm_export, "cuMemExportToShareableHandle", (void*, kalos_cu_allocation, int, uint64_t))       \
  X(error_name, "cuGetErrorName", (kalos_cu_result, const char**))

typedef struct kalos_driver {
#define KALOS_CU_MEMBER(member, symbol, parameters) kalos_cu_result(*member) parameters;
  KALOS_CU_FUNCTIONS(KALOS_CU_MEMBER)
#undef KALOS_CU_MEMBER
} kalos_driver;

#define KALOS_CU_SYMBOL(member, symbol, parameters) symbol,
static const char* const kalos_driver_symbols[] = {KALOS_CU_FUNCTIONS(KALOS_CU_SYMBOL)};
#undef KALOS_CU_SYMBOL
#define KALOS_DRIVER_COUNT (sizeof(kalos_driver_symbols) / sizeof(kalos_driver_symbols[0]))

// The table as an array of addresses, in the order of the symbols.
static inline void kalos_driver_set(kalos_driver* driver, size_t place, uintptr_t address) {
  ((uintptr_t*)(void*)driver)[place] = address;
}

#endif  // KALOS_DRIVER_H
