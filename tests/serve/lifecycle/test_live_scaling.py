"""Autoscaling while requests are served: metrics, drain, hook, start of stopped engines, and role switches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.serve.lifecycle.membership_rig import DiscoveryRig, emulated
from tests.serve.lifecycle.test_role_switches import LoadGenerator, hook
from tests.serve.rig import CLUSTER, Rig, rig, with_section
from tests.serve.two_sites import LONG
from tests.waiting import until

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.assembly import Deployment
from kvroute.serve.config.preflight import deployment_of
from kvroute.serve.observe.view import ScalingLoad
from kvroute.topology import parse
from kvroute.types import InputErrors, PeerReport, PeerReported, Replicas, ScaleEnded, ScaleIn, ScaleOut

QUICK = "interval: 50 ms, window: 2 s, startup: 0 s, scale_in: 500 ms, catch_up: 1 s"
SLOW = CLUSTER.replace("per_token: 1 us, base: 1 ms", "per_token: 20 us, base: 1 ms")
"""A prompt of the load takes 55 ms, so that a few clients need more than one prefill instance."""


def scaling(gate: Rig) -> ScalingLoad:
    """Return the gateway's present state of autoscaling."""
    load = gate.gateway.state.tick(gate.gateway.now()).load.scaling
    assert load is not None
    return load


def model(gate: Rig) -> Replicas | None:
    """Return the last result."""
    return next(iter(scaling(gate).models), None)


async def quiet(gate: Rig) -> None:
    """Wait until the traffic window is empty and every role needs one instance."""
    await until(lambda: (found := model(gate)) is not None and (found.prefill, found.decode) == (1, 1))


def test_desired_numbers_rise_under_load_and_fall_without() -> None:
    async def run() -> None:
        async with rig(f"  autoscaling: {{{QUICK}, ttft: 500 ms}}\n", SLOW) as gate:
            await quiet(gate)
            load = LoadGenerator(gate, clients=12)
            await until(lambda: (found := model(gate)) is not None and found.prefill > 1)
            page = await gate.metrics()
            assert 'kvroute_desired_replicas{model="llama-3-70b",role="prefill"}' in page
            assert "kvroute_needed_replicas{" in page
            assert 'kvroute_serving_replicas{model="llama-3-70b",role="decode"} 2' in page
            await load.end()
            await quiet(gate)
            engines = gate.gateway.runtime.engines.values()
            assert all(engine.availability.up for engine in engines)  # without a hook nothing stops
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_an_instance_is_drained_then_stopped_and_started_again_under_load(tmp_path: Path) -> None:
    log = tmp_path / "events.log"

    async def run() -> None:
        async with hook([200]) as (url, bodies):
            section = f'  autoscaling: {{{QUICK}, ttft: 500 ms, hook: {{url: "{url}"}}}}\n  log: {{events: {log}}}\n'
            async with rig(section, SLOW) as gate:
                await check(gate, bodies)

    async def check(gate: Rig, bodies: list[Any]) -> None:
        await until(lambda: len(scaling(gate).stopped) == 2)
        stopped = set(scaling(gate).stopped)
        assert {name[:-1] for name in stopped} == {"prefill", "decode"}
        assert {(body["action"], body["instance"], body["replicas"]) for body in bodies} == {
            ("stop", name, 1) for name in stopped
        }
        engines = gate.gateway.runtime.engines
        assert all(engines[name].availability.reason == "scaled in" for name in stopped)
        (prefill,) = [name for name in stopped if name.startswith("prefill")]
        load = LoadGenerator(gate, clients=12)
        await until(lambda: engines[prefill].in_flight > 0)
        assert ("start", prefill) in {(body["action"], body["instance"]) for body in bodies}
        await load.end()
        await until(lambda: len(scaling(gate).stopped) == 2)
        assert 'kvroute_scale_actions_total{action="start",outcome="done"}' in await gate.metrics()
        assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    header, found_records = read_log(log)
    records = list(found_records)
    found = {type(decision) for record in records for decision in record.decisions}
    assert {Replicas, ScaleIn, ScaleOut} <= found
    again = replay(header.spec.build(parse(SLOW)), records)
    assert all(decisions_equal(record.decisions, now) for record, now in again)


