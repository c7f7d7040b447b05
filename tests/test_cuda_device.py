"""Opening a GPU: what is told of one that works, and what is raised where none does.

The driver is the stand-in of `helpers.emulated_cuda`, in processes of their own; the operating
system's part is a folder that looks like it.
"""

import logging
import os
import re
import sys
import types
from pathlib import Path

import pytest
from helpers.cuda_process import CudaProcess

from kalos_ctx import _nvrtc
from kalos_ctx.backends import cuda_device, cuda_system
from kalos_ctx.backends.cuda_device import NoGpu
from kalos_ctx.errors import DeviceUnavailable

GIVEN = cuda_system.Hardware(nodes=("/dev/nvidia0",))


@pytest.fixture
def emulated(tmp_path):
    """Run code with the stand-in driver."""
    return CudaProcess(tmp_path)


# ---- A GPU that works ---------------------------------------------------------------------------


def test_open_device_tells_what_the_gpu_is(emulated):
    found = emulated("""
from cuda.bindings import driver
device = cuda_device.open_device(0)
again = cuda_device.open_device(0)
known = {f.name: getattr(device, f.name) for f in dataclasses.fields(device) if f.name != "kernels"}
current = int(driver.cuCtxGetCurrent()[1])
say([known, list(device.cubins), device.kernels.compiled, again.kernels.compiled, current])
""")
    known, cubins, compiled, again, current = found
    assert (known["ordinal"], known["name"], known["arch"]) == (0, "Emulated GPU", "sm_90")
    assert (known["capability"], known["driver_version"]) == ([9, 0], [13, 0])
    assert known["nvrtc_version"] == list(_nvrtc.compiler().version)
    assert (known["num_multiprocessors"], known["total_nbytes"]) == (4, 2 << 30)
    assert known["l2_nbytes"] > 0
    assert all(known[name] is True for name in known if name.endswith(("supported", "pointers")))
    assert (cubins, compiled, again) == (["small"], ["small"], [])
    assert current == 0, "the caller's current context has changed"


def test_open_device_tells_what_the_gpu_cannot(emulated):
    code = """
d = cuda_device.open_device(0)
say([d.can_use_host_pointers, d.host_register_supported, d.read_only_host_register_supported,
     d.vm_supported, cuda_device.page_cache_self_test(d, folder)])
"""
    found = emulated(code, KALOS_FAKE_ATTRIBUTES="91=0,99=0,102=0,113=0")
    assert found == [False] * 4 + ["the GPU does not take memory of the host"]


def test_several_devices_are_counted_from_0(emulated):
    code = """
say([cuda_device.available_devices(), cuda_device.open_device(1).ordinal,
     error_of(cuda_device.open_device, 2), error_of(cuda_device.open_device, -1)])
"""
    names, ordinal, above, below = emulated(code, KALOS_FAKE_DEVICES="2")
    assert (names, ordinal) == (["Emulated GPU"] * 2, 1)
    assert above[1].startswith("device must be between cuda:0 and cuda:1 here (got cuda:2)")
    assert "(got cuda:-1)" in below[1]


def test_find_device_opens_the_first(emulated):
    assert emulated("say([cuda_device.find_device().ordinal, warned])") == [0, []]


@pytest.mark.needs_gpu
def test_gpu_of_this_machine_opens_and_passes_the_self_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cuda_device.kernel_cache, "kernels", lambda arch: types.SimpleNamespace(cubins={})
    )
    device = cuda_device.open_device(0)
    free, total = cuda_device.memory(device)
    assert 0 < free <= total
    assert device.name == cuda_device.available_devices()[0]
    assert cuda_device.pinned_memory_self_test(device) == ""
    assert cuda_device.page_cache_self_test(device, tmp_path) == cuda_device.ZERO_COPY


# ---- What is in the way -------------------------------------------------------------------------

TRY = "say(tried())"
MISFITS = {
    "KALOS_FAKE_VERSION=11080": "for CUDA 11.8.*for CUDA 12.0.*525",
    "KALOS_FAKE_FAIL=cuInit:*:803": "DRIVER_MISMATCH.*restart",
    "KALOS_FAKE_FAIL=cuInit:*:804": "COMPAT.*LD_LIBRARY_PATH",
    "KALOS_FAKE_FAIL=cuInit:*:802": "NOT_READY.*nvidia-fabricmanager",
    "KALOS_FAKE_FAIL=cuInit:*:304": "OPERATING_SYSTEM.*nvidia-smi and dmesg",
}


