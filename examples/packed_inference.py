"""An inference loop of one's own over a packed batch: cu_seqlens, positions, the caller's stream.

Run it without arguments. The network is one attention layer with random weights, in numpy, or in
torch where that is installed; where there is a GPU too, windows are built in its memory on a stream
of the caller's, and the network reads them there. What it says means nothing, how it is fed does.
"""

import contextlib
import importlib.util
import itertools
import tempfile
from pathlib import Path

import numpy as np

import kalos_ctx as kalos
from kalos_ctx import demo_data

NUM_CHATS, MAX_TOKENS, RESERVE, NEW_TOKENS, WIDTH = 3, 256, 32, 6, 32
POLICY = kalos.Policy(generation_prompt=True)


class OneLayer:
    """Embedding, causal attention and output; `xp` is numpy or torch, which share these calls."""

    def __init__(self, xp, vocab_size, place):
        rng = np.random.default_rng(0)
        shapes = {"embed": (vocab_size, WIDTH), "place": (MAX_TOKENS, WIDTH)}
        shapes |= {name: (WIDTH, WIDTH) for name in ("query", "key", "value")}
        self.xp = xp
        for name, shape in shapes.items():
            setattr(self, name, place(rng.normal(0, 0.3, shape).astype(np.float32)))

    def prefill(self, token_ids, positions, cu_seqlens):
        """Run over all windows at once; no token sees another window, nor what follows it."""
        xp = self.xp
        hidden = self.embed[token_ids] + self.place[positions]
        keys, values = hidden @ self.key, hidden @ self.value
        ends = cu_seqlens[1:]
        window = xp.searchsorted(ends, xp.arange(len(token_ids), **self.beside(ends)), side="right")
        sees = (window[:, None] == window[None, :]) & (positions[None, :] <= positions[:, None])
        weights = xp.exp(hidden @ self.query @ keys.T) * sees
        mixed = weights @ values / weights.sum(1)[:, None]
        last = ends - 1
        bounds = cu_seqlens.tolist()
        caches = [
            (keys[start:stop], values[start:stop]) for start, stop in itertools.pairwise(bounds)
        ]
        return (mixed[last] @ self.embed.T).argmax(1), caches

    def step(self, token_id, cache):
        """Run over one more token of a window whose keys and values are kept."""
        xp = self.xp
        keys, values = cache
        hidden = self.embed[token_id] + self.place[len(keys)]
        keys = xp.concatenate([keys, (hidden @ self.key)[None]])
        values = xp.concatenate([values, (hidden @ self.value)[None]])
        weights = xp.exp(keys @ (hidden @ self.query))
        mixed = weights @ values / weights.sum()
        return (mixed @ self.embed.T).argmax(), (keys, values)

    def beside(self, array):
        """Return where a new array must be to meet this one: torch asks, numpy does not."""
        return {} if self.xp is np else {"device": array.device}


def chosen_library():
    """Return the array library, and a stream where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return np, None
    import torch

    return torch, torch.cuda.Stream() if torch.cuda.is_available() else None


def main():
    xp, stream = chosen_library()
    chats = demo_data.conversations()[:NUM_CHATS]
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "loop.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store, device="cpu" if stream is None else "cuda") as assembler,
        contextlib.nullcontext() if stream is None else xp.cuda.stream(stream),
    ):
        device = "cpu" if stream is None else "cuda"
        place = np.asarray if xp is np else lambda array: xp.from_numpy(array).to(device)
        network = OneLayer(xp, store.codec.vocab_size, place)
        requests = []
        for chat in chats:
            turns = [{"role": m["role"], "content": m["content"]} for m in chat["messages"][:15]]
            store.extend(chat["id"], turns)
            requests.append(
                {"session": chat["id"], "max_tokens": MAX_TOKENS, "reserve": RESERVE,
                 "policy": POLICY, "stream": stream}
            )  # fmt: skip
        with assembler.assemble_batch(requests, dtype="int64") as batch:
            # No copy: the network reads the windows where Kalos built them, in the stream's order.
            arrays = [xp.from_dlpack(one) for one in
                      (batch.token_ids, batch.positions, batch.cu_seqlens)]  # fmt: skip
            first, caches = network.prefill(*arrays)
            print(f"{xp.__name__} on {assembler.device}: {len(arrays[0])} tokens in one pass, "
                  f"windows at {arrays[2].tolist()}")  # fmt: skip
        for request, token_id, cache in zip(requests, first, caches, strict=True):
            made = [int(token_id)]
            while len(made) < NEW_TOKENS:
                token_id, cache = network.step(token_id, cache)
                made.append(int(token_id))
            # A trained network stops at its end token; this one may say any, and some may not stand
            # in content.
            controls = store.codec.structural_ids | store.codec.markup_ids
            made = [one for one in made if one not in controls] or [0]
            store.append(request["session"], "assistant", token_ids=made)
            with assembler.assemble(**{**request, "stream": None}) as window:
                print(f"{request['session']}: {len(made)} new tokens, {len(window)} in the next "
                      f"window, {window.report.reused_tokens} as before")  # fmt: skip


if __name__ == "__main__":
    main()
