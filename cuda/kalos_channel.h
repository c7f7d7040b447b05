// kalos_channel.h: what a client and a sidecar say to each other, over shared memory or a socket.
//
// Standalone, so that a client in another language needs this file alone. Little-endian, natural
// alignment, explicit padding; reserved bytes are zero. docs/sidecar.md tells the whole protocol;
// examples/c has a client in C.
//
// One message is a kalos_message and body_nbytes bytes behind it. Both transports carry the same
// messages:
//
//   socket         one message after the other on a connected Unix stream socket
//   shared memory  two regions for each client. The client writes requests into the first, the
//                  sidecar answers in the second, which nobody else can write. A region is a page
//                  that begins with its head, then KALOS_CHANNEL_SLOTS slots of one size; slot i
//                  of either region belongs to words[i].
//
// The life of a request in slot i, with id larger than every id before it on this connection:
//   1. client: write the message, then words[i] = KALOS_WORD(id, REQUEST_READY) with release. Where
//      `sleeping` of the response region is set, doorbell += 1 and FUTEX_WAKE on it.
//   2. sidecar: acquire the word, copy the message once, check the copy.
//   3. sidecar: write the answer, then its words[i] = KALOS_WORD(id, RESULT_READY or ERROR) with
//      release; or ON_SOCKET, where the answer is larger than the slot and comes by the socket.
//      Where waiting[i] is set, wake[i] += 1 and FUTEX_WAKE on it.
//   4. client: acquire the word; the slot is its own again once it has copied what it needs.
// A client that stops waiting leaves the slot alone until its answer has come.
#ifndef KALOS_CHANNEL_H
#define KALOS_CHANNEL_H

#include <stdint.h>

#ifdef __cplusplus
#define KALOS_CHANNEL_ASSERT(cond, text) static_assert(cond, text)
#else
#define KALOS_CHANNEL_ASSERT(cond, text) _Static_assert(cond, text)
#endif

#define KALOS_PROTOCOL_MAJOR 1u
#define KALOS_PROTOCOL_MINOR 0u
#define KALOS_CHANNEL_MAGIC 0x47534d4bu  // "KMSG"
#define KALOS_CHANNEL_ENDIAN 0x01020304u

// ---- Messages -----------------------------------------------------------------------------------
#define KALOS_OP_HELLO 1u      // client, first on a connection: kalos_hello
#define KALOS_OP_WELCOME 2u    // sidecar: kalos_hello as granted, msgpack map; with descriptors
#define KALOS_OP_PING 16u      // empty; the answer is empty too
#define KALOS_OP_COUNT 17u     // kalos_call; the answer is a uint64
#define KALOS_OP_ASSEMBLE 18u  // kalos_call; the answer is a kalos_window_result
#define KALOS_OP_CALL 19u      // kalos_call, options [name, {arguments}]; the answer is msgpack

#define KALOS_STATUS_OK 0u
#define KALOS_STATUS_ERROR 1u  // the body is a msgpack map: type, message, fields

typedef struct kalos_message {
  uint32_t magic;
  uint16_t opcode;  // an answer repeats its request's
  uint16_t status;  // of an answer; 0 in a request
  uint64_t id;
  uint64_t generation;  // which life of the sidecar; 0 in HELLO
  uint32_t body_nbytes;
  uint32_t reserved0;
  uint64_t timeout_ns;  // the client waits no longer than this; 0 for no limit. 0 in an answer
  uint64_t reserved[3];
} kalos_message;
KALOS_CHANNEL_ASSERT(sizeof(kalos_message) == 64, "kalos_message");

#define KALOS_MODE_DIRECT 1u  // the client maps the store itself
#define KALOS_MODE_SERVED 2u
#define KALOS_TRANSPORT_MEMORY 1u
#define KALOS_TRANSPORT_SOCKET 2u

typedef struct kalos_hello {
  uint32_t endian;
  uint16_t major;
  uint16_t minor;            // asked: the newest known; granted: the one that is spoken
  uint32_t message_nbytes;   // sizeof(kalos_message)
  uint32_t slots;            // KALOS_CHANNEL_SLOTS
  uint64_t features;         // bits; granted: those that both have
  uint32_t modes;            // asked: a set of KALOS_MODE_*; granted: one of them
  uint32_t transports;       // likewise of KALOS_TRANSPORT_*
  uint32_t request_nbytes;   // of a request slot; asked: 0
  uint32_t response_nbytes;  // of a response slot; asked: 0
  uint64_t reserved[3];
} kalos_hello;
KALOS_CHANNEL_ASSERT(sizeof(kalos_hello) == 64, "kalos_hello");

