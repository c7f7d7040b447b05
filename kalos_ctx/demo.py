"""`kalos demo`: the main job on bundled real chats, and a writer that is killed while it appends.

Run as a module with the path of a store it is that writer: it appends turns without end, and
acknowledges each on standard output as soon as `append` has returned.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx import demo_data, terminal
from kalos_ctx.store import SessionStore

if TYPE_CHECKING:
    from kalos_ctx._assembler import ContextWindow
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.planner import Policy

LONG_CHAT = "chitchat-ece0ee74"
COLLECTION = "other chats"
MAX_TOKENS, RESERVE, TOP_K = 4096, 512, 3
NUM_ROWS = 8
CRASH_SESSION = "appended until the kill"
KILLS = 3
ACKS_BEFORE_KILL = 1000
CRASH_TIMEOUT_S = 10.0
READ_NBYTES = 1 << 16


def run_demo(
    keep: Path | None = None, step: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Run the demonstration and return its figures as plain JSON values.

    Parameters
    ----------
    keep : path, optional
        Where the store is made; a temporary folder, removed at the end, if left out.
    step : callable, optional
        Told what begins.

    Raises
    ------
    KalosError, OSError
    """
    begin = time.perf_counter()
    place = tempfile.TemporaryDirectory(prefix="kalos-demo-") if keep is None else nullcontext("")
    with place as folder:
        path = Path(folder) / "chats.kalos" if keep is None else keep
        step("loading a tokenizer and proving its chat template")
        with SessionStore.open(path, tokenizer=str(demo_data.tokenizer_dir())) as store:
            step("filling a store with real chats and passages")
            filled = fill(store)
            step("replaying a chat turn by turn")
            windows, reuse, device = replay(store)
        step("killing a writer in the middle of its appends")
        crash = kill_a_writer(path)
    return {
        "store": None if keep is None else str(keep),
        "filled": filled,
        "session": LONG_CHAT,
        "max_tokens": MAX_TOKENS,
        "reserve": RESERVE,
        "device": device,
        "windows": windows,
        "reuse": reuse,
        "crash": crash,
        "seconds": round(time.perf_counter() - begin, 2),
    }


