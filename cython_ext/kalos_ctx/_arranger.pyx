"""Windows on a device laid into one batch there, by the kernel of `arrange.cu`."""

cimport cython
from libc.errno cimport ETIMEDOUT
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from kalos_ctx._device cimport (
    Device, kalos_gpu, kalos_gpu_enter, kalos_gpu_launch, kalos_gpu_leave, kalos_gpu_to_device,
)
from kalos_ctx._device_array cimport device_array
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_ptr, kalos_cu_result
from kalos_ctx._exports cimport check_status
from kalos_ctx._window_buffer cimport (
    kalos_buffer, kalos_buffer_done, kalos_buffer_order, kalos_buffer_ref, kalos_buffer_unref,
    kalos_lease, kalos_lease_begin, kalos_lease_end, kalos_pool, kalos_pool_close, kalos_pool_new,
)
from kalos_ctx._windows cimport Window

from kalos_ctx.errors import InvalidArgument, PoolExhausted

cdef extern from "kalos_launch.h" nogil:
    enum:
        KALOS_ARRANGE_BLOCK
        KALOS_ARRANGE_PACKED
        KALOS_ARRANGE_LEFT
        KALOS_ARRANGE_RIGHT

    ctypedef struct kalos_arrange_row:
        uint64_t tokens
        uint32_t start
        uint32_t length

    ctypedef struct kalos_arrange_args:
        uint64_t rows
        uint64_t token_ids
        uint64_t positions
        uint64_t mask
        uint64_t num_cells
        uint64_t done
        uint64_t counter
        uint32_t num_rows
        uint32_t width
        uint32_t layout
        uint32_t wide
        uint32_t ticket
        int32_t pad_id

LAYOUT_CODES = {
    "packed": KALOS_ARRANGE_PACKED, "left": KALOS_ARRANGE_LEFT, "right": KALOS_ARRANGE_RIGHT,
}
cdef uint64_t PACKED_MAX = (1 << 31) - 1       # tokens, so that cu_seqlens is int32
cdef uint64_t ALIGN = 256                      # bytes: each array begins a memory transaction
cdef uint32_t MAX_BATCHES = 1 << 16            # whose memory is alive
cdef uint32_t IDLE_BATCHES = 4                 # whose memory is kept for the next ones
cdef uint32_t BLOCKS_PER_MULTIPROCESSOR = 16


cdef struct job:
    # One batch on its way: what the kernel reads, and whose memory that is.
    kalos_buffer** sources         # [num_rows], a reference each; NULL: an error's row
    kalos_arrange_row* rows        # [num_rows]
    int32_t* ends                  # [num_rows + 1]
    kalos_cu_ptr rows_place
    kalos_cu_ptr ends_place        # 0: not wanted
    kalos_arrange_args args


cdef uint64_t aligned(uint64_t nbytes) noexcept nogil:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


cdef kalos_cu_result send(kalos_gpu* gpu, job* work) noexcept nogil:
    """Enqueue a batch on the GPU's own stream. Context entered."""
    cdef kalos_cu_result code = 0
    cdef uint32_t i
    for i in range(work.args.num_rows):
        if code == 0 and work.sources[i] != NULL:
            code = kalos_buffer_order(work.sources[i], gpu.stream)
    if code == 0:
        code = kalos_gpu_to_device(
            gpu, work.rows_place, work.rows, work.args.num_rows * sizeof(kalos_arrange_row),
            gpu.stream)
    if code == 0 and work.ends_place:
        code = kalos_gpu_to_device(
            gpu, work.ends_place, work.ends, (work.args.num_rows + 1) * sizeof(int32_t),
            gpu.stream)
    return code


cdef kalos_cu_result perform(kalos_gpu* gpu, job* work, kalos_buffer* out,
                             kalos_cu_handle kernel, uint32_t max_blocks) noexcept nogil:
    """Fill `out` and wait for it."""
    cdef uint64_t blocks = (work.args.num_cells + KALOS_ARRANGE_BLOCK - 1) // KALOS_ARRANGE_BLOCK
    cdef kalos_cu_result code = kalos_gpu_enter(gpu), waited
    if code:
        return code
    code = kalos_buffer_order(out, gpu.stream)
    if code == 0:
        code = send(gpu, work)
    if code == 0 and blocks:
        code = kalos_gpu_launch(
            gpu, kernel, <uint32_t>min(blocks, <uint64_t>max_blocks), KALOS_ARRANGE_BLOCK, 0,
            gpu.stream, &work.args)
    # Also after a failure: copies may be under way from memory that is freed next.
    waited = gpu.driver.stream_synchronize(gpu.stream)
    kalos_gpu_leave(gpu)
    if waited == 0:
        kalos_buffer_done(out)
    return code if code else waited


