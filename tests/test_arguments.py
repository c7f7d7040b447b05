"""Arguments: what passes and as what, what is refused and as which class."""

import decimal
import fractions
import json
import math

import numpy as np
import pytest

from kalos_ctx import arguments
from kalos_ctx.errors import InvalidArgument, InvalidType

NEEDLE = "needle-of-a-conversation"
# Python itself refuses to print it.
HUGE = pytest.param(10**5000, id="huge")
TINY = pytest.param(-(10**5000), id="tiny")


def refused(kind, match=None):
    return pytest.raises(kind, match=match)


# ---- Names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", b"a"),
        ("ä", b"\xc3\xa4"),
        (b"\xff", b"\xff"),
        ("a\0b", b"a\0b"),
        ("x" * 1024, b"x" * 1024),
    ],
)
def test_name_is_bytes(value, expected):
    assert arguments.name_bytes(value, "session") == expected
    assert arguments.key_bytes(value) == expected


@pytest.mark.parametrize(
    "value", ["", b"", "x" * 1025, "ä" * 513, b"x" * 1025, "\ud800", "a\udfff"]
)
def test_name_of_other_length_or_with_a_surrogate_is_refused(value):
    with refused(InvalidArgument, "session"):
        arguments.name_bytes(value, "session")


@pytest.mark.parametrize("value", [None, 5, 1.5, True, bytearray(b"a"), memoryview(b"a"), ["a"]])
def test_name_of_another_type_is_refused(value):
    with refused(InvalidType, "session must be str or bytes"):
        arguments.name_bytes(value, "session")


def test_empty_name_passes_where_it_may():
    assert arguments.name_bytes("", "tenant", empty=True) == b""
    with refused(InvalidArgument, "0 to 1024"):
        arguments.name_bytes("x" * 1025, "tenant", empty=True)


@pytest.mark.parametrize("name", ["a", "ä", "a\0", b"\xff\xfe"])
def test_name_comes_out_as_it_went_in(name):
    assert arguments.name_out(arguments.name_bytes(name, "session")) == name


# ---- Roles, groups, choices ---------------------------------------------------------------------


def test_roles_are_numbered_as_the_layout_has_them():
    names = ("system", "developer", "user", "assistant", "tool", "function")
    assert [arguments.role_code(name) for name in names] == list(range(6))
    assert names == arguments.ROLE_NAMES


@pytest.mark.parametrize("value", ["User", "", "bot", "user ", NEEDLE])
def test_unknown_role_is_refused_and_not_quoted(value):
    with refused(InvalidArgument, "role must be one of") as caught:
        arguments.role_code(value)
    assert NEEDLE not in str(caught.value)


@pytest.mark.parametrize("value", [None, 2, b"user", ["user"], True])
def test_role_of_another_type_is_refused(value):
    with refused(InvalidType, "role must be a str"):
        arguments.role_code(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", b"sa"), ("1", b"s1"), (1, b"i1"), (-5, b"i-5"), (0, b"i0"), (np.int64(7), b"i7")],
)
def test_group_keeps_its_type(value, expected):
    assert arguments.group_bytes(value) == expected


@pytest.mark.parametrize("value", [None, 1.0, True, b"a", ["a"], (), math.nan])
def test_group_of_another_type_is_refused(value):
    with refused(InvalidType, "group"):
        arguments.group_bytes(value)


@pytest.mark.parametrize("value", ["", "x" * 1025, "\ud800", 2**2049, TINY])
def test_group_out_of_range_is_refused(value):
    with refused(InvalidArgument, "group"):
        arguments.group_bytes(value)


@pytest.mark.parametrize("value", ["c", "", "A", NEEDLE])
def test_choice_outside_the_options_is_refused(value):
    assert arguments.choice("b", "mode", ("a", "b")) == 1
    with refused(InvalidArgument, "mode must be one of a, b") as caught:
        arguments.choice(value, "mode", ("a", "b"))
    assert NEEDLE not in str(caught.value)
    for other in (None, 0, b"a", True):
        with refused(InvalidType):
            arguments.choice(other, "mode", ("a", "b"))


@pytest.mark.parametrize("value", [0, 1, None, "True", np.True_, 1.0])
def test_flag_is_a_bool_alone(value):
    assert arguments.flag(True, "framed") is True
    with refused(InvalidType, "framed must be a bool"):
        arguments.flag(value, "framed")


