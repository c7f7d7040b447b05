// fiber.cpp: switches of stacks for x86-64 and AArch64, in a few instructions. swapcontext would
// save the signal mask, a system call a switch.
#include "fiber.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// void kalos_simt_swap(void** save, void* load): saves what a callee must keep, changes stacks.
#if defined(__x86_64__)
asm(R"(
.text
.globl kalos_simt_swap
.hidden kalos_simt_swap
.type kalos_simt_swap, @function
kalos_simt_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kalos_simt_swap, . - kalos_simt_swap
)");
static const size_t kSaved = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl kalos_simt_swap
.hidden kalos_simt_swap
.type kalos_simt_swap, @function
kalos_simt_swap:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size kalos_simt_swap, . - kalos_simt_swap
)");
#else
#error "the emulator switches stacks on x86-64 and AArch64 alone"
#endif
extern "C" void kalos_simt_swap(void** save, void* load);

namespace kalos_simt {

// Sanitized code has frames several times as large.
#ifdef __SANITIZE_ADDRESS__
static const size_t kStack = 512 << 10;
static fiber* came_from = nullptr;
#else
static const size_t kStack = 128 << 10;
#endif

void fiber_make(fiber* one) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char* memory = (char*)mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) {
    perror("the emulator has no memory for a thread's stack");
    abort();
  }
  one->stack = memory + page;
  one->stack_nbytes = kStack;
  // Tops at the same place of their pages would fall on the same few sets of the cache.
  static size_t made = 0;
  one->lead = made++ * 192 % 4096;
}

void fiber_begin(fiber* one, void (*body)()) {
  uintptr_t top = (uintptr_t)(one->stack + one->stack_nbytes - one->lead) & ~(uintptr_t)15;
#if defined(__x86_64__)
  // As if `body` had been called: the address to go to, and one word more for the alignment.
  void** frame = (void**)top - 2 - kSaved;
  memset(frame, 0, (kSaved + 2) * sizeof(void*));
  frame[kSaved] = (void*)body;
#else
  void** frame = (void**)(top - 160);
  memset(frame, 0, 160);
  frame[11] = (void*)body;
#endif
  one->stack_pointer = frame;
  one->shadow = nullptr;
#ifdef __SANITIZE_ADDRESS__
  // Whoever used the stack before may have left it in the middle of a function.
  __asan_unpoison_memory_region(one->stack, one->stack_nbytes);
#endif
}

void fiber_switch(fiber* from, fiber* to, bool last) {
#ifdef __SANITIZE_ADDRESS__
  came_from = from;
  __sanitizer_start_switch_fiber(last ? nullptr : &from->shadow, to->stack, to->stack_nbytes);
#else
  (void)last;
#endif
  kalos_simt_swap(&from->stack_pointer, to->stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from->shadow, nullptr, nullptr);
#endif
}

#ifdef __SANITIZE_ADDRESS__
// The bounds of the stack that the launch came from are known once a fiber runs.
void fiber_entered() {
  const void* bottom;
  size_t nbytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &nbytes);
  if (!came_from->stack) {
    came_from->stack = (char*)bottom;
    came_from->stack_nbytes = nbytes;
  }
}
#else
void fiber_entered() {}
#endif

void fiber_adopt(fiber* one) { *one = fiber(); }

}  // namespace kalos_simt
