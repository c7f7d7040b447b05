// fuzz_channel.c: any bytes in a client's region, against the sidecar's end of a channel.
//
// The entry point is libFuzzer's; fuzz_main.c runs it without libFuzzer. Sanitizers watch every
// access. Besides, each verdict is compared with that of a plain check, which does its sums with
// numbers that no length can overflow, and every part that a verdict gives out is read.
//
// corpus/ is what libFuzzer kept as the least that reaches everything; from the repository's root,
// with the seeds that fuzz_main.c writes:
//   clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icuda
//     -Icython_ext/kalos_ctx -o fuzz tests/native/fuzz_channel.c
//   ./fuzz -max_len=8192 -max_total_time=600 -use_value_profile=1 found seeds
//   ./fuzz -merge=1 -use_counters=0 tests/native/corpus found seeds
#include "fuzz_channel.h"

static volatile uint64_t sink;  // what was read is used

// ---- The plain checks ---------------------------------------------------------------------------

static int is_within(int64_t value, int64_t least, int64_t most) {
  return value >= least && value <= most;
}

static int plain_call_is_right(const uint8_t* body, size_t nbytes, uint32_t opcode) {
  kalos_call call;
  if (nbytes < sizeof(call)) return 0;
  memcpy(&call, body, sizeof(call));
  const unsigned __int128 names = (unsigned __int128)call.session_nbytes + call.tenant_nbytes;
  unsigned __int128 end = sizeof(call) + names;
  for (; end % 4; end++)
    if (end >= nbytes || body[(size_t)end]) return 0;
  end += (unsigned __int128)call.query_dims * sizeof(float) + call.options_nbytes;
  int right = end == nbytes;
  for (int k = 0; k < 3; k++) right = right && call.reserved[k] == 0;
  right = right && call.session_nbytes <= KALOS_NAME_MAX && call.tenant_nbytes <= KALOS_NAME_MAX;
  right = right && is_within(call.max_tokens, -1, KALOS_CALL_MAX_TOKENS);
  right = right && is_within(call.reserve, 0, KALOS_CALL_MAX_TOKENS);
  right = right && is_within(call.as_of, -1, KALOS_CALL_MAX_TOKENS);
  if (opcode != KALOS_OP_ASSEMBLE) right = right && call.query_dims == 0 && call.top_k == 0;
  return right;
}

static int plain_request_is_right(const uint8_t* slot, uint64_t word, uint64_t last_id) {
  kalos_message head;
  memcpy(&head, slot, sizeof(head));
  const int is_ping = head.opcode == KALOS_OP_PING;
  int right = (word & 0xff) == KALOS_SLOT_REQUEST_READY && word >> 8 == head.id;
  right = right && head.id > last_id && head.magic == KALOS_CHANNEL_MAGIC;
  right = right && is_within(head.opcode, KALOS_OP_PING, KALOS_OP_CALL);
  right = right && head.status == 0 && head.reserved0 == 0 && head.generation == GENERATION;
  for (int k = 0; k < 3; k++) right = right && head.reserved[k] == 0;
  right = right && head.body_nbytes <= SLOT_CAPACITY && (!is_ping || head.body_nbytes == 0);
  if (!right || is_ping) return right;
  return plain_call_is_right(slot + sizeof(head), head.body_nbytes, head.opcode);
}

// ---- One step -----------------------------------------------------------------------------------

// The checks alone, on a copy that ends where the bytes end.
static void check_alone(const uint8_t* bytes, size_t nbytes) {
  static const uint32_t opcodes[] = {KALOS_OP_ASSEMBLE, KALOS_OP_COUNT, KALOS_OP_CALL};
  kalos_message head;
  kalos_call_parts parts;
  if (nbytes < sizeof(head)) return;
  memcpy(&head, bytes, sizeof(head));
  const size_t body_nbytes = nbytes - sizeof(head);
  must(kalos_check_head(&head, body_nbytes) < KALOS_REFUSALS, "a verdict has a sentence");
  uint8_t* body = (uint8_t*)malloc(body_nbytes ? body_nbytes : 1);
  must(body != NULL, "there is memory for a copy");
  memcpy(body, bytes + sizeof(head), body_nbytes);
  for (size_t k = 0; k < sizeof(opcodes) / sizeof(*opcodes); k++) {
    const int code = kalos_check_call(body, body_nbytes, opcodes[k], &parts);
    must(code < KALOS_REFUSALS, "a verdict has a sentence");
    must((code == KALOS_TAKE_OK) == plain_call_is_right(body, body_nbytes, opcodes[k]),
         "both checks of a call agree");
    if (code == KALOS_TAKE_OK) sink += read_call(body, body_nbytes, &parts);
  }
  free(body);
}

