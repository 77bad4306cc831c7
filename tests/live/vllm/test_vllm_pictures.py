"""Live: pictures in chats, responses and messages, on real vLLM servers of a tiny vision model: one for prefill and one
for decode with kvroute's connector."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from tests.live.services import missing
from tests.live.vllm.conftest import BIN, Pair, make_model, start_member, wait_ready
from tests.live.vllm.gateway_rig import (
    GREEDY,
    TOKENS,
    Gateway,
    all_up,
    anthropic_client,
    cluster_file,
    running,
    token_ids,
    until,
    wait_until_idle,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
PIXELS = 64
QUESTION = "What is that? " * 30
"""Longer than a block, so that its first blocks contain the picture and others do not."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill server and a decode server."""
    if not (BIN / "vllm").exists():
        missing("vLLM is not installed: run tests/live/vllm/install.sh")
    folder = tmp_path_factory.mktemp("pictures")
    model = make_model(folder, script="make_vision_model")
    prefill = start_member("kv_producer", "prefill0", model, folder)
    decode = start_member("kv_consumer", "decode0", model, folder)
    try:
        wait_ready([prefill, decode])
        yield Pair(model, folder, prefill, decode, decode, prefill)
    finally:
        prefill.kill()
        decode.kill()


@pytest.fixture(scope="module")
def gateway(servers: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of both."""
    folder, members = tmp_path_factory.mktemp("gateway"), [servers.prefill, servers.decode]
    with running("serve", cluster_file(servers, {}, members), folder, "--port", "0") as (process, addresses):
        gateway = Gateway(process, addresses["url"], addresses["admin"], folder / "events.log", 0.0)
        all_up(gateway, servers, members)
        yield gateway


def picture(seed: int) -> str:
    """Return a PNG of random pixels, in base64."""
    draw = random.Random(seed)
    rows = b"".join(b"\0" + draw.randbytes(3 * PIXELS) for _ in range(PIXELS))
    chunks = {b"IHDR": struct.pack("!2I5B", PIXELS, PIXELS, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(rows), b"IEND": b""}
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack("!I", len(body)) + kind + body + struct.pack("!I", zlib.crc32(kind + body))
        for kind, body in chunks.items()
    )
    return base64.b64encode(data).decode()


def data_url(seed: int) -> str:
    """Return a picture as a URL."""
    return f"data:image/png;base64,{picture(seed)}"


def chat(*seeds: int) -> Any:
    """Return messages with pictures and the same text for all pictures."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(seed)}} for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]


def expected(servers: Pair, *seeds: int) -> list[int]:
    """Return the tokens of the prefill server alone."""
    body = {"model": "tiny", "messages": chat(*seeds), **GREEDY, **TOKENS}
    tokens: list[int] = servers.prefill.post("/v1/chat/completions", body)["choices"][0]["token_ids"]
    return tokens


def moved(servers: Pair) -> float:
    """Return the number of KV caches that the decode server has pulled."""
    return servers.decode.metric("kvroute:kv_transfers_total", source="prefill0")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_each_picture_has_its_own_answer(servers: Pair, gateway: Gateway, streamed: bool) -> None:
    """The text is the same for all: blocks of one picture never serve another one. The first request comes twice."""
    first = 10 + 10 * streamed
    requests = [(first,), (first + 1,), (first,), (first, first + 1), (first + 1, first)]
    right, before, got = [expected(servers, *seeds) for seeds in requests], moved(servers), []
    with gateway.client() as client:
        for seeds in requests:
            answer: Any = client.chat.completions.create(
                model="tiny", messages=chat(*seeds), stream=streamed, extra_body=TOKENS, **GREEDY
            )
            pieces = list(answer) if streamed else [answer]
            got.append([token for piece in pieces for choice in piece.choices for token in token_ids(choice)])
    assert got == right
    assert right[2] == right[0]
    assert len({tuple(tokens) for tokens in right}) == 4
    until(lambda: moved(servers) == before + len(requests))
    wait_until_idle(gateway)


def test_a_corrupted_block_changes_the_answer(servers: Pair, gateway: Gateway) -> None:
    """The negative control of the test above: the decode server computes with the KV that it has pulled."""
    right = expected(servers, 40)
    servers.prefill.fault_file.write_text("corrupt-layer-2-block-0", encoding="utf-8")
    try:
        with gateway.client() as client:
            answer: Any = client.chat.completions.create(model="tiny", messages=chat(40), extra_body=TOKENS, **GREEDY)
    finally:
        servers.prefill.fault_file.unlink()
    assert token_ids(answer.choices[0]) != right


def test_pictures_of_responses_and_messages(servers: Pair, gateway: Gateway) -> None:
    """Each API has its own form of a picture; the text of the answer is that of the prefill server alone."""
    before = moved(servers)
    parts = [{"type": "input_image", "image_url": data_url(50)}, {"type": "input_text", "text": QUESTION}]
    responses: dict[str, Any] = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8}
    source = {"type": "base64", "media_type": "image/png", "data": picture(51)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    messages: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
    cold = {"temperature": 0, "ignore_eos": True}
    right = [
        servers.prefill.post("/v1/responses", {"model": "tiny", **responses, **cold})["output"][0],
        servers.prefill.post("/v1/messages", {"model": "tiny", **messages, **cold}),
    ]
    with gateway.client() as client, anthropic_client(gateway.url) as other:
        response: Any = client.responses.create(model="tiny", **responses, extra_body=cold)
        message: Any = other.messages.create(model="tiny", **messages, extra_body=cold)
    assert response.output_text == right[0]["content"][0]["text"]
    assert message.content[0].text == right[1]["content"][0]["text"]
    until(lambda: moved(servers) == before + 2)
