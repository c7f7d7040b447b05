"""Recall for batches of queries: equal to the definition bit for bit, or it says that it is not."""

import ctypes
import math

import numpy as np
import pytest
from helpers import emulated_cuda, plain_recall

BATCH = sorted(emulated_cuda.CUDA.glob("recall_batch_*.cu"))
NORMS = emulated_cuda.CUDA / "row_norms.cu"
BOUNDS = emulated_cuda.ROOT / "tests" / "helpers" / "batch_bounds.cu"
ORDERS = ("forward", "reverse", "shuffled:1", "shuffled:2")
METRICS = {"cosine": 0, "ip": 1, "l2": 2}
EXTENTS, COUNTERS = 16, 8
QUERY_NBYTES, WARP_NBYTES, SHARED_NBYTES = 672, 4 * 2048 + 5 * 144, 227 * 1024
TYPES = {"f32": np.float32, "f16": np.float16}
TICKET, MAX_DYNAMIC_SHARED = 77, 8


class Extent(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint32), ("end", ctypes.c_uint32))


class Scope(ctypes.Structure):
    _fields_ = (
        ("allowed", ctypes.c_uint64),
        ("num_extents", ctypes.c_uint32),
        ("min_score", ctypes.c_float),
        ("extents", Extent * EXTENTS),
    )


def structure(addresses, numbers):
    fields = [(name, ctypes.c_uint64) for name in addresses.split()]
    fields += [(name, ctypes.c_uint32) for name in numbers.split()]
    return type("Args", (ctypes.Structure,), {"_fields_": fields})


BatchArgs = structure(
    "rows lengths dead queries scopes lists counters hits lost done",
    "stride_nbytes dim metric num_queries num_scopes k begin end ticket reserved",
)
NormsArgs = structure("rows norms", "stride_nbytes dim half begin end reserved")
BoundsArgs = structure("rows lengths queries lower upper", "dim metric half num_rows num_queries x")


@pytest.fixture(scope="session")
def launcher():
    kernels = [*BATCH, NORMS, BOUNDS]
    made = emulated_cuda.Launcher(emulated_cuda.cache_folder(), kernels=kernels)
    for name in ("f32_few", "f16_few", "f32_many", "f16_many"):
        function = ctypes.c_void_p()
        name = f"kalos_recall_batch_{name}".encode()
        made.call("cuModuleGetFunction", ctypes.byref(function), made._module, name)
        made.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, SHARED_NBYTES)
    return made


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def address(array):
    return array.ctypes.data


# ---- The definition, in arrays -------------------------------------------------------------------
def fma32(x, y, z):
    """Fused multiply-add of float32: the sum in double is rounded to odd, so that the second
    rounding, to float32, sees on which side of a tie it is."""
    product = x.astype(np.float64) * y.astype(np.float64)
    z = z.astype(np.float64)
    total = product + z
    with np.errstate(invalid="ignore"):
        back = total - product
        rest = (product - (total - back)) + (z - back)
    odd = total.view(np.int64) & 1
    towards = np.where(rest > 0, np.inf, -np.inf)
    away = np.nextafter(total, towards)
    exact = np.where((rest != 0) & (odd == 0), away, total)
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(total), exact, total).astype(np.float32)


def tree(p):
    for half in (16, 8, 4, 2, 1):
        p = p[..., :half] + p[..., half : 2 * half]
    return p[..., 0]


def scores(rows, query, metric, factors=None):
    """Scores of float32 or float16 rows with a query as prepared, as DESIGN.md defines them."""
    x = rows.astype(np.float32)
    p = np.zeros((len(x), 32), np.float32)
    for d in range(0, x.shape[1], 32):
        a, b = x[:, d : d + 32], np.broadcast_to(query[d : d + 32], p.shape)
        if metric == "l2":
            a = b = a - b
        p = fma32(a, b, p)
    total = tree(p)
    if metric == "cosine":
        total = total * factors
    if metric == "l2":
        total = -total
    total = total + np.float32(0)
    return np.where(np.isnan(total), np.float32(-np.inf), total)


