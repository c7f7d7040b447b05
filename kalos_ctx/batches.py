"""Several windows as one batch: packed, or padded to one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import arguments
from kalos_ctx.errors import InvalidArgument, InvalidType, KalosError, PoolExhausted, WindowReleased

if TYPE_CHECKING:
    from kalos_ctx._context_window import ContextWindow
    from kalos_ctx._device import Device
    from kalos_ctx._windows import Window, WindowPool

LAYOUTS = ("packed", "left", "right")
DTYPES = ("int32", "int64")
FIELDS = frozenset(
    {
        "session", "tenant", "max_tokens", "reserve", "query", "top_k", "collections",
        "session_recall", "min_score", "filters", "placement", "recall_role", "as_of", "policy",
        "stream", "out",
    }
)  # fmt: skip


class ContextBatch:
    """Windows of several requests, and their tokens in one array.

    Indexing, iteration and `len` give the windows, or the errors that stand in their place; an
    error's row is empty. `release()` (or the end of a `with` block) frees all windows; arrays stay.

    On a CUDA assembler the arrays are `DeviceArray`s: they lie on the device, other libraries take
    them by DLPack or the CUDA array interface, and `numpy()` copies one to the host.

    Attributes
    ----------
    layout : {"packed", "left", "right"}
    token_ids : int32 or int64 array of shape (total,), or (n, longest)
    cu_seqlens : int32 array of shape (n + 1,)
        Where each window begins and ends in a packed batch.
    positions : array of shape (total,) and the type of `token_ids`
        Places in each window, from 0; packed.
    attention_mask : array of shape (n, longest) and the type of `token_ids`
        1 for tokens, 0 for padding, from lengths; padded layouts.
    position_ids : array of shape (n, longest) and the type of `token_ids`
        Places in each window, 0 in the padding; padded layouts.
    """

    token_ids: Any
    cu_seqlens: Any
    positions: Any
    attention_mask: Any
    position_ids: Any

    def __init__(
        self,
        windows: Sequence[ContextWindow | KalosError],
        layout: str,
        pad_id: int | None,
        dtype: str,
        pool: WindowPool,
    ) -> None:
        self._windows = tuple(windows)
        self.layout = layout
        if pool.device is not None:
            arrays = _arranged(pool, pool.device, self._windows, layout, pad_id or 0, dtype=dtype)
        elif layout == "packed":
            arrays = _packed(*_rows(self._windows), np.dtype(dtype))
        else:
            arrays = _padded(*_rows(self._windows), np.dtype(dtype), layout == "left", pad_id or 0)
        for name, array in arrays.items():
            setattr(self, name, array)
        self.released = False

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> ContextWindow | KalosError:
        if self.released:
            raise WindowReleased("the batch was released; use its arrays, or build it again")
        return self._windows[index]

    def __iter__(self) -> Iterator[ContextWindow | KalosError]:
        for index in range(len(self)):
            yield self[index]

    def __dlpack__(self, **options: Any) -> Any:
        """Export `token_ids` without a copy, as the array API's `__dlpack__` says."""
        return self.token_ids.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Say where the tokens are: (1, 0), the CPU, or (2, N), CUDA device N."""
        place: tuple[int, int] = self.token_ids.__dlpack_device__()
        return place

    def release(self) -> None:
        """Free all windows. Idempotent; the batch's arrays stay valid."""
        self.released = True
        for window in self._windows:
            if not isinstance(window, KalosError):
                window.release()

    def __enter__(self) -> ContextBatch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<ContextBatch of {len(self)} windows, {self.layout}>"


def _rows(
    windows: Sequence[ContextWindow | KalosError],
) -> tuple[list[NDArray[np.int32]], NDArray[np.int64]]:
    """Token IDs of each row, an error's without any, and their lengths."""
    empty = np.empty(0, np.int32)
    rows = [empty if isinstance(window, KalosError) else window.token_ids for window in windows]
    return [empty, *rows], np.array([len(row) for row in rows], np.int64)


