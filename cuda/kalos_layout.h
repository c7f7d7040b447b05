// kalos_layout.h: every fixed-width struct on disk and in shared memory, and the constants that go
// with them. One definition for C, Cython and NVRTC; FORMAT.md explains each field. Little-endian,
// natural alignment, explicit padding. A retired field keeps its place and its name.
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

// Positions in segmented files are (segment << 32) | offset: bytes in log segments, int32 elements
// in token segments. Segments are below 2^16, so a position fits in 48 bits.
#define KALOS_POSITION(segment, offset) (((uint64_t)(segment) << 32) | (uint64_t)(uint32_t)(offset))
#define KALOS_POSITION_SEGMENT(pos) ((uint32_t)((pos) >> 32))
#define KALOS_POSITION_OFFSET(pos) ((uint32_t)(pos))
#define KALOS_POSITION_BITS 48
#define KALOS_POSITION_MASK ((((uint64_t)1) << KALOS_POSITION_BITS) - 1)

// ---- Roles of a turn ----------------------------------------------------------------------------
#define KALOS_ROLE_SYSTEM 0u
#define KALOS_ROLE_DEVELOPER 1u
#define KALOS_ROLE_USER 2u
#define KALOS_ROLE_ASSISTANT 3u
#define KALOS_ROLE_TOOL 4u
#define KALOS_ROLE_FUNCTION 5u

// ---- Where the log stands after a record --------------------------------------------------------
// Allocation happens in the writer before the record is written, so a redo reads every place from
// the record and never from the state it repairs.
typedef struct kalos_cursor {
  uint64_t arena_used;        // bytes of the index arena in use
  uint64_t tokens_end;        // position of the first free element of the token segments
  uint32_t vector_rows;       // rows of the vector file in use
  uint32_t num_slots;         // slots in use, dead ones included
  uint32_t session_keys;      // used buckets of the slot table, tombstones included
  uint32_t idempotency_keys;  // used buckets of the key table, tombstones included
} kalos_cursor;
KALOS_STATIC_ASSERT(sizeof(kalos_cursor) == 32, "kalos_cursor");

// ---- One turn of a session, or one passage of a collection --------------------------------------
#define KALOS_ENTRY_DEAD 0x01u     // erased or deleted passage, erased turn
#define KALOS_ENTRY_TTL 0x02u      // expires; the time stands in the record
#define KALOS_ENTRY_FRAMED 0x04u   // the caller vouched for the framing
#define KALOS_ENTRY_TEXT 0x08u     // the record holds the original text
#define KALOS_ENTRY_ORPHAN 0x10u   // a result with no earlier assistant turn: in no window
#define KALOS_ENTRY_GROUPED 0x20u  // the turn names a group or joined one
#define KALOS_ENTRY_ZERO 0x40u     // the vector's norm is zero

typedef struct kalos_entry {
  uint64_t tokens_pos;   // position of the first token ID
  uint64_t sum;          // turn: archived tokens of the session with this turn; passage: its ID
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
  uint32_t crc;  // CRC32C of the 60 bytes before
} kalos_entry;
KALOS_STATIC_ASSERT(sizeof(kalos_entry) == 64, "kalos_entry");

// ---- One run of entries -------------------------------------------------------------------------
typedef struct kalos_extent {
  uint32_t first_seq;  // sequence number of the first entry
  uint32_t capacity;   // entries that fit
  uint64_t place;      // arena offset of the first entry (48 bits) and 16 bits of check above it
} kalos_extent;
KALOS_STATIC_ASSERT(sizeof(kalos_extent) == 16, "kalos_extent");

// ---- A slot: a session, a collection or a tenant ------------------------------------------------
#define KALOS_SLOT_SESSION 1u
#define KALOS_SLOT_COLLECTION 2u
#define KALOS_SLOT_TENANT 3u

#define KALOS_IMAGE_DEAD 0x01u     // erased
#define KALOS_IMAGE_COMPLEX 0x02u  // a turn: grouped, trimmed, orphaned, expiring, with a live form
#define KALOS_IMAGE_TTL 0x04u      // a turn expires
#define KALOS_IMAGE_LASTING 0x08u  // a turn never expires
#define KALOS_IMAGE_FORKED 0x10u   // shares entries with another slot of its family
#define KALOS_IMAGE_VECTORS 0x20u  // a turn has a vector

