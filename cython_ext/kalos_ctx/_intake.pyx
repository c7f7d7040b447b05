"""Token IDs as callers give them, turned into what the store takes: a contiguous int32 array, in range."""

import numpy as np

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport int32_t, uint32_t

from kalos_ctx.errors import InvalidTokenId, InvalidType

cdef long long LARGEST = 0x7fffffff


cdef object bad_id(Py_ssize_t at, object value, uint32_t vocab_size):
    limit = f"[0, {vocab_size})" if vocab_size else "[0, 2147483648)"
    raise InvalidTokenId(f"token_ids[{at}] must lie in {limit} (got {value})")


cdef object from_sequence(object value, uint32_t vocab_size):
    """int32 array from a list or tuple of Python or numpy integers."""
    cdef Py_ssize_t i, n = len(value)
    cdef long long one, limit = vocab_size - 1 if vocab_size else LARGEST
    cdef int overflow
    out = np.empty(n, np.int32)
    cdef int32_t[::1] to = out
    for i in range(n):
        item = value[i]
        if not PyLong_CheckExact(item):
            if not isinstance(item, np.integer):
                raise InvalidType(f"token_ids[{i}] must be an int (got {type(item).__name__})")
            item = int(item)
        one = PyLong_AsLongLongAndOverflow(item, &overflow)
        if overflow or one < 0 or one > limit:
            bad_id(i, item, vocab_size)
        to[i] = <int32_t>one
    return out


cdef Py_ssize_t first_bad(const int32_t[::1] ids, uint32_t vocab_size) noexcept nogil:
    """Place of the first ID out of range, -1 for none. One pass without branches, then the search."""
    cdef Py_ssize_t i, n = ids.shape[0]
    cdef uint32_t limit = vocab_size if vocab_size else 0x80000000u
    cdef uint32_t worst = 0
    for i in range(n):
        worst |= <uint32_t>(<uint32_t>ids[i] >= limit)
    if not worst:
        return -1
    for i in range(n):
        if <uint32_t>ids[i] >= limit:
            return i
    return -1


def as_ids(value not None, uint32_t vocab_size):
    """The IDs as a C-contiguous int32 array of shape (L,); the caller's own where it is one already.

    Parameters
    ----------
    value : sequence of int, or a one-dimensional buffer of any integer type
    vocab_size : int
        IDs must lie in [0, vocab_size); 0 allows every non-negative int32.

    Raises
    ------
    InvalidTokenId, InvalidType
    """
    cdef Py_ssize_t at
    cdef const int32_t[::1] ids
    if isinstance(value, (list, tuple)):
        return from_sequence(value, vocab_size)
    if isinstance(value, (str, bytes, bytearray, dict, set)):
        raise InvalidType(f"token_ids must be a sequence or buffer of ints (got {type(value).__name__})")
    if type(value) is not np.ndarray:
        try:
            array = np.asarray(value if hasattr(value, "__array__") else memoryview(value))
        except (TypeError, ValueError):
            try:
                return from_sequence(list(value), vocab_size)
            except TypeError:
                raise InvalidType("token_ids must be a sequence or buffer of ints "
                                  f"(got {type(value).__name__})") from None
    else:
        array = value
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidType("token_ids must be one-dimensional and of an integer type "
                          f"(got {array.ndim} dimensions of {array.dtype})")
    if array.dtype != np.int32 or not array.flags.c_contiguous or not array.dtype.isnative:
        wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        over = wide > (vocab_size - 1 if vocab_size else LARGEST)
        if wide.dtype == np.int64:
            over |= wide < 0
        if over.any():
            at = int(np.argmax(over))
            bad_id(at, wide[at], vocab_size)
        return wide.astype(np.int32)
    ids = array
    at = first_bad(ids, vocab_size)
    if at >= 0:
        bad_id(at, ids[at], vocab_size)
    return array
