"""A real Envoy asks a picker whose engines are discovered: Envoy's configuration lists none of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.epp.envoy_rig import PickerRig, address, alone, picking
from tests.live.envoy import PICKER, EnvoyRig, check_configuration, envoy, released
from tests.serve.discovery.dns_server import dns_server
from tests.serve.lifecycle.membership_rig import DISCOVERY, write
from tests.serve.rig import MODEL
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    failing,
    listening,
    run,
    tokens,
)
from tests.waiting import until

from kvroute.epp.envoy_config import EnvoySpec
from kvroute.serve.lifecycle.deployment import Deployment

pytestmark = pytest.mark.live
BODY = {"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3}
BODIES = pytest.mark.parametrize("buffered", [False, True], ids=["streamed", "buffered"])
CHECK = "health: {interval: 200 ms}"
NO_CHECK = "health: {panic: 0, interval: 3600 s, slow_start: 0 s}"
SRV = "_http._tcp.engines.example"


def entries(engines: Iterable[Engine]) -> list[dict[str, Any]]:
    """Return the file of engines, each on a node of its own."""
    return [
        {
            "name": engine.name,
            "uid": engine.name,
            "role": "both",
            "url": f"http://{address(engine)}",
            "node": engine.name,
        }
        for engine in engines
    ]


@asynccontextmanager
async def following(engines: Sequence[Engine], folder: Path, text: str = DISCOVERY) -> AsyncIterator[PickerRig]:
    """Run a picker that follows a file with these engines, and wait until it is ready."""
    write(folder / "engines.yaml", entries(engines))
    async with picking(Deployment.of(text, str(folder / "cluster.yaml"))) as picker:
        await until(lambda: not picker.gateway.ready())
        yield picker


@asynccontextmanager
async def discovering(
    engines: Sequence[Engine], folder: Path, text: str = DISCOVERY, **options: Any
) -> AsyncIterator[EnvoyRig]:
    """Run the same with an Envoy in front of it."""
    made = Deployment.of(text, str(folder / "cluster.yaml"))
    async with following(engines, folder, text) as picker, envoy(picker, made, folder, **options) as rig:
        yield rig


def up_of(rig: EnvoyRig) -> Callable[[], set[str]]:
    """Return what tells the names of the engines that take requests."""
    return lambda: {name for name, engine in rig.picker.gateway.runtime.engines.items() if engine.availability.up}


@pytest.mark.parametrize("fallback", [(), ("engines.llm.svc:8000", "10.0.0.1:8000")], ids=["closed", "open"])
@BODIES
def test_envoy_accepts_the_configuration(tmp_path: Path, fallback: tuple[str, ...], buffered: bool) -> None:
    """Without a deprecated field."""
    made = Deployment.of(DISCOVERY, "test.yaml")
    options = EnvoySpec("10.0.0.9:9002", fail_open=bool(fallback), buffered=buffered, fallback=fallback)
    check_configuration(made, options, tmp_path)


@BODIES
def test_engines_that_join_and_leave_are_reached_as_the_picker_says(tmp_path: Path, buffered: bool) -> None:
    """Each gets the requests of its time, and those in progress end where they are."""

    async def main() -> None:
        engines, gate = alone(2), Gate()
        async with listening(engines), discovering(engines[:1], tmp_path, buffered=buffered) as rig:
            assert (await rig.post(BODY)).status == 200
            engines[0].serve = gate.before(tokens)
            slow = asyncio.ensure_future(rig.post(BODY | {"stream": True}))
            await gate.entered.wait()
            write(tmp_path / "engines.yaml", entries(engines[1:]))
            await until(lambda: up_of(rig)() == {"engine1"})
            for number in range(5):
                assert (await rig.post(BODY | {"user": str(number)})).status == 200
            assert [len(engine.received) for engine in engines] == [2, 5]
            gate.open.set()
            assert len((await slow).events) == 3
            assert await released(rig)

    run(main())


def test_engines_of_srv_records_are_reached(tmp_path: Path) -> None:
    """Also one that is added to the records while Envoy runs."""

    async def main() -> None:
        engines = alone(2)
        async with listening(engines), dns_server() as server:
            records = [f"0 0 {engine.port} {engine.name}.example." for engine in engines]
            server.records = {(f"{engine.name}.example", "A"): ["127.0.0.1"] for engine in engines}
            server.records[SRV, "SRV"] = records[:1]
            times = "interval_min: 50 ms, interval_max: 1 s, keep: 1 h"
            source = f'dns: {{both: {SRV}, nameservers: ["{server.address}"], {times}}}'
            made = Deployment.of(DISCOVERY.replace("file: engines.yaml", source), str(tmp_path / "cluster.yaml"))
            async with picking(made) as picker, envoy(picker, made, tmp_path) as rig:
                await until(lambda: len(up_of(rig)()) == 1)
                assert (await rig.post(BODY)).status == 200
                server.records[SRV, "SRV"] = records[1:]
                await until(lambda: up_of(rig)() == {f"engine1.example-{engines[1].port}"})
                assert (await rig.post(BODY)).status == 200
                assert [len(engine.received) for engine in engines] == [1, 1]
                assert await released(rig)

    run(main())


@BODIES
def test_the_next_endpoint_serves_if_the_first_is_dead(tmp_path: Path, buffered: bool) -> None:
    """The picker learns which one served, and the breaker of the other one opens."""

    async def main() -> None:
        engines = alone()
        async with listening(engines[1:]):
            async with listening(engines[:1]):
                pass  # it has a port now, on which nothing listens any more
            text = DISCOVERY.replace(CHECK, NO_CHECK) + "  breaker: {failures: 1}\n"
            async with discovering(engines, tmp_path, text, buffered=buffered) as rig:
                up = rig.picker.gateway.runtime.engines["engine0"].availability
                up.set_healthy(True, rig.picker.gateway.now())
                for number in range(8):
                    assert (await rig.post(BODY | {"prompt": f"{number} word " * 20})).status == 200
                assert await released(rig)
                assert up_of(rig)() == {"engine1", "engine2"}
                failed = 'kvroute_leg_failures_total{leg="decode",engine="engine0",kind="refused"} 4'
                assert failed in await rig.picker.metrics()

    run(main())


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_full_engines_are_tried_in_order_as_often_as_configured(tmp_path: Path, attempts: int) -> None:
    """Envoy tries no engine that the picker has not named."""

    async def main() -> None:
        engines = alone(4)
        for engine in engines:
            engine.serve = failing(503)
        text = DISCOVERY.replace(CHECK, NO_CHECK) + f"  retries: {{attempts: {attempts}}}\n"
        async with listening(engines), discovering(engines, tmp_path, text) as rig:
            await until(lambda: len(up_of(rig)()) == 4)
            assert (await rig.post(BODY)).status == 503
            assert sorted(len(engine.received) for engine in engines) == [0] * (4 - attempts) + [1] * attempts
            assert await released(rig)

    run(main())


def test_fewer_engines_than_attempts_are_no_reason_for_another_engine(tmp_path: Path) -> None:
    """The only engine is full: the client gets status 503, and the picker blames no other engine."""

    async def main() -> None:
        engines = alone(1)
        engines[0].serve = failing(503)
        text = DISCOVERY.replace(CHECK, NO_CHECK) + "  retries: {attempts: 3}\n"
        async with listening(engines), discovering(engines, tmp_path, text) as rig:
            assert (await rig.post(BODY)).status == 503
            assert len(engines[0].received) == 1
            assert await released(rig)
            engines[0].serve = tokens
            assert (await rig.post(BODY)).status == 200

    run(main())


def short_cleanup(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which Envoy forgets addresses that are not in use every 50 ms."""
    config = copy.deepcopy(config)
    for cluster in config["static_resources"]["clusters"]:
        if cluster.get("type") == "ORIGINAL_DST":
            cluster["cleanup_interval"] = "0.05s"
    return config


