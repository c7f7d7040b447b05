"""Chats of other stores and of files into a store: each conversation wholly or not at all.

docs/importing.md describes what is taken from each source and what is refused.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kalos_ctx.chat_files import Refused
from kalos_ctx.conversations import Conversation, conversation
from kalos_ctx.errors import KalosError, StoreFull, StoreIOError, StoreLocked, StoreReadOnly
from kalos_ctx.found_chats import FoundChat
from kalos_ctx.import_sources import opened_source

if TYPE_CHECKING:
    from kalos_ctx.rehearsal import Rehearsal
    from kalos_ctx.store import SessionStore

TOOLS_SEGMENT = "tools"
TURN_PLACE = re.compile(r"\Aturns\[(\d+)\]")
# The store itself has failed: no later conversation can fare better.
HOPELESS = (StoreFull, StoreIOError, StoreLocked, StoreReadOnly)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A conversation that was not taken, and why.

    Attributes
    ----------
    place : str
        Where it stands in the source; not escaped.
    reason : str
    line : int or None
        Of a file, from 1: where the conversation begins.
    """

    place: str
    reason: str
    line: int | None = None


@dataclass(slots=True)
class ImportReport:
    """What an import did, or would do.

    Attributes
    ----------
    sessions, turns, tokens : int
        New sessions, and turns with their tokens added to new and old ones.
    unchanged : int
        Conversations that the store held already.
    grown : int
        Sessions that gained turns at their end.
    as_system : int
        Developer turns that stand as system turns, since the template has no developer.
    skipped : Counter of str
        What of the taken conversations was left out or stands otherwise, and how often.
    refused : list of Refusal
    """

    sessions: int = 0
    turns: int = 0
    tokens: int = 0
    unchanged: int = 0
    grown: int = 0
    as_system: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    refused: list[Refusal] = field(default_factory=list)


def import_file(
    store: SessionStore,
    source: str | os.PathLike[str],
    *,
    form: str | None = None,
    on_bytes: Callable[[int], None] | None = None,
    **options: Any,
) -> ImportReport:
    """Add the conversations of a source to a store.

    Parameters
    ----------
    source : path or str
        A file of any known format, "-" for standard input, or the URL of a Redis server.
    form : str, optional
        One of `import_sources.FORMATS`; recognised where not given.
    on_bytes : callable, optional
        Called with the bytes of the source that were read so far.
    **options
        As `import_chats`.

    Raises
    ------
    SourceUnavailable, OSError, and as `import_chats`
    """
    with opened_source(source, form) as chats:
        return import_chats(store, chats.chats(on_bytes), **options)


def import_chats(
    store: SessionStore | Rehearsal,
    chats: Iterable[FoundChat],
    *,
    tenant: str | bytes = "",
    strict: bool = False,
    trust_token_ids: bool = False,
    on_refusal: Callable[[Refusal], None] | None = None,
) -> ImportReport:
    """Add conversations to a store.

    Each becomes one session, all of it or nothing. One that the store holds already is left as it
    is, and one that has grown gains its new turns, so that an import may be repeated, also after it
    was interrupted.

    Parameters
    ----------
    store : SessionStore or Rehearsal
        Opened for writing, with a tokenizer unless the source holds token IDs only.
    strict : bool
        Stop at the first refusal; what stands before it is in the store.
    trust_token_ids : bool
        Take `token_ids` of messages without text as they are, framing included.
    on_refusal : callable, optional
        Called with each refusal.

    Raises
    ------
    StoreFull, StoreIOError, StoreLocked, StoreReadOnly, and what reading the source raises
    """
    report = ImportReport()
    taker = _Taker(store, tenant, trust_token_ids, report)
    for found in chats:
        try:
            if isinstance(found.value, Refused):
                raise found.value
            taker.take(found)
        except HOPELESS:
            raise
        except (Refused, KalosError) as error:
            refusal = Refusal(found.place, str(error), found.line)
            report.refused.append(refusal)
            if on_refusal is not None:
                on_refusal(refusal)
            if strict:
                break
    return report


