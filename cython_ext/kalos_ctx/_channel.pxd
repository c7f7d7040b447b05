"""The shared memory between one client and the sidecar, and the status page."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from kalos_ctx._channel_layout cimport (
    KALOS_CHANNEL_SLOTS, kalos_call, kalos_message, kalos_status_page,
)

cdef extern from "_channel.h" nogil:
    enum kalos_refusal:
        KALOS_TAKE_OK
        KALOS_TAKE_NOTHING
        KALOS_BAD_STATE
        KALOS_BAD_ID
        KALOS_BAD_MAGIC
        KALOS_BAD_OPCODE
        KALOS_BAD_RESERVED
        KALOS_BAD_GENERATION
        KALOS_BAD_LENGTH
        KALOS_BAD_VALUE
        KALOS_REFUSALS

    ctypedef struct kalos_call_parts:
        kalos_call call
        size_t session_off
        size_t tenant_off
        size_t query_off
        size_t options_off

    ctypedef struct kalos_seat:
        uint64_t id
        kalos_message head
        kalos_call_parts parts
        uint8_t* body

    ctypedef struct kalos_end:
        const uint8_t* requests
        uint8_t* responses
        size_t request_nbytes
        size_t response_nbytes
        uint64_t generation
        kalos_seat seats[KALOS_CHANNEL_SLOTS]
        void* owner

    uint64_t kalos_load_word(const uint64_t* word)
    uint32_t kalos_load_flag(const uint32_t* flag)
    void kalos_store_flag(uint32_t* flag, uint32_t value)
    void kalos_fence()
    void kalos_spin(uint64_t n)
    uint64_t kalos_mono_ns()
    void kalos_futex_wait(const uint32_t* word, uint32_t seen, uint64_t timeout_ns)
    void kalos_futex_wake(uint32_t* word)
    size_t kalos_padded(size_t nbytes, size_t to)
    int kalos_check_head(const kalos_message* head, uint64_t capacity)
    int kalos_check_call(const uint8_t* body, size_t nbytes, uint32_t opcode,
                         kalos_call_parts* parts)
    bint kalos_has_news(const kalos_end* end)
    void kalos_fill_head(kalos_message* head, uint32_t opcode, uint64_t id, uint64_t generation,
                         uint64_t body_nbytes, uint32_t status)
    uint8_t* kalos_answer_body(kalos_end* end, uint32_t i)
    void kalos_publish(kalos_end* end, uint32_t i, uint32_t state)
    void kalos_answer(kalos_end* end, uint32_t i, size_t body_nbytes, uint32_t status)
    int kalos_next(kalos_end* end, uint32_t* slot, int* code, uint64_t* pings)
    void kalos_ask(uint8_t* requests, const uint8_t* responses, uint32_t i, uint64_t id)
    uint32_t kalos_await(uint8_t* requests, const uint8_t* responses, uint32_t i, uint64_t id,
                         uint64_t spins, uint64_t sleep_ns)
    int kalos_taken(const uint8_t* slot, size_t capacity, uint64_t id, uint64_t generation,
                    uint32_t opcode, uint32_t state, kalos_message* head)
    void kalos_stage_add(kalos_status_page* page, uint32_t stage, int64_t ns)
    void kalos_count_add(kalos_status_page* page, uint32_t which, uint64_t n)

# The sentence for a refusal.
cdef str refusal_text(int code)

cdef class Region:
    """Memory that two processes share: a memfd and this process's mapping of it."""
    cdef uint8_t* base
    cdef readonly size_t nbytes
    cdef readonly int fd           # -1 once it was let go


cdef class StatusPage(Region):
    cdef kalos_status_page* page


cdef class ServerChannel:
    """The sidecar's end of one client's channel."""
    cdef kalos_end end
    cdef readonly Region requests
    cdef readonly Region responses
    cdef readonly object client            # whose it is: the sidecar's object
    cdef readonly bint retired


cdef class ClientChannel:
    """The client's end."""
    cdef readonly Region requests
    cdef readonly Region responses
    cdef readonly size_t request_nbytes
    cdef readonly size_t response_nbytes
    cdef readonly uint64_t generation
    cdef uint32_t free_slots               # a bit for each
    cdef uint64_t owed[KALOS_CHANNEL_SLOTS]  # requests whose client stopped waiting
    cdef int lease(self) noexcept
    cdef void give_back(self, uint32_t i) noexcept
    cdef void give_up(self, uint32_t i, uint64_t id) noexcept
    cdef uint8_t* slot(self, uint32_t i) noexcept nogil
    cdef const uint8_t* answer_slot(self, uint32_t i) noexcept nogil
