"""Where a case plays: a fresh candidate in a folder of its own, and short words for turns."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kalos_ctx.conformance.adapter import Candidate, Factory, Setup
from kalos_ctx.conformance.case import NotApplicable

CHILD_TIMEOUT_S = 120


class ManualClock:
    """A clock that a case moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to be appended."""

    role: str
    token_ids: list[int]
    fields: dict[str, Any] = field(default_factory=dict)


def user(*ids: int) -> Turn:
    """Return a user turn."""
    return Turn("user", list(ids))


def assistant(*ids: int) -> Turn:
    """Return an assistant turn."""
    return Turn("assistant", list(ids))


def call(group: str, *ids: int, results: int = 1) -> Turn:
    """Return an assistant turn that issues one call or several."""
    calls = [f"{group}-{number}" for number in range(results)]
    return Turn("assistant", list(ids), {"group": group, "calls": calls})


def result(group: str, *ids: int, number: int = 0) -> Turn:
    """Return the result of a call."""
    return Turn("tool", list(ids), {"group": group, "call": f"{group}-{number}"})


def pairs(count: int, length: int = 1) -> list[Turn]:
    """Return user and assistant turns in turn, each of a token of its own."""
    return [
        made(*[10 + 2 * number + place] * length)
        for number in range(count)
        for place, made in enumerate((user, assistant))
    ]


def tokens(turns: Sequence[Turn]) -> list[int]:
    """Return the tokens of turns, one after the other."""
    return [token for turn in turns for token in turn.token_ids]


def suffixes(turns: Sequence[Turn]) -> list[list[int]]:
    """Return what a window of whole turns without a gap may be, longest first."""
    return [tokens(turns[start:]) for start in range(len(turns) + 1)]


def without_call(window: Sequence[int], turns: Sequence[Turn]) -> list[int]:
    """Return the first tokens of results that stand in a window without their call.

    Every turn is to begin with a token of its own.
    """
    there = set(window)
    called = {
        name
        for turn in turns
        if turn.token_ids[0] in there
        for name in (*turn.fields.get("calls", ()), turn.fields.get("group"))
        if turn.role == "assistant"
    }
    return [
        turn.token_ids[0]
        for turn in turns
        if turn.role == "tool"
        and there.intersection(turn.token_ids)
        and turn.fields.get("call") not in called
    ]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


class Stage:
    """What a check is given.

    Parameters
    ----------
    factory : callable
        Makes a candidate of a `Setup`.
    folder : Path
        Empty; the candidate gets a folder inside it.
    capabilities : frozenset of str
    """

    def __init__(self, factory: Factory, folder: Path, capabilities: frozenset[str]) -> None:
        self.clock = ManualClock()
        self.folder = folder
        self.capabilities = capabilities
        self._factory = factory
        self._settings: dict[str, Any] = {}
        self._candidate: Candidate | None = None

    @property
    def store_folder(self) -> Path:
        """The folder of the candidate."""
        return self.folder / "store"

    @property
    def candidate(self) -> Candidate:
        """The candidate, opened when it is first asked for."""
        return self._candidate or self.open()

    def open(self, **settings: Any) -> Candidate:
        """Open the candidate with other settings than the usual; before it is used."""
        self.store_folder.mkdir(exist_ok=True)
        self._settings = settings
        self._candidate = self._factory(Setup(self.store_folder, clock=self.clock, **settings))
        return self._candidate

    def reopen(self) -> Candidate:
        """Close the candidate and open its folder again."""
        self.close()
        return self.open(**self._settings)

    def close(self) -> None:
        """Close what is open."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.close()

    def has(self, capability: str) -> bool:
        """Whether the candidate claims a capability."""
        return capability in self.capabilities

    def fill(self, session: str, *turns: Turn, **fields: Any) -> None:
        """Append turns."""
        for turn in turns:
            self.candidate.append(session, turn.role, turn.token_ids, **turn.fields, **fields)

    def window(self, session: str, limit: int | None, **options: Any) -> list[int]:
        """Assemble within a limit of tokens, or of turns where a candidate counts those.

        Cases that take either have turns of one token.
        """
        if self.has("token_limit"):
            return list(self.candidate.assemble(session, limit, **options))
        if limit is not None:
            options["max_turns"] = limit
        return list(self.candidate.assemble(session, None, **options))

    def refused(self, do: Callable[..., Any], *args: Any, **options: Any) -> bool:
        """Whether a call is refused on purpose; any other exception is the candidate's error."""
        try:
            do(*args, **options)
        except self.candidate.refusals:
            return True
        return False

    # ---- Other processes ------------------------------------------------------------------------

    def elsewhere(self, calls: Sequence[Any], *, seed: str = "0", read_only: bool = True) -> Any:
        """Make calls in another process and return their results.

        Parameters
        ----------
        calls : sequence of (method, arguments, options)
        seed : str
            PYTHONHASHSEED of the process.
        read_only : bool
        """
        return self.answer(self.begin(calls, seed=seed, read_only=read_only))

    def begin(
        self, calls: Sequence[Any], *, seed: str = "0", read_only: bool = False
    ) -> subprocess.Popen[str]:
        """Start a process that makes calls on a candidate of its own."""
        self.store_folder.mkdir(exist_ok=True)
        task = {
            "factory": factory_name(self._factory),
            "folder": str(self.store_folder),
            "read_only": read_only,
            "calls": list(calls),
        }
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        child = subprocess.Popen(
            [sys.executable, "-m", "kalos_ctx.conformance.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,  # not where sources may lie that were not built
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
        )
        assert child.stdin is not None
        child.stdin.write(json.dumps(task) + "\n")
        child.stdin.flush()
        return child

    def answer(self, child: subprocess.Popen[str]) -> Any:
        """Wait for a process and return what its calls gave.

        Raises
        ------
        RuntimeError
            The candidate raised there.
        """
        try:
            out, said = child.communicate(timeout=CHILD_TIMEOUT_S)
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            last = said.strip().splitlines()[-1:] or ["it said nothing"]
            raise RuntimeError(f"in another process: {last[0]}")
        return json.loads(out)


def factory_name(factory: Factory) -> str:
    """Return `MODULE:NAME` under which another process finds a factory.

    Raises
    ------
    NotApplicable
        It is not a name of an importable module.
    """
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", "")
    if module in ("", "__main__") or not name.isidentifier():
        raise NotApplicable("another process cannot import the factory")
    return f"{module}:{name}"


def find_factory(spec: str) -> Factory:
    """Return the factory that `MODULE:NAME` names.

    Raises
    ------
    ValueError, ImportError, AttributeError
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ValueError(f"a factory is named MODULE:FACTORY (got {spec!r})")
    found: Factory = getattr(importlib.import_module(module), name)
    return found