class _Taker:
    """Puts conversations into one store."""

    def __init__(
        self,
        store: SessionStore | Rehearsal,
        tenant: str | bytes,
        trust: bool,
        report: ImportReport,
    ) -> None:
        self._store, self._tenant, self._trust, self._report = store, tenant, trust, report
        self._has_developer = _renders_developer(store)

    def take(self, found: FoundChat) -> None:
        """Add one conversation; Refused or KalosError, and nothing is changed, otherwise."""
        chat = conversation(
            found.value, found.unnamed, trust_token_ids=self._trust, places=found.places
        )
        as_system = 0 if self._has_developer else _developer_as_system(chat)
        store, tenant = self._store, self._tenant
        if chat.tools is not None:
            self._check_tools(chat.tools)
        have = store.count(chat.session, tenant=tenant)
        if have:
            self._check_same(chat, have)
        try:
            added = store.extend(chat.session, keyed_turns(chat, have), tenant=tenant)
        except HOPELESS:
            raise
        except KalosError as error:
            raise Refused(
                TURN_PLACE.sub(lambda place: chat.place(place, have), str(error))
            ) from None
        # Behind the turns: an import that was cut short between the two is completed by the next.
        tools_new = chat.tools is not None and self._pin_tools(chat.session, chat.tools)
        self._count(chat, have, len(added), tools_new)
        self._report.as_system += as_system
        self._report.skipped.update(found.skipped)

    def _count(self, chat: Conversation, have: int, added: int, tools_new: bool) -> None:
        report = self._report
        report.turns += added
        if added:
            new = self._store.turns(chat.session, have, tenant=self._tenant)
            report.tokens += sum(turn.num_tokens for turn in new)
        if not have:
            report.sessions += 1
        elif added or tools_new:
            report.grown += 1
        else:
            report.unchanged += 1

    def _check_same(self, chat: Conversation, have: int) -> None:
        """Refuse a conversation that does not begin as the stored session does."""
        old = self._store.turns(chat.session, tenant=self._tenant)
        for stored, turn in zip(old, chat.turns, strict=False):
            if not _same(stored, turn):
                raise Refused(
                    f"the store has a session of this name whose turn {stored.seq} is another"
                )
        if have > len(chat.turns):
            raise Refused(
                f"the store has a session of this name with more turns, {have} "
                f"(the source has {len(chat.turns)})"
            )

    def _check_tools(self, tools: str) -> None:
        codec = self._store.codec
        if codec is None or not codec.has_template:
            raise Refused("tools need a tokenizer with a chat template")
        codec.head([(TOOLS_SEGMENT, "tools", tools)])

    def _pin_tools(self, session: bytes, tools: str) -> bool:
        old = self._store.segments(session, tenant=self._tenant).get(TOOLS_SEGMENT)
        if old is not None and old["text"] == tools:
            return False
        self._store.set_segment(session, TOOLS_SEGMENT, tools, tenant=self._tenant, role="tools")
        return True


def keyed_turns(chat: Conversation, first: int) -> list[dict[str, Any]]:
    """Return the turns from `first` on as arguments of `append`.

    Each has an idempotency key of its place, so that the store itself takes none of them twice.
    """
    rest = chat.turns[first:]
    return [{**turn, "key": f"import:{i}"} for i, turn in enumerate(rest, first)]


def _developer_as_system(chat: Conversation) -> int:
    """Let developer turns be system turns; return how many there are."""
    found = [turn for turn in chat.turns if turn["role"] == "developer"]
    for turn in found:
        turn["role"] = "system"
    return len(found)


def _renders_developer(store: SessionStore | Rehearsal) -> bool:
    codec = store.codec
    if codec is None or not codec.has_template:
        return True
    try:
        codec.encode_turn("developer", "x")
    except KalosError:
        return False
    return True


def _same(stored: Any, turn: Mapping[str, Any]) -> bool:
    """Say whether a stored turn is the source's, as far as the source says."""
    if stored.role != turn["role"] or stored.text != turn["content"]:
        return False
    if (stored.metadata or None) != turn["metadata"] or stored.group != turn["group"]:
        return False
    if turn["created_at"] is not None and stored.created_at != turn["created_at"]:
        return False
    ids = turn.get("token_ids")
    return ids is None or stored.token_ids.tolist() == ids
