"""What `kalos doctor` finds about CUDA, and what to do about it."""

import os
import types

import pytest
from helpers.cuda_process import CudaProcess

from kalos_ctx import doctor
from kalos_ctx.backends.cuda_system import Hardware, Mps

EXAMINE = """
from kalos_ctx import doctor
cuda_system.nvidia_smi = lambda query: "nvidia-smi is not installed"
cuda_system.mps = lambda: cuda_system.Mps("/tmp/nvidia-mps", False, False, False)
say({one.what: one.as_dict() for one in doctor.examine(folder)})
"""
CUDA = ("cuda-python", "gpu", "cuda", "cuda:0", "kernels", "pinned memory", "page cache", "mps")


@pytest.fixture
def emulated(tmp_path):
    """Run code with the stand-in driver."""
    return CudaProcess(tmp_path)


@pytest.fixture(autouse=True)
def no_choice_of_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# ---- A driver that answers -----------------------------------------------------------------------


def test_doctor_of_a_gpu_that_works_finds_everything_ok(emulated):
    found = emulated(EXAMINE)
    assert {name: found[name]["state"] for name in CUDA} == dict.fromkeys(CUDA, "ok")
    assert {found[name]["advice"] for name in CUDA} == {""}
    assert found["gpu"]["found"] == "1 CUDA devices"
    assert "for CUDA 13.0, NVRTC" in found["cuda"]["found"]
    device = "Emulated GPU, compute capability 9.0, 2.0 of 2.0 GiB free"
    assert found["cuda:0"]["found"] == device
    assert "small compiled" in found["kernels"]["found"]
    assert found["page cache"]["found"].endswith("(zero_copy)")


@pytest.mark.parametrize(
    ("options", "what", "state", "said", "advice"),
    [
        ({"KALOS_FAKE_FAIL": "cuInit:*:803"}, "gpu", "broken", "error 803", "restart"),
        ({"KALOS_FAKE_VERSION": "11080"}, "cuda", "broken", "525", "CPU"),
        ({"KALOS_FAKE_VERSION": "12020"}, "cuda", "note", "for CUDA 12.2", "kalos-ctx[cuda12]"),
        ({"KALOS_FAKE_ATTRIBUTES": "75=6"}, "cuda:0", "broken", "capability 6.0", "CPU"),
        ({"KALOS_FAKE_ATTRIBUTES": "102=0"}, "cuda:0", "note", "Emulated", "virtual memory"),
        ({"KALOS_FAKE_FAIL": "cuDevicePrimaryCtxRetain:*:46"}, "cuda:0", "broken",
         "DEVICE_UNAVAILABLE", "CPU"),
        ({"KALOS_FAKE_FAIL": "cuMemHostRegister:*:2"}, "pinned memory", "broken", "OUT_OF_MEMORY",
         "memlock"),
        ({"KALOS_FAKE_FAIL": "cuMemHostRegister:2:1"}, "page cache", "note", "INVALID_VALUE",
         "staged"),
        ({"KALOS_CACHE_DIR": "/proc/kalos"}, "kernels", "note", "every start", "KALOS_CACHE_DIR"),
    ],
)  # fmt: skip
def test_doctor_names_what_is_wrong_and_what_to_do(emulated, options, what, state, said, advice):
    found = emulated(EXAMINE, **options)
    assert found[what]["state"] == state
    assert said in found[what]["found"]
    assert advice in found[what]["advice"]
    others = {name: one["state"] for name, one in found.items() if name != what}
    assert "broken" not in others.values()


def test_doctor_without_cuda_python_asks_the_driver_alone(emulated):
    code = """
from importlib import metadata
def version(name, real=metadata.version):
    if name.startswith("cuda-"):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules["cuda.bindings"] = sys.modules["cuda.core"] = None
"""
    found = emulated(code + EXAMINE)
    assert found["cuda-python"]["state"] == "note"
    assert "pip install 'kalos-ctx[cuda]'" in found["cuda-python"]["advice"]
    assert (found["gpu"]["state"], "cuda:0" in found) == ("ok", False)


# ---- A GPU that the driver does not show ---------------------------------------------------------


def answers(code, count=0):
    """A driver's library whose cuInit gives a code."""

    def get_count(pointer):
        pointer._obj.value = count
        return 0

    return lambda name: types.SimpleNamespace(cuInit=lambda flags: code, cuDeviceGetCount=get_count)


def missing(name):
    raise OSError


