"""SQLite files that others wrote, opened for reading alone; nothing appears beside them.

A file is not trusted: views, triggers and functions that it brings along are not used.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from kalos_ctx.chat_files import Refused
from kalos_ctx.found_chats import SourceUnavailable

MAGIC = b"SQLite format 3\0"
HEAD_NBYTES = 20
WAL_VERSIONS = b"\2\2"  # bytes 18 and 19 of a file with a write-ahead log


def is_sqlite(path: str | os.PathLike[str]) -> bool:
    """Say whether a file begins as SQLite files do; nothing is read from a pipe.

    Raises
    ------
    OSError
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@contextmanager
def opened_database(path: str | os.PathLike[str]) -> Iterator[Database]:
    """Open a file for reading.

    Raises
    ------
    SourceUnavailable
        It is no SQLite file, is damaged, or was written to while it was read.
    OSError
    """
    name = os.path.abspath(path)
    with open(name, "rb") as file:
        head = file.read(HEAD_NBYTES)
        before = os.fstat(file.fileno())
    if not head.startswith(MAGIC):
        raise SourceUnavailable("this is no SQLite file; give another --format")
    # SQLite makes files beside one that has a write-ahead log, even for a reader, unless it may
    # take the file as one that nobody writes; whether somebody did is looked at in the end.
    quiet = head[18:] == WAL_VERSIONS and not os.path.exists(f"{name}-wal")
    how = "immutable=1" if quiet else "mode=ro"
    try:
        connection = sqlite3.connect(f"file:{quote(os.fsencode(name))}?{how}", uri=True)
    except sqlite3.Error as error:
        raise SourceUnavailable(f"the SQLite file cannot be opened: {error}") from None
    try:
        yield Database(connection)
    finally:
        connection.close()
    after = os.stat(name)
    if quiet and (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
        raise SourceUnavailable("the SQLite file was written to while it was read; import it again")


class Database:
    """An open file. Text comes as bytes, since it may be no UTF-8."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.text_factory = bytes
        self.rows("PRAGMA trusted_schema = OFF")
        self.rows("PRAGMA cell_size_check = ON")
        tables = self.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        self._columns = {
            table: {row[1] for row in self.rows(f"PRAGMA table_info({quoted(table)})")}
            for (table,) in tables
        }

    def tables_with(self, columns: frozenset[str]) -> list[str]:
        """Return the tables that have these columns, quoted for a query."""
        raw = {name.encode() for name in columns}
        return [quoted(name) for name, found in self._columns.items() if raw <= found]

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query.

        Raises
        ------
        SourceUnavailable
        """
        try:
            return self._connection.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            # Of a damaged file even SQLite's message may be no UTF-8.
            what = "" if isinstance(error, UnicodeDecodeError) else f": {error}"
            raise SourceUnavailable(f"the SQLite file cannot be read{what}") from None


def quoted(name: bytes) -> str:
    """Return a table's name for a query."""
    return '"' + name.decode("utf-8", "replace").replace('"', '""') + '"'


def text_of(value: Any) -> str:
    """Return a text column's value; a number as text.

    Raises
    ------
    Refused
        It is no text, or not UTF-8.
    """
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, bytes):
        raise Refused("a column that should hold text holds none")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"a text of the SQLite file is not UTF-8 (byte {error.start})") from None
