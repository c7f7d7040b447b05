"""Recall on the CPU: the score to the bit, and top-k against plain Python."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import plain_recall
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx import _cpu_ops, _vectors
from kalos_ctx.errors import DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector

METRICS = ("cosine", "ip", "l2")
FAST_LEVELS = [level for level in _cpu_ops.levels() if level != "reference"]
MANY_DIMS = [*range(1, 201), 384, 768, 1000, 4096]
ROOT = Path(__file__).resolve().parents[1]


def plain_scores(query, rows, metric):
    query = [float(v) for v in query]
    return [plain_recall.score([float(v) for v in row], query, metric) for row in rows]


def random_rows(rng, shape, dtype):
    """Rows over many magnitudes, with zeros, negative zeros and subnormals among them."""
    rows = rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)
    rows[rng.random(shape) < 0.05] = 0.0
    rows[rng.random(shape) < 0.05] = -0.0
    tiny = rng.random(shape) < 0.05
    rows[tiny] = rng.integers(-9, 10, shape)[tiny] * float(np.finfo(dtype).smallest_subnormal)
    return rows.astype(dtype)


# ---- The score -----------------------------------------------------------------------------------


def documented(heading):
    """Give the cells of the table under a heading sentence of the definition."""
    text = (ROOT / "DESIGN.md").read_text().split(heading)[1]
    lines = text.split("\n\n")[1 if heading[0] == "S" else 2].strip().splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in lines]


def test_score_documented_patterns_have_documented_bits():
    cells = documented("## Test vectors")
    assert len(cells) == 16
    for dim, dtype, *expected in cells:
        d = np.arange(int(dim))
        row = (((d * 37 + 11) % 101 - 50) / 7).astype(np.float32).astype(dtype)
        query = (((d * 53 + 7) % 97 - 48) / 9).astype(np.float32)
        for metric, bits in zip(METRICS, expected, strict=True):
            for level in _cpu_ops.levels():
                got = _cpu_ops.score_rows(query, row[None], [0], metric=metric, level=level)
                assert f"{got.view(np.uint32)[0]:08x}" == bits, (dim, dtype, metric, level)


def parse_case(text, dim):
    values = np.zeros(dim, dtype=np.float32)
    for index, value in re.findall(r"[xq]\[(\d+)\] = (-?[0-9a-fx.p+-]+)", text):
        values[int(index)] = float.fromhex(value) if "x" in value else float(value)
    return values


def test_score_documented_single_cases_have_documented_bits():
    cells = documented("Single cases.")
    assert len(cells) == 12
    for name, metric, dim, row_text, query_text, bits in cells:
        row, query = parse_case(row_text, int(dim)), parse_case(query_text, int(dim))
        assert f"{plain_recall.bits(plain_scores(query, [row], metric))[0]:08x}" == bits, name
        for level in _cpu_ops.levels():
            got = _cpu_ops.score_rows(query, row[None], [0], metric=metric, level=level)
            assert f"{got.view(np.uint32)[0]:08x}" == bits, (name, level)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("metric", METRICS)
def test_g26_score_reference_equals_plain_python_bits(metric, dtype):
    rng = np.random.default_rng(7)
    for dim in (1, 2, 7, 31, 32, 33, 63, 64, 65, 200):
        rows, query = random_rows(rng, (3, dim), dtype), random_rows(rng, dim, "float32")
        query[0] = 1.5
        got = _cpu_ops.score_rows(query, rows, range(3), metric=metric, level="reference")
        assert plain_recall.bits(got) == plain_recall.bits(plain_scores(query, rows, metric)), dim


@pytest.mark.parametrize("level", FAST_LEVELS)
@pytest.mark.parametrize("metric", METRICS)
def test_g26_score_fast_levels_equal_reference_bits(metric, level):
    rng = np.random.default_rng(8)
    for dim in MANY_DIMS:
        for dtype in ("float32", "float16"):
            rows, query = random_rows(rng, (5, dim), dtype), random_rows(rng, dim, "float32")
            query[0] = 1.5
            expected = _cpu_ops.score_rows(query, rows, range(5), metric=metric, level="reference")
            got = _cpu_ops.score_rows(query, rows, range(5), metric=metric, level=level)
            assert plain_recall.bits(got) == plain_recall.bits(expected), (dim, dtype)


@pytest.mark.parametrize("level", _cpu_ops.levels())
def test_score_extreme_magnitudes_equal_plain_python_bits(level):
    """Products that overflow, underflow and cancel; a wrong rounding of fma shows here first."""
    rng = np.random.default_rng(9)
    rows = np.ldexp(rng.standard_normal((40, 40)), rng.integers(-140, 120, (40, 1)))
    rows = rows.astype(np.float32)
    query = np.ldexp(rng.standard_normal(40), rng.integers(-20, 12, 40)).astype(np.float32)
    for metric in METRICS:
        got = _cpu_ops.score_rows(query, rows, range(40), metric=metric, level=level)
        assert plain_recall.bits(got) == plain_recall.bits(plain_scores(query, rows, metric))


def test_score_every_float16_value_converts_exactly():
    rows = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, None]
    rows = np.ascontiguousarray(rows[np.isfinite(rows[:, 0])])
    expected = rows[:, 0].astype(np.float32) + np.float32(0)
    for level in _cpu_ops.levels():
        got = _cpu_ops.score_rows([1.0], rows, range(len(rows)), metric="ip", level=level)
        assert np.array_equal(got.view(np.uint32), expected.view(np.uint32)), level


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the mode register of x86-64")
@pytest.mark.parametrize("mode", [0x8040, 0x6000, 0x4000], ids=["ftz-daz", "to-zero", "upward"])
def test_score_callers_floating_point_mode_changes_no_bit(mode):
    """Libraries built with -ffast-math switch subnormals off for whole threads."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    rng = np.random.default_rng(10)
    rows, query = random_rows(rng, (64, 70), "float32"), random_rows(rng, 70, "float32")
    rows[:8] *= np.float32(2.0**-140)
    plain = [_cpu_ops.topk(query, rows, metric=metric, k=64) for metric in METRICS]
    saved, changed = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(saved)
    libm.fegetenv(changed)
    changed[7] |= mode  # MXCSR is the last word of fenv_t
    libm.fesetenv(changed)
    try:
        other = [_cpu_ops.topk(query, rows, metric=metric, k=64) for metric in METRICS]
        libm.fegetenv(changed)
    finally:
        libm.fesetenv(saved)
    assert changed[7] & mode == mode
    for (scores, found), (other_scores, other_found) in zip(plain, other, strict=True):
        assert np.array_equal(scores.view(np.uint32), other_scores.view(np.uint32))
        assert np.array_equal(found, other_found)


