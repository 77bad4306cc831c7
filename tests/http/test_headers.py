"""Headers through the gateway: hop-by-hop headers are removed, the others are passed on unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.http.headers import (
    FORWARDED,
    THEIR_OWN,
    Headers,
    answered,
    forwarded,
    header_lines,
)

names = st.sampled_from(
    [b"x-a", b"x-b", b"authorization", b"te", b"host", b"server", b"content-type", b"date", b"close"]
)
plain = st.lists(st.tuples(names, st.sampled_from([b"1", b"2"])), max_size=8)
connections = st.lists(st.sampled_from([b"keep-alive", b"Keep-Alive, X-A", b"close", b"x-a , x-b", b"X-B"]), max_size=2)


@given(plain, connections, st.randoms())
def test_exactly_the_hop_by_hop_headers_are_removed(sent: Headers, values: list[bytes], shuffle: object) -> None:
    """For every position and value of the Connection header, hop-by-hop headers are removed; order and values of the
    others are kept."""
    headers = sent + [(b"connection", value) for value in values]
    getattr(shuffle, "shuffle")(headers)  # noqa: B009
    named = {token.strip().lower() for value in values for token in value.split(b",")}
    allowed = FORWARDED | {b"x-a"}
    upstream = forwarded(headers, b"id", allowed)
    typed = any(name == b"content-type" for name, _ in headers)
    assert upstream[0] == (b"x-request-id", b"id")
    assert upstream[1 : None if typed else -1] == [header for header in headers if header[0] in allowed - named]
    assert typed or upstream[-1] == (b"content-type", b"application/json")
    _, downstream = answered(headers)
    removed = named | THEIR_OWN | {b"content-type"}
    assert downstream == [header for header in headers if header[0] not in removed]


def test_headers_of_a_request_to_an_engine() -> None:
    """The gateway sets the request ID, so that engine and client see the same one."""
    sent = [
        (b"host", b"gateway"),
        (b"authorization", b"Bearer secret"),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", b"7"),
        (b"x-own", b"1"),
        (b"connection", b"Keep-Alive, X-Own"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip"),
        (b"traceparent", b"00-client"),
        (b"x-request-id", b"theirs"),
        (b"x-data-parallel-rank", b"1"),
    ]
    upstream = [
        (b"x-request-id", b"id-1"),
        (b"authorization", b"Bearer secret"),
        (b"content-type", b"application/json; charset=utf-8"),
        (b"traceparent", b"00-client"),
    ]
    assert forwarded(sent, b"id-1") == upstream
    assert forwarded(sent, b"id-1", FORWARDED | {b"x-own"}) == upstream
    kept = forwarded(sent, b"id-1", FORWARDED - {b"authorization", b"traceparent"})
    assert header_lines(kept) == b"x-request-id: id-1\r\ncontent-type: application/json; charset=utf-8\r\n"


@pytest.mark.parametrize("kind", [b"text/event-stream", None])
def test_headers_of_a_response_to_a_client(kind: bytes | None) -> None:
    """The content type is returned separately; it is JSON if the engine gives none."""
    headers = [
        (b"transfer-encoding", b"chunked"),
        (b"x-hop", b"1"),
        (b"connection", b"x-hop"),
        (b"x-request-id", b"the engine's"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]
    content_type, rest = answered([*headers, (b"content-type", kind)] if kind else headers)
    assert content_type == (kind or b"application/json")
    assert rest == headers[4:]
