"""The vector store: LangChain's published suite, then what it does not ask for."""

import asyncio

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.langchain import KalosVectorStore
from kalos_ctx.adapters.langchain_vectors import ID_FIELD

DIM = 6


@pytest.fixture
def store(tmp_path):
    with kalos.SessionStore.open(tmp_path / "store") as opened:
        yield opened


class TestStandard(VectorStoreIntegrationTests):
    """The published suite, sync and async, over a store without a tokenizer."""

    @pytest.fixture
    def vectorstore(self, store):
        return KalosVectorStore(store, self.get_embeddings())


class TestStandardWithTenantAndAssembler(VectorStoreIntegrationTests):
    """The published suite again, for one of several tenants, with an assembler of one's own."""

    @pytest.fixture
    def vectorstore(self, store):
        other = KalosVectorStore(store, self.get_embeddings(), tenant="globex")
        other.add_documents([Document(page_content="foo", id="1")])
        with kalos.ContextAssembler(store) as assembler:
            yield KalosVectorStore(
                store, self.get_embeddings(), assembler=assembler, tenant="acme", collection="docs"
            )


class KnownVectors(Embeddings):
    """Gives the real embeddings of the bundled passages and questions."""

    def __init__(self):
        texts = [one["text"] for one in demo_data.passages() + demo_data.queries()]
        vectors = np.concatenate([demo_data.passage_vectors(), demo_data.query_vectors()])
        self.known = dict(zip(texts, vectors.astype(np.float32), strict=True))

    def embed_documents(self, texts):
        return [self.known[text].tolist() for text in texts]

    def embed_query(self, text):
        return self.known[text].tolist()


@pytest.fixture(scope="module")
def embedding():
    return KnownVectors()


@pytest.fixture(scope="module")
def real(tmp_path_factory, embedding):
    """Return a vector store of the bundled passages, and LangChain's own over the same."""
    documents = [
        Document(
            id=f"p{one['id']}",
            page_content=one["text"],
            metadata={"conv": one["conv"], "first": one["first_turn"]},
        )
        for one in demo_data.passages()
    ]
    theirs = InMemoryVectorStore(embedding)
    theirs.add_documents(documents)
    folder = tmp_path_factory.mktemp("vectors") / "store"
    tokenizer = demo_data.tokenizer_dir()
    with kalos.SessionStore.open(folder, tokenizer=tokenizer) as opened:
        mine = KalosVectorStore(opened, embedding)
        assert mine.add_documents(documents) == [one.id for one in documents]
        yield mine, theirs


QUESTIONS = [one["text"] for one in demo_data.queries()[:16]]


@pytest.mark.parametrize("k", [1, 4, 50])
def test_search_finds_what_the_one_in_memory_finds(real, k):
    mine, theirs = real
    for question in QUESTIONS:
        found = mine.similarity_search_with_score(question, k=k)
        wanted = theirs.similarity_search_with_score(question, k=k)
        scores = [score for _, score in found]
        assert scores == pytest.approx([score for _, score in wanted], abs=1e-5)
        assert scores == sorted(scores, reverse=True)
        # Passages with equal scores may change places.
        assert sorted(one.id for one, score in found if score > scores[-1] + 1e-5) == sorted(
            one.id for one, score in wanted if score > scores[-1] + 1e-5
        )


def test_async_search_gives_the_same(real):
    mine, _ = real

    async def search():
        return (
            await mine.asimilarity_search_with_score(QUESTIONS[0], k=3),
            await mine.asimilarity_search(QUESTIONS[0], k=3),
            await mine.amax_marginal_relevance_search(QUESTIONS[0], k=3),
        )

    scored, plain, diverse = asyncio.run(search())
    assert scored == mine.similarity_search_with_score(QUESTIONS[0], k=3)
    assert plain == [one for one, _ in scored]
    assert diverse == mine.max_marginal_relevance_search(QUESTIONS[0], k=3)


