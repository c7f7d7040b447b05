"""The sessions: real messages of two people each, in the order in which they were written.

A session of n turns is n messages from somewhere in the pool of all conversations, one behind the
other; behind the last comes the first again (100,000 turns go four times through the 24,939).
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kalos_ctx import demo_data

BUDGET = 8192
PAGE = 100  # messages that a road encodes at a time, from the newest backwards
FETCH = 500  # newest messages that a road asks for where its store can be asked so; here enough
ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def conversations():
    """Return the conversations of two people: the 300 of tests/data."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        from helpers.real_data import dialogues
    finally:
        sys.path.pop(0)
    return [row for row in dialogues() if row["source"] == "chitchat-dataset"]


@functools.cache
def pool():
    """Return all messages, `role` and `content`."""
    return [
        {"role": message["role"], "content": message["content"]}
        for row in conversations()
        for message in row["messages"]
    ]


@functools.cache
def tokenizer():
    """Return the demo's tokenizer, Qwen3's."""
    return Tokenizer.from_file(str(demo_data.tokenizer_dir() / "tokenizer.json"))


def framed(message):
    """Return a message as the model's template frames it."""
    return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"


def encode(messages):
    """Return each message's token IDs, by Hugging Face's tokenizers, without offsets."""
    texts = [framed(message) for message in messages]
    return [row.ids for row in tokenizer().encode_batch_fast(texts, add_special_tokens=False)]


@functools.cache
def pool_ids():
    """Return the token IDs of each message of the pool, int32."""
    return [np.array(row, np.int32) for row in encode(pool())]


@functools.cache
def turn_start():
    """Return the ID with which every turn begins."""
    return tokenizer().token_to_id("<|im_start|>")


@dataclass(frozen=True)
class Chat:
    """A session: `turns` messages of the pool from `first` on."""

    name: str
    turns: int
    first: int = 0

    def __iter__(self):
        """Yield (message, its token IDs)."""
        messages, ids = pool(), pool_ids()
        for i in range(self.first, self.first + self.turns):
            yield messages[i % len(messages)], ids[i % len(messages)]

    def messages(self):
        return [message for message, _ in self]

    def blob(self):
        """All token IDs, int32."""
        return np.concatenate([ids for _, ids in self])

    def window(self):
        """The newest whole turns that fit the budget: what every road must answer."""
        return whole_turns(self.blob())


def whole_turns(ids):
    """The newest whole turns of token IDs that fit the budget."""
    if len(ids) <= BUDGET:
        return ids
    tail = ids[-BUDGET:]
    return tail[int((tail == turn_start()).argmax()) :]


def newest(messages, encoder, lap):
    """Encode from the newest message backwards until the budget is full; the IDs in order."""
    kept, total = [], 0
    for stop in range(len(messages), 0, -PAGE):
        rows = encoder(messages[max(0, stop - PAGE) : stop])
        lap("tokenise")
        for ids in reversed(rows):
            if total + len(ids) > BUDGET:
                return kept[::-1]
            kept.append(ids)
            total += len(ids)
    return kept[::-1]


def joined(rows, lap):
    """One int32 array of lists of IDs."""
    ids = np.array([one for row in rows for one in row], np.int32)
    lap("array")
    return ids
