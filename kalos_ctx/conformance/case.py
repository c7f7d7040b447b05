"""One case: what it is called, where it was reported, what it needs, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kalos_ctx.conformance.stage import Stage

SECTIONS = {
    "A": "Truncation and budgets",
    "B": "Tool calls and results",
    "C": "Tokens as given",
    "E": "Storage, order, concurrency",
    "F": "Identifiers, isolation, injection",
    "G": "Content at its edges",
    "H": "Recall and vectors",
    "I": "Deletion and expiry",
    "J": "Prefix stability and reuse",
    "K": "Batches, padding, masks",
    "L": "Hand-over to engines",
}


class CaseFailed(AssertionError):
    """A candidate does something else than is right; the sentence says what."""


class NotApplicable(Exception):
    """A case cannot be run on a candidate; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """A public report, as behaviour that can be checked.

    Attributes
    ----------
    id : str
    title : str
        What is right, in one line.
    section : str
        Key of `SECTIONS`.
    priority : {1, 2, 3}
        1: wrong answers, lost data or leaks. 2: users will meet it. 3: hardening.
    cause : str
        Why it went wrong there.
    reports : tuple of str
        `owner/repository#number`.
    needs : tuple of str
        Capabilities; `a|b` is either of them.
    check : callable
        Takes a `Stage`; raises `CaseFailed`.
    """

    id: str
    title: str
    section: str
    priority: int
    cause: str
    reports: tuple[str, ...]
    needs: tuple[str, ...]
    check: Callable[[Stage], None]

    @property
    def links(self) -> tuple[str, ...]:
        """Addresses of the reports."""
        return tuple(
            f"https://github.com/{repository}/issues/{number}"
            for repository, _, number in (report.partition("#") for report in self.reports)
        )

    def missing(self, capabilities: frozenset[str]) -> list[str]:
        """Return the needs that a candidate does not meet."""
        return [need for need in self.needs if not capabilities & set(need.split("|"))]


def case(
    number: str,
    title: str,
    *,
    section: str,
    priority: int = 1,
    cause: str,
    reports: tuple[str, ...],
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[[Stage], None]], Case]:
    """Make a case of a check."""

    def made(check: Callable[[Stage], None]) -> Case:
        return Case(number, title, section, priority, cause, reports, needs, check)

    return made


def expect(condition: bool, sentence: str) -> None:
    """Raise `CaseFailed` with the sentence unless the condition holds."""
    if not condition:
        raise CaseFailed(sentence)
