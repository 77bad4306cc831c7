"""A gateway or a picker as a process in front of the vLLM servers, a client of it, and the tokens that are right."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
from tests.live.services import missing

if TYPE_CHECKING:
    from tests.live.vllm.conftest import Pair, Server

ANSWER_TOKENS = 24
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": ANSWER_TOKENS}
TOKENS = {"return_token_ids": True, "ignore_eos": True}
WAIT_S = 300.0
FAILURES = "kvroute:kv_transfer_failures_total"


@dataclass(frozen=True)
class Gateway:
    """A `kvroute serve` process, or a `kvroute epp` process with its Envoy."""

    process: subprocess.Popen[bytes]
    url: str
    """URL for clients: that of the gateway, or of Envoy."""
    admin: str
    log: Path
    pulled_before: float
    """Bytes that the decode servers had pulled before the gateway started."""

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the event log."""
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").split("\n")[1:-1]]
        return [line["event"] for line in lines if line["event"]["type"] == kind]

    def decode_target(self) -> str:
        """Return the decode instance that was chosen last; empty if none was."""
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").split("\n")[1:-1]]
        decisions = [decision for line in lines for decision in line.get("decisions", ())]
        return next((decision["target"] for decision in reversed(decisions) if decision["type"] == "decode"), "")

    def client(self) -> openai.OpenAI:
        """Return a client of this gateway."""
        return openai_client(self.url)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have `labels`."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples if all(label in line for label in wanted))


def openai_client(url: str) -> openai.OpenAI:
    """Return a client without retries, because the gateway retries."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0)


def anthropic_client(url: str) -> Any:
    """Return a client without retries, because the gateway retries."""
    try:
        import anthropic
    except ImportError:
        missing("anthropic is not installed: uv pip install -r requirements/live.txt")
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120.0)


def cluster_file(pair: Pair, more: dict[str, Any], servers: Sequence[Server] = ()) -> str:
    """Return the file of instances on two nodes, as vLLM serves them. Args: `more` are settings of the gateway;
    `servers` are the instances, the one for prefill first (default: all three)."""
    model = str(pair.model / "config.json")
    roles = {"prefill0": "prefill", "decode0": "decode", "decode1": "decode"}
    document = {
        "name": "live",
        "racks": [{"name": "rack0"}],
        "nodes": [
            {
                "name": node,
                "rack": "rack0",
                "gpus": 2,
                "nvlink": "10 GB/s",
                "nics": {"compute": {"count": 2, "capacity": "10 Gbps"}},
            }
            for node in ("node0", "node1")
        ],
        "timing": {
            "default": {
                "prefill": {"kind": "linear", "per_token": "200 us", "base": "20 ms"},
                "decode": {"base": "5 ms", "per_request": "1 ms"},
            }
        },
        "defaults": {"model": model, "tp": 1, "batch_max": 32, "kv_capacity": "33 MB"},
        "instances": [
            {
                "name": server.name,
                "role": roles[server.name],
                "gpus": f"node{min(index, 1)}:{max(index - 1, 0)}",
                "endpoint": {
                    "url": server.url,
                    "protocol": pair.protocol,
                    "kv_events": server.events,
                    "kv_replay": server.replay,
                    "bootstrap": f"127.0.0.1:{server.ports[3]}",
                },
            }
            for index, server in enumerate(servers or pair.servers)
        ],
        "gateway": {
            "models": {"tiny": model},
            "prompt": {"tokenizer": str(pair.model / "tokenizer.json"), "block_tokens": 32},
            "health": {"interval": "500 ms"},
            "policy": "foresight",  # a pair for every request
            **more,
        },
    }
    return json.dumps(document)  # YAML includes JSON


@contextmanager
def serving(cluster: Pair, folder: Path, text: str = "", **more: Any) -> Iterator[Gateway]:
    """Run a gateway in front of all servers; check that it ends properly on SIGTERM. Args: `text` is its cluster file,
    or `more` are its settings."""
    cluster.restart_dead_servers()
    before, log = pulled_bytes(cluster), folder / "events.log"
    with running("serve", text or cluster_file(cluster, more), folder, "--port", "0") as (process, addresses):
        yield Gateway(process, addresses["url"], addresses["admin"], log, before)


@contextmanager
def running(
    command: str, text: str, folder: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """Run `kvroute serve` or `kvroute epp` with its event log in `folder`/events.log; check that it ends properly on
    SIGTERM. Yield the process and its addresses.

    Args:
        command: `serve` or `epp`.
        text: the cluster file.
        folder: folder for all files.
        options: more options of the command.
    """
    file, ready, log, output = (folder / name for name in ("cluster.yaml", "ready.json", "events.log", "output.txt"))
    file.write_text(text, encoding="utf-8")
    places = ["--admin-port", "0", "--ready-file", str(ready), "--log", str(log)]
    line = [sys.executable, "-m", "kvroute.cli.app", command, str(file), *places, *options]
    with output.open("wb") as sink:
        process = subprocess.Popen(line, stdout=sink, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or (ready.exists() and ready.read_bytes().endswith(b"}")))
        assert process.poll() is None, output.read_text(encoding="utf-8")
        yield process, json.loads(ready.read_bytes())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30.0) == 0, output.read_text(encoding="utf-8")
    finally:
        process.kill()
        process.wait()


def all_up(gateway: Gateway, pair: Pair, servers: Sequence[Server] = ()) -> None:
    """Wait until the gateway reports all of its servers as up. Args: see `cluster_file`."""
    names = [server.name for server in servers or pair.servers]
    until(lambda: all(gateway.metric("kvroute_instance_up", engine=name) == 1 for name in names))


def until(condition: Callable[[], bool]) -> None:
    """Wait for an effect in another process."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def prompt(tokens: int, seed: int) -> list[int]:
    """Return random token IDs, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(3, 420) for _ in range(tokens)]


def alone(pair: Pair, tokens: list[int], count: int = ANSWER_TOKENS) -> list[int]:
    """Return the tokens of a server without a connector."""
    body = {"model": "tiny", "prompt": tokens, "temperature": 0, "max_tokens": count, **TOKENS}
    reply = pair.alone.post("/v1/completions", body)
    tokens_out: list[int] = reply["choices"][0]["token_ids"]
    return tokens_out


def token_ids(choice: Any) -> list[int]:
    """Return vLLM's own field."""
    return list((choice.model_extra or {}).get("token_ids") or ())


