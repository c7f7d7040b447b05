"""What a window says about itself. Everything is worked out when it is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import blockkeys
from kalos_ctx._context_window import use_report
from kalos_ctx.arguments import whole
from kalos_ctx.errors import WindowReleased
from kalos_ctx.planner import Budget, Plan, PlanItem
from kalos_ctx.types import Hits

if TYPE_CHECKING:
    from kalos_ctx._context_window import ContextWindow
    from kalos_ctx._window_parts import WindowParts

NO_HITS = Hits(np.empty(0, np.uint64), np.empty(0, np.float32), np.zeros(1, np.int64))


class Segment(NamedTuple):
    """One tile of a window: tokens `[start, stop)`.

    Attributes
    ----------
    kind : {"segment", "turn", "summary", "passage", "generation_prompt"}
    name : str or None
        A pinned segment's name; of a passage, its collection, or "session".
    seq : int or None
        Of a turn; of a summary, the first turn it stands for.
    id : int or None
        Of a passage; of a recalled turn, its seq.
    start, stop : int
    """

    kind: str
    name: str | None
    seq: int | None
    id: int | None
    start: int
    stop: int


class Fate(NamedTuple):
    """What became of a turn, a summary or a passage.

    Attributes
    ----------
    seq : int or None
        None for passages.
    why : str
        Empty for what is kept. `docs/windows.md` lists the reasons.
    id : int or None
        Of a passage; of a recalled turn, its seq.
    kind : {"turn", "summary", "passage"}
    name : str or None
        A passage's collection, or "session".
    cut_tokens : int
        Tokens that a kept turn lost at its beginning.
    """

    seq: int | None
    why: str
    id: int | None = None
    kind: str = "turn"
    name: str | None = None
    cut_tokens: int = 0


class Report:
    """What stands in a window, what does not, and why.

    Attributes
    ----------
    hits : Hits
        What was recalled, before passages were dropped.
    reused_tokens : int
        Leading tokens that are those of this assembler's window of the session before, and of the
        assistant turns appended since.
    path : str
        How the tokens came here. ``cpu_mapped``: copied from the store's mapped files on the CPU.
        On a device ``staged``: gathered by the CPU and copied over; ``zero_copy``: by the GPU, out
        of the page cache; ``mixed``: the same, with some runs through pinned memory. Behind a ``+``
        how recall ran, where not on the window's device: ``cpu_recall``.
    degraded : str or None
        Why the window is less than was asked for.
    """

    def __init__(self, window: ContextWindow) -> None:
        self._parts: WindowParts = window.parts
        # Not the window itself: a report that is kept must not keep a slot.
        self._window = weakref.ref(window)
        self.hits: Hits = NO_HITS if self._parts.hits is None else self._parts.hits
        self.reused_tokens: int = self._parts.reused_tokens
        self.path: str = self._parts.path
        self.degraded: str | None = self._parts.degraded

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The tiles of the window in order, one for each segment, turn and passage."""
        return tuple(Segment(*row) for row in self._parts.tiles())

    @cached_property
    def _fates(self) -> tuple[tuple[Fate, ...], tuple[Fate, ...]]:
        kept: list[Fate] = []
        dropped: list[Fate] = []
        for kind, seq, why, cut in self._parts.fates():
            (dropped if why else kept).append(Fate(seq, why, None, kind, None, cut))
        for number, source, _, why in self._parts.passages or ():
            (dropped if why else kept).append(Fate(None, why, number, "passage", source))
        return tuple(kept), tuple(dropped)

    @property
    def kept(self) -> tuple[Fate, ...]:
        """Turns by seq, then passages by score, that stand in the window."""
        return self._fates[0]

    @property
    def dropped(self) -> tuple[Fate, ...]:
        """Turns and passages that do not, each with its reason."""
        return self._fates[1]

    @property
    def trimmed(self) -> bool:
        """Whether a turn was dropped or cut."""
        dropped = any(fate.kind != "passage" and fate.why != "summarized" for fate in self.dropped)
        return dropped or any(fate.cut_tokens for fate in self.kept)

    @property
    def low_water(self) -> int | None:
        """Tokens to which a stable cut trims the history; None for a sliding one."""
        return self._parts.low_mark

    @cached_property
    def by_segment(self) -> dict[str, int]:
        """Tokens by pinned segment, `history`, `recall` and `generation_prompt`; they add up."""
        return _by_segment(self._parts.tiles())

    @cached_property
    def reused_until(self) -> str | None:
        """Name what ended the match with the window before: a segment's name, or `turn 7`.

        None where all of the window before was used again, or where there was none.
        """
        if self._parts.reused_all or not self._parts.compared:
            return None
        for tile in self.segments:
            if tile.stop > self.reused_tokens:
                return _title(tile)
        return None

    def reused_blocks(self, block_size: int) -> int:
        """Whole blocks among `reused_tokens`."""
        return self.reused_tokens // whole(block_size, "block_size", 1)

    def block_keys(self, block_size: int, salt: bytes = b"") -> NDArray[np.uint64] | list[bytes]:
        """Keys of the window's leading whole blocks.

        Without a salt the rolling XXH3-64 keys that routers compute, uint64; with one the SHA-256
        chain, 32 bytes each, under which nobody without the salt shares a block.

        Raises
        ------
        WindowReleased, InvalidArgument, InvalidType
        """
        window = self._window()
        if window is None:
            raise WindowReleased("the window is gone; take its block keys before it is released")
        if salt:
            return blockkeys.block_keys_sha256(window.token_ids, block_size, salt)
        return blockkeys.block_keys(window.token_ids, block_size)

    @property
    def timings(self) -> dict[str, float]:
        """Microseconds by stage: lookup, plan, recall, lease, gather, total."""
        return self._parts.timings()

    def __repr__(self) -> str:
        return (
            f"<Report of {self._parts.num_tokens} tokens: {len(self.kept)} kept, "
            f"{len(self.dropped)} dropped, {self.reused_tokens} tokens reused>"
        )