def test_the_hook_is_called_after_the_last_request_of_the_instance() -> None:
    """The requests take longer than the periods of autoscaling, so an instance with requests has to be drained."""

    async def run() -> None:
        async with hook([200]) as (url, bodies):
            section = f'  autoscaling: {{{QUICK}, hook: {{url: "{url}"}}}}\n  policy: round-robin\n'
            async with rig(section) as gate:
                await check(gate, bodies)

    async def check(gate: Rig, bodies: list[Any]) -> None:
        for name in ("decode0", "decode1"):
            await gate.command(name, "slow", factor=30)
        asked = [asyncio.create_task(gate.ask(f"{k} Hello", stream=True, tokens=60)) for k in range(4)]
        engines = gate.gateway.runtime.engines
        await until(lambda: any(name.startswith("decode") for name in scaling(gate).stopping))
        (name,) = [name for name in scaling(gate).stopping if name.startswith("decode")]
        assert engines[name].in_flight > 0
        assert not any(body["instance"] == name for body in bodies)
        await until(lambda: any(body["instance"] == name for body in bodies))
        assert engines[name].in_flight == 0
        for response in await asyncio.gather(*asked):
            assert response.status == 200
            assert len(response.events) == 60

    uvloop.run(run())


def test_a_failed_hook_leaves_the_instance_serving_and_delays_the_next_call() -> None:
    async def run() -> None:
        async with hook([500]) as (url, bodies):
            section = f'  autoscaling: {{{QUICK}, hook: {{url: "{url}", back_off: 1 h}}}}\n'
            async with rig(section) as gate:
                await until(lambda: len(bodies) == 2)
                await until(lambda: not scaling(gate).stopping)
                assert all(engine.availability.up for engine in gate.gateway.runtime.engines.values())
                assert not scaling(gate).stopped
                page = await gate.metrics()
                assert 'kvroute_scale_actions_total{action="stop",outcome="failed"} 2' in page
                assert len(bodies) == 2

    uvloop.run(run())


def test_a_reload_keeps_stopped_instances_and_one_without_a_hook_serves_with_all() -> None:
    async def run() -> None:
        async with hook([200]) as (url, _):
            section = f'  autoscaling: {{{QUICK}, hook: {{url: "{url}"}}}}\n'
            async with rig(section) as gate:
                endpoints = gate.fleet.ready().instances
                await until(lambda: len(scaling(gate).stopped) == 2)
                stopped = scaling(gate).stopped
                again = with_section(section + "  policy: round-robin\n")
                assert await gate.gateway.reload(lambda: Deployment.of(again, "new.yaml", endpoints=endpoints))
                assert scaling(gate).stopped == stopped
                engines = gate.gateway.runtime.engines
                assert all(engines[name].availability.reason == "scaled in" for name in stopped)
                assert gate.gateway.runtime.control.scaling is not None
                assert gate.gateway.runtime.control.scaling.stopped == frozenset(stopped)
                assert await gate.gateway.reload(lambda: Deployment.of(CLUSTER, "new.yaml", endpoints=endpoints))
                assert gate.gateway.runtime.control.scaling is None
                assert await gate.becomes(stopped[0], True)

    uvloop.run(run())


def test_an_instance_that_another_gateway_stops_gets_no_requests() -> None:
    async def run() -> None:
        async with rig(f"  autoscaling: {{{QUICK}}}\n") as gate:
            gateway, engine = gate.gateway, gate.gateway.runtime.engines["decode0"]
            for sequence, serves in ((1, False), (2, True)):
                event = ScaleEnded(gateway.now(), "decode0", serves=serves)
                report = PeerReport("other", sequence, gateway.now(), events=(event,), whole=True)
                gateway.peers.notify(PeerReported(gateway.now(), report))
                assert engine.availability.up is serves

    uvloop.run(run())


