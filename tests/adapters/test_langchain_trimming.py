"""Trimming: LangChain's own examples, then what Kalos's rules add to them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import trim_messages as langchain_trim

import kalos_ctx as kalos
from kalos_ctx.adapters.langchain import trim_messages

TEXT = "This is a 4 token text. The full message is 10 tokens."
EXAMPLE = [
    SystemMessage(TEXT),
    HumanMessage(TEXT, id="first"),
    AIMessage(
        [
            {"type": "text", "text": "This is the FIRST 4 token block."},
            {"type": "text", "text": "This is the SECOND 4 token block."},
        ],
        id="second",
    ),
    HumanMessage(TEXT, id="third"),
    AIMessage(TEXT, id="fourth"),
]


def ten_a_message(messages):
    """Count as LangChain's documentation does: 3 + 4 a text + 3."""
    return sum(6 + 4 * (1 if isinstance(m.content, str) else len(m.content)) for m in messages)


def words(messages):
    return sum(1 + len(str(message.text).split()) for message in messages)


def call(*ids):
    return AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": one} for one in ids])


def result(name, text="a\nb\nc"):
    return ToolMessage(text, tool_call_id=name)


LANGCHAIN_EXAMPLES = [
    {"max_tokens": 30, "strategy": "first"},
    {"max_tokens": 30, "strategy": "first", "allow_partial": True},
    {"max_tokens": 30, "strategy": "first", "allow_partial": True, "end_on": "human"},
    {"max_tokens": 30, "strategy": "last", "allow_partial": True},
    {"max_tokens": 30, "strategy": "last", "include_system": True},
    {"max_tokens": 40, "strategy": "last", "include_system": True, "allow_partial": True},
    {"max_tokens": 30, "strategy": "last", "end_on": "human"},
    {"max_tokens": 30, "strategy": "last", "include_system": True, "end_on": "human"},
    {"max_tokens": 40, "strategy": "last", "start_on": "human"},
    {"max_tokens": 60, "strategy": "last", "include_system": True, "start_on": HumanMessage},
    {"max_tokens": 1000},
    {"max_tokens": 0},
]


@pytest.mark.parametrize("options", LANGCHAIN_EXAMPLES, ids=str)
def test_messages_without_calls_are_cut_as_langchain_cuts_them(options):
    theirs = langchain_trim(EXAMPLE, token_counter=ten_a_message, **options)
    assert trim_messages(EXAMPLE, token_counter=ten_a_message, **options) == theirs


def test_every_kind_of_counter_is_taken():
    def of_message(message: BaseMessage) -> int:
        return 10

    model = FakeListChatModel(responses=[], custom_get_token_ids=lambda text: [0] * len(text))
    for counter, most in ((len, 2), (of_message, 20), ("approximate", 40), (model, 140)):
        mine = trim_messages(EXAMPLE, max_tokens=most, token_counter=counter)
        assert (
            mine == EXAMPLE[-2:] == langchain_trim(EXAMPLE, max_tokens=most, token_counter=counter)
        )


def test_without_messages_it_is_a_runnable():
    trimmer = trim_messages(max_tokens=2, token_counter=len)
    assert trimmer.invoke(EXAMPLE) == EXAMPLE[-2:]


@pytest.mark.parametrize("most", range(7))
def test_call_and_results_are_kept_or_dropped_together(most):
    chat = [HumanMessage("u"), call("a", "b"), result("a"), result("b"), AIMessage("done")]
    kept = trim_messages(chat, max_tokens=most, token_counter=len)
    assert kept == {0: [], 4: chat[1:], 5: chat, 6: chat}.get(most, chat[4:])


def test_result_without_an_earlier_call_never_stands():
    chat = [result("gone"), HumanMessage("u"), result("a"), call("a")]
    assert trim_messages(chat, max_tokens=9, token_counter=len) == [chat[1], chat[3]]


def test_repeated_call_id_belongs_to_the_nearest_call():
    chat = [call("a"), result("a"), HumanMessage("u"), call("a"), result("a")]
    assert trim_messages(chat, max_tokens=3, token_counter=len) == chat[2:]


