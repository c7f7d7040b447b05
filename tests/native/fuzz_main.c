// fuzz_main.c: runs the fuzzer's entry point without libFuzzer.
//   fuzz_channel FILE...              each file once
//   fuzz_channel --mutate N FILE...   N inputs made from the files, the same at every run
//   fuzz_channel --seeds FOLDER       write the valid messages and the tables of boundaries there
#include "fuzz_channel.h"

typedef struct input {
  uint8_t* bytes;
  size_t nbytes;
} input;
#define INPUT_NBYTES_MAX 16384u

// What a length, a count or an ID may be got wrong by.
static const uint64_t BOUNDARIES[] = {
    0,
    1,
    2,
    3,
    sizeof(kalos_call) - 1,
    sizeof(kalos_call),
    sizeof(kalos_call) + 1,
    KALOS_NAME_MAX - 1,
    KALOS_NAME_MAX,
    KALOS_NAME_MAX + 1,
    SLOT_CAPACITY - 1,
    SLOT_CAPACITY,
    SLOT_CAPACITY + 1,
    SLOT_NBYTES,
    0xffff,
    0x3fffffff,
    0x40000000,
    0x7fffffff,
    0x80000000,
    0xfffffffe,
    0xffffffff,
    0x100000000,
    (uint64_t)KALOS_CALL_MAX_TOKENS,
    (uint64_t)KALOS_CALL_MAX_TOKENS + 1,
    KALOS_ID_MAX,
    KALOS_ID_MAX + 1,
    INT64_MAX,
    (uint64_t)1 << 63,
    UINT64_MAX,
};
#define NUM_BOUNDARIES (sizeof(BOUNDARIES) / sizeof(*BOUNDARIES))

// ---- Seeds --------------------------------------------------------------------------------------

