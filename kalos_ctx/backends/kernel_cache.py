"""The kernels as machine code: compiled once for an architecture, then read from a folder.

An entry is one file a source and architecture, ``NAME-ARCH-KEY.cubin``:

    offset  size  field
    0       8     magic, "KALOSCB1"
    8       32    key
    40      8     length of the code in bytes, little-endian
    48      32    SHA-256 of the code
    80      ...   code

The key is a SHA-256 over the compiler, its options, the architecture, the source and every header.
An entry is valid if and only if all of it holds; any other is compiled again and replaced. Files
are written aside and renamed, so processes that start at once meet whole entries or none. Code is
never taken from a folder, or a file, that another user but root could have written. A folder that
cannot be written, in an image, say, is read all the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kalos_ctx import _nvrtc
from kalos_ctx._kernel_source import kernel_dir

log = logging.getLogger(__name__)

MAGIC = b"KALOSCB1"
HEADER = struct.Struct("<8s32sQ32s")
CODE_NBYTES_MAX = 64 << 20
ENTRY = re.compile(r"\w+-sm_\w+-[0-9a-f]{64}\.cubin")
ASIDE = re.compile(r"\.\w+-sm_\w+-[0-9a-f]{64}\.cubin\.[0-9a-f]{16}")
ENTRIES_KEPT = 64
ASIDE_AGE_S = 3600.0  # a writer needs milliseconds: what is older was left by one that died
FRESH_AGE_S = 86400.0  # entries in use are touched once a day, so that pruning finds the others
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Kernels:
    """Machine code of every kernel, and where it came from.

    Attributes
    ----------
    arch : str
        Such as "sm_90".
    cubins : dict of str to bytes
        By the source's name without suffix.
    compiled : tuple of str
        Sources that were not in the cache.
    elapsed_ms : float
    folder : str
        Of the cache; empty where none is used.
    no_cache : str
        Why no cache is used or why it could not be written; else empty.
    """

    arch: str
    cubins: dict[str, bytes]
    compiled: tuple[str, ...]
    elapsed_ms: float
    folder: str
    no_cache: str

    def __str__(self) -> str:
        how = f"{', '.join(self.compiled)} compiled" if self.compiled else "from the cache"
        return f"{len(self.cubins)} files for {self.arch}, {how} in {self.elapsed_ms:,.0f} ms"


class UnfitFolderError(Exception):
    """The folder cannot hold a cache; the message says why and what to do."""


def cubins(arch: str, *, cache_dir: str | os.PathLike[str] | None = None) -> dict[str, bytes]:
    """Return the machine code of every kernel file, by the file's name without suffix.

    Parameters and errors as in `kernels`.
    """
    return kernels(arch, cache_dir=cache_dir).cubins


def kernels(arch: str, *, cache_dir: str | os.PathLike[str] | None = None) -> Kernels:
    """Compile the kernels for an architecture, or read what an earlier start compiled.

    Parameters
    ----------
    arch : str
        Such as "sm_90".
    cache_dir : path, optional
        For `cache_place()`.

    Raises
    ------
    DeviceUnavailable
        NVRTC is missing or refused a source; its log is in the message.

    Notes
    -----
    A cache that cannot be used costs time and a warning in the log, and is no error.
    """
    start = time.perf_counter()
    sources, keys = _sources(arch)
    no_cache = ""
    folder = ""
    found: dict[str, bytes] = {}
    try:
        place = cache_place() if cache_dir is None else Path(cache_dir)
        with _opened(place) as (fd, folder):
            for name in sources:
                code = _load(fd, _entry(name, arch, keys[name]), keys[name])
                if code is not None:
                    found[name] = code
            missing = {name: text for name, text in sources.items() if name not in found}
            if missing:
                built = _compiled(missing, arch)
                no_cache = _saved(fd, arch, keys, built)
                found.update(built)
    except UnfitFolderError as error:
        no_cache = str(error)
        missing = sources
        found = _compiled(sources, arch)
    if no_cache:
        log.warning("kernels are compiled at every start: %s", no_cache)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    ordered = {name: found[name] for name in sources}
    result = Kernels(arch, ordered, tuple(missing), elapsed_ms, folder, no_cache)
    log.info("%s", result)
    return result


def cache_place() -> Path:
    """Return ``$KALOS_CACHE_DIR``, ``$XDG_CACHE_HOME/kalos`` or ``~/.cache/kalos``.

    Raises
    ------
    UnfitFolderError
        The user has no home.
    """
    if own := os.environ.get("KALOS_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, says the XDG Base Directory Specification
        return Path(base) / "kalos"
    try:
        return Path.home() / ".cache" / "kalos"
    except RuntimeError:
        raise UnfitFolderError("the user has no home; set KALOS_CACHE_DIR to a folder") from None


# ---- What is compiled ---------------------------------------------------------------------------


def _sources(arch: str) -> tuple[dict[str, str], dict[str, bytes]]:
    """The text and the key of each kernel file."""
    folder = kernel_dir()
    shared = hashlib.sha256()
    for part in (_nvrtc.compiler().identity, repr(sorted(_nvrtc.OPTIONS.items())), arch):
        _add(shared, part.encode())
    for header in sorted((*folder.glob("*.h"), *folder.glob("*.cuh"))):
        _add(shared, header.name.encode())
        _add(shared, header.read_bytes())
    texts, keys = {}, {}
    for path in sorted(folder.glob("*.cu")):
        text = path.read_bytes()
        key = shared.copy()
        _add(key, path.name.encode())
        _add(key, text)
        texts[path.stem], keys[path.stem] = text.decode(), key.digest()
    return texts, keys


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Take a part in by its length, so that no other parts give the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _compiled(sources: dict[str, str], arch: str) -> dict[str, bytes]:
    folder = kernel_dir()

    def one(name: str) -> bytes:
        code, said = _nvrtc.compile_cubin(sources[name], f"{name}.cu", arch, folder)
        if said:
            log.warning("NVRTC says of %s.cu: %s", name, said)
        return code

    # NVRTC works without the GIL.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "kalos-nvrtc") as pool:
        return dict(zip(sources, pool.map(one, sources), strict=True))


# ---- The folder ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[tuple[int, str]]:
    """Open the cache's folder, made where it is missing, as (descriptor, path)."""
    path = os.path.realpath(place)
    fd = -1
    try:
        _make(Path(path))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        _check(fd, path)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise UnfitFolderError(
            f"{path}: {error.strerror}; set KALOS_CACHE_DIR to a folder of your own"
        ) from error
    except UnfitFolderError:
        os.close(fd)
        raise
    try:
        yield fd, path
    finally:
        os.close(fd)


