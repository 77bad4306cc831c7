"""langchain: structured output by its three methods, a bound tool, log-probabilities and embeddings."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(description="the beginning")
    rating: int = Field(ge=1, le=10)


class Search(BaseModel):
    """Search the web."""

    query: str


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0)
    for method in ("json_schema", "function_calling"):
        joke = chat.with_structured_output(Joke, method=method).invoke("Tell a joke.")
        assert isinstance(joke, Joke), method
    assert isinstance(chat.with_structured_output(None, method="json_mode").invoke("Answer in JSON."), dict)
    called = chat.bind_tools([Search], tool_choice="any").invoke("Search.")
    assert Search.model_validate(called.tool_calls[0]["args"]), called
    said = chat.bind(logprobs=True).invoke("Hello")
    assert len(said.response_metadata["logprobs"]["content"]) == said.usage_metadata["output_tokens"]
    assert "".join(str(part.content) for part in chat.stream("Hello")) == said.content
    vectors = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a", "b"])) == 2


if __name__ == "__main__":
    main(*sys.argv[1:])
