"""Section H: vectors, filters, scores, and what recall brings into a window."""

from __future__ import annotations

import math
import random
from typing import Any

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import Stage, pairs, user

X = [1.0, 0.0]
NAN, INF = math.nan, math.inf


def at_angle(degrees: float) -> list[float]:
    """Return a vector of length one whose cosine with `X` falls with the angle."""
    return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]


def found(stage: Stage, top_k: int, query: list[float] = X, **options: Any) -> list[Any]:
    """Return the IDs of the hits."""
    return [hit for hit, _ in stage.candidate.recall(query, top_k, "notes", **options)]


def add(stage: Stage, *angles: float, **options: Any) -> list[Any]:
    """Add passages at angles; each has a token of its own."""
    vectors = [at_angle(angle) for angle in angles]
    rows = [[70 + number] for number in range(len(angles))]
    return stage.candidate.add_passages("notes", vectors, rows, **options)


def recalled(stage: Stage, limit: int, top_k: int = 8) -> list[int]:
    """Assemble a window with recall."""
    return stage.candidate.assemble("s", limit, query=X, top_k=top_k, collection="notes")


@case(
    "B77",
    "A huge passage is held to the budget",
    section="G",
    priority=2,
    cause="recalled text is added after the budget was checked",
    reports=("letta-ai/letta#1635",),
    needs=("token_limit", "recall"),
)
def b77(stage: Stage) -> None:
    stage.fill("s", user(*[1] * 10))
    stage.candidate.add_passages("notes", [X], [[7] * 10_000])
    window: list[int] = []
    if not stage.refused(lambda: window.extend(recalled(stage, 100))):
        expect(len(window) <= 100, f"a limit of 100 gives {len(window)} tokens")
        expect(window.count(1) == 10, "the newest turn went to make room for a passage")


@case(
    "B80",
    "A filter acts before the cut to the nearest k",
    section="H",
    cause="the filter comes after the cut",
    reports=("mem0ai/mem0#7416", "mem0ai/mem0#7083"),
    needs=("recall", "filters"),
)
def b80(stage: Stage) -> None:
    metadata = [{"kind": "no" if number < 4 else "yes"} for number in range(10)]
    ids = add(stage, *(5.0 * number for number in range(10)), metadata=metadata)
    hits = found(stage, 5, filters={"kind": "yes"})
    expect(hits == ids[4:9], f"the nearest five that pass give {len(hits)} hits, not those five")


@case(
    "B81",
    "Deleted passages take no place",
    section="H",
    cause="deleted rows still take slots, or surface",
    reports=("tteon/seocho#122", "weaviate/weaviate#10767", "ruvnet/ruflo#2815"),
    needs=("recall", "delete_passages"),
)
def b81(stage: Stage) -> None:
    ids = add(stage, *(5.0 * number for number in range(6)))
    stage.candidate.delete_passages("notes", ids[:3])
    for top_k in (3, 4):
        hits = found(stage, top_k)
        expect(hits == ids[3:], f"three of six passages are left, top_k={top_k} gives {len(hits)}")


@case(
    "B83",
    "A zero vector never stands before a match, and a zero query finds nothing",
    section="H",
    cause="0/0 in the cosine",
    reports=("run-llama/llama_index#23050", "spiceai/spiceai#11621", "qdrant/qdrant#4654"),
    needs=("recall",),
)
def b83(stage: Stage) -> None:
    ids: list[Any] = []
    if stage.refused(
        lambda: ids.extend(
            stage.candidate.add_passages("notes", [[0.0, 0.0], at_angle(60)], [[70], [71]])
        )
    ):
        return
    hits = stage.candidate.recall(X, 2, "notes")
    expect(all(math.isfinite(score) for _, score in hits), "a score is not a finite number")
    expect(hits[0][0] == ids[1], "a zero vector stands before a match")
    none: list[Any] = []
    if not stage.refused(lambda: none.extend(found(stage, 2, [0.0, 0.0]))):
        expect(none == [], f"a zero query finds {len(none)} passages")


@case(
    "B84",
    "Vectors that are not finite are refused, and searches go on working",
    section="H",
    cause="non-finite values are accepted",
    reports=(
        "chroma-core/chroma#7420",
        "ClickHouse/ClickHouse#104079",
        "langchain-ai/langchain#31822",
        "spiceai/spiceai#13872",
    ),
    needs=("recall",),
)
def b84(stage: Stage) -> None:
    ids = add(stage, 0.0)
    for bad in ([NAN, 1.0], [INF, 0.0], [1.0, NAN]):
        taken = not stage.refused(stage.candidate.add_passages, "notes", [bad], [[1]])
        expect(not taken, f"the vector {bad} is stored")
        expect(stage.refused(found, stage, 1, bad), f"the query {bad} is taken")
    expect(found(stage, 5) == ids, "a refused vector is found")


