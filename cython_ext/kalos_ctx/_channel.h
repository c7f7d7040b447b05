// _channel.h: the two ends of a channel, in plain C: copy once, then check.
//
// Nothing that the other side can write is read twice, and no number of it is used before it was
// checked. The sidecar reads a client's region only through kalos_take; the client reads the
// sidecar's only through kalos_taken. Kept free of Python so that sanitizers and fuzzers can run it
// (tests/native).
#ifndef KALOS_CHANNEL_ENDS_H
#define KALOS_CHANNEL_ENDS_H

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kalos_channel.h"

#define KALOS_SPINS_FIRST 512u  // looks before the first yield, about 10 us
#define KALOS_SPINS_EACH 64u    // looks between two of them

// What a check found; the table in _channel.pyx has a sentence for each.
enum kalos_refusal {
  KALOS_TAKE_OK = 0,
  KALOS_TAKE_NOTHING = 1,  // the slot holds no new request
  KALOS_BAD_STATE,
  KALOS_BAD_ID,  // not larger than the slot's last, or not the word's
  KALOS_BAD_MAGIC,
  KALOS_BAD_OPCODE,
  KALOS_BAD_RESERVED,
  KALOS_BAD_GENERATION,
  KALOS_BAD_LENGTH,  // a length is larger than its place, or the parts do not add up
  KALOS_BAD_VALUE,
  KALOS_REFUSALS
};

// ---- Order --------------------------------------------------------------------------------------

static inline uint64_t kalos_load_word(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void kalos_store_word(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint32_t kalos_load_flag(const uint32_t* flag) {
  return __atomic_load_n(flag, __ATOMIC_SEQ_CST);
}

static inline void kalos_store_flag(uint32_t* flag, uint32_t value) {
  __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
}

// Between a store and a load of something else: who goes to sleep stores its flag and then looks
// for work, who brings work stores it and then looks for the flag. One of them sees the other.
static inline void kalos_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

static inline void kalos_relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield" ::: "memory");
#endif
}

static inline uint64_t kalos_mono_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// Called with a count from 1 by who looks again and again. Now and then it lets others run: the
// scheduler may have put both sides on one CPU, and who waits must not keep the other from
// answering. A yield with nobody else there costs a fraction of a microsecond, and comes only where
// the answer was not quick.
static inline void kalos_spin(uint64_t n) {
  if (n > KALOS_SPINS_FIRST && n % KALOS_SPINS_EACH == 0)
    sched_yield();
  else
    kalos_relax();
}

// Sleep while *word is `seen`, at most timeout_ns.
static inline void kalos_futex_wait(const uint32_t* word, uint32_t seen, uint64_t timeout_ns) {
  struct timespec span = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &span, NULL, 0);
}