def factors_of(rows):
    squares = (rows.astype(np.float64) ** 2).sum(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        factors = (1.0 / np.sqrt(squares)).astype(np.float32)
    return np.where(np.isfinite(factors), factors, np.float32(0))


def prepared(queries, metric):
    queries = np.ascontiguousarray(queries, np.float32)
    if metric != "cosine":
        return queries
    wide = queries.astype(np.float64)
    return (wide / np.sqrt((wide**2).sum(axis=1, keepdims=True))).astype(np.float32)


def best(values, passing, k, min_score=-math.inf):
    rows = np.flatnonzero(passing & (values >= np.float32(min_score)))
    rows = rows[np.lexsort((rows, -values[rows].astype(np.float64)))][:k]
    return [(int(row), int(values[row].view(np.uint32))) for row in rows]


# ---- The kernels ---------------------------------------------------------------------------------
def norms_of(launcher, rows):
    norms = np.full(len(rows), -1, np.float32)
    args = NormsArgs(address(rows), address(norms), rows.strides[0], rows.shape[1])
    args.half, args.end = rows.dtype == np.float16, len(rows)
    assert launcher.launch("kalos_row_norms", 3, 256, args) == 0
    return norms


def lengths_of(launcher, rows, metric):
    return factors_of(rows) if metric == "cosine" else norms_of(launcher, rows)


def bitmap(flags):
    bits = np.packbits(flags, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4 + 4)).view(np.uint32)


def recall(launcher, rows, queries, metric, k, *, kind="few", scopes=None, dead=None, **options):
    """Launch; returns the hits of each query as (row, score's bits), and which are lost."""
    n, (num_rows, dim) = len(queries), rows.shape
    blocks, warps = options.get("blocks", 3), options.get("warps", 2)
    group = {"few": 16, "many": 64}[kind]
    groups = -(-n // group)
    if scopes is None:
        scopes = (Scope * 1)(scope((0, num_rows)))
    extents = [one.extents[i] for one in scopes for i in range(one.num_extents)]
    counters = np.zeros(COUNTERS + 2 * n, np.uint32)
    lists = np.full((n, k, blocks), 0xABABABAB, np.uint64)
    hits = np.full((n, k), 0xABABABAB, np.uint64)
    lost, done = np.full(n, 7, np.uint32), np.zeros(16, np.uint32)
    dead = bitmap(np.zeros(num_rows, bool) if dead is None else dead)
    lengths = lengths_of(launcher, rows, metric)
    arrays = (rows, lengths, dead, queries)
    args = BatchArgs(*map(address, arrays), ctypes.addressof(scopes))
    args.lists, args.counters, args.hits = address(lists), address(counters), address(hits)
    args.lost, args.done = address(lost), address(done)
    args.stride_nbytes, args.dim, args.metric = rows.strides[0], dim, METRICS[metric]
    args.num_queries, args.num_scopes, args.k = n, len(scopes), k
    args.begin = min(one.begin for one in extents)
    args.end = max(one.end for one in extents)
    args.ticket = TICKET
    rounded = -(-min(n, group) // 16) * 16
    shared = rounded * (QUERY_NBYTES + 2 * dim) + warps * WARP_NBYTES
    name = f"kalos_recall_batch_{'f16' if rows.dtype == np.float16 else 'f32'}_{kind}"
    grid, block = (blocks, groups), 32 * warps
    assert launcher.launch(name, grid, block, args, shared_nbytes=shared) == 0
    assert done[0] == TICKET
    assert not counters.any()
    assert set(lost.tolist()) <= {0, 1}
    return [hits_of(keys) for keys in hits], lost.astype(bool)


def hits_of(keys):
    keys = [int(key) for key in keys]
    count = next((i for i, key in enumerate(keys) if key == 0), len(keys))
    assert not any(keys[count:])
    words = [(~key & 0xFFFFFFFF, key >> 32) for key in keys[:count]]
    return [(row, word ^ 0x80000000 if word >> 31 else word ^ 0xFFFFFFFF) for row, word in words]


def scope(*extents, min_score=-math.inf, allowed=None):
    made = Scope(0 if allowed is None else address(allowed), len(extents), min_score)
    for i, (begin, end) in enumerate(extents):
        made.extents[i].begin, made.extents[i].end = begin, end
    return made


def wanted(rows, queries, metric, k, passing, min_score=-math.inf):
    factors = factors_of(rows) if metric == "cosine" else None
    return [best(scores(rows, query, metric, factors), passing, k, min_score) for query in queries]


def check(launcher, rows, queries, metric, k, **options):
    """Every query must be answered exactly and none be lost."""
    queries = prepared(queries, metric)
    hits, lost = recall(launcher, rows, queries, metric, k, **options)
    dead = options.get("dead")
    passing = np.ones(len(rows), bool) if dead is None else ~dead
    assert hits == wanted(rows, queries, metric, k, passing)
    assert not lost.any()


def some_rows(rng, num_rows, dim, kind="f32"):
    return rng.standard_normal((num_rows, dim)).astype(TYPES[kind])


def aligned(rows):
    """The same rows at an address that is a multiple of 16."""
    room = np.zeros(rows.nbytes + 16, np.uint8)
    begin = -address(room) % 16
    made = room[begin : begin + rows.nbytes].view(rows.dtype).reshape(rows.shape)
    made[:] = rows
    return made


# ---- The reference itself ------------------------------------------------------------------------
@pytest.mark.parametrize("metric", METRICS)
def test_scores_in_arrays_are_those_of_the_plain_definition(rng, metric):
    rows, queries = some_rows(rng, 12, 96), rng.standard_normal((2, 96)).astype(np.float32)
    rows[3] = queries[1]
    rows[4] = queries[0] * np.float32(1 + 2**-22)
    factors = factors_of(rows)
    for query, ready in zip(queries, prepared(queries, metric), strict=True):
        got = plain_recall.bits(scores(rows, ready, metric, factors))
        plain = [plain_recall.score(row.tolist(), query.tolist(), metric) for row in rows]
        assert got == plain_recall.bits(plain)


# ---- Hits ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("num_rows", "dim", "batch", "k"),
    [(1, 32, 2, 1), (31, 32, 3, 32), (65, 64, 16, 10), (400, 160, 7, 5), (1000, 96, 2, 32)],
)
def test_hits_are_exact(launcher, rng, kind, metric, num_rows, dim, batch, k):
    rows = aligned(some_rows(rng, num_rows, dim, kind))
    check(launcher, rows, rng.standard_normal((batch, dim)), metric, k)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", TYPES)
def test_hits_do_not_depend_on_the_order_of_threads(launcher, rng, monkeypatch, order, kind):
    monkeypatch.setenv("KALOS_FAKE_ORDER", order)
    rows = aligned(some_rows(rng, 700, 64, kind))
    check(launcher, rows, rng.standard_normal((16, 64)), "cosine", 10, warps=5, blocks=2)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("group", "batch"), [("few", 17), ("few", 64), ("many", 33), ("many", 64)])
