"""Recall over rows that are resident on a device: one launch a scan, hits in pinned memory.

Scopes, entries and what deletions mean are the CPU scan's (`_store_scan`); only the scan itself is
another one, with the same bits. A row that was deleted since the device's bitmap was brought up to
date is found by its entry, as on the CPU: the bitmap is brought up to date then, and the scan done
again.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from kalos_ctx._cpu_ops cimport KALOS_METRIC_L2, kalos_hit
from kalos_ctx._device cimport (
    Device, kalos_gpu_launch_2d, kalos_gpu_to_device,
)
from kalos_ctx._device_rows cimport DeviceRows, device_rows
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_result
from kalos_ctx._lanes cimport DeviceBuffer, Lane, Lanes
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._store_scan cimport Scope, StoreScan
from kalos_ctx._vectors cimport RowMap, Runs

cdef extern from "kalos_launch.h" nogil:
    enum:
        KALOS_RECALL_BLOCK
        KALOS_RECALL_MAX_K
        KALOS_RECALL_MAX_QUERIES
        KALOS_RECALL_EXTENTS
        KALOS_RECALL_INLINE
        KALOS_RECALL_FEW
        KALOS_RECALL_TOGETHER

    ctypedef struct kalos_recall_extent:
        uint32_t begin
        uint32_t end

    ctypedef struct kalos_recall_scope:
        uint64_t allowed
        uint32_t num_extents
        float min_score
        kalos_recall_extent* extents

    ctypedef struct kalos_recall_args:
        uint64_t rows
        uint64_t factors
        uint64_t dead
        uint64_t queries
        uint64_t scopes
        uint64_t lists
        uint64_t counters
        uint64_t hits
        uint64_t done
        uint32_t stride_nbytes
        uint32_t dim
        uint32_t metric
        uint32_t num_queries
        uint32_t k
        uint32_t begin
        uint32_t end
        uint32_t ticket
        kalos_recall_scope scope
        float* query

cdef extern from "_keys.h" nogil:
    void kalos_hit_of_key(uint64_t key, kalos_hit* hit)

cdef enum:
    SCOPES_KEPT = 256
    MAX_DYNAMIC_SHARED = 8          # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    LISTS_NBYTES = 64 << 20         # scratch for lists: more blocks than fit it are not launched


cdef class DeviceScope:
    """The rows of a scope as the device takes them."""


cdef class DeviceScan(StoreScan):
    """Scans of one store on one device.

    Parameters
    ----------
    reader : StoreReader
        Or the writer.
    device : Device
    progress : callable, optional
        Called as ``progress(rows_done, num_rows)`` while the store's vectors are loaded.
    """

    def __init__(self, StoreReader reader not None, Device device not None, progress=None):
        StoreScan.__init__(self, reader)
        self.device = device
        self.lanes = Lanes(device)
        self.progress = progress
        self.scopes = {}
        self.scans = {}
        self.together = KALOS_RECALL_MAX_QUERIES

    def close(self):
        """Give the rows' memory back. Nothing may be in flight."""
        if self.resident is not None:
            self.resident.close()
            self.resident = None
        self.scopes.clear()

    # ---- What a launch needs --------------------------------------------------------------------

    cdef DeviceRows rows_for(self, RowMap rows):
        """The device's rows, with all of `rows` among them."""
        cdef DeviceRows resident = self.resident
        if resident is None or resident.index is not rows.index:
            with self.lock:
                resident = self.resident
                if resident is None or resident.index is not rows.index:
                    resident = device_rows(self.device, rows, 0, 0)
                    resident.load(rows, self.progress)
                    self.resident = resident  # what scans of the former rows still hold stays
                    self.scopes.clear()
        resident.follow(rows, NULL)
        return resident

    cdef DeviceScope scope_for(self, Runs runs, Lane lane):
        """The extents of few runs are a parameter; many runs become a bitmap, which is kept."""
        cdef DeviceScope scope = self.scopes.get(id(runs))
        cdef Py_ssize_t n = runs.c_spans.shape[0]
        if scope is not None and scope.runs is runs:
            return scope
        scope = DeviceScope.__new__(DeviceScope)
        scope.runs = runs
        scope.begin = <uint32_t>runs.c_spans[0, 0]
        scope.end = <uint32_t>(runs.c_spans[n - 1, 0] + runs.c_spans[n - 1, 1])
        if n <= <Py_ssize_t>KALOS_RECALL_EXTENTS:
            return scope
        marks = np.zeros((scope.end + 63) // 32 * 32 + 1, np.int8)
        np.add.at(marks, runs.spans[:, 0].astype(np.int64), 1)
        np.add.at(marks, (runs.spans[:, 0] + runs.spans[:, 1]).astype(np.int64), -1)
        bits = np.packbits(np.cumsum(marks, dtype=np.int8).view(np.bool_), bitorder="little")
        scope.bitmap = DeviceBuffer(self.device)
        scope.bitmap.reserve(len(bits))
        lane.host.reserve(len(bits))
        memcpy(lane.host.data, <const char*><size_t>bits.ctypes.data, len(bits))
        self.device.enter()
        code = kalos_gpu_to_device(
            self.device.h_gpu, scope.bitmap.data, lane.host.data, len(bits), lane.stream)
        self.device.leave()
        cu_check(code, "copy a scope")
        self.device.synchronize(lane.stream)
        while len(self.scopes) >= SCOPES_KEPT:
            del self.scopes[next(iter(self.scopes))]
        self.scopes[id(runs)] = scope
        return scope

    cdef kalos_cu_handle kernel(self, str kind, size_t shared) except NULL:
        cdef kalos_cu_handle function = self.device.function(kind)
        self.scans[kind] = self.scans.get(kind, 0) + 1
        if shared > 32768:
            self.device.enter()
            code = self.device.driver.function_set(function, MAX_DYNAMIC_SHARED, <int>shared)
            self.device.leave()
            cu_check(code, "give a kernel its shared memory")
        return function

    # ---- The scan -------------------------------------------------------------------------------

    cdef list scan(self, Scope scope, Runs runs, object queries, uint32_t k, float min_score,
                   list gone):
        cdef DeviceRows rows
        cdef Lane lane
        cdef kalos_hit* hits
        cdef uint64_t* keys
        cdef uint32_t q, i, count
        cdef list out = []
        if runs.ids is not None:
            # IDs that do not ascend with rows order ties otherwise than a key does.
            self.scans["cpu"] = self.scans.get("cpu", 0) + 1
            return self.scan_on_cpu(scope, runs, queries, k, min_score, gone)
        k = <uint32_t>min(<uint64_t>k, runs.num_rows)
        rows = self.rows_for(scope.rows)
        lane = self.lanes.take()
        try:
            self.launch(lane, rows, self.scope_for(runs, lane), runs, queries, k, min_score)
            found = np.empty(k, np.dtype([("score", "f4"), ("row", "u4"), ("id", "u8")]))
            hits = <kalos_hit*><size_t>found.ctypes.data
            keys = <uint64_t*>lane.host.data
            for q in range(<uint32_t>queries.shape[0]):
                count = 0
                for i in range(k):
                    if keys[<uint64_t>q * k + i] == 0:
                        break
                    kalos_hit_of_key(keys[<uint64_t>q * k + i], &hits[i])
                    count += 1
                out.append(self.named(scope, runs, hits, count, gone))
        finally:
            self.lanes.give(lane)
        if gone:
            rows.follow_dead(scope.rows, NULL)
        return out

    cdef list scan_on_cpu(self, Scope scope, Runs runs, object queries, uint32_t k,
                          float min_score, list gone):
        cdef list out = []
        for at in range(0, queries.shape[0], 8):
            out.extend(StoreScan.scan(self, scope, runs, queries[at : at + 8], k, min_score, gone))
        return out

    cdef int launch(self, Lane lane, DeviceRows rows, DeviceScope scope, Runs runs, object queries,
                    uint32_t k, float min_score) except -1:
        """Scan and wait: keys of hits stand at the beginning of the lane's pinned memory."""
        cdef kalos_recall_args args
        cdef kalos_recall_scope* each
        cdef const float[:, ::1] values = queries
        cdef uint32_t n = <uint32_t>values.shape[0], dim = rows.dim_padded, together = 1, q, i
        cdef uint32_t blocks, a_block, block_rows = 128 if rows.half else 64
        cdef size_t hits_nbytes = (<size_t>n * k * 8 + 63) // 64 * 64
        cdef size_t queries_nbytes = (<size_t>n * dim * 4 + 63) // 64 * 64
        cdef size_t asked = queries_nbytes + n * sizeof(kalos_recall_scope)
        cdef kalos_cu_handle function
        cdef kalos_cu_result code
        cdef str kind = "f16_" if rows.half else "f32_"
        kind = "kalos_recall_" + kind + ("l2_" if self.metric == KALOS_METRIC_L2 else "dot_")
        if k > KALOS_RECALL_FEW:
            kind, a_block = kind + "many", 4
        elif n > 1:
            kind, a_block, together = kind + "batch", 2, KALOS_RECALL_TOGETHER
        else:
            kind, a_block = kind + "few", 4
        function = self.kernel(kind, together * dim * 4)
        blocks = (scope.end - scope.begin + block_rows - 1) // block_rows
        blocks = min(blocks, <uint32_t>self.device.num_multiprocessors * a_block)
        blocks = max(<uint32_t>1, min(blocks, <uint32_t>(LISTS_NBYTES // (<size_t>n * k * 8))))
        lane.host.reserve(hits_nbytes + asked)
        lane.scratch.reserve(<size_t>n * blocks * k * 8 + asked)
        lane.counters.reserve((n + 1) * 4)
        memset(&args, 0, sizeof(args))
        args.rows, args.factors, args.dead = rows.base, rows.factors, rows.dead
        args.lists, args.counters = lane.scratch.data + asked, lane.counters.data
        args.hits, args.done = lane.host.mapped, lane.done_mapped
        args.stride_nbytes, args.dim, args.metric = rows.stride_nbytes, dim, self.metric
        args.num_queries, args.k = n, k
        args.begin, args.end = scope.begin, scope.end
        args.scope.min_score = min_score
        if scope.bitmap is not None:
            args.scope.allowed = scope.bitmap.data
            args.scope.num_extents = 1
            args.scope.extents[0].begin, args.scope.extents[0].end = scope.begin, scope.end
        else:
            args.scope.num_extents = <uint32_t>runs.c_spans.shape[0]
            for i in range(args.scope.num_extents):
                args.scope.extents[i].begin = <uint32_t>runs.c_spans[i, 0]
                args.scope.extents[i].end = <uint32_t>(runs.c_spans[i, 0] + runs.c_spans[i, 1])
        args.ticket = lane.next_ticket()
        self.device.enter()
        code = 0
        if n == 1 and dim <= KALOS_RECALL_INLINE:
            memcpy(args.query, &values[0, 0], dim * 4)
        else:
            memcpy(lane.host.data + hits_nbytes, &values[0, 0], <size_t>n * dim * 4)
            each = <kalos_recall_scope*>(lane.host.data + hits_nbytes + queries_nbytes)
            for q in range(n):
                each[q] = args.scope
            code = kalos_gpu_to_device(self.device.h_gpu, lane.scratch.data,
                                       lane.host.data + hits_nbytes, asked, lane.stream)
            args.queries, args.scopes = lane.scratch.data, lane.scratch.data + queries_nbytes
        if code == 0:
            code = kalos_gpu_launch_2d(
                self.device.h_gpu, function, blocks, (n + together - 1) // together,
                KALOS_RECALL_BLOCK, together * dim * 4, lane.stream, &args)
        self.device.leave()
        cu_check(code, "recall")
        try:
            lane.wait()
        except:
            lane.drain()
            raise
        return 0
