"""What stands in a window: budgets, groups, roles, arguments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.chat_data import byte_tokenizer

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import (
    BudgetExceeded,
    Conflict,
    DeviceUnavailable,
    InvalidArgument,
    InvalidTokenId,
    InvalidType,
    PoolExhausted,
    SessionNotFound,
    StoreClosed,
    StoreCorrupt,
    WindowReleased,
)
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

SLIDING = Policy(stable_prefix=False)


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path, vocab_size=100_000) as opened:
        yield opened


@pytest.fixture
def assembler(store):
    with ContextAssembler(store, timeout=0.0) as made:
        yield made


def fill(store, *turns, session="s"):
    """Append turns given as (role, IDs) or (role, IDs, group)."""
    for role, ids, *group in turns:
        store.append(session, role, token_ids=ids, group=group[0] if group else None)


def pairs(store, count, length=1):
    for number in range(count):
        fill(store, ("user", [10 + number] * length), ("assistant", [200 + number] * length))


def ids_of(assembler, max_tokens, policy=SLIDING, **options):
    with assembler.assemble("s", max_tokens=max_tokens, policy=policy, **options) as window:
        return window.tolist()


def whys(report):
    return {fate.seq: fate.why for fate in report.dropped}


# ---- A. Truncation and budgets -------------------------------------------------------------------


def test_b01_b21_a_result_goes_because_its_call_goes(store, assembler):
    """Also where neither turn names a group: the result binds to the nearest earlier call."""
    for session, group in (("named", "g"), ("bare", None)):
        turns = [("user", [5]), ("assistant", [6] * 3, group), ("tool", [7], group)]
        fill(store, *turns, ("user", [8]), ("assistant", [9]), session=session)
        with assembler.assemble(session, max_tokens=4, policy=SLIDING) as window:
            assert window.tolist() == [8, 9]
            assert whys(window.report) == {0: "budget", 1: "budget", 2: "group"}
        plan = assembler.plan(session, max_tokens=4, policy=SLIDING)
        assert whys(plan) == {0: "budget", 1: "budget", 2: "group"}


def test_b02_a_session_without_turns_gives_its_segments_alone(store, assembler):
    store.append("s", "user", token_ids=[1])
    store.rollback("s", 0)
    assert ids_of(assembler, 10) == []
    store.set_segment("s", "sys", token_ids=[1, 2])
    assert ids_of(assembler, 10) == [1, 2]
    store.set_segment("only segments", "sys", token_ids=[3])
    with assembler.assemble("only segments", max_tokens=10) as window:
        assert window.tolist() == [3]
        assert window.report.kept == window.report.dropped == ()
    with pytest.raises(SessionNotFound):
        assembler.assemble("unknown", max_tokens=10)


def test_b05_pinned_segments_come_first_in_every_window(store, assembler):
    store.set_segment("s", "sys", token_ids=[1, 2])
    pairs(store, 50)
    for stop in range(1, 101, 9):
        ids = ids_of(assembler, 20, Policy(start_on="user"), as_of=stop)
        assert ids[:2] == [1, 2]
        assert len(ids) <= 20


def test_b06_l01_a_head_that_fills_the_window_leaves_no_history(store, assembler):
    store.set_segment("s", "sys", token_ids=[1, 2, 3])
    fill(store, ("user", [7, 7, 7]))
    with assembler.assemble("s", max_tokens=3) as window:
        assert window.tolist() == [1, 2, 3]
        assert window.report.kept == ()
        assert whys(window.report) == {0: "budget"}
    with pytest.raises(BudgetExceeded) as refused:
        ids_of(assembler, 4)
    assert refused.value.by_segment == {"sys": 3, "history": 3}
    assert (refused.value.budget, refused.value.over) == (4, 2)
    assert ids_of(assembler, 4, Policy(on_overflow="drop")) == [1, 2, 3]
    for call in (assembler.assemble, assembler.plan):
        with pytest.raises(BudgetExceeded) as refused:
            call("s", max_tokens=2)
        assert (refused.value.by_segment, refused.value.over) == ({"sys": 3}, 1)


def test_b08_l04_old_turns_are_not_read(store, assembler):
    """Their lengths are stored: a window of the newest turns is right though the rest is lost."""
    ids = np.arange(8, dtype=np.int32)
    for _ in range(20):
        store.extend("s", [{"role": "user", "token_ids": ids}] * 500)
    tokens = Path(store.path) / "gen-000000" / "tok-000000"
    with open(tokens, "r+b") as file:
        file.write(b"\xff" * (9900 * 64))
    assert ids_of(assembler, 256, SLIDING) == list(range(8)) * 32
    with assembler.assemble("s", max_tokens=256) as window:
        assert len(window.report.kept) + len(window.report.dropped) == 10_000
    with pytest.raises(StoreCorrupt):
        ids_of(assembler, None)


def test_b09_l05_what_is_kept_is_a_contiguous_suffix(store, assembler):
    pairs(store, 60, 3)
    for budget in range(3, 120, 7):
        with assembler.assemble("s", max_tokens=budget, policy=SLIDING) as window:
            kept = [fate.seq for fate in window.report.kept]
            assert kept == list(range(120 - len(kept), 120))


def test_b10_a_partial_cut_keeps_the_tail(store, assembler):
    fill(store, ("user", list(range(1, 10))))
    policy = Policy(stable_prefix=False, allow_partial=True)
    with assembler.assemble("s", max_tokens=4, policy=policy) as window:
        assert window.tolist() == [6, 7, 8, 9]
        assert [fate.cut_tokens for fate in window.report.kept] == [5]
        assert window.report.trimmed
    cut = assembler.plan("s", max_tokens=4, policy=policy).items[0]
    assert (cut.action, cut.tokens, cut.cut_tokens) == ("cut", 4, 5)
    assert ids_of(assembler, 4, Policy(on_overflow="drop")) == []


def test_b13_a_budget_crossed_by_one_token_trims_to_the_low_mark(store, assembler):
    pairs(store, 5, 2)
    assert len(ids_of(assembler, 20, Policy())) == 20
    with assembler.assemble("s", max_tokens=19, policy=Policy(low_water=0.5)) as window:
        assert len(window) == 8
        report = window.report
        assert (report.trimmed, report.low_water) == (True, 9)
        assert [fate.seq for fate in report.kept] == [6, 7, 8, 9]
    with assembler.assemble("s", max_tokens=19, policy=SLIDING) as window:
        assert (len(window), window.report.low_water) == (18, None)


def test_b14_b15_l08_reserve_and_segments_count(store, assembler):
    store.set_segment("s", "tools", token_ids=[3] * 7)
    store.set_segment("s", "sys", token_ids=[4] * 3)
    pairs(store, 20, 4)
    with assembler.assemble("s", max_tokens=24, reserve=8, policy=SLIDING) as window:
        assert len(window) == 14
        assert window.report.by_segment == {"tools": 7, "sys": 3, "history": 4}
    for budget in range(22, 60):
        with assembler.assemble("s", max_tokens=budget, reserve=8) as window:
            assert len(window) <= budget - 8
            assert sum(window.report.by_segment.values()) == len(window)


def test_b17_a_huge_result_yields_to_the_budget(store, assembler):
    fill(store, ("user", [1]), ("assistant", [2], 1), ("tool", [3] * 1000, 1))
    with pytest.raises(BudgetExceeded):
        ids_of(assembler, 100)
    assert ids_of(assembler, 100, Policy(on_overflow="drop")) == []
    cut = ids_of(assembler, 100, Policy(stable_prefix=False, allow_partial=True))
    assert cut == [2] + [3] * 99


def test_b19_zero_none_and_negative_are_three_things(store, assembler):
    pairs(store, 2)
    assert ids_of(assembler, 0) == []
    assert len(ids_of(assembler, None)) == 4
    assert len(ids_of(assembler, None, reserve=10**6)) == 4
    for bad in (-1, True, 1.5, "4"):
        with pytest.raises(InvalidArgument):
            ids_of(assembler, bad)
    for options in ({"reserve": 5}, {"reserve": None}, {"reserve": -1}, {"as_of": -1}):
        with pytest.raises(InvalidArgument):
            ids_of(assembler, 4, **options)
    assert ids_of(assembler, 4, as_of=0) == []
    assert len(ids_of(assembler, np.int64(4), as_of=np.int32(99))) == 4


# ---- B. Tool calls, C. Roles ---------------------------------------------------------------------


def test_b20_l03_results_never_stand_without_their_call(store, assembler):
    fill(store, ("user", [1]), ("assistant", [2], "c"), ("tool", [3], "c"), ("tool", [4], "c"))
    fill(store, ("assistant", [5]))
    windows = {budget: ids_of(assembler, budget) for budget in range(1, 6)}
    assert windows == {1: [5], 2: [5], 3: [5], 4: [2, 3, 4, 5], 5: [1, 2, 3, 4, 5]}
    assert store.count("s") == 5


def test_b23_a_result_whose_call_is_outside_is_left_out_and_told(store, assembler):
    fill(store, ("tool", [1], "x"), ("assistant", [2], "y"), ("tool", [3], "y"), ("user", [4]))
    store.summarize("s", 0, 2, token_ids=[9])
    with assembler.assemble("s", max_tokens=None) as window:
        assert window.tolist() == [9, 4]
        assert whys(window.report) == {0: "summarized", 1: "summarized", 2: "orphan"}


def test_b27_a_window_that_needs_no_cut_is_the_plain_concatenation(store, assembler):
    rows = [[number, number + 1] * (number % 3 + 1) for number in range(40)]
    fill(store, *(("user" if n % 2 else "assistant", row) for n, row in enumerate(rows)))
    whole = [token for row in rows for token in row]
    for policy in (Policy(), SLIDING, Policy(alternation="merge"), Policy(allow_partial=True)):
        assert ids_of(assembler, len(whole), policy) == whole


def test_b30_ids_as_given_come_back_as_given(store, assembler):
    fill(store, ("assistant", [10, 11]))
    assert ids_of(assembler, 10) == [10, 11]


def test_b39_alternation_off_merge_strict(store, assembler):
    fill(store, ("user", [1]), ("user", [2]), ("assistant", [3]))
    assert ids_of(assembler, 9, Policy()) == [1, 2, 3]
    assert ids_of(assembler, 9, Policy(alternation="merge")) == [1, 2, 3]
    for call in (assembler.assemble, assembler.plan):
        with pytest.raises(Conflict, match="0 and 1"):
            call("s", max_tokens=9, policy=Policy(alternation="strict"))
    fill(store, ("assistant", [4], "g"), ("tool", [5], "g"), ("tool", [6], "g"), session="t")
    with assembler.assemble("t", max_tokens=9, policy=Policy(alternation="strict")) as window:
        assert window.tolist() == [4, 5, 6]


def test_summaries_stand_for_their_turns_and_as_of_looks_behind_them(store, assembler):
    pairs(store, 4)
    store.summarize("s", 0, 4, token_ids=[9, 9], role="system")
    fill(store, ("user", [7]))
    with assembler.assemble("s", max_tokens=None) as window:
        assert window.tolist() == [9, 9, 12, 202, 13, 203, 7]
        tile = window.report.segments[0]
        assert (tile.kind, tile.seq, tile.stop) == ("summary", 0, 2)
        assert not window.report.trimmed
    assert ids_of(assembler, None, as_of=7) == [10, 200, 11, 201, 12, 202, 13]
    assert ids_of(assembler, None, as_of=8)[:2] == [9, 9]
    plan = assembler.plan("s", max_tokens=None)
    assert plan.kept[0].kind == "summary"


def test_segments_stand_at_their_places(store, assembler):
    pairs(store, 2)
    for name, ids, options in (
        ("clock", [51], {"volatile": True}),
        ("sys", [52], {}),
        ("mid", [53], {"placement": "before_last_user"}),
        ("end", [54], {"placement": "end"}),
    ):
        store.set_segment("s", name, token_ids=ids, **options)
    store.set_segment(None, "tenant", token_ids=[55])
    assert ids_of(assembler, None) == [55, 52, 51, 10, 200, 53, 11, 201, 54]
    assert ids_of(assembler, None, Policy(include_system=False)) == [10, 200, 53, 11, 201, 54]
    store.set_segment(None, "tenant")
    store.set_segment("s", "clock")
    assert ids_of(assembler, None) == [52, 10, 200, 53, 11, 201, 54]


# ---- Windows, slots, arguments -------------------------------------------------------------------


def test_b114_ids_of_a_window_lie_inside_the_vocabulary(store, assembler):
    for bad in (-1, 100_000, 100_001, 2**31):
        with pytest.raises(InvalidTokenId):
            store.append("s", "user", token_ids=[1, bad])
    fill(store, ("user", [0, 99_999]))
    assert ids_of(assembler, 10) == [0, 99_999]


def test_b115_b117_windows_of_any_length_export(store, assembler):
    fill(store, ("user", [1, 2, 3]))
    for budget, wanted in ((0, []), (3, [1, 2, 3])):
        with assembler.assemble("s", max_tokens=budget) as window:
            assert window.device == assembler.device
            assert np.from_dlpack(window, device="cpu").tolist() == window.tolist() == wanted
            assert window.token_ids.dtype == np.int32
    with pytest.raises(WindowReleased):
        len(window)
    assert window.report.by_segment == {"history": 3}
    assert "3 tokens" in repr(window.report)


def test_out_is_filled_too(store, assembler):
    fill(store, ("user", [1, 2, 3]))
    out = np.zeros(5, np.int32)
    with assembler.assemble("s", max_tokens=9, out=out) as window:
        assert out.tolist() == [1, 2, 3, 0, 0]
        assert window.tolist() == [1, 2, 3]
    frozen = np.zeros(5, np.int32)
    frozen.flags.writeable = False
    for bad in (frozen, np.zeros(5, np.int64), np.zeros((5, 1), np.int32), [0] * 5, b"12345678"):
        with pytest.raises(InvalidType):
            assembler.assemble("s", max_tokens=9, out=bad)
    with pytest.raises(InvalidArgument, match="room for the window's 3"):
        assembler.assemble("s", max_tokens=9, out=np.zeros(2, np.int32))
    assert assembler.pool.free == assembler.pool.slots


def test_slots_run_out_and_come_back(store):
    fill(store, ("user", [1]))
    with ContextAssembler(store, slots=2, timeout=0.0) as assembler:
        windows = [assembler.assemble("s", max_tokens=9) for _ in range(2)]
        with pytest.raises(PoolExhausted):
            assembler.assemble("s", max_tokens=9)
        windows.pop()
        assembler.assemble("s", max_tokens=9).release()
        report = windows.pop().report
        assembler.assemble("s", max_tokens=9).release()
        assert report.by_segment == {"history": 1}
        with pytest.raises(WindowReleased):
            report.block_keys(1)


def test_windows_maps_sessions_to_their_latest_live_window(store, assembler):
    fill(store, ("user", [1]))
    store.append("s", "user", token_ids=[2], tenant="t")
    first, second = (assembler.assemble("s", max_tokens=9) for _ in range(2))
    other = assembler.assemble(b"s", tenant="t", max_tokens=9)
    assert dict(assembler.windows) == {"s": second, ("t", "s"): other}
    assert (other.session, other.tenant) == ("s", "t")
    second.release()
    assert assembler.windows["s"] is assembler.windows[b"s"] is first
    del first
    assert list(assembler.windows) == [("t", "s")]
    with pytest.raises(KeyError):
        assembler.windows["s"]
    assert ("t", "s", "x") not in assembler.windows
    store.delete("s", tenant="t")
    assert len(assembler.windows) == 0
    assert other.tolist() == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"session": 5}, {"session": ""}, {"session": "x" * 1025}, {"tenant": None},
        {"policy": "last"}, {"stream": 3}, {"top_k": -1}, {"top_k": 1.0}, {"top_k": True},
        {"session_recall": 1}, {"placement": "front"}, {"recall_role": "tool"},
        {"recall_role": "narrator"}, {"recall_role": 3}, {"collections": 7},
        {"collections": {"a": 1}}, {"min_score": "1"}, {"min_score": float("nan")},
        {"filters": [1]},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(store, assembler, options):
    fill(store, ("user", [1]))
    told = {"session": "s", "max_tokens": 9, **options}
    for call in (assembler.assemble, assembler.plan):
        with pytest.raises(InvalidArgument):
            call(told["session"], **{k: v for k, v in told.items() if k != "session"})
    with pytest.raises(TypeError):
        assembler.assemble("s", max_tokens=9, unknown=1)


def test_devices(store):
    assert ContextAssembler(store, device="cpu").device == "cpu"
    with pytest.raises(DeviceUnavailable):
        ContextAssembler(store, device="cuda:17")
    for device in ("gpu", "cuda:", "cuda:x", "", None, 0):
        with pytest.raises(InvalidArgument):
            ContextAssembler(store, device=device)
    with pytest.raises(InvalidType):
        ContextAssembler("store")


def test_a_closed_assembler_or_store_says_so_and_windows_live_on(store_path):
    store = SessionStore.open(store_path)
    fill(store, ("user", [1]))
    assembler = ContextAssembler(store)
    window = assembler.assemble("s", max_tokens=9)
    assembler.close()
    assembler.close()
    with pytest.raises(StoreClosed):
        assembler.assemble("s", max_tokens=9)
    other = ContextAssembler(store)
    store.close()
    with pytest.raises(StoreClosed):
        other.assemble("s", max_tokens=9)
    assert window.tolist() == [1]


def test_a_cut_never_falls_inside_a_character(store_path):
    with SessionStore.open(store_path, tokenizer=byte_tokenizer()) as store:
        assembler = ContextAssembler(store)
        store.append("s", "user", "aé漢字😀b")
        length = len(store.turns("s")[0].token_ids)
        for stable in (False, True):
            policy = Policy(stable_prefix=stable, allow_partial=True)
            for budget in range(1, length + 1):
                with assembler.assemble("s", max_tokens=budget, policy=policy) as window:
                    assert len(window) <= budget
                    assert "\ufffd" not in store.codec.decode(window.token_ids)
