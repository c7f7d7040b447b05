"""Several windows as one batch: layouts, masks, errors, slots; and the async calls."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import (
    InvalidArgument,
    InvalidType,
    PoolExhausted,
    SessionNotFound,
    WindowReleased,
)
from kalos_ctx.store import SessionStore


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path) as opened:
        for name, ids in (("three", [5, 2, 2]), ("five", [2, 6, 7, 8, 9]), ("one", [4])):
            opened.append(name, "user", token_ids=ids)
        yield opened


@pytest.fixture
def assembler(store):
    with ContextAssembler(store, slots=8, timeout=0.0) as made:
        yield made


def asks(*names, **options):
    return [{"session": name, "max_tokens": 9, **options} for name in names]


def test_b110_packed_rows_have_positions_of_their_own(assembler):
    with assembler.assemble_batch(asks("three", "five", "one")) as batch:
        assert len(batch) == 3
        assert batch.cu_seqlens.tolist() == [0, 3, 8, 9]
        assert batch.token_ids.tolist() == [5, 2, 2, 2, 6, 7, 8, 9, 4]
        assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
        arrays = (batch.token_ids, batch.cu_seqlens, batch.positions)
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        assert [window.tolist() for window in batch] == [[5, 2, 2], [2, 6, 7, 8, 9], [4]]
        assert np.from_dlpack(batch, device="cpu").tolist() == batch.token_ids.tolist()


def test_b110_b111_padded_rows_are_masked_by_length(assembler):
    """The padding is an ID that the content holds too."""
    rows = asks("three", "five")
    left = assembler.assemble_batch(rows, layout="left", pad_id=2)
    assert left.token_ids.tolist() == [[2, 2, 5, 2, 2], [2, 6, 7, 8, 9]]
    assert left.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert left.position_ids.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    right = assembler.assemble_batch(rows, layout="right", pad_id=0)
    assert right.token_ids.tolist() == [[5, 2, 2, 0, 0], [2, 6, 7, 8, 9]]
    assert right.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert right.position_ids.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    left.release()
    right.release()


@pytest.mark.parametrize("layout", ["packed", "left", "right"])
def test_empty_batches_and_empty_windows(assembler, layout):
    pad = None if layout == "packed" else 0
    with assembler.assemble_batch([], layout=layout, pad_id=pad) as batch:
        assert batch.token_ids.size == len(batch) == 0
    rows = asks("three", max_tokens=0) + asks("one")
    with assembler.assemble_batch(rows, layout=layout, pad_id=pad) as batch:
        assert np.ravel(batch.token_ids.tolist())[-1] == 4
        assert len(batch[0]) == 0


def test_errors_stand_at_their_place_or_end_the_call(assembler):
    rows = [*asks("three", "none"), *asks("five")]
    with assembler.assemble_batch(rows, on_error="return") as batch:
        assert isinstance(batch[1], SessionNotFound)
        assert batch.cu_seqlens.tolist() == [0, 3, 3, 8]
    with pytest.raises(SessionNotFound, match=r"requests\[1\]: there is no such session"):
        assembler.assemble_batch(rows)
    assert assembler.pool.free == 8


def test_release_frees_all_windows_and_arrays_stay(assembler):
    batch = assembler.assemble_batch(asks("three", "five"))
    assert assembler.pool.free == 6
    batch.release()
    batch.release()
    assert assembler.pool.free == 8
    assert batch.token_ids.tolist() == [5, 2, 2, 2, 6, 7, 8, 9]
    for use in (lambda: batch[0], lambda: list(batch)):
        with pytest.raises(WindowReleased):
            use()
    with pytest.raises(PoolExhausted, match="9 requests"):
        assembler.assemble_batch(asks(*["one"] * 9))


def test_wrong_batches_are_refused(assembler):
    good = asks("one")
    for requests, options, error in (
        ([{"session": "one", "max_tokens": 9, "topk": 1}], {}, InvalidArgument),
        ([{"session": "one"}], {}, InvalidArgument),
        ([{"max_tokens": 9}], {}, InvalidArgument),
        (["one"], {}, InvalidType),
        ({"session": "one"}, {}, InvalidType),
        ("one", {}, InvalidType),
        (5, {}, InvalidType),
        (good, {"layout": "middle"}, InvalidArgument),
        (good, {"layout": "left"}, InvalidArgument),
        (good, {"layout": "left", "pad_id": -1}, InvalidArgument),
        (good, {"pad_id": True}, InvalidType),
        (good, {"on_error": "ignore"}, InvalidArgument),
    ):
        with pytest.raises(error):
            assembler.assemble_batch(requests, **options)
    with pytest.raises(InvalidArgument, match=r"requests\[0\] has unknown fields: topk"):
        assembler.assemble_batch([{"session": "one", "max_tokens": 9, "topk": 1}])
    assert assembler.pool.free == 8


def test_async_calls_give_the_same(assembler):
    async def run():
        window = await assembler.aassemble("three", max_tokens=9)
        batch = await assembler.aassemble_batch(asks("five", "one"), layout="packed")
        return window, batch

    window, batch = asyncio.run(run())
    assert window.tolist() == [5, 2, 2]
    assert batch.token_ids.tolist() == [2, 6, 7, 8, 9, 4]


def test_a_cancelled_call_gives_its_slot_back(assembler, monkeypatch):
    """The thread cannot be stopped; what it builds is released when nobody waits for it."""
    began, go_on = threading.Event(), threading.Event()
    build = assembler.assemble

    def slow(*args, **options):
        began.set()
        go_on.wait(10)
        return build(*args, **options)

    async def run():
        task = asyncio.ensure_future(assembler.aassemble("three", max_tokens=9))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    monkeypatch.setattr(assembler, "assemble", slow, raising=False)
    asyncio.run(run())
    assert assembler.pool.free == 8
