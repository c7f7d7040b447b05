"""What a chat template makes of one turn, of the head and of the prompt's end: text, not tokens.

Notation, as used in the comments below: W(messages) is the whole rendering with a generation prompt
asked for, less that generation prompt. T(m) is the text that one turn adds to it. `U`, `A`, `C`,
`R` and `S` are probe messages: user, assistant, assistant with a tool call, tool result, system.

T(m) is a difference of whole renderings that end in a user turn, because that is the form in which
the turn stands in all later history: W(before + m + after) without W(before) in front and without
T(after) behind. Templates differ in how much they look at; `before` is the shortest context whose
result is that of a longer one on the probes, and `kalos_ctx.proof` compares whole conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kalos_ctx.errors import InvalidArgument, InvalidType, TemplateUnsafe
from kalos_ctx.firewall import AddedTokens
from kalos_ctx.sandbox import GuardedTemplate, TemplateRaised

Message = dict[str, Any]
EXTRA_FIELDS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
HEAD_ROLES = ("system", "developer")
FIXED_CLOCK = 1_700_000_000.0
# Strings that a template cannot take for anything else and that survive trimming and JSON.
MARK = "Kq7zKalosProbe"
CALL: Mapping[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "probe_tool", "arguments": {"key": "value"}},
}
CALLED: Mapping[str, Any] = {"tool_calls": [CALL]}


def user(content: str = "What is this?") -> Message:
    return {"role": "user", "content": content}


def assistant(content: str = "An answer.", **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def calling(*calls: Mapping[str, Any], content: str = "", **fields: Any) -> Message:
    return assistant(content, tool_calls=[dict(call) for call in calls or (CALL,)], **fields)


def result(content: str = "42", **fields: Any) -> Message:
    return {
        "role": "tool",
        "content": content,
        "tool_call_id": CALL["id"],
        "name": CALL["function"]["name"],
        **fields,
    }


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What is known of the turns before the one that is encoded.

    Attributes
    ----------
    role : str
        Role of the turn just before.
    extra : mapping, optional
        Template fields of that turn (`tool_calls` matters).
    call : mapping, optional
        For tool turns: template fields of the nearest earlier assistant turn, where that is not the
        turn just before.
    """

    role: str
    extra: Mapping[str, Any] | None = None
    call: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TurnText:
    """A turn as rendered in history.

    `text` is encoded in one piece. `live` is the form in a running tool loop where it differs.
    `pre` and `post` are what the template puts around plain content here. The turn before loses
    `trim` tokens at its end.
    """

    text: str
    pre: str
    post: str
    trim: int = 0
    live: str | None = None


@dataclass(frozen=True, slots=True)
class _Frame:
    """What is learned once for a kind of turn in a context."""

    before: tuple[Message, ...]
    prefix: str  # W(before), less what the next turn of this kind takes away from it
    back: str  # the end of `prefix` that is encoded again with the turn, "" nearly always
    trim: int
    pre: str
    post: str


