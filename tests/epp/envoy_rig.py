"""A picker in front of engines, and a gRPC client in place of Envoy: it asks, sends the request to the endpoint,
and reports the response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import msgspec
from tests.serve.rig import COMPLETIONS, MODEL, RunningGateway
from tests.serve.stub_engines import Engine, deployment, listening

from kvroute.epp.envoy_pb2 import (
    FULL_DUPLEX_STREAMED,
    NONE,
    BodySendMode,
    HeaderMap,
    HeaderValue,
    HealthCheckRequest,
    HealthCheckResponse,
    HttpBody,
    HttpHeaders,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from kvroute.epp.frontend import PickerFrontend
from kvroute.epp.messages import DESTINATION, HEALTH, NAMESPACE, PROCESS, SERVED, SUBSET, SUBSET_NAMESPACE
from kvroute.epp.server import PickerSpec
from kvroute.serve.assembly import Gateway
from kvroute.serve.lifecycle.deployment import Deployment

PIECE_BYTES = 60_000

_OPTIONS = (("grpc.http2.bdp_probe", 0),)
"""Without it the window of a fast connection grows to megabytes, so that a sender that reads nothing stalls no one."""


@dataclass
class Answer:
    """What the picker has answered to a request."""

    destination: str = ""
    """The header; empty: an immediate response."""
    metadata: str = ""
    """The same in dynamic metadata."""
    added: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    status: int = 0
    """Of the immediate response; 0: there is none."""
    headers: dict[str, str] = field(default_factory=dict)
    """Of the immediate response."""

    @property
    def endpoints(self) -> list[str]:
        """The endpoints in the order to try."""
        return self.destination.split(",")


def message_headers(headers: Sequence[tuple[str, str]]) -> HeaderMap:
    """Return headers as Envoy sends them."""
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode()) for name, value in headers])


def metadata_of(namespace: str, key: str, value: Any) -> Metadata:
    """Return metadata with one value."""
    message = Metadata()
    message.filter_metadata[namespace].update({key: value})
    return message


class EnvoyStream:
    """One request in Envoy."""

    def __init__(self, channel: Any, mode: BodySendMode = FULL_DUPLEX_STREAMED) -> None:
        self._mode = mode
        self.call = channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()

    async def send(self, **fields: Any) -> None:
        """Send one message."""
        await self.call.write(ProcessingRequest(**fields))

    async def read(self) -> ProcessingResponse:
        """Read one message."""
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.details()
        assert isinstance(message, ProcessingResponse)
        return message

    async def ask(
        self,
        body: bytes | None,
        *,
        path: str = COMPLETIONS,
        headers: Sequence[tuple[str, str]] = (),
        subset: Any = None,
        method: str = "",
    ) -> Answer:
        """Send a request, and read the choice. Args: `body` None: the request has none; `method` empty: GET without a
        body, else POST."""
        first = asyncio.ensure_future(self.read())
        # The picker may refuse a request and close the stream before it has the whole body.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.ask_only(body, path=path, headers=headers, subset=subset, method=method)
        return await self.answer(body is not None, await first)

    async def ask_only(
        self,
        body: bytes | None,
        *,
        path: str = COMPLETIONS,
        headers: Sequence[tuple[str, str]] = (),
        subset: Any = None,
        method: str = "",
    ) -> None:
        """Send a request."""
        method = method or ("GET" if body is None else "POST")
        pseudo = [(":method", method), (":path", path), (":authority", "llm")]
        sent = HttpHeaders(headers=message_headers([*pseudo, *headers]), end_of_stream=body is None)
        more = {} if subset is None else {"metadata_context": metadata_of(SUBSET_NAMESPACE, SUBSET, subset)}
        config = ProtocolConfiguration(request_body_mode=self._mode, response_body_mode=NONE)
        await self.send(request_headers=sent, protocol_config=config, **more)
        if body is None:
            return
        for start in range(0, max(len(body), 1), PIECE_BYTES):
            piece, end = body[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(body)
            await self.send(request_body=HttpBody(body=piece, end_of_stream=end))

    async def answer(self, has_body: bool, first: ProcessingResponse | None = None) -> Answer:
        """Read the choice, or the immediate response. Args: `first`: its first message, if that is already read."""
        first = await self.read() if first is None else first
        if first.HasField("immediate_response"):
            response = first.immediate_response
            shown = {header.header.key: header.header.raw_value.decode() for header in response.headers.set_headers}
            return Answer(status=response.status.code, body=response.body, headers=shown)
        mutation = first.request_headers.response.header_mutation
        added = {header.header.key: header.header.raw_value.decode() for header in mutation.set_headers}
        inner = first.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value
        answer = Answer(added.pop(DESTINATION), inner, added, list(mutation.remove_headers))
        while has_body:
            piece = (await self.read()).request_body.response.body_mutation.streamed_response
            answer.body += piece.body
            has_body = not piece.end_of_stream
        return answer

    async def respond(self, status: int, served: str = "", *, ends: bool = False) -> ProcessingResponse:
        """Report that the response begins. Args: `served`: the endpoint that has served it; empty: none has."""
        sent = HttpHeaders(headers=message_headers([(":status", str(status))]), end_of_stream=ends)
        more = {"metadata_context": metadata_of(NAMESPACE, SERVED, served)} if served else {}
        await self.send(response_headers=sent, **more)
        return await self.read()

    async def end(self) -> None:
        """End the stream, as Envoy does after the end of the response."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF


@dataclass(slots=True)
class PickerRig(RunningGateway):
    """A running picker and a channel to it."""

    channel: Any

    def stream(self, mode: BodySendMode = FULL_DUPLEX_STREAMED) -> EnvoyStream:
        """Begin a request."""
        return EnvoyStream(self.channel, mode)

    async def health(self, service: str) -> int:
        """Return the status of a health check."""
        check = self.channel.unary_unary(
            HEALTH,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        return int((await check(HealthCheckRequest(service=service))).status)

    async def through(self, body: dict[str, Any], **ask: Any) -> tuple[int, bytes]:
        """Do a whole request as Envoy does it: ask, send it to the first endpoint that accepts it, report and end."""
        stream = self.stream()
        answer = await stream.ask(msgspec.json.encode(body), **ask)
        if answer.status:
            return answer.status, answer.body
        for endpoint in answer.endpoints:
            try:
                async with self.session.post(f"http://{endpoint}{COMPLETIONS}", data=answer.body) as response:
                    await stream.respond(response.status, endpoint)
                    found = await response.read()
            except aiohttp.ClientConnectorError:
                continue
            await stream.end()
            return response.status, found
        await stream.respond(503)
        await stream.end()
        return 503, b""

    def booked(self) -> dict[str, int]:
        """Return the number of requests on each instance, as the core and the engine clients count them."""
        runtime = self.gateway.runtime
        loads = runtime.control.loads(runtime.now())
        return {
            name: load.queued + runtime.engines[name].in_flight
            for name, load in loads.items()
            if load.queued or runtime.engines[name].in_flight
        }


@asynccontextmanager
async def picking(made: Deployment, settings: PickerSpec | None = None) -> AsyncIterator[PickerRig]:
    """Run a picker and a channel to it."""
    gateway = Gateway(made, seed=1, frontend=PickerFrontend(settings))
    try:
        await gateway.start()
        async with (
            aiohttp.ClientSession() as session,
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=_OPTIONS) as channel,
        ):
            yield PickerRig(gateway, session, channel)
    finally:
        await gateway.close()


@asynccontextmanager
async def picker(
    engines: Sequence[Engine], section: str = "", settings: PickerSpec | None = None
) -> AsyncIterator[PickerRig]:
    """Run the engines and a picker in front of them."""
    async with listening(engines), picking(deployment(engines, section), settings) as rig:
        yield rig


def alone(count: int = 3) -> list[Engine]:
    """Return engines that each prefill and decode."""
    return [Engine(f"engine{number}", "both") for number in range(count)]


def address(engine: Engine) -> str:
    """Return the endpoint of an engine as Envoy writes it."""
    return f"127.0.0.1:{engine.port}"


def completion_body(**fields: Any) -> bytes:
    """Return the body of a completion request."""
    return msgspec.json.encode({"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3} | fields)
