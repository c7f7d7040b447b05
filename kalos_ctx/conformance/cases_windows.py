"""Sections A and B: budgets, and calls with their results."""

from __future__ import annotations

import time

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import (
    Stage,
    Turn,
    assistant,
    call,
    pairs,
    result,
    suffixes,
    tokens,
    user,
    without_call,
)

LIMIT = "token_limit|turn_limit"


def expect_whole_suffix(window: list[int], turns: list[Turn], what: str) -> None:
    """Fail unless a window is the newest whole turns without a gap."""
    expect(window in suffixes(turns), f"{what} the window {window} is no run of the newest turns")


# ---- A. Truncation and budgets -------------------------------------------------------------------


@case(
    "B01",
    "A result goes when its call goes",
    section="A",
    cause="cutting by size alone leaves a tool result whose call was cut",
    reports=("langchain-ai/langchain#33245",),
    needs=(LIMIT, "groups"),
)
def b01(stage: Stage) -> None:
    turns = [user(5), call("c", 6), result("c", 7), user(8), assistant(9)]
    stage.fill("s", *turns)
    window = stage.window("s", 3)
    expect(
        7 not in window, f"with room for three tokens the result stands without its call: {window}"
    )
    expect(window == [8, 9], f"with room for three tokens the window is {window}, not [8, 9]")
    if stage.has("report"):
        report = stage.candidate.report()
        expect(
            report.dropped.get(2) == report.group_reason is not None,
            "the report does not say that the result went because its call went",
        )


@case(
    "B02",
    "A session without turns gives a window, not an exception",
    section="A",
    cause="index 0 is read before checking for emptiness",
    reports=("langchain-ai/langchain#26895", "langchain-ai/langchain#30376"),
    needs=(LIMIT,),
)
def b02(stage: Stage) -> None:
    stage.candidate.start("s")
    window = stage.window("s", 10)
    expect(window == [], f"a session without turns gives {window}")
    if stage.has("pin"):
        stage.candidate.pin("s", "system", [1, 2])
        window = stage.window("s", 10)
        expect(window == [1, 2], f"a session of a pinned [1, 2] alone gives {window}")


@case(
    "B04",
    "Pinned and recalled text together never exceed the budget",
    section="A",
    cause="system and retrieved text alone exceed the limit, and the error names no segment",
    reports=("run-llama/llama_index#11637", "run-llama/llama_index#9371"),
    needs=("token_limit", "pin", "recall"),
)
def b04(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [1] * 6)
    stage.candidate.add_passages("notes", [[1.0, 0.0]], [[7] * 8])
    window: list[int] = []

    def assemble() -> None:
        window[:] = stage.candidate.assemble("s", 10, query=[1.0, 0.0], top_k=1, collection="notes")

    if not stage.refused(assemble):
        expect(len(window) <= 10, f"6 pinned and 8 recalled tokens give a window of {len(window)}")
        expect(window[:6] == [1] * 6, "the pinned text was cut to make room for what was recalled")


@case(
    "B05",
    "Pinned text stands first in every window",
    section="A",
    cause='the repair for "must start with a user turn" treats the system turn as stale',
    reports=("run-llama/llama_index#23144",),
    needs=("token_limit", "pin"),
)
def b05(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [1, 2])
    options = {"start_on": "user"} if stage.has("start_on") else {}
    for turn in pairs(50):
        stage.fill("s", turn)
        window = stage.window("s", 20, **options)
        expect(window[:2] == [1, 2], f"a window begins with {window[:2]}, not with the pinned text")
        expect(len(window) <= 20, f"a window has {len(window)} tokens, the limit is 20")


@case(
    "B06",
    "Pinned text that fills the budget leaves no history, and says so where it is too long",
    section="A",
    cause="a helper meant for summaries filters system turns; a limit of one breaks it",
    reports=("microsoft/semantic-kernel#12612",),
    needs=("token_limit", "pin"),
)
def b06(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [1, 2, 3])
    stage.fill("s", user(7, 7, 7))
    window = stage.window("s", 3)
    expect(window == [1, 2, 3], f"a limit of 3 gives {window} where the pinned text has 3 tokens")
    window = []
    if not stage.refused(lambda: window.extend(stage.window("s", 4))):
        expect(window == [1, 2, 3], f"a limit of 4 gives {window} for 3 pinned and 3 other tokens")


@case(
    "L01",
    "Pinned text longer than the budget is refused",
    section="A",
    cause="the system text is kept whatever its length",
    reports=(),  # seen by running a library
    needs=("token_limit", "pin"),
)
def l01(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [1] * 30)
    stage.fill("s", user(7))
    window: list[int] = []
    if not stage.refused(lambda: window.extend(stage.window("s", 5))):
        expect(len(window) <= 5, f"a limit of 5 tokens gives {len(window)} without a word")


def seconds_of_window(stage: Stage, session: str) -> float:
    """Time the fastest of some windows."""
    spent = []
    for _ in range(5):
        begin = time.perf_counter()
        stage.window(session, 100)
        spent.append(time.perf_counter() - begin)
    return min(spent)


