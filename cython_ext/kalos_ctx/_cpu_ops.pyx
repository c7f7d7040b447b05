"""Exact recall on the CPU: scores and top-k.

DESIGN.md ("The score, defined") has the definition; `_score.h` computes it, `_scan.h` finds the
best, `_rowmath.h` prepares rows and queries, `_workers.h` spreads large scans over the cores.
Python callables here take numpy arrays and check them; `_store_scan` uses the functions of
`_cpu_ops.pxd` on mapped rows.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

import numpy as np

from kalos_ctx._vectors cimport floats_of

from kalos_ctx._vectors import row_factors
from kalos_ctx.errors import (
    DimensionMismatch,
    InvalidArgument,
    InvalidType,
    NonFiniteVector,
)


cdef extern from "_scan.h" nogil:
    int kalos_topk(const kalos_scan *scan, kalos_hit *hits, uint32_t *counts)
    void kalos_score_rows(
        const kalos_rows *rows, const uint32_t *listed, uint64_t count, const float *query,
        int metric, int level, float *scores)
    int kalos_level_works(int level)
    int64_t kalos_prepare_query(const float *query, uint64_t dim, int metric, float *prepared)


MAX_HITS = KALOS_MAX_HITS
MAX_QUERIES = KALOS_MAX_QUERIES
LEVELS = ("reference", "native", "avx2", "avx512")
METRICS = {"cosine": KALOS_METRIC_COSINE, "ip": KALOS_METRIC_IP, "l2": KALOS_METRIC_L2}


cdef int c_topk(const kalos_scan *scan, kalos_hit *hits, uint32_t *counts) noexcept nogil:
    return kalos_topk(scan, hits, counts)


cdef void c_score_rows(
    const kalos_rows *rows, const uint32_t *listed, uint64_t count, const float *query,
    int metric, int level, float *scores,
) noexcept nogil:
    kalos_score_rows(rows, listed, count, query, metric, level, scores)


cdef int64_t c_prepare_query(
    const float *query, uint64_t dim, int metric, float *prepared
) noexcept nogil:
    return kalos_prepare_query(query, dim, metric, prepared)


cdef int _metric(object name) except -1:
    if not isinstance(name, str) or name not in METRICS:
        raise InvalidArgument(f"metric must be one of {', '.join(METRICS)}")
    return METRICS[name]


cdef int _level(object name) except -2:
    if name is None:
        return KALOS_LEVEL_AUTO
    if name not in LEVELS or not kalos_level_works(LEVELS.index(name)):
        raise InvalidArgument(f"level must be one of {', '.join(levels())} on this machine")
    return LEVELS.index(name)


cdef uint64_t _count(str argument, object value, uint64_t least, uint64_t most) except? 0:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidType(f"{argument} must be an int (got {type(value).__name__})")
    if not least <= value <= most:
        raise InvalidArgument(f"{argument} must be between {least} and {most} (got {value})")
    return value


cdef class _Rows:
    """Row arrays as the C scan takes them, and the arrays that keep the pointers alive."""

    cdef kalos_rows c
    cdef readonly uint64_t num_rows
    cdef list _kept
    cdef const void **_segments
    cdef const float **_factors

    def __cinit__(self, object rows not None, object factors, int metric):
        self._segments = NULL
        self._factors = NULL
        self._kept = list(rows) if isinstance(rows, (list, tuple)) else [rows]
        if not self._kept:
            raise InvalidArgument("rows must hold at least one array")
        count = len(self._kept)
        self._segments = <const void **> malloc(count * sizeof(void *))
        self._factors = <const float **> malloc(count * sizeof(void *))
        if self._segments == NULL or self._factors == NULL:
            raise MemoryError()
        self._take_rows()
        self.c.segments = <const void *const *> self._segments
        self.c.factors = NULL
        if metric == KALOS_METRIC_COSINE:
            self._take_factors(factors)

    def __dealloc__(self):
        free(self._segments)
        free(self._factors)

    cdef int _take_rows(self) except -1:
        first = self._kept[0]
        self.num_rows = 0
        for i, array in enumerate(self._kept):
            if not isinstance(array, np.ndarray) or array.dtype not in (np.float32, np.float16):
                raise InvalidType("rows must be float32 or float16 arrays")
            if array.ndim != 2 or not array.flags.c_contiguous or array.dtype != first.dtype:
                raise InvalidArgument("rows must be C-contiguous (n, dim) arrays of one dtype")
            if array.shape[1] != first.shape[1]:
                raise DimensionMismatch("rows must have one dimension in all segments")
            last = i == len(self._kept) - 1
            if array.shape[0] != first.shape[0] and not (last and array.shape[0] < first.shape[0]):
                raise InvalidArgument("segments of rows must be equally long but for the last")
            self._segments[i] = <const void *> <size_t> array.ctypes.data
            self.num_rows += array.shape[0]
        if first.shape[1] < 1:
            raise DimensionMismatch("rows must have at least 1 dimension (got 0)")
        if self.num_rows > 0xFFFFFFFF:
            raise InvalidArgument("rows must be fewer than 2**32")
        self.c.rows_per_segment = max(first.shape[0], 1)
        self.c.dim = first.shape[1]
        self.c.half = first.dtype == np.float16
        self.c.stride_nbytes = first.shape[1] * first.itemsize
        self.c.factor_stride_nbytes = sizeof(float)
        return 0

    cdef int _take_factors(self, object factors) except -1:
        if factors is None:
            parts = [row_factors(array) for array in self._kept]
            factors = np.concatenate(parts)
        factors = np.ascontiguousarray(factors, dtype=np.float32)
        if factors.shape != (self.num_rows,):
            raise InvalidArgument(f"factors must have shape ({self.num_rows},)")
        base = <size_t> factors.ctypes.data
        for i in range(len(self._kept)):
            self._factors[i] = <const float *> <size_t> (base + 4 * i * self.c.rows_per_segment)
        self._kept.append(factors)
        self.c.factors = <const float *const *> self._factors
        return 0


def levels():
    """Name the ways of computing scores that this machine has, slowest first.

    Returns
    -------
    list of str
    """
    return [name for i, name in enumerate(LEVELS) if kalos_level_works(i)]


def prepare_query(query not None, *, metric="cosine"):
    """Give a query as scans take it: checked, for cosine divided by its norm.

    Parameters
    ----------
    query : array-like of shape (D,)
        Real numbers, rounded to float32 first.
    metric : {'cosine', 'ip', 'l2'}

    Returns
    -------
    float32 array of shape (ceil(D / 32) * 32,), or None
        Zeros behind the D values. None for a zero query with cosine, which recalls nothing.

    Raises
    ------
    InvalidArgument, InvalidType, NonFiniteVector
    """
    cdef int c_metric = _metric(metric)
    cdef const float[::1] values = floats_of("query", query, 1)
    cdef uint64_t dim = values.shape[0]
    if dim == 0:
        raise DimensionMismatch("query must have at least 1 dimension (got 0)")
    prepared = np.empty(KALOS_PADDED_DIM(dim), dtype=np.float32)
    cdef float[::1] out = prepared
    cdef int64_t status = kalos_prepare_query(&values[0], dim, c_metric, &out[0])
    if status == KALOS_QUERY_ZERO:
        return None
    if status >= 0:
        raise NonFiniteVector(f"query must be finite (index {status} is not)")
    return prepared


def score_rows(query not None, rows not None, listed not None, *, metric, factors=None, level=None):
    """Score listed rows against one query.

    Parameters
    ----------
    query : array-like of shape (D,)
    rows : float32 or float16 array of shape (N, D), or a list of them (segments)
    listed : array-like of int, shape (M,)
        Row numbers, in any order, repeats allowed.
    metric : {'cosine', 'ip', 'l2'}
    factors : float32 array of shape (N,), optional
        From `row_factors`; computed where cosine needs them and they are not given.
    level : str, optional
        One of `levels()`; all give the same bits.

    Returns
    -------
    float32 array of shape (M,)
        Zeros for a zero query with cosine.

    Raises
    ------
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector
    """
    cdef int c_metric = _metric(metric), c_level = _level(level)
    cdef _Rows c_rows = _Rows(rows, factors, c_metric)
    prepared = _query_for(query, c_rows, metric)
    wanted = np.asarray(listed)
    if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
        raise InvalidType("listed must be row numbers of shape (M,)")
    if wanted.size and not (0 <= wanted.min() and wanted.max() < c_rows.num_rows):
        raise InvalidArgument(f"listed must lie in [0, {c_rows.num_rows})")
    cdef const uint32_t[::1] numbers = np.ascontiguousarray(wanted, dtype=np.uint32)
    scores = np.zeros(wanted.size, dtype=np.float32)
    if prepared is None or wanted.size == 0:
        return scores
    cdef const float[::1] q = prepared
    cdef float[::1] out = scores
    with nogil:
        kalos_score_rows(
            &c_rows.c, &numbers[0], <uint64_t> numbers.shape[0], &q[0], c_metric, c_level, &out[0])
    return scores


cdef object _query_for(object query, _Rows rows, object metric):
    prepared = prepare_query(query, metric=metric)
    if np.shape(query)[0] != rows.c.dim:
        raise DimensionMismatch(
            f"query must have {rows.c.dim} dimensions (got {np.shape(query)[0]})")
    return prepared


cdef object _bits(str argument, object flags, uint64_t num_rows):
    """Pack bool flags, one a row, into 64-bit words."""
    flags = np.asarray(flags)
    if flags.dtype != np.bool_ or flags.shape != (num_rows,):
        raise InvalidArgument(f"{argument} must be bool of shape ({num_rows},)")
    packed = np.zeros((num_rows + 63) // 64 * 8, dtype=np.uint8)
    bits = np.packbits(flags, bitorder="little")
    packed[: bits.size] = bits
    return packed.view("<u8").astype(np.uint64, copy=False)


cdef object _extents(object extents, uint64_t num_rows):
    """Extents as uint64 (E, 2), checked to ascend, not to overlap and to lie in the rows."""
    if extents is None:
        return np.array([[0, num_rows]], dtype=np.uint64)
    array = np.asarray(extents)
    if array.size == 0:
        return np.empty((0, 2), dtype=np.uint64)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 2:
        raise InvalidArgument("extents must be (start, count) pairs of int")
    starts, ends = array[:, 0].astype(object), (array[:, 0].astype(object) + array[:, 1])
    if (array < 0).any() or ends.max() > num_rows or (starts[1:] < ends[: len(ends) - 1]).any():
        raise InvalidArgument("extents must ascend, not overlap, and lie in the rows")
    return np.ascontiguousarray(array, dtype=np.uint64)


cdef float c_lower_bound(object value) except? -1:
    if value is None:
        return -float("inf")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise InvalidType(f"min_score must be a number (got {type(value).__name__})")
    try:
        value = float(value)
    except OverflowError as error:
        raise InvalidArgument("min_score must fit a float") from error
    if value != value:
        raise InvalidArgument("min_score must not be NaN")
    with np.errstate(over="ignore", under="ignore"):
        bound = np.float32(value)
    # A bound between two float32 values keeps what lies above it: round up.
    return np.nextafter(bound, np.float32(np.inf)) if float(bound) < value else bound


def topk(query not None, rows not None, *, metric, k, extents=None, tombstones=None, allowed=None,
         ids=None, min_score=None, factors=None, threads=0, level=None):
    """Find the best rows for one query, exactly.

    Parameters
    ----------
    query : array-like of shape (D,)
    rows : float32 or float16 array of shape (N, D), or a list of them (segments)
        C-contiguous; segments are equally long but for the last.
    metric : {'cosine', 'ip', 'l2'}
        A larger score is better; l2 gives the negated squared distance.
    k : int
        1 to 1024.
    extents : array-like of int, shape (E, 2), optional
        (start, count) of the rows in scope, ascending, not overlapping. None: all rows.
    tombstones, allowed : bool array of shape (N,), optional
        Rows that are dead; rows that pass the filter. Both act before the top-k.
    ids : uint64 array of shape (N,), optional
        Equal scores go to the lower ID; without IDs to the lower row.
    min_score : float, optional
        Inclusive.
    factors : float32 array of shape (N,), optional
    threads : int
        0: as many as pay. The result does not depend on it.
    level : str, optional
        One of `levels()`.

    Returns
    -------
    scores : float32 array of shape (H,)
        H = min(k, rows that pass), best first. Empty for a zero query with cosine.
    rows : uint32 array of shape (H,)

    Raises
    ------
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector
    """
    query = np.asarray(query)
    if query.ndim != 1:
        raise InvalidArgument(f"query must have 1 axis (got {query.ndim})")
    scores, found, _ = topk_batch(
        query[None], rows, metric=metric, k=k, extents=extents, tombstones=tombstones,
        allowed=allowed, ids=ids, min_score=min_score, factors=factors, threads=threads,
        level=level)
    return scores, found


def topk_batch(queries not None, rows not None, *, metric, k, extents=None, tombstones=None,
               allowed=None, ids=None, min_score=None, factors=None, threads=0, level=None):
    """Find the best rows for several queries; up to 8 share one pass over the rows.

    Parameters
    ----------
    queries : array-like of shape (B, D)
        The other parameters are those of `topk`.

    Returns
    -------
    scores : float32 array of shape (sum(counts),)
        Query after query, each best first.
    rows : uint32 array of the same shape
    counts : int64 array of shape (B,)
        0 for a zero query with cosine.

    Raises
    ------
    DimensionMismatch, InvalidArgument, InvalidType, NonFiniteVector
    """
    cdef kalos_scan scan
    scan.metric = _metric(metric)
    scan.level = _level(level)
    scan.k = _count("k", k, 1, KALOS_MAX_HITS)
    scan.threads = _count("threads", threads, 0, 1 << 20)
    scan.min_score = c_lower_bound(min_score)
    cdef _Rows c_rows = _Rows(rows, factors, scan.metric)
    scan.rows = c_rows.c
    queries = np.asarray(queries)
    if queries.ndim != 2:
        raise InvalidArgument(f"queries must have 2 axes (got {queries.ndim})")
    cdef uint64_t[:, ::1] spans = _extents(extents, c_rows.num_rows)
    scan.num_extents = spans.shape[0]
    scan.extents = <kalos_row_run *> &spans[0, 0] if spans.shape[0] else NULL
    cdef uint64_t[::1] dead, passing, names
    scan.tombstones = scan.allowed = scan.ids = NULL
    if tombstones is not None:
        dead = _bits("tombstones", tombstones, c_rows.num_rows)
        scan.tombstones = &dead[0] if dead.shape[0] else NULL
    if allowed is not None:
        passing = _bits("allowed", allowed, c_rows.num_rows)
        scan.allowed = &passing[0] if passing.shape[0] else NULL
    if ids is not None:
        names = np.ascontiguousarray(ids, dtype=np.uint64)
        if <uint64_t> names.shape[0] != c_rows.num_rows:
            raise InvalidArgument(f"ids must have shape ({c_rows.num_rows},)")
        scan.ids = &names[0] if names.shape[0] else NULL
    prepared = [_query_for(query, c_rows, metric) for query in queries]
    return _scan_in_groups(&scan, prepared)


cdef object _scan_in_groups(kalos_scan *scan, list prepared):
    """Run the scan for all prepared queries, KALOS_MAX_QUERIES a pass; None recalls nothing."""
    counts = np.zeros(len(prepared), dtype=np.int64)
    live = [i for i, query in enumerate(prepared) if query is not None]
    cdef float[:, ::1] queries
    cdef uint32_t[::1] found = np.zeros(KALOS_MAX_QUERIES, dtype=np.uint32)
    room = np.empty(
        (KALOS_MAX_QUERIES, scan.k), dtype=[("score", "=f4"), ("row", "=u4"), ("id", "=u8")])
    cdef uint8_t[::1] hits = room.reshape(-1).view(np.uint8)
    cdef int status
    cdef Py_ssize_t place
    scores, rows = [], []
    for first in range(0, len(live), KALOS_MAX_QUERIES):
        group = live[first : first + KALOS_MAX_QUERIES]
        queries = np.stack([prepared[i] for i in group])
        scan.queries = &queries[0, 0]
        scan.num_queries = <uint32_t> len(group)
        with nogil:
            status = kalos_topk(scan, <kalos_hit *> &hits[0], &found[0])
        if status != 0:
            raise MemoryError("recall found no memory for its lists")
        for place in range(len(group)):
            best = room[place, : found[place]]
            counts[group[place]] = found[place]
            scores.append(best["score"])
            rows.append(best["row"])
        scores, rows = [np.concatenate(scores)], [np.concatenate(rows)]
    if not scores:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.uint32), counts
    return scores[0], rows[0], counts
