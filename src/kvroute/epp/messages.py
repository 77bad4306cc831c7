"""Conversion between the messages of envoy.proto and what the picker uses; what comes from Envoy is checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from google.protobuf import struct_pb2

from kvroute.epp.envoy_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpHeaders,
    HttpStatus,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)
from kvroute.http.headers import Headers
from kvroute.http.server.request_parser import HttpError, RequestLimits

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
HEALTH = "/grpc.health.v1.Health/Check"
NAMESPACE, DESTINATION = "envoy.lb", "x-gateway-destination-endpoint"
"""Namespace and key of the chosen endpoints, as a header (the key alone) and as dynamic metadata."""
ATTEMPTS = "x-kvroute-destination-endpoints"
"""Key beside it: the same endpoints, each under the number of Envoy's attempt ("1", "2", ...)."""
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
PIECE_BYTES = 62 * 1024
"""Longest part of a body in one message: Envoy splits messages of more than 64 KiB."""
MESSAGE_BYTES = 1024 * 1024
"""Longest message beside the body in it and the headers that the settings allow: the metadata of Envoy's filters."""
_BODY_FIELDS = frozenset((b"\x22", b"\x2a"))
"""First bytes of messages with a body: numbers and wire types of `request_body` and `response_body`."""
_ENVOYS_OWN = 16
"""Headers that Envoy adds to those of a client, pseudo-headers included."""
_LINE_BYTES = 4
"""Bytes of a header line beside its name and value."""
_UNSAFE = re.compile(rb"[\r\n\0]")
_UNSENDABLE = HttpError(400, "a header has a character that HTTP/1.1 cannot send; send printable ASCII")
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


class RequestRefused(Exception):
    """The request gets an error response before it is complete."""

    def __init__(self, error: HttpError) -> None:
        self.error = error
        super().__init__(error.message)


def other_bytes(raw: bytes) -> int:
    """Return the size of a message from Envoy without the body in it, in bytes: before it is parsed, because parsing
    takes long for many small values."""
    if raw[:1] not in _BODY_FIELDS:
        return len(raw)
    length = shift = 0
    for at, byte in enumerate(raw[1:6], start=2):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return max(len(raw) - length, at)
    return len(raw)


def checked_headers(message: HttpHeaders, limits: RequestLimits) -> tuple[dict[bytes, bytes], Headers]:
    """Return pseudo-headers and headers of a request. Raises Refused: they exceed the limits, or cannot be sent on."""
    if len(message.headers.headers) > limits.header_count + _ENVOYS_OWN:
        raise RequestRefused(too_long(limits))
    pseudo: dict[bytes, bytes] = {}
    headers: Headers = []
    size = 0
    for header in message.headers.headers:
        name, value = header.key.encode(), header.raw_value or header.value.encode()
        size += len(name) + len(value) + _LINE_BYTES
        if _UNSAFE.search(name) or _UNSAFE.search(value):
            raise RequestRefused(_UNSENDABLE)
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            headers.append((name, value))
    if size > limits.header_bytes + _ENVOYS_OWN * _LINE_BYTES:
        raise RequestRefused(too_long(limits))
    return pseudo, headers


def too_long(limits: RequestLimits) -> HttpError:
    """Return the error for headers that exceed the limits."""
    return HttpError(431, f"the request's headers exceed {limits.header_bytes} bytes or {limits.header_count} lines")


def status_of(message: HttpHeaders) -> int:
    """Return the status of a response; 0 if there is none."""
    for header in message.headers.headers:
        if header.key == ":status":
            value = header.raw_value or header.value.encode()
            return int(value) if value.isdigit() and len(value) == 3 else 0
    return 0


