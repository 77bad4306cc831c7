"""Cached KV that is read from the store before the prompt is computed, through the whole gateway: both read paths,
turns that hit what the decode instance wrote back, and failures."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop
from tests.serve.rig import GatewayResponse, Rig, rig
from tests.serve.two_sites import metric
from tests.waiting import until
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.emulator.api.server import InstanceServer
from kvroute.emulator.kv.storage import ModelledNic, StorageNode
from kvroute.llm import model
from kvroute.prefix import block_hashes
from kvroute.topology import parse
from kvroute.types import ReadFinished, ReadKv, Request
from kvroute_engine.block_keys import block_keys

BLOCK = 16
TEXT = """
name: stored
racks: [{name: rack0}]
storage: {reads: READS, buffer: 1.1 GB}
nodes:
  - {name: node0, rack: rack0, gpus: 2, nics: {compute: {capacity: 400 Gbps}, storage: {capacity: 80 Gbps}}}
  - {name: node1, rack: rack0, gpus: 2, nics: {compute: {capacity: 400 Gbps}, storage: {capacity: 80 Gbps}}}
  - {name: node2, rack: rack0, gpus: 2, nics: {compute: {capacity: 400 Gbps}, storage: {capacity: 80 Gbps}}}
timing: {default: {prefill: {kind: linear, per_token: 200 us, base: 1 ms}, decode: {base: 1 ms, per_request: 10 us}}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 40 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: decode0, role: decode, gpus: "node1:0-1"}
  - {name: decode1, role: decode, gpus: "node2:0-1"}
gateway:
  listen: {port: 0}
  admin: {port: 0}
  measure: engine
  prefill: cache-aware
