"""Windows of real conversations against the whole rendering by the model's own chat template."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.chat_data import (
    QWEN3,
    SPECIAL,
    codec_of,
    fields_of,
    template_text,
    tokenizer_of,
)
from helpers.clock import ManualClock
from helpers.hf_render import compile_template
from helpers.real_data import dialogues

from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.planner import Policy
from kalos_ctx.store import SessionStore

ASK = Policy(generation_prompt=True)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def as_turn(message):
    return {
        "role": message["role"],
        "content": message["content"] or None,
        "metadata": fields_of(message) or None,
    }


def users(messages):
    return [place for place, message in enumerate(messages) if message["role"] == "user"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "store"
    with SessionStore.open(path, tokenizer=QWEN3) as opened:
        yield opened


@pytest.fixture(scope="module")
def chats(store):
    """An assembler of a store with all real conversations."""
    with ContextAssembler(store) as assembler:
        for dialogue in dialogues():
            store.extend(dialogue["id"], [as_turn(message) for message in dialogue["messages"]])
        yield assembler


def test_every_user_ended_prompt_equals_the_whole_rendering(chats):
    """All prompts of each ninth conversation, and the last one, which holds them, of the others."""
    render = compile_template(template_text("qwen3_bundled"), 0.0)
    tokenizer = tokenizer_of("qwen3_bundled")
    for number, dialogue in enumerate(dialogues()):
        messages = dialogue["messages"]
        ends = [place + 1 for place in users(messages)]
        ends = ends if number % 9 == 0 else ends[-1:]
        texts = [render(messages[:end]) for end in ends]
        whole = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for end, encoding in zip(ends, whole, strict=True):
            with chats.assemble(dialogue["id"], max_tokens=None, as_of=end, policy=ASK) as window:
                assert window.token_ids.tolist() == encoding.ids, (dialogue["id"], end)


def test_without_a_generation_prompt_the_rendering_ends_where_the_window_does(chats):
    render = compile_template(template_text("qwen3_bundled"), 0.0)
    tokenizer = tokenizer_of("qwen3_bundled")
    for dialogue in dialogues()[::9]:
        end = users(dialogue["messages"])[-1] + 1
        whole = tokenizer.encode(
            render(dialogue["messages"][:end], ask=False), add_special_tokens=False
        )
        with chats.assemble(dialogue["id"], max_tokens=None, as_of=end) as window:
            assert window.tolist() == whole.ids


def test_as_of_equals_the_window_of_then_bit_for_bit(store):
    assembler, policy = ContextAssembler(store), Policy(on_overflow="drop")
    for dialogue in dialogues()[::45]:
        session, old = "then " + dialogue["id"], []
        for message in dialogue["messages"]:
            store.extend(session, [as_turn(message)])
            for budget in (None, 300):
                with assembler.assemble(session, max_tokens=budget, policy=policy) as window:
                    old.append((budget, window.tolist()))
        for place, (budget, ids) in enumerate(old):
            with assembler.assemble(
                session, max_tokens=budget, as_of=place // 2 + 1, policy=policy
            ) as window:
                assert window.tolist() == ids


def test_a_running_tool_loop_shows_its_thoughts_and_history_does_not(store):
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I must look.",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo"}}}
            ],
        },
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "and wind"},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Say it."},
        {"role": "user", "content": "Thanks"},
    ]
    render = compile_template(template_text("qwen3_bundled"), 0.0)
    tokenizer = tokenizer_of("qwen3_bundled")
    assembler = ContextAssembler(store)
    for count, message in enumerate(messages, 1):
        store.extend("loop", [as_turn(message)])
        if message["role"] == "assistant":
            continue
        whole = tokenizer.encode(render(messages[:count]), add_special_tokens=False).ids
        for stop in (None, count):
            with assembler.assemble("loop", max_tokens=None, policy=ASK, as_of=stop) as window:
                assert window.tolist() == whole
    assert "I must look" not in store.codec.decode(whole)
    with assembler.assemble("loop", max_tokens=None, policy=ASK, as_of=4) as window:
        assert "I must look" in store.codec.decode(window.token_ids)


@pytest.mark.parametrize("tools", [False, True])
def test_the_head_is_the_templates_own(store, tools):
    """Pinned system text and tool schemas stand as the template renders them."""
    render = compile_template(template_text("qwen3_bundled"), 0.0)
    session = f"head {tools}"
    store.set_segment(session, "sys", "Be brief.")
    if tools:
        store.set_segment(session, "tools", json.dumps([TOOL]), role="tools")
    store.append(session, "user", "Hi")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    whole = render(messages, tools=[TOOL] if tools else None)
    with ContextAssembler(store).assemble(session, max_tokens=None, policy=ASK) as window:
        assert store.codec.decode(window.token_ids) == whole
        names = {tile.name for tile in window.report.segments}
        assert {"sys", "generation_prompt"} <= names
        assert sum(window.report.by_segment.values()) == len(window)


def test_a_head_with_a_date_changes_with_the_day(tmp_path):
    """gpt-oss writes today's date; one window a day, and the same one all day long."""
    clock = ManualClock()
    codec = codec_of("gptoss")
    with SessionStore.open(
        tmp_path / "s", tokenizer=tokenizer_of("gptoss"), template=template_text("gptoss"),
        clock=clock,
    ) as store:  # fmt: skip
        assert store.codec.fingerprint == codec.fingerprint
        store.append("s", "user", "Hi")
        assembler = ContextAssembler(store)
        days = []
        for _ in range(3):
            windows = []
            for _ in range(2):
                with assembler.assemble("s", max_tokens=None) as window:
                    windows.append(window.tolist())
                clock.advance(1.5)
            assert windows[0] == windows[1]
            days.append(windows[0])
            clock.advance(86_400.0)
        assert len({tuple(day) for day in days}) == 3


