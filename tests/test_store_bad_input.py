"""Bad input: every argument of every call, and that a refused call changes nothing."""

import inspect
import math

import numpy as np
import pytest
from helpers.store_files import content_digest

from kalos_ctx.errors import InvalidArgument, KalosError
from kalos_ctx.store import SessionStore

NEEDLE = "needle-of-a-conversation"
DEEP: list = []
for _ in range(70):
    DEEP = [DEEP]

NOT_NAMES = (
    "",
    b"",
    "a" * 1025,
    "\ud800",
    5,
    1.5,
    True,
    bytearray(b"a"),
    ["a"],
    object(),
    math.nan,
)
NOT_TENANTS = (None, "a" * 1025, "\ud800", 5, 1.5, True, bytearray(b"a"), ["a"], object())
NOT_ROLES = (None, "", "User", "bot", NEEDLE, 2, True, b"user", ["user"])
NOT_IDS = (
    *([-1], [1000], [2**31], [2**64], [10**5000], [1.0], [math.nan], [True], [None], ["1"]),
    *(NEEDLE, b"123", 5, 1.5, {1: 2}, {1}, object(), [[1]], [], ()),
    *(np.array([1.0]), np.array([[1]]), np.array([-1]), np.array([2**40]), np.array(["1"])),
)
NOT_VECTORS = (
    *(5, 1.5, True, NEEDLE, b"ab", {}, {1.0}, object(), [], [[1.0, 2.0]], [None, 1.0]),
    *([math.nan, 1], [1, math.inf], [1e300, 0], ["1", "2"], [1j, 2], [1.0], [1.0, 2.0, 3.0]),
    *(np.array([]), np.zeros((1, 2)), np.array(["a", "b"]), [NEEDLE, NEEDLE], [10**400, 1]),
)
NOT_SECONDS = (math.nan, math.inf, -math.inf, 10**400, "1", NEEDLE, True, 1j, [1], object())
NOT_WHOLE = (
    -1,
    2**64,
    10**5000,
    1.0,
    1.5,
    math.nan,
    "1",
    NEEDLE,
    True,
    [1],
    np.array([1]),
    object(),
)
NOT_METADATA = (
    *(NEEDLE, 5, True, [NEEDLE], [("a", 1)], {1: NEEDLE}, {"a": {1: NEEDLE}}, {"a": math.nan}),
    *({"a": math.inf}, {"a": b"x"}, {"a": {NEEDLE}}, {"a": object()}, {"a": DEEP}, {b"a": 1}),
)
NOT_GROUPS = ("", "a" * 1025, "\ud800", 1.5, True, b"g", ["g"], 2**5000, object(), math.nan)
NOT_BOOLS = (0, 1, None, "True", NEEDLE, 1.0, [], np.True_)
NOT_CHOICES = (None, "", "HEAD", NEEDLE, 0, True, b"head", ["head"])
NOT_PASSAGE_IDS = (5, 1.5, True, object(), NEEDLE, b"ab", [1.0], [math.nan], ["1"], [None], [True])
NOT_MAPPINGS = (None, 5, NEEDLE, [NEEDLE], (1, 2), object(), b"ab")

