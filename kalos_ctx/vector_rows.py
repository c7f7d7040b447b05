"""Vectors as callers give them, checked and brought into the form in which the store keeps rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from kalos_ctx._vectors import check_vectors
from kalos_ctx.errors import DimensionMismatch

DIM_MAX = 4096
ROW_ALIGN = 16
# Segments hold a multiple of it, so that a word of deletion bits never spans two.
ROWS_AT_ONCE = 64


def row_stride(dim: int, dtype: str) -> int:
    """Return the bytes from one stored row to the next."""
    return -(-dim * np.dtype(dtype).itemsize // ROW_ALIGN) * ROW_ALIGN


class VectorRows:
    """Checked rows, padded with zeros to the stride in which the store keeps them.

    Attributes
    ----------
    dim : int
    nbytes : int
        Bytes of a row without its padding.
    padded : uint8 array of shape (n, stride)
    factors : float32 array of shape (n,)
        What a row's score is multiplied by.
    zero : bool array of shape (n,)
    """

    __slots__ = ("dim", "factors", "nbytes", "padded", "zero")

    def __init__(self, value: Any, ndim: int, dim: int | None, dtype: Any) -> None:
        """Check `value` of `ndim` dimensions against the store's `dim` (None: not fixed yet).

        Raises
        ------
        DimensionMismatch, NonFiniteVector, InvalidType
        """
        try:
            array = np.asarray(value)
        except ValueError:
            raise DimensionMismatch("vectors must all have one length") from None
        if array.ndim != ndim:
            what = "a vector must have 1 dimension" if ndim == 1 else "vectors must be (n, dim)"
            raise DimensionMismatch(f"{what} (got {array.ndim} dimensions)")
        found = array.shape[-1]
        if dim is not None and found != dim:
            raise DimensionMismatch(f"vectors must have {dim} dimensions (got {found})")
        if not 1 <= found <= DIM_MAX:
            raise DimensionMismatch(f"vectors must have 1 to {DIM_MAX} dimensions (got {found})")
        checked = check_vectors(array.reshape(-1, found), dtype=dtype)
        stored = np.ascontiguousarray(checked.stored)
        n, self.dim = stored.shape
        self.nbytes = self.dim * stored.itemsize
        self.padded = np.zeros((n, row_stride(self.dim, dtype)), np.uint8)
        self.padded[:, : self.nbytes] = stored.view(np.uint8).reshape(n, self.nbytes)
        self.factors = checked.factors
        self.zero = checked.zero

    def __len__(self) -> int:
        return len(self.factors)
