"""Whether this machine has a CUDA device, asked of the driver alone.

Neither cuda-python nor Kalos takes part: if one of them is broken on a machine with a GPU, the
tests that need the GPU fail there; they are not skipped.
"""

import ctypes

CUDA_SUCCESS = 0
CUDA_ERROR_NO_DEVICE = 100


class NoGpuError(Exception):
    """There is no CUDA driver here, or the driver finds no device."""


def require_gpu(library: str = "libcuda.so.1") -> int:
    """Return the number of CUDA devices; raise `NoGpuError` where there is no driver or no device.

    Any other failure of the driver is a RuntimeError: a broken driver is not a missing one.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise NoGpuError("no CUDA driver was found") from error
    if hasattr(driver, "kalos_fake_count"):
        raise NoGpuError("the CUDA driver is the stand-in of emulated_cuda.py")
    count = ctypes.c_int(0)
    for call in (lambda: driver.cuInit(0), lambda: driver.cuDeviceGetCount(ctypes.byref(count))):
        code = call()
        if code == CUDA_ERROR_NO_DEVICE:
            raise NoGpuError("the CUDA driver finds no device")
        if code != CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver answers with error {code}")
    if count.value == 0:
        raise NoGpuError("the CUDA driver finds no device")
    return count.value
