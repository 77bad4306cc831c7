"""One ext_proc stream: the messages of Envoy about one request, and the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

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
from kvroute.epp.exchange import Pick, PickExchange, PickRequest, id_headers
from kvroute.epp.messages import (
    MESSAGE_BYTES,
    RequestRefused,
    body_pieces,
    buffered_replies,
    checked_headers,
    immediate_reply,
    other_bytes,
    picked,
    served_of,
    set_headers,
    split_names,
    status_of,
    streamed_replies,
    subset_of,
    too_long,
)
from kvroute.http.deadlines import NEVER_S
from kvroute.http.headers import Headers, request_id_of
from kvroute.http.server.request_parser import HttpError, RequestLimits
from kvroute.serve.api.anthropic.errors import ApiErrors

_WANTED, _ECHO, _SHOWN = b"test-epp-endpoint-selection", b"x-echo-set-header", b"x-conformance-test-served-endpoint"
"""Headers of the conformance tests of the Gateway API inference extension."""


_ERRORS = ApiErrors()
_SLOW_HEAD = HttpError(408, "the request's headers did not arrive in time")
_SLOW_BODY = HttpError(408, "the request's body did not arrive in time")


class ProtocolFault(Exception):
    """Envoy's configuration sends messages that a picker cannot use; the text says what to change."""


class StreamOwner(Protocol):
    """The server of all streams."""

    limits: RequestLimits

    def take(self, stream: ProcessingStream, exchange: PickExchange) -> None:
        """Handle the request of a stream, which is complete."""
        ...

    def hold(self, stream: ProcessingStream, nbytes: int) -> None:
        """Count the size of a stream's body so far, in bytes. Raises Refused if there is no room for it."""
        ...

    def refused(self, status: int, path: bytes, request_id: bytes, client: str) -> None:
        """Count and log an error response to a request that is not complete. Args: `path`, `client`: empty: not
        known."""
        ...


