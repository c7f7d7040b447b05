"""The CUDA driver, called through C.

cuda-python loads the driver and gives the addresses of its entry points; calls then cost what they
cost in C. A table is filled once a process; nothing here touches a device.
"""

from libc.stdint cimport uintptr_t

from kalos_ctx.errors import DeviceError, DeviceUnavailable

cdef extern from "_driver.h" nogil:
    const size_t KALOS_DRIVER_COUNT
    const char* const* kalos_driver_symbols
    void kalos_driver_set(kalos_driver* driver, size_t place, uintptr_t address)

DRIVER_VERSION = 12000          # CUDA 12.0: variants of entry points as it knows them

cdef kalos_driver TABLE
cdef bint LOADED = False


cdef kalos_driver* c_driver() except NULL:
    """The table of entry points.

    Raises
    ------
    DeviceUnavailable
        cuda-python or the driver is missing, or too old.
    """
    global LOADED
    cdef size_t place
    if LOADED:
        return &TABLE
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceUnavailable(
            "the CUDA backend needs cuda-python: pip install 'kalos-ctx[cuda]'") from error
    try:
        code, = driver.cuInit(0)
    except Exception as error:  # the loader's own type, which older versions do not have
        raise DeviceUnavailable(f"the CUDA driver cannot be loaded: {error}") from error
    if int(code):
        raise DeviceUnavailable(f"the CUDA driver does not start: {code.name}")
    for place in range(KALOS_DRIVER_COUNT):
        symbol = kalos_driver_symbols[place]
        code, address, *_ = driver.cuGetProcAddress(symbol, DRIVER_VERSION, 0)
        if int(code) or not int(address):
            raise DeviceUnavailable(
                f"the CUDA driver has no {symbol.decode()}: Kalos needs a driver for CUDA 12.0 "
                "or newer")
        kalos_driver_set(&TABLE, place, <uintptr_t>int(address))
    LOADED = True
    return &TABLE


cdef int cu_check(kalos_cu_result code, str doing) except -1:
    """Raise for a driver call that failed; `doing` ends "the GPU cannot ...".

    Raises
    ------
    MemoryError, DeviceError
    """
    cdef const char* name = NULL
    if code == 0:
        return 0
    if code == KALOS_CU_OUT_OF_MEMORY:
        raise MemoryError(f"the GPU has no memory to {doing}")
    TABLE.error_name(code, &name)
    text = name.decode() if name != NULL else f"error {code}"
    raise DeviceError(f"the GPU cannot {doing}: {text}")


def driver_calls():
    """Names of the entry points that Kalos calls, as the driver knows them."""
    return [kalos_driver_symbols[place].decode() for place in range(KALOS_DRIVER_COUNT)]
