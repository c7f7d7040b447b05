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
    cdef list scan(self, Scope scope, Runs runs, object queries, uint32_t k, float min_score,
                   list gone)
    # The best rows for prepared queries [num_queries][padded dim], num_queries <= together.
    cdef int scan_hits(self, Scope scope, Runs runs, const float* queries, uint32_t num_queries,
                       uint32_t k, float min_score, kalos_hit* hits, uint32_t* counts) except -1
    # Called when a scan gave rows that are deleted, before it is done again.
    cdef int rows_gone(self, Scope scope) except -1
    cdef tuple entries(self, Scope scope, Runs runs, const kalos_hit* hits, uint32_t k,
                       const uint32_t* counts, uint32_t num_queries, list gone)
    cdef list named(self, Scope scope, Runs runs, const kalos_hit* hits, uint32_t count, list gone)
    cdef bint still_there(self, Scope scope) except -1
