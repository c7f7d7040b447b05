"""The window that a caller holds, and the caller's own buffer beside it."""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.string cimport memcpy

from kalos_ctx._session_table cimport SessionRef, SessionTable, shown
from kalos_ctx._windows cimport Window

from kalos_ctx.errors import InvalidArgument, InvalidType

cdef object REPORT = None


@cython.no_gc_clear
cdef class ContextWindow(Window):
    """A session's next input: int32 token IDs of shape (L,), in a slot of the assembler's pool.

    Made by `ContextAssembler.assemble`. `release()`, the end of a `with` block or the end of the
    object gives the slot back; arrays made from it stay valid. `token_ids`, `tolist`, `__dlpack__`
    and `len` raise `WindowReleased` afterwards, `report` does not.
    """

    def __init__(self):
        raise TypeError("windows are made by ContextAssembler.assemble")

    def __dealloc__(self):
        self.unlink()

    cdef void link(self, SessionTable table):
        """Become the session's latest window."""
        cdef SessionRef ref = self.ref
        self.table = table
        self.older = ref.latest
        if self.older != NULL:
            (<ContextWindow>self.older).newer = <void*>self
        else:
            table.live[ref.key] = ref
        ref.latest = <void*>self

    cdef void unlink(self) noexcept:
        cdef SessionTable table = self.table
        cdef SessionRef ref = self.ref
        if table is None:
            return
        self.table = None
        if self.older != NULL:
            (<ContextWindow>self.older).newer = self.newer
        if self.newer != NULL:
            (<ContextWindow>self.newer).older = self.older
        else:
            ref.latest = self.older
            # At the interpreter's end the collector may have emptied the assembler before.
            if ref.latest == NULL and table.live is not None and table.live.get(ref.key) is ref:
                del table.live[ref.key]
        self.older = self.newer = NULL

    cpdef release(self):
        """Give the slot back; arrays made from the window stay valid. Idempotent."""
        self.unlink()
        Window.release(self)

    @property
    def session(self):
        """Name of the session: str, or bytes where it is not UTF-8."""
        return self.ref.shown

    @property
    def tenant(self):
        """Name of the tenant, as `session`."""
        return shown(self.ref.tenant)

    @property
    def report(self):
        """What stands in the window, what does not, and why."""
        if self._report is None:
            self._report = REPORT(self)
        return self._report


def use_report(cls):
    """Say what `ContextWindow.report` makes of a window; called once, at import."""
    global REPORT
    REPORT = cls


cdef Py_ssize_t out_tokens(object out) except -1:
    """Length of a caller's buffer, checked."""
    cdef Py_buffer view
    cdef Py_ssize_t n
    try:
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND)
    except (BufferError, TypeError, ValueError):
        raise InvalidType("out must be a writable, contiguous int32 buffer") from None
    form = view.format.decode() if view.format != NULL else "B"
    n = view.shape[0] if view.ndim == 1 else -1
    fits = view.itemsize == 4 and form.lstrip("@=<") in ("i", "l")
    PyBuffer_Release(&view)
    if n < 0 or not fits:
        raise InvalidType(f"out must be a 1-D int32 buffer (got {view.ndim}-D of format {form!r})")
    return n


cdef int fill_out(ContextWindow window, object out) except -1:
    """Copy a window into the caller's buffer."""
    cdef Py_buffer view
    cdef Py_ssize_t n = out_tokens(out)
    if n < window.num_tokens:
        length = window.num_tokens
        window.release()
        raise InvalidArgument(f"out must have room for the window's {length} tokens (got {n})")
    window.settle_host()
    PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_ND)
    if window.num_tokens:
        memcpy(view.buf, window.c_data(), window.num_tokens * 4)
    PyBuffer_Release(&view)
    return 0
