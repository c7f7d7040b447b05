// litmus_channel.c: whether each side sees all that the other wrote before it said so.
//   litmus_channel TRIPS
//
// A client keeps all slots of a channel in flight; the sidecar answers, itself or by a worker.
// Every byte of a request and of its answer is a function of the ID, and both sides check every
// byte. Four ways, TRIPS requests each: both sides look without pause, or sleep at once; the thread
// that takes answers, or a worker. With -fsanitize=thread nothing may be reported: all that one
// side reads was ordered by a word. A sleep that nobody ends within LOST_NS is a lost wake-up.
#include <pthread.h>
#include <sched.h>

#include "channel_end.h"

#define LOST_NS 20000000000u
#define SPINS 200u
#define QUEUE_LEN (2 * KALOS_CHANNEL_SLOTS)

typedef struct way {
  const char* name;
  int sleeps;
  int by_worker;
  uint32_t depth;  // slots in flight
} way;

static uint8_t *requests, *responses;
static kalos_end end;
static way now;
static uint32_t stopping;
static uint64_t num_sleeps;

// What the thread that takes hands to the worker, in order.
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t queue_grew = PTHREAD_COND_INITIALIZER;
static uint32_t queue[QUEUE_LEN], queue_first, queue_stop;

// ---- Payloads -----------------------------------------------------------------------------------

static uint8_t byte_of(uint64_t id, size_t k, uint32_t side) {
  return (uint8_t)((id * 0x9e3779b97f4a7c15u + k * 0x100000001b3u + side) >> 29);
}

// So that neighbours differ in size, and some fill their slot.
static size_t nbytes_of(uint64_t id, uint32_t side) {
  const size_t most = SLOT_CAPACITY - sizeof(kalos_call);
  const size_t some = (size_t)(id * 0x9e3779b97f4a7c15u >> (side ? 40 : 44));
  return id % 64 ? some % 300 : most - some % 8;
}

static void fill(uint8_t* bytes, size_t nbytes, uint64_t id, uint32_t side) {
  for (size_t k = 0; k < nbytes; k++) bytes[k] = byte_of(id, k, side);
}

static void check(const uint8_t* bytes, size_t nbytes, uint64_t id, uint32_t side) {
  must(nbytes == nbytes_of(id, side), "a message has its own size");
  for (size_t k = 0; k < nbytes; k++)
    must(bytes[k] == byte_of(id, k, side), "a message has its own bytes");
}

// ---- The sidecar --------------------------------------------------------------------------------

static void answer(uint32_t i) {
  const kalos_seat* seat = &end.seats[i];
  const uint64_t id = seat->head.id;
  check(seat->body + seat->parts.options_off, seat->parts.call.options_nbytes, id, 0);
  fill(kalos_answer_body(&end, i), nbytes_of(id, 1), id, 1);
  kalos_answer(&end, i, nbytes_of(id, 1), id % 3 ? KALOS_STATUS_OK : KALOS_STATUS_ERROR);
}

static void hand_over(uint32_t i) {
  pthread_mutex_lock(&queue_lock);
  queue[queue_stop++ % QUEUE_LEN] = i;
  pthread_cond_signal(&queue_grew);
  pthread_mutex_unlock(&queue_lock);
}

static void* work(void* unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&queue_lock);
    while (queue_first == queue_stop && !kalos_load_flag(&stopping))
      pthread_cond_wait(&queue_grew, &queue_lock);
    if (queue_first == queue_stop) {
      pthread_mutex_unlock(&queue_lock);
      return NULL;
    }
    const uint32_t i = queue[queue_first++ % QUEUE_LEN];
    pthread_mutex_unlock(&queue_lock);
    answer(i);
  }
}

// As the serving loop does, for one channel.
static void sleep_until_rung(void) {
  const kalos_request_head* asks = (const kalos_request_head*)requests;
  kalos_response_head* mine = (kalos_response_head*)responses;
  const uint32_t seen = kalos_load_flag(&asks->doorbell);
  kalos_store_flag(&mine->sleeping, 1);
  kalos_fence();
  if (!kalos_has_news(&end) && !kalos_load_flag(&stopping)) {
    const uint64_t began = kalos_mono_ns();
    num_sleeps++;
    kalos_futex_wait(&asks->doorbell, seen, LOST_NS);
    must(kalos_mono_ns() - began < LOST_NS, "whoever asks wakes the sidecar");
  }
  kalos_store_flag(&mine->sleeping, 0);
}

