"""Declarations of cuda/kalos_layout.h; the header is the definition."""

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "kalos_layout.h" nogil:
    const uint32_t KALOS_FORMAT_MAJOR, KALOS_FORMAT_MINOR, KALOS_ENDIAN_MARK, KALOS_ALIGN
    const uint32_t KALOS_TOKENS_PER_LINE
    uint64_t KALOS_POSITION(uint32_t segment, uint32_t offset)
    uint32_t KALOS_POSITION_SEGMENT(uint64_t pos)
    uint32_t KALOS_POSITION_OFFSET(uint64_t pos)
    const uint64_t KALOS_POSITION_MASK
    const uint32_t KALOS_APPLIED_WHOLE, KALOS_INDEX_FORMAT

    const uint32_t KALOS_ROLE_SYSTEM, KALOS_ROLE_DEVELOPER, KALOS_ROLE_USER
    const uint32_t KALOS_ROLE_ASSISTANT, KALOS_ROLE_TOOL, KALOS_ROLE_FUNCTION

    ctypedef struct kalos_cursor:
        uint64_t arena_used
        uint64_t tokens_end
        uint32_t vector_rows
        uint32_t num_slots
        uint32_t session_keys
        uint32_t idempotency_keys

    const uint32_t KALOS_ENTRY_DEAD, KALOS_ENTRY_TTL, KALOS_ENTRY_FRAMED, KALOS_ENTRY_TEXT
    const uint32_t KALOS_ENTRY_ORPHAN, KALOS_ENTRY_GROUPED, KALOS_ENTRY_ZERO

    ctypedef struct kalos_entry:
        uint64_t tokens_pos
        uint64_t sum
        uint64_t lsn
        uint32_t num_tokens
        uint32_t token_crc
        uint32_t seq
        uint32_t unit_first
        uint32_t vector_row
        uint32_t live_tokens
        uint32_t live_crc
        uint16_t prefix_len
        uint16_t suffix_len
        uint16_t trim_prev
        uint8_t role
        uint8_t flags
        uint32_t crc

    ctypedef struct kalos_extent:
        uint32_t first_seq
        uint32_t capacity
        uint64_t place

    const uint32_t KALOS_SLOT_SESSION, KALOS_SLOT_COLLECTION, KALOS_SLOT_TENANT
    const uint32_t KALOS_IMAGE_DEAD, KALOS_IMAGE_COMPLEX, KALOS_IMAGE_TTL, KALOS_IMAGE_LASTING
    const uint32_t KALOS_IMAGE_FORKED, KALOS_IMAGE_VECTORS

    ctypedef struct kalos_image:
        uint64_t hash
        uint64_t name_lsn
        uint64_t last_lsn
        uint64_t extents_off
        uint64_t segments_lsn
        uint64_t summaries_lsn
        uint64_t sum
        uint64_t next_id
        double expires_at
        uint32_t num_entries
        uint32_t num_extents
        uint32_t extents_capacity
        uint32_t flags
        uint32_t epoch
        uint32_t kind
        uint32_t slot_id
        uint32_t family
        uint32_t last_assistant
        uint32_t last_user
        uint32_t shared_below
        uint32_t crc

    ctypedef struct kalos_slot:
        uint64_t version
        uint64_t reserved
        kalos_image image[2]

    ctypedef struct kalos_bucket:
        uint64_t hash
        uint64_t value
    const uint64_t KALOS_BUCKET_EMPTY, KALOS_BUCKET_GONE
    const uint32_t KALOS_SLOT_BLOCKS, KALOS_SLOT_BLOCK_SHIFT

    ctypedef struct kalos_roots:
        uint64_t slot_table
        uint64_t key_table
        uint32_t slot_log2
        uint32_t key_log2
        uint64_t slot_blocks[28]
        uint32_t reserved
        uint32_t crc

    const uint32_t KALOS_ARENA_FIRST

    ctypedef struct kalos_index_header:
        char magic[8]
        uint32_t endian
        uint32_t format
        uint8_t uuid[16]
        uint64_t inode
        uint64_t device
        uint32_t generation
        uint32_t crc
        uint64_t epoch
        uint64_t roots_version
        uint64_t num_slots
        uint64_t applied
        uint64_t suspect
        kalos_roots roots[2]

    ctypedef struct kalos_row:
        uint32_t crc
        float factor
        uint64_t entry
    const uint64_t KALOS_ROW_DEAD

    const uint32_t KALOS_RECORD_MAGIC, KALOS_RECORD_MORE, KALOS_RECORD_SCRUBBED, KALOS_RECORD_ROOTS
    const uint32_t KALOS_RECORD_SYNCED
    const uint32_t KALOS_KIND_SLOT, KALOS_KIND_TURN, KALOS_KIND_PASSAGE, KALOS_KIND_SEGMENTS
    const uint32_t KALOS_KIND_SUMMARIES, KALOS_KIND_ROLLBACK, KALOS_KIND_FORK, KALOS_KIND_ERASE
    const uint32_t KALOS_KIND_DROP, KALOS_KIND_IMAGE, KALOS_KIND_TABLES, KALOS_KIND_SHARE
    const uint32_t KALOS_KIND_LAST

    ctypedef struct kalos_record:
        uint32_t magic
        uint32_t header_crc
        uint32_t size
        uint16_t kind
        uint16_t flags
        uint64_t lsn
        uint32_t body_crc
        uint32_t body_len
        kalos_cursor cursor

    ctypedef struct kalos_change:
        uint64_t slot_off
        uint64_t entry_off
        uint64_t prev_lsn
        uint64_t extents_off
        double created_at
        double expires_at
        uint32_t slot_bucket
        uint32_t key_bucket
        uint32_t group_bucket
        uint32_t call_bucket
        uint32_t num_extents
        uint32_t name_len
        uint32_t tenant_len
        uint32_t key_len
        uint32_t group_len
        uint32_t text_len
        uint32_t metadata_len
        uint32_t table_len
        uint32_t tokens_len
        uint32_t live_len
        uint32_t vector_len
        uint32_t vector_crc
        float vector_factor
        uint32_t present
        uint8_t digest[16]
        kalos_image image
        kalos_entry entry
    const uint32_t KALOS_HAS_TEXT, KALOS_HAS_METADATA, KALOS_HAS_GROUP, KALOS_HAS_KEY
    const uint32_t KALOS_HAS_VECTOR

    ctypedef struct kalos_item:
        uint64_t tokens_pos
        double created_at
        uint32_t num_tokens
        uint32_t token_crc
        uint32_t start
        uint32_t stop
        uint32_t at_count
        uint32_t name_len
        uint32_t text_len
        uint16_t prefix_len
        uint16_t suffix_len
        uint8_t role
        uint8_t placement
        uint8_t flags
        uint8_t reserved
        uint32_t size
    const uint32_t KALOS_ITEM_TEXT, KALOS_ITEM_VOLATILE, KALOS_ITEM_FRAMED
    const uint32_t KALOS_PLACE_HEAD, KALOS_PLACE_BEFORE_LAST_USER, KALOS_PLACE_END

    const uint32_t KALOS_SEGMENT_FIRST

    ctypedef struct kalos_log_header:
        char magic[8]
        uint32_t endian
        uint32_t format
        uint8_t uuid[16]
        uint64_t salt
        uint32_t generation
        uint32_t segment
        uint32_t prev_end
        uint32_t reserved
        uint32_t reserved2
        uint32_t crc

    const uint32_t KALOS_CONTROL_BYTES, KALOS_CONTROL_STATE_A, KALOS_CONTROL_STATE_B
    const uint32_t KALOS_CONTROL_WORDS
    const uint32_t KALOS_DTYPE_FLOAT32, KALOS_DTYPE_FLOAT16
    const uint32_t KALOS_METRIC_COSINE, KALOS_METRIC_IP, KALOS_METRIC_L2

    ctypedef struct kalos_store_header:
        char magic[8]
        uint32_t endian
        uint32_t format
        uint8_t uuid[16]
        uint64_t salt
        uint64_t segment_bytes
        double created_at
        uint32_t vector_dtype
        uint32_t metric
        uint32_t crc

    ctypedef struct kalos_state:
        uint64_t version
        uint64_t checkpoint
        kalos_cursor cursor
        uint64_t epoch
        uint8_t boot_id[16]
        uint8_t fingerprint[32]
        uint32_t generation
        uint32_t clean
        uint32_t vector_dim
        uint32_t vocab_size
        kalos_roots roots
        uint32_t durability
        uint64_t inode
        uint64_t device
        uint32_t crc

    ctypedef struct kalos_words:
        uint64_t committed
        uint64_t generation
        uint64_t erasures
        uint64_t vector_rows
        uint64_t index

cdef extern from "_checks.h" nogil:
    uint32_t kalos_crc32c(uint32_t crc, const void* data, size_t n)
    uint32_t kalos_crc32c_portable(uint32_t crc, const void* data, size_t n)
    uint64_t kalos_hash_bytes(uint64_t h, const void* data, size_t n)
    uint64_t kalos_hash_name(uint64_t salt, uint32_t kind, const void* tenant, size_t tenant_len,
                             const void* name, size_t name_len)
    uint64_t kalos_seal(uint64_t value, uint64_t context)
    int kalos_unseal(uint64_t word, uint64_t context, uint64_t* value)
