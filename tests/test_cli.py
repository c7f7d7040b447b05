"""The command line: output, exit statuses, one line for an error, and names on a terminal."""

import json
import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

import kalos_ctx
from kalos_ctx import cli, doctor, importing, terminal
from kalos_ctx import store_path as store_path_checks
from kalos_ctx.errors import StoreNotFound
from kalos_ctx.store import SessionStore

PACKAGE = Path(kalos_ctx.__file__).resolve().parents[1]
HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}
EVIL = "\x1b[31mred\r\n\u202e"


@pytest.fixture
def kalos(capsys):
    """Return a function that runs a command: (exit status, standard output, standard error)."""

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            cli.app([str(arg) for arg in args], prog_name="kalos")
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return the path of a tokenizer of whole words, which loads fast, without a template."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    vocab = {"hi": 0, "hello": 1, "bye": 2, "[UNK]": 3}
    Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).save(str(path))
    return path


@pytest.fixture
def chats(tmp_path):
    """Return a file with two conversations, and one between them that is refused."""
    path = tmp_path / "chats.jsonl"
    records = [
        {"id": "a", "messages": [HI, HELLO]},
        {"id": "bad", "messages": [{"role": "narrator", "content": "x"}]},
        {"id": "b", "messages": [HI]},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def filled(store_path):
    """Return the path of a store of token IDs with sessions s0 to s4 and one with an evil name."""
    with SessionStore.open(store_path, vocab_size=1000) as store:
        for i in range(5):
            store.append(f"s{i}", "user", token_ids=[1, 2, 3])
        store.append(EVIL, "user", token_ids=[4])
        store.append("s0", "assistant", token_ids=range(10, 40))
        store.append("other", "user", token_ids=[4], tenant="t")
    return store_path


def subprocess_args(*args):
    return [sys.executable, "-m", "kalos_ctx.cli", *map(str, args)]


def environment():
    return {**os.environ, "PYTHONPATH": str(PACKAGE), "COLUMNS": "100"}


# ---- Import and export --------------------------------------------------------------------------


def test_import_names_refusals_and_exits_with_1(kalos, chats, store_path, tokenizer):
    code, out, err = kalos("import", chats, store_path, "--tokenizer", tokenizer)
    assert code == 1
    assert out == "2 sessions added, 0 grown, 0 unchanged: 3 turns, 3 tokens; 1 refused\n"
    assert err.splitlines() == [
        f"{chats}:2: messages[0] has an unknown role 'narrator'",
        "kalos: 1 conversations were refused; correct these lines and import again",
    ]


def test_import_strict_stops_there(kalos, chats, store_path, tokenizer):
    code, out, _ = kalos(
        "import", chats, store_path, "--tokenizer", tokenizer, "--strict", "--json"
    )
    report = json.loads(out)
    assert (code, report["sessions"], report["refused"][0]["line"]) == (1, 1, 2)


def test_import_export_import_is_the_identity(kalos, chats, store_path, tokenizer, tmp_path):
    kalos("import", chats, store_path, "--tokenizer", tokenizer)
    code, out, err = kalos("export", store_path)
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"id": "a", "messages": [HI, HELLO]},
        {"id": "b", "messages": [HI]},
    ]
    exported = tmp_path / "exported.jsonl"
    exported.write_text(out)
    again = tmp_path / "again.kalos"
    assert kalos("import", exported, again, "--tokenizer", tokenizer)[0] == 0
    assert kalos("export", again)[1] == out
    assert kalos("import", exported, again, "--tokenizer", tokenizer)[1].startswith("0 sessions")


def test_import_from_standard_input(chats, store_path, tokenizer):
    done = subprocess.run(
        subprocess_args("import", "-", store_path, "--tokenizer", tokenizer),
        input=chats.read_bytes(),
        capture_output=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"stdin:2: messages[0]")
    with SessionStore.open(store_path, "r") as store:
        assert store.sessions().items == ["a", "b"]


def test_import_missing_file_makes_no_store(kalos, store_path, tokenizer, tmp_path):
    code, out, err = kalos("import", tmp_path / "none", store_path, "--tokenizer", tokenizer)
    assert (code, out) == (1, "")
    assert err == f"kalos: {tmp_path}/none: No such file or directory\n"
    assert not store_path.exists()


def test_import_without_tokenizer_says_what_to_do(kalos, chats, store_path):
    code, _, err = kalos("import", chats, store_path)
    assert (code, err) == (1, "kalos: text needs a tokenizer; give --tokenizer PATH\n")
    assert not store_path.exists()