class ProcessingStream:
    """Reads one request, lets its owner take it, sends the answer, and reports the response until the stream ends.

    See `Deadlines` for `deadline_s` and `expire`."""

    def __init__(self, context: Any, owner: StreamOwner, *, conformance: bool) -> None:
        """Args:

        context: gRPC's context of the call, which reads messages that are not parsed yet.
        owner: takes the request.
        conformance: whether the headers of the conformance tests have an effect.
        """
        self._context, self._owner, self._conformance = context, owner, conformance
        self._now = asyncio.get_running_loop().time
        self.deadline_s = self._now() + owner.limits.header_s
        self.held_bytes = 0
        """Memory that counts for the body; only the owner changes it."""
        self._mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._has_body = self._trailers = False
        self._path, self._peer = b"", ""
        self._headers_read: Headers = []
        self._answered: asyncio.Future[Pick | ProcessingResponse] = asyncio.get_running_loop().create_future()
        self._withdrawal: ProcessingResponse | None = None
        """Response that Envoy sends although it has the choice already."""
        self._incomplete: HttpError | None = None
        """Response to a request that is not awaited any longer."""
        self._expired: Callable[[], None] = self._too_slow
        """Called at the end of the deadline, unless a reply is being sent."""
        self._task = asyncio.current_task()
        self._reset = self._writing = self._over = False
        """`_over`: the response is over, and Envoy has not ended the stream in time."""

    async def run(self) -> None:
        """Serve the stream until Envoy ends it.

        Raises:
            ProtocolFault: see there.
        """
        try:
            await self._serve()
        except RequestRefused as refused:
            await self._refuse(refused.error)
        except asyncio.CancelledError:
            if self._incomplete is not None:
                await self._refuse(self._incomplete)
            elif self._withdrawal is not None:
                self._writing = True
                self.deadline_s = self._now() + self._owner.limits.stall_s
                await self._context.write(self._withdrawal)
            elif self._reset:
                await self._context.abort(grpc.StatusCode.ABORTED, "the request has failed in the picker")
            elif not self._over:
                raise

    def expire(self, now: float) -> None:
        """Handle the end of the deadline: Envoy does not go on, or reads no reply."""
        self.deadline_s = NEVER_S
        if not self._writing:
            self._expired()
        elif self._task is not None:
            self._task.cancel()

    def refuse(self, error: HttpError) -> None:
        """Respond to a request that is not complete yet."""
        if self._task is not None and not self._writing:
            self._incomplete = error
            self._task.cancel()

    def _too_slow(self) -> None:
        self.refuse(_SLOW_BODY if self._path else _SLOW_HEAD)

    def _leave(self) -> None:
        """End the stream, because the response is over."""
        self._over = True
        self._interrupt()

    async def _serve(self) -> None:
        first = await self._read()
        if first is None:
            return
        if first.HasField("response_headers"):  # Envoy's own error response to a request that no filter has seen
            await self._follow(None, first)
            return
        request = await self._request(first)
        if request is None:
            return
        exchange = PickExchange(request, self._answer, self._abort)
        exchange.resized = self._resized
        try:
            self._owner.take(self, exchange)
            del request, first
            answer = await self._answered
            for reply in self._replies(answer):
                await self._write(reply)
            self.deadline_s = NEVER_S
            self._owner.hold(self, 0)
            if isinstance(answer, Pick):
                self._expired = exchange.late
                self.deadline_s = self._now() + answer.wait_s
                await self._follow(exchange, wait_s=answer.wait_s)
        finally:
            exchange.closed()

    async def _refuse(self, error: HttpError) -> None:
        """Let Envoy send an error response."""
        body = _ERRORS.body(self._path, error.status, error.message, error.type, error.code)
        request_id = request_id_of(self._headers_read)
        headers = id_headers(self._path, request_id)
        if error.status in (429, 503):
            headers.append((b"retry-after", b"1"))
        self._owner.refused(error.status, self._path, request_id, self._peer)
        self.deadline_s = self._now() + self._owner.limits.stall_s
        self._writing = True
        await self._context.write(immediate_reply(error.status, body, b"application/json", headers))

    def _resized(self, nbytes: int) -> bool:
        """Count the size of the body that has been decoded or freed; return whether there is room for it."""
        try:
            self._owner.hold(self, nbytes)
        except RequestRefused:
            return False
        return True

    async def _read(self) -> ProcessingRequest | None:
        """Read one message; None: the stream has ended."""
        raw: bytes = await self._context.read()
        if raw is grpc.aio.EOF:
            return None
        if len(raw) > MESSAGE_BYTES and other_bytes(raw) > MESSAGE_BYTES + self._owner.limits.header_bytes:
            raise RequestRefused(too_long(self._owner.limits))
        try:
            message: ProcessingRequest = ProcessingRequest.FromString(raw)
        except DecodeError:
            raise ProtocolFault("send messages of ext_proc v3") from None
        return message

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
        """Send one message within the time for a reader that stalls. An interruption waits for its end: gRPC sends one
        message at a time, and no status meanwhile."""
        self._writing = True
        self.deadline_s = self._now() + self._owner.limits.stall_s
        try:
            await self._context.write(reply)
        finally:
            self._writing = False
        if self._reset or self._withdrawal is not None:
            raise asyncio.CancelledError

    # The request

    async def _request(self, first: ProcessingRequest) -> PickRequest | None:
        """Read the request to its end; None: it has ended early."""
        if not first.HasField("request_headers"):
            raise ProtocolFault("set request_header_mode: SEND, so that processing begins with the request headers")
        if first.HasField("protocol_config"):
            self._mode = first.protocol_config.request_body_mode
            self._response_mode = first.protocol_config.response_body_mode
        pseudo, headers = checked_headers(first.request_headers, self._owner.limits)
        self._path, _, query = pseudo.get(b":path", b"/").partition(b"?")
        self._headers_read = headers
        via = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        self._peer = via.rpartition(b",")[2].strip().decode("latin-1")  # Envoy appends its client; others are claims
        body: bytes | None = b""
        self._has_body = not first.request_headers.end_of_stream
        if self._has_body:
            if self._mode not in (BUFFERED, FULL_DUPLEX_STREAMED):
                raise ProtocolFault("set request_body_mode: FULL_DUPLEX_STREAMED (or BUFFERED)")
            if self._mode == BUFFERED:
                await self._write(ProcessingResponse(request_headers=HeadersResponse()))
            self.deadline_s = self._now() + self._owner.limits.body_s
            body = await self._body()
        self.deadline_s = NEVER_S
        if body is None:
            return None
        subset = subset_of(first)
        subsets = [] if subset is None else [subset]
        if self._conformance:
            wanted = [value.decode("latin-1") for name, value in headers if name == _WANTED]
            subsets += [frozenset(split_names(value)) for value in wanted]
        return PickRequest(pseudo.get(b":method", b"GET"), self._path, query, headers, body, self._peer, tuple(subsets))

    async def _body(self) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while (message := await self._read()) is not None:
            if message.HasField("request_trailers"):
                self._trailers = True
                return b"".join(parts)
            if not message.HasField("request_body"):
                raise ProtocolFault("the body of a request follows its headers")
            if message.request_body.body:
                parts.append(message.request_body.body)
                size += len(parts[-1])
                self._owner.hold(self, size)
            if message.request_body.end_of_stream:
                return b"".join(parts)
        return None

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

    async def _follow(
        self, exchange: PickExchange | None, message: ProcessingRequest | None = None, *, wait_s: float = 0.0
    ) -> None:
        """Report the response, and return every message of it unchanged. The deadline is that of its first message.

        Args:
            exchange: of the request; None: the picker has not seen it.
            message: the first one; None: it is not read yet.
            wait_s: time limit for the next part of a body that Envoy sends, in seconds.
        """
        message = message or await self._read()
        due_s = self.deadline_s
        while message is not None:
            match message.WhichOneof("request"):
                case "response_headers":
                    served = served_of(message)
                    if exchange is not None:
                        exchange.response_began(status_of(message.response_headers), served)
                    await self._write(ProcessingResponse(response_headers=self._shown(served)))
                    if exchange is not None and message.response_headers.end_of_stream:
                        exchange.closed()
                    due_s = self._due_s(wait_s, ends=exchange is None or message.response_headers.end_of_stream)
                case "response_body":
                    for piece in self._unchanged(message.response_body):
                        await self._write(ProcessingResponse(response_body=piece))
                    due_s = self._due_s(wait_s, ends=message.response_body.end_of_stream)
                case "response_trailers":
                    if exchange is not None:
                        exchange.closed()
                    await self._write(ProcessingResponse(response_trailers=TrailersResponse()))
                    due_s = self._due_s(wait_s, ends=True)
                case "request_trailers":
                    await self._write(ProcessingResponse(request_trailers=TrailersResponse()))
                case _:
                    raise ProtocolFault("the request is over after the choice of its endpoint")
            self.deadline_s = due_s
            message = await self._read()

    def _due_s(self, wait_s: float, *, ends: bool) -> float:
        """Return the deadline of the next message of a response that has begun. Args: `ends`: nothing but the end of
        the stream can follow."""
        self._expired = self._leave if ends else self._abort
        if ends:
            return self._now() + self._owner.limits.body_s
        return NEVER_S if self._response_mode == NONE else self._now() + wait_s

    def _shown(self, served: str) -> HeadersResponse:
        if not self._conformance:
            return HeadersResponse()
        shown = set_headers([(_SHOWN, served.encode() or b"fail: missing")])
        return HeadersResponse(response=CommonResponse(header_mutation=HeaderMutation(set_headers=shown)))

    def _unchanged(self, body: HttpBody) -> Iterable[BodyResponse]:
        if self._response_mode == FULL_DUPLEX_STREAMED:
            return body_pieces(body.body, ends=body.end_of_stream)
        return [BodyResponse()]
