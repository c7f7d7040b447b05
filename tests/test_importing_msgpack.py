"""MessagePack as data: values, extensions unread, and a refusal for bytes that are none."""

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx.chat_files import Refused
from kalos_ctx.msgpack_values import Extension, unpack

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(VALUES)
def test_unpack_gives_back_what_was_packed(value):
    assert unpack(msgpack.packb(value)) == value


def test_an_extension_stays_a_code_and_bytes():
    packed = msgpack.packb([msgpack.ExtType(5, b"ab"), {1: 2}])
    assert unpack(packed) == [Extension(5, b"ab"), {1: 2}]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no whole"),
        (b"\xc1", "no whole"),
        (b"\x01\x02", "goes on behind its value"),
        (b"\xdb\xff\xff\xff\xffx", "no whole"),
        (b"\xdd\xff\xff\xff\xff", "no whole"),
        (b"\xa1\xff", "no whole"),
        (b"\x81\x90\x01", "no whole"),
        (b"\x91" * 5000 + b"\x01", "nested too deeply"),
    ],
)
def test_unpack_of_what_is_no_messagepack_says_so(data, reason):
    with pytest.raises(Refused, match=reason):
        unpack(data)


@given(st.binary(max_size=64))
def test_unpack_of_any_bytes_gives_a_value_or_a_refusal(data):
    with contextlib.suppress(Refused):
        unpack(data)