# ---- Vectors at the door -------------------------------------------------------------------------


def test_check_vectors_float16_rounds_as_numpy_does():
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.abs(values) < 65520][None]  # NaN compares false
    halves = np.arange(0, 0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)[None]
    for case in (values, middles, -middles, np.nextafter(middles, np.float32(0))):
        got = _vectors.check_vectors(case, dtype="float16").stored
        assert np.array_equal(got.view(np.uint16), case.astype(np.float16).view(np.uint16))


def test_check_vectors_factors_are_those_of_the_stored_rows():
    rng = np.random.default_rng(12)
    for dtype in ("float32", "float16"):
        for dim in (1, 7, 8, 9, 100):
            rows = random_rows(rng, (4, dim), "float32")
            rows[2] = 0
            checked = _vectors.check_vectors(rows, dtype=dtype)
            expected = [plain_recall.row_factor([float(v) for v in r]) for r in checked.stored]
            assert plain_recall.bits(checked.factors) == plain_recall.bits(expected)
            assert checked.zero.tolist() == [factor == 0 for factor in expected]


@pytest.mark.parametrize("bad", [[np.nan, 1], [np.inf, 0], [1, np.nan], [1, -np.inf], [1, 1e39]])
def test_b84_check_vectors_non_finite_is_refused_with_its_place(bad):
    column = int(np.argmin(np.abs(np.array(bad)) < 1e38))
    for dtype in ("float32", "float16"):
        with pytest.raises(NonFiniteVector, match=f"row 1, column {column} "):
            _vectors.check_vectors([[1.0, 2.0], bad], dtype=dtype)
    with pytest.raises(NonFiniteVector, match=f"index {column} "):
        _cpu_ops.prepare_query(bad)


