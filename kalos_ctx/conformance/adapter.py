"""What a store or an assembler shows to the cases: `Candidate`, and what it is opened with.

Two calls are needed, `append` and `assemble`. Everything else is optional: a candidate names what
it can do in `capabilities`, and a case that needs more is reported as not applicable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

# Capability: what a candidate promises with it.
CAPABILITIES: Mapping[str, str] = {
    "token_limit": "`assemble(max_tokens=n)` bounds the window in tokens",
    "turn_limit": "`assemble(max_turns=n)` bounds the window in turns",
    "reserve": "`assemble(reserve=n)` keeps room for the reply",
    "partial": "`assemble(partial=True)` may cut the oldest kept turn",
    "start_on": "`assemble(start_on=role)` begins the history on a role",
    "alternation": "`assemble(alternation=...)` merges or refuses turns in a row of one role",
    "constant_cost": "a window costs the same whatever the length of the history",
    "groups": "a call and its results are told by `group`, `calls` and `call`",
    "bare_results": "results without a call's name bind to the nearest earlier call",
    "pin": "`pin` sets a segment that stands at the head of every window",
    "volatile": "`pin(volatile=True)` marks a segment that changes often",
    "summaries": "`summarize` lets a text stand for turns",
    "report": "`report` says what stands in the latest window and why the rest does not",
    "read": "`turns` gives back what was stored",
    "listing": "`sessions` lists the sessions in pages",
    "metadata": "`append(metadata=...)` is kept with the turn",
    "timestamps": "`append(created_at=...)` sets the time of a turn",
    "rollback": "`rollback` takes the newest turns back",
    "reopen": "what was stored is there when the folder is opened again",
    "readers": "another process reads while this one has the store open",
    "writers": "several processes append at once",
    "threads": "several threads use one candidate",
    "tenants": "`tenant=` separates what belongs to whom",
    "delete": "`delete` removes a session",
    "delete_tenant": "`delete_tenant` removes all that a tenant has",
    "erase_bytes": "what was deleted is gone from the bytes of the files",
    "ttl": "`append(ttl=seconds)` lets a turn expire by the clock of the set-up",
    "recall": "`add_passages`, `recall`, and `assemble(query=...)`",
    "filters": "`recall(filters=...)` compares fields of the metadata",
    "min_score": "`recall(min_score=...)` drops what scores less",
    "delete_passages": "`delete_passages` removes single passages",
    "vocabulary": "IDs outside `Setup.vocab_size` are refused",
    "control_ids": "`Setup.control_ids` never stand in a user's content",
    "batches": "`batch` gives several windows as one, packed or padded",
    "block_keys": "`block_keys` names the blocks of a window for a prefix cache",
    "stable_prefix": "a cut moves seldom, so that a prefix cache stays warm",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a factory makes a candidate of.

    Attributes
    ----------
    folder : Path
        Is there; empty at first. Nothing is to be written outside it.
    read_only : bool
        Open what is there for reading, while another has it open.
    vocab_size : int, optional
        IDs lie below it.
    control_ids : tuple of int
        IDs that only the framing of turns may write.
    clock : callable
        Gives the time in seconds; cases move it.
    """

    folder: Path
    read_only: bool = False
    vocab_size: int | None = None
    control_ids: tuple[int, ...] = ()
    clock: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as the store gives it back."""

    role: str
    token_ids: list[int]
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class WindowReport:
    """What a candidate says about its latest window.

    Attributes
    ----------
    dropped : dict of int to str
        Position of a turn in the session to the reason why it is not in the window.
    group_reason : str or None
        The reason that stands for "its call went".
    by_segment : dict of str to int
        Tokens by part of the window; they add up to its length.
    trimmed : bool
        Whether something of the history is missing.
    """

    dropped: Mapping[int, str] = field(default_factory=dict)
    group_reason: str | None = None
    by_segment: Mapping[str, int] = field(default_factory=dict)
    trimmed: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Several windows as one.

    Attributes
    ----------
    token_ids : list of int, or of lists of int
        One after the other where packed, else rows of one length.
    starts : list of int
        Where each row of a packed batch begins, and the end of the last.
    positions : as `token_ids`
    mask : list of lists of int
        1 for a token, 0 for padding; empty where packed.
    """

    token_ids: list[Any]
    positions: list[Any]
    starts: list[int] = field(default_factory=list)
    mask: list[list[int]] = field(default_factory=list)


