"""Fuzzing target: bytes of a client's connection, through `gateway.reading.RequestReader`."""

from __future__ import annotations

from tests.fuzz.cuts import bounded, pieces

from kvroute.http.client.pool import request_bytes
from kvroute.http.headers import forwarded
from kvroute.http.server.request_parser import ParsedRequest, RequestLimits, RequestParser

INSTRUMENTED = ("kvroute.http.server.request_parser", "kvroute.http.headers")
RUNS = 60_000
LIMITS = RequestLimits(header_bytes=512, body_bytes=2048, header_count=16)
STATUSES = {0, 400, 413, 431, 501, 505}
"""Statuses of errors; 0 means no error."""
_FRAMING = (b"content-length", b"transfer-encoding")


def check(data: bytes) -> str:
    """For every split of the bytes, the requests and the error are the same. A request has one framing, and it is read
    back equal after it is written, also in the form that the gateway sends to an engine."""
    requests, status = bounded(lambda: _read([data]), 2_000 + 60 * len(data))
    again, other_status = _read(list(pieces(data)))
    assert again == requests
    # Of two errors in one header the parser may report the second one, if both are in one piece.
    assert bool(status) == bool(other_status)
    assert {status, other_status} <= STATUSES
    for request in requests:
        _check(request)
    return "refused" if status else "accepted" if requests else "waits"


def _read(some: list[bytes]) -> tuple[list[ParsedRequest], int]:
    reader = RequestParser(LIMITS)
    for piece in some:
        while piece and reader.fault is None:
            piece = reader.feed(piece)
    return list(reader.ready), reader.fault.status if reader.fault else 0


def _check(request: ParsedRequest) -> None:
    names = [name for name, _ in request.headers]
    hosts, lengths, codings = (names.count(name) for name in (b"host", *_FRAMING))
    assert hosts == 1 or (request.http10 and hosts == 0)
    assert lengths + codings <= 1
    assert len(request.body) <= LIMITS.body_bytes
    for name, value in request.headers:
        assert name == name.lower()
        assert not any(c < 0x20 and c != 9 for c in name + value)
        if name == b"content-length":
            assert int(value) == len(request.body)

    target = request.path + (b"?" + request.query if request.query else b"")
    plain = [header for header in request.headers if header[0] not in (*_FRAMING, b"host", b"connection", b"expect")]
    (again,) = _read_whole(request_bytes(request.method, target, b"a", plain, request.body))
    assert again[:3] == request[:3]
    assert [header for header in again.headers if header[0] not in (*_FRAMING, b"host")] == plain
    assert again.body == request.body

    # An engine gets one equivalent request without any of the client's framing.
    sent = request_bytes(request.method, target, b"engine", forwarded(request.headers, b"1"), request.body)
    (engines,) = _read_whole(sent)
    assert engines[:3] == request[:3]
    assert engines.body == request.body


def _read_whole(raw: bytes) -> list[ParsedRequest]:
    reader = RequestParser(RequestLimits())
    assert reader.feed(raw) == b""
    assert reader.fault is None, reader.fault
    return list(reader.ready)
