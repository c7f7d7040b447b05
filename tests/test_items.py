"""Tables of segments and summaries as bytes."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalos_ctx import _reader, items
from kalos_ctx._kernel_source import kernel_dir
from kalos_ctx.errors import StoreCorrupt
from kalos_ctx.items import ITEM, Item

U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=9).map(lambda ids: np.array(ids, np.int32))
ITEMS = st.builds(
    Item,
    name=TEXT,
    role=st.integers(0, 255),
    ids=IDS,
    text=st.none() | TEXT,
    placement=st.integers(0, 2),
    volatile=st.booleans(),
    start=U32,
    stop=U32,
    at_count=U32,
    created_at=st.floats(allow_nan=False),
    prefix_len=st.integers(0, 2**16 - 1),
    suffix_len=st.integers(0, 2**16 - 1),
    tokens_pos=st.integers(0, 2**63),
    token_crc=U32,
)


def fields(item):
    return [
        value.tolist() if isinstance(value, np.ndarray) else value
        for value in (getattr(item, name) for name in item.__slots__)
    ]


@given(st.lists(ITEMS, max_size=5))
def test_table_comes_back(table):
    raw = items.pack(table)
    assert len(raw) % 8 == 0
    assert [fields(one) for one in items.unpack(raw)] == [fields(one) for one in table]


@given(st.lists(ITEMS, min_size=1, max_size=3), st.data())
def test_cut_table_raises_or_ends_between_items(table, data):
    raw = items.pack(table)
    cut = data.draw(st.integers(0, len(raw) - 1))
    ends = [0]
    for item in table:
        ends.append(ends[-1] + len(item.pack()))
    if cut in ends:
        assert len(list(items.unpack(raw[:cut]))) == ends.index(cut)
    else:
        with pytest.raises(StoreCorrupt):
            list(items.unpack(raw[:cut]))


@given(st.binary(max_size=200))
def test_any_bytes_end_or_raise_corrupt(raw):
    with contextlib.suppress(StoreCorrupt):
        list(items.unpack(raw))


def test_struct_is_the_layouts():
    """The same fields in the same order and of the same sizes as kalos_item."""
    text = (Path(kernel_dir()) / "kalos_layout.h").read_text(encoding="utf-8")
    body = re.search(r"typedef struct kalos_item \{(.*?)\} kalos_item;", text, re.S)[1]
    codes = {"uint64_t": "Q", "double": "d", "uint32_t": "I", "uint16_t": "H", "uint8_t": "B"}
    found = "<" + "".join(
        codes[kind] for kind in re.findall(r"^\s*(uint\d+_t|double) \w+;", body, re.M)
    )
    assert found == ITEM.format
    assert ITEM.size == _reader.ITEM_BYTES


def test_placed_asks_for_a_place_once():
    asked = []

    def stage(ids):
        asked.append(ids.tolist())
        return 640, 99

    item = Item(name="p", role=0, ids=np.array([1, 2], np.int32))
    placed = item.placed(stage)
    assert (placed.tokens_pos, placed.token_crc, placed.name) == (640, 99, "p")
    assert placed.placed(stage) is placed
    assert asked == [[1, 2]]
