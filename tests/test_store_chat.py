"""SessionStore with a real tokenizer and chat template (Qwen3): framing, control, binding."""

import random

import numpy as np
import pytest
from helpers.chat_data import BUNDLED, QWEN3, fields_of, qwen3_tokenizer, template_text
from helpers.hf_render import compile_template
from helpers.real_data import dialogues
from helpers.store_files import all_bytes, content_digest

from kalos_ctx.errors import (
    ControlTokenInContent,
    FingerprintMismatch,
    IdempotencyConflict,
    InvalidArgument,
    InvalidTokenId,
    TemplateUnsafe,
)
from kalos_ctx.store import SessionStore
from kalos_ctx.tokens import TokenCodec

IM_START, IM_END, THINK = 151644, 151645, 151667


@pytest.fixture(scope="session")
def codec():
    """Load the bundled tokenizer with its template once; loading takes a second."""
    return TokenCodec.load(QWEN3)


@pytest.fixture(scope="session")
def chatml_codec():
    """Load the same tokenizer with another template."""
    return TokenCodec.load(QWEN3, template_text("chatml"))


@pytest.fixture
def open_chat(codec, monkeypatch, store_path):
    """Return a function that opens the store with the tokenizer loaded already."""
    monkeypatch.setattr(TokenCodec, "load", lambda tokenizer, template=None: codec)

    def open_chat(mode="a", **options):
        return SessionStore.open(store_path, mode, tokenizer=QWEN3, **options)

    return open_chat


@pytest.fixture
def store(open_chat):
    """Return an empty store with the bundled tokenizer."""
    with open_chat() as store:
        yield store


def stored(store, session="s"):
    return [i for turn in store.turns(session) for i in turn.token_ids.tolist()]


def test_open_by_path_frames_with_the_template_beside_the_tokenizer(store_path, codec):
    with SessionStore.open(store_path, tokenizer=str(QWEN3)) as store:
        store.append("s", "user", "Hello, wörld!")
        [turn] = store.turns("s")
        text = store.codec.decode(turn.token_ids)
    assert text == "<|im_start|>user\nHello, wörld!<|im_end|>\n"
    assert turn.text == "Hello, wörld!"
    assert store.codec.fingerprint == codec.fingerprint


def test_open_tokenizer_object_without_a_template_stores_bare_text(store_path):
    tokenizer = qwen3_tokenizer()
    with SessionStore.open(store_path, tokenizer=tokenizer) as store:
        store.append("s", "user", "Hello there")
        assert stored(store) == tokenizer.encode("Hello there").ids
        store.append("s", "assistant", token_ids=[5, 6])
        assert store.turns("s", 1)[0].token_ids.tolist() == [5, 6]


def test_open_other_template_in_place_of_the_one_beside(store_path):
    with SessionStore.open(store_path, tokenizer=QWEN3, template=template_text("chatml")) as store:
        store.append("s", "user", "x")
        store.append("s", "user", "y")
        assert "<|im_start|>user\ny<|im_end|>" in store.codec.decode(stored(store))


@pytest.mark.parametrize("template", ["{{ messages }}", "{% for"])
def test_open_template_that_cannot_hold_is_refused_and_makes_nothing(store_path, template):
    with pytest.raises(TemplateUnsafe):
        SessionStore.open(store_path, tokenizer=QWEN3, template=template)
    assert not store_path.exists()


def test_real_conversations_equal_the_whole_rendering(store, codec):
    """Turn by turn through the store, and encoded at once, with zero tolerance."""
    render = compile_template(template_text(BUNDLED), now=0)
    tokenizer = qwen3_tokenizer()
    chosen = [
        messages
        for messages in (dialogue["messages"] for dialogue in dialogues())
        if 4 <= len(messages) <= 60 and {m["role"] for m in messages} <= {"user", "assistant"}
    ][::12]
    assert len(chosen) > 10
    for i, messages in enumerate(chosen):
        for message in messages:
            extra = fields_of(message)
            store.append(f"s{i}", message["role"], message["content"], metadata=extra or None)
        if messages[-1]["role"] != "user":
            messages = messages[:-1]
            store.rollback(f"s{i}", len(messages))
        assert stored(store, f"s{i}") == tokenizer.encode(render(messages, ask=False)).ids


