"""Role switches while requests are served: drain first, then the operator's hook, and back to the old role if it
fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from tests.serve.rig import Rig
from tests.serve.two_sites import LONG, TEXT, metric, two_sites, wait_for_counter
from tests.waiting import until

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.assembly import Deployment
from kvroute.serve.config.offload import RoleSwitchSection, hook_url
from kvroute.serve.lifecycle.role_hook import switch_role
from kvroute.topology import parse
from kvroute.types import Endpoint, RoleSwitched
from kvroute_engine.files.units import Duration

FREQUENT_REVIEWS = "review: 50 ms, requests_min: 5, window: 10 s, busy_above: 0.01, prefill_min: 1, decode_min: 1"
ONCE = FREQUENT_REVIEWS.replace("prefill_min: 1, decode_min: 1", "prefill_min: 2, decode_min: 2")
"""One role switch, after which every instance keeps its role."""
OUTCOMES = "kvroute_role_switches_total"


def offload(role_switch: str = "", long_term: str = FREQUENT_REVIEWS) -> str:
    """Return settings under which no prompt is offloaded; the home site has one prefill and three decode instances, too
    few prefill instances for long prompts."""
    section = f"    role_switch: {role_switch}\n" if role_switch else ""
    return (
        "  offload:\n    threshold: 100K\n    check_interval: 20 ms\n    short_term: {enabled: false}\n"
        f"    long_term: {{{long_term}}}\n{section}"
    )


@asynccontextmanager
async def hook(statuses: list[int], released: asyncio.Event | None = None) -> AsyncIterator[tuple[str, list[Any]]]:
    """Run a hook and yield its URL and the bodies that it received. It responds with `statuses` in turn, repeats the
    last one, and waits for `released` before each response."""
    bodies: list[Any] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        bodies.append(await request.json())
        if released is not None:
            await released.wait()
        return web.Response(status=statuses[min(len(bodies), len(statuses)) - 1])

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/role", bodies
    finally:
        if released is not None:
            released.set()
        await runner.cleanup()


class LoadGenerator:
    """Clients that send requests repeatedly and require every response to be complete."""

    def __init__(self, gate: Rig, clients: int = 4, tokens: int = 4) -> None:
        self._gate, self._over, self._count = gate, False, tokens
        self.responses = 0
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._over:
            response = await self._gate.ask(f"{number} {turn} {LONG}", stream=True, tokens=self._count)
            assert response.status == 200, response.body
            assert len(response.events) == self._count
            self.responses, turn = self.responses + 1, turn + 1

    async def end(self) -> None:
        """Stop new requests and wait for the running ones."""
        self._over = True
        await asyncio.gather(*self._tasks)


def _check_replay(log: Path) -> bool:
    header, records = read_log(log)
    return all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(parse(TEXT)), records)
    )


def _role_switches(log: Path) -> list[tuple[str, str]]:
    events = [record.event for record in read_log(log)[1]]
    return [(event.instance, event.role) for event in events if isinstance(event, RoleSwitched)]


def test_emulated_engines_switch_roles_under_load(tmp_path: Path) -> None:
    """No hook is configured: the gateway orders the emulated engines of its own process. The log replays to the same
    decisions."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with two_sites(offload() + f"  log: {{events: {log}}}\n") as gate:
            load = LoadGenerator(gate)
            await wait_for_counter(gate, OUTCOMES, 1, outcome="switched")
            (name,) = [n for n, s in gate.fleet.servers.items() if n.startswith("decode") and s.role == "prefill"][:1]
            engines = gate.gateway.runtime.engines
            assert engines[name].role == "prefill"
            await until(lambda: engines[name].in_flight > 0)
            assert await metric(gate, "kvroute_instance_up", engine=name, role="prefill") == 1
            async with gate.session.get(gate.admin + "/state") as response:
                offloaded = (await response.json())["tick"]["load"]["offload"]
            assert offloaded["roles"][name] == "prefill"
            assert offloaded["review"]["n_prefill"][0] >= 2  # the best number depends on the load so far
            await load.end()
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    assert _check_replay(log)
    assert _role_switches(log)