static void* serve(void* unused) {
  uint64_t pings = 0;
  uint32_t i = 0, idle = 0;
  int code = 0;
  (void)unused;
  while (!kalos_load_flag(&stopping)) {
    if (kalos_next(&end, &i, &code, &pings)) {
      must(code == KALOS_TAKE_OK, "an honest request is right");
      if (now.by_worker)
        hand_over(i);
      else
        answer(i);
    } else if (now.sleeps) {
      sleep_until_rung();
    } else if (++idle % SPINS) {
      kalos_relax();
    } else {
      sched_yield();
    }
  }
  return NULL;
}

// ---- The client ---------------------------------------------------------------------------------

static void ask(uint32_t i, uint64_t id) {
  kalos_message* head = (kalos_message*)slot_of(requests, i);
  kalos_call* call = (kalos_call*)(head + 1);
  const size_t nbytes = nbytes_of(id, 0);
  memset(call, 0, sizeof(*call));
  call->options_nbytes = (uint32_t)nbytes;
  fill((uint8_t*)(call + 1), nbytes, id, 0);
  kalos_fill_head(head, KALOS_OP_CALL, id, GENERATION, sizeof(*call) + nbytes, 0);
  kalos_ask(requests, responses, i, id);
}

static void await(uint32_t i, uint64_t id) {
  uint32_t state = KALOS_SLOT_EMPTY;
  kalos_message head;
  if (now.sleeps) {
    const uint64_t began = kalos_mono_ns();
    while (state == KALOS_SLOT_EMPTY) {
      state = kalos_await(requests, responses, i, id, 0, LOST_NS);
      must(state || kalos_mono_ns() - began < LOST_NS, "whoever answers wakes the client");
    }
  } else {
    while (state == KALOS_SLOT_EMPTY) {
      state = kalos_await(requests, responses, i, id, SPINS, 0);
      if (state == KALOS_SLOT_EMPTY) sched_yield();  // there may be one CPU
    }
  }
  must(state == (id % 3 ? KALOS_SLOT_RESULT_READY : KALOS_SLOT_ERROR), "the word has its state");
  const uint8_t* slot = slot_of(responses, i);
  must(kalos_taken(slot, SLOT_CAPACITY, id, GENERATION, KALOS_OP_CALL, state, &head) ==
           KALOS_TAKE_OK,
       "an honest answer is right");
  must(head.status == (id % 3 ? KALOS_STATUS_OK : KALOS_STATUS_ERROR), "so has its head");
  check(slot + sizeof(head), head.body_nbytes, id, 1);
}

static uint64_t run(uint64_t trips, uint64_t first_id) {
  uint64_t in_flight[KALOS_CHANNEL_SLOTS] = {0}, id = first_id;
  const uint64_t stop_id = first_id + trips;
  uint32_t open = 0;
  for (uint32_t i = 0;; i = (i + 1) % now.depth) {
    if (in_flight[i]) {
      await(i, in_flight[i]);
      in_flight[i] = 0;
      open--;
    }
    if (id < stop_id) {
      ask(i, id);
      in_flight[i] = id++;
      open++;
    } else if (open == 0) {
      return stop_id;
    }
  }
}

int main(int argc, char** argv) {
  static const way ways[] = {
      {"look", 0, 0, KALOS_CHANNEL_SLOTS},
      {"sleep", 1, 0, KALOS_CHANNEL_SLOTS},
      {"look, worker", 0, 1, KALOS_CHANNEL_SLOTS},
      {"sleep, worker", 1, 1, KALOS_CHANNEL_SLOTS},
      {"sleep, one", 1, 0, 1},
      {"sleep, worker, one", 1, 1, 1},
  };
  must(argc == 2, "the number of trips is given");
  const uint64_t trips = strtoull(argv[1], NULL, 10);
  uint64_t id = 1;
  requests = new_region(), responses = new_region();
  open_end(&end, requests, responses);
  for (size_t k = 0; k < sizeof(ways) / sizeof(*ways); k++) {
    pthread_t sidecar, worker;
    now = ways[k];
    num_sleeps = 0;
    kalos_store_flag(&stopping, 0);
    must(pthread_create(&sidecar, NULL, serve, NULL) == 0, "a thread can be made");
    must(pthread_create(&worker, NULL, work, NULL) == 0, "a thread can be made");
    id = run(trips, id);
    kalos_store_flag(&stopping, 1);
    kalos_futex_wake(&((kalos_request_head*)requests)->doorbell);
    pthread_mutex_lock(&queue_lock);
    pthread_cond_broadcast(&queue_grew);
    pthread_mutex_unlock(&queue_lock);
    must(pthread_join(sidecar, NULL) == 0, "a thread can be joined");
    must(pthread_join(worker, NULL) == 0, "a thread can be joined");
    printf("%s: trips %llu sleeps %llu\n", now.name, (unsigned long long)trips,
           (unsigned long long)num_sleeps);
  }
  close_end(&end);
  free(requests), free(responses);
  return 0;
}
