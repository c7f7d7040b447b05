"""What a read hands out: turns, passages, and token IDs that lie in the store's files."""

import json

import numpy as np

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_WRITABLE

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
cdef tuple ROLE_NAMES = ROLES
cdef char* INT32_FORMAT = b"i"


cdef class TokenView:
    """Read-only int32 buffer over a mapped file, which it keeps mapped."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("stored token IDs are read-only")
        buffer.buf = <void*>self.data
        buffer.obj = self
        buffer.len = self.length * 4
        buffer.readonly = 1
        buffer.itemsize = 4
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = INT32_FORMAT
        buffer.ndim = 1
        buffer.shape = &self.length
        buffer.strides = &self.stride
        buffer.suboffsets = NULL
        buffer.internal = NULL


cdef object ids_of(TokenView view):
    if view.length == 0:
        empty = np.empty(0, np.int32)
        empty.flags.writeable = False
        return empty
    return np.frombuffer(view, np.int32)


cdef class Stored:
    """What a turn and a passage have in common: token IDs, text and metadata."""

    @property
    def token_ids(self):
        """int32 IDs of shape (num_tokens,), read-only; a turn's framing included."""
        if self.ids is None:
            self.ids = ids_of(self.view)
        return self.ids

    @property
    def num_tokens(self):
        """Length in tokens; a turn's framing included."""
        return self.view.length

    @property
    def text(self):
        """The original text, or None."""
        return None if self.raw_text is None else self.raw_text.decode()

    @property
    def metadata(self):
        """The metadata as it was given, or None."""
        return None if self.raw_metadata is None else json.loads(self.raw_metadata)


cdef class Turn(Stored):
    """One stored turn.

    Attributes
    ----------
    seq : int
        Sequence number in its session, from 0.
    role : str
    token_ids : int32 array of shape (num_tokens,)
        Read-only and zero-copy: it lies in the store's file. Framing included.
    text : str or None
        The original content, where it was given as text.
    group : str, int or None
    created_at : float
        Seconds as `time.time()`.
    metadata : dict or None
    num_tokens : int
    """

    @property
    def role(self):
        """Role of the turn."""
        return ROLE_NAMES[self.role_code]

    @property
    def group(self):
        """The group as it was given, or None."""
        if self.raw_group is None:
            return None
        return int(self.raw_group[1:]) if self.raw_group[0] == c"i" else self.raw_group[1:].decode()

    def __repr__(self):
        return f"Turn(seq={self.seq}, role={self.role!r}, num_tokens={self.view.length})"


cdef class Passage(Stored):
    """One stored passage.

    Attributes
    ----------
    id : int
    vector : float array of shape (dim,)
        As stored: float16 rows come back as float16.
    text : str or None
    token_ids : int32 array, read-only
        Empty where the passage has none.
    metadata : dict or None
    created_at : float
    """

    @property
    def vector(self):
        """The row as stored, a copy."""
        return np.frombuffer(self.raw_vector, np.float16 if self.half else np.float32)

    def __repr__(self):
        return f"Passage(id={self.id}, num_tokens={self.view.length})"
