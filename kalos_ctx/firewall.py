"""The control-token firewall: which added tokens may stand where, and text that spells them.

Added tokens are matched in text before anything else, so a user who writes `<|im_end|>` ends a turn
unless somebody prevents it. `encode_special_tokens` of `tokenizers` is not enough: it leaves added
tokens that are not flagged special (`<think>`, `<tool_call>`, some models' role markers) live.

Two classes (CONTRACT.md words the rule): *structural* tokens never stand in content; *markup*, all
other added tokens, may stand in assistant turns and nowhere else.

How text that spells a token stays text. Before a turn is rendered, each spelled token in the
content is broken by a private character that occurs nowhere in the input. Whatever still matches in
the rendered text was written by the template. Those matches are renamed to private strings, the
breaks are taken out again, and the result is encoded at once by a twin of the tokenizer that shares
the model but knows the added tokens under the private names only. At the end the IDs are counted: a
control token too many is never let through.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from kalos_ctx.errors import ControlTokenInContent, InvalidArgument, InvalidTokenId, InvalidType

Ids = NDArray[np.int32]
ASSISTANT = "assistant"
# Private-use planes: the break, the twin's quote and its names are taken from here.
BREAKS = range(0xE000, 0xF900)
QUOTES = range(0xF0000, 0xF1000)
NAMES = 0x100000


def as_ids(value: object) -> Ids:
    """Return `value` as a contiguous int32 array of shape (L,), refusing what does not fit.

    Raises
    ------
    InvalidType
        Not a one-dimensional sequence or buffer of integers (a mapping, text, floats).
    InvalidTokenId
        An integer does not fit int32.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return np.ascontiguousarray(value)
    if isinstance(value, (str, bytes, Mapping, set, frozenset)):
        raise InvalidType(
            f"token_ids must be a sequence of integers (got {type(value).__name__}); "
            "pass the list of IDs itself, for a tokenizer's result its 'input_ids'"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidType("token_ids must be a flat sequence of integers") from None
    if array.ndim != 1:
        raise InvalidType(f"token_ids must have one dimension (got {array.ndim})")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidType(f"token_ids must be integers (got {array.dtype})")
    wide = (array < 0) | (array > np.iinfo(np.int32).max)
    if wide.any():
        position = int(wide.argmax())
        raise InvalidTokenId(
            f"token_ids[{position}] is {int(array[position])}, which is no token ID"
        )
    return np.ascontiguousarray(array, dtype=np.int32)


class AddedTokens:
    """The added tokens of a tokenizer and where a text spells them.

    Attributes
    ----------
    ids : dict of str to int
        Each added token's text and ID. Runs of white space, which some vocabularies hold as added
        tokens, are ordinary text and not among them.
    spaces : dict of str to int
        Those runs.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.entries: dict[int, AddedToken] = dict(tokenizer.get_added_tokens_decoder())
        known = {t.content: i for i, t in self.entries.items() if t.content}
        self.spaces: dict[str, int] = {t: i for t, i in known.items() if t.isspace()}
        self.ids: dict[str, int] = {t: i for t, i in known.items() if t not in self.spaces}
        self.pattern = _pattern(self.ids)

    def boundaries(self, text: str) -> list[int]:
        """Return the sorted offsets at which an added token starts or ends in `text`."""
        return sorted({edge for match in self.find(text) for edge in match.span()})

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the matches the tokenizer makes: leftmost first, then longest."""
        return self.pattern.finditer(text)

    def ids_in(self, text: str) -> list[int]:
        """Return the IDs of the added tokens that `text` spells, in order."""
        return [self.ids[match[0]] for match in self.find(text)]


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(words, key=len, reverse=True)
    if not ordered:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, ordered)))


