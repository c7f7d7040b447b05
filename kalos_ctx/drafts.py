"""From the arguments of a call to drafts: what the store's core writes.

Checks come first and framing last: a turn whose idempotency key is known already is not framed
again, since its place in the conversation is not the one that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import arguments
from kalos_ctx._batch import Draft
from kalos_ctx._intake import as_ids
from kalos_ctx._reader import ENTRY_FRAMED, ENTRY_TEXT, ENTRY_TTL, ENTRY_ZERO, SESSION
from kalos_ctx.errors import FingerprintMismatch, InvalidArgument
from kalos_ctx.vector_rows import VectorRows

if TYPE_CHECKING:
    from kalos_ctx._turns import Turn
    from kalos_ctx._writer import StoreWriter
    from kalos_ctx.template import TurnContext
    from kalos_ctx.tokens import EncodedTurn, TokenCodec

Ids = NDArray[np.int32]

# Template fields that a turn's metadata may carry (docs/templates.md).
TEMPLATE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
TURN_FIELDS = frozenset(
    (
        "role", "content", "token_ids", "vector", "group", "key", "created_at", "metadata", "ttl",
        "framed",
    )
)  # fmt: skip


class Plain(NamedTuple):
    """IDs without framing, in the shape of an EncodedTurn."""

    ids: Ids
    prefix_len: int = 0
    suffix_len: int = 0
    trim_prev: int = 0
    live_ids: Ids | None = None


class Payload(NamedTuple):
    """Content as it was given, checked: text or IDs, or neither beside tool calls."""

    text: bytes | None
    ids: Ids | None


class History:
    """What the codec needs of the turns before the next one; read when first asked."""

    def __init__(self, core: StoreWriter, tenant: bytes, session: bytes) -> None:
        self._core, self._tenant, self._session = core, tenant, session
        self._last: tuple[str, dict[str, Any] | None] | None = None
        self._call: dict[str, Any] | None = None
        self._read = False
        self._keys: set[bytes] = set()

    def _load(self) -> None:
        self._read = True
        state = self._core.slot_state(SESSION, self._tenant, self._session)
        if state is None or not state["count"]:
            return
        last = self._turn(state["count"] - 1)
        if last is None:
            return
        self._last = (last.role, template_fields(last.metadata))
        if last.role != "assistant" and state["last_assistant"]:
            call = self._turn(state["last_assistant"] - 1)
            self._call = None if call is None else template_fields(call.metadata)

    def _turn(self, seq: int) -> Turn | None:
        found = self._core.turns(self._tenant, self._session, seq, seq + 1, float("-inf"))
        return found[0] if found else None

    def context(self, role: str) -> TurnContext | None:
        """Return what a turn of `role` must know of those before it; None for a first turn."""
        from kalos_ctx.template import TurnContext

        if not self._read:
            self._load()
        if self._last is None:
            return None
        before, extra = self._last
        call = self._call if role == "tool" and before != "assistant" else None
        return TurnContext(before, extra, call)

    def note(self, role: str, extra: dict[str, Any] | None) -> None:
        """Take in a turn of the same call; the next one follows it."""
        if not self._read:
            self._load()
        if self._last is not None and self._last[0] == "assistant":
            self._call = self._last[1]
        self._last = (role, extra)

    def knows(self, key: bytes) -> bool:
        """Whether the session, or this call, has a turn of an idempotency key; the key is noted."""
        if key in self._keys:
            return True
        self._keys.add(key)
        return self._core.has_key(self._tenant, self._session, key)


class TurnIntake:
    """Turns arguments into drafts by the rules of one open store.

    Attributes
    ----------
    codec : TokenCodec or None
    vocab_size : int
        IDs must be below it; 0 allows every non-negative int32.
    bound : bool
        Whether the store was written with a tokenizer.
    on_control : {"literal", "refuse"}
    """

    def __init__(
        self, codec: TokenCodec | None, vocab_size: int, bound: bool, on_control: str
    ) -> None:
        self.codec = codec
        self.vocab_size = vocab_size
        self.bound = bound
        self.on_control = on_control

    def turn(
        self,
        given: Mapping[str, Any],
        history: History,
        now: float,
        rows: VectorRows | None,
    ) -> Draft:
        """Check and frame one turn.

        Parameters
        ----------
        given : mapping
            The arguments of `SessionStore.append`.
        rows : VectorRows, optional
            The turn's vector, checked.
        """
        get = given.get
        role, metadata, framed = given["role"], get("metadata"), get("framed", False)
        fields: dict[str, Any] = {"role": arguments.role_code(role)}
        arguments.flag(framed, "framed")
        if metadata is not None:
            fields["metadata"] = arguments.metadata_bytes(metadata)
        extra = template_fields(metadata)
        payload = self.payload(get("content"), get("token_ids"), framed, extra)
        fields["text"] = payload.text
        flags = (ENTRY_FRAMED if framed else 0) | (ENTRY_TEXT if payload.text is not None else 0)
        created_at, ttl, group, key = get("created_at"), get("ttl"), get("group"), get("key")
        fields["created_at"] = (
            now if created_at is None else arguments.seconds(created_at, "created_at")
        )
        if ttl is not None:
            fields["expires_at"] = now + arguments.seconds(ttl, "ttl", positive=True)
            flags |= ENTRY_TTL
        if rows is not None:
            flags |= ENTRY_ZERO if rows.zero[0] else 0
            fields.update(
                vector=rows.padded[0], vector_nbytes=rows.nbytes, factor=float(rows.factors[0])
            )
        if group is not None:
            fields["group"] = arguments.group_bytes(group)
        fields["flags"] = flags
        if key is not None:
            raw_key = arguments.key_bytes(key)
            fields["key"] = raw_key
            fields["digest"] = digest(
                role, payload.text, payload.ids, framed, fields.get("group"),
                fields.get("metadata"), fields.get("vector"), ttl, created_at,
            )  # fmt: skip
            if history.knows(raw_key):
                # The core compares the digests and gives the turn's seq; nothing is stored.
                return Draft(**fields)
        encoded = self.framed(role, payload, framed, extra, history)
        if self.codec is not None:
            history.note(role, extra)
        return Draft(
            ids=encoded.ids,
            live=encoded.live_ids,
            prefix_len=encoded.prefix_len,
            suffix_len=encoded.suffix_len,
            trim_prev=encoded.trim_prev,
            **fields,
        )

    def payload(
        self,
        content: Any,
        token_ids: Any,
        framed: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Payload:
        """Check content or IDs.

        Raises
        ------
        InvalidTokenId, FingerprintMismatch, InvalidArgument, InvalidType
        """
        if content is not None and token_ids is not None:
            raise InvalidArgument("give content or token_ids, not both")
        if token_ids is not None:
            ids = as_ids(token_ids, self.vocab_size)
            if not len(ids):
                raise InvalidArgument("a turn must have at least 1 token (got 0)")
            if self.codec is None and self.bound and not framed:
                raise FingerprintMismatch(
                    "the store was written with a tokenizer; open it with the same one, or "
                    "pass framed=True"
                )
            return Payload(None, ids)
        if framed:
            raise InvalidArgument("framed=True is for token_ids")
        has_calls = bool(extra and extra.get("tool_calls"))
        if content is None and not has_calls:
            raise InvalidArgument("a turn needs content or token_ids")
        text = None if content is None else arguments.text_bytes(content, "content")
        if self.codec is None:
            if self.bound:
                raise FingerprintMismatch(
                    "the store was written with a tokenizer; open it with the same one"
                )
            raise InvalidArgument("content needs a tokenizer; this store takes token_ids only")
        if not text and not has_calls:
            raise InvalidArgument("a turn must not be empty")
        return Payload(text, None)

    def framed(
        self,
        role: str,
        payload: Payload,
        framed: bool = False,
        extra: dict[str, Any] | None = None,
        history: History | None = None,
    ) -> EncodedTurn | Plain:
        """Return a turn's IDs with their framing.

        Raises
        ------
        ControlTokenInContent, TemplateUnsafe, InvalidArgument
        """
        codec = self.codec
        if payload.ids is not None:
            if framed or codec is None:
                return Plain(payload.ids)
            codec.check_ids(role, payload.ids)
            if not codec.has_template:
                return Plain(payload.ids)
            return codec.frame_ids(role, payload.ids, _context(history, role), extra=extra)
        assert codec is not None  # `payload` refused text without a tokenizer
        encoded = codec.encode_turn(
            role,
            None if payload.text is None else payload.text.decode(),
            _context(history, role),
            extra=extra,
            on_control=self.on_control,
        )
        if not len(encoded.ids):
            raise InvalidArgument("a turn must have at least 1 token (got 0)")
        return encoded

    def passage(self, rows: VectorRows, i: int, given: tuple[Any, Any, Any], now: float) -> Draft:
        """Check and encode the passage of row `i`, given as (text, token_ids, metadata)."""
        text, token_ids, metadata = given
        raw_text = None if text is None else arguments.text_bytes(text, f"texts[{i}]")
        ids: Ids = np.empty(0, np.int32)
        if token_ids is not None:
            ids = as_ids(token_ids, self.vocab_size)
            if self.codec is not None:
                self.codec.check_ids("system", ids)
        elif text and self.codec is not None:
            ids = self.codec.encode_text(text, on_control=self.on_control)
        return Draft(
            flags=(ENTRY_TEXT if text is not None else 0) | (ENTRY_ZERO if rows.zero[i] else 0),
            ids=ids,
            text=raw_text,
            metadata=None if metadata is None else arguments.metadata_bytes(metadata),
            created_at=now,
            vector=rows.padded[i],
            vector_nbytes=rows.nbytes,
            factor=float(rows.factors[i]),
        )


def template_fields(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what of a turn's metadata is the template's, None for nothing."""
    if not metadata:
        return None
    fields = {name: metadata[name] for name in TEMPLATE_FIELDS if name in metadata}
    return fields or None


def digest(*parts: Any) -> bytes:
    """Return 16 bytes over everything that makes a turn's payload."""
    seal = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes):
            raw = part
        elif isinstance(part, np.ndarray):
            raw = part.tobytes()
        else:
            raw = repr(part).encode()
        # Kind and length keep parts apart: b"None" is not None.
        seal.update(b"%c%d:" % (type(part).__name__[0].encode(), len(raw)))
        seal.update(raw)
    return seal.digest()


def _context(history: History | None, role: str) -> TurnContext | None:
    return None if history is None else history.context(role)
