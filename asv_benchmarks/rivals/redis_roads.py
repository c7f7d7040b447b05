"""Redis: the classic road from text to token IDs, and the careful ones that store IDs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time

import numpy as np

from rivals.chats import BUDGET, FETCH, encode, joined, newest, tokenizer, whole_turns
from rivals.measure import no_lap
from rivals.road import MissingRival, Road, installed


class RedisServer:
    """A Redis that keeps nothing on disk, on a Unix socket and on a port of 127.0.0.1."""

    def __init__(self, folder):
        try:
            import redis
        except ImportError as error:
            raise MissingRival("redis") from error
        if shutil.which("redis-server") is None:
            raise MissingRival("redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.path = os.path.join(folder, "redis.sock")
        self.process = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--unixsocket", self.path,
             "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.unix = redis.Redis(unix_socket_path=self.path)
        self.tcp = redis.Redis(host="127.0.0.1", port=port)
        for _ in range(200):
            with contextlib.suppress(redis.exceptions.ConnectionError):
                self.unix.ping()
                return
            time.sleep(0.02)
        raise TimeoutError("redis-server does not answer")

    def close(self):
        self.unix.close()
        self.tcp.close()
        self.process.terminate()
        self.process.wait()


def push(client, key, rows):
    """Fill a list in pieces."""
    with client.pipeline(transaction=False) as pipe:
        for at in range(0, len(rows), 1000):
            pipe.rpush(key, *rows[at : at + 1000])
        pipe.execute()


class TextRoad(Road):
    """Text as JSON in a list, tokenised when a window is wanted."""

    group = "text"

    def __init__(self, server, name, *, tcp=False, whole=False, encoder=encode):
        self.client = server.tcp if tcp else server.unix
        self.name, self.whole, self.encoder = name, whole, encoder
        self.first = 0 if whole else -FETCH
        if not whole:
            self.note = f"asks for the newest {FETCH} messages and encodes from the newest back"

    def fill(self, chat):
        if not self.client.exists(f"text:{chat.name}"):
            push(self.client, f"text:{chat.name}", [json.dumps(one) for one in chat.messages()])

    def window(self, session, lap=no_lap):
        rows = self.client.lrange(f"text:{session}", self.first, -1)
        lap("fetch")
        messages = [json.loads(row) for row in rows]
        lap("parse")
        if self.whole:
            rows = self.encoder(messages)
            lap("tokenise")
            rows = fitting(rows)
        else:
            rows = newest(messages, self.encoder, lap)
        lap("cut")
        return joined(rows, lap)

    def append(self, session, message, ids):
        self.client.rpush(f"text:{session}", json.dumps(message))


def fitting(rows):
    """The newest lists that fit the budget."""
    total, at = 0, len(rows)
    while at and total + len(rows[at - 1]) <= BUDGET:
        at -= 1
        total += len(rows[at])
    return rows[at:]


class TokenListRoad(Road):
    """Token IDs as JSON lists, a turn an entry."""

    name, group = "Redis, token IDs as JSON", "ids"
    note = f"asks for the newest {FETCH} turns"

    def __init__(self, server):
        self.client = server.unix

    def fill(self, chat):
        rows = [json.dumps(ids.tolist()) for _, ids in chat]
        push(self.client, f"list:{chat.name}", rows)

    def window(self, session, lap=no_lap):
        rows = self.client.lrange(f"list:{session}", -FETCH, -1)
        lap("fetch")
        rows = [json.loads(row) for row in rows]
        lap("parse")
        rows = fitting(rows)
        lap("cut")
        return joined(rows, lap)

    def append(self, session, message, ids):
        self.client.rpush(f"list:{session}", json.dumps(ids.tolist()))


class RawRoad(Road):
    """The careful opponent: int32 in one value, of which only the end is fetched."""

    group = "ids"
    note = "one value a session; GETRANGE of its last 32 KiB, cut at the first turn's start token"

    def __init__(self, server, name, *, tcp=False):
        self.name, self.client = name, server.tcp if tcp else server.unix

    def fill(self, chat):
        self.client.set(f"raw:{chat.name}", chat.blob().tobytes())

    def window(self, session, lap=no_lap):
        raw = self.client.getrange(f"raw:{session}", -4 * BUDGET - 4, -1)
        lap("fetch")
        ids = whole_turns(np.frombuffer(raw, np.int32))
        lap("cut")
        return ids

    def append(self, session, message, ids):
        self.client.append(f"raw:{session}", ids.tobytes())


class RedisVlLayout(Road):
    """RedisVL's message history by its layout: a hash a message, and an index by time."""

    name, group = "RedisVL's layout", "framework"
    note = (
        "its MessageHistory needs a newer RediSearch than Debian's, so its hashes are written by "
        f"hand and a sorted set stands for the index; newest {FETCH}"
    )
    fields = ("entry_id", "session_tag", "role", "content", "tool_call_id", "timestamp", "metadata")

    def __init__(self, server):
        self.client = server.unix

    def fill(self, chat):
        with self.client.pipeline(transaction=False) as pipe:
            for i, (message, _) in enumerate(chat):
                key = f"vl:{chat.name}:{i}"
                pipe.hset(key, mapping={"entry_id": key, "session_tag": chat.name,
                                        "timestamp": 1.7e9 + i, **message})  # fmt: skip
                pipe.zadd(f"vl:{chat.name}", {key: i})
                if i % 1000 == 999:
                    pipe.execute()
            pipe.execute()

    def window(self, session, lap=no_lap):
        keys = self.client.zrange(f"vl:{session}", -FETCH, -1)
        pipe = self.client.pipeline(transaction=False)
        for key in keys:
            pipe.hmget(key, self.fields)
        rows = pipe.execute()
        lap("fetch")
        messages = [{"role": row[2].decode(), "content": row[3].decode()} for row in rows]
        lap("parse")
        rows = newest(messages, encode, lap)
        lap("cut")
        return joined(rows, lap)


def tiktoken_encoder():
    """The demo's tokenizer as a tiktoken encoding: the same IDs, made from the same file."""
    try:
        import tiktoken
    except ImportError as error:
        raise MissingRival("tiktoken") from error
    data = json.loads(tokenizer().to_str())
    # How GPT-2's byte-level BPE writes bytes as characters.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(rest)}
    special = {row["content"]: row["id"] for row in data["added_tokens"]}
    ranks = {
        bytes(byte_of[character] for character in token): rank
        for token, rank in data["model"]["vocab"].items()
        if token not in special
    }
    pattern = data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    encoding = tiktoken.Encoding(
        "demo", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    start, end, line = special["<|im_start|>"], special["<|im_end|>"], encoding.encode("\n")
    heads = {role: [start, *encoding.encode(f"{role}\n")] for role in ("user", "assistant")}

    def encoder(messages):
        return [
            [*heads[one["role"]], *encoding.encode_ordinary(one["content"]), end, *line]
            for one in messages
        ]

    return encoder


def redis_roads(server):
    """Every road over Redis that needs no framework."""
    return installed(
        lambda: TextRoad(server, "text from Redis, all of it", whole=True),
        lambda: TextRoad(server, "text from Redis, TCP", tcp=True),
        lambda: TextRoad(server, "text from Redis"),
        lambda: TextRoad(server, "text from Redis, tiktoken", encoder=tiktoken_encoder()),
        lambda: RedisVlLayout(server),
        lambda: TokenListRoad(server),
        lambda: RawRoad(server, "raw int32 from Redis, TCP", tcp=True),
        lambda: RawRoad(server, "raw int32 from Redis"),
    )
