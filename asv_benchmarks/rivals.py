"""Kalos and what a user would pick instead, in one run: ``python asv_benchmarks/rivals.py``.

    python asv_benchmarks/rivals.py [--machine NAME] [--quick] [PART...]

The parts: `turns` (windows by every road, 10 to 100,000 turns, with stages), `callers` (1 to 64
threads), `writes` (one more turn), `recalls` (exact top 10), `reuse` (what a KV cache has seen),
and `windows`, `appends`, `reads`, which stand beside floors; without one, all.

Prints p50 and p99 in microseconds. `--machine NAME` also writes results/NAME/rivals.json, from
which `plots.py` draws and docs/performance.md has its tables. Every road's answer is checked to be
the same window. Rivals that are not installed are left out (`pip install '.[rivals]'`, and
`redis-server` on the PATH); where a call would take longer than 20 seconds, "not run at this size"
stands instead. Quote the ratios: machines are noisy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path

# The package beside this file, which has its name; run as a script, this one is `__main__`.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from rivals import chats, floors_part, measure, reuse_part, search_part, windows_part

FLOORS = {
    "windows": floors_part.windows,
    "appends": floors_part.appends,
    "reads": floors_part.reads,
}
PARTS = {
    "turns": windows_part.growing,
    "callers": windows_part.at_once,
    "writes": windows_part.writes,
    "recalls": search_part.recalls,
    "reuse": reuse_part.reuse,
}


def floors(name, out):
    """Run a part that has floors, and print its rows with their ratio to the first."""

    def say(what, value, base=None):
        ratio = "" if base is None else f"{value[0] / base[0]:8.2f} x"
        print(f"{what:45} {value[0]:10.2f} {value[1]:10.2f} {ratio}", flush=True)
        out[what] = {"p50": measure.rounded(value[0]), "p99": measure.rounded(value[1])}
        return value

    with tempfile.TemporaryDirectory(prefix="kalos-rivals-") as folder:
        FLOORS[name](folder, say)


def main():
    """Run the parts that were asked for."""
    names = [*PARTS, *FLOORS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--machine", metavar="NAME", help="also write results/NAME/rivals.json")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all works")
    options = parser.parse_args()
    if strange := sorted(set(options.parts) - set(names)):
        parser.error(f"no part is called {', '.join(strange)}")
    chosen = options.parts or names
    out = {
        "version": 1,
        "date": datetime.date.today().isoformat(),
        "command": f"python asv_benchmarks/rivals.py {' '.join(sys.argv[1:])}".strip(),
        "machine": measure.machine(options.machine or ""),
        "versions": measure.versions(),
        "load_before": round(os.getloadavg()[0], 2),
        "sizes": {
            "budget": chats.BUDGET,
            "turns": windows_part.TURNS,
            "callers": windows_part.CALLERS,
            "callers_turns": windows_part.CALLERS_TURNS,
            "top_k": search_part.K,
            "reuse_budget": reuse_part.BUDGET,
            "limit_s": measure.LIMIT_S,
            "messages": len(chats.pool()),
        },
    }
    print(f"{out['machine']['cpu']}, {out['machine']['cores']} cores; microseconds, p50 and p99")
    for name in chosen:
        print(f"# {name}", flush=True)
        if name in PARTS:
            PARTS[name](lambda line: print(line, flush=True), out, quick=options.quick)
        else:
            floors(name, out.setdefault("floors", {}))
        if options.machine:  # what was measured is kept where a later part fails
            path = Path(measure.here("results", options.machine, "rivals.json"))
            path.parent.mkdir(parents=True, exist_ok=True)
            out["load_after"] = round(os.getloadavg()[0], 2)
            path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
