"""The proof, at load, that a chat template can be encoded turn by turn.

Probe conversations are rendered and encoded whole at every prompt that ends in a user turn, and
compared, text and IDs, with the head and the turns put together as a store puts them together. What
fails on plain turns refuses the template; what fails with tools or with system text refuses those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kalos_ctx.errors import TemplateUnsafe
from kalos_ctx.sandbox import TemplateRaised
from kalos_ctx.template import (
    EXTRA_FIELDS,
    MARK,
    ChatTemplate,
    Message,
    TurnContext,
    TurnText,
    assistant,
    calling,
    result,
    user,
)

# Edges that merge with framing: white space at either end, digits, joined characters, JSON, markup.
CONTENTS = (
    "Hello",
    " leads with a space",
    "ends with a line\n",
    "two\n\nparagraphs",
    "\n\nstarts with lines",
    "12345 and 67890",
    "naïve café, 日本語, 😀",
    '{"a": [1, 2]}',
    "<b>bold</b>",
    "ends with spaces   ",
    "'s",
    "a",
)
PAIRS = 2 * len(CONTENTS)
SYSTEM = f"Obey {MARK}."
# Two clocks, in another minute, day, month and year.
CLOCKS = (86_400.0 * 365, 86_400.0 * 9876 + 12_345.0)
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": f"Looks up {MARK}.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "What to look up."}},
            "required": ["key"],
        },
    },
}


def contexts(messages: Sequence[Message]) -> Iterator[tuple[Message, TurnContext | None]]:
    """Yield each message with the context that a store has of it."""
    previous: Message | None = None
    call: dict[str, Any] | None = None
    for message in messages:
        context = None
        if previous is not None:
            extra = {k: previous[k] for k in EXTRA_FIELDS if k in previous}
            context = TurnContext(previous["role"], extra, call)
        yield message, context
        if message["role"] == "assistant":
            call = {k: message[k] for k in EXTRA_FIELDS if k in message}
        previous = message


def check(
    template: ChatTemplate,
    messages: Sequence[Message],
    system: Sequence[Message] = (),
    tools: Sequence[Any] | None = None,
) -> None:
    """Raise `TemplateUnsafe` unless the turns make up the whole at every user-ended prompt."""
    head = template.head_text(system, tools=tools)
    turns: list[TurnText] = []
    ids, text = template.encode(head), head
    for place, (message, context) in enumerate(contexts(messages)):
        turn = template.turn_text(message, context)
        turns.append(turn)
        ids = ids[: len(ids) - turn.trim] + template.encode(turn.text)
        if message["role"] != "user":
            continue
        shown = template.whole([*system, *messages[: place + 1]], tools=tools)
        if not shown.startswith(head):
            raise TemplateUnsafe(
                f"text before the first turn changes with the conversation (at {place + 1} turns)"
            )
        if not any(turn.trim for turn in turns) and shown != head + "".join(
            turn.text for turn in turns
        ):
            raise TemplateUnsafe(
                f"a turn is rendered differently in a longer conversation (at {place + 1} turns)"
            )
        if template.encode(shown) != ids:
            raise TemplateUnsafe(
                f"tokens merge across the edge of a turn (seen at {place + 1} turns)"
            )
    text = template.whole([*system, *messages], tools=tools) + template.generation_prompt
    if template.encode(text) != ids + template.encode(template.generation_prompt):
        raise TemplateUnsafe("the generation prompt's tokens merge with the turn before it")


def plain_probe() -> list[Message]:
    """Return a conversation of plain turns, long enough to notice counting."""
    made: list[Message] = []
    for number in range(PAIRS):
        made.append(user(CONTENTS[number % len(CONTENTS)]))
        made.append(assistant(CONTENTS[(5 * number + 3) % len(CONTENTS)]))
    return [*made, user()]


def tool_probes(template: ChatTemplate) -> list[list[Message]]:
    """Return conversations with tool loops of one, several and parallel calls."""
    call, other = template.probe_call(), template.probe_call("other_tool")
    loop = [user(), calling(call), result(), assistant()]
    chain = [user(" q\n"), calling(call), result(), calling(other), result("{}\n"), assistant()]
    parallel = [user(), calling(call), result("1\n"), result(" 2"), result("3"), assistant()]
    return [
        [*loop, *chain, user(), assistant(), *loop, user()],
        [*parallel, *loop, *parallel, user()],
        [*loop[:3], user("wait"), assistant(), user()],
    ]


def prove(template: ChatTemplate) -> None:
    """Prove the template on the probes and mark what it cannot do.

    Raises
    ------
    TemplateUnsafe
        Plain turns, or plain turns under a system message, cannot be encoded one by one.
    """
    plain = plain_probe()
    check(template, plain)
    _check_clock(template, plain)
    for row in ([user(), user("b"), user("c")], [user(), assistant(), assistant("b"), user()]):
        try:
            list(map(template.turn_text, *zip(*contexts(row), strict=True)))
        except TemplateUnsafe:
            continue  # refused when such a turn is encoded
        check(template, row)
    _prove_head(template, plain)
    _prove_tools(template)


def _check_clock(template: ChatTemplate, plain: Sequence[Message]) -> None:
    bodies = set()
    try:
        for now in CLOCKS:
            head = template.head_text([], now=now)
            bodies.add(template.whole(plain, now=now)[len(head) :])
    except TemplateUnsafe:
        bodies.clear()
    if len(bodies) != 1:
        raise TemplateUnsafe("the clock stands in the turns, not only in the head")


def _prove_head(template: ChatTemplate, plain: Sequence[Message]) -> None:
    system = {"role": "system", "content": SYSTEM}
    template.head_problem = _head_problem(template, plain, system)
    if template.head_problem is None:
        template.many_head_turns = _takes_two(template, system, template.head_text([system]))
        template.takes_developer = _contains_mark(template, [{**system, "role": "developer"}])
    _prove_head_tools(template, [system] if template.head_problem is None else [], plain)


def _head_problem(template: ChatTemplate, plain: Sequence[Message], system: Message) -> str | None:
    """Return why system text cannot stand in a head of its own, None where it can."""
    try:
        first = template.whole([system, user()])
    except TemplateRaised:
        return "the template refuses a system message"
    except TemplateUnsafe as error:
        return str(error)
    if MARK not in first:
        return "the template drops a system message"
    if not template.whole([system, user(), assistant(), user()]).startswith(first):
        raise TemplateUnsafe("system text moves to a later turn as the conversation grows")
    try:
        head = template.head_text([system])
    except TemplateUnsafe as error:
        return str(error)
    if MARK not in head:
        return "the template puts system text behind the first turn's start"
    check(template, plain, [system])
    return None


def _takes_two(template: ChatTemplate, system: Message, head: str) -> bool:
    second = {"role": "system", "content": f"Second {MARK}x."}
    try:
        both = template.head_text([system, second])
    except TemplateUnsafe:
        return False
    return both.startswith(head) and f"{MARK}x" in both[len(head) :]


def _contains_mark(template: ChatTemplate, messages: Sequence[Message]) -> bool:
    try:
        return MARK in template.head_text(messages)
    except TemplateUnsafe:
        return False


def _prove_head_tools(
    template: ChatTemplate, system: Sequence[Message], plain: Sequence[Message]
) -> None:
    try:
        if MARK not in template.whole([user()], tools=[TOOL]):
            template.tools_problem = "the template does not render tool schemas"
            return
        check(template, plain[-5:], system, [TOOL])
        check(template, plain[-5:], [], [TOOL])
    except TemplateUnsafe as error:
        template.tools_problem = str(error)


def _prove_tools(template: ChatTemplate) -> None:
    call, other = template.probe_call(), template.probe_call("other_tool")
    calls = [user(), calling(call), assistant(), user(" q\n"), calling(other), user(), assistant()]
    try:
        check(template, [*calls, user()])
    except TemplateRaised:
        pass  # it wants a result after each call; the probes with results decide
    except TemplateUnsafe as error:
        template.call_problem = str(error)
    try:
        for probe in tool_probes(template):
            check(template, probe)
    except TemplateUnsafe as error:
        template.tool_problem = str(error)
    if template.call_problem is None:
        shown = template.turn_text(calling(call), TurnContext("user")).text
        template.renders_calls = "probe_tool" in shown
        template.has_live = template.renders_calls and _differs_live(template)


def _differs_live(template: ChatTemplate) -> bool:
    """Say whether reasoning of a running tool loop is shown and later dropped."""
    template.has_live = True
    for fields in ({"reasoning_content": MARK}, {"thinking": MARK}, {"content": "Thinks."}):
        message = calling(template.probe_call(), **fields)
        try:
            if template.turn_text(message, TurnContext("user")).live is not None:
                return True
        except TemplateUnsafe:
            continue  # it has no such field, or takes no content beside a call
    return False


def stands_inside(template: ChatTemplate, role: str) -> bool:
    """Say whether a turn of `role` may stand between an answer and the next question."""
    row = [user(), assistant(), {"role": role, "content": MARK}, user()]
    try:
        check(template, row)
    except TemplateUnsafe:
        return False
    return True
