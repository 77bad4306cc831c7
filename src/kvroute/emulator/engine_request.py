"""One request to an engine: the fields of vLLM's HTTP interface that the emulator uses. Other fields are ignored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from kvroute.emulator.errors import ApiError
from kvroute.emulator.prompt import Prompt, chat_prompt, checked_salt, completion_prompts, response_prompt
from kvroute.types import Role

Kind: TypeAlias = Literal["chat", "completions", "responses", "messages"]
Leg: TypeAlias = Literal["prefill", "decode", "whole"]
DEFAULT_TOKENS: dict[Kind, int] = {"completions": 16, "chat": 64, "responses": 64, "messages": 64}
"""Output tokens of a request that sets no limit."""
N_MAX = 128


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


class KeptBlocks(msgspec.Struct, frozen=True):
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
    kept: KeptBlocks | None = None


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
    kv_transfer_params: KvParams | None = None
    cache_salt: str | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int] | None = None
    bootstrap_room: int | list[int] | None = None


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Key and address under which the KV of one answer is fetched. On the prefill leg the address is empty."""

    key: str
    host: str = ""
    port: int = 0
    awaited: bool = False
    """True if the source may not have the KV yet."""
    early: bool = False
    """True if the KV is sent while it is computed, False if only when it is complete."""
    tokens: int | None = None
    """Number of tokens whose KV the source has; None if not given."""
    prefill_cached_tokens: int | None = None
    """Prompt tokens that the prefill instance had cached before it computed the rest; None if not given."""
    kept: KeptBlocks | None = None
    """What the own node has read from the store."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A validated request for `len(prompts) * n` answers of `output_tokens` each."""

    kind: Kind
    model: str
    """Model name that the client used."""
    leg: Leg
    prompts: tuple[Prompt, ...]
    n: int
    output_tokens: int
    stream: bool
    usage: bool
    tickets: tuple[KvHandle, ...]
    """One handle per answer. Empty without a KV transfer, and on vLLM's prefill leg: the engine generates the key."""
    wants_params: bool
    """True if the response of a prefill leg contains `kv_transfer_params`."""
    prefix: KvHandle | None = None
    """KV of a prompt prefix that a prefill leg fetches before it computes the rest."""
    storage: StorageParams | None = None
    """Blocks that a prefill leg takes from the buffers of storage nodes."""
    token_ids: bool = False
    """Whether the events of a stream have the ids of their tokens."""


_DECODER = msgspec.json.Decoder(Body)


def read_engine_request(
    kind: Kind,
    data: bytes,
    *,
    models: Sequence[str],
    role: Role,
    block_tokens: int,
    adapters: Collection[str] = (),
) -> EngineRequest:
    """Parse and validate a body. `models` are the names that the engine serves, its own first; `adapters` of these are
    LoRA adapters.

    Raises:
        Refusal: broken JSON, a field of a wrong type or out of range, a model that is not served.
    """
    try:
        body = _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError(f"the body cannot be read: {error}") from None
    if body.model is not None and body.model not in models:
        what = f"The model `{body.model}` does not exist; use {' or '.join(models)}"
        raise ApiError(what, status=404, kind="NotFoundError", param="model")
    salt = checked_salt(body.cache_salt)
    prompts = _prompts(kind, body, block_tokens, salt)
    if body.model is not None and body.model in adapters:
        prompts = [prompt.with_adapter(body.model, block_tokens) for prompt in prompts]
    n = _bounded(body.n, "n", 1, N_MAX) if kind in ("completions", "chat") else 1
    answers = len(prompts) * n
    leg, tickets = _handles(body, role, answers)
    bound = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    bound = body.max_output_tokens if kind == "responses" else bound
    return EngineRequest(
        kind=kind,
        model=body.model or models[0],
        leg=leg,
        prompts=tuple(prompts),
        n=n,
        output_tokens=_bounded(bound, "max_tokens", DEFAULT_TOKENS[kind], 2**31 - 1),
        stream=bool(body.stream),
        usage=bool(body.stream_options and body.stream_options.include_usage),
        tickets=tickets,
        wants_params=leg == "prefill" and body.kv_transfer_params is not None,
        prefix=_prefix(body.kv_transfer_params) if leg == "prefill" else None,
        storage=body.kv_transfer_params.storage if leg == "prefill" and body.kv_transfer_params else None,
        token_ids=bool(body.return_token_ids),
    )


