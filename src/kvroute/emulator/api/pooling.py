"""Requests of pooling models: embeddings, scores, ranks, classes. All numbers follow from the input alone."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.emulator.api.response import usage
from kvroute.emulator.errors import ApiError
from kvroute.emulator.prompt import EmulatedPrompt, chat_prompt, completion_prompts

DIMENSIONS = 8
"""Numbers of an embedding of a request that sets no `dimensions`."""
DIMENSIONS_MAX = 65_536
CLASSES = ("LABEL_0", "LABEL_1")
_NULL = msgspec.Raw(b"null")
Vector = npt.NDArray[np.float32]


class PoolingBody(msgspec.Struct, frozen=True):
    """The body of /v1/embeddings, /pooling and /classify."""

    model: str | None = None
    input: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    encoding_format: str = "float"
    dimensions: int | None = None


class ScoreBody(msgspec.Struct, frozen=True):
    """The body of /score: each pair of a first and a second text."""

    model: str | None = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None


class RerankBody(msgspec.Struct, frozen=True):
    """The body of /rerank."""

    query: Any
    documents: Any
    model: str | None = None
    top_n: int = 0


def embeddings(body: PoolingBody, model: str, block_tokens: int, number: int) -> dict[str, Any]:
    """Return the response to /v1/embeddings. `number`: part of its id.

    Raises:
        ApiError: no input, or a field out of range.
    """
    prompts = _prompts(body, block_tokens)
    dimensions = DIMENSIONS if body.dimensions is None else body.dimensions
    if not 1 <= dimensions <= DIMENSIONS_MAX:
        raise ApiError(f"dimensions is {dimensions}; give 1 to {DIMENSIONS_MAX}", param="dimensions")
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(_vector(prompt, dimensions), body)}
        for index, prompt in enumerate(prompts)
    ]
    return _listed(f"embd-{number}", model, data, prompts)


def pooling(body: PoolingBody, model: str, block_tokens: int, number: int) -> dict[str, Any]:
    """Return the response to /pooling. Args and Raises as for `embeddings`."""
    document = embeddings(body, model, block_tokens, number)
    for entry in document["data"]:
        entry |= {"object": "pooling", "data": entry.pop("embedding")}
    return document | {"id": f"pool-{number}"}


def classes(body: PoolingBody, model: str, block_tokens: int, number: int) -> dict[str, Any]:
    """Return the response to /classify. Args and Raises as for `embeddings`."""
    prompts = _prompts(body, block_tokens)
    data = []
    for index, prompt in enumerate(prompts):
        first = _share(float(_vector(prompt, DIMENSIONS)[0]))
        probs = [first, 1.0 - first]
        label = CLASSES[probs.index(max(probs))]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(CLASSES)})
    return _listed(f"classify-{number}", model, data, prompts)


def scores(body: ScoreBody, model: str, block_tokens: int, number: int) -> dict[str, Any]:
    """Return the response to /score. Args as for `embeddings`.

    Raises:
        ApiError: a text is missing, or the two lists have different lengths.
    """
    first = _first_of(body.text_1, body.data_1, body.queries)
    second = _first_of(body.text_2, body.data_2, body.documents, body.items)
    ones, others = _texts(first, "text_1", block_tokens), _texts(second, "text_2", block_tokens)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise ApiError(f"there are {len(ones)} first and {len(others)} second texts; give one first text, or as many")
    pairs = list(zip(ones, others, strict=True))
    data = [{"index": at, "object": "score", "score": _score(*pair)} for at, pair in enumerate(pairs)]
    return _listed(f"score-{number}", model, data, [*ones, *others])


def ranks(body: RerankBody, model: str, block_tokens: int, number: int) -> dict[str, Any]:
    """Return the response to /rerank, the most relevant document first. Args as for `embeddings`.

    Raises:
        ApiError: a text is missing, or `top_n` is negative.
    """
    query, documents = _texts(body.query, "query", block_tokens)[0], _texts(body.documents, "documents", block_tokens)
    if body.top_n < 0:
        raise ApiError(f"top_n is {body.top_n}; give 0 or more", param="top_n")
    given = body.documents if isinstance(body.documents, list) else [body.documents]
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": _text(text), "multi_modal": None},
            "relevance_score": _score(query, prompt),
        }
        for index, (text, prompt) in enumerate(zip(given, documents, strict=True))
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    tokens = _tokens([query] * len(documents) + documents)
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"score-{number}", "model": model, "usage": counts, "results": results[: body.top_n or None]}


def _prompts(body: PoolingBody, block_tokens: int) -> list[EmulatedPrompt]:
    if bytes(body.messages) != b"null":
        return [chat_prompt(body.messages, block_tokens)]
    return completion_prompts(body.input, block_tokens)


def _first_of(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _texts(value: Any, name: str, block_tokens: int) -> list[EmulatedPrompt]:
    """Return the prompts of one text or of several. A text may also be an object with `content` parts."""
    texts = value if isinstance(value, list) else [value]
    if not texts or any(not isinstance(text, str | dict) for text in texts):
        raise ApiError(f"{name} is missing or no text; give a string or a list of strings", param=name)
    return [completion_prompts(msgspec.Raw(msgspec.json.encode(_text(text))), block_tokens)[0] for text in texts]


def _text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _vector(prompt: EmulatedPrompt, dimensions: int) -> Vector:
    """Return numbers [dimensions] of norm 1 that follow from a prompt."""
    drawn = np.random.Generator(np.random.PCG64(prompt.seed)).standard_normal(dimensions)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _encoded(vector: Vector, body: PoolingBody) -> Any:
    """Return an embedding as a list, or in base64 as 32-bit little-endian numbers."""
    match body.encoding_format:
        case "float":
            return vector.tolist()
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    what = f"encoding_format is {body.encoding_format!r}; give float or base64"
    raise ApiError(what, param="encoding_format")


def _score(one: EmulatedPrompt, other: EmulatedPrompt) -> float:
    """Return the relevance of a text to another, in (0, 1): equal texts have the highest."""
    return _share(4 * float(_vector(one, DIMENSIONS) @ _vector(other, DIMENSIONS)))


def _share(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def _tokens(prompts: Sequence[EmulatedPrompt]) -> int:
    return sum(len(prompt.tokens) for prompt in prompts)


def _listed(name: str, model: str, data: list[dict[str, Any]], prompts: Sequence[EmulatedPrompt]) -> dict[str, Any]:
    document = {"id": name, "object": "list", "created": int(time.time()), "model": model, "data": data}
    return {**document, "usage": usage(_tokens(prompts), 0, 0)}
