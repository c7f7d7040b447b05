// kalos_window.c: ask a sidecar for a session's window, with nothing but kalos_channel.h and libc.
//   kalos_window SOCKET SESSION MAX_TOKENS [TENANT]
//
// Prints the token IDs on one line, then a line for each span. A failure prints one line on stderr
// and ends with status 1; nothing is tried another way. The steps are those of any client:
//   connect, say HELLO, read WELCOME with its descriptors     greet
//   map both regions, after a look at their size and seals    map_region
//   write a request into a slot, publish it, ring             ask
//   look for the answer, then sleep until it comes            await
//   copy the answer once, check the copy                      read_answer
// One request is made, so slot 0 and ID 1 do; a client that makes more gives each slot one request
// at a time and never uses an ID again.
#define _GNU_SOURCE  // MSG_CMSG_CLOEXEC, F_GET_SEALS, syscall

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "kalos_channel.h"

#define SLOT 0u
#define REQUEST_ID 1u
#define TIMEOUT_S 10
#define SPINS 2000                  // looks for the answer before the first sleep
#define SLEEP_NS 5000000            // between two looks at whether the sidecar lives
#define BODY_NBYTES_MAX (1u << 30)  // a larger answer is not believed
#define NUM_DESCRIPTORS 3u          // status page, requests, responses

typedef struct answer {
  kalos_message head;
  uint8_t* body;  // head.body_nbytes bytes of our own memory
} answer;

typedef struct channel {
  int sock;
  uint64_t generation;
  uint32_t request_nbytes, response_nbytes;  // of a slot
  uint8_t* requests;
  const uint8_t* responses;  // read-only: a write to it would be a fault
} channel;

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fputs("kalos_window: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  exit(EXIT_FAILURE);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// ---- Errors of the sidecar: a msgpack map whose first keys are type and message -----------------

// The string at *at, which moves behind it; NULL where there is none within the bytes.
static const char* read_string(const uint8_t** at, const uint8_t* end, int* nbytes) {
  const ptrdiff_t left = end - *at;
  const uint8_t* from = *at;
  uint32_t size = 0, head = 1;
  if (left < 1) return NULL;
  if ((from[0] & 0xe0) == 0xa0) {  // fixstr
    size = from[0] & 0x1f;
  } else if (from[0] >= 0xd9 && from[0] <= 0xdb) {  // str 8, 16 and 32: big-endian lengths
    head += 1u << (from[0] - 0xd9);
    if (left < (ptrdiff_t)head) return NULL;
    for (uint32_t k = 1; k < head; k++) size = size << 8 | from[k];
  } else {
    return NULL;
  }
  if (size > left - head) return NULL;
  *at = from + head + size;
  *nbytes = (int)size;
  return (const char*)from + head;
}

__attribute__((noreturn)) static void fail_as_told(const answer* told) {
  const uint8_t *at = told->body, *end = told->body + told->head.body_nbytes;
  const char *type = NULL, *message = NULL;
  int type_nbytes = 0, message_nbytes = 0;
  if (at < end && (*at & 0xf0) == 0x80) {  // a map of less than 16 keys
    at++;
    for (int k = 0; k < 2; k++) {
      int nbytes = 0;
      const char* key = read_string(&at, end, &nbytes);
      if (key && nbytes == 4 && !memcmp(key, "type", 4))
        type = read_string(&at, end, &type_nbytes);
      else if (key && nbytes == 7 && !memcmp(key, "message", 7))
        message = read_string(&at, end, &message_nbytes);
    }
  }
  if (!type || !message) fail("the sidecar answered with an error that cannot be read");
  fail("%.*s: %.*s", type_nbytes, type, message_nbytes, message);
}

// ---- The socket ---------------------------------------------------------------------------------

static void send_all(int sock, const void* data, size_t nbytes) {
  const uint8_t* at = data;
  while (nbytes) {
    const ssize_t sent = send(sock, at, nbytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) fail("the sidecar does not listen: %s", strerror(errno));
    at += sent;
    nbytes -= (size_t)sent;
  }
}

// Receive exactly nbytes. Descriptors may come with the first of them: they are added to `fds`.
static void receive_all(int sock, void* data, size_t nbytes, int* fds, uint32_t* num_fds) {
  union {
    char bytes[CMSG_SPACE(NUM_DESCRIPTORS * sizeof(int))];
    struct cmsghdr aligned;
  } control;
  uint8_t* at = data;
  while (nbytes) {
    struct iovec place = {at, nbytes};
    struct msghdr message = {.msg_iov = &place, .msg_iovlen = 1};
    if (fds) {
      message.msg_control = control.bytes;
      message.msg_controllen = sizeof(control.bytes);
    }
    const ssize_t got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("the sidecar did not answer: %s", strerror(errno));
    if (got == 0) fail("the sidecar ended the connection");
    // Without descriptors left to this process the bytes come, and the descriptors are dropped.
    if (message.msg_flags & MSG_CTRUNC)
      fail("%s",
           fds ? "a descriptor was lost on the way (ulimit -n)" : "a descriptor came unasked");
    for (struct cmsghdr* part = fds ? CMSG_FIRSTHDR(&message) : NULL; part;
         part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      if (*num_fds + count > NUM_DESCRIPTORS) fail("the sidecar sent more descriptors than it may");
      memcpy(fds + *num_fds, CMSG_DATA(part), count * sizeof(int));
      *num_fds += (uint32_t)count;
    }
    at += got;
    nbytes -= (size_t)got;
  }
}

static answer receive_answer(int sock, int* fds, uint32_t* num_fds) {
  answer got;
  receive_all(sock, &got.head, sizeof(got.head), fds, num_fds);
  if (got.head.magic != KALOS_CHANNEL_MAGIC) fail("what answers at the socket is no sidecar");
  if (got.head.body_nbytes > BODY_NBYTES_MAX) fail("an answer is larger than can be");
  got.body = malloc((size_t)got.head.body_nbytes + 1);
  if (!got.body) fail("no memory for %" PRIu32 " bytes", got.head.body_nbytes);
  receive_all(sock, got.body, got.head.body_nbytes, fds, num_fds);
  return got;
}

static int connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const struct timeval patience = {.tv_sec = TIMEOUT_S};
  if (strlen(path) >= sizeof(address.sun_path)) fail("the socket's path is too long");
  strcpy(address.sun_path, path);
  const int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (sock < 0) fail("no socket can be had: %s", strerror(errno));
  setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  if (connect(sock, (const struct sockaddr*)&address, sizeof(address)))
    fail("no sidecar answers at %s: %s", path, strerror(errno));
  return sock;
}

