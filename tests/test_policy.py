"""What callers may wish for, how a budget is divided, and the records of a plan."""

import numpy as np
import pytest

from kalos_ctx._planner import ROLE_CODES, FlatHistory, HistoryPlan, select_passages_flat
from kalos_ctx.errors import BudgetExceeded, InvalidArgument, InvalidType
from kalos_ctx.planner import Plan, PlanItem, Policy, divide_budget


def test_policy_has_the_documented_defaults_and_is_hashable():
    policy = Policy()
    assert (policy.strategy, policy.low_water, policy.recall_tokens) == ("last", 0.5, None)
    assert policy.stable_prefix
    assert policy.keep_groups
    assert policy.include_system
    assert not policy.allow_partial
    assert not policy.generation_prompt
    assert (policy.alternation, policy.on_overflow) == ("off", "raise")
    assert hash(Policy(start_on={"user", "assistant"})) == hash(
        Policy(start_on=["assistant", "user"])
    )
    assert (Policy(start_on="user").start_mask, Policy().end_mask) == (1 << ROLE_CODES["user"], 0)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("strategy", "first", InvalidArgument),
        ("strategy", None, InvalidType),
        ("alternation", "on", InvalidArgument),
        ("on_overflow", "", InvalidArgument),
        ("allow_partial", 1, InvalidType),
        ("stable_prefix", None, InvalidType),
        ("low_water", 0, InvalidArgument),
        ("low_water", 1.01, InvalidArgument),
        ("low_water", float("nan"), InvalidArgument),
        ("low_water", True, InvalidType),
        ("low_water", "0.5", InvalidType),
        ("recall_tokens", -1, InvalidArgument),
        ("recall_tokens", 1.5, InvalidType),
        ("recall_tokens", False, InvalidType),
        ("start_on", "narrator", InvalidArgument),
        ("start_on", (), InvalidArgument),
        ("end_on", 3, InvalidType),
        ("end_on", ["user", 3], InvalidType),
    ],
)
def test_policy_refuses_what_it_does_not_know_and_names_it(field, value, error):
    with pytest.raises(error, match=f"^{field} must"):
        Policy(**{field: value})


def test_b86_zero_is_not_none_in_every_number():
    parts = {"system": 4}
    assert divide_budget(100, 0, parts, recalls=True, recall_tokens=None).recall == 25
    assert divide_budget(100, 0, parts, recalls=True, recall_tokens=0).recall == 0
    assert divide_budget(100, 20, parts, recalls=True, recall_tokens=500).history == 0
    assert divide_budget(100, 20, parts, recalls=False, recall_tokens=50).history == 76
    assert Policy(recall_tokens=np.int64(0)).recall_tokens == 0


def test_b04_head_that_does_not_fit_names_every_segment():
    with pytest.raises(BudgetExceeded, match="system 6, profile 8") as caught:
        divide_budget(12, 2, {"system": 6, "profile": 8}, recalls=False, recall_tokens=None)
    assert caught.value.by_segment == {"system": 6, "profile": 8}
    assert (caught.value.budget, caught.value.over) == (10, 4)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: divide_budget(-1, 0, {}, recalls=False, recall_tokens=None), "max_tokens"),
        (lambda: divide_budget(8, 9, {}, recalls=False, recall_tokens=None), "reserve"),
        (lambda: FlatHistory([1], [9]), "roles"),
        (lambda: FlatHistory([1, 1], [2]), "roles"),
        (lambda: FlatHistory([1, 1], [2, 2], unit_first=[0, 2]), "unit_first"),
        (lambda: FlatHistory([2**53, 1], [2, 2]), "lengths"),
        (lambda: FlatHistory([1], [2]).plan(5, num_turns=2), "num_turns"),
        (lambda: FlatHistory([1], [2]).plan(5, low_water=0), "low_water"),
        (lambda: FlatHistory([1], [2]).plan(5).fate(1), "turn"),
        (lambda: select_passages_flat([1], [0], [1], budget=5), "same_as"),
    ],
)
def test_wrong_numbers_are_refused_by_name(call, error):
    with pytest.raises(InvalidArgument, match=f"^{error} must"):
        call()


def test_plan_sorts_its_items_into_kept_and_dropped():
    budget = divide_budget(20, 0, {"system": 2}, recalls=False, recall_tokens=None)
    items = (
        PlanItem("segment", 2, "kept", name="system"),
        PlanItem("turn", 5, "dropped", "budget", seq=0),
        PlanItem("turn", 3, "cut", "budget", seq=1, cut_tokens=4),
    )
    plan = Plan(items, budget, 9, 5, {"system": 2, "history": 3})
    assert [item.seq for item in plan.kept] == [None, 1]
    assert [item.seq for item in plan.dropped] == [0]
    assert plan.trimmed
    assert not Plan(items[:1], budget, 9, 2, {"system": 2}).trimmed
    with pytest.raises(TypeError, match="plan"):
        HistoryPlan()