def test_cut_inside_a_group_keeps_the_call_and_cuts_results():
    chat = [HumanMessage("u"), call("a", "b"), result("a"), result("b"), AIMessage("done")]
    for strategy, texts in (("last", ["c", "a\nb\nc"]), ("first", ["a\nb\nc", "a\n"])):
        part = chat[1:] if strategy == "last" else chat[1:4]
        kept = trim_messages(
            part,
            max_tokens=words(part) - 2,
            token_counter=words,
            allow_partial=True,
            strategy=strategy,
        )
        assert kept[0] == chat[1]
        assert [one.content for one in kept if one.type == "tool"] == texts
    assert chat[2].content == "a\nb\nc"


def test_group_whose_call_alone_does_not_fit_is_dropped():
    chat = [call("a"), result("a"), HumanMessage("u")]
    kept = trim_messages(chat, max_tokens=3, token_counter=words, allow_partial=True)
    assert kept == chat[2:]


def test_call_that_waits_for_its_result_is_never_cut():
    waiting = AIMessage("one\ntwo", tool_calls=[{"name": "f", "args": {}, "id": "a"}])
    assert trim_messages([waiting], max_tokens=2, token_counter=words, allow_partial=True) == []
    assert trim_messages([waiting], max_tokens=3, token_counter=words) == [waiting]


def test_start_and_end_remove_whole_units():
    chat = [call("a"), result("a"), HumanMessage("u"), AIMessage("x"), call("b"), result("b")]
    start = trim_messages(chat, max_tokens=9, token_counter=len, start_on="human")
    end = trim_messages(chat, max_tokens=9, token_counter=len, end_on=("human", AIMessage))
    assert (start, end) == (chat[2:], chat[:4])
    assert trim_messages(chat, max_tokens=9, token_counter=len, start_on="system") == []


def test_system_message_that_does_not_fit_raises():
    with pytest.raises(kalos.BudgetExceeded, match="takes 1 tokens more") as caught:
        trim_messages(
            [SystemMessage("a b")], max_tokens=2, token_counter=words, include_system=True
        )
    assert (caught.value.over, caught.value.budget) == (1, 2)


def test_text_is_cut_by_the_splitter_that_is_given():
    class ByWord:
        def split_text(self, text):
            return [word + " " for word in text.split()]

    for splitter in (ByWord(), ByWord().split_text):
        kept = trim_messages(
            [HumanMessage("one two three")],
            max_tokens=3,
            token_counter=words,
            allow_partial=True,
            text_splitter=splitter,
        )
        assert [one.content for one in kept] == ["two three "]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "middle"}, "strategy must be"),
        ({"strategy": "first", "start_on": "human"}, "start_on is for"),
        ({"strategy": "first", "include_system": True}, "include_system is for"),
        ({"token_counter": "exact"}, "token_counter must be"),
        ({"token_counter": 3}, "token_counter must be"),
        ({"max_tokens": 2.5}, "max_tokens must be an int"),
        ({"start_on": [3]}, "start_on must hold"),
        ({"text_splitter": 3}, "text_splitter must be"),
    ],
)
def test_wrong_argument_is_a_value_error(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        trim_messages(EXAMPLE, **{"max_tokens": 9, "token_counter": len, **options})
    assert isinstance(caught.value, kalos.InvalidArgument)


MESSAGES = st.lists(
    st.one_of(
        st.sampled_from([HumanMessage("u v"), AIMessage("x\ny\nz"), SystemMessage("s")]),
        st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(
            lambda ids: call(*ids)
        ),
        st.sampled_from("abc").map(result),
        st.just(HumanMessage([{"type": "text", "text": "a\nb"}, {"type": "image"}])),
    ),
    max_size=12,
)


@given(
    messages=MESSAGES,
    most=st.integers(0, 40),
    last=st.booleans(),
    partial=st.booleans(),
    uneven=st.booleans(),
    kind=st.sampled_from([None, "human", "ai", ("human", "tool")]),
)
def test_any_list_keeps_the_bound_and_no_result_loses_its_call(
    messages, most, last, partial, uneven, kind
):
    def count(given):
        # A counter that is not a sum, and not even larger for longer lists.
        return words(given) + (random.Random(len(given)).randrange(6) if uneven else 0)

    kept = trim_messages(
        messages,
        max_tokens=most,
        token_counter=count,
        strategy="last" if last else "first",
        allow_partial=partial,
        **({"start_on": kind} if last else {"end_on": kind}),
    )
    assert not kept or count(kept) <= most
    called = set()
    for message in kept:
        assert message.type != "tool" or message.tool_call_id in called
        called |= {one["id"] for one in getattr(message, "tool_calls", ())}
    if kept and kind:
        assert (kept[0] if last else kept[-1]).type in kind
