"""Stub engines for the gateway: each one records its requests and answers as the test specifies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web
from tests.serve.rig import CLUSTER, MODEL, RunningGateway, with_section
from tests.waiting import HANGS_S

from kvroute.serve.assembly import Gateway
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute.types import KvProtocol, Role

HEAD = CLUSTER.partition("instances:")[0]
NODES = ("node0", "node1")


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One request that an engine received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded from JSON."""
        return msgspec.json.decode(self.body)

    def raw(self, name: str) -> bytes:
        """Return the undecoded JSON bytes of one field of the body."""
        return bytes(msgspec.json.decode(self.body, type=dict[str, msgspec.Raw])[name])


Serve = Callable[["Engine", web.BaseRequest, ReceivedRequest], Awaitable[web.StreamResponse]]


async def tokens(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
    """Answer like a model, with `max_tokens` tokens, streamed or whole; a prefill leg of vLLM also returns KV
    parameters."""
    body = received.json
    count = body.get("max_tokens", 1)
    whole: dict[str, Any] = {"object": "text_completion", "choices": [{"index": 0, "text": f"{engine.name} " * count}]}
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        whole["kv_transfer_params"] = engine.params
    if not body.get("stream"):
        return web.json_response(body=msgspec.json.encode(whole | {"usage": {"completion_tokens": count}}))
    return await stream(request, [f"{engine.name} "] * count)


async def stream(request: web.BaseRequest, texts: Sequence[str]) -> web.StreamResponse:
    """Send each text as a server-sent event."""
    response = await start_stream(request)
    for text in texts:
        await response.write(event(text))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def start_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Start a stream: send its status and headers."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(text: str) -> bytes:
    """Return the event of one token of a stream."""
    return b"data: %b\n\n" % msgspec.json.encode({"choices": [{"index": 0, "text": text}]})


def failing(status: int, *, times: int = 1 << 30, then: Serve = tokens) -> Serve:
    """Return a handler that answers the first `times` requests with an error."""
    left = times

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        nonlocal left
        left -= 1
        if left >= 0:
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=status)
        return await then(engine, request, received)

    return serve


@dataclass(slots=True, eq=False)
class Gate:
    """A point in the middle of a request where an engine waits."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the wait is over, also when the caller has closed the connection."""
    cancelled: bool = False
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        """Wait until the gate is open."""
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        finally:
            self.left.set()

    def before(self, then: Serve) -> Serve:
        """Return a handler that waits at this gate before it answers."""

        async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            await self.wait()
            return await then(engine, request, received)

        return serve


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. `serve` answers completions; health checks, metrics and bootstrap queries are answered as by a
    working engine."""

    name: str
    role: Role
    protocol: KvProtocol = "vllm"
    model: str = MODEL
    serve: Serve = tokens
    params: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(b'{"do_remote_prefill":true}'))
    received: list[ReceivedRequest] = field(default_factory=list)
    """The completion requests received."""
    queries: int = 0
    """Number of requests to the bootstrap server."""
    engine_id: str = ""
    """Engine ID that the bootstrap server returns. Empty: it lists no engine."""
    started_s: float = 1.0
    """Start time of the process in seconds, as the metrics page shows it."""
    metrics: str = ""
    """More lines of the metrics page."""
    tls: ssl.SSLContext | None = None
    ranks: int = 1
    """Data-parallel ranks; if there are several, the bootstrap server returns an ID for each of them."""
    port: int = 0

    @property
    def endpoint(self) -> str:
        """The endpoint in the syntax of the cluster file."""
        url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        bootstrap = f', bootstrap: "127.0.0.1:{self.port}"' if self.role == "prefill" else ""
        return f'{{url: "{url}", protocol: {self.protocol}{bootstrap}}}'

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = ReceivedRequest(request.method, request.path_qs, headers, await request.read())
        match request.path:
            case "/health":
                return web.Response()
            case "/metrics":
                page = f"vllm:num_requests_running 0\nprocess_start_time_seconds {self.started_s}\n"
                return web.Response(text=page + self.metrics)
            case "/query":
                self.queries += 1
                ids = [f"{self.engine_id}_dp{rank}" for rank in range(self.ranks)]
                if self.ranks == 1:
                    ids = [self.engine_id]
                found = {str(rank): {"engine_id": name, "worker_addr": {}} for rank, name in enumerate(ids)}
                return web.json_response(found if self.engine_id else {})
            case _:
                self.received.append(received)
                return await self.serve(self, request, received)


def deployment(
    engines: Sequence[Engine],
    section: str = "",
    listen: str = "{port: 0}",
    admin: str = "{port: 0}",
    head: str = HEAD,
) -> Deployment:
    """Return a deployment of engines that already listen, alternately in two racks, with the settings of a gateway.
    Args: `head` is the cluster file up to its instances."""
    lines = [
        f'  - {{name: {engine.name}, role: {engine.role}, gpus: "{NODES[index % 2]}:{index - index % 2}-'
        f'{index - index % 2 + 1}", model: {engine.model}, endpoint: {engine.endpoint}}}\n'
        for index, engine in enumerate(engines)
    ]
    gateway = f"gateway:\n  listen: {listen}\n  admin: {admin}\n  policy: foresight\n"
    return Deployment.of(with_section(section, f"{head}instances:\n{''.join(lines)}{gateway}"), "stub.yaml")


@asynccontextmanager
async def listening(engines: Sequence[Engine]) -> AsyncIterator[None]:
    """Let the engines listen while the context is open."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            runner = web.ServerRunner(web.Server(engine.handle, handler_cancellation=True), shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", engine.port, ssl_context=engine.tls, reuse_address=True)
            await site.start()
            engine.port = int(runner.addresses[0][1])
        yield


@asynccontextmanager
async def serving(made: Deployment) -> AsyncIterator[RunningGateway]:
    """Run a gateway and a client of it."""
    gateway = Gateway(made, seed=1)
    try:
        await gateway.start()
        async with aiohttp.ClientSession() as session:
            yield RunningGateway(gateway, session)
    finally:
        await gateway.close()


@asynccontextmanager
async def stub_rig(
    engines: Sequence[Engine], section: str = "", listen: str = "{port: 0}", admin: str = "{port: 0}"
) -> AsyncIterator[RunningGateway]:
    """Run the engines and a gateway in front of them."""
    async with listening(engines), serving(deployment(engines, section, listen, admin)) as front:
        yield front


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` with a time limit, so that a hang fails the test."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await main

    uvloop.run(bounded())


def completion(**fields: Any) -> dict[str, Any]:
    """Return the body of a completion request."""
    return {"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3} | fields


def sent_to_decode(body: dict[str, Any]) -> dict[str, Any]:
    """Return what the decode engine receives of a request's fields: a stream reports its number of tokens."""
    return body | {"stream_options": {"include_usage": True}} if body.get("stream") else body


def engines_of(protocol: KvProtocol) -> tuple[list[Engine], list[Engine]]:
    """Return two prefill and two decode engines of one protocol."""
    prefill = [Engine(f"prefill{n}", "prefill", protocol, engine_id=f"id-{n}") for n in (0, 1)]
    return prefill, [Engine(f"decode{n}", "decode", protocol) for n in (0, 1)]
