"""Recall over a store's mapped rows: what a backend gives its own scan to."""

from libc.stdint cimport uint32_t

from kalos_ctx._cpu_ops cimport kalos_hit
from kalos_ctx._index cimport Index
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._vectors cimport RowFiles, RowMap, Runs


cdef class Scope:
    cdef RowMap rows
    cdef readonly tuple names
    cdef readonly tuple parts
    cdef readonly Runs runs
    cdef readonly bint turns
    cdef readonly dict expiries


cdef class StoreScan:
    cdef StoreReader reader
    cdef RowFiles files
    cdef object lock            # guards `files` and `merged`; not held during scans
    cdef dict merged            # slots -> (parts, Runs)
    cdef int metric
    cdef uint32_t together      # queries that one scan takes
    cdef tuple prepare_one(self, object query)
    cdef Scope settled(self, uint32_t kind, bytes tenant, tuple names)
    cdef Scope scope_of(self, Index index, uint32_t kind, bytes tenant, tuple names)
    cdef Runs together_runs(self, Index index, tuple parts)
    cdef Runs with_ids(self, Index index, Runs runs)
    # The best of up to `together` prepared queries (N, padded dim); rows deleted meanwhile go to
    # `gone`. Lists as `named` makes them, one a query.
    cdef list scan(self, Scope scope, Runs runs, object queries, uint32_t k, float min_score,
                   list gone)
    cdef list named(self, Scope scope, Runs runs, const kalos_hit* hits, uint32_t count, list gone)
    cdef bint still_there(self, Scope scope) except -1
