"""Files of a tokenizer, and what follows from its vocabulary: fingerprint, classes, characters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kalos_ctx.errors import InvalidArgument, InvalidType, TemplateUnsafe
from kalos_ctx.firewall import AddedTokens
from kalos_ctx.template import CALLED, ChatTemplate, TurnContext, assistant, calling, user

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
# Names that by convention begin or end a text; a bare tokenizer.json does not say which do.
TEXT_EDGES = frozenset(
    ("<s>", "</s>", "<bos>", "<eos>", "<|endoftext|>", "<|startoftext|>", "<|begin_of_text|>")
) | {"<|end_of_text|>", "<|eot_id|>", "<|return|>", "[BOS]", "[EOS]", "[CLS]", "[SEP]"}

Loaded = tuple[Tokenizer, "str | None", dict[str, str]]


def load_files(
    tokenizer: str | PathLike[str] | Tokenizer,
    template: str | PathLike[str] | None,
    special_tokens: Mapping[str, str] | None,
) -> Loaded:
    """Return tokenizer (a copy of our own), template text and special tokens."""
    config: dict[str, Any] = {}
    text: str | None = None
    if isinstance(tokenizer, Tokenizer):
        # Truncation and padding are turned off below, which the caller must not see.
        loaded = Tokenizer.from_str(tokenizer.to_str())
    elif isinstance(tokenizer, (str, PathLike)):
        path = Path(tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        loaded = _read_tokenizer(path)
        config = _read_config(path.with_name("tokenizer_config.json"))
        text = _template_beside(path, config)
    else:
        raise InvalidType(
            "tokenizer must be the path of a tokenizer.json, its folder or a tokenizers.Tokenizer "
            f"(got {type(tokenizer).__name__}); of a transformers tokenizer pass "
            "`.backend_tokenizer` with its chat template"
        )
    loaded.no_truncation()
    loaded.no_padding()
    if template is not None:
        text = _read_template(template)
    specials = {**_specials(config), **_checked_specials(special_tokens)}
    return loaded, text or None, specials


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"tokenizer cannot be read: {path}: {error}") from None
    except Exception as error:  # tokenizers raises bare Exception for what it cannot parse
        raise InvalidArgument(f"tokenizer is not a tokenizer.json: {path}: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"tokenizer_config.json cannot be read: {path}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"tokenizer_config.json must hold a mapping: {path}")
    return config


def _template_beside(path: Path, config: Mapping[str, Any]) -> str | None:
    beside = path.with_name("chat_template.jinja")
    if beside.is_file():
        return _read_text(beside)
    found = config.get("chat_template")
    if isinstance(found, list):
        # Several by name; transformers takes the one called default.
        named = {e.get("name"): e.get("template") for e in found if isinstance(e, Mapping)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise InvalidArgument("chat_template in tokenizer_config.json must be text")
    return found


def _read_template(template: str | PathLike[str]) -> str:
    if not isinstance(template, (str, PathLike)):
        raise InvalidType(f"template must be text or a path (got {type(template).__name__})")
    if isinstance(template, PathLike):
        return _read_text(Path(template))
    one_line = "\n" not in template and "{" not in template and len(template) < 4096
    if one_line and template.endswith((".jinja", ".jinja2", ".j2")):
        return _read_text(Path(template))
    return template


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"template cannot be read: {path}: {error}") from None


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _checked_specials(given: Mapping[str, str] | None) -> dict[str, str]:
    for name, value in (given or {}).items():
        if name not in SPECIAL_NAMES:
            raise InvalidArgument(f"special_tokens has no {name!r}; known: {SPECIAL_NAMES}")
        if not isinstance(value, str):
            raise InvalidType(f"special_tokens[{name!r}] must be a str")
    return dict(given or {})


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the highest ID plus one, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def fingerprint_of(
    tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]
) -> bytes:
    """Return SHA-256 over what decides how text becomes IDs.

    The tokenizer counts by its parts, so that layout and order in its file do not matter, nor
    fields that a later version of the library adds with an empty default. Special tokens count
    where the template names them.
    """
    digest = hashlib.sha256(b"kalos tokens 1\0")
    parts = json.loads(tokenizer.to_str())
    model = parts.pop("model")
    for name in ("truncation", "padding", "version"):
        parts.pop(name, None)
    vocab, merges = model.pop("vocab", {}), model.pop("merges", [])
    rows = sorted(vocab.items(), key=lambda r: r[1]) if isinstance(vocab, dict) else vocab
    _add(digest, (f"{row[0]}\0{row[1]}" for row in rows))
    _add(digest, (row if isinstance(row, str) else " ".join(row) for row in merges))
    shape = json.dumps(_filled([parts, model]), sort_keys=True)
    _add(digest, [shape, template or ""])
    if template is not None:
        _add(digest, (f"{n}\0{t}" for n, t in sorted(special_tokens.items()) if n in template))
    return digest.digest()


def _add(digest: Any, rows: Iterable[str]) -> None:
    data = "\x1e".join(rows).encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little") + data)


def _filled(value: Any) -> Any:
    """Return `value` without the fields that say nothing."""
    if isinstance(value, Mapping):
        kept = {k: _filled(v) for k, v in value.items()}
        return {k: v for k, v in kept.items() if v not in (None, False, "", [], {})}
    if isinstance(value, list):
        return [_filled(item) for item in value]
    return value


def character_starts(tokenizer: Tokenizer, size: int) -> NDArray[np.bool_]:
    """Return, per ID, False where a token begins inside a multi-byte UTF-8 character."""
    starts = np.ones(size, dtype=np.bool_)
    parts = json.loads(tokenizer.to_str())
    # Byte-level BPE writes byte b of 0x80 to 0xBF as one character of its own alphabet.
    byte_level = "ByteLevel" in json.dumps([parts["pre_tokenizer"], parts["decoder"]])
    inside = {_byte_character(b) for b in range(0x80, 0xC0)} if byte_level else set()
    fallback = {f"<0x{b:02X}>" for b in range(0x80, 0xC0)} if not byte_level else set()
    for text, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if text[:1] in inside or text in fallback:
            starts[number] = False
    starts[list(tokenizer.get_added_tokens_decoder())] = True
    starts.flags.writeable = False
    return starts


def _byte_character(byte: int) -> str:
    """Return the character that stands for `byte` in GPT-2's byte alphabet."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    others = [b for b in range(256) if b not in printable]
    return chr(256 + others.index(byte))


