"""`kalos demo` and the examples: that they run as a user runs them, and that the demo can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kalos_ctx
from kalos_ctx import cli, demo, demo_data, terminal
from kalos_ctx.store import SessionStore

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(kalos_ctx.__file__).resolve().parents[1]
# Those that need no framework; tests/adapters runs the others.
EXAMPLES = sorted(
    ROOT / "examples" / f"{name}.py"
    for name in ("chatbot_backend", "custom_loop", "packed_inference", "rag_service")
)


def run_python(*args, cwd):
    return subprocess.run(
        [sys.executable, "-W", "error", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Run the demo once as a user does, with a store that is kept: (its figures, the store)."""
    folder = tmp_path_factory.mktemp("demo")
    store = folder / "chats.kalos"
    done = run_python("-m", "kalos_ctx.cli", "demo", "--json", "--keep", store, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout), store


def test_demo_windows_stay_within_their_bound(kept):
    found, _ = kept
    assert len(found["windows"]) == demo.NUM_ROWS
    for window in found["windows"]:
        assert 0 < window["tokens"] <= found["max_tokens"] - found["reserve"]
        assert 0 <= window["reused_tokens"] <= window["tokens"]
        assert window["timings_us"]["total"] > 0


def test_demo_recalls_real_passages_of_other_chats(kept):
    found, _ = kept
    texts = {passage["text"]: passage["conv"] for passage in demo_data.passages()}
    recalled = [one["text"] for window in found["windows"] for one in window["recalled"]]
    assert len(recalled) >= demo.NUM_ROWS
    assert demo.LONG_CHAT not in {texts[text] for text in recalled}


def test_demo_stable_windows_keep_more_of_the_prefix(kept):
    shares = kept[0]["reuse"]["share"]
    assert shares["stable"] > 0.9
    assert shares["sliding"] < shares["stable"]


def test_demo_killed_writers_lost_nothing_and_the_store_is_kept(kept):
    found, path = kept
    crash = found["crash"]
    assert crash["acknowledged"] >= demo.KILLS * demo.ACKS_BEFORE_KILL
    assert crash["found"] >= crash["acknowledged"]
    assert crash["lost"] == crash["wrong"] == 0
    with SessionStore.open(path, "r") as store:
        assert store.count(demo.CRASH_SESSION) == crash["found"]
        assert store.verify().ok


def test_demo_prints_plain_text_into_a_pipe(kept, capsys):
    found, _ = kept
    demo.print_demo(found)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "nothing was lost" in out
    for window in found["windows"]:
        for passage in window["recalled"]:
            assert terminal.short(passage["text"], 90) in out


@pytest.fixture
def crash_store(store_path):
    """Return a store in which the writer that is killed has turns to append."""
    with SessionStore.open(store_path, vocab_size=100) as store:
        for i in range(10):
            store.append(demo.LONG_CHAT, "user", token_ids=range(i + 1), framed=True)
    return store_path


def test_demo_lost_turn_is_found(crash_store, monkeypatch):
    def one_too_many(path):
        return count(path) + 1

    count = demo.acknowledgements
    monkeypatch.setattr(demo, "acknowledgements", one_too_many)
    monkeypatch.setattr(demo, "KILLS", 1)
    found = demo.kill_a_writer(crash_store)
    # A last append that was in the store but not acknowledged any more hides the one made up.
    assert found["lost"] + (found["found"] - found["acknowledged"] + 1) == 1


def test_demo_changed_turn_is_found(crash_store, monkeypatch):
    def nothing(path):
        return 0

    monkeypatch.setattr(demo, "acknowledgements", nothing)
    monkeypatch.setattr(demo, "KILLS", 1)
    with SessionStore.open(crash_store) as store:
        store.append(demo.CRASH_SESSION, "user", token_ids=[0], framed=True)
        store.append(demo.CRASH_SESSION, "user", token_ids=[99], framed=True)
    assert demo.kill_a_writer(crash_store)["wrong"] == 1


def test_demo_writer_that_ends_by_itself_is_no_kill(store_path):
    with pytest.raises(terminal.CommandFailed, match="ended by itself with status 1 after 0 app"):
        demo.acknowledgements(store_path)


def test_demo_loss_is_exit_1(kept, monkeypatch, capsys):
    found = {**kept[0], "crash": {**kept[0]["crash"], "lost": 2}}
    monkeypatch.setattr(demo, "run_demo", lambda keep, step: found)
    with pytest.raises(SystemExit) as ended:
        cli.app(["demo"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert "2 were lost" in out
    assert len(err.splitlines()) == 1


def test_demo_keeps_no_store_over_another(kept, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.app(["demo", "--keep", str(kept[1])])
    assert ended.value.code == 1
    assert "give a new folder" in capsys.readouterr().err


def test_demo_moments_are_embeddings_of_the_long_chat():
    found = demo.moments()
    assert 217 in found
    assert all(vector.shape == (384,) for vector in found.values())
    assert np.allclose([np.linalg.norm(v) for v in found.values()], 1, atol=1e-2)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_without_arguments(path, tmp_path):
    done = run_python(path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) >= 4
    assert list(tmp_path.iterdir()) == []
