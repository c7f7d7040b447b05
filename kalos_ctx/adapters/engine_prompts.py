"""What every engine needs of a window: its IDs, checked lengths, and a salt that parts tenants."""

from __future__ import annotations

import hashlib
import hmac
import operator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.errors import BudgetExceeded, InvalidArgument, InvalidType

_SALT_DOMAIN = b"kalos cache salt 1\0"


class ContextWindow(Protocol):
    """What an adapter needs of a window that `assemble` made."""

    @property
    def tenant(self) -> str | bytes: ...

    @property
    def token_ids(self) -> NDArray[np.int32]: ...

    @property
    def report(self) -> Any: ...

    def __len__(self) -> int: ...

    def tolist(self) -> list[int]: ...


class EmptyWindow(InvalidArgument):
    """A window without tokens, which no engine can take as a prompt."""


def checked_length(length: int, *, max_model_len: int, reserve: int, what: str = "window") -> None:
    """Check that a prompt and the answer fit the model, and that there is a prompt.

    Parameters
    ----------
    length : int
        The window's, in tokens.
    max_model_len : int
        What the model takes, prompt and answer together, in tokens.
    reserve : int
        Tokens of the answer, at least 1: what the engine may generate.

    Raises
    ------
    EmptyWindow, BudgetExceeded, InvalidArgument, InvalidType
    """
    most, left = at_least_1("max_model_len", max_model_len), at_least_1("reserve", reserve)
    if not length:
        raise EmptyWindow(f"the {what} has no tokens, and an engine needs at least 1")
    over = length + left - most
    if over > 0:
        raise BudgetExceeded(
            f"the {what} has {length} tokens, which with reserve = {left} is {over} more than "
            f"max_model_len = {most}; assemble it with max_tokens = {most}, reserve = {left}",
            {"window": length, "reserve": left},
            most,
            over,
        )


def at_least_1(what: str, value: Any) -> int:
    """Return a number of tokens that is 1 or more.

    Raises
    ------
    InvalidArgument, InvalidType
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidType(f"{what} must be an int (got {type(value).__name__})") from None
    if number < 1:
        raise InvalidArgument(f"{what} must be at least 1 (got {number})")
    return number


def prompt_ids(window: ContextWindow, *, max_model_len: int, reserve: int) -> list[int]:
    """Return a window's IDs as the list of int that engines take, made without a Python loop.

    Raises
    ------
    EmptyWindow, BudgetExceeded, WindowReleased, InvalidArgument, InvalidType
    """
    checked_length(len(window), max_model_len=max_model_len, reserve=reserve)
    return window.tolist()


def cache_salt(tenant: str | bytes, secret: bytes = b"") -> str:
    """Return what parts a tenant's blocks in an engine's prefix cache from all others'.

    Parameters
    ----------
    tenant : str or bytes
        May be empty: the default tenant has a salt too.
    secret : bytes
        Known to the servers alone. Without it whoever knows a tenant's name can work the salt out.

    Returns
    -------
    str
        64 hexadecimal digits: HMAC-SHA-256 under `secret` of "kalos cache salt 1\\0" and the name.
        The name cannot be read from it.

    Raises
    ------
    InvalidType
    """
    if not isinstance(secret, bytes | bytearray | memoryview):
        raise InvalidType(f"secret must be bytes (got {type(secret).__name__})")
    if not isinstance(tenant, str | bytes):
        raise InvalidType(f"tenant must be a str or bytes (got {type(tenant).__name__})")
    name = tenant.encode() if isinstance(tenant, str) else tenant
    return hmac.digest(bytes(secret), _SALT_DOMAIN + name, hashlib.sha256).hex()
