"""Options, fixtures and markers of the whole suite; functions that tests import are in helpers/."""

import os
from pathlib import Path

import hypothesis
import pytest
from helpers import emulated_cuda
from helpers.clock import ManualClock
from helpers.gpu import NoGpuError, require_gpu
from helpers.sidecars import socket_folder, threaded

import kalos_ctx

# "ci" gives every machine the same examples, so a red run can be repeated; "explore" looks for new
# ones and keeps those that failed in .hypothesis/.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, database=None
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help='where device="auto" builds windows in all tests; "cuda" takes the emulated GPU of '
        "helpers/emulated_cuda.py where there is none",
    )


def pytest_configure(config):
    device = config.getoption("--device")
    os.environ["KALOS_DEVICE"] = device
    if device == "cuda":
        try:
            require_gpu()
        except NoGpuError:
            folder = emulated_cuda.cache_folder()
            emulated_cuda.install(folder)
            os.environ.update(emulated_cuda.environment(folder))


def pytest_runtest_setup(item):
    if item.get_closest_marker("needs_gpu") is None:
        return
    try:
        require_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", autouse=True)
def same_package_in_every_process(tmp_path_factory):
    """Let the interpreters that tests start import the package that is tested here.

    They would look into the working folder first, and in a checkout find sources that were not
    built there.
    """
    before = os.getcwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(kalos_ctx.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
    yield
    os.chdir(before)


@pytest.fixture
def store_path(tmp_path):
    """Return a path at which a test may create a store; nothing is there yet."""
    return tmp_path / "chats.kalos"


@pytest.fixture
def clock():
    """Return a clock with ``now`` and ``advance(seconds)``, to be passed as ``clock=``."""
    return ManualClock()


@pytest.fixture
def folder():
    """Return a folder whose path is short enough for a socket in it."""
    with socket_folder() as path:
        yield path


@pytest.fixture
def served(tmp_path):
    """Return a sidecar on a thread, whose store has a session "s" of 3 tokens, and its socket."""
    with kalos_ctx.SessionStore.open(tmp_path / "served.kalos") as store:
        store.append("s", "user", token_ids=[1, 2, 3], framed=True)
    with socket_folder() as path:
        options = {"handshake_timeout": 0.5}
        with threaded(tmp_path / "served.kalos", f"{path}/s", **options) as sidecar:
            yield sidecar, f"{path}/s"
