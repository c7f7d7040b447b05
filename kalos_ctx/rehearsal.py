"""A rehearsal of an import: everything is checked and counted as in earnest, nothing is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kalos_ctx.arguments import name_bytes
from kalos_ctx.drafts import History, Plain, TurnIntake
from kalos_ctx.errors import InvalidArgument, KalosError, StoreNotFound
from kalos_ctx.store import SessionStore

if TYPE_CHECKING:
    from kalos_ctx._turns import Turn
    from kalos_ctx.drafts import Payload
    from kalos_ctx.tokens import EncodedTurn, TokenCodec


class Rehearsal:
    """What an import needs of a store, read from one that may not exist yet.

    Parameters
    ----------
    path : path
        The store that would be written to.
    tokenizer, template : optional
        As for `SessionStore.open`.

    Raises
    ------
    As `SessionStore.open` in mode "r", but for a store that is not there.

    Notes
    -----
    A context manager. A session that stands twice in the source cannot be compared with itself, and
    is refused at the second time.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, tokenizer: Any = None, template: Any = None
    ) -> None:
        self._store: SessionStore | None = None
        try:
            self._store = SessionStore.open(path, "r", tokenizer=tokenizer, template=template)
        except StoreNotFound:
            self.codec = _codec(tokenizer, template)
            bound, vocab_size = self.codec is not None, getattr(self.codec, "vocab_size", 0)
        else:
            self.codec = self._store.codec
            bound, vocab_size = self._store._bound, self._store._vocab_size
        self._intake = _CountingIntake(self.codec, vocab_size, bound, "literal")
        self._seen: set[tuple[bytes, bytes]] = set()
        self._last: list[NewTurn] = []

    def count(self, session: bytes, *, tenant: str | bytes = "") -> int:
        """Return the number of turns that the store has."""
        return 0 if self._store is None else self._store.count(session, tenant=tenant)

    def turns(
        self, session: bytes, start: int = 0, *, tenant: str | bytes = ""
    ) -> Sequence[Turn | NewTurn]:
        """Return the store's turns; from where it ends, those of the latest `extend`."""
        have = self.count(session, tenant=tenant)
        if start >= have or self._store is None:
            return self._last
        return self._store.turns(session, start, tenant=tenant)

    def extend(
        self, session: bytes, turns: Sequence[dict[str, Any]], *, tenant: str | bytes = ""
    ) -> list[int]:
        """Check and encode turns as the store would; return the seqs that they would have."""
        name = (name_bytes(tenant, "tenant", empty=True), name_bytes(session, "session"))
        if name in self._seen:
            raise InvalidArgument("the session stands twice; only an import can compare the two")
        have = self.count(session, tenant=tenant)
        history = History(_Reading(self._store), *name)  # type: ignore[arg-type]
        new = []
        for i, turn in enumerate(turns):
            try:
                self._intake.turn(turn, history, 0.0, None)
            except KalosError as error:
                if isinstance(error, ValueError):
                    error.args = (f"turns[{i}]: {error}", *error.args[1:])
                raise
            new.append(NewTurn(have + i, self._intake.num_tokens))
        self._seen.add(name)
        self._last = new
        return [one.seq for one in new]

    def segments(self, session: bytes, *, tenant: str | bytes = "") -> dict[str, dict[str, Any]]:
        """Return the store's pinned segments of a session."""
        if not self.count(session, tenant=tenant) or self._store is None:
            return {}
        return self._store.segments(session, tenant=tenant)

    def set_segment(self, session: bytes, name: str, content: str, **options: Any) -> None:
        """Leave the store as it is; the importer has checked the segment."""

    def sync(self) -> None:
        """Do nothing: nothing was written."""

    def close(self) -> None:
        """Close what was read. Idempotent."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class NewTurn(NamedTuple):
    """A turn that would be added."""

    seq: int
    num_tokens: int


class _CountingIntake(TurnIntake):
    """Checks turns as a store does and keeps how many tokens the latest one has."""

    num_tokens = 0

    def framed(
        self,
        role: str,
        payload: Payload,
        framed: bool = False,
        extra: dict[str, Any] | None = None,
        history: History | None = None,
    ) -> EncodedTurn | Plain:
        """Return a turn's IDs with their framing."""
        encoded = super().framed(role, payload, framed, extra, history)
        self.num_tokens = len(encoded.ids)
        return encoded


class _Reading:
    """What `History` asks a core, of a store that is read or is not there; no key is known."""

    def __init__(self, store: SessionStore | None) -> None:
        self._core = None if store is None else store._core

    def slot_state(self, *where: Any) -> Any:
        """As the core's."""
        return None if self._core is None else self._core.slot_state(*where)

    def turns(self, *where: Any) -> Any:
        """As the core's."""
        return None if self._core is None else self._core.turns(*where)

    def has_key(self, *where: Any) -> bool:
        """Take every turn for a new one."""
        return False


def _codec(tokenizer: Any, template: Any) -> TokenCodec | None:
    if tokenizer is None:
        return None
    from kalos_ctx.tokens import TokenCodec

    return TokenCodec.load(tokenizer, template)
