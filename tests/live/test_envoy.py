"""A real Envoy asks the picker: what the Gateway API inference extension demands of both, failures, and streams."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from tests.epp.envoy_rig import PickerRig, address, alone, picking
from tests.epp.sidecar import sidecar
from tests.live.envoy import (
    SUBSET_HEADER,
    EnvoyRig,
    check_configuration,
    emulated_rig,
    envoy,
    envoy_rig,
    released,
    with_subset_header,
    without_instance,
)
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    deployment,
    engines_of,
    event,
    listening,
    run,
    start_stream,
    tokens,
)
from tests.waiting import until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.epp.envoy_config import EnvoySpec
from kvroute.epp.server import PickerSpec
from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.lifecycle.deployment import Deployment

pytestmark = pytest.mark.live
BODY = {"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3}
BODIES = pytest.mark.parametrize("buffered", [False, True], ids=["streamed", "buffered"])


@pytest.mark.parametrize("fail_open", [False, True])
@BODIES
def test_envoy_accepts_the_configuration(tmp_path: Path, fail_open: bool, buffered: bool) -> None:
    """Without a deprecated field."""
    text = CLUSTER
    for port, name in enumerate(("prefill0", "prefill1", "decode0", "decode1"), start=1):
        text = text.replace(f"name: {name},", f"name: {name}, endpoint: {{url: 'http://10.0.0.1:{port}'}},")
    made = Deployment.of(text, "test.yaml")
    check_configuration(made, EnvoySpec("10.0.0.9:9002", fail_open=fail_open, buffered=buffered), tmp_path)


@BODIES
def test_whole_and_streamed_responses_and_long_bodies(tmp_path: Path, buffered: bool) -> None:
    """The engine gets the body unchanged, and the client the engine's response without headers of the picker."""

    async def main() -> None:
        engines = alone()
        async with envoy_rig(engines, tmp_path, buffered=buffered) as rig:
            whole = await rig.post(BODY)
            assert (whole.status, len(whole.text.split())) == (200, 3)
            assert not [name for name in whole.headers if name.startswith(("x-gateway", "x-kvroute"))]
            streamed = await rig.post(BODY | {"stream": True})
            assert len(streamed.events) == 3
            long = BODY | {"prompt": "word " * 60_000}
            assert (await rig.post(long)).status == 200
            assert any(request.json == long for engine in engines for request in engine.received)
            async with rig.session.get(f"{rig.url}/health") as response:
                assert response.status == 200
            assert await released(rig)

    run(main())


def test_a_hundred_requests_follow_the_choice(tmp_path: Path) -> None:
    """Ten at a time, as in the conformance test GatewayFollowingEPPRouting: each engine gets those of its subset."""

    async def main() -> None:
        engines = alone()
        async with envoy_rig(engines, tmp_path, change=with_subset_header) as rig:
            limit = asyncio.Semaphore(10)

            async def one(number: int) -> None:
                async with limit:
                    headers = {SUBSET_HEADER: address(engines[number % 3])}
                    response = await rig.post(BODY | {"user": str(number)}, headers=headers)
                    assert response.status == 200

            await asyncio.gather(*(one(number) for number in range(100)))
            for which, engine in enumerate(engines):
                assert {int(request.json["user"]) % 3 for request in engine.received} == {which}
            assert await released(rig)

    run(main())


def test_a_subset_without_an_endpoint_is_503_and_a_key_at_its_limit_429(tmp_path: Path) -> None:
    """Envoy sends the picker's immediate responses."""

    async def main() -> None:
        engines, gate = alone(), Gate()
        for engine in engines:
            engine.serve = gate.before(tokens)
        section = f"  keys: {{known: {{a: '{hash_text('one')}'}}, concurrency: {{a: 1}}}}\n"
        async with envoy_rig(engines, tmp_path, section, with_subset_header) as rig:
            key = {"authorization": "Bearer one"}
            for subset in ("192.0.2.1:80", "192.0.2.1"):
                refused = await rig.post(BODY, headers=key | {SUBSET_HEADER: subset})
                assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert (await rig.post(BODY)).status == 401
            first = asyncio.ensure_future(rig.post(BODY, headers=key))
            await gate.entered.wait()
            dropped = await rig.post(BODY, headers=key)
            assert dropped.status == 429
            assert dropped.json["error"]["type"] == "rate_limit_error"
            assert int(dropped.headers["retry-after"]) >= 1
            gate.open.set()
            assert (await first).status == 200
            assert await released(rig)

    run(main())