@case(
    "B08",
    "Four times the history costs at most a little more than four times",
    section="A",
    cause="the whole tail is counted again for each turn that is removed",
    reports=("run-llama/llama_index#12264",),
    needs=(LIMIT,),
)
def b08(stage: Stage) -> None:
    stage.fill("short", *pairs(150))
    stage.fill("long", *pairs(600))
    # Work in proportion to the history takes 4 times as long, counting tails anew 16 times.
    ratio = seconds_of_window(stage, "long") / seconds_of_window(stage, "short")
    expect(ratio < 8, "a window takes time with the square of the history's length")


@case(
    "B08b",
    "A window costs the same whatever the history's length",
    section="A",
    cause="the lengths of turns are not stored",
    reports=("run-llama/llama_index#12264",),
    needs=(LIMIT, "constant_cost"),
)
def b08_constant(stage: Stage) -> None:
    stage.fill("short", *pairs(100))
    stage.fill("long", *pairs(10_000))
    ratio = seconds_of_window(stage, "long") / seconds_of_window(stage, "short")
    expect(ratio < 3, "a window of 20,000 turns takes more than three times that of 200")


@case(
    "B09",
    "What is kept is the newest turns without a gap",
    section="A",
    cause="turns are removed from the middle until the rest fits",
    reports=("microsoft/autogen#7955",),
    needs=(LIMIT,),
)
def b09(stage: Stage) -> None:
    turns = pairs(40)
    stage.fill("s", *turns)
    for limit in (3, 10, 31, 79):
        window = stage.window("s", limit)
        expect(len(window) <= limit, f"a limit of {limit} gives {len(window)} tokens")
        expect_whole_suffix(window, turns, f"with a limit of {limit}")


@case(
    "B10",
    "A turn that crosses the limit keeps its tail where that is asked for",
    section="A",
    priority=2,
    cause="a turn that crosses the limit is dropped whole though its tail would fit",
    reports=("microsoft/autogen#2350",),
    needs=("token_limit", "partial"),
)
def b10(stage: Stage) -> None:
    stage.fill("s", user(*range(1, 10)))
    window = stage.window("s", 4, partial=True)
    expect(window == [6, 7, 8, 9], f"of nine tokens with room for four {window} is kept")


@case(
    "B13",
    "One token too many costs no more than is documented",
    section="A",
    cause="at one token over, the window drops to half without notice",
    reports=("ollama/ollama#17427",),
    needs=("token_limit",),
)
def b13(stage: Stage) -> None:
    turns = pairs(10, 2)
    stage.fill("s", *turns)
    window = stage.window("s", 40)
    expect(window == tokens(turns), "a history of exactly the limit is cut")
    window = stage.window("s", 39)
    expect_whole_suffix(window, turns, "one token over,")
    # A pair of turns may go with the turn that has to.
    least = int(stage.candidate.low_water * 39) - 3
    expect(len(window) >= least, f"one token over, {len(window)} of 40 tokens are left")
    if stage.has("report"):
        expect(stage.candidate.report().trimmed, "the report does not say that history is missing")


@case(
    "B14",
    "The window leaves room for the reply",
    section="A",
    cause="managing the context is left to the client",
    reports=("ggml-org/llama.cpp#17284",),
    needs=("token_limit", "reserve", "pin"),
)
def b14(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "system", [1, 2])
    for turn in pairs(20, 4):
        stage.fill("s", turn)
        window = stage.window("s", 32, reserve=8)
        expect(len(window) <= 24, f"32 tokens less 8 for the reply give {len(window)}")
        expect(window[:2] == [1, 2], "the pinned text is not there")


@case(
    "B15",
    "Every pinned segment counts",
    section="A",
    cause="system text and tool schemas are not counted",
    reports=("vybestack/llxprt-code#310", "adolfousier/opencrabs#1378"),
    needs=("token_limit", "pin"),
)
def b15(stage: Stage) -> None:
    stage.candidate.start("s")
    stage.candidate.pin("s", "tools", [3] * 7)
    stage.candidate.pin("s", "system", [4] * 3)
    stage.fill("s", *pairs(20, 4), user(99, 99, 99, 99))
    window = stage.window("s", 16)
    expect(len(window) <= 16, f"a limit of 16 gives {len(window)} tokens")
    expect(window.count(3) == 7 and window.count(4) == 3, "pinned text is missing")
    if stage.has("report"):
        parts = stage.candidate.report().by_segment
        expect(sum(parts.values()) == len(window), "the parts in the report do not add up")


@case(
    "B17",
    "A huge result yields to the budget",
    section="A",
    priority=2,
    cause="one huge tool result inside the protected tail still overflows",
    reports=("langchain-ai/deepagentsjs#228",),
    needs=("token_limit", "groups"),
)
def b17(stage: Stage) -> None:
    turns = [user(1), call("c", 2), result("c", *[3] * 1000)]
    stage.fill("s", *turns)
    window: list[int] = []
    if not stage.refused(lambda: window.extend(stage.window("s", 100))):
        expect(len(window) <= 100, f"a limit of 100 gives {len(window)} tokens")
        expect(not without_call(window, turns), "the result stands without its call")


