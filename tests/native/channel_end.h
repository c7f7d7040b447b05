// channel_end.h: a sidecar's end over memory of this process, and a reader of all that it took.
//
// What the programs in this folder share. Every buffer is exactly as large as the protocol says, so
// that a sanitizer sees the first byte beyond it; what a sanitizer cannot see is checked here, and
// ends the program.
#ifndef KALOS_TESTS_CHANNEL_END_H
#define KALOS_TESTS_CHANNEL_END_H

#include <stdio.h>
#include <stdlib.h>

#include "_channel.h"

#define SLOT_NBYTES 4096u
#define SLOT_CAPACITY (SLOT_NBYTES - sizeof(kalos_message))
#define REGION_NBYTES (KALOS_CHANNEL_PAGE + KALOS_CHANNEL_SLOTS * SLOT_NBYTES)
#define GENERATION 0x1122334455667788u

static inline void must(int holds, const char* text) {
  if (holds) return;
  fprintf(stderr, "does not hold: %s\n", text);
  abort();
}

// Pages of zeros that every thread may use.
static inline uint8_t* new_region(void) {
  uint8_t* region = (uint8_t*)aligned_alloc(KALOS_CHANNEL_PAGE, REGION_NBYTES);
  must(region != NULL, "there is memory for a region");
  memset(region, 0, REGION_NBYTES);
  return region;
}

// The client's slot i of a request region.
static inline uint8_t* slot_of(uint8_t* requests, uint32_t i) {
  return requests + KALOS_CHANNEL_PAGE + (size_t)i * SLOT_NBYTES;
}

static inline void open_end(kalos_end* end, const uint8_t* requests, uint8_t* responses) {
  memset(end, 0, sizeof(*end));
  end->requests = requests;
  end->responses = responses;
  end->request_nbytes = end->response_nbytes = SLOT_NBYTES;
  end->generation = GENERATION;
  for (uint32_t i = 0; i < KALOS_CHANNEL_SLOTS; i++) {
    end->seats[i].body = (uint8_t*)malloc(SLOT_CAPACITY);
    must(end->seats[i].body != NULL, "there is memory for a body");
    memset(end->seats[i].body, 0, SLOT_CAPACITY);
  }
}

static inline void close_end(kalos_end* end) {
  for (uint32_t i = 0; i < KALOS_CHANNEL_SLOTS; i++) free(end->seats[i].body);
}

static inline uint64_t sum_of(const uint8_t* bytes, size_t nbytes) {
  uint64_t sum = 0;
  for (size_t k = 0; k < nbytes; k++) sum += bytes[k];
  return sum;
}

// Sum of all that a call holds, read by the offsets that were given out for it.
static inline uint64_t read_call(const uint8_t* body, size_t nbytes,
                                 const kalos_call_parts* parts) {
  const kalos_call* call = &parts->call;
  const size_t query_nbytes = (size_t)call->query_dims * 4;
  must(parts->session_off == sizeof(kalos_call), "the session follows the call");
  must(parts->tenant_off - parts->session_off == call->session_nbytes, "the tenant follows it");
  must(parts->query_off - parts->tenant_off - call->tenant_nbytes < 4, "then zeros, then a query");
  must(parts->options_off - parts->query_off == query_nbytes, "the options follow the query");
  must(parts->options_off + call->options_nbytes == nbytes, "the options end the body");
  must(parts->query_off % 4 == 0, "a query is aligned");
  return sum_of(body + parts->session_off, call->session_nbytes) +
         sum_of(body + parts->tenant_off, call->tenant_nbytes) +
         sum_of(body + parts->query_off, query_nbytes) +
         sum_of(body + parts->options_off, call->options_nbytes);
}

// Sum of a request that was taken into seat i and found right.
static inline uint64_t read_seat(const kalos_end* end, uint32_t i) {
  const kalos_seat* seat = &end->seats[i];
  must(seat->head.body_nbytes <= SLOT_CAPACITY, "a body fits its slot");
  must(seat->head.generation == GENERATION, "a request is for this life");
  must(seat->head.id != 0 && seat->head.id <= KALOS_ID_MAX, "an ID fits a word");
  if (!kalos_is_call(seat->head.opcode)) return 0;
  return read_call(seat->body, seat->head.body_nbytes, &seat->parts);
}

// xorshift64*: the same numbers everywhere.
static inline uint64_t next_random(uint64_t* state) {
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 0x2545f4914f6cdd1du;
}

#endif  // KALOS_TESTS_CHANNEL_END_H