def test_hits_of_many_queries_are_exact(launcher, rng, kind, group, batch):
    rows = aligned(some_rows(rng, 300, 32, kind))
    check(launcher, rows, rng.standard_normal((batch, 32)), "ip", 4, kind=group)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("blocks", "warps"), [(1, 1), (1, 16), (9, 1), (40, 2)])
def test_any_grid_gives_the_same_hits(launcher, rng, kind, blocks, warps):
    rows = aligned(some_rows(rng, 1100, 32, kind))
    queries = rng.standard_normal((3, 32))
    check(launcher, rows, queries, "l2", 9, blocks=blocks, warps=warps)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_rows_come_by_row(launcher, rng, metric):
    rows = aligned(np.repeat(some_rows(rng, 20, 64), 12, axis=0)[rng.permutation(240)])
    check(launcher, rows, rng.standard_normal((5, 64)), metric, 30, blocks=8)


def test_dead_rows_are_no_hits(launcher, rng):
    rows = aligned(some_rows(rng, 500, 64))
    dead = rng.random(500) < 0.6
    dead[64:160] = True
    check(launcher, rows, rng.standard_normal((6, 64)), "cosine", 10, dead=dead)
    check(launcher, rows, rng.standard_normal((2, 64)), "cosine", 10, dead=np.ones(500, bool))


@pytest.mark.parametrize("metric", METRICS)
def test_scope_of_all_queries_is_kept(launcher, rng, metric):
    rows, queries = aligned(some_rows(rng, 900, 32)), rng.standard_normal((4, 32))
    queries = prepared(queries, metric)
    extents = [(5, 6), (31, 70), (290, 610), (700, 899)]
    allowed = rng.random(900) < 0.3
    passing = np.zeros(900, bool)
    for begin, end in extents:
        passing[begin:end] = True
    words = bitmap(allowed)
    for bits, which in ((None, passing), (words, passing & allowed)):
        scopes = (Scope * 1)(scope(*extents, allowed=bits))
        hits, lost = recall(launcher, rows, queries, metric, 12, scopes=scopes)
        assert hits == wanted(rows, queries, metric, 12, which)
        assert not lost.any()


