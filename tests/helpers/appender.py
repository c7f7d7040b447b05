"""A process that appends turns made of their numbers, and what must be found of them."""

from pathlib import Path

# Appends turn i to session s<i % 5>, its content made of i, and says so once the call has returned.
APPENDER = """
import os, sys
from kalos_ctx.store import SessionStore
path, durability, first, stop, ack = sys.argv[1:6]
store = SessionStore.open(path, durability=durability, segment_bytes=65536)
fd = os.open(ack, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for i in range(int(first), int(stop)):
    if i % 7 == 3:
        store.extend(f"s{i % 5}", [{"role": "user", "token_ids": [i, part]} for part in range(3)])
    else:
        store.append(f"s{i % 5}", "user", token_ids=list(range(i, i + 1 + i % 40)),
                     metadata={"i": i, "pad": "x" * (i * 37 % 1500)})
    os.write(fd, b"%d\\n" % i)
os._exit(0)
"""


def expected_turns(stop: int) -> list[tuple[int, list[list[int]]]]:
    """What the appender writes, call by call: (session, the token IDs of its turns)."""
    return [
        (i % 5, [[i, p] for p in range(3)] if i % 7 == 3 else [list(range(i, i + 1 + i % 40))])
        for i in range(stop)
    ]


def found_calls(store, stop: int) -> int:
    """Return how many of the appender's calls the store holds: all in order, none in part."""
    have = {k: [t.token_ids.tolist() for t in store.turns(f"s{k}")] if store.count(f"s{k}") else []
            for k in range(5)}  # fmt: skip
    want = expected_turns(stop)
    left = {k: list(turns) for k, turns in have.items()}
    for n, (session, turns) in enumerate(want):
        if left[session][: len(turns)] != turns:
            assert left == {k: [] for k in range(5)}, f"call {n} is missing or in part"
            return n
        del left[session][: len(turns)]
    assert left == {k: [] for k in range(5)}
    return stop


def acknowledged(ack) -> int:
    """Return how many calls were acknowledged."""
    text = Path(ack).read_text() if Path(ack).exists() else ""
    return text.count("\n")
