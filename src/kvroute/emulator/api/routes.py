"""HTTP paths of an instance: those of vLLM, and kvroute's control requests below /emulator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web

from kvroute.emulator.api.completion import JSON, complete
from kvroute.emulator.api.connection import fail
from kvroute.emulator.api.pooling import (
    PoolingBody,
    RerankBody,
    ScoreBody,
    classes,
    embeddings,
    pooling,
    ranks,
    scores,
)
from kvroute.emulator.api.server import InstanceServer
from kvroute.emulator.engine.adapters import adapter_lines
from kvroute.emulator.engine.counters import EngineGauges, RankMetrics, metrics_page, storage_lines
from kvroute.emulator.engine.engine_request import EmulatedRequest, read_engine_request, served_model
from kvroute.emulator.engine.faults import Fault
from kvroute.emulator.errors import ApiError, EngineError
from kvroute.emulator.generation.words import token_bytes, token_text
from kvroute.emulator.kv.kv_events import AllBlocksCleared
from kvroute.emulator.kv.storage import EmulatedBufferRead
from kvroute.emulator.kv.storage_tier import StorageTier
from kvroute.emulator.prompt import chat_prompt, completion_prompts
from kvroute.emulator.request_body import Kind
from kvroute.emulator.transcription import read_audio
from kvroute.types import InputError, Role
from kvroute_engine.addresses import host_port

DOWN_MAX_S = 3600.0
READS_PATH = "/v1/kv/reads"
T = TypeVar("T")


class Restart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /emulator/restart."""

    down_s: float = 0.0
    """Time for which connections are refused, in seconds."""


class Slow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /emulator/slow."""

    factor: float = 1.0
    """Factor on all times of the model; 1 is normal."""


class RoleOrder(msgspec.Struct, frozen=True):
    """The body of POST /emulator/role, as a gateway's role-switch hook sends it. Other fields are ignored."""

    role: Role


class WanOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /emulator/wan."""

    wan_path: str = ""
    """WAN path, `from/to` as under the cluster file's `wan`; empty: the only one."""
    share: float = 1.0
    """Share of the capacity that remains; 0 cuts the path, 1 restores it."""


class EmulatedReadOrder(msgspec.Struct, frozen=True):
    """The body of POST /v1/kv/reads: consecutive blocks of one prompt."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:-]+$")]
    keys: list[str]
    """Keys of the blocks, hexadecimal."""
    first_block: int = 0
    wait: Literal["data", "room"] = "data"
    """When the response comes: when the blocks are in the buffer, or as soon as they have room there."""


class Inputs(msgspec.Struct, frozen=True):
    """The body of /tokenize and /v1/messages/count_tokens."""

    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    system: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    return_token_strs: bool | None = None


class TokenIds(msgspec.Struct, frozen=True):
    """The body of /detokenize."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


