"""The checks of the store, compiled on their own: CRC32C, sealed words, vector rows."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

SOURCE = """
#include "_records.h"
uint32_t crc(uint32_t c, const char* p, size_t n) { return kalos_crc32c(c, p, n); }
uint32_t crc_table(uint32_t c, const char* p, size_t n) { return kalos_crc32c_portable(c, p, n); }
uint64_t seal(uint64_t value, uint64_t context) { return kalos_seal(value, context); }
int unseal(uint64_t word, uint64_t context) { uint64_t v; return kalos_unseal(word, context, &v); }
// How many of the 64 one-bit flips of a sealed word are taken for sealed words.
int blind(uint64_t value, uint64_t context) {
  int n = 0;
  uint64_t v, word = kalos_seal(value, context);
  for (int bit = 0; bit < 64; bit++) n += kalos_unseal(word ^ ((uint64_t)1 << bit), context, &v);
  return n;
}
// How many one-bit flips of a row are not noticed.
int blind_row(uint32_t c, float factor, uint64_t entry, uint64_t row, int dead) {
  kalos_row r;
  uint64_t e;
  int n = 0, d;
  kalos_row_write(&r, row, c, factor, entry, dead);
  if (!kalos_row_holds(&r, row, &e, &d) || e != entry || d != dead) return 1000;
  if (kalos_row_holds(&r, row + 1, &e, &d))
    return 1000;
  for (int bit = 0; bit < 128; bit++) {
    ((uint8_t*)&r)[bit / 8] ^= 1 << bit % 8;
    n += kalos_row_holds(&r, row, &e, &d);
    ((uint8_t*)&r)[bit / 8] ^= 1 << bit % 8;
  }
  return n;
}
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Return the checks as a library of their own."""
    folder = tmp_path_factory.mktemp("checks")
    (folder / "checks.c").write_text(SOURCE)
    target = folder / "checks.so"
    subprocess.run(
        ["gcc", "-O3", "-std=gnu11", "-shared", "-fPIC", f"-I{ROOT / 'cython_ext/kalos_ctx'}",
         f"-I{ROOT / 'cuda'}", "-o", target, folder / "checks.c"],
        check=True,
    )  # fmt: skip
    library = ctypes.CDLL(str(target))
    for name in ("crc", "crc_table"):
        getattr(library, name).restype = ctypes.c_uint32
        getattr(library, name).argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
    library.seal.restype = ctypes.c_uint64
    for name in ("seal", "blind"):
        getattr(library, name).argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.unseal.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.blind_row.argtypes = [
        ctypes.c_uint32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int,
    ]  # fmt: skip
    return library


def test_crc_of_known_strings(checks):
    """RFC 3720, appendix B.4, and the usual check value."""
    for data, want in (
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ):
        assert checks.crc(0, data, len(data)) == want
        assert checks.crc_table(0, data, len(data)) == want


def test_crc_equals_the_table_for_every_length_and_alignment(checks):
    raw = np.random.default_rng(1).integers(0, 256, 2100, np.uint8)
    at = raw.ctypes.data
    for n in range(2001):
        for start in range(n % 2, 9, 2):
            assert checks.crc(n, at + start, n) == checks.crc_table(n, at + start, n), (n, start)


@pytest.mark.parametrize("n", [3071, 3072, 3073, 6143, 6144, 10000, 65536, 1_000_003])
def test_crc_of_long_runs_equals_the_table(checks, n):
    raw = np.random.default_rng(n).integers(0, 256, n + 8, np.uint8)
    for start in (0, 1, 7):
        at = raw.ctypes.data + start
        assert checks.crc(7, at, n) == checks.crc_table(7, at, n)


def test_crc_goes_on_where_it_was_left(checks):
    raw = np.random.default_rng(3).integers(0, 256, 5000, np.uint8)
    at = raw.ctypes.data
    whole = checks.crc(0, at, 5000)
    for cut in (0, 1, 191, 192, 193, 3072, 4999):
        assert checks.crc(checks.crc(0, at, cut), at + cut, 5000 - cut) == whole


def test_sealed_word_notices_every_flipped_bit(checks):
    draw = np.random.default_rng(5)
    for value, context in draw.integers(0, 2**48, (3000, 2), np.uint64).tolist():
        word = checks.seal(value, context)
        assert word & (2**48 - 1) == value
        assert word >> 63 == 1
        assert word >> 48 != 0xFFFF
        assert checks.unseal(word, context)
        assert checks.blind(value, context) == 0


def test_vector_row_notices_every_flipped_bit(checks):
    draw = np.random.default_rng(6)
    for crc, entry, row in draw.integers(0, 2**32, (3000, 3), np.uint64).tolist():
        assert checks.blind_row(crc, crc / 7, entry // 64 * 64, row, crc % 2) == 0


def test_zero_is_neither_a_sealed_word_nor_an_empty_bucket(checks):
    """A hole in a file is damage wherever a word proves itself."""
    for context in range(1000):
        assert not checks.unseal(0, context)
        assert not checks.unseal(1, context)
        assert not checks.unseal(2**64 - 1, context)
