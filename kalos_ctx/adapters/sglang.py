"""Windows as requests of SGLang.

Extra `sglang`. The arguments are plain values, so that this module imports nothing of SGLang: they
go to an `Engine` or, as JSON, to a server's `/generate`::

    asked = generate_arguments(window, max_model_len=8192, reserve=512, secret=SECRET)
    answer = engine.generate(**asked)
    store.append(session, "assistant", token_ids=answer["output_ids"])

Checked against the source of SGLang 0.5.23: the fields, the validator of IDs and the normalisation
of its `GenerateReqInput`, and the parameters of `Engine.generate`. The package cannot be imported
without a GPU's libraries, so the class was taken out of its module; no engine was run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kalos_ctx.adapters.engine_prompts import ContextWindow, EmptyWindow, cache_salt, prompt_ids
from kalos_ctx.errors import InvalidArgument, KalosError

__all__ = ["EmptyWindow", "batch_arguments", "cache_salt", "generate_arguments"]

SALT_FIELDS = ("cache_salt", "extra_key")


def generate_arguments(
    window: ContextWindow,
    *,
    max_model_len: int,
    reserve: int,
    secret: bytes = b"",
    sampling_params: Mapping[str, Any] | None = None,
    salt_field: str = "cache_salt",
) -> dict[str, Any]:
    """Return a window as arguments of `Engine.generate`, or a request's JSON.

    Parameters
    ----------
    window : ContextWindow
        May be released afterwards: the IDs are copied.
    max_model_len : int
        The engine's context length in tokens. Nothing is left to `allow_auto_truncate`.
    reserve : int
        Tokens the engine may generate; stands as `max_new_tokens` in the sampling parameters.
    secret : bytes
        Keys the salt; see `cache_salt`.
    sampling_params : mapping, optional
        Further sampling parameters.
    salt_field : {"cache_salt", "extra_key"}
        Under which name the salt parts the radix cache. `extra_key` is for versions whose requests
        do not have the other yet.

    Returns
    -------
    dict
        `input_ids`, `sampling_params` and the salt.

    Raises
    ------
    EmptyWindow, BudgetExceeded, WindowReleased, InvalidArgument, InvalidType
    """
    if salt_field not in SALT_FIELDS:
        raise InvalidArgument(f"salt_field must be one of {SALT_FIELDS} (got {salt_field!r})")
    ids = prompt_ids(window, max_model_len=max_model_len, reserve=reserve)
    sampling = dict(sampling_params or {})
    if sampling.setdefault("max_new_tokens", reserve) != reserve:
        raise InvalidArgument(
            f"sampling_params must have max_new_tokens = reserve, {reserve} "
            f"(got {sampling['max_new_tokens']!r})"
        )
    return {
        "input_ids": ids,
        "sampling_params": sampling,
        salt_field: cache_salt(window.tenant, secret),
    }


def batch_arguments(
    windows: Iterable[ContextWindow | KalosError], **options: Any
) -> dict[str, list[Any]]:
    """Return several windows, such as a `ContextBatch`, as one request; as `generate_arguments`.

    Returns
    -------
    dict of str to list
        The same fields, each with one entry a window.

    Raises
    ------
    KalosError
        The error that stands in a window's place.
    InvalidArgument
        There is no window.
    """
    rows = []
    for window in windows:
        if isinstance(window, KalosError):
            raise window
        rows.append(generate_arguments(window, **options))
    if not rows:
        raise InvalidArgument("windows must have at least 1 window (got 0)")
    return {field: [row[field] for row in rows] for field in rows[0]}
