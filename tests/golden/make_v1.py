"""Write the golden store of format 1.0: `python tests/golden/make_v1.py`. Once, never again.

`tests/golden/v1/store` is what a released version wrote, `expected.json` what it could read from it
then. Later versions must read the same. A later format has a script of its own beside this one,
with its folder's name: `v1.1` for 1.1, `v2` for 2.0 (tests/test_golden.py).
"""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.store_images import answers, fill

from kalos_ctx.store import SessionStore

HERE = Path(__file__).resolve().parent / "v1"


def main() -> None:
    """Make the store and what can be read from it."""
    if HERE.exists():
        raise SystemExit(f"{HERE} is there already; a released format is never written anew")
    HERE.mkdir(parents=True)
    with SessionStore.open(
        HERE / "store", segment_bytes=65536, durability="each", clock=lambda: 1_700_000_000.0
    ) as store:
        fill(store)
        found = answers(store)
    (HERE / "store" / "lock").write_text("")
    shutil.rmtree(HERE / "store" / "gen-000001", ignore_errors=True)
    (HERE / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