# ---- Numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [1, 1.5, -3, 0, np.float32(2.5), np.int64(7), fractions.Fraction(1, 2), 1e300]
)
def test_seconds_take_real_numbers(value):
    assert arguments.seconds(value, "ttl") == float(value)
    assert type(arguments.seconds(value, "ttl")) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), np.nan])
def test_seconds_not_finite_are_refused(value):
    with refused(InvalidArgument, "created_at must be finite"):
        arguments.seconds(value, "created_at")


@pytest.mark.parametrize("value", [0, -1, -0.0, -1e-9])
def test_seconds_zero_or_negative_are_refused_where_they_must_be_positive(value):
    with refused(InvalidArgument, "ttl must be positive"):
        arguments.seconds(value, "ttl", positive=True)
    assert arguments.seconds(value, "created_at") == value


@pytest.mark.parametrize("value", [None, "1", True, 1j, [1], decimal.Decimal(1), np.array([1.0])])
def test_seconds_of_another_type_are_refused(value):
    with refused(InvalidType, "ttl must be a number of seconds"):
        arguments.seconds(value, "ttl")


@pytest.mark.parametrize("value", [0, 5, np.uint8(5), np.array(5)])
def test_whole_takes_what_has_an_index(value):
    assert arguments.whole(value, "limit") == int(value)
    assert type(arguments.whole(value, "limit")) is int


@pytest.mark.parametrize(
    "value", [None, 1.0, "1", True, np.array([1]), [1], math.nan, np.float64(1)]
)
def test_whole_of_another_type_is_refused(value):
    with refused(InvalidType, "limit must be an int"):
        arguments.whole(value, "limit")


@pytest.mark.parametrize("value", [-1, 11, 2**64, TINY, HUGE])
def test_whole_out_of_range_is_refused(value):
    with refused(InvalidArgument, "limit must be between 0 and 10"):
        arguments.whole(value, "limit", 0, 10)


# ---- Text and metadata --------------------------------------------------------------------------


def test_text_is_utf_8_and_a_surrogate_is_named_by_its_place():
    assert arguments.text_bytes("a\0ü😀", "content") == "a\0ü😀".encode()
    with refused(InvalidArgument, "content has a lone surrogate at position 24") as caught:
        arguments.text_bytes(NEEDLE + "\ud800", "content")
    assert NEEDLE not in str(caught.value)
    for other in (None, b"a", 5, ["a"]):
        with refused(InvalidType, "content must be a str"):
            arguments.text_bytes(other, "content")


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": None, "b": [1, 2.5, True, "x", {"c": []}], "ü\0\ud800": "\ud800"},
        {"deep": json.loads("[" * 60 + "]" * 60)},
        {"n": 10**300},
    ],
)
def test_metadata_comes_back_as_it_was_given(value):
    assert json.loads(arguments.metadata_bytes(value)) == value


@pytest.mark.parametrize(
    "value",
    [
        {1: "a"},
        {None: 1},
        {"a": {1: 2}},
        {"a": [{"b": {True: 1}}]},
        {"a": b"x"},
        {"a": {1, 2}},
        {"a": object()},
        {"a": np.int64(1)},
        {"a": np.zeros(2)},
        [("a", 1)],
        "a",
        5,
        None,
    ],
)
def test_metadata_that_json_would_change_is_refused(value):
    with refused(InvalidType, "metadata"):
        arguments.metadata_bytes(value)


def test_metadata_with_numbers_or_nesting_out_of_bounds_is_refused():
    loop: dict = {}
    loop["a"] = loop
    for value in (
        {"a": math.nan},
        {"a": [math.inf]},
        {"deep": json.loads("[" * 70 + "]" * 70)},
        {"n": 10**5000},
        loop,
    ):
        with refused(InvalidArgument, "metadata"):
            arguments.metadata_bytes(value)


def test_metadata_refused_is_not_quoted():
    for value in ({NEEDLE: {1: NEEDLE}}, {NEEDLE: math.nan}, {"a": {NEEDLE}}):
        with refused(InvalidArgument) as caught:
            arguments.metadata_bytes(value)
        assert NEEDLE not in str(caught.value)
