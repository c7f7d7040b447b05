"""What a caller says about a window's content (`Policy`), and what a plan says back.

The planner itself is ``cuda/kalos_plan.h``, compiled for the host and the device. This module
checks the caller's wishes, divides a budget into its parts, and holds the records of the report.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from kalos_ctx._planner import ROLE_CODES
from kalos_ctx.errors import BudgetExceeded, InvalidArgument, InvalidType

STRATEGIES = ("last",)
ALTERNATIONS = ("off", "merge", "strict")
ON_OVERFLOW = ("raise", "drop")


def role_mask(name: str, roles: str | tuple[str, ...] | None) -> int:
    """One bit per role code for the planner; 0 for None, which allows any role.

    Raises
    ------
    InvalidArgument
        A role is unknown, or none is named.
    InvalidType
        `roles` is neither a str nor strs.
    """
    if roles is None:
        return 0
    named = (roles,) if isinstance(roles, str) else roles
    mask = 0
    for role in named:
        if not isinstance(role, str):
            raise InvalidType(f"{name} must hold roles as str (got {type(role).__name__})")
        if role not in ROLE_CODES:
            raise InvalidArgument(f"{name} must name roles of {tuple(ROLE_CODES)} (got {role!r})")
        mask |= 1 << ROLE_CODES[role]
    if not mask:
        raise InvalidArgument(f"{name} must name at least one role, or be None (got {roles!r})")
    return mask


def _several(name: str, roles: Any) -> str | tuple[str, ...] | None:
    if roles is None or isinstance(roles, str):
        return roles
    if isinstance(roles, (bytes, Mapping)) or not isinstance(roles, Iterable):
        raise InvalidType(
            f"{name} must be a role, several roles or None (got {type(roles).__name__})"
        )
    # A set has no order of its own, so equal policies would differ.
    return tuple(sorted(roles, key=str) if isinstance(roles, (set, frozenset)) else roles)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a window is cut. Immutable and hashable.

    Parameters
    ----------
    strategy : {"last"}
        Which end of the history is kept: the newest turns.
    allow_partial : bool
        The oldest kept unit may lose its beginning. Inside a group the call stays whole and its
        results lose their beginning.
    include_system : bool
        Head segments stand in the window.
    start_on, end_on : str or iterable of str, optional
        Roles on which the history must begin and end; whole units go until it does.
    keep_groups : bool
        A call and its results are kept or dropped together.
    stable_prefix : bool
        Cut to `low_water` when the budget is crossed, so that the prompt's beginning seldom
        changes. False keeps the largest suffix that fits.
    low_water : float
        In (0, 1]. Share of the history's budget that a cut leaves.
    recall_tokens : int, optional
        Tokens set aside for recalled passages and their framing. None is a quarter of the window;
        0 is none.
    generation_prompt : bool
        The template's generation prompt closes the window and counts.
    alternation : {"off", "merge", "strict"}
        Turns in a row of one role stay as they are, become one turn, or are refused. Results of
        tools may follow one another in each case.
    on_overflow : {"raise", "drop"}
        When the newest unit does not fit: `BudgetExceeded`, or a window without history.

    Raises
    ------
    InvalidArgument
        A value is not one of those named here.
    InvalidType
        A value is of another type.
    """

    strategy: str = "last"
    allow_partial: bool = False
    include_system: bool = True
    start_on: str | tuple[str, ...] | None = None
    end_on: str | tuple[str, ...] | None = None
    keep_groups: bool = True
    stable_prefix: bool = True
    low_water: float = 0.5
    recall_tokens: int | None = None
    generation_prompt: bool = False
    alternation: str = "off"
    on_overflow: str = "raise"

    def __post_init__(self) -> None:
        for name, choices in (
            ("strategy", STRATEGIES),
            ("alternation", ALTERNATIONS),
            ("on_overflow", ON_OVERFLOW),
        ):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidType(f"{name} must be a str (got {type(value).__name__})")
            if value not in choices:
                raise InvalidArgument(f"{name} must be one of {choices} (got {value!r})")
        for name in (
            "allow_partial",
            "include_system",
            "keep_groups",
            "stable_prefix",
            "generation_prompt",
        ):
            value = getattr(self, name)
            if type(value) is not bool:
                raise InvalidType(f"{name} must be a bool (got {type(value).__name__})")
        for name in ("start_on", "end_on"):
            roles = _several(name, getattr(self, name))
            role_mask(name, roles)
            object.__setattr__(self, name, roles)
        object.__setattr__(self, "low_water", _share(self.low_water))
        if self.recall_tokens is not None:
            object.__setattr__(
                self, "recall_tokens", token_count("recall_tokens", self.recall_tokens)
            )

    @property
    def start_mask(self) -> int:
        """`start_on` as one bit per role code, 0 for any."""
        return role_mask("start_on", self.start_on)

    @property
    def end_mask(self) -> int:
        """`end_on` as one bit per role code, 0 for any."""
        return role_mask("end_on", self.end_on)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(f"low_water must be a number (got {type(value).__name__})")
    share = float(value)
    if not 0.0 < share <= 1.0:  # NaN too
        raise InvalidArgument(f"low_water must be in (0, 1] (got {value!r})")
    return share