def _packed(
    rows: list[NDArray[np.int32]], lengths: NDArray[np.int64], dtype: np.dtype[Any]
) -> dict[str, NDArray[Any]]:
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if ends[-1] > np.iinfo(np.int32).max:
        raise InvalidArgument(
            f"requests must have at most {np.iinfo(np.int32).max} tokens together (got {ends[-1]})"
        )
    places = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return {
        "token_ids": np.concatenate(rows).astype(dtype, copy=False),
        "cu_seqlens": ends.astype(np.int32),
        "positions": places.astype(dtype),
    }


def _padded(
    rows: list[NDArray[np.int32]],
    lengths: NDArray[np.int64],
    dtype: np.dtype[Any],
    left: bool,
    pad_id: int,
) -> dict[str, NDArray[Any]]:
    longest = int(lengths.max(initial=0))
    columns = np.arange(longest)
    first = (longest - lengths if left else np.zeros_like(lengths))[:, None]
    holds = (columns >= first) & (columns < first + lengths[:, None])
    token_ids = np.full((len(lengths), longest), pad_id, dtype)
    token_ids[holds] = np.concatenate(rows)
    return {
        "token_ids": token_ids,
        "attention_mask": holds.astype(dtype),
        "position_ids": np.where(holds, columns - first, 0).astype(dtype),
    }


def _arranged(
    pool: WindowPool,
    device: Device,
    windows: Sequence[ContextWindow | KalosError],
    layout: str,
    pad_id: int,
    *,
    dtype: str,
) -> dict[str, Any]:
    """Lay windows out on the device where they are."""
    if pool.arranger is None:
        from kalos_ctx._arranger import Arranger

        pool.arranger = Arranger(device)
    rows: list[Window | None] = [
        None if isinstance(window, KalosError) else window for window in windows
    ]
    arrays: dict[str, Any] = pool.arranger.arrange(rows, layout, pad_id, dtype == "int64")
    return arrays


def build_batch(
    assemble: Callable[..., ContextWindow],
    pool: WindowPool,
    requests: Any,
    *,
    layout: Any,
    pad_id: Any,
    on_error: Any,
    dtype: Any = "int32",
) -> ContextBatch:
    """Build a batch; `ContextAssembler.assemble_batch` describes it."""
    arguments.choice(layout, "layout", LAYOUTS)
    arguments.choice(on_error, "on_error", ("raise", "return"))
    arguments.choice(dtype, "dtype", DTYPES)
    if pad_id is not None:
        arguments.whole(pad_id, "pad_id", 0, 2**31 - 1)
    elif layout != "packed":
        raise InvalidArgument(f"layout {layout!r} needs a pad_id")
    rows = _checked_requests(requests)
    if len(rows) > pool.slots:
        raise PoolExhausted(
            f"{len(rows)} requests need a window slot each, and the assembler has "
            f"{pool.slots}: make it with more slots"
        )
    windows: list[ContextWindow | KalosError] = []
    try:
        for place, row in enumerate(rows):
            try:
                windows.append(assemble(**row))
            except KalosError as error:
                error.args = (f"requests[{place}]: {error}", *error.args[1:])
                if on_error == "raise":
                    raise
                windows.append(error)
        return ContextBatch(windows, layout, pad_id, dtype, pool)
    except BaseException:
        for window in windows:
            if not isinstance(window, KalosError):
                window.release()
        raise


def _checked_requests(requests: Any) -> list[dict[str, Any]]:
    if isinstance(requests, (Mapping, str, bytes)) or not hasattr(requests, "__iter__"):
        raise InvalidType("requests must be a sequence of mappings")
    rows = []
    for place, row in enumerate(requests):
        if not isinstance(row, Mapping):
            raise InvalidType(f"requests[{place}] must be a mapping (got {type(row).__name__})")
        unknown = sorted(str(field) for field in row.keys() - FIELDS)
        if unknown:
            raise InvalidArgument(f"requests[{place}] has unknown fields: {', '.join(unknown)}")
        missing = {"session", "max_tokens"} - row.keys()
        if missing:
            raise InvalidArgument(f"requests[{place}] has no {', '.join(sorted(missing))}")
        rows.append(dict(row))
    return rows
