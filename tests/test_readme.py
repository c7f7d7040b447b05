"""What the README shows works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_readme_example_runs_and_prints_a_window(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert len(code.splitlines()) <= 12
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "PYTHONPATH": os.pathsep.join(sys.path)
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.match(r"\d+ \[.*\] 0", run.stdout.replace("\n", " ")), run.stdout


def test_readme_names_the_two_commands():
    assert "pip install . && kalos demo" in README
    assert "pip install '.[test]' && pytest" in README
