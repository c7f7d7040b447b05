"""Token IDs as callers give them: what passes, what is refused, and where."""

import array
import math

import numpy as np
import pytest

from kalos_ctx._intake import as_ids
from kalos_ctx.errors import InvalidTokenId, InvalidType


class Indexable:
    """What torch tensors and the like look like from here: an array by protocol."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class Failing:
    def __iter__(self):
        raise RuntimeError("not from here")


GOOD = [
    [1, 2, 3],
    (1, 2, 3),
    range(1, 4),
    array.array("i", [1, 2, 3]),
    array.array("Q", [1, 2, 3]),
    memoryview(array.array("h", [1, 2, 3])),
    [np.int8(1), np.uint64(2), 3],
    np.array([1, 2, 3], np.uint8),
    np.array([1, 2, 3], np.int64),
    np.array([1, 2, 3], ">i4"),
    np.array([1, 2, 3], ">u8"),
    np.array([1, 9, 2, 9, 3], np.int32)[::2],
    np.array([3, 2, 1], np.int32)[::-1],
    np.array([[1, 9], [2, 9], [3, 9]], np.int32)[:, 0],
    Indexable([1, 2, 3]),
    {1: 0, 2: 0, 3: 0}.keys(),
    (i for i in (1, 2, 3)),
]


@pytest.mark.parametrize("value", GOOD, ids=lambda value: type(value).__name__)
def test_ids_of_any_integer_kind_pass(value):
    ids = as_ids(value, 100)
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    assert ids.tolist() == [1, 2, 3]


def test_int32_array_is_not_copied():
    value = np.array([1, 2, 3], np.int32)
    assert as_ids(value, 0) is value
    value.flags.writeable = False
    assert as_ids(value, 0) is value


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int32), range(0)])
def test_no_ids_are_no_error(empty):
    assert as_ids(empty, 10).tolist() == []


def test_bounds_are_inclusive_of_zero_and_exclusive_of_the_vocabulary():
    assert as_ids([0, 9], 10).tolist() == [0, 9]
    assert as_ids([0, 2**31 - 1], 0).tolist() == [0, 2**31 - 1]
    assert as_ids([2**31 - 1], 2**31).tolist() == [2**31 - 1]


@pytest.mark.parametrize(
    "bad", [-1, 10, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 2**64, -(2**63), 10**50]
)
@pytest.mark.parametrize("place", [0, 1, 7])
def test_id_out_of_range_is_named_by_its_place(bad, place):
    ids = [1] * 8
    ids[place] = bad
    with pytest.raises(InvalidTokenId, match=rf"token_ids\[{place}\] must lie in \[0, 10\)"):
        as_ids(ids, 10)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"])
def test_array_id_out_of_range_is_named_by_its_place(dtype):
    limits = np.iinfo(dtype)
    for bad in {limits.min, limits.max} - {0}:
        ids = np.ones(1000, dtype)
        ids[777] = bad
        ids[888] = bad
        with pytest.raises(InvalidTokenId, match=r"token_ids\[777\]"):
            as_ids(ids, 100)


def test_without_a_vocabulary_ids_end_with_int32():
    for bad in (2**31, -1):
        with pytest.raises(InvalidTokenId, match=r"\[0, 2147483648\)"):
            as_ids([bad], 0)
        with pytest.raises(InvalidTokenId, match=r"\[0, 2147483648\)"):
            as_ids(np.array([bad]), 0)


@pytest.mark.parametrize(
    "value",
    [
        "123",
        b"123",
        bytearray(b"123"),
        {1: 2},
        {1, 2},
        5,
        1.5,
        object(),
        [1.0],
        [1, None],
        [1, "2"],
        [True],
        [1, np.True_],
        [math.nan],
        [[1], [2]],
        np.array([1.0, 2.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1, None]),
        np.array([[1, 2]]),
        np.array(5),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([(1, 2)], "i4,i4"),
        array.array("d", [1.0]),
        Indexable([1.5]),
    ],
    ids=repr,
)
def test_other_values_are_refused(value):
    with pytest.raises(InvalidType, match="token_ids"):
        as_ids(value, 10)


def test_error_of_a_callers_iterator_is_its_own():
    with pytest.raises(RuntimeError, match="not from here"):
        as_ids(Failing(), 10)


@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 1000, 100_003])
def test_first_of_several_bad_ids_is_found_at_every_length(n):
    rng = np.random.default_rng(n)
    ids = rng.integers(0, 1000, n).astype(np.int32)
    assert (as_ids(ids, 1000) == ids).all()
    bad = np.sort(rng.integers(0, n, 3))
    ids[bad] = 1000
    with pytest.raises(InvalidTokenId, match=rf"token_ids\[{bad[0]}\]"):
        as_ids(ids, 1000)