// ---- The channel --------------------------------------------------------------------------------

// A region must keep its size for as long as it is mapped, or an access could end in a signal.
static uint8_t* map_region(int fd, size_t slot_nbytes, int protection) {
  const size_t nbytes = KALOS_CHANNEL_PAGE + KALOS_CHANNEL_SLOTS * slot_nbytes;
  const int fixed = F_SEAL_SHRINK | F_SEAL_GROW, seals = fcntl(fd, F_GET_SEALS);
  struct stat found;
  if (seals < 0 || (seals & fixed) != fixed || fstat(fd, &found) ||
      (uint64_t)found.st_size != nbytes)
    fail("the sidecar sent memory whose size is not fixed as the protocol says");
  void* base = mmap(NULL, nbytes, protection, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("%zu bytes cannot be mapped: %s", nbytes, strerror(errno));
  return base;
}

static channel greet(int sock) {
  const struct {
    kalos_message head;
    kalos_hello hello;
  } asked = {
      .head = {.magic = KALOS_CHANNEL_MAGIC,
               .opcode = KALOS_OP_HELLO,
               .body_nbytes = sizeof(kalos_hello)},
      .hello = {.endian = KALOS_CHANNEL_ENDIAN,
                .major = KALOS_PROTOCOL_MAJOR,
                .minor = KALOS_PROTOCOL_MINOR,
                .message_nbytes = sizeof(kalos_message),
                .slots = KALOS_CHANNEL_SLOTS,
                .modes = KALOS_MODE_SERVED,
                .transports = KALOS_TRANSPORT_MEMORY},
  };
  int fds[NUM_DESCRIPTORS];
  uint32_t num_fds = 0;
  kalos_hello granted;
  send_all(sock, &asked, sizeof(asked));
  const answer got = receive_answer(sock, fds, &num_fds);
  if (got.head.status != KALOS_STATUS_OK) fail_as_told(&got);
  if (got.head.opcode != KALOS_OP_WELCOME || got.head.body_nbytes < sizeof(granted) ||
      num_fds != NUM_DESCRIPTORS)
    fail("the sidecar's welcome is not what the protocol says");
  memcpy(&granted, got.body, sizeof(granted));
  if (granted.major != KALOS_PROTOCOL_MAJOR || granted.endian != KALOS_CHANNEL_ENDIAN ||
      granted.message_nbytes != sizeof(kalos_message) || granted.slots != KALOS_CHANNEL_SLOTS)
    fail("the sidecar speaks version %u.%u, and we speak %u.%u", granted.major, granted.minor,
         KALOS_PROTOCOL_MAJOR, KALOS_PROTOCOL_MINOR);
  if (granted.modes != KALOS_MODE_SERVED || granted.transports != KALOS_TRANSPORT_MEMORY ||
      granted.request_nbytes < KALOS_CHANNEL_PAGE || granted.response_nbytes < KALOS_CHANNEL_PAGE)
    fail("the sidecar granted what nobody asked for");
  const channel made = {
      .sock = sock,
      .generation = got.head.generation,
      .request_nbytes = granted.request_nbytes,
      .response_nbytes = granted.response_nbytes,
      .requests = map_region(fds[1], granted.request_nbytes, PROT_READ | PROT_WRITE),
      .responses = map_region(fds[2], granted.response_nbytes, PROT_READ),
  };
  for (uint32_t k = 0; k < NUM_DESCRIPTORS; k++) close(fds[k]);
  free(got.body);
  return made;
}

// Write the request, then its word: whoever sees the word sees the request.
static void ask(const channel* to, const char* session, const char* tenant, int64_t max_tokens) {
  kalos_request_head* mine = (kalos_request_head*)to->requests;
  const kalos_response_head* theirs = (const kalos_response_head*)to->responses;
  uint8_t* slot = to->requests + KALOS_CHANNEL_PAGE + (size_t)SLOT * to->request_nbytes;
  const size_t session_nbytes = strlen(session), tenant_nbytes = strlen(tenant);
  if (session_nbytes > KALOS_NAME_MAX || tenant_nbytes > KALOS_NAME_MAX)
    fail("a name must be at most %u bytes long", KALOS_NAME_MAX);
  // No query and no options: behind the names come zeros up to a multiple of 4, and no more.
  const size_t body_nbytes = (sizeof(kalos_call) + session_nbytes + tenant_nbytes + 3) / 4 * 4;
  if (body_nbytes > to->request_nbytes - sizeof(kalos_message))
    fail("the request is larger than its slot");
  const kalos_message head = {.magic = KALOS_CHANNEL_MAGIC,
                              .opcode = KALOS_OP_ASSEMBLE,
                              .id = REQUEST_ID,
                              .generation = to->generation,
                              .body_nbytes = (uint32_t)body_nbytes,
                              .timeout_ns = (uint64_t)TIMEOUT_S * 1000000000u};
  const kalos_call call = {.max_tokens = max_tokens,
                           .as_of = -1,
                           .session_nbytes = (uint16_t)session_nbytes,
                           .tenant_nbytes = (uint16_t)tenant_nbytes};
  memcpy(slot, &head, sizeof(head));
  slot += sizeof(head);
  memset(slot, 0, body_nbytes);
  memcpy(slot, &call, sizeof(call));
  memcpy(slot + sizeof(call), session, session_nbytes);
  memcpy(slot + sizeof(call) + session_nbytes, tenant, tenant_nbytes);
  __atomic_store_n(&mine->words[SLOT], KALOS_WORD(REQUEST_ID, KALOS_SLOT_REQUEST_READY),
                   __ATOMIC_RELEASE);
  // The fence lies between our word and their flag: either they see the word, or we see the flag.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (__atomic_load_n(&theirs->sleeping, __ATOMIC_SEQ_CST)) {
    __atomic_fetch_add(&mine->doorbell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &mine->doorbell, FUTEX_WAKE, 1, NULL, NULL, 0);
  }
}

