"""Cutting a list of LangChain messages between units: a call and its results live and die together.

The rules are those of `ContextAssembler` for turns, over messages and any counter of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kalos_ctx.errors import BudgetExceeded, InvalidType

# A LangChain message; this module needs `type`, `content`, `tool_calls`, `tool_call_id` of it.
Message: TypeAlias = Any
Unit: TypeAlias = list[Message]
Count: TypeAlias = Callable[[list[Message]], int]
Fits: TypeAlias = Callable[[list[Unit]], bool]


def units_of(messages: Sequence[Message]) -> list[Unit]:
    """Return the stretches between which no call is split from a result; orphans are left out."""
    last_of: dict[int, int] = {}
    caller: dict[Any, int] = {}
    kept: list[int] = []
    for place, message in enumerate(messages):
        if _is_result(message):
            call = caller.get(message.tool_call_id)
            if call is None:
                continue
            last_of[call] = place
        for one in _calls(message):
            caller[one["id"]] = place
        kept.append(place)
    units: list[Unit] = []
    until = -1
    for place in kept:
        if place > until:
            units.append([])
        units[-1].append(messages[place])
        until = max(until, last_of.get(place, place))
    return units


def trimmed(
    messages: Sequence[Message],
    *,
    max_tokens: int,
    count: Count,
    last: bool,
    allow_partial: bool,
    ends: Callable[[Message], bool] | None,
    starts: Callable[[Message], bool] | None,
    include_system: bool,
    split: Callable[[str], list[str]],
) -> list[Message]:
    """Cut messages to `max_tokens`; `langchain.trim_messages` describes it.

    Raises
    ------
    BudgetExceeded, InvalidType
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
        raise InvalidType(f"max_tokens must be an int (got {type(max_tokens).__name__})")
    head: Unit = []
    if include_system and messages and messages[0].type == "system":
        head, messages = [messages[0]], messages[1:]
        over = count(head) - max_tokens
        if over > 0:
            raise BudgetExceeded(
                f"the system message takes {over} tokens more than max_tokens = {max_tokens}",
                {"system": over + max_tokens},
                max_tokens,
                over,
            )

    def fits(kept: list[Unit]) -> bool:
        return count(_flat(head, kept)) <= max_tokens

    units = units_of(messages)
    if last:
        _drop_ends(units, ends)
    kept = _fitting(units, fits, last)
    if allow_partial and len(kept) < len(units):
        at = len(units) - len(kept) - 1 if last else len(kept)
        piece = _partial(units[at], kept, fits, last, split)
        if piece:
            kept = [piece, *kept] if last else [*kept, piece]
    while True:
        if last:
            _drop_starts(kept, starts)
        else:
            _drop_ends(kept, ends)
        # A counter may say less of more messages: what is returned keeps the bound all the same.
        if not kept or fits(kept):
            return _flat(head, kept)
        kept.pop(0 if last else -1)


def _fitting(units: list[Unit], fits: Fits, last: bool) -> list[Unit]:
    """Return the most units of one end that fit, found by halving."""
    low, high = 0, len(units)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(_end(units, middle, last)):
            low = middle
        else:
            high = middle - 1
    return _end(units, low, last)


def _end(units: list[Unit], number: int, last: bool) -> list[Unit]:
    return units[len(units) - number :] if last else units[:number]


def _partial(
    unit: Unit, kept: list[Unit], fits: Fits, last: bool, split: Callable[[str], list[str]]
) -> Unit | None:
    """Return a unit with as much of its text as fits, None for none.

    A lone message needs a piece of its text. In a group the calls stay whole and every result
    stays, since each call needs one, with its text cut.
    """
    group = len(unit) > 1
    if not group and _calls(unit[0]):
        return None
    cut = [place for place, message in enumerate(unit) if not group or _is_result(message)]
    pieces = [(place, piece) for place in cut for piece in _pieces(unit[place].content, split)]

    def with_pieces(number: int) -> Unit:
        taken = pieces[len(pieces) - number :] if last else pieces[:number]
        made = list(unit)
        for place in cut:
            own = [piece for at, piece in taken if at == place]
            made[place] = unit[place].model_copy(
                update={"content": _joined(unit[place].content, own)}
            )
        return made

    def fit(number: int) -> bool:
        made = with_pieces(number)
        return fits([made, *kept] if last else [*kept, made])

    low, high = (0 if group else 1), len(pieces)
    if high < low or not fit(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fit(middle):
            low = middle
        else:
            high = middle - 1
    return with_pieces(low)


def _pieces(content: Any, split: Callable[[str], list[str]]) -> list[tuple[int, Any]]:
    """Return what a content can be cut into, each with the place of the part it belongs to."""
    if isinstance(content, str):
        return [(0, piece) for piece in split(content)]
    found: list[tuple[int, Any]] = []
    for place, part in enumerate(content):
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str) and (isinstance(part, str) or part.get("type") == "text"):
            found += [(place, piece) for piece in split(text)]
        else:
            found.append((place, part))
    return found


def _joined(content: Any, pieces: list[tuple[int, Any]]) -> Any:
    """Return a content that holds these of its pieces."""
    if isinstance(content, str):
        return "".join(piece for _, piece in pieces)
    parts: list[Any] = []
    for place, part in enumerate(content):
        own = [piece for at, piece in pieces if at == place]
        if not own:
            continue
        if isinstance(part, str):
            parts.append("".join(own))
        elif isinstance(own[0], str):
            parts.append({**part, "text": "".join(own)})
        else:
            parts.append(part)
    return parts


def _drop_starts(units: list[Unit], starts: Callable[[Message], bool] | None) -> None:
    while units and starts is not None and not starts(units[0][0]):
        units.pop(0)


def _drop_ends(units: list[Unit], ends: Callable[[Message], bool] | None) -> None:
    while units and ends is not None and not ends(units[-1][-1]):
        units.pop()


def _flat(head: Unit, units: list[Unit]) -> list[Message]:
    return [*head, *(message for unit in units for message in unit)]


def _calls(message: Message) -> list[Any]:
    return [*(getattr(message, "tool_calls", None) or ())]


def _is_result(message: Message) -> bool:
    return getattr(message, "tool_call_id", None) is not None