def test_a_hook_is_called_after_the_drain_with_instance_and_role() -> None:
    async def run() -> None:
        released = asyncio.Event()
        async with hook([204], released) as (url, bodies):
            section = offload(f'{{url: "{url}"}}') + "  policy: round-robin\n"
            async with two_sites(section) as gate:
                await check_role_switch(gate, bodies, released)

    async def check_role_switch(gate: Rig, bodies: list[Any], released: asyncio.Event) -> None:
        for name in ("decode0", "decode1", "decode2"):
            await gate.command(name, "slow", factor=10)
        load = LoadGenerator(gate, clients=9, tokens=30)  # two thirds of a second each, on every decode instance
        await until(lambda: bool(bodies))
        name = bodies[0]["instance"]
        engines = gate.gateway.runtime.engines
        assert engines[name].in_flight == 0
        assert bodies == [{"instance": name, "role": "prefill", "from": "decode"}]
        before = load.responses
        await until(lambda: load.responses > before + 10)
        assert engines[name].in_flight == 0
        assert engines[name].availability.reason == "switching"
        assert await metric(gate, "kvroute_role_switches_in_progress") == 1
        released.set()
        await wait_for_counter(gate, OUTCOMES, 1, outcome="switched")
        await until(lambda: engines[name].in_flight > 0)
        await load.end()
        assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_the_drain_of_an_instance_has_a_timeout() -> None:
    """Every decode instance has hanging requests; the hook is called after the drain timeout."""
    slow = FREQUENT_REVIEWS.replace("requests_min: 5", "requests_min: 12")
    section = offload('{url: "{endpoint}/nowhere", drain: 100 ms, back_off: 1 h}', slow) + "  policy: round-robin\n"

    async def run() -> None:
        async with two_sites(section) as gate:
            assert (await gate.ask(LONG, stream=True)).status == 200
            names = ("decode0", "decode1", "decode2")
            for name in names:
                await gate.command(name, "slow", factor=1000)
            tasks = [asyncio.create_task(gate.ask(f"{n} {LONG}", stream=True, tokens=3)) for n in range(30)]
            await wait_for_counter(gate, OUTCOMES, 1, outcome="failed")
            engines = gate.gateway.runtime.engines
            assert all(engines[name].in_flight for name in names)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_failed_hook_leaves_the_role_and_delays_the_next_switch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "events.log"

    async def run() -> None:
        async with hook([500]) as (url, bodies):
            section = offload(f'{{url: "{url}", back_off: 1 h}}') + f"  log: {{events: {log}}}\n"
            async with two_sites(section) as gate:
                load = LoadGenerator(gate)
                await wait_for_counter(gate, OUTCOMES, 1, outcome="failed")
                name = bodies[0]["instance"]
                engines = gate.gateway.runtime.engines
                assert (engines[name].role, engines[name].availability.reason) == ("decode", "")
                await wait_for_counter(gate, OUTCOMES, 1, outcome="declined")
                assert len(bodies) == 1
                await load.end()
                assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    (fields,) = [record.__dict__["fields"] for record in caplog.records if record.message == "role_switch_failed"]
    assert fields["reason"] == "the hook returned status 500"
    assert {role for _, role in _role_switches(log)} == {"decode"}
    assert _check_replay(log)


def test_an_engine_that_dies_during_a_role_switch_stays_down_until_it_recovers() -> None:
    async def run() -> None:
        released = asyncio.Event()
        async with hook([200], released) as (url, bodies):
            section = offload(f'{{url: "{url}"}}') + "  health: {interval: 20 ms, timeout: 1 s, failures: 1}\n"
            async with two_sites(section) as gate:
                load = LoadGenerator(gate)
                await until(lambda: bool(bodies))
                name = bodies[0]["instance"]
                availability = gate.gateway.runtime.engines[name].availability
                await gate.stop_engine(name)
                await until(lambda: not availability.healthy)
                released.set()
                await wait_for_counter(gate, OUTCOMES, 1, outcome="switched")
                assert not availability.up
                await gate.restart_engine(name)
                await until(lambda: availability.up)
                engines = gate.gateway.runtime.engines
                await until(lambda: engines[name].in_flight > 0)
                await load.end()
                assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


@pytest.mark.parametrize("change", ["same", "no-hook", "another-engine"])
def test_a_reload_during_a_role_switch(tmp_path: Path, change: str) -> None:
    """The switch continues if the new file still allows it; if switching is no longer allowed, the role in the file
    applies."""
    log = tmp_path / "events.log"

    async def run() -> str:
        released = asyncio.Event()
        async with hook([200], released) as (url, bodies):
            logged = f"  log: {{events: {log}}}\n"
            section = offload(f'{{url: "{url}"}}') + logged
            async with two_sites(section) as gate:
                load = LoadGenerator(gate)
                await until(lambda: bool(bodies))
                name = str(bodies[0]["instance"])
                endpoints = dict(gate.fleet.ready().instances)
                text = TEXT + (logged if change == "no-hook" else section)
                if change == "another-engine":
                    endpoints[name] = Endpoint(url="http://127.0.0.1:9")
                assert await gate.gateway.reload(lambda: Deployment.of(text, "new.yaml", endpoints=endpoints))
                each = gate.gateway.runtime.engines[name]
                assert each.availability.reason.endswith("switching") is (change == "same")
                released.set()
                await wait_for_counter(gate, OUTCOMES, 1, outcome="switched" if change == "same" else "abandoned")
                assert each.role == ("prefill" if change == "same" else "decode")
                await load.end()
                assert await gate.becomes_idle(), gate.held_resources()
            return name

    name = uvloop.run(run())
    assert _check_replay(tmp_path / "events.log.1")
    assert _check_replay(log)
    assert ((name, "prefill") in _role_switches(log)) is (change == "same")


