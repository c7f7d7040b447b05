"""Answers from passages: recall by meaning, inside the window's budget, for two tenants.

Run it without arguments: passages, questions and their embeddings are real and come with Kalos. A
service of its own calls an embedding model where this one looks a vector up.
"""

import tempfile
from pathlib import Path

import numpy as np

import kalos_ctx as kalos
from kalos_ctx import demo_data

COLLECTION = "memories"
MAX_TOKENS, RESERVE, TOP_K, MIN_SCORE = 768, 256, 4, 0.35
NUM_QUESTIONS = 4
POLICY = kalos.Policy(generation_prompt=True)


def fill(store, tenant, passages, vectors):
    """Add one tenant's passages; another tenant never recalls them."""
    return store.add_passages(
        COLLECTION,
        vectors,
        tenant=tenant,
        texts=[passage["text"] for passage in passages],
        metadata=[{"chat": passage["conv"]} for passage in passages],
    )


def answer(store, assembler, tenant, question, vector):
    """Build the window for a question and print what was recalled into it."""
    session = f"question-{question['id']}"
    store.append(session, "user", question["text"], tenant=tenant)
    with assembler.assemble(
        session,
        tenant=tenant,
        max_tokens=MAX_TOKENS,
        reserve=RESERVE,
        query=vector,
        top_k=TOP_K,
        min_score=MIN_SCORE,
        collections=(COLLECTION,),
        policy=POLICY,
    ) as window:
        hits = window.report.hits
        recalled = [part.id for part in window.report.segments if part.kind == "passage"]
        print(f"{tenant}: {' '.join(question['text'].split())[:70]!r}, {len(window)} tokens")
        for passage in store.passages(COLLECTION, recalled, tenant=tenant):
            score = hits.scores[list(hits.ids).index(passage.id)]
            print(f"    {score:.2f}  {' '.join(passage.text.split())[:70]!r}")
        return recalled


def main():
    passages = demo_data.passages()
    vectors = demo_data.passage_vectors().astype(np.float32)
    questions, asked = demo_data.queries(), demo_data.query_vectors().astype(np.float32)
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "rag.kalos", tokenizer=str(demo_data.tokenizer_dir())
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        half = len(passages) // 2
        fill(store, "acme", passages[:half], vectors[:half])
        fill(store, "globex", passages[half:], vectors[half:])
        for tenant in ("acme", "globex"):
            for question, vector in list(zip(questions, asked, strict=True))[:NUM_QUESTIONS]:
                answer(store, assembler, tenant, question, vector)


if __name__ == "__main__":
    main()
