"""Text to token IDs: turns in their history form, the head, recalled text, what may stand where.

`TokenCodec` joins a tokenizer with a chat template. A turn is rendered by the template itself in a
short context, encoded in one piece, and equals its slice of the whole conversation encoded at once;
`kalos_ctx.proof` proves that at load and refuses a template for which it does not hold.
docs/templates.md says what holds for which template.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kalos_ctx.errors import InvalidArgument, InvalidType
from kalos_ctx.firewall import ASSISTANT, AddedTokens, Break, Firewall, Ids
from kalos_ctx.heads import HeadBuilder, Segment, checked_schemas, checked_segment
from kalos_ctx.proof import prove, stands_inside
from kalos_ctx.template import ChatTemplate, Message, TurnContext, TurnText
from kalos_ctx.vocabulary import (
    character_starts,
    fingerprint_of,
    load_files,
    structural_tokens,
    vocabulary_size,
)

SEPARATOR = "\n\n"
ROLE = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
HEAD_CACHE_SIZE = 64


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A turn as a window holds it.

    Attributes
    ----------
    ids : int32 array of shape (L,)
        Framing and content in the form of history.
    prefix_len, suffix_len : int
        Tokens of framing in front of and behind the content: the longest common start (end) with
        the framing encoded alone. A token in which framing and content merged counts as content.
    trim_prev : int
        Tokens that the turn before loses at its end where this one follows it (adjacent tool
        results that share a block). Such a turn always stands in the same unit as that one.
    live_ids : int32 array of shape (L',), optional
        The form while a tool loop runs (the turn stands after the last user turn), where it
        differs.
    """

    ids: Ids
    prefix_len: int
    suffix_len: int
    trim_prev: int = 0
    live_ids: Ids | None = None


