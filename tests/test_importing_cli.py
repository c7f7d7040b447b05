"""`kalos import` of other sources than JSON: recognising, rehearsing, and what it prints."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.chat_data import QWEN3
from helpers.framework_chats import SESSION

from kalos_ctx import cli, import_sources
from kalos_ctx.store import SessionStore

GOLDEN = Path(__file__).parent / "golden" / "imports"


@pytest.fixture
def kalos(capsys):
    """Return a function that runs a command: (exit status, standard output, standard error)."""

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            cli.app([str(arg) for arg in args], prog_name="kalos")
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.mark.parametrize("form", [(), ("--format", "langgraph")])
def test_import_of_checkpoints_is_recognised_or_told(kalos, store_path, form):
    code, out, err = kalos(
        "import", GOLDEN / "langgraph.sqlite", store_path, "--tokenizer", QWEN3, *form
    )
    assert (code, err) == (0, "")
    with SessionStore.open(store_path, "r") as store:
        tokens = sum(turn.num_tokens for turn in store.turns(SESSION))
    assert out == (f"1 sessions added, 0 grown, 0 unchanged: 6 turns, {tokens} tokens; 0 refused\n")


def test_import_of_agents_says_what_was_left_out(kalos, store_path):
    code, _, err = kalos("import", GOLDEN / "agents.sqlite", store_path, "--tokenizer", QWEN3)
    assert code == 0
    assert err.splitlines() == [
        "kalos: 1 developer turns stand as system turns, since the template has no developer",
        "kalos: not taken as in the source: 1 reasoning without its text, 1 web_search_call",
    ]


def test_import_dry_run_prints_what_the_import_then_prints(kalos, store_path):
    command = ("import", GOLDEN / "agents.sqlite", store_path, "--tokenizer", QWEN3)
    code, out, err = kalos(*command, "--dry-run")
    assert (code, store_path.exists()) == (0, False)
    rehearsed = json.loads(kalos(*command, "--dry-run", "--json")[1])
    assert rehearsed.pop("dry_run") is True
    assert kalos(*command) == (0, out.removeprefix("dry run: "), err)
    again = json.loads(kalos(*command, "--json")[1])
    assert (again["unchanged"], again["turns"], again["dry_run"]) == (1, 0, False)
    assert rehearsed["skipped"] == again["skipped"]


def test_import_refusal_names_the_thread_and_the_message(kalos, store_path, tmp_path):
    path = Path(shutil.copy(GOLDEN / "langgraph.sqlite", tmp_path))
    data = path.read_bytes()
    assert data.count(b"human") > 0
    path.write_bytes(data.replace(b"\xa5human", b"\xa5robot"))
    code, out, err = kalos("import", path, store_path, "--tokenizer", QWEN3, "--json")
    refused = [
        {
            "place": f"thread {SESSION}",
            "line": None,
            "reason": "messages[1] has an unknown role 'robot'",
        }
    ]
    assert (code, json.loads(out)["refused"]) == (1, refused)
    assert err.splitlines() == [
        f"thread {SESSION}: messages[1] has an unknown role 'robot'",
        "kalos: 1 conversations were refused; correct them and import again",
    ]


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("redis://127.0.0.1:1/0", ("--format", "jsonl"), "not of the format jsonl"),
        ("redis://me:secret@[", (), "the URL of the server cannot be read"),
        (GOLDEN / "redis.json", ("--format", "langgraph"), "no SQLite file"),
        (GOLDEN / "redis.json", ("--format", "redis"), "read from a URL"),
        (GOLDEN, (), "is a folder"),
    ],
)
def test_import_source_that_cannot_be_read_is_one_line_and_makes_no_store(
    kalos, store_path, source, options, words
):
    code, out, err = kalos("import", source, store_path, "--tokenizer", QWEN3, *options)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert words in err
    assert "secret" not in err
    assert not store_path.exists()


def test_import_formats_of_the_command_are_those_of_the_sources():
    assert tuple(one.value for one in cli.ImportFormat) == import_sources.FORMATS
