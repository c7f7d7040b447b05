"""Chats from files into a store and back: formats, refusals, and imports that are repeated."""

import gzip
import io
import json
from unittest import mock

import pytest
from helpers.chat_data import QWEN3
from helpers.real_data import dialogues
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from kalos_ctx import chat_files
from kalos_ctx.conversations import conversation
from kalos_ctx.exporting import export_session, export_sessions, message
from kalos_ctx.importing import import_file
from kalos_ctx.store import SessionStore

HI = {"role": "user", "content": "hi"}
HELLO = {"role": "assistant", "content": "hello"}


@pytest.fixture
def plain_tokenizer():
    """Return a tokenizer of single bytes' worth of words, fast to load, without a template."""
    vocab = {"hi": 0, "hello": 1, "bye": 2, "[UNK]": 3}
    return Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))


@pytest.fixture
def store(store_path, plain_tokenizer):
    with SessionStore.open(store_path, tokenizer=plain_tokenizer) as opened:
        yield opened


@pytest.fixture(scope="module")
def real_store(tmp_path_factory):
    """Return a store with Qwen3's tokenizer; each test has a tenant of its own in it."""
    path = tmp_path_factory.mktemp("real") / "chats.kalos"
    with SessionStore.open(path, tokenizer=str(QWEN3)) as opened:
        yield opened


@pytest.fixture
def tenant(request):
    return request.node.name


def written(path, records, opener=open):
    with opener(path, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)
    return path


def chat(name, *messages):
    return {"id": name, "messages": list(messages)}


def reasons(report):
    return [(refusal.line, refusal.reason) for refusal in report.refused]


def taken(store, session):
    return [(turn.role, turn.text) for turn in store.turns(session)]


def values(text):
    data = text if isinstance(text, bytes) else text.encode()
    return list(chat_files.records(io.BytesIO(data)))


# ---- Real conversations -------------------------------------------------------------------------


def test_import_then_export_gives_the_real_conversations(real_store, tenant, tmp_path):
    wanted = [*dialogues()[:6], *dialogues()[-40:]]
    report = import_file(real_store, written(tmp_path / "chats.jsonl", wanted), tenant=tenant)
    assert reasons(report) == []
    assert report.turns == sum(len(one["messages"]) for one in wanted)
    assert list(export_sessions(real_store, tenant=tenant)) == [
        {"id": one["id"], "messages": one["messages"]} for one in wanted
    ]


def test_import_of_an_export_gives_the_same_tokens(real_store, tenant, tmp_path):
    first = written(tmp_path / "a.jsonl", [*dialogues()[:2], *dialogues()[-5:]])
    import_file(real_store, first, tenant=tenant)
    exported = list(export_sessions(real_store, tenant=tenant))
    import_file(real_store, written(tmp_path / "b.jsonl", exported), tenant="again")
    assert list(export_sessions(real_store, tenant="again")) == exported
    for one in exported:
        old, new = (real_store.turns(one["id"], tenant=name) for name in (tenant, "again"))
        assert [t.token_ids.tolist() for t in old] == [t.token_ids.tolist() for t in new]


def test_import_repeated_changes_nothing(real_store, tenant, tmp_path):
    wanted = [*dialogues()[:2], *dialogues()[-10:]]
    path = written(tmp_path / "chats.jsonl", wanted)
    import_file(real_store, path, tenant=tenant)
    before = list(export_sessions(real_store, tenant=tenant, full=True))
    report = import_file(real_store, path, tenant=tenant)
    assert (report.sessions, report.grown, report.turns) == (0, 0, 0)
    assert report.unchanged == len(wanted)
    assert list(export_sessions(real_store, tenant=tenant, full=True)) == before


def test_import_of_a_cut_file_then_the_whole_gives_the_whole(real_store, tenant, tmp_path):
    wanted = dialogues()[-6:]
    cut = [*wanted[:2], {**wanted[2], "messages": wanted[2]["messages"][:3]}]
    import_file(real_store, written(tmp_path / "chats.jsonl", cut), tenant=tenant)
    path = written(tmp_path / "chats.jsonl", wanted)
    report = import_file(real_store, path, tenant=tenant)
    assert (report.sessions, report.grown, report.unchanged) == (3, 1, 2)
    assert [one["messages"] for one in export_sessions(real_store, tenant=tenant)] == [
        one["messages"] for one in wanted
    ]


