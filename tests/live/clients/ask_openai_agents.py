"""openai-agents over chats and responses: with and without a limit, a tool, a handoff, a value as the answer."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Forecast(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def main(url: str, model: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        chosen = kind(model=model, openai_client=client)
        for settings in (ModelSettings(), ModelSettings(max_tokens=500)):
            agent = Agent(name="plain", instructions="be brief", model=chosen, model_settings=settings)
            whole = await Runner.run(agent, "hello")
            streamed = Runner.run_streamed(agent, "hello")
            events = [event.type async for event in streamed.stream_events()]
            assert whole.final_output == streamed.final_output != "", (kind, settings)
            assert len(events) > 10, (kind, settings)
            assert whole.context_wrapper.usage.total_tokens > 0, (kind, settings)
        agent = Agent(name="tool", model=chosen, tools=[function_tool(weather)], output_type=Forecast)
        ran = await Runner.run(agent, "What is the weather?")
        assert isinstance(ran.final_output, Forecast), kind
        assert "rain in" in str(ran.to_input_list()), kind
        first = Agent(name="first", model=chosen, handoffs=[Agent(name="second", model=chosen)])
        ran = await Runner.run(first, "hello")
        assert ran.last_agent.name == "second", kind


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
