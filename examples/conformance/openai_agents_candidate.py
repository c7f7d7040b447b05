"""OpenAI Agents SDK: `SQLiteSession`, read through the `Runner` as a model would be asked."""

import asyncio
import sqlite3
import threading
from importlib.metadata import version

from agents import Agent, ModelResponse, RunConfig, Runner, Usage, set_tracing_disabled
from agents.exceptions import UserError
from agents.memory import SessionSettings, SQLiteSession
from agents.memory.session import SessionABC
from agents.models.interface import Model
from number_text import ids_of, text_of
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from kalos_ctx.conformance import Candidate, StoredTurn

set_tracing_disabled(True)  # or the SDK would send what it saw to OpenAI


class Recorder(Model):
    """A model that keeps what it was asked."""

    def __init__(self):
        self.asked = []

    async def get_response(self, system_instructions, input, *args, **options):
        """Keep the input and answer with nothing."""
        self.asked = input
        text = ResponseOutputText(text="", type="output_text", annotations=[], logprobs=[])
        answer = ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[text]
        )
        return ModelResponse(output=[answer], usage=Usage(), response_id=None)

    def stream_response(self, *args, **options):
        """Not asked for."""
        raise NotImplementedError


class ReadOnly(SessionABC):
    """A session as it is: what the run would append to it is not kept."""

    def __init__(self, session):
        self.session = session
        self.session_id = session.session_id
        self.session_settings = session.session_settings

    async def get_items(self, limit=None):
        """Return what the session has."""
        return await self.session.get_items(limit)

    async def add_items(self, items):
        """Keep nothing."""

    async def pop_item(self):
        """Remove nothing."""

    async def clear_session(self):
        """Remove nothing."""


def items_of(role, token_ids, calls, call):
    """Return a turn as items; each call of a turn has the tokens of the turn."""
    text = text_of(token_ids)
    if call is not None:
        return [{"type": "function_call_output", "call_id": call, "output": text}]
    if calls:
        return [
            {"type": "function_call", "call_id": one, "name": "f", "arguments": text}
            for one in calls
        ]
    return [{"role": role, "content": text}]


def turns_of(items):
    """Return items as turns: calls in a row are one."""
    turns = []
    before = None
    for item in items:
        kind = item.get("type")
        if kind != "function_call" or before != "function_call":
            text = item.get("content") or item.get("output") or item.get("arguments") or ""
            turns.append(StoredTurn(role_of(item), ids_of(text)))
        before = kind
    return turns


def role_of(item):
    """Return the role that an item has as a turn."""
    roles = {"function_call": "assistant", "function_call_output": "tool"}
    return item.get("role") or roles[item["type"]]


class SQLiteSessionCandidate(Candidate):
    """`SQLiteSession` in a file."""

    name = "OpenAI Agents SQLiteSession"
    version = version("openai-agents")
    settings = (
        "a database file; a window is the input that the Runner gives to a model with "
        "SessionSettings(limit=...), which counts items"
    )
    capabilities = frozenset(
        {"turn_limit", "groups", "read", "reopen", "readers", "writers", "threads", "delete",
         "rollback"}
    )  # fmt: skip
    refusals = (ValueError, UserError, sqlite3.Error)

    def __init__(self, setup):
        self.path = setup.folder / "chats.db"
        self.open = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def wait(self, coroutine):
        """Run a coroutine on the candidate's loop, as an application with one would."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def session(self, name):
        """Return a session, opened once."""
        if name not in self.open:
            self.open[name] = SQLiteSession(name, self.path)
        return self.open[name]

    def append(self, session, role, token_ids, *, calls=(), call=None, group=None):
        """Add the items of a turn."""
        self.wait(self.session(session).add_items(items_of(role, token_ids, calls, call)))

    def assemble(self, session, max_tokens, reserve=0, *, max_turns=None):
        """Return what a model would be given."""
        model = Recorder()
        self.wait(
            Runner.run(
                Agent("a", model=model),
                [],
                session=ReadOnly(self.session(session)),
                run_config=RunConfig(session_settings=SessionSettings(limit=max_turns)),
            )
        )
        return [number for turn in turns_of(model.asked) for number in turn.token_ids]

    def close(self):
        """Close all sessions."""
        for session in self.open.values():
            session.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def turns(self, session, *, tenant=""):
        """Return the items."""
        return turns_of(self.wait(self.session(session).get_items()))

    def rollback(self, session, to):
        """Pop the newest items."""
        while len(self.wait(self.session(session).get_items())) > to:
            self.wait(self.session(session).pop_item())

    def delete(self, session, *, tenant=""):
        """Clear a session."""
        self.wait(self.session(session).clear_session())


def factory(setup):
    """Make a candidate of a folder."""
    return SQLiteSessionCandidate(setup)
