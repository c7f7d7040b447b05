from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kalos_ctx._batch import Draft
from kalos_ctx._erasing import ErasingStore

class StoreWriter(ErasingStore):
    def append_turns(
        self, tenant: bytes, name: bytes, drafts: list[Draft], now: float
    ) -> list[int]: ...
    def has_key(self, tenant: bytes, name: bytes, key: bytes) -> bool: ...
    def rollback(
        self, tenant: bytes, name: bytes, to: int, expect_last: int | None
    ) -> int | None: ...
    def fork(self, tenant: bytes, name: bytes, new_name: bytes, at: int | None) -> bool: ...
    def put_table(
        self,
        slot_kind: int,
        tenant: bytes,
        name: bytes,
        kind: int,
        compose: Callable[[bytes, int, Callable[[NDArray[np.int32]], tuple[int, int]]], bytes],
    ) -> None: ...
    def set_vector_dim(self, dim: int) -> None: ...
    def forget_vector_dim(self) -> None: ...
    def set_fingerprint(self, fingerprint: bytes, vocab_size: int) -> None: ...
    def add_passages(
        self, tenant: bytes, collection: bytes, drafts: list[Draft], ids: Sequence[int] | None
    ) -> list[int]: ...
