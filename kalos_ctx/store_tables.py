"""The calls that pin segments and let summaries stand for turns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import arguments, items
from kalos_ctx._reader import KIND_SEGMENTS, KIND_SUMMARIES, SESSION, TENANT
from kalos_ctx.arguments import ROLE_NAMES, name_bytes, role_code
from kalos_ctx.drafts import Plain
from kalos_ctx.errors import Conflict, InvalidArgument, SessionNotFound
from kalos_ctx.store_base import SEQ_MAX, StoreBase, read_again_when_left

# A segment of tool schemas has no role of its own; the template renders it.
TOOLS_ROLE = 255


class TableCalls(StoreBase):
    """Segments and summaries of `SessionStore`."""

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
        slot, owner = (
            (TENANT, b"") if session is None else (SESSION, name_bytes(session, "session"))
        )
        arguments.text_bytes(name, "name")
        name_bytes(name, "name")
        place = arguments.choice(placement, "placement", items.PLACEMENTS)
        arguments.flag(volatile, "volatile")
        item = None
        if content is not None or token_ids is not None:
            item = self._segment(name, (content, token_ids), role, place, volatile)

        def compose(old: bytes, count: int, stage: items.Stage) -> bytes:
            kept = list(items.unpack(old))
            at = next((i for i, one in enumerate(kept) if one.name == name), None)
            if at is not None and item is None:
                del kept[at]
            elif at is not None and item is not None:
                kept[at] = item.placed(stage)
            elif item is not None:
                kept.append(item.placed(stage))
            return items.pack(kept)

        with core.mutex:
            state = core.slot_state(slot, tenant_b, owner)
            if state is not None:
                self._refuse_expired(state)
            elif item is None:
                return
            core.put_table(slot, tenant_b, owner, KIND_SEGMENTS, compose)

    def _segment(
        self, name: str, given: tuple[Any, Any], role: str, place: int, volatile: bool
    ) -> items.Item:
        """A segment from its (content, token_ids)."""
        content, token_ids = given
        encoded: Any
        codec = self.codec
        if role == "tools":
            if place or token_ids is not None or codec is None or not codec.has_template:
                raise InvalidArgument(
                    "role 'tools' is for head segments with content, in a store with a template"
                )
            code = TOOLS_ROLE
            arguments.text_bytes(content, "content")
            encoded = Plain(_joined(codec.head([(name, "tools", content)])))
        else:
            code = role_code(role)
            payload = self._intake.payload(content, token_ids)
            if place == 0 and payload.text is not None and codec is not None and codec.has_template:
                # Templates render a head in one piece, and may date it.
                encoded = Plain(_joined(codec.head([(name, role, content)], now=self._clock())))
            else:
                encoded = self._intake.framed(role, payload)
        return items.Item(
            name=name,
            role=code,
            ids=np.asarray(encoded.ids, np.int32),
            text=content,
            placement=place,
            volatile=volatile,
            created_at=self._clock(),
            prefix_len=encoded.prefix_len,
            suffix_len=encoded.suffix_len,
        )

    @read_again_when_left
    def segments(
        self, session: str | bytes | None, *, tenant: str | bytes = ""
    ) -> dict[str, dict[str, Any]]:
        """Return the pinned segments by name, in order (`session=None`: the tenant's own).

        Each is a dict with `role`, `text`, `token_ids` (int32 array of shape (L,), framing
        included), `placement`, `volatile`. A tenant that is not there has none.

        Raises
        ------
        SessionNotFound, SessionExpired, StoreCorrupt, StoreIOError, InvalidArgument, InvalidType
        """
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        slot, owner = (
            (TENANT, b"") if session is None else (SESSION, name_bytes(session, "session"))
        )
        state = self._core.slot_state(slot, tenant_b, owner)
        if state is None:
            if session is None:
                return {}
            raise SessionNotFound("there is no such session in this tenant")
        self._refuse_expired(state)
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
        first = arguments.whole(start, "start", 0, SEQ_MAX)
        last = arguments.whole(stop, "stop", 0, SEQ_MAX)
        code = role_code(role)
        if first >= last:
            raise InvalidArgument(f"start must be below stop (got {first} and {last})")
        with core.mutex:
            state = self._state(tenant_b, session_b)
            if last > state["count"]:
                raise InvalidArgument(
                    f"stop must be at most the number of turns, {state['count']} (got {last})"
                )
            encoded = self._intake.framed(role, self._intake.payload(content, token_ids))
            item = items.Item(
                name="",
                role=code,
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

    @read_again_when_left
    def summaries(self, session: str | bytes, *, tenant: str | bytes = "") -> list[dict[str, Any]]:
        """Return the session's summaries in the order of their turns.

        Each is a dict with `start`, `stop`, `role`, `text`, `token_ids` (int32 array of shape (L,),
        framing included).

        Raises
        ------
        SessionNotFound, SessionExpired, StoreCorrupt, StoreIOError, InvalidArgument, InvalidType
        """
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


def _joined(head: list[tuple[str, NDArray[np.int32]]]) -> NDArray[np.int32]:
    if not head:
        return np.empty(0, np.int32)
    return np.concatenate([ids for _, ids in head]).astype(np.int32)


def _role_name(code: int) -> str:
    return "tools" if code == TOOLS_ROLE else ROLE_NAMES[code]
