"""MessagePack to plain values, as data alone: nothing that the bytes name is imported or called.

Extension types stay what they are, a code and bytes; the caller decides which it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

from kalos_ctx.chat_files import Refused


@dataclass(frozen=True, slots=True)
class Extension:
    """A value of an application's own type, unread."""

    code: int
    data: bytes


def unpack(data: bytes) -> Any:
    """Return the one value that the bytes hold.

    Returns
    -------
    None, bool, int, float, str, bytes, list, dict or Extension

    Raises
    ------
    Refused
        The bytes are no MessagePack, are cut short, go on behind the value, or are nested too
        deeply.
    """
    try:
        return msgpack.unpackb(data, ext_hook=Extension, strict_map_key=False)
    except msgpack.ExtraData:
        raise Refused("MessagePack data goes on behind its value") from None
    except (RecursionError, msgpack.StackError):
        raise Refused("MessagePack data is nested too deeply") from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise Refused(f"this is no whole MessagePack value ({type(error).__name__})") from None
