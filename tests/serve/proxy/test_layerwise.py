"""KV that is fetched while it is computed, through the whole gateway: both legs run at once, and the outcome for a
request whose prefill, decode or link fails in the middle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.serve.rig import Rig, RunningGateway, rig
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    completion,
    engines_of,
    failing,
    run,
    start_stream,
    stub_rig,
    tokens,
)
from tests.serve.two_sites import AWAY, HOME, LONG, OFFLOAD, SHORT, TEXT, metric, two_sites
from tests.waiting import until

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import Decode, Prefill, TransferMeasured

EARLY = OFFLOAD + "    layerwise: true\n"
EVERYWHERE = "  layerwise: true\n"
DECODERS = ("decode0", "decode1", "decode2")
VERY_LONG = LONG * 20
"""110 ms of prefill at the remote site."""


async def engine_metric(gate: Rig, name: str, sample: str) -> float:
    """Return one sample of an engine's own metrics page."""
    async with gate.session.get(gate.fleet.ready().instances[name].url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))


async def pulled(gate: Rig, kind: str) -> float:
    """Return the number of transfers into all decode engines: `kv_early` or `kv_transfers`."""
    return sum([await engine_metric(gate, name, f"kvroute:{kind}_total") for name in DECODERS])


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_transfers_between_datacenters_are_early(tmp_path: Path, stream: bool) -> None:
    """Transfers within a datacenter are not early. The response is that of a single engine, and the log replays to the
    same decisions."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with two_sites(EARLY + f"  log: {{events: {log}}}\n") as gate:
            long, short = await gate.ask(LONG, stream=stream), await gate.ask(SHORT, stream=stream)
            assert (long.status, short.status) == (200, 200)
            assert (await pulled(gate, "kv_early"), await pulled(gate, "kv_transfers")) == (1, 1)
            assert long.text == await gate.direct("decode0", LONG)
            assert await metric(gate, "kvroute_transfers_in_flight", tier="cross_datacenter") == 0
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())
    header, read = read_log(log)
    records = list(read)
    assert all(
        decisions_equal(record.decisions, again)
        for record, again in replay(header.spec.build(parse(TEXT)), iter(records))
    )
    kinds = [[type(decision) for decision in record.decisions] for record in records if record.decisions]
    assert kinds == [[Prefill, Decode], [Prefill], [Decode]]
    early = next(record for record in records if record.decisions).decisions[0]
    assert isinstance(early, Prefill)
    measured = [record.event.source for record in records if isinstance(record.event, TransferMeasured)]
    assert early.instance not in measured


def test_transfers_within_a_datacenter_can_be_early(tmp_path: Path) -> None:
    """The cluster file enables early transfers within a datacenter too. Their time is that of the prefill, so they are
    no measurement of the network."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with rig(EVERYWHERE + f"  log: {{events: {log}}}\n") as gate:
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=n % 2 == 0) for n in range(6)])
            assert [response.status for response in responses] == [200] * 6
            early = [await engine_metric(gate, name, "kvroute:kv_early_total") for name in ("decode0", "decode1")]
            assert sum(early) == 6
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())
    _, records = read_log(log)
    assert not [record for record in records if isinstance(record.event, TransferMeasured)]


def test_the_decode_leg_does_not_wait_for_the_prefill_response() -> None:
    """The decode leg is complete before the prefill engine has answered. Both legs carry the same transfer ID, and each
    attempt has a new one."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with early(prefill + decode) as front:
            response = await front.post(completion(stream=True))
            assert (response.status, len(response.text.split())) == (200, 3)
            await gate.entered.wait()
            first, second = transfer_ids(prefill), transfer_ids(decode)
            assert first == second != []
            gate.open.set()
            assert await front.becomes_idle(), front.held_resources()
            assert (await front.post(completion(stream=True))).status == 200
            assert len(set(transfer_ids(prefill))) == 2

    run(main())


def transfer_ids(engines: list[Engine]) -> list[str]:
    """Return the transfer IDs of the requests."""
    return [
        received.json["kv_transfer_params"].get("transfer_id", "") for engine in engines for received in engine.received
    ]


def early(engines: list[Engine]) -> Any:
    """Run a gateway that starts the legs of these engines at the same time; the stub engines transfer no KV."""
    return stub_rig(engines, EVERYWHERE)


def test_an_unreachable_decode_engine_does_not_repeat_the_prefill() -> None:
    """Another decode engine gets the same transfer ID: the prompt is computed once."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = gate.before(tokens)

        async def full_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if len(transfer_ids(decode)) == 1:
                await gate.entered.wait()
                return web.json_response({"error": {"message": "busy"}}, status=503)
            return await tokens(engine, request, received)

        for engine in decode:
            engine.serve = full_once
        async with early(prefill + decode) as front:
            response = await front.post(completion(stream=True))
            assert (response.status, len(response.text.split())) == (200, 3)
            assert not gate.cancelled
            assert transfer_ids(prefill) * 2 == transfer_ids(decode)
            gate.open.set()
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_after_a_failed_prefill_both_legs_are_retried(streams: bool) -> None:
    """Both legs restart under another transfer ID; the first decode leg is cancelled."""

    async def main() -> None:
        waits = Gate()
        prefill, decode = engines_of("vllm")

        async def fails_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if len(transfer_ids(prefill)) > 1:
                return await tokens(engine, request, received)
            await waits.entered.wait()
            return web.json_response({"error": {"message": "out of memory"}}, status=500)

        async def hangs_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if len(transfer_ids(decode)) == 1:
                if streams:
                    await start_stream(request)
                await waits.wait()
            return await tokens(engine, request, received)

        for engine in prefill:
            engine.serve = fails_once
        for engine in decode:
            engine.serve = hangs_once
        async with early(prefill + decode) as front:
            response = await front.post(completion(stream=streams))
            assert (response.status, len(response.text.split())) == (200, 3)
            await waits.left.wait()
            assert waits.cancelled
            assert sorted(transfer_ids(prefill)) == sorted(transfer_ids(decode))
            assert len(set(transfer_ids(prefill))) == 2
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_without_another_prefill_instance_the_decode_engine_computes_the_prompt(streams: bool) -> None:
    """vLLM computes a prompt whose KV does not arrive: the decode leg continues, and its response goes to the
    client."""

    async def main() -> None:
        failed = asyncio.Event()
        (prefill, _), (decode, _) = engines_of("vllm")

        async def fails(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            failed.set()
            return await failing(500)(engine, request, received)

        async def recomputes(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            await failed.wait()
            return await tokens(engine, request, received)

        prefill.serve, decode.serve = fails, recomputes
        async with early([prefill, decode]) as front:
            response = await front.post(completion(stream=streams))
            assert (response.status, len(response.text.split())) == (200, 3)
            assert (len(prefill.received), len(decode.received)) == (1, 1)
            assert await transferred_bytes(front) == 0
            assert await front.becomes_idle(), front.held_resources()

    run(main())


async def transferred_bytes(front: RunningGateway) -> float:
    """Return the bytes of KV that the gateway counts as transferred."""
    page = (await front.get("/metrics")).body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in page if line.startswith("kvroute_transfer_bytes_total"))


@pytest.mark.parametrize("fault", ["reset", 500, 503])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_leg_that_fails_once_only_delays_the_request(leg: str, fault: Any) -> None:
    """At either site and for any status, every request is answered and nothing is held."""

    async def main() -> None:
        async with two_sites(EARLY) as gate:
            instances = ("far0", "far1") if leg == "prefill" else DECODERS[:2]
            for name in instances:
                await gate.command(name, leg=leg, fail_next=1, status=fault)
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=n % 2 == 0) for n in range(6)])
            assert [response.status for response in responses] == [200] * 6
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


