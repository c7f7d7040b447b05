"""The shared memory between one client and the sidecar, and the status page.

kalos_channel.h has the layout and the life of a request, `_channel.h` the two ends in C. Each
region is a memfd of a fixed size: sealed against growing and shrinking, so that no access ends in
a signal; its pages exist before it is handed out. The region that the sidecar answers in is sealed
with F_SEAL_FUTURE_WRITE once the sidecar has mapped it: nobody else can write it, by any way.
"""

import errno as errnos
import fcntl
import os

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kalos_ctx._channel_layout cimport (
    KALOS_CHANNEL_MAGIC, KALOS_CHANNEL_PAGE, KALOS_CHANNEL_SLOTS, KALOS_PROTOCOL_MAJOR,
    KALOS_PROTOCOL_MINOR, KALOS_SLOT_EMPTY, KALOS_STAGE_BUCKETS, KALOS_STAGES, KALOS_STATE_DRAINING,
    KALOS_STATE_READY, KALOS_STATE_STARTING, kalos_response_head, kalos_status_page,
)
from kalos_ctx._posix cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap

from kalos_ctx.errors import ProtocolError, SidecarUnavailable

cdef extern from "<sys/mman.h>" nogil:
    const int MAP_POPULATE
    int mlock(const void* addr, size_t n)

cdef extern from "_sigbus.h" nogil:
    void kalos_guard_add(void* base, size_t n)
    void kalos_guard_remove(void* base)

F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h
PAGE_NBYTES = KALOS_CHANNEL_PAGE
SLOTS = KALOS_CHANNEL_SLOTS
cdef uint32_t NUM_SLOTS = KALOS_CHANNEL_SLOTS, NUM_STAGES = KALOS_STAGES
cdef uint32_t NUM_BUCKETS = KALOS_STAGE_BUCKETS

# By the numbers of kalos_refusal.
cdef tuple REFUSALS = (
    "",
    "",
    "the slot's state is none that a client writes",
    "its id is not larger than the ones before, or not the one of its slot",
    "it has another magic number",
    "its opcode is unknown",
    "reserved bytes are not zero",
    "it is for another life of the sidecar",
    "a length is larger than its place, or its parts do not add up",
    "a number is outside what the protocol allows",
)
assert len(REFUSALS) == KALOS_REFUSALS

COUNT_NAMES = (
    "requests", "windows", "errors", "bad_requests", "expired", "on_socket", "denied",
    "connections", "reconnects", "disconnects", "handshakes_failed", "batches", "sleeps",
    "degraded", "retired", "state_faults", "tokens",
)
GAUGE_NAMES = (
    "clients", "direct_clients", "pool_slots", "pool_free", "registered_bytes", "device_bytes",
    "channel_bytes", "vector_rows", "queued", "locked_bytes",
)
STAGE_NAMES = ("queue", "sync", "plan", "device", "response", "total")
STATE_NAMES = ("starting", "ready", "draining")
assert len(STAGE_NAMES) == KALOS_STAGES
assert (KALOS_STATE_STARTING, KALOS_STATE_READY, KALOS_STATE_DRAINING) == (0, 1, 2)


cdef str refusal_text(int code):
    return REFUSALS[code]


