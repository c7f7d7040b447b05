"""Recall over rows that are resident on a device: one launch a scan, hits in pinned memory.

Scopes, entries and what deletions mean are the CPU scan's (`_store_scan`); only the scan itself is
another one, with the same bits. A row that was deleted since the device's bitmap was brought up to
date is found by its entry, as on the CPU: the bitmap is brought up to date then, and the scan done
again.
"""

from functools import partial

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kalos_ctx._cpu_ops cimport KALOS_METRIC_L2, kalos_hit
from kalos_ctx._device cimport (
    Device, kalos_gpu_enter, kalos_gpu_launch_2d, kalos_gpu_leave, kalos_gpu_to_device,
)
from kalos_ctx._device_batch cimport BatchScan
from kalos_ctx._device_rows cimport DeviceRows, device_rows
from kalos_ctx._device_scopes cimport DeviceScope, DeviceScopes, kalos_recall_scope
from kalos_ctx._driver cimport cu_check, kalos_cu_result
from kalos_ctx._lanes cimport Lane, Lanes
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._store_scan cimport Scope, StoreScan
from kalos_ctx._vectors cimport RowMap, Runs

from kalos_ctx._row_source import newest_rows
from kalos_ctx._vectors import StoreMoved

cdef extern from "kalos_launch.h" nogil:
    enum:
        KALOS_RECALL_BLOCK
        KALOS_RECALL_MAX_QUERIES
        KALOS_RECALL_INLINE
        KALOS_RECALL_FEW

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

cdef extern from *:
    """
    #define KALOS_RECALL_ARGS_HEAD offsetof(kalos_recall_args, scope)
    """
    const size_t KALOS_RECALL_ARGS_HEAD

cdef enum:
    LISTS_NBYTES = 64 << 20         # scratch for lists: more blocks than fit it are not launched

