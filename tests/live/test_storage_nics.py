"""Live: emulated engines read cached KV from Redis through storage NICs of limited bandwidth (network namespaces)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import uvloop
from bench.gateway.program import served
from bench.gateway.storage import READS, first_prompt
from bench.storage_nics.emulated import BLOCK_TOKENS, NAMES, Engines, block_bytes, engines, gateway
from bench.storage_nics.network import STORE_PORT
from bench.wan.network import Unavailable
from tests.live.services import missing, required
from tests.waiting import until

from kvroute_engine.block_keys import block_keys

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
CONTEXT_TOKENS, APPENDED_TOKENS, OUTPUT_TOKENS = 6400, 160, 16
AGENTS = 12
BALANCE_MAX = 1.2
"""Maximum bytes of a storage NIC divided by their mean, for a read path that uses all of them."""


@dataclass
class Client:
    """A client of the gateway, and of the engines directly."""

    running: Engines
    session: aiohttp.ClientSession
    url: str
    admin: str
    log: Path
    """Event log of the gateway."""

    async def ask(self, prompt: list[int], url: str = "") -> tuple[str, int]:
        """Return the answer and the number of cached tokens."""
        body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        async with self.session.post(f"{url or self.url}/v1/completions", json=body) as response:
            document = await response.json()
            assert response.status == 200, document
        return document["choices"][0]["text"], document["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def plain(self, prompt: list[int]) -> str:
        """Return the answer of one engine that computes everything itself."""
        await self.forget("decode0")
        text, cached = await self.ask(prompt, self.running.endpoints["decode0"]["url"])
        assert cached == 0
        return text

    def events(self, kind: str, instance: str = "") -> list[dict[str, Any]]:
        """Return the events of one kind in the gateway's log."""
        lines = self.log.read_text(encoding="utf-8").split("\n")[1:-1]
        events = [json.loads(line)["event"] for line in lines]
        return [event for event in events if event["type"] == kind and instance in ("", event.get("instance"))]

    async def forget(self, *names: str) -> None:
        """Drop the KV in the memory of engines, so that it must be read from the store, and wait until the gateway
        knows."""
        for name in names or NAMES:
            async with self.session.post(f"{self.running.endpoints[name]['url']}/reset_prefix_cache") as response:
                assert response.status == 200
            await until(lambda name=name: not self.holds(name), poll_s=0.1)  # type: ignore[misc]

    def holds(self, instance: str) -> bool:
        """Return whether an instance has KV in memory as far as the gateway knows."""
        found = [
            event
            for kind in ("kv_stored", "kv_cleared")
            for event in self.events(kind, instance)
            if event.get("tier", "gpu") == "gpu"
        ]
        return bool(found) and max(found, key=lambda event: event["at"])["type"] == "kv_stored"

    async def stored(self, *turns: list[int]) -> None:
        """Wait until the gateway knows that all full blocks of the last prompts, continued to these turns, are in the
        store."""
        chains = [event["request"]["blocks"] for event in self.events("arrived")][-len(turns) :]
        full = min(len(turn) for turn in turns) // BLOCK_TOKENS

        def known() -> bool:
            found = [event["blocks"] for event in self.events("kv_stored") if event.get("tier") == "store"]
            return all(
                any(len(stored) >= full and stored[: len(chain)] == chain for stored in found) for chain in chains
            )

        await until(known, poll_s=0.1)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        async with self.session.get(f"{self.admin}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        samples = [line for line in lines if line.startswith(f"{name}{{") and all(label in line for label in wanted)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def store_of(running: Engines) -> Any:
    """Return a client of the store. Use it inside its namespace."""
    import redis

    return redis.Redis(port=STORE_PORT)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The engines of this module."""
    required("redis-server", "redis-server")
    if find_spec("redis") is None:
        missing("redis-py is not installed: uv pip install -r requirements/live.txt")
    try:
        with engines(tmp_path_factory.mktemp("nics")) as found:
            yield found
    except Unavailable as error:
        missing(str(error))


@contextmanager
def served_by(running: Engines, reads: str) -> Iterator[Any]:
    """Run a gateway with one read path; yield a function that runs a test with a client of it."""
    with gateway(running, reads, logged=True) as (program, ready):

        def run(test: Any) -> None:
            async def main() -> None:
                addresses = await served(ready, program)
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                    await test(Client(running, session, addresses["url"], addresses["admin"], running.log(reads)))

            uvloop.run(main())

        yield run


def contexts(seed: int) -> list[list[int]]:
    """Return the first prompts of agents."""
    return [first_prompt(seed + agent)[:CONTEXT_TOKENS] for agent in range(AGENTS)]


@pytest.mark.parametrize("reads", READS)
def test_the_bytes_cross_the_nics_of_the_read_path(running: Engines, reads: str) -> None:
    """One NIC, or all three alike; every answer is that of a plain engine."""

    async def turns(client: Client) -> None:
        prompts = contexts(seed=100 * READS.index(reads))
        await asyncio.gather(*(client.ask(prompt) for prompt in prompts))
        await client.stored(*prompts)
        await client.forget()
        before = running.network.received_bytes()
        longer = [[*prompt, *range(APPENDED_TOKENS)] for prompt in prompts]
        answers = await asyncio.gather(*(client.ask(prompt) for prompt in longer))
        read = [now - then for now, then in zip(running.network.received_bytes(), before, strict=True)]
        assert [cached for _, cached in answers] == [CONTEXT_TOKENS] * AGENTS
        for prompt, (text, _) in zip(longer, answers, strict=True):
            assert text == await client.plain(prompt)
        payload = AGENTS * CONTEXT_TOKENS // BLOCK_TOKENS * block_bytes()
        assert payload < sum(read) < 1.5 * payload  # headers of blocks and of packets, and the write-back's replies
        if reads == "prefill":
            assert read[0] > 0.95 * sum(read)
        elif reads != "alternating":
            assert max(read) * len(read) <= BALANCE_MAX * sum(read)

    with served_by(running, reads) as run:
        run(turns)


def test_the_next_turn_reads_what_the_decode_engine_wrote_back(running: Engines) -> None:
    async def turns(client: Client) -> None:
        prompt = first_prompt(9001)[: CONTEXT_TOKENS - OUTPUT_TOKENS // 2]
        text, _ = await client.ask(prompt)
        turn = [*prompt, *np.frombuffer(text.encode(), "<u4").tolist()]
        assert len(turn) // BLOCK_TOKENS > len(prompt) // BLOCK_TOKENS
        await client.stored(turn)
        await client.forget()
        assert (await client.ask([*turn, *range(9)]))[1] == len(turn) // BLOCK_TOKENS * BLOCK_TOKENS

    with served_by(running, "split") as run:
        run(turns)


def test_a_damaged_block_is_computed(running: Engines) -> None:
    """The read ends before it. What comes after it is computed, too."""

    async def turns(client: Client) -> None:
        prompt = first_prompt(9002)[:CONTEXT_TOKENS]
        await client.ask(prompt)
        await client.stored(prompt)
        await client.forget()
        key = block_keys(prompt, BLOCK_TOKENS)[10].hex()
        with running.network.store():
            store = store_of(running)
            (name,) = [stored for stored in store.scan_iter(count=10_000) if stored.decode().endswith(key)]
            store.setrange(name, 5000, b"damaged")
        longer = [*prompt, *range(APPENDED_TOKENS)]
        text, cached = await client.ask(longer)
        assert (text, cached) == (await client.plain(longer), 10 * BLOCK_TOKENS)
        assert await client.metric("kvroute_storage_reads_total", side="prefill", outcome="short") == 1

    with served_by(running, "prefill") as run:
        run(turns)


def test_a_node_that_dies_while_it_reads_costs_only_time(running: Engines) -> None:
    """The engine that was to decode is killed with its node's buffer; the request is computed and decoded elsewhere."""

    async def turns(client: Client) -> None:
        prompts = [first_prompt(seed)[:CONTEXT_TOKENS] for seed in (9003, 9004)]
        for prompt in prompts:
            await client.ask(prompt)
            await client.stored(prompt)
        expected = await client.plain(prompts[1])
        await client.forget()
        await client.ask(prompts[0])  # the prefill node reads
        before = running.network.received_bytes()
        asked = asyncio.ensure_future(client.ask(prompts[1]))
        numbers = (1, 2)
        half = CONTEXT_TOKENS // BLOCK_TOKENS * block_bytes() / 2
        await until(
            lambda: any(running.network.received_bytes()[number] > before[number] + half / 4 for number in numbers)
        )
        (reader,) = [
            number for number in numbers if running.network.received_bytes()[number] > before[number] + half / 4
        ]
        running.end(NAMES[reader])
        text, cached = await asked
        assert cached == 0
        running.start(NAMES[reader])
        assert text == expected
        assert await client.metric("kvroute_storage_reads_total", side="decode", outcome="failed") == 1

    with served_by(running, "alternating") as run:
        run(turns)
