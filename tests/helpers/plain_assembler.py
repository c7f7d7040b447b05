"""An assembler in plain Python, written from CONTRACT.md's words: lists, no index, no cache.

It shares the walk over units with `plain_planner` and nothing with the compiled assembler.
"""

from dataclasses import dataclass, field

from helpers import plain_planner

RESULTS = ("tool", "function")


@dataclass
class Turn:
    """One stored turn."""

    role: str
    ids: list[int]
    group: object = None
    live: list[int] | None = None
    prefix: int = 0
    suffix: int = 0
    trim: int = 0
    expires_at: float = float("inf")


@dataclass
class Summary:
    start: int
    stop: int
    at_count: int
    ids: list[int]
    role: str = "system"


@dataclass
class Segment:
    name: str
    ids: list[int]
    placement: str = "head"
    volatile: bool = False


@dataclass
class Session:
    turns: list[Turn] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)  # the tenant's before the session's


@dataclass
class Item:
    """A turn or a summary as it stands in the history."""

    seq: int
    role: str
    ids: list[int]
    first: int  # the first turn of the unit that it closed
    prefix: int = 0
    suffix: int = 0
    trim: int = 0
    summary: bool = False
    absent: bool = False


@dataclass
class Window:
    ids: list[int]
    kept: dict[int, int]  # seq: tokens cut off its beginning
    dropped: dict[int, str]
    code: str
    passages: list[str] = field(default_factory=list)


def stored_units(turns):
    """First turn of the unit that each turn closed, and the orphans, turn by turn."""
    firsts, orphans = [], set()

    def start_of(turn):
        """The start of the unit that holds a turn, among those there are."""
        return min([turn, *(f for at, f in enumerate(firsts) if f <= turn <= at)])

    for now, turn in enumerate(turns):
        first = now
        if turn.trim and now:
            first = start_of(now - 1)
        members = [t for t in range(now) if t not in orphans and turns[t].group == turn.group]
        callers = [t for t in members if turns[t].role == "assistant"]
        assistants = [t for t in range(now) if turns[t].role == "assistant"]
        if turn.group is not None:
            if members:
                first = min(first, start_of(members[0]))
            lost = turn.role in RESULTS and not callers
        else:
            lost = turn.role in RESULTS and not assistants
            if turn.role in RESULTS and not lost:
                first = min(first, start_of(assistants[-1]))
        if lost:
            orphans.add(now)
            first = now
        firsts.append(first)
    return firsts, orphans


def has_call(turns, seq, gone):
    """Whether a call that a result answers still stands."""
    turn = turns[seq]
    if turn.role not in RESULTS:
        return True
    assistants = [t for t in range(seq) if turns[t].role == "assistant"]
    if turn.group is None:
        return assistants[-1] not in gone
    return any(turns[t].group == turn.group and t not in gone for t in assistants)


def view(session, count, now):
    """The items of the first `count` turns, and why other turns are gone."""
    turns = session.turns[:count]
    firsts, orphans = stored_units(turns)
    last_user = max((s for s, turn in enumerate(turns) if turn.role == "user"), default=-1)
    shown = [s for s in session.summaries if s.stop <= count and s.at_count <= count]
    gone = {}
    for summary in shown:
        gone.update(dict.fromkeys(range(summary.start, summary.stop), "summarized"))
    for seq, turn in enumerate(turns):
        if turn.expires_at <= now and seq not in gone:
            gone[seq] = "expired"
    items, barrier = [], 0
    for seq, turn in enumerate(turns):
        starting = [s for s in shown if s.start == seq]
        if starting:
            items.append(Item(seq, starting[0].role, list(starting[0].ids), seq, summary=True))
            barrier = starting[0].stop
        if seq in gone:
            continue
        live = turn.live is not None and seq > last_user
        item = Item(seq, turn.role, list(turn.live if live else turn.ids), firsts[seq])
        item.prefix, item.suffix, item.trim = turn.prefix, turn.suffix, turn.trim
        lost = seq in orphans or not has_call(turns, seq, gone)
        before = items[-1] if items else None
        if turn.trim and (
            before is None or before.summary or before.absent or before.seq != seq - 1
        ):
            lost = True
        item.first = max(item.first, barrier)
        if lost:
            item.absent, item.first, item.trim, item.ids = True, seq, 0, []
        items.append(item)
    return items, gone


def units_of(items, keep_groups, joined=()):
    """Units of the present items, as lists of places."""
    links = list(joined)
    for place, item in enumerate(items):
        if item.absent or item.summary:
            continue
        if keep_groups:
            links += [(p, place) for p in range(place) if items[p].seq >= item.first]
        if item.trim:
            links.append((place - 1, place))
    units = []
    for place in range(len(items)):
        if not units or not any(first < place <= last for first, last in links):
            units.append([])
        if not items[place].absent:
            units[-1].append(place)
    return [unit for unit in units if unit]


