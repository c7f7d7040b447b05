"""Bytes to messages and back; no I/O.

kalos_channel.h has the layout of what is fixed. Everything else is msgpack, with these extension
types: 1 an array (dtype, number of dims, dims as uint32, the elements), 2 an int beyond 64 bits in
decimal, 16 and up one of Kalos's records, as the list of its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any

import msgpack
import numpy as np

from kalos_ctx import errors
from kalos_ctx.errors import InvalidType, KalosError, ProtocolError, VersionMismatch
from kalos_ctx.planner import Budget, Plan, PlanItem, Policy
from kalos_ctx.types import ErasureReceipt, Hits, Page

MAGIC, ENDIAN = 0x47534D4B, 0x01020304
MAJOR, MINOR = 1, 0
OP_HELLO, OP_WELCOME, OP_PING, OP_COUNT, OP_ASSEMBLE, OP_CALL = 1, 2, 16, 17, 18, 19
MODES = {"direct": 1, "served": 2}
TRANSPORTS = {"memory": 1, "socket": 2}
SLOTS = 8
FEATURE_RECONNECT = 1  # a hello's bit: the client was connected before

HEAD = struct.Struct("<IHHQQIIQ24x")
HELLO = struct.Struct("<IHHIIQIIII24x")
CALL = struct.Struct("<qqqIIIHH24x")

# A message that is larger is refused before it is read.
MESSAGE_NBYTES_MAX = 1 << 30
HELLO_NBYTES_MAX = 4096

ARRAY, BIG_INT, FIRST_RECORD = 1, 2, 16
# A record keeps its place; new ones come behind.
RECORDS: tuple[type[Any], ...] = (Policy, Hits, Plan, PlanItem, Budget, ErasureReceipt, Page)
DTYPES = ("<f4", "<f2", "<f8", "<i4", "<i8", "<u4", "<u8", "<i2", "|i1", "|u1", "<u2", "|b1")


# ---- Values -------------------------------------------------------------------------------------


def pack(value: Any) -> bytes:
    """Return a value as bytes.

    Raises
    ------
    InvalidType
        It holds something that has no form there.
    """
    try:
        packed: bytes = msgpack.packb(
            value, default=_extend, use_bin_type=True, unicode_errors="surrogatepass"
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidType(f"a value cannot be sent to a sidecar: {error}") from None
    return packed


def unpack(data: bytes) -> Any:
    """Return the value that was packed; tuples come back as lists.

    Raises
    ------
    ValueError, TypeError
        The bytes are damaged, or name a type that the protocol does not have.
    """
    return _unpack(data, True)


def _unpack(data: bytes, use_list: bool) -> Any:
    try:
        return msgpack.unpackb(
            data,
            ext_hook=_extension,
            use_list=use_list,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except msgpack.UnpackException as error:
        raise ValueError(f"it is no msgpack ({type(error).__name__})") from None


def _extend(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(ARRAY, _array_bytes(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, int):
        return msgpack.ExtType(BIG_INT, str(value).encode())
    if type(value) in RECORDS:
        row = [getattr(value, field.name) for field in fields(value)]
        return msgpack.ExtType(FIRST_RECORD + RECORDS.index(type(value)), pack(row))
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        return msgpack.ExtType(ARRAY, _array_bytes(np.asarray(value)))
    if isinstance(value, (set, frozenset)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{type(value).__name__} has no form there")
    return list(value)


def _array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    little = np.ascontiguousarray(array).reshape(array.shape)
    little = little.astype(little.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in DTYPES:
        raise TypeError(f"an array of {array.dtype} has no form there")
    head = struct.pack(
        f"<BB{little.ndim}I", DTYPES.index(little.dtype.str), little.ndim, *little.shape
    )
    return head + little.tobytes()


def _extension(code: int, data: bytes) -> Any:
    if code == ARRAY:
        return _array_from(data)
    if code == BIG_INT:
        if len(data) > 1024:
            raise ValueError("an int of more than 1,024 digits")
        return int(data)
    if FIRST_RECORD <= code < FIRST_RECORD + len(RECORDS):
        return _record_from(RECORDS[code - FIRST_RECORD], _unpack(data, False))
    raise ValueError(f"extension type {code} is unknown")


def _array_from(data: bytes) -> np.ndarray[Any, Any]:
    try:
        kind, ndim = struct.unpack_from("<BB", data)
        shape = struct.unpack_from(f"<{ndim}I", data, 2)
        return np.frombuffer(data, DTYPES[kind], offset=2 + 4 * ndim).reshape(shape)
    except (struct.error, IndexError):
        raise ValueError("an array is damaged") from None


def _record_from(cls: type[Any], row: Any) -> Any:
    if not isinstance(row, tuple) or len(row) != len(fields(cls)):
        raise ValueError(f"a {cls.__name__} has other fields")
    if cls is Page:
        return Page(list(row[0]), row[1])
    return cls(*row)


# ---- Windows ------------------------------------------------------------------------------------

WINDOW_OPTIONS = frozenset(
    {"collections", "session_recall", "min_score", "filters", "placement", "recall_role"}
)


def window_options(raw: bytes) -> tuple[Policy | None, dict[str, Any]]:
    """Return policy and further arguments of an ASSEMBLE from its options.

    Raises
    ------
    ProtocolError, InvalidArgument, InvalidType
    """
    try:
        options = unpack(raw)
    except KalosError:
        raise  # a policy that is refused says what is wrong with it
    except (ValueError, TypeError):
        raise ProtocolError("the options of a window are damaged") from None
    if not isinstance(options, dict) or not options.keys() <= WINDOW_OPTIONS | {"policy"}:
        raise ProtocolError("the options of a window are not a map of arguments")
    return options.pop("policy", None), options


# ---- Errors -------------------------------------------------------------------------------------


def pack_error(error: KalosError) -> bytes:
    """Return an error as the body of an answer."""
    return pack(
        {
            "type": _public_class(type(error)).__name__,
            "message": str(error),
            "fields": {
                name: value
                for name, value in vars(error).items()
                if isinstance(value, (str, int, float, bytes, dict, type(None)))
            },
        }
    )


def _public_class(cls: type[KalosError]) -> type[KalosError]:
    """Return the nearest class that `kalos_ctx.errors` has."""
    for base in cls.__mro__:
        if issubclass(base, KalosError) and base in vars(errors).values():
            return base
    return KalosError


def unpack_error(body: bytes) -> KalosError:
    """Return the error that an answer holds; an unknown type is a KalosError."""
    try:
        said = unpack(body)
        cls = getattr(errors, str(said["type"]), KalosError)
        if not (isinstance(cls, type) and issubclass(cls, KalosError)):
            cls = KalosError
        error = cls.__new__(cls)
        error.args = (str(said["message"]),)
        vars(error).update(said["fields"])
    except (ValueError, TypeError, KeyError):
        return ProtocolError("the sidecar answered with an error that cannot be read")
    return error


# ---- Handshake ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of either side: what is asked, or what was granted."""

    major: int = MAJOR
    minor: int = MINOR
    features: int = 0
    modes: int = 0
    transports: int = 0
    request_nbytes: int = 0
    response_nbytes: int = 0

    def body(self) -> bytes:
        """Return the kalos_hello."""
        return HELLO.pack(
            ENDIAN,
            self.major,
            self.minor,
            HEAD.size,
            SLOTS,
            self.features,
            self.modes,
            self.transports,
            self.request_nbytes,
            self.response_nbytes,
        )

    @classmethod
    def read(cls, body: bytes, whose: str) -> Hello:
        """Return the hello in a body.

        Raises
        ------
        VersionMismatch, ProtocolError
            The other side speaks no version of this protocol, or no such machine's.
        """
        if len(body) < HELLO.size:
            raise ProtocolError(f"the {whose}'s hello is shorter than {HELLO.size} bytes")
        endian, major, minor, head, slots, *rest = HELLO.unpack_from(body)
        ours = f"version {MAJOR}.{MINOR}, little-endian, heads of {HEAD.size} bytes, {SLOTS} slots"
        if endian != ENDIAN:
            raise VersionMismatch(f"the {whose} has another byte order (we speak {ours})")
        if (major, head, slots) != (MAJOR, HEAD.size, SLOTS):
            raise VersionMismatch(
                f"the {whose} speaks version {major}.{minor}, heads of {head} bytes, {slots} slots "
                f"(we speak {ours})"
            )
        return cls(major, minor, *rest)


