"""instructor: values of a pydantic model, by a call of a tool and by a JSON schema; whole and in parts."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(min_length=2, max_length=20)
    people: int = Field(ge=1000)
    kind: Literal["port", "capital"]
    twins: list[str] = Field(max_length=3)


def main(url: str, model: str) -> None:
    messages = [{"role": "user", "content": "Describe a city."}]
    plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(plain, mode=mode)
        city = client.chat.completions.create(model=model, messages=messages, response_model=City, max_retries=0)
        assert isinstance(city, City), mode
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(model=model, messages=messages, response_model=City))
    assert len(parts) > 2
    assert City.model_validate(parts[-1].model_dump())


if __name__ == "__main__":
    main(*sys.argv[1:])
