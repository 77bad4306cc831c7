"""Limits on the size of a prompt: the model's context and the memory for tokenizing, from the model's own files.

In most vocabularies one token represents a bounded number of bytes, so a text can be known to exceed the context before
it is tokenized.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from kvroute.serve.api.json_fields import Fields, RequestError
from kvroute.serve.api.prompt_queue import LANE_LIMITS

MEMORY_BYTES: Final = 2_000_000_000
TOKENIZER_MEMORY_RATIO: Final = 350
"""Peak memory of tokenizing, per byte of prompt. Measured with tokenizers 0.23: 150 to 200 for text, 330 if almost
every character is a separate word."""
JSON_EXPANSION: Final = 6
"""JSON may write a character of one byte as six: \\u0041."""
_NFC_SHRINKS = 3
"""NFC shortens UTF-8 to a third at most (three Hangul letters become one syllable)."""
_BYTES = 256
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Limits beyond which a prompt is rejected with status 400."""

    context_tokens: int | None = None
    """Context length of the model; None: unknown, and no prompt is rejected for it."""
    longest_token_bytes: int | None = None
    """Maximum bytes of text that one token represents; None: unknown, and only tokens are checked."""
    memory_bytes: float = MEMORY_BYTES
    """Memory for all prompts that are tokenized at the same time."""

    @property
    def text_bytes(self) -> int:
        """The longest text that is tokenized: with it in the last lane, all lanes together stay within the memory."""
        total = self.memory_bytes / TOKENIZER_MEMORY_RATIO
        return int(max(total - sum(LANE_LIMITS[:-1]), total / len(LANE_LIMITS)))

    def check_text(self, nbytes: int, param: str, fields: Fields) -> None:
        """Check the bytes of a prompt before it is tokenized. Raises RequestError."""
        context, longest = self.context_tokens, self.longest_token_bytes
        if context is not None and longest is not None and nbytes > context * longest and not _truncates(fields):
            self._exceeds_context(param, f"is {nbytes} bytes long, at least {-(-nbytes // longest)} tokens")
        if nbytes > self.text_bytes:
            raise _too_large(param, nbytes, self.text_bytes)

    def check_template_fields(self, nbytes: int, param: str) -> None:
        """Check the bytes of JSON that a chat template reads, before rendering. Raises RequestError."""
        if nbytes > JSON_EXPANSION * self.text_bytes:
            raise _too_large(param, nbytes, JSON_EXPANSION * self.text_bytes)

    def check_tokens(self, tokens: int, param: str, fields: Fields) -> None:
        """Check the tokens of a prompt when they are known. Raises RequestError."""
        context = self.context_tokens
        if context is not None and tokens > context and not _truncates(fields):
            self._exceeds_context(param, f"has {tokens} tokens")

    def _exceeds_context(self, param: str, what: str) -> None:
        message = f"{param}: {what}, but the model's context length is {self.context_tokens}; send a shorter prompt"
        raise RequestError(message, param=param, code="context_length_exceeded")


def _too_large(param: str, nbytes: int, most: int) -> RequestError:
    hint = "send a shorter prompt, or ask the operator to raise `gateway.prompt.memory`"
    message = f"{param}: is {nbytes} bytes long, but at most {most} bytes can be tokenized; {hint}"
    return RequestError(message, param=param, code="prompt_too_large")


def _truncates(fields: Fields) -> bool:
    """Whether the client requests that vLLM truncates the prompt."""
    if bytes(fields.get("truncation", b"null")) == b'"auto"':  # of the Responses API
        return True
    return bytes(fields.get("truncate_prompt_tokens", b"null")) != b"null"


def context_of(folder: Path) -> int | None:
    """Return the model's context length by the `config.json` of its folder, with RoPE scaling; None: not given."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    trained = max((_whole(text.get(key)) for key in _CONTEXT_KEYS), default=0)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(scaling, dict):
        factor = scaling.get("factor")
        factor = factor if isinstance(factor, int | float) and factor > 1 else 1
        trained = int(max(trained, _whole(scaling.get("original_max_position_embeddings"))) * factor)
    return trained or None


def longest_token_bytes(tokenizer: Path) -> int | None:
    """Return the maximum bytes of text that one token of a `tokenizer.json` represents; None if no bound exists.

    A bound needs a vocabulary in which every byte is a token, so that nothing is dropped or joined as unknown, and
    normalizers and pre-tokenizers that do not shorten the text.
    """
    try:
        document = msgspec.json.decode(tokenizer.read_bytes(), type=_Tokenizer)
        return _longest(document)
    except (OSError, msgspec.MsgspecError):
        return None


class _Added(msgspec.Struct):
    content: str = ""
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    vocab: Any = None
    type: str = "BPE"
    byte_fallback: bool = False


class _Step(msgspec.Struct):
    type: str = ""
    behavior: str = ""
    pattern: Any = None
    content: str = ""
    normalizers: list[_Step] = []
    pretokenizers: list[_Step] = []


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_Added] = []
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None


def _longest(document: _Tokenizer) -> int | None:
    model, added = document.model, document.added_tokens
    if model.type != "BPE" or not isinstance(model.vocab, dict):
        return None
    normalizers, splitters = _steps(document.normalizer), _steps(document.pre_tokenizer)
    if not all(map(_keeps_text, normalizers)) or not all(map(_keeps_text, splitters)):
        return None
    if any(token.lstrip or token.rstrip for token in added):  # such a token absorbs any number of blanks
        return None
    byte_level = any(step.type == "ByteLevel" for step in (*normalizers, *splitters))
    if byte_level and sum(len(token) == 1 for token in model.vocab) >= _BYTES:
        longest = max(map(len, model.vocab))  # a character represents a byte
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in model.vocab for byte in range(_BYTES)):
        longest = max(len(token.encode()) for token in model.vocab)
    else:
        return None
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return longest * (_NFC_SHRINKS if any(step.type == "NFC" for step in normalizers) else 1)


def _steps(step: _Step | None) -> list[_Step]:
    if step is None:
        return []
    inner = [*step.normalizers, *step.pretokenizers]
    return [found for part in inner for found in _steps(part)] if step.type == "Sequence" else [step]


def _keeps_text(step: _Step) -> bool:
    """Whether no step drops text or, apart from NFC, shortens it."""
    if step.type == "Replace":
        found = step.pattern.get("String") if isinstance(step.pattern, dict) else None
        return isinstance(found, str) and len(step.content.encode()) >= len(found.encode())
    if step.type == "Split":
        return step.behavior != "Removed"
    return step.type in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