GIVEN = Hardware(1, ("NVIDIA H200",), "580.82.07", ("/dev/nvidia0",))
SHOWN = [["NVIDIA H200", "Disabled"]]
ABSENT = {
    "no gpu, no driver": (missing, Hardware(), "note", "no CUDA driver", "CPU"),
    "no gpu": (answers(100), Hardware(), "note", "finds no device", "CPU"),
    "stub, no gpu": (answers(34), Hardware(), "note", "finds no device", "CPU"),
    "no driver installed": (missing, Hardware(on_bus=2), "note", "has 2 NVIDIA GPUs",
                            "install NVIDIA's driver"),
    "not given": (missing, Hardware(1, ("NVIDIA H200",), "580.82.07"), "note",
                  "has NVIDIA H200, and this process was given none", "docker run --gpus"),
    "no library": (missing, GIVEN, "broken", "/dev/nvidia0 is here", "NVIDIA_DRIVER_CAPABILITIES"),
    "stub": (answers(34), GIVEN, "broken", "finds no device", "stubs"),
    "mismatch": (answers(803), GIVEN, "broken", "its kernel module is 580.82.07", "restart"),
    "shown": (answers(100), GIVEN, "broken", "nvidia-smi shows 1", "permission"),
}  # fmt: skip


@pytest.mark.parametrize(("load", "seen", "state", "said", "advice"), ABSENT.values(), ids=ABSENT)
def test_doctor_says_why_no_device_is_there(monkeypatch, load, seen, state, said, advice):
    monkeypatch.setattr(doctor.cuda_system, "nvidia_smi", lambda query: SHOWN)
    found = doctor.cuda_devices(load, seen)
    assert (found.what, found.state) == ("gpu", state)
    assert said in found.found
    assert advice in found.advice


def test_doctor_says_which_device_file_is_refused():
    seen = Hardware(1, ("NVIDIA H200",), "580", ("/dev/nvidia0",), ("/dev/nvidia0",))
    found = doctor.cuda_devices(answers(100), seen)
    assert (found.state, "may not open /dev/nvidia0" in found.found) == ("broken", True)


@pytest.mark.parametrize(
    ("rows", "said", "advice"),
    [
        ([["NVIDIA H200", "Enabled"]], "MIG is on", "nvidia-smi mig -cgi"),
        ("nvidia-smi says: Driver/library version mismatch", "mismatch", "restart"),
    ],
)
def test_doctor_asks_nvidia_smi_where_the_driver_shows_none(monkeypatch, rows, said, advice):
    monkeypatch.setattr(doctor.cuda_system, "nvidia_smi", lambda query: rows)
    found = doctor.cuda_devices(answers(100), GIVEN)
    assert (found.state, said in found.found, advice in found.advice) == ("broken", True, True)


@pytest.mark.parametrize(
    ("value", "state", "said"),
    [
        ("", "note", "hides every GPU"),
        ("-1", "note", "hides every GPU"),
        ("7", "broken", "CUDA_VISIBLE_DEVICES=7 names none of the 1 GPUs"),
    ],
)
def test_doctor_reads_cuda_visible_devices(monkeypatch, value, state, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = doctor.cuda_devices(answers(100), GIVEN)
    assert (found.state, said in found.found) == (state, True)


# ---- Other processes on the GPU ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mps", "others", "state", "said"),
    [
        (Mps("/p", False, True, True), 3, "ok", "runs"),
        (Mps("/p", True, True, False), 0, "note", "no process here"),
        (Mps("/p", True, False, False), 0, "note", "CUDA_MPS_PIPE_DIRECTORY=/p has no daemon"),
        (Mps("/p", False, False, False), 2, "note", "off, and 2 other processes"),
        (Mps("/p", False, False, False), 0, "ok", "off; needed when"),
        (Mps("/p", False, False, False), None, "ok", "does not say"),
    ],
)
def test_sharing_says_what_other_processes_cost(mps, others, state, said):
    found = doctor.sharing(mps, others)
    assert (found.state, said in found.found) == (state, True)
    assert bool(found.advice) is (state == "note")


@pytest.mark.parametrize(
    ("rows", "others"),
    [("nvidia-smi is not installed", None), ([], 0), ([["1"], ["1"], ["2"], ["own"]], 2)],
)
def test_other_processes_are_counted_without_this_one(monkeypatch, rows, others):
    if rows and isinstance(rows, list):
        rows = [[str(os.getpid()) if row == ["own"] else row[0]] for row in rows]
    monkeypatch.setattr(doctor.cuda_system, "nvidia_smi", lambda query: rows)
    assert doctor._other_processes() == others


def test_existing_is_the_nearest_folder(tmp_path):
    assert doctor.existing(tmp_path / "a" / "b") == tmp_path
    assert doctor.existing(tmp_path) == tmp_path
