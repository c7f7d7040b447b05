"""The other process of a case: makes the calls that stand on its input, prints the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kalos_ctx.conformance.adapter import Setup
from kalos_ctx.conformance.stage import find_factory


def main() -> None:
    """Read one line of JSON, make its calls on a candidate, print a JSON list."""
    task = json.loads(sys.stdin.readline())
    setup = Setup(Path(task["folder"]), read_only=task["read_only"])
    candidate = find_factory(task["factory"])(setup)
    try:
        made = [
            getattr(candidate, method)(*arguments, **options)
            for method, arguments, options in task["calls"]
        ]
    finally:
        candidate.close()
    print(json.dumps(made))


if __name__ == "__main__":
    main()