def normalize_call(call: object, as_text: bool) -> Message:
    """Return a tool call as templates take it: arguments as a mapping, or as JSON text.

    OpenAI's format has the arguments as JSON text, most templates want the mapping behind it; users
    of transformers convert with `json.loads`, and so is it done here. A template that joins the
    arguments to text gets JSON text.
    """
    if not isinstance(call, Mapping):
        raise InvalidType(f"tool_calls must hold mappings (got {type(call).__name__})")
    whole = {"type": "function", **call}
    function = whole.get("function")
    if function is None:
        function = {k: whole.pop(k) for k in ("name", "arguments") if k in whole}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidType("a tool call must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not as_text:
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = arguments
        arguments = parsed if isinstance(parsed, Mapping) else arguments
    elif not isinstance(arguments, str) and as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    whole["function"] = {**function, "arguments": arguments}
    return whole


class ChatTemplate:
    """The text side of a chat template, learned from its own renderings.

    Parameters
    ----------
    source : str
        Jinja text.
    tokens : AddedTokens
    encode : callable
        Text to a list of IDs, as the tokenizer does by default; used to prove joins.
    special_tokens : mapping of str to str
        `bos_token`, `eos_token` and so on, for templates that name them.

    Raises
    ------
    TemplateUnsafe
        The template cannot be taken apart turn by turn, and the reason.
    """

    def __init__(
        self,
        source: str,
        tokens: AddedTokens,
        encode: Callable[[str], list[int]],
        special_tokens: Mapping[str, str],
    ) -> None:
        self.guarded = GuardedTemplate(source)
        self.tokens = tokens
        self.encode = encode
        self.special_tokens = dict(special_tokens)
        self.tool_problem: str | None = None
        self.call_problem: str | None = None
        self.head_problem: str | None = None
        self.tools_problem: str | None = None
        self.many_head_turns = False
        self.takes_developer = False
        self.renders_calls = False
        self.has_live = False
        self.arguments_as_text = self._takes_text_arguments()
        self.generation_prompt = self._learn_generation_prompt()
        self.user_text = self._learn_user_text()
        self._tails: dict[bool, tuple[list[Message], str]] = {}
        self.template_head = self.head_text([])
        self._frame = lru_cache(maxsize=256)(self._learn_frame)

    # Whole renderings.

    def render(
        self,
        messages: Sequence[Message],
        *,
        ask: bool = True,
        tools: Sequence[Any] | None = None,
        now: float | None = None,
        input_chars: int = 0,
    ) -> str:
        """Return the whole rendering of `messages`; `ask`: with a generation prompt."""
        variables = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": ask,
            **self.special_tokens,
        }
        # What is learned holds for ever, so it is learned at a fixed time; only heads have a date.
        return self.guarded.render(variables, FIXED_CLOCK if now is None else now, input_chars)

    def whole(self, messages: Sequence[Message], **options: Any) -> str:
        """Return W(messages), for messages that end in a user turn."""
        text = self.render(messages, **options)
        if not text.endswith(self.generation_prompt):
            raise TemplateUnsafe("the template's generation prompt changes with the conversation")
        return text[: len(text) - len(self.generation_prompt)]

    def _align(self, text: str, offset: int) -> int:
        """Return the last edge of an added token in `text` at or before `offset`."""
        for match in self.tokens.find(text):
            if match.start() < offset < match.end():
                return match.start()
        return offset

    def _takes_text_arguments(self) -> bool:
        try:
            self.render([user(), calling(), result(), assistant(), user()], now=0.0)
        except TemplateRaised:
            return False
        except TemplateUnsafe:
            text = normalize_call(CALL, as_text=True)
            try:
                self.render([user(), calling(text), result(), assistant(), user()], now=0.0)
            except TemplateUnsafe:
                return False
            return True
        return False

    def _learn_generation_prompt(self) -> str:
        asked, unasked = self.render([user()]), self.render([user()], ask=False)
        if asked.startswith(unasked):
            return asked[len(unasked) :]
        # Phi-3 closes the text where no generation prompt is asked for.
        return asked[self._align(asked, _common(asked, unasked)) :]

    def _learn_user_text(self) -> str:
        """Return T(U), so that what stands before it is known too."""
        one = self.whole([user()])
        try:
            two = self.whole([user(), user()])
        except TemplateRaised:
            # The roles must alternate: what ends the first and the second user turn alike.
            two = self.whole([user(), assistant(), user()])
            common = _common(one[::-1], two[len(one) :][::-1])
            edges = [e for e in (*self.tokens.boundaries(one), len(one)) if e >= len(one) - common]
            return one[min(edges) :]
        if not two.startswith(one):
            raise TemplateUnsafe(
                "text before the end of the conversation changes when a turn follows it"
            )
        text = two[len(one) :]
        if not one.endswith(text):
            raise TemplateUnsafe("the first user turn is rendered differently from a later one")
        if not text:
            raise TemplateUnsafe("the template renders nothing for a user turn")
        return text

    # One turn.

    def message(self, role: str, content: str, extra: Mapping[str, Any] | None) -> Message:
        """Return the message as the template gets it; fields without a value are left out."""
        made: Message = {"role": role, "content": content}
        for field in EXTRA_FIELDS if extra else ():
            value = extra.get(field) if extra else None
            if value is None or (field == "tool_calls" and not value):
                continue
            if field == "tool_calls":
                if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
                    raise InvalidType(
                        f"tool_calls must be a list of mappings (got {type(value).__name__})"
                    )
                value = [normalize_call(call, self.arguments_as_text) for call in value]
            elif not isinstance(value, str):
                raise InvalidType(f"{field} must be a str (got {type(value).__name__})")
            made[field] = value
        return made

    def turn_text(
        self, message: Message, previous: TurnContext | None, input_chars: int = 0
    ) -> TurnText:
        """Return T(message) after `previous`.

        Raises
        ------
        TemplateUnsafe
            The template refuses the turn, drops it, or renders it differently in a longer context.
        """
        role, has_calls = message["role"], "tool_calls" in message
        problem = self.tool_problem if role == "tool" else self.call_problem
        if problem is not None and (has_calls or role == "tool"):
            what = "a tool result" if role == "tool" else "a tool call"
            raise TemplateUnsafe(f"{what} cannot be a turn of its own: {problem}")
        frame = self.frame(role, previous, has_calls, message.get("name"))
        tail, tail_text = self.tail(role, has_calls)
        try:
            text = self.whole([*frame.before, message, *tail], input_chars=input_chars)
        except TemplateRaised:
            raise TemplateUnsafe(f"the template refuses this {role} turn here") from None
        cut = self._cut(text, frame.prefix, tail_text, role)
        if not cut:
            raise TemplateUnsafe(
                f"the template renders nothing for a turn of role {role!r}; "
                "store it under a role that it renders"
            )
        live = None
        if has_calls and self.has_live and self._may_differ_live(message):
            shown = self._live_text(frame, message, cut, input_chars)
            live = None if shown == cut else frame.back + shown
        return TurnText(frame.back + cut, frame.back + frame.pre, frame.post, frame.trim, live)

    def plain_frame(
        self, role: str, previous: TurnContext | None, name: str | None = None
    ) -> TurnText:
        """Return the framing of plain content of `role`: `pre`, `post` and `trim`, without text."""
        if role == "tool" and self.tool_problem is not None:
            raise TemplateUnsafe(f"a tool result cannot be a turn of its own: {self.tool_problem}")
        frame = self.frame(role, previous, False, name)
        return TurnText("", frame.back + frame.pre, frame.post, frame.trim)

    @staticmethod
    def _cut(text: str, prefix: str, tail: str, role: str) -> str:
        if not text.startswith(prefix) or not text.endswith(tail):
            raise TemplateUnsafe(
                f"a {role} turn changes text before or behind it, so it cannot stand by itself"
            )
        return text[len(prefix) : len(text) - len(tail)]

    def tail(self, role: str, has_calls: bool) -> tuple[list[Message], str]:
        """Return the probe messages that put a turn into history, and their text."""
        if role == "user":
            return [], ""
        if not has_calls:
            return [user()], self.user_text
        if True not in self._tails:
            # A finished tool loop: gpt-oss drops its reasoning only after a final answer.
            answer = self.frame("assistant", TurnContext("user"), False)
            text = self.whole([*answer.before, assistant(), user()])
            after = [assistant(), user()], text[len(answer.prefix) :]
            try:
                self.whole([user(), calling(self.probe_call()), *after[0]])
            except TemplateRaised:
                after = [user()], self.user_text
            self._tails[True] = after
        return self._tails[True]

    def probe_call(self, name: str = "probe_tool") -> Message:
        function = {**CALL["function"], "name": name}
        return normalize_call({**CALL, "function": function}, self.arguments_as_text)

    @staticmethod
    def _may_differ_live(message: Message) -> bool:
        return bool(
            message["content"] or message.get("reasoning_content") or message.get("thinking")
        )

    def _live_text(self, frame: _Frame, message: Message, cut: str, input_chars: int) -> str:
        """Return T(message) while a tool loop runs: W(before + m + R) less what R adds."""
        calls = message["tool_calls"]
        reply = result(tool_call_id=calls[0].get("id", CALL["id"]))
        closed = [*frame.before, message, reply, assistant(), user()]
        answer = self.frame("assistant", TurnContext("tool"), False)
        after = self.whole([*answer.before, assistant(), user()])[len(answer.prefix) :]
        whole = self.whole(closed, input_chars=input_chars)
        reply_text = self._cut(whole, frame.prefix + cut, after, "tool")
        running = self.render([*frame.before, message, reply], input_chars=input_chars)
        end = reply_text + self.generation_prompt
        return self._cut(running, frame.prefix, end, "assistant")

    # Contexts.

    def frame(
        self, role: str, previous: TurnContext | None, has_calls: bool, name: str | None = None
    ) -> _Frame:
        """Return what is known of turns of `role` after `previous`; `name`: of a result's tool."""
        kind = "calls" if has_calls else role
        before = "none" if previous is None else previous.role
        calls: tuple[str, ...] = ()
        if role == "tool":
            source = None if previous is None else previous.call
            if previous is not None and previous.role == "assistant" and previous.extra:
                source = previous.extra
            calls = self._call_names(source) or ((name,) if name else ())
            before = "tool" if before == "tool" else "calls"
            frame = self._frame(kind, before, calls)
            if not calls and CALL["function"]["name"] in frame.pre:
                raise TemplateUnsafe(
                    "the template writes the tool's name into a result: "
                    "give the calls of the assistant turn before it, or the result's own name"
                )
            return frame
        elif before == "assistant" and previous is not None and previous.extra:
            before = "calls" if previous.extra.get("tool_calls") else before
        return self._frame(kind, before, calls)

    def _call_names(self, source: Mapping[str, Any] | None) -> tuple[str, ...]:
        calls = (source or {}).get("tool_calls") or ()
        return tuple(normalize_call(call, False)["function"]["name"] for call in calls)

    def _contexts(self, kind: str, before: str, calls: tuple[str, ...]) -> Iterator[list[Message]]:
        """Yield candidates for the messages before a turn, shortest first."""
        made = calling(*(self.probe_call(name) for name in calls or ("probe_tool",)))
        call = calling(self.probe_call())
        if kind == "tool":
            yield [user(), made, *([result()] if before == "tool" else [])]
            return
        yield [] if kind == "user" else [user()]
        full: dict[str, list[Message]] = {
            "none": [] if kind == "user" else [user()],
            "user": [user()],
            "assistant": [user(), assistant()],
            "calls": [user(), call],
            "tool": [user(), call, result()],
        }
        yield full.get(before, [user()])

    def _learn_frame(self, kind: str, before: str, calls: tuple[str, ...]) -> _Frame:
        role = "assistant" if kind == "calls" else kind
        candidates = list(self._contexts(kind, before, calls))
        frames = [self._frame_in(role, kind, context) for context in candidates]
        # The short context serves only where it gives what the full one gives.
        probe = calling(self.probe_call()) if kind == "calls" else {"role": role, "content": MARK}
        texts = [self._probe_text(frame, probe, kind) for frame in frames]
        best = frames[0] if texts[0] == texts[-1] and not frames[-1].trim else frames[-1]
        if best.trim and before != "tool":
            raise TemplateUnsafe(f"a {role} turn takes away text from a {before} turn before it")
        return best

    def _probe_text(self, frame: _Frame, probe: Message, kind: str) -> str:
        tail, text = self.tail(probe["role"], kind == "calls")
        whole = self.whole([*frame.before, probe, *tail])
        return frame.back + self._cut(whole, frame.prefix, text, probe["role"])

    def _frame_in(self, role: str, kind: str, before: list[Message]) -> _Frame:
        prefix = self._prefix(before)
        tail, tail_text = self.tail(role, False)
        probes = []
        for content in (MARK, "x" + MARK):
            probe: Message = {"role": role, "content": content}
            if role == "tool":
                probe = result(content)
            probes.append(self.whole([*before, probe, *tail]))
        start = len(prefix)
        if not probes[0].startswith(prefix):
            if role != "tool":
                raise TemplateUnsafe(
                    f"the template moves or merges a {role} turn that stands inside a conversation"
                )
            start = self._align(prefix, min(_common(prefix, text) for text in probes))
        lost, kept = prefix[start:], prefix[:start]
        text = self._cut(probes[0], kept, tail_text, role)
        pre, found, post = text.partition(MARK)
        if not found or MARK in post:
            raise TemplateUnsafe(f"the template does not render the content of a {role} turn")
        trim, back = self._learn_trim(kept, lost, text) if lost else (0, "")
        return _Frame(tuple(before), kept, back, trim, pre, post)

    def _prefix(self, before: list[Message]) -> str:
        """Return W(before), closed as it stands before a user turn."""
        if before and before[-1]["role"] == "user":
            return self.whole(before)
        text = self.whole([*before, user()])
        if not text.endswith(self.user_text):
            raise TemplateUnsafe("a user turn is rendered differently after other turns")
        return text[: len(text) - len(self.user_text)]

    def _learn_trim(self, kept: str, lost: str, text: str) -> tuple[int, str]:
        """Return how many tokens the turn before loses, and which kept text is encoded again.

        Where the loss does not start at an added token, the last kept token may have been merged
        with it or with what follows now; then that token is given up as well.
        """
        encode = self.encode
        closed, joined = encode(kept + lost), encode(kept + text)
        for taken in range(5):
            back = "" if not taken else _tail_text(encode, kept, taken)
            for trim in range(1, 9 + taken):
                if closed[:-trim] + encode(back + text) == joined:
                    return trim, back
        raise TemplateUnsafe("adjacent tool results share a block whose tokens cannot be cut")

    # The head.

    def head_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        now: float | None = None,
        input_chars: int = 0,
    ) -> str:
        """Return what stands before the first turn: W(messages + U) without T(U)."""
        try:
            text = self.whole([*messages, user()], tools=tools, now=now, input_chars=input_chars)
        except TemplateRaised:
            raise TemplateUnsafe("the template refuses a system message") from None
        if not text.endswith(self.user_text):
            raise TemplateUnsafe("the template puts head text into the first user turn")
        return text[: len(text) - len(self.user_text)]

    def head_key(self, now: float) -> tuple[str, ...]:
        """Return the head's dates at `now`; an empty tuple where it has none."""
        self.guarded.state.now = now
        return tuple(self.guarded.strftime_now(f) for f in sorted(self.guarded.clock_formats))


def _common(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _tail_text(encode: Callable[[str], list[int]], text: str, tokens: int) -> str:
    """Return the shortest end of `text` that encodes to its last `tokens` IDs."""
    last = encode(text)[-tokens:]
    for length in range(1, 64):
        if encode(text[-length:]) == last:
            return text[-length:]
    raise InvalidArgument("no end of the text has these tokens")


__all__ = ["ChatTemplate", "TurnContext", "TurnText"]
