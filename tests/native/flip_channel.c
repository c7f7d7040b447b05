// flip_channel.c: a client that changes its slots while the sidecar reads them.
//   flip_channel FLIPS
//
// One thread flips bits of words, heads and lengths as fast as it can, mostly there and back, so
// that what it flips is right most of the time and wrong at the worst moment. The other takes
// requests, and reads every part of each that was found right; and it reads answers as a client
// does, out of a region that is flipped as well. Sanitizers watch for an access out of range, and
// channel_end.h checks that a verdict holds for the copy that it was given on. The races are meant:
// no thread sanitizer here.
#include <pthread.h>

#include "channel_end.h"

#if defined(__SANITIZE_ADDRESS__)
#define AS_FAST_AS_IT_CAN __attribute__((no_sanitize("address", "undefined")))
#else
#define AS_FAST_AS_IT_CAN
#endif

#define FLIPPED_SLOTS 2u  // few: so that both threads are at the same bytes
#define FLIPS_A_MESSAGE 256u

static uint8_t *requests, *responses, *answers;
static uint8_t templates[KALOS_OP_CALL - KALOS_OP_PING + 1][SLOT_NBYTES];
static uint64_t num_flips, flips_wanted;

// ---- The flipper --------------------------------------------------------------------------------

static void make_templates(void) {
  for (uint32_t opcode = KALOS_OP_PING; opcode <= KALOS_OP_CALL; opcode++) {
    uint8_t* at = templates[opcode - KALOS_OP_PING];
    kalos_call call = {.max_tokens = 100, .as_of = -1, .session_nbytes = 300, .tenant_nbytes = 20};
    if (opcode == KALOS_OP_ASSEMBLE) call.query_dims = 64;
    call.options_nbytes = 200;
    const size_t body_nbytes =
        opcode == KALOS_OP_PING ? 0 : sizeof(call) + 320 + call.query_dims * sizeof(float) + 200;
    kalos_fill_head((kalos_message*)at, opcode, 1, GENERATION, body_nbytes, 0);
    if (body_nbytes) memcpy(at + sizeof(kalos_message), &call, sizeof(call));
  }
}

// A right message in the slot, under a new ID.
static void write_message(uint32_t i, uint32_t opcode, uint64_t id) {
  kalos_message* head = (kalos_message*)slot_of(requests, i);
  memcpy(head, templates[opcode - KALOS_OP_PING], 256);
  head->id = id;
  kalos_store_word(&((kalos_request_head*)requests)->words[i],
                   KALOS_WORD(id, KALOS_SLOT_REQUEST_READY));
  head = (kalos_message*)slot_of(answers, i);
  kalos_fill_head(head, opcode, id, GENERATION, 100, 0);
  kalos_store_word(&((kalos_request_head*)answers)->words[i], id);
}

// A byte that something depends on, in slot i of either region.
AS_FAST_AS_IT_CAN static volatile uint8_t* pick_byte(uint32_t i, uint64_t random) {
  static const uint16_t heads[] = {offsetof(kalos_message, body_nbytes),
                                   offsetof(kalos_message, body_nbytes) + 1,
                                   offsetof(kalos_message, body_nbytes) + 3,
                                   offsetof(kalos_message, opcode),
                                   offsetof(kalos_message, id),
                                   offsetof(kalos_message, generation),
                                   offsetof(kalos_message, magic),
                                   offsetof(kalos_message, status)};
  static const uint16_t lengths[] = {
      offsetof(kalos_call, session_nbytes), offsetof(kalos_call, session_nbytes) + 1,
      offsetof(kalos_call, tenant_nbytes),  offsetof(kalos_call, tenant_nbytes) + 1,
      offsetof(kalos_call, query_dims),     offsetof(kalos_call, query_dims) + 3,
      offsetof(kalos_call, options_nbytes), offsetof(kalos_call, options_nbytes) + 3};
  const uint32_t which = (uint32_t)(random >> 8) & 7;
  switch (random & 7) {
    case 0:
      return requests + sizeof(uint64_t) * i + which;  // the word
    case 1:
      return slot_of(answers, i) + heads[which];
    case 2:
      return slot_of(requests, i) + ((random >> 16) & 255);  // anything near the beginning
    case 3:
    case 4:
      return slot_of(requests, i) + heads[which];
    default:
      return slot_of(requests, i) + sizeof(kalos_message) + lengths[which];
  }
}