def test_driver_that_does_not_work_raises_and_auto_warns(emulated):
    found = emulated(
        f"options = {list(MISFITS)!r}\n"
        "found = []\n"
        "for name, value in (option.split('=') for option in options):\n"
        "    os.environ[name] = value\n"
        "    found.append(tried())\n"
        "    del os.environ[name]\n"
        "say(found)\n"
    )
    for ((kind, text), auto_is_none, warned), message in zip(found, MISFITS.values(), strict=True):
        assert (kind, auto_is_none) == ("DeviceUnavailable", True)
        assert re.search(message, text)
        assert [text in one for one in warned] == [True]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ("75=7,76=0", "capability 7.0.*needs 7.5.*device='cpu'"),
        ("75=99", "NVRTC .*does not compile.*99.0.*install a newer"),
    ],
)
def test_gpu_that_does_not_fit_raises_and_auto_warns(emulated, attributes, message):
    (kind, text), auto_is_none, warned = emulated(TRY, KALOS_FAKE_ATTRIBUTES=attributes)
    assert (kind, auto_is_none) == ("DeviceUnavailable", True)
    assert re.search(message, text)
    assert [text in one for one in warned] == [True]


@pytest.mark.parametrize(
    "option",
    ["KALOS_FAKE_DEVICES=0", "KALOS_FAKE_FAIL=cuInit:*:100", "KALOS_FAKE_FAIL=cuInit:*:34"],
)
def test_no_device_is_quiet_unless_one_was_given(emulated, option):
    name, value = option.split("=")
    code = """
found = [tried()]
cuda_system.hardware = lambda: cuda_system.Hardware(nodes=("/dev/nvidia0",))
found.append(tried())
os.environ["CUDA_VISIBLE_DEVICES"] = ""
say([*found, tried()])
"""
    none, given, hidden = emulated(code, **{name: value})
    for (kind, text), auto_is_none, warned in (none, hidden):
        assert (kind, auto_is_none, warned) == ("NoGpu", True, [])
        assert "finds no GPU" in text
    (kind, text), auto_is_none, warned = given
    assert (kind, auto_is_none) == ("DeviceUnavailable", True)
    assert [text in one for one in warned] == [True]


def test_broken_kernel_raises_with_the_compilers_log(emulated):
    code = "Path(sys.argv[1], 'small.cu').write_text('oops')\n" + TRY
    (kind, text), auto_is_none, warned = emulated(code)
    assert (kind, auto_is_none, len(warned)) == ("DeviceUnavailable", True, 1)
    assert "small.cu(1): error" in text


NEWER = """
from kalos_ctx import _nvrtc
real = _nvrtc.compiler()
_nvrtc.compiler = lambda: dataclasses.replace(real, version=(99, 1))
device = None
def open_it():
    global device
    device = cuda_device.open_device(0)
say([error_of(open_it), device and device.nvrtc_version])
"""


def test_code_of_a_newer_nvrtc_is_tried_on_the_driver(emulated):
    assert emulated(NEWER) == [None, [99, 1]]
    (kind, text), _ = emulated(NEWER, KALOS_FAKE_FAIL="cuModuleLoadData:*:209")
    assert kind == "DeviceUnavailable"
    assert re.search(r"for CUDA 13.0, does not load small.cu.*NVRTC 99.1.*kalos-ctx\[cuda12", text)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90"), ((8, 9), "sm_89"), ((8, 8), "sm_86")]
)
def test_code_is_for_the_gpu_or_the_next_older_of_its_generation(capability, arch):
    compiler = _nvrtc.Compiler((12, 9), (75, 80, 86, 89, 90, 100), "")
    assert cuda_device.code_arch(capability, compiler) == arch


def bindings(monkeypatch, **functions):
    """Put a module in place of cuda.bindings, whose driver has these functions."""
    driver = types.SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=driver))


