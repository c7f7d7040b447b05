"""The client's side of a call over shared memory."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._channel cimport ClientChannel
from kalos_ctx._channel_layout cimport kalos_message
from kalos_ctx._context_window cimport ContextWindow
from kalos_ctx._window_wire cimport WindowReader

cdef enum Answer:
    ANSWER_OK
    ANSWER_ERROR
    ANSWER_ON_SOCKET
    ANSWER_LATE          # the time is over
    ANSWER_LOST          # the sidecar is gone, or reads this channel no more
    ANSWER_DAMAGED


cdef class Asker:
    cdef ClientChannel channel
    cdef readonly WindowReader reader
    cdef object is_alive           # callable: whether the connection still stands
    cdef uint64_t next_id
    cdef public uint64_t spins     # looks at the answer before the caller sleeps
    cdef object slot_freed         # threading.Condition: a slot came back
    cdef int num_waiting           # callers that wait for one
    cdef int take_slot(self, uint64_t until_ns) except -2
    cdef void free_slot(self, int i)
    cdef uint64_t begin(self, int i, uint32_t opcode, size_t body_nbytes,
                        uint64_t timeout_ns) noexcept
    cdef Answer wait(self, int i, uint64_t id, uint64_t until_ns) except *
    cdef ContextWindow read_window(self, int i, uint64_t id, bytes session, bytes tenant)
    cdef int check(self, const uint8_t* slot, uint64_t id, uint32_t opcode, uint32_t state,
                   kalos_message* head) except -1
    cdef bytes read_body(self, int i, uint64_t id, uint32_t opcode, uint32_t state)
    cdef bytes read_failure(self, int i, uint64_t id, uint32_t opcode, Answer answer,
                            uint64_t timeout_ns)
