"""Windows as requests of SGLang: token IDs, a salt for each tenant, and checked lengths.

Run it without arguments to see a request, on any machine. With the address of a server that runs a
model whose tokenizer the store has, it sends it: ``... http://localhost:30000``.
"""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.sglang import batch_arguments, generate_arguments

CONTEXT_LEN, RESERVE, NUM_CHATS = 1024, 256, 3
SECRET = b"of the servers alone; read yours from where secrets are kept"
POLICY = kalos.Policy(generation_prompt=True)


def fill(store):
    for chat in demo_data.conversations()[:NUM_CHATS]:
        turns = [{"role": one["role"], "content": one["content"]} for one in chat["messages"][:31]]
        store.extend(chat["id"], turns, tenant="acme")
        yield {"session": chat["id"], "tenant": "acme", "max_tokens": CONTEXT_LEN,
               "reserve": RESERVE, "policy": POLICY}  # fmt: skip


def send(server, body):
    """Post a request to a server's /generate and return its answer."""
    request = urllib.request.Request(
        f"{server}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main(server=None):
    options = {"max_model_len": CONTEXT_LEN, "reserve": RESERVE, "secret": SECRET}
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "sglang.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        requests = list(fill(store))
        with assembler.assemble(**requests[0]) as window:
            body = generate_arguments(window, **options, sampling_params={"temperature": 0.7})
        shown = {**body, "input_ids": f"[{len(body['input_ids'])} IDs]"}
        print(f"One window: {json.dumps(shown)}")
        with assembler.assemble_batch(requests) as batch:
            several = batch_arguments(batch, **options)
        print(f"Three windows in one request: {[len(ids) for ids in several['input_ids']]} IDs")
        try:
            with assembler.assemble(**{**requests[0], "reserve": 0}) as window:
                generate_arguments(window, **{**options, "max_model_len": len(window)})
        except kalos.BudgetExceeded as error:
            print(f"refused: {error}")
        if server is not None:
            answer = send(server, body)
            store.append(requests[0]["session"], "assistant", answer["text"], tenant="acme")
            print(f"The server says: {answer['text'][:70]!r}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
