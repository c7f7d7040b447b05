"""An agent of the OpenAI Agents SDK whose memory is a Kalos store.

Run it without arguments, after ``pip install 'kalos-ctx[openai-agents]'``. The model is a stand-in
that asks for a tool and then answers, so that nothing is sent anywhere.
"""

import asyncio
import tempfile
from pathlib import Path

from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
from agents.models.interface import Model
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
)

import kalos_ctx as kalos
from kalos_ctx import demo_data
from kalos_ctx.adapters.openai_agents import KalosSession

MAX_TOKENS, RESERVE = 1024, 256


@function_tool
def find_car(owner: str) -> str:
    """Look up where a car stands."""
    return f"{owner}'s car: level 3, next to the lift"


class StandIn(Model):
    """Asks for the tool where it sees a question, and answers from its output."""

    async def get_response(self, system_instructions, input, *args, **kwargs):
        last = input[-1]
        if last.get("type") == "function_call_output":
            output = self.message(f"It is here: {last['output']}.")
        elif "car" in last["content"]:
            output = ResponseFunctionToolCall(
                type="function_call", call_id="1", name="find_car", arguments='{"owner":"Ann"}'
            )
        else:
            output = self.message(f"You have told me {len(input)} things so far.")
        return ModelResponse(output=[output], usage=Usage(), response_id=None)

    def message(self, text):
        part = ResponseOutputText(type="output_text", text=text, annotations=[])
        return ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[part]
        )

    def stream_response(self, *args, **kwargs):
        raise NotImplementedError("this stand-in answers in one piece")


async def talk(store):
    agent = Agent(name="porter", model=StandIn(), tools=[find_car])
    session = KalosSession("ann", store)
    for question in ("Where is my car?", "Thank you!"):
        result = await Runner.run(agent, question, session=session)
        print(f"user: {question}\nagent: {result.final_output}")
    items = await session.get_items()
    print(f"\n{len(items)} items: {', '.join(i.get('type', i.get('role')) for i in items)}")
    latest = await session.get_items(limit=4)
    print(f"The latest 4, without the output whose call was cut off: {len(latest)}")


def main():
    set_tracing_disabled(True)
    with (
        tempfile.TemporaryDirectory() as folder,
        kalos.SessionStore.open(
            Path(folder) / "agents.kalos", tokenizer=demo_data.tokenizer_dir()
        ) as store,
        kalos.ContextAssembler(store) as assembler,
    ):
        asyncio.run(talk(store))
        with assembler.assemble("ann", max_tokens=MAX_TOKENS, reserve=RESERVE) as window:
            print(f"\nThe same chat as a window of {len(window)} tokens:\n")
            print(store.codec.decode(window.token_ids))


if __name__ == "__main__":
    main()