def _prompts(kind: Kind, body: Body, block_tokens: int, salt: str) -> list[Prompt]:
    match kind:
        case "completions":
            return completion_prompts(body.prompt, block_tokens, salt)
        case "chat":
            return [chat_prompt(body.messages, block_tokens, salt)]
        case "messages":
            return [chat_prompt(body.messages, block_tokens, salt, bytes(body.tools) + bytes(body.system))]
        case "responses":
            return [response_prompt(body.input, block_tokens, salt, bytes(body.tools) + bytes(body.instructions))]


def _bounded(value: int | None, name: str, default: int, most: int) -> int:
    if value is None:
        return default
    if not 1 <= value <= most:
        raise ApiError(f"{name} is {value}; give 1 to {most}", param=name)
    return value


def _handles(body: Body, role: Role, answers: int) -> tuple[Leg, tuple[KvHandle, ...]]:
    if body.bootstrap_room is not None:
        return ("prefill" if role == "prefill" else "decode"), _rooms(body, answers)
    params = body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return "whole", ()
    if answers > 1:
        raise ApiError("kv_transfer_params do not support several choices; use one prompt and n of 1", param="n")
    if params.do_remote_decode:
        return "prefill", (KvHandle(params.transfer_id),) if params.transfer_id else ()
    if params.transfer_id and params.remote_bootstrap_addr:
        host, port = _address(params.remote_bootstrap_addr)
        return "decode", (KvHandle(params.transfer_id, host, port, awaited=True),)
    if params.transfer_id and not params.remote_request_id and params.remote_host and params.remote_port:
        return "decode", (KvHandle(params.transfer_id, params.remote_host, params.remote_port, True, early=True),)
    return "decode", (_forwarded(params),)


def _prefix(params: KvParams | None) -> KvHandle | None:
    return _forwarded(params) if params is not None and params.do_remote_prefill else None


def _forwarded(params: KvParams) -> KvHandle:
    """Return the KV handle in the parameters of another instance's response."""
    if not (params.remote_request_id and params.remote_host and params.remote_port):
        what = "kv_transfer_params lacks remote_request_id, remote_host or remote_port; copy them from prefill"
        raise ApiError(what, param="kv_transfer_params")
    return KvHandle(
        params.remote_request_id,
        params.remote_host,
        params.remote_port,
        tokens=params.remote_num_tokens,
        prefill_cached_tokens=params.remote_prefill_cached_tokens,
        kept=params.kept,
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise ApiError(f"{text!r} is not host:port", param="kv_transfer_params")
    return host, int(port)


def _rooms(body: Body, answers: int) -> tuple[KvHandle, ...]:
    """Return the KV handles of SGLang's bootstrap rooms: one room, or a list with one per answer."""
    rooms = body.bootstrap_room if isinstance(body.bootstrap_room, list) else [body.bootstrap_room]
    hosts = body.bootstrap_host if isinstance(body.bootstrap_host, list) else [body.bootstrap_host or ""] * len(rooms)
    ports = body.bootstrap_port if isinstance(body.bootstrap_port, list) else [body.bootstrap_port or 0] * len(rooms)
    if not len(rooms) == len(hosts) == len(ports) == answers:
        what = f"{len(rooms)} bootstrap rooms, {len(hosts)} hosts and {len(ports)} ports for {answers} choices"
        raise ApiError(f"{what}; give one of each per choice", param="bootstrap_room")
    meetings = zip(rooms, hosts, ports, strict=True)
    return tuple(KvHandle(f"room-{room}", host, port, awaited=True) for room, host, port in meetings)
