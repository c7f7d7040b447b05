"""Files of conversations, read as streams: JSON lines, or one JSON array; gzip is unpacked."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

MAX_RECORD_NBYTES = 64 << 20
CHUNK_NBYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANK = re.compile(r"[ \t\r\n]*")


class Refused(Exception):
    """A conversation is not taken, and why; the message quotes none of it."""


class opened:
    """A binary file to read, or standard input, which stays open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        if self._path == "-":
            return sys.stdin.buffer
        self._file = open(self._path, "rb")
        return self._file

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()


class _Source:
    """A file's bytes from its beginning, unpacked where they are gzip, with places told."""

    def __init__(self, raw: IO[bytes], on_bytes: Callable[[int], None] | None) -> None:
        self._raw, self._on_bytes = raw, on_bytes
        self._done = 0
        self._ahead = raw.read(CHUNK_NBYTES)
        self._packed = self._ahead[:2] == b"\x1f\x8b"
        self._stream: Any = gzip.GzipFile(fileobj=self) if self._packed else self  # type: ignore[call-overload]

    def read(self, size: int = CHUNK_NBYTES) -> bytes:
        """Read raw bytes (called by gzip too)."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
        else:
            data = self._raw.read(size)
        self._done += len(data)
        if self._on_bytes is not None:
            self._on_bytes(self._done)
        return data

    def chunk(self) -> bytes:
        """Return the next bytes of the text, b"" at the end."""
        if not self._packed:
            return self.read()
        try:
            data: bytes = self._stream.read(CHUNK_NBYTES)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise Refused(
                f"the gzip data is damaged from here on ({type(error).__name__})"
            ) from None
        return data


def records(
    raw: IO[bytes], on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (line, parsed JSON value or Refused) for each conversation of a file.

    Reads as a stream: at most one conversation, of at most 64 MiB, is held.
    """
    source = _Source(raw, on_bytes)
    try:
        first = source.chunk().removeprefix(BOM)
        while first and not first.strip():
            more = source.chunk()
            if not more:
                return
            first += more
    except Refused as refused:
        yield 1, refused
        return
    if first.lstrip()[:1] == b"[":
        yield from _array_items(first, source)
    else:
        yield from _lines(first, source)


def parsed_json(text: str) -> Any:
    """Return a text's JSON value, or a Refused that says why it has none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return Refused(f"not JSON: {error.msg} at character {error.pos + 1}")
    except ValueError:
        return Refused("not JSON that can be read: a number is too long")
    except RecursionError:
        return Refused("not JSON that can be read: nested too deeply")


def _line_value(line: bytes) -> Any:
    if b"\0" in line:
        return Refused("the line holds a NUL byte")
    try:
        return parsed_json(line.decode())
    except UnicodeDecodeError as error:
        return Refused(f"the line is not UTF-8 at byte {error.start + 1}")


def _lines(first: bytes, source: _Source) -> Iterator[tuple[int, Any]]:
    """Yield the values of JSON lines."""
    number, pending, skipping, data = 1, b"", False, first
    while data:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            if skipping:
                skipping = False
            else:
                line = pending + piece
                if len(line) > MAX_RECORD_NBYTES:
                    yield number, too_long()
                elif line.strip():
                    yield number, _line_value(line)
            pending = b""
            number += 1
        if not skipping:
            pending += rest
            if len(pending) > MAX_RECORD_NBYTES:
                yield number, too_long()
                pending, skipping = b"", True
        try:
            data = source.chunk()
        except Refused as refused:
            yield number, refused
            return
    if pending.strip() and not skipping:
        yield number, _line_value(pending)


def too_long() -> Refused:
    """Return the refusal of a conversation that takes more memory than one may."""
    return Refused(f"longer than {MAX_RECORD_NBYTES >> 20} MiB")


class _ArrayText:
    """The decoded text of a JSON array, with the line at which the unread part begins."""

    def __init__(self, first: bytes, source: _Source) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.line, self.at, self.ended = 1, 0, False
        self.text = self._decoder.decode(first)
        self._wanted = 0

    def more(self) -> None:
        """Read on; twice as much each time, so that a long item is tried a few times only."""
        self.text, self.at = self.text[self.at :], 0
        target = 2 * len(self.text) + CHUNK_NBYTES
        pieces, have = [self.text], len(self.text)
        while have < target and not self.ended:
            data = self._source.chunk()
            self.ended = not data
            pieces.append(self._decoder.decode(data, final=self.ended))
            have += len(pieces[-1])
        self.text = "".join(pieces)

    def pass_over(self, end: int) -> None:
        """Go on behind `end`, counting lines."""
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def peek(self) -> str:
        """Return the next character that is not blank; "" at the end."""
        while True:
            match = BLANK.match(self.text, self.at)
            self.pass_over(match.end() if match else self.at)
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()


def _array_items(first: bytes, source: _Source) -> Iterator[tuple[int, Any]]:
    """Yield the items of one JSON array; what is not JSON ends it, since no next item is known."""
    line = 1
    try:
        text = _ArrayText(first, source)
        text.peek()
        text.pass_over(text.at + 1)
        separator = ","
        if text.peek() == "]":
            separator = "]"
            text.pass_over(text.at + 1)
        while separator == ",":
            line = text.line
            value, end = _array_item(text)
            yield line, value
            text.pass_over(end)
            separator = text.peek()
            line = text.line
            if separator not in ("]", ","):
                raise Refused("the JSON array is broken here; nothing behind it was read")
            text.pass_over(text.at + 1)
            if separator == ",":
                text.peek()
        if text.peek():
            line = text.line
            raise Refused("something stands behind the JSON array")
    except UnicodeDecodeError:
        yield line, Refused("the file is not UTF-8 here or behind; nothing further was read")
    except Refused as refused:
        yield line, refused


def _array_item(text: _ArrayText) -> tuple[Any, int]:
    """Return the item at the text's place and where it ends."""
    decoder = json.JSONDecoder()
    while True:
        try:
            return decoder.raw_decode(text.text, text.at)
        except json.JSONDecodeError as error:
            if text.ended:
                raise Refused(f"not JSON: {error.msg}; nothing behind it was read") from None
        except (ValueError, RecursionError):
            raise Refused("a number is too long or lists are nested too deeply") from None
        if len(text.text) - text.at > MAX_RECORD_NBYTES:
            raise Refused(f"not JSON, or longer than {MAX_RECORD_NBYTES >> 20} MiB")
        text.more()