static inline void kalos_futex_wake(uint32_t* word) {
  __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

// Copy what the other side may be writing. The barrier binds the compiler: what is read behind it
// is read from the copy, not from there once more.
static inline void kalos_copy(void* to, const void* from, size_t nbytes) {
  memcpy(to, from, nbytes);
  __asm__ __volatile__("" : : "r"(to) : "memory");
}

// ---- Checks: on private copies only -------------------------------------------------------------

static inline size_t kalos_padded(size_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

static inline int kalos_is_call(uint32_t opcode) {
  return opcode == KALOS_OP_COUNT || opcode == KALOS_OP_ASSEMBLE || opcode == KALOS_OP_CALL;
}

// The head of a request, as far as it can be checked without its body.
static inline int kalos_check_head(const kalos_message* head, uint64_t capacity) {
  if (head->magic != KALOS_CHANNEL_MAGIC) return KALOS_BAD_MAGIC;
  if (head->opcode != KALOS_OP_PING && !kalos_is_call(head->opcode)) return KALOS_BAD_OPCODE;
  if (head->status || head->reserved0 || head->reserved[0] || head->reserved[1] ||
      head->reserved[2])
    return KALOS_BAD_RESERVED;
  if (head->id == 0 || head->id > KALOS_ID_MAX) return KALOS_BAD_ID;
  if (head->body_nbytes > capacity) return KALOS_BAD_LENGTH;
  if (head->opcode == KALOS_OP_PING) return head->body_nbytes ? KALOS_BAD_LENGTH : KALOS_TAKE_OK;
  return head->body_nbytes < sizeof(kalos_call) ? KALOS_BAD_LENGTH : KALOS_TAKE_OK;
}

// Where the parts of a call's body lie; offsets from the body's first byte.
typedef struct kalos_call_parts {
  kalos_call call;
  size_t session_off;
  size_t tenant_off;
  size_t query_off;
  size_t options_off;
} kalos_call_parts;

static inline int kalos_check_call(const uint8_t* body, size_t nbytes, uint32_t opcode,
                                   kalos_call_parts* parts) {
  if (nbytes < sizeof(kalos_call)) return KALOS_BAD_LENGTH;
  kalos_call* call = &parts->call;
  memcpy(call, body, sizeof(*call));
  if (call->reserved[0] || call->reserved[1] || call->reserved[2]) return KALOS_BAD_RESERVED;
  if (call->session_nbytes > KALOS_NAME_MAX || call->tenant_nbytes > KALOS_NAME_MAX)
    return KALOS_BAD_LENGTH;
  if (call->max_tokens < -1 || call->max_tokens > KALOS_CALL_MAX_TOKENS || call->reserve < 0 ||
      call->reserve > KALOS_CALL_MAX_TOKENS || call->as_of < -1 ||
      call->as_of > KALOS_CALL_MAX_TOKENS)
    return KALOS_BAD_VALUE;
  if (opcode != KALOS_OP_ASSEMBLE && (call->query_dims || call->top_k)) return KALOS_BAD_VALUE;
  parts->session_off = sizeof(kalos_call);
  parts->tenant_off = parts->session_off + call->session_nbytes;
  const size_t names_end = parts->tenant_off + call->tenant_nbytes;
  parts->query_off = kalos_padded(names_end, 4);
  // 64-bit sums of 32-bit lengths: no overflow.
  parts->options_off = parts->query_off + (size_t)call->query_dims * 4;
  if (parts->options_off + call->options_nbytes != nbytes) return KALOS_BAD_LENGTH;
  for (size_t i = names_end; i < parts->query_off; i++)
    if (body[i]) return KALOS_BAD_RESERVED;
  return KALOS_TAKE_OK;
}

// ---- The sidecar's end --------------------------------------------------------------------------

// What the sidecar keeps of one slot, in its own memory.
typedef struct kalos_seat {
  uint64_t seen;  // the last word that was looked at
  uint64_t id;    // the request that is being answered, or was last
  uint32_t busy;  // taken and not answered; kalos_load_flag, since a worker may answer
  kalos_message head;
  kalos_call_parts parts;
  uint8_t* body;  // capacity bytes
} kalos_seat;

// The sidecar's end of one channel: the mappings, and what it keeps in its own memory.
typedef struct kalos_end {
  const uint8_t* requests;  // the client writes it at any time
  uint8_t* responses;
  size_t request_nbytes;  // of a slot
  size_t response_nbytes;
  uint64_t generation;
  uint32_t next_slot;  // where the next look begins
  kalos_seat seats[KALOS_CHANNEL_SLOTS];
  void* owner;
} kalos_end;

// Copy the request of slot `i` out of the client's region, once, and check the copy. A refused one
// leaves head.id as the word named it, so that it can be answered.
static inline int kalos_take(kalos_end* end, uint32_t i) {
  const kalos_request_head* shared = (const kalos_request_head*)end->requests;
  const uint8_t* slot = end->requests + KALOS_CHANNEL_PAGE + (size_t)i * end->request_nbytes;
  const size_t capacity = end->request_nbytes - sizeof(kalos_message);
  kalos_seat* seat = &end->seats[i];
  const uint64_t word = kalos_load_word(&shared->words[i]);
  if (word == seat->seen) return KALOS_TAKE_NOTHING;
  if (kalos_load_flag(&seat->busy)) return KALOS_TAKE_NOTHING;  // one request a slot at a time
  seat->seen = word;
  if (KALOS_WORD_STATE(word) == KALOS_SLOT_EMPTY) return KALOS_TAKE_NOTHING;
  kalos_copy(&seat->head, slot, sizeof(seat->head));
  const uint64_t named = seat->head.id;
  seat->head.id = KALOS_WORD_ID(word);
  if (KALOS_WORD_STATE(word) != KALOS_SLOT_REQUEST_READY) return KALOS_BAD_STATE;
  if (seat->head.id != named || seat->head.id <= seat->id) return KALOS_BAD_ID;
  seat->id = seat->head.id;
  const int code = kalos_check_head(&seat->head, capacity);
  if (code) return code;
  if (seat->head.generation != end->generation) return KALOS_BAD_GENERATION;
  kalos_copy(seat->body, slot + sizeof(kalos_message), seat->head.body_nbytes);
  if (!kalos_is_call(seat->head.opcode)) return KALOS_TAKE_OK;
  return kalos_check_call(seat->body, seat->head.body_nbytes, seat->head.opcode, &seat->parts);
}

// Whether a slot holds something that was not looked at.
static inline int kalos_has_news(const kalos_end* end) {
  const kalos_request_head* shared = (const kalos_request_head*)end->requests;
  for (uint32_t i = 0; i < KALOS_CHANNEL_SLOTS; i++)
    if (!kalos_load_flag(&end->seats[i].busy) &&
        kalos_load_word(&shared->words[i]) != end->seats[i].seen)
      return 1;
  return 0;
}

static inline void kalos_fill_head(kalos_message* head, uint32_t opcode, uint64_t id,
                                   uint64_t generation, uint64_t body_nbytes, uint32_t status) {
  memset(head, 0, sizeof(*head));
  head->magic = KALOS_CHANNEL_MAGIC;
  head->opcode = (uint16_t)opcode;
  head->status = (uint16_t)status;
  head->id = id;
  head->generation = generation;
  head->body_nbytes = (uint32_t)body_nbytes;
}

// Where the body of slot i's answer goes, response_nbytes - sizeof(kalos_message) bytes.
static inline uint8_t* kalos_answer_body(kalos_end* end, uint32_t i) {
  return end->responses + KALOS_CHANNEL_PAGE + (size_t)i * end->response_nbytes +
         sizeof(kalos_message);
}

// The answer of slot i stands there, or goes by the socket: tell the client, and wake it where it
// sleeps.
static inline void kalos_publish(kalos_end* end, uint32_t i, uint32_t state) {
  kalos_response_head* mine = (kalos_response_head*)end->responses;
  const kalos_request_head* theirs = (const kalos_request_head*)end->requests;
  const uint64_t word = KALOS_WORD(end->seats[i].head.id, state);
  // First: a client that has its answer may ask again at once, and the loop, which sleeps where it
  // finds nothing, must not pass over that request because the seat is still busy. From here on
  // the seat is the loop's.
  kalos_store_flag(&end->seats[i].busy, 0);
  kalos_store_word(&mine->words[i], word);
  kalos_fence();
  if (kalos_load_flag(&theirs->waiting[i])) kalos_futex_wake(&mine->wake[i]);
}

static inline void kalos_answer(kalos_end* end, uint32_t i, size_t body_nbytes, uint32_t status) {
  const kalos_seat* seat = &end->seats[i];
  kalos_message* head = (kalos_message*)(kalos_answer_body(end, i) - sizeof(kalos_message));
  kalos_fill_head(head, seat->head.opcode, seat->head.id, end->generation, body_nbytes, status);
  kalos_publish(end, i, status ? KALOS_SLOT_ERROR : KALOS_SLOT_RESULT_READY);
}

// The client's next request, where it has one: at most one, so that no client holds up the others.
// A ping is answered here. Returns 1 for a request that is left to the caller (its slot busy, *code
// what its check said), 0 for none; *pings counts those answered.
static inline int kalos_next(kalos_end* end, uint32_t* slot, int* code, uint64_t* pings) {
  for (uint32_t k = 0; k < KALOS_CHANNEL_SLOTS; k++) {
    const uint32_t i = (end->next_slot + k) % KALOS_CHANNEL_SLOTS;
    *code = kalos_take(end, i);
    if (*code == KALOS_TAKE_NOTHING) continue;
    end->next_slot = i + 1;
    kalos_store_flag(&end->seats[i].busy, 1);
    if (*code == KALOS_TAKE_OK && end->seats[i].head.opcode == KALOS_OP_PING) {
      kalos_answer(end, i, 0, KALOS_STATUS_OK);
      ++*pings;
      return 0;
    }
    *slot = i;
    return 1;
  }
  return 0;
}

// ---- The client's end ---------------------------------------------------------------------------

// The request in slot i is written; tell the sidecar, and wake it where it sleeps.
static inline void kalos_ask(uint8_t* requests, const uint8_t* responses, uint32_t i, uint64_t id) {
  kalos_request_head* mine = (kalos_request_head*)requests;
  const kalos_response_head* theirs = (const kalos_response_head*)responses;
  kalos_store_word(&mine->words[i], KALOS_WORD(id, KALOS_SLOT_REQUEST_READY));
  kalos_fence();
  if (kalos_load_flag(&theirs->sleeping)) kalos_futex_wake(&mine->doorbell);
}

// State of the answer to `id` in slot i, KALOS_SLOT_EMPTY while there is none.
static inline uint32_t kalos_answered(const uint8_t* responses, uint32_t i, uint64_t id) {
  const kalos_response_head* theirs = (const kalos_response_head*)responses;
  const uint64_t word = kalos_load_word(&theirs->words[i]);
  return KALOS_WORD_ID(word) == id ? KALOS_WORD_STATE(word) : KALOS_SLOT_EMPTY;
}

// Wait for the answer: look `spins` times, then sleep at most sleep_ns.
static inline uint32_t kalos_await(uint8_t* requests, const uint8_t* responses, uint32_t i,
                                   uint64_t id, uint64_t spins, uint64_t sleep_ns) {
  kalos_request_head* mine = (kalos_request_head*)requests;
  const kalos_response_head* theirs = (const kalos_response_head*)responses;
  uint32_t state;
  for (uint64_t n = 1; n <= spins; n++) {
    state = kalos_answered(responses, i, id);
    if (state) return state;
    kalos_spin(n);
  }
  const uint32_t seen = kalos_load_flag(&theirs->wake[i]);
  kalos_store_flag(&mine->waiting[i], 1);
  kalos_fence();
  state = kalos_answered(responses, i, id);
  if (!state && sleep_ns) {
    kalos_futex_wait(&theirs->wake[i], seen, sleep_ns);
    state = kalos_answered(responses, i, id);
  }
  kalos_store_flag(&mine->waiting[i], 0);
  return state;
}

// The head of an answer to a request of an opcode, copied once and checked; its body is at most
// `capacity` bytes. `state` is what the slot's word says.
static inline int kalos_taken(const uint8_t* slot, size_t capacity, uint64_t id,
                              uint64_t generation, uint32_t opcode, uint32_t state,
                              kalos_message* head) {
  kalos_copy(head, slot, sizeof(*head));
  if (head->magic != KALOS_CHANNEL_MAGIC) return KALOS_BAD_MAGIC;
  if (head->id != id) return KALOS_BAD_ID;
  if (head->generation != generation) return KALOS_BAD_GENERATION;
  if (head->opcode != opcode) return KALOS_BAD_OPCODE;
  if (head->status != (state == KALOS_SLOT_ERROR ? KALOS_STATUS_ERROR : KALOS_STATUS_OK))
    return KALOS_BAD_VALUE;
  return head->body_nbytes > capacity ? KALOS_BAD_LENGTH : KALOS_TAKE_OK;
}

// ---- Numbers for the status page ----------------------------------------------------------------

static inline uint32_t kalos_stage_bucket(uint64_t ns) {
  const uint32_t b = ns ? 64u - (uint32_t)__builtin_clzll(ns) : 0;
  return b < KALOS_STAGE_BUCKETS ? b : KALOS_STAGE_BUCKETS - 1;
}

static inline void kalos_stage_add(kalos_status_page* page, uint32_t stage, int64_t ns) {
  const uint64_t took = ns > 0 ? (uint64_t)ns : 0;
  __atomic_fetch_add(&page->stages[stage][kalos_stage_bucket(took)], 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&page->sums_ns[stage], took, __ATOMIC_RELAXED);
}

static inline void kalos_count_add(kalos_status_page* page, uint32_t which, uint64_t n) {
  __atomic_fetch_add(&page->counts[which], n, __ATOMIC_RELAXED);
}

#endif  // KALOS_CHANNEL_ENDS_H
