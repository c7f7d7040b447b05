"""Keys of a window's leading blocks: which prefix of it another place may already hold.

Two kinds. `block_keys` is for routing: fast 64-bit keys that a router which follows the same
published recipe computes too; they are hints, since 64 bits can be made to collide on purpose.
`block_keys_sha256` is for deciding that memory is shared: nobody can make a collision, and the salt
keeps tenants apart.

Both hash whole blocks only, over fixed-width little-endian integers, so that every process, host
and Python gives the same keys.
"""

from __future__ import annotations

import hashlib
import operator
import struct

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from kalos_ctx.errors import InvalidArgument, InvalidTokenId, InvalidType

XXH3_SEED = 1337
_SHA256_DOMAIN = b"kalos block key 1\0"


def _token_words(token_ids: ArrayLike) -> NDArray[np.uint32]:
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return np.empty(0, dtype="<u4")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidType(f"token_ids must be 1-D integers (got {ids.ndim}-D {ids.dtype})")
    bad = np.flatnonzero((ids < 0) | (ids >= 1 << 31))
    if bad.size:
        raise InvalidTokenId(f"token_ids must lie in [0, 2**31) (position {bad[0]} does not)")
    return np.ascontiguousarray(ids, dtype="<u4")


def _blocks(token_ids: ArrayLike, block_size: int) -> list[memoryview]:
    """Give the bytes of each whole block; a rest shorter than a block has no key."""
    if isinstance(block_size, bool):
        raise InvalidType("block_size must be an int (got bool)")
    try:
        size = operator.index(block_size)
    except TypeError as error:
        kind = type(block_size).__name__
        raise InvalidType(f"block_size must be an int (got {kind})") from error
    if size < 1:
        raise InvalidArgument(f"block_size must be at least 1 (got {size})")
    words = _token_words(token_ids)
    data = memoryview(words.tobytes())
    return [data[4 * i : 4 * (i + size)] for i in range(0, words.size - size + 1, size)]


def _salt_bytes(salt: bytes) -> bytes:
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise InvalidType(f"salt must be bytes (got {type(salt).__name__})")
    return bytes(salt)


def block_keys(token_ids: ArrayLike, block_size: int, salt: bytes = b"") -> NDArray[np.uint64]:
    """Compute the rolling XXH3-64 keys of the leading whole blocks, for routing.

    Parameters
    ----------
    token_ids : array-like of int, shape (L,)
        In [0, 2**31).
    block_size : int
        Tokens a block, at least 1.
    salt : bytes
        Keys under different salts differ from the first block on. Empty: the unsalted recipe.

    Returns
    -------
    uint64 array of shape (L // block_size,)
        Key i stands for the whole prefix up to and including block i.

    Raises
    ------
    InvalidArgument, InvalidTokenId, InvalidType

    Notes
    -----
    The recipe of NVIDIA Dynamo's KV router (ai-dynamo/dynamo, lib/kv-router/src/protocols.rs,
    `compute_block_hash_for_seq` and `compute_seq_hash_for_block`; salt: lib/kv-hashing,
    `compute_salt_hash`)::

        seed   = 1337, plus XXH3-64(salt, seed 1) modulo 2**64 where there is a salt
        h[i]   = XXH3-64(block i's tokens as little-endian uint32, seed)
        key[0] = h[0]
        key[i] = XXH3-64(key[i-1] || h[i], both little-endian uint64, seed 1337)
    """
    salt = _salt_bytes(salt)
    seed = XXH3_SEED
    if salt:
        seed = (seed + xxhash.xxh3_64_intdigest(salt, seed=1)) & 0xFFFFFFFFFFFFFFFF
    blocks = _blocks(token_ids, block_size)
    keys = np.empty(len(blocks), dtype=np.uint64)
    key = 0
    for i, block in enumerate(blocks):
        own = xxhash.xxh3_64_intdigest(block, seed=seed)
        if i == 0:
            key = own
        else:
            key = xxhash.xxh3_64_intdigest(struct.pack("<QQ", key, own), seed=XXH3_SEED)
        keys[i] = key
    return keys


def block_keys_sha256(token_ids: ArrayLike, block_size: int, salt: bytes = b"") -> list[bytes]:
    """Compute the chained SHA-256 keys of the leading whole blocks, where a key decides sharing.

    Parameters
    ----------
    token_ids : array-like of int, shape (L,)
        In [0, 2**31).
    block_size : int
        Tokens a block, at least 1.
    salt : bytes
        What may not share, such as the tenant and the model; it enters the first block's key, and
        through the chain all others.

    Returns
    -------
    list of bytes
        32 bytes for each of the L // block_size blocks; each stands for the whole prefix.

    Raises
    ------
    InvalidArgument, InvalidTokenId, InvalidType

    Notes
    -----
    ::

        key[-1] = SHA-256("kalos block key 1\\0" || block_size as little-endian uint64 || salt)
        key[i]  = SHA-256(key[i-1] || block i's tokens as little-endian uint32)
    """
    salt = _salt_bytes(salt)
    blocks = _blocks(token_ids, block_size)
    key = hashlib.sha256(_SHA256_DOMAIN + struct.pack("<Q", block_size) + salt).digest()
    keys = []
    for block in blocks:
        key = hashlib.sha256(key + block).digest()
        keys.append(key)
    return keys