// The arguments of a call. Behind it: session, tenant, zeros up to a multiple of 4, the query as
// float32, the options as msgpack (a map of further arguments; CALL: name and arguments).
typedef struct kalos_call {
  int64_t max_tokens;  // -1: no bound
  int64_t reserve;
  int64_t as_of;  // -1: as the session stands
  uint32_t top_k;
  uint32_t query_dims;
  uint32_t options_nbytes;
  uint16_t session_nbytes;
  uint16_t tenant_nbytes;
  uint64_t reserved[3];
} kalos_call;
KALOS_CHANNEL_ASSERT(sizeof(kalos_call) == 64, "kalos_call");
#define KALOS_NAME_MAX 1024u
#define KALOS_CALL_MAX_TOKENS ((int64_t)1 << 53)

// A window. Behind it: num_tokens int32 IDs, zeros up to a multiple of 8, num_spans
// kalos_window_span, num_fates kalos_window_fate, extras as msgpack (path, names of pinned
// segments, hits, passages).
typedef struct kalos_window_result {
  uint32_t num_tokens;
  uint32_t num_spans;
  uint32_t num_fates;
  uint32_t extras_nbytes;
  uint32_t flags;  // KALOS_RESULT_*
  uint32_t reserved0;
  uint64_t count;  // turns that the window was planned from
  uint64_t reused_tokens;
  uint64_t total;   // max_tokens - reserve
  uint64_t budget;  // tokens that the history could take
  uint64_t low;     // what a stable cut trims it to
  uint64_t recall_budget;
  uint64_t recall_used;
  int64_t clocks[6];  // monotonic ns: begin, and the ends of lookup, plan, recall, lease, gather
} kalos_window_result;
KALOS_CHANNEL_ASSERT(sizeof(kalos_window_result) == 128, "kalos_window_result");
#define KALOS_RESULT_STABLE 1u      // `low` holds
#define KALOS_RESULT_COMPARED 2u    // there was a window of the session before
#define KALOS_RESULT_REUSED_ALL 4u  // the match ended where it and the reply did

// What a run of a window's tokens is.
#define KALOS_SPAN_HEAD 0u    // the block of head segments
#define KALOS_SPAN_INSIDE 1u  // segments before the last user turn
#define KALOS_SPAN_TAIL 2u    // segments at the end
#define KALOS_SPAN_PROMPT 3u  // the generation prompt
#define KALOS_SPAN_TURN 4u
#define KALOS_SPAN_SUMMARY 5u
#define KALOS_SPAN_PASSAGE 6u
#define KALOS_SPAN_FRAME 7u      // framing of passages; belongs to the tile before
#define KALOS_SPAN_MEMORY 0x01u  // the tokens lie in this process, not in the store
#define KALOS_SPAN_OPENS 0x02u   // framing that belongs to the tile behind it
#define KALOS_SPAN_CUT 0x04u     // the turn lost its beginning

typedef struct kalos_window_span {
  uint64_t id;
  uint32_t start;
  uint32_t length;
  uint8_t kind;
  uint8_t flags;
  uint16_t role;
  uint32_t reserved;
} kalos_window_span;
KALOS_CHANNEL_ASSERT(sizeof(kalos_window_span) == 24, "kalos_window_span");

// What became of the turns or summaries [first, stop).
typedef struct kalos_window_fate {
  uint64_t first;
  uint64_t stop;
  uint64_t cut;  // tokens lost at the beginning
  uint8_t kind;  // KALOS_FATE_OF_*
  uint8_t why;   // 0 kept; docs/sidecar.md has the table
  uint8_t reserved[6];
} kalos_window_fate;
KALOS_CHANNEL_ASSERT(sizeof(kalos_window_fate) == 32, "kalos_window_fate");
#define KALOS_FATE_OF_TURN 0u
#define KALOS_FATE_OF_SUMMARY 1u

// ---- Shared memory ------------------------------------------------------------------------------
#define KALOS_CHANNEL_SLOTS 8u
#define KALOS_CHANNEL_PAGE 4096u  // bytes of a region before its first slot

#define KALOS_SLOT_EMPTY 0u
#define KALOS_SLOT_REQUEST_READY 1u
#define KALOS_SLOT_RESULT_READY 2u
#define KALOS_SLOT_ERROR 3u
#define KALOS_SLOT_ON_SOCKET 4u
#define KALOS_WORD(id, state) ((uint64_t)(id) << 8 | (uint64_t)(state))
#define KALOS_WORD_ID(word) ((word) >> 8)
#define KALOS_WORD_STATE(word) ((uint32_t)((word) & 0xffu))
#define KALOS_ID_MAX (((uint64_t)1 << 56) - 1)

