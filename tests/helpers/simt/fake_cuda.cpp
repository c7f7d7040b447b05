// fake_cuda.cpp: a libcuda.so.1 whose device is the emulator and whose device memory is the host's.
// Tests load it instead of the NVIDIA driver, so that cuda-python and Kalos run without a GPU.
//
// Environment, read when a call needs it:
//   KALOS_FAKE_VERSION=12020     what cuDriverGetVersion says (13000)
//   KALOS_FAKE_DEVICES=0         number of devices (1)
//   KALOS_FAKE_FAIL=S:N:C,...    the Nth call of symbol S, counted from 1, returns C; N = * for
//   all.
//                                C = -1: it returns 0 and does nothing. C = -719: it returns 0, and
//                                its stream fails with 719, as work that goes wrong later does
//   KALOS_FAKE_ATTRIBUTES=A=V,.. device attributes by number
//   KALOS_FAKE_LOG=path          calls per symbol are written there when the process ends
//   KALOS_FAKE_TRACE=1           each call goes to stderr, and each symbol that is not here
//   KALOS_FAKE_MEMORY=nbytes     memory of the device (2 GiB)
//   KALOS_FAKE_STRICT=1          the host cannot touch device memory
//   KALOS_FAKE_ASYNC=microseconds  streams work on threads of their own, each item after a pause
//   KALOS_FAKE_ORDER=forward | reverse | shuffled[:seed]   order of threads and blocks in a launch
// This file: entry points, versions, devices, contexts, names of errors.
#include "fake_cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>
#include <vector>

