"""The sidecar's hot loop: takes requests out of shared memory and answers them.

One pass looks at every client, takes at most one request of each (so that who floods waits behind
everybody else), answers pings on the spot and the rest in turn, with one acquisition of the GIL for
all of them. A pass takes everything that is there; nothing waits for a batch to fill. Work that may
take long goes to the workers. Where nothing comes for `spin_ns`, the loop sleeps on the doorbells
of all clients at once (futex_waitv).
"""

import logging

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport EAGAIN, EINTR, ETIMEDOUT, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from kalos_ctx._assembler cimport AssemblerCore
from kalos_ctx._channel cimport (
    KALOS_TAKE_OK, ServerChannel, StatusPage, kalos_answer, kalos_answer_body, kalos_call_parts,
    kalos_check_call, kalos_check_head, kalos_count_add, kalos_end, kalos_fence, kalos_fill_head,
    kalos_futex_wake, kalos_has_news, kalos_load_flag, kalos_mono_ns, kalos_next, kalos_publish,
    kalos_spin, kalos_stage_add, kalos_store_flag, refusal_text,
)
from kalos_ctx._channel_layout cimport (
    KALOS_COUNT_BAD_REQUESTS, KALOS_COUNT_BATCHES, KALOS_COUNT_DEGRADED, KALOS_COUNT_DENIED,
    KALOS_COUNT_ERRORS, KALOS_COUNT_EXPIRED, KALOS_COUNT_ON_SOCKET, KALOS_COUNT_REQUESTS,
    KALOS_COUNT_SLEEPS, KALOS_COUNT_STATE_FAULTS, KALOS_COUNT_TOKENS, KALOS_COUNT_WINDOWS,
    KALOS_OP_ASSEMBLE, KALOS_OP_CALL, KALOS_OP_COUNT, KALOS_OP_PING, KALOS_SLOT_ON_SOCKET,
    KALOS_STAGE_DEVICE, KALOS_STAGE_PLAN, KALOS_STAGE_QUEUE, KALOS_STAGE_RESPONSE, KALOS_STAGE_SYNC,
    KALOS_STAGE_TOTAL, KALOS_STATUS_ERROR, KALOS_STATUS_OK, kalos_call, kalos_message,
    kalos_request_head, kalos_response_head, kalos_window_result,
)
from kalos_ctx._context_window cimport ContextWindow
from kalos_ctx._window_parts cimport WindowParts
from kalos_ctx._window_wire cimport extras_of, window_nbytes, window_tokens, write_window

import numpy as np

from kalos_ctx.errors import (
    DeviceError, KalosError, PeerDenied, ProtocolError, SidecarUnavailable, StoreCorrupt,
    StoreFull, StoreIOError,
)

cdef extern from *:
    """
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>
    #ifndef SYS_futex_waitv
    #define SYS_futex_waitv 449
    #endif
    typedef struct kalos_waiter {  // struct futex_waitv, Linux 5.16
      uint64_t value;
      uint64_t address;
      uint32_t flags;
      uint32_t reserved;
    } kalos_waiter;
    #define KALOS_WAITERS 128
    #define KALOS_FUTEX_U32 2u

    // Sleep until one of the words changes or until_ns is there; 0, or -1 with errno.
    static int kalos_wait_many(kalos_waiter* waiters, unsigned n, uint64_t until_ns) {
      struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
      return (int)syscall(SYS_futex_waitv, waiters, n, 0, &until, CLOCK_MONOTONIC);
    }

    static void kalos_nap(uint64_t ns) {
      struct timespec span = {0, (long)ns};
      nanosleep(&span, NULL);
    }
    """
    ctypedef struct kalos_waiter:
        uint64_t value
        uint64_t address
        uint32_t flags
        uint32_t reserved
    enum: KALOS_WAITERS
    const uint32_t KALOS_FUTEX_U32
    int kalos_wait_many(kalos_waiter* waiters, unsigned n, uint64_t until_ns) nogil
    void kalos_nap(uint64_t ns) nogil

log = logging.getLogger(__name__)

