"""Recall of 2 to 64 queries in one pass over the rows, through the tensor cores.

The kernel looks at every row in float16 first, with a proven bound, and scores the few rows that
may be hits as DESIGN.md says: the hits are exact, or the kernel says that they may not be.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy, memset

import threading

from kalos_ctx._cpu_ops cimport KALOS_METRIC_COSINE
from kalos_ctx._device cimport (
    kalos_gpu_enter, kalos_gpu_launch, kalos_gpu_launch_2d, kalos_gpu_leave,
    kalos_gpu_to_device,
)
from kalos_ctx._device_memory cimport growing_array
from kalos_ctx._device_rows cimport DeviceRows
from kalos_ctx._device_scopes cimport DeviceScope, kalos_recall_scope
from kalos_ctx._driver cimport cu_check, kalos_cu_device, kalos_cu_handle, kalos_cu_ptr, \
    kalos_cu_result
from kalos_ctx._lanes cimport Lane

cdef extern from "kalos_launch.h" nogil:
    """
    static size_t kalos_batch_shared_nbytes(uint32_t queries, uint32_t dim, uint32_t warps) {
      return KALOS_BATCH_SHARED_NBYTES((size_t)queries, dim, (size_t)warps);
    }
    """
    size_t kalos_batch_shared_nbytes(uint32_t queries, uint32_t dim, uint32_t warps)
    enum:
        KALOS_BATCH_FEW
        KALOS_BATCH_MANY
        KALOS_BATCH_FEW_WARPS
        KALOS_BATCH_MANY_WARPS
        KALOS_BATCH_MAX_K
        KALOS_BATCH_TILE
        KALOS_BATCH_COUNTERS
        KALOS_BATCH_WARP_NBYTES
        KALOS_NORMS_BLOCK
        KALOS_RECALL_MAX_QUERIES

    ctypedef struct kalos_recall_batch_args:
        uint64_t rows
        uint64_t lengths
        uint64_t dead
        uint64_t queries
        uint64_t scopes
        uint64_t lists
        uint64_t counters
        uint64_t hits
        uint64_t lost
        uint64_t done
        uint32_t stride_nbytes
        uint32_t dim
        uint32_t metric
        uint32_t num_queries
        uint32_t num_scopes
        uint32_t k
        uint32_t begin
        uint32_t end
        uint32_t ticket

    ctypedef struct kalos_row_norms_args:
        uint64_t rows
        uint64_t norms
        uint32_t stride_nbytes
        uint32_t dim
        uint32_t half
        uint32_t begin
        uint32_t end

cdef enum:
    MAX_SHARED_OPTIN = 97           # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    MAX_DYNAMIC_SHARED = 8          # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    STATIC_SHARED = 1024            # bytes left to what a kernel declares
    WARPS_MIN = 4                   # with fewer the rows are not kept in flight
    NORMS_CHUNK = 4 << 20


cdef class BatchScan:
    """Scans of several queries over the rows of one generation.

    Parameters
    ----------
    rows : DeviceRows
    metric : int
    """

    def __init__(self, DeviceRows rows not None, uint32_t metric):
        cdef kalos_cu_device number = 0
        cdef int room = 0
        self.rows, self.device, self.metric = rows, rows.device, metric
        self.lock = threading.Lock()
        name = "f16" if rows.half else "f32"
        self.kernels[0] = self.device.function(f"kalos_recall_batch_{name}_few")
        self.kernels[1] = self.device.function(f"kalos_recall_batch_{name}_many")
        driver = self.device.driver
        self.device.enter()
        code = driver.device_get(&number, self.device.ordinal)
        if code == 0:
            code = driver.device_attribute(&room, MAX_SHARED_OPTIN, number)
        room -= STATIC_SHARED
        for kernel in range(2):
            if code == 0:
                code = driver.function_set(self.kernels[kernel], MAX_DYNAMIC_SHARED, room)
        self.room = <size_t>room
        self.device.leave()
        cu_check(code, "give a kernel its shared memory")

    cdef bint takes(self, uint32_t n, uint32_t k) noexcept:
        return 2 <= n <= KALOS_RECALL_MAX_QUERIES and k <= KALOS_BATCH_MAX_K \
            and self.warps(min(n, <uint32_t>KALOS_BATCH_FEW), KALOS_BATCH_FEW_WARPS) >= WARPS_MIN

    cdef uint32_t warps(self, uint32_t queries, uint32_t most) noexcept:
        """Warps of a block for so many queries, as its memory allows."""
        cdef size_t fixed = kalos_batch_shared_nbytes(queries, self.rows.dim_padded, 0)
        if fixed >= self.room:
            return 0
        return <uint32_t>min(<size_t>most, (self.room - fixed) // KALOS_BATCH_WARP_NBYTES)

    cdef kalos_cu_ptr lengths(self, Lane lane) except 0:
        """What bounds a row's length: its factor for cosine, else its norm, made where missing."""
        cdef kalos_row_norms_args args
        cdef kalos_cu_handle kernel
        cdef kalos_cu_result code
        cdef uint64_t num_rows
        if self.metric == KALOS_METRIC_COSINE:
            return self.rows.factors
        if self.num_norms == self.rows.num_rows:
            return self.norms.base
        kernel = self.device.function("kalos_row_norms")
        with self.lock:
            num_rows = self.rows.num_rows
            if self.norms is None:
                self.norms = growing_array(self.device, self.rows.max_rows * 4, NORMS_CHUNK)
            self.norms.grow(num_rows * 4, lane.stream)
            memset(&args, 0, sizeof(args))
            args.rows, args.norms = self.rows.base, self.norms.base
            args.stride_nbytes, args.dim = self.rows.stride_nbytes, self.rows.dim_padded
            args.half = self.rows.half
            args.begin, args.end = <uint32_t>self.num_norms, <uint32_t>num_rows
            self.device.enter()
            code = kalos_gpu_launch(
                self.device.h_gpu, kernel, self.device.num_multiprocessors * 8, KALOS_NORMS_BLOCK,
                0, lane.stream, &args)
            self.device.leave()
            cu_check(code, "measure rows")
            self.device.synchronize(lane.stream)  # other streams read them too
            self.num_norms = num_rows
        return self.norms.base

    cdef bint scan(self, Lane lane, DeviceScope scope, const float* queries, uint32_t n, uint32_t k,
                   float min_score) except -1:
        cdef kalos_recall_batch_args args
        cdef kalos_recall_scope* asked
        cdef kalos_cu_result code
        cdef uint32_t group = KALOS_BATCH_FEW, warps, blocks, q
        cdef int kernel = 0
        cdef uint32_t dim = self.rows.dim_padded
        cdef size_t hits_nbytes = (<size_t>n * k * 8 + 63) // 64 * 64
        cdef size_t lost_nbytes = (<size_t>n * 4 + 63) // 64 * 64
        cdef size_t queries_nbytes = <size_t>n * dim * 4
        cdef size_t ask_nbytes = queries_nbytes + sizeof(kalos_recall_scope)
        cdef char* ask
        cdef const uint32_t* lost
        warps = self.warps(min(n, group), KALOS_BATCH_FEW_WARPS)
        if n > KALOS_BATCH_FEW:
            q = self.warps(min(n, <uint32_t>KALOS_BATCH_MANY), KALOS_BATCH_MANY_WARPS)
            if q >= 2 * WARPS_MIN:
                group, warps, kernel = KALOS_BATCH_MANY, q, 1
        blocks = ((scope.end - scope.begin + KALOS_BATCH_TILE - 1) // KALOS_BATCH_TILE
                  + warps - 1) // warps
        blocks = max(<uint32_t>1, min(blocks, <uint32_t>self.device.num_multiprocessors))
        memset(&args, 0, sizeof(args))
        args.lengths = self.lengths(lane)
        lane.host.reserve(hits_nbytes + lost_nbytes + ask_nbytes)
        lane.scratch.reserve((ask_nbytes + 63) // 64 * 64 + <size_t>n * blocks * k * 8)
        lane.counters.reserve((KALOS_BATCH_COUNTERS + 2 * <size_t>KALOS_RECALL_MAX_QUERIES) * 4)
        args.rows, args.dead = self.rows.base, self.rows.dead
        args.queries, args.scopes = lane.scratch.data, lane.scratch.data + queries_nbytes
        args.lists = lane.scratch.data + (ask_nbytes + 63) // 64 * 64
        args.counters, args.done = lane.counters.data, lane.done_mapped
        args.hits, args.lost = lane.host.mapped, lane.host.mapped + hits_nbytes
        args.stride_nbytes, args.dim, args.metric = self.rows.stride_nbytes, dim, self.metric
        args.num_queries, args.num_scopes, args.k = n, 1, k
        args.begin, args.end = scope.begin, scope.end
        args.ticket = lane.next_ticket()
        ask = lane.host.data + hits_nbytes + lost_nbytes
        memcpy(ask, queries, queries_nbytes)
        asked = <kalos_recall_scope*>(ask + queries_nbytes)
        asked[0] = scope.scope
        asked.min_score = min_score
        code = kalos_gpu_enter(self.device.h_gpu)
        cu_check(code, "recall")
        code = kalos_gpu_to_device(
            self.device.h_gpu, lane.scratch.data, ask, ask_nbytes, lane.stream)
        if code == 0:
            code = kalos_gpu_launch_2d(
                self.device.h_gpu, self.kernels[kernel], blocks, (n + group - 1) // group,
                warps * 32, <unsigned int>kalos_batch_shared_nbytes(min(n, group), dim, warps),
                lane.stream, &args)
        kalos_gpu_leave(self.device.h_gpu)
        if code:
            lane.drain()
        cu_check(code, "recall")
        lane.wait()
        lost = <const uint32_t*>(lane.host.data + hits_nbytes)
        for q in range(n):
            if lost[q]:
                return False
        return True