typedef struct kalos_image {
  uint64_t hash;           // of kind, tenant and name
  uint64_t name_lsn;       // record that holds tenant and name
  uint64_t last_lsn;       // newest record of this slot
  uint64_t extents_off;    // arena offset of the extent array
  uint64_t segments_lsn;   // record with the table of pinned segments, 0 for none
  uint64_t summaries_lsn;  // record with the table of summaries, 0 for none
  uint64_t sum;            // archived tokens of all turns
  uint64_t next_id;        // tenant: the next passage ID; collection: dead passages
  double expires_at;       // latest expiry of a turn, meaningful while LASTING is not set
  uint32_t num_entries;
  uint32_t num_extents;
  uint32_t extents_capacity;
  uint32_t flags;
  uint32_t epoch;  // changes whenever entries that were readable change or go
  uint32_t kind;
  uint32_t slot_id;
  uint32_t family;          // slot ID of the oldest session whose entries this one may share
  uint32_t last_assistant;  // seq + 1 of the newest assistant turn, 0 for none
  uint32_t last_user;       // seq + 1 of the newest user turn, 0 for none
  uint32_t shared_below;    // entries with a smaller seq may be shared and are never overwritten
  uint32_t crc;             // CRC32C of the 116 bytes before
} kalos_image;
KALOS_STATIC_ASSERT(sizeof(kalos_image) == 120, "kalos_image");

// Two images, written in turn: image[version & 1] is the valid one, so that a writer that dies
// between leaves the older state readable.
typedef struct kalos_slot {
  uint64_t version;  // sealed with the slot's offset: a flipped bit brings no older image back
  uint64_t reserved;
  kalos_image image[2];
} kalos_slot;
KALOS_STATIC_ASSERT(sizeof(kalos_slot) == 256, "kalos_slot");

// ---- Hash tables in the arena -------------------------------------------------------------------
// Linear probing. value: 48 bits (slot table: arena offset; key table: log position) and 16 bits of
// check over hash and value; KALOS_BUCKET_EMPTY a bucket never used, KALOS_BUCKET_GONE one whose
// owner was erased. Zero is none of them, so that a hole in the file is damage and not an absent
// session.
typedef struct kalos_bucket {
  uint64_t hash;
  uint64_t value;
} kalos_bucket;
#define KALOS_BUCKET_EMPTY ((uint64_t)1)
#define KALOS_BUCKET_GONE (~(uint64_t)0)

#define KALOS_SLOT_BLOCKS 28u
#define KALOS_SLOT_BLOCK_SHIFT 6u  // block k holds 64 << k slots

typedef struct kalos_roots {
  uint64_t slot_table;  // arena offset
  uint64_t key_table;   // arena offset
  uint32_t slot_log2;   // buckets
  uint32_t key_log2;
  uint64_t slot_blocks[KALOS_SLOT_BLOCKS];  // arena offsets, 0 for none yet
  uint32_t reserved;
  uint32_t crc;  // CRC32C of the bytes before
} kalos_roots;
KALOS_STATIC_ASSERT(sizeof(kalos_roots) == 256, "kalos_roots");

#define KALOS_ARENA_FIRST 4096u  // arena bytes that the header takes

// The index's own format, which changes where its bytes do: a store of a newer minor format has an
// index that is read all the same.
#define KALOS_INDEX_FORMAT 0x10000u

// Beside `applied`: it is where the next batch will begin, and none was applied since.
#define KALOS_APPLIED_WHOLE 1u

typedef struct kalos_index_header {
  char magic[8];  // "KALOSIDX"
  uint32_t endian;
  uint32_t format;  // major << 16 | minor
  uint8_t uuid[16];
  uint64_t inode;  // of this very file: a copy is noticed
  uint64_t device;
  uint32_t generation;
  uint32_t crc;            // CRC32C of the bytes before
  uint64_t epoch;          // writer epoch that wrote the index last, | 1 while it is being written
  uint64_t roots_version;  // sealed; roots[roots_version & 1] is valid
  uint64_t num_slots;      // sealed
  uint64_t applied;  // sealed; start of the last batch that was applied, and KALOS_APPLIED_WHOLE
  uint64_t suspect;  // not 0: a read met damage, the next writer builds the index again
  uint8_t reserved[416];
  kalos_roots roots[2];
} kalos_index_header;
KALOS_STATIC_ASSERT(sizeof(kalos_index_header) == 1024, "kalos_index_header");

