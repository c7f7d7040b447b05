"""A store with something of everything that the page can show, made of the bundled chats."""

import numpy as np

from kalos_ctx import demo_data
from kalos_ctx.demo import as_turn
from kalos_ctx.store import SessionStore

LONG = "chitchat-ece0ee74"
TOOLS = "booking with tools"
EVIL = "\x1b[31m<img src=x onerror=alert(1)>\u202e"
COLLECTION = "other chats"
PERSONA = "You are a student at a large university. Be curious, kind and brief."
NUM_PASSAGES = 200


def make_inspect_store(path):
    """Make the store and close it."""
    chats = {chat["id"]: chat["messages"] for chat in demo_data.conversations()}
    calls = next(
        messages for messages in chats.values() if any("tool_calls" in one for one in messages)
    )
    rows = [i for i, one in enumerate(demo_data.passages()) if one["conv"] != LONG]
    rows = rows[:NUM_PASSAGES]
    vectors = demo_data.passage_vectors().astype(np.float32)
    with SessionStore.open(path, tokenizer=str(demo_data.tokenizer_dir())) as store:
        for name, messages in list(chats.items())[:12]:
            if name != LONG:
                store.extend(name, [as_turn(one) for one in messages])
        store.extend(TOOLS, [as_turn(one) for one in calls])
        turns = [as_turn(one) for one in chats[LONG]]
        # The turn before the last user turn has a vector of its own.
        turns[-3]["vector"] = vectors[rows[7]]
        store.extend(LONG, turns)
        store.set_segment(LONG, "persona", PERSONA)
        store.summarize(LONG, 0, 40, "They met in a chat raffle and talked about their studies.")
        store.add_passages(
            COLLECTION,
            vectors[rows],
            texts=[demo_data.passages()[i]["text"] for i in rows],
        )
        store.append(EVIL, "user", EVIL, tenant="acme")
        store.append("plain", "user", "hello", tenant="acme")