def test_b28_extra_fields_survive_a_reopen_and_still_frame(open_chat):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "ä", "n": 1}}}
    metadata = {"tool_calls": [call], "mine": {"deep": [1, 2, {"z": None}]}}
    with open_chat() as store:
        store.append("s", "user", "call it")
        store.append("s", "assistant", None, metadata=metadata)
    with open_chat() as store:
        store.append("s", "tool", "42", metadata={"name": "f", "tool_call_id": "c1"})
        turns = store.turns("s")
        assert turns[1].metadata == metadata
        assert turns[1].text is None
        assert turns[2].metadata == {"name": "f", "tool_call_id": "c1"}
        assert '"name": "f"' in store.codec.decode(turns[1].token_ids)
        assert store._core.units(b"", b"s") == [(0, False), (1, False), (1, False)]


def test_b30_reply_ids_are_stored_as_given_and_never_encoded_again(store, codec):
    """An odd way to spell a word: encoding the decoded text would give other IDs."""
    odd = [i for letter in "Hello" for i in codec.encode_text(letter).tolist()]
    assert codec.encode_text(codec.decode(odd)).tolist() != odd
    store.append("s", "assistant", token_ids=odd)
    [turn] = store.turns("s")
    assert turn.text is None
    ids = turn.token_ids.tolist()
    at = ids.index(odd[0])
    assert ids[at : at + len(odd)] == odd
    assert codec.decode(ids) == "<|im_start|>assistant\nHello<|im_end|>\n"


def test_framed_ids_are_stored_bare(store):
    ids = [IM_START, 77091, 198, 9707, IM_END, 198]
    store.append("s", "assistant", token_ids=ids, framed=True)
    assert stored(store) == ids


@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
@pytest.mark.parametrize("control", [IM_START, IM_END])
def test_b29_control_ids_in_content_are_refused_with_their_place(store, role, control, store_path):
    before = content_digest(store_path)
    with pytest.raises(ControlTokenInContent, match="2"):
        store.append("s", role, token_ids=[5, 6, control, 6])
    for call in (
        lambda: store.set_segment("s", "p", token_ids=[control], role="system"),
        lambda: store.add_passages("c", [[1.0]], token_ids=[[5, control]]),
        lambda: store.extend("s", [{"role": role, "token_ids": [control]}]),
    ):
        with pytest.raises(ControlTokenInContent):
            call()
    assert content_digest(store_path) == before


def test_markup_ids_stand_in_assistant_turns_alone(store):
    store.append("s", "assistant", token_ids=[THINK, 5])
    for role in ("user", "system", "tool"):
        with pytest.raises(ControlTokenInContent):
            store.append("s", role, token_ids=[THINK, 5])
    with pytest.raises(ControlTokenInContent):
        store.add_passages("c", [[1.0]], token_ids=[[THINK]])


def test_b29_random_contents_never_hold_control_tokens(store, codec):
    pieces = [
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
        "user\n",
        "<|",
        "|>",
        "ä",
        " ",
        "<tool_call>",
    ]
    rng = random.Random(29)
    rows = [
        {"role": "user", "content": "x" + "".join(rng.choices(pieces, k=rng.randint(1, 6)))}
        for _ in range(500)
    ]
    store.extend("s", rows)
    forbidden = np.array(sorted(codec.structural_ids | codec.markup_ids))
    frame = {IM_START: 1, IM_END: 1}
    for turn, row in zip(store.turns("s"), rows, strict=True):
        held = turn.token_ids[np.isin(turn.token_ids, forbidden)].tolist()
        assert {i: held.count(i) for i in held} == frame
        assert row["content"].strip() in codec.decode(turn.token_ids)


def test_on_control_refuse_raises_for_text_and_literal_keeps_it(open_chat):
    with open_chat(on_control="refuse") as store:
        with pytest.raises(ControlTokenInContent):
            store.append("s", "user", "a <|im_end|> b")
        with pytest.raises(ControlTokenInContent):
            store.add_passages("c", [[1.0]], texts=["<|im_end|>"])
        assert store.append("s", "user", "a < |im_end| > b") == 0
    with open_chat() as store:
        assert store.append("s", "user", "a <|im_end|> b") == 1
        assert store.turns("s", 1)[0].text == "a <|im_end|> b"


