"""The calls that keep passages with their vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import arguments
from kalos_ctx._reader import COLLECTION
from kalos_ctx.arguments import name_bytes
from kalos_ctx.errors import (
    Conflict,
    InvalidArgument,
    InvalidType,
    PassageNotFound,
)
from kalos_ctx.store_base import StoreBase, read_again_when_left

if TYPE_CHECKING:
    from kalos_ctx._turns import Passage

PASSAGES_PER_BATCH = 16384
# IDs are uint64, and the next one must be a number too.
ID_MAX = 2**64 - 2


class PassageCalls(StoreBase):
    """Passages of `SessionStore`."""

    def add_passages(
        self,
        collection: str | bytes,
        vectors: Any,
        *,
        tenant: str | bytes = "",
        texts: Sequence[str | None] | None = None,
        token_ids: Sequence[Any] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        ids: Any = None,
    ) -> NDArray[np.uint64]:
        """Add passages with their vectors and return their IDs.

        Parameters
        ----------
        vectors : float array of shape (n, dim)
        texts, token_ids, metadata : sequences of length n, optional
            IDs are stored as given; text without IDs is encoded where there is a tokenizer.
        ids : int array of shape (n,), optional
            Unique per tenant, above every ID used before; the next ones where not given.

        Returns
        -------
        uint64 array of shape (n,)

        Raises
        ------
        Conflict
            An ID was used, or is not above those used.
        DimensionMismatch, NonFiniteVector, ControlTokenInContent, InvalidTokenId,
        InvalidArgument, InvalidType, StoreReadOnly, StoreFull, StoreIOError

        Notes
        -----
        All or nothing, up to 16,384 passages; of a larger call a crash may leave the first
        multiples of that.
        """
        core = self._writer()
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        collection_b = name_bytes(collection, "collection")
        rows = self._rows(vectors, 2)
        n = len(rows)
        texts_n = _column(texts, "texts", n)
        ids_n = _column(token_ids, "token_ids", n)
        metadata_n = _column(metadata, "metadata", n)
        order, numbers = _passage_ids(ids, n)
        now = self._clock()
        drafts = [
            self._intake.passage(rows, i, (texts_n[i], ids_n[i], metadata_n[i]), now) for i in order
        ]
        given: list[int] = []
        with core.mutex:
            for at in range(0, n, PASSAGES_PER_BATCH):
                part = drafts[at : at + PASSAGES_PER_BATCH]
                chosen = None if numbers is None else numbers[at : at + PASSAGES_PER_BATCH]
                with nullcontext() if at else self._dimension([rows]):
                    given += core.add_passages(tenant_b, collection_b, part, chosen)
        out = np.empty(n, np.uint64)
        out[order] = np.array(given, np.uint64)
        return out

    @read_again_when_left
    def passages(
        self, collection: str | bytes, ids: Any, *, tenant: str | bytes = ""
    ) -> list[Passage]:
        """Return passages by ID, in the order asked for.

        Parameters
        ----------
        ids : sequence of int, or int array of shape (n,)

        Raises
        ------
        PassageNotFound
            One of them never was, or was deleted, or there is no such collection.
        StoreCorrupt, StoreIOError, InvalidArgument, InvalidType
        """
        wanted = _numbers(ids, "ids", 2**64 - 1)
        slot, places, dead = self._passage_places(collection, wanted, tenant)
        if any(dead):
            raise PassageNotFound(f"passage {wanted[dead.index(True)]} was deleted")
        return [self._core.passage_at(slot, place) for place in places]

    def delete_passages(
        self, collection: str | bytes, ids: Any, *, tenant: str | bytes = ""
    ) -> int:
        """Delete passages, their bytes included; return how many went.

        One that was deleted before is passed over, and not counted.

        Parameters
        ----------
        ids : sequence of int, or int array of shape (n,)

        Raises
        ------
        PassageNotFound
            One of them never was, or there is no such collection; nothing was changed.
        StoreReadOnly, StoreFull, StoreIOError, StoreCorrupt, InvalidArgument, InvalidType
        """
        core = self._writer()
        wanted = _numbers(ids, "ids", 2**64 - 1)
        with core.mutex:
            _, places, _ = self._passage_places(collection, wanted, tenant)
            return core.drop_passages(
                name_bytes(tenant, "tenant", empty=True),
                name_bytes(collection, "collection"),
                sorted(set(places)),
            )

    def _passage_places(
        self, collection: Any, wanted: Sequence[int], tenant: Any
    ) -> tuple[int, list[int], list[bool]]:
        """Slot, places in the collection, and which are dead."""
        tenant_b = name_bytes(tenant, "tenant", empty=True)
        collection_b = name_bytes(collection, "collection")
        state = self._core.slot_state(COLLECTION, tenant_b, collection_b)
        if state is None:
            raise PassageNotFound("there is no such collection in this tenant")
        places, dead = self._core.passage_places(state["slot_off"], np.array(wanted, np.uint64))
        for place, one in zip(places, wanted, strict=True):
            if place < 0:
                raise PassageNotFound(f"there is no passage {one} in this collection")
        return state["slot_off"], places, dead


def _column(value: Any, name: str, n: int) -> Sequence[Any]:
    if value is None:
        return [None] * n
    if (
        isinstance(value, str | bytes | Mapping)
        or not hasattr(value, "__len__")
        or not hasattr(value, "__getitem__")
    ):
        raise InvalidType(
            f"{name} must be a sequence with one item a passage (got {type(value).__name__})"
        )
    if len(value) != n:
        raise InvalidArgument(f"{name} must have one item a passage, {n} (got {len(value)})")
    return value  # type: ignore[no-any-return]


def _numbers(ids: Any, what: str, most: int) -> list[int]:
    """Passage IDs from any iterable of ints."""
    try:
        given = list(ids)
        if isinstance(ids, str | bytes | bytearray):
            raise TypeError
    except TypeError:
        raise InvalidType(f"{what} must be a sequence of ints (got {type(ids).__name__})") from None
    return [arguments.whole(one, what, 0, most) for one in given]


def _passage_ids(ids: Any, n: int) -> tuple[list[int], list[int] | None]:
    """The order in which passages are stored (IDs ascend), and their IDs in it."""
    if ids is None:
        return list(range(n)), None
    numbers = _numbers(ids, "ids", ID_MAX)
    if len(numbers) != n:
        raise InvalidArgument(f"ids must have one item a passage, {n} (got {len(numbers)})")
    if len(set(numbers)) != n:
        raise Conflict("ids must not repeat")
    order = sorted(range(n), key=numbers.__getitem__)
    return order, [numbers[i] for i in order]
