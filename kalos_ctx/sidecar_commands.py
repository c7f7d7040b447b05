"""`kalos serve`, `kalos ping` and `kalos top`."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kalos_ctx import terminal
from kalos_ctx.terminal import CommandFailed, guarded

SocketPath = Annotated[
    Path, typer.Option("--socket", metavar="PATH", help="Where the sidecar listens.")
]
LOG_FORMATS = ("text", "json")
STAGES = ("queue", "sync", "plan", "device", "response", "total")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("serve")(serve_command)
    app.command("ping")(ping_command)
    app.command("top")(top_command)


@guarded
def serve_command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Made where it is missing.")],
    *,
    socket: SocketPath,
    access: Annotated[
        Path | None,
        typer.Option(help="TOML file: which users may use which tenants. Without: your own, all."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or its folder with the chat template.")
    ] = None,
    template: Annotated[
        Path | None, typer.Option(help="Chat template, for the one beside the tokenizer.")
    ] = None,
    vector_dim: Annotated[int | None, typer.Option(help="Of a new store.")] = None,
    durability: Annotated[str, typer.Option(help="process, group or each.")] = "process",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    slots: Annotated[int, typer.Option(help="Windows alive at a time in the sidecar.")] = 64,
    workers: Annotated[int, typer.Option(help="Threads for calls that may take long.")] = 8,
    max_clients: Annotated[int, typer.Option(help="Connections at a time.")] = 1024,
    spin: Annotated[
        float, typer.Option(help="Seconds without a request after which it sleeps.")
    ] = 0.0005,
    poll: Annotated[bool, typer.Option("--poll", help="Never sleep; takes a whole CPU.")] = False,
    cpu: Annotated[int | None, typer.Option(help="CPU that the hot loop is pinned to.")] = None,
    lease: Annotated[
        float | None,
        typer.Option(help="Seconds without a request after which shared memory is taken back."),
    ] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish, at the end.")] = 5.0,
    metrics_port: Annotated[
        int | None, typer.Option(help="Prometheus metrics on 127.0.0.1; 0 picks a port.")
    ] = None,
    log_format: Annotated[str, typer.Option(help="text or json; neither has content.")] = "text",
) -> None:
    """Serve a store to other processes until SIGTERM; `kalos ping` says when it is ready."""
    from kalos_ctx.sidecar.server import serve

    if log_format not in LOG_FORMATS:
        raise CommandFailed("--log-format must be text or json")
    _log_to_stderr(log_format)
    serve(
        store,
        socket,
        access=access,
        tokenizer=None if tokenizer is None else str(tokenizer),
        template=None if template is None else str(template),
        vector_dim=vector_dim,
        durability=durability,
        device=device,
        slots=slots,
        workers=workers,
        max_clients=max_clients,
        spin=spin,
        poll=poll,
        cpu=cpu,
        lease=lease,
        drain_timeout=drain_timeout,
        metrics_port=metrics_port,
    )


@guarded
def ping_command(
    *,
    socket: SocketPath,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Ask whether a sidecar is ready: exit status 0 where it is, 1 where it is not."""
    from kalos_ctx.sidecar.client import connect

    begin = time.monotonic()
    with connect(socket, mode="served", timeout=timeout) as client:
        client.ping()
        took = time.monotonic() - begin
        found = client.status()
    answer = {
        "state": found["state"],
        "pid": found["pid"],
        "clients": found["gauges"]["clients"],
        "seconds": round(took, 6),
    }
    if as_json:
        terminal.print_json(answer)
    else:
        terminal.say(f"{found['state']}: pid {found['pid']}, answered in {took * 1e3:.1f} ms")


@guarded
def top_command(
    *,
    socket: SocketPath,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a look.")] = False,
) -> None:
    """Show a sidecar's counters live; they are read from shared memory, no request is made."""
    from kalos_ctx.sidecar.client import connect

    live = not once and not as_json and terminal.is_terminal(sys.stdout)
    with connect(socket, mode="served") as client:
        if live:
            _watch(client, interval)
            return
        while True:
            found = client.status()
            if as_json:
                terminal.print_json(found)
            else:
                _print_tables(found)
            if once or not as_json:
                return
            time.sleep(interval)


def _watch(client: Any, interval: float) -> None:
    """Redraw until the reader ends it."""
    from rich.console import Group
    from rich.live import Live

    before = client.status()
    with Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(Group(*_renderables(before, client.status(), interval)), refresh=True)
                before = client.status()
                time.sleep(interval)
        except KeyboardInterrupt:
            return


def _renderables(before: dict[str, Any], now: dict[str, Any], seconds: float) -> list[Any]:
    from rich.table import Table

    age = now["beat_age_s"]
    head = Table.grid(padding=(0, 3))
    head.add_row(
        f"[b]{now['state']}[/b]",
        f"pid {now['pid']}",
        f"up {time.time() - now['started_at']:.0f} s",
        f"loop alive {age:.1f} s ago" if age is not None else "loop not started",
    )
    rates = Table("count", "a second", "in all", title="Counts", title_justify="left")
    for name, value in now["counts"].items():
        rate = (value - before["counts"][name]) / max(seconds, 1e-9)
        rates.add_row(name, f"{rate:,.0f}", f"{value:,}")
    gauges = Table("now", "", title="In use", title_justify="left")
    for name, value in now["gauges"].items():
        gauges.add_row(name, f"{value:,}")
    both = Table.grid(padding=(0, 4))
    both.add_row(rates, gauges)
    stages = Table("stage", "count", "mean", "p50", "p99", title="Time", title_justify="left")
    for row in _stage_rows(now):
        stages.add_row(*row)
    return [head, both, stages]


def _print_tables(found: dict[str, Any]) -> None:
    terminal.say(f"{found['state']}: pid {found['pid']}")
    terminal.table(("count", "in all"), ((n, str(v)) for n, v in found["counts"].items()))
    terminal.table(("in use", "now"), ((n, str(v)) for n, v in found["gauges"].items()))
    terminal.table(("stage", "count", "mean", "p50", "p99"), _stage_rows(found))


def _stage_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    from kalos_ctx.metrics import quantile

    rows = []
    for name in STAGES:
        stage = found["stages"][name]
        count = sum(stage["buckets"])
        mean = stage["sum_s"] / count if count else None
        times = (mean, quantile(stage["buckets"], 0.5), quantile(stage["buckets"], 0.99))
        rows.append((name, str(count), *(_microseconds(value) for value in times)))
    return rows


def _microseconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e6:,.1f} us"


class JsonLines(logging.Formatter):
    """A log record as one JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; ASCII, so that nothing in it reaches the terminal raw."""
        said: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            # The class and the place; its text may quote what a client sent.
            said["error"] = record.exc_info[0].__name__
            trace = record.exc_info[2]
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            if trace is not None:
                said["at"] = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"
        return json.dumps(said)


def _log_to_stderr(form: str) -> None:
    """Send the package's log to standard error."""
    logger = logging.getLogger("kalos_ctx")
    logger.setLevel(logging.INFO)
    if form == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logger.handlers[:] = [handler]
        logger.propagate = False
