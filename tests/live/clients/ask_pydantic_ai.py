"""pydantic-ai over chats and responses: an agent with a tool, whose answer is a value, by a tool or a JSON schema."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Forecast(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int
    rain: bool


def weather(city: str) -> str:
    """Return the weather of a city."""
    CALLED.append(city)
    return "12 degrees, rain"


CALLED: list[str] = []


async def main(url: str, model: str) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (Forecast, NativeOutput(Forecast), str):
            CALLED.clear()
            agent = Agent(kind(model, provider=provider), tools=[weather], output_type=output)
            answer = (await agent.run("What is the weather?")).output
            assert CALLED, (kind, output)
            assert answer if output is str else isinstance(answer, Forecast), (kind, output)
            async with agent.run_stream("What is the weather?") as streamed:
                assert await streamed.get_output(), (kind, output)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
