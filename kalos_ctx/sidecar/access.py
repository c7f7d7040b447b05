"""Who may connect, and which tenants each may use."""

from __future__ import annotations

import grp
import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kalos_ctx.arguments import name_bytes
from kalos_ctx.errors import InvalidArgument, PeerDenied

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OVERFLOW_UID = 65534  # what the kernel says for a user that our user namespace does not know
FIELDS = frozenset({"uid", "user", "gid", "group", "tenants"})
SHAPE = "it needs [[allow]] tables of uid, user, gid or group, and tenants"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one peer may use.

    Attributes
    ----------
    every_tenant : bool
    tenants : frozenset of bytes
        Looked at where not every tenant may be used.
    """

    every_tenant: bool = False
    tenants: frozenset[bytes] = frozenset()

    def may_use(self, tenant: bytes) -> bool:
        """Whether the tenant may be named."""
        return self.every_tenant or tenant in self.tenants

    def joined(self, other: Grant) -> Grant:
        """Return what either allows."""
        return Grant(self.every_tenant or other.every_tenant, self.tenants | other.tenants)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Which users and groups may use which tenants.

    Attributes
    ----------
    users, groups : dict of int to Grant
        By uid and gid.
    unknown_pid : bool
        Whether a peer of another PID namespace, whose pid reads 0, may connect.
    """

    users: Mapping[int, Grant] = field(default_factory=dict)
    groups: Mapping[int, Grant] = field(default_factory=dict)
    unknown_pid: bool = False

    @classmethod
    def own_user(cls) -> AccessRules:
        """Return the default: the sidecar's own user, every tenant."""
        return cls(users={os.getuid(): Grant(every_tenant=True)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AccessRules:
        """Read rules from a TOML file; docs/sidecar.md describes it.

        Raises
        ------
        InvalidArgument
            It cannot be read, or says something else than rules.
        """
        try:
            said = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"the access file cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"the access file is no TOML: {error}") from None
        return cls.from_mapping(said)

    @classmethod
    def from_mapping(cls, said: Mapping[str, Any]) -> AccessRules:
        """Return the rules that a file's content says.

        Raises
        ------
        InvalidArgument
            The message names the entry, and what was expected.
        """
        if not said.keys() <= {"allow", "unknown_pid"} or not isinstance(
            said.get("allow", []), list
        ):
            raise InvalidArgument(f"the access file has other keys: {SHAPE}")
        users: dict[int, Grant] = {}
        groups: dict[int, Grant] = {}
        for place, row in enumerate(said.get("allow", [])):
            what = f"allow[{place}]"
            if not isinstance(row, dict) or not row.keys() <= FIELDS or "tenants" not in row:
                raise InvalidArgument(f"{what} has other keys: {SHAPE}")
            named = [key for key in ("uid", "user", "gid", "group") if key in row]
            if len(named) != 1:
                raise InvalidArgument(f"{what} must name one of uid, user, gid, group")
            number = _number(row, named[0], what)
            table = users if named[0] in ("uid", "user") else groups
            grant = _grant(row["tenants"], what)
            table[number] = table[number].joined(grant) if number in table else grant
        unknown = said.get("unknown_pid", False)
        if not isinstance(unknown, bool):
            raise InvalidArgument("unknown_pid must be true or false")
        return cls(users, groups, unknown)

    @property
    def is_shared(self) -> bool:
        """Whether another user than the sidecar's own may connect."""
        return bool(self.groups) or any(uid != os.getuid() for uid in self.users)

    def grant(self, uid: int, gid: int, pid: int) -> Grant:
        """Return what a peer may use.

        Raises
        ------
        PeerDenied
            Nothing.
        """
        if pid == 0 and not self.unknown_pid:
            raise PeerDenied(
                "the sidecar cannot see your process (pid 0: another PID namespace); share the "
                "namespace, or set unknown_pid in its access file"
            )
        found = [
            table[number]
            for table, number in ((self.users, uid), (self.groups, gid))
            if number in table
        ]
        if not found:
            unknown = " (unknown in the sidecar's user namespace)" if uid == OVERFLOW_UID else ""
            raise PeerDenied(f"user {uid}{unknown} may not use this sidecar")
        grant = found[0]
        for other in found[1:]:
            grant = grant.joined(other)
        return grant


def _number(row: Mapping[str, Any], key: str, what: str) -> int:
    value = row[key]
    if key in ("uid", "gid"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(f"{what}.{key} must be a number from 0")
        return value
    try:
        return pwd.getpwnam(value).pw_uid if key == "user" else grp.getgrnam(value).gr_gid
    except (KeyError, TypeError):
        raise InvalidArgument(f"{what}.{key} names nobody on this machine") from None


def _grant(value: Any, what: str) -> Grant:
    if value == "*":
        return Grant(every_tenant=True)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidArgument(f'{what}.tenants must be "*" or a list of names')
    return Grant(tenants=frozenset(name_bytes(name, "tenant", empty=True) for name in value))
