"""Bytes to messages and back."""

import contextlib
import struct

import numpy as np
import pytest
from golden.make_channel import FOLDER as GOLDEN
from golden.make_channel import messages
from hypothesis import given
from hypothesis import strategies as st

import kalos_ctx
from kalos_ctx import Policy, errors
from kalos_ctx.planner import Budget, Plan, PlanItem
from kalos_ctx.sidecar import protocol
from kalos_ctx.types import ErasureReceipt, Hits, Page

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**2048), 2**2048)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters()) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    assert protocol.unpack(protocol.pack(value)) == value


@given(st.sampled_from(protocol.DTYPES), st.lists(st.integers(0, 4), max_size=3), st.data())
def test_an_array_comes_back_with_its_type_and_shape(dtype, shape, data):
    size = int(np.prod(shape))
    raw = data.draw(st.binary(min_size=size * 8, max_size=size * 8))
    array = np.frombuffer(raw, np.uint8)[: size * np.dtype(dtype).itemsize]
    if dtype == "|b1":
        array = array % 2
    array = array.view(dtype).reshape(shape)
    found = protocol.unpack(protocol.pack(array))
    assert (found.dtype, found.shape, found.tobytes()) == (
        array.dtype,
        array.shape,
        array.tobytes(),
    )


@pytest.mark.parametrize(
    "record",
    [
        Policy(),
        Policy(stable_prefix=False, start_on=("user", "tool"), recall_tokens=5),
        ErasureReceipt({"turns": 2}, "ab"),
        Page(["a", b"\xff"], None),
        Plan((PlanItem("turn", 3, "kept", seq=1),), Budget(9, 1, 8, 0), 4, 3, {"history": 3}),
    ],
)
def test_a_record_comes_back_equal(record):
    assert protocol.unpack(protocol.pack(record)) == record


def test_hits_come_back_with_their_types():
    hits = Hits(np.array([1], np.uint64), np.array([0.5], np.float32), np.array([1]), ("c",), None)
    found = protocol.unpack(protocol.pack(hits))
    assert [found.ids.dtype, found.scores.dtype, found.counts.dtype] == ["u8", "f4", "i8"]
    assert (found.sources, found.reason) == (("c",), None)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.array([object()]), 1j])
def test_what_has_no_form_is_refused(value):
    with pytest.raises(kalos_ctx.InvalidType):
        protocol.pack({"x": value})


@given(st.binary(max_size=64))
def test_random_bytes_raise_one_of_two_errors(data):
    with contextlib.suppress(ValueError, TypeError):
        protocol.unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000 + b"\xc0",
        b"\xc7\x03\x01\x00\x03\x01",  # an array without its dims
        b"\xc7\x02\x01\xff\x00",  # of an unknown type
        b"\xc7\x01\x63\x00",  # an unknown extension type
        b"\xc7\x01\x10\x90",  # a Policy without fields
        b"\xdd\xff\xff\xff\xff",  # a list longer than the message
    ],
)
def test_damaged_bytes_are_refused(data):
    with pytest.raises((ValueError, TypeError)):
        protocol.unpack(data)


