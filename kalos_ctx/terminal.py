"""What goes to a person's terminal: escaped names, tables, progress bars, one line for an error.

Names and texts come from users of the store, so a control character in one could move the cursor,
recolour the screen or reorder the line. Nothing of them reaches the terminal unescaped.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NoReturn, ParamSpec, TypeVar

import typer

from kalos_ctx import errors

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILED, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 130, 141
PIPED_WIDTH = 200

# What to do about an error, by class; the first that matches, so subclasses stand before bases.
ADVICE: tuple[tuple[type[BaseException], str], ...] = (
    (errors.StoreNotFound, "check the path, or make a store with 'kalos import'"),
    (errors.NotAStore, "give the folder of a store"),
    (errors.StoreCorrupt, "see 'kalos verify', and restore the store from a snapshot"),
    (errors.StoreLocked, "stop the other writer, or wait until it has closed the store"),
    (errors.FingerprintMismatch, "give --tokenizer (and --template) as when the store was made"),
    (errors.SessionNotFound, "'kalos sessions STORE' lists what is there; see --tenant"),
    (errors.SessionExpired, "its time to live is over; 'kalos sessions STORE' lists the others"),
    (errors.PassageNotFound, "check the name of the collection and --tenant"),
    (errors.TemplateUnsafe, "give another template with --template"),
    (errors.BudgetExceeded, "raise --max-tokens or lower --reserve"),
    (errors.DimensionMismatch, "give vectors of the model that the store was filled with"),
    (errors.StoreFull, "free space on the file system, then try again"),
    (errors.FormatVersionError, "install the version of kalos-ctx that wrote the store"),
    (errors.DeviceUnavailable, "use --device cpu, or see 'kalos doctor'"),
)


def shown(value: object) -> str:
    """Return a name or a text on one line, every character that is not printable escaped.

    Bytes that are not UTF-8 and lone surrogates appear as `\\xff`. Backslashes stay as they are.
    """
    text = value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("ascii", "backslashreplace").decode() if code > 127 else repr(char)[1:-1]


def readable(text: str) -> str:
    """Return a text of several lines for the terminal: escaped, line ends and tabs kept."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def short(text: str, width: int = 60) -> str:
    """Return the beginning of a text on one line, blanks run together."""
    line = shown(" ".join(text[: 8 * width].split()))
    return line if len(line) <= width and len(text) <= 8 * width else line[: width - 3] + "..."


def name_argument(value: str) -> bytes:
    """Return a name given on the command line as the bytes that were typed."""
    return os.fsencode(value)


def name_text(value: str | bytes) -> str:
    """Return a stored name as JSON text; bytes outside UTF-8 become lone surrogates."""
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


def is_terminal(stream: IO[str]) -> bool:
    """Say whether a stream leads to a person's terminal."""
    return stream.isatty()


def say(line: str) -> None:
    """Print one line, already escaped, to standard output."""
    print(line)


def note(line: str) -> None:
    """Print one line, already escaped, to standard error."""
    print(line, file=sys.stderr)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()
) -> None:
    """Print a table; cells are escaped. Into a pipe: plain columns without lines or colours.

    Parameters
    ----------
    columns : sequence of str
    rows : iterable of sequences
        One cell a column; not str is turned into str.
    numbers : iterable of int
        Columns that are aligned at the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    live = is_terminal(sys.stdout)
    grid = Table(box=box.SIMPLE_HEAD if live else None, pad_edge=False, header_style="bold")
    right = set(numbers)
    for i, column in enumerate(columns):
        grid.add_column(
            column, justify="right" if i in right else "left", no_wrap=i in right or not live
        )
    for row in rows:
        grid.add_row(*(Text(shown(cell)) for cell in row))
    console = Console(width=None if live else PIPED_WIDTH, highlight=False)
    # Captured, since rich would end the process by itself where the reader of a pipe has left.
    with console.capture() as captured:
        console.print(grid)
    text = "\n".join(line.rstrip() for line in captured.get().splitlines())
    print(text.strip("\n"))


@contextmanager
def progress(
    what: str, total: int | None, *, visible: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs, if that is a terminal.

    Yields
    ------
    callable
        Takes how much is done by now, in bytes.
    """
    if not is_terminal(sys.stderr):
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(shown(what), total=total)
        yield lambda done: bar.update(task, completed=done)


def _ignore(done: int) -> None:
    """Take the place of a bar that nobody would see."""


class CommandFailed(Exception):
    """A command ends with status 1; the message says why and what to do, on one line."""


def fail(error: BaseException | str) -> NoReturn:
    """Print one line on standard error that says what is wrong and what to do; exit with 1."""
    note(f"kalos: {failure_line(error)}")
    raise typer.Exit(EXIT_FAILED)


def failure_line(error: BaseException | str) -> str:
    """Return what is wrong and what to do about it, on one escaped line."""
    if isinstance(error, str | CommandFailed):
        return shown(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and not isinstance(error, errors.KalosError):
        text = error.strerror or text
        if error.filename is not None:
            text = f"{os.fsdecode(error.filename)}: {text}"
    advice = next((what for kind, what in ADVICE if isinstance(error, kind)), "")
    return shown(f"{text}; {advice}" if advice else text)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the errors of a command into one line and an exit status."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _drop_unwritten()
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except KeyboardInterrupt:
            note("kalos: interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (errors.KalosError, CommandFailed, OSError) as error:
            _drop_unwritten()
            fail(error)

    return run


def _drop_unwritten() -> None:
    """Forget output that cannot be written; the interpreter would complain at its last flush."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_streams() -> None:
    """Escape what a stream's encoding lacks, and show the package's warnings as lines of ours."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLine())
    logging.getLogger("kalos_ctx").addHandler(handler)


class _LogLine(logging.Formatter):
    """A log record as one escaped line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"kalos: {shown(record.getMessage())}"


def print_json(value: Any) -> None:
    """Print one JSON document on one line; ASCII, so that no name can reach the terminal raw."""
    import json

    print(json.dumps(value, default=_plain, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return name_text(value)
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
