"""Vector rows of a store in the form in which a device takes them.

Rows are read from the store's mapped files, without the GIL. What a writer does meanwhile is seen
whole or not at all: a row or an entry that is being changed is read again.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memcpy, memset

from kalos_ctx._control cimport WORD_ROWS
from kalos_ctx._index cimport Index
from kalos_ctx._layout cimport KALOS_ENTRY_DEAD, kalos_crc32c, kalos_entry
from kalos_ctx._log cimport kalos_row_holds
from kalos_ctx._reader cimport StoreReader
from kalos_ctx._segment cimport MappedFile
from kalos_ctx._vectors cimport RowMap

from kalos_ctx._vectors import StoreMoved

cdef extern from *:
    """
    #define KALOS_LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
    #define KALOS_REREAD() __asm__ volatile("" ::: "memory")

    // The first word from `word` on with a bit that `known` has not, or `stop`. Eight at a time,
    // which compilers turn into vectors; a bit that is set meanwhile is found by the next call.
    static uint64_t kalos_new_bits(const uint64_t* now, const uint64_t* known, uint64_t word,
                                   uint64_t stop) {
      for (; word + 8 <= stop; word += 8) {
        uint64_t found = 0;
        for (int i = 0; i < 8; ++i) found |= now[word + i] & ~known[word + i];
        if (found) break;
      }
      while (word < stop && !(now[word] & ~known[word])) ++word;
      return word;
    }
    """
    uint64_t KALOS_LOAD_RELAXED(const uint64_t* p) nogil
    void KALOS_REREAD() nogil
    uint64_t kalos_new_bits(
        const uint64_t* now, const uint64_t* known, uint64_t word, uint64_t stop) nogil

# A writer may be between the words of what is read; it is read again so often.
cdef int READS = 1000


cdef int map_arena(RowMap rows, kalos_arena* out) except -1:
    """The entries of the rows' index, also those behind what was mapped so far.

    Raises
    ------
    StoreIOError
    """
    cdef MappedFile arena = rows.index.arena
    if arena.fd >= 0:  # else the store is closed, and nothing comes
        arena.check(0)
        arena.map_at_least(arena.size)
    out.base = arena.base
    out.nbytes = min(arena.size, arena.mapped)
    return 0


cdef size_t row_nbytes(RowMap rows) noexcept nogil:
    """Bytes of a row's values."""
    return <size_t>rows.dim * (2 if rows.half else 4)


cdef const char* row_at(RowMap rows, uint64_t row) noexcept nogil:
    """A row in the store's mapped files."""
    return <const char*>rows.segments[row // rows.rows_per_segment] \
        + row % rows.rows_per_segment * rows.stride_nbytes


cdef void fill_rows(
    RowMap rows, uint64_t row, uint64_t count, char* out, size_t stride,
) noexcept nogil:
    """Rows as they lie on the device: zeros behind the values, whatever the store has there."""
    cdef size_t nbytes = row_nbytes(rows)
    cdef uint64_t at, n
    cdef const char* source
    while count:
        at = row % rows.rows_per_segment
        n = min(count, rows.rows_per_segment - at)
        source = row_at(rows, row)
        row += n
        count -= n
        if nbytes == stride and rows.stride_nbytes == stride:
            memcpy(out, source, n * stride)
            out += n * stride
            continue
        while n:
            memcpy(out, source, nbytes)
            memset(out + nbytes, 0, stride - nbytes)
            source += rows.stride_nbytes
            out += stride
            n -= 1


cdef void fill_places(
    RowMap rows, const kalos_arena* arena, uint64_t row, uint64_t count, kalos_row_tokens* places,
    float* factors,
) noexcept nogil:
    """Where the tokens of rows lie, and the rows' factors."""
    cdef uint64_t i
    for i in range(count):
        places[i] = tokens_of(rows, arena, row + i)
        factors[i] = rows.infos[row + i].factor


cdef kalos_row_tokens tokens_of(
    RowMap rows, const kalos_arena* arena, uint64_t row,
) noexcept nogil:
    """Where the tokens of a living row's entry lie; zeros where no entry can be read."""
    cdef kalos_row_tokens out
    cdef kalos_entry entry
    cdef uint64_t place = 0
    cdef int dead = 0, _
    memset(&out, 0, sizeof(out))
    for _ in range(READS):
        if kalos_row_holds(&rows.infos[row], row, &place, &dead):
            break
    else:
        return out
    if dead or place == 0 or place + sizeof(entry) > arena.nbytes:
        return out
    for _ in range(READS):
        memcpy(&entry, arena.base + place, sizeof(entry))
        if entry.crc == kalos_crc32c(0, &entry, sizeof(entry) - 4):
            break
        KALOS_REREAD()
    else:
        return out
    # Behind a rollback another turn may take the entry's place.
    if entry.vector_row == row + 1 and not entry.flags & KALOS_ENTRY_DEAD:
        out.tokens_pos = entry.tokens_pos
        out.num_tokens = entry.num_tokens
        out.token_crc = entry.token_crc
    return out


cdef uint64_t dead_bits(RowMap rows, uint64_t word, uint64_t num_rows) noexcept nogil:
    """A word of the store's dead bitmap; bits of rows from `num_rows` on are not of these rows."""
    cdef uint64_t bits = KALOS_LOAD_RELAXED(&rows.dead[word])
    if num_rows - word * 64 < 64:
        bits &= ((<uint64_t>1) << (num_rows % 64)) - 1
    return bits


cdef void add_dead(
    RowMap rows, uint64_t num_rows, uint64_t first, uint64_t* bits,
) noexcept nogil:
    """Add the store's dead bits to `bits`, from word `first` to the word of the last row."""
    cdef uint64_t word
    for word in range(first, (num_rows + 63) // 64):
        bits[word] |= dead_bits(rows, word, num_rows)


cdef uint64_t add_new_dead(
    RowMap rows, uint64_t num_rows, uint64_t* bits, uint64_t* first,
) noexcept nogil:
    """Add all of the store's dead bits to `bits`, and tell which words that changed.

    They are those from `first` to the number that is returned, 0 for none.
    """
    cdef uint64_t stop = (num_rows + 63) // 64
    cdef uint64_t word = 0, now, behind = 0
    first[0] = stop
    while True:
        word = kalos_new_bits(rows.dead, bits, word, stop)
        if word >= stop:
            return behind
        now = dead_bits(rows, word, num_rows)
        if now & ~bits[word]:  # else the new bits are of rows from `num_rows` on
            bits[word] |= now
            first[0] = min(first[0], word)
            behind = word + 1
        word += 1


def newest_rows(StoreReader reader not None, RowMap known=None):
    """Map the rows that a store has published by now.

    Parameters
    ----------
    reader : StoreReader
        Or the writer.
    known : RowMap, optional
        An earlier answer, which is given again when there are no newer rows.

    Returns
    -------
    RowMap

    Raises
    ------
    StoreMoved
        The store went on in other files meanwhile; the call may be repeated.
    StoreClosed, StoreCorrupt
    """
    cdef RowMap rows
    cdef Index index
    cdef uint64_t num_rows
    reader.enter()
    index = reader.index
    num_rows = reader.control.word(WORD_ROWS)
    if known is not None and known.index is index and known.num_rows >= num_rows \
            and known.dim == reader.control.state.vector_dim:
        return known
    rows = RowMap.__new__(RowMap)
    rows.take(reader, num_rows)
    if rows.index is not index:
        raise StoreMoved()
    return rows