def test_import_sharegpt_gives_what_the_openai_form_gives(store, tmp_path):
    sharegpt = {
        "id": "s",
        "system": "bye",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
    }
    import_file(store, written(tmp_path / "s.json", [sharegpt]))
    assert taken(store, "s") == [("system", "bye"), ("user", "hi"), ("assistant", "hello")]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_import_json_array_takes_every_item(store, tmp_path, indent, packed):
    text = json.dumps([chat(f"c{i}", HI, HELLO) for i in range(300)], indent=indent)
    path = tmp_path / "chats.json"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    report = import_file(store, path)
    assert (report.sessions, report.turns, report.refused) == (300, 600, [])


# ---- Roles and fields ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("User", "user"), ("human", "user"), ("gpt", "assistant"), ("bot", "assistant"),
        ("developer", "developer"), ("observation", "tool"), ("function", "function"),
    ],
)  # fmt: skip
def test_b79_known_role_maps(given, role):
    record = {"conversations": [{"from": given, "value": "x"}]}
    assert conversation(record, "n").turns[0]["role"] == role


def test_b79_unknown_role_is_refused_with_its_line(store, tmp_path):
    bad = chat("bad", HI, {"role": "narrator", "content": "x"})
    report = import_file(store, written(tmp_path / "a.jsonl", [chat("a", HI), bad, chat("b", HI)]))
    assert reasons(report) == [(2, "messages[1] has an unknown role 'narrator'")]
    assert store.sessions().items == ["a", "b"]


def test_b79_developer_stands_as_system_where_the_template_has_none(real_store, tenant, tmp_path):
    record = chat("d", {"role": "developer", "content": "Be brief."}, HI)
    path = written(tmp_path / "a.jsonl", [record])
    report = import_file(real_store, path, tenant=tenant)
    assert (report.as_system, reasons(report)) == (1, [])
    assert export_session(real_store, "d", tenant=tenant)["messages"] == [
        {"role": "system", "content": "Be brief."},
        HI,
    ]


def test_import_keeps_fields_group_time_and_metadata(store, tmp_path):
    turn = {
        **HI, "name": "Ann", "weight": 0.5, "group": 7, "created_at": 12.5,
        "metadata": {"role": "captain", "x": [1, None]},
    }  # fmt: skip
    import_file(store, written(tmp_path / "a.jsonl", [chat("a", turn, HELLO)]))
    stored = store.turns("a")[0]
    assert stored.metadata == {"name": "Ann", "weight": 0.5, "role": "captain", "x": [1, None]}
    assert (stored.group, stored.created_at) == (7, 12.5)
    assert message(stored, full=True) == {
        **HI, "name": "Ann", "weight": 0.5, "x": [1, None], "metadata": {"role": "captain"},
        "group": 7, "created_at": 12.5,
    }  # fmt: skip
    again = written(tmp_path / "b.jsonl", export_sessions(store, full=True))
    assert import_file(store, again).unchanged == 1