// State of the answer; KALOS_SLOT_EMPTY while the word is not that of our request.
static uint32_t state_of(const channel* from) {
  const kalos_response_head* theirs = (const kalos_response_head*)from->responses;
  const uint64_t word = __atomic_load_n(&theirs->words[SLOT], __ATOMIC_ACQUIRE);
  return KALOS_WORD_ID(word) == REQUEST_ID ? KALOS_WORD_STATE(word) : KALOS_SLOT_EMPTY;
}

static int is_lost(const channel* from) {
  const kalos_response_head* theirs = (const kalos_response_head*)from->responses;
  uint8_t byte;
  if (__atomic_load_n(&theirs->retired, __ATOMIC_SEQ_CST)) return 1;
  const ssize_t got = recv(from->sock, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

static uint32_t await(const channel* from) {
  kalos_request_head* mine = (kalos_request_head*)from->requests;
  const kalos_response_head* theirs = (const kalos_response_head*)from->responses;
  const struct timespec nap = {.tv_nsec = SLEEP_NS};
  const uint64_t until_ns = now_ns() + (uint64_t)TIMEOUT_S * 1000000000u;
  uint32_t state = KALOS_SLOT_EMPTY;
  for (int k = 0; k < SPINS && !state; k++) state = state_of(from);
  while (!state) {
    // Read before the last look: an answer that comes behind that look changes it.
    const uint32_t seen = __atomic_load_n(&theirs->wake[SLOT], __ATOMIC_SEQ_CST);
    __atomic_store_n(&mine->waiting[SLOT], 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    state = state_of(from);
    if (!state) syscall(SYS_futex, &theirs->wake[SLOT], FUTEX_WAIT, seen, &nap, NULL, 0);
    __atomic_store_n(&mine->waiting[SLOT], 0, __ATOMIC_SEQ_CST);
    const int lost = is_lost(from);
    if (!state) state = state_of(from);  // what was answered before the end still counts
    if (!state && lost) fail("the sidecar is gone; what became of the request is not known");
    if (!state && now_ns() > until_ns) fail("the sidecar did not answer within %d s", TIMEOUT_S);
  }
  return state;
}

// The answer in memory of our own; nothing of the slot is looked at twice.
static answer read_answer(const channel* from, uint32_t state) {
  const uint8_t* slot = from->responses + KALOS_CHANNEL_PAGE + (size_t)SLOT * from->response_nbytes;
  answer got;
  if (state == KALOS_SLOT_ON_SOCKET) {
    got = receive_answer(from->sock, NULL, NULL);
  } else {
    memcpy(&got.head, slot, sizeof(got.head));
    __atomic_signal_fence(__ATOMIC_SEQ_CST);  // the compiler, too, reads the copy from here on
    if (got.head.magic != KALOS_CHANNEL_MAGIC ||
        got.head.body_nbytes > from->response_nbytes - sizeof(got.head))
      fail("the answer is not what the protocol says");
    got.body = malloc((size_t)got.head.body_nbytes + 1);
    if (!got.body) fail("no memory for %" PRIu32 " bytes", got.head.body_nbytes);
    memcpy(got.body, slot + sizeof(got.head), got.head.body_nbytes);
  }
  if (got.head.id != REQUEST_ID || got.head.generation != from->generation ||
      got.head.opcode != KALOS_OP_ASSEMBLE)
    fail("the answer is to another request");
  return got;
}

// ---- The window ---------------------------------------------------------------------------------

static void print_window(const answer* got) {
  const size_t nbytes = got->head.body_nbytes;
  kalos_window_result head;
  if (nbytes < sizeof(head)) fail("a window is shorter than its head");
  memcpy(&head, got->body, sizeof(head));
  // Sums of 32-bit numbers in 64 bits: none overflows.
  const uint64_t tokens_off = sizeof(head);
  const uint64_t spans_off = tokens_off + ((uint64_t)head.num_tokens * sizeof(int32_t) + 7) / 8 * 8;
  const uint64_t fates_off = spans_off + (uint64_t)head.num_spans * sizeof(kalos_window_span);
  const uint64_t extras_off = fates_off + (uint64_t)head.num_fates * sizeof(kalos_window_fate);
  if (extras_off + head.extras_nbytes != nbytes) fail("the parts of a window do not add up");
  for (uint32_t k = 0; k < head.num_tokens; k++) {
    int32_t id;
    memcpy(&id, got->body + tokens_off + k * sizeof(id), sizeof(id));
    printf("%s%" PRId32, k ? " " : "", id);
  }
  printf("\n");
  for (uint32_t k = 0; k < head.num_spans; k++) {
    kalos_window_span span;
    memcpy(&span, got->body + spans_off + k * sizeof(span), sizeof(span));
    printf("span %" PRIu32 "..%" PRIu64 " kind %u role %u id %" PRIu64 "\n", span.start,
           (uint64_t)span.start + span.length, span.kind, span.role, span.id);
  }
}

int main(int argc, char** argv) {
  char* end;
  if (argc != 4 && argc != 5) fail("usage: kalos_window SOCKET SESSION MAX_TOKENS [TENANT]");
  errno = 0;
  const long long max_tokens = strtoll(argv[3], &end, 10);
  if (errno || end == argv[3] || *end || max_tokens < 0 || max_tokens > KALOS_CALL_MAX_TOKENS)
    fail("MAX_TOKENS must be a number of tokens (got %s)", argv[3]);
  const channel opened = greet(connect_to(argv[1]));
  ask(&opened, argv[2], argc == 5 ? argv[4] : "", max_tokens);
  const uint32_t state = await(&opened);
  const answer got = read_answer(&opened, state);
  if (state == KALOS_SLOT_ERROR || got.head.status != KALOS_STATUS_OK) fail_as_told(&got);
  print_window(&got);
  free(got.body);
  close(opened.sock);
  return EXIT_SUCCESS;
}
