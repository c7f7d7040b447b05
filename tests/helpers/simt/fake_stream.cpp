// fake_stream.cpp: streams, events, modules and launches.
//
// A stream does its work at once. With KALOS_FAKE_ASYNC it has a thread that does the work later,
// so that host code which reads results without waiting for them is found out.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"
#include "simt.h"

namespace kalos_fake {
namespace {

using steady = std::chrono::steady_clock;

// Recorded and not yet reached: pending counts the records on their way.
struct event {
  int device = 0;
  unsigned flags = 0;
  uint64_t recorded = 0;
  uint64_t reached = 0;
  steady::time_point at;
};

struct stream {
  std::mutex turn;  // held by whoever does its work at once
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::deque<std::function<result()>> work;
  bool busy = false;
  bool stopping = false;
  result failed = kSuccess;
  std::thread worker;
};

struct function {
  const kalos_simt::kernel* kernel;
  int dynamic_most = 48 << 10;
};

struct module {
  int device;
  std::map<std::string, std::unique_ptr<function>> functions;
};

// Streams and events have a lock of their own: threads of streams wait on it.
std::mutex queue_lock;
std::condition_variable queue_changed;
std::map<kalos_cu_handle, std::shared_ptr<stream>> streams;
std::map<kalos_cu_handle, std::shared_ptr<event>> events;
std::map<kalos_cu_handle, std::unique_ptr<module>> modules;
std::mutex launch_lock;  // the emulator runs one launch at a time

template <class T>
kalos_cu_handle handle_of(const T& one) {
  return (kalos_cu_handle)(void*)one.get();
}

void serve(stream* one) {
  std::unique_lock<std::mutex> hold(queue_lock);
  for (;;) {
    queue_changed.wait(hold, [&] { return one->stopping || !one->work.empty(); });
    if (one->work.empty()) return;
    auto work = std::move(one->work.front());
    one->work.pop_front();
    one->busy = true;
    hold.unlock();
    usleep((useconds_t)setting("ASYNC", 0));
    const result code = work();
    hold.lock();
    if (code && !one->failed) one->failed = code;
    one->busy = false;
    queue_changed.notify_all();
  }
}

void end_streams();

std::shared_ptr<stream> new_stream(unsigned flags, int priority) {
  auto one = std::make_shared<stream>();
  one->flags = flags;
  one->priority = priority;
  if (!is_asynchronous()) return one;
  // Registered behind the library's own destructors, so that it comes before them.
  static const int at_exit = atexit(end_streams);
  (void)at_exit;
  one->worker = std::thread(serve, one.get());
  return one;
}

// The stream of a handle; 0, 1 and 2 name the default stream. Null: no such stream.
std::shared_ptr<stream> find_stream(kalos_cu_handle handle) {
  static const std::shared_ptr<stream>* const normal =
      new std::shared_ptr<stream>(new_stream(0, 0));
  if ((uintptr_t)handle <= 2) return *normal;
  const std::lock_guard<std::mutex> hold(queue_lock);
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

std::shared_ptr<event> find_event(kalos_cu_handle handle) {
  const std::lock_guard<std::mutex> hold(queue_lock);
  const auto found = events.find(handle);
  return found == events.end() ? nullptr : found->second;
}

// Call with queue_lock held.
void enqueue(stream& one, std::function<result()> work) {
  one.work.push_back(std::move(work));
  queue_changed.notify_all();
}

result wait_for(stream& one) {
  const std::lock_guard<std::mutex> turn(one.turn);
  std::unique_lock<std::mutex> hold(queue_lock);
  queue_changed.wait(hold, [&] { return one.work.empty() && !one.busy; });
  const result code = one.failed;
  one.failed = kSuccess;
  return code;
}

void stop(stream& one) {
  if (!one.worker.joinable()) return;
  {
    const std::lock_guard<std::mutex> hold(queue_lock);
    one.stopping = true;
    queue_changed.notify_all();
  }
  one.worker.join();
}

void end_streams() {
  synchronize_all();
  for (const auto& [handle, one] : streams) stop(*one);
  stop(*find_stream(nullptr));
}

result check_launch(const function& one, const kalos_simt::shape& grid,
                    const kalos_simt::shape& block, unsigned dynamic_nbytes) {
  const uint64_t threads = (uint64_t)block.x * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    return kInvalidValue;
  }
  if (!threads || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
    return kInvalidValue;
  }
  if (one.kernel->max_threads && threads > (uint64_t)one.kernel->max_threads) {
    return kLaunchOutOfResources;
  }
  return dynamic_nbytes > (unsigned)one.dynamic_most ? kInvalidValue : kSuccess;
}

function* checked_function(kalos_cu_handle handle) {
  for (const auto& [at, one] : modules) {
    for (const auto& [name, found] : one->functions) {
      if (handle_of(found) == handle) return found.get();
    }
  }
  return nullptr;
}

}  // namespace

bool is_asynchronous() {
  static const bool asynchronous = setting("ASYNC", -1) >= 0;
  return asynchronous;
}

result submit(kalos_cu_handle handle, std::function<result()> work) {
  const auto one = find_stream(handle);
  const result late = take_late_failure();
  if (!one) return kInvalidHandle;
  if (late) work = [=]() -> result { return late; };
  if (is_asynchronous()) {
    const std::lock_guard<std::mutex> hold(queue_lock);
    enqueue(*one, std::move(work));
    return kSuccess;
  }
  const std::lock_guard<std::mutex> turn(one->turn);
  const result code = work();
  if (!late) return code;
  const std::lock_guard<std::mutex> hold(queue_lock);
  one->failed = late;
  return kSuccess;
}

result synchronize_all() {
  std::vector<std::shared_ptr<stream>> all = {find_stream(nullptr)};
  {
    const std::lock_guard<std::mutex> hold(queue_lock);
    for (const auto& [handle, one] : streams) all.push_back(one);
  }
  result code = kSuccess;
  for (const auto& one : all) {
    const result failed = wait_for(*one);
    if (!code) code = failed;
  }
  return code;
}

template <class Map>
static void drop(Map& objects, int device) {
  for (auto at = objects.begin(); at != objects.end();) {
    at = at->second->device == device ? objects.erase(at) : std::next(at);
  }
}

void drop_context_objects(int device) {
  synchronize_all();
  for (const auto& [handle, one] : streams) {
    if (one->device == device) stop(*one);
  }
  guard hold(lock);
  const std::lock_guard<std::mutex> hold_queues(queue_lock);
  drop(streams, device);
  drop(events, device);
  drop(modules, device);
}

}  // namespace kalos_fake