async def answer(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    """Dispatch a request to its handler.

    Raises:
        Refusal: no handler has this method and path, or the handler rejects the request.
    """
    handler = ROUTES.get((request.method, request.path))
    if handler is not None:
        return await handler(server, request)
    if request.path.startswith(READS_PATH + "/") and request.method in _ONE_READ:
        return await _ONE_READ[request.method](server, request)
    if any(path == request.path for _, path in ROUTES):
        raise ApiError("Method Not Allowed", status=405, kind="MethodNotAllowedError")
    raise ApiError("Not Found", status=404, kind="NotFoundError")


async def _completion(server: InstanceServer, request: web.BaseRequest, kind: Kind) -> web.StreamResponse:
    data = await request.read()
    server = server.for_request(request)
    return await complete(request, _read_request(kind, data, server), server.engine, server.faults, server.origin)


def _read_request(kind: Kind, data: bytes, server: InstanceServer) -> EmulatedRequest:
    engine = server.engine
    return read_engine_request(
        kind,
        data,
        models=engine.model_names,
        role=server.role,
        block_tokens=engine.block_tokens,
        adapters=engine.adapters.load_s,
    )


async def _completions(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    return await _completion(server, request, "completions")


async def _chat(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    return await _completion(server, request, "chat")


async def _responses(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    return await _completion(server, request, "responses")


async def _messages(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    return await _completion(server, request, "messages")


async def _count_tokens(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    inputs = await _read(request, Inputs)
    head = bytes(inputs.tools) + bytes(inputs.system)
    prompt = chat_prompt(inputs.messages, server.engine.block_tokens, head=head)
    return _json({"input_tokens": len(prompt.tokens)})


async def _models(server: InstanceServer, _: web.BaseRequest) -> web.StreamResponse:
    engine = server.engine
    card = {"object": "model", "created": int(server.started_s), "owned_by": "kvroute", "root": engine.instance.model}
    card |= {"max_model_len": engine.context_tokens}
    return _json({"object": "list", "data": [{"id": name} | card for name in engine.model_names]})


async def _health(server: InstanceServer, _: web.BaseRequest) -> web.StreamResponse:
    fault = server.faults.should_fail("health")
    if fault is not None:
        await fail(fault)
    return web.Response()


async def _metrics(server: InstanceServer, _: web.BaseRequest) -> web.StreamResponse:
    engine = server.engine
    page = metrics_page(engine.instance.model, [_rank_metrics(rank, server.started_s) for rank in server.ranks])
    if engine.adapters.load_s:
        page += adapter_lines(engine.adapters, engine.adapters_in_use())
    if engine.storage is not None:
        page += storage_lines(engine.instance.model, engine.storage.node)
    return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _rank_metrics(server: InstanceServer, started_s: float) -> RankMetrics:
    """Args: `started_s`: start of the process."""
    engine = server.engine
    load = EngineGauges(
        running=engine.running,
        waiting=engine.waiting,
        kv_used_share=engine.kv_used_share,
        block_tokens=engine.block_tokens,
        capacity_blocks=engine.capacity_blocks,
        started_s=started_s,
    )
    return RankMetrics(engine.instance.rank, load, engine.counters, *server.kv_server.links())


async def _tokenize(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    inputs, engine = await _read(request, Inputs), server.engine
    if bytes(inputs.messages) != b"null":
        prompt = chat_prompt(inputs.messages, engine.block_tokens)
    else:
        prompt = completion_prompts(inputs.prompt, engine.block_tokens)[0]
    tokens = prompt.tokens.tolist()
    texts = [token_text(token) for token in tokens] if inputs.return_token_strs else None
    return _json({"count": len(tokens), "max_model_len": engine.context_tokens, "tokens": tokens, "token_strs": texts})


async def _tokenizer_info(_: InstanceServer, __: web.BaseRequest) -> web.StreamResponse:
    return _json({"tokenizer_class": "FourByteTokenizer", "bos_token": "<s> ", "eos_token": "</s>", "pad_token": None})


async def _detokenize(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    ids = await _read(request, TokenIds)
    return _json({"prompt": b"".join(map(token_bytes, ids.tokens)).decode("utf-8", "replace")})


def _pooled(
    kind: type[T], respond: Callable[[T, str, int, int], dict[str, Any]]
) -> Callable[[InstanceServer, web.BaseRequest], Awaitable[web.StreamResponse]]:
    """Return a handler that reads a body of this kind and responds at once."""

    async def handler(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
        body, engine = await _read(request, kind), server.engine
        model = served_model(getattr(body, "model", None), engine.model_names)
        return _json(respond(body, model, engine.block_tokens, next(engine.numbers)))

    return handler


async def _transcription(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    audio = await read_audio(request)
    server = server.for_request(request)
    ask = _read_request("transcriptions", audio.body, server)
    return await complete(request, replace(ask, audio=audio), server.engine, server.faults, server.origin)


async def _reset_prefix_cache(server: InstanceServer, _: web.BaseRequest) -> web.StreamResponse:
    for rank in server.ranks:
        if not rank.engine.clear_cache():
            raise EngineError("cached blocks are in use; try again when no request is in progress", status=503)
        if rank.publisher is not None:
            rank.publisher.publish([AllBlocksCleared()])
    return web.Response()


async def _fault(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    fault = await _read(request, Fault)
    if isinstance(fault.status, int) and not 400 <= fault.status <= 599:
        raise ApiError(f"status {fault.status} is not a failure; give 400 to 599, reset or hang", param="status")
    if fault.fail_next < 0 or fault.after_tokens < 0 or not 0 <= fault.share <= 1:
        raise ApiError("a number is out of range; give fail_next and after_tokens of 0 or more, share in [0, 1]")
    server.faults.schedule(fault)
    return _json({})


async def _restart(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    wan_order = await _read(request, Restart)
    if not 0 <= wan_order.down_s <= DOWN_MAX_S:
        raise ApiError(f"down_s is {wan_order.down_s}; give 0 to {DOWN_MAX_S:g}", param="down_s")
    server.restart(wan_order.down_s)
    return _json({})


async def _slow(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    wan_order = await _read(request, Slow)
    if not 0.001 <= wan_order.factor <= 1000:
        raise ApiError(f"factor is {wan_order.factor}; give 0.001 to 1000", param="factor")
    for rank in server.ranks:
        rank.engine.slow(wan_order.factor)
    return _json({})


async def _role(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    """Set another role, as after a restart. The instance must be idle; its cache is cleared."""
    role_order = await _read(request, RoleOrder)
    if any(rank.engine.running or rank.engine.waiting for rank in server.ranks):
        raise EngineError("requests are in progress; drain the instance first", status=409)
    await _reset_prefix_cache(server, request)
    for rank in server.ranks:
        rank.role = role_order.role
    return _json({"role": role_order.role})


async def _wan(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    """Set the capacity of a WAN path. A request to any instance applies to the whole process."""
    wan_order, fabric = await _read(request, WanOrder), server.kv_server.kv_source.fabric
    only = fabric.wan[0] if len(fabric.wan) == 1 else ""
    try:
        fabric.degrade(wan_order.wan_path or only, wan_order.share)
    except InputError as error:
        raise ApiError(str(error), param="wan_path") from None
    return _json({})


async def _read_blocks(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    """Read blocks from the store into the buffer of the instance's node."""
    tier, order = _storage_of(server), await _read(request, EmulatedReadOrder)
    try:
        keys = [bytes.fromhex(key) for key in order.keys]
    except ValueError:
        raise ApiError("a key is not hexadecimal", param="keys") from None
    read = await tier.node.begin(order.id, tier.model, keys, tier.block_bytes)
    if order.wait == "room":
        return _json({"id": order.id, "blocks": read.blocks}, status=202)
    return _staged(server, await tier.node.complete(read))


async def _wait_for_blocks(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    """Return when the blocks of a read are in the buffer."""
    node, read_id = _storage_of(server).node, request.path.removeprefix(READS_PATH + "/")
    return _staged(server, await node.complete(node.find(read_id)))


def _staged(server: InstanceServer, read: EmulatedBufferRead) -> web.Response:
    host, port = server.origin.host, server.origin.kv_port
    found = {"id": read.id, "blocks": read.blocks, "bytes": read.kv_bytes, "seconds": read.in_service_s}
    return _json({**found, "waited_s": read.waited_s, "data": host_port(host, port)})


async def _release_blocks(server: InstanceServer, request: web.BaseRequest) -> web.StreamResponse:
    _storage_of(server).node.release(request.path.removeprefix(READS_PATH + "/"))
    return web.Response(status=204)


async def _buffer(server: InstanceServer, _: web.BaseRequest) -> web.StreamResponse:
    node = _storage_of(server).node
    found = {"queued_bytes": node.queued_bytes, "buffered_bytes": node.buffered_bytes}
    return _json({**found, "quota_bytes": node.buffer_bytes, "read_bytes": node.read_bytes})


def _storage_of(server: InstanceServer) -> StorageTier:
    tier = server.engine.storage
    if tier is None:
        raise ApiError(
            f"the node of {server.engine.instance.name} has no storage NIC", status=404, kind="NotFoundError"
        )
    return tier


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(document), content_type=JSON)


async def _read(request: web.BaseRequest, kind: type[T]) -> T:
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(f"the body cannot be read: {error}") from None


_ONE_READ = {"GET": _wait_for_blocks, "DELETE": _release_blocks}
"""Requests below READS_PATH, by method."""
ROUTES: dict[tuple[str, str], Callable[[InstanceServer, web.BaseRequest], Awaitable[web.StreamResponse]]] = {
    ("POST", "/v1/completions"): _completions,
    ("POST", "/v1/chat/completions"): _chat,
    ("POST", "/v1/responses"): _responses,
    ("POST", "/v1/messages"): _messages,
    ("POST", "/v1/messages/count_tokens"): _count_tokens,
    ("GET", "/v1/models"): _models,
    ("GET", "/health"): _health,
    ("GET", "/metrics"): _metrics,
    ("POST", "/tokenize"): _tokenize,
    ("POST", "/detokenize"): _detokenize,
    ("GET", "/tokenizer_info"): _tokenizer_info,
    ("POST", "/v1/embeddings"): _pooled(PoolingBody, embeddings),
    ("POST", "/pooling"): _pooled(PoolingBody, pooling),
    ("POST", "/classify"): _pooled(PoolingBody, classes),
    **{("POST", path): _pooled(ScoreBody, scores) for path in ("/score", "/v1/score")},
    **{("POST", path): _pooled(RerankBody, ranks) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    ("POST", "/v1/audio/transcriptions"): _transcription,
    ("POST", "/v1/audio/translations"): _transcription,
    ("POST", "/reset_prefix_cache"): _reset_prefix_cache,
    ("POST", "/emulator/fault"): _fault,
    ("POST", "/emulator/restart"): _restart,
    ("POST", "/emulator/slow"): _slow,
    ("POST", "/emulator/role"): _role,
    ("POST", "/emulator/wan"): _wan,
    ("POST", READS_PATH): _read_blocks,
    ("GET", READS_PATH): _buffer,
}
