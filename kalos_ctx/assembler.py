"""`ContextAssembler`: a session in, the model's next input out."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import arguments, items
from kalos_ctx._assembler import AssemblerCore
from kalos_ctx._cpu_ops import MAX_HITS
from kalos_ctx._gathering import Gatherer
from kalos_ctx._window_parts import Head, Rules
from kalos_ctx._windows import WindowPool
from kalos_ctx.arguments import ROLE_NAMES, name_bytes, name_out, role_code
from kalos_ctx.batches import ContextBatch, build_batch
from kalos_ctx.errors import (
    FingerprintMismatch,
    InvalidArgument,
    InvalidType,
    StoreClosed,
)
from kalos_ctx.planner import Plan, Policy, divide_budget, token_count
from kalos_ctx.reports import plan_of
from kalos_ctx.store import SessionStore
from kalos_ctx.store_tables import TOOLS_ROLE

if TYPE_CHECKING:
    from kalos_ctx._context_window import ContextWindow
    from kalos_ctx.types import Hits

    Held = TypeVar("Held", ContextWindow, ContextBatch)

log = logging.getLogger(__name__)

LEGACY_STREAM, PER_THREAD_STREAM = 1, 2  # cuda.h, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD
PAGE_NBYTES = 4096  # nothing has an address below
PLACEMENTS = ("before_last_user", "after_system", "end")
TOKENS_MAX = 2**53
_DEFAULT = Policy()
_EMPTY = np.empty(0, np.int32)
_NO_FRAME = (_EMPTY, _EMPTY, _EMPTY)


class LiveWindows(Mapping[Any, "ContextWindow"]):
    """Sessions and their latest windows that were not released.

    A session of the default tenant stands under its name, another under ``(tenant, session)``.
    """

    def __init__(self, assembler: ContextAssembler) -> None:
        self._core = assembler

    def __getitem__(self, key: Any) -> ContextWindow:
        tenant, session = key if isinstance(key, tuple) and len(key) == 2 else ("", key)
        try:
            owner = name_bytes(tenant, "tenant", empty=True)
            name = name_bytes(session, "session")
        except InvalidArgument:
            raise KeyError(key) from None
        window = self._core.live_window((owner, name) if owner else name)
        if window is None:
            raise KeyError(key)
        return window

    def __iter__(self) -> Iterator[Any]:
        for key in self._core.live_keys():
            yield name_out(key) if isinstance(key, bytes) else tuple(map(name_out, key))

    def __len__(self) -> int:
        return len(self._core.live_keys())


class ContextAssembler(AssemblerCore):
    """Builds windows of a store's sessions.

    Parameters
    ----------
    store : SessionStore
    device : {"auto", "cpu", "cuda", "cuda:N"}
        Where windows are built and recall runs. "auto": the first GPU where there is one that
        works, else the CPU, unless the environment's KALOS_DEVICE names another choice; the
        attribute `device` says which it is.
    slots : int
        Windows that may be alive at a time, 1 to 1,048,576.
    timeout : float
        Seconds to wait for a slot.

    Raises
    ------
    DeviceUnavailable
        A GPU was asked for that cannot be used; the message says why and what to do.
    InvalidArgument, InvalidType

    Notes
    -----
    Thread-safe. A context manager; use after `close` raises `StoreClosed`. Windows outlive it.
    """

    def __init__(
        self,
        store: SessionStore,
        *,
        device: str = "auto",
        slots: int = 64,
        timeout: float = 1.0,
    ) -> None:
        if not isinstance(store, SessionStore):
            raise InvalidType(f"store must be a SessionStore (got {type(store).__name__})")
        ordinal = _checked_device(device)
        self.device = "cpu" if ordinal is None else f"cuda:{ordinal}"
        codec = store.codec
        self._codec = codec
        self._frames: dict[str, tuple[NDArray[np.int32], ...]] = {}
        self._backend: Any = None
        self._date: tuple[int, Any] = (0, None)
        prompt, starts = _EMPTY, None
        if codec is not None:
            prompt = np.ascontiguousarray(codec.generation_prompt, np.int32)
            starts = np.ascontiguousarray(codec.starts_character()).view(np.uint8)
        elif store._bound:
            log.warning(
                "the store was written with a tokenizer and opened without one: windows have "
                "neither the template's own head nor a generation prompt"
            )
        gatherer = Gatherer()
        if ordinal is not None:
            from kalos_ctx.backends.cuda import make_gatherer

            gatherer = make_gatherer(store, ordinal)
        pool = WindowPool(slots, timeout, getattr(gatherer, "device", None))
        self.start(store, store._core, store._clock, pool, gatherer, prompt, starts)
        self._note_dates()
        store.listen(self)

    # ---- Public calls beside `assemble` ---------------------------------------------------------

    def assemble_batch(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        layout: str = "packed",
        pad_id: int | None = None,
        on_error: str = "raise",
        dtype: str = "int32",
    ) -> ContextBatch:
        """Build several windows at once.

        Parameters
        ----------
        requests : sequence of mappings
            Each with the arguments of `assemble`.
        layout : {"packed", "left", "right"}
            One after the other, or padded to one length on the left or the right.
        pad_id : int, optional
            What fills the rows; needed by "left" and "right".
        on_error : {"raise", "return"}
            Release what was built and raise, or let the error stand in the window's place.
        dtype : {"int32", "int64"}
            Of the batch's arrays but `cu_seqlens`.

        Raises
        ------
        As `assemble`; PoolExhausted where there are more requests than slots.
        """
        return build_batch(
            self.assemble,
            self.pool,
            requests,
            layout=layout,
            pad_id=pad_id,
            on_error=on_error,
            dtype=dtype,
        )

    def plan(self, session: str | bytes, **options: Any) -> Plan:
        """Return what `assemble` would keep, drop or cut, and why; nothing is moved.

        Takes the arguments of `assemble`, checks them alike, and recalls where that would.

        Raises
        ------
        SessionNotFound, SessionExpired, BudgetExceeded, StoreCorrupt, StoreClosed,
        DimensionMismatch, NonFiniteVector, UnknownField, TemplateUnsafe
        Conflict
            `alternation="strict"` and two turns in a row have one role.
        InvalidArgument, InvalidType
        """
        return plan_of(self.plan_parts(session, **options))

    def recall(
        self,
        query: Any,
        *,
        tenant: str | bytes = "",
        top_k: int,
        collections: str | bytes | Sequence[str | bytes] = (),
        session: str | bytes | None = None,
        min_score: float | None = None,
        filters: Mapping[str, Any] | None = None,
    ) -> Hits:
        """Find the rows that are nearest to a query, or to each of several.

        Parameters
        ----------
        query : float array of shape (dim,) or (n, dim)
        top_k : int
            Hits of each query, at most.
        collections : str, bytes or a sequence of them
            Whose passages are searched.
        session : str or bytes, optional
            Whose own turns are searched too.
        min_score : float, optional
            Inclusive.
        filters : mapping, optional
            Metadata field to value or list of values.

        Raises
        ------
        DimensionMismatch, NonFiniteVector, UnknownField, SessionNotFound, SessionExpired,
        StoreCorrupt, StoreClosed, InvalidArgument, InvalidType
        DeviceError
            The driver failed, on a GPU.
        """
        if (
            type(query) is np.ndarray
            and query.ndim == 1
            and type(collections) is str
            and type(top_k) is int
            and 0 <= top_k <= MAX_HITS
            and session is None
            and min_score is None
            and filters is None
        ):
            owner = b"" if tenant == "" else name_bytes(tenant, "tenant", empty=True)
            names = (name_bytes(collections, "collections"),)
            hits: Hits = self._recaller().passages(owner, names, query, top_k)[0]
            return hits
        found = self._recaller().recall(
            query,
            tenant=name_bytes(tenant, "tenant", empty=True),
            top_k=arguments.whole(top_k, "top_k"),
            collections=_collections(collections),
            session=None if session is None else name_bytes(session, "session"),
            min_score=_score(min_score),
            filters=filters,
        )
        hits = found.hits
        return hits

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring the store's vectors to where recall needs them, before the first one asks.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress(rows_done, num_rows)`` while a GPU's memory is filled.

        Raises
        ------
        StoreCorrupt, StoreClosed, DeviceError
        """
        self._recaller().load(progress)

    def combine_recalls(self) -> None:
        """Let recalls that several threads ask for at a time go together, as one scan.

        Results are the same. A recall that is alone takes a little longer (under a microsecond);
        many at a time take less.
        """
        self._recaller().combine()

    def gauges(self) -> dict[str, int]:
        """Return what is in use now.

        `pool_slots`, `pool_free`: window slots; `registered_bytes`: of token files that a GPU
        reads; `device_bytes`: of its memory; `vector_rows`: of the store. Raises nothing, behind
        `close` neither.
        """
        segments = getattr(self.gatherer, "segments", None)
        device = self.pool.device
        return {
            "pool_slots": self.pool.slots,
            "pool_free": self.pool.free,
            "registered_bytes": 0 if segments is None else segments.nbytes,
            "device_bytes": 0 if device is None else device.counts()["device_nbytes"],
            "vector_rows": self.store._core.num_vector_rows,
        }

    @property
    def windows(self) -> LiveWindows:
        """Mapping of session to its latest live window."""
        return LiveWindows(self)

    async def aassemble(self, session: str | bytes, **options: Any) -> ContextWindow:
        """Build a window without blocking the event loop; as `assemble`.

        Raises
        ------
        As `assemble`. A caller that is cancelled loses no slot: the window is released.
        """
        return await _in_thread(self.assemble, session, **options)

    async def aassemble_batch(
        self, requests: Sequence[Mapping[str, Any]], **options: Any
    ) -> ContextBatch:
        """Build several windows without blocking the event loop; as `assemble_batch`.

        Raises
        ------
        As `assemble_batch`. A caller that is cancelled loses no slots.
        """
        return await _in_thread(self.assemble_batch, requests, **options)

    async def arecall(self, query: Any, **options: Any) -> Hits:
        """Find rows without blocking the event loop; as `recall`.

        Raises
        ------
        As `recall`.
        """
        return await asyncio.to_thread(self.recall, query, **options)

    def session_erased(self, tenant: bytes, session: bytes) -> None:
        """Forget a session that the store erased."""
        self.forget(tenant, session)

    def close(self) -> None:
        """Forget everything. Idempotent; live windows stay with their owners."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
        self.end()

    def __enter__(self) -> ContextAssembler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ContextAssembler({self.store!r}, device={self.device!r})"

    # ---- Hooks of the compiled part -------------------------------------------------------------

    def checked_name(self, value: Any, what: str, empty: bool) -> bytes:
        """Return a name's bytes."""
        return name_bytes(value, what, empty=empty)

    def checked_tokens(self, what: str, value: Any) -> int:
        """Return a number of tokens."""
        count = token_count(what, value)
        if count > TOKENS_MAX:
            raise InvalidArgument(f"{what} must be at most {TOKENS_MAX} (got {count})")
        return count

    def make_rules(self, policy: Any) -> Rules:
        """Return a policy as the planner takes it; None is the default one."""
        if policy is not None and not isinstance(policy, Policy):
            raise InvalidType(f"policy must be a Policy (got {type(policy).__name__})")
        return Rules(_DEFAULT if policy is None else policy)

    def refuse_head(self, segments: Mapping[str, int], total: int) -> None:
        """Raise for pinned segments that do not fit."""
        divide_budget(total, 0, segments, recalls=False, recall_tokens=None)

    def make_head(self, tenant_table: bytes, session_table: bytes, include_system: bool) -> Head:
        """Encode the pinned segments: the tenant's before the session's, volatile ones last."""
        found = [*items.unpack(tenant_table), *items.unpack(session_table)]
        found.sort(key=lambda item: item.volatile)
        pinned = [item for item in found if item.placement == 0 and include_system]
        texts = [item for item in pinned if item.text is not None]
        codec = self._codec
        if codec is not None and codec.has_template:
            rows = [(item.name, _role(item.role), item.text or "") for item in texts]
            head = codec.head(rows, now=self.store._clock())
            head += [(item.name, item.ids) for item in pinned if item.text is None]
            self._note_dates()
        else:
            if codec is None and len(texts) > 1:
                # Each was encoded as a head of its own; only the template can join them.
                raise FingerprintMismatch(
                    "the session has several pinned texts; open the store with its tokenizer"
                )
            head = [(item.name, item.ids) for item in pinned]
        inside, tail = (
            [(item.name, _ids(item.ids)) for item in found if item.placement == place]
            for place in (1, 2)
        )
        return Head([(name, _ids(ids)) for name, ids in head], inside, tail)

    def date_key(self) -> Any:
        """Return what the head's dates are now; looked at once a second."""
        now = self.store._clock()
        if self._date[0] != int(now) or self._date[1] is None:
            assert self._codec is not None
            self._date = (int(now), self._codec.head_changes(now))
        return self._date[1]

    def _note_dates(self) -> None:
        codec = self._codec
        self.set_dated(codec is not None and codec.head_changes(self.store._clock()) != ())

    def read_summaries(self, table: bytes, count: int) -> list[tuple[int, ...]]:
        """Return the summaries that stand in a window of the first `count` turns."""
        return [
            (
                item.start,
                item.stop,
                item.role,
                item.tokens_pos,
                len(item.ids),
                item.token_crc,
                item.prefix_len,
                item.suffix_len,
            )
            for item in items.unpack(table)
            if item.stop <= count and item.at_count <= count
        ]

    def checked_recall(
        self,
        *,
        query: Any,
        tenant: Any,
        session: Any,
        top_k: Any,
        collections: Any,
        session_recall: Any,
        min_score: Any,
        filters: Any,
        placement: Any,
        recall_role: Any,
        as_of: Any,
    ) -> tuple[str, Any] | None:
        """Check what concerns recall; None where the call does not recall."""
        count = arguments.whole(top_k, "top_k")
        names = _collections(collections)
        if not isinstance(session_recall, bool):
            raise InvalidType(
                f"session_recall must be a bool (got {type(session_recall).__name__})"
            )
        least = _score(min_score)
        if filters is not None and not isinstance(filters, Mapping):
            raise InvalidType(f"filters must be a mapping (got {type(filters).__name__})")
        arguments.choice(placement, "placement", PLACEMENTS)
        frame = self._frame(recall_role)
        if query is None or count == 0:
            return None
        ask = {
            "tenant": name_bytes(tenant, "tenant", empty=True),
            "top_k": count,
            "collections": names,
            "session": name_bytes(session, "session") if session_recall else None,
            "min_score": least,
            "filters": filters,
            "as_of": None if as_of is None else token_count("as_of", as_of),
        }
        return placement, (query, ask, frame)

    def recall_hits(self, ask: tuple[Any, dict[str, Any], Any]) -> tuple[Any, ...]:
        """Return hits, where each lies, its source, the frame of recalled passages, generation."""
        query, options, frame = ask
        found = self._recaller().recall(query, **options)
        sources = found.hits.sources or (None,) * len(found.hits)
        return found.hits, found.places, sources, frame, found.generation, found.path

    def _recaller(self) -> Any:
        if self.closed:
            raise StoreClosed("the assembler is closed")
        if self._backend is None:
            device = self.pool.device
            if device is None:
                from kalos_ctx.backends.cpu import CpuBackend

                self._backend = CpuBackend(self.store)
            else:
                from kalos_ctx.backends.cuda import CudaBackend

                self._backend = CudaBackend(self.store, device)
        return self._backend

    def stream_handle(self, stream: Any) -> int:
        """Return the address of a caller's stream."""
        return _stream_handle(stream)

    def _frame(self, role: Any) -> tuple[NDArray[np.int32], ...]:
        """Prefix, separator and suffix of recalled passages; the same arrays for one role."""
        code = role_code(role) if isinstance(role, str) else None
        if code is None:
            raise InvalidType(f"recall_role must be a str (got {type(role).__name__})")
        if role in ("tool", "function"):
            raise InvalidArgument(f"recall_role must be a role that answers no call (got {role!r})")
        if self._codec is None:
            return _NO_FRAME
        frame = self._frames.get(role)
        if frame is None:
            frame = tuple(_ids(part) for part in self._codec.recall_frame(role))
            self._frames[role] = frame
        return frame