def test_a_long_response_ends_although_envoy_forgets_idle_addresses(tmp_path: Path) -> None:
    """The address of another engine is forgotten meanwhile, that of the response is not."""

    async def closing(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await tokens(engine, request, received)
        response.force_close()
        return response

    async def main() -> None:
        engines, gate = alone(2), Gate()
        engines[1].serve = closing
        async with listening(engines), discovering(engines[:1], tmp_path, change=short_cleanup) as rig:
            engines[0].serve = gate.before(tokens)
            slow = asyncio.ensure_future(rig.post(BODY | {"stream": True}))
            await gate.entered.wait()
            write(tmp_path / "engines.yaml", entries(engines[1:]))
            await until(lambda: up_of(rig)() == {"engine1"})
            assert (await rig.post(BODY)).status == 200
            known = "cluster.kvroute_engines_1.membership_total"
            while await rig.stat(known) != 1:
                await asyncio.sleep(0.01)
            assert len(engines[1].received) == 1
            gate.open.set()
            assert len((await slow).events) == 3
            assert await released(rig)

    run(main())


@BODIES
def test_a_picker_without_engines_answers_with_one_sentence(tmp_path: Path, buffered: bool) -> None:
    """As while an InferencePool is deleted: Envoy, which fails closed, asks it long after its health check."""

    async def main() -> None:
        engines = alone(1)
        async with listening(engines), discovering(engines, tmp_path, buffered=buffered) as rig:
            assert (await rig.post(BODY)).status == 200
            write(tmp_path / "engines.yaml", entries([]))
            await until(lambda: not rig.picker.gateway.runtime.engines)
            checks = f"cluster.{PICKER}.health_check.attempt"
            before = await rig.stat(checks)
            while await rig.stat(checks) < before + 4:
                await asyncio.sleep(0.05)
            response = await rig.post(BODY)
            assert response.status == 503
            assert "no instance is up" in response.json["error"]["message"]

    run(main())


@BODIES
@pytest.mark.parametrize("fail_open", [False, True], ids=["closed", "open"])
def test_without_a_picker_envoy_fails_as_configured(tmp_path: Path, fail_open: bool, buffered: bool) -> None:
    """Closed: 503. Open: an engine of the fallback, and a warning. An address that a client names is never used."""

    async def main() -> None:
        chosen, spare, secret = engines = alone(3)
        async with listening(engines):
            places = (f"localhost:{spare.port}",) if fail_open else ()
            named = {"x-gateway-destination-endpoint": address(secret)}
            fails: dict[str, Any] = {"fail_open": fail_open, "buffered": buffered, "fallback": places}
            async with discovering([chosen], tmp_path, **fails) as rig:
                for headers in ({}, named):
                    assert (await rig.post(BODY, headers=headers)).status == 200
                    assert (await rig.post(BODY | {"stream": True}, headers=headers)).status == 200
                assert [len(engine.received) for engine in engines] == [4, 0, 0]
                assert "no picker responds" not in rig.errors.read_text()
                await rig.picker.gateway.close()
                await rig.picker_gone()
                for headers in ({}, named):
                    assert (await rig.post(BODY, headers=headers)).status == (200 if fail_open else 503)
                assert [len(engine.received) for engine in engines] == [4, 2 * fail_open, 0]
                if fail_open:
                    await until(lambda: "warning: no picker responds" in rig.errors.read_text())

    run(main())
