"""Every exception Kalos raises, by what the caller can do about it.

All derive from `KalosError`. A wrong argument is a `ValueError` too, a missing thing a
`LookupError`. A refused call changes nothing, and a message names the argument, the value's place
and the limit, never the content of a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping


class KalosError(Exception):
    """Root of every error that Kalos raises on purpose."""


class InvalidArgument(KalosError, ValueError):
    """An argument's value is outside what the call takes."""


class InvalidType(InvalidArgument, TypeError):
    """An argument is of a type that the call does not take."""


class SessionNotFound(KalosError, LookupError):
    """The session is not in the store (or not in this tenant)."""


class SessionExpired(KalosError, LookupError):
    """Every turn of the session has outlived its time to live."""


class StoreNotFound(KalosError, LookupError):
    """There is no store at the path."""


class PassageNotFound(KalosError, LookupError):
    """The passage (or the collection) is not in the store."""


class StoreLocked(KalosError):
    """Another process (or another object in this one) writes to the store."""


class StoreCorrupt(KalosError):
    """A file of the store does not hold what its checksum says.

    Attributes
    ----------
    file : str
        Name of the damaged file inside the store, empty where it is not known.
    offset : int
        Byte offset of the damage in that file, -1 where it is not known.
    """

    def __init__(self, message: str, file: str = "", offset: int = -1) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset


class NotAStore(StoreCorrupt):
    """What lies at the path is not a Kalos store; it was not touched."""


class StoreFull(KalosError):
    """The file system or a limit refused more bytes; nothing of the call was kept."""


class StoreIOError(KalosError, OSError):
    """The operating system failed a read or a write for another reason than space."""


class StoreReadOnly(KalosError):
    """The call writes, and the store was opened for reading or has stopped taking writes."""


class StoreClosed(KalosError):
    """The store was used after `close()`."""


class ForkedHandle(KalosError):
    """A writer opened before `os.fork` was used in the child."""


class FingerprintMismatch(KalosError, ValueError):
    """The store was written with another tokenizer, template or vector layout."""


class FormatVersionError(KalosError):
    """The store has a format that this version does not read, or another byte order."""


class InvalidTokenId(KalosError, ValueError):
    """A token ID lies outside the vocabulary."""


class ControlTokenInContent(KalosError, ValueError):
    """Content holds a control token that only framing may write."""


class TemplateUnsafe(KalosError, ValueError):
    """The chat template cannot be encoded turn by turn, and the reason."""


class DimensionMismatch(KalosError, ValueError):
    """A vector's length is not the store's dimension."""


class NonFiniteVector(KalosError, ValueError):
    """A vector holds NaN, an infinity, or a value that float16 cannot hold."""


class UnknownField(KalosError, LookupError):
    """A filter names a metadata field that no passage of the collections has."""


class IdempotencyConflict(KalosError, ValueError):
    """The idempotency key was used with another payload."""


class Conflict(KalosError, ValueError):
    """The state the caller expected is not the state that was found."""


class BudgetExceeded(KalosError, ValueError):
    """The window cannot be built within its budget.

    Attributes
    ----------
    by_segment : dict of str to int
        Tokens that each part needs.
    budget : int
        Tokens the window may have (`max_tokens - reserve`).
    over : int
        How many tokens too many.
    """

    def __init__(
        self,
        message: str,
        by_segment: Mapping[str, int] | None = None,
        budget: int = 0,
        over: int = 0,
    ) -> None:
        super().__init__(message)
        self.by_segment = dict(by_segment or {})
        self.budget = budget
        self.over = over


class PoolExhausted(KalosError):
    """No window slot became free within the timeout."""


class WindowReleased(KalosError):
    """A window was used after its release."""


class DeviceUnavailable(KalosError):
    """The device asked for does not work here."""


class DeviceError(KalosError):
    """The driver refused a call on a device that works; the message has its name for the error."""


class SidecarUnavailable(KalosError):
    """No sidecar answers at the socket."""


class SidecarTimeout(SidecarUnavailable, TimeoutError):
    """The sidecar did not answer in time; a write may still be done, a read changes nothing."""


class PeerDenied(KalosError):
    """The peer's user may not do this."""


class VersionMismatch(KalosError):
    """Client and sidecar speak no common protocol version."""


class ProtocolError(KalosError):
    """A peer sent what the protocol does not allow."""
