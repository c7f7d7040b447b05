"""The error for an adapter whose framework is not installed."""

from __future__ import annotations

from kalos_ctx.errors import KalosError


class MissingExtra(KalosError, ImportError):
    """The framework of an adapter is not installed; the message names the extra that brings it."""


def missing_extra(extra: str, error: ImportError) -> MissingExtra:
    """Return the error to raise where importing a framework failed with `error`."""
    return MissingExtra(
        f"kalos_ctx.adapters needs the extra {extra!r}: pip install 'kalos-ctx[{extra}]' ({error})",
        name=error.name,
    )
