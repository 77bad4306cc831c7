"""The router's data about a request."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request on arrival. The output length is unknown; only its upper bound is given."""

    id: int
    input_tokens: int
    blocks: tuple[int, ...] = ()
    """Chained hashes of the prompt's full blocks: an equal hash means an equal prefix up to that block."""
    block_tokens: int = 16
    max_output_tokens: int = 0
    """Maximum number of generated tokens; KV memory is reserved for them."""
    model: str = ""
    """Model name; empty: the cluster's only model."""
    adapter: str = ""
    """LoRA adapter of the model; empty: none. `blocks` differ from those of other adapters and of the base model."""
    session: int = 0
    """Hash of the client's session, an unsigned 64-bit integer; 0: none."""
    one_leg: bool = False
    """True if prefill and decode must use one instance: several prompts or outputs in one request, whose KV no protocol
    can transfer."""
    copyable: bool = True
    """True if its cached prefix can be copied between instances; this requires the prompt's tokens."""