def test_b114_vocabulary_is_the_tokenizers(open_chat, codec):
    with open_chat() as store:
        assert store.stats()["vocab_size"] == codec.vocab_size
        with pytest.raises(InvalidTokenId, match=r"token_ids\[1\]"):
            store.append("s", "user", token_ids=[5, codec.vocab_size])


def test_vocab_size_larger_than_the_tokenizers_is_kept(open_chat, codec):
    with pytest.raises(InvalidArgument, match="vocab_size"):
        open_chat(vocab_size=codec.vocab_size - 1)
    with open_chat(vocab_size=151_936) as store:
        store.append("s", "user", token_ids=[151_935], framed=True)
    with open_chat() as store:
        store.append("s", "user", token_ids=[151_935], framed=True)
        with pytest.raises(InvalidTokenId):
            store.append("s", "user", token_ids=[151_935])
        assert store.stats()["vocab_size"] == 151_936
    with pytest.raises(FingerprintMismatch, match="vocab_size"):
        open_chat(vocab_size=152_000)


# ---- Binding ------------------------------------------------------------------------------------


def test_store_of_another_template_is_refused(chatml_codec, open_chat, store_path, monkeypatch):
    with open_chat() as store:
        store.append("s", "user", "x")
    before = all_bytes(store_path)
    monkeypatch.setattr(TokenCodec, "load", lambda tokenizer, template=None: chatml_codec)
    for mode in ("a", "r"):
        with pytest.raises(FingerprintMismatch):
            SessionStore.open(store_path, mode, tokenizer=QWEN3, template="chatml")
    for name, raw in all_bytes(store_path).items():
        if "/" in name and not name.endswith("index"):
            assert raw == before[name]


def test_store_without_a_tokenizer_is_bound_while_it_is_empty(open_chat, store_path):
    SessionStore.open(store_path).close()
    with open_chat() as store:
        store.append("s", "user", "x")
        assert store.stats()["fingerprint"] == store.codec.fingerprint.hex()
    with open_chat("r") as store:
        assert store.turns("s")[0].text == "x"


def test_store_of_bare_ids_is_not_bound_later(open_chat, store_path):
    with SessionStore.open(store_path) as store:
        store.append("s", "user", token_ids=[1])
    for mode in ("a", "r"):
        with pytest.raises(FingerprintMismatch):
            open_chat(mode)


def test_bound_store_opened_without_its_tokenizer_takes_framed_ids_alone(open_chat, store_path):
    with open_chat() as store:
        store.append("s", "user", "x")
    with SessionStore.open(store_path) as store:
        assert store.turns("s")[0].text == "x"
        for options in ({"token_ids": [5]}, {"content": "x"}):
            with pytest.raises(FingerprintMismatch):
                store.append("s", "user", **options)
        assert store.append("s", "user", token_ids=[IM_START, 5, IM_END], framed=True) == 1
        with pytest.raises(InvalidTokenId):
            store.append("s", "user", token_ids=[200_000], framed=True)


def test_content_without_a_tokenizer_is_refused(store_path):
    with SessionStore.open(store_path) as store:
        for call in (
            lambda: store.append("s", "user", "text"),
            lambda: store.set_segment("s", "p", "text"),
            lambda: store.set_segment("s", "p", "[]", role="tools"),
        ):
            with pytest.raises(InvalidArgument, match=r"tokenizer|template"):
                call()
        assert store.sessions().items == []


# ---- Turns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [{"content": ""}, {"token_ids": []}, {}, {"content": None}])
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_b76_empty_turn_is_refused_and_later_turns_work(
    open_chat, store_path, empty, with_tokenizer
):
    with open_chat() if with_tokenizer else SessionStore.open(store_path) as store:
        for role in ("user", "assistant"):
            with pytest.raises(InvalidArgument):
                store.append("s", role, **empty)
        assert store.append("s", "user", token_ids=[5]) == 0
        assert store.count("s") == 1