KIND_NAMES = ("few", "many", "", "tensor", "lost", "cpu")


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
        self.scopes = DeviceScopes(device)
        self.together = KALOS_RECALL_MAX_QUERIES

    @property
    def cpu_scans(self):
        """How many scans ran on the CPU."""
        return self.counts[<int>CPU]

    @property
    def scans(self):
        """How many scans each kernel made, how many of the tensor cores' were done again by another
        since a hit might have been missing, and how many ran on the CPU."""
        return {name: self.counts[kind] for kind, name in enumerate(KIND_NAMES) if name}

    @property
    def num_resident(self):
        """Rows that are on the device."""
        cdef DeviceRows resident = self.resident
        return 0 if resident is None else resident.num_rows

    def load(self, progress=None):
        """Bring the store's rows onto the device, before a recall asks for them.

        Parameters
        ----------
        progress : callable, optional
            In place of the one that the scan was made with.

        Raises
        ------
        StoreCorrupt, StoreClosed, DeviceError
        """
        cdef RowMap rows
        if progress is not None:
            self.progress = progress
        while True:
            try:
                rows = newest_rows(self.reader)
                break
            except StoreMoved:
                continue
        if rows.num_rows:
            self.rows_for(rows)

    def close(self):
        """Give the rows' memory back, once the scans that read it have ended."""
        cdef DeviceRows resident = self.resident
        self.resident = self.batches = None
        if resident is not None:
            resident.stop_following()
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
                    self.find_kernels(resident)
                    self.scopes.clear()
                    self.resident = resident  # what scans of the former rows still hold stays
                    # New rows come over behind a recall's back; none waits for that.
                    resident.start_following(partial(newest_rows, self.reader))
        resident.follow(rows, NULL)
        return resident

    def find_kernels(self, DeviceRows rows not None):
        """Look the kernels up for the store's rows and metric."""
        cdef int kind
        name = "f16" if rows.half else "f32"
        name += "_l2" if self.metric == KALOS_METRIC_L2 else "_dot"
        for kind in range(<int>KINDS):
            self.kernels[kind] = self.device.function(f"kalos_recall_{name}_{KIND_NAMES[kind]}")
        self.batches = BatchScan(rows, self.metric)

    # ---- The scan -------------------------------------------------------------------------------

    cdef int scan_hits(self, Scope scope, Runs runs, const float* queries, uint32_t num_queries,
                       uint32_t k, float min_score, kalos_hit* hits, uint32_t* counts) except -1:
        cdef DeviceRows rows
        cdef Lane lane
        cdef DeviceScope on_device
        cdef BatchScan batches
        cdef bint found
        cdef uint64_t* keys
        cdef uint32_t q, i
        if runs.ids is not None:
            # IDs that do not ascend with rows order ties otherwise than a key does.
            self.counts[<int>CPU] += 1
            return StoreScan.scan_hits(
                self, scope, runs, queries, num_queries, k, min_score, hits, counts)
        rows = self.rows_for(scope.rows)
        lane = self.lanes.take()
        try:
            on_device = self.scopes.of(runs, lane)
            found = False
            batches = self.batches  # another thread may close, or go on to other rows
            if num_queries > 1 and batches is not None and batches.rows is rows \
                    and batches.takes(num_queries, k):
                self.counts[<int>TENSOR] += 1
                found = batches.scan(lane, on_device, queries, num_queries, k, min_score)
                self.counts[<int>LOST] += not found
            if not found:
                self.launch(lane, rows, on_device, queries, num_queries, k, min_score)
            keys = <uint64_t*>lane.host.data
            for q in range(num_queries):
                for i in range(k):
                    if keys[0] == 0:
                        break
                    kalos_hit_of_key(keys[0], &hits[i])
                    keys += 1
                else:
                    i = k
                counts[q] = i
                keys = <uint64_t*>lane.host.data + <size_t>(q + 1) * k
                hits += k
        finally:
            self.lanes.give(lane)
        return 0

    cdef int rows_gone(self, Scope scope) except -1:
        cdef DeviceRows resident = self.resident
        if resident is not None and resident.index is scope.rows.index:
            resident.follow_dead(scope.rows, NULL)
        return 0

    cdef int launch(self, Lane lane, DeviceRows rows, DeviceScope scope, const float* queries,
                    uint32_t n, uint32_t k, float min_score) except -1:
        """Scan and wait: keys of hits stand at the beginning of the lane's pinned memory."""
        cdef kalos_recall_args args
        cdef uint32_t dim = rows.dim_padded, a_block = 3 if rows.half else 4
        cdef uint32_t blocks, block_rows = 128 if rows.half else 64
        cdef size_t hits_nbytes = (<size_t>n * k * 8 + 63) // 64 * 64
        cdef size_t asked = (<size_t>n * dim * 4 + 63) // 64 * 64
        cdef int kind = FEW
        cdef kalos_cu_result code
        if k > KALOS_RECALL_FEW:
            kind, a_block = MANY, 3
        self.counts[kind] += 1
        blocks = (scope.end - scope.begin + block_rows - 1) // block_rows
        blocks = min(blocks, <uint32_t>self.device.num_multiprocessors * a_block)
        blocks = max(<uint32_t>1, min(blocks, <uint32_t>(LISTS_NBYTES // (<size_t>n * k * 8))))
        lane.host.reserve(hits_nbytes + asked)
        lane.scratch.reserve(<size_t>n * blocks * k * 8 + asked)
        lane.counters.reserve((n + 1) * 4)
        memset(&args, 0, KALOS_RECALL_ARGS_HEAD)
        args.rows, args.factors, args.dead = rows.base, rows.factors, rows.dead
        args.lists, args.counters = lane.scratch.data + asked, lane.counters.data
        args.hits, args.done = lane.host.mapped, lane.done_mapped
        args.stride_nbytes, args.dim, args.metric = rows.stride_nbytes, dim, self.metric
        args.num_queries, args.k = n, k
        args.begin, args.end = scope.begin, scope.end
        args.scope = scope.scope
        args.scope.min_score = min_score
        args.ticket = lane.next_ticket()
        code = kalos_gpu_enter(self.device.h_gpu)
        cu_check(code, "recall")
        if n == 1 and dim <= KALOS_RECALL_INLINE:
            memcpy(args.query, queries, dim * 4)
        else:
            memcpy(lane.host.data + hits_nbytes, queries, <size_t>n * dim * 4)
            code = kalos_gpu_to_device(self.device.h_gpu, lane.scratch.data,
                                       lane.host.data + hits_nbytes, asked, lane.stream)
            args.queries = lane.scratch.data
        if code == 0:
            code = kalos_gpu_launch_2d(
                self.device.h_gpu, self.kernels[kind], blocks, n, KALOS_RECALL_BLOCK,
                dim * 4, lane.stream, &args)
        kalos_gpu_leave(self.device.h_gpu)
        if code:
            lane.drain()
        cu_check(code, "recall")
        lane.wait()
        return 0
