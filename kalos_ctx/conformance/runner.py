"""Runs cases over a candidate and tells what came of each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kalos_ctx.conformance.adapter import CAPABILITIES, Candidate, Factory, Setup
from kalos_ctx.conformance.case import SECTIONS, Case, CaseFailed, NotApplicable
from kalos_ctx.conformance.cases import CASES, chosen
from kalos_ctx.conformance.stage import Stage, find_factory

PASSED, FAILED, NOT_APPLICABLE, ERROR = "passed", "failed", "not applicable", "error"
STATUSES = (PASSED, FAILED, NOT_APPLICABLE, ERROR)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Attributes
    ----------
    case : str
        Its ID.
    status : {"passed", "failed", "not applicable", "error"}
        "error": the candidate raised what it does not name as a refusal.
    why : str
        The sentence of a failure, the missing capability, or the exception.
    """

    case: str
    status: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a candidate says about itself, without it being open."""

    name: str
    version: str
    settings: str
    capabilities: frozenset[str]
    not_claimed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Results:
    """What came of all cases that were run on a candidate."""

    candidate: Profile
    outcomes: tuple[Outcome, ...]

    def counts(self) -> dict[str, int]:
        """Return how many cases there are of each status."""
        return {status: sum(one.status == status for one in self.outcomes) for status in STATUSES}

    def of(self, number: str) -> Outcome:
        """Return the outcome of a case.

        Raises
        ------
        KeyError
            It was not run.
        """
        for one in self.outcomes:
            if one.case == number:
                return one
        raise KeyError(number)

    @property
    def ok(self) -> bool:
        """Whether no case failed or ended in an error."""
        return all(one.status in (PASSED, NOT_APPLICABLE) for one in self.outcomes)

    def to_json(self) -> str:
        """Return the results as JSON."""
        about = self.candidate
        return json.dumps(
            {
                "candidate": about.name,
                "version": about.version,
                "settings": about.settings,
                "capabilities": sorted(about.capabilities),
                "counts": self.counts(),
                "outcomes": [asdict(one) for one in self.outcomes],
            },
            indent=2,
        )

    def to_text(self) -> str:
        """Return the results as lines for a terminal."""
        titles = {one.id: one.title for one in CASES}
        lines = [f"{self.candidate.name} {self.candidate.version}".strip()]
        for one in self.outcomes:
            why = f"\n{'':22}{one.why}" if one.why else ""
            lines.append(f"{one.case:6}{one.status:16}{titles.get(one.case, '')}{why}")
        lines.append(", ".join(f"{count} {status}" for status, count in self.counts().items()))
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """Return the results as a table."""
        return markdown_table([self])


def profile_of(candidate: Candidate) -> Profile:
    """Return what a candidate says about itself.

    Raises
    ------
    ValueError
        It names a capability that there is not.
    """
    unknown = sorted(candidate.capabilities - CAPABILITIES.keys())
    if unknown:
        raise ValueError(f"there is no capability {', '.join(unknown)}")
    name = candidate.name or type(candidate).__name__
    return Profile(
        name,
        candidate.version,
        candidate.settings,
        candidate.capabilities,
        candidate.not_claimed,
    )


def examine(factory: Factory) -> Profile:
    """Open a candidate in a folder of its own, only to ask what it can do.

    Raises
    ------
    ValueError
    """
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        candidate = factory(Setup(Path(folder)))
        try:
            return profile_of(candidate)
        finally:
            candidate.close()


def run_case(one: Case, factory: Factory, profile: Profile, folder: Path) -> Outcome:
    """Run a case in an empty folder."""
    if one.id in profile.not_claimed:
        return Outcome(one.id, NOT_APPLICABLE, profile.not_claimed[one.id])
    missing = one.missing(profile.capabilities)
    if missing:
        needs = ", ".join(need.replace("|", " or ") for need in missing)
        return Outcome(one.id, NOT_APPLICABLE, f"needs {needs}")
    stage = Stage(factory, folder, profile.capabilities)
    try:
        try:
            one.check(stage)
        finally:
            stage.close()
    except CaseFailed as failure:
        return Outcome(one.id, FAILED, str(failure))
    except NotApplicable as reason:
        return Outcome(one.id, NOT_APPLICABLE, str(reason))
    except Exception as error:
        return Outcome(one.id, ERROR, f"{type(error).__name__}: {error}")
    return Outcome(one.id, PASSED)


def run(factory: Factory, ids: list[str] | None = None) -> Results:
    """Run all cases, or some, over what a factory makes.

    Parameters
    ----------
    factory : callable
        Takes a `Setup`, returns a `Candidate`.
    ids : list of str, optional

    Raises
    ------
    ValueError
        An ID or a capability that there is not.
    """
    cases = chosen(ids)
    profile = examine(factory)
    outcomes = []
    for one in cases:
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            outcomes.append(run_case(one, factory, profile, Path(folder)))
    return Results(profile, tuple(outcomes))


def markdown_table(all_results: Sequence[Results]) -> str:
    """Return one table of several candidates, a column each."""
    names = [results.candidate.name for results in all_results]
    lines = [
        f"| case | what is right | {' | '.join(names)} |",
        f"| --- | --- |{' --- |' * len(names)}",
    ]
    shown: Iterable[str] = [one.case for one in all_results[0].outcomes] if all_results else ()
    by_id = {one.id: one for one in CASES}
    section = ""
    for number in shown:
        one = by_id[number]
        if one.section != section:
            section = one.section
            lines.append(f"| | **{SECTIONS[section]}** |{' |' * len(names)}")
        cells = [_cell(results.of(number)) for results in all_results]
        title = one.title
        if one.links:
            title = f"[{title}]({one.links[0]})"
        lines.append(f"| {number} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    return {NOT_APPLICABLE: "n/a", FAILED: "**failed**", ERROR: "**error**"}.get(
        outcome.status, outcome.status
    )


def main(arguments: list[str] | None = None) -> int:
    """Run cases from the command line; 0 where none failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m kalos_ctx.conformance",
        description="Run the cases over what MODULE:FACTORY makes.",
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY")
    parser.add_argument("--case", action="append", metavar="ID", help="only this one; repeatable")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print JSON")
    shape.add_argument("--markdown", action="store_true", help="print a table")
    options = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    try:
        factory = find_factory(options.factory)
        chosen(options.case)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    results = run(factory, options.case)
    if options.json:
        print(results.to_json())
    elif options.markdown:
        print(results.to_markdown())
    else:
        print(results.to_text())
    return 0 if results.ok else 1
