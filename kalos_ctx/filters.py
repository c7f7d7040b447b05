"""Filters over the metadata of passages and turns: checked, then answered from an inverted index.

A filter maps fields to a value or to several values. An entry passes where every field matches; a
field matches where the entry's metadata has it and its value is one of those asked for. Fields are
the top-level names of the metadata, compared whole, whatever they look like. Values compare as JSON
values: 1 and 1.0 are one number, True is no number, "1" is no number, None is null and is not the
same as a missing field. Where the stored value is a list, one of its elements must match. Stored
mappings, and lists in lists, match nothing.
"""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.errors import InvalidArgument, InvalidType, StoreCorrupt, UnknownField

ENTRY_DEAD = 1
POSTINGS_KEPT = 16_000_000

# A field and the keys of the values it may have.
Checked = tuple[tuple[str, tuple[Any, ...]], ...]


class _Constant:
    """Stand for true, false or null, which would equal 1, 0 or be no key at all."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_CONSTANTS = {True: _Constant("true"), False: _Constant("false")}
_NULL = _Constant("null")


def _key(value: Any) -> Any:
    """What two equal JSON scalars share; ValueError for anything else."""
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return _CONSTANTS[value]
    if isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError


def checked(filters: Any) -> Checked | None:
    """Bring a filter into a form that can be compared and hashed.

    Parameters
    ----------
    filters : mapping of str to value or list of values, or None
        Values are str, int, float, bool or None. A list, tuple or set matches any of its values,
        an empty one matches nothing.

    Returns
    -------
    tuple, or None
        None where nothing is asked.

    Raises
    ------
    InvalidArgument, InvalidType
    """
    if filters is None:
        return None
    if not isinstance(filters, Mapping):
        raise InvalidType(f"filters must be a mapping (got {type(filters).__name__})")
    out = []
    for place, (field, wanted) in enumerate(filters.items()):
        if not isinstance(field, str):
            raise InvalidType(f"filters: a field must be a str (got {type(field).__name__})")
        values = wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
        keys = []
        for value in values:
            plain = value.item() if isinstance(value, np.generic) else value
            try:
                keys.append(_key(plain))
            except ValueError:
                if isinstance(plain, float):
                    raise InvalidArgument(
                        f"filters: a number must be finite (field {place})"
                    ) from None
                raise InvalidType(
                    "filters: a value must be a str, int, float, bool, None, or a list of them "
                    f"(field {place} has {type(plain).__name__})"
                ) from None
        out.append((field, tuple(dict.fromkeys(keys))))
    return tuple(out) or None


class FieldIndex:
    """Which entries of one slot have a field, and with which value.

    Attributes
    ----------
    count : int
        Entries that were looked at.
    num_postings : int
        What it holds, in entries of lists: 4 bytes each, and about 100 for each distinct value.
    """

    def __init__(self) -> None:
        self.count = 0
        self.epoch = -1
        self.num_postings = 0
        self._fields: dict[str, tuple[array[int], dict[Any, array[int]]]] = {}

    def add(self, seq: int, metadata: Mapping[str, Any]) -> None:
        """Take in one entry; seqs ascend."""
        for field, value in metadata.items():
            known = self._fields.get(field)
            if known is None:
                known = self._fields[field] = (array("I"), {})
            holders, by_value = known
            holders.append(seq)
            keys = set()
            for one in value if isinstance(value, list) else [value]:
                try:
                    keys.add(_key(one))
                except ValueError:
                    continue
            for key in keys:
                by_value.setdefault(key, array("I")).append(seq)
            self.num_postings += 1 + len(keys)

    def has(self, field: str) -> bool:
        """Whether any entry has a field."""
        return field in self._fields

    def holders(self, field: str) -> NDArray[np.uint32]:
        """Return the seqs of the entries that have a field, ascending."""
        known = self._fields.get(field)
        return _seqs(None if known is None else known[0])

    def passing(self, wanted: Checked) -> NDArray[np.uint32]:
        """Return the seqs of the entries that pass a filter, ascending."""
        found: NDArray[np.uint32] | None = None
        for field, keys in wanted:
            known = self._fields.get(field)
            lists = [] if known is None else [known[1][key] for key in keys if key in known[1]]
            here = _seqs(None)
            if len(lists) == 1:
                here = _seqs(lists[0])
            elif lists:
                here = np.unique(np.concatenate([_seqs(one) for one in lists]))
            found = here if found is None else np.intersect1d(found, here, assume_unique=True)
        return _seqs(None) if found is None else found


def _seqs(values: array[int] | None) -> NDArray[np.uint32]:
    # A copy: an array that numpy looks into could not grow any more.
    return np.array(values if values is not None else (), np.uint32)


class MetadataIndexes:
    """Inverted indexes of the slots that were filtered, made at first use and extended.

    The indexes of the longest unused slots go where all together hold more than `POSTINGS_KEPT`.

    Parameters
    ----------
    core : StoreReader
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._lock = threading.RLock()
        self._slots: dict[int, FieldIndex] = {}
        self._generation = -1

    def passing(self, slots: Iterable[int], wanted: Checked) -> dict[int, NDArray[np.uint32]]:
        """Return the seqs of the entries that pass a filter, by slot, ascending.

        Raises
        ------
        UnknownField
            No entry of the slots has a field of the filter.
        StoreCorrupt
        """
        with self._lock:  # an index may not grow while it is read
            indexes = {slot: self.of(slot) for slot in slots}
            require_known(wanted, list(indexes.values()))
            return {slot: index.passing(wanted) for slot, index in indexes.items()}

    def of(self, slot_off: int) -> FieldIndex:
        """Return the index of a slot, up to its present entries. It goes on growing."""
        with self._lock:
            if self._core.generation != self._generation:
                self._slots.clear()
            self._generation = self._core.generation
            known = self._followed(self._slots.pop(slot_off, FieldIndex()), slot_off)
            if self._core.generation != self._generation:
                # The store moved to other files meanwhile. The caller notices too, and asks again.
                return known
            self._slots[slot_off] = known
            total = sum(one.num_postings for one in self._slots.values())
            while total > POSTINGS_KEPT and len(self._slots) > 1:
                total -= self._slots.pop(next(iter(self._slots))).num_postings
            return known

    def _followed(self, index: FieldIndex, slot_off: int) -> FieldIndex:
        columns = self._core.entry_columns(slot_off, index.count)
        epoch = columns[5]
        if epoch != index.epoch and index.count:
            # Entries went or changed. What is left is indexed anew, so that nothing of them stays.
            index = FieldIndex()
            columns = self._core.entry_columns(slot_off, 0)
            epoch = columns[5]
        index.epoch = epoch
        for seq, lsn, flags in zip(
            columns[4].tolist(), columns[2].tolist(), columns[3].tolist(), strict=True
        ):
            if not flags & ENTRY_DEAD:
                metadata = self._metadata(slot_off, seq, lsn)
                if metadata:
                    index.add(seq, metadata)
        index.count += len(columns[4])
        return index

    def _metadata(self, slot_off: int, seq: int, lsn: int) -> Mapping[str, Any] | None:
        try:
            raw = self._core.metadata_at(lsn)
            found: Mapping[str, Any] | None = None if raw is None else json.loads(raw)
        except (StoreCorrupt, ValueError):
            # It may have been deleted since its flags were read.
            if self._core.entry_columns(slot_off, seq)[3][:1].tolist() == [ENTRY_DEAD]:
                return None
            raise
        return found


def require_known(wanted: Checked, indexes: list[FieldIndex]) -> None:
    """Raise UnknownField where a filter names a field that no entry has."""
    for place, (field, _) in enumerate(wanted):
        if not any(index.has(field) for index in indexes):
            raise UnknownField(
                f"filters: no passage of the collections has field {place} (of {len(wanted)}); "
                "fields are the top-level names of the metadata"
            )
