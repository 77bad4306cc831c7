"""Agents whose cached KV crosses storage NICs of limited bandwidth: one prefill and two decode servers of real vLLM,
each with a buffer server on a node of its own, and Redis as the store."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.storage_nics.network import STORE_PORT, StorageNics
from tests.live.services import required
from tests.live.vllm.conftest import Server
from tests.live.vllm.gateway_rig import Gateway, all_up, prompt, serving, until
from tests.live.vllm.test_vllm_storage import NAMES, READS, Buffer, Cluster, ask, start_buffer, with_store

BITS_PER_S = 20e6
"""Rate of a storage NIC. Storage must be the limit, although all servers share a few cores."""
CONTEXT_TOKENS, APPENDED_TOKENS, ANSWER_TOKENS = 1920, 40, 8
"""Tokens that every agent reads from the store, those that its turn appends, and those that it gets."""


@dataclass
class Stored:
    """The servers, and the network of their storage NICs."""

    cluster: Cluster
    network: StorageNics

    def file(self, reads: str) -> str:
        """Return the cluster file with one read path.

        A prompt takes long to compute there, so that reading is always cheaper: these storage NICs are as slow as the
        tests need them, and a CPU with a tiny model is faster.
        """
        document = json.loads(self.cluster.file(reads))
        for node in document["nodes"]:
            node["nics"]["storage"] = {"capacity": f"{round(BITS_PER_S / 1e6)} Mbps"}
        document["timing"]["default"]["prefill"]["per_token"] = "1 s"
        return json.dumps(document)


@contextmanager
def stored_behind_nics(model: Path, folder: Path, alone: Server) -> Iterator[Stored]:
    """Run the store, the buffer servers and the servers.

    Raises:
        Unavailable: the machine cannot provide such a network.
    """
    redis = required("redis-server", "redis-server")
    with StorageNics(len(NAMES), BITS_PER_S) as network:
        with network.store():
            command = [redis, "--port", str(STORE_PORT), "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
            store = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=folder)

        def begin(name: str) -> Buffer:
            number = NAMES.index(name)
            address = network.address(number)
            url = f"redis://{network.store_address(number)}:{STORE_PORT}/0"
            with network.node(number):
                return start_buffer(url, folder, name, "--host", "0.0.0.0", "--advertised-host", address)

        try:
            with with_store(model, folder, alone, begin, folder) as cluster:
                yield Stored(cluster, network)
        finally:
            store.kill()
            store.wait()


def contexts(agents: int, seed: int) -> list[list[int]]:
    """Return the context of each agent."""
    return [prompt(CONTEXT_TOKENS, seed=seed + agent) for agent in range(agents)]


def fill(stored: Stored, gateway: Gateway, prompts: list[list[int]]) -> None:
    """Compute the contexts, wait until they are in the store, and drop them from the servers' own caches."""
    for tokens in prompts:
        ask(gateway, tokens, ANSWER_TOKENS)
    blocks = CONTEXT_TOKENS // 32
    chains = [event["request"]["blocks"] for event in gateway.events("arrived")][-len(prompts) :]

    def complete() -> bool:
        events = [event["blocks"] for event in gateway.events("kv_stored") if event.get("tier") == "store"]
        known = {tuple(chain[:blocks]) for chain in events if len(chain) >= blocks}
        return all(tuple(chain[:blocks]) in known for chain in chains)

    until(complete)
    stored.cluster.forget()
    until(lambda: gateway.events("kv_cleared") != [])


@dataclass(frozen=True)
class Outcome:
    """One turn of every agent, all at once, with one read path."""

    reads: str
    seconds: float
    read_bytes: list[int]
    """Bytes that each storage NIC has received."""
    failed: float
    """Reads that failed; their blocks were computed instead."""
    turns: list[list[int]]
    answers: list[list[int]]

    @property
    def balance(self) -> float:
        """Maximum bytes of a storage NIC divided by their mean."""
        return max(self.read_bytes) * len(self.read_bytes) / sum(self.read_bytes)


def measured(stored: Stored, folder: Path, reads: str, agents: int, seed: int) -> Outcome:
    """Run one turn of every agent with a read path."""
    folder.mkdir(exist_ok=True)
    with serving(stored.cluster.pair, folder, text=stored.file(reads)) as gateway:
        all_up(gateway, stored.cluster.pair)
        prompts = contexts(agents, seed)
        fill(stored, gateway, prompts)
        turns = [[*tokens, *prompt(APPENDED_TOKENS, seed=at)] for at, tokens in enumerate(prompts)]
        before, began = stored.network.received_bytes(), time.monotonic()
        with ThreadPoolExecutor(agents) as threads:
            answers = list(threads.map(lambda tokens: ask(gateway, tokens, ANSWER_TOKENS), turns))
        seconds = time.monotonic() - began
        after = stored.network.received_bytes()
        failed = gateway.metric(READS, outcome="failed")
    read = [now - then for now, then in zip(after, before, strict=True)]
    return Outcome(reads, seconds, read, failed, turns, answers)
