"""Vector rows of a store: checked when they enter, mapped for scans, owned by entries.

A row is checked against its checksum before the first scan of its slot in this process, and not
again: warm recall pays nothing, and a flipped bit raises and never gives a wrong score. Rows of
other slots are not looked at. What a scan uses without the GIL (`RowMap`, `Runs`) never changes;
growth makes new ones.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import threading
from collections import namedtuple

import numpy as np

from kalos_ctx._control cimport WORD_ROWS
from kalos_ctx._index cimport EntryTable, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_DTYPE_FLOAT16, KALOS_ENTRY_DEAD, KALOS_ENTRY_ORPHAN, KALOS_ENTRY_TTL, KALOS_IMAGE_DEAD,
    KALOS_METRIC_COSINE, kalos_crc32c, kalos_entry, kalos_image,
)
from kalos_ctx._log cimport kalos_row_holds, kalos_sections

from kalos_ctx.errors import (
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector, StoreCorrupt,
)

cdef extern from "_rowmath.h" nogil:
    int64_t kalos_check_rows(
        const float* rows, uint64_t num_rows, uint64_t dim, uint16_t* halves, float* scratch,
        float* factors, uint8_t* zero)
    float kalos_stored_factor(const void* row, uint64_t dim, int half, float* scratch)
    uint64_t kalos_fp_enter()
    void kalos_fp_leave(uint64_t mode)

cdef extern from *:
    """
    #define KALOS_LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
    #define KALOS_REREAD() __asm__ volatile("" ::: "memory")
    """
    uint64_t KALOS_LOAD_RELAXED(const uint64_t* p) nogil
    void KALOS_REREAD() nogil


class StoreMoved(Exception):
    """The store went on in another generation while one call looked at it; the call begins anew."""


CheckedRows = namedtuple("CheckedRows", ["stored", "factors", "zero"])
cdef size_t SLOTS_KEPT = 16384  # slots whose runs a process remembers


cdef object floats_of(str argument, object values, int ndim):
    """A C-contiguous float32 array with `ndim` axes; wider floats are rounded once."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidType(f"{argument} must be an array of numbers") from error
    if array.dtype.kind not in "fiu":
        raise InvalidType(f"{argument} must hold real numbers (got dtype {array.dtype})")
    if array.ndim != ndim:
        raise InvalidArgument(f"{argument} must have {ndim} axes (got {array.ndim})")
    with np.errstate(over="ignore", under="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def check_vectors(rows not None, *, dtype="float32"):
    """Check vectors before they are stored, and compute what is stored with them.

    Parameters
    ----------
    rows : array-like of shape (N, D)
        Real numbers, rounded to float32 first.
    dtype : {'float32', 'float16'}
        How the rows are stored. float16 rounds to nearest, ties to even.

    Returns
    -------
    CheckedRows
        `stored` (N, D) in `dtype`; `factors` float32 (N,), what cosine multiplies with (0 for a
        zero row); `zero` bool (N,), rows whose factor is 0.

    Raises
    ------
    NonFiniteVector
        A value is NaN or infinite, or would be once rounded; row and column are named.
    DimensionMismatch, InvalidArgument, InvalidType
    """
    if dtype not in ("float32", "float16"):
        raise InvalidArgument("dtype must be 'float32' or 'float16'")
    array = floats_of("vectors", rows, 2)
    cdef const float[:, ::1] values = array
    cdef uint64_t n = values.shape[0], dim = values.shape[1]
    if dim == 0:
        raise DimensionMismatch("vectors must have at least 1 dimension (got 0)")
    cdef bint half = dtype == "float16"
    stored = np.empty((n, dim), dtype=np.float16) if half else array
    factors, zero = np.empty(n, dtype=np.float32), np.empty(n, dtype=np.bool_)
    cdef uint16_t[:, ::1] halves = stored.view(np.uint16) if half else None
    cdef float[::1] out = factors, scratch = np.empty(dim, dtype=np.float32)
    cdef uint8_t[::1] flags = zero.view(np.uint8)
    if n == 0:
        return CheckedRows(stored, factors, zero)
    cdef uint16_t *halves_ptr = &halves[0, 0] if half else NULL
    cdef int64_t bad
    with nogil:
        bad = kalos_check_rows(
            &values[0, 0], n, dim, halves_ptr, &scratch[0], &out[0], &flags[0])
    if bad >= 0:
        raise NonFiniteVector(
            f"vectors must be finite in {dtype} (row {bad // <int64_t> dim}, "
            f"column {bad % <int64_t> dim} is not)")
    return CheckedRows(stored, factors, zero)


def row_factors(rows not None):
    """Compute what cosine multiplies each stored row's dot product with.

    Parameters
    ----------
    rows : float32 or float16 array of shape (N, D)

    Returns
    -------
    float32 array of shape (N,)
        1 / norm, rounded once; 0 for a zero row.

    Raises
    ------
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector
    """
    return check_vectors(rows).factors


# ---- Rows, mapped -------------------------------------------------------------------------------

cdef class RowMap:
    """The rows of one generation as they are mapped now; made by `RowFiles`."""

    def __cinit__(self):
        self.segments = NULL
        self.factors = NULL

    def __dealloc__(self):
        free(self.segments)
        free(self.factors)

    cdef int take(self, StoreReader reader, uint64_t num_rows) except -1:
        """Map the first `num_rows` rows; StoreCorrupt where a file is too short for them."""
        cdef uint64_t segment, first, count
        cdef uint64_t num_segments
        self.index, self.log, self.vectors = reader.index, reader.log, reader.vectors
        self.num_rows = num_rows
        self.rows_per_segment = reader.rows_per_segment
        self.stride_nbytes = reader.row_stride
        self.dim = reader.control.state.vector_dim
        self.half = reader.control.head.vector_dtype == KALOS_DTYPE_FLOAT16
        self.check_factors = reader.control.head.metric == KALOS_METRIC_COSINE
        self.index.rows.check(num_rows * FACTOR_STRIDE)
        self.index.dead.check((num_rows + 63) // 64 * 8)
        self.infos = <const kalos_row*>self.index.rows.base
        self.dead = <const uint64_t*>self.index.dead.base
        num_segments = 0
        if num_rows:  # without a row the layout may not be known yet
            num_segments = (num_rows + self.rows_per_segment - 1) // self.rows_per_segment
        self.segments = <const void**>malloc(num_segments * sizeof(void*) + 1)
        self.factors = <const float**>malloc(num_segments * sizeof(void*) + 1)
        if self.segments == NULL or self.factors == NULL:
            raise MemoryError()
        self.kept = []
        for segment in range(num_segments):
            first = segment * self.rows_per_segment
            count = min(num_rows - first, self.rows_per_segment)
            self.segments[segment] = self.vectors.at(
                <uint32_t>segment, 0, count * self.stride_nbytes)
            self.factors[segment] = &self.infos[first].factor
            self.kept.append(self.vectors.open(<uint32_t>segment, False))
        return 0

    cdef bint is_dead(self, uint64_t row) noexcept nogil:
        return KALOS_LOAD_RELAXED(&self.dead[row // 64]) >> (row % 64) & 1

    cdef bint entry_gone(self, uint64_t row) except -1:
        """Whether the row was deleted meanwhile; entry and row say so before its bit does."""
        cdef const kalos_entry* entry
        cdef uint64_t place
        cdef int dead, _
        for _ in range(1000):  # a writer may be between the row's words
            if kalos_row_holds(&self.infos[row], row, &place, &dead):
                break
        else:
            return False
        if dead or place == 0:
            return dead
        entry = <const kalos_entry*>self.index.at(place, sizeof(kalos_entry))
        return entry.flags & KALOS_ENTRY_DEAD and entry.vector_row == row + 1

    cdef int verify(self, uint64_t start, uint64_t count) except -1:
        """Compare rows with their checksums, and with cosine their factors with the rows.

        Raises
        ------
        StoreCorrupt
        """
        cdef uint64_t row = start
        cdef int64_t bad
        cdef float* scratch = <float*>malloc(self.dim * sizeof(float))
        if scratch == NULL:
            raise MemoryError()
        try:
            while True:
                with nogil:
                    bad = first_flaw(self, row, start + count, scratch)
                if bad < 0:
                    return 0
                if not self.entry_gone(bad):
                    self.damaged(bad)
                row = bad + 1
        finally:
            free(scratch)

    def damaged(self, uint64_t row):
        """Raise StoreCorrupt for a row that does not hold."""
        cdef uint32_t segment = <uint32_t>(row // self.rows_per_segment)
        cdef uint64_t off = row % self.rows_per_segment * self.stride_nbytes
        raise StoreCorrupt(
            f"{self.vectors.label(segment)} at byte {off}: a vector does not hold its checksum",
            self.vectors.label(segment), off)


cdef int64_t first_flaw(RowMap m, uint64_t row, uint64_t stop, float* scratch) noexcept nogil:
    """The first row from `row` on that does not hold, alive or dead, or -1."""
    cdef uint64_t nbytes = m.dim * (2 if m.half else 4)
    cdef uint64_t mode = kalos_fp_enter()
    cdef int64_t bad = -1
    cdef uint64_t place
    cdef int dead
    cdef const char* p
    while row < stop:
        p = <const char*>m.segments[row // m.rows_per_segment] \
            + row % m.rows_per_segment * m.stride_nbytes
        if not kalos_row_holds(&m.infos[row], row, &place, &dead) or dead != m.is_dead(row) \
                or not dead and (
                kalos_crc32c(0, p, nbytes) != m.infos[row].crc
                or (m.check_factors
                    and kalos_stored_factor(p, m.dim, m.half, scratch) != m.infos[row].factor)):
            bad = <int64_t>row
            break
        row += 1
    kalos_fp_leave(mode)
    return bad


cdef int read_entry(Index index, const EntryTable* table, uint32_t seq, kalos_entry* out) except -1:
    """Copy a checked entry; one that is being marked as deleted is read until it is whole."""
    cdef const kalos_entry* entry = table_entry(table, seq)
    cdef int _
    if entry != NULL:
        for _ in range(1000):
            out[0] = entry[0]
            if out.crc == kalos_crc32c(0, out, sizeof(kalos_entry) - 4) and out.seq == seq:
                return 0
            KALOS_REREAD()
    return index.check_entry(entry, seq)


# ---- Rows of slots ------------------------------------------------------------------------------

cdef class Runs:
    """Rows that a scan looks at: runs in which row and seq go up by one together.

    Attributes
    ----------
    spans : uint64 array of shape (E, 2)
        First row and number of rows; ascending and disjoint.
    seqs, owners : uint32 arrays of shape (E,)
        Seq of a run's first row; which of `slots` owns it.
    ids : uint64 array by row, or None
        Only where IDs do not ascend with rows.
    num_rows : int
    """

    def __init__(self, tuple slots, spans, seqs, owners, edges, ids=None):
        self.slots = slots
        self.spans = self.c_spans = spans
        self.seqs = self.c_seqs = seqs
        self.owners = self.c_owners = owners
        self.edges = edges
        self.ids = ids
        self.num_rows = int(spans[:, 1].sum())

    cdef bint locate(self, uint64_t row, uint32_t* owner, uint32_t* seq) noexcept:
        """Whose row this is; False for a row of no run."""
        cdef Py_ssize_t lo = 0, hi = self.c_spans.shape[0], mid
        while lo < hi:
            mid = (lo + hi) >> 1
            if self.c_spans[mid, 0] <= row:
                lo = mid + 1
            else:
                hi = mid
        if lo == 0 or row - self.c_spans[lo - 1, 0] >= self.c_spans[lo - 1, 1]:
            return False
        owner[0] = self.c_owners[lo - 1]
        seq[0] = self.c_seqs[lo - 1] + <uint32_t>(row - self.c_spans[lo - 1, 0])
        return True

    def picked(self, seqs not None):
        """Keep only the entries with these seqs (ascending); for the runs of one slot.

        Parameters
        ----------
        seqs : uint32 array of shape (M,)

        Returns
        -------
        Runs
        """
        if not len(self.spans) or not len(seqs):
            return runs_of(self.slots, np.empty((0, 6), np.uint64))
        order = np.argsort(self.seqs, kind="stable")
        firsts = self.seqs[order]
        at = np.searchsorted(firsts, seqs, "right") - 1
        known = at >= 0
        run = order[at]
        ahead = seqs.astype(np.uint64) - self.seqs[run]
        known &= ahead < self.spans[run, 1]
        return self.single(seqs[known], self.spans[run, 0][known] + ahead[known])

    def every_seq(self):
        """Seqs of the entries, ascending, uint32 of shape (num_rows,); for the runs of one slot."""
        if not len(self.spans):
            return np.empty(0, np.uint32)
        counts = self.spans[:, 1].astype(np.int64)
        ahead = np.arange(self.num_rows) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.sort((np.repeat(self.seqs, counts) + ahead).astype(np.uint32))

    def single(self, seqs, rows):
        """Runs of entries of one slot, given by seq and row; used where IDs need no edges."""
        if not len(rows):
            return runs_of(self.slots, np.empty((0, 6), np.uint64), self.ids)
        order = np.argsort(rows, kind="stable")
        rows, seqs = rows[order], seqs[order].astype(np.uint64)
        begins = np.flatnonzero(np.concatenate((
            [True], (np.diff(rows) != 1) | (np.diff(seqs) != 1))))
        table = np.zeros((len(begins), 6), np.uint64)
        table[:, 0] = rows[begins]
        table[:, 1] = np.diff(np.append(begins, len(rows)))
        table[:, 2] = seqs[begins]
        # Seqs ascend with IDs, so that they can stand for them as edges.
        table[:, 4] = seqs[begins]
        table[:, 5] = table[:, 2] + table[:, 1] - 1
        return runs_of(self.slots, table, self.ids)

    def without(self, rows):
        """The same runs less some rows; IDs stay."""
        keep = []
        gone = sorted(rows)
        for span, seq, owner, edge in zip(
                self.spans.tolist(), self.seqs.tolist(), self.owners.tolist(), self.edges.tolist()):
            start, stop = span[0], span[0] + span[1]
            for row in [row for row in gone if start <= row < stop] + [stop]:
                if row > start:
                    keep.append((start, row - start, seq + start - span[0], owner, *edge))
                start = row + 1
        table = np.array(keep, np.uint64).reshape(-1, 6)
        return runs_of(self.slots, table, self.ids)


cdef Runs runs_of(tuple slots, object table, object ids=None):
    """Runs from a table of (row, rows, seq, owner, first ID, last ID)."""
    return Runs(
        slots, np.ascontiguousarray(table[:, :2]), table[:, 2].astype(np.uint32),
        table[:, 3].astype(np.uint32), np.ascontiguousarray(table[:, 4:]), ids)


cdef object table_of(Runs runs):
    return np.column_stack((runs.spans, runs.seqs.astype(np.uint64),
                            runs.owners.astype(np.uint64), runs.edges))


def merged_runs(list parts not None):
    """One scan over the rows of several slots.

    Parameters
    ----------
    parts : list of Runs
        Of different slots.

    Returns
    -------
    Runs
        Without `ids`, whose absence `ids_ascend` judges.
    """
    if len(parts) == 1:
        return parts[0]
    slots, tables = (), []
    for runs in parts:
        table = table_of(runs)
        table[:, 3] += len(slots)
        slots += runs.slots
        tables.append(table)
    table = np.concatenate(tables) if tables else np.empty((0, 6), np.uint64)
    return runs_of(slots, table[np.argsort(table[:, 0], kind="stable")])


def ids_ascend(Runs runs not None):
    """Whether a lower row has a lower ID throughout, so that rows break ties as IDs do."""
    edges = runs.edges
    return len(edges) < 2 or bool((edges[:-1, 1] < edges[1:, 0]).all())


cdef class EntryRows:
    """Rows of one slot's entries that have a vector and live; follows the slot."""

    def __init__(self, Index index not None, Log log not None, uint64_t slot_off, bint turns):
        self.index = index
        self.log = log
        self.slot_off = slot_off
        self.turns = turns
        self.forget()

    def forget(self):
        """Begin anew."""
        self.count = 0
        self.expiries = {}
        self.runs = runs_of((self.slot_off,), np.empty((0, 6), np.uint64))

    cdef int follow(self, RowFiles files) except -1:
        """Bring the runs up to the slot's present entries."""
        cdef kalos_image image
        self.index.read_image(self.slot_off, &image)
        # A collection only loses entries that stay in their place, which the bitmap says.
        if image.num_entries < self.count or (self.turns and image.epoch != self.epoch):
            self.forget()
        self.epoch = image.epoch
        if image.num_entries > self.count:
            try:
                self.extend(files, image.num_entries)
            except StoreCorrupt:
                # An erasure zeroes rows behind the slot's end.
                self.index.read_image(self.slot_off, &image)
                if not image.flags & KALOS_IMAGE_DEAD:
                    raise
                self.forget()
        return 0

    cdef int extend(self, RowFiles files, uint32_t count) except -1:
        """Take in the entries behind those known. On an error nothing changes."""
        cdef EntryTable table
        cdef kalos_entry copy
        cdef kalos_entry* entry = &copy
        cdef uint32_t seq, at = 0
        cdef uint64_t row, id, last = 0, top = 0
        cdef Index index = self.index
        cdef RowMap rows
        cdef kalos_sections sections
        fresh = np.empty((count - self.count, 6), np.uint64)
        cdef uint64_t[:, ::1] runs = fresh
        expiries = {}
        index.open_table(self.slot_off, &table)
        try:
            for seq in range(self.count, min(count, table.image.num_entries)):
                read_entry(index, &table, seq, entry)
                if entry.vector_row == 0 or entry.flags & (KALOS_ENTRY_DEAD | KALOS_ENTRY_ORPHAN):
                    continue
                row = entry.vector_row - 1
                id = seq if self.turns else entry.sum
                if at and row == last + 1 and runs[at - 1, 2] + runs[at - 1, 1] == seq:
                    runs[at - 1, 1] += 1
                else:
                    runs[at, 0], runs[at, 1], runs[at, 2], runs[at, 3] = row, 1, seq, 0
                    runs[at, 4] = id
                    at += 1
                runs[at - 1, 5] = id
                last = row
                top = max(top, row + 1)
                if entry.flags & KALOS_ENTRY_TTL:
                    self.log.sections(entry.lsn, &sections)
                    expiries[seq] = sections.change.expires_at
        finally:
            table_clear(&table)
        if at:
            rows = files.at_least(index, top)
            for i in range(at):
                rows.verify(runs[i, 0], runs[i, 1])
            self.append(fresh[:at])
        self.expiries.update(expiries)
        self.count = count
        return 0

    def append(self, fresh):
        """Put new runs behind those known; the first may continue the last."""
        known = table_of(self.runs)
        if len(known) and known[-1, 0] + known[-1, 1] == fresh[0, 0] \
                and known[-1, 2] + known[-1, 1] == fresh[0, 2]:
            known[-1, 1] += fresh[0, 1]
            known[-1, 5] = fresh[0, 5]
            fresh = fresh[1:]
        table = np.concatenate((known, fresh))
        if (table[1:, 0] < table[:-1, 0]).any():
            table = table[np.argsort(table[:, 0], kind="stable")]
        self.runs = runs_of((self.slot_off,), table)


cdef class RowFiles:
    """What maps a store's vector rows for scans, and remembers which slot owns which.

    Parameters
    ----------
    reader : StoreReader
        Or the writer, which is one. Its files are followed as they grow and move.
    """

    def __init__(self, StoreReader reader not None):
        self.reader = reader
        self.lock = threading.Lock()
        self.map = None
        self.slots = {}

    cdef RowMap at_least(self, Index index, uint64_t num_rows):
        """A map of a generation with at least so many rows. Call with the lock held.

        Raises
        ------
        StoreMoved
            The generation is not the present one any more.
        """
        cdef RowMap rows = self.map
        if rows is None or rows.index is not index or rows.num_rows < num_rows:
            if self.reader.index is not index:
                raise StoreMoved()
            rows = RowMap.__new__(RowMap)
            rows.take(self.reader, max(num_rows, self.reader.control.word(WORD_ROWS)))
            if rows.index is not index:
                raise StoreMoved()
            self.map = rows
        return rows

    cdef EntryRows rows_of(self, Index index, Log log, uint64_t slot_off, bint turns):
        """A slot's rows as of now. Call with the lock held."""
        cdef EntryRows rows = self.slots.get(slot_off)
        if rows is None or rows.index is not index:
            rows = EntryRows(index, log, slot_off, turns)
            rows.follow(self)
            if <size_t>len(self.slots) >= SLOTS_KEPT:
                del self.slots[next(iter(self.slots))]
            self.slots[slot_off] = rows
        else:
            rows.follow(self)
        return rows

    def runs_of_slot(self, uint64_t slot_off, bint turns):
        """The rows of a slot's living entries as of now, checked.

        Returns
        -------
        Runs

        Raises
        ------
        StoreCorrupt
        """
        with self.lock:
            self.reader.enter()
            return self.rows_of(self.reader.index, self.reader.log, slot_off, turns).runs
