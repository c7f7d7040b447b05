"""Recall on the CPU, over the rows where they lie in the store's files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kalos_ctx import arguments, filters
from kalos_ctx._cpu_ops import MAX_HITS
from kalos_ctx._store_scan import StoreScan, lower_bound
from kalos_ctx.backends.combining import Combiner
from kalos_ctx.errors import (
    InvalidType,
    SessionExpired,
    SessionNotFound,
    StoreCorrupt,
    StoreIOError,
)
from kalos_ctx.types import Hits

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from kalos_ctx._store_scan import Hit, Scope
    from kalos_ctx._vectors import Runs
    from kalos_ctx.store import SessionStore

SESSION_SOURCE = "session"
# Of `StoreScan.passages`.
Found = tuple[Any, Any, Any, list[tuple[int, int, bool]], list[int], Any, list[int], int]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a recall found.

    Attributes
    ----------
    hits : Hits
    places : list of (int, int, bool)
        For each hit: its slot's offset in the index, its seq there, whether it is a turn.
    generation : int
        Of the store's files, in which the places hold.
    path : str or None
        How recall ran where it was not the backend's own way: ``"cpu_recall"``.
    """

    hits: Hits
    places: list[tuple[int, int, bool]]
    generation: int
    path: str | None = None


class CpuBackend:
    """Exact recall from a store, without a GPU.

    Thread-safe; scans release the GIL and share the process's helper threads. Rows that other
    threads or processes add or delete are seen by the next call.

    Parameters
    ----------
    store : SessionStore
        Reader or writer.
    """

    name = "cpu"

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._core = store._core
        self._scan = self._new_scan()
        self._metadata = filters.MetadataIndexes(self._core)
        self.combiner: Combiner | None = None

    def _new_scan(self) -> StoreScan:
        return StoreScan(self._core)

    def recall(
        self,
        query: ArrayLike,
        *,
        tenant: bytes = b"",
        top_k: int,
        collections: tuple[bytes, ...] = (),
        session: bytes | None = None,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
        as_of: int | None = None,
    ) -> Recalled:
        """Find the passages, and the session's own turns, that score best.

        Parameters
        ----------
        query : float array-like of shape (D,) or (B, D)
            Rounded to float32. Under cosine a zero query recalls nothing, and `hits.reason` says
            `"zero_query"`.
        tenant : bytes
            Nothing of another tenant is looked at.
        top_k : int
            Most hits a query, 0 to 1,024.
        collections : tuple of bytes
            Whose passages are searched. One that has no passage yet gives none.
        session : bytes, optional
            Whose own turns with vectors are searched too. Expired ones are left out.
        min_score : float, optional
            Inclusive; None for no bound.
        filters : mapping, optional
            Metadata field to value or list of values, as `kalos_ctx.filters` says. They apply to
            the session's turns as well.
        as_of : int, optional
            Only turns with a smaller seq.

        Returns
        -------
        Recalled
            Exactly min(top_k, rows that pass) hits a query, by score, then by ID; of a turn and a
            passage with one ID the passage stands first.

        Raises
        ------
        DimensionMismatch, NonFiniteVector, UnknownField, SessionNotFound, SessionExpired,
        StoreCorrupt, StoreClosed, InvalidArgument, InvalidType
        """
        k = arguments.whole(top_k, "top_k", 0, MAX_HITS)
        names = _names(collections)
        bound = lower_bound(min_score)
        wanted = _checked(filters)
        if as_of is not None:
            as_of = arguments.whole(as_of, "as_of")
        if (
            session is None
            and wanted is None
            and type(query) is np.ndarray
            and query.ndim in (1, 2)
        ):
            return Recalled(*self.passages(tenant, names, query, k, bound))
        prepared, zero = self._scan.prepare(query)
        for tries in itertools.count():
            generation = self._core.generation
            try:
                scopes = self._scopes(tenant, names, session, wanted, as_of)
            except (StoreCorrupt, StoreIOError):
                # The files of a generation that was left may be gone.
                if generation == self._core.generation:
                    raise
                continue
            found = [
                self._scan.best(scope, runs, prepared, zero, k, bound, tries)
                for scope, runs in scopes
            ]
            # None: rows were erased or the store moved to other files meanwhile.
            if None not in found and generation == self._core.generation:
                break
        hits = cast("list[list[list[Hit]]]", found)
        ranked = [_merged(hits, query, k) for query in range(len(prepared))]
        return _recalled(scopes, ranked, zero, generation)

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Make the first recall as fast as the next: nothing to do, rows lie in mapped files."""

    def close(self) -> None:
        """Nothing to give back."""

    def passages(
        self,
        tenant: bytes,
        names: tuple[bytes, ...],
        query: NDArray[Any],
        k: int,
        bound: float = -math.inf,
    ) -> tuple[Hits, list[tuple[int, int, bool]], int]:
        """Find passages without a filter: the most frequent recall, in few steps.

        Parameters
        ----------
        tenant : bytes
        names : tuple of bytes
            Collections, each once.
        query : array of shape (D,) or (B, D)
        k : int
            0 to 1,024.
        bound : float
            Least score.

        Returns
        -------
        hits, places, generation
            As `Recalled` has them.
        """
        if self.combiner is not None and query.ndim == 1:
            self._scan.prepare(query)  # whose own error it is
            row = np.asarray(query, np.float32)
            found: Found = self.combiner((tenant, names, k, bound, len(row)), row)
        else:
            found = self._scan.passages(tenant, names, query, k, bound)
        return self._told(found)

    def combine(self) -> None:
        """Let recalls that several threads ask for at a time go together."""
        self.combiner = Combiner(self._scan_together)

    def _scan_together(
        self, key: tuple[bytes, tuple[bytes, ...], int, float, int], queries: NDArray[np.float32]
    ) -> list[Found]:
        tenant, names, k, bound, _ = key
        found = self._scan.passages(tenant, names, queries, k, bound)
        ids, scores, counts, places, owners, scope, zero, generation = found
        ends = np.cumsum(counts).tolist()
        apart = []
        for row, end in enumerate(ends):
            own = slice(ends[row - 1] if row else 0, end)
            none = [0] if row in zero else []
            apart.append(
                (ids[own], scores[own], counts[row : row + 1], places[own], owners[own], scope,
                 none, generation)
            )  # fmt: skip
        return apart

    def _told(self, found: Found) -> tuple[Hits, list[tuple[int, int, bool]], int]:
        """Hits with the names of their collections."""
        ids, scores, counts, places, owners, scope, zero, generation = found
        count = len(places)
        names = scope.names
        if len(names) == 1:
            sources = (arguments.name_out(names[0]),) * count
        else:
            labels = [arguments.name_out(name) for name in names]
            sources = tuple([labels[owner] for owner in owners])
        reason = "zero_query" if zero else None
        hits = Hits(ids, scores, counts, cast("tuple[str, ...]", sources), reason)
        return hits, places, generation

    def _scopes(
        self,
        tenant: bytes,
        names: tuple[bytes, ...],
        session: bytes | None,
        wanted: filters.Checked | None,
        as_of: int | None,
    ) -> list[tuple[Scope, Runs]]:
        """What is scanned: each scope with those of its rows that pass."""
        scopes = []
        if names:
            scope = self._scan.collections(tenant, names)
            scopes.append((scope, scope.runs))
        if session is not None:
            own = self._scan.session(tenant, session)
            if own is None:
                raise SessionNotFound("there is no such session in this tenant")
            scopes.append((own, self._own_turns(own, tenant, session, as_of)))
        if wanted is None:
            return scopes
        slots = [slot for scope, _ in scopes for slot in scope.slots]
        passing = self._metadata.passing(slots, wanted)
        return [(scope, scope.filtered(runs, passing)) for scope, runs in scopes]

    def _own_turns(self, scope: Scope, tenant: bytes, session: bytes, as_of: int | None) -> Runs:
        """The session's turns before `as_of` that have not expired."""
        runs = scope.runs
        now = self._store._clock()
        expired = [seq for seq, at in scope.expiries.items() if at <= now]
        if expired:
            state = self._core.slot_state(1, tenant, session)
            if state and state["expires_at"] is not None and state["expires_at"] <= now:
                raise SessionExpired("every turn of the session has expired")
        if as_of is None and not expired:
            return runs
        seqs: NDArray[np.uint32] = runs.every_seq()
        if as_of is not None:
            seqs = seqs[seqs < as_of]
        if expired:
            seqs = seqs[~np.isin(seqs, np.array(expired, np.uint32))]
        return runs.picked(seqs)


