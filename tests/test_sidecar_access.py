"""Who may connect, and which tenants each may use."""

import contextlib
import grp
import os
import pwd
import subprocess
import sys

import numpy as np
import pytest
from helpers.raw_client import RawClient
from helpers.sidecars import eventually, socket_folder, threaded

import kalos_ctx
from kalos_ctx import AccessRules, SessionStore
from kalos_ctx.sidecar import protocol
from kalos_ctx.sidecar.access import Grant

ME = os.getuid()


def rules(text, tmp_path):
    path = tmp_path / "access.toml"
    path.write_text(text)
    return AccessRules.load(path)


def test_rules_join_what_user_and_group_may_use(tmp_path):
    found = rules(
        """
        unknown_pid = true
        [[allow]]
        uid = 1001
        tenants = ["a", "ü"]
        [[allow]]
        uid = 1001
        tenants = ["b"]
        [[allow]]
        gid = 50
        tenants = [""]
        [[allow]]
        uid = 1002
        tenants = "*"
        """,
        tmp_path,
    )
    grant = found.grant(1001, 50, 0)
    assert grant == Grant(False, frozenset({b"a", "ü".encode(), b"b", b""}))
    assert not grant.may_use(b"c")
    assert found.grant(1002, 1, 5).may_use(b"anything")
    assert found.is_shared
    with pytest.raises(kalos_ctx.PeerDenied):
        found.grant(1003, 51, 5)


def test_names_of_users_and_groups_are_looked_up(tmp_path):
    user, group = pwd.getpwuid(ME).pw_name, grp.getgrgid(os.getgid()).gr_name
    found = rules(
        f'[[allow]]\nuser = "{user}"\ntenants = "*"\n[[allow]]\ngroup = "{group}"\ntenants = []',
        tmp_path,
    )
    assert found.users == {ME: Grant(True)}
    assert found.groups == {os.getgid(): Grant()}


def test_the_default_is_the_own_user_and_every_tenant():
    found = AccessRules.own_user()
    assert found.grant(ME, 12345, 1).every_tenant
    assert not found.is_shared


@pytest.mark.parametrize(
    "text",
    [
        "allow = 5",
        "other = 1",
        "[[allow]]\nuid = 1",
        '[[allow]]\ntenants = "*"',
        '[[allow]]\nuid = 1\ngid = 2\ntenants = "*"',
        '[[allow]]\nuid = -1\ntenants = "*"',
        '[[allow]]\nuid = "root"\ntenants = "*"',
        '[[allow]]\nuser = "nobody-of-that-name"\ntenants = "*"',
        "[[allow]]\nuid = 1\ntenants = 5",
        "[[allow]]\nuid = 1\ntenants = [5]",
        '[[allow]]\nuid = 1\ntenants = "*"\nmore = 1',
        "unknown_pid = 1",
        "[[allow",
    ],
)
def test_a_file_that_says_something_else_is_refused(text, tmp_path):
    with pytest.raises(kalos_ctx.InvalidArgument):
        rules(text, tmp_path)


def test_a_file_that_is_missing_is_refused(tmp_path):
    with pytest.raises(kalos_ctx.InvalidArgument, match="cannot be read"):
        AccessRules.load(tmp_path / "none")


@pytest.fixture
def two_tenants(tmp_path):
    """A sidecar whose client may use tenant "a" alone; "b" holds a secret."""
    with SessionStore.open(tmp_path / "s", vector_dim=2) as store:
        for tenant in ("a", "b"):
            store.append("s", "user", token_ids=[7, ord(tenant)], tenant=tenant, framed=True)
            store.add_passages("c", np.eye(2), token_ids=[[ord(tenant)]] * 2, tenant=tenant)
    access = AccessRules(users={ME: Grant(False, frozenset({b"a"}))})
    with socket_folder() as folder, threaded(tmp_path / "s", f"{folder}/s", access=access) as side:
        yield side, f"{folder}/s"


