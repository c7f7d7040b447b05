// fuzz_channel.h: what an input of the channel's fuzzer is.
//
// An input is a sequence of steps of a client that keeps to no rule. Each is a kalos_step and
// `nbytes` bytes, fewer where the input ends, that are written to the beginning of a slot; then the
// slot's word is stored and the sidecar looks once. What an earlier step left in a slot stays
// there.
#ifndef KALOS_TESTS_FUZZ_CHANNEL_H
#define KALOS_TESTS_FUZZ_CHANNEL_H

#include "channel_end.h"

typedef struct kalos_step {
  uint64_t word;
  uint16_t nbytes;
  uint8_t slot;   // modulo KALOS_CHANNEL_SLOTS
  uint8_t flags;  // STEP_*
  uint32_t answer_nbytes;
} kalos_step;
_Static_assert(sizeof(kalos_step) == 16, "kalos_step");
#define STEP_ANSWER 1u  // what was taken is answered at once; else its slot stays busy
#define STEP_FAIL 2u    // with an error
#define STEP_SLEEP 4u   // the client says that it sleeps

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes);

#endif  // KALOS_TESTS_FUZZ_CHANNEL_H
