"""Arguments of public calls, checked and turned into what the store takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kalos_ctx.errors import InvalidArgument, InvalidType

NAME_BYTES_MAX = 1024
ROLES = {"system": 0, "developer": 1, "user": 2, "assistant": 3, "tool": 4, "function": 5}
ROLE_NAMES = tuple(ROLES)


def name_bytes(value: Any, what: str, *, empty: bool = False) -> bytes:
    """Return an identifier as opaque bytes; str is encoded as UTF-8."""
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as e:
            raise InvalidArgument(
                f"{what} has a lone surrogate at position {e.start}; give bytes for such a name"
            ) from None
    elif not isinstance(value, bytes):
        raise InvalidType(f"{what} must be str or bytes (got {type(value).__name__})")
    if len(value) > NAME_BYTES_MAX or (not value and not empty):
        least = 0 if empty else 1
        raise InvalidArgument(
            f"{what} must have {least} to {NAME_BYTES_MAX} bytes (got {len(value)})"
        )
    return bytes(value)


def name_out(value: bytes) -> str | bytes:
    """Return a stored identifier as str where it is UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def role_code(role: Any) -> int:
    """Return the number of a role."""
    if not isinstance(role, str):
        raise InvalidType(f"role must be a str (got {type(role).__name__})")
    try:
        return ROLES[role]
    except KeyError:
        raise InvalidArgument(f"role must be one of {', '.join(ROLES)}") from None


def text_bytes(value: Any, what: str) -> bytes:
    """Return text as UTF-8."""
    if not isinstance(value, str):
        raise InvalidType(f"{what} must be a str (got {type(value).__name__})")
    try:
        return value.encode()
    except UnicodeEncodeError as e:
        raise InvalidArgument(f"{what} has a lone surrogate at position {e.start}") from None


def metadata_bytes(value: Any) -> bytes:
    """Return metadata as JSON; what does not come back as it was given is refused."""
    if not isinstance(value, Mapping):
        raise InvalidType(f"metadata must be a mapping (got {type(value).__name__})")
    for field in value:
        if not isinstance(field, str):
            raise InvalidType(f"metadata fields must be str (got {type(field).__name__})")
    try:
        return json.dumps(dict(value), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as e:
        kind = InvalidType if isinstance(e, TypeError) else InvalidArgument
        raise kind("metadata must hold JSON values only (str, finite numbers, bool, None, "
                   "lists, mappings with str keys)") from None  # fmt: skip


def group_bytes(value: Any) -> bytes:
    """Return a group; its first byte tells str from int."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidType(f"group must be a str or an int (got {type(value).__name__})")
    if isinstance(value, int):
        return b"i%d" % value
    return b"s" + name_bytes(value, "group")


def key_bytes(value: Any) -> bytes:
    """Return an idempotency key."""
    return name_bytes(value, "key")


def seconds(value: Any, what: str, *, positive: bool = False) -> float:
    """Return a finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{what} must be a number of seconds (got {type(value).__name__})")
    if not math.isfinite(value) or (positive and value <= 0):
        bound = "positive and finite" if positive else "finite"
        raise InvalidArgument(f"{what} must be {bound} (got {value})")
    return float(value)


def whole(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """Return an int in a range; bool is none."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{what} must be an int (got {type(value).__name__})")
    number = value.__index__()
    if number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InvalidArgument(f"{what} must be {bound} (got {number})")
    return int(number)


def choice(value: Any, what: str, options: tuple[str, ...]) -> int:
    """Return the place of an option."""
    if not isinstance(value, str):
        raise InvalidType(f"{what} must be a str (got {type(value).__name__})")
    if value not in options:
        raise InvalidArgument(f"{what} must be one of {', '.join(options)}")
    return options.index(value)
