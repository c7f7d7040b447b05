"""What of a window the engine has already: reused tokens, stable boundaries, block keys."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from helpers.chat_data import QWEN3
from helpers.real_data import dialogues
from hypothesis import given, settings
from hypothesis import strategies as st

from kalos_ctx import blockkeys
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

ASK = Policy(generation_prompt=True)
SLIDING = Policy(stable_prefix=False)


@pytest.fixture
def store(store_path):
    with SessionStore.open(store_path) as opened:
        yield opened


@pytest.fixture
def assembler(store):
    with ContextAssembler(store) as made:
        yield made


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    with SessionStore.open(tmp_path_factory.mktemp("reuse") / "s", tokenizer=QWEN3) as opened:
        yield opened


def report_of(assembler, session="s", max_tokens=None, **options):
    with assembler.assemble(session, max_tokens=max_tokens, **options) as window:
        return window.report, window.tolist()


def common(a, b):
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def test_b32_the_window_and_the_reply_are_used_again(chats):
    assembler = ContextAssembler(chats)
    chats.append("b32", "user", "Hi")
    _, before = report_of(assembler, "b32", policy=ASK)
    reply = chats.codec.encode_text("Hello, I am here.")
    chats.append("b32", "assistant", token_ids=reply)
    chats.append("b32", "user", "Good")
    report, ids = report_of(assembler, "b32", policy=ASK)
    sent = before + reply.tolist()
    assert ids[: len(sent)] == sent
    assert report.reused_tokens == len(sent) + len(chats.turns("b32")[1].token_ids) - len(reply) - 3
    assert report.reused_until is None


def test_b34_b35_the_report_shows_where_the_match_ends(chats):
    """A thought that the template drops once a user turn follows ends the match in that turn."""
    assembler = ContextAssembler(chats)
    chats.append("b34", "user", "Look")
    call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    chats.append(
        "b34", "assistant", "", metadata={"tool_calls": call, "reasoning_content": "Well."}
    )
    chats.append("b34", "tool", "found")
    _, before = report_of(assembler, "b34", policy=ASK)
    chats.append("b34", "assistant", "Done.")
    chats.append("b34", "user", "Thanks")
    report, ids = report_of(assembler, "b34", policy=ASK)
    assert report.reused_tokens == common(before, ids) < len(before)
    assert report.reused_until == "turn 1"


def test_b104_b13_the_stable_boundary_seldom_moves(store, assembler):
    sizes = {}
    for name, policy in (("stable", Policy(low_water=0.5)), ("sliding", SLIDING)):
        reused = total = moves = 0
        first = None
        for number in range(300):
            role = ("user", "assistant")[number % 2]
            store.append(name, role, token_ids=[number] * 20)
            report, ids = report_of(assembler, name, 1000, policy=policy)
            begins = report.kept[0].seq
            moves += first is not None and begins != first
            first = begins
            if number % 2 == 0:
                reused += report.reused_tokens
                total += len(ids)
        sizes[name] = (moves, reused / total)
    assert sizes["stable"][0] <= -(-300 * 20 // 500)
    assert sizes["stable"][1] >= 0.9
    assert sizes["sliding"][1] < 0.5


def test_b105_volatile_text_stands_late_and_the_report_names_what_ended_the_match(store, assembler):
    store.set_segment("s", "clock", token_ids=[50, 51], volatile=True)
    store.set_segment("s", "sys", token_ids=[1, 2, 3])
    store.append("s", "user", token_ids=[4])
    assert report_of(assembler)[0].reused_until is None
    store.set_segment("s", "clock", token_ids=[50, 52], volatile=True)
    report, ids = report_of(assembler)
    assert ids == [1, 2, 3, 50, 52, 4]
    assert (report.reused_tokens, report.reused_until) == (4, "clock")
    store.append("s", "assistant", token_ids=[5])
    report, _ = report_of(assembler)
    assert (report.reused_tokens, report.reused_until) == (7, None)
    store.rollback("s", 0)
    store.append("s", "user", token_ids=[9])
    assert report_of(assembler)[0].reused_until == "turn 0"


def test_b106_recalled_text_late_leaves_the_prefix_alone(store, assembler):
    vectors = np.eye(8, dtype=np.float32)
    store.add_passages("notes", vectors, token_ids=[[70 + n] for n in range(8)])
    for number in range(9):
        store.append("s", ("user", "assistant")[number % 2], token_ids=[number] * 3)
    for placement, least in (("before_last_user", 24), ("end", 27), ("after_system", 0)):
        for query in vectors:
            report, _ = report_of(
                assembler, max_tokens=400, query=query, top_k=1, collections="notes",
                placement=placement,
            )  # fmt: skip
        assert report.reused_tokens == least
        assert report.reused_until == "passage 7"


def test_b109_reuse_is_told_in_tokens_and_whole_blocks(store, assembler):
    store.append("s", "user", token_ids=list(range(63)))
    report_of(assembler)
    report, _ = report_of(assembler)
    assert report.reused_tokens == 63
    assert [report.reused_blocks(size) for size in (1, 16, 63, 64)] == [63, 3, 1, 0]
    for size in (0, -1, True, 1.5):
        with pytest.raises(InvalidArgument):
            report.reused_blocks(size)


def test_b73_salted_block_keys_share_nothing(store, assembler):
    store.append("s", "user", token_ids=list(range(64)))
    with assembler.assemble("s", max_tokens=None) as window:
        ids, report = window.token_ids, window.report
        plain = report.block_keys(16)
        assert plain.tolist() == blockkeys.block_keys(ids, 16).tolist()
        one, two, again = (report.block_keys(16, salt) for salt in (b"one", b"two", b"one"))
        assert len(one) == len(plain) == 4
        assert not set(one) & set(two)
        assert one == again == blockkeys.block_keys_sha256(ids, 16, b"one")


@given(st.data())
@settings(max_examples=60)
def test_reused_tokens_is_the_common_prefix(tmp_path_factory, data):
    """Against the two windows and the reply, token by token, whatever happens between them."""
    with SessionStore.open(tmp_path_factory.mktemp("reuse") / "s") as store:
        assembler = ContextAssembler(store)
        ids = st.lists(st.integers(0, 2), min_size=1, max_size=5)
        roles = st.sampled_from(("user", "assistant", "assistant"))
        before, count = None, 0
        for _ in range(8):
            for _ in range(data.draw(st.integers(0, 3))):
                store.append("s", data.draw(roles), token_ids=data.draw(ids))
            if store.count("s") == 0:
                continue
            policy = Policy(
                stable_prefix=data.draw(st.booleans()), low_water=0.5, on_overflow="drop"
            )
            budget = data.draw(st.sampled_from((None, 20, 12)))
            report, now = report_of(assembler, max_tokens=budget, policy=policy)
            if before is not None:
                reply = []
                for turn in store.turns("s", count):
                    if turn.role != "assistant":
                        break
                    reply += turn.token_ids.tolist()
                sent = before + reply
                # A reply counts as far as it stands in the window as a turn.
                assert common(before, now) <= report.reused_tokens <= common(sent, now)
                if now[: len(sent)] == sent:
                    assert report.reused_tokens == len(sent)
            before, count = now, store.count("s")


def test_prefix_reuse_of_real_conversations(chats):
    """Long real conversations, budget 300: the stable prefix keeps most of every prompt."""
    long = sorted(dialogues(), key=lambda one: -len(one["messages"]))[:6]
    shares = {}
    for name, policy in (
        ("stable", Policy(generation_prompt=True, on_overflow="drop")),
        ("sliding", Policy(generation_prompt=True, on_overflow="drop", stable_prefix=False)),
    ):
        assembler, reused, total = ContextAssembler(chats), 0, 0
        for dialogue in long:
            session = name + dialogue["id"]
            for message in dialogue["messages"]:
                metadata = {k: v for k, v in message.items() if k not in ("role", "content")}
                chats.append(
                    session, message["role"], message["content"] or None, metadata=metadata or None
                )
                if message["role"] == "user":
                    report, ids = report_of(assembler, session, 800, policy=policy)
                    reused, total = reused + report.reused_tokens, total + len(ids)
        shares[name] = reused / total
    assert shares["stable"] > 0.85 > shares["sliding"]


def test_b61_b107_another_process_builds_the_same_window(store_path, store, assembler):
    for number in range(40):
        store.append("s", ("user", "assistant")[number % 2], token_ids=[number] * 5)
    code = (
        "import sys\n"
        "from kalos_ctx.assembler import ContextAssembler\n"
        "from kalos_ctx.store import SessionStore\n"
        "with SessionStore.open(sys.argv[1], mode='r') as store:\n"
        "    window = ContextAssembler(store).assemble('s', max_tokens=100)\n"
        "    print(window.tolist(), window.report.block_keys(16).tolist())\n"
    )
    with assembler.assemble("s", max_tokens=100) as window:
        wanted = f"{window.tolist()} {window.report.block_keys(16).tolist()}"
    for seed in ("0", "1"):
        made = subprocess.run(
            [sys.executable, "-c", code, str(store_path)], capture_output=True, text=True,
            check=True, env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        assert made.stdout.strip() == wanted
