# ruff: noqa: RUF001 (DeepSeek writes its tokens with full-width bars)
"""Turn by turn equals the whole conversation, for every real template and conversation."""

import functools
import json
import os

import pytest
from helpers.chat_data import (
    BUNDLED,
    SPECIAL,
    TEMPLATES,
    as_messages,
    byte_tokenizer,
    codec_of,
    encode_all,
    template_text,
    tokenizer_of,
    window,
)
from helpers.hf_render import compile_template
from helpers.real_data import dialogues
from tokenizers import Tokenizer

from kalos_ctx.errors import TemplateUnsafe
from kalos_ctx.tokens import TokenCodec

NOW = 1_760_000_000.0
SYSTEM = "You are a barista.\n\nAnswer in one line."
# Each chat is checked whole under some template, and its beginning under every other one; under
# some every prompt is compared, under the others the last. "explore" compares every prompt of
# everything (a quarter of an hour).
EXHAUSTIVE = os.environ.get("HYPOTHESIS_PROFILE") == "explore"
BEGINNING = 16
WHOLE_EVERY = len(TEMPLATES)
PROMPTS_EVERY = 15
# What these make of the tool dialogues: the tool turns are refused, the rest is compared.
WITHOUT_TOOLS = {"deepseekv3": ("tool", "calls"), "phi3": ("tool",), "phi3_5": ("tool",)}


@functools.cache
def renderer(name):
    return functools.partial(compile_template(template_text(name), NOW), **SPECIAL.get(name, {}))


def encode_whole(name, text):
    return tokenizer_of(name).encode(text, add_special_tokens=False).ids


def ids_of(tiles):
    return [i for _, ids in tiles for i in ids.tolist()]


def last_prompt(messages):
    stop = max(n for n, m in enumerate(messages) if m["role"] == "user")
    return messages[: stop + 1]


def kept(name, messages):
    """Return the messages without those that the template cannot take as turns."""
    left_out = WITHOUT_TOOLS.get(name, ())
    return [
        m
        for m in messages
        if m["role"] not in left_out and not ("tool_calls" in m and "calls" in left_out)
    ]


def conversations(source):
    return [d["messages"] for d in dialogues() if d["source"] == source]


def check_conversation(name, messages, every_prompt):
    codec, render = codec_of(name), renderer(name)
    messages = last_prompt(kept(name, as_messages(name, messages)))
    turns = encode_all(codec, messages)
    head, prompt = ids_of(codec.head([], now=NOW)), codec.generation_prompt.tolist()
    text = render(messages)
    assert head + window(turns) + prompt == encode_whole(name, text)
    if every_prompt:
        for stop, message in enumerate(messages, 1):
            if message["role"] == "user":
                expected = encode_whole(name, render(messages[:stop]))
                assert head + window(turns, stop) + prompt == expected
    pinned = ids_of(codec.head([("prompt", "system", SYSTEM)], now=NOW))
    start = messages[:1]
    shown = render([{"role": "system", "content": SYSTEM}, *start])
    assert pinned + window(turns, 1) + prompt == encode_whole(name, shown)


def test_data_covers_all_conversations():
    assert len(conversations("chitchat-dataset")) == 300
    assert len(conversations("Taskmaster-4")) == 150
    assert len(TEMPLATES) == 11


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_turn_by_turn_equal_the_whole(name):
    offset = TEMPLATES.index(name)
    for number, messages in enumerate(conversations("chitchat-dataset"), offset):
        whole = EXHAUSTIVE or number % WHOLE_EVERY == 0
        every_prompt = EXHAUSTIVE or number % PROMPTS_EVERY == 0
        check_conversation(name, messages[: None if whole else BEGINNING], every_prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_dialogues_turn_by_turn_equal_the_whole(name):
    for messages in conversations("Taskmaster-4"):
        check_conversation(name, messages, every_prompt=True)


# Running tool loops: prompts that end in a tool result.

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_menu", "arguments": {"query": "tea", "size": 2}},
}
THOUGHTS = {
    "qwen3": "reasoning_content",
    BUNDLED: "reasoning_content",
    "glm4moe": "reasoning_content",
    "gptoss": "thinking",
}


def running_loop(field):
    """Return a finished loop with reasoning, then one that still runs with two steps."""

    def step(thought, name):
        call = {**CALL, "function": {**CALL["function"], "name": name}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call], field: thought},
            {"role": "tool", "content": '{"n": 1}', "tool_call_id": "call_1", "name": name},
        ]

    question = {"role": "user", "content": "What teas are there?"}
    answer = {"role": "assistant", "content": "Green and black."}
    done = [question, *step("Look it up.", "get_menu"), answer]
    return [*done, question, *step("Again,\nsame way.", "get_menu"), *step("More.", "get_price")]


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("length", [7, 9])
def test_b34_running_loop_equals_the_whole_through_live_ids(name, length):
    messages = running_loop(THOUGHTS[name])[:length]
    codec = codec_of(name)
    turns = encode_all(codec, messages)
    head, prompt = ids_of(codec.head([], now=NOW)), codec.generation_prompt.tolist()
    expected = encode_whole(name, renderer(name)(messages))
    assert head + window(turns, live_from=4) + prompt == expected
    assert head + window(turns) + prompt != expected
    assert turns[1].live_ids is not None
    assert len(turns[1].live_ids) > len(turns[1].ids)


@pytest.mark.parametrize("name", THOUGHTS)
def test_b34_finished_loop_is_stored_without_its_reasoning(name):
    codec = codec_of(name)
    finished = [*running_loop(THOUGHTS[name]), {"role": "assistant", "content": "Two euros."}]
    messages = [*finished, {"role": "user", "content": "Thanks"}]
    turns = encode_all(codec, messages)
    whole = ids_of(codec.head([], now=NOW)) + window(turns) + codec.generation_prompt.tolist()
    assert whole == encode_whole(name, renderer(name)(messages))
    assert "Look it up" not in codec.decode(whole)
    assert "Look it up" in codec.decode(turns[1].live_ids)


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3_instruct_2507", "qwen3_training"])
def test_loop_without_hidden_reasoning_has_no_live_form(name):
    messages = running_loop("reasoning_content")
    codec = codec_of(name)
    turns = encode_all(codec, messages)
    assert all(turn.live_ids is None for turn in turns)
    whole = ids_of(codec.head([], now=NOW)) + window(turns) + codec.generation_prompt.tolist()
    assert whole == encode_whole(name, renderer(name)(messages))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_training"])
def test_parallel_results_share_a_block_and_trim_the_one_before(name):
    codec, render = codec_of(name), renderer(name)
    calls = [{**CALL, "id": f"call_{n}"} for n in range(3)]
    messages = [
        {"role": "user", "content": "Three things"},
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        *({"role": "tool", "content": f"{n}\n", "tool_call_id": f"call_{n}"} for n in range(3)),
        {"role": "assistant", "content": "Done"},
        {"role": "user", "content": "Good"},
    ]
    turns = encode_all(codec, messages)
    assert [turn.trim_prev for turn in turns] == [0, 0, 0, 2, 2, 0, 0]
    head, prompt = ids_of(codec.head([])), codec.generation_prompt.tolist()
    assert head + window(turns) + prompt == encode_whole(name, render(messages))
    for stop in (3, 4, 5):
        assert head + window(turns, stop) + prompt == encode_whole(name, render(messages[:stop]))


def test_shared_block_without_an_added_token_at_its_end_gives_up_a_merged_token():
    """Qwen2.5's own tokenizer has no token for </tool_response>: ">" and a line merge."""
    parts = json.loads(tokenizer_of("qwen2_5").to_str())
    parts["added_tokens"] = [t for t in parts["added_tokens"] if "tool_resp" not in t["content"]]
    # Later tokens move down to close the gap.
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    codec = TokenCodec.load(tokenizer, template_text("qwen2_5"))
    messages = [
        {"role": "user", "content": "Two things"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "Good"},
    ]
    turns = encode_all(codec, messages)
    assert turns[3].trim_prev == 3
    whole = tokenizer.encode(renderer("qwen2_5")(messages), add_special_tokens=False).ids
    assert ids_of(codec.head([])) + window(turns) + codec.generation_prompt.tolist() == whole


def test_dropping_the_oldest_turns_leaves_the_rest_unchanged():
    for name in TEMPLATES:
        codec, render = codec_of(name), renderer(name)
        messages = last_prompt(conversations("chitchat-dataset")[7])
        turns = encode_all(codec, messages)
        start = next(n for n, m in enumerate(messages) if n > 6 and m["role"] == "user")
        head, prompt = ids_of(codec.head([], now=NOW)), codec.generation_prompt.tolist()
        expected = encode_whole(name, render(messages[start:]))
        assert head + window(turns[start:]) + prompt == expected