def test_filter_counts_before_the_search(real):
    mine, theirs = real
    conv = mine.similarity_search(QUESTIONS[1], k=1)[0].metadata["conv"]
    found = mine.similarity_search(QUESTIONS[1], k=5, filter={"conv": conv})
    wanted = theirs.similarity_search(
        QUESTIONS[1], k=5, filter=lambda one: one.metadata["conv"] == conv
    )
    assert found == wanted
    with pytest.raises(kalos.UnknownField):
        mine.similarity_search(QUESTIONS[1], filter={"nothing has it": 1})


def test_least_score_leaves_out_what_is_farther(real):
    mine, _ = real
    scores = [score for _, score in mine.similarity_search_with_score(QUESTIONS[2], k=9)]
    found = mine.similarity_search(QUESTIONS[2], k=9, min_score=scores[3])
    assert len(found) == sum(score >= scores[3] for score in scores)


@pytest.mark.parametrize("lambda_mult", [0.0, 0.5, 1.0])
def test_marginal_relevance_chooses_as_the_one_in_memory(real, lambda_mult):
    mine, theirs = real
    for question in QUESTIONS[:8]:
        asked = {"k": 4, "fetch_k": 12, "lambda_mult": lambda_mult}
        found = mine.max_marginal_relevance_search(question, **asked)
        assert found == theirs.max_marginal_relevance_search(question, **asked)


def test_retriever_with_a_threshold_gives_scores_between_0_and_1(real):
    mine, _ = real
    scored = mine.similarity_search_with_relevance_scores(QUESTIONS[3], k=20)
    assert all(0 <= score <= 1 for _, score in scored)
    retriever = mine.as_retriever(
        search_type="similarity_score_threshold",
        search_kwargs={"score_threshold": scored[4][1], "k": 20},
    )
    assert len(retriever.invoke(QUESTIONS[3])) == 5


def test_documents_are_recalled_into_windows(real):
    mine, _ = real
    store, vector = mine.store, np.asarray(mine.embeddings.embed_query(QUESTIONS[4]), np.float32)
    store.append("chat", "user", QUESTIONS[4])
    best = mine.similarity_search(QUESTIONS[4], k=1)[0]
    with (
        kalos.ContextAssembler(store) as assembler,
        assembler.assemble(
            "chat", max_tokens=2048, query=vector, top_k=2, collections=mine.collection
        ) as window,
    ):
        assert best.page_content in store.codec.decode(window.token_ids)


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_relevance_is_between_0_and_1_and_falls_with_the_score(tmp_path, metric):
    with kalos.SessionStore.open(tmp_path / "store", metric=metric) as opened:
        mine = KalosVectorStore(opened, DeterministicFakeEmbedding(size=DIM))
        mine.add_texts([str(i) for i in range(9)])
        scored = mine.similarity_search_with_relevance_scores("3", k=9)
        assert scored[0][0].page_content == "3"
        assert all(0 <= score <= 1 for _, score in scored)
        assert [score for _, score in scored] == sorted((s for _, s in scored), reverse=True)


def test_documents_survive_and_another_process_object_reads_them(tmp_path):
    embedding = DeterministicFakeEmbedding(size=DIM)
    with kalos.SessionStore.open(tmp_path / "store") as opened:
        KalosVectorStore.from_texts(
            ["a", "b"], embedding, [{"n": 1}, {}], ids=["x", "y"], store=opened
        )
    with kalos.SessionStore.open(tmp_path / "store", "r") as reader:
        mine = KalosVectorStore(reader, embedding)
        assert mine.get_by_ids(["x"]) == [Document(id="x", page_content="a", metadata={"n": 1})]
        assert mine.similarity_search("b", k=1)[0].id == "y"
        with pytest.raises(kalos.StoreReadOnly):
            mine.add_texts(["c"])


def test_replaced_document_is_gone_with_its_vector(store):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    mine.add_texts(["old", "other"], ids=["a", "b"])
    mine.add_texts(["new"], ids=["a"])
    assert store.stats()["passages"] == 2
    assert {one.page_content for one in mine.similarity_search("old", k=9)} == {"new", "other"}