def test_each_query_has_its_own_scope(launcher, rng):
    rows, queries = aligned(some_rows(rng, 600, 64)), rng.standard_normal((5, 64))
    queries = queries.astype(np.float32)
    allowed = rng.random(600) < 0.5
    words = bitmap(allowed)
    extents = [[(0, 600)], [(100, 101)], [(0, 33), (500, 600)], [(64, 96)], [(200, 590)]]
    limits = [-math.inf, -math.inf, 2.0, 1e9, -3.0]
    scopes = (Scope * 5)()
    for i, (each, limit) in enumerate(zip(extents, limits, strict=True)):
        scopes[i] = scope(*each, min_score=limit, allowed=words if i == 4 else None)
    hits, lost = recall(launcher, rows, queries, "ip", 8, scopes=scopes)
    for i, query in enumerate(queries):
        passing = np.zeros(600, bool)
        for begin, end in extents[i]:
            passing[begin:end] = True
        if i == 4:
            passing &= allowed
        assert hits[i] == best(scores(rows, query, "ip"), passing, 8, limits[i])
    assert not lost.any()


def test_min_score_is_that_of_the_exact_score(launcher, rng):
    rows, queries = aligned(some_rows(rng, 300, 96)), rng.standard_normal((2, 96))
    queries = prepared(queries, "cosine")
    factors = factors_of(rows)
    fourth = np.sort(scores(rows, queries[0], "cosine", factors))[-4]
    for limit, count in ((fourth, 4), (np.nextafter(fourth, np.float32(2)), 3)):
        scopes = (Scope * 1)(scope((0, 300), min_score=limit))
        hits, lost = recall(launcher, rows, queries, "cosine", 10, scopes=scopes)
        assert len(hits[0]) == count
        assert hits == wanted(rows, queries, "cosine", 10, np.ones(300, bool), limit)
        assert not lost.any()


# ---- Rows that are hard to tell apart ------------------------------------------------------------
def near_ties(rng, count, dim, kind, spread):
    """Rows whose scores differ by less than the bounds tell."""
    one = rng.standard_normal(dim)
    rows = one + spread * rng.standard_normal((count, dim))
    return one, rows.astype(TYPES[kind])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("metric", METRICS)
def test_near_ties_are_told_apart(launcher, rng, kind, metric):
    one, rows = near_ties(rng, 40, 128, kind, 3e-4)
    rows = aligned(np.concatenate([some_rows(rng, 500, 128, kind), rows])[rng.permutation(540)])
    queries = np.stack([one, rng.standard_normal(128)])
    check(launcher, rows, queries, metric, 10, blocks=2)


@pytest.mark.parametrize("metric", METRICS)
def test_too_many_near_ties_are_lost_and_said_so(launcher, rng, metric):
    one, rows = near_ties(rng, 400, 64, "f32", 1e-5)
    rows = aligned(np.concatenate([some_rows(rng, 200, 64), rows])[rng.permutation(600)])
    queries = prepared(np.stack([one, rng.standard_normal(64) - one]), metric)
    hits, lost = recall(launcher, rows, queries, metric, 10, blocks=2)
    right = wanted(rows, queries, metric, 10, np.ones(600, bool))
    assert lost[0]
    assert all(hits[i] == right[i] for i in range(2) if not lost[i])


@pytest.mark.parametrize("blocks", [1, 2])
def test_lost_rows_that_are_no_hits_do_not_count(launcher, rng, blocks):
    """More rows than there is room for, and then better ones that fill the hits: those of the same
    block, or those of another one that comes later."""
    one, rows = near_ties(rng, 320, 64, "f32", 1e-5)
    better = (one * 1.5 + 0.1 * rng.standard_normal((12, 64))).astype(np.float32)
    rows = rows.reshape(10, 32, 64)
    rows[1::2] = some_rows(rng, 160, 64).reshape(5, 32, 64)  # the second block's
    rows[9, :12] = better
    rows = aligned(rows.reshape(320, 64))
    queries = np.stack([one, one]).astype(np.float32)
    hits, lost = recall(launcher, rows, queries, "ip", 10, blocks=blocks, warps=1)
    assert not lost.any()
    assert hits == wanted(rows, queries, "ip", 10, np.ones(len(rows), bool))


