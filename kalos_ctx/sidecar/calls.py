"""The store's and the assembler's calls by their names, for requests that name one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kalos_ctx.errors import InvalidArgument, ProtocolError

if TYPE_CHECKING:
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.store import SessionStore

# What a client may call. The session comes first in all that take one; the tenant is the request's.
OF_STORE = (
    "append",
    "extend",
    "set_segment",
    "summarize",
    "rollback",
    "fork",
    "delete",
    "add_passages",
    "delete_passages",
    "sessions",
)
OF_ASSEMBLER = ("recall", "plan")
WITHOUT_SESSION = frozenset({"add_passages", "delete_passages", "sessions"})
WRITES = frozenset(OF_STORE) - {"sessions"}


class Calls:
    """Runs calls by name.

    Parameters
    ----------
    store : SessionStore
    assembler : ContextAssembler
    durability : {"process", "group", "each"}
        The store's: a write that waits for a disk is not quick.
    """

    def __init__(self, store: SessionStore, assembler: ContextAssembler, durability: str) -> None:
        self._quick = durability == "process"
        self._calls: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {}
        for owner, names in ((store, OF_STORE), (assembler, OF_ASSEMBLER)):
            for name in names:
                call = getattr(owner, name)
                # `plan` takes what `assemble` takes.
                described = assembler.assemble if name == "plan" else call
                signature = inspect.signature(described)
                taken = frozenset(signature.parameters) - {"session", "tenant", "stream", "out"}
                self._calls[name] = (call, taken)

    def is_quick(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a call takes microseconds: token IDs appended to memory, no text to encode."""
        return self._quick and name == "append" and arguments.get("content") is None

    def __call__(self, name: str, session: bytes, tenant: bytes, arguments: dict[str, Any]) -> Any:
        """Run one.

        Raises
        ------
        ProtocolError, InvalidArgument, and what the call raises
        """
        if name not in self._calls:
            raise ProtocolError("the request names a call that the sidecar does not have")
        call, taken = self._calls[name]
        if not arguments.keys() <= taken:
            raise InvalidArgument(f"{name} has no argument of that name")
        if name in WITHOUT_SESSION:
            return call(tenant=tenant, **arguments)
        if name == "recall" or (name == "set_segment" and not session):
            return call(tenant=tenant, session=session or None, **arguments)
        return call(session, tenant=tenant, **arguments)
