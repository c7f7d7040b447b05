"""Where a store may lie: a folder of a local file system, reached without a link at its end."""

from __future__ import annotations

import os
import stat
from typing import Any

from kalos_ctx._reader import StoreReader
from kalos_ctx.errors import (
    InvalidArgument,
    InvalidType,
    NotAStore,
    StoreIOError,
    StoreNotFound,
)

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "lustre", "gpfs"}
)
# What a crash may leave of a store that was never whole.
UNFINISHED = frozenset({"lock", "control.new", "gen-000000"})


def absolute_path(path: Any) -> str:
    """Return a path as an absolute str.

    Raises
    ------
    InvalidArgument, InvalidType
    """
    try:
        folder = os.fspath(path)
    except TypeError:
        raise InvalidType(f"path must be a path (got {type(path).__name__})") from None
    folder = os.fsdecode(folder)
    if not folder or "\0" in folder:
        raise InvalidArgument("path must not be empty and must not hold NUL")
    try:
        os.fsencode(folder)
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"path has a lone surrogate at position {e.start}") from None
    return os.path.abspath(folder)


def checked_path(path: Any, mode: str) -> str:
    """Return the store's folder; what is not a folder of this machine is refused.

    Raises
    ------
    StoreNotFound
        Nothing is there, and the mode is "r".
    NotAStore
        A file, a link, a FIFO, a device, or a network file system.
    StoreIOError, InvalidArgument, InvalidType
    """
    folder = absolute_path(path)
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        if mode == "r":
            raise StoreNotFound("there is no store at the path") from None
        refuse_network(folder)
        return folder
    except OSError as e:
        raise StoreIOError(e.errno, f"cannot look at the path: {e.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise NotAStore("the path is a file, a link, a FIFO or a device; a store is a directory")
    refuse_network(folder)
    return folder


def refuse_network(folder: str) -> None:
    """Raise where a folder lies, or would lie, on a network file system."""
    # A folder's own path may pass through links; the kernel's list of mounts knows none.
    if file_system(os.path.realpath(folder)) in NETWORK_FILE_SYSTEMS:
        raise NotAStore("the path lies on a network file system, where mappings are not coherent")


def file_system(folder: str) -> str:
    """Return the type of the file system a path lies on, empty where it is not known."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split(" ")
                where = _unescaped(fields[1])
                inside = folder == where or folder.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(best):
                    best, kind = where, fields[2]
    except OSError:
        return ""
    return kind


def _unescaped(where: str) -> str:
    """A mount point; the list writes space, tab, newline and backslash in octal."""
    for octal, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        where = where.replace(f"\\{octal}", character)
    return where


def open_reader(folder: str) -> StoreReader:
    """Open a store's core for reading.

    Raises
    ------
    StoreNotFound, NotAStore, StoreCorrupt, FormatVersionError, StoreIOError
    """
    try:
        names = os.listdir(folder)
    except OSError as e:
        raise StoreIOError(e.errno, f"cannot read the store's folder: {e.strerror}") from None
    if "control" not in names:
        if UNFINISHED.issuperset(names):
            raise StoreNotFound("there is no store at the path")
        raise NotAStore("the folder has no control file", "control", 0)
    return StoreReader(folder)