cdef class Region:
    """Memory that two processes share."""

    def __cinit__(self, *args):
        self.base, self.nbytes, self.fd = NULL, 0, -1

    def __dealloc__(self):
        if self.base != NULL:
            kalos_guard_remove(self.base)
            munmap(self.base, self.nbytes)

    @staticmethod
    def new(str name, size_t nbytes):
        """Make one of zeros whose pages exist; sealed against changes of its size."""
        return _new(Region.__new__(Region), name, nbytes)

    @staticmethod
    def received(int fd, size_t nbytes, bint writable):
        """Map one that came from the sidecar; takes the descriptor, also where it raises."""
        return _received(Region.__new__(Region), fd, nbytes, writable)

    def seal_for_others(self):
        """Nobody who maps it from now on can write it."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def seal(self):
        """No more seals."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def lock_in_memory(self):
        """Keep the pages in memory; whether the system allowed it."""
        return mlock(self.base, self.nbytes) == 0

    def close_fd(self):
        """Let go of the descriptor; the mapping stays. Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


cdef object _map(Region region, int fd, size_t nbytes, int protection):
    cdef void* base = mmap(NULL, nbytes, protection, MAP_SHARED | MAP_POPULATE, fd, 0)
    if base == MAP_FAILED:
        raise SidecarUnavailable(f"{nbytes} bytes of shared memory cannot be mapped")
    region.base, region.nbytes = <uint8_t*>base, nbytes
    # A hole that was punched into it where memory has run out would be a signal.
    kalos_guard_add(base, nbytes)
    return region


cdef object _new(Region region, str name, size_t nbytes):
    try:
        region.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(region.fd, nbytes)
        os.posix_fallocate(region.fd, 0, nbytes)
    except OSError as e:
        region.close_fd()
        raise SidecarUnavailable(
            f"{nbytes} bytes of shared memory cannot be had: {e.strerror}") from None
    fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return _map(region, region.fd, nbytes, PROT_READ | PROT_WRITE)


cdef object _received(Region region, int fd, size_t nbytes, bint writable):
    region.fd = fd
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as e:
        if e.errno != errnos.EINVAL:
            raise
        seals = 0
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & fixed != fixed or os.fstat(fd).st_size != nbytes:
        raise ProtocolError("the sidecar sent memory whose size is not fixed as the protocol says")
    return _map(region, fd, nbytes, PROT_READ | PROT_WRITE if writable else PROT_READ)


cdef class StatusPage(Region):
    """What the sidecar counts; any client can read it without a call."""

    @staticmethod
    def create(uint64_t generation, uint64_t started_ns, uint32_t pid):
        """Make the sidecar's own."""
        cdef StatusPage status = _new(
            StatusPage.__new__(StatusPage), "kalos-status", sizeof(kalos_status_page))
        cdef kalos_status_page* page = <kalos_status_page*>status.base
        status.page = page
        page.magic = KALOS_CHANNEL_MAGIC
        page.major, page.minor = KALOS_PROTOCOL_MAJOR, KALOS_PROTOCOL_MINOR
        page.pid, page.generation, page.started_ns = pid, generation, started_ns
        status.seal_for_others()
        return status

    @staticmethod
    def open(int fd):
        """Map the page that a sidecar sent; takes the descriptor."""
        cdef StatusPage status = _received(
            StatusPage.__new__(StatusPage), fd, sizeof(kalos_status_page), False)
        status.page = <kalos_status_page*>status.base
        if status.page.magic != KALOS_CHANNEL_MAGIC:
            raise ProtocolError("the sidecar's status page has another magic number")
        return status

    def count(self, str name, uint64_t n=1):
        """Add to a counter."""
        kalos_count_add(self.page, COUNT_NAMES.index(name), n)

    def set_gauge(self, str name, uint64_t value):
        """Set a gauge."""
        self.page.gauges[<int>GAUGE_NAMES.index(name)] = value

    @property
    def state(self):
        """"starting", "ready" or "draining"."""
        return STATE_NAMES[min(self.page.state, 2)]

    @state.setter
    def state(self, str name):
        self.page.state = STATE_NAMES.index(name)

    @property
    def generation(self):
        """Which life of the sidecar."""
        return self.page.generation

    def read(self):
        """All of it as a dict: state, pid, times in seconds, counts, gauges, stages.

        A stage is {"buckets": counts by upper bound 2**i ns, "sum_s": seconds}.
        """
        cdef kalos_status_page* page = self.page
        cdef uint32_t s, b
        stages = {}
        for s in range(NUM_STAGES):
            stages[STAGE_NAMES[s]] = {
                "buckets": [page.stages[s][b] for b in range(NUM_BUCKETS)],
                "sum_s": page.sums_ns[s] / 1e9,
            }
        return {
            "state": self.state,
            "pid": page.pid,
            "generation": page.generation,
            "started_at": page.started_ns / 1e9,
            "beat_age_s": (kalos_mono_ns() - page.beat_ns) / 1e9 if page.beat_ns else None,
            "counts": {name: page.counts[i] for i, name in enumerate(COUNT_NAMES)},
            "gauges": {name: page.gauges[i] for i, name in enumerate(GAUGE_NAMES)},
            "stages": stages,
        }