typedef struct kalos_request_head {  // the client writes it
  uint64_t words[KALOS_CHANNEL_SLOTS];
  uint32_t waiting[KALOS_CHANNEL_SLOTS];  // 1: the client sleeps on wake[i]
  uint32_t doorbell;                      // the sidecar sleeps on it
  uint32_t reserved[7];
} kalos_request_head;
KALOS_CHANNEL_ASSERT(sizeof(kalos_request_head) == 128, "kalos_request_head");

typedef struct kalos_response_head {  // the sidecar writes it
  uint64_t words[KALOS_CHANNEL_SLOTS];
  uint32_t wake[KALOS_CHANNEL_SLOTS];
  uint32_t sleeping;  // 1: ring the doorbell
  uint32_t retired;   // 1: nobody reads this channel any more
  uint32_t reserved[6];
  uint32_t magic;
  uint16_t major;
  uint16_t minor;
  uint64_t generation;
  uint64_t reserved2[6];
} kalos_response_head;
KALOS_CHANNEL_ASSERT(sizeof(kalos_response_head) == 192, "kalos_response_head");

// ---- The status page ----------------------------------------------------------------------------
// One for all clients, written by the sidecar. Counts are of the whole sidecar and name nobody.
// Histogram bucket b counts what took less than 2^b ns and not less than 2^(b-1).
#define KALOS_STATE_STARTING 0u
#define KALOS_STATE_READY 1u
#define KALOS_STATE_DRAINING 2u

#define KALOS_STAGE_QUEUE 0u     // from the request's arrival to its turn
#define KALOS_STAGE_SYNC 1u      // the session's state is looked up
#define KALOS_STAGE_PLAN 2u      // planned, recall included
#define KALOS_STAGE_DEVICE 3u    // tokens are gathered
#define KALOS_STAGE_RESPONSE 4u  // the answer is written
#define KALOS_STAGE_TOTAL 5u
#define KALOS_STAGES 6u
#define KALOS_STAGE_BUCKETS 40u

#define KALOS_COUNT_REQUESTS 0u
#define KALOS_COUNT_WINDOWS 1u
#define KALOS_COUNT_ERRORS 2u        // answered with a typed error
#define KALOS_COUNT_BAD_REQUESTS 3u  // refused by a check of the protocol
#define KALOS_COUNT_EXPIRED 4u       // their client waited no longer
#define KALOS_COUNT_ON_SOCKET 5u     // answers too large for their slot
#define KALOS_COUNT_DENIED 6u        // peers and tenants refused
#define KALOS_COUNT_CONNECTIONS 7u
#define KALOS_COUNT_RECONNECTS 8u
#define KALOS_COUNT_DISCONNECTS 9u
#define KALOS_COUNT_HANDSHAKES_FAILED 10u
#define KALOS_COUNT_BATCHES 11u  // passes of the loop that found requests
#define KALOS_COUNT_SLEEPS 12u
#define KALOS_COUNT_DEGRADED 13u      // windows that are less than was asked for
#define KALOS_COUNT_RETIRED 14u       // clients retired past their lease
#define KALOS_COUNT_STATE_FAULTS 15u  // damage, full disk and I/O errors met
#define KALOS_COUNT_TOKENS 16u        // token IDs in the windows given out
#define KALOS_COUNTS 32u

#define KALOS_GAUGE_CLIENTS 0u
#define KALOS_GAUGE_DIRECT_CLIENTS 1u
#define KALOS_GAUGE_POOL_SLOTS 2u
#define KALOS_GAUGE_POOL_FREE 3u
#define KALOS_GAUGE_REGISTERED_BYTES 4u
#define KALOS_GAUGE_DEVICE_BYTES 5u
#define KALOS_GAUGE_CHANNEL_BYTES 6u
#define KALOS_GAUGE_VECTOR_ROWS 7u
#define KALOS_GAUGE_QUEUED 8u
#define KALOS_GAUGE_LOCKED_BYTES 9u
#define KALOS_GAUGES 16u

typedef struct kalos_status_page {
  uint32_t magic;
  uint16_t major;
  uint16_t minor;
  uint32_t state;  // KALOS_STATE_*
  uint32_t pid;
  uint64_t generation;
  uint64_t started_ns;  // wall clock
  uint64_t beat_ns;     // monotonic; the loop moves it at least twice a second
  uint64_t reserved[3];
  uint64_t counts[KALOS_COUNTS];
  uint64_t gauges[KALOS_GAUGES];
  uint64_t sums_ns[KALOS_STAGES];
  uint64_t stages[KALOS_STAGES][KALOS_STAGE_BUCKETS];
} kalos_status_page;
KALOS_CHANNEL_ASSERT(sizeof(kalos_status_page) == 64 + 8 * (32 + 16 + 6 + 240), "status page");

#endif  // KALOS_CHANNEL_H
