"""A window as a table for people and as one JSON document for programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kalos_ctx import terminal

if TYPE_CHECKING:
    from kalos_ctx._assembler import ContextWindow
    from kalos_ctx.reports import Segment
    from kalos_ctx.store import SessionStore
    from kalos_ctx.types import Hits

PREVIEW = 60


def window_document(window: ContextWindow) -> dict[str, Any]:
    """Return a window with its report as plain JSON values."""
    report = window.report
    return {
        "session": terminal.name_text(window.session),
        "device": str(window.device),
        "num_tokens": len(window),
        "token_ids": window.token_ids.tolist(),
        "segments": [one._asdict() for one in report.segments],
        "by_segment": report.by_segment,
        "kept": [one._asdict() for one in report.kept],
        "dropped": [one._asdict() for one in report.dropped],
        "hits": hits_document(report.hits),
        "reused_tokens": report.reused_tokens,
        "reused_until": report.reused_until,
        "low_water": report.low_water,
        "timings": report.timings,
        "path": report.path,
        "degraded": report.degraded,
    }


def hits_document(hits: Hits) -> list[dict[str, Any]]:
    """Return the hits of one query, best first."""
    return [
        {"id": int(one), "score": float(score), "source": source}
        for one, score, source in zip(hits.ids, hits.scores, hits.sources, strict=True)
    ]


def print_window(window: ContextWindow, store: SessionStore, tenant: bytes) -> None:
    """Print what stands in a window, what does not, and how long each stage took."""
    report = window.report
    terminal.table(
        ("part", "name", "from", "tokens", "text"),
        (
            (one.kind, _label(one), one.start, one.stop - one.start,
             terminal.short(_text(one, window.session, store, tenant), PREVIEW))
            for one in report.segments
        ),
        numbers=(2, 3),
    )  # fmt: skip
    reasons = Counter(one.why for one in report.dropped)
    gone = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items())) or "nothing"
    times = ", ".join(f"{name} {value:.1f}" for name, value in report.timings.items())
    terminal.say(f"{len(window)} tokens on {window.device} ({report.path}); dropped: {gone}")
    terminal.say(f"microseconds: {times}")


def _label(one: Segment) -> str:
    number = one.seq if one.seq is not None else one.id
    return " ".join(str(part) for part in (one.name, number) if part is not None)


def _text(one: Segment, session: str | bytes, store: SessionStore, tenant: bytes) -> str:
    """Return the text of a part, "" where it has none."""
    if one.kind == "turn" and one.seq is not None:
        return store.turns(session, one.seq, one.seq + 1, tenant=tenant)[0].text or ""
    if one.kind == "passage" and one.name not in (None, "session"):
        return store.passages(str(one.name), [one.id], tenant=tenant)[0].text or ""
    return ""
