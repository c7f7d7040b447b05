"""Token IDs as text: numbers with spaces between. One token a number, so every count is exact."""

from collections.abc import Sequence


def text_of(ids: Sequence[int]) -> str:
    """Return token IDs as text."""
    return " ".join(str(int(one)) for one in ids)


def ids_of(text: str) -> list[int]:
    """Return the token IDs that stand in a text."""
    return [int(word) for word in text.split()]


def count(text: str) -> int:
    """Return how many tokens a text has."""
    return len(text.split())


def split(text: str) -> list[str]:
    """Return a text as its tokens, each with what separates it from the one before."""
    return [word + " " for word in text.split()]