def test_crash_between_the_two_steps_of_a_replacement_leaves_the_newer_one(store, monkeypatch):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    mine.add_texts(["old"], ids=["a"])
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete_passages", lambda *args, **kwargs: 1 // 0, raising=False)
        with pytest.raises(ZeroDivisionError):
            mine.add_texts(["new"], ids=["a"])
    assert [one.page_content for one in mine.get_by_ids(["a"])] == ["new"]
    mine.add_texts(["newest"], ids=["a"])
    assert [one.page_content for one in mine.similarity_search("x", k=9)] == ["newest"]


def test_repeated_id_in_one_call_keeps_the_last(store):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    assert mine.add_texts(["one", "two"], ids=["a", "a"]) == ["a", "a"]
    assert [one.page_content for one in mine.get_by_ids(["a"])] == ["two"]


def test_delete_without_ids_empties_one_collection(store):
    embedding = DeterministicFakeEmbedding(size=DIM)
    mine, other = (KalosVectorStore(store, embedding, collection=name) for name in "ab")
    mine.add_texts([str(i) for i in range(1500)])
    other.add_texts(["stays"])
    assert mine.delete() is True
    assert mine.similarity_search("1") == []
    assert len(other.similarity_search("1")) == 1


def test_many_ids_are_found_in_several_steps(store):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    names = mine.add_texts([str(i) for i in range(600)])
    assert {one.id for one in mine.get_by_ids(names)} == set(names)


def test_indexing_api_replaces_and_removes_documents(store):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    records = InMemoryRecordManager("test")
    records.create_schema()
    options = {"cleanup": "full", "source_id_key": "source", "key_encoder": "sha256"}
    first = [Document(page_content=text, metadata={"source": text}) for text in "abc"]
    assert index(first, records, mine, **options)["num_added"] == 3
    done = index(first[1:], records, mine, **options)
    assert (done["num_skipped"], done["num_deleted"]) == (2, 1)
    assert {one.page_content for one in mine.similarity_search("a", k=9)} == {"b", "c"}


def test_wrong_arguments_are_refused_and_nothing_is_added(store, tmp_path):
    embedding = DeterministicFakeEmbedding(size=DIM)
    mine = KalosVectorStore(store, embedding)
    with pytest.raises(kalos.InvalidArgument, match="must not have the field"):
        mine.add_texts(["a"], [{ID_FIELD: "x"}])
    with pytest.raises(kalos.InvalidArgument, match="one item a document"):
        mine.add_documents([Document(page_content="a")], ids=["a", "b"])
    with pytest.raises(kalos.InvalidType, match="JSON"):
        mine.add_texts(["a"], [{"f": object()}])
    with pytest.raises(kalos.InvalidType, match="store must be"):
        KalosVectorStore("store", embedding)
    with pytest.raises(kalos.InvalidArgument, match="store must be given"):
        KalosVectorStore.from_texts(["a"], embedding)
    with (
        kalos.SessionStore.open(tmp_path / "other") as other,
        kalos.ContextAssembler(other) as assembler,
        pytest.raises(kalos.InvalidArgument, match="one of the same store"),
    ):
        KalosVectorStore(store, embedding, assembler=assembler)
    assert mine.similarity_search("a") == []
    assert mine.add_documents([]) == []


def test_passage_deleted_since_it_was_found_is_left_out(store, monkeypatch):
    mine = KalosVectorStore(store, DeterministicFakeEmbedding(size=DIM))
    mine.add_texts(["a", "b", "c"], ids=["a", "b", "c"])
    with kalos.ContextAssembler(store) as assembler:
        query = np.asarray(mine.embeddings.embed_query("a"), np.float32)
        hits = assembler.recall(query, top_k=3, collections=mine.collection)
        monkeypatch.setattr(mine._assembler, "recall", lambda *args, **kwargs: hits, raising=False)
        store.delete_passages(mine.collection, [int(hits.ids[1])])
        assert len(mine.similarity_search("a", k=3)) == 2
