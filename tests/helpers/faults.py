"""Faults for tests: a shim below a process, small file systems, other processes."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import kalos_ctx

PACKAGE_ROOT = Path(kalos_ctx.__file__).resolve().parents[1]
SHIM_SOURCE = Path(__file__).with_name("shim.c")


def compile_shim(folder) -> Path:
    """Compile the shim; gcc is there wherever Kalos is built."""
    target = Path(folder) / "shim.so"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", target, SHIM_SOURCE, "-ldl"], check=True
    )
    return target


def environment(**extra) -> dict[str, str]:
    """Return this process's environment for a child that imports the same package."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), str(Path(__file__).parents[1])]),
        **{name: str(value) for name, value in extra.items()},
    }


def run_child(code: str, *args, timeout=120, **env) -> subprocess.CompletedProcess:
    """Run Python code in a process of its own and return what became of it."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def checked_child(code: str, *args, **env) -> str:
    """Run Python code that must end well; what it printed."""
    done = run_child(code, *args, **env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def start_child(code: str, *args, **env) -> subprocess.Popen:
    """Start Python code with pipes to and from it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment(**env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextmanager
def small_disk(folder, nbytes: int):
    """Mount a tmpfs of so many bytes; None where this process may not mount."""
    Path(folder).mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        yield None
        return
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
