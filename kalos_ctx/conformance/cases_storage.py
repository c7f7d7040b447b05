"""Section E: what is stored, in which order, by whom."""

from __future__ import annotations

import time

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import Stage, assistant, pairs, tokens, user


def stored(stage: Stage, session: str) -> list[list[int]]:
    """Return the tokens of the stored turns."""
    return [list(turn.token_ids) for turn in stage.candidate.turns(session)]


@case(
    "B47",
    "Turns of one time keep the order in which they were appended",
    section="E",
    cause="order by timestamp; ties are arbitrary",
    reports=("openai/openai-agents-python#1900",),
    needs=("read",),
)
def b47(stage: Stage) -> None:
    fields = {"created_at": 1000.0} if stage.has("timestamps") else {}
    for number in range(1000):
        stage.fill("s", user(number), **fields)
    wanted = [[number] for number in range(1000)]
    expect(stored(stage, "s") == wanted, "1,000 turns come back in another order")
    if stage.has("reopen"):
        stage.reopen()
        expect(
            stored(stage, "s") == wanted, "1,000 turns come back in another order after reopening"
        )


@case(
    "B48",
    "Assembling never appends",
    section="E",
    cause="history and new input are written back",
    reports=("openai/openai-agents-python#1699",),
    needs=("read",),
)
def b48(stage: Stage) -> None:
    turns = pairs(4)
    stage.fill("s", *turns)
    for _ in range(10):
        stage.window("s", 3)
    count = len(stage.candidate.turns("s"))
    expect(count == 8, f"after ten windows there are {count} turns, not 8")


@case(
    "B50",
    "A rollback keeps what was before its mark",
    section="E",
    cause="the retry never adds it again",
    reports=("openai/openai-agents-python#3852",),
    needs=("rollback",),
)
def b50(stage: Stage) -> None:
    stage.fill("s", user(1), assistant(2))
    stage.candidate.rollback("s", 1)
    window = stage.window("s", None)
    expect(window == [1], f"behind a rollback to the first of two turns the window is {window}")
    stage.fill("s", assistant(3))
    window = stage.window("s", None)
    expect(window == [1, 3], f"a turn behind the rollback gives {window}")


@case(
    "B51",
    "Equal turns are distinct turns",
    section="E",
    priority=2,
    cause="equality of content is used as identity",
    reports=("openai/openai-agents-python#4069",),
)
def b51(stage: Stage) -> None:
    stage.fill("s", user(1), assistant(2), user(1), assistant(2))
    window = stage.window("s", None)
    expect(window == [1, 2, 1, 2], f"[1] [2] [1] [2] comes back as {window}")


@case(
    "B55",
    "Several processes append to one session, and nothing is lost",
    section="E",
    cause="the whole session is read, changed and written; first openers race on the set-up",
    reports=(
        "Consensys/ask-o11y-plugin#218",
        "odysseus-dev/odysseus#1940",
        "openai/openai-agents-python#4987",
    ),
    needs=("writers", "read"),
)
def b55(stage: Stage) -> None:
    count, each = 4, 25
    children = [
        stage.begin([["append", ["s", "user", [1000 * writer + n]], {}] for n in range(each)])
        for writer in range(count)
    ]
    for child in children:
        stage.answer(child)
    found = [ids[0] for ids in stored(stage, "s")]
    expect(len(found) == count * each, f"of {count * each} turns {len(found)} are there")
    for writer in range(count):
        own = [token for token in found if token // 1000 == writer]
        expect(own == sorted(own), "the order of one writer's turns is not kept")


@case(
    "B56",
    "Appends in a tight loop are all there",
    section="E",
    priority=2,
    cause="timestamps in keys collide",
    reports=("langchain-ai/langchain-redis#69",),
    needs=("read",),
)
def b56(stage: Stage) -> None:
    for number in range(1000):
        stage.fill("s", user(number))
    expect(stored(stage, "s") == [[n] for n in range(1000)], "1,000 appends are not 1,000 turns")


@case(
    "B58",
    "An append costs the same whatever the history's length",
    section="E",
    cause="the whole session is written and counted again",
    reports=("redis/agent-memory-server#195",),
)
def b58(stage: Stage) -> None:
    def seconds() -> float:
        spent = []
        for _ in range(5):
            begin = time.perf_counter()
            stage.fill("s", *pairs(10))
            spent.append(time.perf_counter() - begin)
        return min(spent)

    first = seconds()
    stage.fill("s", *pairs(450))
    # Ten times the history: work in proportion to it takes up to ten times as long.
    expect(seconds() < 5 * first, "an append takes the longer the longer the history is")


@case(
    "B60",
    "What was stored is there when the folder is opened again",
    section="E",
    cause="history lives in the process, or is written at its end",
    reports=("openakita/openakita#647", "anomalyco/opencode#7607"),
    needs=("reopen",),
)
def b60(stage: Stage) -> None:
    turns = pairs(20, 3)
    stage.fill("s", *turns)
    before = stage.window("s", None)
    expect(before == tokens(turns), "the window is not what was stored")
    stage.reopen()
    expect(stage.window("s", None) == before, "after reopening the window is another")
    stage.fill("s", user(7))
    expect(stage.window("s", None) == [*before, 7], "a turn behind the reopening is not there")


@case(
    "B61",
    "Another process builds the same window at once",
    section="E",
    cause="a dictionary of one process",
    reports=("Abilityai/trinity#704", "grapeot/web_agentic_ai#18"),
    needs=("readers",),
)
def b61(stage: Stage) -> None:
    stage.fill("s", *pairs(10))
    limit = 7 if stage.has("token_limit") else None
    for _ in range(2):
        window = stage.window("s", limit)
        there = stage.elsewhere([["assemble", ["s", limit], {}]])[0]
        expect(there == window, "another process builds another window")
        stage.fill("s", user(99))


@case(
    "B63",
    "Pages of a listing neither repeat nor miss a session",
    section="E",
    priority=3,
    cause="no order, or an order of random IDs",
    reports=("google/adk-python#6272", "HarperFast/harper#2268"),
    needs=("listing",),
)
def b63(stage: Stage) -> None:
    names = [f"s{number}" for number in range(10)]
    for name in names:
        stage.fill(name, user(1))
    found: list[str] = []
    cursor = None
    for page in range(20):
        items, cursor = stage.candidate.sessions(cursor=cursor, limit=3)
        found += items
        stage.fill(f"new{page}", user(1))
        if cursor is None or set(names) <= set(found):
            break
    old = [name for name in found if name in names]
    expect(sorted(old) == sorted(names), f"ten sessions are listed as {len(old)} while others come")