using namespace kalos_fake;

// ---- Streams ------------------------------------------------------------------------------------
KALOS_FAKE(cuStreamCreateWithPriority, , 0, context,
           (kalos_cu_handle * out, unsigned flags, int priority)) {
  KALOS_FAKE_ENTER(cuStreamCreateWithPriority, );
  if (!out || flags > 1) return kInvalidValue;
  const auto one = new_stream(flags, priority);
  one->device = current_device();
  const std::lock_guard<std::mutex> hold(queue_lock);
  *out = handle_of(one);
  streams[*out] = one;
  return kSuccess;
}

KALOS_FAKE(cuStreamCreate, , 0, context, (kalos_cu_handle * out, unsigned flags)) {
  KALOS_FAKE_ENTER(cuStreamCreate, );
  return cuStreamCreateWithPriority(out, flags, 0);
}

KALOS_FAKE(cuStreamDestroy, _v2, 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuStreamDestroy, _v2);
  const auto one = find_stream(handle);
  if (!one || (uintptr_t)handle <= 2) return kInvalidHandle;
  wait_for(*one);
  stop(*one);
  const std::lock_guard<std::mutex> hold(queue_lock);
  streams.erase(handle);
  return kSuccess;
}

KALOS_FAKE(cuStreamSynchronize, , 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuStreamSynchronize, );
  const auto one = find_stream(handle);
  return one ? wait_for(*one) : (result)kInvalidHandle;
}

