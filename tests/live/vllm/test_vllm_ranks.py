"""Live: real vLLM with two data-parallel ranks behind one port. A repeated prefix returns to its rank.

Each rank counts its own prefix cache hits and KV transfers (label `engine`), which show where a request was computed.
"""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.services import missing
from tests.live.vllm.conftest import BIN, free_ports, make_model, start_member, wait_ready
from tests.live.vllm.gateway_rig import (
    FAILURES,
    GREEDY,
    TOKENS,
    Gateway,
    prompt,
    running,
    token_ids,
    until,
    wait_until_idle,
)

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]
RANKS = ("0", "1")
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


@dataclass(frozen=True)
class Servers:
    """A prefill server with one rank and a decode server with two, and the model of both."""

    model: Path
    prefill: Server
    decode: Server


def consecutive_ports() -> list[int]:
    """Return the ports of a server with two ranks: HTTP, KV events, their replay, KV. Each but the first is the one of
    rank 0, and rank 1 has the next one."""
    for first in free_ports(20):
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + 7):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return [first, first + 1, first + 3, first + 5]
    raise AssertionError("no free ports in a row")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Both servers, up."""
    if not (BIN / "vllm").exists():
        missing("vLLM is not installed: run tests/live/vllm/install.sh")
    folder = tmp_path_factory.mktemp("ranks")
    model = make_model(folder)
    prefill = start_member("kv_producer", "prefill0", model, folder, timeout_s=30.0)
    decode = start_member(
        *("kv_both", "decode0", model, folder, consecutive_ports()),
        options=["--data-parallel-size", "2"],
        timeout_s=30.0,
    )
    try:
        wait_ready([prefill, decode])
        yield Servers(model, prefill, decode)
    finally:
        prefill.kill()
        decode.kill()


def cluster_file(servers: Servers, role: str, **more: Any) -> str:
    """Return the file of the server with two ranks in a role; as `decode` beside the prefill server."""
    model, decode, prefill = str(servers.model / "config.json"), servers.decode, servers.prefill
    node = {"rack": "rack0", "gpus": 2, "nics": {"compute": {"count": 2, "capacity": "10 Gbps"}}}

    def endpoint(server: Server) -> dict[str, str]:
        kv = f"127.0.0.1:{server.ports[3]}"
        return {"url": server.url, "kv_events": server.events, "kv_replay": server.replay, "bootstrap": kv}

    instances: list[dict[str, Any]] = [
        {"name": "decode0", "role": role, "gpus": "node1:0-1", "dp": 2, "endpoint": endpoint(decode)}
    ]
    if role == "decode":
        instances.append({"name": "prefill0", "role": "prefill", "gpus": "node0:0", "endpoint": endpoint(prefill)})
    document = {
        "name": "live",
        "racks": [{"name": "rack0"}],
        "nodes": [{"name": name, **node} for name in ("node0", "node1")],
        "timing": {
            "default": {
                "prefill": {"kind": "linear", "per_token": "200 us", "base": "20 ms"},
                "decode": {"base": "5 ms", "per_request": "1 ms"},
            }
        },
        "defaults": {"model": model, "tp": 1, "batch_max": 32, "kv_capacity": "33 MB"},
        "instances": instances,
        "gateway": {
            "models": {"tiny": model},
            "prefix": "events",
            "prompt": {"tokenizer": str(servers.model / "tokenizer.json"), "block_tokens": 32},
            "health": {"interval": "500 ms"},
            "scrape": {"interval": "200 ms"},
            "policy": "foresight",  # a pair for every request
            **more,
        },
    }
    return json.dumps(document)


def serving(text: str, folder: Path) -> Any:
    """Run a gateway with a cluster file."""
    return running("serve", text, folder, "--port", "0")


def gateway_of(process: Any, addresses: dict[str, str], folder: Path, names: tuple[str, ...]) -> Gateway:
    """Return the gateway once it reports that all instances are up."""
    gateway = Gateway(process, addresses["url"], addresses["admin"], folder / "events.log", 0.0)
    until(lambda: all(gateway.metric("kvroute_instance_up", engine=name) == 1 for name in names))
    return gateway


def direct(servers: Servers, tokens: list[int], rank: str = "") -> Any:
    """Send a prompt to the server with two ranks past the gateway. Args: `rank` of the header; empty: none."""
    body = {"model": "tiny", "prompt": tokens, **GREEDY, **TOKENS}
    headers = {"Content-Type": "application/json"} | ({"X-data-parallel-rank": rank} if rank else {})
    request = urllib.request.Request(f"{servers.decode.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120.0) as reply:
        return json.loads(reply.read())


def by_rank(servers: Servers, name: str) -> dict[str, float]:
    return {rank: servers.decode.metric(name, engine=rank) for rank in RANKS}


def gained(servers: Servers, name: str, before: dict[str, float]) -> dict[str, float]:
    after = by_rank(servers, name)
    return {rank: after[rank] - before[rank] for rank in RANKS}


def gains(servers: Servers, name: str, before: dict[str, float], total: float) -> dict[str, float]:
    """Wait until the ranks have counted `total` since `before`; return what each has counted. Metrics of a response may
    come after it."""
    with suppress(AssertionError):  # the caller's comparison shows what is missing
        until(lambda: sum(gained(servers, name, before).values()) >= total)
    return gained(servers, name, before)


def loads_are_read(gateway: Gateway) -> None:
    """Wait until the gateway has read the load of both ranks again."""
    read = len(gateway.events("instance_measured"))
    until(lambda: len(gateway.events("instance_measured")) >= read + 4)


def completed(gateway: Gateway, tokens: list[int]) -> list[int]:
    with gateway.client() as client:
        reply = client.completions.create(model="tiny", prompt=tokens, **GREEDY, extra_body=TOKENS)
    return token_ids(reply.choices[0])


def test_a_repeated_prefix_returns_to_its_rank(servers: Servers, tmp_path: Path) -> None:
    """Only the KV events of each rank tell the gateway where a prompt is: it was sent past it."""
    with serving(cluster_file(servers, "both"), tmp_path) as (process, addresses):
        gateway = gateway_of(process, addresses, tmp_path, ("decode0_dp0", "decode0_dp1"))
        for number, rank in enumerate(("1", "0", "1", "1", "0", "0")):
            tokens = prompt(300, seed=5_000 + number)
            stored = len(gateway.events("kv_stored"))
            expected = direct(servers, tokens, rank)["choices"][0]["token_ids"]
            until(lambda: len(gateway.events("kv_stored")) > stored)  # noqa: B023
            loads_are_read(gateway)
            before = by_rank(servers, HITS)
            assert completed(gateway, tokens) == expected
            assert gains(servers, HITS, before, 288) == {rank: 288.0, "10"[int(rank)]: 0.0}
        wait_until_idle(gateway)


def test_without_the_header_a_repeated_prefix_goes_to_any_rank(servers: Servers) -> None:
    """The negative control: vLLM divides requests by load and does not know where a prefix is."""
    tokens = prompt(300, seed=6_000)
    before = by_rank(servers, QUERIES)
    for _ in range(6):
        direct(servers, tokens)
    queries = gains(servers, QUERIES, before, 6 * 300)
    assert min(queries.values()) >= 300, queries


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_header_reaches_its_rank(servers: Servers, rank: str) -> None:
    before = by_rank(servers, QUERIES)
    for number in range(3):
        direct(servers, prompt(100, seed=6_100 + number), rank)
    assert gains(servers, QUERIES, before, 300) == {rank: 300.0, "10"[int(rank)]: 0.0}


def test_a_rank_that_does_not_exist_is_a_client_error(servers: Servers) -> None:
    """As emulated engines answer."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        direct(servers, prompt(20, seed=1), "2")
    assert refused.value.code == 400
    assert b"data_parallel_rank 2 is out of range [0, 2)." in refused.value.read()