def structural_tokens(
    tokenizer: Tokenizer,
    tokens: AddedTokens,
    template: ChatTemplate | None,
    special_tokens: Mapping[str, str],
) -> set[int]:
    """Return the IDs that only framing may write.

    They are: what the tokenizer itself adds around a text; the named special tokens and those that
    begin or end a text by convention; and what the template frames turns with. Around the
    assistant's content that is the first token and the last one, since what stands between
    (`<think>` and its like) the model writes by itself. Without a template every token flagged
    special counts.
    """
    found = set(tokenizer.encode("", add_special_tokens=True).ids)
    names = {*special_tokens.values(), *TEXT_EDGES}
    found |= {number for text, number in tokens.ids.items() if text in names}
    if template is None:
        found |= {number for number, token in tokens.entries.items() if token.special}
        return found
    for text in _framings(template):
        found.update(tokens.ids_in(text))
    for text, closed in _assistant_texts(template):
        ids = tokens.ids_in(text)
        found.update(ids[:1])
        found.update(ids[-1:] if closed else [])
    return found


def _framings(template: ChatTemplate) -> Iterator[str]:
    yield template.template_head
    for role, before in (("user", "assistant"), ("system", "user"), ("tool", "assistant")):
        try:
            frame = template.plain_frame(role, TurnContext(before, CALLED))
        except TemplateUnsafe:
            continue  # there is no such framing
        yield from (frame.pre, frame.post)
    if template.head_problem is None:
        yield template.head_text([{"role": "system", "content": "x"}])
    if template.tool_problem is None:
        again = template.plain_frame("tool", TurnContext("tool", None, CALLED))
        yield from (again.pre, again.post)


def _assistant_texts(template: ChatTemplate) -> Iterator[tuple[str, bool]]:
    """Yield assistant turns, and whether their last token ends the turn."""
    frame = template.plain_frame("assistant", TurnContext("user"))
    closed = bool(template.tokens.ids_in(frame.post))
    yield frame.pre + frame.post, closed
    yield template.generation_prompt, False
    answered = template.render([user(), assistant()], ask=False)
    yield answered[len(template.whole([user()])) :], closed
    if template.call_problem is None:
        message = calling(template.probe_call())
        yield template.turn_text(message, TurnContext("user")).text, closed
