"""Sections F and I: identifiers, tenants, deletion and expiry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kalos_ctx.conformance.case import case, expect
from kalos_ctx.conformance.stage import Stage, assistant, pairs, tokens, user

NAMES = ("../x", "/etc/x", "..", ".", "a\0b", "", "a" * 2**20, "\u00e4", "a\u0308", "A", "a", "a ")
SECRET = [1_912_345_671, 1_712_345_673, 1_512_345_677]  # so rare that a file holds them on purpose


@case(
    "B65",
    "A session's ID is an opaque name",
    section="F",
    cause="the ID is used as a path",
    reports=("langchain-ai/langchain#36890", "EricLBuehler/mistral.rs#1958"),
)
def b65(stage: Stage) -> None:
    taken = {}
    for number, name in enumerate(NAMES):
        if not stage.refused(stage.candidate.append, name, "user", [number]):
            taken[name] = number
    expect(len(taken) > 0, "every name is refused")
    for name, number in taken.items():
        window = stage.window(name, None)
        expect(window == [number], f"{name[:20]!a} shares its turns with another name: {window}")
    outside = sorted(path.name for path in stage.folder.iterdir() if path != stage.store_folder)
    expect(outside == [], f"files were written outside the folder: {outside}")


@case(
    "B67",
    "A hostile filter field is data",
    section="F",
    cause="filter keys are spliced into a query",
    reports=("langchain-ai/langgraph#5666", "HackTricks-wiki/hacktricks#2361"),
    needs=("recall", "filters"),
)
def b67(stage: Stage) -> None:
    stage.candidate.add_passages("notes", [[1.0, 0.0]], [[7]], metadata=[{"owner": "a"}])
    for field in ("x') OR 1=1 --", 'x" OR ""="', "$where", "__proto__"):
        hits: list[object] = []
        query = [1.0, 0.0]
        if not stage.refused(
            lambda field=field, hits=hits, query=query: hits.extend(
                stage.candidate.recall(query, 5, "notes", filters={field: "a"})
            )
        ):
            expect(hits == [], f"a filter on the field {field!r} finds {len(hits)} passages")


@case(
    "B68",
    "A filter on a field that is not there never gives everything",
    section="F",
    cause="an allow-list drops the condition",
    reports=("langchain-ai/langgraphjs#2504",),
    needs=("recall", "filters"),
)
def b68(stage: Stage) -> None:
    stage.candidate.add_passages(
        "notes", [[1.0, 0.0]] * 3, [[7], [8], [9]], metadata=[{"owner": "a"}] * 3
    )
    hits: list[object] = []

    def recall() -> None:
        hits.extend(stage.candidate.recall([1.0, 0.0], 5, "notes", filters={"owmer": "a"}))

    if not stage.refused(recall):
        expect(hits == [], f"a filter on an unknown field finds {len(hits)} passages")


@case(
    "B69",
    "A tenant's window never holds another's tokens",
    section="F",
    cause="one of several ways to search lacks the scope",
    reports=("getzep/graphiti#632",),
    needs=("tenants",),
)
def b69(stage: Stage) -> None:
    candidate = stage.candidate
    for number, tenant in enumerate(("a", "b")):
        low = 1000 * number
        for turn in range(4):
            candidate.append("s", "user", [low + turn], tenant=tenant)
        if stage.has("recall"):
            candidate.add_passages(
                "notes", [[1.0, 0.0]] * 3, [[low + 100 + n] for n in range(3)], tenant=tenant
            )
    for number, tenant in enumerate(("a", "b")):
        low = 1000 * number
        windows = [candidate.assemble("s", None, tenant=tenant)]
        if stage.has("recall"):
            windows.append(
                candidate.assemble(
                    "s", 60, tenant=tenant, query=[1.0, 0.0], top_k=8, collection="notes"
                )
            )
        for window in windows:
            foreign = [token for token in window if not low <= token < low + 1000]
            expect(foreign == [], f"tenant {tenant!r} is shown {foreign} of another")
            expect(len(window) >= 4, f"tenant {tenant!r} is not shown what is its own")


@case(
    "B72",
    "Threads get what one thread gets",
    section="F",
    priority=2,
    cause="a shared mutable object mixes users",
    reports=("FlowiseAI/Flowise#1497",),
    needs=("threads",),
)
def b72(stage: Stage) -> None:
    names = [f"s{number}" for number in range(64)]
    for number, name in enumerate(names):
        stage.fill(name, *(user(1000 * number + turn) for turn in range(8)))
    alone = [stage.window(name, 5) for name in names]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            together = list(pool.map(lambda name: stage.window(name, 5), names))
            expect(together == alone, "sixteen threads get other windows than one")


# ---- I. Deletion and expiry ----------------------------------------------------------------------


def holds(folder: Path, ids: list[int]) -> bool:
    """Whether a file below a folder holds one of the IDs, as int32 or as digits."""
    needles = [form for n in ids for form in (n.to_bytes(4, "little"), str(n).encode())]
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if any(needle in data for needle in needles):
                return True
    return False


@case(
    "B95",
    "Erasing one tenant leaves the others as they are",
    section="I",
    cause="drop and recreate behind a filtered delete",
    reports=("mem0ai/mem0#3928", "mem0ai/mem0#3746"),
    needs=("tenants", "delete_tenant"),
)
def b95(stage: Stage) -> None:
    for number, tenant in enumerate(("a", "b", "c")):
        for turn in range(5):
            stage.candidate.append("s", "user", [100 * number + turn], tenant=tenant)
    before = [stage.candidate.assemble("s", None, tenant=tenant) for tenant in ("a", "c")]
    stage.candidate.delete_tenant("b")
    after = [stage.candidate.assemble("s", None, tenant=tenant) for tenant in ("a", "c")]
    expect(before == after, "the windows of other tenants changed")
    gone: list[int] = []
    if not stage.refused(lambda: gone.extend(stage.candidate.assemble("s", None, tenant="b"))):
        expect(gone == [], "what the tenant had is still there")


@case(
    "B96",
    "What was deleted is in no window, no listing, no reading",
    section="I",
    cause="index and store disagree",
    reports=("mem0ai/mem0#3695",),
    needs=("delete",),
)
def b96(stage: Stage) -> None:
    candidate = stage.candidate
    kept = pairs(3)
    stage.fill("kept", *kept)
    stage.fill("gone", user(*SECRET), assistant(*SECRET))
    candidate.delete("gone")
    for again in range(2 if stage.has("reopen") else 1):
        candidate = stage.reopen() if again else candidate
        where = " after reopening" if again else ""
        window: list[int] = []
        if not stage.refused(lambda window=window: window.extend(stage.window("gone", None))):
            expect(window == [], f"a deleted session still gives a window{where}")
        if stage.has("listing"):
            names = candidate.sessions()[0]
            expect("gone" not in names, f"a deleted session is still listed{where}")
        window = stage.window("kept", None)
        expect(window == tokens(kept), f"another session changed{where}")


@case(
    "B96b",
    "What was deleted is gone from the bytes of the files",
    section="I",
    cause="a record is marked and its bytes stay",
    reports=("mem0ai/mem0#3695",),
    needs=("delete", "erase_bytes"),
)
def b96_bytes(stage: Stage) -> None:
    stage.fill("kept", user(1))
    stage.fill("gone", user(*SECRET), assistant(*SECRET))
    expect(holds(stage.store_folder, SECRET), "the tokens are in no file before the deletion")
    stage.candidate.delete("gone")
    expect(not holds(stage.store_folder, SECRET), "the tokens of a deleted session are in a file")


@case(
    "B98",
    "A turn is there until its time is over, and then nowhere",
    section="I",
    priority=2,
    cause="the option is not applied",
    reports=("FlowiseAI/Flowise#2255",),
    needs=("ttl",),
)
def b98(stage: Stage) -> None:
    stage.candidate.append("s", "user", [1])
    stage.candidate.append("s", "user", [2], ttl=1.0)
    stage.clock.advance(0.9)
    expect(stage.window("s", None) == [1, 2], "a turn is gone before its time is over")
    stage.clock.advance(0.2)
    window = stage.window("s", None)
    expect(window == [1], f"a turn whose time is over is still in the window {window}")
    if stage.has("read"):
        there = [turn.token_ids for turn in stage.candidate.turns("s")]
        expect(there == [[1]], "a turn whose time is over is still read")


@case(
    "B101",
    "An append to an expired session is refused",
    section="I",
    priority=2,
    cause='no distinction between "new" and "expired"',
    reports=("agentscope-ai/agentscope-runtime#329",),
    needs=("ttl",),
)
def b101(stage: Stage) -> None:
    stage.candidate.append("s", "user", [1], ttl=1.0)
    stage.clock.advance(2.0)
    expect(
        stage.refused(stage.candidate.append, "s", "user", [2]),
        "an append to an expired session silently starts a new one",
    )


@case(
    "B102",
    "Expired sessions are in no listing",
    section="I",
    priority=3,
    cause="a second index without expiry",
    reports=("redis/agent-memory-server#233",),
    needs=("ttl", "listing"),
)
def b102(stage: Stage) -> None:
    for number in range(50):
        stage.candidate.append(f"s{number}", "user", [1], ttl=1.0)
    stage.clock.advance(2.0)
    names = stage.candidate.sessions()[0]
    expect(names == [], f"{len(names)} expired sessions are listed")