class TokenCodec:
    """A tokenizer and, where there is one, the chat template that frames turns.

    Made by `TokenCodec.load`. Thread-safe: nothing changes after loading but caches.

    Attributes
    ----------
    fingerprint : bytes
        32 bytes over tokenizer, template and the special tokens that the template names.
    vocab_size : int
        Highest ID plus one, added tokens included.
    has_template : bool
    structural_ids, markup_ids : frozenset of int
        Tokens that never stand in content, and those that may stand in assistant turns only.
    generation_prompt : int32 array of shape (G,)
        What asks the model for its turn; empty without a template or where it has none.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        tokens = AddedTokens(tokenizer)
        self.vocab_size = vocabulary_size(tokenizer)
        self._template: ChatTemplate | None = None
        if template is not None:
            self._template = ChatTemplate(template, tokens, self._encode, special_tokens)
            prove(self._template)
        self.has_template = template is not None
        structural = structural_tokens(tokenizer, tokens, self._template, special_tokens)
        self._firewall = Firewall(tokenizer, tokens, structural, self.vocab_size)
        self.structural_ids = self._firewall.structural_ids
        self.markup_ids = self._firewall.markup_ids
        self.check_ids = self._firewall.check_ids
        prompt = self._template.generation_prompt if self._template else ""
        self.generation_prompt = _frozen(self._encode(prompt))
        self.fingerprint = fingerprint_of(tokenizer, template, special_tokens)
        self._frame_ids = lru_cache(maxsize=512)(lambda text: tuple(self._encode(text)))
        self._inside = lru_cache(maxsize=32)(self._stands_inside)
        self._heads: OrderedDict[Hashable, list[tuple[str, Ids]]] = OrderedDict()
        self._starts: NDArray[np.bool_] | None = None

    @classmethod
    def load(
        cls,
        tokenizer: str | PathLike[str] | Tokenizer,
        template: str | PathLike[str] | None = None,
        *,
        special_tokens: Mapping[str, str] | None = None,
    ) -> TokenCodec:
        """Load a tokenizer and prove its chat template.

        Parameters
        ----------
        tokenizer : path or tokenizers.Tokenizer
            A `tokenizer.json` or its folder. The template is taken from `chat_template.jinja`
            beside it, else from `tokenizer_config.json`. An object is copied, never changed.
        template : str or path, optional
            Jinja text or the path of a `.jinja` file; stands for the one beside the tokenizer. The
            empty string means no template.
        special_tokens : mapping of str to str, optional
            `bos_token`, `eos_token` and so on, for templates that name them; by default those of
            `tokenizer_config.json`.

        Raises
        ------
        TemplateUnsafe
            The template cannot be encoded turn by turn; the message says which rule is broken.
        InvalidArgument, InvalidType
            A file is missing or unreadable, or the tokenizer is of another type.
        """
        return cls(*load_files(tokenizer, template, special_tokens))

    # Turns.

    def encode_turn(
        self,
        role: str,
        content: str | None,
        previous: str | TurnContext | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        on_control: str = "literal",
    ) -> EncodedTurn:
        """Encode a turn in its history form.

        Parameters
        ----------
        role : str
            A role that the template renders.
        content : str or None
            None only beside tool calls; then it stands for the empty text.
        previous : str or TurnContext, optional
            Role of the turn before, or what is known of it; None for the first turn.
        extra : mapping, optional
            Template fields: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `thinking`.
            Others are not looked at. Arguments of calls may be a mapping or JSON text.
        on_control : {"literal", "refuse"}
            Whether text that spells a forbidden control token stays text or is refused.

        Raises
        ------
        ControlTokenInContent
            With "refuse"; with "literal" only where the model has no other encoding.
        TemplateUnsafe
            The template refuses the turn here, drops it, or moves it.
        InvalidArgument, InvalidType
        """
        self._check_role(role)
        _check_choice(on_control)
        has_calls = role == ASSISTANT and bool(extra and extra.get("tool_calls"))
        text = _checked_text("" if content is None and has_calls else content, "content")
        context = _context(previous)
        template = self._template
        if template is None:
            return EncodedTurn(_array(self._plain(text, role, on_control)), 0, 0)
        message = template.message(role, text, extra)
        texts = list(_strings(message)) if extra else [text]
        if role == "tool" and context is not None:
            texts += _strings([context.extra or {}, context.call or {}])
        if self._firewall.spells(role, texts):
            if on_control == "refuse":
                self._firewall.refuse_spelled(role, texts)
            return self._literal_turn(template, message, context, texts)
        turn = template.turn_text(message, context, sum(map(len, texts)))
        ids = self._encode(turn.text)
        live = None if turn.live is None else self._encode(turn.live)
        if not self._clean(turn.text, ids) or (
            live is not None and not self._clean(turn.live or "", live)
        ):
            # Normalisation made a token of other characters: encode without added tokens.
            return self._literal_turn(template, message, context, texts)
        pre, post = self._frame_ids(turn.pre), self._frame_ids(turn.post)
        return self._encoded(ids, live, turn, pre, post)

    def _literal_turn(
        self,
        template: ChatTemplate,
        message: Message,
        context: TurnContext | None,
        texts: list[str],
    ) -> EncodedTurn:
        role = message["role"]
        breaks = Break(self._firewall, role, "".join(texts))
        broken: Message = {**breaks.apply_deep(message), "role": role}
        if role == "tool":
            context = _broken(breaks, context)
        turn = template.turn_text(broken, context, sum(map(len, texts)))
        encode = self._firewall.encode_literal
        ids = encode(turn.text, breaks)[0]
        live = None if turn.live is None else encode(turn.live, breaks)[0]
        pre, post = encode(turn.pre, breaks)[0], encode(turn.post, breaks)[0]
        return self._encoded(ids, live, turn, pre, post)

    def _encoded(
        self,
        ids: list[int],
        live: list[int] | None,
        turn: TurnText,
        pre: Sequence[int],
        post: Sequence[int],
    ) -> EncodedTurn:
        prefix = _common_start(ids, pre)
        suffix = _common_start(ids[: prefix - 1 if prefix else None : -1], post[::-1])
        if not suffix and prefix < len(ids) and ids[-1] in self.structural_ids:
            suffix = 1  # another end token than plain turns have, such as gpt-oss's <|call|>
        shown = None if live is None else _array(live)
        return EncodedTurn(_array(ids), prefix, suffix, turn.trim, shown)

    def frame_ids(
        self,
        role: str,
        ids: object,
        previous: str | TurnContext | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> EncodedTurn:
        """Put the framing of `role` around content IDs, which are not encoded again.

        The framing is that of plain content: IDs that an engine returned hold their calls and their
        reasoning themselves, so `extra` is only checked.

        Parameters
        ----------
        ids : sequence of int or integer buffer of shape (L,)
        role, previous, extra
            As in `encode_turn`.

        Raises
        ------
        InvalidTokenId
            An ID lies outside the vocabulary.
        ControlTokenInContent
            An ID is a control token that the role's content may not hold.
        TemplateUnsafe
            The template refuses a turn of the role here, drops it, or moves it.
        InvalidArgument, InvalidType
        """
        self._check_role(role)
        content = self.check_ids(role, ids)
        context = _context(previous)
        template = self._template
        if template is None:
            return EncodedTurn(content.copy(), 0, 0)
        name = template.message(role, "", extra).get("name")
        pre, post, trim = self._framing(template, role, context, name)
        whole = np.concatenate([_array(pre), content, _array(post)])
        return EncodedTurn(whole, len(pre), len(post), trim)

    def _framing(
        self, template: ChatTemplate, role: str, context: TurnContext | None, name: str | None
    ) -> tuple[Sequence[int], Sequence[int], int]:
        texts = [name] if name else []
        if context is not None:
            texts += _strings([context.extra or {}, context.call or {}])
        if role != "tool" or not self._firewall.spells(role, texts):
            frame = template.plain_frame(role, context, name)
            return self._frame_ids(frame.pre), self._frame_ids(frame.post), frame.trim
        breaks = Break(self._firewall, role, "".join(texts))
        frame = template.plain_frame(role, _broken(breaks, context), breaks.apply(name or ""))
        encode = self._firewall.encode_literal
        return encode(frame.pre, breaks)[0], encode(frame.post, breaks)[0], frame.trim

    # Text without framing.

    def encode_text(self, text: str, role: str = "system", *, on_control: str = "literal") -> Ids:
        """Encode plain content, such as a passage: no framing, no control token live.

        Returns
        -------
        int32 array of shape (L,)

        Raises
        ------
        ControlTokenInContent, InvalidArgument, InvalidType
            As `encode_turn`.
        """
        _check_choice(on_control)
        # Recalled text is never the assistant's own turn, so markup is not live in it either.
        rule = "system" if role == ASSISTANT else role
        return _array(self._plain(_checked_text(text, "text"), rule, on_control))

    def _plain(self, text: str, role: str, on_control: str) -> list[int]:
        firewall = self._firewall
        if firewall.forbidden_pattern(role).search(text) is not None:
            if on_control == "refuse":
                firewall.refuse_spelled(role, [text])
        else:
            ids = self._encode(text)
            if self._clean(text, ids):
                return ids
        breaks = Break(firewall, role, text)
        return firewall.encode_literal(breaks.apply(text), breaks)[0]

    def decode(self, ids: object) -> str:
        """Return the text of `ids`, control tokens shown.

        IDs outside the vocabulary stand for nothing.

        Parameters
        ----------
        ids : sequence of int or integer array of shape (L,)

        Raises
        ------
        TypeError, ValueError, OverflowError
            Of the tokenizer, for what is no flat sequence of whole numbers of 32 bits.
        """
        shown: str = self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
        return shown

    def starts_character(self) -> NDArray[np.bool_]:
        """Return, per vocabulary ID, whether a token starts on a character's first byte.

        Returns
        -------
        bool array of shape (vocab_size,), read-only
            A cut before a token with False would split a multi-byte character. The same array at
            every call; raises nothing.
        """
        if self._starts is None:
            self._starts = character_starts(self._tokenizer, self.vocab_size)
        return self._starts

    # The head and recalled text.

    def head(
        self,
        segments: Iterable[Segment],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: float | None = None,
    ) -> list[tuple[str, Ids]]:
        """Encode what stands before the first turn.

        Parameters
        ----------
        segments : iterable of (name, role, text)
            Pinned texts in order. Role `tools`: a JSON list of tool schemas.
        tools : sequence of mappings, optional
            More tool schemas.
        now : float, optional
            Seconds as `time.time()`, for templates with a date.

        Returns
        -------
        list of (name, int32 array)
            Tiles the head in its own order. What the template puts there by itself stands under
            "template", or with the text that it surrounds.

        Raises
        ------
        TemplateUnsafe
            The template refuses, drops or moves a text.
        InvalidArgument, InvalidType, ControlTokenInContent
        """
        rows = [checked_segment(row) for row in segments]
        moment = time.time() if now is None else now
        schemas = checked_schemas(tools)
        key = (tuple(rows), json.dumps(schemas), self.head_changes(moment))
        found = self._heads.get(key)
        if found is None:
            found = HeadBuilder(self, self._template, self._firewall).build(rows, schemas, moment)
            self._heads[key] = found
            while len(self._heads) > HEAD_CACHE_SIZE:
                self._heads.popitem(last=False)
        return list(found)

    def head_changes(self, now: float | None = None) -> Hashable:
        """Return a value that changes when the head's date does; constant where it has none.

        Parameters
        ----------
        now : float, optional
            Seconds as `time.time()`; the present where it is not given.

        Raises
        ------
        ValueError, OverflowError
            Where the head has a date, for a time that the platform's calendar does not hold.
        """
        if self._template is None:
            return ()
        return self._template.head_key(time.time() if now is None else now)

    def recall_role_used(self, role: str) -> str:
        """Return the role under which recalled passages stand.

        `role`, or "user" where the template would drop or move a turn of `role` inside a
        conversation (gpt-oss and DeepSeek do so with system messages). A role that the template
        does not know is one that it drops: nothing is raised for it.
        """
        return role if self._template is None or self._inside(role) else "user"

    def recall_frame(self, role: str) -> tuple[Ids, Ids, Ids]:
        """Return prefix, separator and suffix that make recalled passages one turn.

        All are empty without a template: then passages stand as stored.

        Returns
        -------
        tuple of three int32 arrays of shapes (P,), (S,) and (Q,), read-only

        Raises
        ------
        InvalidArgument, InvalidType
            `role` is no name of a role.
        TemplateUnsafe
            The template refuses the turn.
        """
        self._check_role(role)
        if self._template is None:
            return _frozen([]), _frozen([]), _frozen([])
        used = self.recall_role_used(role)
        frame = self._template.plain_frame(used, TurnContext(ASSISTANT))
        separator = _frozen(self._encode(SEPARATOR))
        return _frozen(self._frame_ids(frame.pre)), separator, _frozen(self._frame_ids(frame.post))

    @property
    def template_limits(self) -> dict[str, str]:
        """What the template cannot do and why, by subject: `head`, `tools`, `tool_call`, `tool`."""
        template = self._template
        if template is None:
            return {}
        problems = {
            "head": template.head_problem,
            "tools": template.tools_problem,
            "tool_call": template.call_problem,
            "tool": template.tool_problem,
        }
        limits = {subject: why for subject, why in problems.items() if why is not None}
        if "tool_call" not in limits and not template.renders_calls:
            limits["tool_call"] = "the template leaves tool calls out of an assistant turn"
        return limits

    def _stands_inside(self, role: str) -> bool:
        return self._template is not None and stands_inside(self._template, role)

    # Helpers.

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _clean(self, text: str, ids: list[int]) -> bool:
        """Say whether `ids` hold exactly the control tokens that `text` spells."""
        spelled = sum(1 for _ in self._firewall.tokens.find(text))
        return self._firewall.count(ids) == spelled

    def _check_role(self, role: str) -> None:
        if not isinstance(role, str):
            raise InvalidType(f"role must be a str (got {type(role).__name__})")
        # A template may write the role itself; a name can neither spell nor complete a token.
        if self._template is not None and ROLE.match(role) is None:
            raise InvalidArgument("role must be 1 to 32 of a-z, 0-9 and _, starting with a letter")


def _check_choice(on_control: str) -> None:
    if on_control not in ("literal", "refuse"):
        raise InvalidArgument(f"on_control must be 'literal' or 'refuse' (got {on_control!r})")


def _checked_text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise InvalidType(f"{name} must be a str (got {type(text).__name__})")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"{name} has a lone surrogate at character {error.start}"
            ) from None
    return text


def _context(previous: str | TurnContext | None) -> TurnContext | None:
    if previous is None or isinstance(previous, TurnContext):
        return previous
    if not isinstance(previous, str):
        raise InvalidType(
            f"previous must be a role or a TurnContext (got {type(previous).__name__})"
        )
    return TurnContext(previous)


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in plain data, checked for lone surrogates."""
    if isinstance(value, str):
        yield _checked_text(value, "extra")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _broken(breaks: Break, context: TurnContext | None) -> TurnContext | None:
    """Return the context with the tokens broken that its calls spell."""
    if context is None:
        return None
    extra, call = (
        None if fields is None else {f: breaks.apply_deep(v) for f, v in fields.items()}
        for fields in (context.extra, context.call)
    )
    return TurnContext(context.role, extra, call)


def _common_start(ids: Sequence[int], framing: Sequence[int]) -> int:
    length = len(framing)
    if tuple(ids[:length]) == tuple(framing):
        return length
    return next((n for n, (a, b) in enumerate(zip(ids, framing, strict=False)) if a != b), len(ids))


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def _frozen(ids: Sequence[int]) -> Ids:
    array = _array(ids)
    array.flags.writeable = False
    return array


__all__ = ["EncodedTurn", "TokenCodec", "TurnContext"]
