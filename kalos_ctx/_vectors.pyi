from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

class CheckedRows(NamedTuple):
    stored: NDArray[Any]
    factors: NDArray[np.float32]
    zero: NDArray[np.bool_]

def check_vectors(
    rows: ArrayLike, *, dtype: Literal["float32", "float16"] = "float32"
) -> CheckedRows: ...
