// fiber.h: a thread's stack and registers, and the switch from one to another.
#ifndef KALOS_SIMT_FIBER_H
#define KALOS_SIMT_FIBER_H

#include <stddef.h>

namespace kalos_simt {

struct fiber {
  void* stack_pointer = nullptr;  // where it goes on; all else is saved on its stack
  char* stack = nullptr;
  size_t stack_nbytes = 0;
  size_t lead = 0;         // bytes left free at the top
  void* shadow = nullptr;  // AddressSanitizer's frames of it
};

// Memory for a fiber, with a page before it that nothing may touch. Kept for the whole process.
void fiber_make(fiber* one);
// Lets the fiber begin with `body` when it is switched to; `body` must not return.
void fiber_begin(fiber* one, void (*body)());
// `last`: `from` never goes on.
void fiber_switch(fiber* from, fiber* to, bool last = false);
// What a fiber does first.
void fiber_entered();
// Lets `one` stand for the stack that the caller runs on.
void fiber_adopt(fiber* one);

}  // namespace kalos_simt

#endif  // KALOS_SIMT_FIBER_H
