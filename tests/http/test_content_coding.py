"""Bodies with a Content-Encoding: decoded within the limits, whatever the client sends; other codings get 415."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CHAT, COMPLETIONS, GatewayResponse, RunningGateway
from tests.serve.stub_engines import completion, engines_of, run, stub_rig

from kvroute.http.server.content_coding import CODINGS_MAX, CodingError, content_coding, decoded

MB = 1024 * 1024


def bare_deflate(body: bytes) -> bytes:
    """Return a body in the format of zlib without its head and checksum."""
    encoder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return encoder.compress(body) + encoder.flush()


def streamed_zstd(body: bytes) -> bytes:
    """Return a frame that does not tell the size of its content."""
    encoder = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return encoder.compress(body) + encoder.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "zstd": ("zstd", zstandard.compress),
    "streamed zstd": ("zstd", streamed_zstd),
}


def status_of(coding: str, body: bytes, bytes_max: int = MB) -> int:
    """Return the status of the rejection of a body."""
    with pytest.raises(CodingError) as refused:
        decoded(coding.encode(), body, bytes_max)
    return refused.value.status


@given(st.binary(max_size=2000), st.lists(st.sampled_from(sorted(ENCODERS)), max_size=CODINGS_MAX))
def test_codings_are_removed_in_reverse_order(body: bytes, names: list[str]) -> None:
    sent = body
    for name in names:
        sent = ENCODERS[name][1](sent)
    coding = " , ".join([ENCODERS[name][0] for name in names] + ["identity"])
    assert decoded(coding.encode(), sent, MB) == body


@given(st.sampled_from(sorted(ENCODERS)), st.binary(max_size=300), st.data())
def test_damaged_bodies_are_refused_or_decoded_within_the_limit(name: str, body: bytes, data: st.DataObject) -> None:
    coding, encode = ENCODERS[name]
    sent = bytearray(encode(body))
    sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(CodingError):
        assert len(decoded(coding.encode(), bytes(sent), 400)) <= 400


@pytest.mark.parametrize("name", ENCODERS)
def test_an_incomplete_body_and_a_longer_one_are_refused(name: str) -> None:
    coding, encode = ENCODERS[name]
    sent = encode(b"some text " * 100)
    for wrong in (sent[:-1], sent[: len(sent) // 2], sent + b"x", sent + sent, b"{}", b"\x28"):
        assert status_of(coding, wrong) == 400, wrong[:20]


@pytest.mark.parametrize("name", ENCODERS)
def test_a_bomb_takes_no_more_memory_than_the_limit(name: str) -> None:
    """64 MB of zeros are refused at the limit, and exactly the limit is accepted."""
    coding, encode = ENCODERS[name]
    bomb, fits = encode(bytes(64 * MB)), encode(bytes(MB))
    assert decoded(coding.encode(), fits, MB) == bytes(MB)
    assert status_of(coding, encode(bytes(MB + 1))) == 413
    tracemalloc.start()
    assert status_of(coding, bomb) == 413
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * MB


def test_a_bomb_of_several_codings_is_refused_too() -> None:
    bomb = gzip.compress(gzip.compress(bytes(64 * MB)))
    assert status_of("gzip, gzip", bomb) == 413
    assert status_of("gzip, gzip, gzip, gzip", bomb) == 415


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "aws-chunked", "\xff", "gzip;q=1"])
def test_other_codings_are_refused_with_the_accepted_ones(coding: str) -> None:
    with pytest.raises(CodingError, match="gzip, deflate, zstd") as refused:
        decoded(coding.encode("latin-1"), b"x", MB)
    assert (refused.value.status, refused.value.code) == (415, "unsupported_content_encoding")


def test_several_headers_are_one_list() -> None:
    assert content_coding([(b"content-encoding", b"gzip"), (b"x", b"y"), (b"content-encoding", b"br")]) == b"gzip,br"
    assert content_coding([(b"accept-encoding", b"gzip")]) == b""


async def send(front: RunningGateway, path: str, body: bytes, coding: str) -> GatewayResponse:
    """Send an encoded body."""
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    async with front.session.post(front.url + path, data=body, headers=headers) as response:
        return GatewayResponse(
            response.status, {name.lower(): value for name, value in response.headers.items()}, await response.read()
        )


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/embeddings", "/v1/audio/speech"])
@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_engines_get_the_decoded_body(path: str, name: str) -> None:
    """They get no Content-Encoding."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            fields = completion(messages=[{"role": "user", "content": "hi " * 100_000}])
            sent = ENCODERS[name][1](msgspec.json.encode(fields))
            response = await send(front, path, sent, ENCODERS[name][0])
            assert response.status == 200
            received = [request for engine in prefill + decode for request in engine.received]
            assert received
            for request in received:
                assert request.json["messages"] == fields["messages"]
                assert "content-encoding" not in request.headers
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_the_limits_of_the_gateway_hold_for_decoded_bodies() -> None:
    """`body` for one, `bodies` for all; a refusal says what is accepted."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        body = msgspec.json.encode(completion(prompt="x" * 600_000))
        async with stub_rig(prefill + decode, "  limits: {body: 500 KB}\n") as front:
            refused = await send(front, COMPLETIONS, gzip.compress(body), "gzip")
            assert (refused.status, refused.json["error"]["code"]) == (413, "body_too_large")
            unknown = await send(front, COMPLETIONS, body[:100], "br")
            assert (unknown.status, unknown.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
            wrong = await send(front, COMPLETIONS, body[:100], "gzip")
            assert (wrong.status, wrong.json["error"]["code"]) == (400, "invalid_content_encoding")
            empty = await send(front, COMPLETIONS, b"", "gzip")
            assert empty.status == 400
        async with stub_rig(prefill + decode, "  limits: {body: 1 MB, bodies: 1 MB}\n") as front:
            full = await send(front, COMPLETIONS, gzip.compress(body), "gzip")
            assert full.status == 503
            assert full.headers["retry-after"] == "1"
            assert (await send(front, COMPLETIONS, gzip.compress(body[:0] + b"[]"), "gzip")).status == 400
        assert not any(engine.received for engine in prefill + decode)

    run(main())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])
def test_a_byte_order_mark_is_ignored(path: str) -> None:
    """Engines get the body without it."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            for size in (1, 100_000):
                body = b"\xef\xbb\xbf" + msgspec.json.encode(completion(prompt="hi " * size))
                async with front.session.post(front.url + path, data=body) as response:
                    assert response.status == 200
            received = [request for engine in prefill + decode for request in engine.received]
            assert all(request.body.startswith(b"{") for request in received)
            async with front.session.post(front.url + path, data=b"\xef\xbb\xbf") as response:
                assert response.status == 400

    run(main())
