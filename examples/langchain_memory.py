"""LangChain with Kalos: a chat's history, trimming, and a retriever.

Run it without arguments, after ``pip install 'kalos-ctx[langchain]'``. Passages, questions and
their embeddings are real and come with Kalos; the chat model gives prepared answers.
"""

import tempfile
from pathlib import Path

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.langchain import KalosChatMessageHistory, KalosVectorStore, trim_messages

NUM_QUESTIONS, TOP_K, MAX_TOKENS = 3, 2, 1024


class BundledEmbeddings(Embeddings):
    """Looks vectors up where a service of its own calls an embedding model."""

    def __init__(self):
        texts = [one["text"] for one in demo_data.passages() + demo_data.queries()]
        vectors = np.concatenate([demo_data.passage_vectors(), demo_data.query_vectors()])
        self.known = dict(zip(texts, vectors.astype(np.float32), strict=True))

    def embed_documents(self, texts):
        return [self.known[text].tolist() for text in texts]

    def embed_query(self, text):
        return self.known[text].tolist()


def short(text):
    return " ".join(text.split())[:70]


def answer(model, history, retriever, question):
    """Ask with what was recalled and what fits of the history; keep question and answer."""
    found = retriever.invoke(question)
    recalled = SystemMessage("Earlier:\n" + "\n".join(one.page_content for one in found))
    asked = HumanMessage(question)
    prompt = trim_messages(
        [recalled, *history.messages, asked],
        max_tokens=MAX_TOKENS,
        token_counter="approximate",
        include_system=True,
        start_on="human",
    )
    reply = model.invoke(prompt)
    history.add_messages([asked, reply])
    print(f"user: {short(question)}")
    for document in found:
        print(f"    recalled {document.id}: {short(document.page_content)}")
    print(f"    {len(prompt)} messages to the model; it says: {reply.content}")


def main():
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "langchain.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        documents = KalosVectorStore(store, BundledEmbeddings(), assembler=assembler)
        documents.add_documents(
            [
                Document(
                    id=f"p{one['id']}", page_content=one["text"], metadata={"chat": one["conv"]}
                )
                for one in demo_data.passages()
            ]
        )
        retriever = documents.as_retriever(search_kwargs={"k": TOP_K})
        history = KalosChatMessageHistory("ann", store)
        model = FakeListChatModel(responses=["I see.", "Go on.", "That is so."])
        for question in demo_data.queries()[:NUM_QUESTIONS]:
            answer(model, history, retriever, question["text"])
        with assembler.assemble("ann", max_tokens=1024) as window:
            print(f"The history as a window: {len(window)} tokens of {store.count('ann')} turns")


if __name__ == "__main__":
    main()
