"""Recalled passages in windows: scope, budget, duplicates, placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import (
    BudgetExceeded,
    DimensionMismatch,
    NonFiniteVector,
    UnknownField,
)
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

AXES = np.eye(4, dtype=np.float32)
X = [1.0, 0.0, 0.0, 0.0]
RECALL = {"query": X, "top_k": 8, "collections": ["notes"]}


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path, vector_dim=4, metric="ip") as opened:
        yield opened


@pytest.fixture
def assembler(store):
    with ContextAssembler(store) as made:
        yield made


def pin(store, *rows, tenant=""):
    """Add passages that score 1, 1/2, 1/3 ... in this order."""
    vectors = np.array([[1 / (n + 1), 0, 0, 0] for n in range(len(rows))], np.float32)
    return store.add_passages("notes", vectors, token_ids=list(rows), tenant=tenant)


def whys(report):
    return {fate.id: fate.why for fate in report.dropped if fate.kind == "passage"}


def test_b04_l08_passages_that_do_not_fit_their_share_go(store, assembler):
    """Pinned text and recalled text together never exceed the window."""
    store.set_segment("s", "system", token_ids=[1] * 6)
    pin(store, [7] * 8, [8] * 2)
    with assembler.assemble("s", max_tokens=10, **RECALL) as window:
        assert window.tolist() == [1] * 6 + [8] * 2
        assert whys(window.report) == {0: "recall_budget"}
        assert window.report.by_segment == {"system": 6, "recall": 2}
    with pytest.raises(BudgetExceeded) as refused:
        assembler.assemble("s", max_tokens=5, **RECALL)
    assert (refused.value.by_segment, refused.value.over) == ({"system": 6}, 1)


def test_b77_b92_a_huge_passage_is_held_to_its_share(store, assembler):
    store.append("s", "user", token_ids=[1] * 10)
    pin(store, [7] * 10_000, [8] * 20, [9] * 6)
    with assembler.assemble("s", max_tokens=100, **RECALL) as window:
        assert window.tolist() == [8] * 20 + [1] * 10
        assert whys(window.report) == {0: "recall_budget", 2: "recall_budget"}
        assert [fate.id for fate in window.report.kept if fate.kind == "passage"] == [1]
    plan = assembler.plan("s", max_tokens=100, **RECALL)
    dropped = [(item.id, item.tokens, item.why) for item in plan.dropped]
    assert dropped == [(0, 10_000, "recall_budget"), (2, 6, "recall_budget")]
    assert plan.budget.recall == 25


@given(st.data())
@settings(max_examples=60)
def test_b92_no_window_is_longer_than_its_budget(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("b92") / "s"
    lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)
    with SessionStore.open(path, vector_dim=4, metric="ip") as store:
        for place, length in enumerate(data.draw(lengths)):
            role = ("user", "assistant")[place % 2]
            store.append("s", role, token_ids=[place] * length)
        pin(store, *([50 + n] * length for n, length in enumerate(data.draw(lengths))))
        policy = Policy(
            stable_prefix=data.draw(st.booleans()),
            recall_tokens=data.draw(st.one_of(st.none(), st.integers(0, 60))),
            on_overflow="drop",
        )
        budget, reserve = data.draw(st.integers(0, 120)), data.draw(st.integers(0, 20))
        options = {"max_tokens": budget + reserve, "reserve": reserve, "policy": policy}
        with ContextAssembler(store).assemble("s", **options, **RECALL) as window:
            assert len(window) <= budget
            share = budget // 4 if policy.recall_tokens is None else policy.recall_tokens
            assert window.report.by_segment.get("recall", 0) <= share


def test_b89_a_passage_that_stands_in_the_history_is_not_inserted_again(store, assembler):
    store.append("s", "user", token_ids=[1, 2, 3])
    store.append("s", "assistant", token_ids=[4, 5])
    copies = [[9, 9, 1]] * 5
    pin(store, [1, 2, 3], *copies, [9, 9, 2], [3, 4], [2, 3, 4, 5])
    with assembler.assemble("s", max_tokens=100, **{**RECALL, "top_k": 20}) as window:
        assert window.tolist() == [9, 9, 1, 9, 9, 2, 1, 2, 3, 4, 5]
        assert whys(window.report) == dict.fromkeys([0, 2, 3, 4, 5, 7, 8], "duplicate")


def test_a_passage_of_a_turn_that_was_cut_stands(store, assembler):
    store.append("s", "user", token_ids=[1, 2, 3])
    store.append("s", "user", token_ids=[4] * 6)
    pin(store, [1, 2, 3])
    for stable in (False, True):
        policy = Policy(stable_prefix=stable, recall_tokens=3, low_water=1.0)
        with assembler.assemble("s", max_tokens=9, policy=policy, **RECALL) as window:
            wanted = ([1, 2, 3] if stable else []) + [4] * 6
            assert window.tolist()[-len(wanted) :] == wanted


def test_sliding_gives_the_history_what_the_passages_left(store, assembler):
    for number in range(10):
        store.append("s", "user", token_ids=[number])
    pin(store, [77, 77])
    for stable, kept in ((False, 8), (True, 5)):
        policy = Policy(stable_prefix=stable, recall_tokens=5, low_water=1.0)
        with assembler.assemble("s", max_tokens=10, policy=policy, **RECALL) as window:
            assert len(window) == kept + 2


def test_b25_a_recalled_result_is_context_and_never_a_bare_turn(store, assembler):
    """Its content stands; with and without a template nothing of its framing does."""
    store.append("s", "assistant", token_ids=[2], group="c")
    store.append("s", "tool", token_ids=[3, 4], group="c", vector=X)
    for number in range(8):
        store.append("s", "user", token_ids=[10 + number])
    policy = Policy(stable_prefix=False)
    options = {"query": X, "top_k": 3, "session_recall": True, "policy": policy}
    with assembler.assemble("s", max_tokens=8, **options) as window:
        assert window.tolist() == [*range(12, 17), 3, 4, 17]
        tile = window.report.segments[5]
        assert (tile.kind, tile.name, tile.id, tile.seq) == ("passage", "session", 1, None)
    with assembler.assemble("s", max_tokens=40, **options) as window:
        assert window.tolist() == [2, 3, 4, *range(10, 18)]
        assert whys(window.report) == {1: "duplicate"}


def test_b90_what_was_recalled_is_never_stored(store, assembler):
    pin(store, [70, 70])
    for number in range(10):
        store.append("s", "user", token_ids=[number], vector=X)
        with assembler.assemble("s", max_tokens=200, session_recall=True, **RECALL) as window:
            assert window.tolist().count(70) == 2
    assert store.count("s") == 10
    assert [turn.num_tokens for turn in store.turns("s")] == [1] * 10


def test_placements_and_order_of_score(store, assembler):
    store.set_segment("s", "sys", token_ids=[1])
    store.append("s", "user", token_ids=[2])
    store.append("s", "assistant", token_ids=[3])
    pin(store, [7], [8])
    windows = {
        placement: assembler.assemble("s", max_tokens=40, placement=placement, **RECALL).tolist()
        for placement in ("before_last_user", "after_system", "end")
    }
    assert windows == {
        "before_last_user": [1, 7, 8, 2, 3],
        "after_system": [1, 7, 8, 2, 3],
        "end": [1, 2, 3, 7, 8],
    }
    store.append("t", "assistant", token_ids=[3])
    with assembler.assemble("t", max_tokens=40, **RECALL) as window:
        assert window.tolist() == [3, 7, 8]


def test_passages_without_ids_are_told(store, assembler):
    store.add_passages("notes", AXES[:1])
    store.append("s", "user", token_ids=[1])
    with assembler.assemble("s", max_tokens=40, **RECALL) as window:
        assert window.tolist() == [1]
        assert whys(window.report) == {0: "empty"}


def test_hits_scores_filters_and_refusals(store, assembler):
    store.append("s", "user", token_ids=[1])
    store.add_passages(
        "notes", AXES[[0, 0]], token_ids=[[7], [8]], metadata=[{"lang": "de"}, {"lang": "en"}]
    )
    told = {"max_tokens": 40, **RECALL}
    with assembler.assemble("s", filters={"lang": "en"}, **told) as window:
        assert window.tolist() == [8, 1]
        assert window.report.hits.ids.tolist() == [1]
        assert window.report.hits.scores.tolist() == [1.0]
    for score, hits in ((1.0, 2), (1.5, 0)):
        with assembler.assemble("s", min_score=score, **told) as window:
            assert len(window.report.hits) == hits
    with assembler.assemble("s", max_tokens=40) as window:
        assert len(window.report.hits) == 0
    for options, error in (
        ({"query": [1.0]}, DimensionMismatch),
        ({"query": [np.nan, 0, 0, 0]}, NonFiniteVector),
        ({"filters": {"none": 1}}, UnknownField),
    ):
        for call in (assembler.assemble, assembler.plan):
            with pytest.raises(error):
                call("s", **{**told, **options})
    hits = assembler.recall([X, X], top_k=1, collections="notes")
    assert (hits.ids.tolist(), hits.counts.tolist()) == ([0, 0], [1, 1])


def test_recall_counts_against_h_only_where_the_call_recalls(store, assembler):
    for _ in range(8):
        store.append("s", "user", token_ids=[1])
    for options, kept in (
        ({}, 8), ({"query": X}, 8), ({"top_k": 3}, 8), ({"query": X, "top_k": 0}, 8),
        ({"query": X, "top_k": 1}, 6), ({"query": X, "top_k": 1, "as_of": 6}, 6),
    ):  # fmt: skip
        policy = Policy(low_water=1.0)
        with assembler.assemble("s", max_tokens=8, policy=policy, **options) as window:
            assert len(window) == min(kept, 8)


@given(st.data())
@settings(max_examples=40)
def test_b69_a_tenants_window_never_holds_anothers_ids(tmp_path_factory, data):
    """The same names, vectors and queries in two tenants; each has IDs of its own."""
    path = tmp_path_factory.mktemp("b69") / "s"
    with SessionStore.open(path, vector_dim=4) as store:
        assembler = ContextAssembler(store)
        for number, tenant in enumerate(("a", "b")):
            base = 1000 * number
            for turn in range(data.draw(st.integers(1, 5))):
                store.append("s", "user", token_ids=[base + turn], tenant=tenant, vector=X)
            count = data.draw(st.integers(1, 5))
            store.add_passages(
                "notes", np.tile(AXES[0], (count, 1)), tenant=tenant,
                token_ids=[[base + 100 + n] for n in range(count)],
                metadata=[{"m": n % 2} for n in range(count)],
            )  # fmt: skip
        options = {
            "max_tokens": data.draw(st.sampled_from((8, 60))),
            "session_recall": data.draw(st.booleans()),
            "filters": data.draw(st.sampled_from((None, {"m": 0}, {"m": [0, 1]}))),
            **RECALL,
        }
        if options["session_recall"]:
            options["filters"] = None
        rows = [{"session": "s", "tenant": tenant, **options} for tenant in ("a", "b")]
        with assembler.assemble_batch(rows) as batch:
            for number, window in enumerate(batch):
                low = 1000 * number
                assert all(low <= token < low + 1000 for token in window.tolist())
