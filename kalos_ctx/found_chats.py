"""What every reader of a source yields: one conversation, or why it cannot be had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kalos_ctx.errors import KalosError


class SourceUnavailable(KalosError):
    """A source cannot be read, or not to its end; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class FoundChat:
    """One conversation of a source.

    Attributes
    ----------
    place : str
        Where it stands, for a person: `chats.jsonl:12`, `thread t1`. Not escaped.
    value : JSON value or Refused
        A record as `conversations.conversation` takes it.
    unnamed : str
        The session's name where the record has none.
    line : int or None
        Of a file, from 1.
    places : sequence of str or None
        What each message is called in a refusal; None for `messages[0]` and so on.
    skipped : mapping of str to int
        What of it is not taken as it is, and how often.
    """

    place: str
    value: Any
    unnamed: str = ""
    line: int | None = None
    places: Sequence[str] | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)


class ChatSource(Protocol):
    """What a reader of a source is.

    Attributes
    ----------
    label : str
        Its name on a progress bar; without secrets.
    nbytes : int or None
        What `chats` will have told in the end; None where that is not known.
    """

    label: str
    nbytes: int | None

    def chats(self, on_bytes: Callable[[int], None] | None = None) -> Iterator[FoundChat]:
        """Yield the conversations; `on_bytes` is told the bytes that were read so far."""