def fill(store: SessionStore) -> dict[str, Any]:
    """Add every bundled chat but the one to be replayed, and the passages of other chats."""
    begin = time.perf_counter()
    turns = 0
    chats = [chat for chat in demo_data.conversations() if chat["id"] != LONG_CHAT]
    for chat in chats:
        turns += len(store.extend(chat["id"], [as_turn(one) for one in chat["messages"]]))
    found = demo_data.passages()
    rows = [i for i, passage in enumerate(found) if passage["conv"] != LONG_CHAT]
    store.add_passages(
        COLLECTION,
        demo_data.passage_vectors()[rows].astype(np.float32),
        texts=[found[i]["text"] for i in rows],
        metadata=[{"chat": found[i]["conv"]} for i in rows],
    )
    return {
        "sessions": len(chats),
        "turns": turns,
        "passages": len(rows),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def as_turn(message: dict[str, Any]) -> dict[str, Any]:
    """Return a bundled message as arguments of `append`."""
    metadata = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {
        "role": message["role"],
        "content": message["content"],
        "metadata": metadata or None,
    }


def moments() -> dict[int, NDArray[np.float32]]:
    """Return embeddings of what was just said in the long chat, by the turn that ended it."""
    found = {
        passage["last_turn"]: vector.astype(np.float32)
        for passage, vector in zip(demo_data.passages(), demo_data.passage_vectors(), strict=True)
        if passage["conv"] == LONG_CHAT
    }
    for query, vector in zip(demo_data.queries(), demo_data.query_vectors(), strict=True):
        if query["conv"] == LONG_CHAT:
            found[query["turn"]] = vector.astype(np.float32)
    return found


# ---- A chat that grows --------------------------------------------------------------------------


def replay(store: SessionStore) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Append the long chat turn by turn and build the window that each user turn asks for.

    Returns
    -------
    windows : list of dict
        Some of those with recall, spread over the chat.
    reuse : dict
        Share of prompt tokens that began like the window before: `stable` and `sliding` cuts
        without recall, and `recalling`, stable cuts with it.
    device : str
    """
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.planner import Policy

    chat = next(one for one in demo_data.conversations() if one["id"] == LONG_CHAT)
    messages, known = chat["messages"], moments()
    user_turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    wanted = shown_turns([i for i in user_turns if i in known])
    stable = Policy(generation_prompt=True)
    policies = {
        "stable": stable,
        "sliding": Policy(generation_prompt=True, stable_prefix=False),
        "recalling": stable,
    }
    tokens, reused = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)
    rows: list[dict[str, Any]] = []
    query = None
    with ExitStack() as stack:
        # One assembler each, since it compares a window with its own one before.
        assemblers = {name: stack.enter_context(ContextAssembler(store)) for name in policies}
        for i, message in enumerate(messages):
            turn = as_turn(message)
            store.append(LONG_CHAT, turn["role"], turn["content"])
            query = known.get(i, query)
            if message["role"] != "user":
                continue
            for name, policy in policies.items():
                asked = query if name == "recalling" else None
                with _window(assemblers[name], asked, policy) as window:
                    tokens[name] += len(window)
                    reused[name] += window.report.reused_tokens
                    if name == "recalling" and i in wanted:
                        rows.append(window_row(store, i, window))
        device = str(assemblers["stable"].device)
    shares = {name: round(reused[name] / tokens[name], 4) for name in policies}
    return rows, {"windows": len(user_turns), "prompt_tokens": tokens, "share": shares}, device


def _window(
    assembler: ContextAssembler, query: NDArray[np.float32] | None, policy: Policy
) -> ContextWindow:
    recalls = query is not None
    return assembler.assemble(
        LONG_CHAT,
        max_tokens=MAX_TOKENS,
        reserve=RESERVE,
        query=query,
        top_k=TOP_K if recalls else 0,
        collections=(COLLECTION,) if recalls else (),
        policy=policy,
    )


def shown_turns(turns: list[int]) -> set[int]:
    """Return up to NUM_ROWS of the turns, spread evenly, the last one among them."""
    count = min(NUM_ROWS, len(turns))
    return {turns[(place + 1) * len(turns) // count - 1] for place in range(count)}


def window_row(store: SessionStore, turn: int, window: ContextWindow) -> dict[str, Any]:
    """Return what the table says of one window."""
    report = window.report
    kinds = [one.kind for one in report.segments]
    recalled = [one.id for one in report.segments if one.id is not None]
    texts = {
        hit: passage.text
        for hit, passage in zip(recalled, store.passages(COLLECTION, recalled), strict=True)
    }
    return {
        "turn": turn,
        "tokens": len(window),
        "history_turns": kinds.count("turn"),
        "reused_tokens": report.reused_tokens,
        "recalled": [{"id": one, "text": text} for one, text in texts.items()],
        "timings_us": {name: round(us, 1) for name, us in report.timings.items()},
    }


# ---- A writer that is killed --------------------------------------------------------------------


def kill_a_writer(path: Path) -> dict[str, Any]:
    """Kill writers while they append, and compare the store with what they acknowledged."""
    acknowledged = found = lost = wrong = 0
    opened_ms = []
    for _ in range(KILLS):
        acknowledged = found + acknowledgements(path)
        begin = time.perf_counter()
        with SessionStore.open(path) as store:
            opened_ms.append(round((time.perf_counter() - begin) * 1e3, 2))
            turns = store.turns(CRASH_SESSION)
            wrong += sum(
                not np.array_equal(turn.token_ids, ids)
                for turn, (_, ids) in zip(turns, endless_turns(store, 0), strict=False)
            )
        found = len(turns)
        lost += max(0, acknowledged - found)
    return {
        "kills": KILLS,
        "acknowledged": acknowledged,
        "found": found,
        "wrong": wrong,
        "lost": lost + wrong,
        "opened_ms": opened_ms,
    }


def acknowledgements(path: Path) -> int:
    """Run a writer until it has acknowledged enough, kill it; return what it acknowledged.

    Raises
    ------
    CommandFailed
        The writer ended by itself, or acknowledged too little in time.
    """
    package = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    search = package if not inherited else f"{package}{os.pathsep}{inherited}"
    with subprocess.Popen(
        [sys.executable, "-m", "kalos_ctx.demo", str(path)],
        # With -m the interpreter looks into its working folder first, and in a checkout would find
        # sources that were not built there.
        cwd=path.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search},
    ) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        pipe = writer.stdout.fileno()
        count = _counted(pipe, time.monotonic() + CRASH_TIMEOUT_S, ACKS_BEFORE_KILL)
        enough = count >= ACKS_BEFORE_KILL
        if enough:
            # The kill hits an arbitrary moment of an append, not the one after an acknowledgement.
            count += _counted(pipe, time.monotonic() + random.uniform(0.01, 0.05))
        writer.kill()
        # What was acknowledged before the kill but not read yet counts too.
        count += _counted(pipe, math.inf)
        reason = writer.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    if not enough or writer.returncode != -signal.SIGKILL:
        slow = not enough and writer.returncode == -signal.SIGKILL
        how = "was too slow" if slow else f"ended by itself with status {writer.returncode}"
        why = f" ({reason})" if reason else ""
        raise terminal.CommandFailed(
            f"the writer {how} after {count} appends{why}; run 'kalos doctor'"
        )
    return count


def _counted(pipe: int, deadline: float, enough: float = math.inf) -> int:
    """Read acknowledgements until there are enough, time is up or the writer is gone."""
    count = 0
    while count < enough and time.monotonic() < deadline:
        if not select.select([pipe], [], [], 0.01)[0]:
            continue
        data = os.read(pipe, READ_NBYTES)
        if not data:
            break
        count += data.count(b"\n")
    return count


def endless_turns(store: SessionStore, first: int) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Yield role and token IDs of the long chat's turns, again and again, from the `first`."""
    turns = [(turn.role, turn.token_ids) for turn in store.turns(LONG_CHAT)]
    return itertools.islice(itertools.cycle(turns), first % len(turns), None)


def write_until_killed(path: str) -> None:
    """Append turns to a store without end and acknowledge each with a line of its own."""
    with SessionStore.open(path) as store:
        for role, ids in endless_turns(store, store.count(CRASH_SESSION)):
            seq = store.append(CRASH_SESSION, role, token_ids=ids, framed=True)
            os.write(1, b"%d\n" % seq)


# ---- For people ---------------------------------------------------------------------------------


def print_demo(found: dict[str, Any]) -> None:
    """Print the figures of `run_demo`."""
    filled, reuse, crash = found["filled"], found["reuse"], found["crash"]
    say = terminal.say
    say(
        f"Store: {filled['sessions']} real chats ({filled['turns']:,} turns) tokenised once, "
        f"{filled['passages']} passages with their embeddings, in {filled['seconds']} s."
    )
    say("")
    say(
        f"A chat of {reuse['windows']} user turns is replayed. Each gets a window of at most "
        f"{found['max_tokens']} tokens, {found['reserve']} of them kept free for the reply "
        f"({found['device']}). Some of them:"
    )
    stages = list(found["windows"][0]["timings_us"]) if found["windows"] else []
    terminal.table(
        ("turn", "tokens", "reused", "of turns", *(f"{stage} us" for stage in stages)),
        (
            (w["turn"], w["tokens"], w["reused_tokens"], w["history_turns"],
             *(f"{us:.1f}" for us in w["timings_us"].values()))
            for w in found["windows"]
        ),
        numbers=range(4 + len(stages)),
    )  # fmt: skip
    say("")
    say("What was recalled from other chats, by the meaning of what was just said:")
    terminal.table(
        ("turn", "passage", "text"),
        (
            (w["turn"], passage["id"], terminal.short(passage["text"], 90))
            for w in found["windows"]
            for passage in w["recalled"]
        ),
        numbers=(0, 1),
    )
    say("")
    share = reuse["share"]
    say(
        f"Of all prompt tokens {share['stable']:.1%} began like the window before, so that a "
        f"model's prefix cache can keep them; {share['sliding']:.1%} where the oldest turn is cut "
        f"each time. With recall: {share['recalling']:.1%}, since recalled text is new to it."
    )
    say("")
    outcome = "nothing was lost" if not crash["lost"] else f"{crash['lost']} were lost"
    say(
        f"A writer was killed with SIGKILL in the middle of its appends, {crash['kills']} times, "
        f"after {crash['acknowledged']:,} acknowledged ones in all; the store opened again in "
        f"{max(crash['opened_ms'])} ms or less and holds {crash['found']:,}: {outcome}."
    )
    if found["store"] is not None:
        say(terminal.shown(f"The store is at {found['store']}: kalos sessions {found['store']}"))
    say(f"{found['seconds']} s in all.")


if __name__ == "__main__":
    write_until_killed(sys.argv[1])
