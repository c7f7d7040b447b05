"""LlamaIndex with Kalos: a chat store for short-term memory, a block for what falls out of it.

Run it without arguments, after ``pip install 'kalos-ctx[llama-index]'``. The chat and the
embeddings are real and come with Kalos.
"""

import asyncio
import tempfile
from pathlib import Path

import numpy as np
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.memory import ChatMemoryBuffer

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.llama_index import KalosChatStore, KalosMemoryBlock

NUM_MESSAGES, TOKEN_LIMIT = 24, 200


class BundledEmbedding(BaseEmbedding):
    """Looks the vectors of the bundled questions up where others call a model."""

    def _get_text_embedding(self, text):
        texts = [f"user: {one['text']}" for one in demo_data.queries()]
        return demo_data.query_vectors()[texts.index(text)].astype(np.float32).tolist()

    def _get_query_embedding(self, query):
        return self._get_text_embedding(f"user: {query}")

    async def _aget_query_embedding(self, query):
        return self._get_query_embedding(query)


def short_term(store):
    """Put a chat into a buffer; what does not fit it stays in the store."""
    count = store.codec.encode_text
    memory = ChatMemoryBuffer.from_defaults(
        token_limit=TOKEN_LIMIT,
        chat_store=KalosChatStore(store),
        chat_store_key="ann",
        tokenizer_fn=lambda text: count(text).tolist(),
    )
    for message in demo_data.conversations()[0]["messages"][:NUM_MESSAGES]:
        memory.put(ChatMessage(role=message["role"], content=message["content"]))
    print(f"{len(memory.get_all())} messages in the store, {len(memory.get())} in the buffer")


async def long_term(store):
    """Keep messages as passages, and recall those that belong to a question."""
    block = KalosMemoryBlock(store=store, embed_model=BundledEmbedding(), top_k=3, recent=1)
    questions = [ChatMessage(role="user", content=one["text"]) for one in demo_data.queries()]
    await block.aput(questions[1:], session_id="ann")
    recalled = await block.aget(questions[:1], session_id="ann")
    print(f"\n{' '.join(questions[0].content.split())!r} recalls:")
    for text in recalled.split("\n\n"):
        print(f"    {' '.join(text.split())[:80]}")


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "llama.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        short_term(store)
        asyncio.run(long_term(store))
        with assembler.assemble("ann", max_tokens=512, reserve=128) as window:
            print(f"\nThe same chat as a window: {len(window)} tokens")


if __name__ == "__main__":
    main()
