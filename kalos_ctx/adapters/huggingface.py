"""Windows for models of transformers: batches, prompts, and a KV cache that is used again.

Extra `huggingface`. Tensors share the batch's memory where it and the model are in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.adapters.engine_prompts import ContextWindow, EmptyWindow, at_least_1, checked_length
from kalos_ctx.adapters.extras import missing_extra
from kalos_ctx.errors import InvalidArgument, InvalidType, KalosError

try:
    import torch
    from torch.utils.dlpack import from_dlpack
    from transformers import DynamicCache
except ImportError as error:
    raise missing_extra("huggingface", error) from error

if TYPE_CHECKING:
    from kalos_ctx.batches import ContextBatch

__all__ = [
    "EmptyWindow",
    "SessionCache",
    "cache_argument",
    "generate",
    "ids_to_feed",
    "model_inputs",
    "prompts",
]


def model_inputs(batch: ContextBatch, device: Any = None) -> dict[str, torch.Tensor]:
    """Return a batch as a model's keyword arguments.

    Parameters
    ----------
    batch : ContextBatch
        Of `assemble_batch(..., layout="left", pad_id=..., dtype="int64")`; "right" for training.
        Its masks come from lengths: a token that equals the padding is no padding.
    device : torch device, optional
        Where the tensors go; where the batch is, without a copy, when it is not given.

    Returns
    -------
    dict
        `input_ids`, `attention_mask` and `position_ids`, int64 of shape (B, L).

    Raises
    ------
    EmptyWindow
        A row has no tokens.
    KalosError
        The error that stands in a window's place.
    InvalidArgument
        The batch is packed or not int64.
    """
    if batch.layout == "packed":
        raise InvalidArgument("batch must have layout 'left' or 'right' (got 'packed')")
    if str(batch.token_ids.dtype) != "int64":
        raise InvalidArgument(f"batch must have dtype 'int64' (got {batch.token_ids.dtype})")
    for place, window in enumerate(batch):
        if isinstance(window, KalosError):
            raise window
        if not len(window):
            raise EmptyWindow(f"row {place} of the batch has no tokens")
    arrays = {
        "input_ids": batch.token_ids,
        "attention_mask": batch.attention_mask,
        "position_ids": batch.position_ids,
    }
    tensors = {name: from_dlpack(array) for name, array in arrays.items()}
    if device is None:
        return tensors
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def generate(
    model: Any,
    batch: ContextBatch,
    *,
    max_new_tokens: int,
    max_model_len: int | None = None,
    **options: Any,
) -> list[NDArray[np.int32]]:
    """Generate the answers to a batch of windows.

    Parameters
    ----------
    model : PreTrainedModel
    batch : ContextBatch
        Left-padded int64: `assemble_batch(..., layout="left", pad_id=..., dtype="int64")`.
    max_new_tokens : int
        Of each answer, at least 1.
    max_model_len : int, optional
        In tokens; the configuration's `max_position_embeddings` where it is not given.
    **options
        Further arguments of `model.generate`.

    Returns
    -------
    list of int32 arrays of shape (G,)
        An answer's new IDs, without the end token and what follows it: what `append(token_ids=...)`
        takes. One a row; with `num_return_sequences` so many a row.

    Raises
    ------
    EmptyWindow, BudgetExceeded, InvalidArgument, InvalidType
    """
    if batch.layout != "left":
        raise InvalidArgument(f"batch must have layout 'left' (got {batch.layout!r})")
    inputs = model_inputs(batch, model.device)
    # `generate` works the positions out of the mask, and keeps them up itself.
    del inputs["position_ids"]
    length = inputs["input_ids"].shape[1]
    at_least_1("max_new_tokens", max_new_tokens)
    most = _model_length(model) if max_model_len is None else max_model_len
    checked_length(
        length,
        max_model_len=length + max_new_tokens if most is None else most,
        reserve=max_new_tokens,
        what="batch's longest window",
    )
    config = options.get("generation_config") or model.generation_config
    ends = _end_ids(options.get("eos_token_id", config.eos_token_id))
    if config.pad_token_id is None and ends:
        options.setdefault("pad_token_id", ends[0])  # or transformers says so at each call
    with torch.inference_mode():
        made = model.generate(**inputs, max_new_tokens=max_new_tokens, **options)
    rows = made if isinstance(made, torch.Tensor) else made.sequences
    new: NDArray[np.int32] = rows[:, length:].to("cpu", torch.int32).numpy()
    return [_until_end(row, ends) for row in new]


def prompts(
    windows: Iterable[ContextWindow | KalosError], *, max_model_len: int, reserve: int
) -> list[list[int]]:
    """Return windows as inputs of continuous batching, `model.generate_batch(inputs=...)`.

    Parameters
    ----------
    windows : iterable of ContextWindow
        Such as a `ContextBatch`. IDs come from the host view, without a Python loop over tokens.
    max_model_len, reserve : int
        In tokens; each window with `reserve` new tokens must fit.

    Raises
    ------
    EmptyWindow, BudgetExceeded, InvalidArgument, InvalidType
    KalosError
        The error that stands in a window's place.
    """
    rows = []
    for place, window in enumerate(windows):
        if isinstance(window, KalosError):
            raise window
        checked_length(
            len(window), max_model_len=max_model_len, reserve=reserve, what=f"window {place}"
        )
        rows.append(window.tolist())
    return rows


def ids_to_feed(
    window: ContextWindow, cache: Any, cached_ids: Any = None, *, device: Any = None
) -> torch.Tensor:
    """Crop a KV cache to what it shares with a window, and return the IDs still to be fed.

    Parameters
    ----------
    window : ContextWindow
        The session's next one, of the assembler that made the one before.
    cache : DynamicCache
        Of one row, changed in place; `past_key_values` of older versions. It holds the window
        before and the answer to it.
    cached_ids : int sequence of shape (C,), optional
        What the cache was fed, from its beginning. Give it where the answer was not stored under
        the IDs that were generated (as text, say): what is kept is then compared. Without it
        `window.report.reused_tokens` alone decides.
    device : torch device, optional

    Returns
    -------
    int64 tensor of shape (1, F)
        The window's last F IDs, at least 1: the last token's logits need it fed again.

    Raises
    ------
    EmptyWindow
    InvalidArgument
        The cache has several rows, or layers that cannot be cropped: a sliding window that was
        passed, or states without a position. Nothing was cropped.
    """
    if not len(window):
        raise EmptyWindow("the window has no tokens, and a model needs at least 1")
    held = int(cache.get_seq_length())
    kept = min(window.report.reused_tokens, held, len(window) - 1)
    ids = window.token_ids
    if cached_ids is not None:
        kept = min(kept, _common(ids, np.asarray(cached_ids)))
    if kept < held:
        _check_croppable(cache)
        cache.crop(kept - held)  # negative: how many go; it means so in every version
    fed = torch.from_numpy(ids[kept:].astype(np.int64))[None]
    return fed if device is None else fed.to(device)


def cache_argument(model: Any) -> str:
    """Return how a model's `forward` calls its cache: `cache`, before 5.24 `past_key_values`."""
    named = "cache" in inspect.signature(model.forward).parameters
    return "cache" if named else "past_key_values"


