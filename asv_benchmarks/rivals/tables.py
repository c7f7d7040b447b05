"""The tables of docs/performance.md from a recorded run.

    python asv_benchmarks/rivals/tables.py [NAME] [--write]

Prints them; with --write it puts them in the place of those of the page, whose prose is then to be
read again. Needs the standard library alone; a test holds the page against it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
SHOWN = "2-core-epyc-zen5"  # the run that docs/performance.md shows
BASE = "Kalos, in process"
FEW = 100  # calls; a p99 of fewer is marked


def load(name=SHOWN):
    """Return a recorded run."""
    return json.loads((RESULTS / name / "rivals.json").read_text(encoding="utf-8"))


def time(microseconds):
    """A time to three digits: in microseconds without a unit, above that in ms or s."""
    for unit, factor in (("", 1), (" ms", 1e3), (" s", 1e6)):
        value = microseconds / factor
        if value < 999.5 or factor == 1e6:
            digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:,.{digits}f}{unit}"
    raise AssertionError


def pair(row):
    """The p50 and p99 of a row, or that it was not run."""
    if row is None:
        return ""
    if "not_run" in row:
        return f"not run at this size ({row['not_run']})"
    return f"{time(row['p50'])} / {time(row['p99'])}{'*' if row['calls'] < FEW else ''}"


def times(value):
    """A ratio to three digits."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.{1 if value >= 10 else 2}f}"


def ratio(rows, bases):
    """How many times as long as the base, at one size or from the least to the most of several."""
    found = [
        row["p50"] / base["p50"]
        for row, base in zip(rows, bases, strict=True)
        if row is not None and "p50" in row
    ]
    if not found:
        return ""
    least, most = times(min(found)), times(max(found))
    return f"{most} x" if least == most else f"{least} to {most} x"


def lines(head, rows):
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def grid(data, part, sizes, *, beside, which):
    """Roads down, sizes across, and the ratio to Kalos in process over some of the sizes."""
    at = {(row["road"], row["turns"]): row for row in data[part]}
    names = dict.fromkeys(row["road"] for row in data[part])
    bases = [at[BASE, size] for size in beside]
    head = ["", *(f"{size:,} turns" for size in sizes), f"to Kalos in process, {which}"]
    rows = [
        [
            name,
            *(pair(at.get((name, size))) for size in sizes),
            ratio([at.get((name, size)) for size in beside], bases),
        ]
        for name in names
    ]
    return lines(head, rows)


def turns(data):
    """Windows by every road."""
    sizes = data["sizes"]["turns"]
    full = [size for size in sizes if size >= 1_000]  # those whose window is full
    return grid(data, "turns", sizes, beside=full, which="from 1,000 turns on")


def stages(data):
    """Stages of every road that has some, at one size."""
    rows = []
    for row in data["turns"]:
        if len(row.get("stages", ())) < 2:
            continue
        parts = row["stages"].items()
        rows.append([row["road"], *(f"{name} {time(one['p50'])} / {time(one['p99'])}" for name, one
                                    in parts)])  # fmt: skip
    return lines(["", "stages, p50 / p99"], [[row[0], "; ".join(row[1:])] for row in rows])


def callers(data):
    """Latency and windows a second from one thread and from many."""
    at = {(row["road"], row["callers"]): row for row in data["callers"]}
    levels = (1, 8, 64)
    rows = [
        [
            name,
            *(
                f"{pair(at[name, n])}; slowest {time(at[name, n]['worst'])}; "
                f"{at[name, n]['a_second']:,} a second"
                for n in levels
            ),
        ]
        for name in dict.fromkeys(row["road"] for row in data["callers"])
    ]
    return lines(["", *(f"{n} thread{'s' if n > 1 else ''}" for n in levels)], rows)


def writes(data):
    """One more turn."""
    sizes = sorted({row["turns"] for row in data["writes"]})
    return grid(data, "writes", sizes, beside=sizes[-1:], which=f"{sizes[-1]:,} turns")


def search(data):
    """Exact top 10."""
    shapes = list(dict.fromkeys((row["rows"], row["dim"]) for row in data["search"]))
    at = {(row["road"], row["rows"], row["dim"]): row for row in data["search"]}
    names = list(dict.fromkeys(row["road"] for row in data["search"]))
    rows = []
    for count, dim in shapes:
        ours = at["Kalos", count, dim]
        found = [at[name, count, dim] for name in names]
        beside = ["" if row is ours else f" ({ratio([row], [ours])})" for row in found]
        cells = [pair(row) + more for row, more in zip(found, beside, strict=True)]
        rows.append([f"{count:,} x {dim}", *cells])
    return lines(["rows", *names], rows)


def reuse(data):
    """Shares of prompt tokens by policy."""
    rows = [
        [row["policy"], f"{row['reused_percent']:.1f} %", f"{row['reused_percent_late']:.1f} %",
         f"{row['tokens_a_late_window']:,}"]
        for row in data["reuse"]
    ]  # fmt: skip
    head = ["policy", "reused, of all prompts", "reused, once the history is cut",
            "tokens a window then"]  # fmt: skip
    return lines(head, rows)


def notes(data):
    """How each road was set up, where a reader must know."""
    said = {}
    for row in data["roads"]:
        if row["note"]:
            said.setdefault(row["note"], []).append(row["road"])
    return "\n".join(f"- {'; '.join(names)}: {note}." for note, names in said.items())


TABLES = (turns, stages, callers, writes, search, reuse, notes)


def rewrite(page, data):
    """Put the tables of a record in the place of those under the same heads of a page."""
    text = page.read_text(encoding="utf-8")
    for make in TABLES[:-1]:
        table = make(data)
        head = re.escape(table.partition("\n")[0])
        text, found = re.subn(rf"{head}\n(\|.*\n)+", lambda _, table=table: f"{table}\n", text)
        if found != 1:
            raise SystemExit(
                f"{page.name} has {found} tables with the head {table.split(chr(10))[0]}"
            )
    page.write_text(text, encoding="utf-8")


def main():
    """Print the tables, or write them into docs/performance.md."""
    words = [word for word in sys.argv[1:] if word != "--write"]
    data = load(*words)
    if "--write" in sys.argv:
        rewrite(RESULTS.parents[1] / "docs" / "performance.md", data)
        return
    for make in TABLES:
        print(f"{make(data)}\n")


if __name__ == "__main__":
    main()
