"""Live: real vLLM reads cached KV from a store through the buffer servers of its prefill and decode nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.live.vllm.conftest import LAYER_BYTES, MODEL, Pair, Server, environment, start_member, wait_ready
from tests.live.vllm.gateway_rig import (
    TOKENS,
    Gateway,
    all_up,
    alone,
    cluster_file,
    prompt,
    serving,
    token_ids,
    until,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
NAMES = ("prefill0", "decode0", "decode1")
BLOCK_BYTES = 4 * LAYER_BYTES
HEADER_BYTES = 4096
"""Size of the header of a stored block, before its layers."""
ANSWER_TOKENS = 40
READS = "kvroute_storage_reads_total"
TIMEOUT_S = 30.0
"""Time after which a read or write without progress fails: longer than a busy machine stops a process."""


@dataclass
class Buffer:
    """One `kvroute buffer` process."""

    process: subprocess.Popen[bytes]
    url: str
    data: str

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()


@dataclass
class Cluster:
    """Three servers with a store, each on a node of its own with a buffer server."""

    pair: Pair
    store: Path
    buffers: dict[str, Buffer]

    def file(self, reads: str) -> str:
        """Return the cluster file with one read path."""
        document = json.loads(cluster_file(self.pair, {}))
        node = document["nodes"][0]
        nics = {**node["nics"], "storage": {"capacity": "10 Gbps"}}
        document["nodes"] = [{**node, "name": f"node{at}", "nics": nics} for at in range(3)]
        document["storage"] = {"reads": reads}
        for at, instance in enumerate(document["instances"]):
            instance["gpus"] = f"node{at}:0"
            instance["endpoint"]["buffer"] = self.buffers[instance["name"]].url
        return json.dumps(document)

    def forget(self) -> None:
        """Drop everything from the prefill server's own cache, so that it must be read from the store."""
        self.pair.prefill.post("/reset_prefix_cache", {})
        # An idle engine does not publish its events.
        self.pair.prefill.post("/v1/completions", {"model": MODEL, "prompt": prompt(8, seed=1), "max_tokens": 1})

    def stored_blocks(self) -> list[Path]:
        """Return the files of the blocks in the store."""
        return [path for path in self.store.glob("*/blocks/*/*") if path.is_file()]


