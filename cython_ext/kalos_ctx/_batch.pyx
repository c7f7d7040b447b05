"""Batches: everything of one call is built in memory, checked, and only then written.

Order of a commit: token IDs, vector rows, then the records (which make them count), then the index.
Until the last record of a batch is whole nothing of it counts, and what was written before it lies
in space that the next batch will take.
"""

from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from kalos_ctx._index cimport Index
from kalos_ctx._layout cimport (
    KALOS_ALIGN, KALOS_BUCKET_EMPTY, KALOS_KIND_DROP, KALOS_KIND_SHARE, KALOS_POSITION,
    KALOS_POSITION_OFFSET, KALOS_POSITION_SEGMENT, KALOS_RECORD_MAGIC, KALOS_RECORD_MORE,
    KALOS_RECORD_ROOTS, KALOS_RECORD_SYNCED, KALOS_SEGMENT_FIRST, KALOS_TOKENS_PER_LINE,
    kalos_bucket, kalos_change, kalos_crc32c, kalos_extent, kalos_record, kalos_roots,
)
from kalos_ctx._log cimport Log, kalos_record_crc, kalos_round_up
from kalos_ctx._segment cimport SegmentSet

from kalos_ctx.errors import InvalidArgument, StoreFull


cdef int stage(Staging* s, uint32_t segment, uint64_t off, uint64_t size) except -1:
    """Room for `size` bytes that go to a place; joins the piece before where the places join."""
    cdef void* grown
    cdef Piece* last
    if s.size + size > s.room:
        s.room = max(s.size + size, s.room * 2)
        grown = realloc(s.data, s.room)
        if grown == NULL:
            raise MemoryError
        s.data = <char*>grown
    if s.num_pieces:
        last = &s.pieces[s.num_pieces - 1]
        if last.segment == segment and last.off + last.size == off:
            last.size += size
            s.size += size
            return 0
    if s.num_pieces == s.piece_room:
        s.piece_room = max(<uint32_t>8, s.piece_room * 2)
        grown = realloc(s.pieces, s.piece_room * sizeof(Piece))
        if grown == NULL:
            raise MemoryError
        s.pieces = <Piece*>grown
    s.pieces[s.num_pieces].segment = segment
    s.pieces[s.num_pieces].off = off
    s.pieces[s.num_pieces].start = s.size
    s.pieces[s.num_pieces].size = size
    s.num_pieces += 1
    s.size += size
    return 0


cdef class Draft:
    """A turn or passage, prepared: IDs framed and checked, text and metadata as bytes."""

    def __init__(self, *, uint8_t role=0, uint8_t flags=0, const int32_t[::1] ids=None,
                 const int32_t[::1] live=None, uint32_t prefix_len=0, uint32_t suffix_len=0,
                 uint32_t trim_prev=0, bytes text=None, bytes metadata=None, bytes group=None,
                 bytes key=None, bytes digest=None, double created_at=0,
                 double expires_at=0, const uint8_t[::1] vector=None, uint32_t vector_nbytes=0,
                 float factor=0, uint64_t passage_id=0):
        if prefix_len > 0xffff or suffix_len > 0xffff or trim_prev > 0xffff:
            raise InvalidArgument("the framing of a turn must stay below 65,536 tokens")
        self.role = role
        self.flags = flags
        self.ids = ids
        self.live = live
        self.prefix_len = prefix_len
        self.suffix_len = suffix_len
        self.trim_prev = trim_prev
        self.text = text
        self.metadata = metadata
        self.group = group
        self.key = key
        self.digest = digest
        self.created_at = created_at
        self.expires_at = expires_at
        self.vector = vector
        self.vector_nbytes = vector_nbytes
        self.factor = factor
        self.passage_id = passage_id


