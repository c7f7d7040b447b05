// fake_ranges.cpp: reserved address ranges, and memory that is created and mapped into them.
//
// An allocation is a memfd, so that a descriptor of it means the same memory in another process.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "fake_cuda.h"

namespace kalos_fake {
namespace {

const size_t kGranularity = 2 << 20;

struct allocation {
  int fd;
  size_t nbytes;
  int references;  // its handle, and each mapping
};
struct mapping {
  size_t nbytes;
  kalos_cu_allocation of;
  int access;  // PROT_* of the last cuMemSetAccess
};

std::map<uint64_t, size_t> reservations;
std::map<kalos_cu_allocation, allocation> allocations;
std::map<uint64_t, mapping> mappings;
kalos_cu_allocation last_allocation;

void drop_reference(kalos_cu_allocation handle) {
  allocation& one = allocations.at(handle);
  if (--one.references) return;
  close(one.fd);
  memory_used -= one.nbytes;
  allocations.erase(handle);
}

}  // namespace

bool is_mapped(uint64_t ptr, size_t nbytes) {
  const uint64_t end = ptr + nbytes;
  for (auto at = containing(mappings, ptr); at != mappings.end(); ++at) {
    const uint64_t stop = at->first + at->second.nbytes;
    if (at->first > ptr || stop < ptr || !at->second.access) return false;
    if (end <= stop) return true;
    ptr = stop;
  }
  return false;
}

void protect_mappings(bool open) {
  for (const auto& [ptr, one] : mappings) {
    mprotect((void*)ptr, one.nbytes, open ? one.access : PROT_NONE);
  }
}

uint64_t mapped_live(const char* kind) {
  if (!strcmp(kind, "reserved")) return reservations.size();
  if (!strcmp(kind, "created")) return allocations.size();
  if (!strcmp(kind, "mapped")) return mappings.size();
  return ~(uint64_t)0;
}

}  // namespace kalos_fake

using namespace kalos_fake;

KALOS_FAKE(cuMemGetAllocationGranularity, , 0, init,
           (size_t* nbytes, const kalos_cu_mem_prop* prop, int)) {
  KALOS_FAKE_ENTER(cuMemGetAllocationGranularity, );
  if (!nbytes || !prop) return kInvalidValue;
  *nbytes = kGranularity;
  return kSuccess;
}

KALOS_FAKE(cuMemAddressReserve, , 0, init,
           (kalos_cu_ptr * ptr, size_t nbytes, size_t alignment, kalos_cu_ptr, uint64_t flags)) {
  KALOS_FAKE_ENTER(cuMemAddressReserve, );
  guard hold(lock);
  if (!ptr || !nbytes || nbytes % kGranularity || flags || (alignment & (alignment - 1))) {
    return kInvalidValue;
  }
  const size_t unit = std::max(alignment, kGranularity);
  void* memory =
      mmap(nullptr, nbytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  const uint64_t begin = round_up((uint64_t)memory, unit);
  const uint64_t end = (uint64_t)memory + nbytes + unit;
  if (begin > (uint64_t)memory) munmap(memory, begin - (uint64_t)memory);
  if (end > begin + nbytes) munmap((void*)(begin + nbytes), end - begin - nbytes);
  reservations[begin] = nbytes;
  *ptr = begin;
  return kSuccess;
}

KALOS_FAKE(cuMemAddressFree, , 0, init, (kalos_cu_ptr ptr, size_t nbytes)) {
  KALOS_FAKE_ENTER(cuMemAddressFree, );
  guard hold(lock);
  const auto found = reservations.find(ptr);
  if (found == reservations.end() || found->second != nbytes) return kInvalidValue;
  const auto inside = mappings.lower_bound(ptr);
  if (inside != mappings.end() && inside->first < ptr + nbytes) return kInvalidValue;
  munmap((void*)ptr, nbytes);
  reservations.erase(found);
  return kSuccess;
}

KALOS_FAKE(cuMemCreate, , 0, init,
           (kalos_cu_allocation * handle, size_t nbytes, const kalos_cu_mem_prop* prop, uint64_t)) {
  KALOS_FAKE_ENTER(cuMemCreate, );
  guard hold(lock);
  if (!handle || !prop || !nbytes || nbytes % kGranularity) return kInvalidValue;
  if (prop->type != KALOS_CU_MEM_PINNED || prop->location.type != KALOS_CU_MEM_DEVICE) {
    return kInvalidValue;
  }
  if (prop->location.id < 0 || prop->location.id >= num_devices()) return kInvalidDevice;
  if (nbytes > memory_total() - memory_used) return kOutOfMemory;
  const int fd = memfd_create("kalos-fake-device", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)nbytes)) {
    if (fd >= 0) close(fd);
    return kOutOfMemory;
  }
  const std::vector<char> poison(kGranularity, (char)kPoison);
  for (size_t at = 0; at < std::min(nbytes, kPoisonMost); at += kGranularity) {
    if (pwrite(fd, poison.data(), kGranularity, (off_t)at) < 0) break;
  }
  *handle = ++last_allocation;
  allocations[*handle] = {fd, nbytes, 1};
  memory_used += nbytes;
  return kSuccess;
}

