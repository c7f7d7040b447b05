"""What the operating system says of NVIDIA GPUs, without the driver and without cuda-python."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DRIVER_LIBRARY = "libcuda.so.1"
NVIDIA_SMI_TIMEOUT_S = 20.0
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"  # PCI class of display controllers; 0x0302 are those without a screen

SUCCESS = 0
STUB_LIBRARY = 34
NO_DEVICE = 100

# What to do about results of cuInit and of the first calls (CUDA Driver API, CUresult).
REMEDIES = {
    2: "free memory on the GPU, or give its other users less",
    3: "CUDA does not survive a fork: start worker processes with spawn",
    STUB_LIBRARY: "a stub library was found: take its folder (.../stubs) out of LD_LIBRARY_PATH",
    46: "another process has the GPU for itself: nvidia-smi -c DEFAULT, or run MPS",
    NO_DEVICE: "give this process a GPU",
    214: "the GPU's memory has an error: see nvidia-smi -q -d ECC, and reset or replace the GPU",
    802: "start nvidia-fabricmanager, of the driver's version: GPUs joined by NVSwitch need it",
    803: (
        "the driver's library and kernel module are of different versions: restart after an "
        "update of the driver; in a container, take the image's own libcuda.so away"
    ),
    804: (
        "the cuda-compat library does not work with this GPU: take its folder (.../compat) out of "
        "LD_LIBRARY_PATH, or update the driver"
    ),
    805: "the MPS daemon does not answer: start it, or unset CUDA_MPS_PIPE_DIRECTORY",
    807: "the MPS server is not ready: see its log in CUDA_MPS_LOG_DIRECTORY",
    808: "MPS has as many clients as it takes: end some",
    809: "MPS has as many connections as it takes: end some clients",
    999: (
        "check the permission of /dev/nvidia* and that nvidia_uvm is loaded (nvidia-modprobe -u); "
        "restart the container"
    ),
}
ANY_REMEDY = "see nvidia-smi and dmesg"


@dataclass(frozen=True, slots=True)
class Hardware:
    """NVIDIA GPUs as the kernel shows them to this process.

    Attributes
    ----------
    on_bus : int
        GPUs on the PCI bus. A container sees those of its host, whether it was given one or not.
    models : tuple of str
        Names of those that the kernel module drives.
    module : str
        The kernel module's version; empty where it is not loaded.
    nodes : tuple of str
        Device nodes of GPUs: what this process, or its container, was given.
    refused : tuple of str
        Nodes that this process may not open, by their mode.
    """

    on_bus: int = 0
    models: tuple[str, ...] = ()
    module: str = ""
    nodes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def hardware(root: Path = Path("/")) -> Hardware:
    """Look at /sys, /proc and /dev below `root`."""
    on_bus = 0
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        if _text(device / "vendor") == NVIDIA_VENDOR:
            on_bus += _text(device / "class").startswith(DISPLAY_CLASS)
    models = []
    for gpu in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", _text(gpu), re.MULTILINE)
        models.append(found[1].strip() if found else "NVIDIA GPU")
    version = re.search(r"Module.*?\s(\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version"))
    nodes = [
        p for p in sorted(root.glob("dev/nvidia*")) if re.fullmatch(r"nvidia(ctl|\d+)", p.name)
    ]
    return Hardware(
        on_bus,
        tuple(models),
        version[1] if version else "",
        tuple(str(p) for p in nodes if p.name != "nvidiactl"),
        tuple(str(p) for p in nodes if not os.access(p, os.R_OK | os.W_OK)),
    )


def hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every GPU, as it does on purpose when empty or -1."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in ("", "-1")


def remedy(code: int) -> str:
    """What to do about a result of the driver."""
    return REMEDIES.get(code, ANY_REMEDY)


def library_version() -> str:
    """Version of the driver's library that this process has loaded, from its file's name."""
    found = re.search(r"/libcuda\.so\.(\d+\.[\d.]+)", _text(Path("/proc/self/maps")))
    return found[1] if found else ""


def nvidia_smi(query: str) -> list[list[str]] | str:
    """Ask nvidia-smi; the rows of its answer, or why there are none.

    Parameters
    ----------
    query : str
        Such as "query-gpu=name,mig.mode.current".
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not installed"
    try:
        done = subprocess.run(
            [tool, f"--{query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi does not answer: {error}"
    if done.returncode:
        said = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return f"nvidia-smi says: {said[0] if said else f'exit status {done.returncode}'}"
    return [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]


@dataclass(frozen=True, slots=True)
class Mps:
    """The Multi-Process Service as this process would reach it.

    Attributes
    ----------
    folder : str
        Of its pipes.
    asked_for : bool
        CUDA_MPS_PIPE_DIRECTORY is set.
    has_pipes : bool
        A daemon made its pipes there; it may have ended since.
    runs : bool
        Its process is seen from here; in a container it need not be.
    """

    folder: str
    asked_for: bool
    has_pipes: bool
    runs: bool


def mps(root: Path = Path("/")) -> Mps:
    """Look for the MPS daemon's pipes and process."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    place = Path(folder) if folder else root / "tmp/nvidia-mps"
    # The kernel cuts names of processes to 15 characters.
    runs = any(_text(comm) == "nvidia-cuda-mps" for comm in root.glob("proc/[0-9]*/comm"))
    return Mps(str(place), bool(folder), (place / "control").exists(), runs)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
