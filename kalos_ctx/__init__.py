"""Kalos: a chat session's ID in, the model's next input out.

The names below load their modules when they are first used, so that the import costs little and
needs neither a template engine nor a GPU library.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from kalos_ctx.errors import (
    BudgetExceeded,
    Conflict,
    ControlTokenInContent,
    DeviceError,
    DeviceUnavailable,
    DimensionMismatch,
    FingerprintMismatch,
    ForkedHandle,
    FormatVersionError,
    IdempotencyConflict,
    InvalidArgument,
    InvalidTokenId,
    InvalidType,
    KalosError,
    NonFiniteVector,
    NotAStore,
    PassageNotFound,
    PeerDenied,
    PoolExhausted,
    ProtocolError,
    SessionExpired,
    SessionNotFound,
    SidecarTimeout,
    SidecarUnavailable,
    StoreClosed,
    StoreCorrupt,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreNotFound,
    StoreReadOnly,
    TemplateUnsafe,
    UnknownField,
    VersionMismatch,
    WindowReleased,
)

if _TYPE_CHECKING:
    from kalos_ctx._turns import Passage, Turn
    from kalos_ctx.assembler import ContextAssembler
    from kalos_ctx.planner import Plan, PlanItem, Policy
    from kalos_ctx.sidecar.access import AccessRules
    from kalos_ctx.sidecar.async_client import AsyncClient, connect_async
    from kalos_ctx.sidecar.client import Client, connect
    from kalos_ctx.sidecar.server import serve
    from kalos_ctx.store import SessionStore
    from kalos_ctx.tokens import TokenCodec
    from kalos_ctx.types import ErasureReceipt, Flaw, Hits, Page, VerifyReport

# Where each name that is not loaded yet comes from.
_HOMES = {
    "AccessRules": "sidecar.access",
    "AsyncClient": "sidecar.async_client",
    "Client": "sidecar.client",
    "ContextAssembler": "assembler",
    "ErasureReceipt": "types",
    "Flaw": "types",
    "Hits": "types",
    "Page": "types",
    "Passage": "_turns",
    "Plan": "planner",
    "PlanItem": "planner",
    "Policy": "planner",
    "SessionStore": "store",
    "TokenCodec": "tokens",
    "Turn": "_turns",
    "VerifyReport": "types",
    "connect": "sidecar.client",
    "connect_async": "sidecar.async_client",
    "serve": "sidecar.server",
}

__all__ = [
    "AccessRules",
    "AsyncClient",
    "BudgetExceeded",
    "Client",
    "Conflict",
    "ContextAssembler",
    "ControlTokenInContent",
    "DeviceError",
    "DeviceUnavailable",
    "DimensionMismatch",
    "ErasureReceipt",
    "FingerprintMismatch",
    "Flaw",
    "ForkedHandle",
    "FormatVersionError",
    "Hits",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidTokenId",
    "InvalidType",
    "KalosError",
    "NonFiniteVector",
    "NotAStore",
    "Page",
    "Passage",
    "PassageNotFound",
    "PeerDenied",
    "Plan",
    "PlanItem",
    "Policy",
    "PoolExhausted",
    "ProtocolError",
    "SessionExpired",
    "SessionNotFound",
    "SessionStore",
    "SidecarTimeout",
    "SidecarUnavailable",
    "StoreClosed",
    "StoreCorrupt",
    "StoreFull",
    "StoreIOError",
    "StoreLocked",
    "StoreNotFound",
    "StoreReadOnly",
    "TemplateUnsafe",
    "TokenCodec",
    "Turn",
    "UnknownField",
    "VerifyReport",
    "VersionMismatch",
    "WindowReleased",
    "connect",
    "connect_async",
    "serve",
]


def __getattr__(name: str) -> _Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
