from typing import Any

import numpy as np
from numpy.typing import NDArray

def as_ids(value: Any, vocab_size: int) -> NDArray[np.int32]: ...
