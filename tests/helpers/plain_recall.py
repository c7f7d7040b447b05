"""The score and the top-k in plain Python: slow, short, written from the words of the definition.

The fused multiply-add is exact rational arithmetic rounded once, so nothing here shares a line, a
library or an instruction with what it checks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

LANES = 32


def round_to_float32(value: Fraction) -> float:
    """Round to nearest, ties to even; subnormals kept, overflow to infinity. Zero gives +0."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / unit) * unit  # Python rounds halves to even
    if rounded >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def fma32(x: float, y: float, z: float) -> float:
    """Multiply two float32 values and add a third, rounded once."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return x * y + z  # infinities and NaN follow the ordinary rules
    return round_to_float32(Fraction(x) * Fraction(y) + Fraction(z))


def add32(x: float, y: float) -> float:
    return fma32(x, 1.0, y)


def mul32(x: float, y: float) -> float:
    return fma32(x, y, 0.0)


def tree_sum(partials: Sequence[float]) -> float:
    sums = list(partials)
    half = len(sums) // 2
    while half >= 1:
        for j in range(half):
            sums[j] = add32(sums[j], sums[j + half])
        half //= 2
    return sums[0]


def sum_of_squares(row: Sequence[float]) -> float:
    """Add squares in double: eight strided sums, then the tree."""
    sums = [0.0] * 8
    for d, x in enumerate(row):
        sums[d % 8] += x * x
    for half in (4, 2, 1):
        for j in range(half):
            sums[j] += sums[j + half]
    return sums[0]


def row_factor(row: Sequence[float]) -> float:
    squares = sum_of_squares(row)
    if squares == 0:
        return 0.0
    factor = round_to_float32(Fraction(1.0 / math.sqrt(squares)))
    return 0.0 if math.isinf(factor) else factor


def prepare(query: Sequence[float], metric: str) -> list[float] | None:
    if metric != "cosine":
        return list(query)
    norm = math.sqrt(sum_of_squares(query))
    if norm == 0:
        return None
    return [round_to_float32(Fraction(x / norm)) for x in query]


def score(row: Sequence[float], query: Sequence[float], metric: str) -> float:
    """Score one stored row against a query that was not prepared yet."""
    prepared = prepare(query, metric)
    if prepared is None:
        raise ValueError("a zero query has no cosine")
    partials = [0.0] * LANES
    for d, (x, q) in enumerate(zip(row, prepared, strict=True)):
        if metric == "l2":
            x = q = add32(x, -q)
        partials[d % LANES] = fma32(x, q, partials[d % LANES])
    total = tree_sum(partials)
    if metric == "cosine":
        total = mul32(total, row_factor(row))
    if metric == "l2":
        total = -total
    if math.isnan(total):
        return -math.inf
    return total if total != 0 else 0.0


def topk(
    scores: Sequence[float],
    k: int,
    *,
    passing: Sequence[int],
    ids: Sequence[int] | None = None,
    min_score: float = -math.inf,
) -> list[int]:
    """Give the rows of the best scores: larger first, then lower ID, then lower row."""
    rows = [row for row in passing if scores[row] >= min_score]
    return sorted(rows, key=lambda row: (-scores[row], ids[row] if ids else row, row))[:k]


def bits(values: Sequence[float] | NDArray[np.float32]) -> list[int]:
    """Give the bit patterns of float32 values, so that -0 and +0 differ."""
    return [struct.unpack("<I", struct.pack("<f", value))[0] for value in values]
