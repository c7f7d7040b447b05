"""A process that finds a CUDA driver as users' processes do: by its name. Run by test_simt.py.

Prints what it saw as JSON. Argument: elements behind the end of its memory that a kernel writes to.
"""

import ctypes
import json
import sys

import numpy as np
from cuda.bindings import driver
from cuda.core import Device

from kalos_ctx._driver import driver_calls


def call(name, *arguments):
    """Call an entry point through cuda-python and return what it gives."""
    code, *out = getattr(driver, name)(*arguments)
    if int(code):
        raise SystemExit(f"{name}: {code.name}")
    return out[0] if len(out) == 1 else out


def main(beyond: int) -> None:
    device = Device(0)
    device.set_current()
    found = [int(call("cuGetProcAddress", name.encode(), 12000, 0)[0]) for name in driver_calls()]
    values = np.arange(5000, dtype=np.uint32)
    sums, result = np.zeros(41, np.uint32), np.zeros(1, np.uint32)
    stream = call("cuStreamCreate", 1)
    function = call("cuModuleGetFunction", call("cuModuleLoadData", b"any"), b"test_sum")
    memory = [int(call("cuMemAlloc", size)) for size in (values.nbytes, 164)]
    call("cuMemcpyHtoDAsync", memory[0], values.ctypes.data, values.nbytes, stream)
    call("cuMemcpyHtoDAsync", memory[1], sums.ctypes.data, sums.nbytes, stream)
    values[:] = 0  # pageable: the driver has taken the bytes
    places = (memory[0], 5000, memory[1], memory[1] + 160, memory[1] + 4 * beyond)
    kinds = (ctypes.c_void_p, ctypes.c_uint32, *[ctypes.c_void_p] * 3)
    call("cuLaunchKernel", function, 40, 1, 1, 128, 1, 1, 0, stream, (places, kinds), 0)
    call("cuMemcpyDtoHAsync", result.ctypes.data, memory[1] + 4 * beyond, 4, stream)
    call("cuStreamSynchronize", stream)
    free, total = call("cuMemGetInfo")
    seen = {
        "name": device.name,
        "capability": list(device.compute_capability),
        "multiprocessors": device.properties.multiprocessor_count,
        "version": call("cuDriverGetVersion"),
        "missing": found.count(0),
        "sum": int(result[0]),
        "taken": total - free,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]))
