"""What an adapter costs over the calls that it makes: p50 and p99 of both, in the same run.

Run it with the adapters' extras installed: ``python asv_benchmarks/adapters_overhead.py``. The two
calls of a row take turns, so that what else the machine does meets both. An async call is compared
with the store's own call sent through the same thread; a row whose framework is missing says so.
"""

import asyncio
import gc
import tempfile
import time
from pathlib import Path

import numpy as np

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.extras import MissingExtra

CALLS, WARM_UP = 2000, 200
TEXT = "I parked on level 3, next to the lift, and left the ticket in the car."
MAX_TOKENS, RESERVE = 8192, 512


def times(native, adapter):
    """Return microseconds of each call, the two taking turns."""
    taken = [], []
    gc.disable()
    for i in range(WARM_UP + CALLS):
        for which, call in enumerate((native, adapter)):
            begin = time.perf_counter_ns()
            call(i)
            if i >= WARM_UP:
                taken[which].append((time.perf_counter_ns() - begin) / 1000)
    gc.enable()
    return [np.percentile(row, (50, 99)) for row in taken]


def row(name, native, adapter):
    before, after = times(native, adapter)
    cells = (*before, *after, *(after - before))
    print(f"{name:<34}" + "".join(f"{cell:>10.1f}" for cell in cells), flush=True)


def openai_agents(store):
    from kalos_ctx.adapters.openai_agents import KalosSession

    session = KalosSession("openai", store)
    item = {"role": "user", "content": TEXT}
    turn = {"role": "user", "content": TEXT, "metadata": {"item": item}}
    row(
        "openai_agents, add one item",
        lambda i: store.extend("openai native", [turn]),
        lambda i: session._add([item]),
    )
    row(
        "openai_agents, get 20 items",
        lambda i: [one.metadata["item"] for one in store.turns("openai native", -20)],
        lambda i: session._items(20),
    )
    loop = asyncio.new_event_loop()
    row(
        "openai_agents, await add one item",
        lambda i: loop.run_until_complete(asyncio.to_thread(store.extend, "openai native", [turn])),
        lambda i: loop.run_until_complete(session.add_items([item])),
    )
    row(
        "openai_agents, await get 20 items",
        lambda i: loop.run_until_complete(
            asyncio.to_thread(
                lambda: [one.metadata["item"] for one in store.turns("openai native", -20)]
            )
        ),
        lambda i: loop.run_until_complete(session.get_items(20)),
    )
    loop.close()


def langchain(store):
    from langchain_core.messages import HumanMessage, message_to_dict, messages_from_dict

    from kalos_ctx.adapters.langchain import KalosChatMessageHistory, KalosVectorStore

    history = KalosChatMessageHistory("langchain", store)
    message = HumanMessage(TEXT)

    def keep(i):
        turn = {"role": "user", "content": TEXT, "metadata": {"m": message_to_dict(message)}}
        store.extend("langchain native", [turn])

    row("langchain, add a message", keep, lambda i: history.add_message(message))
    row(
        "langchain, latest 20 messages",
        lambda i: messages_from_dict(
            [one.metadata["m"] for one in store.turns("langchain native", -20)]
        ),
        lambda i: history.latest(20),
    )
    vectors = demo_data.passage_vectors().astype(np.float32)
    texts = [one["text"] for one in demo_data.passages()]
    store.add_passages("langchain", vectors, texts=texts)
    with kalos.ContextAssembler(store) as assembler:
        found = KalosVectorStore(store, None, assembler=assembler)

        def search(i):
            hits = assembler.recall(vectors[i % 1000], top_k=4, collections="langchain")
            return [(one.text, one.metadata) for one in store.passages("langchain", hits.ids)]

        row("langchain, search 4 of 1,000", search,
            lambda i: found.similarity_search_by_vector(vectors[i % 1000], 4))  # fmt: skip


def llama_index(store):
    from llama_index.core.base.llms.types import ChatMessage

    from kalos_ctx.adapters.llama_index import KalosChatStore

    chats = KalosChatStore(store)
    message = ChatMessage(role="user", content=TEXT)

    def keep(i):
        kept = message.model_dump(mode="json")
        store.extend("llama native", [{"role": "user", "content": TEXT, "metadata": {"m": kept}}])

    row("llama_index, add a message", keep, lambda i: chats.add_message("llama", message))
    store.rollback("llama native", 20)
    store.rollback("llama", 20)
    row(
        "llama_index, get 20 messages",
        lambda i: [
            ChatMessage.model_validate(one.metadata["m"]) for one in store.turns("llama native")
        ],
        lambda i: chats.get_messages("llama"),
    )


def engines(store):
    from kalos_ctx.adapters import sglang, vllm

    while store.count("long") < 400:
        store.append("long", "user" if store.count("long") % 2 == 0 else "assistant", TEXT)
    with kalos.ContextAssembler(store) as assembler:
        window = assembler.assemble("long", max_tokens=MAX_TOKENS, reserve=RESERVE)
        options = {"max_model_len": MAX_TOKENS, "reserve": RESERVE, "secret": b"secret"}
        name = f"{len(window):,}-token window"
        row(f"vllm, {name}", lambda i: window.tolist(),
            lambda i: vllm.tokens_prompt(window, **options))  # fmt: skip
        row(f"sglang, {name}", lambda i: window.tolist(),
            lambda i: sglang.generate_arguments(window, **options))  # fmt: skip


def huggingface(store):
    import torch

    from kalos_ctx.adapters.huggingface import SessionCache, model_inputs

    with kalos.ContextAssembler(store) as assembler:
        requests = [{"session": "long", "max_tokens": MAX_TOKENS, "reserve": RESERVE}] * 4
        batch = assembler.assemble_batch(requests, layout="left", pad_id=0, dtype="int64")
        arrays = ("token_ids", "attention_mask", "position_ids")
        row(
            "huggingface, inputs of 4 rows",
            lambda i: [torch.from_numpy(getattr(batch, name)) for name in arrays],
            lambda i: model_inputs(batch),
        )
        cache = SessionCache()
        window = assembler.assemble("long", max_tokens=MAX_TOKENS, reserve=RESERVE)
        row(
            "huggingface, IDs to feed",
            lambda i: torch.from_numpy(window.token_ids.astype(np.int64))[None],
            lambda i: cache.feed(window),
        )


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "store", tokenizer=demo_data.tokenizer_dir()
        ) as store,
    ):
        print(f"{'microseconds':<34}{'native':>20}{'adapter':>20}{'difference':>20}")
        print(" " * 34 + f"{'p50':>10}{'p99':>10}" * 3)
        for part in (openai_agents, langchain, llama_index, engines, huggingface):
            try:
                part(store)
            except (MissingExtra, ModuleNotFoundError) as error:
                print(f"{part.__name__}: not measured ({error})")


if __name__ == "__main__":
    main()
