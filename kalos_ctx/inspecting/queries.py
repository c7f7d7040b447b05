"""What a browser asks, from the query part of a URL: each value checked, every refusal typed."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs

from kalos_ctx.errors import InvalidArgument

NAME_NBYTES = 1024
FIELDS_MAX = 64
VALUE_CHARS = 65536


class Query:
    """The fields of one request.

    Raises
    ------
    InvalidArgument
    """

    def __init__(self, text: str) -> None:
        try:
            self._fields = parse_qs(
                text, keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX
            )
        except ValueError:
            raise InvalidArgument(
                f"a request must have at most {FIELDS_MAX} fields of UTF-8 text"
            ) from None
        if any(len(one) > VALUE_CHARS for values in self._fields.values() for one in values):
            raise InvalidArgument(f"a field must have at most {VALUE_CHARS} characters")

    def text(self, name: str, default: str = "") -> str:
        """Return a field's text; it may stand once."""
        values = self._fields.get(name, [default])
        if len(values) != 1:
            raise InvalidArgument(f"{name} must stand once (got {len(values)})")
        return values[0]

    def whole(self, name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """Return a whole number from 0; `default` where the field is missing or empty.

        Raises
        ------
        InvalidArgument
            It is no number, too large, or missing without a default.
        """
        given = self.text(name)
        if not given:
            if default is None:
                raise InvalidArgument(f"{name} must be given")
            return default
        if not (given.isascii() and given.isdigit() and len(given) <= 20) or int(given) > most:
            raise InvalidArgument(f"{name} must be a whole number from 0 to {most}")
        return int(given)

    def optional_whole(self, name: str) -> int | None:
        """Return a whole number, or None where the field is missing or empty."""
        return self.whole(name) if self.text(name) else None

    def share(self, name: str, default: float) -> float:
        """Return a number above 0, up to 1."""
        given = self.text(name)
        try:
            value = float(given) if given else default
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise InvalidArgument(f"{name} must be a number above 0, up to 1")
        return value

    def flag(self, name: str) -> bool:
        """Return whether a box is ticked."""
        return self.choice(name, ("0", "1")) == "1"

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of several words; the first where the field is missing."""
        given = self.text(name, choices[0])
        if given not in choices:
            raise InvalidArgument(f"{name} must be one of {', '.join(choices)}")
        return given

    def name(self, name: str, *, empty: bool = False) -> bytes:
        """Return a stored name, which travels in hex since it may be no text."""
        given = self.text(name)
        try:
            raw = bytes.fromhex(given)
        except ValueError:
            raise InvalidArgument(f"{name} must be a name in hex") from None
        if len(raw) > NAME_NBYTES or not (raw or empty):
            raise InvalidArgument(f"{name} must have 1 to {NAME_NBYTES} bytes (got {len(raw)})")
        return raw

    def names(self, name: str) -> tuple[bytes, ...]:
        """Return several stored names."""
        found = []
        for given in self._fields.get(name, []):
            try:
                found.append(bytes.fromhex(given))
            except ValueError:
                raise InvalidArgument(f"{name} must be names in hex") from None
        return tuple(found)