def test_a_tenant_that_is_not_allowed_is_denied_in_every_call(two_tenants):
    sidecar, path = two_tenants
    with kalos_ctx.connect(path) as client:
        assert client.assemble("s", tenant="a", max_tokens=9).token_ids.tolist() == [7, ord("a")]
        calls = [
            lambda t: client.assemble("s", tenant=t, max_tokens=9),
            lambda t: client.count("s", tenant=t),
            lambda t: client.plan("s", tenant=t, max_tokens=9),
            lambda t: client.recall([1, 0], tenant=t, top_k=1, collections="c"),
            lambda t: client.append("s", "user", tenant=t, token_ids=[1], framed=True),
            lambda t: client.extend("s", [], tenant=t),
            lambda t: client.delete("s", tenant=t),
            lambda t: client.sessions(tenant=t),
            lambda t: client.set_segment(None, "x", token_ids=[1], tenant=t),
            lambda t: client.add_passages("c", np.eye(2), tenant=t),
            lambda t: client.assemble_batch([{"session": "s", "tenant": t, "max_tokens": 9}]),
        ]
        for call in calls:
            for tenant in ("b", ""):
                with pytest.raises(kalos_ctx.PeerDenied):
                    call(tenant)
        # Nor by an argument that names one beside the request's own.
        with pytest.raises(kalos_ctx.InvalidArgument):
            client._call("append", b"s", "a", {"role": "user", "token_ids": [1], "tenant": "b"}, 5)
    assert sidecar.status.read()["counts"]["denied"] == 2 * len(calls)


def test_auto_mode_is_served_for_who_may_not_use_every_tenant(two_tenants):
    _, path = two_tenants
    with kalos_ctx.connect(path) as client:
        assert client.mode == "served"
        assert "every tenant" in client.mode_why
    with pytest.raises(kalos_ctx.PeerDenied):
        kalos_ctx.connect(path, mode="direct", timeout=1)


def test_no_byte_of_another_tenants_window_reaches_a_clients_memory(tmp_path):
    secret = np.full(3000, 0x5EC2E7, np.int32)
    with SessionStore.open(tmp_path / "s") as store:
        store.append("s", "user", token_ids=secret, tenant="b", framed=True)
        store.append("s", "user", token_ids=[1], tenant="a", framed=True)
    with socket_folder() as folder, threaded(tmp_path / "s", f"{folder}/s") as sidecar:
        with kalos_ctx.connect(f"{folder}/s", mode="served") as all_tenants:
            assert len(all_tenants.assemble("s", tenant="b", max_tokens=None)) == 3000
        sidecar.access = AccessRules(users={ME: Grant(False, frozenset({b"a"}))})
        with contextlib.ExitStack() as stack:
            raws = [stack.enter_context(RawClient(f"{folder}/s")) for _ in range(3)]
            for raw in raws:
                body = protocol.call_body(b"s", b"a")
                raw.put(0, raw.request(protocol.OP_ASSEMBLE, body))
                assert eventually(lambda raw=raw: raw.answer_word(0)[1] == 2)
                assert secret[:4].tobytes() not in bytes(raw.responses)


@pytest.mark.skipif(ME != 0, reason="becoming another user takes root")
def test_82_another_user_connects_by_its_rule_alone(tmp_path):
    nobody = pwd.getpwnam("nobody").pw_uid
    code = (
        "import os, sys\n"
        "import kalos_ctx, kalos_ctx.sidecar.client\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "try:\n"
        "    client = kalos_ctx.connect(sys.argv[1], timeout=1)\n"
        "    print(client.mode, client.count('s', tenant='a'))\n"
        "except kalos_ctx.KalosError as error:\n"
        "    print(type(error).__name__)\n"
    )

    def as_nobody(path):
        done = subprocess.run(
            [sys.executable, "-c", code, path, str(nobody)], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return done.stdout.strip()

    with socket_folder() as folder:
        os.chmod(folder, 0o711)
        access = AccessRules(users={ME: Grant(True), 424242: Grant(True)})
        with threaded(tmp_path / "s", f"{folder}/s", access=access):
            assert as_nobody(f"{folder}/s") == "PeerDenied"
        access = AccessRules(users={nobody: Grant(False, frozenset({b"a"}))}, unknown_pid=True)
        with threaded(tmp_path / "s", f"{folder}/s", access=access):
            assert as_nobody(f"{folder}/s") in ("served 0", "PeerDenied")