def test_a_dead_first_endpoint_is_skipped_and_its_breaker_opens(tmp_path: Path) -> None:
    """The second endpoint serves the request, and the picker learns which one did."""

    async def main() -> None:
        engines = alone()
        # No health check tells: a check every hour.
        section = "  breaker: {failures: 1}\n  health: {panic: 0, interval: 3600 s, slow_start: 0 s}\n"
        async with listening(engines[1:]):
            async with listening(engines[:1]):
                made = deployment(engines, section)
            async with picking(made) as picker, envoy(picker, made, tmp_path) as rig:
                up = picker.gateway.runtime.engines["engine0"].availability
                await until(lambda: not picker.gateway.ready())
                up.set_healthy(True, picker.gateway.now())
                for number in range(8):
                    assert (await rig.post(BODY | {"prompt": f"{number} word " * 20})).status == 200
                assert await released(rig)
                assert not up.up
                assert all(engine.availability.up for engine in list(picker.gateway.runtime.engines.values())[1:])
                assert (
                    'kvroute_leg_failures_total{leg="decode",engine="engine0",kind="refused"} 4'
                    in await picker.metrics()
                )

    run(main())


def test_an_endpoint_that_envoy_does_not_know_is_replaced_and_the_load_booked_there(tmp_path: Path) -> None:
    """Envoy sends the request to another endpoint in turn, with status 200."""

    async def main() -> None:
        engines, gate = alone(2), Gate()

        async def waits(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(event("one"))
            await gate.wait()
            await response.write_eof()
            return response

        for engine in engines:
            engine.serve = waits
        async with listening(engines):
            made = deployment(engines, "  retries: {attempts: 1}\n  breaker: {failures: 1}\n  health: {panic: 0}\n")
            async with picking(made) as picker, envoy(picker, without_instance(made, "engine0"), tmp_path) as rig:
                response = asyncio.ensure_future(rig.post(BODY | {"stream": True}))
                await gate.entered.wait()
                await until(lambda: set(picker.booked()) == {"engine1"})
                gate.open.set()
                assert (await response).status == 200
                assert [len(engine.received) for engine in engines] == [0, 1]
                assert await released(rig)
                assert all(client.availability.up for client in picker.gateway.runtime.engines.values())

    run(main())


@pytest.mark.parametrize("fail_open", [False, True], ids=["closed", "open"])
@BODIES
def test_without_a_picker_envoy_fails_as_configured(tmp_path: Path, fail_open: bool, buffered: bool) -> None:
    """Closed: 503. Open: any engine, and a warning."""

    async def main() -> None:
        engines = alone()
        async with listening(engines):
            made = deployment(engines)
            async with (
                picking(made) as picker,
                envoy(picker, made, tmp_path, fail_open=fail_open, buffered=buffered) as rig,
            ):
                assert (await rig.post(BODY)).status == 200
                assert "no picker responds" not in rig.errors.read_text()
                await picker.gateway.close()
                await rig.picker_gone()
                before = sum(len(engine.received) for engine in engines)
                response = await rig.post(BODY)
                assert response.status == (200 if fail_open else 503)
                assert sum(len(engine.received) for engine in engines) == before + fail_open
                if fail_open:
                    await until(lambda: "warning: no picker responds" in rig.errors.read_text())

    run(main())


@pytest.mark.parametrize("when", ["before the response", "in the stream"])
def test_a_client_that_leaves_frees_everything(tmp_path: Path, when: str) -> None:
    """In the engine and in the picker."""

    async def main() -> None:
        engines, gate = alone(1), Gate()

        async def half(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if when == "before the response":
                await gate.wait()
            response = await start_stream(request)
            await response.write(event("one"))
            await gate.wait()
            raise AssertionError("the client is gone")

        engines[0].serve = half
        async with envoy_rig(engines, tmp_path) as rig:
            async with aiohttp.ClientSession() as client:

                async def ask() -> None:
                    async with client.post(rig.url + COMPLETIONS, json=BODY | {"stream": True}) as response:
                        async for _ in response.content:
                            pass

                asking = asyncio.ensure_future(ask())
                await gate.entered.wait()
                await until(lambda: bool(rig.picker.booked()))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await gate.left.wait()
            assert gate.cancelled
            assert await released(rig)

            async def counted() -> bool:
                return "kvroute_client_disconnects_total 1" in await rig.picker.metrics()

            while not await counted():
                await asyncio.sleep(0.05)

    run(main())


def test_an_engine_that_breaks_off_its_stream_is_blamed_by_the_access_log(tmp_path: Path) -> None:
    """The stream to the picker ends in the same way as that of a whole response."""

    async def main() -> None:
        engines, gate = alone(1), Gate()

        async def breaks(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(event("one"))
            await gate.wait()
            assert request.transport is not None
            request.transport.abort()
            return response

        async def ask(rig: EnvoyRig) -> None:
            async with rig.session.post(rig.url + COMPLETIONS, json=BODY | {"stream": True}) as response:
                assert b"one" in await response.content.readline()
                gate.open.set()
                await response.read()

        engines[0].serve = breaks
        async with envoy_rig(engines, tmp_path, "  breaker: {failures: 1}\n  health: {panic: 0}\n") as rig:
            up = rig.picker.gateway.runtime.engines["engine0"].availability
            with pytest.raises(aiohttp.ClientPayloadError):
                await ask(rig)
            await until(lambda: not up.up)
            assert await released(rig)
            assert "kvroute_stream_errors_total 1" in await rig.picker.metrics()

    run(main())


def test_prefill_by_the_picker_and_decode_through_envoy(tmp_path: Path) -> None:
    """The text is that of an engine which does both, and the KV cache has moved."""

    async def direct(rig: PickerRig, fleet: EmulatedCluster, prompt: str) -> str:
        url = fleet.ready().instances["decode0"].url + COMPLETIONS
        async with rig.session.post(url, json={"model": MODEL, "prompt": prompt, "max_tokens": 8}) as response:
            return str((await response.json())["choices"][0]["text"])

    async def main() -> None:
        async with emulated_rig(tmp_path) as (rig, fleet):
            for number in range(6):
                prompt = f"question {number} " * 40
                ask: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "stream": number % 2 == 0}
                response = await rig.post(ask)
                assert response.status == 200
                assert response.text == await direct(rig.picker, fleet, prompt)
            assert await released(rig)
            page = await rig.picker.metrics()
            assert 'kvroute_decisions_total{kind="prefill"' in page
            moved = [line for line in page.split("\n") if line.startswith("kvroute_transfer_bytes_total{")]
            assert sum(float(line.rpartition(" ")[2]) for line in moved) > 0
            assert 'kvroute_transfers_in_flight{tier="node"} 0' in page

    run(main())


def test_sidecars_of_decode_instances_order_the_prefill(tmp_path: Path) -> None:
    """Envoy passes the header with the prefill instance on to the sidecar that the picker has chosen."""

    async def main() -> None:
        async with (
            EmulatedCluster(topology.parse(CLUSTER), EmulatedClusterSpec()) as fleet,
            AsyncExitStack() as stack,
        ):
            endpoints, sidecars = dict(fleet.ready().instances), []
            for name in ("decode0", "decode1"):
                sidecars.append(await stack.enter_async_context(sidecar(endpoints[name].url)))
                endpoints[name] = replace(endpoints[name], url=f"http://127.0.0.1:{sidecars[-1].port}")
            made = Deployment.of(CLUSTER, "test.yaml", endpoints=endpoints)
            picker = await stack.enter_async_context(picking(made, PickerSpec(sidecar=True)))
            rig = await stack.enter_async_context(envoy(picker, made, tmp_path))
            for number in range(4):
                ask: dict[str, Any] = {"model": MODEL, "prompt": f"question {number} " * 40, "max_tokens": 8}
                response = await rig.post(ask | {"stream": number % 2 == 0})
                assert (response.status, len(response.text.split())) == (200, 8)
            named = [prefiller for other in sidecars for prefiller in other.prefillers]
            known = {endpoints[name].url.removeprefix("http://") for name in ("prefill0", "prefill1")}
            assert (len(named), set(named) <= known) == (4, True)
            assert await released(rig)

    run(main())


def test_a_client_that_leaves_during_the_prefill_stops_it(tmp_path: Path) -> None:
    """Envoy cancels its stream to the picker, which closes its call to the prefill engine."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        gate = Gate()
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with envoy_rig(prefill + decode, tmp_path) as rig:
            async with aiohttp.ClientSession() as client:
                asking = asyncio.ensure_future(client.post(rig.url + COMPLETIONS, json=BODY))
                await gate.entered.wait()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await gate.left.wait()
            assert gate.cancelled
            assert await released(rig)
            assert not any(engine.received for engine in decode)

    run(main())
