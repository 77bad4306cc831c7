"""What a prompt is to routing: its length in tokens and the chained hashes of its full blocks.

With the model's tokenizer both are exact and equal those that engines' KV events lead to; without one, blocks are
pieces of text: equal text is equal, but engines' own events mean nothing then.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import tokenizers
import xxhash

from kvroute.gateway.chat_template import TEMPLATE_FIELDS, ChatTemplate
from kvroute.gateway.openai import Completion
from kvroute.prefix import block_hashes
from kvroute.types import InputError

TEXT_INLINE_BYTES = 256 * 1024
TOKENIZER_INLINE_BYTES = 4 * 1024
MEDIA_TOKENS = 1024
"""A guess for one image or recording, whose bytes say nothing of its tokens."""

_BASE64 = re.compile(rb";base64,[A-Za-z0-9+/=_-]+|\"data\"\s*:\s*\"[A-Za-z0-9+/=_-]+")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Length and block hashes of a prompt; of several prompts in one request, all lengths and the first's blocks."""

    input_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int
    ids: list[int] | None = field(default=None, compare=False, repr=False)
    """Token ids of the first prompt; None: only the engine knows them."""


class Prompts:
    """Reads prompts, small ones at once, large ones in a thread. `close` ends the threads."""

    def __init__(
        self,
        tokenizer: Path | None = None,
        *,
        block_tokens: int = 16,
        bytes_per_token: int = 4,
        inline_bytes: int | None = None,
        threads: int = 2,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Args:
            tokenizer: a `tokenizer.json` or its folder; None: blocks of text.
            block_tokens: tokens of one block, as in the engines' cache.
            bytes_per_token: what a token is taken for without a tokenizer.
            inline_bytes: prompts up to here are read at once; None: what takes about a millisecond.
            threads: for larger ones.
            clock: for chat templates that tell the date.

        Raises:
            InputError: the tokenizer or its chat template cannot be read.
        """
        self.exact = tokenizer is not None
        """Hashes equal those of engines' KV events."""
        self._block_tokens, self._bytes_per_token = block_tokens, bytes_per_token
        default = TOKENIZER_INLINE_BYTES if self.exact else TEXT_INLINE_BYTES
        self._inline_bytes = default if inline_bytes is None else inline_bytes
        self._tokenizer = _load(tokenizer) if tokenizer else None
        self._template = ChatTemplate.load(_folder(tokenizer), clock) if tokenizer else None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prompt")

    def blocks_now(self, completion: Completion) -> Prompt | None:
        """The prompt, or None if it is so large that `blocks` should read it."""
        limit = self._inline_bytes if completion.token_ids is None else TEXT_INLINE_BYTES
        return self._read(completion) if self._work_bytes(completion) <= limit else None

    async def blocks(self, completion: Completion) -> Prompt:
        """The same for a prompt of any size, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, completion)

    def close(self) -> None:
        """End the threads; prompts under way are finished first."""
        self._threads.shutdown()

    def _work_bytes(self, completion: Completion) -> int:
        """Bytes to work through: all prompts; of a chat that goes through the template, every field that this reads."""
        size = _text_bytes(completion.text, completion.token_ids)
        if completion.further:
            size += sum(_text_bytes(*_pair(other)) for other in completion.further)
        if self._template is not None and completion.kind == "chat":
            fields = completion.fields
            size = max(size, sum([len(fields[name]) for name in TEMPLATE_FIELDS if name in fields]))
        return size

    def _read(self, completion: Completion) -> Prompt:
        seed = xxhash.xxh64_intdigest(completion.salt.encode()) if completion.salt else 0
        tokens, blocks, ids = self._first(completion, seed)
        for other in completion.further:
            tokens += len(other) if isinstance(other, list) else self._length(other, completion)
        return Prompt(max(1, tokens), blocks, self._block_tokens, ids)

    def _first(self, completion: Completion, seed: int) -> tuple[int, tuple[int, ...], list[int] | None]:
        ids, text = completion.token_ids, completion.text
        if ids is None and text is None:
            return 0, (), None
        if ids is None and text is not None and (ids := self._ids(completion, text)) is None:
            return self._text_tokens(text, completion.media), self._text_blocks(text, seed), None
        assert ids is not None
        return len(ids), block_hashes(ids, self._block_tokens, seed), ids

    def _ids(self, completion: Completion, text: bytes) -> list[int] | None:
        """Token ids as vLLM has them: special tokens are added to a plain prompt, a chat template brings its own.

        None where only the engine knows them: other media than text, a template of the client's or none at all.
        """
        if self._tokenizer is None:
            return None
        prompt: str | None = text.decode() if completion.kind == "completions" else self._rendered(completion)
        if prompt is None:
            return None
        special = _wants_special(completion, default=completion.kind == "completions")
        ids: list[int] = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=special)[0].ids
        return ids

    def _rendered(self, completion: Completion) -> str | None:
        if self._template is None or completion.media or "chat_template" in completion.fields:
            return None
        return self._template.render(completion.fields)

    def _length(self, text: bytes, completion: Completion) -> int:
        ids = self._ids(completion, text)
        return self._text_tokens(text, False) if ids is None else len(ids)

    def _text_tokens(self, text: bytes, media: bool) -> int:
        if not media:
            return -(-len(text) // self._bytes_per_token)
        plain, parts = _BASE64.subn(b"", text)
        return -(-len(plain) // self._bytes_per_token) + MEDIA_TOKENS * max(1, parts)

    def _text_blocks(self, text: bytes, seed: int) -> tuple[int, ...]:
        """Chained as `block_hashes` chains tokens, over pieces of as many bytes as a block's tokens are taken for."""
        step = self._block_tokens * self._bytes_per_token
        digest, parent = xxhash.xxh64_intdigest, seed
        return tuple([parent := digest(text[at : at + step], parent) for at in range(0, len(text) - step + 1, step)])


def _text_bytes(text: bytes | None, ids: list[int] | None) -> int:
    return len(text) if text is not None else 8 * len(ids or ())


def _pair(prompt: bytes | list[int]) -> tuple[bytes | None, list[int] | None]:
    return (prompt, None) if isinstance(prompt, bytes) else (None, prompt)


def _wants_special(completion: Completion, default: bool) -> bool:
    raw = completion.fields.get("add_special_tokens")
    return default if raw is None or bytes(raw) == b"null" else bytes(raw) == b"true"


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _load(tokenizer: Path) -> tokenizers.Tokenizer:
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    mend = "give the model's tokenizer.json or the folder that holds it"
    if not path.is_file():
        raise InputError("there is no such tokenizer", where=str(path), mend=mend)
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more special.
        raise InputError(f"no tokenizer ({error})", where=str(path), mend=mend) from error
    # A file may carry the lengths of its training; engines switch them off too.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
