# ruff: noqa: RUF001 (DeepSeek writes its tokens with full-width bars)
"""Codecs for the real chat templates, and the real conversations as templates take them."""

import functools
import json
from pathlib import Path

from helpers.real_data import template_paths
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kalos_ctx.tokens import TokenCodec, TurnContext

QWEN3 = Path(__file__).resolve().parents[2] / "kalos_ctx" / "demo_data" / "qwen3"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
# The control tokens of each template's own tokenizer that Qwen3's lacks.
CONTROL_TOKENS = {
    "deepseekv3": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
        *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    "glm4moe": (
        *("[gMASK]", "<sop>", *ROLE_TOKENS, "<|observation|>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gptoss": (
        *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
        "<|constrain|>",
    ),
    "phi3": (*ROLE_TOKENS, "<|end|>"),
    "phi3_5": (*ROLE_TOKENS, "<|end|>"),
}
SPECIAL = {
    "deepseekv3": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "phi3": {"eos_token": "<|endoftext|>"},
    "phi3_5": {"eos_token": "<|endoftext|>"},
}
BUNDLED = "qwen3_bundled"
TEMPLATES = (*sorted(template_paths()), BUNDLED)


@functools.cache
def _qwen3_json() -> str:
    return (QWEN3 / "tokenizer.json").read_text(encoding="utf-8")


def qwen3_tokenizer(*control_tokens: str) -> Tokenizer:
    """Return Qwen3's tokenizer with more special tokens; a new object each time."""
    tokenizer = Tokenizer.from_str(_qwen3_json())
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control_tokens])
    return tokenizer


def byte_tokenizer(*control_tokens: str) -> Tokenizer:
    """Return a small tokenizer that has one token a byte, and control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in control_tokens])
    return tokenizer


def template_text(name: str) -> str:
    path = QWEN3 / "chat_template.jinja" if name == BUNDLED else template_paths()[name]
    return path.read_text(encoding="utf-8")


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer that stands for that of template `name`; not to be changed."""
    return qwen3_tokenizer(*CONTROL_TOKENS.get(name, ()))


@functools.cache
def codec_of(name: str) -> TokenCodec:
    return TokenCodec.load(
        tokenizer_of(name), template_text(name), special_tokens=SPECIAL.get(name)
    )


def as_messages(name: str, messages: list[dict]) -> list[dict]:
    """Return the messages as a user of transformers passes them to this template."""
    if name != "deepseekv3":
        return messages
    made = json.loads(json.dumps(messages))
    for message in made:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return made


def fields_of(message: dict) -> dict:
    return {k: v for k, v in message.items() if k not in ("role", "content")}


def encode_all(codec: TokenCodec, messages: list[dict]) -> list:
    """Encode a conversation turn by turn with what a store knows of the turns before."""
    turns, previous, call = [], None, None
    for message in messages:
        context = None
        if previous is not None:
            context = TurnContext(previous["role"], fields_of(previous), call)
        turns.append(
            codec.encode_turn(
                message["role"], message["content"], context, extra=fields_of(message)
            )
        )
        if message["role"] == "assistant":
            call = fields_of(message)
        previous = message
    return turns


def window(turns: list, stop: int | None = None, live_from: int | None = None) -> list[int]:
    """Put turns together as a window does; turns from `live_from` on stand in a running loop."""
    ids: list[int] = []
    for place, turn in enumerate(turns[:stop]):
        if turn.trim_prev:
            del ids[len(ids) - turn.trim_prev :]
        running = live_from is not None and place >= live_from and turn.live_ids is not None
        ids.extend((turn.live_ids if running else turn.ids).tolist())
    return ids