KALOS_FAKE(cuStreamQuery, , 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuStreamQuery, );
  const auto one = find_stream(handle);
  if (!one) return kInvalidHandle;
  const std::unique_lock<std::mutex> turn(one->turn, std::try_to_lock);
  if (!turn) return kNotReady;
  const std::lock_guard<std::mutex> hold(queue_lock);
  if (!one->work.empty() || one->busy) return kNotReady;
  return std::exchange(one->failed, kSuccess);
}

KALOS_FAKE(cuStreamGetPriority, , 0, context, (kalos_cu_handle handle, int* priority)) {
  KALOS_FAKE_ENTER(cuStreamGetPriority, );
  const auto one = find_stream(handle);
  if (!one) return kInvalidHandle;
  *priority = one->priority;
  return kSuccess;
}

KALOS_FAKE(cuStreamGetFlags, , 0, context, (kalos_cu_handle handle, unsigned* flags)) {
  KALOS_FAKE_ENTER(cuStreamGetFlags, );
  const auto one = find_stream(handle);
  if (!one) return kInvalidHandle;
  *flags = one->flags;
  return kSuccess;
}

KALOS_FAKE(cuStreamGetCtx, , 0, context, (kalos_cu_handle handle, kalos_cu_handle* out)) {
  KALOS_FAKE_ENTER(cuStreamGetCtx, );
  if (!find_stream(handle)) return kInvalidHandle;
  *out = (kalos_cu_handle)(void*)current_context();
  return kSuccess;
}

KALOS_FAKE(cuStreamIsCapturing, , 0, context, (kalos_cu_handle handle, int* status)) {
  KALOS_FAKE_ENTER(cuStreamIsCapturing, );
  if (!find_stream(handle)) return kInvalidHandle;
  *status = 0;
  return kSuccess;
}

KALOS_FAKE(cuStreamWaitEvent, , 0, context,
           (kalos_cu_handle handle, kalos_cu_handle which, unsigned)) {
  KALOS_FAKE_ENTER(cuStreamWaitEvent, );
  const auto one = find_event(which);
  if (!one) return kInvalidHandle;
  // Without queues, what was recorded has been reached.
  if (!is_asynchronous()) return find_stream(handle) ? kSuccess : kInvalidHandle;
  uint64_t until;
  {
    const std::lock_guard<std::mutex> hold(queue_lock);
    until = one->recorded;
  }
  return submit(handle, [=]() -> result {
    std::unique_lock<std::mutex> hold(queue_lock);
    queue_changed.wait(hold, [&] { return one->reached >= until; });
    return kSuccess;
  });
}

// ---- Events -------------------------------------------------------------------------------------
KALOS_FAKE(cuEventCreate, , 0, context, (kalos_cu_handle * out, unsigned flags)) {
  KALOS_FAKE_ENTER(cuEventCreate, );
  if (!out || flags > 7) return kInvalidValue;
  const auto one = std::make_shared<event>();
  one->flags = flags;
  one->device = current_device();
  const std::lock_guard<std::mutex> hold(queue_lock);
  *out = handle_of(one);
  events[*out] = one;
  return kSuccess;
}

KALOS_FAKE(cuEventDestroy, _v2, 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuEventDestroy, _v2);
  const std::lock_guard<std::mutex> hold(queue_lock);
  return events.erase(handle) ? kSuccess : kInvalidHandle;
}