def test_b84_check_vectors_float16_overflow_is_refused():
    assert _vectors.check_vectors([[65519.0]], dtype="float16").stored[0, 0] == 65504
    for value in (65520.0, 7e4, -7e4):
        assert _vectors.check_vectors([[value]]).stored[0, 0] == value
        with pytest.raises(NonFiniteVector, match="float16"):
            _vectors.check_vectors([[0.0], [value]], dtype="float16")


def test_g24_check_vectors_finds_every_place_of_a_long_row():
    for place in range(200):
        rows = np.ones((2, 200), dtype=np.float32)
        rows[1, place] = np.nan
        with pytest.raises(NonFiniteVector, match=f"row 1, column {place} "):
            _vectors.check_vectors(rows)


def test_b83_zero_row_scores_zero_and_zero_query_recalls_nothing():
    rows = np.array([[0, 0], [-1, 0], [1, 0]], dtype=np.float32)
    assert _vectors.check_vectors(rows).zero.tolist() == [True, False, False]
    scores, found = _cpu_ops.topk([2.0, 0.0], rows, metric="cosine", k=3)
    assert found.tolist() == [2, 0, 1]
    assert scores.tolist() == [1, 0, -1]
    assert _cpu_ops.prepare_query([0.0, -0.0]) is None
    scores, found = _cpu_ops.topk([0.0, -0.0], rows, metric="cosine", k=3)
    assert scores.size == found.size == 0
    assert _cpu_ops.topk([0.0, 0.0], rows, metric="ip", k=3)[1].tolist() == [0, 1, 2]


# ---- Top-k ---------------------------------------------------------------------------------------


