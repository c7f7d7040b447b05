// fake_memory.cpp: device memory, pinned and registered host memory, copies.
//
// A device address is the host address of the same byte. New memory holds KALOS_SIMT_POISON, and a
// few bytes behind each allocation that must still hold it when the allocation is freed.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"

namespace kalos_fake {
namespace {

#ifdef __SANITIZE_ADDRESS__
const size_t kTail = 0;  // AddressSanitizer watches what lies behind
#else
const size_t kTail = 256;
#endif

size_t page() { return (size_t)sysconf(_SC_PAGESIZE); }

struct block {
  size_t nbytes;
  size_t held;  // bytes of the mapping in strict mode, 0 where it came from malloc
  int device;
};
struct registration {
  size_t nbytes;
  unsigned flags;
  int device;
};

std::map<uint64_t, block> device_blocks;
std::map<uint64_t, block> host_blocks;
std::map<uint64_t, registration> registrations;
int accesses;

template <class Map>
bool holds(Map& ranges, uint64_t ptr, size_t nbytes) {
  const auto found = containing(ranges, ptr);
  return found != ranges.end() && ptr - found->first + nbytes <= found->second.nbytes;
}

template <class Map>
bool overlaps(const Map& ranges, uint64_t begin, uint64_t end, size_t unit) {
  for (const auto& [other, one] : ranges) {
    if (begin / unit * unit < round_up(other + one.nbytes, unit) &&
        other / unit * unit < round_up(end, unit)) {
      return true;
    }
  }
  return false;
}

// In a mapping of its own when it is to be protected.
void* new_memory(size_t nbytes, size_t alignment, bool mapped, block* out) {
  void* memory = nullptr;
  *out = {nbytes, 0, current_device()};
  if (mapped) {
    out->held = round_up(nbytes + kTail, page());
    memory = mmap(nullptr, out->held, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
  } else if (posix_memalign(&memory, alignment, nbytes + kTail)) {
    return nullptr;
  }
  memset(memory, kPoison, std::min(nbytes, kPoisonMost));
  memset((char*)memory + nbytes, kPoison, kTail);
  return memory;
}

void free_memory(uint64_t ptr, const block& one, const char* kind) {
  const unsigned char* tail = (const unsigned char*)ptr + one.nbytes;
  for (size_t i = 0; i < kTail; ++i) {
    if (tail[i] == kPoison) continue;
    problem("byte %zu behind %zu bytes of %s memory was written", i, one.nbytes, kind);
    break;
  }
  if (one.held) {
    munmap((void*)ptr, one.held);
  } else {
    memset((void*)ptr, kPoison, std::min(one.nbytes, kPoisonMost));
    free((void*)ptr);
  }
}

void set_protection(bool open) {
  for (const auto& [ptr, one] : device_blocks) {
    mprotect((void*)ptr, one.held, open ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  protect_mappings(open);
}

// The mapping of the process that an address lies in, as /proc/self/maps has it.
struct host_map {
  bool found = false, shared = false, writable = false, file = false;
};

host_map map_of(uint64_t address) {
  host_map map;
  FILE* maps = fopen("/proc/self/maps", "r");
  char line[4400];
  while (maps && fgets(line, sizeof(line), maps)) {
    unsigned long begin, end, inode;
    char mode[5], path[4096] = "";
    if (sscanf(line, "%lx-%lx %4s %*s %*s %lu %4095[^\n]", &begin, &end, mode, &inode, path) < 4) {
      continue;
    }
    if (address < begin || address >= end) continue;
    map.found = true;
    map.shared = mode[3] == 's';
    map.writable = mode[1] == 'w';
    const char* name = path + strspn(path, " ");
    map.file = inode != 0 && strncmp(name, "/memfd:", 7) && strncmp(name, "/dev/", 5);
    break;
  }
  if (maps) fclose(maps);
  return map;
}

// Whether every page can be read: beyond the end of a file there are none.
bool is_present(uint64_t begin, uint64_t end) {
  const uint64_t first = begin / page() * page();
  if (madvise((void*)first, round_up(end, page()) - first, 22 /* MADV_POPULATE_READ */) == 0) {
    return true;
  }
  if (errno != EINVAL) return false;
  int ends[2];
  if (pipe(ends)) return false;
  bool present = true;
  for (uint64_t at = first; present && at < end; at += page()) {
    char byte;
    present = write(ends[1], (const void*)at, 1) == 1 && read(ends[0], &byte, 1) == 1;
  }
  close(ends[0]);
  close(ends[1]);
  return present;
}

}  // namespace

size_t memory_used;

size_t memory_total() { return (size_t)setting("MEMORY", 2l << 30); }

bool is_strict() {
  static const bool strict = setting("STRICT", 0) != 0;
  return strict;
}

bool is_accessible() { return accesses > 0; }

bool is_device_range(uint64_t ptr, size_t nbytes) {
  guard hold(lock);
  return holds(device_blocks, ptr, nbytes) || is_mapped(ptr, nbytes);
}

bool is_host_range(const void* ptr, size_t nbytes) {
  guard hold(lock);
  return holds(host_blocks, (uint64_t)ptr, nbytes) || holds(registrations, (uint64_t)ptr, nbytes);
}

void free_context_memory(int device) {
  guard hold(lock);
  for (auto at = device_blocks.begin(); at != device_blocks.end();) {
    const auto [ptr, one] = *at;
    if (one.device != device) {
      ++at;
      continue;
    }
    if (is_strict()) mprotect((void*)ptr, one.held, PROT_READ | PROT_WRITE);
    free_memory(ptr, one, "device");
    memory_used -= one.nbytes;
    at = device_blocks.erase(at);
  }
  for (auto at = host_blocks.begin(); at != host_blocks.end();) {
    const auto [ptr, one] = *at;
    if (one.device == device) free_memory(ptr, one, "pinned");
    at = one.device == device ? host_blocks.erase(at) : std::next(at);
  }
  for (auto at = registrations.begin(); at != registrations.end();) {
    at = at->second.device == device ? registrations.erase(at) : std::next(at);
  }
}

device_access::device_access() {
  if (!is_strict()) return;
  guard hold(lock);
  if (accesses++ == 0) set_protection(true);
}

device_access::~device_access() {
  if (!is_strict()) return;
  guard hold(lock);
  if (--accesses == 0) set_protection(false);
}

}  // namespace kalos_fake

using namespace kalos_fake;

// ---- Device memory ------------------------------------------------------------------------------
KALOS_FAKE(cuMemGetInfo, _v2, 0, context, (size_t* available, size_t* all)) {
  KALOS_FAKE_ENTER(cuMemGetInfo, _v2);
  guard hold(lock);
  *all = memory_total();
  *available = memory_total() - memory_used;
  return kSuccess;
}

KALOS_FAKE(cuMemAlloc, _v2, 0, context, (kalos_cu_ptr * ptr, size_t nbytes)) {
  KALOS_FAKE_ENTER(cuMemAlloc, _v2);
  guard hold(lock);
  if (!ptr || !nbytes) return kInvalidValue;
  if (nbytes > memory_total() - memory_used) return kOutOfMemory;
  block one;
  void* memory = new_memory(nbytes, 512, is_strict(), &one);
  if (!memory) return kOutOfMemory;
  *ptr = (kalos_cu_ptr)memory;
  device_blocks[*ptr] = one;
  memory_used += nbytes;
  if (is_strict() && !accesses) mprotect(memory, one.held, PROT_NONE);
  return kSuccess;
}

KALOS_FAKE(cuMemFree, _v2, 0, context, (kalos_cu_ptr ptr)) {
  KALOS_FAKE_ENTER(cuMemFree, _v2);
  synchronize_all();
  guard hold(lock);
  if (!ptr) return kSuccess;
  const auto found = device_blocks.find(ptr);
  if (found == device_blocks.end()) return kInvalidValue;
  if (is_strict()) mprotect((void*)ptr, found->second.held, PROT_READ | PROT_WRITE);
  free_memory(ptr, found->second, "device");
  memory_used -= found->second.nbytes;
  device_blocks.erase(found);
  return kSuccess;
}

// ---- Host memory --------------------------------------------------------------------------------
KALOS_FAKE(cuMemHostAlloc, , 0, context, (void** ptr, size_t nbytes, unsigned flags)) {
  KALOS_FAKE_ENTER(cuMemHostAlloc, );
  guard hold(lock);
  if (!ptr || !nbytes || flags & ~7u) return kInvalidValue;
  block one;
  *ptr = new_memory(nbytes, page(), false, &one);
  if (!*ptr) return kOutOfMemory;
  host_blocks[(uint64_t)*ptr] = one;
  return kSuccess;
}

KALOS_FAKE(cuMemFreeHost, , 0, context, (void* ptr)) {
  KALOS_FAKE_ENTER(cuMemFreeHost, );
  synchronize_all();
  guard hold(lock);
  const auto found = host_blocks.find((uint64_t)ptr);
  if (found == host_blocks.end()) return kInvalidValue;
  free_memory(found->first, found->second, "pinned");
  host_blocks.erase(found);
  return kSuccess;
}

// As the NVIDIA driver does it: a shared mapping of a file on disk can only be registered for
// reading, and every page must be there.
KALOS_FAKE(cuMemHostRegister, _v2, 0, context, (void* ptr, size_t nbytes, unsigned flags)) {
  KALOS_FAKE_ENTER(cuMemHostRegister, _v2);
  guard hold(lock);
  const uint64_t begin = (uint64_t)ptr;
  const uint64_t end = begin + nbytes;
  if (!ptr || !nbytes || flags & ~15u) return kInvalidValue;
  // Whole pages are registered.
  if (overlaps(registrations, begin, end, page()) || overlaps(host_blocks, begin, end, 1)) {
    return kAlreadyRegistered;
  }
  const host_map map = map_of(begin);
  const bool for_reading = (flags & KALOS_CU_REGISTER_READ_ONLY) != 0;
  if (!map.found || !map_of(end - 1).found) return kInvalidValue;
  if (for_reading) {
    int able = 0;
    attribute_of(113, current_device(), &able);
    if (!able) return kNotSupported;
    if (map.file && map.shared && !(flags & KALOS_CU_REGISTER_DEVICEMAP)) return kInvalidValue;
  } else if (!map.writable || (map.file && map.shared)) {
    return kInvalidValue;
  }
  if (!is_present(begin, end)) return kInvalidValue;
  registrations[begin] = {nbytes, flags, current_device()};
  return kSuccess;
}

KALOS_FAKE(cuMemHostUnregister, , 0, context, (void* ptr)) {
  KALOS_FAKE_ENTER(cuMemHostUnregister, );
  synchronize_all();
  guard hold(lock);
  return registrations.erase((uint64_t)ptr) ? kSuccess : kNotRegistered;
}

KALOS_FAKE(cuMemHostGetDevicePointer, _v2, 0, context,
           (kalos_cu_ptr * out, void* ptr, unsigned flags)) {
  KALOS_FAKE_ENTER(cuMemHostGetDevicePointer, _v2);
  guard hold(lock);
  if (!out || flags) return kInvalidValue;
  if (!holds(host_blocks, (uint64_t)ptr, 1)) {
    const auto found = containing(registrations, (uint64_t)ptr);
    if (!holds(registrations, (uint64_t)ptr, 1)) return kInvalidValue;
    if (!(found->second.flags & KALOS_CU_REGISTER_DEVICEMAP)) return kInvalidValue;
  }
  *out = (kalos_cu_ptr)ptr;
  return kSuccess;
}

// ---- Copies -------------------------------------------------------------------------------------
// By a kernel: addresses of the device and of mapped host memory are of one space.
static bool is_reachable(uint64_t ptr, size_t nbytes) {
  return is_device_range(ptr, nbytes) || is_host_range((const void*)ptr, nbytes);
}

// From pageable memory the driver takes the bytes before the call returns.
static result copy(void* to, const void* from, size_t nbytes, kalos_cu_handle stream) {
  if (!nbytes) return kSuccess;
  const bool pageable = !is_device_range((uint64_t)from, nbytes) && !is_host_range(from, nbytes);
  std::vector<char> taken;
  if (pageable && is_asynchronous()) taken.assign((const char*)from, (const char*)from + nbytes);
  return submit(stream, [=, bytes = std::move(taken)]() -> result {
    device_access open;
    memmove(to, bytes.empty() ? from : bytes.data(), nbytes);
    return kSuccess;
  });
}

KALOS_FAKE(cuMemcpyHtoDAsync, _v2, 0, context,
           (kalos_cu_ptr to, const void* from, size_t nbytes, kalos_cu_handle stream)) {
  KALOS_FAKE_ENTER(cuMemcpyHtoDAsync, _v2);
  if (nbytes && (!from || !is_reachable(to, nbytes))) return kInvalidValue;
  return copy((void*)to, from, nbytes, stream);
}

KALOS_FAKE(cuMemcpyDtoHAsync, _v2, 0, context,
           (void* to, kalos_cu_ptr from, size_t nbytes, kalos_cu_handle stream)) {
  KALOS_FAKE_ENTER(cuMemcpyDtoHAsync, _v2);
  if (nbytes && (!to || !is_reachable(from, nbytes))) return kInvalidValue;
  const result code = copy(to, (const void*)from, nbytes, stream);
  // Into pageable memory the call returns once the bytes are there.
  return code || is_host_range(to, nbytes) ? code : synchronize_all();
}

KALOS_FAKE(cuMemcpyDtoDAsync, _v2, 0, context,
           (kalos_cu_ptr to, kalos_cu_ptr from, size_t nbytes, kalos_cu_handle stream)) {
  KALOS_FAKE_ENTER(cuMemcpyDtoDAsync, _v2);
  if (nbytes && (!is_reachable(to, nbytes) || !is_reachable(from, nbytes))) return kInvalidValue;
  return copy((void*)to, (const void*)from, nbytes, stream);
}

KALOS_FAKE(cuMemcpyHtoD, _v2, 0, context, (kalos_cu_ptr to, const void* from, size_t nbytes)) {
  KALOS_FAKE_ENTER(cuMemcpyHtoD, _v2);
  if (nbytes && (!from || !is_reachable(to, nbytes))) return kInvalidValue;
  const result code = copy((void*)to, from, nbytes, nullptr);
  return code ? code : synchronize_all();
}

KALOS_FAKE(cuMemcpyDtoH, _v2, 0, context, (void* to, kalos_cu_ptr from, size_t nbytes)) {
  KALOS_FAKE_ENTER(cuMemcpyDtoH, _v2);
  if (nbytes && (!to || !is_reachable(from, nbytes))) return kInvalidValue;
  const result code = copy(to, (const void*)from, nbytes, nullptr);
  return code ? code : synchronize_all();
}

KALOS_FAKE(cuMemsetD8Async, , 0, context,
           (kalos_cu_ptr to, unsigned char byte, size_t nbytes, kalos_cu_handle stream)) {
  KALOS_FAKE_ENTER(cuMemsetD8Async, );
  if (nbytes && !is_reachable(to, nbytes)) return kInvalidValue;
  return submit(stream, [=]() -> result {
    device_access open;
    memset((void*)to, byte, nbytes);
    return kSuccess;
  });
}

KALOS_FAKE(cuStreamWriteValue32, , 0, context,
           (kalos_cu_handle stream, kalos_cu_ptr to, uint32_t value, unsigned flags)) {
  KALOS_FAKE_ENTER(cuStreamWriteValue32, );
  if (flags || to % 4 || !is_reachable(to, 4)) return kInvalidValue;
  return submit(stream, [=]() -> result {
    device_access open;
    __atomic_store_n((uint32_t*)to, value, __ATOMIC_RELEASE);
    return kSuccess;
  });
}

// ---- Whose an address is ------------------------------------------------------------------------
KALOS_FAKE(cuPointerGetAttribute, , 0, context, (void* out, int attribute, kalos_cu_ptr ptr)) {
  KALOS_FAKE_ENTER(cuPointerGetAttribute, );
  const bool device = is_device_range(ptr, 1);
  if (!out || !is_reachable(ptr, 1)) return kInvalidValue;
  switch (attribute) {
    case 2:  // memory type: host or device
      *(unsigned*)out = device ? 2 : 1;
      return kSuccess;
    case 3:  // device pointer
      *(kalos_cu_ptr*)out = ptr;
      return kSuccess;
    case 4:  // host pointer
      if (device) return kInvalidValue;
      *(void**)out = (void*)ptr;
      return kSuccess;
    case 8:  // managed
      *(unsigned*)out = 0;
      return kSuccess;
    case 9:  // device
      *(int*)out = current_device();
      return kSuccess;
    default:
      return kNotSupported;
  }
}

// ---- For tests, by ctypes -----------------------------------------------------------------------
// Things of a kind that are there: device, pinned, registered, reserved, created or mapped.
KALOS_FAKE_EXPORT uint64_t kalos_fake_live_memory(const char* kind) {
  guard hold(lock);
  if (!strcmp(kind, "device")) return device_blocks.size();
  if (!strcmp(kind, "pinned")) return host_blocks.size();
  if (!strcmp(kind, "registered")) return registrations.size();
  return mapped_live(kind);
}