def test_a_prefill_engine_that_dies_during_the_transfer_is_replaced() -> None:
    """The transfer stops in the middle; another engine computes the prompt, and the WAN path is not blamed."""

    async def main() -> None:
        async with two_sites(EARLY) as gate:
            for name in ("far0", "far1"):
                await gate.command(name, "slow", factor=100)  # they die before they have computed a prompt
            requests = [asyncio.create_task(gate.ask(f"{n} {VERY_LONG}", stream=True)) for n in range(2)]
            engines = [gate.fleet.servers[name] for name in ("far0", "far1")]
            await until(lambda: any(engine.engine.counters.sent or engine.kv_server.awaited for engine in engines))
            await until(lambda: any(engine.engine.running for engine in engines))
            for name in ("far0", "far1"):
                await gate.stop_engine(name)
            responses = await asyncio.gather(*requests)
            assert [response.status for response in responses] == [200] * 2
            assert all(response.text for response in responses)
            assert await metric(gate, "kvroute_wan_path_state", site=AWAY) == 0
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_a_wan_path_that_is_cut_during_an_early_transfer_is_blamed(stream: bool) -> None:
    """The requests on that path are prefilled at home."""

    async def main() -> None:
        async with two_sites(EARLY) as gate:
            await gate.command("far0", "wan", share=0)
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=stream) for n in range(4)])
            assert [response.status for response in responses] == [200] * 4
            assert await metric(gate, "kvroute_offload_decisions_total", site=HOME, reason="away_down") == 4
            engines = gate.gateway.runtime.engines
            assert all(engines[name].availability.breaker.state(1e6) == "closed" for name in engines)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


@pytest.mark.slow
def test_a_client_that_disconnects_ends_both_legs() -> None:
    async def main() -> None:
        async with two_sites(EARLY) as gate:
            engines = [gate.fleet.servers[name].engine for name in ("far0", "far1")]
            gate.slow(5000)  # no leg ends by itself in time
            requests = [asyncio.create_task(gate.ask(f"{n} {VERY_LONG}", stream=True)) for n in range(4)]
            await until(lambda: all(engine.running for engine in engines))
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            assert await gate.becomes_idle(), gate.held_resources()
            await until(lambda: not any(gate.fleet.servers[name].engine.waiting for name in DECODERS))
            assert not any(engine.held for engine in engines)

    uvloop.run(main())


FAULTS = st.fixed_dictionaries(
    {
        "leg": st.sampled_from(["prefill", "decode", "transfer"]),
        "fail_next": st.integers(1, 2),
        "status": st.sampled_from([500, 503, "reset"]),
    }
)


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.sampled_from(["far0", "far1", "prefill0", *DECODERS]), FAULTS, max_size=4), st.booleans())
def test_after_any_failures_every_request_ends_once_and_nothing_is_held(faults: dict[str, Any], stream: bool) -> None:
    """Each request gets a complete response or an error; afterwards the core and the engines hold nothing."""

    async def main() -> None:
        async with two_sites(EARLY + EVERYWHERE) as gate:
            for name, fault in faults.items():
                await gate.command(name, **fault)
            prompts = [f"{n} {LONG if n % 2 else SHORT}" for n in range(6)]
            responses = await asyncio.gather(*[gate.ask(prompt, stream=stream) for prompt in prompts])
            for prompt, response in zip(prompts, responses, strict=True):
                assert response.status in (200, 502, 503, 504)
                if response.status == 200:
                    assert response.text == await gate.direct("decode0", prompt)
            assert await gate.becomes_idle(), gate.held_resources()
            await until(lambda: not any(server.engine.waiting for server in gate.fleet.servers.values()))

    uvloop.run(main())
