"""Turn by turn equals the whole conversation, for every real template and conversation."""

import functools

import pytest
from helpers.chat_data import (
    SPECIAL,
    TEMPLATES,
    as_messages,
    codec_of,
    encode_all,
    template_text,
    tokenizer_of,
    window,
)
from helpers.hf_render import compile_template
from helpers.real_data import dialogues

from kalos_ctx.errors import TemplateUnsafe
from kalos_ctx.tokens import TokenCodec

NOW = 1_760_000_000.0
SYSTEM = "You are a barista.\n\nAnswer in one line."
# In these every prompt is rendered whole; in the others only the last one is, which is quadratic less.
EVERY = 15
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
    for number, messages in enumerate(conversations("chitchat-dataset")):
        check_conversation(name, messages, every_prompt=number % EVERY == 0)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tool_dialogues_turn_by_turn_equal_the_whole(name):
    for messages in conversations("Taskmaster-4"):
        check_conversation(name, messages, every_prompt=True)