def test_b36_the_head_is_written_once_and_ids_as_given_stay(tmp_path):
    """A template's BOS stands once; a session whose content starts with the same ID keeps it."""
    with SessionStore.open(tmp_path / "ids") as store:
        store.set_segment("s", "bos", token_ids=[0, 5])
        store.append("s", "user", token_ids=[0, 7])
        with ContextAssembler(store).assemble("s", max_tokens=None) as window:
            assert window.tolist() == [0, 5, 0, 7]
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer_of("deepseekv3").save(str(folder / "tokenizer.json"))
    config = {**SPECIAL["deepseekv3"], "chat_template": template_text("deepseekv3")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with SessionStore.open(tmp_path / "text", tokenizer=folder) as store:
        for session in ("plain", "pinned"):
            store.append(session, "user", "Hi")
            store.append(session, "assistant", "Hello")
        store.set_segment("pinned", "a", "One.")
        store.set_segment("pinned", "b", "Two.")
        for session in ("plain", "pinned"):
            with ContextAssembler(store).assemble(session, max_tokens=None) as window:
                shown = store.codec.decode(window.token_ids)
                bos = SPECIAL["deepseekv3"]["bos_token"]
                assert shown.startswith(bos)
                assert shown.count(bos) == 1


def test_recalled_passages_are_one_framed_turn(store):
    store.append("recalls", "user", "Hi")
    store.add_passages("notes", np.eye(2, dtype=np.float32), texts=["First.", "Second."])
    with ContextAssembler(store).assemble(
        "recalls", max_tokens=200, query=[1.0, 0.5], top_k=5, collections="notes"
    ) as window:
        shown, tiles = store.codec.decode(window.token_ids), window.report.segments
    frame = "<|im_start|>system\nFirst.\n\nSecond.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert shown == frame
    kinds = [(tile.kind, tile.id, tile.seq) for tile in tiles]
    assert kinds == [("passage", 0, None), ("passage", 1, None), ("turn", None, 0)]
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
