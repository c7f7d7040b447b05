"""Kalos itself as a candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, ClassVar

import numpy as np

import kalos_ctx
from kalos_ctx.conformance.adapter import (
    CAPABILITIES,
    Candidate,
    Rows,
    Setup,
    StoredTurn,
    WindowReport,
)


def _version() -> str:
    try:
        return metadata.version("kalos-ctx")
    except metadata.PackageNotFoundError:  # a checkout that was built in place
        return ""


class KalosCandidate(Candidate):
    """A store and an assembler, with the default policy."""

    name = "Kalos"
    version = _version()
    settings = "the default policy: cuts to half of the budget when it is crossed"
    # One process writes; several go through the sidecar, which is no part of these cases. A window
    # is bounded in tokens alone.
    capabilities = frozenset(CAPABILITIES) - {"turn_limit", "writers"}
    refusals = (kalos_ctx.KalosError,)
    low_water: ClassVar[float] = 0.5

    def __init__(self, setup: Setup) -> None:
        self.store = kalos_ctx.SessionStore.open(
            setup.folder / "chats.kalos",
            "r" if setup.read_only else "a",
            tokenizer=_tokenizer(setup) if setup.control_ids else None,
            vocab_size=None if setup.control_ids else setup.vocab_size,
            clock=setup.clock,
        )
        self.assembler = kalos_ctx.ContextAssembler(self.store)
        self._report: Any = None

    def append(self, session: str, role: str, token_ids: Sequence[int], **fields: Any) -> None:
        """Store a turn; calls and results are told by their group."""
        options = {k: v for k, v in fields.items() if k not in ("calls", "call")}
        self.store.append(session, role, token_ids=token_ids, **options)

    def assemble(
        self, session: str, max_tokens: int | None, reserve: int = 0, **options: Any
    ) -> list[int]:
        """Return the tokens of a window."""
        policy = kalos_ctx.Policy(
            allow_partial=options.pop("partial", False),
            start_on=options.pop("start_on", None),
            alternation=options.pop("alternation", "off"),
        )
        if "collection" in options:
            options["collections"] = options.pop("collection")
        with self.assembler.assemble(
            session,
            max_tokens=max_tokens,
            reserve=reserve,
            policy=policy,
            **options,
        ) as window:
            self._report = window.report
            ids: list[int] = window.token_ids.tolist()
        return ids

    def start(self, session: str) -> None:
        """Make a session without turns."""
        self.store.append(session, "user", token_ids=[0])
        self.store.rollback(session, 0)

    def close(self) -> None:
        """Close the assembler and the store."""
        self.assembler.close()
        self.store.close()

    def turns(self, session: str, *, tenant: str = "") -> list[StoredTurn]:
        """Return all turns."""
        return [
            StoredTurn(turn.role, turn.token_ids.tolist(), turn.metadata)
            for turn in self.store.turns(session, tenant=tenant)
        ]

    def sessions(
        self, *, cursor: Any = None, limit: int = 100, tenant: str = ""
    ) -> tuple[list[str], Any]:
        """Return a page of names."""
        page = self.store.sessions(cursor=cursor, limit=limit, tenant=tenant)
        return [str(name) for name in page.items], page.cursor

    def pin(
        self, session: str, name: str, token_ids: Sequence[int], *, volatile: bool = False
    ) -> None:
        """Set a head segment."""
        self.store.set_segment(session, name, token_ids=token_ids, volatile=volatile)

    def summarize(self, session: str, start: int, stop: int, token_ids: Sequence[int]) -> None:
        """Let a text stand for turns."""
        self.store.summarize(session, start, stop, token_ids=token_ids)

    def report(self) -> WindowReport:
        """Return what the report of the latest window says."""
        report = self._report
        dropped = {fate.seq: fate.why for fate in report.dropped if fate.kind == "turn"}
        return WindowReport(dropped, "group", report.by_segment, report.trimmed)

    def rollback(self, session: str, to: int) -> None:
        """Keep the first turns."""
        self.store.rollback(session, to)

    def delete(self, session: str, *, tenant: str = "") -> None:
        """Erase a session."""
        self.store.delete(session, tenant=tenant)

    def delete_tenant(self, tenant: str) -> None:
        """Erase a tenant."""
        self.store.delete_tenant(tenant)

    def add_passages(
        self,
        collection: str,
        vectors: Sequence[Sequence[float]],
        token_ids: Sequence[Sequence[int]],
        *,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        tenant: str = "",
    ) -> list[Any]:
        """Store passages."""
        made = self.store.add_passages(
            collection,
            np.asarray(vectors, np.float32),
            token_ids=token_ids,
            metadata=metadata,
            tenant=tenant,
        )
        return [int(number) for number in made]

    def delete_passages(self, collection: str, ids: Sequence[Any]) -> None:
        """Remove passages."""
        self.store.delete_passages(collection, ids)

    def recall(
        self, query: Sequence[float], top_k: int, collection: str, **options: Any
    ) -> list[tuple[Any, float]]:
        """Return the hits."""
        hits = self.assembler.recall(query, top_k=top_k, collections=collection, **options)
        return [(int(n), float(x)) for n, x in zip(hits.ids, hits.scores, strict=True)]

    def batch(
        self, sessions: Sequence[str], max_tokens: int, *, layout: str, pad_id: int | None = None
    ) -> Rows:
        """Return windows as a batch."""
        asked = [{"session": name, "max_tokens": max_tokens} for name in sessions]
        with self.assembler.assemble_batch(asked, layout=layout, pad_id=pad_id) as batch:
            if layout == "packed":
                return Rows(
                    batch.token_ids.tolist(), batch.positions.tolist(), batch.cu_seqlens.tolist()
                )
            return Rows(
                batch.token_ids.tolist(),
                batch.position_ids.tolist(),
                mask=batch.attention_mask.tolist(),
            )

    def block_keys(self, session: str, block_size: int, *, salt: str = "") -> list[str]:
        """Return the keys of the window's blocks."""
        with self.assembler.assemble(session, max_tokens=None) as window:
            keys = window.report.block_keys(block_size, salt.encode())
        return [key.hex() if isinstance(key, bytes) else f"{int(key):016x}" for key in keys]


def _tokenizer(setup: Setup) -> Any:
    """Return a tokenizer of bare numbers in which some are control tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = Tokenizer(WordLevel({str(n): n for n in range(setup.vocab_size or 0)}, unk_token="0"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens([AddedToken(str(number), special=True) for number in setup.control_ids])
    return made


def factory(setup: Setup) -> Candidate:
    """Open Kalos."""
    return KalosCandidate(setup)
