"""Processes that find the stand-in CUDA driver, and one small kernel in place of the package's."""

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from helpers import emulated_cuda

# Kept between runs: what still fits is used again.
FOLDER = Path(tempfile.gettempdir()) / f"kalos-emulated-cuda-{os.getuid()}"
PRELUDE = '''
import dataclasses, json, logging, os, sys
from pathlib import Path
from kalos_ctx.backends import cuda_device, cuda_system, kernel_cache
from kalos_ctx.errors import DeviceUnavailable

kernel_cache.kernel_dir = lambda: Path(sys.argv[1])
folder = sys.argv[2]
cuda_system.hardware = cuda_system.Hardware
os.environ.pop("CUDA_VISIBLE_DEVICES", None)

class Warned(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())

warned = []
logging.getLogger("kalos_ctx").addHandler(Warned(logging.WARNING))

def error_of(call, *args):
    try:
        call(*args)
    except DeviceUnavailable as error:
        return [type(error).__name__, str(error)]
    return None

def tried():
    """What opening a device and what device="auto" do: error, whether auto gives none, warnings."""
    warned.clear()
    return [error_of(cuda_device.open_device, 0), cuda_device.find_device() is None, [*warned]]

def say(value):
    print(json.dumps(value))
'''


@cache
def _variables():
    return emulated_cuda.environment(FOLDER, kernels=[])


class CudaProcess:
    """Runs code in new processes that see one emulated GPU and no hardware.

    The code has `cuda_device`, `cuda_system`, `kernel_cache`, `folder` (a place for files) and the
    functions above; what it gives to `say` comes back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = folder / "sources"
        self.sources.mkdir()
        (self.sources / "small.cu").write_text('extern "C" __global__ void kalos_small() {}\n')

    def __call__(self, code: str, **variables: str):
        """Run the code; the variables are those of the stand-in driver."""
        cache_dir = str(self.folder / "cache")
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, str(self.sources), str(self.folder)],
            env={**os.environ, **_variables(), "KALOS_CACHE_DIR": cache_dir, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
