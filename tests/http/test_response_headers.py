"""Every response has a Date and the id of its request, whichever part of the gateway sends it."""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime

import pytest
from tests.http.server_rig import HOST_AND_CLOSE, echo, exchange_bytes, parse_responses
from tests.serve.rig import CHAT, COMPLETIONS, RunningGateway, rig
from tests.serve.stub_engines import Engine, completion, engines_of, failing, run, stub_rig

from kvroute.http.server.exchange import Exchange
from kvroute.http.server.request_parser import RequestLimits
from kvroute.serve.api.anthropic.errors import ApiErrors
from kvroute.serve.api.api_keys import hash_text

MINE = b"X-Request-Id: my-1\r\n"
REFUSED_BY_THE_PARSER = {
    "not HTTP": (400, b"GET /\xff" + b" HTTP/1.1\r\n"),
    "no host": (400, b"GET / HTTP/1.1\r\n" + MINE + b"\r\n"),
    "another version": (505, b"GET / HTTP/1.2\r\n\r\n"),
    "a long head": (431, b"GET / HTTP/1.1\r\n" + MINE + b"x: " + b"y" * 40_000),
    "a large body": (413, b"POST / HTTP/1.1\r\n" + MINE + HOST_AND_CLOSE + b"content-length: 2000\r\n\r\n"),
    "a slow head": (408, b"GET / HTTP/1.1\r\n" + MINE + HOST_AND_CLOSE),
    "a slow body": (408, b"POST / HTTP/1.1\r\n" + MINE + HOST_AND_CLOSE + b"content-length: 2\r\n\r\n{"),
    "another coding": (501, b"POST / HTTP/1.1\r\n" + MINE + HOST_AND_CLOSE + b"transfer-encoding: gzip\r\n\r\n"),
}


def checked_id(headers: dict[bytes, bytes]) -> bytes:
    """Check the Date, and return the request's id."""
    parsedate_to_datetime(headers[b"date"].decode())
    assert headers[b"x-request-id"]
    return headers[b"x-request-id"]


@pytest.mark.parametrize("case", REFUSED_BY_THE_PARSER)
def test_refusals_of_the_parser_have_the_id_of_their_request(case: str) -> None:
    """If the client's id was not read, the response has a new one."""
    status, sent = REFUSED_BY_THE_PARSER[case]
    limits = RequestLimits(header_bytes=1000, body_bytes=1000, header_s=0.1, body_s=0.1)
    [(got, headers, body)] = parse_responses(exchange_bytes(sent, limits=limits))
    assert got == status, body
    known = MINE in sent
    assert (checked_id(headers) == b"my-1") == known


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/messagesx", b"/x"])
def test_paths_of_anthropic_have_the_name_of_its_sdks_too(path: bytes) -> None:
    """Their SDKs read `request-id`; those of OpenAI `x-request-id`."""
    for sent, status in ((b"", 200), (b"transfer-encoding: x\r\n", 501)):
        head = b"GET %b HTTP/1.1\r\n" % path + MINE + HOST_AND_CLOSE + sent + b"\r\n"
        [(got, headers, _)] = parse_responses(exchange_bytes(head, errors=ApiErrors()))
        assert (got, checked_id(headers)) == (status, b"my-1")
        anthropic = path.split(b"/")[:3] == [b"", b"v1", b"messages"]
        assert (headers.get(b"request-id") == b"my-1") == anthropic


def test_each_request_of_a_connection_has_its_own_id() -> None:
    """Responses that a handler streams and those of a failing handler have it too."""

    def handler(exchange: Exchange) -> None:
        if exchange.path == b"/stream":
            exchange.start(200, [], 2)
            exchange.write(b"ok")
            exchange.end()
        elif exchange.path == b"/fails":
            raise KeyError("a bug")
        else:
            echo(exchange)

    sent = b"".join(
        b"GET %b HTTP/1.1\r\nX-Request-Id: %b\r\nHost: g\r\n\r\n" % (path, path[1:])
        for path in (b"/stream", b"/whole", b"/fails")
    )
    raw = exchange_bytes(sent + b"GET /last HTTP/1.0\r\n\r\n", handler)
    found = parse_responses(raw)
    assert [checked_id(headers) for _, headers, _ in found[:3]] == [b"stream", b"whole", b"fails"]
    assert len(checked_id(found[3][1])) == 32


async def refused(front: RunningGateway, method: str, path: str, body: bytes | None, **headers: str) -> None:
    """Send a request that is refused, with and without an id, and check the response."""
    for name in ("", "my-1"):
        sent = {"X-Request-Id": name, **headers} if name else headers
        async with front.session.request(method, front.url + path, data=body, headers=sent) as response:
            assert response.status >= 400
            parsedate_to_datetime(response.headers["date"])
            given = response.headers.getall("x-request-id")
            assert given == [name] if name else len(given[0]) == 32
            if path.startswith("/v1/messages"):
                assert response.headers["request-id"] == given[0]


def test_every_refusal_of_the_gateway_has_the_id_of_its_request() -> None:
    async def main() -> None:
        section = f"  keys: {{known: {{alice: '{hash_text('kvr_alice')}'}}}}\n"
        async with rig(section) as gate:
            key = {"Authorization": "Bearer kvr_alice"}
            await refused(gate, "POST", CHAT, b"{bad", **key)
            await refused(gate, "POST", CHAT, json.dumps(completion(messages=[])).encode(), **key)
            await refused(gate, "POST", COMPLETIONS, b"{" * 200_000, **key)
            await refused(gate, "POST", COMPLETIONS, b"{}")
            await refused(gate, "POST", "/v1/messages", b"{}")
            await refused(gate, "POST", "/v1/messages", b"{bad", **key)
            await refused(gate, "GET", COMPLETIONS, None)
            await refused(gate, "GET", "/nope", None)
            await refused(gate, "GET", "/v1/models/none/../x", None, **key)
            await refused(gate, "POST", "/v1/embeddings", b"[]", **key)

    run(main())


def test_refusals_because_of_load_and_of_engines_have_it_too() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill + decode:
            engine.serve = failing(500)
        async with stub_rig(prefill + decode) as front:
            await refused(front, "POST", COMPLETIONS, json.dumps(completion()).encode())
            await refused(front, "POST", "/v1/embeddings", b"{}")
        for engine in prefill + decode:
            engine.serve = failing(422)
        async with stub_rig(prefill + decode) as front:
            await refused(front, "POST", COMPLETIONS, json.dumps(completion()).encode())
            await refused(front, "POST", "/v1/embeddings", b"{}")

    run(main())


def test_an_engines_own_ids_do_not_reach_the_client() -> None:
    async def main() -> None:
        prefill, decode = engines_of("vllm")

        async def serve(engine: Engine, request: object, received: object) -> object:
            from aiohttp import web

            return web.json_response({}, headers={"X-Request-Id": "theirs", "request-id": "theirs"})

        for engine in prefill + decode:
            engine.serve = serve  # type: ignore[assignment]
        async with stub_rig(prefill + decode) as front:
            response = await front.post({}, "/v1/messages/count_tokens", {"X-Request-Id": "mine"})
            assert (response.headers["x-request-id"], response.headers["request-id"]) == ("mine", "mine")

    run(main())
