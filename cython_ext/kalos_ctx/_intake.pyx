"""Token IDs as callers give them, turned into what the store takes: int32, contiguous, in range."""

import numpy as np

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport int32_t, uint32_t

from kalos_ctx._batch cimport Draft
from kalos_ctx._layout cimport KALOS_ENTRY_FRAMED

from kalos_ctx._turns import ROLES
from kalos_ctx.errors import InvalidArgument, InvalidTokenId, InvalidType

NAME_BYTES_MAX = 1024

cdef dict ROLE_CODES = {name: code for code, name in enumerate(ROLES)}

cdef object INT32 = np.dtype(np.int32)
cdef long long LARGEST = 0x7fffffff
cdef object LARGEST_PRINTED = 10 ** 20


def name_bytes(value, str what not None, *, bint empty=False):
    """An identifier as opaque bytes; str is encoded as UTF-8.

    Raises
    ------
    InvalidArgument, InvalidType
    """
    cdef bytes name
    if isinstance(value, str):
        try:
            name = (<str>value).encode()
        except UnicodeEncodeError as e:
            raise InvalidArgument(
                f"{what} has a lone surrogate at position {e.start}; give bytes for such a name"
            ) from None
    elif isinstance(value, bytes):
        name = bytes(value)
    else:
        raise InvalidType(f"{what} must be str or bytes (got {type(value).__name__})")
    if len(name) > NAME_BYTES_MAX or (not name and not empty):
        least = 0 if empty else 1
        raise InvalidArgument(
            f"{what} must have {least} to {NAME_BYTES_MAX} bytes (got {len(name)})")
    return name


cdef object bad_id(Py_ssize_t at, object value, uint32_t vocab_size):
    limit = f"[0, {vocab_size})" if vocab_size else "[0, 2147483648)"
    # Python refuses to print a number of thousands of digits.
    given = value if -LARGEST_PRINTED < value < LARGEST_PRINTED else "a larger number"
    raise InvalidTokenId(f"token_ids[{at}] must lie in {limit} (got {given})")


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
    """Place of the first ID out of range, -1 for none. A pass without branches, then the search."""
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
    """The IDs as a C-contiguous int32 array of shape (L,); the caller's own where it is one.

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
    if type(value) is np.ndarray and value.dtype is INT32 and value.ndim == 1:
        try:
            ids = value
        except ValueError:  # not contiguous
            pass
        else:
            at = first_bad(ids, vocab_size)
            if at >= 0:
                bad_id(at, ids[at], vocab_size)
            return value
    if isinstance(value, (list, tuple)):
        return from_sequence(value, vocab_size)
    if isinstance(value, (str, bytes, bytearray, dict, set)):
        raise InvalidType(
            f"token_ids must be a sequence or buffer of ints (got {type(value).__name__})")
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


cdef Draft new_draft(int code, const int32_t[::1] ids, double created_at, int flags):
    """A draft of IDs alone, made without the keyword arguments of its constructor."""
    cdef Draft draft = Draft.__new__(Draft)
    # A view that was never set is not None.
    draft.live = draft.vector = None
    draft.role = code
    draft.ids = ids
    draft.created_at = created_at
    draft.flags = flags
    return draft


def bare_draft(role, token_ids not None, uint32_t vocab_size, double created_at, bint framed):
    """The draft of a turn that is IDs and a role; None where the role is not one or there is no ID.

    Raises
    ------
    InvalidTokenId, InvalidType
    """
    code = ROLE_CODES.get(role) if isinstance(role, str) else None
    if code is None:
        return None
    ids = as_ids(token_ids, vocab_size)
    if not len(ids):
        return None
    return new_draft(code, ids, created_at, KALOS_ENTRY_FRAMED if framed else 0)


def bare_drafts(list rows not None, uint32_t vocab_size, double created_at):
    """Drafts of turns that are all dicts of a role and IDs alone; None where one is anything else.

    What it does not take goes the long way, which finds the words for what is wrong.
    """
    cdef list out = []
    cdef const int32_t[::1] view
    for row in rows:
        if type(row) is not dict or len(<dict>row) != 2:
            return None
        role = (<dict>row).get("role")
        ids = (<dict>row).get("token_ids")
        code = ROLE_CODES.get(role) if type(role) is str else None
        if code is None or type(ids) is not np.ndarray or ids.dtype != np.int32 or ids.ndim != 1 \
                or not ids.flags.c_contiguous:
            return None
        view = ids
        if view.shape[0] == 0 or first_bad(view, vocab_size) >= 0:
            return None
        out.append(new_draft(code, view, created_at, 0))
    return out