@case(
    "B19",
    "No limit, a limit of nothing and a negative one are three things",
    section="A",
    priority=2,
    cause="0 becomes 'keep all'; negatives delete the oldest",
    reports=("microsoft/agent-framework#7470",),
    needs=(LIMIT,),
)
def b19(stage: Stage) -> None:
    stage.fill("s", *pairs(3))
    expect(len(stage.window("s", None)) == 6, "no limit does not give all")
    window: list[int] = []
    if not stage.refused(lambda: window.extend(stage.window("s", 0))):
        expect(window == [], f"a limit of 0 gives {len(window)} tokens")
    window = []
    if not stage.refused(lambda: window.extend(stage.window("s", -1))):
        expect(window == [], f"a limit of -1 gives {len(window)} of 6 tokens")


# ---- B. Tool calls and results -------------------------------------------------------------------


@case(
    "B20",
    "A limit never parts a result from its call",
    section="B",
    cause="the limit ignores pairs",
    reports=("openai/openai-agents-python#4322",),
    needs=(LIMIT, "groups"),
)
def b20(stage: Stage) -> None:
    turns = [user(1), call("c", 2, results=2), result("c", 3)]
    turns += [result("c", 4, number=1), assistant(5)]
    stage.fill("s", *turns)
    for limit in range(1, 6):
        window = stage.window("s", limit)
        bare = without_call(window, turns)
        expect(not bare, f"with a limit of {limit} the results {bare} stand without their call")
        expect(
            window[-1:] == [5], f"with a limit of {limit} the newest turn is not there: {window}"
        )
    if stage.has("read"):
        expect(len(stage.candidate.turns("s")) == 5, "reading changed what is stored")


@case(
    "B20b",
    "A result does not stand without its call behind a user's turn either",
    section="B",
    priority=2,
    cause="only results at the very front are looked at",
    reports=("openai/openai-agents-python#4322",),
    needs=(LIMIT, "groups"),
)
def b20_interleaved(stage: Stage) -> None:
    turns = [user(1), call("c", 2), user(3), result("c", 4), assistant(5)]
    stage.fill("s", *turns)
    for limit in (3, 4):
        window = stage.window("s", limit)
        bare = without_call(window, turns)
        expect(not bare, f"with a limit of {limit} the window is {window}: a result and no call")


@case(
    "B21",
    "A result without a name belongs to the nearest earlier call",
    section="B",
    cause="the search for a boundary looks only at content items, not at the tool role",
    reports=("microsoft/semantic-kernel#12708",),
    needs=(LIMIT, "bare_results"),
)
def b21(stage: Stage) -> None:
    stage.fill("s", user(5), assistant(6), Turn("tool", [7]), user(8), assistant(9))
    window = stage.window("s", 3)
    expect(window == [8, 9], f"with room for three tokens the window is {window}, not [8, 9]")


@case(
    "B23",
    "A result whose call a summary stands for is left out",
    section="B",
    priority=2,
    cause="a pair is kept when its other half lies outside the range",
    reports=("microsoft/semantic-kernel#13062",),
    needs=("summaries", "groups"),
)
def b23(stage: Stage) -> None:
    stage.fill("s", user(1), call("c", 2), result("c", 3), user(4))
    stage.candidate.summarize("s", 0, 2, [9])
    window = stage.window("s", None)
    expect(3 not in window, f"the result stands behind the summary of its call: {window}")
    expect(window == [9, 4], f"the window is {window}, not [9, 4]")


@case(
    "B27",
    "A window that needs no cut is all that was stored",
    section="B",
    priority=2,
    cause="a filter runs even when nothing needs reducing",
    reports=("dotnet/extensions#6890",),
    needs=(LIMIT, "groups"),
)
def b27(stage: Stage) -> None:
    turns = [user(1), call("c", 2), result("c", 3), assistant(4), user(5), user(6)]
    stage.fill("s", *turns)
    for limit in (6, 100):
        window = stage.window("s", limit)
        expect(window == [1, 2, 3, 4, 5, 6], f"a limit of {limit} for six tokens gives {window}")


@case(
    "B28",
    "Calls and metadata survive reopening, and pairs stay pairs",
    section="B",
    priority=2,
    cause="extra fields are dropped on save",
    reports=("run-llama/llama_index#12313",),
    needs=(LIMIT, "groups", "reopen"),
)
def b28(stage: Stage) -> None:
    extra = {"source": "a"}
    turns = [user(1), call("c", 2), result("c", 3), user(4)]
    for turn in turns:
        fields = dict(turn.fields)
        if stage.has("metadata"):
            fields["metadata"] = extra
        stage.candidate.append("s", turn.role, turn.token_ids, **fields)
    candidate = stage.reopen()
    if stage.has("metadata") and stage.has("read"):
        kept = [turn.metadata for turn in candidate.turns("s")]
        expect(kept == [extra] * 4, "the metadata is not there after reopening")
    window = stage.window("s", None)
    expect(window == [1, 2, 3, 4], f"after reopening the window is {window}")
    window = stage.window("s", 2)
    expect(3 not in window, f"after reopening the result stands without its call: {window}")
