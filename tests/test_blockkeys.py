"""Block keys: the published routing recipe, and chains that are the same in every process."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx.blockkeys import XXH3_SEED, block_keys, block_keys_sha256
from kalos_ctx.errors import InvalidArgument, InvalidTokenId, InvalidType

IDS = list(range(1, 65))
GOLDEN = [0xEA06FC71A5EE6E88, 0xAD01835A37DD294C, 0x0D55E56C2BCCBD1A, 0x445502A8048D6688]
GOLDEN_SALTED = [0x98D62386A7357D1E, 0xA1FD1D593480D9A1, 0xC58387DCBAF2FE9D, 0x50D6E808D151EEA3]
GOLDEN_SHA256 = [
    "04edd107747e35914e45051aafcc2a54cef35b9e71b21d1e5f102d9df858094e",
    "c971c95fcb68b4cd01b63e22fc64e6cc67ce5b0970db4eb0f59b21ab09f1dbc7",
]
SCRIPT = """
from kalos_ctx.blockkeys import block_keys, block_keys_sha256
ids = list(range(1, 65))
print([int(key) for key in block_keys(ids, 16)])
print([key.hex() for key in block_keys_sha256(ids, 32)])
"""


def test_seed_matches_the_published_hash_value():
    """The router's own test states this value for `compute_block_hash(b"test data")`."""
    assert xxhash.xxh3_64_intdigest(b"test data", seed=XXH3_SEED) == 13226331709069118873


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 20), st.binary(max_size=9))
def test_block_keys_follow_the_written_recipe(ids, size, salt):
    seed = 1337 + (xxhash.xxh3_64_intdigest(salt, seed=1) if salt else 0)
    expected = []
    sha, parent = [], hashlib.sha256(b"kalos block key 1\0" + struct.pack("<Q", size) + salt)
    for start in range(0, len(ids) // size * size, size):
        block = struct.pack(f"<{size}I", *ids[start : start + size])
        own = xxhash.xxh3_64_intdigest(block, seed=seed % 2**64)
        chained = struct.pack("<QQ", expected[-1] if expected else 0, own)
        expected.append(xxhash.xxh3_64_intdigest(chained, seed=1337) if expected else own)
        parent = hashlib.sha256(parent.digest() + block)
        sha.append(parent.digest())
    keys = block_keys(ids, size, salt)
    assert keys.dtype == np.uint64
    assert keys.tolist() == expected
    assert block_keys_sha256(ids, size, salt) == sha


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_b107_keys_are_golden_in_every_process(hash_seed):
    assert block_keys(IDS, 16).tolist() == GOLDEN
    assert block_keys(IDS, 16, b"tenant-7").tolist() == GOLDEN_SALTED
    assert [key.hex() for key in block_keys_sha256(IDS, 32)] == GOLDEN_SHA256
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout == f"{GOLDEN}\n{GOLDEN_SHA256}\n"


@pytest.mark.parametrize("compute", [block_keys, block_keys_sha256])
def test_b73_salt_changes_the_first_key_and_all_after_it(compute):
    plain, one, two = (list(compute(IDS, 16, salt)) for salt in (b"", b"a", b"b"))
    for left, right in ((plain, one), (plain, two), (one, two)):
        assert all(a != b for a, b in zip(left, right, strict=True))
    assert list(compute(IDS, 16, b"a")) == one


@pytest.mark.parametrize("compute", [block_keys, block_keys_sha256])
def test_b109_only_whole_blocks_have_keys(compute):
    assert len(compute(IDS[:63], 64)) == 0
    assert len(compute([], 16)) == 0
    assert len(compute(IDS, 64)) == 1
    assert list(compute(IDS[:63], 16)) == list(compute(IDS, 16))[:3]


@pytest.mark.parametrize("compute", [block_keys, block_keys_sha256])
def test_keys_differ_from_the_first_changed_block_on(compute):
    changed = [*IDS[:20], 999, *IDS[21:]]
    same = [a == b for a, b in zip(compute(IDS, 16), compute(changed, 16), strict=True)]
    assert same == [True, False, False, False]


def test_keys_do_not_depend_on_the_container():
    for ids in (np.array(IDS, dtype="<i4"), np.array(IDS, dtype=">i8"), np.repeat(IDS, 2)[::2]):
        assert block_keys(ids, 16).tolist() == GOLDEN


@pytest.mark.parametrize("compute", [block_keys, block_keys_sha256])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((IDS, 0), InvalidArgument),
        ((IDS, -1), InvalidArgument),
        ((IDS, 1.5), InvalidType),
        ((IDS, True), InvalidType),
        ((IDS, 16, "salt"), InvalidType),
        ((IDS, 16, None), InvalidType),
        (([1, -1], 1), InvalidTokenId),
        (([1, 2**31], 1), InvalidTokenId),
        (([1.0], 1), InvalidType),
        (([[1]], 1), InvalidType),
    ],
)
def test_keys_wrong_argument_is_refused(compute, arguments, error):
    with pytest.raises(error):
        compute(*arguments)