@pytest.mark.parametrize(
    "error",
    [
        kalos_ctx.BudgetExceeded("too much", {"a": 5}, 4, 1),
        kalos_ctx.StoreCorrupt("bad", "log", 7),
        kalos_ctx.StoreIOError(5, "no"),
        kalos_ctx.SessionNotFound("there is none"),
        kalos_ctx.InvalidType("no"),
    ],
)
def test_an_error_comes_back_as_its_class_with_its_fields(error):
    found = protocol.unpack_error(protocol.pack_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_every_error_class_survives_the_way():
    for name in dir(errors):
        cls = getattr(errors, name)
        if isinstance(cls, type) and issubclass(cls, kalos_ctx.KalosError):
            error = cls("x")
            assert type(protocol.unpack_error(protocol.pack_error(error))) is cls


def test_an_error_of_a_class_of_its_own_comes_as_the_public_one():
    class Own(kalos_ctx.SessionNotFound):
        pass

    assert type(protocol.unpack_error(protocol.pack_error(Own("x")))) is kalos_ctx.SessionNotFound


@pytest.mark.parametrize("body", [b"", b"\xc0", b"\x80", protocol.pack({"type": "x"})])
def test_an_error_that_cannot_be_read_is_a_protocol_error(body):
    assert type(protocol.unpack_error(body)) is kalos_ctx.ProtocolError


def test_an_error_never_becomes_a_class_that_is_none():
    body = protocol.pack({"type": "__builtins__", "message": "x", "fields": {}})
    assert type(protocol.unpack_error(body)) is kalos_ctx.KalosError


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
def test_81_the_handshake_of_each_release_is_still_understood(folder):
    hello = (folder / "hello.bin").read_bytes()
    head = protocol.read_head(hello[:64])
    assert head.opcode == protocol.OP_HELLO
    found = protocol.Hello.read(hello[64:], "client")
    assert (found.modes, found.transports) == (3, 3)
    welcome = (folder / "welcome.bin").read_bytes()
    granted = protocol.Hello.read(welcome[64:], "sidecar")
    assert (granted.request_nbytes, granted.response_nbytes) == (65536, 278528)
    assert protocol.unpack(welcome[128:])["pid"] == 7


def test_81_this_release_says_its_golden_bytes():
    folder = GOLDEN / f"v{protocol.MAJOR}.{protocol.MINOR}"
    for name, data in messages().items():
        assert (folder / name).read_bytes() == data


def test_numbers_of_the_header_and_of_this_module_are_the_same():
    from helpers.channel_header import constants

    found = constants()
    for name in ("HELLO", "WELCOME", "PING", "COUNT", "ASSEMBLE", "CALL"):
        assert found[f"KALOS_OP_{name}"] == getattr(protocol, f"OP_{name}")
    assert found["KALOS_CHANNEL_MAGIC"] == protocol.MAGIC
    assert found["KALOS_CHANNEL_ENDIAN"] == protocol.ENDIAN
    assert found["KALOS_CHANNEL_SLOTS"] == protocol.SLOTS
    assert (found["KALOS_PROTOCOL_MAJOR"], found["KALOS_PROTOCOL_MINOR"]) == (
        protocol.MAJOR,
        protocol.MINOR,
    )
    assert found["KALOS_MODE_DIRECT"] == protocol.MODES["direct"]
    assert found["KALOS_TRANSPORT_SOCKET"] == protocol.TRANSPORTS["socket"]


def test_window_options_are_checked():
    policy, options = protocol.window_options(
        protocol.pack({"policy": Policy(), "collections": ["a"]})
    )
    assert (policy, options) == (Policy(), {"collections": ["a"]})
    for wrong in (b"\xc1", protocol.pack([1]), protocol.pack({"max_tokens": 5})):
        with pytest.raises(kalos_ctx.ProtocolError):
            protocol.window_options(wrong)


def test_a_message_that_announces_too_much_is_refused_before_it_is_read():
    data = struct.pack("<IHHQQIIQ24x", protocol.MAGIC, 19, 0, 1, 1, 2**32 - 1, 0, 0)
    with pytest.raises(kalos_ctx.ProtocolError, match="larger"):
        protocol.read_head(data)


@given(st.binary(min_size=64, max_size=192))
def test_any_bytes_as_a_handshake_are_read_or_refused(data):
    with contextlib.suppress(kalos_ctx.KalosError):
        head = protocol.read_head(data[:64], protocol.HELLO_NBYTES_MAX)
        assert head.body_nbytes <= protocol.HELLO_NBYTES_MAX
    with contextlib.suppress(kalos_ctx.KalosError):
        found = protocol.Hello.read(data, "client")
        assert found.major == protocol.MAJOR


@given(st.integers(0, 127), st.integers(0, 255))
def test_a_hello_with_one_byte_changed_is_read_or_refused(at, value):
    hello = bytearray(messages()["hello.bin"])
    hello[at] = value
    with contextlib.suppress(kalos_ctx.KalosError):
        protocol.read_head(bytes(hello[:64]), protocol.HELLO_NBYTES_MAX)
        protocol.Hello.read(bytes(hello[64:]), "client")
