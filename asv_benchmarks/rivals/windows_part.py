"""Windows by every road: against the number of turns, by stage, and with many callers at once."""

from __future__ import annotations

import contextlib
import tempfile

import numpy as np

from rivals import measure
from rivals.chats import Chat
from rivals.framework_roads import framework_roads
from rivals.kalos_roads import KalosRoad, KalosRoads
from rivals.redis_roads import RedisServer, redis_roads
from rivals.road import MissingRival
from rivals.store_roads import store_roads

TURNS = (10, 100, 1_000, 10_000, 100_000)
CALLERS = (1, 2, 4, 8, 16, 32, 64)
CALLERS_TURNS = 1_000
STAGES_AT = 1_000
BESIDE = (
    "text from Redis",
    "raw int32 from Redis",
    "LMDB, a blob a session",
    "LMDB, a row a turn",
    "SQLite, a row a turn",
    "Kalos behind grpcio",
    "Kalos, sidecar, served",
    "Kalos, sidecar, direct",
    "Kalos, in process",
)


@contextlib.contextmanager
def all_roads(say, wanted=None, *, frameworks=True):
    """Give the roads without Kalos, Kalos's, and what ends them, over a folder of their own."""
    with (
        tempfile.TemporaryDirectory(prefix="kalos-rivals-") as folder,
        contextlib.ExitStack() as ends,
    ):
        roads = []
        try:
            server = RedisServer(folder)
            ends.callback(server.close)
            roads += redis_roads(server)
        except MissingRival as error:
            server = None
            say(f"  ({error} is not installed: rows that need it are left out)")
        roads += framework_roads(folder, server) if frameworks else []
        roads += store_roads(folder)
        roads = [road for road in roads if wanted is None or road.name in wanted]
        for road in roads:
            ends.callback(road.close)
        kalos = KalosRoads(folder)
        ends.callback(kalos.close)
        yield roads, kalos, ends


def check(road, chat):
    """Refuse a road whose window is not the one that all must give; a shorter one by policy may."""
    ids = road.answer(chat.name)
    right = chat.window()
    if isinstance(road, KalosRoad) and road.policy.stable_prefix:
        right = right[len(right) - len(ids) :]
    if ids.dtype != np.int32 or not np.array_equal(ids, right):
        raise AssertionError(f"{road.name} gives another window of {chat.name}")
    return len(ids)


def growing(say, out, *, quick=False):
    """Every road over sessions of 10 to 100,000 turns, and its stages at one size."""
    sizes = TURNS[:3] if quick else TURNS
    seconds = 0.15 if quick else 0.9
    chats = [Chat(f"turns-{n}", n) for n in sizes]
    with all_roads(say) as (roads, kalos, ends):
        for chat in chats:
            kalos.fill(chat)
        served = kalos.ready()
        for road in served:
            ends.callback(road.close)
        spent = {road.name: {} for road in (*roads, *served)}
        out["roads"] = [
            {"road": road.name, "group": road.group, "note": road.note}
            for road in (*roads, *served)
        ]
        out["turns"] = []
        for chat in chats:
            now = []
            for road in (*roads, *served):
                guess = measure.expected(spent[road.name], chat.turns)
                if guess > measure.LIMIT_S:
                    limit = f"> {measure.LIMIT_S:.0f} s"
                    say(f"{road.name:36} {chat.turns:8,}   not run at this size ({limit})")
                    out["turns"].append(
                        {"road": road.name, "turns": chat.turns, "not_run": limit,
                         "expected_s": measure.rounded(guess)}
                    )  # fmt: skip
                    continue
                road.fill(chat)
                now.append((road, check(road, chat)))
            calls = {road.name: (lambda road=road: road.window(chat.name)) for road, _ in now}  # noqa: B023
            found = measure.in_turn(calls, seconds)
            for road, tokens in now:
                row = {"road": road.name, "turns": chat.turns, "tokens": tokens, **found[road.name]}
                spent[road.name][chat.turns] = row["p50"] / 1e6
                if chat.turns == STAGES_AT:
                    row["stages"] = road.stages(chat.name, seconds)
                out["turns"].append(row)
                say(f"{road.name:36} {chat.turns:8,} {row['p50']:12.2f} {row['p99']:12.2f}"
                    f"  {row['calls']:5} calls")  # fmt: skip


def at_once(say, out, *, quick=False):
    """The faster roads from 1 to 64 threads of this process, each with a session of its own."""
    levels = (1, 4) if quick else CALLERS
    seconds = 0.2 if quick else 1.5
    chats = [Chat(f"caller-{i}", CALLERS_TURNS, i * 389) for i in range(max(levels))]
    with all_roads(say, BESIDE, frameworks=False) as (roads, kalos, ends):
        for chat in chats:
            kalos.fill(chat, text_turns=0)
            for road in roads:
                road.fill(chat)
        served = [road for road in kalos.ready() if road.name in BESIDE]
        for road in served:
            ends.callback(road.close)
        out["callers"] = []
        for callers in levels:
            for road in (*roads, *served):
                check(road, chats[callers - 1])
                found = measure.together(
                    lambda i, road=road: road.window(chats[i].name), callers, seconds
                )
                out["callers"].append({"road": road.name, "callers": callers, **found})
                say(f"{road.name:36} {callers:8} {found['p50']:12.2f} {found['p99']:12.2f}"
                    f"  {found['a_second']:8,} a second")  # fmt: skip


def writes(say, out, *, quick=False):
    """One more turn for a session that has 1,000 or 100,000."""
    sizes = (100, 1_000) if quick else (1_000, 100_000)
    calls = 50 if quick else 1_000
    with all_roads(say, frameworks=False) as (roads, kalos, _):
        roads = [road for road in roads if road.group == "ids" or road.name == "text from Redis"]
        out["writes"] = []
        for turns in sizes:
            chat = Chat(f"written-{turns}", turns)
            new = list(Chat("new", 200, 5000))
            kalos.fill(chat, text_turns=0)
            ways = []
            for road in roads:
                if "TCP" not in road.name:
                    road.fill(chat)
                    ways.append((road.name, road.append))
            ways.append(
                ("Kalos, in process, from text", kalos_append(kalos.store.writer, text=True))
            )
            ways.append(("Kalos, in process", kalos_append(kalos.store.writer)))
            for name, append in ways:
                at = iter(range(10**9))

                def one(append=append, at=at, chat=chat):
                    message, ids = new[next(at) % len(new)]  # noqa: B023
                    append(chat.name, message, ids)

                least = 20 if quick else 100
                took = measure.spell(one, calls / 1000, least)
                row = {"road": name, "turns": turns, **measure.figures(took)}
                out["writes"].append(row)
                say(f"{name:36} {turns:8,} {row['p50']:12.2f} {row['p99']:12.2f}")


def kalos_append(writer, *, text=False):
    """Append token IDs, as the other stores of IDs do, or text, which is tokenised then."""

    def append(session, message, ids):
        if text:
            writer.append(session, message["role"], message["content"])
        else:
            writer.append(session, message["role"], token_ids=ids, framed=True)

    return append