def test_a_reload_keeps_switched_roles(tmp_path: Path) -> None:
    log = tmp_path / "events.log"
    section = offload(long_term=ONCE) + f"  log: {{events: {log}}}\n"

    async def run() -> None:
        async with two_sites(section) as gate:
            load = LoadGenerator(gate)
            await wait_for_counter(gate, OUTCOMES, 1, outcome="switched")
            await load.end()
            roles = {name: engine.role for name, engine in gate.gateway.runtime.engines.items()}
            endpoints = gate.fleet.ready().instances
            assert await gate.gateway.reload(lambda: Deployment.of(TEXT + section, "new.yaml", endpoints=endpoints))
            assert {n: s.role for n, s in gate.gateway.runtime.engines.items()} == roles
            assert (await gate.ask(LONG, stream=True)).status == 200
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    assert "prefill" in {role for _, role in _role_switches(log)}
    assert _check_replay(log)


def test_a_draining_gateway_starts_no_role_switch() -> None:
    """An instance that drains keeps serving in its role; a hook call in flight is cancelled at the end."""

    async def run() -> None:
        never = asyncio.Event()
        async with hook([200], never) as (url, bodies), two_sites(offload(f'{{url: "{url}"}}')) as gate:
            load = LoadGenerator(gate)
            await until(lambda: bool(bodies))
            await load.end()
            await gate.gateway.drain()
            await gate.gateway.close()
            metrics = "".join(gate.gateway.metrics.page()[1])
            assert f'{OUTCOMES}{{outcome="abandoned"}} 1\n' in metrics
            assert len(bodies) == 1

    uvloop.run(run())


def test_without_a_hook_a_review_only_reports_the_best_split(caplog: pytest.LogCaptureFixture) -> None:
    """Settings of engines that are not emulated: no role is switched; the best split is logged and shown."""
    caplog.set_level("INFO", logger="kvroute")

    async def run() -> None:
        async with two_sites(offload()) as gate:
            endpoints = gate.fleet.ready().instances
            plain = Deployment.of(TEXT + offload(), "new.yaml", endpoints=endpoints)
            assert plain.settings.offload is not None
            section = msgspec.structs.replace(plain.settings.offload, role_switch=None)
            settings = msgspec.structs.replace(plain.settings, offload=section)
            assert await gate.gateway.reload(lambda: Deployment(plain.text, plain.cluster, settings))
            load = LoadGenerator(gate)
            await wait_for_counter(gate, "kvroute_reviews_total", 1, verdict="off")
            await load.end()
            gain = await metric(gate, "kvroute_review_gain_ratio")
            assert gain is not None
            assert gain > 0.5
            assert all(engine.role == engine.instance.role for engine in gate.gateway.runtime.engines.values())

    uvloop.run(run())
    reasons = [record.__dict__["fields"]["reason"] for record in caplog.records if record.message == "review"]
    assert "best split: 3 prefill, 1 decode (no hook: roles do not change)" in reasons


COMMANDS = {
    "done": ("import os; assert os.environ['ROLE'] == 'prefill' and os.environ['FROM'] == 'decode'", ""),
    "environment": (
        "import os; assert os.environ['INSTANCE'] + os.environ['ENDPOINT'] == 'decode0http://127.0.0.1:1'",
        "",
    ),
    "fails": ("raise SystemExit(3)", "the hook exited with code 3"),
    "dies": ("import os; os.kill(os.getpid(), 9)", "the hook was killed by signal 9"),
    "hangs": ("import time; time.sleep(600)", "the hook took longer than 0.5 s"),
}


@pytest.mark.parametrize(("code", "why"), COMMANDS.values(), ids=COMMANDS)
def test_a_program_can_be_the_hook(code: str, why: str) -> None:
    instance = msgspec.structs.replace(
        next(i for i in parse(TEXT).instances if i.name == "decode0"), endpoint=Endpoint(url="http://127.0.0.1:1")
    )
    timeout_s = Duration(0.5 if "took" in why else 60.0)
    section = msgspec.structs.replace(RoleSwitchSection(command=[sys.executable, "-c", code]), timeout_s=timeout_s)
    assert uvloop.run(switch_role(section, instance, "decode", "prefill")) == why


def test_a_missing_hook_is_reported() -> None:
    instance = msgspec.structs.replace(parse(TEXT).instances[0], endpoint=Endpoint(url="http://127.0.0.1:9/"))
    missing = uvloop.run(switch_role(RoleSwitchSection(command=["/no/such/program"]), instance, "decode", "prefill"))
    assert missing == "/no/such/program cannot be run (No such file or directory)"
    unreachable = uvloop.run(switch_role(RoleSwitchSection(url="{endpoint}/role"), instance, "decode", "prefill"))
    assert unreachable.startswith("the hook cannot be reached (")
    assert hook_url("{endpoint}/role", "http://a:1/") == "http://a:1/role"
