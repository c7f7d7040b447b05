"""Windows in host memory: their tokens are copied from the store's mapped files by the CPU."""


cdef class Gatherer:
    """Copies on the CPU; the base of those that write to a device."""

    cdef int fill(self, WindowParts parts, Window window, kalos_cu_handle stream) except -1:
        return parts.gather_window(window.c_data())
