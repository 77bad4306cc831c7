"""Many streams at once through Envoy and the picker, and clients that leave: emulated engines prefill and decode."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

import aiohttp
import pytest
from tests.live.envoy import EnvoyRig, emulated_rig, released, with_patient_health_check
from tests.serve.rig import COMPLETIONS, MODEL, GatewayResponse
from tests.serve.stub_engines import run
from tests.waiting import until

from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.emulator.generation.words import generated_tokens
from kvroute.emulator.prompt import EmulatedPrompt, value_tokens
from kvroute.serve.api.api_keys import hash_text
from kvroute.types import TIER_COUNT

pytestmark = pytest.mark.live
STREAMS, TOKENS = 1_000, 12
ROLES = ("prefill", "decode")
HELD = 1e6
"""Factor by which an engine is slower while a test holds its requests."""


def slow(fleet: EmulatedCluster, roles: tuple[str, ...], factor: float) -> None:
    """Make the engines of these roles slower; 1 is normal speed."""
    for name, server in fleet.servers.items():
        if name.startswith(roles):
            server.engine.slow(factor)


def at_engines(fleet: EmulatedCluster, roles: tuple[str, ...]) -> int:
    """Return the number of requests that wait or run in the engines of these roles."""
    engines = [server.engine for name, server in fleet.servers.items() if name.startswith(roles)]
    return sum(engine.running + engine.waiting for engine in engines)


def expected(prompt: str, count: int) -> str:
    """Return what an emulated engine generates, as the prompt alone determines it."""
    seed = EmulatedPrompt.of(value_tokens(prompt), 16).seed
    return b"".join(islice(generated_tokens(seed, 0), count)).decode()


async def metrics(rig: EnvoyRig, name: str) -> dict[str, float]:
    """Return the samples of a metric of the picker, by their labels."""
    lines = [line for line in (await rig.picker.metrics()).split("\n") if line.startswith((f"{name}{{", f"{name} "))]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


async def check_nothing_counted(rig: EnvoyRig, fleet: EmulatedCluster) -> None:
    """Check that all counts of requests, in the picker and in the engines, become zero."""
    assert await released(rig), rig.picker.held_resources()
    await until(lambda: not any(rig.picker.counted_loads(fleet)))
    assert not any((await metrics(rig, "kvroute_transfers_in_flight")).values())


def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    """All are in the decode engines at the same time. Each client gets its own whole stream, from one prefill and one
    decode, and nothing is counted afterwards."""
    prompts = [f"stream {number} of {STREAMS}: " + "what is a KV cache? " * 4 for number in range(STREAMS)]
    # A busy machine may be slow to connect, to answer a health check and to move KV, which is no failure here.
    section = "  timeouts: {connect: 300 s}\n  health: {timeout: 300 s}\n"
    settings = EmulatedClusterSpec(kv_patience_s=3600.0)

    async def one(client: aiohttp.ClientSession, rig: EnvoyRig, prompt: str) -> GatewayResponse:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        async with client.post(rig.url + COMPLETIONS, json=body) as response:
            return GatewayResponse(response.status, {}, await response.read())

    async def main() -> None:
        async with (
            emulated_rig(tmp_path, section, settings, change=with_patient_health_check) as (rig, fleet),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
        ):
            slow(fleet, ("decode",), HELD)
            asked = [asyncio.ensure_future(one(client, rig, prompt)) for prompt in prompts]
            await until(lambda: at_engines(fleet, ("decode",)) == STREAMS or any(task.done() for task in asked))
            assert rig.picker.gateway.runtime.control.in_flight == STREAMS
            slow(fleet, ("decode",), 1)
            responses = await asyncio.gather(*asked)
            for prompt, response in zip(prompts, responses, strict=True):
                assert response.status == 200
                assert response.text == expected(prompt, TOKENS)
                assert len(response.events) == TOKENS
                assert response.body.count(b'"finish_reason":"length"') == response.body.count(b"[DONE]") == 1
                assert response.body.endswith(b"data: [DONE]\n\n")
            await check_nothing_counted(rig, fleet)
            await check_each_leg_ran_once(rig, fleet)

    run(main())


async def check_each_leg_ran_once(rig: EnvoyRig, fleet: EmulatedCluster) -> None:
    """Check that each request had one prefill and one decode, by the engines' counters and by the picker's."""
    counters = [server.engine.counters for server in fleet.servers.values()]
    assert sum(counter.finished for counter in counters) == STREAMS
    assert sum(pulled.transfers for counter in counters for pulled in counter.pulled.values()) == STREAMS
    decisions = await metrics(rig, "kvroute_decisions_total")
    for kind in ("prefill", "decode"):
        assert sum(count for labels, count in decisions.items() if f'kind="{kind}"' in labels) == STREAMS
    assert await metrics(rig, "kvroute_requests_total") == {'{endpoint="completions",code="200"}': STREAMS}
    for name in ("leg_failures", "retries", "client_disconnects", "stream_errors"):
        assert not any((await metrics(rig, f"kvroute_{name}_total")).values())


KEYS = {name: {"authorization": f"Bearer {name}"} for name in ("one", "two")}
STAGES: dict[str, tuple[tuple[str, ...], float]] = {
    # The prefill ends after two seconds; a machine that is so late that it has ended sees the next stage.
    "in the prefill": (ROLES, 0.0),
    "in the transfer": (("decode",), 0.999),
    "in the stream": (("decode",), 0.0),
}
"""Roles of the engines at which a request is in each stage, and the share of the network that other traffic uses."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_frees_bookings_transfers_and_limits(tmp_path: Path, stage: str) -> None:
    """There is room for one request: in the picker, of this key, and in the memory for long bodies. The second client
    is accepted after the first one has left, and a third request gets its whole response."""
    known = ", ".join(f"{name}: '{hash_text(name)}'" for name in KEYS)
    section = f"  keys: {{known: {{{known}}}, concurrency: {{one: 1}}}}\n"
    section += "  limits: {in_flight: 1, queue: 0, bodies: 1 MB}\n"
    roles, background = STAGES[stage]
    settings = EmulatedClusterSpec(background=(background,) * TIER_COUNT)
    short = {"model": MODEL, "prompt": "short", "max_tokens": TOKENS}

    async def leave(rig: EnvoyRig, fleet: EmulatedCluster, number: int) -> None:
        """Send a request whose body takes more than half of the memory, and leave in the stage."""
        body = {
            "model": MODEL,
            "prompt": f"{number} " * 82_000,
            "max_tokens": 2_000,
            "ignore_eos": True,
            "stream": True,
        }
        reached = asyncio.Event()

        async def ask(client: aiohttp.ClientSession) -> None:
            async with client.post(rig.url + COMPLETIONS, json=body, headers=KEYS["one"]) as response:
                assert response.status == 200, await response.text()
                assert (await response.content.readline()).startswith(b"data: {")
                reached.set()
                await response.read()

        async with aiohttp.ClientSession() as client:
            asking = asyncio.ensure_future(ask(client))
            there = reached.is_set if stage == "in the stream" else lambda: at_engines(fleet, roles) == 1
            await until(lambda: asking.done() or there())
            assert not asking.done(), asking
            assert rig.picker.booked()
            for key, reason in (("one", "this key"), ("two", "the gateway is full")):
                refused = await rig.post(short, headers=KEYS[key])
                assert refused.status == 429
                assert reason in refused.body.decode()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await check_nothing_counted(rig, fleet)

    async def main() -> None:
        async with emulated_rig(tmp_path, section, settings) as (rig, fleet):
            slow(fleet, ROLES, 50)
            for number in (1, 2):
                await leave(rig, fleet, number)
            slow(fleet, ROLES, 1)
            response = await rig.post(short, headers=KEYS["one"])
            assert (response.status, response.text) == (200, expected("short", TOKENS))
            await check_nothing_counted(rig, fleet)
            while await metrics(rig, "kvroute_client_disconnects_total") != {"": 2}:
                await asyncio.sleep(0.05)  # Envoy's access log comes later
            assert not any((await metrics(rig, "kvroute_leg_failures_total")).values())

    run(main())