namespace kalos_fake {

entry* entries;
std::recursive_mutex lock;

namespace {

bool initialized;
uint64_t problems;
std::string failures;  // set by kalos_fake_fail, else the environment's

const char* environment(const char* name) {
  char full[64];
  snprintf(full, sizeof(full), "KALOS_FAKE_%s", name);
  return getenv(full);
}

// The code that the test asked for this call, or 0. Form: symbol:nth:code, joined by commas.
result wanted_failure(const char* name, uint64_t call) {
  const char* spec = failures.empty() ? environment("FAIL") : failures.c_str();
  const size_t length = strlen(name);
  while (spec && *spec) {
    if (!strncmp(spec, name, length) && spec[length] == ':') {
      const char* nth = spec + length + 1;
      const char* code = strchr(nth, ':');
      if (code && (*nth == '*' || strtoull(nth, nullptr, 10) == call)) return atoi(code + 1);
    }
    spec = strchr(spec, ',');
    if (spec) ++spec;
  }
  return kSuccess;
}

struct log_writer {
  ~log_writer() {
    const char* path = environment("LOG");
    FILE* file = path ? fopen(path, "w") : nullptr;
    if (!file) return;
    std::map<std::string, uint64_t> calls;
    for (const entry* one = entries; one; one = one->next) calls[one->name] += one->calls;
    for (const auto& [name, count] : calls) {
      if (count) fprintf(file, "%s %llu\n", name.c_str(), (unsigned long long)count);
    }
    fclose(file);
  }
} writer;

thread_local result late_failure;

}  // namespace

entry::entry(const char* name, void* address, int version, needs what)
    : name(name), address(address), version(version), what(what), next(entries) {
  entries = this;
}

bool entry::ends(result* code) {
  guard hold(lock);
  ++calls;
  if (setting("TRACE", 0)) fprintf(stderr, "fake cuda: %s\n", name);
  const result wanted = wanted_failure(name, calls);
  late_failure = wanted < -1 ? -wanted : kSuccess;
  *code = wanted == -1 ? (result)kSuccess : wanted;
  if (wanted >= -1 && wanted != 0) return true;
  *code = kNotInitialized;
  if (what != needs::nothing && !initialized) return true;
  *code = kInvalidContext;
  return what == needs::context && !current_context();
}

result take_late_failure() { return std::exchange(late_failure, kSuccess); }

void problem(const char* format, ...) {
  guard hold(lock);
  ++problems;
  va_list arguments;
  va_start(arguments, format);
  fputs("fake cuda: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

long setting(const char* name, long otherwise) {
  const char* text = environment(name);
  return text && *text ? strtol(text, nullptr, 0) : otherwise;
}

// ---- Devices ------------------------------------------------------------------------------------
int num_devices() { return (int)setting("DEVICES", 1); }

namespace {

const std::map<int, int>& attributes() {
  static const std::map<int, int> values = {
      {1, 1024},                                   // threads of a block
      {2, 1024},        {3, 1024},    {4, 64},     // of a block by axis
      {5, 2147483647},  {6, 65535},   {7, 65535},  // blocks of a grid by axis
      {8, 49152},                                  // shared memory of a block
      {9, 65536},                                  // constant memory
      {10, 32},                                    // lanes of a warp
      {11, 2147483647}, {12, 65536},  {13, 1980000}, {14, 512},
      {15, 1},          {16, 4},  // multiprocessors
      {19, 1},                    // maps host memory
      {31, 1},          {33, 1},      {36, 3201000}, {37, 6144},
      {38, 52428800},   {39, 2048},  // threads of a multiprocessor
      {40, 3},          {41, 1},     // unified addresses
      {75, 9},          {76, 0},     // compute capability
      {78, 1},                       // priorities of streams
      {79, 1},          {80, 1},      {81, 233472},  {82, 65536},
      {83, 1},          {89, 1},      {91, 1},   // host pointers serve for registered memory
      {95, 1},          {97, 232448},            // shared memory of a block that asks for it
      {99, 1},                                   // registers host memory
      {102, 1},                                  // virtual memory
      {103, 1},                                  // with file descriptors
      {106, 32},        {111, 1024},  {113, 1},  // registers read-only host memory
  };
  return values;
}

}  // namespace

result attribute_of(int attribute, int device, int* value) {
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  if (!value || attribute <= 0) return kInvalidValue;
  const auto found = attributes().find(attribute);
  *value = found == attributes().end() ? 0 : found->second;
  for (const char* spec = environment("ATTRIBUTES"); spec && *spec;) {
    char* end;
    if (strtol(spec, &end, 10) == attribute && *end == '=') *value = atoi(end + 1);
    spec = strchr(spec, ',');
    if (spec) ++spec;
  }
  return kSuccess;
}

// ---- Contexts -----------------------------------------------------------------------------------
struct context {
  int device;
  int retained;
  unsigned flags;
};

namespace {

context primary[8] = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {3, 0, 0},
                      {4, 0, 0}, {5, 0, 0}, {6, 0, 0}, {7, 0, 0}};
thread_local std::vector<context*> stack;

context* checked(kalos_cu_handle handle) {
  for (context& one : primary) {
    if ((void*)&one == (void*)handle && one.retained > 0) return &one;
  }
  return nullptr;
}

}  // namespace

context* current_context() {
  guard hold(lock);
  return stack.empty() || !stack.back() || !stack.back()->retained ? nullptr : stack.back();
}
int current_device() { return current_context()->device; }

}  // namespace kalos_fake

using namespace kalos_fake;

// ---- Entry points: start and look-up ------------------------------------------------------------
KALOS_FAKE(cuInit, , 0, nothing, (unsigned flags)) {
  KALOS_FAKE_ENTER(cuInit, );
  if (flags) return kInvalidValue;
  if (num_devices() <= 0) return kNoDevice;
  initialized = true;
  return kSuccess;
}

KALOS_FAKE(cuDriverGetVersion, , 0, nothing, (int* version)) {
  KALOS_FAKE_ENTER(cuDriverGetVersion, );
  if (!version) return kInvalidValue;
  *version = (int)setting("VERSION", 13000);
  return kSuccess;
}

// The newest variant that the caller's version knows. status: 0 found, 1 no such symbol.
static result look_up(const char* symbol, void** address, int version, int* status) {
  if (!symbol || !address) return kInvalidValue;
  const entry* best = nullptr;
  for (const entry* one = entries; one; one = one->next) {
    if (strcmp(one->name, symbol) || one->version > version) continue;
    if (!best || one->version >= best->version) best = one;
  }
  *address = best ? best->address : nullptr;
  if (status) *status = best ? 0 : 1;
  if (!best && setting("TRACE", 0)) fprintf(stderr, "fake cuda: no %s %d\n", symbol, version);
  return best ? kSuccess : kNotFound;
}

KALOS_FAKE(cuGetProcAddress, , 0, nothing,
           (const char* symbol, void** address, int version, uint64_t)) {
  KALOS_FAKE_ENTER(cuGetProcAddress, );
  return look_up(symbol, address, version, nullptr);
}

KALOS_FAKE(cuGetProcAddress, _v2, 12000, nothing,
           (const char* symbol, void** address, int version, uint64_t, int* status)) {
  KALOS_FAKE_ENTER(cuGetProcAddress, _v2);
  return look_up(symbol, address, version, status);
}

// Private tables of the driver. NVRTC asks for them while it compiles and goes on without.
KALOS_FAKE(cuGetExportTable, , 0, nothing, (const void** table, const void*)) {
  KALOS_FAKE_ENTER(cuGetExportTable, );
  if (table) *table = nullptr;
  return kNotFound;
}

// ---- Entry points: devices ----------------------------------------------------------------------
KALOS_FAKE(cuDeviceGetCount, , 0, init, (int* count)) {
  KALOS_FAKE_ENTER(cuDeviceGetCount, );
  if (!count) return kInvalidValue;
  *count = num_devices();
  return kSuccess;
}

KALOS_FAKE(cuDeviceGet, , 0, init, (kalos_cu_device * device, int ordinal)) {
  KALOS_FAKE_ENTER(cuDeviceGet, );
  if (ordinal < 0 || ordinal >= num_devices()) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

KALOS_FAKE(cuDeviceGetName, , 0, init, (char* name, int size, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceGetName, );
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  snprintf(name, (size_t)size, "Emulated GPU");
  return kSuccess;
}

KALOS_FAKE(cuDeviceGetUuid, _v2, 0, init, (unsigned char* uuid, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceGetUuid, _v2);
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  memcpy(uuid, "KALOS-EMULATED-", 15);
  uuid[15] = (unsigned char)device;
  return kSuccess;
}

KALOS_FAKE(cuDeviceGetPCIBusId, , 0, init, (char* text, int size, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceGetPCIBusId, );
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  snprintf(text, (size_t)size, "0000:%02x:00.0", device + 1);
  return kSuccess;
}

KALOS_FAKE(cuDeviceGetAttribute, , 0, init, (int* value, int attribute, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceGetAttribute, );
  return attribute_of(attribute, device, value);
}

KALOS_FAKE(cuDeviceTotalMem, _v2, 0, init, (size_t* nbytes, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceTotalMem, _v2);
  if (device < 0 || device >= num_devices()) return kInvalidDevice;
  *nbytes = (size_t)setting("MEMORY", 2l << 30);
  return kSuccess;
}

KALOS_FAKE(cuDeviceComputeCapability, , 0, init, (int* major, int* minor, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDeviceComputeCapability, );
  const result code = attribute_of(75, device, major);
  return code ? code : attribute_of(76, device, minor);
}

KALOS_FAKE(cuDeviceCanAccessPeer, , 0, init, (int* can, kalos_cu_device, kalos_cu_device)) {
  KALOS_FAKE_ENTER(cuDeviceCanAccessPeer, );
  *can = 0;
  return kSuccess;
}

// ---- Entry points: contexts ---------------------------------------------------------------------
KALOS_FAKE(cuDevicePrimaryCtxRetain, , 0, init, (kalos_cu_handle * out, kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDevicePrimaryCtxRetain, );
  guard hold(lock);
  if (device < 0 || device >= num_devices() || device >= 8) return kInvalidDevice;
  ++primary[device].retained;
  *out = (kalos_cu_handle)(void*)&primary[device];
  return kSuccess;
}

KALOS_FAKE(cuDevicePrimaryCtxRelease, _v2, 0, init, (kalos_cu_device device)) {
  KALOS_FAKE_ENTER(cuDevicePrimaryCtxRelease, _v2);
  {
    guard hold(lock);
    if (device < 0 || device >= num_devices() || device >= 8) return kInvalidDevice;
    if (!primary[device].retained) return kInvalidContext;
    if (--primary[device].retained > 0) return kSuccess;
  }
  // What was made in the context goes with it.
  drop_context_objects(device);
  free_context_memory(device);
  return kSuccess;
}

KALOS_FAKE(cuDevicePrimaryCtxGetState, , 0, init,
           (kalos_cu_device device, unsigned* flags, int* active)) {
  KALOS_FAKE_ENTER(cuDevicePrimaryCtxGetState, );
  guard hold(lock);
  if (device < 0 || device >= num_devices() || device >= 8) return kInvalidDevice;
  *flags = primary[device].flags;
  *active = primary[device].retained > 0;
  return kSuccess;
}

KALOS_FAKE(cuCtxPushCurrent, _v2, 0, init, (kalos_cu_handle one)) {
  KALOS_FAKE_ENTER(cuCtxPushCurrent, _v2);
  guard hold(lock);
  if (!checked(one)) return kInvalidContext;
  stack.push_back(checked(one));
  return kSuccess;
}

KALOS_FAKE(cuCtxPopCurrent, _v2, 0, init, (kalos_cu_handle * one)) {
  KALOS_FAKE_ENTER(cuCtxPopCurrent, _v2);
  if (stack.empty()) return kInvalidContext;
  if (one) *one = (kalos_cu_handle)(void*)stack.back();
  stack.pop_back();
  return kSuccess;
}

KALOS_FAKE(cuCtxSetCurrent, , 0, init, (kalos_cu_handle one)) {
  KALOS_FAKE_ENTER(cuCtxSetCurrent, );
  guard hold(lock);
  if (one && !checked(one)) return kInvalidContext;
  if (!stack.empty()) stack.pop_back();
  if (one) stack.push_back(checked(one));
  return kSuccess;
}

KALOS_FAKE(cuCtxGetCurrent, , 0, init, (kalos_cu_handle * one)) {
  KALOS_FAKE_ENTER(cuCtxGetCurrent, );
  *one = stack.empty() ? nullptr : (kalos_cu_handle)(void*)stack.back();
  return kSuccess;
}

KALOS_FAKE(cuCtxGetDevice, , 0, context, (kalos_cu_device * device)) {
  KALOS_FAKE_ENTER(cuCtxGetDevice, );
  *device = current_device();
  return kSuccess;
}

KALOS_FAKE(cuCtxGetDevice, _v2, 13000, init, (kalos_cu_device * device, kalos_cu_handle one)) {
  KALOS_FAKE_ENTER(cuCtxGetDevice, _v2);
  guard hold(lock);
  const context* which = one ? checked(one) : current_context();
  if (!which) return kInvalidContext;
  *device = which->device;
  return kSuccess;
}

KALOS_FAKE(cuCtxSynchronize, , 0, context, (void)) {
  KALOS_FAKE_ENTER(cuCtxSynchronize, );
  return synchronize_all();
}

KALOS_FAKE(cuCtxSynchronize, _v2, 13000, init, (kalos_cu_handle)) {
  KALOS_FAKE_ENTER(cuCtxSynchronize, _v2);
  return synchronize_all();
}

KALOS_FAKE(cuCtxGetStreamPriorityRange, , 0, context, (int* least, int* greatest)) {
  KALOS_FAKE_ENTER(cuCtxGetStreamPriorityRange, );
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kSuccess;
}

KALOS_FAKE(cuCtxGetFlags, , 0, context, (unsigned* flags)) {
  KALOS_FAKE_ENTER(cuCtxGetFlags, );
  *flags = 0;
  return kSuccess;
}

// ---- Entry points: errors -----------------------------------------------------------------------
static const char* name_of(result code) {
  switch (code) {
    case kSuccess:
      return "CUDA_SUCCESS";
    case kInvalidValue:
      return "CUDA_ERROR_INVALID_VALUE";
    case kOutOfMemory:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case kNotInitialized:
      return "CUDA_ERROR_NOT_INITIALIZED";
    case kNoDevice:
      return "CUDA_ERROR_NO_DEVICE";
    case kInvalidDevice:
      return "CUDA_ERROR_INVALID_DEVICE";
    case kInvalidImage:
      return "CUDA_ERROR_INVALID_IMAGE";
    case kInvalidContext:
      return "CUDA_ERROR_INVALID_CONTEXT";
    case kAlreadyMapped:
      return "CUDA_ERROR_ALREADY_MAPPED";
    case kNotMapped:
      return "CUDA_ERROR_NOT_MAPPED";
    case 209:
      return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case kInvalidHandle:
      return "CUDA_ERROR_INVALID_HANDLE";
    case kNotFound:
      return "CUDA_ERROR_NOT_FOUND";
    case kNotReady:
      return "CUDA_ERROR_NOT_READY";
    case kIllegalAddress:
      return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case kLaunchOutOfResources:
      return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
    case kLaunchTimeout:
      return "CUDA_ERROR_LAUNCH_TIMEOUT";
    case kAlreadyRegistered:
      return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    case kNotRegistered:
      return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    case kLaunchFailed:
      return "CUDA_ERROR_LAUNCH_FAILED";
    case 800:
      return "CUDA_ERROR_NOT_PERMITTED";
    case kNotSupported:
      return "CUDA_ERROR_NOT_SUPPORTED";
    case 999:
      return "CUDA_ERROR_UNKNOWN";
    default:
      return nullptr;
  }
}

KALOS_FAKE(cuGetErrorName, , 0, nothing, (kalos_cu_result code, const char** text)) {
  KALOS_FAKE_ENTER(cuGetErrorName, );
  *text = name_of(code);
  return *text ? kSuccess : kInvalidValue;
}

KALOS_FAKE(cuGetErrorString, , 0, nothing, (kalos_cu_result code, const char** text)) {
  KALOS_FAKE_ENTER(cuGetErrorString, );
  *text = name_of(code) ? "said by the stand-in driver" : nullptr;
  return *text ? kSuccess : kInvalidValue;
}

// ---- For tests, by ctypes -----------------------------------------------------------------------
// Calls of a symbol so far, of all its variants.
KALOS_FAKE_EXPORT uint64_t kalos_fake_count(const char* name) {
  guard hold(lock);
  uint64_t calls = 0;
  for (const entry* one = entries; one; one = one->next) {
    if (!strcmp(one->name, name)) calls += one->calls;
  }
  return calls;
}

// Replaces KALOS_FAKE_FAIL for this process, and counts calls from here on; "" ends it.
KALOS_FAKE_EXPORT void kalos_fake_fail(const char* spec) {
  guard hold(lock);
  failures = spec;
  for (entry* one = entries; one; one = one->next) one->calls = 0;
}

KALOS_FAKE_EXPORT uint64_t kalos_fake_problems(void) { return problems; }