def _edge_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Match text that starts with a token's end or ends with a token's start."""
    ends = {word[i:] for word in words for i in range(1, len(word))}
    starts = {word[:i] for word in words for i in range(1, len(word))}
    return re.compile(rf"\A(?:{_pattern(ends).pattern})|(?:{_pattern(starts).pattern})\Z")


class Break:
    """Breaks spelled control tokens of one role's text, and takes the breaks out again.

    A token of one character cannot be broken; it is exchanged for a private character.
    """

    def __init__(self, firewall: Firewall, role: str, texts: str) -> None:
        self._pattern = firewall.forbidden_pattern(role)
        self._edges = firewall.edge_pattern
        free = (chr(c) for c in BREAKS if chr(c) not in texts)
        try:
            self.mark = next(free)
            self._single = {token: next(free) for token in firewall.tokens.ids if len(token) == 1}
        except StopIteration:
            raise InvalidArgument("content uses every private-use character there is") from None

    def apply(self, text: str) -> str:
        """Return `text` with every forbidden token broken, at its edges too."""
        if self._edges.search(text) is not None:
            # The template's own text might complete it to a token.
            text = self.mark + text + self.mark
        while True:
            broken = self._pattern.sub(self._broken, text)
            if broken == text:
                return text
            text = broken

    def apply_deep(self, value: Any) -> Any:
        """Apply to every string in plain data, keys included."""
        if isinstance(value, str):
            return self.apply(value)
        if isinstance(value, Mapping):
            return {self.apply_deep(k): self.apply_deep(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.apply_deep(item) for item in value]
        return value

    def _broken(self, match: re.Match[str]) -> str:
        token = match[0]
        if len(token) == 1:
            return self._single[token]
        return token[0] + self.mark + token[1:]

    def restore(self, text: str, mark: str = "") -> str:
        """Return `text` with exchanged characters back and each break replaced by `mark`."""
        for token, stand_in in self._single.items():
            # Kept apart by the mark on both sides, or it would match as the token again.
            text = text.replace(stand_in, mark + token + mark)
        return text.replace(self.mark, mark)


class _Twin:
    """The tokenizer with its added tokens renamed to private strings, and a null token."""

    def __init__(self, tokenizer: Tokenizer, tokens: AddedTokens, quote: str) -> None:
        self.names = {
            token: f"{quote}{chr(NAMES + n)}{quote}" for n, token in enumerate(tokens.ids)
        }
        self.null = f"{quote}{quote}"
        twin = Tokenizer(tokenizer.model)  # shares the model, copies nothing
        if tokenizer.normalizer is not None:
            twin.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            twin.pre_tokenizer = tokenizer.pre_tokenizer
        renamed = [AddedToken(self.null, normalized=False, special=True)]
        for token, number in tokens.ids.items():
            entry = tokens.entries[number]
            renamed.append(
                AddedToken(
                    self.names[token],
                    single_word=entry.single_word,
                    lstrip=entry.lstrip,
                    rstrip=entry.rstrip,
                    normalized=False,
                    special=True,
                )
            )
        twin.add_tokens([*renamed, *(tokens.entries[n] for n in tokens.spaces.values())])
        self.tokenizer = twin
        self.null_id = twin.token_to_id(self.null)
        self.real_ids = {twin.token_to_id(self.names[t]): n for t, n in tokens.ids.items()}
        self.real_ids |= {twin.token_to_id(t): n for t, n in tokens.spaces.items()}


class Firewall:
    """Decides on IDs and on text; owns the lookup tables.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    tokens : AddedTokens
        Of the same tokenizer.
    structural : iterable of int
        IDs that never stand in content. The other added tokens are markup.
    vocab_size : int
        Valid IDs are `0 <= id < vocab_size`.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokens: AddedTokens, structural: Iterable[int], vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.vocab_size = vocab_size
        added = frozenset(tokens.ids.values())
        self.structural_ids = frozenset(structural) & frozenset(range(vocab_size))
        self.markup_ids = added - self.structural_ids
        self.control_ids = added | self.structural_ids
        self._structural_pattern = _pattern(
            text for text, number in tokens.ids.items() if number in self.structural_ids
        )
        self.edge_pattern = _edge_pattern(tokens.ids)
        self._bad_assistant = self._table(self.structural_ids)
        self._bad_elsewhere = self._table(self.control_ids)
        self._twin: _Twin | None = None

    def _table(self, ids: frozenset[int]) -> NDArray[np.uint8]:
        table = np.zeros(self.vocab_size, dtype=np.uint8)
        table[list(ids)] = 1
        table.flags.writeable = False
        return table

    def forbidden_pattern(self, role: str) -> re.Pattern[str]:
        """Return what text of `role` must not have live."""
        return self._structural_pattern if role == ASSISTANT else self.tokens.pattern

    def check_ids(self, role: str, ids: object) -> Ids:
        """Refuse content IDs that may not stand in a turn of `role`.

        Parameters
        ----------
        role : str
        ids : int array-like of shape (L,)

        Returns
        -------
        int32 array of shape (L,)
            The IDs, not copied where they are int32 already.

        Raises
        ------
        ControlTokenInContent
            With the position of the first one.
        InvalidTokenId
            An ID lies outside [0, vocab_size).
        InvalidType
            Not integers in one dimension.
        """
        array = as_ids(ids)
        table = self._bad_assistant if role == ASSISTANT else self._bad_elsewhere
        try:
            # As unsigned numbers negative IDs are out of range too, and numpy checks that.
            found = table.take(array.view(np.uint32)).tobytes().find(b"\x01")
        except IndexError:
            outside = (array < 0) | (array >= self.vocab_size)
            position = int(outside.argmax())
            raise InvalidTokenId(
                f"token_ids[{position}] is {int(array[position])}, outside the vocabulary of "
                f"{self.vocab_size}"
            ) from None
        if found >= 0:
            number = int(array[found])
            kind = "structural" if number in self.structural_ids else "markup"
            raise ControlTokenInContent(
                f"token_ids[{found}] is the {kind} token {number}, which may not stand in the "
                f"content of a {role!r} turn"
            )
        return array

    def spells(self, role: str, texts: Iterable[str]) -> bool:
        """Say whether a text spells a token forbidden for `role`, or part of one at its edge."""
        search, edge = self.forbidden_pattern(role).search, self.edge_pattern.search
        return any(search(text) is not None or edge(text) is not None for text in texts)

    def refuse_spelled(self, role: str, texts: Iterable[str]) -> None:
        """Raise `ControlTokenInContent` where a text spells a token forbidden for `role`."""
        pattern = self.forbidden_pattern(role)
        for text in texts:
            match = pattern.search(text)
            if match is not None:
                raise ControlTokenInContent(
                    f"content of a {role!r} turn spells the control token "
                    f"{self.tokens.ids[match[0]]} at character {match.start()}"
                )

    def count(self, ids: Iterable[int]) -> int:
        """Return how many control tokens are among `ids`."""
        return sum(map(self.control_ids.__contains__, ids))

    def encode_literal(self, text: str, breaks: Break, cuts: Iterable[int] = ()) -> list[list[int]]:
        """Encode rendered text in which spelled tokens are broken.

        Parameters
        ----------
        text : str
            The rendering of broken content.
        breaks : Break
            What broke it.
        cuts : iterable of int
            Ascending character offsets; the result is cut before the first token that starts there.

        Returns
        -------
        list of list of int
            One list of IDs for each part.

        Raises
        ------
        ControlTokenInContent
            The model itself makes a control token out of the literal text.
        """
        twin = self._twin_without(text)
        for null in ("", twin.null):
            parts, expected = self._pieces(text, breaks, twin, null, cuts)
            if self.count(i for part in parts for i in part) == expected:
                return parts
        raise ControlTokenInContent("content makes a control token that cannot be kept as text")

    def _pieces(
        self, text: str, breaks: Break, twin: _Twin, null: str, cuts: Iterable[int]
    ) -> tuple[list[list[int]], int]:
        pending, starts = list(cuts), []
        out: list[str] = []
        length = last = expected = 0

        def copy(stop: int, convert: Callable[[str], str]) -> None:
            nonlocal length, last
            while pending and pending[0] <= stop:
                cut = max(pending.pop(0), last)
                starts.append(length + len(convert(text[last:cut])))
            piece = convert(text[last:stop])
            out.append(piece)
            length += len(piece)
            last = stop

        def plain(piece: str) -> str:
            return breaks.restore(piece, null)

        for match in self.tokens.find(text):
            copy(match.start(), plain)
            copy(match.end(), lambda piece: twin.names.get(piece, ""))
            expected += 1
        copy(len(text), plain)
        encoding = twin.tokenizer.encode("".join(out), add_special_tokens=False)
        parts: list[list[int]] = [[]]
        for number, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            while starts and start >= starts[0]:
                starts.pop(0)
                parts.append([])
            if number != twin.null_id:
                parts[-1].append(twin.real_ids.get(number, number))
        parts.extend([] for _ in starts)
        return parts, expected

    def _twin_without(self, text: str) -> _Twin:
        """Return a twin whose quote does not occur in `text`."""
        twin = self._twin
        if twin is None:
            # Two threads may both build one; the model is shared, so the loser costs nothing.
            twin = self._twin = _Twin(self._tokenizer, self.tokens, chr(QUOTES[0]))
        if twin.null[0] not in text:
            return twin
        for code in QUOTES:
            if chr(code) not in text:
                return _Twin(self._tokenizer, self.tokens, chr(code))
        raise InvalidArgument("content uses every private-use character there is")
