// _sigbus.h: a mapped file that is cut from outside must end in an error, not in the process's
// death.
//
// Reading a mapping behind its file's new end raises SIGBUS. The handler puts a page of zeros under
// the address where it lies in a mapping of ours and returns; the read goes on, the checksum of
// what it reads does not hold, and the caller gets StoreCorrupt. A signal that is not ours goes to
// whoever was there before. Costs nothing where nothing goes wrong.
#ifndef KALOS_SIGBUS_H
#define KALOS_SIGBUS_H

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define KALOS_GUARD_MAX 8192

typedef struct kalos_guard_table {
  uintptr_t base[KALOS_GUARD_MAX];
  uintptr_t end[KALOS_GUARD_MAX];  // 0: free
  struct sigaction before;
  int installed;
  uint32_t hits;  // pages that were put in place
} kalos_guard_table;

static kalos_guard_table kalos_guards;

static void kalos_on_sigbus(int sig, siginfo_t* info, void* context) {
  uintptr_t address = (uintptr_t)info->si_addr;
  if (info->si_code == BUS_ADRERR) {
    for (int i = 0; i < KALOS_GUARD_MAX; i++) {
      uintptr_t end = __atomic_load_n(&kalos_guards.end[i], __ATOMIC_ACQUIRE);
      if (end && address >= kalos_guards.base[i] && address < end) {
        uintptr_t page = address & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
        if (mmap((void*)page, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
          __atomic_fetch_add(&kalos_guards.hits, 1, __ATOMIC_RELAXED);
          return;
        }
      }
    }
  }
  if (kalos_guards.before.sa_flags & SA_SIGINFO) {
    kalos_guards.before.sa_sigaction(sig, info, context);
  } else if (kalos_guards.before.sa_handler != SIG_IGN &&
             kalos_guards.before.sa_handler != SIG_DFL) {
    kalos_guards.before.sa_handler(sig);
  } else {
    signal(SIGBUS, SIG_DFL);  // the instruction faults again and the process ends as it would have
  }
}

// A writer asks before it calls its index complete: what it stored into such a page is in no file.
static uint32_t kalos_guard_hits(void) {
  return __atomic_load_n(&kalos_guards.hits, __ATOMIC_RELAXED);
}

// Call with the GIL. A range that finds no place is simply not guarded.
static void kalos_guard_add(void* base, size_t n) {
  if (!kalos_guards.installed) {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = kalos_on_sigbus;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    kalos_guards.installed = sigaction(SIGBUS, &action, &kalos_guards.before) == 0;
  }
  for (int i = 0; i < KALOS_GUARD_MAX; i++) {
    if (kalos_guards.end[i] == 0) {
      kalos_guards.base[i] = (uintptr_t)base;
      __atomic_store_n(&kalos_guards.end[i], (uintptr_t)base + n, __ATOMIC_RELEASE);
      return;
    }
  }
}

static void kalos_guard_remove(void* base) {
  for (int i = 0; i < KALOS_GUARD_MAX; i++)
    if (kalos_guards.end[i] && kalos_guards.base[i] == (uintptr_t)base)
      __atomic_store_n(&kalos_guards.end[i], (uintptr_t)0, __ATOMIC_RELEASE);
}

#endif  // KALOS_SIGBUS_H