def test_import_tools_pins_them_and_exports_them(real_store, tenant, tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = written(tmp_path / "a.jsonl", [{**chat("a", HI), "tools": tools}])
    import_file(real_store, path, tenant=tenant)
    assert export_session(real_store, "a", tenant=tenant) == {
        "id": "a",
        "messages": [HI],
        "tools": tools,
    }
    assert import_file(real_store, path, tenant=tenant).unchanged == 1


def test_import_without_id_names_the_session_after_file_and_line(store, tmp_path):
    records = [{"messages": [HI]}, {"id": 12, "messages": [HI]}]
    path = written(tmp_path / "chats.jsonl", records)
    import_file(store, path)
    assert store.sessions().items == ["chats.jsonl:1", "12"]
    assert import_file(store, path).unchanged == 2


def test_import_text_parts_become_one_text_and_others_are_refused(store, tmp_path):
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "hi"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    path = written(
        tmp_path / "a.jsonl",
        [chat("a", {**HI, "content": parts}), chat("b", {**HI, "content": image})],
    )
    report = import_file(store, path)
    assert taken(store, "a") == [("user", "hihi")]
    assert reasons(report) == [(2, "messages[0] has a content part that is not text")]


def test_import_name_that_is_not_utf8_survives_export_and_import(store, tmp_path):
    store.append(b"\xffx", "user", "hi")
    path = written(tmp_path / "a.jsonl", export_sessions(store))
    assert import_file(store, path).unchanged == 1
    assert store.sessions().items == [b"\xffx"]


def test_import_token_ids_only_where_they_are_trusted(store, store_path, tmp_path):
    store.append("a", "user", token_ids=[0, 2], framed=True)
    path = written(tmp_path / "a.jsonl", export_sessions(store))
    other = SessionStore.open(tmp_path / "other.kalos", vocab_size=4)
    with other:
        refused = import_file(other, path)
        assert "--trust-token-ids" in refused.refused[0].reason
        assert other.sessions().items == []
        assert import_file(other, path, trust_token_ids=True).turns == 1
        assert other.turns("a")[0].token_ids.tolist() == [0, 2]
        assert import_file(other, path, trust_token_ids=True).unchanged == 1


# ---- Refusals -----------------------------------------------------------------------------------

REFUSED = {
    "not json": (b"{", "not JSON"),
    "nul": (b'{"id": "a\0"}', "the line holds a NUL byte"),
    "not utf-8": (b'{"id": "\xff"}', "the line is not UTF-8 at byte 9"),
    "no object": (b"12", "a conversation must be a JSON object (got a number)"),
    "neither": (b'{"id": "a"}', "a conversation must have 'messages' or 'conversations'"),
    "no list": (b'{"messages": {}}', "'messages' must be a list of messages (got an object)"),
    "empty list": (b'{"messages": []}', "'messages' must be a list of messages (got an empty one)"),
    "no role": (b'{"messages": [{"content": "x"}]}', "messages[0] has no role"),
    "no content": (b'{"messages": [{"role": "user"}]}', "messages[0] has no content"),
    "empty": (b'{"messages": [{"role": "user", "content": ""}]}', "messages[0] is empty"),
    "id": (b'{"id": [], "messages": [{"role": "user", "content": "x"}]}', "'id' must be a string"),
    "long id": (
        json.dumps({"id": "x" * 2000, "messages": [HI]}).encode(),
        "'id' must have 1 to 1024 bytes (got 2000)",
    ),
    "surrogate": (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        "messages[0]: content has a lone surrogate",
    ),
    "nan": (
        b'{"messages": [{"role": "user", "content": "x", "w": NaN}]}',
        "messages[0]: metadata must hold",
    ),
    "tools": (
        b'{"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "x"}]}',
        "tools need a tokenizer with a chat template",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_import_names_line_and_reason_and_goes_on(store, tmp_path, case):
    line, reason = REFUSED[case]
    path = tmp_path / "a.jsonl"
    good = [json.dumps(chat(name, HI)).encode() for name in ("first", "last")]
    path.write_bytes(b"\n".join([good[0], b"", line, good[1]]))
    report = import_file(store, path)
    assert [refusal.line for refusal in report.refused] == [3]
    assert report.refused[0].reason.startswith(reason)
    assert store.sessions().items == ["first", "last"]


def test_import_deep_nesting_is_refused(store, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": ' + b"[" * 200_000 + b"\n" + json.dumps(chat("a", HI)).encode())
    report = import_file(store, path)
    assert reasons(report)[0][0] == 1
    assert store.sessions().items == ["a"]


def test_import_never_quotes_content(store, tmp_path):
    secret = "the secret sentence"
    records = [
        chat("a", {"role": "user", "content": secret, "x": float("nan")}),
        chat("b", {"role": "user", "content": secret}, {"role": "narrator", "content": secret}),
        chat("c", {"role": "user", "content": [secret]}),
    ]
    path = written(tmp_path / "a.jsonl", records)
    report = import_file(store, path)
    assert len(report.refused) == 3
    assert secret not in str(report.refused)


def test_import_strict_stops_at_the_first_refusal(store, tmp_path):
    path = written(tmp_path / "a.jsonl", [chat("a", HI), chat("b"), chat("c", HI)])
    report = import_file(store, path, strict=True)
    assert [refusal.line for refusal in report.refused] == [2]
    assert store.sessions().items == ["a"]


def test_import_other_chat_of_the_same_name_is_refused(store, tmp_path):
    records = [chat("a", HI, HELLO), chat("a", HELLO, HI), chat("a", HI)]
    report = import_file(store, written(tmp_path / "a.jsonl", records))
    assert reasons(report) == [
        (2, "the store has a session of this name whose turn 0 is another"),
        (3, "the store has a session of this name with more turns, 2 (the source has 1)"),
    ]
    assert len(store.turns("a")) == 2


def test_import_tenants_are_apart(store, tmp_path):
    path = written(tmp_path / "a.jsonl", [chat("a", HI)])
    import_file(store, path, tenant="t")
    assert store.count("a") == 0
    assert store.count("a", tenant="t") == 1


# ---- Streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("text", ['{"a": "ä"}\n\n {"b": 2}', '\n[ {"a": "ä"},\n\n {"b": 2} ]\n'])
def test_records_do_not_depend_on_the_size_of_reads(monkeypatch, size, text):
    monkeypatch.setattr(chat_files, "CHUNK_NBYTES", size)
    first = 1 if text.startswith("{") else 2
    assert values(text) == [(first, {"a": "ä"}), (first + 2, {"b": 2})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(
    items=st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
    size=st.sampled_from([1, 3, 64]),
)
def test_records_equal_what_json_reads(items, indent, ascii_only, size):
    array = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    lines = "\n".join(json.dumps(item, ensure_ascii=ascii_only) for item in items)
    with mock.patch.object(chat_files, "CHUNK_NBYTES", size):
        assert [value for _, value in values(array)] == items
        assert values(lines) == list(enumerate(items, 1))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[{"a": 1}\n {"b": 2}]', 2, "the JSON array is broken here"),
        ('[{"a": 1},\n]', 2, "not JSON"),
        ('[{"a": 1}]\n x', 2, "something stands behind the JSON array"),
        ('[{"a": 1},\n {"b": ', 2, "not JSON"),
        (b'[{"a": 1},\n {"b": "\xff"}]', 1, "the file is not UTF-8"),
    ],
)
def test_records_broken_array_keeps_what_stands_before(monkeypatch, text, line, reason):
    monkeypatch.setattr(chat_files, "CHUNK_NBYTES", 4)
    *good, (at, refused) = values(text)
    assert good in ([(1, {"a": 1})], [])
    assert at == line
    assert str(refused).startswith(reason)


def test_records_line_beyond_the_bound_is_refused_and_passed_over(monkeypatch):
    monkeypatch.setattr(chat_files, "CHUNK_NBYTES", 16)
    monkeypatch.setattr(chat_files, "MAX_RECORD_NBYTES", 64)
    found = values('{"a": 1}\n{"b": "' + "x" * 500 + '"}\n{"c": 3}\n')
    assert [line for line, _ in found] == [1, 2, 3]
    assert found[0][1] == {"a": 1}
    assert isinstance(found[1][1], chat_files.Refused)
    assert found[2][1] == {"c": 3}


def test_records_damaged_gzip_is_refused():
    data = bytearray(gzip.compress(b'{"a": 1}\n' * 1000))
    *good, (_, refused) = values(bytes(data[:-20]))
    assert isinstance(refused, chat_files.Refused)
    assert all(value == {"a": 1} for _, value in good)


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf", b"[]", b" [ ] \n"])
def test_records_of_an_empty_file_are_none(data):
    assert values(data) == []


def test_records_byte_order_mark_is_passed_over():
    assert values(b'\xef\xbb\xbf{"a": 1}') == [(1, {"a": 1})]


def test_import_tells_the_bytes_it_has_read(store, tmp_path):
    path = written(tmp_path / "a.jsonl.gz", [chat("a", HI)] * 50, gzip.open)
    done = []
    import_file(store, path, on_bytes=done.append)
    assert done[-1] == path.stat().st_size
    assert done == sorted(done)
