"""Vector rows of a store, resident on a device.

The rows of one generation are copied from the store's mapped files in their order, once; behind
each row's number stand its factor, where its entry's tokens lie, and whether it is deleted. Memory
grows in place, so that addresses never change while kernels read it. `num_rows` is raised when
everything below it has arrived: whoever reads it first and launches then sees whole rows, on any
stream.

Deleted rows stay in their place. The dead bitmap is also kept in pinned memory as it stands on the
device: bits are only ever added, so neither of two threads that add to one word takes back what
the other added, and what did not change is not copied.

The file is long because every part works on the same buffers under the same lock; where rows come
from (`_row_source`) and what follows them (`_row_follower`) stand apart.
"""

import random
import threading

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from kalos_ctx._device cimport (
    Device, kalos_gpu_enter, kalos_gpu_free_pinned, kalos_gpu_is_here, kalos_gpu_leave,
    kalos_gpu_ref, kalos_gpu_to_device, kalos_gpu_to_host, kalos_gpu_unref,
)
from kalos_ctx._device_memory cimport growing_array
from kalos_ctx._driver cimport cu_check, kalos_cu_handle, kalos_cu_result, kalos_driver
from kalos_ctx._layout cimport kalos_crc32c
from kalos_ctx._log cimport kalos_row_holds
from kalos_ctx._row_source cimport (
    add_dead, add_new_dead, fill_places, fill_rows, kalos_arena, kalos_row_tokens, map_arena,
    row_at, row_nbytes, tokens_of,
)
from kalos_ctx._vectors cimport RowMap

from kalos_ctx._row_follower import RowFollower
from kalos_ctx._vectors import StoreMoved
from kalos_ctx.errors import DeviceError, InvalidArgument, StoreClosed

cdef uint64_t MOST_ROWS = <uint64_t>1 << 32     # a row's number has 32 bits
cdef size_t STAGING_NBYTES = 16 << 20           # of each of the two buffers
cdef size_t LOAD_STEP_NBYTES = 64 << 20
cdef size_t FIRST_BITS_NBYTES = 64 << 10
# Chunks of the four arrays: together what a large store may leave unused.
cdef size_t ROW_CHUNK_NBYTES = 32 << 20
cdef size_t PLACE_CHUNK_NBYTES = 8 << 20
cdef size_t FACTOR_CHUNK_NBYTES = 4 << 20
cdef size_t DEAD_CHUNK_NBYTES = 2 << 20
# Addresses are reserved for so many times the device's memory.
cdef size_t RANGE_FACTOR = 4
SAMPLE_ROWS = 64
cdef enum:
    ROW_EXTRA_NBYTES = 24   # behind the values of a row that is read back: place, factor, bits


# ---- What is copied -----------------------------------------------------------------------------

