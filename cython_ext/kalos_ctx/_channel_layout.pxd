"""Declarations of cuda/kalos_channel.h; the header is the definition."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "kalos_channel.h" nogil:
    const uint32_t KALOS_PROTOCOL_MAJOR, KALOS_PROTOCOL_MINOR
    const uint32_t KALOS_CHANNEL_MAGIC, KALOS_CHANNEL_ENDIAN

    const uint32_t KALOS_OP_HELLO, KALOS_OP_WELCOME, KALOS_OP_PING, KALOS_OP_COUNT
    const uint32_t KALOS_OP_ASSEMBLE, KALOS_OP_CALL
    const uint32_t KALOS_STATUS_OK, KALOS_STATUS_ERROR

    ctypedef struct kalos_message:
        uint32_t magic
        uint16_t opcode
        uint16_t status
        uint64_t id
        uint64_t generation
        uint32_t body_nbytes
        uint32_t reserved0
        uint64_t timeout_ns

    const uint32_t KALOS_MODE_DIRECT, KALOS_MODE_SERVED
    const uint32_t KALOS_TRANSPORT_MEMORY, KALOS_TRANSPORT_SOCKET

    ctypedef struct kalos_hello:
        uint32_t endian
        uint16_t major
        uint16_t minor
        uint32_t message_nbytes
        uint32_t slots
        uint64_t features
        uint32_t modes
        uint32_t transports
        uint32_t request_nbytes
        uint32_t response_nbytes

    ctypedef struct kalos_call:
        int64_t max_tokens
        int64_t reserve
        int64_t as_of
        uint32_t top_k
        uint32_t query_dims
        uint32_t options_nbytes
        uint16_t session_nbytes
        uint16_t tenant_nbytes

    const uint32_t KALOS_NAME_MAX

    ctypedef struct kalos_window_result:
        uint32_t num_tokens
        uint32_t num_spans
        uint32_t num_fates
        uint32_t extras_nbytes
        uint32_t flags
        uint64_t count
        uint64_t reused_tokens
        uint64_t total
        uint64_t budget
        uint64_t low
        uint64_t recall_budget
        uint64_t recall_used
        int64_t clocks[6]

    const uint32_t KALOS_RESULT_STABLE, KALOS_RESULT_COMPARED, KALOS_RESULT_REUSED_ALL

    ctypedef struct kalos_window_span:
        uint64_t id
        uint32_t start
        uint32_t length
        uint8_t kind
        uint8_t flags
        uint16_t role

    ctypedef struct kalos_window_fate:
        uint64_t first
        uint64_t stop
        uint64_t cut
        uint8_t kind
        uint8_t why

    const uint8_t KALOS_FATE_OF_TURN, KALOS_FATE_OF_SUMMARY

    const uint32_t KALOS_CHANNEL_PAGE
    enum: KALOS_CHANNEL_SLOTS
    const uint32_t KALOS_SLOT_EMPTY, KALOS_SLOT_REQUEST_READY, KALOS_SLOT_RESULT_READY
    const uint32_t KALOS_SLOT_ERROR, KALOS_SLOT_ON_SOCKET

    ctypedef struct kalos_request_head:
        uint64_t words[KALOS_CHANNEL_SLOTS]
        uint32_t doorbell

    ctypedef struct kalos_response_head:
        uint64_t words[KALOS_CHANNEL_SLOTS]
        uint32_t wake[KALOS_CHANNEL_SLOTS]
        uint32_t sleeping
        uint32_t retired
        uint32_t magic
        uint16_t major
        uint16_t minor
        uint64_t generation

    const uint32_t KALOS_STATE_STARTING, KALOS_STATE_READY, KALOS_STATE_DRAINING
    const uint32_t KALOS_STAGE_QUEUE, KALOS_STAGE_SYNC, KALOS_STAGE_PLAN, KALOS_STAGE_DEVICE
    const uint32_t KALOS_STAGE_RESPONSE, KALOS_STAGE_TOTAL
    enum: KALOS_STAGES
    enum: KALOS_STAGE_BUCKETS

    const uint32_t KALOS_COUNT_REQUESTS, KALOS_COUNT_WINDOWS, KALOS_COUNT_ERRORS
    const uint32_t KALOS_COUNT_BAD_REQUESTS, KALOS_COUNT_EXPIRED, KALOS_COUNT_ON_SOCKET
    const uint32_t KALOS_COUNT_DENIED, KALOS_COUNT_CONNECTIONS, KALOS_COUNT_RECONNECTS
    const uint32_t KALOS_COUNT_DISCONNECTS, KALOS_COUNT_HANDSHAKES_FAILED, KALOS_COUNT_BATCHES
    const uint32_t KALOS_COUNT_SLEEPS, KALOS_COUNT_DEGRADED, KALOS_COUNT_RETIRED
    const uint32_t KALOS_COUNT_STATE_FAULTS, KALOS_COUNT_TOKENS
    enum: KALOS_COUNTS

    const uint32_t KALOS_GAUGE_CLIENTS, KALOS_GAUGE_DIRECT_CLIENTS, KALOS_GAUGE_POOL_SLOTS
    const uint32_t KALOS_GAUGE_POOL_FREE, KALOS_GAUGE_REGISTERED_BYTES, KALOS_GAUGE_DEVICE_BYTES
    const uint32_t KALOS_GAUGE_CHANNEL_BYTES, KALOS_GAUGE_VECTOR_ROWS, KALOS_GAUGE_QUEUED
    enum: KALOS_GAUGES

    ctypedef struct kalos_status_page:
        uint32_t magic
        uint16_t major
        uint16_t minor
        uint32_t state
        uint32_t pid
        uint64_t generation
        uint64_t started_ns
        uint64_t beat_ns
        uint64_t counts[KALOS_COUNTS]
        uint64_t gauges[KALOS_GAUGES]
        uint64_t sums_ns[KALOS_STAGES]
        uint64_t stages[KALOS_STAGES][KALOS_STAGE_BUCKETS]