def _by_segment(tiles: list[tuple[Any, ...]]) -> dict[str, int]:
    found: dict[str, int] = {}
    names = {"turn": "history", "summary": "history", "passage": "recall"}
    for kind, name, _, _, start, stop in tiles:
        label = names.get(kind, name)
        found[label] = found.get(label, 0) + stop - start
    return found


def _title(tile: Segment) -> str:
    if tile.kind in ("segment", "generation_prompt"):
        return str(tile.name)
    return f"{tile.kind} {tile.id if tile.kind == 'passage' else tile.seq}"


def plan_of(parts: WindowParts) -> Plan:
    """Return the plan that these parts are, in the order of the window.

    Dropped turns stand where they would stand; dropped passages behind those that were taken.
    """
    fates = parts.fates()
    lengths: list[int] = parts.lengths or []
    why_of = {(kind, seq): (why, cut) for kind, seq, why, cut in fates}
    ahead = iter(fates)
    items: list[PlanItem] = []

    def until(seq: int | None) -> None:
        """Add the dropped turns before the kept one."""
        for kind, at, why, _ in ahead:
            if at == seq and not why:
                return
            items.append(PlanItem(kind, lengths[at], "dropped", why, at))

    for kind, name, seq, number, start, stop in parts.tiles():
        if seq is not None:
            until(seq)
            cut = why_of[kind, seq][1]
            items.append(
                PlanItem(kind, stop - start, "cut" if cut else "kept", seq=seq, cut_tokens=cut)
            )
        else:
            items.append(PlanItem(kind, stop - start, "kept", id=number, name=name))
    until(None)
    for number, source, tokens, why in parts.passages or ():
        if why:
            items.append(PlanItem("passage", tokens, "dropped", why, id=number, name=source))
    by_segment: Mapping[str, int] = _by_segment(parts.tiles())
    history = parts.budget
    head = sum(item.tokens for item in items if item.kind in ("segment", "generation_prompt"))
    budget = Budget(parts.total, head, history, parts.recall_budget)
    low = parts.low_mark
    return Plan(tuple(items), budget, history if low is None else low, parts.num_tokens, by_segment)


use_report(Report)
