"""The `kalos` command. docs/cli.md describes every command, its output and its exit status."""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kalos_ctx import sidecar_commands, terminal
from kalos_ctx.terminal import CommandFailed, guarded, name_argument, name_text, shown

if TYPE_CHECKING:
    from kalos_ctx.importing import ImportReport
    from kalos_ctx.rehearsal import Rehearsal
    from kalos_ctx.store import SessionStore

app = typer.Typer(
    name="kalos",
    help="From a chat session's ID to the model's next input, as token IDs, in microseconds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")]
Tenant = Annotated[str, typer.Option(help="Tenant; the default one is empty.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="tokenizer.json, or its folder with the chat template.")
]
Template = Annotated[
    Path | None, typer.Option(help="Chat template, for the one beside the tokenizer.")
]


class ImportFormat(str, Enum):
    """What `kalos import` reads; the names are those of `import_sources.FORMATS`."""

    JSONL = "jsonl"
    SHAREGPT = "sharegpt"
    OPENAI_AGENTS = "openai-agents"
    LANGGRAPH = "langgraph"
    REDIS = "redis"


def main() -> None:
    """Run the command line; ends the process."""
    terminal.prepare_streams()
    app(prog_name="kalos")


def open_store(
    path: Path,
    mode: str = "r",
    tokenizer: Path | None = None,
    template: Path | None = None,
) -> SessionStore:
    """Open a store as the commands do."""
    from kalos_ctx.store import SessionStore

    return SessionStore.open(path, mode, **store_options(tokenizer, template))


def store_options(tokenizer: Path | None, template: Path | None) -> dict[str, Any]:
    """Return what a store is opened with, from what was given on the command line."""
    if tokenizer is not None and not tokenizer.exists():
        raise CommandFailed(f"there is no tokenizer at {tokenizer}; check --tokenizer")
    return {
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "template": None if template is None else str(template),
    }


# ---- Chats in and out ---------------------------------------------------------------------------


@app.command("import")
@guarded
def import_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="JSON lines or a JSON array, gzip too, - for standard input; an SQLite file of "
            "OpenAI Agents or LangGraph; redis://HOST:PORT/DATABASE.",
        ),
    ],
    store: StorePath,
    *,
    tokenizer: Tokenizer = None,
    template: Template = None,
    tenant: Tenant = "",
    form: Annotated[
        ImportFormat | None,
        typer.Option("--format", help="What SOURCE is; found out if left out."),
    ] = None,
    key_prefix: Annotated[
        str | None,
        typer.Option(help="What the keys in Redis begin with, if not with what LangChain takes."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Stop at the first refusal.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and count everything, write nothing.")
    ] = False,
    trust_token_ids: Annotated[
        bool,
        typer.Option(
            "--trust-token-ids",
            help="Take token IDs in place of text as they are, control tokens included.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add conversations of files and of other stores; may be repeated.

    Refused conversations are named with their place and the reason, the others are added; then the
    exit status is 1.
    """
    from kalos_ctx.import_sources import opened_source
    from kalos_ctx.importing import Refusal, import_chats

    if os.path.isdir(source):
        raise CommandFailed(f"{source} is a folder; give a file")
    if tokenizer is None and not trust_token_ids:
        raise CommandFailed("text needs a tokenizer; give --tokenizer PATH")

    def refuse(refusal: Refusal) -> None:
        terminal.note(shown(f"{refusal.place}: {refusal.reason}"))

    with (
        # Before a store is made for it.
        opened_source(source, form and form.value, key_prefix=key_prefix) as chats,
        _import_target(store, tokenizer, template, dry_run) as target,
        terminal.progress(f"Importing {chats.label}", chats.nbytes) as step,
    ):
        report = import_chats(
            target,
            chats.chats(step),
            tenant=name_argument(tenant),
            strict=strict,
            trust_token_ids=trust_token_ids,
            on_refusal=refuse,
        )
        target.sync()
    _print_import(report, dry_run, as_json)
    if report.refused:
        what = "these lines" if report.refused[0].line is not None else "them"
        where = "it was stopped there" if strict else f"correct {what} and import again"
        raise CommandFailed(f"{len(report.refused)} conversations were refused; {where}")


def _import_target(
    path: Path, tokenizer: Path | None, template: Path | None, dry_run: bool
) -> SessionStore | Rehearsal:
    if not dry_run:
        return open_store(path, "a", tokenizer, template)
    from kalos_ctx.rehearsal import Rehearsal

    return Rehearsal(path, **store_options(tokenizer, template))


def _print_import(report: ImportReport, dry_run: bool, as_json: bool) -> None:
    if as_json:
        fields = ("sessions", "turns", "tokens", "grown", "unchanged", "as_system", "skipped")
        refused = [{"place": r.place, "line": r.line, "reason": r.reason} for r in report.refused]
        found = {name: getattr(report, name) for name in fields}
        terminal.print_json({**found, "refused": refused, "dry_run": dry_run})
    else:
        terminal.say(
            f"{'dry run: ' if dry_run else ''}{report.sessions} sessions added, {report.grown} "
            f"grown, {report.unchanged} unchanged: {report.turns} turns, {report.tokens} tokens; "
            f"{len(report.refused)} refused"
        )
    if report.as_system:
        terminal.note(
            f"kalos: {report.as_system} developer turns stand as system turns, since the "
            "template has no developer"
        )
    if report.skipped:
        what = ", ".join(f"{count} {name}" for name, count in sorted(report.skipped.items()))
        terminal.note(shown(f"kalos: not taken as in the source: {what}"))


@app.command("export")
@guarded
def export_command(
    store: StorePath,
    session: Annotated[
        str | None, typer.Argument(metavar="SESSION", help="All, if left out.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of standard output.")
    ] = None,
    tenant: Tenant = "",
    full: Annotated[
        bool, typer.Option(help="Add times, and the token IDs of turns without text.")
    ] = False,
) -> None:
    """Write sessions as JSON lines, {id, messages} each, as `kalos import` reads them."""
    import json

    from kalos_ctx.exporting import export_session, export_sessions

    owner = name_argument(tenant)
    with open_store(store) as source:
        if session is not None:
            name = name_argument(session)
            records: Any = [export_session(source, name, tenant=owner, full=full)]
        else:
            records = export_sessions(source, tenant=owner, full=full)
        if output is None:
            for record in records:
                print(json.dumps(record))
            return
        # Beside the target and renamed at the end: a name never stands for half an export.
        part = output.with_name(output.name + ".part")
        try:
            with part.open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(record) + "\n" for record in records)
            part.replace(output)
        finally:
            part.unlink(missing_ok=True)


# ---- Looking at a store -------------------------------------------------------------------------


@app.command("sessions")
@guarded
def sessions_command(
    store: StorePath,
    *,
    prefix: Annotated[str, typer.Option(help="Names that begin with it.")] = "",
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=100_000)] = 100,
    cursor: Annotated[str | None, typer.Option(help="Where the list before ended.")] = None,
    tenant: Tenant = "",
    as_json: AsJson = False,
) -> None:
    """List sessions in the order in which they were made, with the number of their turns."""
    owner = name_argument(tenant)
    with open_store(store) as source:
        page = source.sessions(
            tenant=owner, prefix=name_argument(prefix), cursor=cursor, limit=limit
        )
        rows = [(name, source.count(name, tenant=owner)) for name in page.items]
    if as_json:
        terminal.print_json(
            {"sessions": [{"id": name_text(name), "turns": count} for name, count in rows],
             "cursor": page.cursor}
        )  # fmt: skip
        return
    terminal.table(("session", "turns"), ((_cell(name), count) for name, count in rows),
                   numbers=(1,))  # fmt: skip
    if page.cursor is not None:
        terminal.note(f"there are more: --cursor {page.cursor} goes on")


def _cell(name: str | bytes) -> str:
    return name_text(name)


@app.command("stats")
@guarded
def stats_command(store: StorePath, as_json: AsJson = False) -> None:
    """Show what a store is and holds."""
    with open_store(store) as source:
        found = source.stats()
    if as_json:
        terminal.print_json(found)
        return
    rows: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{inner}", _count(one)) for inner, one in value.items()]
        else:
            rows.append((name, _moment(value) if name == "created_at" else _count(value)))
    terminal.table(("what", "value"), rows)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(" ", "seconds")


def _count(value: object) -> object:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


@app.command("verify")
@guarded
def verify_command(store: StorePath, as_json: AsJson = False) -> None:
    """Read a whole store and compare it with its checksums; exit status 1 if it is damaged."""
    with open_store(store) as source, terminal.progress("Reading", None) as step:
        report = source.verify(lambda done, total: step(done))
    if as_json:
        terminal.print_json(
            {
                "ok": report.ok,
                "errors": [
                    {"file": e.file, "offset": e.offset, "what": e.what} for e in report.errors
                ],
                "checked": report.checked,
            }
        )
    else:
        for flaw in report.errors:
            terminal.say(shown(f"{flaw.file}:{flaw.offset}: {flaw.what}"))
        checked = ", ".join(f"{value:,} {name}" for name, value in report.checked.items())
        terminal.say(f"read {checked}: {'no' if report.ok else len(report.errors)} damage found")
    if not report.ok:
        raise CommandFailed("the store is damaged; restore it from a snapshot")


@app.command("compact")
@guarded
def compact_command(store: StorePath, as_json: AsJson = False) -> None:
    """Write the living data into new files and drop the old ones."""
    open_store(store).close()  # a writer would make a store where there is none
    with open_store(store, "a") as target:
        sizes = target.compact()
    if as_json:
        terminal.print_json(sizes)
    else:
        terminal.say(f"{sizes['before']:,} bytes before, {sizes['after']:,} bytes after")


# ---- Windows ------------------------------------------------------------------------------------


@app.command("window")
@guarded
def window_command(
    store: StorePath,
    session: Annotated[str, typer.Argument(metavar="SESSION")],
    *,
    max_tokens: Annotated[
        int, typer.Option(help="Hard bound in tokens, --reserve included.", min=0)
    ],
    reserve: Annotated[int, typer.Option(help="Tokens kept free for the reply.", min=0)] = 0,
    tokenizer: Tokenizer = None,
    template: Template = None,
    tenant: Tenant = "",
    query_text: Annotated[
        str | None, typer.Option(help="Recall by this text; needs --embed.")
    ] = None,
    embed: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            envvar="KALOS_EMBED",
            help="Python function that takes a text and returns its vector.",
        ),
    ] = None,
    query_vector: Annotated[
        Path | None, typer.Option(help="Recall by the vector in this .npy file.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="Passages to recall.", min=0)] = 5,
    collection: Annotated[
        list[str] | None, typer.Option(help="Collection to recall from; may be repeated.")
    ] = None,
    session_recall: Annotated[
        bool, typer.Option(help="Recall from the session's own older turns too.")
    ] = False,
    as_of: Annotated[
        int | None, typer.Option(help="As if only the turns before it existed.")
    ] = None,
    generation_prompt: Annotated[
        bool, typer.Option(help="End with what asks the model for its turn.")
    ] = False,
    sliding: Annotated[
        bool, typer.Option(help="Keep as much as fits instead of a stable beginning.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    text: Annotated[bool, typer.Option("--text", help="Print the window as text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build the session's next window and show what stands in it and why."""
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.planner import Policy
    from kalos_ctx.window_view import print_window, window_document

    query = _query(query_text, embed, query_vector)
    if text and tokenizer is None:
        raise CommandFailed("--text needs the tokenizer; give --tokenizer PATH")
    if generation_prompt and tokenizer is None:
        raise CommandFailed("--generation-prompt comes from the template; give --tokenizer PATH")
    policy = Policy(stable_prefix=not sliding, generation_prompt=generation_prompt)
    with (
        open_store(store, "r", tokenizer, template) as source,
        ContextAssembler(source, device=device) as assembler,
        assembler.assemble(
            name_argument(session),
            tenant=name_argument(tenant),
            max_tokens=max_tokens,
            reserve=reserve,
            query=query,
            top_k=top_k if query is not None else 0,
            collections=tuple(name_argument(name) for name in collection or ()),
            session_recall=session_recall,
            as_of=as_of,
            policy=policy,
        ) as window,
    ):
        if as_json:
            terminal.print_json(window_document(window))
        elif text and source.codec is not None:
            terminal.say(terminal.readable(source.codec.decode(window.token_ids)))
        else:
            print_window(window, source, name_argument(tenant))


@app.command("inspect")
@guarded
def inspect_command(
    store: StorePath,
    *,
    port: Annotated[
        int, typer.Option(help="On 127.0.0.1; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    tokenizer: Tokenizer = None,
    template: Template = None,
    embed: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            envvar="KALOS_EMBED",
            help="Python function that takes a text and returns its vector, to recall by texts.",
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
) -> None:
    """Show sessions and their windows on a page of this machine, until Ctrl-C."""
    from kalos_ctx.inspecting.server import InspectServer

    function = None if embed is None else embedding_function(embed)
    with (
        open_store(store, "r", tokenizer, template) as source,
        InspectServer(source, port=port, embed=function) as server,
    ):
        terminal.say(server.url)
        terminal.note("kalos: the page is at this address until Ctrl-C; who has it can read all")
        sys.stdout.flush()
        if not no_open:
            import webbrowser

            webbrowser.open(server.launch_url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _query(text: str | None, embed: str | None, file: Path | None) -> Any:
    """Return the vector to recall by, or None."""
    if text is not None and file is not None:
        raise typer.BadParameter("give --query-text or --query-vector, not both")
    if file is not None:
        import numpy as np

        try:
            return np.load(file, allow_pickle=False)
        except ValueError:
            raise CommandFailed(f"{file} holds no array; save one with numpy.save") from None
    if text is None:
        return None
    if embed is None:
        raise CommandFailed(
            "Kalos has no embedding model; give --embed MODULE:FUNCTION that turns the text into "
            "a vector, or --query-vector FILE.npy"
        )
    return embedding_function(embed)(text)


def embedding_function(where: str) -> Any:
    """Import `MODULE:FUNCTION`; modules in the current folder are found too."""
    import importlib

    module, _, name = where.partition(":")
    if not module or not name:
        raise typer.BadParameter("--embed must be MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandFailed(f"--embed cannot be imported: {error}; check its name") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise CommandFailed(f"{where} is no function; give one that takes a text")
    return found


# ---- This machine -------------------------------------------------------------------------------


@app.command("demo")
@guarded
def demo_command(
    keep: Annotated[Path | None, typer.Option(help="Make the store here, and keep it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the main job on bundled real chats, kill a writer, and show that nothing was lost."""
    from kalos_ctx.demo import print_demo, run_demo

    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise CommandFailed(f"{keep} exists already; give a new folder to --keep")
    watched = terminal.is_terminal(sys.stderr) and not as_json
    found = run_demo(keep, terminal.note if watched else lambda what: None)
    if as_json:
        terminal.print_json(found)
    else:
        print_demo(found)
    if found["crash"]["lost"]:
        raise CommandFailed("acknowledged turns were lost; please report this with the output")


@app.command("bench")
@guarded
def bench_command(
    folder: Annotated[
        Path | None, typer.Option(help="Where to make the store; a temporary folder if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure appends, reads, windows and recall on this machine, in a few seconds."""
    from kalos_ctx.bench import print_bench, run_bench

    found = run_bench(folder)
    if as_json:
        terminal.print_json(found)
    else:
        print_bench(found)


@app.command("doctor")
@guarded
def doctor_command(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="Where stores are to be.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Say whether this machine can run Kalos, and what to do where it cannot."""
    from kalos_ctx.doctor import examine

    findings = examine(path)
    if as_json:
        terminal.print_json([finding.as_dict() for finding in findings])
    else:
        terminal.table(
            ("", "what", "found", "what to do"),
            ((f.state, f.what, f.found, f.advice) for f in findings),
        )
    broken = [finding.what for finding in findings if finding.state == "broken"]
    if broken:
        raise CommandFailed(f"broken: {', '.join(broken)}; the list says what to do")


sidecar_commands.add_to(app)


if __name__ == "__main__":
    main()
