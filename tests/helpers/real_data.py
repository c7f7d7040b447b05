"""Readers for the files in tests/data; LICENCES.md there says where they come from."""

import functools
import gzip
import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "data"


def read_jsonl_gz(name: str) -> list[dict]:
    """Return the records of one ``.jsonl.gz`` file."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@functools.cache
def dialogues() -> list[dict]:
    """Return all 450 conversations; not to be changed."""
    return read_jsonl_gz("dialogues.jsonl.gz")


@functools.cache
def passages() -> list[dict]:
    """Return 5,000 windows of chats, row for row with ``vectors()[0]``; not to be changed."""
    return read_jsonl_gz("passages.jsonl.gz")


@functools.cache
def queries() -> list[dict]:
    """Return 200 messages, row for row with ``vectors()[1]``; not to be changed."""
    return read_jsonl_gz("queries.jsonl.gz")


@functools.cache
def vectors() -> tuple[np.ndarray, np.ndarray]:
    """Return float16 embeddings, read-only: passages (5000, 384), queries (200, 384)."""
    with np.load(DATA / "embeddings_minilm.npz") as arrays:
        found = arrays["passages"], arrays["queries"]
    for array in found:
        array.flags.writeable = False
    return found


def minilm_tokenizer_json() -> str:
    """Return the text of the WordPiece tokenizer.json of all-MiniLM-L6-v2."""
    with gzip.open(DATA / "minilm" / "tokenizer.json.gz", "rt", encoding="utf-8") as text:
        return text.read()


def template_paths() -> dict[str, Path]:
    """Return the path of each real chat template, by its name."""
    return {path.stem: path for path in sorted((DATA / "templates").glob("*.jinja"))}
