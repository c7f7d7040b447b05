"""A generation loop of one's own: token IDs in, token IDs out, several sessions in one batch.

Run it without arguments: it takes real chats with tool calls that come with Kalos. The model is a
stand-in that gives the real reply token by token, as a loop around a network would.
"""

import tempfile
from pathlib import Path

import numpy as np

import kalos_ctx as kalos
from kalos_ctx import demo_data

NUM_CHATS, MAX_TOKENS, RESERVE, BLOCK_SIZE = 4, 512, 128, 16
POLICY = kalos.Policy(generation_prompt=True)


def as_turn(message):
    """Return a message in the OpenAI form as arguments of `append`."""
    fields = {name: value for name, value in message.items() if name not in ("role", "content")}
    return {"role": message["role"], "content": message["content"], "metadata": fields or None}


def generate(prompt, mask, wanted):
    """Give the reply's IDs one after the other, as a loop around a model's forward pass would."""
    assert prompt[mask.astype(bool)].size <= MAX_TOKENS - RESERVE
    yield from wanted


def main():
    chats = [c for c in demo_data.conversations() if any("tool_calls" in m for m in c["messages"])]
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "loop.kalos", tokenizer=str(demo_data.tokenizer_dir())
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        replies = {}
        for chat in chats[:NUM_CHATS]:
            messages = chat["messages"]
            stop = max(i for i, message in enumerate(messages) if message["role"] == "user")
            store.extend(chat["id"], [as_turn(message) for message in messages[: stop + 1]])
            reply = next(m["content"] for m in messages[stop + 1 :] if m["content"])
            replies[chat["id"]] = store.codec.encode_text(reply)
        requests = [
            {"session": name, "max_tokens": MAX_TOKENS, "reserve": RESERVE, "policy": POLICY}
            for name in replies
        ]
        batch = assembler.assemble_batch(requests, layout="left", pad_id=0)
        rows = np.asarray(batch.token_ids), np.asarray(batch.attention_mask)
        for i, (name, wanted) in enumerate(replies.items()):
            window = batch[i]
            keys = window.report.block_keys(BLOCK_SIZE)
            made = list(generate(rows[0][i], rows[1][i], wanted))
            # The engine's own IDs are stored as they are and never encoded again.
            store.append(name, "assistant", token_ids=made)
            print(
                f"{name}: a prompt of {len(window)} tokens, {len(keys)} whole blocks of "
                f"{BLOCK_SIZE}; a reply of {len(made)}"
            )
        batch.release()
        for request in requests:
            with assembler.assemble(**request) as window:
                print(f"{request['session']}: {len(window)} tokens at the next call")


if __name__ == "__main__":
    main()
