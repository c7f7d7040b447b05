"""Documents of LangChain as passages: the vector store of `kalos_ctx.adapters.langchain`."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kalos_ctx.adapters.extras import missing_extra
from kalos_ctx.adapters.off_loop import settled
from kalos_ctx.assembler import ContextAssembler
from kalos_ctx.errors import InvalidArgument, InvalidType, PassageNotFound, UnknownField
from kalos_ctx.store import SessionStore

try:
    from langchain_core.documents import Document
    from langchain_core.runnables import run_in_executor
    from langchain_core.vectorstores import VectorStore
    from langchain_core.vectorstores.utils import maximal_marginal_relevance
except ImportError as error:
    raise missing_extra("langchain", error) from error

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

# Of a passage's metadata: the document's ID, which LangChain has as text.
ID_FIELD = "langchain_document_id"
HITS_MAX = 1024
IDS_AT_ONCE = 256


class KalosVectorStore(VectorStore):
    """LangChain documents, kept as passages that windows can recall.

    Parameters
    ----------
    store : SessionStore
        Open for writing where documents are added or deleted.
    embedding : Embeddings
    assembler : ContextAssembler, optional
        Does the searching; one of its own where it is not given.
    collection : str or bytes
    tenant : str or bytes

    Notes
    -----
    Search is exact, and a larger score is better: the cosine, the inner product, or the negated
    squared distance, as the store's metric is. `filter` is a mapping of metadata field to value or
    list of values, applied before the search.

    A document's metadata must be JSON values. Its ID is text and stands in the passage's metadata;
    adding a document under a used ID writes the new passage first and then deletes the old one, so
    that a crash between the two leaves both, of which the newer one counts.
    """

    def __init__(
        self,
        store: SessionStore,
        embedding: Embeddings,
        *,
        assembler: ContextAssembler | None = None,
        collection: str | bytes = "langchain",
        tenant: str | bytes = "",
    ) -> None:
        if not isinstance(store, SessionStore):
            raise InvalidType(f"store must be a SessionStore (got {type(store).__name__})")
        if assembler is not None and assembler.store is not store:
            raise InvalidArgument("assembler must be one of the same store")
        self.store, self.collection, self.tenant = store, collection, tenant
        self._assembler = ContextAssembler(store) if assembler is None else assembler
        self._embedding = embedding
        self._dim: int | None = None

    @property
    def embeddings(self) -> Embeddings:
        """The embedding model."""
        return self._embedding

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        store: SessionStore | None = None,
        **options: Any,
    ) -> KalosVectorStore:
        """Make a vector store of `store`, which must be given, and add texts to it.

        Takes the constructor's options too, and raises as `add_documents` does.
        """
        if store is None:
            raise InvalidArgument("store must be given: the SessionStore that keeps the documents")
        made = cls(store, embedding, **options)
        made.add_texts(texts, metadatas, ids=ids)
        return made

    # Writing.

    def add_documents(self, documents: list[Document], **options: Any) -> list[str]:
        """Add documents, or replace those whose ID is there.

        Parameters
        ----------
        documents : list of Document
        ids : list of str, optional
            In place of the documents' own; those without one get a new UUID.

        Returns
        -------
        list of str
            The documents' IDs.

        Raises
        ------
        DimensionMismatch, NonFiniteVector, InvalidArgument, InvalidType, StoreReadOnly, StoreFull
        """
        vectors = self._embedding.embed_documents([one.page_content for one in documents])
        return self._put(documents, vectors, options.get("ids"))

    async def aadd_documents(self, documents: list[Document], **options: Any) -> list[str]:
        """Add documents, or replace those whose ID is there; as `add_documents`."""
        vectors = await self._embedding.aembed_documents([one.page_content for one in documents])
        return await settled(self._put, documents, vectors, options.get("ids"))

    def delete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """Delete documents with their bytes; all of the collection where `ids` is None.

        IDs that are not there are let pass.

        Raises
        ------
        StoreReadOnly, StoreFull, StoreIOError
        """
        numbers = self._every_number() if ids is None else self._numbers(ids)
        while numbers:
            self.store.delete_passages(self.collection, numbers, tenant=self.tenant)
            numbers = self._every_number() if ids is None else []
        return True

    async def adelete(self, ids: list[str] | None = None, **options: Any) -> bool:
        """Delete documents with their bytes; as `delete`."""
        return await settled(self.delete, ids)

    def _put(
        self,
        documents: Sequence[Document],
        vectors: Sequence[Sequence[float]],
        ids: Sequence[str | None] | None,
    ) -> list[str]:
        if ids is not None and len(ids) != len(documents):
            raise InvalidArgument(
                f"ids must have one item a document, {len(documents)} (got {len(ids)})"
            )
        asked = [one.id for one in documents] if ids is None else list(ids)
        names = [name or str(uuid.uuid4()) for name in asked]
        # Of several under one ID the last one counts, as if they had come one after the other.
        rows = list({name: place for place, name in enumerate(names)}.values())
        if not rows:
            return names
        known = [name for name in dict.fromkeys(asked) if name]
        vectors_nd = np.asarray([vectors[row] for row in rows], np.float32)
        self._dim = vectors_nd.shape[1] if vectors_nd.ndim == 2 else self._dim
        metadata = [self._metadata(documents[row], names[row]) for row in rows]
        old = self._numbers(known) if known else []
        self.store.add_passages(
            self.collection,
            vectors_nd,
            tenant=self.tenant,
            texts=[documents[row].page_content for row in rows],
            metadata=metadata,
        )
        if old:
            self.store.delete_passages(self.collection, old, tenant=self.tenant)
        return names

    @staticmethod
    def _metadata(document: Document, name: str) -> dict[str, Any]:
        if ID_FIELD in document.metadata:
            raise InvalidArgument(f"metadata must not have the field {ID_FIELD!r}")
        return {**document.metadata, ID_FIELD: name}

    # Reading.

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents of these IDs that are there, oldest first."""
        newest: dict[str, Document] = {}
        # Ascending: of two passages under one ID the newer one is met last.
        for one in self._passages(sorted(self._numbers(ids))):
            document = _document(one)
            newest[str(document.id)] = document
        return list(newest.values())

    def similarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        """Return the `k` documents nearest to a text; `filter` and `min_score` as in the class."""
        return [one for one, _ in self.similarity_search_with_score(query, k, **options)]

    async def asimilarity_search(self, query: str, k: int = 4, **options: Any) -> list[Document]:
        """Return the `k` documents nearest to a text."""
        return [one for one, _ in await self.asimilarity_search_with_score(query, k, **options)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a text, each with its score; larger is better.

        Raises
        ------
        DimensionMismatch, NonFiniteVector, UnknownField, InvalidArgument, InvalidType
        """
        return self._search(self._embedding.embed_query(query), k, **options)

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, **options: Any
    ) -> list[tuple[Document, float]]:
        """Return the `k` documents nearest to a text, each with its score; larger is better."""
        vector = await self._embedding.aembed_query(query)
        found: list[tuple[Document, float]] = await run_in_executor(
            None, self._search, vector, k, **options
        )
        return found

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **options: Any
    ) -> list[Document]:
        """Return the `k` documents nearest to a vector."""
        return [one for one, _ in self._search(embedding, k, **options)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **options: Any,
    ) -> list[Document]:
        """Return `k` of the `fetch_k` nearest documents, near to the text but not to each other.

        Parameters
        ----------
        lambda_mult : float
            From 0, the most different ones, to 1, the nearest ones.
        """
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector, k, fetch_k, lambda_mult, **options
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **options: Any,
    ) -> list[Document]:
        """Return `k` of the `fetch_k` documents nearest to a vector, not near to each other."""
        found = [passage for passage, _ in self._hits(embedding, max(k, fetch_k), **options)]
        if not found:
            return []
        chosen = maximal_marginal_relevance(
            np.asarray(embedding, np.float32),
            [one.vector.astype(np.float32) for one in found],
            lambda_mult=lambda_mult,
            k=k,
        )
        return [_document(found[place]) for place in chosen]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        if self.store.metric == "l2":
            return lambda score: 1.0 / (1.0 - score)
        return lambda score: min(max(score, 0.0), 1.0)

    def _search(self, vector: Any, k: int, **options: Any) -> list[tuple[Document, float]]:
        return [(_document(one), score) for one, score in self._hits(vector, k, **options)]

    def _hits(
        self,
        vector: Any,
        k: int,
        *,
        filter: Mapping[str, Any] | None = None,
        min_score: float | None = None,
    ) -> list[tuple[Any, float]]:
        hits = self._assembler.recall(
            np.asarray(vector, np.float32),
            tenant=self.tenant,
            top_k=k,
            collections=self.collection,
            min_score=min_score,
            filters=filter,
        )
        found = {one.id: one for one in self._passages(hits.ids)}
        scored = zip(hits.ids.tolist(), hits.scores.tolist(), strict=True)
        return [(found[number], score) for number, score in scored if number in found]

    def _passages(self, numbers: Any) -> list[Any]:
        """Return the passages that are still there."""
        if not len(numbers):
            return []
        get = functools.partial(self.store.passages, self.collection, tenant=self.tenant)
        try:
            return get(numbers)
        except PassageNotFound:
            # Another deleted one since it was found: one by one, then.
            found = []
            for number in numbers:
                with contextlib.suppress(PassageNotFound):
                    found += get([number])
            return found

    def _numbers(self, names: Sequence[str]) -> list[int]:
        """Return the passages that stand for documents, from the index of the metadata."""
        found: list[int] = []
        for start in range(0, len(names), IDS_AT_ONCE):
            found += self._every_number({ID_FIELD: list(names[start : start + IDS_AT_ONCE])})
        return found

    def _every_number(self, filters: Mapping[str, Any] | None = None) -> list[int]:
        """Return up to 1,024 passages that pass a filter, whatever their vectors are."""
        dim = self._dim or self.store.stats()["vector_dim"]
        if dim is None:
            return []
        self._dim = dim
        anything: NDArray[np.float32] = np.eye(1, dim, dtype=np.float32)[0]
        try:
            hits = self._assembler.recall(
                anything,
                tenant=self.tenant,
                top_k=HITS_MAX,
                collections=self.collection,
                filters=filters,
            )
        except UnknownField:
            return []
        return [int(one) for one in hits.ids]


def _document(passage: Any) -> Document:
    metadata = dict(passage.metadata or {})
    name = metadata.pop(ID_FIELD, None)
    return Document(id=name, page_content=passage.text or "", metadata=metadata)
