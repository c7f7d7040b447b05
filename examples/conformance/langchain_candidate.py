"""LangChain: `InMemoryChatMessageHistory`, `trim_messages` and `InMemoryVectorStore`."""

from importlib.metadata import version

from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.vectorstores import InMemoryVectorStore
from number_text import count, ids_of, split, text_of

from kalos_ctx.conformance import Candidate, StoredTurn

ROLES = {"human": "user", "ai": "assistant", "tool": "tool"}
TYPES = {role: kind for kind, role in ROLES.items()}

# Its filter is a function that the caller writes; these would test the function of this file.
# It has no window with recall: the application puts what was found into a prompt.
NOT_CLAIMED = {
    **dict.fromkeys(("B67", "B68"), "a filter is a function that the caller writes"),
    **dict.fromkeys(("B04", "B77", "B89", "B90", "B92", "B106"), "recall is not part of trimming"),
}


def count_messages(messages):
    """Count tokens exactly, one a number."""
    return sum(count(message.content) for message in messages)


class GivenVectors(Embeddings):
    """Stand for a model: a document is embedded as the vector that was given with it."""

    def __init__(self):
        self.rows = []

    def embed_documents(self, texts):
        """Return the vectors that were given, in their order."""
        return self.rows

    def embed_query(self, text):
        """Return nothing of use: queries are given as vectors."""
        raise NotImplementedError


class LangChainCandidate(Candidate):
    """One history a session, cut by `trim_messages`."""

    name = "LangChain"
    version = version("langchain-core")
    settings = (
        'trim_messages(strategy="last", include_system=True, start_on=("human", "ai"), exact '
        "counter), `len` as counter for limits in turns, allow_partial with a splitter where a "
        "case asks for it; InMemoryVectorStore for recall"
    )
    capabilities = frozenset(
        {"token_limit", "turn_limit", "partial", "start_on", "groups", "pin", "read", "threads",
         "metadata", "delete", "recall", "filters", "delete_passages"}
    )  # fmt: skip
    not_claimed = NOT_CLAIMED

    def __init__(self, setup):
        self.histories = {}
        self.pinned = {}
        self.stores = {}

    def history(self, session):
        """Return a session's history, as `get_session_history` of an application would."""
        return self.histories.setdefault(session, InMemoryChatMessageHistory())

    def append(self, session, role, token_ids, *, calls=(), call=None, group=None, metadata=None):
        """Add a message."""
        text = text_of(token_ids)
        extra = {} if metadata is None else {"additional_kwargs": {"metadata": metadata}}
        if role == "user":
            message = HumanMessage(text, **extra)
        elif role == "assistant":
            asked = [{"name": "f", "args": {}, "id": one} for one in calls]
            message = AIMessage(text, tool_calls=asked, **extra)
        else:
            message = ToolMessage(text, tool_call_id=call, **extra)
        self.history(session).add_messages([message])

    def assemble(
        self, session, max_tokens, reserve=0, *, max_turns=None, partial=False, start_on=None
    ):
        """Trim the session's messages behind its system message."""
        messages = list(self.history(session).messages)
        pinned = self.pinned.get(session)
        if pinned:
            messages.insert(0, SystemMessage(text_of([n for ids in pinned.values() for n in ids])))
        if max_turns is not None or max_tokens is not None:
            messages = trim_messages(
                messages,
                max_tokens=max_tokens if max_turns is None else max_turns,
                token_counter=count_messages if max_turns is None else len,
                strategy="last",
                include_system=True,
                start_on=TYPES[start_on] if start_on else ("human", "ai"),
                allow_partial=partial,
                text_splitter=split,
            )
        return [number for message in messages for number in ids_of(message.content)]

    def turns(self, session, *, tenant=""):
        """Return the messages."""
        return [
            StoredTurn(
                ROLES[message.type],
                ids_of(message.content),
                message.additional_kwargs.get("metadata"),
            )
            for message in self.history(session).messages
        ]

    def pin(self, session, name, token_ids, *, volatile=False):
        """Keep text for the system message, of which LangChain knows one."""
        self.pinned.setdefault(session, {})[name] = list(token_ids)

    def delete(self, session, *, tenant=""):
        """Clear a history."""
        self.history(session).clear()

    def vectors(self, collection):
        """Return a collection's vector store."""
        return self.stores.setdefault(collection, InMemoryVectorStore(GivenVectors()))

    def add_passages(self, collection, vectors, token_ids, *, metadata=None, tenant=""):
        """Add documents."""
        store = self.vectors(collection)
        store.embeddings.rows = [list(row) for row in vectors]
        return store.add_documents(
            [
                Document(text_of(ids), metadata=dict(metadata[place]) if metadata else {})
                for place, ids in enumerate(token_ids)
            ]
        )

    def delete_passages(self, collection, ids):
        """Delete documents."""
        self.vectors(collection).delete(ids)

    def recall(self, query, top_k, collection, *, filters=None):
        """Search by vector."""
        wanted = filters or {}
        found = self.vectors(collection).similarity_search_with_score_by_vector(
            list(query),
            k=top_k,
            filter=lambda document: all(
                document.metadata.get(field) == value for field, value in wanted.items()
            ),
        )
        return [(document.id, score) for document, score in found]


def factory(setup):
    """Make a candidate; nothing is kept beyond it."""
    return LangChainCandidate(setup)
