// fake_cuda.h: what the parts of the stand-in driver share. Types and constants are those of
// _driver.h; entry points are exported under the names that cuGetProcAddress is asked for.
#ifndef KALOS_FAKE_CUDA_H
#define KALOS_FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "_driver.h"

#define KALOS_FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace kalos_fake {

using result = kalos_cu_result;
enum : result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kAlreadyMapped = 208,
  kNotMapped = 211,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailed = 719,
  kNotSupported = 801,
};

// ---- Entry points -------------------------------------------------------------------------------
enum class needs { nothing, init, context };

// One entry point: counts its calls, and fails when the test asked for it.
struct entry {
  const char* name;  // without _v2
  void* address;
  int version;  // first driver version for which cuGetProcAddress gives this one
  needs what;
  uint64_t calls = 0;
  entry* next;

  entry(const char* name, void* address, int version, needs what);
  // Whether the call ends here, and how.
  bool ends(result* code);
};
extern entry* entries;

// KALOS_FAKE(cuMemAlloc, _v2, 0, context, (kalos_cu_ptr* ptr, size_t nbytes)) { ... }
#define KALOS_FAKE(name, suffix, version, what, parameters)                          \
  KALOS_FAKE_EXPORT kalos_cu_result name##suffix parameters;                         \
  static kalos_fake::entry entry_##name##suffix(#name, (void*)name##suffix, version, \
                                                kalos_fake::needs::what);            \
  kalos_cu_result name##suffix parameters
// The first line of a body.
#define KALOS_FAKE_ENTER(name, suffix) \
  if (kalos_cu_result code; entry_##name##suffix.ends(&code)) return code

// All state but the streams' work is behind this lock.
using guard = std::lock_guard<std::recursive_mutex>;
extern std::recursive_mutex lock;

// Something that real hardware would not forgive and no return code reports; tests read the count.
void problem(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Reads KALOS_FAKE_<name>, a number.
long setting(const char* name, long otherwise);

// ---- Contexts and devices -----------------------------------------------------------------------
struct context;
context* current_context();
int current_device();  // of the current context, which there must be
result attribute_of(int attribute, int device, int* value);
int num_devices();

// ---- Memory -------------------------------------------------------------------------------------
// Whether [ptr, ptr + nbytes) lies in one piece of device memory, or of host memory that the driver
// knows.
bool is_device_range(uint64_t ptr, size_t nbytes);
bool is_host_range(const void* ptr, size_t nbytes);
void free_context_memory(int device);

size_t memory_total();
extern size_t memory_used;  // bytes of the device that are taken
bool is_strict();
bool is_accessible();  // whether a device_access lives
// Whether [ptr, ptr + nbytes) is mapped with access (fake_ranges.cpp), neighbouring mappings as
// one.
bool is_mapped(uint64_t ptr, size_t nbytes);
void protect_mappings(bool open);
uint64_t mapped_live(const char* kind);
inline size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
const int kPoison = 0xCD;
const size_t kPoisonMost = 64 << 20;  // of a large allocation only its beginning is filled

// The piece of memory at or before an address, by its beginning; end() for none.
template <class Map>
typename Map::iterator containing(Map& ranges, uint64_t ptr) {
  const auto after = ranges.upper_bound(ptr);
  return after == ranges.begin() ? ranges.end() : std::prev(after);
}

// Device memory is out of the host's reach except while one of these lives (KALOS_FAKE_STRICT=1).
struct device_access {
  device_access();
  ~device_access();
};

// ---- Streams ------------------------------------------------------------------------------------
// A failure that the test asked for and that the call's work is to meet, not the call; read once.
result take_late_failure();
// Does the work now or, with KALOS_FAKE_ASYNC, on the stream's thread. 0, or why it is refused.
result submit(kalos_cu_handle stream, std::function<result()> work);
bool is_asynchronous();
result synchronize_all();
void drop_context_objects(int device);

}  // namespace kalos_fake

#endif  // KALOS_FAKE_CUDA_H