# A call that passes, then for each argument what must not pass in its place.
CALLS = {
    "append": (
        {"session": "s", "role": "user", "token_ids": [1]},
        {
            "session": (None, *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "role": NOT_ROLES,
            "token_ids": (None, *NOT_IDS),
            "content": ("text beside IDs", NEEDLE, 5, b"text"),
            "vector": NOT_VECTORS,
            "group": NOT_GROUPS,
            "key": NOT_NAMES,
            "created_at": NOT_SECONDS,
            "metadata": NOT_METADATA,
            "ttl": (0, -1, -0.0, *NOT_SECONDS),
            "framed": NOT_BOOLS,
        },
    ),
    "extend": (
        {"session": "s", "turns": [{"role": "user", "token_ids": [1]}]},
        {
            "session": (None, *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "turns": (
                *(None, 5, 1.5, True, NEEDLE, b"ab", {"role": "user"}, object()),
                *([one] for one in NOT_MAPPINGS),
                *([{}], [{"token_ids": [1]}], [{"role": "user"}], [{NEEDLE: 1, "role": "user"}]),
                *([{"role": "user", "token_ids": [1], 5: 1}],),
                *([{"role": "user", "token_ids": [1], "session": "s"}],),
            ),
        },
    ),
    "turns": ({"session": "s"}, {"session": (None, *NOT_NAMES), "tenant": NOT_TENANTS,
              **{name: (1.0, math.nan, "1", NEEDLE, True, [1]) for name in ("start", "stop")}}),
    "count": ({"session": "s"}, {"session": (None, *NOT_NAMES), "tenant": NOT_TENANTS}),
    "sessions": (
        {},
        {
            "tenant": NOT_TENANTS,
            "prefix": ("a" * 1025, "\ud800", 5, True, ["a"]),
            "cursor": ("", "x", "-1", "1.5", "٣", "1" * 99, " 1", "1\n", NEEDLE, 5, True, b"1"),
            "limit": (None, 0, 100_001, *NOT_WHOLE),
        },
    ),
    "set_segment": (
        {"session": "s", "name": "p", "token_ids": [1]},
        {
            "session": NOT_NAMES,
            "tenant": NOT_TENANTS,
            "name": (None, b"p", *NOT_NAMES),
            "token_ids": NOT_IDS,
            "content": ("text beside IDs", NEEDLE, 5, b"text"),
            "role": ("tools", *NOT_ROLES),
            "placement": NOT_CHOICES,
            "volatile": NOT_BOOLS,
        },
    ),
    "segments": ({"session": "s"}, {"session": NOT_NAMES, "tenant": NOT_TENANTS}),
    "summarize": (
        {"session": "s", "start": 0, "stop": 2, "token_ids": [1]},
        {
            "session": (None, *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "start": (None, 2, 3, *NOT_WHOLE),
            "stop": (None, 0, 4, *NOT_WHOLE),
            "token_ids": (None, *NOT_IDS),
            "content": ("text beside IDs", NEEDLE, 5, b"text"),
            "role": ("tools", *NOT_ROLES),
        },
    ),
    "summaries": ({"session": "s"}, {"session": (None, *NOT_NAMES), "tenant": NOT_TENANTS}),
    "rollback": (
        {"session": "s", "to": 3},
        {
            "session": (None, *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "to": (None, 2**32, *NOT_WHOLE),
            "expect_last": (-2, 0, 5, 2**40, 1.0, math.nan, "1", NEEDLE, True, [1]),
        },
    ),
    "fork": (
        {"session": "s", "new_session": "t"},
        {
            "session": (None, *NOT_NAMES),
            "new_session": (None, "s", *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "at": (4, 2**32 - 1, 2**40, *NOT_WHOLE),
        },
    ),
    "add_passages": (
        {"collection": "c", "vectors": [[1.0, 2.0]]},
        {
            "collection": (None, *NOT_NAMES),
            "tenant": NOT_TENANTS,
            "vectors": (None, *(one for one in NOT_VECTORS if np.shape(one) != (1, 2)),
                        [[1.0], [1.0, 2.0]], [[1.0]], np.zeros((1, 5000)), [[math.nan, 1]]),
            "texts": (NEEDLE, 5, {}, [], [1], [b"x"], ["\ud800"], ["a", "b"], {NEEDLE}, object()),
            "token_ids": (5, NEEDLE, {}, [5], ["ab"], [[-1]], [[1000]], [[1.0]], [[1], [2]],
                          [[[1]]]),
            "metadata": (5, {}, [5], [NEEDLE], [{1: 2}], [{"a": math.nan}], [None, None], [[1]]),
            "ids": (*NOT_PASSAGE_IDS, [], [-1], [2**64 - 1], [2**64], [1, 2], [[1]], [0],
                    [10**5000]),
        },
    ),
    "passages": ({"collection": "c", "ids": [0]}, {"collection": (None, *NOT_NAMES),
                 "tenant": NOT_TENANTS, "ids": (None, *NOT_PASSAGE_IDS, [-1], [2**64], [[0]])}),
    "delete_passages": ({"collection": "c", "ids": []}, {"collection": (None, *NOT_NAMES),
                        "tenant": NOT_TENANTS,
                        "ids": (None, *NOT_PASSAGE_IDS, [-1], [2**64], [[0]], [0, -1])}),
    "delete": ({"session": "nobody"}, {"session": (None, *NOT_NAMES), "tenant": NOT_TENANTS}),
    "delete_tenant": ({"tenant": "nobody"}, {"tenant": NOT_TENANTS}),
    "snapshot": ({}, {"path": (None, 5, True, "", "a\0b", "\ud800", ["a"], object())}),
}  # fmt: skip
# Calls without arguments, and those that take objects of this package.
WITHOUT = {"open", "close", "compact", "listen", "stats", "sync", "tenants", "verify"}
ROWS = [(call, argument) for call, (_, bad) in CALLS.items() for argument in bad]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Return a store with one of each; every call of this file leaves it as it is."""
    path = tmp_path_factory.mktemp("bad") / "chats.kalos"
    with SessionStore.open(path, vocab_size=1000, segment_bytes=65536) as store:
        store.extend("s", [{"role": "user", "token_ids": [i + 1], "key": str(i)} for i in range(3)])
        store.set_segment("s", "pin", token_ids=[5])
        store.add_passages("c", [[1.0, 2.0]])
        yield store


def state(store):
    stats = store.stats()
    return (
        content_digest(store.path),
        {name: value for name, value in stats.items() if name != "bytes"},
        store.sessions().items,
        store.tenants(),
        store.segments("s").keys(),
    )


def test_table_names_every_call_and_argument():
    public = {name for name, value in vars(SessionStore).items() if callable(value)} | set(
        dir(SessionStore)
    )
    calls = {name for name in public if not name.startswith("_")} - WITHOUT
    calls = {name for name in calls if callable(getattr(SessionStore, name))}
    assert calls == set(CALLS)
    for call, (_, bad) in CALLS.items():
        parameters = set(inspect.signature(getattr(SessionStore, call)).parameters) - {"self"}
        assert parameters == set(bad), call


@pytest.mark.parametrize(("call", "argument"), ROWS, ids=[".".join(row) for row in ROWS])
def test_bad_argument_is_refused_before_any_change(store, call, argument):
    good, bad = CALLS[call]
    before = state(store)
    for value in bad[argument]:
        with pytest.raises(KalosError) as caught:
            getattr(store, call)(**{**good, argument: value})
        assert isinstance(caught.value, ValueError | LookupError), (call, argument)
        assert NEEDLE not in str(caught.value)
        assert len(str(caught.value)) < 400
    assert state(store) == before


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"snapshot"}))
def test_good_arguments_of_the_table_pass(tmp_path, call):
    """The row's other arguments are not what was refused."""
    with SessionStore.open(tmp_path / "s", vocab_size=1000, segment_bytes=65536) as store:
        store.extend("s", [{"role": "user", "token_ids": [i + 1]} for i in range(3)])
        store.add_passages("c", [[1.0, 2.0]])
        store.append("nobody", "user", token_ids=[1])
        getattr(store, call)(**CALLS[call][0])


@pytest.mark.parametrize("argument", sorted(set(CALLS["append"][1]) - {"session", "tenant"}))
def test_bad_field_of_a_turn_in_extend_names_its_place(store, argument):
    before = state(store)
    good = {"role": "user", "token_ids": [1]}
    for value in CALLS["append"][1][argument]:
        with pytest.raises(InvalidArgument if argument == "framed" else ValueError) as caught:
            store.extend("s", [good, {**good, argument: value}, good])
        assert isinstance(caught.value, KalosError)
        assert str(caught.value).startswith("turns[1]") or "dimension" in str(caught.value)
        assert NEEDLE not in str(caught.value)
    assert state(store) == before


OPEN = {
    "path": (None, 5, True, "", b"", "a\0b", "\ud800", ["a"], object(), "a" * 5000),
    "mode": ("w", "", "A", None, 0, True, b"a", ["a"]),
    "tokenizer": (5, True, object(), "/nowhere/at/all", b"\0"),
    "template": ("x", 5, object()),
    "vector_dim": (0, 4097, *NOT_WHOLE),
    "vector_dtype": ("float64", *NOT_CHOICES),
    "metric": ("euclid", *NOT_CHOICES),
    "vocab_size": (0, 2**31 + 1, *NOT_WHOLE),
    "durability": ("sync", *NOT_CHOICES),
    "segment_bytes": (None, 0, 65535, 65537, 2**32, *NOT_WHOLE),
    "on_control": ("ignore", *NOT_CHOICES),
    "clock": (5, 0, True, "now", [1]),
}


@pytest.mark.parametrize("argument", OPEN)
def test_bad_argument_of_open_is_refused_and_nothing_is_made(tmp_path, argument):
    for value in OPEN[argument]:
        options = {"path": tmp_path / "new", argument: value}
        with pytest.raises(KalosError) as caught:
            SessionStore.open(**options)
        assert NEEDLE not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert set(inspect.signature(SessionStore.open).parameters) == set(OPEN)


def test_unknown_options_are_type_errors_of_python(store):
    for call in ("append", "turns", "sessions"):
        with pytest.raises(TypeError):
            getattr(store, call)("s", unknown=1)


def test_error_of_a_callers_clock_or_iterator_is_its_own_and_changes_nothing(store, tmp_path):
    def broken():
        yield {"role": "user", "token_ids": [1]}
        raise RuntimeError("not from here")

    before = state(store)
    with pytest.raises(RuntimeError, match="not from here"):
        store.extend("s", broken())
    assert state(store) == before
