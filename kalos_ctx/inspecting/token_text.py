"""Token IDs as the text that each of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kalos_ctx.terminal import readable

if TYPE_CHECKING:
    from kalos_ctx.tokens import TokenCodec

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than it has bytes; behind that, broken text is shown as it is.
TOKENS_A_CHARACTER = 4

# The text that it writes, and the IDs: several where only together they make a character.
Piece = tuple[str, list[int]]


def pieces(codec: TokenCodec, ids: Sequence[int]) -> list[Piece]:
    """Return the text that each token adds, escaped for a reader.

    A token is decoded behind the one before it, since many tokenizers write a blank between words
    only there.
    """
    found: list[Piece] = []
    before, begin = 0, 0
    for end in range(1, len(ids) + 1):
        known = codec.decode(ids[before:begin]) if begin else ""
        text = codec.decode(ids[before:end])[len(known) :]
        if text.endswith(REPLACEMENT) and end - begin < TOKENS_A_CHARACTER and end < len(ids):
            continue
        found.append((readable(text), list(ids[begin:end])))
        before, begin = begin, end
    return found