def merged(items):
    """Join turns in a row of one role; pairs that were joined, and tokens lost at beginnings."""
    pairs, skips, before = [], {}, None
    for place, item in enumerate(items):
        if item.absent:
            continue
        if before is not None and items[before].role == item.role and item.role not in RESULTS:
            pairs.append((before, place))
            fits = item.prefix + items[before].suffix < len(item.ids) - item.trim
            if not item.trim and fits:
                skips[place] = item.prefix
                item.trim = items[before].suffix
        before = place
    return pairs, skips


def cut(items, skips, policy, budget, joined):
    """The kept tokens as (place, index) pairs."""
    turns = [
        plain_planner.Turn(item.role, len(item.ids) - skips.get(place, 0), None, item.trim)
        for place, item in enumerate(items)
    ]
    units = units_of(items, policy.keep_groups, joined)
    lengths = [len(plain_planner.tokens_of(turns, unit)) for unit in units]
    if budget == 0 or not units:
        return [], "empty"
    low = policy.low_water
    if policy.allow_partial:
        count = min(budget, sum(lengths))
        if policy.stable_prefix:
            count = plain_planner.stable_partial_tokens(lengths, budget, low)
        kept = plain_planner.cut_history(turns, units, count)
    else:
        b = (
            plain_planner.stable_boundary(lengths, budget, low)
            if policy.stable_prefix
            else plain_planner.sliding_boundary(lengths, budget)
        )
        kept = [plain_planner.tokens_of(turns, unit) for unit in units[b:]]
    if not kept:
        return [], "overflow"
    for edge, roles in ((0, policy.start_on), (-1, policy.end_on)):
        allowed = (roles,) if isinstance(roles, str) else roles
        while allowed and kept and items[kept[edge][edge][0]].role not in allowed:
            del kept[edge]
    return [token for unit in kept for token in unit], "ok" if kept else "empty"


def has_run(history, ids):
    n = len(ids)
    return any(history[at : at + n] == ids for at in range(len(history) - n + 1))


def choose(passages, history, budget, frame):
    """What becomes of each recalled passage, and the tokens they take with their framing."""
    prefix, separator, suffix = map(len, frame)
    taken, verdicts, used = [], [], 0
    for ids in passages:
        if not ids:
            verdicts.append("empty")
        elif ids in taken or has_run(history, ids):
            verdicts.append("duplicate")
        else:
            cost = len(ids) + (separator if taken else prefix + suffix)
            verdicts.append("" if used + cost <= budget else "recall_budget")
            if not verdicts[-1]:
                used += cost
                taken.append(ids)
    return taken, verdicts, used


def framed(taken, frame):
    prefix, separator, suffix = frame
    ids = list(prefix) if taken else []
    for place, one in enumerate(taken):
        ids += [*(separator if place else []), *one]
    return ids + (list(suffix) if taken else [])


def assemble(
    session, policy, *, max_tokens, reserve=0, as_of=None, now=0.0, recalled=None,
    placement="before_last_user", frame=((), (), ()), prompt=(),
):  # fmt: skip
    """Return the window, or None where `BudgetExceeded` is right.

    `recalled` is None where the call does not recall, else the hits' IDs, best first.
    """
    count = len(session.turns) if as_of is None else min(as_of, len(session.turns))
    items, gone = view(session, count, now)
    pairs, skips = merged(items) if policy.alternation == "merge" else ([], {})
    places = {"head": [], "before_last_user": [], "end": []}
    for segment in sorted(session.segments, key=lambda one: one.volatile):
        if segment.placement != "head" or policy.include_system:
            places[segment.placement] += segment.ids
    total = 10**9 if max_tokens is None else max_tokens - reserve
    left = total - sum(map(len, places.values())) - len(prompt)
    if left < 0:
        return None
    share = 0
    if recalled is not None:
        share = total // 4 if policy.recall_tokens is None else policy.recall_tokens
        share = min(share, left)
    budget = left - share if policy.stable_prefix else left
    kept, code = cut(items, skips, policy, budget, pairs)

    def ids_of(tokens):
        return [items[place].ids[index + skips.get(place, 0)] for place, index in tokens]

    taken, verdicts, used = choose(recalled or [], ids_of(kept), share, frame)
    if not policy.stable_prefix and recalled is not None:
        kept, code = cut(items, skips, policy, left - used, pairs)
    if code == "overflow" and policy.on_overflow == "raise":
        return None
    order = list(dict.fromkeys(place for place, _ in kept))
    users = [place for place in order if items[place].role == "user"]
    split = len(kept)
    if users:
        first = users[-1]
        while items[first].trim and order.index(first):
            first = order[order.index(first) - 1]
        split = next(at for at, (place, _) in enumerate(kept) if place == first)
    extra = framed(taken, frame)
    ids = places["head"] + (extra if placement == "after_system" else []) + ids_of(kept[:split])
    ids += (extra if placement == "before_last_user" else []) + places["before_last_user"]
    ids += ids_of(kept[split:]) + places["end"] + (extra if placement == "end" else [])
    fates = {}
    for place in order:
        if not items[place].summary:
            fates[items[place].seq] = min(index for at, index in kept if at == place)
    dropped = {seq: gone.get(seq, "") for seq in range(count) if seq not in fates}
    dropped.update({item.seq: "orphan" for item in items if item.absent})
    return Window(ids + list(prompt), fates, dropped, code, verdicts)
