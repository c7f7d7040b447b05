"""Real data that `kalos demo` and the tests run on: a tokenizer, chats, passages and their vectors.

LICENCES.md beside this file says where each file comes from and under what licence. People wrote
these chats: they are here for tests, measurements and the demonstration only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "conversations",
    "data_path",
    "passage_vectors",
    "passages",
    "queries",
    "query_vectors",
    "tokenizer_dir",
]

_HERE = Path(__file__).resolve().parent


def data_path(name: str) -> Path:
    """Return the path of one bundled file.

    Parameters
    ----------
    name : str
        Path inside the folder, such as ``"conversations.jsonl"``.

    Raises
    ------
    FileNotFoundError
        No such file is bundled.
    """
    path = _HERE / name
    if not path.is_file():
        raise FileNotFoundError(f"no bundled file is called {name!r}")
    return path


def tokenizer_dir() -> Path:
    """Return the folder of Qwen3's tokenizer, its configuration and its chat template."""
    return data_path("qwen3/tokenizer.json").parent


def conversations() -> list[dict[str, Any]]:
    """Return 35 conversations: 25 between two people, then 10 with tool calls.

    Each has ``id``, ``source``, ``prompt`` and ``messages``, the latter in the OpenAI form:
    ``role``, ``content``, and ``tool_calls`` or ``tool_call_id`` with ``name`` for tools.
    """
    return _read_jsonl("conversations.jsonl")


def passages() -> list[dict[str, Any]]:
    """Return 1,000 stretches of chats, ascending by ``id``, row for row with `passage_vectors`.

    Each has ``id``, ``conv``, ``first_turn``, ``last_turn`` and ``text``.
    """
    return _read_jsonl("passages.jsonl")


def queries() -> list[dict[str, Any]]:
    """Return 64 messages of chats, row for row with `query_vectors`.

    Each has ``id``, ``conv``, ``turn``, ``text``, ``top10`` (the ``id`` of the ten best passages)
    and ``scores`` (their inner products in float32). For 25 of them ``conv`` and ``turn`` name a
    message of `conversations`.
    """
    return _read_jsonl("queries.jsonl")


def passage_vectors() -> NDArray[np.float16]:
    """Return the passages' embeddings, float16 of shape (1000, 384), of unit length."""
    return _read_vectors("passages")


def query_vectors() -> NDArray[np.float16]:
    """Return the queries' embeddings, float16 of shape (64, 384), of unit length."""
    return _read_vectors("queries")


def _read_jsonl(name: str) -> list[dict[str, Any]]:
    with data_path(name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _read_vectors(key: str) -> NDArray[np.float16]:
    with np.load(data_path("embeddings.npz")) as arrays:
        vectors: NDArray[np.float16] = arrays[key]
    return vectors