def test_export_one_session_and_its_tenant(kalos, filled):
    code, out, _ = kalos("export", filled, "other", "--tenant", "t")
    assert (code, json.loads(out)["id"]) == (0, "other")
    code, out, err = kalos("export", filled, "other")
    assert (code, out, len(err.splitlines())) == (1, "", 1)


def test_export_to_a_file_leaves_no_part_behind(kalos, filled, tmp_path):
    target = tmp_path / "out.jsonl"
    assert kalos("export", filled, "-o", target)[:2] == (0, "")
    assert len(target.read_text().splitlines()) == 6
    assert kalos("export", filled, "none", "-o", target)[0] == 1
    assert len(target.read_text().splitlines()) == 6
    assert sorted(p.name for p in tmp_path.iterdir() if "out" in p.name) == ["out.jsonl"]


@pytest.mark.parametrize("command", ["export", "sessions"])
def test_output_whose_reader_has_left_ends_quietly(filled, command):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        subprocess_args(command, filled),
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (terminal.EXIT_BROKEN_PIPE, b"")


def test_output_that_does_not_fit_is_one_line(filled):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            subprocess_args("export", filled),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"kalos: No space left on device\n")


def test_characters_that_the_terminal_lacks_are_escaped(store_path):
    with SessionStore.open(store_path, vocab_size=9) as store:
        store.append("\u6f22", "user", token_ids=[1])
    done = subprocess.run(
        subprocess_args("sessions", store_path),
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u6f22" in done.stdout


def test_import_progress_is_shown_on_a_terminal_only(chats, store_path, tokenizer):
    args = subprocess_args("import", chats, store_path, "--tokenizer", tokenizer)
    leader, follower = pty.openpty()
    subprocess.run(args, stdout=subprocess.DEVNULL, stderr=follower, env=environment(), check=False)
    os.close(follower)
    shown = b""
    try:
        while data := os.read(leader, 65536):
            shown += data
    except OSError:  # Linux's way to say that the other side is closed
        pass
    os.close(leader)
    assert b"Importing chats.jsonl" in shown
    assert b"narrator" in shown
    piped = subprocess.run(args, capture_output=True, env=environment(), check=False)
    assert b"Importing" not in piped.stdout + piped.stderr


# ---- Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["export", "sessions", "stats", "verify", ("window", "s", "--max-tokens", "9")],
    ids=lambda c: c if isinstance(c, str) else c[0],
)
def test_missing_store_is_one_line_and_exit_1(kalos, store_path, command):
    name, *more = [command] if isinstance(command, str) else command
    code, out, err = kalos(name, store_path, *more)
    assert (code, out) == (1, "")
    assert err == (
        "kalos: there is no store at the path; check the path, or make a store with "
        "'kalos import'\n"
    )


def test_compact_makes_no_store(kalos, store_path):
    assert kalos("compact", store_path)[0] == 1
    assert not store_path.exists()