// ---- Vector rows: what is known of row i --------------------------------------------------------
typedef struct kalos_row {
  uint32_t crc;    // CRC32C of the row's stored bytes, 0 once it is dead
  float factor;    // the row's factor of the score, DESIGN.md; 0 once it is dead
  uint64_t entry;  // its entry's arena offset | KALOS_ROW_DEAD, sealed with row number and above
} kalos_row;
#define KALOS_ROW_DEAD ((uint64_t)1)
KALOS_STATIC_ASSERT(sizeof(kalos_row) == 16, "kalos_row");

// ---- Log ----------------------------------------------------------------------------------------
#define KALOS_RECORD_MAGIC 0x4345524bu  // "KREC"
#define KALOS_RECORD_MORE 0x01u      // the batch goes on: apply only when its last record is there
#define KALOS_RECORD_SCRUBBED 0x02u  // erased: the sections are zeros, body_crc does not bind
#define KALOS_RECORD_ROOTS 0x04u     // a kalos_roots section follows the change
#define KALOS_RECORD_SYNCED 0x08u  // all of the log before this record's batch was durable already

#define KALOS_KIND_SLOT 1u  // a session, collection or tenant comes to be
#define KALOS_KIND_TURN 2u
#define KALOS_KIND_PASSAGE 3u
#define KALOS_KIND_SEGMENTS 4u   // the slot's whole table of pinned segments
#define KALOS_KIND_SUMMARIES 5u  // the session's whole table of summaries
#define KALOS_KIND_ROLLBACK 6u
#define KALOS_KIND_FORK 7u
#define KALOS_KIND_ERASE 8u    // the table section lists the records to scrub
#define KALOS_KIND_DROP 9u     // a passage is deleted
#define KALOS_KIND_IMAGE 10u   // only the slot's image changes
#define KALOS_KIND_TABLES 11u  // a hash table moves to a larger place
#define KALOS_KIND_SHARE 12u   // an entry that another slot's record holds (compaction of forks)
#define KALOS_KIND_LAST 12u

typedef struct kalos_record {  // 64 bytes, inside one sector
  uint32_t magic;
  uint32_t header_crc;  // CRC32C of the 56 bytes behind, begun with the store's salt and lsn
  uint32_t size;        // whole record, a multiple of KALOS_ALIGN
  uint16_t kind;
  uint16_t flags;
  uint64_t lsn;  // its own position
  uint32_t body_crc;
  uint32_t body_len;
  kalos_cursor cursor;
} kalos_record;
KALOS_STATIC_ASSERT(sizeof(kalos_record) == 64, "kalos_record");

// What a record changes, and where. Sections follow in this order: roots, extents, name, tenant,
// key, group, text, metadata, table, tokens, live tokens, vector; each as long as its length says.
typedef struct kalos_change {
  uint64_t slot_off;     // arena offset of the slot
  uint64_t entry_off;    // arena offset of the entry, 0 for none
  uint64_t prev_lsn;     // the slot's record before this one
  uint64_t extents_off;  // where the extents section goes
  double created_at;
  double expires_at;     // 0 for never
  uint32_t slot_bucket;  // bucket + 1 that this record fills, 0 for none
  uint32_t key_bucket;
  uint32_t group_bucket;  // the group's first turn
  uint32_t call_bucket;   // the group's first assistant turn
  uint32_t num_extents;
  uint32_t name_len;
  uint32_t tenant_len;
  uint32_t key_len;
  uint32_t group_len;
  uint32_t text_len;
  uint32_t metadata_len;
  uint32_t table_len;
  uint32_t tokens_len;  // bytes; 0 where the IDs stand in the token segment alone
  uint32_t live_len;
  uint32_t vector_len;
  uint32_t vector_crc;
  float vector_factor;
  uint32_t present;  // KALOS_HAS_*
  uint8_t digest[16];
  kalos_image image;
  kalos_entry entry;
} kalos_change;
KALOS_STATIC_ASSERT(sizeof(kalos_change) == 320, "kalos_change");
#define KALOS_HAS_TEXT 0x01u
#define KALOS_HAS_METADATA 0x02u
#define KALOS_HAS_GROUP 0x04u
#define KALOS_HAS_KEY 0x10u
#define KALOS_HAS_VECTOR 0x20u

