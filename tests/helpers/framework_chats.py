"""Chats that other frameworks write themselves, and what they are in a store.

Each `write_*` needs its framework, which is imported inside. The main suite reads files that these
functions wrote once (tests/golden/make_imports.py).
"""

import asyncio
import json
import sqlite3

SESSION = "trip/42"
QUESTION = "Wetter in Köln, und in Ulm?"
ANSWER = "In Köln 21 °C, in Ulm keine Auskunft."
CALLS = (("call_k", "Köln"), ("call_u", "Ulm"))
RESULTS = {"Köln": "21 °C", "Ulm": "Error: no station"}


def call(call_id, city):
    """Return a call of the tool in OpenAI's chat form."""
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def expected(developer="system"):
    """Return the chat in OpenAI's form, as every source gives it, without its other fields."""
    return [
        {"role": developer, "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call(*one) for one in CALLS]},
        *(
            {"role": "tool", "content": RESULTS[city], "tool_call_id": call_id}
            for call_id, city in CALLS
        ),
        {"role": "assistant", "content": ANSWER},
    ]


def essence(messages):
    """Return exported messages with the fields of `expected` alone."""
    fields = ("role", "content", "tool_calls", "tool_call_id")
    return [{name: one[name] for name in fields if name in one} for one in messages]


def langchain_messages():
    """Return the chat as LangChain's own messages."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    return [
        SystemMessage("Be brief."),
        HumanMessage(QUESTION, id="m1"),
        AIMessage(
            "",
            tool_calls=[
                {"name": "weather", "args": {"city": city}, "id": call_id}
                for call_id, city in CALLS
            ],
            additional_kwargs={"reasoning_content": "Two cities."},
        ),
        ToolMessage(RESULTS["Köln"], tool_call_id="call_k", name="weather"),
        ToolMessage(RESULTS["Ulm"], tool_call_id="call_u", name="weather", status="error"),
        AIMessage(
            [{"type": "text", "text": ANSWER}],
            usage_metadata={"input_tokens": 9, "output_tokens": 9, "total_tokens": 18},
        ),
    ]


# ---- Redis --------------------------------------------------------------------------------------


def write_redis_lists(url, session=SESSION):
    """Write the chat as langchain-community does."""
    from langchain_community.chat_message_histories import RedisChatMessageHistory

    RedisChatMessageHistory(session, url=url).add_messages(langchain_messages())


def write_redis_documents(url, session=SESSION):
    """Write the chat as langchain-redis does, but for the search index, which few servers have."""
    from langchain_redis import RedisChatMessageHistory
    from redisvl.index import SearchIndex

    class WithoutSearch(RedisChatMessageHistory):
        def _create_search_index(self):
            schema = {
                "index": {"name": "i", "prefix": self.key_prefix, "storage_type": "json"},
                "fields": [{"name": "session_id", "type": "tag", "path": "$.session_id"}],
            }
            self.index = SearchIndex.from_dict(schema, redis_client=self.redis_client)

    history = WithoutSearch(session, redis_url=url)
    history.add_messages(langchain_messages())
    history.redis_client.close()


# ---- SQLite -------------------------------------------------------------------------------------


def write_agent_session(path, session=SESSION):
    """Run an agent of the OpenAI Agents SDK with a scripted model and its own session."""
    from agents import (
        Agent,
        ModelResponse,
        Runner,
        SQLiteSession,
        Usage,
        function_tool,
        set_tracing_disabled,
    )
    from agents.models.interface import Model
    from openai.types.responses import (
        ResponseFunctionToolCall,
        ResponseFunctionWebSearch,
        ResponseOutputMessage,
        ResponseOutputText,
        ResponseReasoningItem,
    )

    @function_tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return RESULTS[city]

    def calls():
        return [
            ResponseReasoningItem(id="rs_1", type="reasoning", summary=[]),
            ResponseFunctionWebSearch(
                id="ws_1",
                type="web_search_call",
                status="completed",
                action={"type": "search", "query": "Köln"},
            ),
            *(
                ResponseFunctionToolCall(
                    call_id=call_id,
                    name="weather",
                    arguments=json.dumps({"city": city}, ensure_ascii=False),
                    type="function_call",
                )
                for call_id, city in CALLS
            ),
        ]

    def answer():
        text = ResponseOutputText(text=ANSWER, type="output_text", annotations=[])
        return [
            ResponseOutputMessage(
                id="msg_1", content=[text], role="assistant", status="completed", type="message"
            )
        ]

    class Scripted(Model):
        steps = iter((calls, answer))

        async def get_response(self, *args, **kwargs):
            return ModelResponse(output=next(self.steps)(), usage=Usage(), response_id=None)

        def stream_response(self, *args, **kwargs):
            raise NotImplementedError

    set_tracing_disabled(True)

    async def talk():
        memory = SQLiteSession(session, path)
        await memory.add_items([{"role": "developer", "content": "Be brief."}])
        agent = Agent("guide", model=Scripted(), tools=[weather])
        await Runner.run(agent, QUESTION, session=memory)
        items = await memory.get_items()
        memory.close()
        return items

    return asyncio.run(talk())


def write_checkpoints(path, session=SESSION):
    """Run a graph of LangGraph with a scripted model, a real tool node and SQLite checkpoints."""
    from langchain_core.tools import tool
    from langgraph.checkpoint.sqlite import SqliteSaver
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        if city == "Ulm":
            raise ValueError("no station")
        return RESULTS[city]

    system, question, calls, _, _, answer = langchain_messages()

    def model(state):
        return {"messages": [calls if len(state["messages"]) == 2 else answer]}

    def after(state):
        return "tools" if state["messages"][-1].tool_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    node = ToolNode([weather], handle_tool_errors=lambda error: f"Error: {error}")
    graph.add_node("tools", node)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after)
    graph.add_edge("tools", "model")
    with SqliteSaver.from_conn_string(str(path)) as saver:
        app = graph.compile(checkpointer=saver)
        app.invoke({"messages": [system, question]}, {"configurable": {"thread_id": session}})


def retyped_checkpoint(path, kind, data):
    """Let the checkpoints of a file have another encoding and other bytes."""
    connection = sqlite3.connect(path)
    connection.execute("UPDATE checkpoints SET type = ?, checkpoint = ?", (kind, data))
    connection.commit()
    connection.close()
