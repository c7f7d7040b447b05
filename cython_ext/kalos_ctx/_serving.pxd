"""The sidecar's hot loop: takes requests out of shared memory and answers them."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from kalos_ctx._assembler cimport AssemblerCore
from kalos_ctx._channel cimport ServerChannel, StatusPage, kalos_call_parts, kalos_end
from kalos_ctx._channel_layout cimport kalos_call
from kalos_ctx._window_parts cimport WindowParts


cdef struct taken_request:
    kalos_end* end
    uint32_t slot
    int code
    uint64_t taken_ns


cdef class ServingLoop:
    cdef object store
    cdef AssemblerCore assembler
    cdef readonly StatusPage status
    cdef object protocol           # kalos_ctx.sidecar.protocol
    cdef object offload            # callable: a task for the workers
    cdef object call               # callable: (name, session, tenant, arguments) to a result
    cdef object is_quick           # callable: (name, arguments) to whether the loop may run it
    cdef readonly uint64_t spin_ns
    cdef readonly bint poll
    cdef dict options              # what options say, by their bytes
    cdef dict extras               # of windows without recall, by (path, head)
    cdef list members              # the channels that are looked at
    cdef kalos_end** ends          # theirs
    cdef Py_ssize_t num_ends
    cdef taken_request* taken      # of one pass
    cdef uint32_t kick             # the loop sleeps on it too
    cdef uint32_t seen_kick        # its value when the orders were looked at
    cdef list orders               # what the loop does at the next kick
    cdef readonly bint can_sleep   # the kernel has futex_waitv
    cdef Py_ssize_t collect(self, Py_ssize_t first) noexcept nogil
    cdef void sleep(self) noexcept nogil
    cdef bint has_news(self) noexcept nogil
    cdef int obey(self) except -1
    cdef int turn(self, taken_request* request) except -1
    cdef int finish(self, ServerChannel channel, uint32_t i, object spilled, size_t nbytes,
                    uint32_t status) except -1
    cdef object perform(self, object client, uint32_t opcode, const uint8_t* body,
                        kalos_call_parts* parts, object unpacked, uint8_t* out, size_t room,
                        size_t* nbytes, uint32_t* status)
    cdef object assemble(self, bytes session, bytes tenant, const uint8_t* body,
                         kalos_call_parts* parts, uint8_t* out, size_t room, size_t* nbytes)
    cdef object place(self, bytes answer, uint8_t* out, size_t room, size_t* nbytes)
    cdef object unpack_call(self, const uint8_t* body, kalos_call_parts* parts)
    cdef bytes extras_for(self, WindowParts parts)
    cdef int note(self, WindowParts parts, uint64_t num_tokens) except -1
    cdef bint assemble_in_place(self, bytes session, bytes tenant, const kalos_call* call, policy,
                                uint8_t* out, size_t room, size_t* nbytes) except -1
    cdef tuple options_of(self, const uint8_t* body, kalos_call_parts* parts)
