"""Vector rows on a device as tests make them and look at them."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kalos_ctx._device_rows import DeviceRows
from kalos_ctx._row_source import newest_rows

PLACE = np.dtype([("pos", "<u8"), ("tokens", "<u4"), ("crc", "<u4")])


def newest(store):
    """Return the rows that a store has published."""
    return newest_rows(store._core)


def vectors(count, dim, seed=0):
    """Return random vectors, float32 of shape (count, dim)."""
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


@contextmanager
def opening_rows(memory):
    """Give what opens the rows of a store on the device; all are closed at the end."""
    kept = []

    def open_rows(store, **options):
        kept.append(DeviceRows.open(memory.device, newest(store), **options))
        return kept[-1]

    yield open_rows
    for rows in kept:
        rows.close()


def on_device(memory, rows):
    """Return everything that the device has of the rows, as arrays."""
    n, value = rows.num_rows, np.dtype(np.float16 if rows.half else np.float32)
    packed = memory.read(rows.dead, np.uint8, (n + 7) // 8)
    return SimpleNamespace(
        rows=memory.read(rows.base, value, n * rows.stride_nbytes // value.itemsize).reshape(n, -1),
        factors=memory.read(rows.factors, np.float32, n),
        places=memory.read(rows.places, PLACE, n),
        dead=np.unpackbits(packed, bitorder="little")[:n].astype(bool),
    )


def dead_rows(memory, rows):
    """Return the numbers of the rows whose bit is set on the device."""
    return np.flatnonzero(on_device(memory, rows).dead).tolist()


def tokens_at(store, place):
    """Return the token IDs at a place, read from the store's files."""
    pos, first = int(place["pos"]), int(place["pos"]) & 0xFFFFFFFF
    ids = np.fromfile(next(Path(store.path).glob(f"gen-*/tok-{pos >> 32:06d}")), "<i4")
    return ids[first : first + int(place["tokens"])].tolist()