def test_kv_goes_to_the_rank_that_was_chosen(servers: Servers, tmp_path: Path) -> None:
    """Each rank pulls the KV of the requests that were decided for it. The tokens are those that the prefill server
    computes without a transfer."""
    with serving(cluster_file(servers, "decode", policy="round-robin"), tmp_path) as (process, addresses):
        gateway = gateway_of(process, addresses, tmp_path, ("decode0_dp0", "decode0_dp1", "prefill0"))
        name = "kvroute:kv_transfers_total"
        before, failed = by_rank(servers, name), by_rank(servers, FAILURES)
        prompts = [prompt(200, seed=7_000 + number) for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            got = list(threads.map(lambda tokens: completed(gateway, tokens), prompts))
        for tokens, answer in zip(prompts, got, strict=True):
            body = {"model": "tiny", "prompt": tokens, **GREEDY, **TOKENS}
            assert answer[:4] == servers.prefill.post("/v1/completions", body)["choices"][0]["token_ids"][:4]
        decided = decode_targets(gateway)
        for rank in RANKS:  # vLLM counts the transfers of a step with the next one
            direct(servers, prompt(8, seed=7_100), rank)
        assert by_rank(servers, FAILURES) == failed
        assert gains(servers, name, before, 8) == {rank: float(decided.count(f"decode0_dp{rank}")) for rank in RANKS}
        assert set(decided) == {"decode0_dp0", "decode0_dp1"}
        wait_until_idle(gateway)


def test_kv_comes_from_the_rank_that_has_it(servers: Servers) -> None:
    """The transfer parameters of each rank name its own port and id, and the name of the instance in the file."""
    hold = {"do_remote_decode": True, "do_remote_prefill": False}
    params = []
    for rank in RANKS:
        body = {"model": "tiny", "prompt": prompt(100, seed=8_000), "max_tokens": 1, "kv_transfer_params": hold}
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": rank}
        request = urllib.request.Request(f"{servers.decode.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120.0) as reply:
            params.append(json.loads(reply.read())["kv_transfer_params"])
    port = servers.decode.ports[3]
    assert [param["remote_port"] for param in params] == [port, port + 1]
    assert [param["remote_instance"] for param in params] == ["decode0_dp0", "decode0_dp1"]
    assert [param["remote_engine_id"].rpartition("_")[2] for param in params] == ["dp0", "dp1"]


def decode_targets(gateway: Gateway) -> list[str]:
    """Return the decode instance of each decision."""
    lines = [json.loads(line) for line in gateway.log.read_text(encoding="utf-8").split("\n")[1:-1]]
    decisions = [decision for line in lines for decision in line.get("decisions", ())]
    return [decision["target"] for decision in decisions if decision["type"] == "decode"]
