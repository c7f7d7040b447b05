"""A window as a document: its parts as coloured tiles, what was dropped, recalled and reused."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument, KalosError
from kalos_ctx.inspecting.pages import StorePages, preview
from kalos_ctx.inspecting.token_text import pieces
from kalos_ctx.planner import Policy
from kalos_ctx.terminal import readable, shown

if TYPE_CHECKING:
    from kalos_ctx._assembler import ContextWindow
    from kalos_ctx.inspecting.queries import Query
    from kalos_ctx.reports import Fate, Segment

# Behind these, a part's tokens are shown as one text, and of the dropped turns the newest.
TOKENS_APART, DROPPED_SHOWN = 16_384, 200
TURNS_AT_ONCE = 64
PLACEMENTS = ("before_last_user", "after_system", "end")
QUERIES = ("none", "turn", "passage", "text")


class WindowPages:
    """Documents about windows.

    Parameters
    ----------
    pages : StorePages
    """

    def __init__(self, pages: StorePages) -> None:
        self._pages, self._store = pages, pages.store
        # One remembers the windows that were shown, one the exchange before, one pair at a time.
        self._shown = ContextAssembler(self._store, device="cpu")
        self._paired = ContextAssembler(self._store, device="cpu")
        self._pairing = threading.Lock()

    def window(self, query: Query) -> dict[str, Any]:
        """Return the window of a session under the settings of a request."""
        session, options = query.name("session"), self._options(query)
        if query.choice("compare", ("exchange", "shown")) == "shown":
            with self._shown.assemble(session, **options) as window:
                return self._document(window, options, None)
        with self._pairing:
            self._paired.forget(options["tenant"], session)
            before = self._assemble_before(session, options)
            with self._paired.assemble(session, **options) as window:
                return self._document(window, options, before)

    def close(self) -> None:
        """Forget the windows that were shown."""
        self._shown.close()
        self._paired.close()

    def _options(self, query: Query) -> dict[str, Any]:
        """Return the arguments of `assemble`."""
        tenant = query.name("tenant", empty=True)
        sliding = query.choice("cut", ("stable", "sliding")) == "sliding"
        policy = Policy(
            stable_prefix=not sliding,
            allow_partial=query.flag("partial"),
            low_water=query.share("low_water", 0.5),
            recall_tokens=query.optional_whole("recall_tokens"),
            generation_prompt=query.flag("generation_prompt"),
            include_system=not query.flag("without_system"),
        )
        if policy.generation_prompt and self._store.codec is None:
            raise InvalidArgument(
                "the generation prompt comes from the chat template; start kalos inspect with "
                "--tokenizer PATH"
            )
        vector = self._query_vector(query, tenant)
        return {
            "tenant": tenant,
            "max_tokens": query.whole("max_tokens"),
            "reserve": query.whole("reserve", 0),
            "as_of": query.optional_whole("as_of"),
            "query": vector,
            "top_k": 0 if vector is None else query.whole("top_k", 5),
            "collections": query.names("collection"),
            "session_recall": query.flag("session_recall"),
            "placement": query.choice("placement", PLACEMENTS),
            "policy": policy,
        }

    def _query_vector(self, query: Query, tenant: bytes) -> Any:
        """Return the vector to recall by: of a stored turn, of a passage, or of a text."""
        kind = query.choice("query", QUERIES)
        if kind == "none":
            return None
        if kind == "turn":
            return self._pages.turn_vector(tenant, query.name("session"), query.whole("query_turn"))
        if kind == "passage":
            collection, number = (
                query.name("query_collection"),
                query.whole("query_passage", most=2**64 - 1),
            )
            return self._store.passages(collection, [number], tenant=tenant)[0].vector
        if self._pages.embed is None:
            raise InvalidArgument(
                "a text needs an embedding function; start kalos inspect with --embed "
                "MODULE:FUNCTION, or recall by a stored turn or passage"
            )
        return self._pages.embed(query.text("query_text"))

    def _assemble_before(self, session: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
        """Build the window of the exchange before, so that the next one is compared with it."""
        tenant = options["tenant"]
        count = self._store.count(session, tenant=tenant)
        end = count if options["as_of"] is None else min(options["as_of"], count)
        as_of = self._exchange_before(tenant, session, end)
        if as_of is None:
            return {"as_of": None, "tokens": None, "why": "there is no exchange before it"}
        try:
            with self._paired.assemble(session, **{**options, "as_of": as_of}) as window:
                return {"as_of": as_of, "tokens": len(window), "why": None}
        except KalosError as error:
            return {"as_of": None, "tokens": None, "why": str(error)}

    def _exchange_before(self, tenant: bytes, session: bytes, end: int) -> int | None:
        """Return where the history ended when the latest user turn before the last had come."""
        for stop in range(end - 1, 0, -TURNS_AT_ONCE):
            turns = self._store.turns(session, max(0, stop - TURNS_AT_ONCE), stop, tenant=tenant)
            for turn in reversed(turns):
                if turn.role == "user":
                    return turn.seq + 1
        return None

    # ---- Parts of the document ------------------------------------------------------------------

    def _document(
        self, window: ContextWindow, options: Mapping[str, Any], before: dict[str, Any] | None
    ) -> dict[str, Any]:
        report = window.report
        tenant = options["tenant"]
        taken = {(one.name, one.id): one.why for one in (*report.kept, *report.dropped)
                 if one.kind == "passage"}  # fmt: skip
        return {
            "num_tokens": len(window),
            "max_tokens": options["max_tokens"],
            "reserve": options["reserve"],
            "budget": self._budget(window, options),
            "segments": self._segments(window, tenant),
            "cut": [
                {"seq": one.seq, "tokens": one.cut_tokens} for one in report.kept if one.cut_tokens
            ],
            "dropped": self._dropped(window, tenant),
            "hits": self._hits(window, tenant, taken),
            "no_hits": report.hits.reason,
            "reuse": {
                "tokens": report.reused_tokens,
                "until": None if report.reused_until is None else shown(report.reused_until),
                "before": before,
            },
            "timings": report.timings,
            "path": report.path,
            "degraded": report.degraded,
        }

    def _budget(self, window: ContextWindow, options: Mapping[str, Any]) -> dict[str, int]:
        plan = self._shown.plan(window.session, **options)
        budget = plan.budget
        return {
            "total": budget.total,
            "head": budget.head,
            "history": budget.history,
            "recall": budget.recall,
        }

    def _segments(self, window: ContextWindow, tenant: bytes) -> list[dict[str, Any]]:
        codec = self._store.codec
        ids = window.token_ids
        left = TOKENS_APART
        found = []
        for one in window.report.segments:
            own = ids[one.start : one.stop].tolist()
            document: dict[str, Any] = {
                "kind": one.kind,
                "name": None if one.name is None else shown(one.name),
                "seq": one.seq,
                "id": None if one.id is None else str(one.id),
                "role": self._role(one, window.session, tenant),
                "start": one.start,
                "tokens": len(own),
                "pieces": None,
                "text": None,
                "token_ids": None,
            }
            if codec is not None and len(own) <= left:
                document["pieces"] = pieces(codec, own)
                left -= len(own)
            elif codec is not None:
                document["text"] = readable(codec.decode(own))
            else:
                text = self._stored_text(one, window.session, tenant)
                document["text"] = None if text is None else readable(text)
                document["token_ids"] = own[: max(0, left)]
                left -= len(own)
            found.append(document)
        return found

    def _role(self, one: Segment, session: str | bytes, tenant: bytes) -> str | None:
        if one.kind != "turn" or one.seq is None:
            return None
        found = self._store.turns(session, one.seq, one.seq + 1, tenant=tenant)
        return found[0].role if found else None

    def _stored_text(self, one: Segment, session: str | bytes, tenant: bytes) -> str | None:
        if one.kind == "turn" and one.seq is not None:
            found = self._store.turns(session, one.seq, one.seq + 1, tenant=tenant)
            return found[0].text if found else None
        if one.kind == "passage" and one.name is not None and one.name != "session":
            return self._store.passages(one.name, [one.id], tenant=tenant)[0].text
        return None

    def _dropped(self, window: ContextWindow, tenant: bytes) -> dict[str, Any]:
        dropped = window.report.dropped
        return {
            "count": len(dropped),
            "by_reason": dict(Counter(one.why for one in dropped).most_common()),
            # The newest first: they are those that a larger budget would keep first.
            "newest": [
                self._fate(one, window.session, tenant)
                for one in sorted(dropped, key=_newest)[:DROPPED_SHOWN]
            ],
        }

    def _fate(self, one: Fate, session: str | bytes, tenant: bytes) -> dict[str, Any]:
        made: dict[str, Any] = {
            "kind": one.kind,
            "seq": one.seq,
            "id": None if one.id is None else str(one.id),
            "name": None if one.name is None else shown(one.name),
            "why": one.why,
            "role": None,
            "tokens": None,
            "text": None,
        }
        if one.kind == "turn" and one.seq is not None:
            for turn in self._store.turns(session, one.seq, one.seq + 1, tenant=tenant):
                made.update(role=turn.role, tokens=turn.num_tokens, text=preview(turn.text))
        return made

    def _hits(
        self, window: ContextWindow, tenant: bytes, taken: Mapping[Any, str]
    ) -> list[dict[str, Any]]:
        hits = window.report.hits
        found = []
        for number, score, source in zip(
            hits.ids.tolist(), hits.scores.tolist(), hits.sources, strict=True
        ):
            own = source == "session"
            stored: Any = (
                self._store.turns(window.session, number, number + 1, tenant=tenant)
                if own
                else self._store.passages(source, [number], tenant=tenant)
            )
            found.append(
                {
                    "id": str(number),
                    "source": shown(source),
                    "collection": None if own else _name_bytes(source).hex(),
                    "score": score,
                    "why": taken.get((source, number), ""),
                    "tokens": stored[0].num_tokens if stored else None,
                    "text": preview(stored[0].text) if stored else None,
                }
            )
        return found


def _newest(one: Fate) -> tuple[bool, int]:
    return one.kind == "passage", -(one.seq or 0)


def _name_bytes(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name