@case(
    "B86",
    "A least score of 0 is not the same as none",
    section="H",
    priority=2,
    cause="0 counts as false",
    reports=("redis/redis-vl-python#650",),
    needs=("recall", "min_score"),
)
def b86(stage: Stage) -> None:
    ids = add(stage, 0.0, 80.0, 120.0)
    expect(found(stage, 5, min_score=None) == ids, "without a least score not all are found")
    for least in (0, 0.0):
        hits = found(stage, 5, min_score=least)
        expect(hits == ids[:2], f"a least score of {least!r} gives {len(hits)} of 3 hits, not 2")


@case(
    "B87",
    "A vector of another length is refused",
    section="H",
    cause="a hard-coded dimension",
    reports=("mem0ai/mem0#4195", "mem0ai/mem0#4212", "SciPhi-AI/R2R#861"),
    needs=("recall",),
)
def b87(stage: Stage) -> None:
    ids = add(stage, 0.0)
    expect(
        stage.refused(stage.candidate.add_passages, "notes", [[1.0, 2.0, 3.0]], [[1]]),
        "a vector of three numbers is stored beside one of two",
    )
    expect(stage.refused(found, stage, 1, [1.0, 2.0, 3.0]), "a query of another length is taken")
    expect(found(stage, 5) == ids, "behind a refused vector the search gives something else")


@case(
    "B89",
    "A passage that stands in the window already is not inserted again",
    section="H",
    cause="recall and history are not compared",
    reports=("NousResearch/hermes-agent#111205", "NousResearch/hermes-agent#88471"),
    needs=("token_limit", "recall"),
)
def b89(stage: Stage) -> None:
    stage.fill("s", user(1, 2, 3))
    rows = [[1, 2, 3], *([[9, 9, 1]] * 5), [9, 9, 2]]
    stage.candidate.add_passages("notes", [at_angle(n) for n in range(len(rows))], rows)
    window = recalled(stage, 100)
    text = ",".join(map(str, window))
    expect(text.count("1,2,3") == 1, "a turn of the window is inserted a second time")
    expect(text.count("9,9,1") == 1, "copies of one passage are inserted several times")
    expect(text.count("9,9,2") == 1, "a passage that differs in one number is left out")


@case(
    "B90",
    "What was recalled is never stored",
    section="H",
    cause="the injected block is stored as content and recalled later",
    reports=("rtk-ai/icm#312",),
    needs=("token_limit", "recall", "read"),
)
def b90(stage: Stage) -> None:
    stage.candidate.add_passages("notes", [X], [[700, 701]])
    for number in range(10):
        stage.fill("s", user(number))
        window = recalled(stage, 200)
        expect(window.count(700) == 1, "a passage stands in a window more than once, or not at all")
    kept = [list(turn.token_ids) for turn in stage.candidate.turns("s")]
    expect(kept == [[number] for number in range(10)], "windows changed what is stored")


@case(
    "B92",
    "No window with recall is longer than its budget",
    section="H",
    cause="the budget is applied before recall is added",
    reports=("mastra-ai/mastra#9892",),
    needs=("token_limit", "recall"),
)
def b92(stage: Stage) -> None:
    rng = random.Random(92)
    stage.fill("s", *pairs(10, 3))
    for number in range(12):
        ids = [500 + number] * rng.randrange(1, 30)
        stage.candidate.add_passages("notes", [at_angle(number)], [ids])
    for limit in range(10, 120, 11):
        window = recalled(stage, limit, rng.randrange(1, 12))
        expect(len(window) <= limit, f"a limit of {limit} gives {len(window)} tokens")


@case(
    "B94",
    "Scores fall with rank",
    section="H",
    priority=3,
    cause="a field that is named for something else",
    reports=("agiresearch/A-mem#23",),
    needs=("recall",),
)
def b94(stage: Stage) -> None:
    ids = add(stage, 40.0, 10.0, 70.0, 20.0)
    hits = stage.candidate.recall(X, 4, "notes")
    scores = [score for _, score in hits]
    expect([hit for hit, _ in hits] == [ids[n] for n in (1, 3, 0, 2)], "the nearest is not first")
    expect(scores == sorted(scores, reverse=True), "a later hit has a higher score")