cdef class ServerChannel:
    """The sidecar's end of one client's channel.

    Parameters
    ----------
    client : object
        Whose it is.
    generation : int
        Of the sidecar; a request for another is refused.
    request_nbytes, response_nbytes : int
        Of a slot, multiples of 4,096.
    """

    def __cinit__(self, client, uint64_t generation, size_t request_nbytes, size_t response_nbytes):
        cdef kalos_response_head* head
        cdef uint32_t i
        if request_nbytes % PAGE_NBYTES or response_nbytes % PAGE_NBYTES \
                or not request_nbytes or not response_nbytes:
            raise ValueError("a slot is a number of whole pages")
        self.client = client
        self.requests = Region.new("kalos-requests", PAGE_NBYTES + SLOTS * request_nbytes)
        self.requests.seal()
        self.responses = Region.new("kalos-responses", PAGE_NBYTES + SLOTS * response_nbytes)
        head = <kalos_response_head*>self.responses.base
        head.magic, head.generation = KALOS_CHANNEL_MAGIC, generation
        head.major, head.minor = KALOS_PROTOCOL_MAJOR, KALOS_PROTOCOL_MINOR
        self.responses.seal_for_others()
        self.end.requests, self.end.responses = self.requests.base, self.responses.base
        self.end.request_nbytes, self.end.response_nbytes = request_nbytes, response_nbytes
        self.end.generation, self.end.owner = generation, <void*>self
        for i in range(NUM_SLOTS):
            self.end.seats[i].body = <uint8_t*>calloc(1, request_nbytes)
            if self.end.seats[i].body == NULL:
                raise MemoryError()

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(NUM_SLOTS):
            free(self.end.seats[i].body)

    @property
    def nbytes(self):
        """Bytes of shared memory."""
        return self.requests.nbytes + self.responses.nbytes

    def last_id(self):
        """The largest ID of a request that was taken."""
        cdef uint32_t i
        return max([self.end.seats[i].id for i in range(NUM_SLOTS)])

    def lock_in_memory(self):
        """Keep the pages in memory; whether the system allowed it."""
        return self.requests.lock_in_memory() and self.responses.lock_in_memory()

    def sent(self):
        """The client has its descriptors: let go of ours."""
        self.requests.close_fd()
        self.responses.close_fd()

    def retire(self):
        """Nobody reads this channel any more; a client that still writes harms nobody."""
        cdef kalos_response_head* head = <kalos_response_head*>self.responses.base
        cdef uint32_t i
        self.retired = True
        kalos_store_flag(&head.retired, 1)
        for i in range(NUM_SLOTS):
            kalos_futex_wake(&head.wake[i])
        self.sent()


cdef class ClientChannel:
    """The client's end of a channel. Its methods are called with the GIL, which is their lock.

    Parameters
    ----------
    requests_fd, responses_fd : int
        From the sidecar; taken over, also where it raises.
    """

    def __cinit__(self, int requests_fd, int responses_fd, uint64_t generation,
                  size_t request_nbytes, size_t response_nbytes):
        self.request_nbytes, self.response_nbytes = request_nbytes, response_nbytes
        self.generation = generation
        self.free_slots = (1 << SLOTS) - 1
        try:
            self.requests = Region.received(
                requests_fd, PAGE_NBYTES + SLOTS * request_nbytes, True)
        except BaseException:
            os.close(responses_fd)
            raise
        self.responses = Region.received(
            responses_fd, PAGE_NBYTES + SLOTS * response_nbytes, False)
        self.requests.close_fd()
        self.responses.close_fd()

    @property
    def retired(self):
        """Whether the sidecar reads this channel no more."""
        return kalos_load_flag(&(<kalos_response_head*>self.responses.base).retired) != 0

    cdef int lease(self) noexcept:
        """A slot that is free, or -1. Slots whose answer nobody waited for come back here."""
        cdef uint32_t i
        cdef const kalos_response_head* theirs = <kalos_response_head*>self.responses.base
        cdef uint64_t word
        for i in range(NUM_SLOTS):
            if self.owed[i]:
                word = kalos_load_word(&theirs.words[i])
                if word >> 8 == self.owed[i] and word & 0xFF != KALOS_SLOT_EMPTY:
                    self.owed[i] = 0
                    self.free_slots |= <uint32_t>1 << i
        for i in range(NUM_SLOTS):
            if self.free_slots & <uint32_t>1 << i:
                self.free_slots &= ~(<uint32_t>1 << i)
                return <int>i
        return -1

    cdef void give_back(self, uint32_t i) noexcept:
        self.free_slots |= <uint32_t>1 << i

    cdef void give_up(self, uint32_t i, uint64_t id) noexcept:
        """Nobody waits for the answer any more; until it comes the slot is the sidecar's."""
        self.owed[i] = id

    cdef uint8_t* slot(self, uint32_t i) noexcept nogil:
        return self.requests.base + KALOS_CHANNEL_PAGE + i * self.request_nbytes

    cdef const uint8_t* answer_slot(self, uint32_t i) noexcept nogil:
        return self.responses.base + KALOS_CHANNEL_PAGE + i * self.response_nbytes