AS_FAST_AS_IT_CAN static void* flip(void* unused) {
  uint64_t random = 88172645463325252u, id = 1, done = 0;
  (void)unused;
  while (done < flips_wanted) {
    const uint32_t i = (uint32_t)(next_random(&random) >> 32) % FLIPPED_SLOTS;
    write_message(i, KALOS_OP_PING + (uint32_t)(id % 4), id);
    id++;
    for (uint32_t k = 0; k < FLIPS_A_MESSAGE; k += 2) {
      const uint64_t chosen = next_random(&random);
      volatile uint8_t* byte = pick_byte(i, chosen);
      const uint8_t bit = (uint8_t)(1u << ((chosen >> 40) & 7));
      *byte ^= bit;
      // One of 256 stays as it is, until the next message.
      const int goes_back = ((chosen >> 48) & 255) != 0;
      if (goes_back) *byte ^= bit;
      done += goes_back ? 2 : 1;
      __atomic_store_n(&num_flips, done, __ATOMIC_RELAXED);
    }
  }
  return NULL;
}

// ---- The sidecar and the client -----------------------------------------------------------------

static uint64_t flips_now(void) { return __atomic_load_n(&num_flips, __ATOMIC_RELAXED); }

static int read_answer(uint32_t i, uint8_t* copy) {
  const uint64_t id = kalos_load_word(&((kalos_request_head*)answers)->words[i]);
  kalos_message head;
  if (kalos_taken(slot_of(answers, i), SLOT_CAPACITY, id, GENERATION, KALOS_OP_COUNT,
                  KALOS_SLOT_RESULT_READY, &head) != KALOS_TAKE_OK)
    return 0;
  memcpy(copy, slot_of(answers, i) + sizeof(head), head.body_nbytes);
  return 1;
}

int main(int argc, char** argv) {
  static kalos_end end;
  uint64_t takes = 0, right = 0, pings = 0, raced = 0, read = 0, sum = 0, verdicts[KALOS_REFUSALS];
  uint8_t* copy = (uint8_t*)malloc(SLOT_CAPACITY);
  pthread_t flipper;
  must(argc == 2 && copy != NULL, "the number of flips is given");
  flips_wanted = strtoull(argv[1], NULL, 10);
  requests = new_region(), responses = new_region(), answers = new_region();
  open_end(&end, requests, responses);
  memset(verdicts, 0, sizeof(verdicts));
  make_templates();
  must(pthread_create(&flipper, NULL, flip, NULL) == 0, "a thread can be made");
  for (uint64_t before = 0; (before = flips_now()) < flips_wanted;) {
    uint32_t i = 0;
    int code = KALOS_TAKE_NOTHING;
    // Each look is the first of a new client: what was seen before must not end the test.
    for (uint32_t k = 0; k < KALOS_CHANNEL_SLOTS; k++) end.seats[k].seen = end.seats[k].id = 0;
    if (kalos_next(&end, &i, &code, &pings)) {
      takes++;
      verdicts[code]++;
      raced += flips_now() != before;
      if (code == KALOS_TAKE_OK) {
        right++;
        sum += read_seat(&end, i);
      }
      kalos_answer(&end, i, sum % SLOT_CAPACITY, KALOS_STATUS_OK);
    }
    read += (uint64_t)read_answer((uint32_t)(takes % FLIPPED_SLOTS), copy);
  }
  must(pthread_join(flipper, NULL) == 0, "a thread can be joined");
  printf("flips %llu takes %llu right %llu pings %llu raced %llu answers %llu\n",
         (unsigned long long)num_flips, (unsigned long long)(takes + pings),
         (unsigned long long)right, (unsigned long long)pings, (unsigned long long)raced,
         (unsigned long long)read);
  printf("verdicts");
  for (int code = 0; code < KALOS_REFUSALS; code++)
    printf(" %d:%llu", code, (unsigned long long)verdicts[code]);
  printf("\n");
  close_end(&end);
  free(requests), free(responses), free(answers), free(copy);
  return 0;
}
