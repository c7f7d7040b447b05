"""LMDB and SQLite as stores of token IDs: one blob a session, or one row a turn."""

from __future__ import annotations

import os
import sqlite3
import threading

import numpy as np

from rivals.chats import BUDGET, whole_turns
from rivals.measure import no_lap
from rivals.road import MissingRival, Road, installed

BLOB_NOTE = "one value a session, rewritten whole at every append"
TAIL_NBYTES = 4 * BUDGET + 4  # one ID more than fits shows that the budget cuts


def taken(rows):
    """Join the newest rows that fit the budget; `rows` come newest first."""
    kept, left = [], 4 * BUDGET
    for row in rows:
        left -= len(row)
        if left < 0:
            break
        kept.append(row)
    return b"".join(reversed(kept))


class LmdbRoad(Road):
    """LMDB without syncs, so that an append survives the process and not the machine."""

    group = "ids"

    def __init__(self, folder, *, rows):
        try:
            import lmdb
        except ImportError as error:
            raise MissingRival("lmdb") from error
        self.rows = rows
        self.name = "LMDB, a row a turn" if rows else "LMDB, a blob a session"
        self.note = "" if rows else BLOB_NOTE
        self.env = lmdb.open(
            os.path.join(folder, f"lmdb-{rows}"), map_size=1 << 33, sync=False, max_readers=512
        )
        self.next = {}

    def fill(self, chat):
        name = chat.name.encode()
        with self.env.begin(write=True) as txn:
            if self.rows:
                for i, (_, ids) in enumerate(chat):
                    txn.put(name + b"\0" + i.to_bytes(8, "big"), ids.tobytes(), append=False)
                self.next[chat.name] = chat.turns
            else:
                txn.put(name, chat.blob().tobytes())

    def window(self, session, lap=no_lap):
        with self.env.begin(buffers=True) as txn:
            if self.rows:
                ids = np.frombuffer(taken(self._newest_first(txn, session)), np.int32)
                lap("read")
                return ids
            ids = np.frombuffer(txn.get(session.encode())[-TAIL_NBYTES:], np.int32)
            lap("read")
            ids = whole_turns(ids).copy()  # the map is not ours once the transaction ends
            lap("cut and copy")
            return ids

    @staticmethod
    def _newest_first(txn, session):
        start = session.encode() + b"\0"
        cursor = txn.cursor()
        if not cursor.set_range(session.encode() + b"\1"):
            cursor.last()
        else:
            cursor.prev()
        while True:
            key, value = cursor.item()
            if bytes(key[: len(start)]) != start:
                return
            yield value
            if not cursor.prev():
                return

    def append(self, session, message, ids):
        name = session.encode()
        with self.env.begin(write=True) as txn:
            if self.rows:
                seq = self.next[session]
                txn.put(name + b"\0" + seq.to_bytes(8, "big"), ids.tobytes())
                self.next[session] = seq + 1
            else:
                txn.put(name, txn.get(name) + ids.tobytes())

    def close(self):
        self.env.close()


class SqliteRoad(Road):
    """SQLite in WAL mode without syncs, a connection a thread."""

    group = "ids"

    def __init__(self, folder, *, rows):
        if not rows and not hasattr(sqlite3.Connection, "blobopen"):
            raise MissingRival("sqlite3's blobopen (Python 3.11)")
        self.rows = rows
        self.name = "SQLite, a row a turn" if rows else "SQLite, a blob a session"
        self.note = "" if rows else BLOB_NOTE
        self.path = os.path.join(folder, f"ids-{rows}.sqlite")
        self.own = threading.local()
        self.lock, self.opened = threading.Lock(), []
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute(
            "CREATE TABLE turns (session TEXT, seq INTEGER, ids BLOB, PRIMARY KEY (session, seq))"
            " WITHOUT ROWID"
            if rows
            else "CREATE TABLE sessions (number INTEGER PRIMARY KEY, session TEXT UNIQUE, ids BLOB)"
        )
        self.next = {}

    @property
    def db(self):
        found = getattr(self.own, "db", None)
        if found is None:
            found = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            found.execute("PRAGMA synchronous=OFF")
            found.execute("PRAGMA mmap_size=1073741824")
            self.own.db = found
            with self.lock:
                self.opened.append(found)
        return found

    def fill(self, chat):
        self.db.execute("BEGIN")
        if self.rows:
            self.db.executemany(
                "INSERT INTO turns VALUES (?, ?, ?)",
                ((chat.name, i, ids.tobytes()) for i, (_, ids) in enumerate(chat)),
            )
            self.next[chat.name] = chat.turns
        else:
            self.db.execute(
                "INSERT INTO sessions (session, ids) VALUES (?, ?)",
                (chat.name, chat.blob().tobytes()),
            )
        self.db.execute("COMMIT")

    def window(self, session, lap=no_lap):
        if self.rows:
            found = self.db.execute(
                "SELECT ids FROM turns WHERE session = ? ORDER BY seq DESC", (session,)
            )
            ids = np.frombuffer(taken(row[0] for row in found), np.int32)
            found.close()
            lap("read")
            return ids
        number = self.db.execute(
            "SELECT number FROM sessions WHERE session = ?", (session,)
        ).fetchone()[0]
        with self.db.blobopen("sessions", "ids", number, readonly=True) as blob:
            blob.seek(max(0, len(blob) - TAIL_NBYTES))
            raw = blob.read()
        lap("read")
        ids = whole_turns(np.frombuffer(raw, np.int32))
        lap("cut")
        return ids

    def append(self, session, message, ids):
        if self.rows:
            seq = self.next[session]
            self.db.execute("INSERT INTO turns VALUES (?, ?, ?)", (session, seq, ids.tobytes()))
            self.next[session] = seq + 1
        else:
            # Not `ids || ?`, which would make text of it.
            old = self.db.execute(
                "SELECT ids FROM sessions WHERE session = ?", (session,)
            ).fetchone()[0]
            self.db.execute(
                "UPDATE sessions SET ids = ? WHERE session = ?", (old + ids.tobytes(), session)
            )

    def close(self):
        for one in self.opened:
            one.close()


def store_roads(folder):
    """Both stores, both layouts."""
    return installed(
        *(
            lambda kind=kind, rows=rows: kind(folder, rows=rows)
            for kind in (LmdbRoad, SqliteRoad)
            for rows in (False, True)
        )
    )