def message(
    opcode: int,
    body: bytes = b"",
    *,
    id: int = 0,
    generation: int = 0,
    status: int = 0,
    timeout_ns: int = 0,
) -> bytes:
    """Return a whole message."""
    return HEAD.pack(MAGIC, opcode, status, id, generation, len(body), 0, timeout_ns) + body


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a message."""

    opcode: int
    status: int
    id: int
    generation: int
    body_nbytes: int
    timeout_ns: int


def read_head(data: bytes, most: int = MESSAGE_NBYTES_MAX) -> Head:
    """Return the head of a message.

    Raises
    ------
    ProtocolError
        It is none, or announces a body of more than `most` bytes.
    """
    magic, opcode, status, id_, generation, nbytes, _, timeout_ns = HEAD.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("a message begins with another magic number")
    if nbytes > most:
        raise ProtocolError(f"a message of {nbytes} bytes is larger than {most}")
    return Head(opcode, status, id_, generation, nbytes, timeout_ns)


def call_body(
    session: bytes,
    tenant: bytes,
    options: bytes = b"",
    *,
    max_tokens: int = -1,
    reserve: int = 0,
    as_of: int = -1,
    top_k: int = 0,
    query: bytes = b"",
) -> bytes:
    """Return the body of a call; -1 is no bound, and the session as it stands."""
    head = CALL.pack(
        max_tokens,
        reserve,
        as_of,
        top_k,
        len(query) // 4,
        len(options),
        len(session),
        len(tenant),
    )
    names = session + tenant
    return head + names + bytes(-len(names) % 4) + query + options


assert HEAD.size == HELLO.size == CALL.size == 64
assert astuple(Hello())[:2] == (MAJOR, MINOR)
