"""A prompt as routing uses it: its length in tokens and the chained hashes of its full blocks.

With the model's tokenizer both are exact and match those of engines' KV events. Without one, blocks are pieces of
text: equal texts have equal hashes, but KV events of engines cannot be matched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kvroute.prefix import block_hashes, prompt_seed
from kvroute.serve.api.conversation import Span
from kvroute.serve.api.prompt_bounds import MEMORY_BYTES, PromptBounds, context_of, longest_token_bytes
from kvroute.serve.api.requests import CONVERSATIONS, Completion
from kvroute.types import InputError

if TYPE_CHECKING:
    import tokenizers

    from kvroute.serve.api.chat_template import ChatTemplate

TEXT_INLINE_BYTES = 256 * 1024
TOKENIZER_INLINE_BYTES = 4 * 1024
MEDIA_TOKENS = 1024
"""Estimated tokens of one image, recording or file; the number of bytes does not determine it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Length and block hashes of a prompt; for several prompts in one request, the total length and the first's
    blocks."""

    input_tokens: int
    blocks: tuple[int, ...]
    block_tokens: int
    ids: list[int] | None = field(default=None, compare=False, repr=False)
    """Token ids of the first prompt; None: only the engine can compute them."""


class PromptReader:
    """Reads prompts of one model. It takes as long as the prompt needs, and may be called in a thread."""

    def __init__(
        self,
        tokenizer: Path | None = None,
        *,
        block_tokens: int = 16,
        bytes_per_token: int = 4,
        inline_bytes: int | None = None,
        context_tokens: int | None = None,
        memory_bytes: float = MEMORY_BYTES,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Args: as for `Prompts`. Raises InputError: the tokenizer or its chat template cannot be read."""
        self.exact = tokenizer is not None
        """Whether hashes equal those of engines' KV events."""
        self._block_tokens, self._bytes_per_token = block_tokens, bytes_per_token
        default = TOKENIZER_INLINE_BYTES if self.exact else TEXT_INLINE_BYTES
        self._inline_bytes = default if inline_bytes is None else inline_bytes
        self._tokenizer = _load(tokenizer) if tokenizer else None
        self._template = _template(_folder(tokenizer), clock) if tokenizer else None
        if tokenizer is not None:
            context_tokens = context_tokens or context_of(_folder(tokenizer))
        longest = longest_token_bytes(_file(tokenizer)) if tokenizer is not None and context_tokens else None
        self.bounds = PromptBounds(context_tokens, longest, memory_bytes)

    def inline_bytes(self, completion: Completion) -> int:
        """Return the longest prompt, in bytes, that is read on the event loop."""
        return self._inline_bytes if completion.token_ids is None else TEXT_INLINE_BYTES

    def work_bytes(self, completion: Completion) -> int:
        """Return the bytes to process: all prompts; for a conversation with a template, every field that the template
        reads."""
        size = _text_bytes(completion.text, completion.token_ids)
        if completion.further:
            size += sum(_text_bytes(*_pair(other)) for other in completion.further)
        conversation = CONVERSATIONS.get(completion.kind)
        if conversation is not None and self._renders(completion):
            fields = completion.fields
            size = max(size, sum([len(fields[name]) for name in conversation.template_fields if name in fields]))
        return size

    def check(self, completion: Completion) -> None:
        """Raise RequestError for a prompt that is too large, as far as this is known before tokenizing."""
        if completion.token_ids is not None:
            self.bounds.check_tokens(len(completion.token_ids), "prompt", completion.fields)
        elif self._tokenizer is None or completion.text is None:
            return
        elif completion.kind == "completions":
            self.bounds.check_text(len(completion.text), "prompt", completion.fields)
        elif self._renders(completion):
            self.bounds.check_template_fields(self.work_bytes(completion), _param(completion))

    def read(self, completion: Completion) -> Prompt:
        """Return the prompt. Raises RequestError as `Prompts.blocks` does."""
        seed = prompt_seed(completion.salt, completion.adapter)
        tokens, blocks, ids = self._first(completion, seed)
        if ids is not None:
            self.bounds.check_tokens(tokens, _param(completion), completion.fields)
        if not completion.further:
            return Prompt(max(1, tokens), blocks, self._block_tokens, ids)
        left = self.bounds.text_bytes - len(completion.text or b"")
        for other in completion.further:
            if isinstance(other, list):
                tokens += len(other)
                continue
            left -= len(other)
            tokens += self._length(other, completion) if left >= 0 else self._text_tokens(other)
        return Prompt(max(1, tokens), blocks, self._block_tokens, ids)

    def _first(self, completion: Completion, seed: int) -> tuple[int, tuple[int, ...], list[int] | None]:
        ids, text = completion.token_ids, completion.text
        if ids is None and text is None:
            return 0, (), None
        if ids is None and text is not None and (ids := self._ids(completion, text)) is None:
            plain = self._with_digests(text, completion.media) if completion.media else text
            return self._text_tokens(plain), self._text_blocks(plain, seed), None
        assert ids is not None
        return len(ids), block_hashes(ids, self._block_tokens, seed), ids

    def _ids(self, completion: Completion, text: bytes) -> list[int] | None:
        """Return token ids as vLLM computes them: a plain prompt gets special tokens, a chat template contains its own.

        None if only the engine can compute them: media other than text, a template of the client, or no template.
        """
        if self._tokenizer is None:
            return None
        prompt: str | None = text.decode() if completion.kind == "completions" else self._rendered(completion)
        if prompt is None:
            return None
        nbytes = len(prompt) if prompt.isascii() else len(prompt.encode())
        self.bounds.check_text(nbytes, _param(completion), completion.fields)
        special = _wants_special(completion, default=completion.kind == "completions")
        ids: list[int] = self._tokenizer.encode_batch_fast([prompt], add_special_tokens=special)[0].ids
        return ids

    def _rendered(self, completion: Completion) -> str | None:
        if not self._renders(completion):
            return None
        assert self._template is not None
        return self._template.render(completion.fields, CONVERSATIONS[completion.kind])

    def _renders(self, completion: Completion) -> bool:
        """Whether the tokens of a conversation can be computed."""
        return self._template is not None and not completion.media and "chat_template" not in completion.fields

    def _length(self, text: bytes, completion: Completion) -> int:
        ids = self._ids(completion, text)
        return self._text_tokens(text) if ids is None else len(ids)

    def _text_tokens(self, text: bytes) -> int:
        return -(-len(text) // self._bytes_per_token)

    def _with_digests(self, text: bytes, media: tuple[Span, ...]) -> bytes:
        """Return the text with a digest in place of each part that is not text, as long as its estimated tokens."""
        pieces, at, size = list[bytes](), 0, MEDIA_TOKENS * self._bytes_per_token
        for begin, end in media:
            digest = xxhash.xxh3_128_digest(memoryview(text)[begin:end])
            pieces += [text[at:begin], (digest * (size // len(digest) + 1))[:size]]
            at = end
        return b"".join([*pieces, text[at:]])

    def _text_blocks(self, text: bytes, seed: int) -> tuple[int, ...]:
        """Hash pieces of text of the size of a block, chained as `block_hashes` chains tokens."""
        step = self._block_tokens * self._bytes_per_token
        digest, parent = xxhash.xxh64_intdigest, seed
        return tuple([parent := digest(text[at : at + step], parent) for at in range(0, len(text) - step + 1, step)])


def _param(completion: Completion) -> str:
    """Return the name of the field that contains the prompt."""
    conversation = CONVERSATIONS.get(completion.kind)
    return "prompt" if conversation is None else conversation.param


def _text_bytes(text: bytes | None, ids: list[int] | None) -> int:
    return len(text) if text is not None else 8 * len(ids or ())


def _pair(prompt: bytes | list[int]) -> tuple[bytes | None, list[int] | None]:
    return (prompt, None) if isinstance(prompt, bytes) else (None, prompt)


def _wants_special(completion: Completion, default: bool) -> bool:
    raw = completion.fields.get("add_special_tokens")
    return default if raw is None or bytes(raw) == b"null" else bytes(raw) == b"true"


def _folder(tokenizer: Path) -> Path:
    return tokenizer if tokenizer.is_dir() else tokenizer.parent


def _file(tokenizer: Path) -> Path:
    return tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer


def _template(folder: Path, clock: Callable[[], datetime]) -> ChatTemplate | None:
    from kvroute.serve.api.chat_template import ChatTemplate  # jinja2 takes 5 MB

    return ChatTemplate.load(folder, clock)


def _load(tokenizer: Path) -> tokenizers.Tokenizer:
    import tokenizers  # 4 MB

    path = _file(tokenizer)
    hint = "give the model's tokenizer.json or the folder that contains it"
    if not path.is_file():
        raise InputError("the tokenizer file does not exist", where=str(path), hint=hint)
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific exception
        raise InputError(f"the file is not a valid tokenizer ({error})", where=str(path), hint=hint) from error
    # A tokenizer file may carry the truncation and padding of its training; engines disable them too.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded
