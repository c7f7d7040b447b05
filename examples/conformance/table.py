"""Run all candidates and write what came of it into docs/conformance.md.

    python examples/conformance/table.py            # write
    python examples/conformance/table.py --check    # compare, and say what differs

Needs kalos-ctx with its extras `langchain`, `llama-index` and `openai-agents`.
"""

import difflib
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
RUN_ON = "Run on "

sys.path.insert(0, str(FOLDER))

import langchain_candidate  # noqa: E402
import llama_index_candidates  # noqa: E402
import openai_agents_candidate  # noqa: E402

from kalos_ctx.conformance import CASES, kalos, markdown_table, run  # noqa: E402

FACTORIES = (
    kalos.factory,
    langchain_candidate.factory,
    llama_index_candidates.buffer_factory,
    llama_index_candidates.memory_factory,
    openai_agents_candidate.factory,
)


def counts(all_results):
    """Return how many cases came out how, a row a candidate."""
    yield "| candidate | version | passed | failed | not applicable | settings |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in all_results:
        found = one.counts()
        failed = found["failed"] + found["error"]
        yield (
            f"| {one.candidate.name} | {one.candidate.version} | {found['passed']} | {failed} | "
            f"{found['not applicable']} | {one.candidate.settings} |"
        )


def failures(all_results):
    """Return what the runs say of each failure."""
    titles = {one.id: one.title for one in CASES}
    yield "| case | candidate | what the run says |"
    yield "| --- | --- | --- |"
    for one in all_results:
        for outcome in one.outcomes:
            if outcome.status in ("failed", "error"):
                title = titles[outcome.case]
                yield f"| {outcome.case}: {title} | {one.candidate.name} | {outcome.why} |"


def not_claimed(all_results):
    """Return the cases that a candidate leaves out, with its reasons."""
    place = [one.id for one in CASES].index
    for one in all_results:
        reasons = {}
        for number, why in one.candidate.not_claimed.items():
            reasons.setdefault(why, []).append(number)
        for why, numbers in reasons.items():
            yield f"- {one.candidate.name}, {', '.join(sorted(numbers, key=place))}: {why}."


def page_part():
    """Run everything and return what belongs between the marks."""
    all_results = [run(factory) for factory in FACTORIES]
    today = datetime.now(timezone.utc).date()
    lines = [
        BEGIN,
        f"{RUN_ON}{today} with Python {platform.python_version()}.",
        "",
        *counts(all_results),
        "",
        "### Case by case",
        "",
        markdown_table(all_results),
        "",
        "### What failed, in the words of the run",
        "",
        *failures(all_results),
        "",
        "### Left out, and why",
        "",
        *not_claimed(all_results),
        END,
    ]
    return "\n".join(lines)


def main():
    """Write or check the page; 1 where it differs."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    new = page_part()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(before + new + after, encoding="utf-8")
        return 0
    shown, now = (
        [line for line in part.splitlines() if not line.startswith(RUN_ON)]
        for part in (BEGIN + old + END, new)
    )
    difference = list(difflib.unified_diff(shown, now, "the page", "a run now", lineterm="", n=0))
    print("\n".join(difference) or "The page shows what a run gives.")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
