"""JSON bodies of requests for tokens: the fields of vLLM's HTTP interface that the emulator uses. Other fields are
ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["chat", "completions", "responses", "messages", "transcriptions"]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed response."""

    include_usage: bool | None = None


class StoragePart(msgspec.Struct, frozen=True):
    """Blocks in the buffer of one node."""

    id: str
    """Id of the read."""
    blocks: Annotated[int, msgspec.Meta(ge=1)]
    data: str
    """`host:port` of the KV server that sends them."""
    keep: bool = False
    """True: the blocks stay in the buffer for the decode instance."""


class KeptBlocksBody(msgspec.Struct, frozen=True):
    """Blocks of the prompt in the buffer of the decode instance's node."""

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    blocks: Annotated[int, msgspec.Meta(ge=1)]
    id: str
    """Id of the read."""


class StorageParams(msgspec.Struct, frozen=True):
    """Blocks of the prompt that were read from the store: consecutive parts from `first_block` on."""

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    key: str
    """Key of the last block."""
    parts: list[StoragePart]

    @property
    def kept(self) -> KeptBlocksBody | None:
        """The part of staged blocks that the decode instance takes from the buffer of its node."""
        first = self.first_block
        for part in self.parts:
            if part.keep:
                return KeptBlocksBody(first, part.blocks, part.id)
            first += part.blocks
        return None


class KvParams(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of all legs: NIXL-like pull, Mooncake's `transfer_id`, kvroute's early pull. A prefill leg
    with `do_remote_decode` and `do_remote_prefill` pulls a prefix of the prompt, computes the rest and holds
    everything."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_block_ids: Any = None
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_bootstrap_addr: str | None = None
    remote_num_tokens: int | None = None
    remote_prefill_cached_tokens: int | None = None
    transfer_id: str | None = None
    storage: StorageParams | None = None
    kept: KeptBlocksBody | None = None


class Body(msgspec.Struct, frozen=True):
    """The JSON body of a request for tokens."""

    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    max_tokens: int | None = None
    max_output_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_sequences: list[str] | None = None
    """`stop` of the Messages API."""
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    response_format: Any = None
    text: Any = None
    """`response_format` of the Responses API, under `format`."""
    output_config: Any = None
    """`response_format` of the Messages API, under `format`."""
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    tool_choice: Any = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    """Whether a chat returns log-probabilities; in a completion, of how many tokens at each place."""
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    include: Any = None
    kv_transfer_params: KvParams | None = None
    cache_salt: str | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None

    @property
    def may_constrain(self) -> bool:
        """Whether some field may constrain the text."""
        return bool(
            self.tools
            or self.tool_choice
            or self.response_format
            or self.text
            or self.output_config
            or self.structured_outputs
            or self.guided_json
            or self.guided_regex is not None
            or self.guided_choice is not None
            or self.guided_grammar is not None
        )

    def guided(self) -> tuple[tuple[str, Any], ...]:
        """Return the constraints of earlier versions of vLLM, by their name in `structured_outputs`."""
        given = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        return tuple(zip(("json", "regex", "choice", "grammar"), given, strict=True))
