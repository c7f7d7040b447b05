"""Windows on a device as several test files make and read them."""

import numpy as np
from helpers import device_memory, dlpack_consumer

from kalos_ctx._device import Device

IDS = np.arange(100, 116, dtype=np.int32)
CUDA = (2, 0)  # as DLPack names the device


def open_with_kernels():
    """Open the machine's GPU or the stand-in, with the kernel of batches loaded."""
    memory = device_memory.open_memory()
    memory.device = Device.open(0, kernels(memory), 4)
    return memory


def kernels(memory):
    """Kernel files by name, for the device at hand."""
    if memory.emulated:
        return {"arrange": b"kalos_arrange\0"}  # an image has the names of its kernels
    from cuda.core import Device as CoreDevice

    from kalos_ctx.backends.kernel_cache import cubins

    return cubins(f"sm_{CoreDevice(0).arch}")


def filled(pool, ids=IDS, **options):
    window = pool.acquire(len(ids), **options)
    window.write(ids)
    return window


def place(window):
    """Address of the window's device memory."""
    taken = dlpack_consumer.take(window.__dlpack__(stream=1))
    found = taken.tensor.data
    taken.drop()
    return found


def on_device(memory, window):
    return memory.read(place(window), np.int32, len(window)).tolist()


def allocations(device):
    counts = device.counts()
    return counts["device_allocations"], counts["pinned_allocations"]
