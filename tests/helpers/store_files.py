"""A store seen from outside: the bytes of its files, and another process that reads it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import kalos_ctx

PACKAGE = Path(kalos_ctx.__file__).resolve().parent


def all_bytes(path) -> dict[str, bytes]:
    """Return every file of a store with its bytes, by its name inside the store."""
    root = Path(path)
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def content_digest(path) -> str:
    """Return a digest over what calls have stored: log, token and vector segments."""
    seal = hashlib.sha256()
    for name, raw in all_bytes(path).items():
        if Path(name).name[:4] in ("log-", "tok-", "vec-"):
            # Space that was reserved ahead is zeros and tells nothing.
            seal.update(name.encode() + b"\0" + raw.rstrip(b"\0") + b"\1")
    return seal.hexdigest()


def files_holding(path, *needles) -> list[tuple[str, int]]:
    """Return (file, place of the needle) wherever bytes, text or int32 IDs stand in a store."""
    found = []
    for i, needle in enumerate(needles):
        raw = needle
        if isinstance(needle, str):
            raw = needle.encode()
        elif not isinstance(needle, bytes):
            raw = np.asarray(needle, "<i4").tobytes()
        found += [(name, i) for name, data in all_bytes(path).items() if raw in data]
    return found


CHILD = """
import json, sys
import numpy as np
from kalos_ctx.store import SessionStore
store = SessionStore.open(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
print("ready", flush=True)
for line in sys.stdin:
    try:
        answer = ["value", eval(json.loads(line))]
    except Exception as error:
        answer = ["error", type(error).__name__]
    print(json.dumps(answer), flush=True)
store.close()
"""


class OtherProcess:
    """A store open in a process of its own; `ask` evaluates an expression over `store` there."""

    def __init__(self, path, mode: str = "r", **options) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), mode, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
            text=True,
        )
        assert self._child.stdout.readline() == "ready\n"

    def ask(self, expression: str):
        """Return the value (as JSON carries it), or the name of the error's class as a str."""
        self._child.stdin.write(json.dumps(expression) + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())[1]

    def begin(self, expression: str) -> None:
        """Start an evaluation without waiting; `finish` gives its value."""
        self._child.stdin.write(json.dumps(expression) + "\n")
        self._child.stdin.flush()

    def finish(self):
        """Return the value of what `begin` started."""
        return json.loads(self._child.stdout.readline())[1]

    def __enter__(self) -> "OtherProcess":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._child.stdin.close()
        self._child.wait(30)
        self._child.stdout.close()
