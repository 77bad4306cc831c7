"""One ext_proc stream: the messages of Envoy about one request, and the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from kvroute.epp.envoy_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)
from kvroute.epp.exchange import Pick, PickExchange, PickRequest
from kvroute.epp.messages import (
    body_pieces,
    buffered_replies,
    headers_of,
    picked,
    served_of,
    set_headers,
    split_names,
    status_of,
    streamed_replies,
    subset_of,
)
from kvroute.gateway.openai_api.responses import error_body

_WANTED, _ECHO, _SHOWN = b"test-epp-endpoint-selection", b"x-echo-set-header", b"x-conformance-test-served-endpoint"
"""Headers of the conformance tests of the Gateway API inference extension."""


class ProtocolFault(Exception):
    """Envoy's configuration sends messages that a picker cannot use; the text says what to change."""


class ProcessingStream:
    """Reads one request, asks `take` for an answer, sends it, and reports the response until the stream ends."""

    def __init__(
        self,
        context: Any,
        take: Callable[[PickExchange], None],
        room: Callable[[ProcessingStream, int], tuple[int, str]],
        *,
        conformance: bool,
    ) -> None:
        """Args:

        context: gRPC's context of the call.
        take: takes each request.
        room: takes the size of the body so far, in bytes; returns status and reason if it has no room, else 0.
        conformance: whether the headers of the conformance tests have an effect.
        """
        self._context, self._take = context, take
        self._room, self._conformance = room, conformance
        self.held_bytes = 0
        """Memory that counts for the body; only `room` changes it."""
        self._mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._has_body = self._trailers = False
        self._answered: asyncio.Future[Pick | ProcessingResponse] = asyncio.get_running_loop().create_future()
        self._withdrawal: ProcessingResponse | None = None
        """Response that Envoy sends although it has the choice already."""
        self._task = asyncio.current_task()
        self._reset = self._writing = False

    async def run(self) -> None:
        """Serve the stream until Envoy ends it.

        Raises:
            ProtocolFault: see there.
        """
        first = await self._context.read()
        if first is grpc.aio.EOF:
            return
        request = await self._request(first)
        if request is None:
            return
        exchange = PickExchange(request, self._answer, self._abort)
        exchange.resized = lambda size: not self._room(self, size)[0]
        try:
            self._take(exchange)
            del request
            answer = await self._answered
            for reply in self._replies(answer):
                await self._write(reply)
            self._room(self, 0)
            if isinstance(answer, Pick):
                await self._follow(exchange)
        except asyncio.CancelledError:
            if self._withdrawal is not None:
                await self._context.write(self._withdrawal)
            elif self._reset:
                await self._context.abort(grpc.StatusCode.ABORTED, "the request has failed in the picker")
            else:
                raise
        finally:
            exchange.closed()

    def _answer(self, answer: Pick | ProcessingResponse) -> None:
        if not self._answered.done():
            self._answered.set_result(answer)
        elif isinstance(answer, ProcessingResponse):
            self._withdrawal = answer
            self._interrupt()

    def _abort(self) -> None:
        self._reset = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Stop following the response."""
        if self._task is not None and not self._writing:
            self._task.cancel()

    async def _write(self, reply: ProcessingResponse) -> None:
        """Send one message. An interruption waits for its end: gRPC sends one message at a time, and no status
        meanwhile."""
        self._writing = True
        try:
            await self._context.write(reply)
        finally:
            self._writing = False
        if self._reset or self._withdrawal is not None:
            raise asyncio.CancelledError

    # The request

    async def _request(self, first: ProcessingRequest) -> PickRequest | None:
        """Read the request to its end; None: it has ended early, or has been answered."""
        if not first.HasField("request_headers"):
            raise ProtocolFault("set request_header_mode: SEND, so that processing begins with the request headers")
        if first.HasField("protocol_config"):
            self._mode = first.protocol_config.request_body_mode
            self._response_mode = first.protocol_config.response_body_mode
        request = self._read(first)
        self._has_body = not first.request_headers.end_of_stream and self._mode != NONE
        if self._has_body:
            if self._mode not in (BUFFERED, FULL_DUPLEX_STREAMED):
                raise ProtocolFault("set request_body_mode: FULL_DUPLEX_STREAMED (or BUFFERED)")
            if self._mode == BUFFERED:
                await self._write(ProcessingResponse(request_headers=HeadersResponse()))
            body = await self._body(request)
            return None if body is None else replace(request, body=body)
        return request

    def _read(self, first: ProcessingRequest) -> PickRequest:
        """Return the request without its body."""
        pseudo: dict[bytes, bytes] = {}
        headers = []
        for name, value in headers_of(first.request_headers):
            if name.startswith(b":"):
                pseudo[name] = value
            else:
                headers.append((name, value))
        path, _, query = pseudo.get(b":path", b"/").partition(b"?")
        subset = subset_of(first)
        subsets = [] if subset is None else [subset]
        peer = next((value for name, value in headers if name == b"x-forwarded-for"), b"").decode("latin-1")
        if self._conformance:
            wanted = [value.decode("latin-1") for name, value in headers if name == _WANTED]
            subsets += [frozenset(split_names(value)) for value in wanted]
        return PickRequest(pseudo.get(b":method", b"GET"), path, query, headers, b"", peer, tuple(subsets))

    async def _body(self, request: PickRequest) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._context.read()
            if message is grpc.aio.EOF:
                return None
            if message.HasField("request_trailers"):
                self._trailers = True
                return b"".join(parts)
            if not message.HasField("request_body"):
                raise ProtocolFault("the body of a request follows its headers")
            parts.append(message.request_body.body)
            size += len(parts[-1])
            status, why = self._room(self, size)
            if status:
                kind = "invalid_request_error" if status == 413 else "service_unavailable"
                retry = [] if status == 413 else [(b"retry-after", b"1")]
                PickExchange(request, self._answer, self._abort).respond(status, error_body(why, kind), headers=retry)
                for reply in self._replies(self._answered.result()):
                    await self._write(reply)
                return None
            if message.request_body.end_of_stream:
                return b"".join(parts)

    def _replies(self, answer: Pick | ProcessingResponse) -> Iterable[ProcessingResponse]:
        if not isinstance(answer, Pick):
            return [answer]
        added = answer.added
        if self._conformance:
            added = [*added, (_ECHO, _SHOWN + b":" + answer.destination.encode())]
        mutation, metadata = picked(answer.destination, added, answer.removed)
        if not self._has_body:
            return streamed_replies(mutation, metadata, None)
        if self._mode == BUFFERED:
            return buffered_replies(mutation, metadata, answer.body)
        replies = streamed_replies(mutation, metadata, answer.body, ends=not self._trailers)
        if self._trailers:
            replies.append(ProcessingResponse(request_trailers=TrailersResponse()))
        return replies

    # The response

    async def _follow(self, exchange: PickExchange) -> None:
        """Report the response, and return every message of it unchanged."""
        while (message := await self._context.read()) is not grpc.aio.EOF:
            match message.WhichOneof("request"):
                case "response_headers":
                    served = served_of(message)
                    exchange.response_began(status_of(message.response_headers), served)
                    await self._write(ProcessingResponse(response_headers=self._shown(served)))
                    if message.response_headers.end_of_stream:
                        exchange.closed()
                case "response_body":
                    for piece in self._unchanged(message.response_body):
                        await self._write(ProcessingResponse(response_body=piece))
                case "response_trailers":
                    exchange.closed()
                    await self._write(ProcessingResponse(response_trailers=TrailersResponse()))
                case "request_trailers":
                    await self._write(ProcessingResponse(request_trailers=TrailersResponse()))
                case _:
                    raise ProtocolFault("the request is over after the choice of its endpoint")

    def _shown(self, served: str) -> HeadersResponse:
        if not self._conformance:
            return HeadersResponse()
        shown = set_headers([(_SHOWN, served.encode() or b"fail: missing")])
        return HeadersResponse(response=CommonResponse(header_mutation=HeaderMutation(set_headers=shown)))

    def _unchanged(self, body: HttpBody) -> Iterable[BodyResponse]:
        if self._response_mode == FULL_DUPLEX_STREAMED:
            return body_pieces(body.body, ends=body.end_of_stream)
        return [BodyResponse()]