def test_without_autoscaling_no_gateway_stops_an_instance() -> None:
    """A writer of the stream cannot remove instances."""

    async def run() -> None:
        async with rig() as gate:
            gateway = gate.gateway
            events = tuple([ScaleEnded(gateway.now(), name, serves=False) for name in gateway.runtime.engines])
            report = PeerReport("other", 1, gateway.now(), events=events, whole=True)
            gateway.peers.notify(PeerReported(gateway.now(), report))
            assert all(engine.availability.up for engine in gateway.runtime.engines.values())
            assert (await gate.ask()).status == 200

    uvloop.run(run())


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("{hook: {}}", "`hook` requires a URL or a command"),
        ('{hook: {url: "http://a/b"}, role_switch: {url: "http://a/b"}}', "`hook` changes the number"),
        ("{prefill: {min: 3, max: 2}}", "3 to 2 is not"),
        ("{attainment: 1}", "attainment"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(section: str, sentence: str) -> None:
    with pytest.raises(InputErrors) as caught:
        deployment_of(CLUSTER + f"  autoscaling: {section}\n", "test.yaml", embedded=True)
    assert sentence in str(caught.value)


def test_a_program_receives_what_it_has_to_do(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    program = f"echo $ACTION $INSTANCE $MODEL $ROLE $REPLICAS $ENDPOINT >> {calls}"

    async def run() -> None:
        section = f'  autoscaling: {{{QUICK}, hook: {{command: [sh, -c, "{program}"]}}}}\n'
        async with rig(section) as gate:
            await until(lambda: len(scaling(gate).stopped) == 2)

    uvloop.run(run())
    lines = [line.split() for line in calls.read_text().splitlines()]
    assert sorted(line[3] for line in lines) == ["decode", "prefill"]
    assert all(line[0] == "stop" and line[2] == "llama-3-70b" and line[4] == "1" for line in lines)
    assert all(line[5].startswith("http://127.0.0.1:") for line in lines)


def test_with_a_fixed_number_of_engines_the_role_that_lacks_one_gets_it() -> None:
    async def run() -> None:
        async with hook([200]) as (url, bodies):
            text = SLOW.replace("prefill1, role: prefill", "prefill1, role: decode").replace("prefill1", "decode2")
            section = f'  autoscaling: {{{QUICK}, ttft: 300 ms, role_switch: {{url: "{url}"}}}}\n'
            async with rig(section, text) as gate:
                load = LoadGenerator(gate, clients=12)
                await until(lambda: bool(bodies))
                name = bodies[0]["instance"]
                assert bodies[0] == {"instance": name, "role": "prefill", "from": "decode"}
                engine = gate.gateway.runtime.engines[name]
                await until(lambda: engine.role == "prefill")
                await load.end()
                assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_engines_of_a_discovery_source_follow_the_load(tmp_path: Path) -> None:
    """The hook adds engines to the discovery file up to the requested number, or removes the named one."""
    listed = ["decode0", "prefill0"]
    orders: list[Any] = []
    section = (
        f"  autoscaling: {{{QUICK}, utilisation: 0.05, prefill: {{max: 3}}, decode: {{max: 1}}, "
        f'hook: {{url: "http://127.0.0.1:PORT/scale"}}}}\n'
    )

    async def main() -> None:
        gates: list[Any] = []

        async def handle(request: web.BaseRequest) -> web.Response:
            order = await request.json()
            orders.append(order)
            if order["action"] == "stop":
                listed.remove(order["instance"])
            elif not order["instance"]:
                missing = [f"prefill{k}" for k in range(3) if f"prefill{k}" not in listed]
                listed.extend(missing[: order["replicas"] - len(listed) + 1])
            gates[0].list(sorted(listed))
            return web.Response(status=204)

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        settings = section.replace("PORT", str(runner.addresses[0][1]))
        try:
            async with emulated(tmp_path, 3, 1, listed, settings) as (gate, _):
                gates.append(gate)
                await check(gate)
        finally:
            await runner.cleanup()

    async def check(gate: DiscoveryRig) -> None:
        over = asyncio.Event()

        async def client(number: int) -> None:
            turn = 0
            while not over.is_set():
                response = await gate.ask(f"{number} {turn} {LONG}", stream=True)
                assert response.status == 200, response.body
                turn += 1

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await until(lambda: {"prefill1", "prefill2"} & gate.up != set())
        over.set()
        await asyncio.gather(*clients)
        await until(lambda: sum(name.startswith("prefill") for name in gate.members) == 1)
        assert {order["action"] for order in orders} == {"start", "stop"}
        assert await gate.becomes_idle(), gate.held_resources()
        assert (await gate.ask(LONG)).status == 200

    uvloop.run(main())