@cython.final
@cython.no_gc_clear
cdef class Arranger:
    """Lays windows of one device into batches.

    Parameters
    ----------
    device : Device

    Notes
    -----
    Thread-safe. Memory of batches that ended is kept for the next ones.
    """

    cdef Device device
    cdef kalos_pool* h_pool

    def __cinit__(self, Device device not None):
        self.device = device
        self.h_pool = kalos_pool_new(
            MAX_BATCHES, device.h_gpu, True, IDLE_BATCHES, IDLE_BATCHES)
        if self.h_pool == NULL:
            raise MemoryError()

    def __dealloc__(self):
        kalos_pool_close(self.h_pool)

    def arrange(self, list windows not None, str layout not None, int pad_id, bint wide):
        """Make the arrays of a batch.

        Parameters
        ----------
        windows : list of Window or None
            On this device; None is a row without tokens.
        layout : {"packed", "left", "right"}
        pad_id : int
            What fills padded rows.
        wide : bool
            int64 instead of int32.

        Returns
        -------
        dict of str to DeviceArray
            Packed: `token_ids`, `positions` and `cu_seqlens`, which is int32 always. Padded:
            `token_ids`, `attention_mask` and `position_ids`.

        Raises
        ------
        WindowReleased, InvalidArgument, DeviceError, MemoryError, PoolExhausted, ForkedHandle
        """
        cdef job work
        cdef Py_ssize_t n = len(windows), i
        cdef kalos_cu_handle kernel = self.device.function("kalos_arrange")
        work.sources = <kalos_buffer**>calloc(n + 1, sizeof(void*))
        work.rows = <kalos_arrange_row*>calloc(n + 1, sizeof(kalos_arrange_row))
        work.ends = <int32_t*>calloc(n + 1, sizeof(int32_t))
        try:
            if work.sources == NULL or work.rows == NULL or work.ends == NULL:
                raise MemoryError()
            work.args.num_rows = <uint32_t>n
            work.args.layout = LAYOUT_CODES[layout]
            work.args.wide = wide
            work.args.pad_id = pad_id
            work.args.done = work.args.counter = work.args.ticket = 0
            self.read_windows(windows, &work)
            return self.make(&work, kernel)
        finally:
            for i in range(n if work.sources != NULL else 0):
                kalos_buffer_unref(work.sources[i])
            free(work.sources)
            free(work.rows)
            free(work.ends)

    cdef int read_windows(self, list windows, job* work) except -1:
        """Where the tokens lie, and how many cells they make."""
        cdef Py_ssize_t i
        cdef Window window
        cdef uint64_t total = 0, longest = 0
        cdef bint packed = work.args.layout == KALOS_ARRANGE_PACKED
        for i in range(len(windows)):
            if windows[i] is not None:
                window = windows[i]
                window.c_check()
                if window.lease.buffer.gpu != self.device.h_gpu:
                    raise InvalidArgument(f"windows[{i}] must lie on cuda:{self.device.ordinal}")
                kalos_buffer_ref(window.lease.buffer)  # it may be released while the kernel runs
                work.sources[i] = window.lease.buffer
                work.rows[i].tokens = window.c_device_data()
                work.rows[i].length = <uint32_t>window.num_tokens
            work.rows[i].start = <uint32_t>total if packed else 0
            total += work.rows[i].length
            longest = max(longest, <uint64_t>work.rows[i].length)
            if packed and total > PACKED_MAX:
                raise InvalidArgument(
                    f"requests must have at most {PACKED_MAX} tokens together (got {total})")
            work.ends[i + 1] = <int32_t>total
        work.args.width = <uint32_t>longest
        work.args.num_cells = total if packed else longest * len(windows)
        return 0

    cdef dict make(self, job* work, kalos_cu_handle kernel):
        """Lease memory, fill it, and show its parts as arrays."""
        cdef kalos_arrange_args* args = &work.args
        cdef bint packed = args.layout == KALOS_ARRANGE_PACKED
        cdef int bits = 64 if args.wide else 32
        cdef int64_t n = args.num_rows, cells = <int64_t>args.num_cells, width = args.width
        cdef uint64_t part = aligned(args.num_cells * (bits // 8))
        cdef uint64_t table = aligned(args.num_rows * sizeof(kalos_arrange_row))
        cdef uint64_t ends = aligned((args.num_rows + 1) * sizeof(int32_t)) if packed else 0
        cdef uint64_t nbytes = table + ends + part * (2 if packed else 3)
        cdef uint32_t blocks = <uint32_t>self.device.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        cdef kalos_lease lease
        cdef kalos_gpu* gpu = self.device.h_gpu
        cdef kalos_cu_result code
        cdef int status
        self.device.check()
        with nogil:
            status = kalos_lease_begin(&lease, self.h_pool, (nbytes + 3) // 4, 0, NULL)
        if status == ETIMEDOUT:
            raise PoolExhausted(f"{MAX_BATCHES} batches are alive: drop arrays of older ones")
        check_status(status, f"make a batch of {nbytes} bytes")
        try:
            work.rows_place = lease.buffer.device_data
            work.ends_place = work.rows_place + table if packed else 0
            args.rows = work.rows_place
            args.token_ids = work.rows_place + table + ends
            args.positions = args.token_ids + part
            args.mask = 0 if packed else args.positions + part
            with nogil:
                code = perform(gpu, work, lease.buffer, kernel, blocks)
            cu_check(code, "arrange a batch")
            if packed:
                return {
                    "token_ids": device_array(lease.buffer, args.token_ids, 1, cells, 1, bits),
                    "cu_seqlens": device_array(lease.buffer, work.ends_place, 1, n + 1, 1, 32),
                    "positions": device_array(lease.buffer, args.positions, 1, cells, 1, bits),
                }
            return {
                "token_ids": device_array(lease.buffer, args.token_ids, 2, n, width, bits),
                "attention_mask": device_array(lease.buffer, args.mask, 2, n, width, bits),
                "position_ids": device_array(lease.buffer, args.positions, 2, n, width, bits),
            }
        finally:
            kalos_lease_end(&lease)