def held(fleet: EmulatedCluster) -> list[bool]:
    """Return, for each KV cache that a prefill engine holds, whether it is being fetched."""
    return [kv.expiry is None for server in fleet.servers.values() for kv in server.engine.held.values()]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_in_the_middle_of_a_transfer_frees_everything(tmp_path: Path, stream: bool) -> None:
    """The picker's bookings, the transfer, and the memory of the decode engine are free at once. The prefill engine
    keeps the KV until it expires, as Envoy has closed the request that would have fetched it."""
    settings = EmulatedClusterSpec(background=(0.9999,) * TIER_COUNT)
    long = {"model": MODEL, "prompt": "word " * 20_000, "max_tokens": TOKENS, "stream": stream}
    short = {"model": MODEL, "prompt": "short", "max_tokens": TOKENS}

    async def main() -> None:
        async with emulated_rig(tmp_path, settings=settings) as (rig, fleet):
            engines = [server.engine for server in fleet.servers.values()]
            async with aiohttp.ClientSession() as client:

                async def ask() -> None:
                    async with client.post(rig.url + COMPLETIONS, json=long) as response:
                        await response.read()

                asking = asyncio.ensure_future(ask())
                await until(lambda: asking.done() or held(fleet) == [True])
                assert not asking.done(), asking
                assert len(rig.picker.booked()) == 1
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: held(fleet) == [False])
            await check_nothing_counted(rig, fleet)
            assert not any(engine.counters.pulled for engine in engines)
            for engine in engines:
                engine.kv_expiry_s = 0.05
                for key in engine.held:
                    engine.keep(key)
            await until(lambda: not held(fleet))
            assert sum(engine.counters.kv_expired for engine in engines) == 1
            response = await rig.post(short)
            assert (response.status, response.text) == (200, expected("short", TOKENS))
            await check_nothing_counted(rig, fleet)
            while await metrics(rig, "kvroute_client_disconnects_total") != {"": 1}:
                await asyncio.sleep(0.05)  # Envoy's access log comes later
            assert not any((await metrics(rig, "kvroute_leg_failures_total")).values())

    run(main())