cdef class Batch:
    """Staging area of a writer, used for one batch after another."""

    def __cinit__(self):
        memset(&self.records, 0, sizeof(Staging))
        memset(&self.token_bytes, 0, sizeof(Staging))
        memset(&self.row_bytes, 0, sizeof(Staging))

    def __init__(self, Log log, Index index, SegmentSet tokens, SegmentSet vectors):
        self.log = log
        self.index = index
        self.tokens = tokens
        self.vectors = vectors

    def __dealloc__(self):
        free(self.records.data)
        free(self.records.pieces)
        free(self.token_bytes.data)
        free(self.token_bytes.pieces)
        free(self.row_bytes.data)
        free(self.row_bytes.pieces)

    cdef int begin(self) except -1:
        """Start anew from what the index holds."""
        self.records.size = self.records.num_pieces = 0
        self.token_bytes.size = self.token_bytes.num_pieces = 0
        self.row_bytes.size = self.row_bytes.num_pieces = 0
        self.num_records = 0
        self.next = self.index.cursor
        self.log_at = self.log.end
        self.claimed = None
        self.new_segments = None
        return 0

    cdef uint64_t alloc_arena(self, uint64_t n):
        """Place for n bytes of the index arena."""
        cdef uint64_t off = kalos_round_up(self.next.arena_used, KALOS_ALIGN)
        self.next.arena_used = off + n
        return off

    cdef uint64_t stage_tokens(self, const int32_t* ids, uint64_t n, const int32_t* live,
                               uint64_t num_live) except? 0:
        """Place and stage a run of IDs, and behind it on the next line its live form."""
        cdef uint64_t capacity = self.tokens.segment_bytes // 4
        cdef uint64_t lines = kalos_round_up(n, KALOS_TOKENS_PER_LINE) \
            + kalos_round_up(num_live, KALOS_TOKENS_PER_LINE)
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(self.next.tokens_end)
        cdef uint64_t off = KALOS_POSITION_OFFSET(self.next.tokens_end)
        cdef char* to
        if lines == 0:
            return self.next.tokens_end
        if lines > capacity:
            raise InvalidArgument(
                f"a turn of {n} tokens is longer than a token segment ({capacity} tokens; "
                "segment_bytes sets it)")
        if off + lines > capacity:
            segment += 1
            off = 0
            if segment > 0xffff:
                raise StoreFull("the store has 65,536 token segments; compact it")
        stage(&self.token_bytes, segment, off * 4, lines * 4)
        to = self.token_bytes.data + self.token_bytes.size - lines * 4
        memset(to, 0, lines * 4)
        if n:
            memcpy(to, ids, n * 4)
        if num_live:
            memcpy(to + kalos_round_up(n, KALOS_TOKENS_PER_LINE) * 4, live, num_live * 4)
        self.next.tokens_end = KALOS_POSITION(segment, off + lines)
        return KALOS_POSITION(segment, off)

    cdef uint32_t stage_row(self, const uint8_t* data) except? 0:
        """Place and stage a vector row of the stride's length; the row number."""
        cdef uint32_t row = self.next.vector_rows
        stage(&self.row_bytes, row // self.rows_per_segment,
              <uint64_t>(row % self.rows_per_segment) * self.row_stride, self.row_stride)
        memcpy(self.row_bytes.data + self.row_bytes.size - self.row_stride, data, self.row_stride)
        self.next.vector_rows += 1
        return row

    cdef uint64_t place(self, uint64_t size) except 0:
        """Where the next record of a size goes; in a new segment where it does not fit."""
        cdef uint32_t segment = KALOS_POSITION_SEGMENT(self.log_at)
        cdef uint64_t off = KALOS_POSITION_OFFSET(self.log_at)
        if size >= (<uint64_t>1 << 32) - (1 << 20):
            raise StoreFull(f"a record takes {size} bytes, more than a log segment can hold")
        if off + size > self.log.files.segment_bytes and off > KALOS_SEGMENT_FIRST:
            if segment >= 0xffff:
                raise StoreFull("the log has 65,536 segments; compact the store")
            if self.new_segments is None:
                self.new_segments = []
            self.new_segments.append((segment + 1, off))
            segment += 1
            off = KALOS_SEGMENT_FIRST
            self.log_at = KALOS_POSITION(segment, off)
        return self.log_at

    cdef uint64_t stage_record(self, uint32_t kind, uint32_t flags, kalos_change* c,
                               const Parts* p) except 0:
        """Build a record at the place that `place` gave for its size; the batch goes on behind it.

        `c.image.last_lsn` and `c.entry.lsn` become the record's own position; checksums are
        filled in.
        """
        cdef uint64_t body_len = sizeof(kalos_change) + c.num_extents * sizeof(kalos_extent) \
            + c.name_len + c.tenant_len + c.key_len + c.group_len + c.text_len + c.metadata_len \
            + c.table_len + c.tokens_len + c.live_len + c.vector_len
        cdef uint64_t size
        cdef kalos_record* rec
        cdef kalos_roots* roots
        cdef char* to
        if p.roots != NULL:
            body_len += sizeof(kalos_roots)
            flags |= KALOS_RECORD_ROOTS
        size = kalos_round_up(sizeof(kalos_record) + body_len, KALOS_ALIGN)
        lsn = self.place(size)
        c.image.last_lsn = lsn
        c.image.crc = kalos_crc32c(0, &c.image, sizeof(c.image) - 4)
        if c.entry_off:
            if kind != KALOS_KIND_DROP and kind != KALOS_KIND_SHARE:  # those refer to others
                c.entry.lsn = lsn
            c.entry.crc = kalos_crc32c(0, &c.entry, sizeof(c.entry) - 4)
        stage(&self.records, KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn), size)
        self.last_off = self.records.size - size
        rec = <kalos_record*>(self.records.data + self.last_off)
        memset(rec, 0, sizeof(kalos_record))
        to = <char*>rec + sizeof(kalos_record)
        memcpy(to, c, sizeof(kalos_change))
        to += sizeof(kalos_change)
        if p.roots != NULL:
            to = put(to, p.roots, sizeof(kalos_roots))
            roots = <kalos_roots*>(to - sizeof(kalos_roots))
            # Roots outlive the scrubbing of their record, when no other checksum binds them.
            roots.crc = kalos_crc32c(0, roots, sizeof(kalos_roots) - 4)
        to = put(to, p.extents, c.num_extents * sizeof(kalos_extent))
        to = put(to, p.name, c.name_len)
        to = put(to, p.tenant, c.tenant_len)
        to = put(to, p.key, c.key_len)
        to = put(to, p.group, c.group_len)
        to = put(to, p.text, c.text_len)
        to = put(to, p.metadata, c.metadata_len)
        to = put(to, p.table, c.table_len)
        to = put(to, p.tokens, c.tokens_len)
        to = put(to, p.live, c.live_len)
        to = put(to, p.vector, c.vector_len)
        memset(to, 0, size - sizeof(kalos_record) - body_len)
        rec.magic = KALOS_RECORD_MAGIC
        rec.size = <uint32_t>size
        rec.kind = kind
        rec.flags = flags | KALOS_RECORD_MORE
        if self.synced and self.num_records == 0:
            rec.flags |= KALOS_RECORD_SYNCED
        rec.lsn = lsn
        rec.body_len = <uint32_t>body_len
        rec.body_crc = kalos_crc32c(0, <char*>rec + sizeof(kalos_record), body_len)
        rec.cursor = self.next
        rec.header_crc = kalos_record_crc(self.log.salt, rec)
        self.log_at = KALOS_POSITION(KALOS_POSITION_SEGMENT(lsn), KALOS_POSITION_OFFSET(lsn) + size)
        self.num_records += 1
        return lsn

    cdef uint32_t claim(self, uint64_t table, uint32_t log2, uint64_t hash) except? 0:
        """An empty bucket on the hash's probe path that no record of this batch fills yet; + 1."""
        cdef uint64_t mask = (<uint64_t>1 << log2) - 1, i = hash & mask
        cdef kalos_bucket* b = <kalos_bucket*>self.index.at(table,
                                                            (mask + 1) * sizeof(kalos_bucket))
        if self.claimed is None:
            self.claimed = set()
        while b[i].value != KALOS_BUCKET_EMPTY or (table, i) in self.claimed:
            i = (i + 1) & mask
        self.claimed.add((table, i))
        return <uint32_t>i + 1

    cdef int write(self) except -1:
        """Write everything that was staged; on an error nothing of it counts."""
        cdef kalos_record* last = <kalos_record*>(self.records.data + self.last_off)
        cdef uint32_t i
        cdef Piece* p
        last.flags &= ~KALOS_RECORD_MORE
        last.header_crc = kalos_record_crc(self.log.salt, last)
        # What the index needs is allocated first: behind the log's write nothing may fail.
        self.index.arena.grow(self.next.arena_used)
        if self.next.vector_rows > self.index.cursor.vector_rows:
            self.index.rows.grow(<size_t>self.next.vector_rows * 16)
            self.index.dead.grow(self.next.vector_rows // 8 + 8)
        write_pieces(self.tokens, &self.token_bytes)
        write_pieces(self.vectors, &self.row_bytes)
        if self.new_segments is None:
            p = &self.records.pieces[0]
            self.log.append(self.records.data, p.size, KALOS_POSITION(p.segment, p.off))
            return 0
        end = self.log.end
        try:
            for i in range(self.records.num_pieces):
                p = &self.records.pieces[i]
                for segment, prev_end in self.new_segments:
                    if segment == p.segment:
                        self.log.begin_segment(segment, prev_end)
                self.log.append(self.records.data + p.start, p.size,
                                KALOS_POSITION(p.segment, p.off))
        except BaseException:
            self.log.drop_tail(end)
            raise
        return 0

    cdef int apply(self) except -1:
        """Bring the index up to the batch."""
        cdef const kalos_record* one = <const kalos_record*>self.records.data
        cdef const kalos_record** records = &one
        cdef uint64_t off = 0
        cdef uint32_t i
        if self.num_records == 1:
            return self.index.apply(records, 1)
        records = <const kalos_record**>malloc(self.num_records * sizeof(kalos_record*))
        if records == NULL:
            raise MemoryError
        try:
            for i in range(self.num_records):
                records[i] = <const kalos_record*>(self.records.data + off)
                off += records[i].size
            self.index.apply(records, self.num_records)
        finally:
            free(records)
        return 0


cdef inline char* put(char* to, const void* data, size_t n) noexcept nogil:
    if n:
        memcpy(to, data, n)
    return to + n


cdef int write_pieces(SegmentSet files, Staging* s) except -1:
    """Write staged pieces; a segment that a piece begins seals the one before."""
    cdef uint32_t i
    cdef Piece* p
    for i in range(s.num_pieces):
        p = &s.pieces[i]
        if p.off == 0 and p.segment > 0:
            files.zero_until(p.segment - 1, files.segment_bytes)
        files.write(p.segment, s.data + p.start, p.size, p.off)
    return 0
