"""An open store: how it is opened and bound, and what all of its calls share."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from kalos_ctx import _opening, arguments
from kalos_ctx._reader import SESSION, StoreReader
from kalos_ctx._writer import StoreWriter
from kalos_ctx.drafts import TurnIntake
from kalos_ctx.errors import (
    DimensionMismatch,
    FingerprintMismatch,
    InvalidArgument,
    InvalidType,
    KalosError,
    SessionExpired,
    SessionNotFound,
    StoreCorrupt,
    StoreIOError,
    StoreReadOnly,
)
from kalos_ctx.store_path import checked_path, open_reader
from kalos_ctx.vector_rows import DIM_MAX, ROWS_AT_ONCE, VectorRows, row_stride

if TYPE_CHECKING:
    from kalos_ctx.tokens import TokenCodec

log = logging.getLogger(__name__)

DTYPES = ("float32", "float16")
METRICS = ("cosine", "ip", "l2")
NO_FINGERPRINT = bytes(32)
SEQ_MAX = 2**32 - 1
SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 65536, 2**32 - 2**20

_Store = TypeVar("_Store", bound="StoreBase")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def read_again_when_left(
    call: Callable[Concatenate[_Store, _Args], _Result],
) -> Callable[Concatenate[_Store, _Args], _Result]:
    """Let a reading call begin again where the writer moved to other files in its middle."""

    @functools.wraps(call)
    def again(self: _Store, /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        while True:
            try:
                return call(self, *args, **kwargs)
            except (StoreCorrupt, StoreIOError):
                if not self._core.was_left():
                    raise

    return again


class StoreBase:
    """What `SessionStore` and its groups of calls stand on."""

    path: str
    mode: str
    codec: TokenCodec | None
    metric: str
    recovery: dict[str, Any]
    _core: StoreReader  # a StoreWriter in mode "a"
    _intake: TurnIntake
    _clock: Callable[[], float]
    _listeners: weakref.WeakSet[Any]
    _vocab_size: int
    _vector_dtype: str
    _bound: bool

    def __init__(self) -> None:
        raise InvalidType("SessionStore is opened by SessionStore.open")

    @classmethod
    def open(
        cls: type[_Store],
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
    ) -> _Store:
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
            Dimension of the vectors, 1 to 4,096; fixed by the first vector where it is not given.
        vector_dtype : {"float32", "float16"}
            How rows are stored. The default of a store that exists is what it has.
        metric : {"cosine", "ip", "l2"}
            The default of a store that exists is what it has.
        vocab_size : int, optional
            IDs must be below it; the tokenizer's size where it is not given, and never less.
        durability : {"process", "group", "each"}
            What an acknowledged call survives: docs/durability.md.
        segment_bytes : int
            Size of log, token and vector segments of a new store, 65,536 to `2**32 - 2**20`, a
            multiple of 4,096.
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
        if clock is not None and not callable(clock):
            raise InvalidType(f"clock must be callable (got {type(clock).__name__})")
        asked = {
            "segment_bytes": _segment_bytes(segment_bytes),
            "vector_dtype": arguments.choice(vector_dtype, "vector_dtype", DTYPES),
            "metric": arguments.choice(metric, "metric", METRICS),
            "vector_dim": _optional(vector_dim, "vector_dim", DIM_MAX),
            "vocab_size": _optional(vocab_size, "vocab_size", 2**31),
        }
        _check_dimension(asked["vector_dim"], DTYPES[asked["vector_dtype"]], asked["segment_bytes"])
        folder = checked_path(path, mode)
        codec = _load_codec(tokenizer, template)
        if codec is not None and vocab_size is not None and vocab_size < codec.vocab_size:
            raise InvalidArgument(
                f"vocab_size must be at least the tokenizer's, {codec.vocab_size} "
                f"(got {vocab_size})"
            )
        self = cls.__new__(cls)
        self.path, self.mode, self.codec = folder, mode, codec
        self._clock = clock or time.time
        self._listeners = weakref.WeakSet()
        self._core = _open_core(folder, mode, durability, asked, codec)
        try:
            self._bind(asked)
        except BaseException:
            self._core.close()
            raise
        self._intake = TurnIntake(codec, self._vocab_size, self._bound, on_control)
        self.recovery = dict(getattr(self._core, "recovery", {}))
        self._log_recovery()
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
        if asked["vector_dim"] not in (0, have["vector_dim"]):
            if have["vector_dim"] or self.mode == "r":
                raise DimensionMismatch(
                    f"vector_dim is {have['vector_dim']} in this store (got {asked['vector_dim']})"
                )
            _check_dimension(asked["vector_dim"], self._vector_dtype, have["segment_bytes"])
            self._writer().set_vector_dim(asked["vector_dim"])
        fingerprint = NO_FINGERPRINT if self.codec is None else self.codec.fingerprint
        self._bound = have["fingerprint"] != NO_FINGERPRINT
        if fingerprint not in (NO_FINGERPRINT, have["fingerprint"]):
            if self._bound or self.mode == "r" or self._core.index.num_slots:
                raise FingerprintMismatch(
                    "the store was written with another tokenizer or chat template"
                )
            assert self.codec is not None
            self._vocab_size = asked["vocab_size"] or self.codec.vocab_size
            self._writer().set_fingerprint(fingerprint, self._vocab_size)
            self._bound = True
        elif asked["vocab_size"] not in (0, self._vocab_size):
            raise FingerprintMismatch(
                f"vocab_size is {self._vocab_size or None} in this store "
                f"(got {asked['vocab_size']})"
            )

    def _log_recovery(self) -> None:
        done = self.recovery
        if done.get("flaw") or done.get("rebuilt"):
            log.warning(
                "opened %s after %s: %d records applied again, %d bytes of a torn tail dropped%s",
                self.path,
                done["flaw"] or "a lost index",
                done["replayed"],
                done["dropped_bytes"],
                ", index built anew" if done["rebuilt"] else "",
            )

    def _writer(self) -> StoreWriter:
        """The core of a store that was opened for writing."""
        if self.mode != "a":
            raise StoreReadOnly("the store was opened for reading")
        core = cast(StoreWriter, self._core)
        core.check_open()
        return core

    def _state(self, tenant: bytes, session: bytes) -> dict[str, Any]:
        """The session's state; SessionNotFound or SessionExpired otherwise."""
        state = self._core.slot_state(SESSION, tenant, session)
        if state is None:
            raise SessionNotFound("there is no such session in this tenant")
        self._refuse_expired(state)
        return state

    def _refuse_expired(self, state: Mapping[str, Any]) -> None:
        if state["expires_at"] is not None and state["expires_at"] <= self._clock():
            raise SessionExpired("every turn of the session has expired")

    def _rows(self, value: Any, ndim: int) -> VectorRows:
        """Check vectors and bring them into the store's form."""
        return VectorRows(value, ndim, self._core.control.config["vector_dim"], self._vector_dtype)

    @contextlib.contextmanager
    def _dimension(self, rows: Sequence[VectorRows | None]) -> Iterator[None]:
        """Let a store's first vectors fix its dimension, unless the call is refused.

        Held with the writer's mutex.
        """
        dims = {one.dim for one in rows if one is not None}
        if len(dims) > 1:
            raise DimensionMismatch("vectors must all have one length")
        core = self._writer()
        config = core.control.config
        first = bool(dims) and config["vector_dim"] is None
        if first:
            dim = dims.pop()
            _check_dimension(dim, self._vector_dtype, config["segment_bytes"])
            core.set_vector_dim(dim)
        try:
            yield
        except BaseException:
            if first:
                with contextlib.suppress(KalosError):
                    core.forget_vector_dim()
            raise

    def close(self) -> None:
        """Close in order. Idempotent; arrays that lie in the store's files stay valid."""
        self._core.close()

    def __enter__(self: _Store) -> _Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _check_dimension(dim: int, dtype: str, segment_bytes: int) -> None:
    """Refuse a dimension whose rows are too long for the store's segments."""
    stride = row_stride(dim, dtype)
    if ROWS_AT_ONCE * stride > segment_bytes:
        raise DimensionMismatch(
            f"segment_bytes must be at least {ROWS_AT_ONCE * stride} for vectors of {dim} "
            f"dimensions (got {segment_bytes})"
        )


def _segment_bytes(value: Any) -> int:
    size = arguments.whole(value, "segment_bytes", SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX)
    if size % 4096:
        raise InvalidArgument(f"segment_bytes must be a multiple of 4096 (got {size})")
    return size


def _optional(value: Any, what: str, most: int) -> int:
    """A whole number from 1, or 0 for None."""
    return 0 if value is None else arguments.whole(value, what, 1, most)


def _load_codec(tokenizer: Any, template: Any) -> TokenCodec | None:
    if tokenizer is None:
        if template is not None:
            raise InvalidArgument("template needs a tokenizer")
        return None
    from kalos_ctx.tokens import TokenCodec

    return TokenCodec.load(tokenizer, template)


def _open_core(
    folder: str, mode: str, durability: str, asked: Mapping[str, Any], codec: TokenCodec | None
) -> StoreReader:
    if mode == "r":
        return open_reader(folder)
    config = {
        **asked,
        "vocab_size": asked["vocab_size"] or (0 if codec is None else codec.vocab_size),
        "fingerprint": NO_FINGERPRINT if codec is None else codec.fingerprint,
    }
    return StoreWriter(folder, durability=durability, config=config)
