"""Arguments of public calls, checked and turned into what the store takes."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any

from kalos_ctx import _intake
from kalos_ctx.errors import InvalidArgument, InvalidType

GROUP_BITS_MAX = 2048
METADATA_DEPTH_MAX = 64
name_bytes = _intake.name_bytes  # compiled, since every call pays for it twice
ROLES = {"system": 0, "developer": 1, "user": 2, "assistant": 3, "tool": 4, "function": 5}
ROLE_NAMES = tuple(ROLES)


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
    """Return metadata as JSON; what does not come back as it was given is refused.

    Tuples come back as lists; that alone is let pass.
    """
    if not isinstance(value, Mapping):
        raise InvalidType(f"metadata must be a mapping (got {type(value).__name__})")
    _check_fields(value)
    try:
        return json.dumps(dict(value), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as e:
        kind = InvalidType if isinstance(e, TypeError) else InvalidArgument
        raise kind("metadata must hold JSON values only (str, finite numbers, bool, None, "
                   "lists, mappings with str keys)") from None  # fmt: skip


def _check_fields(value: Mapping[Any, Any]) -> None:
    """Refuse keys that JSON would turn into str, and nesting that a reader could not follow."""
    level: list[Any] = [value]
    for _ in range(METADATA_DEPTH_MAX):
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                for field in one:
                    if not isinstance(field, str):
                        raise InvalidType(
                            f"metadata fields must be str (got {type(field).__name__})"
                        )
                deeper.extend(one.values())
            elif isinstance(one, list | tuple):
                deeper.extend(one)
        level = [one for one in deeper if isinstance(one, Mapping | list | tuple)]
        if not level:
            return
    raise InvalidArgument(f"metadata must be nested at most {METADATA_DEPTH_MAX} deep")


def group_bytes(value: Any) -> bytes:
    """Return a group; its first byte tells str from int."""
    if isinstance(value, str):
        return b"s" + name_bytes(value, "group")
    if isinstance(value, bytes | bytearray):
        raise InvalidType(f"group must be a str or an int (got {type(value).__name__})")
    number = index(value, "group")
    if number.bit_length() > GROUP_BITS_MAX:
        raise InvalidArgument(
            f"group must have at most {GROUP_BITS_MAX} bits (got {number.bit_length()})"
        )
    return b"i%d" % number


def key_bytes(value: Any) -> bytes:
    """Return an idempotency key."""
    return name_bytes(value, "key")


def flag(value: Any, what: str) -> bool:
    """Return a bool; nothing else stands for one."""
    if not isinstance(value, bool):
        raise InvalidType(f"{what} must be a bool (got {type(value).__name__})")
    return value


def seconds(value: Any, what: str, *, positive: bool = False) -> float:
    """Return a finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"{what} must be a number of seconds (got {type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        bound = "positive and finite" if positive else "finite"
        raise InvalidArgument(f"{what} must be {bound} (got {number})")
    return number


def index(value: Any, what: str) -> int:
    """Return an int of any size; bool is none."""
    if isinstance(value, bool):
        raise InvalidType(f"{what} must be an int (got bool)")
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidType(f"{what} must be an int (got {type(value).__name__})") from None


def whole(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """Return an int in a range; bool is none."""
    number = index(value, what)
    if number < least or (most is not None and number > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most}"
        # Python refuses to print a number of thousands of digits.
        given = str(number) if number.bit_length() <= 256 else f"{number.bit_length()} bits"
        raise InvalidArgument(f"{what} must be {bound} (got {given})")
    return number


def choice(value: Any, what: str, options: tuple[str, ...]) -> int:
    """Return the place of an option."""
    if not isinstance(value, str):
        raise InvalidType(f"{what} must be a str (got {type(value).__name__})")
    if value not in options:
        raise InvalidArgument(f"{what} must be one of {', '.join(options)}")
    return options.index(value)
