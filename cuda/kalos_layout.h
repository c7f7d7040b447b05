// kalos_layout.h: every fixed-width struct on disk and in shared memory, and the constants that go with
// them. One definition for C, Cython and NVRTC; FORMAT.md explains each field. Little-endian, natural
// alignment, explicit padding. A retired field keeps its place and its name.
#ifndef KALOS_LAYOUT_H
#define KALOS_LAYOUT_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#endif

#ifdef __cplusplus
#define KALOS_STATIC_ASSERT(cond, text) static_assert(cond, text)
#else
#define KALOS_STATIC_ASSERT(cond, text) _Static_assert(cond, text)
#endif

#define KALOS_FORMAT_MAJOR 1u
#define KALOS_FORMAT_MINOR 0u
#define KALOS_ENDIAN_MARK 0x01020304u

#define KALOS_ALIGN 64u            // bytes; every record and every turn's token run starts on it
#define KALOS_TOKENS_PER_LINE 16u  // int32 IDs in KALOS_ALIGN bytes

// Positions in segmented files are (segment << 32) | offset: bytes in log segments, int32 elements in
// token segments. Segments are below 2^16, so a position fits in 48 bits.
#define KALOS_POSITION(segment, offset) (((uint64_t)(segment) << 32) | (uint64_t)(uint32_t)(offset))
#define KALOS_POSITION_SEGMENT(pos) ((uint32_t)((pos) >> 32))
#define KALOS_POSITION_OFFSET(pos) ((uint32_t)(pos))
#define KALOS_POSITION_BITS 48
#define KALOS_POSITION_MASK ((((uint64_t)1) << KALOS_POSITION_BITS) - 1)

// ---- Roles of a turn --------------------------------------------------------------------------------
#define KALOS_ROLE_SYSTEM 0u
#define KALOS_ROLE_DEVELOPER 1u
#define KALOS_ROLE_USER 2u
#define KALOS_ROLE_ASSISTANT 3u
#define KALOS_ROLE_TOOL 4u
#define KALOS_ROLE_FUNCTION 5u

// ---- Where the log stands after a record ------------------------------------------------------------
// Allocation happens in the writer before the record is written, so a redo reads every place from the
// record and never from the state it repairs.
typedef struct kalos_cursor {
  uint64_t arena_used;     // bytes of the index arena in use
  uint64_t tokens_end;     // position of the first free element of the token segments
  uint32_t vector_rows;    // rows of the vector file in use
  uint32_t num_slots;      // slots in use, dead ones included
  uint32_t session_keys;   // used buckets of the slot table, tombstones included
  uint32_t idempotency_keys;  // used buckets of the key table, tombstones included
} kalos_cursor;
KALOS_STATIC_ASSERT(sizeof(kalos_cursor) == 32, "kalos_cursor");

// ---- One turn of a session, or one passage of a collection -------------------------------------------
#define KALOS_ENTRY_DEAD 0x01u     // erased or deleted passage, erased turn
#define KALOS_ENTRY_TTL 0x02u      // expires; the time stands in the record
#define KALOS_ENTRY_FRAMED 0x04u   // the caller vouched for the framing
#define KALOS_ENTRY_TEXT 0x08u     // the record holds the original text
#define KALOS_ENTRY_ORPHAN 0x10u   // a result without an earlier assistant turn: stored, never in a window
#define KALOS_ENTRY_GROUPED 0x20u  // the turn names a group or joined one
#define KALOS_ENTRY_ZERO 0x40u     // the vector's norm is zero

typedef struct kalos_entry {
  uint64_t tokens_pos;   // position of the first token ID
  uint64_t sum;          // turn: archived tokens of the session up to and including this turn; passage: its ID
  uint64_t lsn;          // position of the log record
  uint32_t num_tokens;   // archived form, framing included
  uint32_t token_crc;    // CRC32C of the archived IDs
  uint32_t seq;          // turn: sequence number; passage: place in the collection
  uint32_t unit_first;   // first turn of the unit that this turn closed when it was appended
  uint32_t vector_row;   // row in the vector file + 1, 0 for none
  uint32_t live_tokens;  // length of the live form, which follows on the next line; 0 for none
  uint32_t live_crc;     // CRC32C of the live IDs
  uint16_t prefix_len;   // framing before the content, in tokens
  uint16_t suffix_len;   // framing behind the content, in tokens
  uint16_t trim_prev;    // tokens that the turn before loses at its end when this one follows
  uint8_t role;
  uint8_t flags;
  uint32_t crc;          // CRC32C of the 60 bytes before
} kalos_entry;
KALOS_STATIC_ASSERT(sizeof(kalos_entry) == 64, "kalos_entry");

#endif  // KALOS_LAYOUT_H
