"""The calls that append, read, cut and fork turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kalos_ctx import arguments
from kalos_ctx._intake import bare_draft, bare_drafts
from kalos_ctx._reader import SESSION
from kalos_ctx.arguments import name_bytes
from kalos_ctx.drafts import TURN_FIELDS, History
from kalos_ctx.errors import InvalidArgument, InvalidType, KalosError, SessionNotFound
from kalos_ctx.store_base import SEQ_MAX, StoreBase

if TYPE_CHECKING:
    from kalos_ctx._batch import Draft
    from kalos_ctx._turns import Turn


class TurnCalls(StoreBase):
    """Turns of `SessionStore`."""

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
        if (
            token_ids is not None
            and self.codec is None
            and (framed is True or (framed is False and not self._bound))
            and content is None
            and vector is None
            and group is None
            and key is None
            and created_at is None
            and metadata is None
            and ttl is None
        ):
            # The bare case, IDs into a store without a tokenizer, is the one whose cost counts.
            draft = bare_draft(role, token_ids, self._vocab_size, now, framed)
            if draft is not None:
                return core.append_turns(tenant_b, session_b, [draft], now)[0]
        turn = {
            "role": role, "content": content, "token_ids": token_ids, "vector": vector,
            "group": group, "key": key, "created_at": created_at, "metadata": metadata,
            "ttl": ttl, "framed": framed,
        }  # fmt: skip
        return self._extend(tenant_b, session_b, [turn], now, False)[0]

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
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        if isinstance(turns, Mapping | str | bytes):
            raise InvalidType("turns must be an iterable of mappings")
        try:
            rows = list(turns)
        except TypeError:
            raise InvalidType(
                f"turns must be an iterable of mappings (got {type(turns).__name__})"
            ) from None
        now = self._clock()
        if self.codec is None and not self._bound and rows:
            drafts = bare_drafts(rows, self._vocab_size, now)
            if drafts is not None:
                return core.append_turns(tenant_b, session_b, drafts, now)
        for i, turn in enumerate(rows):
            if not isinstance(turn, Mapping):
                raise InvalidType(f"turns[{i}] must be a mapping (got {type(turn).__name__})")
            if not turn.keys() <= TURN_FIELDS:
                # The names could be content that slipped a level up, so they are not quoted.
                unknown = len(turn.keys() - TURN_FIELDS)
                raise InvalidArgument(
                    f"turns[{i}] has {unknown} unknown fields; a turn has "
                    f"{', '.join(sorted(TURN_FIELDS))}"
                )
            if "role" not in turn:
                raise InvalidArgument(f"turns[{i}] has no role")
        if not rows:
            return []
        return self._extend(tenant_b, session_b, rows, now, True)

    def _extend(
        self,
        tenant: bytes,
        session: bytes,
        turns: Sequence[Mapping[str, Any]],
        now: float,
        places: bool,
    ) -> list[int]:
        """Append checked mappings; with `places` a refusal names the turn's place in the call."""
        core = self._writer()
        with core.mutex:
            # The framing of a turn may depend on those before it, which the mutex keeps in place.
            history = History(core, tenant, session)
            drafts: list[Draft] = []
            all_rows = []
            for i, turn in enumerate(turns):
                try:
                    vector = turn.get("vector")
                    rows = None if vector is None else self._rows(vector, 1)
                    drafts.append(self._intake.turn(turn, history, now, rows))
                except KalosError as e:
                    if places and isinstance(e, ValueError):
                        e.args = (f"turns[{i}]: {e}", *e.args[1:])
                    raise
                all_rows.append(rows)
            with self._dimension(all_rows):
                return core.append_turns(tenant, session, drafts, now)

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
        SessionNotFound, SessionExpired, StoreCorrupt, StoreIOError, InvalidArgument, InvalidType
        """
        first = None if start is None else arguments.index(start, "start")
        last = None if stop is None else arguments.index(stop, "stop")
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        found = self._core.turns(tenant_b, session_b, first, last, self._clock())
        if found is None:
            raise SessionNotFound("there is no such session in this tenant")
        if not found:
            self._state(tenant_b, session_b)
        return found

    def count(self, session: str | bytes, *, tenant: str | bytes = "") -> int:
        """Return the number of turns; 0 for an unknown or expired session.

        Raises
        ------
        StoreCorrupt, StoreIOError, InvalidArgument, InvalidType
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        state = self._core.slot_state(SESSION, tenant_b, session_b)
        if state is None:
            return 0
        if state["ttl"]:
            return len(self._core.turns(tenant_b, session_b, None, None, self._clock()) or ())
        total: int = state["count"]
        return total

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
        StoreReadOnly, StoreFull, StoreIOError, StoreCorrupt, InvalidArgument, InvalidType
        """
        core = self._writer()
        target = arguments.whole(to, "to", 0, SEQ_MAX)
        if expect_last is not None:
            expect_last = arguments.whole(expect_last, "expect_last", -1, 2**63)
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        with core.mutex:
            self._state(tenant_b, session_b)
            return core.rollback(tenant_b, session_b, target, expect_last) or 0

    def fork(
        self,
        session: str | bytes,
        new_session: str | bytes,
        *,
        tenant: str | bytes = "",
        at: int | None = None,
    ) -> None:
        """Make `new_session` share the turns before `at` (None: all); no token is copied.

        Pinned segments and the summaries of those turns go along. Idempotency keys do not.

        Raises
        ------
        SessionNotFound, SessionExpired
        Conflict
            There is a session `new_session` already.
        StoreReadOnly, StoreFull, StoreIOError, StoreCorrupt, InvalidArgument, InvalidType
        """
        core = self._writer()
        if at is not None:
            at = arguments.whole(at, "at", 0, SEQ_MAX)
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        session_b = name_bytes(session, "session")
        child_b = name_bytes(new_session, "new_session")
        with core.mutex:
            self._state(tenant_b, session_b)
            core.fork(tenant_b, session_b, child_b, at)