class SessionCache:
    """One session's KV cache from window to window, with the IDs that it holds.

    Attributes
    ----------
    cache : DynamicCache
        For the model's `forward`, or its `generate` with the whole window as `input_ids`.
    token_ids : int32 array of shape (C,)
        What the cache holds once all that was given out has been fed.

    Examples
    --------
    ::

        chat = SessionCache()
        logits = model(**chat.inputs(model, window)).logits
        ...
        chat.note(generated)  # what was fed since, token by token
    """

    def __init__(self) -> None:
        self.cache = DynamicCache()
        self.token_ids: NDArray[np.int32] = np.empty(0, np.int32)

    def feed(self, window: ContextWindow, *, device: Any = None) -> torch.Tensor:
        """Crop the cache for a window and return the IDs still to be fed, int64 of shape (1, F).

        Raises
        ------
        EmptyWindow, InvalidArgument
        """
        # A forward pass that failed may have left less in the cache than was given out.
        ids = ids_to_feed(window, self.cache, self.token_ids, device=device)
        self.token_ids = np.array(window.token_ids)
        return ids

    def inputs(self, model: Any, window: ContextWindow) -> dict[str, Any]:
        """Return a window as the keyword arguments of `model`: the IDs to feed, and the cache.

        Raises
        ------
        EmptyWindow, InvalidArgument
        """
        ids = self.feed(window, device=model.device)
        return {"input_ids": ids, cache_argument(model): self.cache}

    def note(self, token_ids: Any) -> None:
        """Say which IDs were fed behind the window."""
        more = np.asarray(token_ids)
        if more.size and (more.ndim != 1 or more.dtype.kind not in "iu"):
            raise InvalidType(f"token_ids must be 1-D integers (got {more.ndim}-D {more.dtype})")
        self.token_ids = np.concatenate([self.token_ids, more.astype(np.int32)])


def _model_length(model: Any) -> int | None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if most is None else int(most)


def _end_ids(given: Any) -> list[int]:
    if given is None:
        return []
    ids = given.tolist() if hasattr(given, "tolist") else given
    return list(ids) if isinstance(ids, Sequence) else [int(ids)]


def _until_end(row: NDArray[np.int32], ends: list[int]) -> NDArray[np.int32]:
    at = np.flatnonzero(np.isin(row, ends))
    return row[: at[0]] if at.size else row


def _common(a: NDArray[np.int32], b: NDArray[Any]) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def _check_croppable(cache: Any) -> None:
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.shape[0] != 1:
            raise InvalidArgument(f"cache must have one row (got {keys.shape[0]})")
        if hasattr(layer, "conv_states") or (
            getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window
        ):
            raise InvalidArgument(
                f"cache has a {type(layer).__name__}, which cannot go back; begin anew"
            )
