"""Plain records that public calls return."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing.

    Attributes
    ----------
    items : list of str or bytes
        `bytes` where a name is not UTF-8.
    cursor : str or None
        Give it to the next call; None at the end.
    """

    items: list[str | bytes]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class ErasureReceipt:
    """What an erasure removed.

    Attributes
    ----------
    counts : dict of str to int
        `turns`, `vectors`, `summaries`, `segments`, `passages`.
    digest : str
        SHA-256, in hex, over the store, the log position and what was removed.
    """

    counts: dict[str, int]
    digest: str


@dataclass(frozen=True, slots=True)
class Flaw:
    """One place where a file does not hold what its checksum says."""

    file: str
    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes
    ----------
    errors : list of Flaw
    checked : dict of str to int
        Records, turns, passages, vectors and bytes that were read.
    """

    errors: list[Flaw] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.errors


@dataclass(frozen=True, slots=True)
class Hits:
    """Recalled rows, best first; for several queries one after the other.

    Attributes
    ----------
    ids : uint64 array of shape (H,)
        Passage IDs; for a session's own turns the seq.
    scores : float32 array of shape (H,)
        Larger is better.
    counts : int64 array of shape (num_queries,)
        Hits of each query.
    sources : tuple of str, one a hit
        Name of the collection, or `"session"`.
    reason : str or None
        Why nothing could be recalled (`"zero_query"`), None otherwise.
    """

    ids: NDArray[np.uint64]
    scores: NDArray[np.float32]
    counts: NDArray[np.int64]
    sources: tuple[str, ...] = ()
    reason: str | None = None

    def __len__(self) -> int:
        return len(self.ids)