@st.composite
def scans(draw):
    """Few distinct values, so that ties are common; every option on and off."""
    n, dim = draw(st.integers(1, 300)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows = rng.integers(-2, 3, (n, dim)).astype(draw(st.sampled_from(["float32", "float16"])))
    cuts = np.sort(rng.integers(0, n + 1, 2 * draw(st.integers(0, 8)))).reshape(-1, 2)
    density = draw(st.sampled_from([0.02, 0.5, 0.98]))
    return {
        "rows": rows,
        "query": rng.integers(-2, 3, dim).astype(np.float32) + np.float32(0.5),
        "metric": draw(st.sampled_from(METRICS)),
        "k": draw(st.integers(1, 40)),
        "extents": draw(st.sampled_from([None, np.c_[cuts[:, 0], cuts[:, 1] - cuts[:, 0]]])),
        "tombstones": draw(st.sampled_from([None, rng.random(n) < 1 - density])),
        "allowed": draw(st.sampled_from([None, rng.random(n) < density])),
        "ids": draw(st.sampled_from([None, rng.permutation(n).astype(np.uint64)])),
        "min_score": draw(st.sampled_from([None, 0, 0.25, -1.0])),
    }


def expected_hits(case):
    n = len(case["rows"])
    passing = set(range(n))
    if case["extents"] is not None:
        passing = {row for start, count in case["extents"] for row in range(start, start + count)}
    if case["tombstones"] is not None:
        passing -= set(np.flatnonzero(case["tombstones"]).tolist())
    if case["allowed"] is not None:
        passing &= set(np.flatnonzero(case["allowed"]).tolist())
    scores = _cpu_ops.score_rows(
        case["query"], case["rows"], range(n), metric=case["metric"], level="reference"
    )
    rows = plain_recall.topk(
        scores.tolist(),
        case["k"],
        passing=sorted(passing),
        ids=None if case["ids"] is None else case["ids"].tolist(),
        min_score=-np.inf if case["min_score"] is None else case["min_score"],
    )
    return scores[rows], rows


@settings(max_examples=300, deadline=None)
@given(scans(), st.integers(1, 400))
def test_topk_any_scope_and_filter_equals_plain_python(case, rows_per_segment):
    """B80, B81, B86, G16, G21, G23, G27: whatever is masked, the best of the rest, exactly."""
    scores, rows = expected_hits(case)
    segments = [
        np.ascontiguousarray(case["rows"][i : i + rows_per_segment])
        for i in range(0, len(case["rows"]), rows_per_segment)
    ]
    for given_rows in (case["rows"], segments):
        got_scores, got_rows = _cpu_ops.topk(**{**case, "rows": given_rows})
        assert got_rows.tolist() == rows
        assert plain_recall.bits(got_scores) == plain_recall.bits(scores)


def big_scan():
    rng = np.random.default_rng(13)
    rows = rng.integers(-3, 4, (20_000, 40)).astype(np.float32)  # 3.2 MB: enough for many threads
    return rows, rng.integers(-3, 4, (11, 40)).astype(np.float32) + np.float32(0.25)


def test_topk_any_number_of_threads_gives_the_same_bits():
    rows, queries = big_scan()
    extents = [(start, 700) for start in range(0, 19_000, 1000)]
    for metric in METRICS:
        runs = [
            _cpu_ops.topk(queries[0], rows, metric=metric, k=500, threads=t, extents=extents)
            for t in (1, 2, 3, 7, 64)
        ]
        for scores, found in runs[1:]:
            assert np.array_equal(found, runs[0][1])
            assert np.array_equal(scores.view(np.uint32), runs[0][0].view(np.uint32))


@pytest.mark.parametrize("level", _cpu_ops.levels())
def test_topk_batch_equals_single_queries(level):
    rows, queries = big_scan()
    rows = rows[:3000]
    queries[4] = 0
    for metric in METRICS:
        options = {"metric": metric, "k": 37, "level": level}
        scores, found, counts = _cpu_ops.topk_batch(queries, rows, **options)
        single = [_cpu_ops.topk(query, rows, **options) for query in queries]
        assert counts.tolist() == [len(hits) for hits, _ in single]
        assert counts[4] == (0 if metric == "cosine" else 37)
        assert np.array_equal(found, np.concatenate([hits for _, hits in single]))
        assert np.array_equal(scores, np.concatenate([hits for hits, _ in single]))


def test_g25_duplicate_rows_give_the_lowest_live_ids_every_time():
    rows = np.tile(np.array([0.3, -0.7, 0.2], dtype=np.float32), (10_000, 1))
    dead = np.zeros(10_000, dtype=bool)
    dead[[0, 3, 4]] = True
    first = _cpu_ops.topk([0.1, 0.9, 0.4], rows, metric="cosine", k=6, tombstones=dead)
    assert first[1].tolist() == [1, 2, 5, 6, 7, 8]
    for _ in range(100):
        again = _cpu_ops.topk([0.1, 0.9, 0.4], rows, metric="cosine", k=6, tombstones=dead)
        assert np.array_equal(again[1], first[1])
        assert np.array_equal(again[0].view(np.uint32), first[0].view(np.uint32))


def test_g27_k_above_the_rows_gives_all_rows():
    rows = np.eye(5, dtype=np.float32)
    scores, found = _cpu_ops.topk([5, 4, 3, 2, 1], rows, metric="ip", k=1024)
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert scores.tolist() == [5, 4, 3, 2, 1]
    empty = np.empty((0, 5), dtype=np.float32)
    assert _cpu_ops.topk([5, 4, 3, 2, 1], empty, metric="ip", k=3)[1].tolist() == []


def test_g23_scores_of_minus_infinity_keep_their_rows():
    rows = np.array([[-3e38], [1], [-2e38]], dtype=np.float32)
    scores, found = _cpu_ops.topk([1e10], rows, metric="ip", k=3)
    assert found.tolist() == [1, 0, 2]
    assert scores.tolist() == [np.float32(1e10), -np.inf, -np.inf]


def test_b80_filter_acts_before_the_cut():
    rows = np.arange(10, 0, -1, dtype=np.float32)[:, None]
    allowed = np.arange(10) >= 4
    assert _cpu_ops.topk([1.0], rows, metric="ip", k=5, allowed=allowed)[1].tolist() == [
        *range(4, 9)
    ]


def test_b81_dead_rows_take_no_slot():
    rows = np.arange(6, 0, -1, dtype=np.float32)[:, None]
    dead = np.arange(6) < 3
    for k, expected in ((3, [3, 4, 5]), (4, [3, 4, 5])):
        got = _cpu_ops.topk([1.0], rows, metric="ip", k=k, tombstones=dead)[1]
        assert got.tolist() == expected


def test_b86_min_score_zero_is_not_none():
    rows = np.array([[1], [0], [-1]], dtype=np.float32)
    for bound, expected in ((None, 3), (0, 2), (0.0, 2), (-0.0, 2), (1, 1), (1.0000000001, 0)):
        got = _cpu_ops.topk([1.0], rows, metric="ip", k=3, min_score=bound)[1]
        assert len(got) == expected, bound


def test_g30_every_row_recalls_itself_first():
    rows = np.random.default_rng(14).standard_normal((500, 48)).astype(np.float32)
    for metric in ("cosine", "l2"):
        for row in range(0, 500, 7):
            assert _cpu_ops.topk(rows[row], rows, metric=metric, k=3)[1][0] == row


def test_g09_eight_threads_on_one_index_get_serial_results():
    rows, _ = big_scan()
    queries = np.random.default_rng(15).standard_normal((200, 40)).astype(np.float32)

    def recall(query):
        return _cpu_ops.topk(query, rows, metric="cosine", k=10, factors=factors)[1].tolist()

    factors = _vectors.row_factors(rows)
    serial = [recall(query) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(recall, queries)) == serial


FORK_SCRIPT = """
import os, sys
import numpy as np
from kalos_ctx import _cpu_ops, _vectors
rows = np.random.default_rng(0).standard_normal((20000, 40)).astype("f4")
run = lambda: _cpu_ops.topk(rows[3], rows, metric="ip", k=9, threads=4)[1].tolist()
before = run()
for _ in range(5):
    child = os.fork()
    if child == 0:
        same = run() == before and run() == before
        helpers = len(os.listdir("/proc/self/task")) - 1
        os._exit(0 if same and helpers == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert run() == before
print("same")
"""


def test_topk_after_fork_works_in_parent_and_child():
    """A child inherits no helper thread, and a wait for one would never end."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "same\n"


# ---- Wrong arguments -----------------------------------------------------------------------------

ROWS = np.ones((4, 2), dtype=np.float32)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"metric": "dot"}, InvalidArgument),
        ({"metric": None}, InvalidArgument),
        ({"k": 0}, InvalidArgument),
        ({"k": -1}, InvalidArgument),
        ({"k": 1025}, InvalidArgument),
        ({"k": 1.0}, InvalidType),
        ({"k": True}, InvalidType),
        ({"threads": -1}, InvalidArgument),
        ({"level": "sse"}, InvalidArgument),
        ({"query": [1.0, 2.0, 3.0]}, DimensionMismatch),
        ({"query": []}, DimensionMismatch),
        ({"query": [[1.0, 2.0]]}, InvalidArgument),
        ({"query": ["a", "b"]}, InvalidType),
        ({"query": [1j, 2]}, InvalidType),
        ({"query": [np.nan, 1.0]}, NonFiniteVector),
        ({"query": [1e39, 1.0]}, NonFiniteVector),
        ({"rows": ROWS.astype(np.float64)}, InvalidType),
        ({"rows": ROWS[:, ::-1]}, InvalidArgument),
        ({"rows": [ROWS[:2], ROWS[:3]]}, InvalidArgument),
        ({"rows": [ROWS, ROWS[:1, :1].copy()]}, DimensionMismatch),
        ({"rows": []}, InvalidArgument),
        ({"extents": [(0, 5)]}, InvalidArgument),
        ({"extents": [(2, 1), (0, 1)]}, InvalidArgument),
        ({"extents": [(0, 2), (1, 2)]}, InvalidArgument),
        ({"extents": [(-1, 2)]}, InvalidArgument),
        ({"allowed": [True]}, InvalidArgument),
        ({"tombstones": [1, 0, 0, 0]}, InvalidArgument),
        ({"ids": [1, 2]}, InvalidArgument),
        ({"min_score": np.nan}, InvalidArgument),
        ({"min_score": 10**400}, InvalidArgument),
        ({"min_score": "1"}, InvalidType),
        ({"factors": [1.0], "metric": "cosine"}, InvalidArgument),
    ],
)
def test_g19_wrong_argument_is_refused(options, error):
    arguments = {"query": [1.0, 2.0], "rows": ROWS, "metric": "ip", "k": 2, **options}
    with pytest.raises(error):
        _cpu_ops.topk(**arguments)


def test_b87_other_dimension_is_refused():
    with pytest.raises(DimensionMismatch, match=r"2 dimensions \(got 3\)"):
        _cpu_ops.score_rows([1.0, 2.0, 3.0], ROWS, [0], metric="ip")
    with pytest.raises(InvalidArgument, match="listed"):
        _cpu_ops.score_rows([1.0, 2.0], ROWS, [4], metric="ip")
    with pytest.raises(DimensionMismatch):
        _vectors.check_vectors(np.empty((2, 0)))