def token_count(name: str, value: Any) -> int:
    """Check a number of tokens: an integer that is no bool, not negative.

    Raises
    ------
    InvalidType, InvalidArgument
    """
    if isinstance(value, bool):
        raise InvalidType(f"{name} must be an int (got bool)")
    try:
        count = operator.index(value)
    except TypeError:
        raise InvalidType(f"{name} must be an int (got {type(value).__name__})") from None
    if count < 0:
        raise InvalidArgument(f"{name} must be at least 0 (got {count})")
    return count


@dataclass(frozen=True, slots=True)
class Budget:
    """How a window's tokens are divided.

    Parameters
    ----------
    total : int
        ``max_tokens - reserve``, the hard bound.
    head : int
        Tokens of the head segments and the generation prompt.
    history : int
        ``H``, what the history may take while passages are still unknown.
    recall : int
        What recalled passages and their framing may take, 0 where the call does not recall.
    """

    total: int
    head: int
    history: int
    recall: int


def divide_budget(
    max_tokens: int,
    reserve: int,
    by_segment: Mapping[str, int],
    *,
    recalls: bool,
    recall_tokens: int | None,
) -> Budget:
    """Divide a window's tokens between head, recalled passages and history.

    Parameters
    ----------
    max_tokens, reserve : int
        The window's size and the tokens left to the model's answer.
    by_segment : mapping of str to int
        Tokens of each part that always stands in the window, the generation prompt included.
    recalls : bool
        Whether the call recalls.
    recall_tokens : int, optional
        The policy's; None is a quarter of ``max_tokens - reserve``. Never more than the head
        leaves.

    Returns
    -------
    Budget

    Raises
    ------
    BudgetExceeded
        The head does not fit.
    InvalidArgument, InvalidType
        A number is negative, not whole, or `reserve` is larger than `max_tokens`.
    """
    max_tokens = token_count("max_tokens", max_tokens)
    reserve = token_count("reserve", reserve)
    if reserve > max_tokens:
        raise InvalidArgument(f"reserve must be at most max_tokens ({max_tokens}) (got {reserve})")
    total = max_tokens - reserve
    head = sum(by_segment.values())
    if head > total:
        parts = ", ".join(f"{name} {tokens}" for name, tokens in by_segment.items())
        raise BudgetExceeded(
            f"the segments that always stand in the window take {head} tokens ({parts}), "
            f"{head - total} more than max_tokens - reserve = {total}",
            by_segment,
            total,
            head - total,
        )
    recall = 0
    if recalls:
        recall = min(total // 4 if recall_tokens is None else recall_tokens, total - head)
    return Budget(total, head, total - head - recall, recall)


@dataclass(frozen=True, slots=True)
class PlanItem:
    """What becomes of one part of a window.

    Parameters
    ----------
    kind : str
        ``segment``, ``turn``, ``summary``, ``passage`` or ``generation_prompt``.
    tokens : int
        Tokens that it takes in the window; for a dropped part, those that it would take.
    action : {"kept", "cut", "dropped"}
        ``cut``: it stands in the window without its beginning.
    why : str
        Empty for what is kept. Else ``budget`` (older than what fits), ``group`` (fits by itself,
        but not the call or the results that belong to it), ``orphan`` (a result without an earlier
        call), ``start_on``, ``end_on``, ``overflow`` (of the newest unit, which does not fit),
        ``recall_budget``, ``duplicate``, or another word of the one who made the plan.
    seq : int, optional
        Sequence number of a turn.
    id : int, optional
        ID of a passage.
    name : str, optional
        Name of a segment.
    cut_tokens : int
        Tokens that a cut part lost.
    """

    kind: str
    tokens: int
    action: str
    why: str = ""
    seq: int | None = None
    id: int | None = None
    name: str | None = None
    cut_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a window would hold, and why; made without a device and without moving a token.

    Parameters
    ----------
    items : tuple of PlanItem
        In the order of the window, dropped parts where they would stand.
    budget : Budget
    low_mark : int
        Tokens to which a stable cut trims the history.
    tokens : int
        Length of the window.
    by_segment : mapping of str to int
        Tokens per part of the window; they add up to `tokens`.
    """

    items: tuple[PlanItem, ...]
    budget: Budget
    low_mark: int
    tokens: int
    by_segment: Mapping[str, int]

    @property
    def kept(self) -> tuple[PlanItem, ...]:
        """What stands in the window, whole or cut."""
        return tuple(item for item in self.items if item.action != "dropped")

    @property
    def dropped(self) -> tuple[PlanItem, ...]:
        """What does not, each with its reason."""
        return tuple(item for item in self.items if item.action == "dropped")

    @property
    def trimmed(self) -> bool:
        """Whether a turn was dropped or cut."""
        return any(item.kind == "turn" and item.action != "kept" for item in self.items)