// The client's reading of the same bytes as an answer.
static void read_as_answer(const uint8_t* slot, uint64_t id) {
  kalos_message head;
  const uint32_t opcodes[] = {KALOS_OP_PING, KALOS_OP_COUNT, KALOS_OP_ASSEMBLE, KALOS_OP_CALL};
  for (uint32_t n = 0; n < 8; n++) {
    const uint32_t opcode = opcodes[n / 2];
    const uint32_t state = n % 2 ? KALOS_SLOT_ERROR : KALOS_SLOT_RESULT_READY;
    if (kalos_taken(slot, SLOT_CAPACITY, id, GENERATION, opcode, state, &head) == KALOS_TAKE_OK) {
      must(head.body_nbytes <= SLOT_CAPACITY, "an answer fits its slot");
      must(head.opcode == opcode && head.status == n % 2, "an answer is what was asked for");
      sink += sum_of(slot + sizeof(head), head.body_nbytes);
    }
  }
}

// Where the sidecar looks, and what is there; the same slots in the same order as kalos_next.
static int plain_next(const kalos_end* end, uint32_t* slot) {
  const kalos_request_head* shared = (const kalos_request_head*)end->requests;
  for (uint32_t k = 0; k < KALOS_CHANNEL_SLOTS; k++) {
    const uint32_t i = (end->next_slot + k) % KALOS_CHANNEL_SLOTS;
    const kalos_seat* seat = &end->seats[i];
    const uint64_t word = shared->words[i];
    if (seat->busy || word == seat->seen || (word & 0xff) == KALOS_SLOT_EMPTY) continue;
    *slot = i;
    return 1;
  }
  return 0;
}

static void look(kalos_end* end, const kalos_step* step) {
  const kalos_request_head* shared = (const kalos_request_head*)end->requests;
  uint32_t expected = 0, slot = KALOS_CHANNEL_SLOTS;
  uint64_t pings = 0;
  int code = -1, is_right = 0;
  const int has_one = plain_next(end, &expected);
  if (has_one) {
    const uint8_t* bytes = end->requests + KALOS_CHANNEL_PAGE + (size_t)expected * SLOT_NBYTES;
    is_right = plain_request_is_right(bytes, shared->words[expected], end->seats[expected].id);
  }
  if (!kalos_next(end, &slot, &code, &pings)) {
    must(has_one == (pings == 1), "what is not left to the caller was a ping, or nothing");
    must(!has_one || is_right, "a ping that is answered is right");
    return;
  }
  must(has_one && slot == expected && pings == 0, "the first slot with news is taken");
  must(code == KALOS_TAKE_OK || (code > KALOS_TAKE_NOTHING && code < KALOS_REFUSALS),
       "a verdict has a sentence");
  must((code == KALOS_TAKE_OK) == is_right, "both checks of a request agree");
  must(end->seats[slot].busy == 1, "what was taken keeps its slot busy");
  must(end->seats[slot].head.id == KALOS_WORD_ID(shared->words[slot]), "it is answered by its ID");
  if (code == KALOS_TAKE_OK) sink += read_seat(end, slot);
  if (!(step->flags & STEP_ANSWER)) return;
  const size_t answer_nbytes = step->answer_nbytes % (SLOT_CAPACITY + 1);
  memset(kalos_answer_body(end, slot), 0x5a, answer_nbytes);
  kalos_answer(end, slot, answer_nbytes, step->flags & STEP_FAIL ? KALOS_STATUS_ERROR : 0);
  must(end->seats[slot].busy == 0, "an answer frees the slot");
  must(kalos_answered(end->responses, slot, end->seats[slot].head.id) ==
           (step->flags & STEP_FAIL ? KALOS_SLOT_ERROR : KALOS_SLOT_RESULT_READY),
       "the client finds its answer");
}

// ---- An input -----------------------------------------------------------------------------------

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t nbytes) {
  static uint8_t *requests, *responses;
  static kalos_end end;
  if (requests == NULL) {
    requests = new_region();
    responses = new_region();
  }
  memset(requests, 0, REGION_NBYTES);
  memset(responses, 0, REGION_NBYTES);
  open_end(&end, requests, responses);
  kalos_request_head* head = (kalos_request_head*)requests;
  kalos_step step;
  while (nbytes >= sizeof(step)) {
    memcpy(&step, data, sizeof(step));
    data += sizeof(step);
    nbytes -= sizeof(step);
    const uint32_t i = step.slot % KALOS_CHANNEL_SLOTS;
    size_t taken = step.nbytes < nbytes ? step.nbytes : nbytes;
    if (taken > SLOT_NBYTES) taken = SLOT_NBYTES;
    memcpy(slot_of(requests, i), data, taken);
    check_alone(data, taken);
    data += taken;
    nbytes -= taken;
    kalos_store_flag(&head->waiting[i], step.flags & STEP_SLEEP ? 1 : 0);
    kalos_store_word(&head->words[i], step.word);
    const int has_news = kalos_has_news(&end);
    look(&end, &step);
    must(has_news || !kalos_has_news(&end), "a look brings no news");
    read_as_answer(slot_of(requests, i), KALOS_WORD_ID(step.word));
  }
  close_end(&end);
  return 0;
}