# One place is the loop's own word.
MAX_CHANNELS = KALOS_WAITERS - 1
cdef uint64_t SLEEP_NS = 500000000
cdef uint64_t NAP_NS = 500000
cdef Py_ssize_t ROOM = 1024
cdef tuple STATE_FAULTS = (StoreCorrupt, StoreFull, StoreIOError)


cdef class ServingLoop:
    """Answers the requests of many clients.

    Parameters
    ----------
    store : SessionStore
    assembler : ContextAssembler
    status : StatusPage
    protocol : module
        `kalos_ctx.sidecar.protocol`.
    call : callable
        (name, session, tenant, arguments) to the result of a call of the store.
    is_quick : callable
        (name, arguments) to whether the loop itself may run that call.
    offload : callable
        Runs a callable without arguments on another thread.
    spin_ns : int
        Nanoseconds without a request after which the loop sleeps.
    poll : bool
        Never sleep.
    """

    def __cinit__(self, *args, **kwargs):
        self.ends = <kalos_end**>calloc(MAX_CHANNELS, sizeof(void*))
        self.taken = <taken_request*>calloc(MAX_CHANNELS, sizeof(taken_request))
        if self.ends == NULL or self.taken == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.ends)
        free(self.taken)

    def __init__(self, store, AssemblerCore assembler not None, StatusPage status not None, *,
                 protocol, call, is_quick, offload, uint64_t spin_ns, bint poll):
        self.store, self.assembler, self.status = store, assembler, status
        self.protocol, self.call, self.is_quick, self.offload = protocol, call, is_quick, offload
        self.spin_ns, self.poll = spin_ns, poll
        self.options, self.extras, self.members, self.orders = {}, {}, [], []
        self.can_sleep = True

    # ---- Orders from other threads --------------------------------------------------------------

    def add(self, ServerChannel channel not None):
        """Look at a channel from now on."""
        self.order(("add", channel))

    def remove(self, ServerChannel channel not None):
        """Look at it no more."""
        self.order(("remove", channel))

    def stop(self):
        """Let `run` return once everything that was taken is answered."""
        self.order(("stop", None))

    def order(self, tuple what):
        """Add to the loop's orders and wake it."""
        self.orders.append(what)
        kalos_futex_wake(&self.kick)

    cdef int obey(self) except -1:
        """Carry the orders out; 1 for the one to stop."""
        cdef ServerChannel channel
        cdef int stop = 0
        cdef Py_ssize_t i
        while self.orders:
            what, channel = self.orders.pop(0)
            if what == "stop":
                stop = 1
            elif what == "add" and len(self.members) < MAX_CHANNELS:
                self.members.append(channel)
            elif what == "remove" and channel in self.members:
                self.members.remove(channel)
        self.num_ends = len(self.members)
        for i in range(self.num_ends):
            self.ends[i] = &(<ServerChannel>self.members[i]).end
        return stop

    # ---- The loop -------------------------------------------------------------------------------

    def run(self):
        """Serve until `stop`; one thread."""
        cdef uint32_t kick, spins = 0
        cdef uint64_t idle_since = kalos_mono_ns(), now
        cdef Py_ssize_t found, first = 0, k
        cdef bint stop = False
        with nogil:
            while True:
                kick = kalos_load_flag(&self.kick)
                if kick != self.seen_kick:
                    self.seen_kick = kick
                    with gil:
                        stop = self.obey() or stop
                found = self.collect(first)
                if found:
                    first += 1
                    spins = 0
                    if found > 0:
                        with gil:
                            for k in range(found):
                                self.turn(&self.taken[k])
                    idle_since = kalos_mono_ns()
                    self.status.page.beat_ns = idle_since
                    continue
                if stop:
                    break
                spins += 1
                kalos_spin(spins)
                if spins & 63 and self.spin_ns:
                    continue
                now = kalos_mono_ns()
                self.status.page.beat_ns = now
                if now - idle_since >= self.spin_ns and not self.poll:
                    self.sleep()

    cdef Py_ssize_t collect(self, Py_ssize_t first) noexcept nogil:
        """Take at most one request of every client, each being the first in turn; answer pings.

        How many are left to answer; -1 where there were pings alone.
        """
        cdef Py_ssize_t n, found = 0, count = self.num_ends
        cdef uint64_t pings = 0
        cdef taken_request* place
        for n in range(count):
            place = &self.taken[found]
            place.end = self.ends[(first + n) % count]
            if kalos_next(place.end, &place.slot, &place.code, &pings):
                place.taken_ns = kalos_mono_ns()
                found += 1
        if found == 0 and pings == 0:
            return 0
        kalos_count_add(self.status.page, KALOS_COUNT_BATCHES, 1)
        kalos_count_add(self.status.page, KALOS_COUNT_REQUESTS, pings + <uint64_t>found)
        return found if found else -1

    cdef bint has_news(self) noexcept nogil:
        cdef Py_ssize_t n
        for n in range(self.num_ends):
            if kalos_has_news(self.ends[n]):
                return True
        return False

    cdef void sleep(self) noexcept nogil:
        """Sleep until a client rings, an order comes or half a second is over."""
        cdef kalos_waiter waiters[KALOS_WAITERS]
        cdef Py_ssize_t n, count = self.num_ends
        cdef kalos_request_head* asks
        waiters[0].value = kalos_load_flag(&self.kick)
        waiters[0].address = <uint64_t><size_t>&self.kick
        for n in range(count):
            # The doorbell's value is read before the look for work: whoever rings later changes it.
            asks = <kalos_request_head*>self.ends[n].requests
            waiters[n + 1].value = kalos_load_flag(&asks.doorbell)
            waiters[n + 1].address = <uint64_t><size_t>&asks.doorbell
            kalos_store_flag(&(<kalos_response_head*>self.ends[n].responses).sleeping, 1)
        for n in range(count + 1):
            waiters[n].flags, waiters[n].reserved = KALOS_FUTEX_U32, 0
        kalos_fence()
        if not self.has_news() and kalos_load_flag(&self.kick) == self.seen_kick:
            kalos_count_add(self.status.page, KALOS_COUNT_SLEEPS, 1)
            if not self.can_sleep:
                kalos_nap(NAP_NS)
            elif kalos_wait_many(waiters, <unsigned>(count + 1), kalos_mono_ns() + SLEEP_NS) < 0 \
                    and errno not in (EAGAIN, EINTR, ETIMEDOUT):
                self.can_sleep = False  # an old kernel, or a filter: it naps from now on
        for n in range(count):
            kalos_store_flag(&(<kalos_response_head*>self.ends[n].responses).sleeping, 0)

    # ---- One request ----------------------------------------------------------------------------

    cdef int turn(self, taken_request* request) except -1:
        """Answer a request, or hand it to the workers."""
        cdef ServerChannel channel = <ServerChannel>request.end.owner
        cdef uint32_t i = request.slot, opcode = request.end.seats[i].head.opcode
        cdef kalos_call_parts* parts = &request.end.seats[i].parts
        cdef object unpacked = None
        if request.code != KALOS_TAKE_OK:
            kalos_count_add(self.status.page, KALOS_COUNT_BAD_REQUESTS, 1)
            error = ProtocolError(f"the request was refused: {refusal_text(request.code)}")
            return self.finish(channel, i, self.protocol.pack_error(error), 0, KALOS_STATUS_ERROR)
        if opcode == KALOS_OP_CALL:
            try:
                unpacked = self.unpack_call(request.end.seats[i].body, parts)
            except ProtocolError as error:
                kalos_count_add(self.status.page, KALOS_COUNT_BAD_REQUESTS, 1)
                return self.finish(
                    channel, i, self.protocol.pack_error(error), 0, KALOS_STATUS_ERROR)
            if not self.is_quick(*unpacked):
                self.offload(lambda at=request.taken_ns: self.serve(channel, i, unpacked, at))
                return 0
        elif opcode == KALOS_OP_ASSEMBLE and parts.call.query_dims:
            self.offload(lambda at=request.taken_ns: self.serve(channel, i, None, at))
            return 0
        self.serve(channel, i, unpacked, request.taken_ns)
        return 0

    def serve(self, ServerChannel channel not None, uint32_t i, unpacked, uint64_t taken_ns):
        """Answer the request that slot i's seat holds."""
        cdef kalos_end* end = &channel.end
        cdef uint64_t now = kalos_mono_ns(), timeout_ns = end.seats[i].head.timeout_ns
        cdef size_t nbytes = 0
        cdef uint32_t status = KALOS_STATUS_OK
        cdef object spilled
        kalos_stage_add(self.status.page, KALOS_STAGE_QUEUE, now - taken_ns)
        if timeout_ns and now - taken_ns > timeout_ns:
            kalos_count_add(self.status.page, KALOS_COUNT_EXPIRED, 1)
            spilled = self.protocol.pack_error(SidecarUnavailable(
                "the request waited longer than its client does; nothing was done"))
            status = KALOS_STATUS_ERROR
        else:
            spilled = self.perform(
                channel.client, end.seats[i].head.opcode, end.seats[i].body, &end.seats[i].parts,
                unpacked, kalos_answer_body(end, i),
                end.response_nbytes - sizeof(kalos_message), &nbytes, &status)
        self.finish(channel, i, spilled, nbytes, status)
        kalos_stage_add(self.status.page, KALOS_STAGE_TOTAL, kalos_mono_ns() - taken_ns)

    cdef int finish(self, ServerChannel channel, uint32_t i, object spilled, size_t nbytes,
                    uint32_t status) except -1:
        """Send an answer: it stands in the slot, or is `spilled`, bytes that may fit there."""
        cdef kalos_end* end = &channel.end
        cdef kalos_message head
        cdef size_t size
        if spilled is not None:
            size = len(<bytes>spilled)
            if size > end.response_nbytes - sizeof(kalos_message):
                kalos_count_add(self.status.page, KALOS_COUNT_ON_SOCKET, 1)
                kalos_fill_head(&head, end.seats[i].head.opcode, end.seats[i].head.id,
                                end.generation, size, status)
                channel.client.send((<char*>&head)[:sizeof(head)] + <bytes>spilled)
                kalos_publish(end, i, KALOS_SLOT_ON_SOCKET)
                return 0
            memcpy(kalos_answer_body(end, i), PyBytes_AS_STRING(spilled), size)
            nbytes = size
        kalos_answer(end, i, nbytes, status)
        return 0

    def serve_message(self, client, bytes head_bytes not None, bytes body not None,
                      uint64_t arrived_ns):
        """Answer a message that came by a socket: the whole answer as bytes."""
        cdef kalos_message head, answer
        cdef kalos_call_parts parts
        cdef size_t nbytes = 0
        cdef uint32_t status = KALOS_STATUS_OK
        cdef const uint8_t* data = <const uint8_t*><char*>body
        cdef object unpacked = None, spilled = b""
        cdef int code
        kalos_count_add(self.status.page, KALOS_COUNT_REQUESTS, 1)
        kalos_stage_add(self.status.page, KALOS_STAGE_QUEUE, kalos_mono_ns() - arrived_ns)
        memcpy(&head, <char*>head_bytes, sizeof(head))
        code = kalos_check_head(&head, len(body))
        if code == KALOS_TAKE_OK and head.opcode != KALOS_OP_PING:
            code = kalos_check_call(data, len(body), head.opcode, &parts)
        try:
            if code != KALOS_TAKE_OK:
                raise ProtocolError(f"the request was refused: {refusal_text(code)}")
            if head.opcode == KALOS_OP_CALL:
                unpacked = self.unpack_call(data, &parts)
        except ProtocolError as error:
            kalos_count_add(self.status.page, KALOS_COUNT_BAD_REQUESTS, 1)
            spilled, status = self.protocol.pack_error(error), KALOS_STATUS_ERROR
        else:
            if head.opcode != KALOS_OP_PING:
                spilled = self.perform(
                    client, head.opcode, data, &parts, unpacked, NULL, 0, &nbytes, &status)
        kalos_fill_head(&answer, head.opcode, head.id, head.generation, len(<bytes>spilled), status)
        kalos_stage_add(self.status.page, KALOS_STAGE_TOTAL, kalos_mono_ns() - arrived_ns)
        return (<char*>&answer)[:sizeof(answer)] + <bytes>spilled

    cdef object unpack_call(self, const uint8_t* body, kalos_call_parts* parts):
        """(name, arguments) of a CALL."""
        cdef bytes raw = (<const char*>body + parts.options_off)[:parts.call.options_nbytes]
        try:
            name, arguments = self.protocol.unpack(raw)
        except (ValueError, TypeError):
            raise ProtocolError("the options of a call are not a name and its arguments") from None
        if not isinstance(name, str) or not isinstance(arguments, dict) \
                or not all(isinstance(key, str) for key in arguments):
            raise ProtocolError("the options of a call are not a name and its arguments")
        return name, arguments

    cdef object perform(self, object client, uint32_t opcode, const uint8_t* body,
                        kalos_call_parts* parts, object unpacked, uint8_t* out, size_t room,
                        size_t* nbytes, uint32_t* status):
        """Do what a request asks. None where the answer stands in `out`, else the answer."""
        cdef bytes session = (<const char*>body + parts.session_off)[:parts.call.session_nbytes]
        cdef bytes tenant = (<const char*>body + parts.tenant_off)[:parts.call.tenant_nbytes]
        cdef uint64_t turns
        try:
            if not client.may_use(tenant):
                kalos_count_add(self.status.page, KALOS_COUNT_DENIED, 1)
                raise PeerDenied("the tenant may not be used by this client")
            if opcode == KALOS_OP_ASSEMBLE:
                return self.assemble(session, tenant, body, parts, out, room, nbytes)
            if opcode == KALOS_OP_COUNT:
                turns = self.store.count(session, tenant=tenant)
                return self.place((<char*>&turns)[:sizeof(turns)], out, room, nbytes)
            name, arguments = unpacked
            result = self.call(name, session, tenant, arguments)
            return self.place(self.protocol.pack(result), out, room, nbytes)
        except KalosError as error:
            if isinstance(error, STATE_FAULTS):
                kalos_count_add(self.status.page, KALOS_COUNT_STATE_FAULTS, 1)
            if isinstance(error, DeviceError):
                client.device_failed(error)
            found = error
        except MemoryError:
            found = KalosError("the sidecar has no memory for this request")
        except Exception as error:
            # Its text may quote what the client sent.
            log.exception("a request failed in a way that nobody expected")
            found = KalosError(f"the sidecar failed ({type(error).__name__}); its log says more")
        status[0] = KALOS_STATUS_ERROR
        kalos_count_add(self.status.page, KALOS_COUNT_ERRORS, 1)
        return self.protocol.pack_error(found)

    cdef object place(self, bytes answer, uint8_t* out, size_t room, size_t* nbytes):
        """Put an answer into its slot where it fits; else it is returned."""
        cdef size_t size = len(answer)
        if size > room:
            return answer
        memcpy(out, PyBytes_AS_STRING(answer), size)
        nbytes[0] = size
        return None

    # ---- Windows --------------------------------------------------------------------------------

    cdef tuple options_of(self, const uint8_t* body, kalos_call_parts* parts):
        """(policy, options for recall) of ASSEMBLE."""
        cdef bytes raw
        cdef object found
        if parts.call.options_nbytes == 0:
            return None, None
        raw = (<const char*>body + parts.options_off)[:parts.call.options_nbytes]
        found = self.options.get(raw)
        if found is None:
            found = self.protocol.window_options(raw)
            if len(self.options) >= ROOM:
                self.options.clear()
            self.options[raw] = found
        return found

    cdef object assemble(self, bytes session, bytes tenant, const uint8_t* body,
                         kalos_call_parts* parts, uint8_t* out, size_t room, size_t* nbytes):
        cdef ContextWindow window
        cdef bytes extras, answer = None
        policy, options = self.options_of(body, parts)
        if parts.call.query_dims == 0 and parts.call.top_k == 0 and not options and out != NULL \
                and self.assemble_in_place(session, tenant, &parts.call, policy, out, room, nbytes):
            return None
        query = None
        if parts.call.query_dims:
            query = np.frombuffer(
                (<const char*>body + parts.query_off)[:parts.call.query_dims * <size_t>4],
                np.float32)
        window = self.assembler.assemble(
            session, tenant=tenant, query=query, top_k=parts.call.top_k, policy=policy,
            max_tokens=None if parts.call.max_tokens < 0 else parts.call.max_tokens,
            reserve=parts.call.reserve, as_of=None if parts.call.as_of < 0 else parts.call.as_of,
            **(options or {}))
        try:
            extras = self.extras_for(window.parts)
            nbytes[0] = window_nbytes(window.parts, <uint32_t>window.num_tokens, extras)
            if nbytes[0] > room:
                answer = PyBytes_FromStringAndSize(NULL, nbytes[0])
                out = <uint8_t*>PyBytes_AS_STRING(answer)
            window.settle_host()
            write_window(window.parts, <uint32_t>window.num_tokens, window.c_data(), extras, out)
            self.note(window.parts, <uint64_t>window.num_tokens)
        finally:
            window.release()
        return answer

    cdef bint assemble_in_place(self, bytes session, bytes tenant, const kalos_call* call, policy,
                                uint8_t* out, size_t room, size_t* nbytes) except -1:
        """Gather a window where its answer goes; False where that is not the way to do it."""
        cdef WindowParts parts
        cdef bytes extras
        cdef uint32_t num_tokens
        # Also where the assembler has a GPU: the answer lies in host memory, and the way over the
        # device takes longer than the copy.
        if len(session) == 0 or room < sizeof(kalos_window_result) \
                or 0 <= call.max_tokens < call.reserve:
            return False
        parts = self.assembler.gather_into(
            tenant, session, call.max_tokens, call.reserve, self.assembler.rules_of(policy),
            call.as_of, window_tokens(out), (room - sizeof(kalos_window_result)) // 4)
        if parts is None:
            return False
        num_tokens = <uint32_t>parts.spans.tokens
        extras = self.extras_for(parts)
        nbytes[0] = window_nbytes(parts, num_tokens, extras)
        if nbytes[0] > room:
            return False
        write_window(parts, num_tokens, NULL, extras, out)
        self.note(parts, num_tokens)
        return True

    cdef bytes extras_for(self, WindowParts parts):
        """What a window's report says beyond its numbers, as bytes."""
        cdef object key, found
        if parts.hits is not None:
            return self.protocol.pack(extras_of(parts))
        key = (parts.path, parts.head)
        found = self.extras.get(key)
        if found is None:
            found = self.protocol.pack(extras_of(parts))
            if len(self.extras) >= ROOM:
                self.extras.clear()
            self.extras[key] = found
        return found

    cdef int note(self, WindowParts parts, uint64_t num_tokens) except -1:
        """Count a window, whose answer is written, and the time of its stages."""
        kalos_count_add(self.status.page, KALOS_COUNT_WINDOWS, 1)
        kalos_count_add(self.status.page, KALOS_COUNT_TOKENS, num_tokens)
        if parts.recall_path is not None:  # recall ran elsewhere than where it was to
            kalos_count_add(self.status.page, KALOS_COUNT_DEGRADED, 1)
        kalos_stage_add(self.status.page, KALOS_STAGE_SYNC, parts.clocks[1] - parts.clocks[0])
        kalos_stage_add(self.status.page, KALOS_STAGE_PLAN, parts.clocks[3] - parts.clocks[1])
        kalos_stage_add(self.status.page, KALOS_STAGE_DEVICE, parts.clocks[5] - parts.clocks[3])
        kalos_stage_add(self.status.page, KALOS_STAGE_RESPONSE,
                        kalos_mono_ns() - parts.clocks[5])
        return 0