cdef kalos_cu_result copy_rows(
    DeviceRows self, RowMap rows, const kalos_arena* arena, uint64_t start, uint64_t stop,
    kalos_cu_handle stream,
) noexcept nogil:
    """Bring rows start to stop over and wait for them; call in the context, lock held.

    One staging buffer is filled while the other is copied: rows, then places, then factors.
    """
    cdef const kalos_driver* driver = self.driver
    cdef size_t stride = self.stride_nbytes
    cdef uint64_t most = self.staging_nbytes // (stride + sizeof(kalos_row_tokens) + sizeof(float))
    cdef uint64_t row = start, n, turn = 0
    cdef kalos_row_tokens* places
    cdef float* factors
    cdef char* buffer
    cdef kalos_cu_result code = 0, last
    while code == 0 and row < stop:
        n = min(stop - row, most)
        buffer = self.staging[turn % 2]
        places = <kalos_row_tokens*>(buffer + n * stride)
        factors = <float*>(places + n)
        if turn >= 2:
            code = driver.event_synchronize(self.events[turn % 2])
            if code:
                break
        fill_rows(rows, row, n, buffer, stride)
        fill_places(rows, arena, row, n, places, factors)
        code = kalos_gpu_to_device(
            self.h_gpu, self.base + row * stride, buffer, n * stride, stream)
        if code == 0:
            code = kalos_gpu_to_device(
                self.h_gpu, self.places + row * sizeof(kalos_row_tokens), places,
                n * sizeof(kalos_row_tokens), stream)
        if code == 0:
            code = kalos_gpu_to_device(
                self.h_gpu, self.factors + row * sizeof(float), factors, n * sizeof(float), stream)
        if code == 0:
            code = driver.event_record(self.events[turn % 2], stream)
        row += n
        turn += 1
    if code == 0:
        add_dead(rows, stop, start // 64, self.bits)
        code = copy_bits(self, start // 64, (stop + 63) // 64, stream)
    # Also behind an error: what is under way reads the staging buffers.
    last = driver.stream_synchronize(stream)
    return code if code else last


cdef kalos_cu_result copy_bits(
    DeviceRows self, uint64_t first, uint64_t stop, kalos_cu_handle stream,
) noexcept nogil:
    """Copy 64-bit words of the dead bitmap, without waiting."""
    return kalos_gpu_to_device(
        self.h_gpu, self.dead + first * 8, self.bits + first, (stop - first) * 8, stream)


# ---- The rows -----------------------------------------------------------------------------------

@cython.final
cdef class DeviceRows:
    """The rows of one generation of a store on one device; `DeviceRows.open` makes it.

    Thread-safe. `close` must wait until no launch reads the rows any more.

    Attributes
    ----------
    base, factors, dead, places : int
        Device addresses, constant: rows, float32 factors, uint32 bitmap of deleted rows, and of
        each row {uint64 tokens_pos, uint32 num_tokens, uint32 token_crc} of its entry, or zeros.
    stride_nbytes : int
        From one row to the next; zeros behind the `dim` values.
    num_rows : int
        Rows that are there.
    max_rows : int
        Rows that addresses are reserved for.
    row_memory, factor_memory, dead_memory, place_memory : GrowingArray
        What the addresses point into; None once closed.
    """

    def __cinit__(self):
        self.stream = NULL
        self.h_gpu = NULL
        self.staging[0] = self.staging[1] = NULL
        self.events[0] = self.events[1] = NULL
        self.bits = NULL
        self.closed = True

    def __init__(self):
        raise TypeError("DeviceRows.open makes the rows on a device")

    def __dealloc__(self):
        self.release()
        kalos_gpu_unref(self.h_gpu)

    @staticmethod
    def open(Device device not None, RowMap rows not None, *, uint64_t max_rows=0,
             size_t staging_nbytes=0):
        """Reserve addresses and pinned memory for the rows of a generation; none is there yet.

        Parameters
        ----------
        device : Device
        rows : RowMap
            Of the generation.
        max_rows : int
            Rows that there may ever be; 0 for as many as four times the device's memory holds.
        staging_nbytes : int
            Pinned memory of each of the two buffers through which rows are copied; 0 for 16 MiB.

        Returns
        -------
        DeviceRows

        Raises
        ------
        InvalidArgument
            The store has no dimension yet.
        DeviceUnavailable
            The device has no virtual memory management.
        MemoryError, DeviceError
        """
        return device_rows(device, rows, max_rows, staging_nbytes)

    @property
    def nbytes(self):
        """Bytes of device memory that are taken."""
        return sum(memory.nbytes for memory in self.arrays())

    def arrays(self):
        """The arrays: rows, factors, bitmap, places; nothing once closed."""
        if self.closed:
            return ()
        return self.row_memory, self.factor_memory, self.dead_memory, self.place_memory

    cdef int reserve(self) except -1:
        """Reserve the addresses of `max_rows` rows."""
        self.row_memory = growing_array(
            self.device, self.max_rows * self.stride_nbytes, ROW_CHUNK_NBYTES)
        self.factor_memory = growing_array(
            self.device, self.max_rows * sizeof(float), FACTOR_CHUNK_NBYTES)
        self.dead_memory = growing_array(
            self.device, (self.max_rows + 63) // 64 * 8, DEAD_CHUNK_NBYTES)
        self.place_memory = growing_array(
            self.device, self.max_rows * sizeof(kalos_row_tokens), PLACE_CHUNK_NBYTES)
        self.base, self.factors = self.row_memory.base, self.factor_memory.base
        self.dead, self.places = self.dead_memory.base, self.place_memory.base
        return 0

    # ---- Following the store ---------------------------------------------------------------------

    cdef int belongs(self, RowMap rows) except -1:
        """Raise where rows are not of this generation, or these are closed. Lock held."""
        if self.closed:
            raise StoreClosed("the rows on the device are closed")
        if rows.index is not self.index:
            raise StoreMoved()
        return 0

    cdef int follow(self, RowMap rows, kalos_cu_handle stream) except -1:
        """Bring over what `rows` has and the device has not.

        The copies are enqueued on `stream` (NULL: one of the rows' own, which waits for no other)
        and waited for, so that launches on any stream see them. Where there is nothing to bring,
        the call takes no lock and does not ask the driver. On an error `num_rows` stays, and where
        memory is short everything else too.

        Raises
        ------
        StoreMoved
            `rows` is of another generation.
        MemoryError, DeviceError, StoreClosed
        """
        if rows.num_rows <= self.num_rows and rows.index is self.index and not self.closed:
            return 0
        if stream == NULL:
            stream = self.stream
        with self.lock:
            self.belongs(rows)
            if rows.num_rows > self.num_rows:
                self.make_room(rows.num_rows, stream)
                self.bring(rows, rows.num_rows, stream)
        return 0

    cdef int follow_dead(self, RowMap rows, kalos_cu_handle stream) except -1:
        """Bring over the bits of rows that were deleted since; as `follow`.

        Rows that are not on the device yet come with their bits. Where nothing was deleted, the
        driver is not asked: the call compares two bitmaps in host memory.
        """
        cdef uint64_t num_rows, first, stop
        cdef kalos_cu_result code
        if stream == NULL:
            stream = self.stream
        with self.lock:
            self.belongs(rows)
            num_rows = min(rows.num_rows, self.num_rows)
            with nogil:
                stop = add_new_dead(rows, num_rows, self.bits, &first)
            if self.bits_behind:
                first, stop = 0, (num_rows + 63) // 64
            if first >= stop:
                return 0
            self.bits_behind = True
            self.device.enter()
            try:
                with nogil:
                    code = copy_bits(self, first, stop, stream)
                    if code == 0:
                        code = self.driver.stream_synchronize(stream)
            finally:
                self.device.leave()
            cu_check(code, "take deleted rows")
            self.bits_behind = False
        return 0

    cdef int kill(self, uint64_t row) except -1:
        """Mark a row as deleted; waits until every later launch sees it.

        A row that is not on the device yet comes with its bit.

        Raises
        ------
        DeviceError, StoreClosed
        """
        cdef uint64_t word = row // 32
        cdef bint behind
        cdef kalos_cu_result code
        with self.lock:
            if self.closed:
                raise StoreClosed("the rows on the device are closed")
            if row >= self.num_rows:
                return 0
            self.bits[row // 64] |= <uint64_t>1 << (row % 64)
            behind = self.bits_behind
            self.bits_behind = True
            self.device.enter()
            try:
                with nogil:
                    code = kalos_gpu_to_device(
                        self.h_gpu, self.dead + word * 4, <const char*>self.bits + word * 4, 4,
                        self.stream)
                    if code == 0:
                        code = self.driver.stream_synchronize(self.stream)
            finally:
                self.device.leave()
            cu_check(code, "take a deleted row")
            self.bits_behind = behind
        return 0

    cdef int bring(self, RowMap rows, uint64_t stop, kalos_cu_handle stream) except -1:
        """Copy rows up to `stop`, for which there is room. Lock held."""
        cdef kalos_arena arena
        cdef kalos_cu_result code
        map_arena(rows, &arena)
        self.device.enter()
        try:
            with nogil:
                code = copy_rows(self, rows, &arena, self.num_rows, stop, stream)
        finally:
            self.device.leave()
        cu_check(code, f"take rows {self.num_rows} to {stop}")
        self.newest = rows
        self.num_rows = stop
        return 0

    cdef int make_room(self, uint64_t num_rows, kalos_cu_handle stream) except -1:
        """Have memory for so many rows, or leave all as it was. Lock held."""
        cdef uint32_t before[4]
        if num_rows > self.max_rows:
            raise MemoryError(
                f"the rows on the device may be {self.max_rows} ({num_rows} are needed)")
        before[0], before[1] = self.row_memory.num_chunks, self.factor_memory.num_chunks
        before[2], before[3] = self.dead_memory.num_chunks, self.place_memory.num_chunks
        try:
            self.make_bits(num_rows)
            self.row_memory.grow(num_rows * self.stride_nbytes, stream)
            self.factor_memory.grow(num_rows * sizeof(float), stream)
            self.dead_memory.grow((num_rows + 63) // 64 * 8, stream)
            self.place_memory.grow(num_rows * sizeof(kalos_row_tokens), stream)
        except BaseException:
            self.device.enter()
            self.row_memory.cut(before[0])
            self.factor_memory.cut(before[1])
            self.dead_memory.cut(before[2])
            self.place_memory.cut(before[3])
            self.device.leave()
            raise
        return 0

    cdef int make_bits(self, uint64_t num_rows) except -1:
        """Have pinned memory for the bitmap of so many rows. Lock held."""
        cdef size_t need = (num_rows + 63) // 64 * 8
        cdef size_t nbytes = max(self.bits_nbytes, FIRST_BITS_NBYTES)
        cdef void* moved
        if need <= self.bits_nbytes:
            return 0
        while nbytes < need:
            nbytes *= 2
        moved = self.device.pinned(nbytes)
        if self.bits != NULL:
            memcpy(moved, self.bits, self.bits_nbytes)
            self.device.free_pinned(self.bits, self.bits_nbytes)
        self.bits = <uint64_t*>moved
        self.bits_nbytes = nbytes
        return 0

    def load(self, RowMap rows not None, progress=None):
        """Bring the rows of a store over for the first time, and check a sample of them.

        Memory for all of them is taken first. Other threads may use the rows that arrived.

        Parameters
        ----------
        rows : RowMap
        progress : callable, optional
            Called with (rows that arrived, rows in all) about every 64 MiB. What it raises ends
            the load; the rows that arrived stay.

        Raises
        ------
        StoreMoved, MemoryError, DeviceError, StoreClosed
        """
        cdef uint64_t step = max(<uint64_t>1, LOAD_STEP_NBYTES // self.stride_nbytes)
        with self.lock:
            self.belongs(rows)
            self.make_room(rows.num_rows, self.stream)
        while self.num_rows < rows.num_rows:
            with self.lock:
                self.belongs(rows)
                if self.num_rows < rows.num_rows:
                    self.bring(rows, min(self.num_rows + step, rows.num_rows), self.stream)
            if progress is not None:
                progress(min(self.num_rows, rows.num_rows), rows.num_rows)
        self.self_check()

    def update(self, RowMap rows not None):
        """Bring over new rows, and the bits of deleted ones.

        Raises
        ------
        StoreMoved, MemoryError, DeviceError, StoreClosed
        """
        self.follow(rows, NULL)
        self.follow_dead(rows, NULL)

    def delete(self, uint64_t row):
        """Mark a row as deleted.

        Raises
        ------
        DeviceError, StoreClosed
        """
        self.kill(row)

    # ---- The check behind a load -----------------------------------------------------------------

    def self_check(self):
        """Read the first row, the last and random ones back and compare them with the store's.

        Deleted rows, and rows that do not hold their checksum in the store, are passed over.

        Raises
        ------
        DeviceError
            A row, its factor, its bit or its place is not what the store has.
        StoreClosed
        """
        with self.lock:
            if self.closed:
                raise StoreClosed("the rows on the device are closed")
            if self.num_rows == 0:
                return
            rows = {0, self.num_rows - 1}
            rows.update(random.randrange(self.num_rows) for _ in range(SAMPLE_ROWS - len(rows)))
            self.check_rows(self.newest, sorted(rows))

    cdef int check_rows(self, RowMap rows, list sample) except -1:
        """Compare rows on the device with the store's. Lock held."""
        cdef size_t step = self.stride_nbytes + ROW_EXTRA_NBYTES
        cdef kalos_arena arena
        cdef uint64_t row
        cdef char* at
        cdef kalos_cu_result code = 0, last
        cdef size_t most = self.staging_nbytes // step
        if <size_t>len(sample) > most:
            for first in range(0, len(sample), most):
                self.check_rows(rows, sample[first:first + most])
            return 0
        at = self.staging[0]
        self.device.enter()
        try:
            for row in sample:
                if code == 0:
                    code = read_row(self, row, at)
                at += step
            last = self.driver.stream_synchronize(self.stream)
        finally:
            self.device.leave()
        cu_check(code if code else last, "give rows back")
        map_arena(rows, &arena)
        at = self.staging[0]
        for row in sample:
            flaw = row_flaw(self, rows, &arena, row, at)
            if flaw is not None:
                raise DeviceError(
                    f"the GPU's memory does not hold what was copied into it: {flaw} of row {row} "
                    "differs")
            at += step
        return 0

    # ---- The follower ----------------------------------------------------------------------------

    def start_following(self, newest not None):
        """Bring new rows over in the background, every few milliseconds while there are some.

        Deletions are not its business.

        Parameters
        ----------
        newest : callable
            Called with the RowMap that it gave before (None at first), gives the newest.
        """
        with self.lock:
            if self.closed:
                raise StoreClosed("the rows on the device are closed")
            if self.follower is None or not self.follower.runs:
                self.follower = RowFollower(self, newest)

    def stop_following(self):
        """End the background thread, if there is one."""
        if self.follower is not None:
            self.follower.stop()

    def bring_newest(self, RowMap rows not None):
        """As the follower does; whether there were new rows."""
        cdef uint64_t before = self.num_rows
        self.follow(rows, NULL)
        return self.num_rows > before

    def close(self):
        """Give all memory back. No launch may read the rows any more."""
        if not kalos_gpu_is_here(self.h_gpu):  # forked off: the lock may be held for ever
            self.closed = True
            return
        self.stop_following()
        with self.lock:
            self.release()

    cdef void release(self) noexcept:
        cdef int i
        if self.closed:
            return
        self.closed = True
        self.num_rows = 0
        if kalos_gpu_enter(self.h_gpu) == 0:
            if self.stream != NULL:
                self.driver.stream_synchronize(self.stream)
                self.driver.stream_destroy(self.stream)
            for i in range(2):
                if self.events[i] != NULL:
                    self.driver.event_destroy(self.events[i])
                kalos_gpu_free_pinned(self.h_gpu, self.staging[i], self.staging_nbytes)
            kalos_gpu_free_pinned(self.h_gpu, self.bits, self.bits_nbytes)
            kalos_gpu_leave(self.h_gpu)
        self.row_memory = self.factor_memory = self.dead_memory = self.place_memory = None
        self.newest = None


cdef DeviceRows device_rows(Device device, RowMap rows, uint64_t max_rows, size_t staging_nbytes):
    """`DeviceRows.open`; 0 stands for the default of both numbers."""
    cdef DeviceRows self = DeviceRows.__new__(DeviceRows)
    cdef size_t free = 0, total = 0
    if rows.dim == 0:
        raise InvalidArgument("rows must have at least 1 dimension (the store has no vector yet)")
    self.device = device
    self.h_gpu = device.h_gpu
    kalos_gpu_ref(self.h_gpu)
    self.driver = device.driver
    self.closed = False
    self.lock = threading.Lock()
    self.index = rows.index
    self.dim = rows.dim
    self.dim_padded = (rows.dim + 31) // 32 * 32
    self.half = rows.half
    self.stride_nbytes = self.dim_padded * (2 if rows.half else 4)
    device.enter()
    try:
        cu_check(self.driver.mem_info(&free, &total), "tell how much memory it has")
    finally:
        device.leave()
    self.max_rows = max_rows or total * RANGE_FACTOR // self.stride_nbytes
    self.max_rows = min(self.max_rows, MOST_ROWS)
    self.reserve()
    self.stream = device.new_stream(False)
    # One row at least must fit into each of the buffers.
    self.staging_nbytes = max(
        staging_nbytes or STAGING_NBYTES, <size_t>self.stride_nbytes + ROW_EXTRA_NBYTES)
    for i in range(2):
        self.staging[i] = <char*>device.pinned(self.staging_nbytes)
        self.events[i] = device.new_event()
    return self


cdef kalos_cu_result read_row(DeviceRows self, uint64_t row, char* out) noexcept nogil:
    """Enqueue the copies of all that the device has of a row: values, place, factor, bits."""
    cdef size_t stride = self.stride_nbytes, size = sizeof(kalos_row_tokens)
    cdef kalos_cu_result code
    code = kalos_gpu_to_host(self.h_gpu, out, self.base + row * stride, stride, self.stream)
    out += stride
    if code == 0:
        code = kalos_gpu_to_host(self.h_gpu, out, self.places + row * size, size, self.stream)
    out += size
    if code == 0:
        code = kalos_gpu_to_host(self.h_gpu, out, self.factors + row * 4, 4, self.stream)
    if code == 0:
        code = kalos_gpu_to_host(self.h_gpu, out + 4, self.dead + row // 32 * 4, 4, self.stream)
    return code


cdef object row_flaw(
    DeviceRows self, RowMap rows, const kalos_arena* arena, uint64_t row, const char* found,
):
    """What of a row as `read_row` gave it is not as in the store; None where all is.

    None too for a row that is deleted or damaged there.
    """
    cdef size_t stride = self.stride_nbytes, nbytes = row_nbytes(rows), i
    cdef kalos_row_tokens place = tokens_of(rows, arena, row)
    cdef float factor = rows.infos[row].factor
    cdef const char* source = row_at(rows, row)
    cdef uint64_t entry = 0
    cdef uint32_t bits
    cdef int dead = 0
    flaw = None
    memcpy(&bits, found + stride + sizeof(place) + 4, 4)
    if memcmp(found, source, nbytes) != 0:
        flaw = "a value"
    # Behind a rollback another turn may have taken the entry's place; then there is none now.
    elif place.num_tokens and memcmp(found + stride, &place, sizeof(place)) != 0:
        flaw = "the place of the tokens"
    elif memcmp(found + stride + sizeof(place), &factor, 4) != 0:
        flaw = "the factor"
    elif bits >> (row % 32) & 1:
        flaw = "the bit"
    for i in range(nbytes, stride):
        if found[i]:
            flaw = "the padding"
    # What the store has was read before this: a row that still holds did so then.
    if not kalos_row_holds(&rows.infos[row], row, &entry, &dead) or dead \
            or rows.infos[row].crc != kalos_crc32c(0, source, nbytes):
        return None
    return flaw