@pytest.mark.parametrize(
    "args",
    [
        ("frobnicate",),
        ("import", "file"),
        ("window", "store", "session"),
        ("window", "store", "session", "--max-tokens", "x"),
        ("window", "store", "session", "--max-tokens", "-1"),
        ("sessions", "store", "--limit", "0"),
        ("export", "store", "--what"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(kalos, args):
    code, out, err = kalos(*args)
    assert (code, out) == (2, "")
    assert err != ""


def test_locked_store_says_what_to_do(kalos, filled):
    with SessionStore.open(filled):
        code, _, err = kalos("compact", filled)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "stop the other writer" in err


def test_file_in_place_of_a_store_is_refused(kalos, tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    code, _, err = kalos("stats", path)
    assert (code, len(err.splitlines())) == (1, 1)
    assert path.read_text() == "x"


def test_interrupt_is_one_line_and_exit_130(kalos, chats, store_path, tokenizer, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(importing, "import_chats", interrupted)
    code, out, err = kalos("import", chats, store_path, "--tokenizer", tokenizer)
    assert (code, out, err) == (130, "", "kalos: interrupted\n")


def test_other_tokenizer_is_named(kalos, chats, store_path, tokenizer, tmp_path):
    kalos("import", chats, store_path, "--tokenizer", tokenizer)
    other = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"hi": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(other))
    code, _, err = kalos("import", chats, store_path, "--tokenizer", other)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "--tokenizer" in err


# ---- Looking at a store -------------------------------------------------------------------------


def test_sessions_pages_with_a_prefix(kalos, filled):
    code, out, _ = kalos("sessions", filled, "--prefix", "s", "--limit", "2", "--json")
    page = json.loads(out)
    assert code == 0
    assert page["sessions"] == [{"id": "s0", "turns": 2}, {"id": "s1", "turns": 1}]
    rest = ("--cursor", page["cursor"])
    code, out, err = kalos("sessions", filled, "--prefix", "s", "--limit", "3", *rest)
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["s2", "1"],
        ["s3", "1"],
        ["s4", "1"],
    ]
    assert (code, err) == (0, "")


def test_sessions_escapes_names(kalos, filled):
    _, out, _ = kalos("sessions", filled)
    assert "\\x1b[31mred\\r\\n\\u202e" in out
    assert not set(out) & set("\x1b\r\u202e")
    _, out, _ = kalos("sessions", filled, "--json")
    assert out.isascii()
    assert EVIL in [one["id"] for one in json.loads(out)["sessions"]]


def test_stats_counts_what_is_there(kalos, filled):
    code, out, _ = kalos("stats", filled, "--json")
    found = json.loads(out)
    assert (code, found["sessions"], found["turns"]) == (0, 7, 8)
    _, out, _ = kalos("stats", filled)
    assert ["turns", "8"] in [line.split() for line in out.splitlines()]


def test_verify_says_what_is_damaged(kalos, filled):
    assert kalos("verify", filled)[0] == 0
    log = filled / "gen-000000" / "tok-000000"
    data = bytearray(log.read_bytes())
    data[0] ^= 1
    log.write_bytes(data)
    code, out, err = kalos("verify", filled)
    assert (code, len(err.splitlines())) == (1, 1)
    assert "tok-000000:" in out
    code, out, _ = kalos("verify", filled, "--json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_compact_tells_bytes(kalos, filled):
    code, out, _ = kalos("compact", filled, "--json")
    assert code == 0
    assert set(json.loads(out)) == {"before", "after"}


# ---- Windows ------------------------------------------------------------------------------------


def test_window_json_has_token_ids_and_report(kalos, filled):
    code, out, _ = kalos("window", filled, "s0", "--max-tokens", "64", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["token_ids"] == [1, 2, 3, *range(10, 40)]
    assert [one["seq"] for one in found["kept"]] == [0, 1]
    assert found["segments"][-1]["stop"] == found["num_tokens"] == 33


def test_window_table_tells_parts_and_drops(kalos, filled):
    args = ("--max-tokens", "40", "--reserve", "8", "--sliding")
    code, out, _ = kalos("window", filled, "s0", *args)
    assert code == 0
    assert f"30 tokens on {os.environ['KALOS_DEVICE']}" in out
    assert "dropped: 1 budget" in out


def test_window_recalls_by_vector_and_by_text(kalos, filled, tmp_path, monkeypatch):
    with SessionStore.open(filled) as store:
        store.add_passages("c", np.eye(3, dtype=np.float32), token_ids=[[7], [8], [9]])
    np.save(tmp_path / "q.npy", np.array([0, 1, 0], np.float32))
    (tmp_path / "embedding.py").write_text("def embed(text):\n    return [0, 0, len(text)]\n")
    monkeypatch.chdir(tmp_path)
    common = ("window", filled, "s0", "--max-tokens", "64", "--collection", "c", "--top-k", "1")
    _, out, _ = kalos(*common, "--json", "--query-vector", tmp_path / "q.npy")
    assert [hit["id"] for hit in json.loads(out)["hits"]] == [1]
    _, out, _ = kalos(*common, "--json", "--query-text", "hi", "--embed", "embedding:embed")
    assert [hit["id"] for hit in json.loads(out)["hits"]] == [2]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--query-text", "hi"), 1, "--embed"),
        (("--query-text", "hi", "--embed", "no_such_module:f"), 1, "--embed"),
        (("--query-text", "hi", "--embed", "json:no_such_name"), 1, "--embed"),
        (("--query-text", "hi", "--embed", "json"), 2, "MODULE:FUNCTION"),
        (("--query-vector", "none.npy"), 1, "none.npy"),
        (("--query-text", "hi", "--query-vector", "q.npy"), 2, "not both"),
        (("--text",), 1, "--tokenizer"),
        (("--generation-prompt",), 1, "--tokenizer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_window_query_that_cannot_be_used_says_why(kalos, filled, args, code, words):
    found, out, err = kalos("window", filled, "s0", "--max-tokens", "64", *args)
    assert (found, out) == (code, "")
    assert words in err


def test_window_unknown_session_is_one_line(kalos, filled):
    code, out, err = kalos("window", filled, "nobody", "--max-tokens", "64")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "kalos sessions" in err


def test_window_text_needs_no_more_than_the_tokenizer(kalos, chats, store_path, tokenizer):
    kalos("import", chats, store_path, "--tokenizer", tokenizer)
    code, out, _ = kalos(
        "window", store_path, "a", "--max-tokens", "9", "--tokenizer", tokenizer, "--text"
    )
    assert (code, out) == (0, "hi hello\n")


def test_window_without_the_tokenizer_says_what_is_missing(chats, store_path, tokenizer):
    """A warning of the package is one line of ours, not a bare log record."""
    kalos_args = ("import", chats, store_path, "--tokenizer", tokenizer)
    subprocess.run(
        subprocess_args(*kalos_args), capture_output=True, env=environment(), check=False
    )
    done = subprocess.run(
        subprocess_args("window", store_path, "a", "--max-tokens", "9", "--json"),
        capture_output=True,
        env=environment(),
        text=True,
        check=False,
    )
    assert (done.returncode, json.loads(done.stdout)["token_ids"]) == (0, [0, 1])
    assert [line[:7] for line in done.stderr.splitlines()] == ["kalos: "]


# ---- This machine -------------------------------------------------------------------------------


def test_doctor_finds_nothing_broken_here(kalos, tmp_path):
    code, out, _ = kalos("doctor", tmp_path / "not" / "yet", "--json")
    found = {one["what"]: one["state"] for one in json.loads(out)}
    assert code == 0
    assert {"platform", "recall", "cuda-python", "gpu", "file system", "open files"} <= set(found)
    assert "broken" not in found.values()


def test_doctor_network_file_system_is_broken(kalos, tmp_path, monkeypatch):
    monkeypatch.setattr(store_path_checks, "file_system", lambda folder: "nfs4")
    code, out, err = kalos("doctor", tmp_path)
    assert code == 1
    assert "nfs4" in out
    assert err == "kalos: broken: file system; the list says what to do\n"


@pytest.mark.parametrize(
    ("init", "count", "state"), [(0, 2, "ok"), (0, 0, "note"), (100, 0, "note"), (803, 0, "broken")]
)
def test_doctor_asks_the_driver(init, count, state):
    def get_count(pointer):
        pointer._obj.value = count
        return 0

    driver = types.SimpleNamespace(cuInit=lambda flags: init, cuDeviceGetCount=get_count)
    assert doctor.cuda_devices(lambda name: driver).state == state


def test_doctor_without_a_driver_is_a_note():
    def missing(name):
        raise OSError

    assert doctor.cuda_devices(missing).state == "note"


def test_bench_measures_with_few_calls(kalos, monkeypatch, tmp_path):
    from kalos_ctx import bench

    small = {"NUM_APPENDS": 128, "NUM_SYNCED": 2, "NUM_CALLS": 3, "NUM_ROWS": 64, "LONG_TURNS": 100}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    code, out, _ = kalos("bench", "--json", "--folder", tmp_path)
    found = json.loads(out)["measures"]
    assert code == 0
    assert all(one.get("per_second", one.get("p50_us", 0)) > 0 for one in found)
    assert len(found) == 9
    assert list(tmp_path.iterdir()) == []


# ---- What reaches a terminal --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("plain ä 漢", "plain ä 漢"),
        ("\x1b]0;x\x07", "\\x1b]0;x\\x07"),
        ("a\u2028b\u200b\x85", "a\\u2028b\\u200b\\x85"),
        ("\n\t\0", "\\n\\t\\x00"),
        (b"\xff\n", "\\xff\\n"),
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_shown_escapes_what_is_not_printable(value, wanted):
    assert terminal.shown(value) == wanted


def test_short_stays_within_its_width():
    assert terminal.short("a  b\nc", 10) == "a b c"
    assert terminal.short("x" * 100, 10) == "xxxxxxx..."
    assert len(terminal.short("\x1b" * 1000, 10)) == 10


def test_readable_keeps_lines_and_escapes_the_rest():
    assert terminal.readable("a\n\tb\x1b[2J\r") == "a\n\tb\\x1b[2J\\r"


def test_table_takes_markup_as_text(capsys):
    terminal.table(("name",), [("[red]x[/red]",), ("x" * 150,)])
    out = capsys.readouterr().out.splitlines()
    assert out == ["name", "[red]x[/red]", "x" * 150]


def test_failure_line_is_one_line():
    error = StoreNotFound("first\nsecond")
    assert terminal.failure_line(error).startswith("first second; ")
    missing = FileNotFoundError(2, "No such file", "/tmp/\x1bx")
    assert terminal.failure_line(missing) == "/tmp/\\x1bx: No such file"