// One pinned segment or one summary in a record's table section; name, text and the IDs follow,
// padded to 8 bytes. The IDs stand in the token segments too.
typedef struct kalos_item {
  uint64_t tokens_pos;
  double created_at;
  uint32_t num_tokens;
  uint32_t token_crc;
  uint32_t start;     // summary: the first turn it stands for
  uint32_t stop;      // summary: the turn behind the last
  uint32_t at_count;  // summary: turns the session had when it was made
  uint32_t name_len;
  uint32_t text_len;
  uint16_t prefix_len;
  uint16_t suffix_len;
  uint8_t role;
  uint8_t placement;
  uint8_t flags;
  uint8_t reserved;
  uint32_t size;  // of the whole item, a multiple of 8
} kalos_item;
KALOS_STATIC_ASSERT(sizeof(kalos_item) == 56, "kalos_item");
#define KALOS_ITEM_TEXT 0x01u
#define KALOS_ITEM_VOLATILE 0x02u
#define KALOS_ITEM_FRAMED 0x04u
#define KALOS_PLACE_HEAD 0u
#define KALOS_PLACE_BEFORE_LAST_USER 1u
#define KALOS_PLACE_END 2u

#define KALOS_SEGMENT_FIRST 64u  // bytes of a log segment that its header takes

typedef struct kalos_log_header {
  char magic[8];  // "KALOSLOG"
  uint32_t endian;
  uint32_t format;
  uint8_t uuid[16];
  uint64_t salt;
  uint32_t generation;
  uint32_t segment;
  uint32_t prev_end;  // where the records of the segment before end
  uint32_t reserved;
  uint32_t reserved2;
  uint32_t crc;
} kalos_log_header;
KALOS_STATIC_ASSERT(sizeof(kalos_log_header) == 64, "kalos_log_header");

// ---- Control file: 4,096 bytes ------------------------------------------------------------------
#define KALOS_CONTROL_BYTES 4096u
#define KALOS_CONTROL_STATE_A 512u
#define KALOS_CONTROL_STATE_B 1024u
#define KALOS_CONTROL_WORDS 2048u

#define KALOS_DTYPE_FLOAT32 0u
#define KALOS_DTYPE_FLOAT16 1u
#define KALOS_METRIC_COSINE 0u
#define KALOS_METRIC_IP 1u
#define KALOS_METRIC_L2 2u

// Never changes after the store was made.
typedef struct kalos_store_header {
  char magic[8];  // "KALOSCTX"
  uint32_t endian;
  uint32_t format;
  uint8_t uuid[16];
  uint64_t salt;
  uint64_t segment_bytes;
  double created_at;
  uint32_t vector_dtype;
  uint32_t metric;
  uint8_t reserved[56];
  uint32_t reserved2;
  uint32_t crc;
} kalos_store_header;
KALOS_STATIC_ASSERT(sizeof(kalos_store_header) == 128, "kalos_store_header");

// Two copies, written in turn; the valid one with the larger version counts.
typedef struct kalos_state {
  uint64_t version;
  uint64_t checkpoint;  // the index is complete and durable up to here
  kalos_cursor cursor;  // as of the checkpoint
  uint64_t epoch;       // grows by 2 with every writer
  uint8_t boot_id[16];
  uint8_t fingerprint[32];  // tokenizer and template; zeros for none
  uint32_t generation;
  uint32_t clean;  // the writer closed in order
  uint32_t vector_dim;
  uint32_t vocab_size;  // 0: any
  kalos_roots roots;    // as of the checkpoint
  uint32_t durability;  // of the writer: 0 process, 1 group, 2 each
  uint32_t reserved0;
  uint64_t inode;  // of the control file itself: a copied store is noticed
  uint64_t device;
  uint32_t reserved[15];
  uint32_t crc;
} kalos_state;
KALOS_STATIC_ASSERT(sizeof(kalos_state) == 464, "kalos_state");

// Single words, each with 16 bits of check above 48 bits of value.
typedef struct kalos_words {
  uint64_t committed;    // end of the last whole batch in the log
  uint64_t generation;   // folder of files in use
  uint64_t erasures;     // counts erasures and rollbacks
  uint64_t vector_rows;  // rows that readers may scan
  uint64_t index;        // counts how often the index was replaced by a new one
} kalos_words;

#endif  // KALOS_LAYOUT_H
