"""A window as the body of a message, both ways.

kalos_channel.h has the layout. The reader makes a window of the same class from it, in memory of
the reader's own, with everything that its report says: nothing of it refers to the sidecar.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport malloc
from libc.string cimport memcpy, memset

from kalos_ctx._channel_layout cimport (
    KALOS_RESULT_COMPARED, KALOS_RESULT_REUSED_ALL, KALOS_RESULT_STABLE, kalos_window_fate,
    kalos_window_result, kalos_window_span,
)
from kalos_ctx._context_window cimport ContextWindow, fill_out, out_tokens
from kalos_ctx._planner cimport KALOS_PLAN_STABLE
from kalos_ctx._session_table cimport SessionRef, shown
from kalos_ctx._session_view cimport (
    KALOS_SPAN_FRAME, KALOS_SPAN_PASSAGE, kalos_span,
)
from kalos_ctx._window_parts cimport Block, Head, WindowParts
from kalos_ctx._windows cimport WindowPool, c_tenant_key

from kalos_ctx._window_parts import KIND_NAMES, WHY_NAMES
from kalos_ctx.errors import ProtocolError
from kalos_ctx.types import Hits

import numpy as np

cdef Py_ssize_t HEADS_ROOM = 256
cdef Py_ssize_t NUM_KINDS = len(KIND_NAMES), NUM_WHYS = len(WHY_NAMES)


# ---- Writing ------------------------------------------------------------------------------------

cdef size_t _padded(size_t nbytes) noexcept:
    return (nbytes + 7) & ~<size_t>7


cdef size_t window_nbytes(WindowParts parts, uint32_t num_tokens, bytes extras) except 0:
    parts.find_fates()
    return (sizeof(kalos_window_result) + _padded(<size_t>num_tokens * 4)
            + parts.spans.count * sizeof(kalos_window_span)
            + parts.num_fates * sizeof(kalos_window_fate) + len(extras))


cdef int32_t* window_tokens(uint8_t* out) noexcept:
    return <int32_t*>(out + sizeof(kalos_window_result))


cdef int write_window(WindowParts parts, uint32_t num_tokens, const int32_t* tokens, bytes extras,
                      uint8_t* out) except -1:
    cdef kalos_window_result head
    cdef kalos_window_span span
    cdef kalos_span* source
    cdef uint32_t i
    cdef size_t nbytes = <size_t>num_tokens * 4
    memset(&head, 0, sizeof(head))
    head.num_tokens = num_tokens
    head.num_spans, head.num_fates = parts.spans.count, parts.num_fates
    head.extras_nbytes = <uint32_t>len(extras)
    if parts.request.flags & KALOS_PLAN_STABLE:
        head.flags |= KALOS_RESULT_STABLE
    if parts.compared:
        head.flags |= KALOS_RESULT_COMPARED
    if parts.reused_all:
        head.flags |= KALOS_RESULT_REUSED_ALL
    head.count, head.reused_tokens = parts.count, parts.reused_tokens
    head.total, head.budget, head.low = parts.total, parts.request.budget, parts.request.low
    head.recall_budget, head.recall_used = parts.recall_budget, parts.recall_used
    memcpy(head.clocks, parts.clocks, sizeof(head.clocks))
    memcpy(out, &head, sizeof(head))
    out += sizeof(head)
    if nbytes and tokens != NULL:
        memcpy(out, tokens, nbytes)
    memset(out + nbytes, 0, _padded(nbytes) - nbytes)
    out += _padded(nbytes)
    for i in range(parts.spans.count):
        source = &parts.spans.items[i]
        memset(&span, 0, sizeof(span))
        span.id, span.start, span.length = source.id, source.start, source.length
        span.kind, span.flags, span.role = source.kind, source.flags, source.role
        memcpy(out, &span, sizeof(span))
        out += sizeof(span)
    if parts.num_fates:
        memcpy(out, parts.fate_runs, parts.num_fates * sizeof(kalos_window_fate))
        out += parts.num_fates * sizeof(kalos_window_fate)
    memcpy(out, <const char*>extras, len(extras))
    return 0


cdef dict extras_of(WindowParts parts):
    cdef Head head = parts.head
    cdef dict found = {
        "path": parts.path,
        "head": [[(<Block>block).names, (<Block>block).lengths]
                 for block in (head.head, head.inside, head.tail)],
    }
    if parts.hits is not None:
        hits = parts.hits
        found["hits"] = [hits.ids.tobytes(), hits.scores.tobytes(), hits.counts.tobytes(),
                         hits.sources, hits.reason]
        found["passages"] = parts.passages
    return found


def check_out(out):
    """Raise for a caller's buffer that is none of int32."""
    out_tokens(out)


