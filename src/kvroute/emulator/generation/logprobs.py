"""Log-probabilities, in natural logarithms, in the formats of chats, completions and prompts. They follow from the
tokens before; a generated token is always the most likely one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import xxhash

from kvroute.emulator.generation.words import WORDS, token_text
from kvroute.emulator.prompt import OUTPUT_ID

_MOST_LIKELY = -0.7
"""A token of a prompt with a higher value is the most likely one."""
_STEP = 0.25


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, and the most likely tokens at its place in order."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def output_logprobs(seed: int, choice: int, tokens: Sequence[int], top: int, first: int = 0) -> Iterator[TokenLogprob]:
    """Yield those of output tokens. `top`: number of most likely tokens; `first`: place of the first one."""
    for place, token in enumerate(tokens, first):
        digest = xxhash.xxh64_intdigest(b"%d/%d" % (choice, place), seed)
        logprob = -(digest % 600) / 1000
        likely = [(token, logprob), *_others(digest, token, logprob, top - 1)]
        yield TokenLogprob(token, logprob, 1, tuple(likely[:top]))


def prompt_logprobs(tokens: Sequence[int], top: int) -> list[TokenLogprob | None]:
    """Return those of a prompt; None for its first token."""
    found: list[TokenLogprob | None] = []
    digest = 0
    for token in tokens:
        digest = xxhash.xxh64_intdigest(token.to_bytes(8, "little", signed=True), digest)
        logprob = -(digest % 8000) / 1000
        below = logprob if logprob > _MOST_LIKELY else _MOST_LIKELY + _STEP
        rank = 1 if logprob > _MOST_LIKELY else max(2, 1 + math.ceil((_MOST_LIKELY - logprob) / _STEP))
        likely = list(_others(digest, token, below, top))
        likely.insert(rank - 1, (token, logprob))
        found.append(TokenLogprob(token, logprob, rank, tuple(likely[:top])))
    return [None, *found[1:]]


def _others(digest: int, token: int, below: float, number: int) -> Iterator[tuple[int, float]]:
    """Yield other tokens, each less likely than the one before."""
    places = ((digest + 7 * step) % len(WORDS) for step in range(number + 1))
    others = (OUTPUT_ID + place for place in places if OUTPUT_ID + place != token)
    for rank, other in enumerate(islice(others, max(number, 0)), 1):
        yield other, below - _STEP * rank


def chat_logprobs(logprobs: Sequence[TokenLogprob], *, as_ids: bool = False) -> dict[str, Any]:
    """Return `logprobs` of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = _shown(token, as_ids)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(logprob.token, logprob.logprob) | {"top_logprobs": [entry(*likely) for likely in logprob.top]}
        for logprob in logprobs
    ]
    return {"content": content}


def completion_logprobs(
    tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, offset: int = 0, as_ids: bool = False
) -> dict[str, Any]:
    """Return `logprobs` of a completion. `offset`: number of characters before its first token."""
    texts, offsets, tops = [_shown(token, as_ids) for token in tokens], list[int](), list[dict[str, float] | None]()
    for text, logprob in zip(texts, logprobs, strict=True):
        offsets.append(offset)
        offset += len(text)
        top = None if logprob is None else dict([(logprob.token, logprob.logprob), *logprob.top])
        tops.append(None if top is None else {_shown(token, as_ids): value for token, value in top.items()})
    values = [None if logprob is None else logprob.logprob for logprob in logprobs]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": tops}


def vllm_prompt_logprobs(logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs`, by token id."""
    return [None if logprob is None else _by_id(logprob) for logprob in logprobs]


def _by_id(logprob: TokenLogprob) -> dict[str, Any]:
    ranks = {token: (value, rank) for rank, (token, value) in enumerate(logprob.top, 1)}
    ranks[logprob.token] = logprob.logprob, logprob.rank
    return {
        str(token): {"logprob": value, "rank": rank, "decoded_token": token_text(token)}
        for token, (value, rank) in ranks.items()
    }


def _shown(token: int, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else token_text(token)
