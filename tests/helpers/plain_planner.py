"""A planner in plain Python, written from CONTRACT.md's words: loops over turns, no running sums.

A kept history is a list of (turn, index) pairs, one per token. It is the model that the compiled
planner is checked against, so it shares no idea with it: units come from links between turns, the
boundary from adding up one unit after the other.
"""

from dataclasses import dataclass, field

RESULT_ROLES = ("tool", "function")


@dataclass
class Turn:
    """One turn: its own length in tokens, and the tokens by which it shortens the one before."""

    role: str
    length: int
    group: int | None = None
    trim: int = 0
    starts: list[bool] = field(default_factory=list)  # per token: begins a character; [] for all

    def begins_character(self, index):
        return index == 0 or not self.starts or self.starts[index]


def links_and_orphans(turns):
    """Pairs of turns that belong together, and the results that belong to nothing."""
    links, orphans = [], set()
    for now, turn in enumerate(turns):
        earlier = [t for t in range(now) if t not in orphans]
        if turn.group is not None:
            partners = [t for t in earlier if turns[t].group == turn.group]
            called = any(turns[t].role == "assistant" for t in partners)
        else:
            partners = [t for t in earlier if turns[t].role == "assistant"][-1:]
            called = bool(partners)
            if turn.role not in RESULT_ROLES:
                continue
        if turn.role in RESULT_ROLES and not called:
            orphans.add(now)
            continue
        links += [(partner, now) for partner in partners]
    return links, orphans


def find_units(turns, keep_groups=True):
    """The units, each a list of turns without orphans, and the orphans."""
    links, orphans = links_and_orphans(turns)
    links = links if keep_groups else []
    links += [(t - 1, t) for t in range(1, len(turns)) if turns[t].trim]
    units = []
    for now in range(len(turns)):
        split = not any(first < now <= last for first, last in links)
        if split or not units:
            units.append([])
        if now not in orphans:
            units[-1].append(now)
    return [unit for unit in units if unit], orphans


def tokens_of(turns, unit):
    """The tokens of a unit as they stand in a window."""
    tokens = []
    for turn in unit:
        tokens = tokens[: len(tokens) - turns[turn].trim]
        tokens += [(turn, index) for index in range(turns[turn].length)]
    return tokens


def last(tokens, count):
    return tokens[len(tokens) - count :]


def stable_boundary(lengths, budget, low_water):
    """The first kept unit, by CONTRACT.md's walk."""
    b = s = 0
    for i, length in enumerate(lengths):
        s += length
        if s > budget:
            fitting = [
                c for c in range(b + 1, i + 1) if sum(lengths[c : i + 1]) <= low_water * budget
            ]
            alone = i if length <= budget else i + 1
            b = min(fitting) if fitting else alone
            s = sum(lengths[b : i + 1])
    return b


def stable_partial_tokens(lengths, budget, low_water):
    """How many of the last tokens the walk keeps where units may be cut."""
    s = 0
    for length in lengths:
        s += length
        if s > budget:
            s = max(int(low_water * budget), min(length, budget))
    return s


def sliding_boundary(lengths, budget):
    for b in range(len(lengths)):
        if sum(lengths[b:]) <= budget:
            return b
    return len(lengths)


def from_a_character(turns, tokens):
    """Drop tokens from the front until the first begins a character."""
    while tokens and not turns[tokens[0][0]].begins_character(tokens[0][1]):
        tokens = tokens[1:]
    return tokens


def cut_unit(turns, unit, count):
    """What stays of a unit of which `count` tokens, fewer than it has, may stay."""
    whole = tokens_of(turns, unit)
    kept = last(whole, count)
    if not kept:
        return []
    hit = kept[0][0]
    calls = [t for t in unit if t <= hit and turns[t].role == "assistant"]
    if not calls or (calls[-1] == hit and kept[0] == (hit, 0)):
        return from_a_character(turns, kept)
    call, results = calls[-1], []
    for turn in unit:
        if turn > call and turns[turn].role == "assistant":
            break
        if turn > call and turns[turn].role in RESULT_ROLES:
            results.append(turn)
    if not any(turn in results for turn, _ in kept):
        return from_a_character(turns, kept)
    head = [token for token in whole if token[0] == call]
    rest = [token for token in whole if token[0] > call]
    tail = from_a_character(turns, last(rest, max(0, count - len(head))))
    if any(turn in results for turn, _ in tail):
        return head + tail
    return [token for token in whole if token[0] > results[-1]]


def cut_history(turns, units, count):
    """The last `count` tokens of the units, less what CONTRACT.md's rules on cuts take."""
    kept = []
    for unit in reversed(units):
        whole = tokens_of(turns, unit)
        if len(whole) > count:
            return [*([part] if (part := cut_unit(turns, unit, count)) else []), *kept]
        kept.insert(0, whole)
        count -= len(whole)
    return kept


def plan(
    turns,
    budget,
    *,
    low_water=0.5,
    stable=True,
    partial=False,
    keep_groups=True,
    start_on=(),
    end_on=(),
):
    """Return the kept tokens and ``ok``, ``empty`` or ``overflow``."""
    units, _ = find_units(turns, keep_groups)
    lengths = [len(tokens_of(turns, unit)) for unit in units]
    if budget == 0 or not units:
        return [], "empty"
    if partial:
        count = min(budget, sum(lengths))
        if stable:
            count = stable_partial_tokens(lengths, budget, low_water)
        kept = cut_history(turns, units, count)
    else:
        b = (
            stable_boundary(lengths, budget, low_water)
            if stable
            else sliding_boundary(lengths, budget)
        )
        kept = [tokens_of(turns, unit) for unit in units[b:]]
    if not kept:
        return [], "overflow"
    while start_on and kept and turns[kept[0][0][0]].role not in start_on:
        kept = kept[1:]
    while end_on and kept and turns[kept[-1][-1][0]].role not in end_on:
        kept = kept[:-1]
    return [token for unit in kept for token in unit], "ok" if kept else "empty"


def merge(turns, prefixes, suffixes):
    """Tokens of a whole history in which turns in a row of one role are one turn."""
    _, orphans = links_and_orphans(turns)
    tokens, before = [], None
    for now, turn in enumerate(turns):
        if now in orphans:
            continue
        own = [(now, index) for index in range(turn.length)]
        joins = before is not None and turns[before].role == turn.role
        if joins and turn.role not in RESULT_ROLES:
            tokens = tokens[: len(tokens) - suffixes[before]]
            own = own[prefixes[now] :]
        else:
            tokens = tokens[: len(tokens) - turn.trim]
        tokens += own
        before = now
    return tokens


def select(lengths, in_history, same_as, budget, frame):
    """What becomes of each recalled passage; `frame` is prefix, separator and suffix in tokens."""
    prefix, separator, suffix = frame
    taken, verdicts = [], []
    for now, length in enumerate(lengths):
        if in_history[now] or same_as[now] in taken:
            verdicts.append("duplicate")
            continue
        row = [lengths[t] for t in taken] + [length]
        if prefix + sum(row) + separator * (len(row) - 1) + suffix <= budget:
            taken.append(now)
            verdicts.append("taken")
        else:
            verdicts.append("recall_budget")
    return verdicts