def subset_of(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the endpoints from which Envoy wants one, by a list or by comma-separated text; None: from all."""
    hint = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in hint or SUBSET not in hint[SUBSET_NAMESPACE].fields:
        return None
    return frozenset(_names(hint[SUBSET_NAMESPACE].fields[SUBSET]))


def _names(value: struct_pb2.Value) -> Iterator[str]:
    texts = [value.string_value] if value.HasField("string_value") else []
    texts += [element.string_value for element in value.list_value.values]
    for text in texts:
        yield from split_names(text)


def split_names(text: str) -> list[str]:
    """Return the non-empty parts of comma-separated text."""
    return [part.strip() for part in text.split(",") if part.strip()]


def served_of(message: ProcessingRequest) -> str:
    """Return the endpoint that has served a response; empty if Envoy does not say, or if no endpoint has."""
    found = message.metadata_context.filter_metadata
    if NAMESPACE not in found or SERVED not in found[NAMESPACE].fields:
        return ""
    served = found[NAMESPACE].fields[SERVED].string_value
    return served if served != "-" else ""


def set_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[HeaderValueOption]:
    """Return the message form of headers that replace those of the same names."""
    return [
        HeaderValueOption(header=HeaderValue(key=name.decode("latin-1"), raw_value=value), append_action=_OVERWRITE)
        for name, value in headers
    ]


def metadata_of(destination: str) -> struct_pb2.Struct:
    """Return the dynamic metadata that names the chosen endpoints.

    The protocol's list is for clusters that know their endpoints. A cluster that knows none takes one endpoint from a
    key of its own, so each attempt has one.
    """
    numbered = enumerate(split_names(destination), start=1)
    attempts = struct_pb2.Struct(fields={str(n): struct_pb2.Value(string_value=address) for n, address in numbered})
    fields = {
        DESTINATION: struct_pb2.Value(string_value=destination),
        ATTEMPTS: struct_pb2.Value(struct_value=attempts),
    }
    inner = struct_pb2.Struct(fields=fields)
    return struct_pb2.Struct(fields={NAMESPACE: struct_pb2.Value(struct_value=inner)})


def picked(destination: str, added: Headers, removed: Iterable[bytes]) -> tuple[HeaderMutation, struct_pb2.Struct]:
    """Return the header changes and the metadata of a choice.

    Args:
        destination: endpoints in the order to try, separated by commas.
        added: headers that the engine receives in place of the client's.
        removed: names of the client's headers that it does not receive; one that is added is not removed, because
            gateways may remove headers after they add others.
    """
    own = [(DESTINATION.encode(), destination.encode()), *added]
    kept = {name for name, _ in own}
    names = [name.decode("latin-1") for name in removed if name not in kept]
    return HeaderMutation(set_headers=set_headers(own), remove_headers=names), metadata_of(destination)


def streamed_replies(
    mutation: HeaderMutation, metadata: struct_pb2.Struct, body: bytes | None, *, ends: bool = True
) -> list[ProcessingResponse]:
    """Return the replies to headers and body of a request whose body Envoy streams.

    Args:
        mutation, metadata: see `picked`.
        body: the body for the engine; None: the request has none.
        ends: whether the request ends with the body; else trailers follow.
    """
    headers = HeadersResponse(response=CommonResponse(header_mutation=mutation))
    first = ProcessingResponse(request_headers=headers, dynamic_metadata=metadata)
    if body is None:
        return [first]
    return [first, *(ProcessingResponse(request_body=piece) for piece in body_pieces(body, ends=ends))]


def body_pieces(body: bytes, *, ends: bool) -> Iterator[BodyResponse]:
    """Yield replies with the parts of a body that Envoy streams. Args: `ends`: whether nothing follows the body."""
    for start in range(0, max(len(body), 1), PIECE_BYTES):
        last = ends and start + PIECE_BYTES >= len(body)
        piece = StreamedBodyResponse(body=body[start : start + PIECE_BYTES], end_of_stream=last)
        yield BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=piece)))


def buffered_replies(mutation: HeaderMutation, metadata: struct_pb2.Struct, body: bytes) -> list[ProcessingResponse]:
    """Return the reply to the body of a request that Envoy has buffered."""
    changed = CommonResponse(header_mutation=mutation, body_mutation=BodyMutation(body=body))
    return [ProcessingResponse(request_body=BodyResponse(response=changed), dynamic_metadata=metadata)]


def immediate_reply(
    status: int, body: bytes, content_type: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> ProcessingResponse:
    """Return the reply that makes Envoy send this response to the client."""
    changed = HeaderMutation(set_headers=set_headers([(b"content-type", content_type), *headers]))
    response = ImmediateResponse(status=HttpStatus(code=status), headers=changed, body=body, details="kvroute")
    return ProcessingResponse(immediate_response=response)
