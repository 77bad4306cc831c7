"""What a router knows of a request."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a router knows of a request when it arrives. The length of the answer is not known, only its bound."""

    id: int
    input_tokens: int
    blocks: tuple[int, ...] = ()
    """Chained hashes of the prompt's full blocks: an equal hash means an equal prefix up to that block."""
    block_tokens: int = 16
    max_output_tokens: int = 0
    """KV memory is reserved for so many generated tokens."""
    model: str = ""
    """Empty: the cluster's only model."""
    one_leg: bool = False
    """Prefill and decode on one instance, for requests whose KV no protocol can hand over (several prompts or
    answers in one request)."""
    copyable: bool = True
    """A cached prefix of it can be copied between instances: whoever would order that knows the prompt's tokens."""
