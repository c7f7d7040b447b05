"""The client's side of a call over shared memory.

A caller leases one of the channel's slots, writes its request, rings where the sidecar sleeps, and
waits without the GIL: first looking, then asleep on the slot's wake word. While it sleeps it makes
sure, every few milliseconds, that the sidecar lives. A caller whose time is over leaves its slot
until the answer has come, since the sidecar may still write it.
"""

import threading

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kalos_ctx._channel cimport (
    KALOS_TAKE_OK, ClientChannel, kalos_ask, kalos_await, kalos_fill_head, kalos_mono_ns,
    kalos_padded, kalos_taken, refusal_text,
)
from kalos_ctx._channel_layout cimport (
    KALOS_NAME_MAX, KALOS_OP_ASSEMBLE, KALOS_OP_PING, KALOS_SLOT_EMPTY, KALOS_SLOT_ERROR,
    KALOS_SLOT_ON_SOCKET, KALOS_SLOT_RESULT_READY, kalos_call, kalos_message,
)
from kalos_ctx._context_window cimport ContextWindow
from kalos_ctx._vectors cimport floats_of
from kalos_ctx._window_wire cimport WindowReader

import numpy as np

from kalos_ctx.errors import (
    DimensionMismatch, InvalidArgument, InvalidType, ProtocolError, SidecarTimeout,
)

cdef uint64_t SLICE_NS = 5000000  # between two looks at whether the sidecar lives


class Lost(Exception):
    """The connection is gone; what became of the request is not known."""


class TooLarge(Exception):
    """The request or its answer goes by the socket; the argument is the answer's ID, or None."""


def query_values(query):
    """A query as float32 of shape (D,), rounded and refused as the assembler does."""
    if not isinstance(query, np.ndarray):
        try:
            query = np.asarray(query)
        except (TypeError, ValueError) as error:
            raise InvalidType("query must be an array of numbers in host memory") from error
    if query.ndim != 1:
        raise InvalidArgument(f"query must have 1 axis (got {query.ndim})")
    if query.shape[0] == 0:
        raise DimensionMismatch("query must have at least 1 dimensions (got 0)")
    return np.ascontiguousarray(floats_of("query", query, 1))


cdef class Asker:
    """Asks over one channel; threads share it.

    Parameters
    ----------
    channel : ClientChannel
    reader : WindowReader
    is_alive : callable
        Whether the connection still stands; called every few milliseconds of a wait.
    spins : int
        How often a caller looks for the answer before it sleeps.
    """

    def __init__(self, ClientChannel channel not None, WindowReader reader not None, is_alive,
                 uint64_t spins):
        self.channel, self.reader, self.is_alive, self.spins = channel, reader, is_alive, spins
        self.next_id = 1
        self.slot_freed = threading.Condition()

    # ---- Slots ----------------------------------------------------------------------------------

    cdef int take_slot(self, uint64_t until_ns) except -2:
        """A slot, or -1 where the time is over first."""
        cdef int i = self.channel.lease()
        cdef uint64_t now
        if i >= 0:
            return i
        with self.slot_freed:
            self.num_waiting += 1
            try:
                while True:
                    i = self.channel.lease()
                    now = kalos_mono_ns()
                    if i >= 0 or now >= until_ns:
                        return i
                    if not self.is_alive():
                        raise Lost()
                    # Slots that nobody waited for come back without a word: look again soon.
                    self.slot_freed.wait(min(SLICE_NS, until_ns - now) / 1e9)
            finally:
                self.num_waiting -= 1

    cdef void free_slot(self, int i):
        self.channel.give_back(i)
        if self.num_waiting:
            with self.slot_freed:
                self.slot_freed.notify()

    def new_id(self):
        """An ID for a request that goes by the socket."""
        cdef uint64_t id = self.next_id
        self.next_id += 1
        return id

    cdef uint64_t begin(self, int i, uint32_t opcode, size_t body_nbytes,
                        uint64_t timeout_ns) noexcept:
        """Write the head of the request in slot i, whose body stands there, and send it."""
        cdef kalos_message* head = <kalos_message*>self.channel.slot(i)
        cdef uint64_t id = self.next_id
        self.next_id += 1
        kalos_fill_head(head, opcode, id, self.channel.generation, body_nbytes, 0)
        head.timeout_ns = timeout_ns
        kalos_ask(self.channel.requests.base, self.channel.responses.base, i, id)
        return id

    cdef Answer wait(self, int i, uint64_t id, uint64_t until_ns) except *:
        """Wait for the answer of slot i. Whatever comes out, the slot is still the caller's but
        for ANSWER_LATE and ANSWER_LOST, and where a signal handler raises."""
        cdef uint8_t* requests = self.channel.requests.base
        cdef const uint8_t* responses = self.channel.responses.base
        cdef uint32_t state
        cdef uint64_t now, spins = self.spins, nap
        with nogil:
            state = kalos_await(requests, responses, i, id, spins, 0)
        while state == KALOS_SLOT_EMPTY:
            now = kalos_mono_ns()
            if now >= until_ns:
                self.channel.give_up(i, id)
                return ANSWER_LATE
            nap = min(SLICE_NS, until_ns - now)
            with nogil:
                state = kalos_await(requests, responses, i, id, 0, nap)
            if state == KALOS_SLOT_EMPTY:
                try:
                    PyErr_CheckSignals()
                except BaseException:
                    self.channel.give_up(i, id)
                    raise
                if self.channel.retired or not self.is_alive():
                    # What was answered before the end still counts.
                    with nogil:
                        state = kalos_await(requests, responses, i, id, 1, 0)
                    if state == KALOS_SLOT_EMPTY:
                        self.channel.give_up(i, id)
                        return ANSWER_LOST
        if state == KALOS_SLOT_RESULT_READY:
            return ANSWER_OK
        if state == KALOS_SLOT_ERROR:
            return ANSWER_ERROR
        return ANSWER_ON_SOCKET if state == KALOS_SLOT_ON_SOCKET else ANSWER_DAMAGED

    # ---- Calls ----------------------------------------------------------------------------------

    def ping(self, uint64_t timeout_ns):
        """One round trip without work."""
        cdef uint64_t until_ns = kalos_mono_ns() + timeout_ns
        cdef int i = self.take_slot(until_ns)
        cdef uint64_t id
        cdef Answer answer
        if i < 0:
            raise SidecarTimeout(_busy(timeout_ns))
        id = self.begin(i, KALOS_OP_PING, 0, timeout_ns)
        answer = self.wait(i, id, until_ns)
        if answer == ANSWER_OK:
            self.free_slot(i)
            return
        self.read_failure(i, id, KALOS_OP_PING, answer, timeout_ns)

    def ask(self, uint32_t opcode, bytes body not None, uint64_t timeout_ns):
        """Send a request whose body is given, and return the answer's body.

        Returns
        -------
        (bool, bytes)
            Whether it is a result (else an error), and its body.

        Raises
        ------
        Lost, TooLarge, SidecarTimeout, ProtocolError
        """
        cdef uint64_t until_ns = kalos_mono_ns() + timeout_ns
        cdef size_t nbytes = len(body)
        cdef int i
        cdef uint64_t id
        cdef Answer answer
        if nbytes > self.channel.request_nbytes - sizeof(kalos_message):
            raise TooLarge(None)
        i = self.take_slot(until_ns)
        if i < 0:
            raise SidecarTimeout(_busy(timeout_ns))
        memcpy(self.channel.slot(i) + sizeof(kalos_message), PyBytes_AS_STRING(body), nbytes)
        id = self.begin(i, opcode, nbytes, timeout_ns)
        answer = self.wait(i, id, until_ns)
        if answer == ANSWER_OK:
            return True, self.read_body(i, id, opcode, KALOS_SLOT_RESULT_READY)
        return False, self.read_failure(i, id, opcode, answer, timeout_ns)

    def assemble(self, bytes session not None, bytes tenant not None, int64_t max_tokens,
                 int64_t reserve, int64_t as_of, uint32_t top_k, query, bytes options not None,
                 uint64_t timeout_ns):
        """Ask for a window.

        Returns
        -------
        ContextWindow, or bytes
            The body of an error.

        Raises
        ------
        As `ask`.
        """
        cdef uint64_t until_ns = kalos_mono_ns() + timeout_ns
        cdef size_t nbytes, at, room = self.channel.request_nbytes - sizeof(kalos_message)
        cdef const float[::1] values = query
        cdef size_t dims = 0 if query is None else values.shape[0]
        cdef uint8_t* body
        cdef kalos_call* call
        cdef int i
        cdef uint64_t id
        cdef Answer answer
        at = sizeof(kalos_call) + kalos_padded(len(session) + len(tenant), 4)
        nbytes = at + dims * 4 + len(options)
        if nbytes > room:
            raise TooLarge(None)
        if len(session) > KALOS_NAME_MAX or len(tenant) > KALOS_NAME_MAX:
            raise InvalidArgument("a name must be 1 to 1024 bytes long")
        i = self.take_slot(until_ns)
        if i < 0:
            raise SidecarTimeout(_busy(timeout_ns))
        body = self.channel.slot(i) + sizeof(kalos_message)
        memset(body, 0, at)
        call = <kalos_call*>body
        call.max_tokens, call.reserve, call.as_of, call.top_k = max_tokens, reserve, as_of, top_k
        call.query_dims, call.options_nbytes = <uint32_t>dims, <uint32_t>len(options)
        call.session_nbytes, call.tenant_nbytes = <uint16_t>len(session), <uint16_t>len(tenant)
        memcpy(body + sizeof(kalos_call), <char*>session, len(session))
        memcpy(body + sizeof(kalos_call) + len(session), <char*>tenant, len(tenant))
        if dims:
            memcpy(body + at, &values[0], dims * 4)
        memcpy(body + at + dims * 4, <char*>options, len(options))
        id = self.begin(i, KALOS_OP_ASSEMBLE, nbytes, timeout_ns)
        answer = self.wait(i, id, until_ns)
        if answer != ANSWER_OK:
            return self.read_failure(i, id, KALOS_OP_ASSEMBLE, answer, timeout_ns)
        return self.read_window(i, id, session, tenant)

    cdef ContextWindow read_window(self, int i, uint64_t id, bytes session, bytes tenant):
        cdef kalos_message head
        cdef const uint8_t* slot = self.channel.answer_slot(i)
        try:
            self.check(slot, id, KALOS_OP_ASSEMBLE, KALOS_SLOT_RESULT_READY, &head)
            return self.reader.read(slot + sizeof(kalos_message), head.body_nbytes, session,
                                    tenant, self.reader.pool.timeout)
        finally:
            self.free_slot(i)

    # ---- Answers --------------------------------------------------------------------------------

    cdef int check(self, const uint8_t* slot, uint64_t id, uint32_t opcode, uint32_t state,
                   kalos_message* head) except -1:
        cdef int code = kalos_taken(
            slot, self.channel.response_nbytes - sizeof(kalos_message), id,
            self.channel.generation, opcode, state, head)
        if code != KALOS_TAKE_OK:
            raise ProtocolError(f"the sidecar's answer was refused: {refusal_text(code)}")
        return 0

    cdef bytes read_body(self, int i, uint64_t id, uint32_t opcode, uint32_t state):
        """Copy an answer's body, and free its slot."""
        cdef kalos_message head
        cdef const uint8_t* slot = self.channel.answer_slot(i)
        try:
            self.check(slot, id, opcode, state, &head)
            return (<const char*>slot + sizeof(kalos_message))[:head.body_nbytes]
        finally:
            self.free_slot(i)

    cdef bytes read_failure(self, int i, uint64_t id, uint32_t opcode, Answer answer,
                            uint64_t timeout_ns):
        """The body of an error; raises where there is none."""
        if answer == ANSWER_ERROR:
            return self.read_body(i, id, opcode, KALOS_SLOT_ERROR)
        if answer == ANSWER_LATE:
            raise SidecarTimeout(
                f"the sidecar did not answer within {timeout_ns / 1e9:g} s; what was asked may "
                f"still be done")
        if answer == ANSWER_LOST:
            raise Lost()
        self.free_slot(i)
        if answer == ANSWER_ON_SOCKET:
            raise TooLarge(id)
        raise ProtocolError("the sidecar's answer was refused: its slot has an unknown state")


cdef str _busy(uint64_t timeout_ns):
    return (f"every slot of the connection stayed in use for {timeout_ns / 1e9:g} s; "
            f"nothing was sent")