@pytest.mark.parametrize("given", [True, False])
def test_missing_driver_says_what_to_install(monkeypatch, caplog, given):
    def missing(flags):
        raise RuntimeError("libcuda.so.1 is not there")

    bindings(monkeypatch, cuInit=missing)
    seen = GIVEN if given else cuda_system.Hardware()
    monkeypatch.setattr(cuda_system, "hardware", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for call in (cuda_device.available_devices, lambda: cuda_device.open_device(0)):
        with pytest.raises(DeviceUnavailable, match="install NVIDIA's driver") as caught:
            call()
        assert isinstance(caught.value, NoGpu) is not given
    assert cuda_device.find_device() is None
    assert [r.levelno for r in caplog.records if r.levelno > logging.INFO] == [30] * given


@pytest.mark.parametrize("given", [True, False])
def test_missing_cuda_python_says_what_to_install(monkeypatch, caplog, given):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    seen = GIVEN if given else cuda_system.Hardware()
    monkeypatch.setattr(cuda_system, "hardware", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'kalos-ctx\[cuda\]'"):
        cuda_device.open_device(0)
    assert cuda_device.find_device() is None
    assert [r.levelno for r in caplog.records if r.levelno > logging.INFO] == [30] * given


def test_missing_cuda_core_says_what_to_install(emulated):
    (kind, text), auto_is_none, warned = emulated("sys.modules['cuda.core'] = None\n" + TRY)
    assert (kind, auto_is_none, len(warned)) == ("DeviceUnavailable", True, 1)
    assert "pip install 'kalos-ctx[cuda]'" in text


# ---- Self-tests ---------------------------------------------------------------------------------

SELF_TESTS = """
import ctypes
device = cuda_device.open_device(0)
found = [cuda_device.page_cache_self_test(device, folder),
         cuda_device.pinned_memory_self_test(device)]
live = ctypes.CDLL("libcuda.so.1").kalos_fake_live_memory
say([found, [live(kind) for kind in (b"registered", b"device")], sorted(os.listdir(sys.argv[2]))])
"""


def test_self_tests_pass_and_leave_nothing(emulated):
    found, live, files = emulated(SELF_TESTS)
    assert (found, live, files) == (["zero_copy", ""], [0, 0], ["cache", "sources"])


def test_self_tests_say_what_the_driver_refuses(emulated):
    found, live, _ = emulated(SELF_TESTS, KALOS_FAKE_FAIL="cuMemHostRegister:*:801")
    assert found[0].startswith("the driver does not register a file's mapping")
    assert found[1] == "CUDA_ERROR_NOT_SUPPORTED"
    assert live == [0, 0]


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("os.pwrite = lambda fd, data, at: None", "does not see what is written"),
        ("cuda_device._pattern = lambda turn: os.urandom(1 << 20)", "something else"),
        ("folder += '/gone'", "No such file"),
    ],
)  # fmt: skip
def test_page_cache_self_test_says_what_it_found(emulated, patch, reason):
    (found, _), live, _ = emulated(SELF_TESTS.replace("found =", f"{patch}\nfound ="))
    assert reason in found
    assert live == [0, 0]


def test_memory_is_free_and_all_of_it(emulated):
    assert emulated("say(cuda_device.memory(cuda_device.open_device(0)))") == [2 << 30, 2 << 30]


# ---- What the operating system says -------------------------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """A folder that looks like a machine with two GPUs, one of them given to this process."""
    root = tmp_path / "machine"
    for name, text in {
        "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:01:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:02:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:02:00.0/class": "0x030200\n",
        "sys/bus/pci/devices/0000:02:00.1/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:02:00.1/class": "0x040300\n",
        "sys/bus/pci/devices/0000:03:00.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:03:00.0/class": "0x030000\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H200\nIRQ: 1\n",
        "proc/driver/nvidia/version": (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n"
        ),
        "proc/7/comm": "nvidia-cuda-mps\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "dev/nvidia-uvm": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_hardware_is_what_the_kernel_shows(machine):
    found = cuda_system.hardware(machine)
    assert (found.on_bus, found.models, found.module) == (2, ("NVIDIA H200",), "580.82.07")
    assert (found.nodes, found.refused) == ((str(machine / "dev/nvidia0"),), ())
    (machine / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue Jun 3\n"
    )
    assert cuda_system.hardware(machine).module == "535.261.03"


def test_hardware_of_a_machine_without_gpus_is_empty(tmp_path):
    assert cuda_system.hardware(tmp_path) == cuda_system.Hardware()


def test_device_nodes_that_may_not_be_opened_are_named(machine, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidiactl")
    assert cuda_system.hardware(machine).refused == (str(machine / "dev/nvidiactl"),)


@pytest.mark.parametrize(
    ("value", "hides"), [(None, False), ("", True), ("-1", True), ("0", False), ("GPU-1", False)]
)
def test_hidden_is_an_empty_list_of_devices(monkeypatch, value, hides):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert cuda_system.hidden() is hides


def test_mps_is_found_by_its_process_and_its_pipes(machine, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    found = cuda_system.mps(machine)
    assert (found.asked_for, found.has_pipes, found.runs) == (False, False, True)
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert cuda_system.mps(tmp_path) == cuda_system.Mps(str(tmp_path), True, True, False)


@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("echo 'NVIDIA H200, Disabled'; echo 'NVIDIA L4, [N/A]'",
         [["NVIDIA H200", "Disabled"], ["NVIDIA L4", "[N/A]"]]),
        ("true", []),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
         "nvidia-smi says: Failed to initialize NVML: Driver/library version mismatch"),
        ("exit 3", "nvidia-smi says: exit status 3"),
        (None, "nvidia-smi is not installed"),
    ],
)  # fmt: skip
def test_nvidia_smi_gives_rows_or_why_not(monkeypatch, tmp_path, script, answer):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
    assert cuda_system.nvidia_smi("query-gpu=name,mig.mode.current") == answer


def test_remedy_is_for_the_code_or_where_to_look():
    assert "spawn" in cuda_system.remedy(3)
    assert cuda_system.remedy(12345) == cuda_system.ANY_REMEDY
