"""The two ends of a channel in C, under sanitizers; and a client in C against a sidecar."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers.sidecars import SidecarProcess, socket_folder

import kalos_ctx
from kalos_ctx._kernel_source import kernel_dir

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "tests" / "native"
EXAMPLE = ROOT / "examples" / "c"
ENDS = ROOT / "cython_ext" / "kalos_ctx" / "_channel.h"
MEMORY = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# gcc's thread sanitizer takes no notice of a fence; what it looks at is ordered by the words alone.
ORDER = ["-O1", "-fsanitize=thread", "-Wno-tsan"]
PLAIN = ["-O3"]


def build(folder, program, flags, *, sources=(), ends=ENDS):
    """Compile a program of tests/native; gcc is there wherever Kalos is built."""
    target = Path(folder) / program
    include = [f"-I{path}" for path in (ends.parent, ROOT / "cuda")]
    subprocess.run(
        ["gcc", "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, *include,
         "-o", target, NATIVE / f"{program}.c", *[NATIVE / name for name in sources]],
        check=True,
    )  # fmt: skip
    return target


def run(*command):
    """Run a program; what became of it.

    Some releases of the sanitizers cannot place their shadow where the system scatters addresses
    widely, and say so or die before the program begins: those run once more without scattering.
    """
    command = [str(part) for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "unexpected memory mapping" in done.stderr or (done.returncode == -11 and not done.stderr):
        done = subprocess.run(
            ["setarch", "-R", *command], capture_output=True, text=True, timeout=300, check=False
        )
    return done


def checked(*command):
    """Run a program that must end well; the numbers that it printed, by their names."""
    done = run(*command)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return {name: int(number) for name, number in re.findall(r"(\w+) (\d+)", done.stdout)}


def altered_ends(folder, before, after):
    """Write the ends with one line of them changed; where they lie."""
    text = ENDS.read_text(encoding="utf-8")
    assert text.count(before) == 1
    target = Path(folder) / ENDS.name
    target.write_text(text.replace(before, after), encoding="utf-8")
    return target


# ---- Requests that keep to no rule --------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fuzz"), "fuzz_channel", MEMORY, sources=["fuzz_main.c"])


@pytest.fixture
def seeds(fuzzer, tmp_path):
    """A right message of every opcode, and one with each field at each of its boundaries."""
    folder = tmp_path / "seeds"
    folder.mkdir()
    assert run(fuzzer, "--seeds", folder).returncode == 0
    return sorted(folder.iterdir())


def test_requests_at_every_boundary_get_the_verdict_of_a_plain_check(fuzzer, seeds):
    assert checked(fuzzer, *seeds)["inputs"] == len(seeds) > 700


def test_requests_that_a_fuzzer_found_are_taken_or_refused_within_their_slots(fuzzer):
    corpus = sorted((NATIVE / "corpus").iterdir())
    assert len(corpus) > 50
    assert checked(fuzzer, *corpus)["inputs"] == len(corpus)


def test_requests_made_by_chance_from_those_are_taken_or_refused_within_their_slots(fuzzer, seeds):
    inputs = [*seeds, *sorted((NATIVE / "corpus").iterdir())]
    assert checked(fuzzer, "--mutate", 300_000, *inputs)["inputs"] == 300_000


# ---- Requests that change while they are read ---------------------------------------------------


@pytest.mark.parametrize("flags", [MEMORY, PLAIN], ids=["sanitized", "optimized"])
def test_slots_that_change_while_they_are_read_are_read_once(tmp_path, flags):
    said = checked(build(tmp_path, "flip_channel", flags), 100_000_000)
    assert said["flips"] >= 100_000_000
    assert said["takes"] > said["right"] > 0
    assert said["answers"] > 0


def test_a_length_that_is_read_twice_is_found_by_changing_it_meanwhile(tmp_path):
    """Shows that the test above would see it. On one CPU this takes its time."""
    again = "((const volatile kalos_message*)slot)->body_nbytes"
    ends = altered_ends(tmp_path, "sizeof(kalos_message), seat->head.body_nbytes)",
                        f"sizeof(kalos_message), {again})")  # fmt: skip
    done = run(build(tmp_path, "flip_channel", MEMORY, ends=ends), 20_000_000_000)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


# ---- Order between the sides --------------------------------------------------------------------


def test_94_each_side_sees_all_that_the_other_wrote_before_its_word(tmp_path):
    assert checked(build(tmp_path, "litmus_channel", PLAIN), 50_000)["trips"] == 50_000


def test_94_both_sides_are_free_of_data_races(tmp_path):
    assert checked(build(tmp_path, "litmus_channel", ORDER), 20_000)["trips"] == 20_000


def test_a_word_without_order_is_found_to_be_a_data_race(tmp_path):
    """Shows that the test above would see it."""
    ends = altered_ends(tmp_path, "__atomic_store_n(word, value, __ATOMIC_RELEASE)",
                        "__atomic_store_n(word, value, __ATOMIC_RELAXED)")  # fmt: skip
    done = run(build(tmp_path, "litmus_channel", ORDER, ends=ends), 100)
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr


# ---- A client in C ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window_program(tmp_path_factory):
    """The example, built with its Makefile's flags against the header that was installed."""
    target = tmp_path_factory.mktemp("example") / "kalos_window"
    makefile = (EXAMPLE / "Makefile").read_text(encoding="utf-8")
    flags = re.search(r"^CFLAGS = (.*)$", makefile, re.MULTILINE)[1].split()
    assert "-Werror" in flags
    subprocess.run(
        ["gcc", *flags, f"-I{kernel_dir()}", "-o", target, EXAMPLE / "kalos_window.c"], check=True
    )
    return target


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The socket of a sidecar with a session, and a client of it; its slots are small."""
    store = tmp_path_factory.mktemp("served") / "chats.kalos"
    with (
        socket_folder() as folder,
        SidecarProcess(store, f"{folder}/s", request_nbytes=4096, response_nbytes=4096),
        kalos_ctx.connect(f"{folder}/s", mode="served", timeout=10) as client,
    ):
        for n in range(40):
            ids = range(1000 * n, 1000 * n + 50)
            client.append("s", ("user", "assistant")[n % 2], token_ids=ids, framed=True)
        client.append("s", "user", tenant="ä", token_ids=[2147483647, 0], framed=True)
        client.set_segment("s", "rules", token_ids=[7, 8])
        yield f"{folder}/s", client


@pytest.mark.parametrize(
    ("max_tokens", "tenant"), [(0, "ä"), (2, "ä"), (60, ""), (777, ""), (4000, "")]
)
def test_a_client_in_c_prints_the_window_that_python_gets(
    window_program, served, max_tokens, tenant
):
    """The largest does not fit its slot and comes by the socket."""
    socket, client = served
    done = run(window_program, socket, "s", max_tokens, tenant)
    assert (done.returncode, done.stderr) == (0, "")
    ids, *spans = done.stdout.split("\n")[:-1]
    with client.assemble("s", tenant=tenant, max_tokens=max_tokens) as window:
        assert [int(word) for word in ids.split()] == window.token_ids.tolist()
        places = [(part.start, part.stop) for part in window.report.segments]
    found = [re.match(r"span (\d+)\.\.(\d+) kind \d+ role \d+ id \d+$", line) for line in spans]
    assert [(int(place[1]), int(place[2])) for place in found] == places


@pytest.mark.parametrize(
    ("session", "max_tokens", "message"),
    [
        ("nobody", 10, "SessionNotFound: there is no such session in this tenant\n"),
        ("s", 1, "BudgetExceeded: "),
        ("", 10, "InvalidArgument: "),
        ("x" * 1025, 10, "a name must be at most 1024 bytes long\n"),
        ("s", "many", "MAX_TOKENS must be a number of tokens (got many)\n"),
    ],
)
def test_a_client_in_c_reports_what_it_was_refused(
    window_program, served, session, max_tokens, message
):
    socket, _ = served
    done = run(window_program, socket, session, max_tokens)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"kalos_window: {message}")


def test_a_client_in_c_without_descriptors_left_says_so(window_program, served):
    socket, _ = served
    done = run("sh", "-c", 'ulimit -n 5; exec "$@"', "sh", window_program, socket, "s", 10)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kalos_window: a descriptor was lost on the way (ulimit -n)\n"


def test_a_client_in_c_without_a_sidecar_says_so(window_program, tmp_path):
    done = run(window_program, "nothing-here", "s", 10)
    assert (done.returncode, done.stdout) == (1, "")
    expected = "kalos_window: no sidecar answers at nothing-here: No such file or directory\n"
    assert done.stderr == expected