"""
TOKENS = list(range(1_000, 2_600))
"""100 blocks."""


def bytes_of(tokens: int) -> float:
    return float(model("llama-3-70b").kv_bytes(tokens))


def stored(reads: str, section: str = "") -> AbstractAsyncContextManager[Rig]:
    """Run the cluster with this read path, and a gateway with `section` in its settings."""
    return rig(section, TEXT.replace("READS", reads))


async def ask(gate: Rig, prompt: list[int], output_tokens: int = 4) -> GatewayResponse:
    response = await gate.ask(prompt, tokens=output_tokens)
    assert response.status == 200, response.body
    return response


def cached(response: GatewayResponse) -> int:
    return int(response.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def output_of(response: GatewayResponse) -> list[int]:
    """Return the token ids of a response of the emulator."""
    ids: list[int] = np.frombuffer(response.text.encode(), "<u4").tolist()
    return ids


async def in_store(gate: Rig, prompt: list[int]) -> None:
    """Wait until the router knows that all full blocks of a prompt are in the store."""
    request = Request(id=0, input_tokens=len(prompt), blocks=block_hashes(prompt, BLOCK), block_tokens=BLOCK)
    whole = len(prompt) // BLOCK * BLOCK
    await until(lambda: gate.gateway.runtime.control.caches.stored_tokens(request, "llama-3-70b") == whole)


async def forget(gate: Rig, *names: str) -> None:
    """Drop the caches in GPU memory (default: of all instances), and wait until the router knows."""
    prefix, servers = gate.gateway.runtime.control.prefix, gate.fleet.servers
    for server in (servers[name] for name in names or servers):
        await until(partial(idle, server))
        async with gate.session.post(f"http://127.0.0.1:{server.port}/reset_prefix_cache") as response:
            assert response.status == 200
    indices = [list(servers).index(name) for name in names or servers]
    await until(lambda: not any(prefix.used_blocks(index) for index in indices))


def idle(server: InstanceServer) -> bool:
    return not server.engine.running and not server.engine.waiting


def node_of(gate: Rig, name: str) -> StorageNode:
    tier = gate.fleet.servers[name].engine.storage
    assert tier is not None
    return tier.node


def nic_of(gate: Rig, name: str) -> ModelledNic:
    medium = node_of(gate, name).medium
    assert isinstance(medium, ModelledNic)
    return medium


async def check_nothing_held(gate: Rig) -> None:
    assert await gate.becomes_idle(), gate.held_resources()
    for name in gate.fleet.servers:
        node = node_of(gate, name)
        await until(lambda node=node: not node.buffered_bytes and not node.queued_bytes)  # type: ignore[misc]
    loads = gate.gateway.runtime.control.loads(gate.gateway.now()).values()
    assert {load.storage_queue_s for load in loads} == {0.0}


@pytest.mark.parametrize(
    ("reads", "sides"), [("prefill", {"prefill0": 1.0}), ("alternating", {}), ("split", {"prefill0": 0.5})]
)
def test_a_stored_prefix_is_read_and_not_computed(tmp_path: Path, reads: str, sides: dict[str, float]) -> None:
    """Client, engines, metrics, log and explain agree on the tokens and bytes of each read path."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with stored(reads, f"  log: {{events: {log}}}\n") as gate:
            assert cached(await ask(gate, TOKENS)) == 0
            await in_store(gate, TOKENS)
            read_bytes = dict.fromkeys(gate.fleet.servers, 0.0)
            for _ in range(2):
                await forget(gate)
                longer = [*TOKENS, *range(10)]  # not a full block
                response = await ask(gate, longer)
                assert cached(response) == len(TOKENS)
                assert response.text == await gate.direct("decode0", longer)
                read_bytes = {name: node_of(gate, name).read_bytes for name in gate.fleet.servers}
            assert sum(read_bytes.values()) == 2 * bytes_of(len(TOKENS))
            for name, share in sides.items():
                assert read_bytes[name] == share * sum(read_bytes.values())
            if reads == "alternating":
                assert sorted(read_bytes.values())[1:] == [bytes_of(len(TOKENS))] * 2
            pulled = gate.fleet.servers["prefill0"].engine.counters.pulled
            elsewhere = sum(nbytes for name, nbytes in read_bytes.items() if name != "prefill0")
            assert sum(transfer.kv_bytes for transfer in pulled.values()) == elsewhere
            for name, nbytes in read_bytes.items():
                side = "prefill" if name == "prefill0" else "decode"
                found = await metric(gate, "kvroute_storage_read_bytes_total", engine=name, side=side)
                assert (found or 0.0) == nbytes
            shown = gate.gateway.state.snapshot(gate.gateway.now()).tick.decisions
            assert [(d.source, d.hit_tokens) for d in shown if d.kind == "read"] == [("store", len(TOKENS))] * 2
            await check_nothing_held(gate)

    uvloop.run(main())
    header, read = read_log(log)
    records = list(read)
    cluster = parse(TEXT.replace("READS", reads))
    assert all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(cluster), iter(records))
    )
    decisions = [decision for record in records for decision in record.decisions]
    orders = [decision for decision in decisions if isinstance(decision, ReadKv)]
    assert [order.prefill_tokens + order.decode_tokens for order in orders] == [len(TOKENS)] * 2
    ends = [record.event for record in records if isinstance(record.event, ReadFinished)]
    parts = [tokens for order in orders for tokens in (order.prefill_tokens, order.decode_tokens) if tokens]
    assert len(ends) == len(parts)
    result = CliRunner().invoke(app, ["explain", str(log), "1"])
    assert "read from the store: " in result.stdout
    assert "tokens by the node of " in result.stdout
    document = msgspec.json.decode(CliRunner().invoke(app, ["explain", str(log), "1", "--json"]).stdout)
    kinds = {decision["kind"]: decision for decision in document["decisions"]}
    assert kinds["readkv"]["read"]["bytes"] == bytes_of(len(TOKENS))
    assert {row["name"] for row in kinds["readkv"]["candidates"]} >= {"prefill0"}
    assert any(row["load_s"] > 0 for row in kinds["prefill"]["candidates"])


def kv_sent(gate: Rig, name: str) -> float:
    """Return the modelled KV that an instance has pulled."""
    return sum(transfer.kv_bytes for transfer in gate.fleet.servers[name].engine.counters.pulled.values())


