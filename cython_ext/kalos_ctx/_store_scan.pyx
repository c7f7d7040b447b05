"""Recall over a store's mapped rows on the CPU: scopes, prepared queries, and the scan.

A scope is a snapshot: rows added while it is scanned are not seen. Rows deleted meanwhile never
come back as hits: an entry is marked before its row is touched, each hit's entry is read after the
scan, and where one is marked the scan is done again without it.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc

import threading

import numpy as np

from kalos_ctx._cpu_ops cimport (
    KALOS_LEVEL_AUTO, KALOS_MAX_QUERIES, KALOS_PADDED_DIM, KALOS_QUERY_ZERO, c_lower_bound,
    c_prepare_query, c_topk, kalos_hit, kalos_row_run, kalos_scan,
)
from kalos_ctx._index cimport EntryTable, Index, table_clear, table_entry
from kalos_ctx._layout cimport (
    KALOS_ENTRY_DEAD, KALOS_IMAGE_DEAD, KALOS_SLOT_COLLECTION, KALOS_SLOT_SESSION, kalos_entry,
    kalos_image,
)
from kalos_ctx._log cimport Log
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._vectors cimport (
    FACTOR_STRIDE, EntryRows, RowFiles, RowMap, Runs, floats_of, read_entry,
)

from kalos_ctx._vectors import StoreMoved, ids_ascend, merged_runs
from kalos_ctx.errors import (
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector, StoreCorrupt, StoreIOError,
)

cdef object FLOAT32 = np.dtype(np.float32), UINT64 = np.dtype(np.uint64)
cdef object INT64 = np.dtype(np.int64)
cdef uint32_t SCOPES_TRIED = 8  # for one call, while its hits are deleted under it
cdef size_t SCOPES_KEPT = 1024  # merged scopes of several collections


cdef class Scope:
    """What one recall may return: rows of some slots, in one generation of the store.

    Attributes
    ----------
    names : tuple of bytes
        Collections that were found, in the order of the call, or the session.
    parts : tuple of Runs
        The rows of each.
    runs : Runs
        All of them.
    turns : bool
    expiries : dict of int to float
        A session's seqs with a time to live, and when they expire.
    """

    @property
    def slots(self):
        """Slot offsets of the parts."""
        return self.runs.slots

    def filtered(self, Runs runs not None, dict passing not None):
        """Keep only entries that pass a filter.

        Parameters
        ----------
        runs : Runs
            The scope's, or for a session a part of them.
        passing : dict of slot offset to uint32 array
            Seqs that pass, ascending.
        """
        if self.turns:
            return runs.picked(np.intersect1d(
                runs.every_seq(), passing[runs.slots[0]], assume_unique=True))
        picked = merged_runs([
            (<Runs>part).picked(passing[(<Runs>part).slots[0]]) for part in self.parts])
        # Whether IDs ascend with rows was judged for all rows, so it holds for fewer.
        return Runs(picked.slots, picked.spans, picked.seqs, picked.owners, picked.edges,
                    self.runs.ids)


def lower_bound(min_score):
    """Give the least float32 score that a bound lets pass; -inf for None.

    Raises
    ------
    InvalidArgument, InvalidType
    """
    return c_lower_bound(min_score)


cdef class StoreScan:
    """Scans of one store.

    Parameters
    ----------
    reader : StoreReader
        Or the writer.
    """

    def __init__(self, StoreReader reader not None):
        self.reader = reader
        self.files = RowFiles(reader)
        self.lock = threading.Lock()
        self.merged = {}
        self.metric = <int>reader.control.head.metric
        self.together = KALOS_MAX_QUERIES

    def prepare(self, query):
        """Check queries and bring them into the form that scans take.

        Parameters
        ----------
        query : array-like of shape (D,) or (B, D)

        Returns
        -------
        prepared : float32 array of shape (B, ceil(D / 32) * 32)
        zero : list of int
            Queries that recall nothing, being zero under cosine.

        Raises
        ------
        DimensionMismatch, NonFiniteVector, InvalidArgument, InvalidType
        """
        cdef uint64_t i, dim
        cdef int64_t status
        cdef const float[:, ::1] values
        cdef float[:, ::1] out
        if type(query) is np.ndarray and query.dtype is FLOAT32 and query.ndim == 1 \
                and query.flags.c_contiguous:
            return self.prepare_one(query)
        if not isinstance(query, np.ndarray):
            try:
                query = np.asarray(query)
            except (TypeError, ValueError) as error:
                raise InvalidType("query must be an array of numbers in host memory") from error
        ndim = query.ndim
        if ndim != 1 and ndim != 2:
            raise InvalidArgument(f"query must have 1 or 2 axes (got {ndim})")
        rows = floats_of("query", query, ndim)
        values = rows if ndim == 2 else rows[None]
        dim = values.shape[1]
        self.reader.enter()
        known = self.reader.control.state.vector_dim
        if dim == 0 or (known and dim != known):
            raise DimensionMismatch(
                f"query must have {known or 'at least 1'} dimensions (got {dim})")
        prepared = np.empty((values.shape[0], KALOS_PADDED_DIM(dim)), np.float32)
        out = prepared
        zero = []
        for i in range(<uint64_t>values.shape[0]):
            status = c_prepare_query(&values[i, 0], dim, self.metric, &out[i, 0])
            if status == KALOS_QUERY_ZERO:
                zero.append(i)
            elif status >= 0:
                where = f"index {status}" if ndim == 1 else f"row {i}, column {status}"
                raise NonFiniteVector(f"query must be finite ({where} is not)")
        return prepared, zero

    cdef tuple prepare_one(self, object query):
        """As `prepare`, for a query that needs no conversion."""
        cdef Py_buffer given, made
        cdef uint64_t dim
        cdef int64_t status
        self.reader.enter()
        known = self.reader.control.state.vector_dim
        # Plain buffers: a typed view of each would cost as much as all the rest.
        PyObject_GetBuffer(query, &given, PyBUF_SIMPLE)
        try:
            dim = given.len // 4
            if dim == 0 or (known and dim != known):
                raise DimensionMismatch(
                    f"query must have {known or 'at least 1'} dimensions (got {dim})")
            prepared = np.empty((1, KALOS_PADDED_DIM(dim)), FLOAT32)
            PyObject_GetBuffer(prepared, &made, PyBUF_WRITABLE)
            status = c_prepare_query(<const float*>given.buf, dim, self.metric, <float*>made.buf)
            PyBuffer_Release(&made)
        finally:
            PyBuffer_Release(&given)
        if status >= 0:
            raise NonFiniteVector(f"query must be finite (index {status} is not)")
        return prepared, [0] if status == KALOS_QUERY_ZERO else []

    def passages(self, bytes tenant not None, tuple names not None, query, uint32_t k,
                 float min_score):
        """The best passages of some collections; the short way of a recall.

        Returns
        -------
        ids : uint64 array of shape (H,)
            Of all queries, one after the other.
        scores : float32 array of shape (H,)
        counts : int64 array of shape (B,)
        places : list of (slot offset, seq, False)
        owners : list of int
            Which of `scope.names` each hit is of.
        scope : Scope
        zero : list of int
            As `prepare`.
        generation : int

        Raises
        ------
        As `prepare` and `collections`.
        """
        cdef Scope scope
        cdef Runs runs
        cdef Py_buffer values
        cdef kalos_hit* hits
        cdef uint32_t* counts
        cdef uint32_t most, n, at, some, dim, tries = 0
        prepared, zero = self.prepare(query)
        n, dim = <uint32_t>prepared.shape[0], <uint32_t>prepared.shape[1]
        while True:
            generation = self.reader.generation
            scope = self.settled(KALOS_SLOT_COLLECTION, tenant, names)
            runs = scope.runs
            while True:
                gone = []
                most = <uint32_t>min(<uint64_t>k, runs.num_rows)
                hits = <kalos_hit*>calloc(
                    1, <size_t>n * (most * sizeof(kalos_hit) + sizeof(uint32_t)) + 1)
                if hits == NULL:
                    raise MemoryError()
                counts = <uint32_t*>(hits + <size_t>n * most)
                PyObject_GetBuffer(prepared, &values, PyBUF_SIMPLE)
                try:
                    for at in range(0, n if most else 0, self.together):
                        some = min(n - at, self.together)
                        self.scan_hits(scope, runs, <const float*>values.buf + <size_t>at * dim,
                                       some, most, min_score, hits + <size_t>at * most, counts + at)
                    for at in zero:
                        counts[at] = 0
                    found = self.entries(scope, runs, hits, most, counts, n, gone)
                finally:
                    PyBuffer_Release(&values)
                    free(hits)
                if not gone:
                    break
                self.rows_gone(scope)
                tries += 1
                if tries < SCOPES_TRIED:  # with what was added meanwhile, so that it is one state
                    break
                runs = runs.without(set(gone))
            if not gone and self.still_there(scope) and generation == self.reader.generation:
                return (*found, scope, zero, generation)

    cdef tuple entries(self, Scope scope, Runs runs, const kalos_hit* hits, uint32_t k,
                       const uint32_t* counts, uint32_t num_queries, list gone):
        """IDs, scores, counts, places and owners of hits [num_queries][k], each entry read and
        checked; where rows are deleted, they go to `gone` and the rest is of no use."""
        cdef EntryTable table
        cdef kalos_entry entry
        cdef Index index = scope.rows.index
        cdef const kalos_hit* hit
        cdef uint32_t q, i, owner = 0, seq = 0
        cdef uint64_t total = 0, at = 0
        cdef int64_t opened = -1
        cdef Py_buffer ids, scores, numbers
        cdef list places = [], owners = []
        cdef uint64_t number
        for q in range(num_queries):
            total += counts[q]
        all_ids, all_scores = np.empty(total, UINT64), np.empty(total, FLOAT32)
        all_counts = np.empty(num_queries, INT64)
        PyObject_GetBuffer(all_ids, &ids, PyBUF_WRITABLE)
        PyObject_GetBuffer(all_scores, &scores, PyBUF_WRITABLE)
        PyObject_GetBuffer(all_counts, &numbers, PyBUF_WRITABLE)
        try:
            for q in range(num_queries):
                (<int64_t*>numbers.buf)[q] = counts[q]
                for i in range(counts[q]):
                    hit = &hits[<size_t>q * k + i]
                    if not runs.locate(hit.row, &owner, &seq):
                        raise AssertionError("a scan left its scope")
                    if opened != owner:
                        if opened >= 0:
                            table_clear(&table)
                        opened = -1
                        index.open_table(runs.slots[owner], &table)
                        opened = owner
                    if seq >= table.image.num_entries:  # a rollback
                        gone.append(hit.row)
                        continue
                    read_entry(index, &table, seq, &entry)
                    if entry.vector_row != hit.row + 1 or entry.flags & KALOS_ENTRY_DEAD \
                            or scope.rows.is_dead(hit.row):
                        gone.append(hit.row)
                        continue
                    number = seq if scope.turns else entry.sum
                    (<uint64_t*>ids.buf)[at], (<float*>scores.buf)[at] = number, hit.score
                    at += 1
                    places.append((table.slot_off, seq, scope.turns))
                    owners.append(owner)
        finally:
            PyBuffer_Release(&ids)
            PyBuffer_Release(&scores)
            PyBuffer_Release(&numbers)
            if opened >= 0:
                table_clear(&table)
        return all_ids, all_scores, all_counts, places, owners

    def collections(self, bytes tenant not None, tuple names not None):
        """The scope of a tenant's collections; those that do not exist have no rows.

        Returns
        -------
        Scope

        Raises
        ------
        StoreCorrupt, StoreClosed
        """
        return self.settled(KALOS_SLOT_COLLECTION, tenant, names)

    def session(self, bytes tenant not None, bytes name not None):
        """The scope of a session's own turns that have vectors; None for an unknown session.

        Raises
        ------
        StoreCorrupt, StoreClosed
        """
        cdef Scope scope = self.settled(KALOS_SLOT_SESSION, tenant, (name,))
        return scope if scope.parts else None

    cdef Scope settled(self, uint32_t kind, bytes tenant, tuple names):
        """The scope of some slots, all of it of one generation."""
        cdef Index index
        with self.lock:
            while True:
                self.reader.enter()
                index = self.reader.index
                try:
                    return self.scope_of(index, kind, tenant, names)
                except StoreMoved:
                    continue
                except (StoreCorrupt, StoreIOError):
                    # The files of a generation that was left may be gone.
                    self.reader.enter()
                    if self.reader.index is index:
                        raise

    cdef Scope scope_of(self, Index index, uint32_t kind, bytes tenant, tuple names):
        cdef Scope scope = Scope.__new__(Scope)
        cdef Log log = self.reader.log
        cdef EntryRows rows
        cdef kalos_image image
        cdef uint64_t slot_off
        cdef uint32_t bucket
        scope.turns = kind == KALOS_SLOT_SESSION
        found, parts = [], []
        for name in names:
            slot_off = index.find_slot(log, kind, tenant, name, &image, &bucket)
            if slot_off:
                rows = self.files.rows_of(index, log, slot_off, scope.turns)
                found.append(name)
                parts.append(rows.runs)
                scope.expiries = rows.expiries
        scope.names, scope.parts = tuple(found), tuple(parts)
        scope.runs = self.together_runs(index, scope.parts)
        scope.rows = self.files.at_least(index, 0)
        return scope

    cdef Runs together_runs(self, Index index, tuple parts):
        """One Runs for all parts, remembered while they stay as they are."""
        if len(parts) == 1:
            runs = parts[0]
            if runs.ids is None and not ids_ascend(runs):
                runs = self.with_ids(index, runs)
            return runs
        slots = tuple([(<Runs>part).slots[0] for part in parts])
        known = self.merged.get(slots)
        if known is not None and all([a is b for a, b in zip(known[0], parts)]):
            return known[1]
        runs = merged_runs(list(parts))
        if not ids_ascend(runs):
            runs = self.with_ids(index, runs)
        if <size_t>len(self.merged) >= SCOPES_KEPT:
            self.merged.clear()
        self.merged[slots] = (parts, runs)
        return runs

    cdef Runs with_ids(self, Index index, Runs runs):
        """The same runs with the ID of each row, for stores whose rows are not in order of IDs."""
        cdef EntryTable table
        cdef const kalos_entry* entry
        cdef uint64_t[::1] ids
        cdef uint32_t seq, owner
        stop = int((runs.spans[:, 0] + runs.spans[:, 1]).max())
        by_row = np.zeros(stop, np.uint64)
        ids = by_row
        for owner in range(<uint32_t>len(runs.slots)):
            index.open_table(runs.slots[owner], &table)
            try:
                for seq in range(table.image.num_entries):
                    entry = table_entry(&table, seq)
                    if entry.vector_row and entry.vector_row <= <uint64_t>stop:
                        ids[entry.vector_row - 1] = entry.sum
            finally:
                table_clear(&table)
        return Runs(runs.slots, runs.spans, runs.seqs, runs.owners, runs.edges, by_row)

    def best(self, Scope scope not None, Runs runs not None, prepared not None, list zero not None,
             uint32_t k, float min_score, uint32_t tries=SCOPES_TRIED):
        """The best rows of `runs`, which are the scope's or a part of them.

        Parameters
        ----------
        tries : int
            Scopes that were built for the call before. After some, a scan whose hits are deleted
            meanwhile is done again without them, and no longer with a new scope.

        Returns
        -------
        list of list of (score, id, slot_off, seq, owner), best first, one list a query
            Or None where rows of the scope were erased meanwhile: build the scope again.
        """
        cdef list gone
        live = [i for i in range(prepared.shape[0]) if i not in zero] if zero else None
        while True:
            gone = []
            out = [[] for _ in range(prepared.shape[0])]
            if runs.num_rows and k:
                for at in range(0, prepared.shape[0] if live is None else len(live),
                                self.together):
                    if live is None:
                        some = prepared[at : at + self.together]
                        places = range(at, at + some.shape[0])
                    else:
                        places = live[at : at + self.together]
                        some = prepared[places]
                    for place, hits in zip(places, self.scan(
                            scope, runs, some, k, min_score, gone)):
                        out[place] = hits
            if not self.still_there(scope):
                return None
            if not gone:
                return out
            self.rows_gone(scope)
            if tries < SCOPES_TRIED:
                return None
            runs = runs.without(set(gone))

    cdef list scan(self, Scope scope, Runs runs, object queries, uint32_t k, float min_score,
                   list gone):
        """Entries of the hits of up to `together` queries; rows deleted meanwhile go to `gone`."""
        cdef const float[:, ::1] values = queries
        cdef uint32_t q, n = <uint32_t>values.shape[0]
        cdef uint32_t* counts
        cdef kalos_hit* hits
        k = <uint32_t>min(<uint64_t>k, runs.num_rows)
        hits = <kalos_hit*>malloc(n * (k * sizeof(kalos_hit) + sizeof(uint32_t)))
        if hits == NULL:
            raise MemoryError()
        counts = <uint32_t*>(hits + <size_t>n * k)
        try:
            self.scan_hits(scope, runs, &values[0, 0], n, k, min_score, hits, counts)
            return [self.named(scope, runs, hits + <uint64_t>q * k, counts[q], gone)
                    for q in range(n)]
        finally:
            free(hits)

    cdef int scan_hits(self, Scope scope, Runs runs, const float* queries, uint32_t num_queries,
                       uint32_t k, float min_score, kalos_hit* hits, uint32_t* counts) except -1:
        """The best rows: hits [num_queries][k], counts [num_queries]."""
        cdef kalos_scan scan
        cdef RowMap rows = scope.rows
        cdef const uint64_t[::1] ids
        cdef int status
        cdef uint32_t at, padded = <uint32_t>KALOS_PADDED_DIM(rows.dim)
        scan.rows.segments = rows.segments
        scan.rows.factors = rows.factors
        scan.rows.rows_per_segment = rows.rows_per_segment
        scan.rows.stride_nbytes = rows.stride_nbytes
        scan.rows.factor_stride_nbytes = FACTOR_STRIDE
        scan.rows.dim = rows.dim
        scan.rows.half = rows.half
        scan.extents = <const kalos_row_run*>&runs.c_spans[0, 0]
        scan.num_extents = runs.c_spans.shape[0]
        scan.tombstones = rows.dead
        scan.allowed = NULL
        scan.ids = NULL
        if runs.ids is not None:
            ids = runs.ids
            scan.ids = &ids[0]
        scan.k = k
        scan.metric = self.metric
        scan.min_score = min_score
        scan.threads = 0
        scan.level = KALOS_LEVEL_AUTO
        for at in range(0, num_queries, KALOS_MAX_QUERIES):
            scan.queries = queries + <size_t>at * padded
            scan.num_queries = min(num_queries - at, <uint32_t>KALOS_MAX_QUERIES)
            with nogil:
                status = c_topk(&scan, hits + <size_t>at * k, counts + at)
            if status != 0:
                raise MemoryError("recall found no memory for its lists")
        return 0

    cdef int rows_gone(self, Scope scope) except -1:
        """Rows were found deleted whose bits a scan may not have seen; here it has."""
        return 0

    cdef list named(self, Scope scope, Runs runs, const kalos_hit* hits, uint32_t count, list gone):
        """(score, ID, slot offset, seq, owner) of hits."""
        cdef Py_ssize_t before = len(gone)
        ids, scores, _, places, owners = self.entries(scope, runs, hits, count, &count, 1, gone)
        if len(gone) != before:
            return []  # the scan is done again
        return [(score, number, place[0], place[1], owner) for score, number, place, owner
                in zip(scores.tolist(), ids.tolist(), places, owners)]

    cdef bint still_there(self, Scope scope) except -1:
        """Whether no slot of the scope was erased and the store did not move meanwhile."""
        cdef kalos_image image
        self.reader.enter()
        if self.reader.index is not scope.rows.index:
            return False
        for slot_off in scope.runs.slots:
            self.reader.index.read_image(slot_off, &image)
            if image.flags & KALOS_IMAGE_DEAD:
                return False
        return True
