"""`SessionStore`: a directory that keeps chat sessions as token IDs.

This layer checks arguments, encodes text and frames turns; the compiled core below it (`_writer`,
`_reader`) takes bytes and IDs and keeps them safe.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import _opening, _reader, _writer, arguments, items
from kalos_ctx._batch import Draft
from kalos_ctx._intake import as_ids
from kalos_ctx._reader import (
    COLLECTION,
    ENTRY_FRAMED,
    ENTRY_TEXT,
    ENTRY_TTL,
    ENTRY_ZERO,
    KIND_SEGMENTS,
    KIND_SUMMARIES,
    SESSION,
    TENANT,
)
from kalos_ctx._cpu_ops import check_vectors
from kalos_ctx.arguments import ROLE_NAMES, name_bytes, role_code
from kalos_ctx.errors import (
    Conflict,
    DimensionMismatch,
    FingerprintMismatch,
    InvalidArgument,
    InvalidType,
    NotAStore,
    PassageNotFound,
    SessionExpired,
    SessionNotFound,
    StoreIOError,
    StoreNotFound,
    StoreReadOnly,
)
from kalos_ctx.types import ErasureReceipt, Page, VerifyReport

if TYPE_CHECKING:
    from kalos_ctx._reader import Passage, Turn
    from kalos_ctx.tokens import EncodedTurn, TokenCodec

log = logging.getLogger(__name__)

DTYPES = ("float32", "float16")
METRICS = ("cosine", "ip", "l2")
NO_FINGERPRINT = bytes(32)
# Template fields that a turn's metadata may carry (docs/templates.md).
TEMPLATE_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
PASSAGES_PER_BATCH = 16384
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "lustre", "gpfs"}
)


class SessionStore:
    """Chat sessions, passages and pinned segments in one directory.

    Opened by `SessionStore.open`. One process writes, any number read, also while it writes.
    Thread-safe. A context manager; use after `close` raises `StoreClosed`.

    Attributes
    ----------
    path : str
    mode : str
        `"a"` or `"r"`.
    codec : TokenCodec or None
        Tokenizer and template; None for a store of token IDs alone.
    recovery : dict
        What opening had to do: `replayed` records, `dropped_bytes` of a torn tail, `rebuilt` index.
    """

    def __init__(self) -> None:
        raise InvalidType("SessionStore is opened by SessionStore.open")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        mode: str = "a",
        *,
        tokenizer: Any = None,
        template: Any = None,
        vector_dim: int | None = None,
        vector_dtype: str = "float32",
        metric: str = "cosine",
        vocab_size: int | None = None,
        durability: str = "process",
        segment_bytes: int = 67108864,
        on_control: str = "literal",
        clock: Callable[[], float] | None = None,
    ) -> SessionStore:
        """Open a store, and make it where mode is "a" and there is none.

        Parameters
        ----------
        path : path
            A directory; links, files and network file systems are refused.
        mode : {"a", "r"}
            Writer, or reader. There is one writer at a time.
        tokenizer : path or tokenizers.Tokenizer, optional
            A `tokenizer.json`, its folder, or an object. Without one the store takes IDs only.
        template : str or path, optional
            Chat template in place of the one beside the tokenizer.
        vector_dim : int, optional
            Dimension of the vectors; fixed by the first vector where it is not given.
        vector_dtype : {"float32", "float16"}
            How rows are stored.
        metric : {"cosine", "ip", "l2"}
        vocab_size : int, optional
            IDs must be below it; the tokenizer's size where it is not given.
        durability : {"process", "group", "each"}
            What an acknowledged call survives: docs/durability.md.
        segment_bytes : int
            Size of log, token and vector segments, 65,536 to 2**32 - 2**20, a multiple of 4,096.
        on_control : {"literal", "refuse"}
            What happens to text that spells a control token.
        clock : callable, optional
            Gives seconds as `time.time()`; for tests and replays.

        Raises
        ------
        StoreNotFound, NotAStore, StoreLocked, StoreCorrupt, FormatVersionError,
        FingerprintMismatch, DimensionMismatch, TemplateUnsafe, StoreFull, StoreIOError,
        InvalidArgument, InvalidType
        """
        arguments.choice(mode, "mode", ("a", "r"))
        arguments.choice(durability, "durability", _opening.DURABILITIES)
        arguments.choice(on_control, "on_control", ("literal", "refuse"))
        config = {
            "segment_bytes": arguments.whole(segment_bytes, "segment_bytes", 65536, 2**32 - 2**20),
            "vector_dtype": arguments.choice(vector_dtype, "vector_dtype", DTYPES),
            "metric": arguments.choice(metric, "metric", METRICS),
            "vector_dim": 0
            if vector_dim is None
            else arguments.whole(vector_dim, "vector_dim", 1, 4096),
            "vocab_size": 0
            if vocab_size is None
            else arguments.whole(vocab_size, "vocab_size", 1, 2**31),
        }
        if segment_bytes % 4096:
            raise InvalidArgument(
                f"segment_bytes must be a multiple of 4096 (got {segment_bytes})"
            )
        if clock is not None and not callable(clock):
            raise InvalidType("clock must be callable")
        folder = _checked_path(path, mode)
        codec = _load_codec(tokenizer, template)
        config["fingerprint"] = NO_FINGERPRINT if codec is None else codec.fingerprint
        if codec is not None and not config["vocab_size"]:
            config["vocab_size"] = codec.vocab_size
        self = cls.__new__(cls)
        self.path = folder
        self.mode = mode
        self.codec: TokenCodec | None = codec
        self._clock = clock or time.time
        self._on_control = on_control
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        core = (
            _writer.StoreWriter(folder, durability=durability, config=config)
            if mode == "a"
            else _open_reader(folder)
        )
        self._core: Any = core
        try:
            self._bind(config)
        except BaseException:
            core.close()
            raise
        self.recovery: dict[str, Any] = dict(getattr(core, "recovery", {}))
        if self.recovery.get("flaw") or self.recovery.get("rebuilt"):
            log.warning(
                "opened %s after %s: %d records applied again, %d bytes of a torn tail dropped%s",
                folder,
                self.recovery["flaw"] or "a lost index",
                self.recovery["replayed"],
                self.recovery["dropped_bytes"],
                ", index built anew" if self.recovery["rebuilt"] else "",
            )
        return self

    def _bind(self, asked: Mapping[str, Any]) -> None:
        """Compare what the caller asked for with what the store is."""
        have = self._core.control.config
        self._vocab_size = have["vocab_size"] or 0
        self._vector_dtype = have["vector_dtype"]
        self.metric = have["metric"]
        for name, options in (("vector_dtype", DTYPES), ("metric", METRICS)):
            # The defaults stand for "as the store is".
            if asked[name] and options[asked[name]] != have[name]:
                raise FingerprintMismatch(
                    f"{name} is {have[name]} in this store (got {options[asked[name]]})"
                )
        if asked["vector_dim"] and asked["vector_dim"] != have["vector_dim"]:
            if have["vector_dim"] or self.mode == "r":
                raise DimensionMismatch(
                    f"vector_dim is {have['vector_dim']} in this store (got {asked['vector_dim']})"
                )
            self._core.set_vector_dim(asked["vector_dim"])
        fingerprint = asked["fingerprint"]
        self._bound = have["fingerprint"] != NO_FINGERPRINT
        if fingerprint not in (NO_FINGERPRINT, have["fingerprint"]):
            if self._bound or self.mode == "r" or self._core.index.num_slots:
                raise FingerprintMismatch(
                    "the store was written with another tokenizer or chat template"
                )
            self._core.set_fingerprint(fingerprint, asked["vocab_size"])
            self._vocab_size = asked["vocab_size"]
            self._bound = True
        elif asked["vocab_size"] and asked["vocab_size"] != self._vocab_size:
            raise FingerprintMismatch(
                f"vocab_size is {self._vocab_size or None} in this store "
                f"(got {asked['vocab_size']})"
            )

    # ---- Turns ----------------------------------------------------------------------------------

    def append(
        self,
        session: str | bytes,
        role: str,
        content: str | None = None,
        *,
        tenant: str | bytes = "",
        token_ids: Any = None,
        vector: Any = None,
        group: str | int | None = None,
        key: str | bytes | None = None,
        created_at: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl: float | None = None,
        framed: bool = False,
    ) -> int:
        """Append a turn and return its sequence number.

        Parameters
        ----------
        session, tenant : str or bytes
            Opaque, 1 to 1,024 bytes (`tenant` may be empty).
        role : {"system", "developer", "user", "assistant", "tool", "function"}
        content : str, optional
            Text; encoded as a whole turn, framed by the template. Give this or `token_ids`.
        token_ids : sequence of int or integer buffer of shape (L,), optional
            Stored as given and never encoded again; framed unless `framed`.
        vector : float array of shape (dim,), optional
            For recall from the session's own turns.
        group : str or int, optional
            Turns that live and die together: a tool call and its results.
        key : str or bytes, optional
            The same key and payload again returns the same seq.
        created_at : float, optional
            Seconds; the clock's time where it is not given.
        metadata : mapping, optional
            JSON values. `tool_calls`, `tool_call_id`, `name`, `reasoning_content` and `thinking`
            are given to the template.
        ttl : float, optional
            Seconds until the turn is gone.
        framed : bool
            `token_ids` carry their framing, for which the caller vouches.

        Raises
        ------
        ControlTokenInContent, InvalidTokenId, IdempotencyConflict, SessionExpired,
        DimensionMismatch, NonFiniteVector, TemplateUnsafe, FingerprintMismatch, StoreReadOnly,
        StoreFull, StoreIOError, InvalidArgument, InvalidType
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        now = self._clock()
        code = role_code(role)
        if (
            self.codec is None
            and content is None
            and vector is None
            and group is None
            and key is None
            and metadata is None
            and ttl is None
            and (framed or not self._bound)
        ):
            # The bare case, IDs into a store without a tokenizer, is the one whose cost counts.
            ids = as_ids(self._given(token_ids), self._vocab_size)
            if not len(ids):
                raise InvalidArgument("a turn must have at least 1 token (got 0)")
            when = now if created_at is None else arguments.seconds(created_at, "created_at")
            draft = Draft(role=code, ids=ids, created_at=when, flags=ENTRY_FRAMED if framed else 0)
            seqs: list[int] = core.append_turns(tenant_b, session_b, [draft], now)
            return seqs[0]
        turn = {
            "role": role, "content": content, "token_ids": token_ids, "vector": vector,
            "group": group, "key": key, "created_at": created_at, "metadata": metadata,
            "ttl": ttl, "framed": framed,
        }  # fmt: skip
        return self._extend(tenant_b, session_b, [turn], now)[0]

    def extend(
        self,
        session: str | bytes,
        turns: Iterable[Mapping[str, Any]],
        *,
        tenant: str | bytes = "",
    ) -> list[int]:
        """Append several turns, all or none, and return their sequence numbers.

        Parameters
        ----------
        turns : iterable of mappings
            Each with the arguments of `append`.

        Raises
        ------
        As `append`; a message names the turn's place.
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        self._writer()
        if isinstance(turns, Mapping | str | bytes):
            raise InvalidType("turns must be an iterable of mappings")
        rows = list(turns)
        for i, turn in enumerate(rows):
            if not isinstance(turn, Mapping):
                raise InvalidType(f"turns[{i}] must be a mapping (got {type(turn).__name__})")
            if not turn.keys() <= TURN_FIELDS:
                unknown = sorted(str(field) for field in turn.keys() - TURN_FIELDS)
                raise InvalidArgument(f"turns[{i}] has unknown fields: {', '.join(unknown)}")
            if "role" not in turn:
                raise InvalidArgument(f"turns[{i}] has no role")
        if not rows:
            return []
        return self._extend(tenant_b, session_b, rows, self._clock())

    def _extend(
        self, tenant: bytes, session: bytes, turns: Sequence[Mapping[str, Any]], now: float
    ) -> list[int]:
        core = self._writer()
        with core.mutex:
            # The framing of a turn may depend on those before it, which the mutex keeps in place.
            previous = _History(core, tenant, session) if self.codec else None
            drafts = [self._draft(turn, previous, now) for turn in turns]
            self._fix_dimension(drafts)
            seqs: list[int] = core.append_turns(tenant, session, [d for d, _ in drafts], now)
        return seqs

    def _draft(
        self, turn: Mapping[str, Any], previous: _History | None, now: float
    ) -> tuple[Draft, int]:
        """Prepare one turn; (draft, vector dimension or 0)."""
        get = turn.get
        role, content, token_ids = turn["role"], get("content"), get("token_ids")
        code = role_code(role)
        framed = get("framed", False)
        if not isinstance(framed, bool):
            raise InvalidType(f"framed must be a bool (got {type(framed).__name__})")
        metadata = get("metadata")
        raw_metadata = None if metadata is None else arguments.metadata_bytes(metadata)
        encoded = self._encode(role, content, token_ids, framed, metadata, previous)
        flags = (ENTRY_FRAMED if framed else 0) | (ENTRY_TEXT if content is not None else 0)
        created_at, ttl = get("created_at"), get("ttl")
        when = now if created_at is None else arguments.seconds(created_at, "created_at")
        expires_at = 0.0
        if ttl is not None:
            expires_at = now + arguments.seconds(ttl, "ttl", positive=True)
            flags |= ENTRY_TTL
        row, nbytes, factor, dim = None, 0, 0.0, 0
        if get("vector") is not None:
            checked = self._vectors(get("vector"), 1)
            row, nbytes, dim = checked.padded[0], checked.nbytes, checked.dim
            factor = float(checked.factors[0])
            flags |= ENTRY_ZERO if checked.zero[0] else 0
        group, key = get("group"), get("key")
        raw_group = None if group is None else arguments.group_bytes(group)
        raw_key = None if key is None else arguments.key_bytes(key)
        raw_text = None if content is None else arguments.text_bytes(content, "content")
        draft = Draft(
            role=code,
            flags=flags,
            ids=encoded.ids,
            live=encoded.live_ids,
            prefix_len=encoded.prefix_len,
            suffix_len=encoded.suffix_len,
            trim_prev=encoded.trim_prev,
            text=raw_text,
            metadata=raw_metadata,
            group=raw_group,
            key=raw_key,
            digest=None
            if raw_key is None
            else _digest(role, raw_text, encoded.ids if raw_text is None else None, framed,
                         raw_group, raw_metadata, row, ttl, created_at),
            created_at=when,
            expires_at=expires_at,
            vector=row,
            vector_nbytes=nbytes,
            factor=factor,
        )  # fmt: skip
        if previous is not None:
            previous.note(role, _template_fields(metadata))
        return draft, dim

    def _encode(
        self,
        role: str,
        content: str | None,
        token_ids: Any,
        framed: bool,
        metadata: Mapping[str, Any] | None,
        previous: _History | None,
    ) -> EncodedTurn | _Plain:
        """The turn's IDs with their framing."""
        codec = self.codec
        extra = _template_fields(metadata)
        if content is not None and token_ids is not None:
            raise InvalidArgument("give content or token_ids, not both")
        if token_ids is not None:
            ids = as_ids(token_ids, self._vocab_size)
            if not len(ids):
                raise InvalidArgument("a turn must have at least 1 token (got 0)")
            if framed:
                return _Plain(ids)
            if codec is None:
                if self._bound:
                    raise FingerprintMismatch(
                        "the store was written with a tokenizer; open it with the same one, or "
                        "pass framed=True"
                    )
                return _Plain(ids)
            codec.check_ids(role, ids)
            if not codec.has_template:
                return _Plain(ids)
            return codec.frame_ids(role, ids, _context(previous, role), extra=extra)
        if framed:
            raise InvalidArgument("framed=True is for token_ids")
        if content is None and not (extra and extra.get("tool_calls")):
            raise InvalidArgument("a turn needs content or token_ids")
        if codec is None:
            if self._bound:
                raise FingerprintMismatch(
                    "the store was written with a tokenizer; open it with the same one"
                )
            raise InvalidArgument("content needs a tokenizer; this store takes token_ids only")
        if content is not None:
            arguments.text_bytes(content, "content")
            if not content and not (extra and extra.get("tool_calls")):
                raise InvalidArgument("a turn must not be empty")
        encoded = codec.encode_turn(
            role, content, _context(previous, role), extra=extra, on_control=self._on_control
        )
        if not len(encoded.ids):
            raise InvalidArgument("a turn must have at least 1 token (got 0)")
        return encoded

    @staticmethod
    def _given(token_ids: Any) -> Any:
        if token_ids is None:
            raise InvalidArgument("a turn needs content or token_ids")
        return token_ids

    def turns(
        self,
        session: str | bytes,
        start: int | None = None,
        stop: int | None = None,
        *,
        tenant: str | bytes = "",
    ) -> list[Turn]:
        """Return the turns with start <= seq < stop, by the rules of slices.

        Raises
        ------
        SessionNotFound, SessionExpired, StoreCorrupt, InvalidType
        """
        for value, what in ((start, "start"), (stop, "stop")):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise InvalidType(f"{what} must be an int (got {type(value).__name__})")
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        found: list[Turn] | None = self._core.turns(
            tenant_b, session_b, start, stop, self._clock()
        )
        if found is None:
            raise SessionNotFound("there is no such session in this tenant")
        if not found:
            self._state(tenant_b, session_b)
        return found

    def count(self, session: str | bytes, *, tenant: str | bytes = "") -> int:
        """Return the number of turns; 0 for an unknown or expired session."""
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        state = self._core.slot_state(SESSION, tenant_b, session_b)
        if state is None:
            return 0
        if state["ttl"]:
            return len(self._core.turns(tenant_b, session_b, None, None, self._clock()))
        total: int = state["count"]
        return total

    def _state(self, tenant: bytes, session: bytes) -> dict[str, Any]:
        """The session's state; SessionNotFound or SessionExpired otherwise."""
        state: dict[str, Any] | None = self._core.slot_state(SESSION, tenant, session)
        if state is None:
            raise SessionNotFound("there is no such session in this tenant")
        if state["expires_at"] is not None and state["expires_at"] <= self._clock():
            raise SessionExpired("every turn of the session has expired")
        return state

    def sessions(
        self,
        *,
        tenant: str | bytes = "",
        prefix: str | bytes | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """List sessions in the order in which they were made.

        Stable while others are added: pages neither repeat nor miss a session.

        Parameters
        ----------
        prefix : str or bytes, optional
            Names that begin with it.
        cursor : str, optional
            From the page before.
        limit : int
            Names a page, 1 to 100,000.

        Raises
        ------
        InvalidArgument, InvalidType
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        begins = b"" if prefix is None else name_bytes(prefix, "prefix", empty=True)
        arguments.whole(limit, "limit", 1, 100_000)
        first = 0
        if cursor is not None:
            if not isinstance(cursor, str) or not cursor.isascii() or not cursor.isdigit():
                raise InvalidArgument("cursor must be one that a page gave")
            first = min(int(cursor), 2**32 - 1)
        now = self._clock()
        names: list[str | bytes] = []
        self._core.slot_state(SESSION, b"", b"\0")  # closed? another generation?
        for slot_id, _, owner, name, _, expires in self._core.slots(first, SESSION):
            if owner != tenant_b or not name.startswith(begins):
                continue
            if expires is not None and expires <= now:
                continue
            if len(names) == limit:
                return Page(names, str(slot_id))
            names.append(arguments.name_out(name))
        return Page(names, None)

    def tenants(self) -> list[str | bytes]:
        """Return the tenants that have a session, a collection or a segment."""
        self._core.slot_state(SESSION, b"", b"\0")
        found = {
            row[2] for kind in (SESSION, COLLECTION, TENANT) for row in self._core.slots(0, kind)
        }
        return [arguments.name_out(name) for name in sorted(found)]

    # ---- Segments and summaries -----------------------------------------------------------------

    def set_segment(
        self,
        session: str | bytes | None,
        name: str,
        content: str | None = None,
        *,
        tenant: str | bytes = "",
        token_ids: Any = None,
        role: str = "system",
        placement: str = "head",
        volatile: bool = False,
    ) -> None:
        """Pin a segment under a name, replace it, or remove it.

        Parameters
        ----------
        session : str, bytes or None
            None: for every session of the tenant.
        content, token_ids
            As in `append`; neither removes the segment.
        role : str
            `"tools"` (head only): content is a JSON list of tool schemas for the template.
        placement : {"head", "before_last_user", "end"}
        volatile : bool
            The text changes often. Windows put volatile head segments behind the stable ones, so
            that they do not end the common prefix early.

        Raises
        ------
        As `append`.
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        slot, owner = (TENANT, b"") if session is None else (SESSION, name_bytes(session, "session"))
        label = name_bytes(name, "name").decode() if isinstance(name, str) else None
        if label is None:
            raise InvalidType(f"name must be a str (got {type(name).__name__})")
        place = arguments.choice(placement, "placement", items.PLACEMENTS)
        if not isinstance(volatile, bool):
            raise InvalidType(f"volatile must be a bool (got {type(volatile).__name__})")
        item = None
        if content is not None or token_ids is not None:
            item = self._segment(label, content, token_ids, role, place, volatile)

        def compose(old: bytes, count: int, stage: items.Stage) -> bytes:
            kept = list(items.unpack(old))
            at = next((i for i, one in enumerate(kept) if one.name == label), None)
            if at is not None and item is None:
                del kept[at]
            elif at is not None and item is not None:
                kept[at] = item.placed(stage)
            elif item is not None:
                kept.append(item.placed(stage))
            return items.pack(kept)

        if item is None and self._core.slot_state(slot, tenant_b, owner) is None:
            return
        core.put_table(slot, tenant_b, owner, KIND_SEGMENTS, compose)

    def _segment(
        self, name: str, content: str | None, token_ids: Any, role: str, place: int, volatile: bool
    ) -> items.Item:
        if role == "tools":
            if place or content is None or self.codec is None or not self.codec.has_template:
                raise InvalidArgument(
                    "role 'tools' is for head segments with content, in a store with a template"
                )
            encoded: Any = _Plain(_joined(self.codec.head([(name, "tools", content)])))
            code = 0
        else:
            code = role_code(role)
            if place == 0 and content is not None and self.codec is not None:
                arguments.text_bytes(content, "content")
                if token_ids is not None:
                    raise InvalidArgument("give content or token_ids, not both")
                if not content:
                    raise InvalidArgument("a segment must not be empty")
                encoded = (
                    _Plain(_joined(self.codec.head([(name, role, content)], now=self._clock())))
                    if self.codec.has_template
                    else self._encode(role, content, None, False, None, None)
                )
            else:
                encoded = self._encode(role, content, token_ids, False, None, None)
        return items.Item(
            name=name,
            role=code if role != "tools" else TOOLS_ROLE,
            ids=np.asarray(encoded.ids, np.int32),
            text=content,
            placement=place,
            volatile=volatile,
            created_at=self._clock(),
            prefix_len=encoded.prefix_len,
            suffix_len=encoded.suffix_len,
        )

    def segments(
        self, session: str | bytes | None, *, tenant: str | bytes = ""
    ) -> dict[str, dict[str, Any]]:
        """Return the pinned segments by name, in order (`session=None`: the tenant's own).

        Each is a dict with `role`, `text`, `token_ids`, `placement`, `volatile`.
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        slot, owner = (TENANT, b"") if session is None else (SESSION, name_bytes(session, "session"))
        state = self._core.slot_state(slot, tenant_b, owner)
        if state is None:
            if session is None:
                return {}
            raise SessionNotFound("there is no such session in this tenant")
        if not state["segments_lsn"]:
            return {}
        return {
            item.name: {
                "role": _role_name(item.role),
                "text": item.text,
                "token_ids": item.ids,
                "placement": items.PLACEMENTS[item.placement],
                "volatile": item.volatile,
            }
            for item in items.unpack(self._core.table_bytes(state["segments_lsn"])[0])
        }

    def summarize(
        self,
        session: str | bytes,
        start: int,
        stop: int,
        content: str | None = None,
        *,
        tenant: str | bytes = "",
        token_ids: Any = None,
        role: str = "system",
    ) -> None:
        """Let a text stand for the turns `[start, stop)` in windows; the turns stay readable.

        A summary that covers an older one's range replaces it; one that overlaps it in part is
        refused.

        Raises
        ------
        SessionNotFound, SessionExpired, Conflict, and as `append`
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        first = arguments.whole(start, "start")
        last = arguments.whole(stop, "stop")
        if first >= last:
            raise InvalidArgument(f"start must be below stop (got {first} and {last})")
        with core.mutex:
            state = self._state(tenant_b, session_b)
            if last > state["count"]:
                raise InvalidArgument(
                    f"stop must be at most the number of turns, {state['count']} (got {last})"
                )
            encoded = self._encode(role, content, token_ids, False, None, None)
            item = items.Item(
                name="",
                role=role_code(role),
                ids=np.asarray(encoded.ids, np.int32),
                text=content,
                start=first,
                stop=last,
                at_count=state["count"],
                created_at=self._clock(),
                prefix_len=encoded.prefix_len,
                suffix_len=encoded.suffix_len,
            )

            def compose(old: bytes, count: int, stage: items.Stage) -> bytes:
                kept = []
                for one in items.unpack(old):
                    if first <= one.start and one.stop <= last:
                        continue
                    if one.start < last and first < one.stop:
                        raise Conflict(
                            f"the range overlaps a summary of [{one.start}, {one.stop}) in part"
                        )
                    kept.append(one)
                kept.append(item.placed(stage))
                kept.sort(key=lambda one: one.start)
                return items.pack(kept)

            core.put_table(SESSION, tenant_b, session_b, KIND_SUMMARIES, compose)

    def summaries(
        self, session: str | bytes, *, tenant: str | bytes = ""
    ) -> list[dict[str, Any]]:
        """Return the session's summaries in order: `start`, `stop`, `role`, `text`, `token_ids`."""
        state = self._state(
            name_bytes(tenant, "tenant", empty=True), name_bytes(session, "session")
        )
        if not state["summaries_lsn"]:
            return []
        return [
            {
                "start": one.start,
                "stop": one.stop,
                "role": ROLE_NAMES[one.role],
                "text": one.text,
                "token_ids": one.ids,
            }
            for one in items.unpack(self._core.table_bytes(state["summaries_lsn"])[0])
        ]

    # ---- Rollback and fork ----------------------------------------------------------------------

    def rollback(
        self,
        session: str | bytes,
        to: int,
        *,
        tenant: str | bytes = "",
        expect_last: int | None = None,
    ) -> int:
        """Keep the turns with seq < `to`; return how many went. Their keys are free again.

        Raises
        ------
        SessionNotFound, SessionExpired
        Conflict
            The last seq is not `expect_last` (-1 for none); nothing was changed.
        """
        core = self._writer()
        target = arguments.whole(to, "to", 0, 2**32 - 1)
        if expect_last is not None:
            expect_last = arguments.whole(expect_last, "expect_last", -1)
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        with core.mutex:
            self._state(tenant_b, session_b)
            gone: int = core.rollback(tenant_b, session_b, target, expect_last)
        return gone

    def fork(
        self,
        session: str | bytes,
        new_session: str | bytes,
        *,
        tenant: str | bytes = "",
        at: int | None = None,
    ) -> None:
        """Make `new_session` share the turns before `at` (all, where it is None); no token is copied.

        Pinned segments and the summaries of those turns go along. Idempotency keys do not.

        Raises
        ------
        SessionNotFound, SessionExpired, Conflict
        """
        core = self._writer()
        if at is not None:
            at = arguments.whole(at, "at")
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        child_b = name_bytes(new_session, "new_session")
        with core.mutex:
            self._state(tenant_b, session_b)
            core.fork(tenant_b, session_b, child_b, at)

    # ---- Passages -------------------------------------------------------------------------------

    def add_passages(
        self,
        collection: str | bytes,
        vectors: Any,
        *,
        tenant: str | bytes = "",
        texts: Sequence[str | None] | None = None,
        token_ids: Sequence[Any] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        ids: Any = None,
    ) -> NDArray[np.uint64]:
        """Add passages with their vectors and return their IDs.

        Parameters
        ----------
        vectors : float array of shape (n, dim)
        texts, token_ids, metadata : sequences of length n, optional
            IDs are stored as given; text without IDs is encoded where there is a tokenizer.
        ids : int array of shape (n,), optional
            Unique per tenant, above every ID used before; the next ones where not given.

        Returns
        -------
        uint64 array of shape (n,)

        Raises
        ------
        Conflict
            An ID was used, or is not above those used.
        DimensionMismatch, NonFiniteVector, ControlTokenInContent, InvalidTokenId,
        InvalidArgument, InvalidType, StoreReadOnly, StoreFull

        Notes
        -----
        All or nothing, up to 16,384 passages; of a larger call a crash may leave the first
        multiples of that.
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        collection_b = name_bytes(collection, "collection")
        checked = self._vectors(vectors, 2)
        n = len(checked.factors)
        columns = [
            _column(value, name, n)
            for value, name in ((texts, "texts"), (token_ids, "token_ids"), (metadata, "metadata"))
        ]
        order, numbers = _passage_ids(ids, n)
        now = self._clock()
        drafts = [
            (self._passage(checked, i, *(column[i] for column in columns), now), checked.dim)
            for i in order
        ]
        with core.mutex:
            self._fix_dimension(drafts)
            given: list[int] = []
            for at in range(0, n, PASSAGES_PER_BATCH):
                part = [d for d, _ in drafts[at : at + PASSAGES_PER_BATCH]]
                chosen = None if numbers is None else numbers[at : at + PASSAGES_PER_BATCH]
                given += core.add_passages(tenant_b, collection_b, part, chosen)
        out = np.empty(n, np.uint64)
        out[order] = np.array(given, np.uint64)
        return out

    def _passage(
        self,
        checked: _Vectors,
        i: int,
        text: str | None,
        token_ids: Any,
        metadata: Mapping[str, Any] | None,
        now: float,
    ) -> Draft:
        raw_text = None if text is None else arguments.text_bytes(text, f"texts[{i}]")
        ids: NDArray[np.int32] = np.empty(0, np.int32)
        if token_ids is not None:
            ids = as_ids(token_ids, self._vocab_size)
            if self.codec is not None:
                self.codec.check_ids("system", ids)
        elif text and self.codec is not None:
            ids = self.codec.encode_text(text, on_control=self._on_control)
        return Draft(
            flags=(ENTRY_TEXT if text is not None else 0) | (ENTRY_ZERO if checked.zero[i] else 0),
            ids=ids,
            text=raw_text,
            metadata=None if metadata is None else arguments.metadata_bytes(metadata),
            created_at=now,
            vector=checked.padded[i],
            vector_nbytes=checked.nbytes,
            factor=float(checked.factors[i]),
        )

    def passages(
        self, collection: str | bytes, ids: Any, *, tenant: str | bytes = ""
    ) -> list[Passage]:
        """Return passages by ID.

        Raises
        ------
        PassageNotFound
        """
        slot, places, dead = self._passage_places(collection, ids, tenant)
        if any(dead):
            raise PassageNotFound(f"passage {list(ids)[dead.index(True)]} was deleted")
        return [self._core.passage_at(slot, place) for place in places]

    def delete_passages(
        self, collection: str | bytes, ids: Any, *, tenant: str | bytes = ""
    ) -> int:
        """Delete passages, their bytes included; return how many went.

        One that is deleted already counts as gone; one that never was raises PassageNotFound and
        nothing is changed.
        """
        core = self._writer()
        with core.mutex:
            _, places, _ = self._passage_places(collection, ids, tenant)
            gone: int = core.drop_passages(
                name_bytes(tenant, "tenant", empty=True),
                name_bytes(collection, "collection"),
                sorted(set(places)),
            )
        return gone

    def _passage_places(
        self, collection: Any, ids: Any, tenant: Any
    ) -> tuple[int, list[int], list[bool]]:
        """Slot, places in the collection, and which are dead."""
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        collection_b = name_bytes(collection, "collection")
        wanted = [arguments.whole(one, "ids", 0, 2**64 - 1) for one in ids]
        state = self._core.slot_state(COLLECTION, tenant_b, collection_b)
        if state is None:
            raise PassageNotFound("there is no such collection in this tenant")
        known, _, _, flags, _, _ = self._core.entry_columns(state["slot_off"], 0)
        places = np.searchsorted(known, np.array(wanted, np.uint64)).tolist()
        for place, one in zip(places, wanted, strict=True):
            if place >= len(known) or int(known[place]) != one:
                raise PassageNotFound(f"there is no passage {one} in this collection")
        return state["slot_off"], places, [bool(flags[place] & 1) for place in places]

    # ---- Deletion -------------------------------------------------------------------------------

    def delete(self, session: str | bytes, *, tenant: str | bytes = "") -> ErasureReceipt:
        """Erase a session: windows, recall, listings, export, and the bytes of the files.

        A fork survives its parent's erasure; bytes that both share stay until the last one goes.

        Raises
        ------
        SessionNotFound
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        with core.mutex:
            found = core.erase(SESSION, tenant_b, session_b)
        if found is None:
            raise SessionNotFound("there is no such session in this tenant")
        self._tell_erased(tenant_b, session_b)
        counts, digest = found
        return ErasureReceipt(counts, digest)

    def delete_tenant(self, tenant: str | bytes) -> ErasureReceipt:
        """Erase everything of a tenant: sessions, segments, collections.

        Interrupted, it leaves whole sessions; call it again.
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        total = dict.fromkeys(("turns", "vectors", "summaries", "segments", "passages"), 0)
        seal = hashlib.sha256()
        with core.mutex:
            for kind in (SESSION, COLLECTION, TENANT):
                for name in [row[3] for row in core.slots(0, kind) if row[2] == tenant_b]:
                    counts, digest = core.erase(kind, tenant_b, name)
                    seal.update(digest.encode())
                    for what, n in counts.items():
                        total[what] += n
                    if kind == SESSION:
                        self._tell_erased(tenant_b, name)
        return ErasureReceipt(total, seal.hexdigest())

    def listen(self, listener: Any) -> None:
        """Have `listener.session_erased(tenant, session)` called at erasures; held weakly."""
        self._listeners.add(listener)

    def _tell_erased(self, tenant: bytes, session: bytes) -> None:
        for listener in list(self._listeners):
            listener.session_erased(tenant, session)

    # ---- The whole store ------------------------------------------------------------------------

    def sync(self) -> None:
        """Make everything that was acknowledged durable, whatever the durability."""
        self._writer().checkpoint()

    def compact(self) -> dict[str, int]:
        """Write the living data into new files and drop the old ones; return bytes before and after."""
        from kalos_ctx._compaction import compact

        before = self._nbytes()
        compact(self._writer(), self._clock())
        return {"before": before, "after": self._nbytes()}

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read everything and compare it with its checksums, and the index with the log.

        Parameters
        ----------
        progress : callable, optional
            Called with (bytes read, bytes in all) now and then.
        """
        from kalos_ctx._verification import verify

        return verify(self._core, progress)

    def snapshot(self, path: str | os.PathLike[str]) -> None:
        """Copy the store as it is now to a new folder, which opens as a store of its own."""
        from kalos_ctx._verification import snapshot

        snapshot(self._writer(), os.fspath(path))

    def stats(self) -> dict[str, Any]:
        """Return what the store is and holds: counts, bytes by kind of file, recovery."""
        self._core.slot_state(SESSION, b"", b"\0")
        config = self._core.control.config
        config["fingerprint"] = config["fingerprint"].hex() if self._bound else None
        rows = [row for row in self._core.slots(0, SESSION)]
        return {
            **config,
            "mode": self.mode,
            "generation": self._core.generation,
            "sessions": len(rows),
            "turns": sum(row[4] for row in rows),
            "passages": sum(row[4] for row in self._core.slots(0, COLLECTION)),
            "bytes": self._bytes_by_kind(),
            "durability": getattr(self._core, "durability", None),
            "recovery": self.recovery,
        }

    def _bytes_by_kind(self) -> dict[str, int]:
        folder = os.path.join(self.path, f"gen-{self._core.generation:06d}")
        kinds = {"log": 0, "tokens": 0, "vectors": 0, "index": 0}
        labels = {"log": "log", "tok": "tokens", "vec": "vectors"}
        for entry in os.scandir(folder):
            kinds[labels.get(entry.name[:3], "index")] += entry.stat().st_size
        return kinds

    def _nbytes(self) -> int:
        return sum(self._bytes_by_kind().values())

    def close(self) -> None:
        """Close in order. Idempotent; arrays that lie in the store's files stay valid."""
        self._core.close()

    def __enter__(self) -> SessionStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SessionStore({self.path!r}, mode={self.mode!r})"

    # ---- Helpers --------------------------------------------------------------------------------

    def _writer(self) -> Any:
        if self.mode != "a":
            raise StoreReadOnly("the store was opened for reading")
        return self._core

    def _vectors(self, value: Any, ndim: int) -> _Vectors:
        """Check vectors and bring them into the store's form."""
        try:
            array = np.asarray(value)
        except ValueError:
            raise DimensionMismatch("vectors must all have one length") from None
        if array.ndim != ndim:
            what = "a vector must have 1 dimension" if ndim == 1 else "vectors must be (n, dim)"
            raise DimensionMismatch(f"{what} (got {array.ndim} dimensions)")
        dim = self._core.control.config["vector_dim"]
        found = array.shape[-1]
        if dim is not None and found != dim:
            raise DimensionMismatch(f"vectors must have {dim} dimensions (got {found})")
        if not 1 <= found <= 4096:
            raise DimensionMismatch(f"vectors must have 1 to 4096 dimensions (got {found})")
        checked = check_vectors(array.reshape(-1, found), dtype=self._vector_dtype)
        return _Vectors(checked)

    def _fix_dimension(self, drafts: Sequence[tuple[Draft, int]]) -> None:
        """Let the first vector fix the dimension; call with the mutex held."""
        dims = {dim for _, dim in drafts if dim}
        if len(dims) > 1:
            raise DimensionMismatch("vectors must all have one length")
        if dims and self._core.control.config["vector_dim"] is None:
            self._core.set_vector_dim(dims.pop())


TURN_FIELDS = frozenset(
    {
        "role", "content", "token_ids", "vector", "group", "key", "created_at", "metadata", "ttl",
        "framed",
    }
)  # fmt: skip
TOOLS_ROLE = 255


class _Plain:
    """IDs without framing, in the shape of an EncodedTurn."""

    __slots__ = ("ids",)
    prefix_len = suffix_len = trim_prev = 0
    live_ids = None

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self.ids = ids


class _Vectors:
    """Checked rows, padded with zeros to the stride in which the store keeps them."""

    __slots__ = ("dim", "factors", "nbytes", "padded", "zero")

    def __init__(self, checked: Any) -> None:
        n, self.dim = checked.stored.shape
        self.nbytes = self.dim * checked.stored.itemsize
        self.padded = np.zeros((n, (self.nbytes + 15) // 16 * 16), np.uint8)
        self.padded[:, : self.nbytes] = np.ascontiguousarray(checked.stored).view(np.uint8).reshape(
            n, self.nbytes
        )
        self.factors = checked.factors
        self.zero = checked.zero


class _History:
    """What the codec needs of the turns before the next one; read when first asked."""

    def __init__(self, core: Any, tenant: bytes, session: bytes) -> None:
        self._core, self._tenant, self._session = core, tenant, session
        self._last: tuple[str, dict[str, Any] | None] | None = None
        self._call: dict[str, Any] | None = None
        self._read = False

    def _load(self) -> None:
        self._read = True
        state = self._core.slot_state(SESSION, self._tenant, self._session)
        if state is None or not state["count"]:
            return
        last = self._turn(state["count"] - 1)
        if last is None:
            return
        self._last = (last.role, _template_fields(last.metadata))
        if last.role != "assistant" and state["last_assistant"]:
            call = self._turn(state["last_assistant"] - 1)
            self._call = None if call is None else _template_fields(call.metadata)

    def _turn(self, seq: int) -> Any:
        found = self._core.turns(self._tenant, self._session, seq, seq + 1, float("-inf"))
        return found[0] if found else None

    def context(self, role: str) -> Any:
        from kalos_ctx.template import TurnContext

        if not self._read:
            self._load()
        if self._last is None:
            return None
        before, extra = self._last
        call = self._call if role == "tool" and before != "assistant" else None
        return TurnContext(before, extra, call)

    def note(self, role: str, extra: dict[str, Any] | None) -> None:
        """A further turn of the same call follows this one."""
        if not self._read:
            self._load()
        if self._last is not None and self._last[0] == "assistant":
            self._call = self._last[1]
        self._last = (role, extra)


def _context(previous: _History | None, role: str) -> Any:
    return None if previous is None else previous.context(role)


def _template_fields(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not metadata:
        return None
    fields = {name: metadata[name] for name in TEMPLATE_FIELDS if name in metadata}
    return fields or None


def _digest(*parts: Any) -> bytes:
    """16 bytes over everything that makes a turn's payload."""
    seal = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part if isinstance(part, bytes) else (
            np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray)
            else repr(part).encode()
        )  # fmt: skip
        seal.update(len(raw).to_bytes(8, "little"))
        seal.update(raw)
    return seal.digest()


def _joined(head: list[tuple[str, NDArray[np.int32]]]) -> NDArray[np.int32]:
    if not head:
        return np.empty(0, np.int32)
    return np.concatenate([ids for _, ids in head]).astype(np.int32)


def _role_name(code: int) -> str:
    return "tools" if code == TOOLS_ROLE else ROLE_NAMES[code]


def _column(value: Any, name: str, n: int) -> Sequence[Any]:
    if value is None:
        return [None] * n
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        raise InvalidType(f"{name} must be a sequence with one item a passage")
    if len(value) != n:
        raise InvalidArgument(f"{name} must have one item a passage, {n} (got {len(value)})")
    return value  # type: ignore[no-any-return]


def _passage_ids(ids: Any, n: int) -> tuple[list[int], list[int] | None]:
    """The order in which passages are stored (IDs ascend), and their IDs in it."""
    if ids is None:
        return list(range(n)), None
    numbers = [arguments.whole(one, "ids", 0, 2**64 - 2) for one in ids]
    if len(numbers) != n:
        raise InvalidArgument(f"ids must have one item a passage, {n} (got {len(numbers)})")
    if len(set(numbers)) != n:
        raise Conflict("ids must not repeat")
    order = sorted(range(n), key=numbers.__getitem__)
    return order, [numbers[i] for i in order]


def _checked_path(path: Any, mode: str) -> str:
    """The store's folder; what is not a folder of this machine is refused."""
    try:
        folder = os.fspath(path)
    except TypeError:
        raise InvalidType(f"path must be a path (got {type(path).__name__})") from None
    if isinstance(folder, bytes):
        folder = os.fsdecode(folder)
    if not folder or "\0" in folder:
        raise InvalidArgument("path must not be empty and must not hold NUL")
    folder = os.path.abspath(folder)
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        if mode == "r":
            raise StoreNotFound("there is no store at the path") from None
        return folder
    except OSError as e:
        raise StoreIOError(e.errno, f"cannot look at the path: {e.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise NotAStore("the path is a file, a link, a FIFO or a device; a store is a directory")
    if _file_system(folder) in NETWORK_FILE_SYSTEMS:
        raise NotAStore("the path lies on a network file system, where mappings are not coherent")
    return folder


def _file_system(folder: str) -> str:
    """Type of the file system a folder lies on, from the kernel's list of mounts."""
    best, kind = "", ""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split(" ")
                where = fields[1].encode().decode("unicode_escape", "replace")
                inside = folder == where or folder.startswith(where.rstrip("/") + "/")
                if inside and len(where) >= len(best):
                    best, kind = where, fields[2]
    except OSError:
        return ""
    return kind


def _load_codec(tokenizer: Any, template: Any) -> TokenCodec | None:
    if tokenizer is None:
        if template is not None:
            raise InvalidArgument("template needs a tokenizer")
        return None
    from kalos_ctx.tokens import TokenCodec

    return TokenCodec.load(tokenizer, template)


def _open_reader(folder: str) -> Any:
    try:
        names = os.listdir(folder)
    except OSError as e:
        raise StoreIOError(e.errno, f"cannot read the store's folder: {e.strerror}") from None
    if "control" not in names:
        if set(names) <= {"lock", "control.new", "gen-000000"}:
            raise StoreNotFound("there is no store at the path")
        raise NotAStore("the folder has no control file", "control", 0)
    return _reader.StoreReader(folder)
