"""Pages of the documentation as tests: their code runs in order, and prints what the page shows.

What a fence says of its block:

- `python`: run, in one namespace a page. What it prints is the next `text` block, or nothing.
- `console`: lines that begin with `$ ` are run by a shell, the others are what is printed.
- `title="NAME"`: not run, but written to a file of that name in the folder where the page runs.
- `needs="MODULE"`: run only where that module can be imported.
- `norun="WHY"`: not run, for the reason that stands there.

`...` in what is printed stands for anything.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<attributes>[^`\n]*)\n(?P<text>.*?)^(?P=ticks)\s*$",
    re.DOTALL | re.MULTILINE,
)
ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
ATTRIBUTES = {"title", "needs", "norun"}
SHELL_TIMEOUT_S = 60


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    attributes: dict[str, str]
    text: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is code that a test runs."""
        return self.language in ("python", "console") and not (
            self.attributes.keys() & {"title", "norun"}
        )

    @property
    def needs(self) -> str | None:
        """The module without which it cannot run."""
        return self.attributes.get("needs")


def blocks_of(page: Path) -> list[Block]:
    """Return a page's fenced blocks in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        rest = match["attributes"].strip()
        attributes = dict(ATTRIBUTE.findall(rest))
        line = text.count("\n", 0, match.start()) + 1
        if ATTRIBUTE.sub("", rest).strip() or not attributes.keys() <= ATTRIBUTES:
            raise AssertionError(f"{page}:{line}: a fence may not say {rest!r}")
        found.append(Block(match["language"], attributes, match["text"], line))
    return found


def needed_modules(page: Path) -> list[str]:
    """Return the modules that some block of the page needs."""
    return sorted({block.needs for block in blocks_of(page) if block.needs})


def run_page(page: Path, folder: Path, *, with_modules: bool = False) -> int:
    """Run a page's code in a folder, which is the working folder meanwhile.

    Returns
    -------
    int
        How many blocks ran.

    Raises
    ------
    AssertionError
        Something else is printed than the page shows.
    """
    blocks = blocks_of(page)
    names: dict[str, object] = {"__name__": "__page__"}
    count = 0
    before = os.getcwd()
    os.chdir(folder)
    try:
        for place, block in enumerate(blocks):
            if "title" in block.attributes:
                (folder / block.attributes["title"]).write_text(block.text, encoding="utf-8")
            if not block.runs or (block.needs and not with_modules):
                continue
            where = f"{page}:{block.line}"
            if block.language == "console":
                run_console(block.text, folder, where)
            else:
                check(run_python(page, block, names), expected_output(blocks, place), where)
            count += 1
    finally:
        os.chdir(before)
    return count


def run_python(page: Path, block: Block, names: dict[str, object]) -> str:
    """Run one block in a namespace and return what it printed."""
    # Empty lines in front: a traceback has the page's own line numbers.
    code = compile("\n" * block.line + block.text, str(page), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def expected_output(blocks: list[Block], place: int) -> str:
    """Return the `text` block behind a block of code, empty where other code comes first."""
    for block in blocks[place + 1 :]:
        if block.language == "text":
            return block.text
        if block.language in ("python", "console"):
            break
    return ""


def run_console(text: str, folder: Path, where: str) -> None:
    """Run the commands of a `console` block and compare what each prints."""
    for command, expected in commands_of(text):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=shell_environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SHELL_TIMEOUT_S,
        )
        check(done.stdout, expected, f"{where}: {command}")


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return (command, what it prints) of a `console` block."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append([line[2:], ""])
        elif found and found[-1][0].endswith("\\"):
            found[-1][0] += "\n" + line
        else:
            found[-1][1] += line + "\n"
    return [(command, printed) for command, printed in found]


def shell_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `kalos` and `python` are those of this test."""
    tools = folder / ".tools"
    if not tools.is_dir():
        tools.mkdir()
        for name, start in (("kalos", "-m kalos_ctx.cli "), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
            (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "COLUMNS": "100"}


def check(printed: str, expected: str, where: str) -> None:
    """Compare what was printed with what a page shows; spaces at line ends do not count."""
    got, wanted = (
        "\n".join(line.rstrip() for line in text.strip("\n").splitlines())
        for text in (printed, expected)
    )
    pattern = ".*?".join(re.escape(part) for part in wanted.split("..."))
    if not re.fullmatch(pattern, got, re.DOTALL):
        raise AssertionError(f"{where} printed\n{got}\nand the page shows\n{wanted}")
