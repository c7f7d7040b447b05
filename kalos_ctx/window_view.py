"""A window as a table for people and as one JSON document for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kalos_ctx import terminal

if TYPE_CHECKING:
    from kalos_ctx.store import SessionStore

PREVIEW = 60


def window_document(window: Any, codec: Any = None) -> dict[str, Any]:
    """Return a window with its report as plain JSON values.

    Parameters
    ----------
    window : ContextWindow
    codec : TokenCodec, optional
        Where given, `text` is the decoded window.
    """
    report = window.report
    document = {
        "session": terminal.name_text(window.session),
        "device": str(window.device),
        "num_tokens": len(window),
        "token_ids": window.token_ids.tolist(),
        "segments": [_fields(one, SEGMENT_FIELDS) for one in report.segments],
        "kept": [_fields(one, KEPT_FIELDS) for one in report.kept],
        "dropped": [_fields(one, DROPPED_FIELDS) for one in report.dropped],
        "hits": hits_document(report.hits),
        "reused_tokens": int(report.reused_tokens),
        "reused_until": report.reused_until,
        "timings": {name: float(value) for name, value in report.timings.items()},
        "path": report.path,
    }
    if codec is not None:
        document["text"] = codec.decode(window.token_ids)
    return document


SEGMENT_FIELDS = ("kind", "name", "seq", "id", "start", "stop")
KEPT_FIELDS = ("seq", "id", "why")
DROPPED_FIELDS = ("seq", "id", "why")


def _fields(one: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named attributes that are there and not None."""
    found = {name: getattr(one, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def hits_document(hits: Any) -> list[dict[str, Any]]:
    """Return the hits of one query, best first."""
    if hits is None:
        return []
    sources = hits.sources or ("",) * len(hits)
    return [
        {"id": int(one), "score": float(score), "source": source}
        for one, score, source in zip(hits.ids, hits.scores, sources, strict=True)
    ]


def print_window(window: Any, store: SessionStore, tenant: bytes) -> None:
    """Print what stands in a window, what does not, and how long each stage took."""
    report = window.report
    texts = {
        turn.seq: turn.text for turn in store.turns(window.session, tenant=tenant)
    } if store.count(window.session, tenant=tenant) else {}  # fmt: skip
    rows = []
    for one in report.segments:
        seq = getattr(one, "seq", None)
        label = one.name if seq is None else seq
        if label is None:
            label = getattr(one, "id", "")
        preview = terminal.short(texts.get(seq) or "", PREVIEW) if seq is not None else ""
        rows.append((one.kind, label, one.start, one.stop - one.start, preview))
    terminal.table(("part", "name", "from", "tokens", "text"), rows, numbers=(2, 3))
    reasons: dict[str, int] = {}
    for one in report.dropped:
        reasons[one.why] = reasons.get(one.why, 0) + 1
    gone = ", ".join(f"{count} {why}" for why, count in sorted(reasons.items())) or "nothing"
    times = ", ".join(f"{name} {value:.1f}" for name, value in report.timings.items())
    terminal.say(f"{len(window)} tokens on {window.device} ({report.path}); dropped: {gone}")
    terminal.say(f"microseconds: {times}")