KALOS_FAKE(cuMemRelease, , 0, init, (kalos_cu_allocation handle)) {
  KALOS_FAKE_ENTER(cuMemRelease, );
  guard hold(lock);
  if (!allocations.count(handle)) return kInvalidValue;
  drop_reference(handle);
  return kSuccess;
}

KALOS_FAKE(cuMemMap, , 0, init,
           (kalos_cu_ptr ptr, size_t nbytes, size_t offset, kalos_cu_allocation handle, uint64_t)) {
  KALOS_FAKE_ENTER(cuMemMap, );
  guard hold(lock);
  const auto range = containing(reservations, ptr);
  const auto found = allocations.find(handle);
  if (found == allocations.end() || offset || nbytes != found->second.nbytes) return kInvalidValue;
  if (range == reservations.end() || ptr % kGranularity ||
      ptr - range->first + nbytes > range->second) {
    return kInvalidValue;
  }
  const auto before = containing(mappings, ptr + nbytes - 1);
  if (before != mappings.end() && before->first + before->second.nbytes > ptr) {
    return kInvalidValue;
  }
  if (mmap((void*)ptr, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) ==
      MAP_FAILED) {
    return kOutOfMemory;
  }
  ++found->second.references;
  mappings[ptr] = {nbytes, handle, PROT_NONE};
  return kSuccess;
}

KALOS_FAKE(cuMemUnmap, , 0, init, (kalos_cu_ptr ptr, size_t nbytes)) {
  KALOS_FAKE_ENTER(cuMemUnmap, );
  synchronize_all();
  guard hold(lock);
  uint64_t at = ptr;
  while (at < ptr + nbytes) {
    const auto found = mappings.find(at);
    if (found == mappings.end() || at + found->second.nbytes > ptr + nbytes) return kInvalidValue;
    at += found->second.nbytes;
  }
  mmap((void*)ptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  for (at = ptr; at < ptr + nbytes;) {
    const auto found = mappings.find(at);
    at += found->second.nbytes;
    drop_reference(found->second.of);
    mappings.erase(found);
  }
  return kSuccess;
}

KALOS_FAKE(cuMemSetAccess, , 0, init,
           (kalos_cu_ptr ptr, size_t nbytes, const kalos_cu_mem_access* access, size_t count)) {
  KALOS_FAKE_ENTER(cuMemSetAccess, );
  guard hold(lock);
  if (!access || count != 1) return kInvalidValue;
  const int protection = access->flags == 3   ? PROT_READ | PROT_WRITE
                         : access->flags == 1 ? PROT_READ
                                              : PROT_NONE;
  uint64_t at = ptr;
  while (at < ptr + nbytes) {
    const auto found = mappings.find(at);
    if (found == mappings.end() || at + found->second.nbytes > ptr + nbytes) return kInvalidValue;
    found->second.access = protection;
    at += found->second.nbytes;
  }
  if (!is_strict() || is_accessible()) mprotect((void*)ptr, nbytes, protection);
  return kSuccess;
}

KALOS_FAKE(cuMemExportToShareableHandle, , 0, init,
           (void* out, kalos_cu_allocation handle, int kind, uint64_t)) {
  KALOS_FAKE_ENTER(cuMemExportToShareableHandle, );
  guard hold(lock);
  const auto found = allocations.find(handle);
  if (!out || found == allocations.end() || kind != KALOS_CU_MEM_FILE_DESCRIPTOR) {
    return kInvalidValue;
  }
  *(int*)out = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}

KALOS_FAKE(cuMemImportFromShareableHandle, , 0, init,
           (kalos_cu_allocation * handle, void* shared, int kind)) {
  KALOS_FAKE_ENTER(cuMemImportFromShareableHandle, );
  guard hold(lock);
  struct stat info;
  const int fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 0);
  if (!handle || kind != KALOS_CU_MEM_FILE_DESCRIPTOR || fd < 0 || fstat(fd, &info)) {
    if (fd >= 0) close(fd);
    return kInvalidValue;
  }
  *handle = ++last_allocation;
  allocations[*handle] = {fd, (size_t)info.st_size, 1};
  memory_used += (size_t)info.st_size;
  return kSuccess;
}
