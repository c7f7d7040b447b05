import numpy as np
from numpy.typing import NDArray

from kalos_ctx._opening import WritableStore

class StagingStore(WritableStore):
    def stage_ids(self, ids: NDArray[np.int32]) -> tuple[int, int]: ...
