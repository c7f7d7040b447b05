"""The table of docs/conformance.md is what a run with the frameworks gives now."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "conformance" / "table.py"
SECONDS = 600
# Addresses that nothing answers: a library that asked would fail at once.
NO_NETWORK = {
    name: "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
}


def test_conformance_page_shows_what_a_run_gives(tmp_path):
    path = os.pathsep.join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        cwd=tmp_path,
        env={**os.environ, **NO_NETWORK, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