# What cannot hold is refused.

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
)
END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
REFUSED = {
    "numbers its turns": (
        "{% for m in messages %}{{ '<|im_start|>' ~ loop.index ~ m.role ~ '\\n' ~ m.content }}"
        "<|im_end|>\n" + END,
        "first user turn is rendered differently|in a longer conversation",
    ),
    "counts in the head": (
        "{{ '<|im_start|>' ~ messages|length ~ '<|im_end|>' }}" + CHATML + END,
        "before the end of the conversation changes",
    ),
    "changes after forty turns": (
        CHATML + "{% if loop.index == 40 %}<|im_start|>{% endif %}" + END,
        "in a longer conversation",
    ),
    "system text in the last user turn": (
        "{% set s = namespace(t='') %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% set s.t = m.content %}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if loop.last and s.t %}{{ s.t + '\\n\\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endif %}" + END,
        "system text moves to a later turn",
    ),
    "clock in every turn": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + strftime_now('%H:%M') + m.content }}"
        "<|im_end|>\n" + END,
        "clock stands in the turns",
    ),
    "no edge between turns": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "tokens merge across the edge of a turn",
    ),
    "drops its user turns": ("{% for m in messages %}{% endfor %}", "renders nothing"),
    "hides old turns": (
        "{% for m in messages[-3:] %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}"
        + END,
        "changes with the conversation|in a longer conversation|changes when a turn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_template_that_cannot_hold_is_refused_with_the_reason(case):
    text, reason = REFUSED[case]
    merges = case == "no edge between turns"
    tokenizer = tokenizer_of("qwen3") if merges else byte_tokenizer("<|im_start|>", "<|im_end|>")
    with pytest.raises(TemplateUnsafe, match=reason):
        TokenCodec.load(tokenizer, text)


def test_the_synthetic_frame_itself_is_accepted():
    assert TokenCodec.load(byte_tokenizer("<|im_start|>", "<|im_end|>"), CHATML + END).has_template


def test_system_text_in_the_first_user_turn_refuses_head_texts_only():
    text = (
        "{% set s = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
        "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
        "{% for m in rest %}{{ '<|im_start|>' + m.role + '\\n' + (s if loop.first else '') }}"
        "{{ m.content + '<|im_end|>\\n' }}" + END
    )
    codec = TokenCodec.load(byte_tokenizer("<|im_start|>", "<|im_end|>"), text)
    assert codec.encode_turn("user", "Hi").prefix_len == 6
    with pytest.raises(TemplateUnsafe, match="first user turn"):
        codec.head([("prompt", "system", "Obey.")])
    assert codec.head([]) == []


def test_template_that_wants_alternating_roles_is_taken_and_refuses_two_users():
    text = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}" + END
    )
    special = {"bos_token": "<|endoftext|>"}
    codec = TokenCodec.load(tokenizer_of("qwen3"), text, special_tokens=special)
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": f" {n} of them \n"} for n in range(9)
    ]
    expected = encode_whole("qwen3", compile_template(text, NOW)(messages, **special))
    turns = encode_all(codec, messages)
    assert ids_of(codec.head([])) + window(turns) + codec.generation_prompt.tolist() == expected
    with pytest.raises(TemplateUnsafe, match="refuses"):
        codec.encode_turn("user", "Hi", "user")
    with pytest.raises(TemplateUnsafe, match="refuses a system message"):
        codec.head([("prompt", "system", "Obey.")])
    with pytest.raises(TemplateUnsafe, match="does not render tool schemas"):
        codec.head([], tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.parametrize("name", ["phi3", "phi3_5"])
def test_tool_result_that_the_template_drops_is_refused(name):
    with pytest.raises(TemplateUnsafe, match="tool result"):
        codec_of(name).encode_turn("tool", "42", "assistant")
    assert "leaves tool calls out" in codec_of(name).template_limits["tool_call"]


def test_deepseek_tool_calls_are_refused_since_they_change_with_earlier_ones():
    codec = codec_of("deepseekv3")
    with pytest.raises(TemplateUnsafe, match="in a longer conversation"):
        codec.encode_turn("assistant", "", "user", extra={"tool_calls": [CALL]})
    with pytest.raises(TemplateUnsafe, match="tool result"):
        codec.encode_turn("tool", "42", "assistant")


def test_deepseek_reasoning_in_content_is_dropped_as_the_template_drops_it():
    codec = codec_of("deepseekv3")
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nBecause."},
        {"role": "user", "content": "Ah"},
    ]
    turns = encode_all(codec, messages)
    assert codec.decode(turns[1].ids) == "<｜Assistant｜>\n\nBecause.<｜end▁of▁sentence｜>"
    whole = ids_of(codec.head([])) + window(turns) + codec.generation_prompt.tolist()
    assert whole == encode_whole("deepseekv3", renderer("deepseekv3")(messages))


@pytest.mark.parametrize("arguments", [{"query": "tea"}, '{"query": "tea"}', '{"query":"tea"}'])
def test_call_arguments_may_be_a_mapping_or_json_text(arguments):
    for name in ("glm4moe", "gptoss", "qwen2_5", "qwen3"):
        call = {"id": "c", "function": {"name": "get_menu", "arguments": arguments}}
        flat = {"id": "c", "name": "get_menu", "arguments": arguments}
        plain = {**CALL, "function": {"name": "get_menu", "arguments": {"query": "tea"}}}
        encode = functools.partial(codec_of(name).encode_turn, "assistant", None, "user")
        expected = encode(extra={"tool_calls": [plain]}).ids.tolist()
        assert encode(extra={"tool_calls": [call]}).ids.tolist() == expected
        assert encode(extra={"tool_calls": [flat]}).ids.tolist() == expected