def _names(collections: Any) -> tuple[bytes, ...]:
    if type(collections) is tuple and len(collections) == 1 and type(collections[0]) is bytes:
        return (arguments.name_bytes(collections[0], "collections"),)
    if isinstance(collections, str | bytes) or not hasattr(collections, "__iter__"):
        raise InvalidType("collections must be a sequence of names")
    return tuple(dict.fromkeys(arguments.name_bytes(name, "collections") for name in collections))


def _checked(wanted: Any) -> filters.Checked | None:
    return filters.checked(wanted)


def _merged(found: list[list[list[Hit]]], query: int, k: int) -> list[tuple[Hit, int]]:
    """The best hits of one query over all scopes, each with its scope's place."""
    # Passages come before turns, and the sort is stable.
    ranked = [(hit, at) for at, hits in enumerate(found) for hit in hits[query]]
    if len(found) > 1:
        ranked.sort(key=lambda one: (-one[0][0], one[0][1]))
        del ranked[k:]
    return ranked


def _recalled(
    scopes: list[tuple[Scope, Runs]],
    ranked: list[list[tuple[Hit, int]]],
    zero: list[int],
    generation: int,
) -> Recalled:
    ids: list[int] = []
    scores: list[float] = []
    sources: list[str | bytes] = []
    places: list[tuple[int, int, bool]] = []
    labels = [
        [SESSION_SOURCE if scope.turns else arguments.name_out(name) for name in scope.names]
        for scope, _ in scopes
    ]
    for hits in ranked:
        for (score, entry_id, slot, seq, owner), at in hits:
            scores.append(score)
            ids.append(entry_id)
            sources.append(labels[at][owner])
            places.append((slot, seq, scopes[at][0].turns))
    found = Hits(
        ids=np.array(ids, np.uint64),
        scores=np.array(scores, np.float32),
        counts=np.array([len(hits) for hits in ranked], np.int64),
        sources=cast("tuple[str, ...]", tuple(sources)),
        reason="zero_query" if zero else None,
    )
    return Recalled(found, places, generation)