def pulled(pair: Pair) -> float:
    """Return the number of successful transfers into the decode servers."""
    return sum(server.metric("kvroute:kv_transfers_total", source="prefill0") for server in (pair.decode, pair.other))


def pulled_bytes(pair: Pair) -> float:
    """Return the bytes pulled into the decode servers, by their own counters."""
    return sum(server.metric("kvroute:kv_transfer_bytes_total") for server in (pair.decode, pair.other))


def measured_bytes(gateway: Gateway) -> float:
    """Return the bytes of all transfers that the engines' counters have reported to the gateway."""
    return sum(float(event["kv_bytes"]) for event in gateway.events("transfer_measured"))


def fetching(server: Server) -> bool:
    """Return whether a request waits for its KV on this server."""
    return server.alive and server.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress") > 0


def server_that_is(pair: Pair, busy: Callable[[Server], bool]) -> Server:
    """Wait for the decode server that is `busy` and return it."""
    chosen: list[Server] = []

    def is_chosen() -> bool:
        chosen.extend(server for server in (pair.decode, pair.other) if busy(server))
        return bool(chosen)

    until(is_chosen)
    return chosen[0]


def during_request(gateway: Gateway, act: Callable[[], None], stream: bool, **body: Any) -> list[int]:
    """Send a request in the background, call `act`, and return the tokens of the response."""
    got: list[int] = []

    def send_prompt() -> None:
        with gateway.client() as client:
            answer: Any = client.completions.create(
                model="tiny", stream=stream, temperature=0, extra_body=TOKENS, **body
            )
            for part in answer if stream else [answer]:
                got.extend(token for choice in part.choices for token in token_ids(choice))

    sender = threading.Thread(target=send_prompt)
    sender.start()
    try:
        act()
    finally:
        sender.join(2 * WAIT_S)
    return got


def requests_on(gateway: Gateway, server: Server) -> float:
    """Return the gateway's own requests on a server."""
    return gateway.metric("kvroute_instance_requests", engine=server.name)


def wait_until_idle(gateway: Gateway) -> None:
    """Check that nothing is in flight by the gateway's own count."""
    until(lambda: gateway.metric("kvroute_requests_in_flight") == 0)
    assert gateway.metric("kvroute_instance_requests") == 0
    assert gateway.metric("kvroute_transfers_in_flight") == 0
    assert gateway.process.poll() is None