async def _in_thread(call: Callable[..., Held], *args: Any, **options: Any) -> Held:
    """Run a call that gives something to release; a cancelled caller loses no slot."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_release_unseen)
        raise


def _release_unseen(task: asyncio.Future[Held]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def _checked_device(device: Any) -> int | None:
    """Return the number of a GPU that was asked for or found, None for the CPU."""
    if not isinstance(device, str):
        raise InvalidType(f"device must be a str (got {type(device).__name__})")
    if device == "auto":
        device = os.environ.get("KALOS_DEVICE", device)
    if device == "cpu":
        return None
    if device == "auto":
        from kalos_ctx.backends.cuda import first_device

        return first_device()
    kind, colon, number = device.partition(":")
    if kind == "cuda" and (not colon or (number.isascii() and number.isdigit())):
        return int(number) if colon else 0
    raise InvalidArgument(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N' (got {device!r})")


def _stream_handle(stream: Any) -> int:
    """Return the address of a CUDA stream: a number, or what an object that has one says."""
    for name in ("cuda_stream", "ptr", "handle"):
        if hasattr(stream, name):
            stream = getattr(stream, name)
            break
    else:
        if hasattr(stream, "__cuda_stream__"):
            stream = stream.__cuda_stream__()[1]
    try:
        address = int(stream)
    except (TypeError, ValueError):
        raise InvalidType(
            f"stream must be a CUDA stream or its address (got {type(stream).__name__})"
        ) from None
    if not (0 <= address <= PER_THREAD_STREAM or address >= PAGE_NBYTES):
        raise InvalidArgument(f"stream must be a CUDA stream's address (got {address})")
    return address or LEGACY_STREAM  # 0 names the legacy default stream too


def _collections(value: Any) -> tuple[bytes, ...]:
    if isinstance(value, (str, bytes)):
        return (name_bytes(value, "collections"),)
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise InvalidType(
            f"collections must be a name or several names (got {type(value).__name__})"
        )
    return tuple(name_bytes(one, "collections") for one in value)


def _score(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidType(f"min_score must be a number (got {type(value).__name__})")
    score = float(value)
    if math.isnan(score):
        raise InvalidArgument("min_score must not be NaN")
    return score


def _role(code: int) -> str:
    return "tools" if code == TOOLS_ROLE else ROLE_NAMES[code]


def _ids(ids: Any) -> NDArray[np.int32]:
    return np.ascontiguousarray(ids, np.int32)