def _make(path: Path) -> None:
    if not path.exists():
        _make(path.parent)
        path.mkdir(0o700, exist_ok=True)


def _check(fd: int, path: str) -> None:
    """Refuse a folder whose entries another user can replace, as ssh does with its keys."""
    user = os.geteuid()
    own = os.fstat(fd)
    if own.st_uid not in (0, user):
        raise UnfitFolderError(
            f"{path} belongs to user {own.st_uid}; set KALOS_CACHE_DIR to a folder of your own"
        )
    if own.st_mode & OTHERS_WRITE:
        raise UnfitFolderError(f"others can write to {path}: chmod go-w it")
    for parent in Path(path).parents:
        found = parent.stat()
        # In a sticky folder, such as /tmp, nobody can rename what belongs to another user.
        open_to_all = found.st_mode & OTHERS_WRITE and not found.st_mode & stat.S_ISVTX
        if open_to_all or found.st_uid not in (0, user):
            raise UnfitFolderError(
                f"others can replace {path}, through {parent}: set KALOS_CACHE_DIR to a folder "
                "below folders of your own"
            )


def _entry(name: str, arch: str, key: bytes) -> str:
    return f"{name}-{arch}-{key.hex()}.cubin"


def _load(fd: int, entry: str, key: bytes) -> bytes | None:
    """Return an entry's code; None where there is none that holds."""
    # NONBLOCK: what lies there may be a FIFO.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(entry, flags, dir_fd=fd), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
                return None
            if found.st_mode & OTHERS_WRITE or found.st_size > CODE_NBYTES_MAX:
                return None
            content = file.read()
            if time.time() - found.st_mtime > FRESH_AGE_S:
                with contextlib.suppress(OSError):  # a read-only file system is not pruned either
                    os.utime(file.fileno())
    except OSError:
        return None
    if len(content) < HEADER.size:
        return None
    magic, its_key, length, checksum = HEADER.unpack_from(content)
    code = content[HEADER.size :]
    if (magic, its_key, length) != (MAGIC, key, len(code)):
        return None
    return code if hashlib.sha256(code).digest() == checksum else None


def _saved(fd: int, arch: str, keys: dict[str, bytes], built: dict[str, bytes]) -> str:
    """Write entries and prune old ones; return why that failed, or nothing."""
    try:
        for name, code in built.items():
            _save(fd, _entry(name, arch, keys[name]), keys[name], code)
        _prune(fd)
    except OSError as error:
        return f"the cache cannot be written: {error.strerror}"
    return ""


def _save(fd: int, entry: str, key: bytes, code: bytes) -> None:
    aside = f".{entry}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(aside, flags, 0o600, dir_fd=fd)
    try:
        with open(file, "wb") as out:
            out.write(HEADER.pack(MAGIC, key, len(code), hashlib.sha256(code).digest()))
            out.write(code)
        os.rename(aside, entry, src_dir_fd=fd, dst_dir_fd=fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside, dir_fd=fd)
        raise


def _prune(fd: int) -> None:
    """Delete all but the newest entries, and what dead writers left; nothing else is touched."""
    entries = []
    now = time.time()
    for name in os.listdir(fd):
        entry = ENTRY.fullmatch(name)
        if not entry and not ASIDE.fullmatch(name):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            changed = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime
            if entry:
                entries.append((changed, name))
            elif now - changed > ASIDE_AGE_S:
                os.unlink(name, dir_fd=fd)
    for _, name in sorted(entries)[:-ENTRIES_KEPT]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