@pytest.mark.parametrize("metric", METRICS)
def test_norms_far_apart(launcher, rng, metric):
    rows = some_rows(rng, 400, 64) * np.float32(10) ** rng.integers(-15, 16, (400, 1))
    rows = aligned(rows.astype(np.float32))
    queries = prepared(rng.standard_normal((4, 64)) * 10.0 ** rng.integers(-9, 9, (4, 1)), metric)
    hits, lost = recall(launcher, rows, queries, metric, 5, blocks=6)
    right = wanted(rows, queries, metric, 5, np.ones(400, bool))
    assert all(lost[i] or hits[i] == right[i] for i in range(4))
    assert metric == "l2" or not lost.any()


@pytest.mark.parametrize("metric", METRICS)
def test_rows_beyond_the_bounds_are_scored_or_lost(launcher, rng, metric):
    rows = some_rows(rng, 200, 32)
    rows[::40] *= np.float32(1e30)
    rows[1::40] *= np.float32(1e-30)
    rows[2::40] *= np.float32(1e-42)
    rows[3::40] = 0
    rows = aligned(rows)
    check(launcher, rows, rng.standard_normal((3, 32)), metric, 20)


def test_infinite_scores_come_in_order(launcher, rng):
    rows = some_rows(rng, 90, 32)
    rows[::9] *= np.float32(3e37)
    rows = aligned(rows)
    queries = np.stack([rng.standard_normal(32) * 1e3, rng.standard_normal(32) * 1e30])
    hits, lost = recall(launcher, rows, queries.astype(np.float32), "ip", 6)
    with np.errstate(over="ignore", invalid="ignore"):
        right = wanted(rows, queries.astype(np.float32), "ip", 6, np.ones(90, bool))
    assert all(lost[i] or hits[i] == right[i] for i in range(2))


# ---- Norms and bounds ----------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dim", [32, 160, 4096])
def test_norms_are_above_the_true_ones_and_close(launcher, rng, kind, dim):
    rows = aligned(some_rows(rng, 30, dim, kind) * TYPES[kind](0.01))
    true = np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1))
    norms = norms_of(launcher, rows)
    assert (norms >= true).all()
    assert (norms <= true * (1 + 2**-14)).all()


def hard_rows(rng, count, dim, kind, query):
    """Random rows and those that make the rounding errors of a step or a sum agree in sign."""
    rows = rng.standard_normal((count, dim))
    rows[0::5] = query  # the largest scores for their norm
    rows[1::5] = -query
    rows[2::5] *= 10.0 ** rng.uniform(-4, 2, (len(rows[2::5]), dim))  # one element rules the sum
    halves = np.ldexp(np.ones(dim), rng.integers(-3, 3, dim))
    rows[3::5] = halves * (1 + 2**-11 - 2**-20)  # just below halfway between two float16
    rows[4::5] = np.sign(query) * (1 + 2**-11 + 2**-18)
    scale = np.float64(2) ** rng.integers(-4, 5, (count, 1))
    return aligned((rows * scale).astype(TYPES[kind]))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [32, 128, 1024, 4096])
def test_scores_lie_within_their_bounds(launcher, rng, kind, metric, dim):
    queries = rng.standard_normal((4, dim))
    queries[1] = np.abs(queries[1])
    queries[2] = 1 + 2**-11 + 2**-19
    queries[3] *= 10.0 ** rng.uniform(-5, 1, dim)
    queries = prepared(queries, metric)
    blocks = [hard_rows(rng, 25, dim, kind, query * 3) for query in queries]
    rows = aligned(np.concatenate(blocks))
    lengths = lengths_of(launcher, rows, metric)
    lower, upper = np.full((2, len(rows), len(queries)), np.nan, np.float32)
    args = BoundsArgs(*map(address, (rows, lengths, queries, lower, upper)))
    args.dim, args.metric, args.half = dim, METRICS[metric], kind == "f16"
    args.num_rows, args.num_queries = rows.shape[0], len(queries)
    assert launcher.launch("test_batch_bounds", -(-len(rows) // 16), 32, args) == 0
    factors = factors_of(rows)
    exact = np.stack([scores(rows, query, metric, factors) for query in queries], axis=1)
    assert (lower <= exact).all()
    assert (exact <= upper).all()
    # And they tell something: a few thousandths of the norms' product.
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)[:, None] * np.linalg.norm(
        queries.astype(np.float64), axis=1
    )
    if metric == "cosine":
        norms = norms * factors[:, None]
    if metric != "l2":
        assert ((upper - lower) <= 2 * (1.1e-3 + dim * 3.2e-7) * norms).all()