KALOS_FAKE(cuEventRecord, , 0, context, (kalos_cu_handle handle, kalos_cu_handle on)) {
  KALOS_FAKE_ENTER(cuEventRecord, );
  const auto one = find_event(handle);
  const auto where = find_stream(on);
  if (!one || !where) return kInvalidHandle;
  const auto reach = [=](uint64_t number) {  // with queue_lock held
    one->reached = std::max(one->reached, number);
    one->at = steady::now();
    queue_changed.notify_all();
  };
  if (!is_asynchronous()) {
    const std::lock_guard<std::mutex> turn(where->turn);
    const std::lock_guard<std::mutex> hold(queue_lock);
    reach(++one->recorded);
    return kSuccess;
  }
  // The record has its number and its place in the queue at once: a wait for it comes behind it.
  const std::lock_guard<std::mutex> hold(queue_lock);
  enqueue(*where, [=, number = ++one->recorded]() -> result {
    const std::lock_guard<std::mutex> hold(queue_lock);
    reach(number);
    return kSuccess;
  });
  return kSuccess;
}

KALOS_FAKE(cuEventQuery, , 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuEventQuery, );
  const auto one = find_event(handle);
  if (!one) return kInvalidHandle;
  const std::lock_guard<std::mutex> hold(queue_lock);
  return one->reached >= one->recorded ? kSuccess : kNotReady;
}

KALOS_FAKE(cuEventSynchronize, , 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuEventSynchronize, );
  const auto one = find_event(handle);
  if (!one) return kInvalidHandle;
  std::unique_lock<std::mutex> hold(queue_lock);
  const uint64_t until = one->recorded;
  queue_changed.wait(hold, [&] { return one->reached >= until; });
  return kSuccess;
}

static result elapsed(float* milliseconds, kalos_cu_handle start, kalos_cu_handle end) {
  const auto first = find_event(start);
  const auto last = find_event(end);
  if (!milliseconds) return kInvalidValue;
  if (!first || !last) return kInvalidHandle;
  const std::lock_guard<std::mutex> hold(queue_lock);
  if ((first->flags | last->flags) & KALOS_CU_EVENT_DISABLE_TIMING) return kInvalidHandle;
  if (!first->recorded || !last->recorded) return kInvalidHandle;
  if (first->reached < first->recorded || last->reached < last->recorded) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
  return kSuccess;
}

KALOS_FAKE(cuEventElapsedTime, , 0, context,
           (float* milliseconds, kalos_cu_handle start, kalos_cu_handle end)) {
  KALOS_FAKE_ENTER(cuEventElapsedTime, );
  return elapsed(milliseconds, start, end);
}

KALOS_FAKE(cuEventElapsedTime, _v2, 12080, context,
           (float* milliseconds, kalos_cu_handle start, kalos_cu_handle end)) {
  KALOS_FAKE_ENTER(cuEventElapsedTime, _v2);
  return elapsed(milliseconds, start, end);
}

// ---- Modules ------------------------------------------------------------------------------------
// Any image will do: kernels are found by name among those that the library was built from.
KALOS_FAKE(cuModuleLoadData, , 0, context, (kalos_cu_handle * out, const void* image)) {
  KALOS_FAKE_ENTER(cuModuleLoadData, );
  guard hold(lock);
  if (!out) return kInvalidValue;
  if (!image) return kInvalidImage;
  auto one = std::make_unique<module>();
  one->device = current_device();
  *out = handle_of(one);
  modules[*out] = std::move(one);
  return kSuccess;
}

KALOS_FAKE(cuModuleUnload, , 0, context, (kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuModuleUnload, );
  synchronize_all();
  guard hold(lock);
  return modules.erase(handle) ? kSuccess : kInvalidHandle;
}

KALOS_FAKE(cuModuleGetFunction, , 0, context,
           (kalos_cu_handle * out, kalos_cu_handle handle, const char* name)) {
  KALOS_FAKE_ENTER(cuModuleGetFunction, );
  guard hold(lock);
  const auto found = modules.find(handle);
  if (!out || !name || found == modules.end()) return kInvalidHandle;
  const kalos_simt::kernel* kernel = kalos_simt::find_kernel(name);
  if (!kernel) return kNotFound;
  auto& place = found->second->functions[name];
  if (!place) place.reset(new function{kernel});
  *out = handle_of(place);
  return kSuccess;
}

static const int kMaxThreads = 0, kStaticShared = 1, kRegisters = 4, kDynamicMost = 8;

