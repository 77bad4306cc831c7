"""Live: prompts prefilled by one vLLM server and decoded by another one give the tokens of a single server."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.vllm.conftest import BLOCK_TOKENS, LAYER_BYTES

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
ANSWER_TOKENS = 32
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def prompt(tokens: int, seed: int) -> list[int]:
    """Return random token IDs, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(3, 420) for _ in range(tokens)]


def complete(server: Server, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Request a greedy completion."""
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return server.post("/v1/completions", body | ({"kv_transfer_params": params} if params else {}))


def answer(reply: dict[str, Any]) -> list[int]:
    """Return the tokens of a completion."""
    tokens: list[int] = reply["choices"][0]["token_ids"]
    return tokens


def params_for(pair: Pair, tokens: list[int]) -> dict[str, Any]:
    """Let the prefill server compute the prompt; return its transfer parameters."""
    params: dict[str, Any] = complete(pair.prefill, tokens, 1, REMOTE_DECODE)["kv_transfer_params"]
    return params


def alone(pair: Pair, tokens: list[int]) -> list[int]:
    """Return the response of a server without a connector."""
    return answer(complete(pair.alone, tokens, ANSWER_TOKENS))


def pulled(server: Server) -> tuple[float, float, float]:
    """Return the transfers, bytes and failures so far. vLLM counts those of a step with the next one, so a short prompt
    without a transfer is computed first."""
    complete(server, prompt(8, seed=40_000), 2)
    names = ("kvroute:kv_transfers_total", "kvroute:kv_transfer_bytes_total", "kvroute:kv_transfer_failures_total")
    transfers, nbytes, failures = (server.metric(name, engine="0") for name in names)
    return transfers, nbytes, failures


@pytest.mark.parametrize("checksum", [False, True], ids=["bare", "checked"])
@pytest.mark.parametrize("tokens", [20, 32, 45, 200, 1000, 2100, 3500])
def test_tokens_equal_those_of_one_server(pair: Pair, tokens: int, checksum: bool) -> None:
    """The lengths cover part of a block, whole blocks, and more than one chunk of prefill (2,048 tokens)."""
    prompt_ids = prompt(tokens, seed=2 * tokens + checksum)
    before, seconds = (
        pulled(pair.decode),
        pair.decode.metric("kvroute:kv_transfer_seconds_total", source="prefill0"),
    )
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, params_for(pair, prompt_ids) | {"checksum": checksum})
    blocks = -(-tokens // BLOCK_TOKENS)
    transfers, nbytes, failures = (now - then for now, then in zip(pulled(pair.decode), before, strict=True))
    assert (transfers, nbytes, failures) == (1, 4 * blocks * LAYER_BYTES, 0)
    assert pair.decode.metric("kvroute:kv_transfer_seconds_total", source="prefill0") > seconds
    assert answer(reply) == alone(pair, prompt_ids)


def announced(pair: Pair, name: str) -> dict[str, Any]:
    """Return the parameters that a router sends to the decode server while the prompt is computed."""
    other = prompt(8, seed=1)
    params = params_for(pair, other)
    complete(pair.decode, other, 1, params)  # the prefill server holds none of its blocks
    where = {field: params[field] for field in ("remote_host", "remote_port", "remote_instance")}
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **where}


@pytest.mark.parametrize("tokens", [20, 200, 3500])
def test_a_prompt_is_pulled_while_it_is_computed(pair: Pair, tokens: int) -> None:
    """Both servers get their requests at once; the tokens are those of one server, and no transfer is measured, because
    it waited."""
    prompt_ids, name = prompt(tokens, seed=10_000 + tokens), f"early-{tokens}"
    params, before = announced(pair, name), pulled(pair.decode)
    early = [pair.decode.metric(f"kvroute:kv_early{unit}_total", source="prefill0") for unit in ("", "_bytes")]
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(complete, pair.decode, prompt_ids, ANSWER_TOKENS, params)
        complete(pair.prefill, prompt_ids, 1, REMOTE_DECODE | {"transfer_id": name})
        tokens_decoded = answer(reply.result())
    assert tokens_decoded == alone(pair, prompt_ids)
    blocks = -(-tokens // BLOCK_TOKENS)
    after = [pair.decode.metric(f"kvroute:kv_early{unit}_total", source="prefill0") for unit in ("", "_bytes")]
    assert [now - then for now, then in zip(after, early, strict=True)] == [1, 4 * blocks * LAYER_BYTES]
    assert pulled(pair.decode) == before
    complete(pair.prefill, prompt(8, seed=2), 1)  # an idle engine does not report the bytes that it has sent
    assert pair.prefill.metric("kvroute:kv_sent_bytes_total", target="decode0") >= 4 * blocks * LAYER_BYTES


def test_a_layer_is_sent_before_the_prompt_is_computed(pair: Pair) -> None:
    """3,500 tokens are two chunks; when the prefill server answers, most blocks of the first one have been sent."""
    prompt_ids = prompt(3500, seed=20_000)
    params = announced(pair, "overlap")
    with ThreadPoolExecutor(1) as pool, packet_socket() as device:
        reply = pool.submit(complete, pair.decode, prompt_ids, ANSWER_TOKENS, params)
        complete(pair.prefill, prompt_ids, 1, REMOTE_DECODE | {"transfer_id": "overlap"})
        sent_bytes = sum(packet.payload for packet in packets(device) if packet.source == params["remote_port"])
        tokens = answer(reply.result())
    assert sent_bytes > 2048 // BLOCK_TOKENS * 4 * LAYER_BYTES / 2
    assert tokens == alone(pair, prompt_ids)


def test_a_prompt_that_the_prefill_server_never_starts_is_computed(pair: Pair) -> None:
    """The decode server waits for `hold_s` and then computes the prompt itself."""
    prompt_ids = prompt(150, seed=20_001)
    failed = pair.decode.metric("kvroute:kv_transfer_failures_total", reason="unknown")
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, announced(pair, "never-begun"))
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason="unknown") == failed + 1
    assert answer(reply) == alone(pair, prompt_ids)


def test_only_missing_blocks_are_pulled(pair: Pair) -> None:
    """The prompt begins with one that the decode server has cached: those whole blocks are not pulled."""
    first = prompt(320, seed=1)
    complete(pair.decode, first, 1, params_for(pair, first))
    longer = first + prompt(100, seed=2)
    before = pulled(pair.decode)
    reply = complete(pair.decode, longer, ANSWER_TOKENS, params_for(pair, longer))
    nbytes = pulled(pair.decode)[1] - before[1]
    assert nbytes == 4 * 4 * LAYER_BYTES
    assert answer(reply) == alone(pair, longer)


def test_a_damaged_block_changes_the_tokens_and_a_checksum_prevents_it(pair: Pair) -> None:
    """The negative control of the equality above. With checksums vLLM recomputes the prompt."""
    bare, checked = prompt(300, seed=3), prompt(300, seed=4)
    pair.prefill.fault_file.write_text("corrupt-layer-2-block-4", encoding="utf-8")
    damaged = answer(complete(pair.decode, bare, ANSWER_TOKENS, params_for(pair, bare)))
    failed = pair.decode.metric("kvroute:kv_transfer_failures_total", reason="checksum")
    recomputed = answer(complete(pair.decode, checked, ANSWER_TOKENS, params_for(pair, checked) | {"checksum": True}))
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason="checksum") == failed + 1
    assert damaged != alone(pair, bare)
    assert recomputed == alone(pair, checked)


@pytest.mark.parametrize(
    ("change", "fault", "reason"),
    [
        pytest.param({"remote_request_id": "another request"}, "", "unknown", id="unknown-request"),
        pytest.param({"remote_port": 1}, "", "refused", id="no-listener"),
        pytest.param({}, "stall-layer-1", "timeout", id="stalled"),
    ],
)
def test_blocks_that_cannot_be_pulled_are_computed(pair: Pair, change: dict[str, Any], fault: str, reason: str) -> None:
    """The request takes more time, and its response is correct."""
    prompt_ids = prompt(150, seed=5 + len(reason))
    failed = pair.decode.metric("kvroute:kv_transfer_failures_total", reason=reason)
    params = params_for(pair, prompt_ids)
    pair.prefill.fault_file.write_text(fault, encoding="utf-8")
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, params | change)
    pair.prefill.fault_file.unlink()
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason=reason) == failed + 1
    complete(pair.decode, prompt_ids, 1, params)  # now it has all blocks and releases them on the prefill server
    assert answer(reply) == alone(pair, prompt_ids)


def test_blocks_that_are_not_fetched_expire(pair: Pair) -> None:
    """The prefill server gets its blocks back; a late fetch is refused, and the prompt is computed."""
    prompt_ids = prompt(150, seed=30)
    expired = pair.prefill.metric("kvroute:kv_expired_total")
    late = pair.decode.metric("kvroute:kv_transfer_failures_total", reason="gone")
    params = params_for(pair, prompt_ids)
    deadline = time.monotonic() + 6 * pair.hold_s
    while pair.prefill.metric("kvroute:kv_expired_total") == expired:
        assert time.monotonic() < deadline, "the blocks never expired"
        complete(pair.prefill, prompt(8, seed=31), 1)  # an idle engine does not check its timeouts
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, params)
    assert pair.decode.metric("kvroute:kv_transfer_failures_total", reason="gone") == late + 1
    assert answer(reply) == alone(pair, prompt_ids)


@dataclass(frozen=True)
class Packet:
    """A TCP packet on the loopback device."""

    mark: int
    """The traffic class byte: the code point is its upper six bits."""
    source: int
    target: int
    payload: int
    """Size in bytes."""


def packets(device: socket.socket) -> list[Packet]:
    """Return the packets captured so far."""
    captured = []
    with suppress(BlockingIOError):
        while data := device.recv(1 << 17):
            if data[9] == socket.IPPROTO_TCP:
                tcp = data[(data[0] & 15) * 4 :]
                source, target = struct.unpack_from("!HH", tcp)
                captured.append(Packet(data[1], source, target, len(tcp) - (tcp[12] >> 4) * 4))
    return captured


def packet_socket() -> socket.socket:
    """Open a capture socket on the loopback device; root is required."""
    ipv4, force = 0x0800, 33
    try:
        device = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ipv4))
    except PermissionError:
        message = "capturing packets needs root"
        if os.environ.get("KVROUTE_REQUIRE_LIVE") == "1":
            pytest.fail(message)
        pytest.skip(message)
    device.bind(("lo", ipv4))
    device.setsockopt(socket.SOL_SOCKET, force, 64 << 20)
    device.setblocking(False)
    return device


def test_packets_of_the_transfer_are_marked_and_share_several_connections(pair: Pair) -> None:
    """AF11 (code point 10) is set for the class `kv` in both directions; requests stay unmarked.

    On a busy machine one connection may be done before the next one has started; therefore there are several attempts.
    """
    shared_by = 0
    for seed in range(40, 45):
        prompt_ids = prompt(3500, seed)
        params = params_for(pair, prompt_ids)
        with packet_socket() as device:
            complete(pair.decode, prompt_ids, 1, params)
            captured = packets(device)
        port = params["remote_port"]
        blocks = [packet for packet in captured if packet.source == port and packet.payload > 1000]
        assert {packet.mark for packet in blocks} == {10 << 2}
        assert {packet.mark for packet in captured if packet.target == port and packet.payload} == {10 << 2}
        assert {packet.mark for packet in captured if packet.target == pair.decode.ports[0]} == {0}
        shared_by = len({packet.target for packet in blocks})
        if shared_by > 1:
            break
    assert 1 < shared_by <= 4


def test_blocks_of_another_prompt_are_not_pulled(pair: Pair) -> None:
    """Transfer parameters of other tokens are detected before a byte is pulled."""
    prompt_ids, other = prompt(100, seed=20), prompt(100, seed=21)
    before = pulled(pair.decode)
    reply = complete(pair.decode, prompt_ids, ANSWER_TOKENS, params_for(pair, other))
    assert pulled(pair.decode) == before
    assert answer(reply) == alone(pair, prompt_ids)


def test_cache_tensors_of_every_layout_become_regions(pair: Pair) -> None:
    """Six layouts, each straight from memory and through a host buffer, for scattered and adjacent blocks, and two
    layouts that are rejected."""
    done = subprocess.run(
        [pair.python, HERE / "check_regions.py"], env=pair.environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "26", done.stderr