class Candidate:
    """A store with an assembler, as the cases see it. Derive from it.

    Attributes
    ----------
    name, version : str
        What stands over its column.
    settings : str
        One line: which options of it are used.
    capabilities : frozenset of str
        Keys of `CAPABILITIES`.
    not_claimed : mapping of str to str
        Cases that it does not claim to handle, with the reason.
    refusals : tuple of exception classes
        What it raises on purpose. A case that asks for a refusal takes only these.
    low_water : float
        In (0, 1]: the share of the budget that a cut leaves, as documented.

    Notes
    -----
    Token IDs are ints from 0 up. A store of text writes them as numbers with spaces between, and
    counts one token a number.
    """

    name: ClassVar[str] = ""
    version: ClassVar[str] = ""
    settings: ClassVar[str] = ""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    not_claimed: ClassVar[Mapping[str, str]] = {}
    refusals: ClassVar[tuple[type[BaseException], ...]] = (ValueError,)
    low_water: ClassVar[float] = 1.0

    # ---- Needed ---------------------------------------------------------------------------------

    def append(self, session: str, role: str, token_ids: Sequence[int], **fields: Any) -> None:
        """Store a turn.

        Parameters
        ----------
        session : str
        role : {"user", "assistant", "tool"}
        token_ids : sequence of int
        **fields
            Only with the capability: `group`, `calls` (names of the calls that an assistant turn
            issues) and `call` (which of them a result answers), `tenant`, `created_at`,
            `metadata`, `ttl`.
        """
        raise NotImplementedError

    def assemble(
        self, session: str, max_tokens: int | None, reserve: int = 0, **options: Any
    ) -> list[int]:
        """Return the model's next input.

        Parameters
        ----------
        session : str
        max_tokens : int or None
            None is no limit. The window has at most `max_tokens - reserve`.
        reserve : int
        **options
            Only with the capability: `max_turns`, `partial`, `start_on`, `alternation`, `tenant`,
            `query`, `top_k`, `collection`.
        """
        raise NotImplementedError

    # ---- Optional -------------------------------------------------------------------------------

    def start(self, session: str) -> None:
        """Make a session without turns, where a session has to be made."""

    def close(self) -> None:
        """Close; nothing is used afterwards."""

    def turns(self, session: str, *, tenant: str = "") -> list[StoredTurn]:
        """Return all stored turns in order."""
        raise NotImplementedError

    def sessions(
        self, *, cursor: Any = None, limit: int = 100, tenant: str = ""
    ) -> tuple[list[str], Any]:
        """Return a page of names and the cursor of the next, None at the end."""
        raise NotImplementedError

    def pin(
        self, session: str, name: str, token_ids: Sequence[int], *, volatile: bool = False
    ) -> None:
        """Set a segment that stands at the head of every window; replace it under its name."""
        raise NotImplementedError

    def summarize(self, session: str, start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Let a text stand for the turns [start, stop) in windows."""
        raise NotImplementedError

    def report(self) -> WindowReport:
        """Return what there is to say about the window that was assembled last."""
        raise NotImplementedError

    def rollback(self, session: str, to: int) -> None:
        """Keep the first `to` turns."""
        raise NotImplementedError

    def delete(self, session: str, *, tenant: str = "") -> None:
        """Remove a session."""
        raise NotImplementedError

    def delete_tenant(self, tenant: str) -> None:
        """Remove all that a tenant has."""
        raise NotImplementedError

    def add_passages(
        self,
        collection: str,
        vectors: Sequence[Sequence[float]],
        token_ids: Sequence[Sequence[int]],
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        tenant: str = "",
    ) -> list[Any]:
        """Store passages for recall, all or none, and return their IDs."""
        raise NotImplementedError

    def delete_passages(self, collection: str, ids: Sequence[Any]) -> None:
        """Remove passages."""
        raise NotImplementedError

    def recall(
        self, query: Sequence[float], top_k: int, collection: str, **options: Any
    ) -> list[tuple[Any, float]]:
        """Return (ID, score) by cosine, best first.

        Parameters
        ----------
        query : sequence of float
        top_k : int
        collection : str
        **options
            Only with the capability: `filters`, `min_score`, `tenant`.
        """
        raise NotImplementedError

    def batch(
        self, sessions: Sequence[str], max_tokens: int, *, layout: str, pad_id: int | None = None
    ) -> Rows:
        """Return several windows as one; `layout` is "packed" or "left"."""
        raise NotImplementedError

    def block_keys(self, session: str, block_size: int, *, salt: str = "") -> list[str]:
        """Return a key for each whole block of the session's window without a limit."""
        raise NotImplementedError


Factory = Callable[[Setup], Candidate]