@pytest.mark.parametrize("text", ["a\0b", "😀", "a\u0308", "\ufeff", "\u202e", " \n ", "e" * 999])
def test_b74_odd_text_comes_back_unchanged(store, text):
    store.append("s", "user", "x" + text, metadata={text: text}, group=text, key=text)
    [turn] = store.turns("s")
    assert (turn.text, turn.metadata, turn.group) == ("x" + text, {text: text}, text)


def test_b74_lone_surrogate_is_refused_in_content_and_kept_in_metadata(store):
    with pytest.raises(InvalidArgument, match="surrogate"):
        store.append("s", "user", "a\ud800b")
    store.append("s", "user", "a", metadata={"x": "\ud800"})
    assert store.turns("s")[0].metadata == {"x": "\ud800"}


def test_key_of_a_turn_whose_framing_depends_on_the_one_before(store):
    """A tool result beside another is framed otherwise; the retry is not mistaken for a new one."""
    rows = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "calling"},
        {"role": "tool", "content": "first", "key": "t1"},
        {"role": "tool", "content": "second", "key": "t2"},
        {"role": "tool", "token_ids": [5, 6], "key": "t3"},
    ]
    assert store.extend("s", rows) == [0, 1, 2, 3, 4]
    before = stored(store)
    for _ in range(2):
        assert [store.append("s", **rows[i]) for i in (2, 3, 4)] == [2, 3, 4]
        assert store.extend("s", rows[2:]) == [2, 3, 4]
    assert stored(store) == before
    with pytest.raises(IdempotencyConflict):
        store.append("s", "tool", "other", key="t2")


def test_key_retried_where_the_template_would_refuse_the_turn_now(open_chat):
    """The turn stands already: its place after itself is nobody's question."""
    with open_chat() as store:
        store.append("s", "user", "x", key="k")
        original = store.codec.encode_turn
        try:
            store.codec.encode_turn = None
            assert store.append("s", "user", "x", key="k") == 0
        finally:
            store.codec.encode_turn = original


def test_new_turns_behind_known_ones_are_framed_after_what_is_stored(store, codec):
    store.append("s", "user", "q")
    store.append("s", "tool", "r1", key="a")
    store.extend("s", [{"role": "tool", "content": "r1", "key": "a"}])
    store.extend(
        "s",
        [{"role": "tool", "content": "r1", "key": "a"}, {"role": "tool", "content": "r2"}],
    )
    store.extend("t", [{"role": "user", "content": "q"}])
    store.extend("t", [{"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}])
    assert stored(store) == stored(store, "t")


def test_passages_take_text_ids_or_neither(store, codec):
    ids = store.add_passages(
        "c", np.eye(3), texts=["Hello there", None, "kept"], token_ids=[None, None, [5, 6]]
    )
    found = store.passages("c", ids)
    assert found[0].token_ids.tolist() == codec.encode_text("Hello there").tolist()
    assert [p.token_ids.tolist() for p in found[1:]] == [[], [5, 6]]
    assert [p.text for p in found] == ["Hello there", None, "kept"]


# ---- Segments and summaries of text -------------------------------------------------------------


def test_segments_and_summaries_of_text_are_framed(store, codec):
    store.append("s", "user", "x")
    store.set_segment("s", "sys", "Be brief.")
    store.set_segment("s", "late", "Now.", placement="end", role="user")
    store.summarize("s", 0, 1, "They said x.")
    segments = store.segments("s")
    texts = {name: codec.decode(one["token_ids"]) for name, one in segments.items()}
    assert texts["sys"] == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert texts["late"] == "<|im_start|>user\nNow.<|im_end|>\n"
    assert segments["sys"]["text"] == "Be brief."
    [summary] = store.summaries("s")
    assert codec.decode(summary["token_ids"]) == "<|im_start|>system\nThey said x.<|im_end|>\n"


def test_tools_segment_is_rendered_by_the_template(store, codec):
    schema = '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'
    store.set_segment("s", "tools", schema, role="tools")
    one = store.segments("s")["tools"]
    assert (one["role"], one["text"]) == ("tools", schema)
    assert "<tools>" in codec.decode(one["token_ids"])
    for options in ({"placement": "end"}, {"token_ids": [5]}):
        with pytest.raises(InvalidArgument):
            store.set_segment("s", "x", None if "token_ids" in options else schema, role="tools",
                              **options)  # fmt: skip
