"""Prompts of an engine without a tokenizer: token ids, hashes of full blocks, and the seed of the output.

Four bytes of UTF-8 are one token, whose id is those bytes as a little-endian number. A component that hashes a prompt
in the same way gets the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import xxhash

from kvroute.emulator.errors import ApiError
from kvroute.prefix import block_hashes, prompt_seed
from kvroute.types import IntArray

TOKEN_BYTES = 4
"""Bytes of text per token."""
OUTPUT_ID = 0xFF000000
"""Id of the first word of the output; no four bytes of UTF-8 have such an id."""
SALT_MAX = 128
_SALT_FORBIDDEN = frozenset("@/\\\0")
_RAW = msgspec.json.Decoder(str | list[int] | None)
_BATCH = msgspec.json.Decoder(list[str | list[int]])
Value: TypeAlias = str | list[int]


@dataclass(frozen=True, slots=True)
class EmulatedPrompt:
    """One prompt: token ids [n] and one chained hash per full block."""

    tokens: IntArray
    blocks: tuple[int, ...]
    seed: int
    """Seed of the output: a hash of all tokens up to `generated`."""
    salt: str = ""
    """`cache_salt`: prompts share cached blocks only if it is equal."""
    adapter: str = ""
    """LoRA adapter; empty: none. Prompts share cached blocks only if it is equal."""
    generated: int = 0
    """Number of output tokens at the end of the prompt: its output continues after them."""

    @classmethod
    def of(cls, tokens: IntArray, block_tokens: int, salt: str = "", adapter: str = "") -> EmulatedPrompt:
        """Create a prompt from token ids [n]."""
        blocks = block_hashes(tokens, block_tokens, prompt_seed(salt, adapter))
        given = np.flatnonzero(tokens < OUTPUT_ID)
        first = int(given[-1]) + 1 if len(given) else 0
        seed = xxhash.xxh64_intdigest(tokens[:first].tobytes())
        return cls(tokens, blocks, seed, salt, adapter, len(tokens) - first)

    def with_adapter(self, adapter: str, block_tokens: int) -> EmulatedPrompt:
        """Return the same prompt for a LoRA adapter."""
        return EmulatedPrompt.of(self.tokens, block_tokens, self.salt, adapter)

    def same(self, other: EmulatedPrompt) -> bool:
        """Return whether tokens and adapter are the same."""
        return self.seed == other.seed and self.adapter == other.adapter and np.array_equal(self.tokens, other.tokens)


def text_tokens(text: bytes) -> IntArray:
    """Return the token ids of UTF-8 text. The last one may represent fewer than four bytes."""
    padded = text + bytes(-len(text) % TOKEN_BYTES)
    return np.frombuffer(padded, "<u4").astype(np.int64)


def value_tokens(value: Value) -> IntArray:
    """Return the token ids of a prompt given as text or as ids."""
    if isinstance(value, str):
        return text_tokens(value.encode("utf-8", "surrogatepass"))
    try:
        return np.array(value, np.int64)
    except OverflowError:
        raise ApiError("a token id does not fit into 64 bits", param="prompt") from None


def checked_salt(salt: str | None) -> str:
    """Return a request's `cache_salt`, empty if there is none.

    Raises:
        Refusal: a value that vLLM rejects.
    """
    if salt is None:
        return ""
    if not salt or len(salt) > SALT_MAX or not _SALT_FORBIDDEN.isdisjoint(salt):
        what = f"cache_salt is empty, longer than {SALT_MAX} characters or holds '@', '/', '\\\\' or NUL"
        raise ApiError(f"{what}; remove it or give another one", param="cache_salt")
    return salt


def completion_prompts(raw: msgspec.Raw, block_tokens: int, salt: str = "") -> list[EmulatedPrompt]:
    """Return the prompts of a completion: text, token ids, or a list of either.

    Raises:
        Refusal: any other value, no prompt, or an empty one.
    """
    values: Sequence[Value]
    try:
        value = _RAW.decode(raw)
        values = [] if value is None else [value]
    except msgspec.ValidationError:
        values = _batch(raw)
    prompts = [EmulatedPrompt.of(value_tokens(value), block_tokens, salt) for value in values]
    if not prompts or any(not len(prompt.tokens) for prompt in prompts):
        raise ApiError("prompt is empty; give text or token ids", param="prompt")
    return prompts


def _batch(raw: msgspec.Raw) -> Sequence[Value]:
    try:
        return _BATCH.decode(raw)
    except msgspec.ValidationError:
        what = "prompt is neither text nor token ids nor a list of these; give one of them"
        raise ApiError(what, param="prompt") from None


def response_prompt(raw: msgspec.Raw, block_tokens: int, salt: str = "", head: bytes = b"") -> EmulatedPrompt:
    """Return the prompt of a response: its input, a string or a list, as `chat_prompt` does.

    Raises:
        Refusal: no input.
    """
    text = bytes(raw)
    if text[:1] not in (b'"', b"["):
        raise ApiError("input is missing; give a string or a list of items", param="input")
    return EmulatedPrompt.of(text_tokens(head + text[:-1].rstrip()), block_tokens, salt)


def chat_prompt(raw: msgspec.Raw, block_tokens: int, salt: str = "", head: bytes = b"") -> EmulatedPrompt:
    """Return the prompt of a chat: its messages as JSON without the closing bracket, so that a longer chat extends it.
    `head` comes before the messages.

    Raises:
        Refusal: no messages, or a value that is not a list of objects with a role.
    """
    try:
        messages = msgspec.json.decode(raw, type=list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise ApiError(
            f"messages is not a list of objects ({error}); give role and content in each", param="messages"
        ) from None
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        raise ApiError("messages is empty or lacks a role; give role and content in each", param="messages")
    return EmulatedPrompt.of(text_tokens(head + bytes(raw)[:-1].rstrip()), block_tokens, salt)