def start_buffer(store: str, folder: Path, name: str, *options: str) -> Buffer:
    """Start a buffer server and wait until it is ready."""
    ready = folder / f"{name}.ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvroute.cli.app", "buffer", store, "--ready-file", str(ready)]
    ports = ("--port", "0", "--data-port", "0", "--token-env", "KVROUTE_TEST_TOKEN", "--quota", "64MB")
    with (folder / f"{name}.buffer.txt").open("ab") as output:
        process = subprocess.Popen(
            [*command, *ports, *options], env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
    until(lambda: process.poll() is not None or (ready.exists() and ready.read_bytes().endswith(b"\n")))
    assert process.poll() is None, (folder / f"{name}.buffer.txt").read_text(encoding="utf-8")
    return Buffer(process, **json.loads(ready.read_bytes()))


@contextmanager
def with_store(
    model: Path, folder: Path, alone: Server, begin: Callable[[str], Buffer], store: Path
) -> Iterator[Cluster]:
    """Run one prefill and two decode servers that share a store.

    Args:
        model: folder of the model.
        folder: for logs.
        alone: the server without a connector.
        begin: starts the buffer server of a server.
        store: folder of the store.
    """
    buffers: dict[str, Buffer] = {}
    servers: list[Server] = []
    try:
        for role, name in zip(("kv_producer", "kv_consumer", "kv_consumer"), NAMES, strict=True):
            buffers[name] = begin(name)
            data = buffers[name].data
            servers.append(start_member(role, name, model, folder, buffer=data, layerwise=False, timeout_s=TIMEOUT_S))
        wait_ready(servers)
        prefill, decode, other = servers
        yield Cluster(Pair(model, folder, prefill, decode, other, alone), store, buffers)
    finally:
        for server in servers:
            server.kill()
        for buffer in buffers.values():
            buffer.kill()


@pytest.fixture(scope="module")
def stored(cluster: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The servers of this module."""
    folder = tmp_path_factory.mktemp("storage")
    store = folder / "store"

    def begin(name: str) -> Buffer:
        return start_buffer(str(store), folder, name)

    with with_store(cluster.model, folder, cluster.alone, begin, store) as found:
        yield found


def ask(gateway: Gateway, tokens: list[int], count: int = ANSWER_TOKENS) -> list[int]:
    """Return the `count` tokens that answer a prompt."""
    with gateway.client() as client:
        reply = client.completions.create(
            model=MODEL, prompt=tokens, temperature=0, max_tokens=count, extra_body=TOKENS
        )
    return token_ids(reply.choices[0])


def reads(gateway: Gateway, side: str, outcome: str = "complete") -> float:
    """Return the number of reads that have ended in this way."""
    return gateway.metric(READS, side=side, outcome=outcome)


def first_turn(stored: Cluster, gateway: Gateway, seed: int, tokens: int = 1000) -> list[int]:
    """Send a new prompt; return it with its answer once both are in the store."""
    first, earlier = prompt(tokens, seed), len(gateway.events("arrived"))
    got = ask(gateway, first)
    assert got == alone(stored.pair, first, ANSWER_TOKENS)
    turn = [*first, *got]
    full = (len(turn) - 1) // 32  # the last token has no KV yet
    until(lambda: in_store(gateway, earlier, full))
    stored.forget()
    until(lambda: not gpu_holders(gateway, "prefill0"))
    return turn


def in_store(gateway: Gateway, earlier: int, blocks: int) -> bool:
    """Return whether the gateway knows that the prompt after `earlier` ones, with its answer, is in the store."""
    events = [event["blocks"] for event in gateway.events("kv_stored") if event.get("tier") == "store"]
    for arrived in gateway.events("arrived")[earlier:]:
        chain = arrived["request"]["blocks"]
        return any(len(event) >= blocks and event[: len(chain)] == chain for event in events)
    return False  # the log is flushed from time to time


def gpu_holders(gateway: Gateway, instance: str) -> bool:
    """Return whether the gateway's last event of an instance's own cache is a stored block."""
    events = [
        event
        for kind in ("kv_stored", "kv_cleared")
        for event in gateway.events(kind)
        if event["instance"] == instance and event.get("tier", "gpu") == "gpu"
    ]
    return bool(events) and max(events, key=lambda event: event["at"])["type"] == "kv_stored"


PATHS = ["prefill", "alternating", "shorter", "split"]


@pytest.mark.parametrize("path", PATHS)
def test_a_second_turn_reads_what_the_first_one_wrote_back(stored: Cluster, tmp_path: Path, path: str) -> None:
    """Two turns of two agents; the blocks that the decode server filled are read, too."""
    with serving(stored.pair, tmp_path, text=stored.file(path)) as gateway:
        all_up(gateway, stored.pair)
        for seed in (1, 2):
            turn = first_turn(stored, gateway, seed=9000 + 10 * PATHS.index(path) + seed)
            loaded = stored.pair.prefill.metric("vllm:external_prefix_cache_hits_total")
            second = [*turn, *prompt(100, seed=77)]
            got = ask(gateway, second)
            assert got == alone(stored.pair, second, ANSWER_TOKENS)
            hits = stored.pair.prefill.metric("vllm:external_prefix_cache_hits_total") - loaded
            assert hits == (len(turn) - 1) // 32 * 32
        sides = {side: reads(gateway, side) for side in ("prefill", "decode")}
        nbytes = gateway.metric("kvroute_storage_read_bytes_total")
    assert nbytes == 2 * 32 * BLOCK_BYTES
    match path:
        case "prefill":
            assert sides == {"prefill": 2, "decode": 0}
        case "alternating":
            assert sides == {"prefill": 1, "decode": 1}
        case "split":
            assert sides == {"prefill": 2, "decode": 2}
        case _:
            assert sum(sides.values()) == 2


def pulled(server: Server, source: str) -> float:
    """Return the bytes of KV that a server has pulled from a source."""
    return server.metric("kvroute:kv_transfer_bytes_total", source=source)


def test_a_decode_server_loads_what_its_own_node_has_read(stored: Cluster, tmp_path: Path) -> None:
    """Every block comes to the decode server once: the staged part from its buffer server, the rest from the prefill
    server."""
    servers = {"decode0": stored.pair.decode, "decode1": stored.pair.other}
    with serving(stored.pair, tmp_path, text=stored.file("split")) as gateway:
        all_up(gateway, stored.pair)
        turn = first_turn(stored, gateway, seed=9700)
        for server in servers.values():
            server.post("/reset_prefix_cache", {})
        own = {name: f"buffer {stored.buffers[name].data}" for name in servers}
        before = {
            (name, source): pulled(server, source)
            for name, server in servers.items()
            for source in (own[name], "prefill0")
        }
        second = [*turn, *prompt(100, seed=81)]
        assert ask(gateway, second) == alone(stored.pair, second, ANSWER_TOKENS)
        arrived = {(name, source): pulled(servers[name], source) - count for (name, source), count in before.items()}
        (chosen,) = {name for (name, _), nbytes in arrived.items() if nbytes}
        side = gateway.metric("kvroute_storage_read_bytes_total", side="decode")
        assert side > 0
        assert arrived[chosen, own[chosen]] == side
        assert arrived[chosen, "prefill0"] == -(-len(second) // 32) * BLOCK_BYTES - side


@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_block_changes_the_tokens_unless_checksums_are_on(
    stored: Cluster, tmp_path: Path, verify: bool
) -> None:
    """One byte of one layer in the store. With checksums the read ends before that block, and the rest is computed."""
    buffer = stored.buffers["prefill0"]
    buffer.kill()
    ports = ("--port", buffer.url.rpartition(":")[2], "--data-port", buffer.data.rpartition(":")[2])
    check = () if verify else ("--no-verify",)
    stored.buffers["prefill0"] = start_buffer(str(stored.store), tmp_path, "prefill0", *ports, *check)
    with serving(stored.pair, tmp_path, text=stored.file("prefill")) as gateway:
        all_up(gateway, stored.pair)
        known = set(stored.stored_blocks())
        turn = first_turn(stored, gateway, seed=9800 + verify)
        for path in set(stored.stored_blocks()) - known:
            data = bytearray(path.read_bytes())
            data[HEADER_BYTES + 2 * LAYER_BYTES : HEADER_BYTES + 3 * LAYER_BYTES] = bytes(LAYER_BYTES)
            path.write_bytes(data)
        second = [*turn, *prompt(100, seed=78)]
        got, want = ask(gateway, second), alone(stored.pair, second, ANSWER_TOKENS)
        if verify:
            assert got == want
            assert reads(gateway, "prefill", "short") == 1
        else:
            assert got != want
            assert reads(gateway, "prefill") == 1


def test_a_buffer_server_that_is_down_costs_only_time(stored: Cluster, tmp_path: Path) -> None:
    """The prompt is computed, and the next one uses the server again after its restart."""
    buffer = stored.buffers["prefill0"]
    ports = ("--port", buffer.url.rpartition(":")[2], "--data-port", buffer.data.rpartition(":")[2])
    with serving(stored.pair, tmp_path, text=stored.file("prefill")) as gateway:
        all_up(gateway, stored.pair)
        turn = first_turn(stored, gateway, seed=9900)
        buffer.kill()
        second = [*turn, *prompt(100, seed=79)]
        assert ask(gateway, second) == alone(stored.pair, second, ANSWER_TOKENS)
        assert reads(gateway, "prefill", "failed") == 1
        stored.buffers["prefill0"] = start_buffer(str(stored.store), tmp_path, "prefill0", *ports)
        turn = first_turn(stored, gateway, seed=9950)
        third = [*turn, *prompt(100, seed=80)]
        assert ask(gateway, third) == alone(stored.pair, third, ANSWER_TOKENS)
        assert reads(gateway, "prefill") == 1
