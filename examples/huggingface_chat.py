"""Chats with a model of transformers: a batch, and a KV cache that is used from turn to turn.

Run it without arguments, after ``pip install 'kalos-ctx[huggingface]'``. The model is a small Llama
with random weights, so that nothing is fetched; what it says means nothing, what it is fed does.
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.huggingface import SessionCache, generate

MAX_TOKENS, NEW_TOKENS, NUM_TURNS = 512, 8, 6
POLICY = kalos.Policy(generation_prompt=True)


def small_model(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2 * MAX_TOKENS,
    )
    return LlamaForCausalLM(config).eval()


def a_batch(store, assembler, model, chats):
    """Answer several chats at once."""
    requests = []
    for chat in chats:
        store.append(chat["id"], "user", chat["messages"][0]["content"])
        requests.append(
            {"session": chat["id"], "max_tokens": MAX_TOKENS, "reserve": NEW_TOKENS,
             "policy": POLICY}
        )  # fmt: skip
    with assembler.assemble_batch(requests, layout="left", pad_id=0, dtype="int64") as batch:
        answers = generate(model, batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        print(
            f"A batch of {tuple(batch.token_ids.shape)}: {[len(one) for one in answers]} new tokens"
        )
    for chat, answer in zip(chats, answers, strict=True):
        plain = [one for one in answer if one not in store.codec.structural_ids]
        store.append(chat["id"], "assistant", token_ids=plain)


def a_chat(store, assembler, model, messages):
    """Go on with one chat; each turn feeds what the cache does not hold yet."""
    chat, shares = SessionCache(), []
    for message in messages:
        store.append("one chat", message["role"], message["content"])
        if message["role"] != "user":
            continue
        with (
            torch.inference_mode(),
            assembler.assemble(
                "one chat", max_tokens=MAX_TOKENS, reserve=NEW_TOKENS, policy=POLICY
            ) as window,
        ):
            inputs = chat.inputs(model, window)
            model(**inputs)
            fed = inputs["input_ids"].shape[1]
            shares.append(fed / len(window))
            print(f"A window of {len(window)} tokens, {fed} of them fed")
    print(f"Fed at the last turn: {shares[-1]:.0%} of the window")


def main():
    chats = demo_data.conversations()
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "chats.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store, device="cpu") as assembler,
    ):
        model = small_model(store.codec.vocab_size)
        a_batch(store, assembler, model, chats[:3])
        a_chat(store, assembler, model, chats[3]["messages"][: 2 * NUM_TURNS])


if __name__ == "__main__":
    main()