@pytest.mark.parametrize("decode0", ["decodes", "fails", "leaves"])
def test_the_decode_instance_takes_what_its_own_node_has_read(decode0: str) -> None:
    """Only the rest comes from the prefill instance. If the request is decoded elsewhere after all, everything comes
    from there, and the router releases the read."""

    async def main() -> None:
        async with stored("split") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            await forget(gate)
            decoders = ("decode0", "decode1")
            for name in decoders:
                node_of(gate, name).hold_s = 3600.0
            before = {name: kv_sent(gate, name) for name in decoders}
            half, whole = bytes_of(len(TOKENS) // 2), bytes_of(len(TOKENS) + 10)
            if decode0 == "fails":
                await gate.command("decode0", leg="decode", fail_next=1)
            if decode0 == "leaves":
                gate.slow(500.0)
            asked = asyncio.ensure_future(ask(gate, [*TOKENS, *range(10)]))
            if decode0 == "leaves":  # after it was chosen, and before the prefill has finished
                await until(lambda: kv_sent(gate, "prefill0") == half)
                gate.gateway.runtime.engines["decode0"].availability.hold("maintenance", gate.gateway.now())
                gate.slow(1.0)
            await asked
            assert node_of(gate, "decode0").read_bytes == half, "decode0 was chosen"
            sent = {name: kv_sent(gate, name) - before[name] for name in decoders}
            assert sent == (
                {"decode0": whole - half, "decode1": 0.0}
                if decode0 == "decodes"
                else {"decode0": 0.0, "decode1": whole}
            )
            await check_nothing_held(gate)

    uvloop.run(main())


def test_blocks_that_the_decode_instance_has_cached_are_not_loaded_twice() -> None:
    """Its node reads blocks that are also in its GPU memory: only the tokens that it lacks cross the network."""

    async def main() -> None:
        async with stored("split") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            assert kv_sent(gate, "decode0") == bytes_of(len(TOKENS)), "decode0 was chosen"
            await forget(gate, "prefill0")
            await ask(gate, [*TOKENS, *range(10)])
            assert node_of(gate, "decode0").read_bytes == bytes_of(len(TOKENS) // 2)
            assert kv_sent(gate, "decode0") == bytes_of(len(TOKENS) + 10)
            await check_nothing_held(gate)

    uvloop.run(main())


def test_the_next_turn_reads_what_the_decode_instance_wrote_back() -> None:
    async def main() -> None:
        async with stored("shorter") as gate:
            first = await ask(gate, TOKENS, output_tokens=40)
            turn = [*TOKENS, *output_of(first)]
            assert len(turn) == len(TOKENS) + 40
            await in_store(gate, turn)
            await forget(gate)
            assert cached(await ask(gate, [*turn, *range(20)])) == len(turn) // BLOCK * BLOCK
            await check_nothing_held(gate)

    uvloop.run(main())


@pytest.mark.parametrize("lost", ["buffer server", "blocks"])
def test_what_cannot_be_read_is_computed(lost: str) -> None:
    """The node of the decode instance dies while it reads, or a block is gone from the store."""

    async def main() -> None:
        async with stored("alternating") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            await forget(gate)
            await ask(gate, TOKENS)  # the prefill node reads
            await forget(gate)
            if lost == "blocks":
                server = gate.fleet.servers["prefill0"]
                nic_of(gate, "prefill0").store.forget(server.engine.instance.model)
                response = await ask(gate, TOKENS)
            else:
                for name in ("decode0", "decode1"):
                    nic_of(gate, name).read_bytes_per_s = 1.0
                asked = asyncio.ensure_future(gate.ask(TOKENS))
                names = ("decode0", "decode1")
                await until(lambda: any(node_of(gate, name).queued_bytes for name in names))
                reader = next(name for name in names if node_of(gate, name).queued_bytes)
                await gate.stop_engine(reader)
                response = await asked
                await gate.restart_engine(reader)
            assert response.status == 200
            assert cached(response) == 0
            assert response.text == await gate.direct("prefill0", TOKENS)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


def test_a_client_that_leaves_during_a_read_frees_the_buffer() -> None:
    async def main() -> None:
        async with stored("split") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            await forget(gate)
            for name in gate.fleet.servers:
                nic_of(gate, name).read_bytes_per_s = 1e6  # minutes
            asked = asyncio.ensure_future(gate.ask(TOKENS))
            await until(lambda: sum(node_of(gate, name).queued_bytes > 0 for name in gate.fleet.servers) == 2)
            asked.cancel()
            await check_nothing_held(gate)
            assert await metric(gate, "kvroute_client_disconnects_total") == 1

    uvloop.run(main())


def test_a_part_that_is_complete_is_released_when_the_client_leaves() -> None:
    async def main() -> None:
        async with stored("split") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            await forget(gate)
            for name in ("decode0", "decode1"):
                nic_of(gate, name).read_bytes_per_s = 1e6  # minutes
            asked = asyncio.ensure_future(gate.ask(TOKENS))
            node = node_of(gate, "prefill0")
            node.hold_s = 3600.0
            await until(lambda: bool(node.buffered_bytes) and not node.queued_bytes)
            asked.cancel()
            await check_nothing_held(gate)

    uvloop.run(main())


def test_a_split_read_reserves_the_decode_side_first() -> None:
    """It holds no buffer of the prefill node while it waits for one of the decode node, so reads cannot block each
    other."""

    async def main() -> None:
        async with stored("split") as gate:
            await ask(gate, TOKENS)
            await in_store(gate, TOKENS)
            await forget(gate)
            keys, decoders = block_keys(TOKENS, BLOCK), ("decode0", "decode1")
            for name in decoders:
                node = node_of(gate, name)
                node.hold_s = 3600.0
                tier = gate.fleet.servers[name].engine.storage
                assert tier is not None
                held = int(node.buffer_bytes // (len(keys) * tier.block_bytes))
                for at in range(held):
                    await node.read(f"other{at}", tier.model, keys, tier.block_bytes)
            asked = asyncio.ensure_future(ask(gate, TOKENS))
            await until(lambda: any(node_of(gate, name).queued_bytes for name in decoders))
            assert not node_of(gate, "prefill0").queued_bytes + node_of(gate, "prefill0").buffered_bytes
            assert not asked.done()
            for name in decoders:
                for at in range(held):
                    node_of(gate, name).release(f"other{at}")
            response = await asked
            assert cached(response) == len(TOKENS) - BLOCK  # one token must be computed
            await check_nothing_held(gate)

    uvloop.run(main())


@pytest.mark.parametrize("lost", ["buffer", "another prompt"])
def test_staged_blocks_that_do_not_arrive_are_computed(lost: str) -> None:
    """The engine alone: the part is gone when it is fetched, or its key is not that of the prompt."""

    async def main() -> None:
        async with stored("split") as gate:
            keys = block_keys(TOKENS, BLOCK)
            key = keys[-1] if lost == "buffer" else keys[0]
            part = {"id": "lost", "blocks": len(keys), "data": "127.0.0.1:1", "buffer": ""}
            params = {"do_remote_decode": True, "storage": {"first_block": 0, "key": key.hex(), "parts": [part]}}
            body = {"prompt": TOKENS, "max_tokens": 1, "kv_transfer_params": params}
            server = gate.fleet.servers["prefill0"]
            async with gate.session.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body) as response:
                document = await response.json()
            assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert server.engine.counters.kv_failed == (lost == "buffer")
            computed_s = 1e-3 + len(TOKENS) * 200e-6
            assert server.engine.counters.prefill_s.sum_s >= computed_s * (1 - 1e-9)

    uvloop.run(main())


def test_a_prompt_whose_tokens_are_unknown_is_computed() -> None:
    """Without a tokenizer, the gateway knows the tokens only of prompts that are sent as ids."""
    text = "KV cache. " * 600

    async def main() -> None:
        async with stored("shorter") as gate:
            await gate.ask(text)
            await forget(gate)
            assert cached(await gate.ask(text)) == 0
            assert await metric(gate, "kvroute_storage_reads_total", engine="prefill0") is None

    uvloop.run(main())