def copy_out(ContextWindow window not None, out):
    """Fill a caller's buffer with a window's tokens; one that is too short releases the window."""
    fill_out(window, out)


# ---- Reading ------------------------------------------------------------------------------------

cdef Block _named(list row):
    cdef Block block = Block.__new__(Block)
    names, lengths = row
    block.names, block.lengths = list(names), [int(length) for length in lengths]
    block.num_tokens = sum(block.lengths)
    if len(block.names) != len(block.lengths):
        raise ProtocolError("a window's pinned segments have names and lengths that do not match")
    return block


cdef tuple _plain(dict extras):
    """(path, Head) of a window's extras."""
    cdef Head head = Head.__new__(Head)
    head.head, head.inside, head.tail = [_named(row) for row in extras["head"]]
    head.num_tokens = <uint64_t>head.head.num_tokens + head.inside.num_tokens \
        + head.tail.num_tokens
    return extras["path"], head


cdef class WindowReader:
    """Makes windows from answers.

    Parameters
    ----------
    pool : WindowPool
        Of the host: where the windows lie.
    unpack : callable
        bytes to the object that msgpack made them from.
    """

    def __init__(self, WindowPool pool not None, unpack):
        self.pool, self.unpack, self.heads = pool, unpack, {}

    def window_from(self, bytes body not None, bytes session not None, bytes tenant not None):
        """As `read`, from bytes."""
        return self.read(
            <const uint8_t*><char*>body, len(body), session, tenant, self.pool.timeout)

    cdef ContextWindow read(self, const uint8_t* body, size_t nbytes, bytes session, bytes tenant,
                            double timeout_s):
        """A window from an answer's body, which nobody else writes any more.

        Every number is checked against the body's length and the window's, since the message may
        be damaged; a wrong one raises ProtocolError.
        """
        cdef kalos_window_result head
        cdef WindowParts parts
        cdef ContextWindow window
        cdef size_t tokens_off = sizeof(kalos_window_result), spans_off, fates_off, extras_off
        if nbytes < sizeof(head):
            raise ProtocolError(f"a window of {nbytes} bytes is shorter than its head")
        memcpy(&head, body, sizeof(head))
        spans_off = tokens_off + _padded(<size_t>head.num_tokens * 4)
        fates_off = spans_off + <size_t>head.num_spans * sizeof(kalos_window_span)
        extras_off = fates_off + <size_t>head.num_fates * sizeof(kalos_window_fate)
        if extras_off + head.extras_nbytes != nbytes:
            raise ProtocolError(f"the parts of a window do not add up to its {nbytes} bytes")
        parts = self.read_parts(&head, body + spans_off, body + fates_off,
                                <bytes>(<const char*>body + extras_off)[:head.extras_nbytes])
        window = self.new_window(parts, session, tenant, head.num_tokens, timeout_s)
        if head.num_tokens:
            memcpy(window.c_data(), body + tokens_off, <size_t>head.num_tokens * 4)
        window.c_set_length(head.num_tokens)
        return window

    cdef ContextWindow new_window(self, WindowParts parts, bytes session, bytes tenant,
                                  uint32_t num_tokens, double timeout_s):
        cdef ContextWindow window = ContextWindow.__new__(ContextWindow)
        cdef SessionRef ref = SessionRef.__new__(SessionRef)
        cdef uint64_t key = c_tenant_key(<const unsigned char*><char*>tenant, len(tenant))
        ref.tenant, ref.session, ref.shown = tenant, session, shown(session)
        window.c_attach(self.pool, num_tokens, key, timeout_s)
        window.ref, window.parts = ref, parts
        return window

    def empty(self, bytes session not None, bytes tenant not None, str why not None):
        """A window without tokens whose report says why."""
        cdef WindowParts parts = WindowParts.__new__(WindowParts)
        cdef ContextWindow window
        parts.path, parts.degraded = "none", why
        parts.fates_known = True
        _, parts.head = _plain({"path": "", "head": [[[], []]] * 3})
        window = self.new_window(parts, session, tenant, 0, self.pool.timeout)
        window.c_set_length(0)
        return window

    cdef WindowParts read_parts(self, const kalos_window_result* head, const uint8_t* spans,
                                const uint8_t* fates, bytes extras):
        cdef WindowParts parts = WindowParts.__new__(WindowParts)
        cdef tuple known = self.heads.get(extras)
        cdef dict said
        cdef int i
        if known is None:
            try:
                said = self.unpack(extras)
                known = _plain(said)
                if "hits" in said:
                    self.read_hits(parts, said)
                else:
                    if len(self.heads) >= HEADS_ROOM:
                        self.heads.clear()
                    self.heads[extras] = known
            except (ValueError, TypeError, KeyError):
                raise ProtocolError("a window's extras are not what the protocol says") from None
        parts.path, parts.head = known
        parts.count = <uint32_t>head.count
        parts.reused_tokens, parts.total = head.reused_tokens, head.total
        parts.request.budget, parts.request.low = head.budget, head.low
        parts.recall_budget, parts.recall_used = head.recall_budget, head.recall_used
        parts.request.flags = KALOS_PLAN_STABLE if head.flags & KALOS_RESULT_STABLE else 0
        parts.compared = head.flags & KALOS_RESULT_COMPARED != 0
        parts.reused_all = head.flags & KALOS_RESULT_REUSED_ALL != 0
        for i in range(6):
            parts.clocks[i] = head.clocks[i]
        self.read_spans(parts, spans, head.num_spans, head.num_tokens)
        self.read_fates(parts, fates, head.num_fates)
        return parts

    cdef int read_hits(self, WindowParts parts, dict said) except -1:
        ids, scores, counts, sources, reason = said["hits"]
        parts.hits = Hits(
            np.frombuffer(ids, np.uint64), np.frombuffer(scores, np.float32),
            np.frombuffer(counts, np.int64), tuple(sources), reason)
        parts.passages = [tuple(row) for row in said["passages"] or ()]
        return 0

    cdef int read_spans(self, WindowParts parts, const uint8_t* source, uint32_t count,
                        uint32_t num_tokens) except -1:
        cdef kalos_window_span span
        cdef kalos_span* place
        cdef uint32_t i
        cdef uint64_t end = 0
        cdef uint64_t num_passages = 0 if parts.passages is None else len(parts.passages)
        for i in range(count):
            memcpy(&span, source + i * sizeof(kalos_window_span), sizeof(span))
            place = parts.push(span.length, span.kind)
            if span.start != end or span.kind > KALOS_SPAN_FRAME \
                    or (span.kind == KALOS_SPAN_PASSAGE and span.id >= num_passages):
                raise ProtocolError("the spans of a window do not tile it")
            place.id, place.flags, place.role = span.id, span.flags, span.role
            end += span.length
        if end != num_tokens:
            raise ProtocolError("the spans of a window do not tile it")
        return 0

    cdef int read_fates(self, WindowParts parts, const uint8_t* source, uint32_t count) except -1:
        cdef size_t nbytes = <size_t>count * sizeof(kalos_window_fate)
        cdef kalos_window_fate* run
        cdef uint32_t i
        parts.fates_known = True
        if count == 0:
            return 0
        parts.fate_runs = <kalos_window_fate*>malloc(nbytes)
        if parts.fate_runs == NULL:
            raise MemoryError()
        memcpy(parts.fate_runs, source, nbytes)
        for i in range(count):
            run = &parts.fate_runs[i]
            if run.first >= run.stop or run.stop > <uint64_t>1 << 32 or run.kind >= NUM_KINDS \
                    or run.why >= NUM_WHYS:
                raise ProtocolError("what became of a window's turns is not what the protocol says")
        parts.num_fates = count
        return 0