KALOS_FAKE(cuFuncGetAttribute, , 0, context, (int* value, int attribute, kalos_cu_handle handle)) {
  KALOS_FAKE_ENTER(cuFuncGetAttribute, );
  guard hold(lock);
  const function* one = checked_function(handle);
  if (!value || !one) return one ? kInvalidValue : kInvalidHandle;
  *value = 0;
  if (attribute == kMaxThreads) *value = one->kernel->max_threads ? one->kernel->max_threads : 1024;
  if (attribute == kStaticShared)
    *value = (int)(one->kernel->shared_end - one->kernel->shared_begin);
  if (attribute == kRegisters) *value = 32;
  if (attribute == kDynamicMost) *value = one->dynamic_most;
  return kSuccess;
}

KALOS_FAKE(cuFuncSetAttribute, , 0, context, (kalos_cu_handle handle, int attribute, int value)) {
  KALOS_FAKE_ENTER(cuFuncSetAttribute, );
  guard hold(lock);
  function* one = checked_function(handle);
  int most = 0;
  if (!one) return kInvalidHandle;
  attribute_of(97, current_device(), &most);
  if (attribute != kDynamicMost) return attribute == 9 ? kSuccess : kInvalidValue;
  if (value < 0 || value > most) return kInvalidValue;
  one->dynamic_most = value;
  return kSuccess;
}

KALOS_FAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor, , 0, context,
           (int* blocks, kalos_cu_handle handle, int threads, size_t dynamic_nbytes)) {
  KALOS_FAKE_ENTER(cuOccupancyMaxActiveBlocksPerMultiprocessor, );
  guard hold(lock);
  if (!checked_function(handle)) return kInvalidHandle;
  if (!blocks || threads <= 0 || threads > 1024) return kInvalidValue;
  const size_t by_threads = 2048 / (((size_t)threads + 31) / 32 * 32);
  *blocks = (int)std::min({(size_t)32, by_threads, (228u << 10) / (dynamic_nbytes + 1024)});
  return kSuccess;
}

KALOS_FAKE(cuLaunchKernel, , 0, context,
           (kalos_cu_handle handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
            unsigned block_x, unsigned block_y, unsigned block_z, unsigned dynamic_nbytes,
            kalos_cu_handle on, void** parameters, void** extra)) {
  KALOS_FAKE_ENTER(cuLaunchKernel, );
  const kalos_simt::shape grid = {grid_x, grid_y, grid_z};
  const kalos_simt::shape block = {block_x, block_y, block_z};
  const kalos_simt::kernel* kernel;
  {
    guard hold(lock);
    const function* one = checked_function(handle);
    if (!one) return kInvalidHandle;
    if (const result code = check_launch(*one, grid, block, dynamic_nbytes)) return code;
    kernel = one->kernel;
  }
  if (extra || (!parameters && kernel->num_parameters)) return kInvalidValue;
  const std::shared_ptr<void> packed(aligned_alloc(64, (kernel->packed_nbytes + 63) / 64 * 64),
                                     free);
  kernel->pack(packed.get(), parameters);
  return submit(on, [=]() -> result {
    const std::lock_guard<std::mutex> hold(launch_lock);
    device_access open;
    const char* why = nullptr;
    const int code = kalos_simt::run(*kernel, grid, block, dynamic_nbytes, packed.get(), &why);
    if (code) fprintf(stderr, "fake cuda: %s\n", why);
    return code;
  });
}

// ---- For tests, by ctypes -----------------------------------------------------------------------
// Streams, events or modules that are there.
KALOS_FAKE_EXPORT uint64_t kalos_fake_live_objects(const char* kind) {
  const std::lock_guard<std::mutex> hold(queue_lock);
  if (!strcmp(kind, "stream")) return streams.size();
  if (!strcmp(kind, "event")) return events.size();
  if (!strcmp(kind, "module")) return modules.size();
  return ~(uint64_t)0;
}
