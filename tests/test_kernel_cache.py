"""Machine code of the kernels: compiled once, kept in a folder that nobody else can write."""

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from kalos_ctx import _nvrtc
from kalos_ctx.backends import kernel_cache
from kalos_ctx.backends.kernel_cache import HEADER, cubins, kernels
from kalos_ctx.errors import DeviceUnavailable

ARCH = "sm_90"
HEADER_TEXT = "#pragma once\n#define KALOS_TEST 1\n"
SOURCE = (
    '#include "shared.h"\nextern "C" __global__ void kalos_{0}(int* p) {{ *p = KALOS_TEST; }}\n'
)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Two small kernel files with a header, in place of the package's."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "shared.h").write_text(HEADER_TEXT)
    for name in ("one", "two"):
        (folder / f"{name}.cu").write_text(SOURCE.format(name))
    monkeypatch.setattr(kernel_cache, "kernel_dir", lambda: folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kalos"


@pytest.fixture
def compiled(monkeypatch):
    """Names of the files that are compiled, as they are."""
    names = []
    real = _nvrtc.compile_cubin

    def counting(source, name, arch, folder, **options):
        names.append(name)
        return real(source, name, arch, folder, **options)

    monkeypatch.setattr(_nvrtc, "compile_cubin", counting)
    return names


def entries(folder):
    return sorted(folder.iterdir())


# ---- What is compiled and what is read ----------------------------------------------------------


def test_first_start_compiles_and_the_next_one_reads(sources, folder, compiled, caplog):
    caplog.set_level(logging.INFO, "kalos_ctx")
    first = kernels(ARCH, cache_dir=folder)
    assert sorted(compiled) == ["one.cu", "two.cu"]
    assert (first.compiled, first.folder, first.no_cache) == (("one", "two"), str(folder), "")
    again = kernels(ARCH, cache_dir=folder)
    assert len(compiled) == 2
    assert (again.cubins, again.compiled) == (first.cubins, ())
    assert list(again.cubins) == ["one", "two"]
    assert all(code.startswith(b"\x7fELF") for code in again.cubins.values())
    assert [("one, two compiled" in r.message, "from the cache" in r.message)
            for r in caplog.records] == [(True, False), (False, True)]  # fmt: skip


def test_cubins_are_those_of_kernels(sources, folder):
    assert cubins(ARCH, cache_dir=folder) == kernels(ARCH, cache_dir=folder).cubins


def test_changed_source_is_compiled_alone(sources, folder, compiled):
    before = cubins(ARCH, cache_dir=folder)
    (sources / "two.cu").write_text(SOURCE.format("two").replace("KALOS_TEST", "2"))
    after = cubins(ARCH, cache_dir=folder)
    assert sorted(compiled) == ["one.cu", "two.cu", "two.cu"]
    assert after["one"] == before["one"]
    assert after["two"] != before["two"]


@pytest.mark.parametrize("name", ["shared.h", "new.cuh"])
def test_changed_or_new_header_compiles_everything_again(sources, folder, compiled, name):
    cubins(ARCH, cache_dir=folder)
    (sources / name).write_text(HEADER_TEXT.replace("1", "3"))
    cubins(ARCH, cache_dir=folder)
    assert len(compiled) == 4


def test_other_architecture_compiler_or_option_is_another_entry(
    sources, folder, compiled, monkeypatch
):
    cubins(ARCH, cache_dir=folder)
    cubins("sm_80", cache_dir=folder)
    assert len(compiled) == 4
    monkeypatch.setitem(_nvrtc.OPTIONS, "fma", True)
    cubins(ARCH, cache_dir=folder)
    assert len(compiled) == 6
    other = _nvrtc.Compiler((1, 2), (90,), "another build")
    monkeypatch.setattr(_nvrtc, "compiler", lambda: other)
    cubins(ARCH, cache_dir=folder)
    assert len(compiled) == 8


def test_same_sources_in_another_place_share_entries(sources, folder, compiled, monkeypatch):
    cubins(ARCH, cache_dir=folder)
    moved = sources.rename(sources.with_name("elsewhere"))
    monkeypatch.setattr(kernel_cache, "kernel_dir", lambda: moved)
    cubins(ARCH, cache_dir=folder)
    assert len(compiled) == 2


def test_broken_source_raises_with_the_compilers_log_and_keeps_nothing(sources, folder):
    (sources / "two.cu").write_text('extern "C" __global__ void kalos_two() { missing(); }')
    with pytest.raises(DeviceUnavailable, match=r"two\.cu for sm_90: (.|\n)*\"missing\" is undef"):
        cubins(ARCH, cache_dir=folder)
    assert entries(folder) == []


def test_missing_cuda_python_raises_with_what_to_install(sources, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'kalos-ctx\[cuda\]'"):
        cubins(ARCH, cache_dir=folder)


def test_missing_nvrtc_raises_with_what_to_install(sources, folder, monkeypatch):
    from cuda import pathfinder

    def missing(name):
        raise RuntimeError(f"no lib{name}\nlooked everywhere")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    with pytest.raises(DeviceUnavailable, match=r"pip install .* \(no libnvrtc\)$"):
        cubins(ARCH, cache_dir=folder)


def test_cuda_core_that_does_not_fit_raises_with_what_to_install(sources, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(DeviceUnavailable, match=r"fit each other: pip install"):
        cubins(ARCH, cache_dir=folder)


# ---- Damage -------------------------------------------------------------------------------------


def flipped(at):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)

    return damage


def cut(length):
    return lambda path: os.truncate(path, length)


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def foreign(path):
    path.write_bytes(b"\x7fELF" + bytes(500))


def exchanged(path):
    """A whole entry of another source stands there."""
    other = next(one for one in path.parent.iterdir() if one != path)
    path.write_bytes(other.read_bytes())


def linked(path):
    moved = path.rename(path.with_name("moved"))
    path.symlink_to(moved)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def writable(path):
    path.chmod(0o620)


DAMAGES = {
    **{f"flip{at}": flipped(at) for at in (0, 8, 40, 48, HEADER.size, -1)},
    **{f"cut{length}": cut(length) for length in (0, 7, HEADER.size - 1, HEADER.size, 300)},
    **{damage.__name__: damage for damage in (longer, foreign, exchanged, linked, fifo, writable)},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entry_is_compiled_again_and_replaced(sources, folder, compiled, damage, caplog):
    whole = cubins(ARCH, cache_dir=folder)
    damaged = entries(folder)[0]
    damage(damaged)
    again = kernels(ARCH, cache_dir=folder)
    assert (again.cubins, again.compiled) == (whole, ("one",))
    assert kernels(ARCH, cache_dir=folder).compiled == ()
    assert stat.S_IMODE(damaged.lstat().st_mode) == 0o600
    assert caplog.records == []


# ---- The folder ---------------------------------------------------------------------------------


def refused(arch, folder, caplog):
    """The warning with which a folder is left alone."""
    caplog.clear()
    found = kernels(arch, cache_dir=folder)
    assert list(found.cubins) == list(found.compiled) == ["one", "two"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert found.no_cache in record.message
    return record.message


def test_folder_is_made_for_the_user_alone(sources, folder):
    before = os.umask(0o002)
    try:
        cubins(ARCH, cache_dir=folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (folder, folder.parent)] == [0o700, 0o700]
    assert {stat.S_IMODE(one.stat().st_mode) for one in entries(folder)} == {0o600}


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_folder_that_others_write_is_not_used(sources, folder, caplog, mode):
    cubins(ARCH, cache_dir=folder)
    folder.chmod(mode)
    assert "others can write" in refused(ARCH, folder, caplog)


def test_folder_below_one_that_others_write_is_not_used(sources, folder, caplog, compiled):
    cubins(ARCH, cache_dir=folder)
    folder.parent.chmod(0o777)
    assert f"through {folder.parent}" in refused(ARCH, folder, caplog)
    folder.parent.chmod(0o1777)  # as /tmp
    assert kernels(ARCH, cache_dir=folder).compiled == ()


def test_folder_of_another_user_is_not_used(sources, folder, caplog, monkeypatch):
    cubins(ARCH, cache_dir=folder)
    real = os.fstat

    def of_another(fd):
        found = list(real(fd))
        found[stat.ST_UID] = 12345
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", of_another)
    assert "belongs to user" in refused(ARCH, folder, caplog)


def test_folder_that_cannot_be_made_is_not_used(sources, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(ARCH, tmp_path / "file" / "kalos", caplog)


def test_folder_that_cannot_be_written_is_read(sources, folder, caplog, monkeypatch, compiled):
    cubins(ARCH, cache_dir=folder)
    compiled.clear()

    def read_only(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("rename", "utime"):
        monkeypatch.setattr(os, name, read_only)
    monkeypatch.setattr(kernel_cache, "FRESH_AGE_S", -1.0)
    assert kernels(ARCH, cache_dir=folder).compiled == ()
    assert (compiled, caplog.records) == ([], [])
    (sources / "one.cu").write_text(SOURCE.format("one") + "// changed\n")
    found = kernels(ARCH, cache_dir=folder)
    assert compiled == ["one.cu"]
    assert "Read-only" in found.no_cache


def test_full_disk_costs_a_warning_and_leaves_nothing_behind(sources, folder, caplog, monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        assert "No space left" in refused(ARCH, folder, caplog)
    assert entries(folder) == []


def test_link_to_a_folder_is_followed(sources, folder, tmp_path):
    cubins(ARCH, cache_dir=folder)
    (tmp_path / "link").symlink_to(folder)
    assert kernels(ARCH, cache_dir=tmp_path / "link").compiled == ()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"KALOS_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"KALOS_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kalos"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/kalos"),
        ({"HOME": "/c"}, "/c/.cache/kalos"),
    ],
)
def test_place_follows_the_environment(monkeypatch, variables, place):
    for name in ("KALOS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(kernel_cache.cache_place()) == place


def test_user_without_a_home_costs_a_warning(sources, monkeypatch, caplog):
    def no_home():
        raise RuntimeError

    monkeypatch.setattr(kernel_cache.Path, "home", no_home)
    monkeypatch.delenv("KALOS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert "set KALOS_CACHE_DIR" in refused(ARCH, None, caplog)


# ---- Pruning and other processes ----------------------------------------------------------------


def test_old_entries_and_what_dead_writers_left_are_deleted(sources, folder):
    cubins(ARCH, cache_dir=folder)
    kept = {one.name for one in entries(folder)}
    now = time.time()
    for age in range(70):
        old = folder / f"old-sm_80-{age:064x}.cubin"
        old.touch()
        os.utime(old, (now - 1000 - age, now - 1000 - age))
    for age, name in ((7200, "0" * 16), (60, "1" * 16)):
        aside = folder / f".old-sm_80-{'0' * 64}.cubin.{name}"
        aside.touch()
        os.utime(aside, (now - age, now - age))
    (folder / "of-the-user").touch()
    os.utime(folder / "of-the-user", (0, 0))
    cubins("sm_80", cache_dir=folder)  # writes two more
    names = {one.name for one in entries(folder)}
    assert kept | {"of-the-user", f".old-sm_80-{'0' * 64}.cubin.{'1' * 16}"} <= names
    assert len(names) == 64 + 2
    assert f"old-sm_80-{59:064x}.cubin" in names
    assert f"old-sm_80-{60:064x}.cubin" not in names


def test_entry_in_use_is_touched_once_a_day(sources, folder):
    cubins(ARCH, cache_dir=folder)
    old, new = entries(folder)
    os.utime(old, (1, 1))
    fresh = new.stat().st_mtime
    cubins(ARCH, cache_dir=folder)
    assert old.stat().st_mtime > time.time() - 60
    assert new.stat().st_mtime == fresh


def test_threads_that_start_at_once_get_the_same_code(sources, folder):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(cubins(ARCH, cache_dir=folder)))
        for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [found[0]] * 4


def test_processes_that_start_at_once_get_the_same_code(sources, folder):
    code = (
        "import hashlib, pathlib, sys\n"
        "from kalos_ctx.backends import kernel_cache\n"
        "kernel_cache.kernel_dir = lambda: pathlib.Path(sys.argv[1])\n"
        f"found = kernel_cache.kernels({ARCH!r}, cache_dir=sys.argv[2])\n"
        "assert not found.no_cache, found.no_cache\n"
        "print(hashlib.sha256(b''.join(found.cubins.values())).hexdigest())\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(sources), str(folder)], stdout=subprocess.PIPE
        )
        for _ in range(6)
    ]
    said = {one.communicate(timeout=120)[0] for one in started}
    assert [one.returncode for one in started] == [0] * 6
    assert len(said) == 1
    assert len(entries(folder)) == 2
    assert kernels(ARCH, cache_dir=folder).compiled == ()