typedef struct field {
  const char* name;
  size_t off;  // from the message's first byte
  size_t nbytes;
} field;
#define HEAD_FIELD(name) \
  {#name, offsetof(kalos_message, name), sizeof(((kalos_message*)NULL)->name)}
#define CALL_FIELD(name) \
  {#name, sizeof(kalos_message) + offsetof(kalos_call, name), sizeof(((kalos_call*)NULL)->name)}

static const field FIELDS[] = {
    HEAD_FIELD(magic),          HEAD_FIELD(opcode),
    HEAD_FIELD(status),         HEAD_FIELD(id),
    HEAD_FIELD(generation),     HEAD_FIELD(body_nbytes),
    HEAD_FIELD(reserved0),      HEAD_FIELD(timeout_ns),
    HEAD_FIELD(reserved[2]),    CALL_FIELD(max_tokens),
    CALL_FIELD(reserve),        CALL_FIELD(as_of),
    CALL_FIELD(top_k),          CALL_FIELD(query_dims),
    CALL_FIELD(options_nbytes), CALL_FIELD(session_nbytes),
    CALL_FIELD(tenant_nbytes),  CALL_FIELD(reserved[0]),
};

typedef struct seed {
  uint8_t bytes[2 * (sizeof(kalos_step) + SLOT_NBYTES)];
  size_t nbytes;
} seed;

// Add a step with a right request; its parts have the lengths given.
static uint8_t* add_request(seed* to, uint32_t slot, uint64_t id, uint32_t opcode,
                            const kalos_call* call) {
  kalos_step step = {KALOS_WORD(id, KALOS_SLOT_REQUEST_READY), 0, (uint8_t)slot, STEP_ANSWER, 40};
  kalos_message head;
  size_t body_nbytes = 0;
  if (call != NULL)
    body_nbytes = kalos_padded(sizeof(*call) + call->session_nbytes + call->tenant_nbytes, 4) +
                  call->query_dims * sizeof(float) + call->options_nbytes;
  kalos_fill_head(&head, opcode, id, GENERATION, body_nbytes, 0);
  step.nbytes = (uint16_t)(sizeof(head) + body_nbytes);
  uint8_t* at = to->bytes + to->nbytes;
  memset(at, 0, sizeof(step) + step.nbytes);
  memcpy(at, &step, sizeof(step));
  memcpy(at + sizeof(step), &head, sizeof(head));
  if (call != NULL) {
    uint8_t* body = at + sizeof(step) + sizeof(head);
    memcpy(body, call, sizeof(*call));
    memset(body + sizeof(*call), 's', call->session_nbytes);
    memset(body + sizeof(*call) + call->session_nbytes, 't', call->tenant_nbytes);
    memset(body + body_nbytes - call->options_nbytes, 0x80, call->options_nbytes);
  }
  to->nbytes += sizeof(step) + step.nbytes;
  return at;
}

static void write_seed(const char* folder, const char* name, uint64_t value, const seed* from) {
  char path[4096];
  snprintf(path, sizeof(path), "%s/%s-%llx", folder, name, (unsigned long long)value);
  FILE* file = fopen(path, "wb");
  must(file != NULL, "a seed's file can be opened");
  must(fwrite(from->bytes, 1, from->nbytes, file) == from->nbytes, "a seed can be written");
  must(fclose(file) == 0, "a seed can be written");
}

static const kalos_call SMALL = {
    .max_tokens = 100, .as_of = -1, .session_nbytes = 5, .tenant_nbytes = 2, .options_nbytes = 1};

static void write_valid(const char* folder) {
  const kalos_call recall = {.max_tokens = -1,
                             .as_of = 3,
                             .top_k = 4,
                             .query_dims = 8,
                             .session_nbytes = 3,
                             .options_nbytes = 2};
  const kalos_call largest = {.session_nbytes = KALOS_NAME_MAX,
                              .tenant_nbytes = KALOS_NAME_MAX,
                              .options_nbytes = SLOT_CAPACITY - sizeof(kalos_call) - 2048};
  for (uint32_t opcode = KALOS_OP_PING; opcode <= KALOS_OP_CALL; opcode++) {
    seed made = {.nbytes = 0};
    add_request(&made, opcode, 1, opcode, opcode == KALOS_OP_PING ? NULL : &SMALL);
    write_seed(folder, "opcode", opcode, &made);
    add_request(&made, opcode, 2, KALOS_OP_PING, NULL);
    write_seed(folder, "then-ping", opcode, &made);
  }
  seed with_query = {.nbytes = 0}, full = {.nbytes = 0};
  add_request(&with_query, 7, 1, KALOS_OP_ASSEMBLE, &recall);
  write_seed(folder, "query", 8, &with_query);
  add_request(&full, 7, 1, KALOS_OP_CALL, &largest);
  write_seed(folder, "largest", SLOT_CAPACITY, &full);
}

static void write_boundaries(const char* folder) {
  for (size_t f = 0; f < sizeof(FIELDS) / sizeof(*FIELDS); f++)
    for (size_t b = 0; b < NUM_BOUNDARIES; b++) {
      seed made = {.nbytes = 0};
      uint8_t* at = add_request(&made, 7, 1, KALOS_OP_ASSEMBLE, &SMALL);
      memcpy(at + sizeof(kalos_step) + FIELDS[f].off, &BOUNDARIES[b], FIELDS[f].nbytes);
      write_seed(folder, FIELDS[f].name, BOUNDARIES[b], &made);
    }
  for (size_t b = 0; b < NUM_BOUNDARIES; b++)
    for (uint64_t state = 0; state < 7; state++) {
      seed made = {.nbytes = 0};
      uint8_t* at = add_request(&made, 0, BOUNDARIES[b], KALOS_OP_COUNT, &SMALL);
      const uint64_t word = KALOS_WORD(BOUNDARIES[b], state < 6 ? state : 0xff);
      memcpy(at + offsetof(kalos_step, word), &word, sizeof(word));
      add_request(&made, 0, BOUNDARIES[b], KALOS_OP_COUNT, &SMALL);  // once more: a replay
      write_seed(folder, "word", word, &made);
    }
}

// ---- Inputs -------------------------------------------------------------------------------------

static input read_input(const char* path) {
  input found = {(uint8_t*)malloc(INPUT_NBYTES_MAX), 0};
  FILE* file = fopen(path, "rb");
  must(file != NULL && found.bytes != NULL, "an input can be read");
  found.nbytes = fread(found.bytes, 1, INPUT_NBYTES_MAX, file);
  must(fclose(file) == 0, "an input can be read");
  return found;
}

// On a copy of its own, so that a sanitizer sees where it ends.
static void run_input(const uint8_t* bytes, size_t nbytes) {
  uint8_t* copy = (uint8_t*)malloc(nbytes ? nbytes : 1);
  must(copy != NULL, "there is memory for an input");
  memcpy(copy, bytes, nbytes);
  LLVMFuzzerTestOneInput(copy, nbytes);
  free(copy);
}

static size_t mutate(uint8_t* bytes, size_t nbytes, const input* other, uint64_t* random) {
  const size_t at = nbytes ? next_random(random) % nbytes : 0;
  const size_t width = (size_t)1 << next_random(random) % 4;
  uint64_t value = BOUNDARIES[next_random(random) % NUM_BOUNDARIES];
  switch (nbytes ? next_random(random) % 6 : 4) {
    case 0:
      bytes[at] ^= (uint8_t)(1u << next_random(random) % 8);
      return nbytes;
    case 1:
      bytes[at] = (uint8_t)next_random(random);
      return nbytes;
    case 2:  // a boundary, aligned as fields are
      if (at / width * width + width <= nbytes) memcpy(bytes + at / width * width, &value, width);
      return nbytes;
    case 3:  // a little more or less
      if (at + width > nbytes) return nbytes;
      memcpy(&value, bytes + at, width);
      value += next_random(random) % 9 - 4;
      memcpy(bytes + at, &value, width);
      return nbytes;
    case 4: {  // another input behind it
      const size_t room = INPUT_NBYTES_MAX - nbytes;
      const size_t more = other->nbytes < room ? other->nbytes : room;
      memcpy(bytes + nbytes, other->bytes, more);
      return nbytes + more;
    }
    default:
      return at;
  }
}

static void run_mutations(uint64_t count, const input* inputs, size_t num_inputs) {
  static uint8_t bytes[INPUT_NBYTES_MAX];
  uint64_t random = 88172645463325252u;
  for (uint64_t n = 0; n < count; n++) {
    const input* from = &inputs[next_random(&random) % num_inputs];
    size_t nbytes = from->nbytes;
    memcpy(bytes, from->bytes, nbytes);
    for (uint64_t k = next_random(&random) % 6; k > 0; k--)
      nbytes = mutate(bytes, nbytes, &inputs[next_random(&random) % num_inputs], &random);
    run_input(bytes, nbytes);
  }
}

int main(int argc, char** argv) {
  if (argc == 3 && !strcmp(argv[1], "--seeds")) {
    write_valid(argv[2]);
    write_boundaries(argv[2]);
    return 0;
  }
  const int mutates = argc > 3 && !strcmp(argv[1], "--mutate");
  const size_t first = mutates ? 3 : 1, num_inputs = (size_t)argc - first;
  must(argc > 1, "there is an input");
  input* inputs = (input*)calloc(num_inputs, sizeof(*inputs));
  must(inputs != NULL, "there is memory for the inputs");
  for (size_t k = 0; k < num_inputs; k++) inputs[k] = read_input(argv[first + k]);
  const uint64_t count = mutates ? strtoull(argv[2], NULL, 10) : 0;
  if (mutates) run_mutations(count, inputs, num_inputs);
  for (size_t k = 0; k < num_inputs; k++) {
    if (!mutates) run_input(inputs[k].bytes, inputs[k].nbytes);
    free(inputs[k].bytes);
  }
  free(inputs);
  printf("inputs %llu\n", (unsigned long long)(mutates ? count : num_inputs));
  return 0;
}
