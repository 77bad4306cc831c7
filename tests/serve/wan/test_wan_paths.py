"""A WAN path that is cut: which component is blamed, which site serves meanwhile, when the path is retried; nothing is
lost."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import Rig
from tests.serve.two_sites import (
    AWAY,
    HOME,
    LONG,
    OFFLOAD,
    SHORT,
    TEXT,
    metric,
    two_sites,
    wait_for_metric,
)
from tests.waiting import until

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.serve.assembly import Deployment
from kvroute.serve.engines.availability import NOT_COUNTED, Availability
from kvroute.serve.engines.breaker import Breaker
from kvroute.serve.engines.fault_attribution import FaultAttribution
from kvroute.serve.wan.paths import PathAttempt
from kvroute.topology import parse
from kvroute.types import Prefill

PATH_STATE = "kvroute_wan_path_state"


async def _placed(gate: Rig, site: str, reason: str) -> float:
    return await metric(gate, "kvroute_offload_decisions_total", site=site, reason=reason) or 0.0


@given(st.lists(st.tuples(st.sampled_from(["arrived", "lost", "cancelled"]), st.booleans()), max_size=40))
def test_only_consecutive_failures_close_a_path_and_each_attempt_counts_once(ends: list[tuple[str, bool]]) -> None:
    """A report about an attempt on the path after its end has no effect."""
    availability = Availability("site", Breaker(failures=3, share=1.0, open_s=1e6), lambda name, up, now: None)
    in_a_row, closed = 0, False
    for end, again in ends:
        path_attempt = PathAttempt(availability, 0.0)
        if end == "lost":
            path_attempt.lost(FaultAttribution(), 0.0, error=False)
        else:
            getattr(path_attempt, end)(0.0)
        assert not path_attempt.open
        if again:
            path_attempt.lost(FaultAttribution(), 0.0, error=False)
            path_attempt.arrived(0.0)
        in_a_row = in_a_row + 1 if end == "lost" else 0 if end == "arrived" else in_a_row
        closed = closed or in_a_row == 3
        assert availability.up is not closed


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["answered", "error", "client_error"])), max_size=40))
def test_an_error_counts_against_a_path_once_the_request_succeeds_without_it(
    requests: list[tuple[bool, str]],
) -> None:
    """Each request is sent over the path, gets an error, and is retried at home with the given outcome. A request that
    has already failed before it is sent over the path does not count."""
    availability = Availability("site", Breaker(failures=3, share=1.0, open_s=1e6), lambda name, up, now: None)
    elsewhere = Availability("decode", Breaker(), lambda name, up, now: None)
    losses = 0
    for failed_before, outcome in requests:
        faults = FaultAttribution()
        if failed_before:
            faults.failed(elsewhere, elsewhere.started(0.0), "prefill", 0.0, uncertain=True)
        PathAttempt(availability, 0.0, counted=not failed_before).lost(faults, 0.0, error=True)
        assert availability.up is (losses < 3)
        if outcome == "answered":
            faults.answered("decode", 0.0)
        elif outcome == "error":
            faults.failed(elsewhere, NOT_COUNTED, "decode", 0.0, uncertain=True)
        faults.ended({"answered": 200, "error": 502, "client_error": 400}[outcome], 0.0)
        losses += outcome == "answered" and not failed_before
        assert availability.up is (losses < 3)


@given(st.lists(st.sampled_from(["+a", "-a", "+b", "-b", "ill", "well"]), max_size=20))
def test_an_instance_is_up_if_it_is_healthy_and_not_held(steps: list[str]) -> None:
    """A reason counts only once, and every change is reported once."""
    changes: list[bool] = []
    availability = Availability("instance", Breaker(), lambda name, up, now: changes.append(up))
    held, healthy = set[str](), True
    for step in steps:
        if step in ("ill", "well"):
            healthy = step == "well"
            availability.set_healthy(healthy, 0.0)
        elif step.startswith("+"):
            held.add(step[1:])
            availability.hold(step[1:], 0.0)
        else:
            held.discard(step[1:])
            availability.release(step[1:], 0.0)
        assert availability.up is (healthy and not held)
        assert set(availability.reason.split(", ")) - {""} == held | ({"unhealthy"} if not healthy else set())
    assert all(now is not before for before, now in zip([True, *changes], changes, strict=False))


def test_long_prompts_are_offloaded_and_short_ones_are_not() -> None:
    async def run() -> None:
        async with two_sites() as gate:
            for prompt in (LONG, SHORT, LONG + "!", SHORT + "!"):
                assert (await gate.ask(prompt)).status == 200
            assert (await _placed(gate, AWAY, "long"), await _placed(gate, HOME, "short")) == (2, 2)
            assert await metric(gate, "kvroute_offload_threshold_tokens", site=AWAY) == 1_000
            assert (await metric(gate, "kvroute_egress_used_ratio", site=AWAY) or 0.0) > 0.0
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_a_cut_path_loses_no_request_and_no_instance_is_blamed(tmp_path: Path, stream: bool) -> None:
    """Requests on the cut path are prefilled again at home, and so are all later ones, until one request finds the path
    working. The log of the run replays to the same decisions."""
    log = tmp_path / "events.log"
    section = OFFLOAD + f"  log: {{events: {log}}}\n"

    async def run() -> None:
        async with two_sites(section) as gate:
            assert (await gate.ask(LONG)).status == 200
            await gate.command("far0", "wan", share=0)
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=stream) for n in range(6)])
            assert [response.status for response in responses] == [200] * 6
            assert all(response.text for response in responses)
            assert await _placed(gate, HOME, "away_down") == 6
            engines = gate.gateway.runtime.engines
            assert all(engines[name].availability.breaker.state(1e6) == "closed" for name in engines)
            assert await metric(gate, "kvroute_transfers_in_flight", tier="cross_datacenter") == 0
            assert await gate.becomes_idle(), gate.held_resources()
            await gate.command("far0", "wan", share=1)
            before = await _placed(gate, AWAY, "long")
            for n in range(1_000):
                assert (await gate.ask(f"{n} again {LONG}", stream=stream)).status == 200
                if await metric(gate, PATH_STATE, site=AWAY) == 0:
                    break
            assert await _placed(gate, AWAY, "long") > before
            assert (await gate.ask(f"last {LONG}", stream=stream)).status == 200
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    header, read = read_log(log)
    records = list(read)
    again = replay(header.spec.build(parse(TEXT)), iter(records))
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)
    sites = [d.offload.site for r in records for d in r.decisions if isinstance(d, Prefill) and d.offload]
    assert set(sites) == {AWAY, HOME}


def test_a_stopped_engine_is_blamed_and_not_the_path() -> None:
    """A decode leg whose connection is cut counts against the engine, not against the path."""

    async def run() -> None:
        async with two_sites() as gate:
            for name in ("decode0", "decode1", "decode2"):
                await gate.command(name, leg="decode", fail_next=1, status="reset")
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=True) for n in range(4)])
            assert [response.status for response in responses] == [200] * 4
            assert await metric(gate, PATH_STATE, site=AWAY) == 0
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_requests_that_fail_on_every_engine_close_no_path() -> None:
    """Each request is also tried at home. There are twice as many as the number of failures that would open the path's
    breaker."""

    async def run() -> None:
        async with two_sites() as gate:
            for name in ("decode0", "decode1", "decode2"):
                await gate.command(name, leg="decode", fail_next=1_000, status=500)
            for n in range(4):
                assert (await gate.ask(f"{n} {LONG}", stream=True)).status == 502
            assert await _placed(gate, AWAY, "long") == 4
            for name in ("decode0", "decode1", "decode2"):
                await gate.command(name, leg="decode", fail_next=0)
            assert await metric(gate, PATH_STATE, site=AWAY) == 0
            assert (await gate.ask(LONG, stream=True)).status == 200
            assert await _placed(gate, AWAY, "long") == 5
            engines = gate.gateway.runtime.engines
            assert all(engines[name].availability.breaker.state(1e6) == "closed" for name in engines)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_client_that_disconnects_does_not_affect_the_path() -> None:
    """Nor does its KV cache, if it is not fetched after the client has left."""

    async def run() -> None:
        async with two_sites(f"{OFFLOAD}  timeouts: {{abandoned: 0 s}}\n", kv_timeout_s=3600.0) as gate:
            await gate.command("far0", "wan", share=0)
            tasks = [asyncio.create_task(gate.ask(f"{n} {LONG}", stream=True)) for n in range(4)]
            control = gate.gateway.runtime.control
            await until(
                lambda: (
                    sum(
                        control.in_progress(request.state.number) and not control.prefilling(request.state.number)
                        for request in gate.requests
                    )
                    == 4
                )
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await gate.becomes_idle(), gate.held_resources()
            assert await metric(gate, PATH_STATE, site=AWAY) == 0

    uvloop.run(run())


def test_a_probe_request_whose_client_disconnects_allows_the_next_probe(caplog: pytest.LogCaptureFixture) -> None:
    """The next request tries the path at once and finds it working. The log warns when the path is closed, not when it
    opens."""
    caplog.set_level("INFO", logger="kvroute")

    async def run() -> None:
        async with two_sites(OFFLOAD.replace("open: 200 ms", "open: 1 ms")) as gate:
            await gate.command("far0", "wan", share=0)
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=True) for n in range(3)])
            assert [response.status for response in responses] == [200] * 3
            before = await _placed(gate, AWAY, "long")
            for n in itertools.count():
                request = asyncio.create_task(gate.ask(f"{n} tries {LONG}", stream=True))
                await until(
                    lambda: (
                        bool(gate.requests)
                        and all(received_request.legs.decode is not None for received_request in gate.requests)
                    )
                )
                if any(received_request.state.path_attempt is not None for received_request in gate.requests):
                    break
                await request
            assert await _placed(gate, AWAY, "long") == before + 1
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            assert await gate.becomes_idle(), gate.held_resources()
            await gate.command("far0", "wan", share=1)
            await until(lambda: gate.gateway.runtime.engines["far0"].availability.up)
            assert (await gate.ask(f"next {LONG}", stream=True)).status == 200
            assert await metric(gate, PATH_STATE, site=AWAY) == 0

    uvloop.run(run())
    levels = {record.message: record.levelname for record in caplog.records if record.message.startswith("wan_path_")}
    assert levels == {"wan_path_closed": "WARNING", "wan_path_open": "INFO"}


def test_a_reload_keeps_a_path_closed() -> None:
    closed_for_long = OFFLOAD.replace("open: 200 ms", "open: 1 h")

    async def run() -> None:
        async with two_sites(closed_for_long) as gate:
            await gate.command("far0", "wan", share=0)
            responses = await asyncio.gather(*[gate.ask(f"{n} {LONG}", stream=True) for n in range(3)])
            assert [response.status for response in responses] == [200] * 3
            await wait_for_metric(gate, PATH_STATE, 2, site=AWAY)
            endpoints = gate.fleet.ready().instances
            text = TEXT + closed_for_long
            assert await gate.gateway.reload(lambda: Deployment.of(text, "new.yaml", endpoints=endpoints))
            assert await metric(gate, PATH_STATE, site=AWAY) == 2
            before = await _placed(gate, AWAY, "long")
            assert (await gate.ask(f"later {LONG}", stream=True)).status == 200
            assert await _placed(gate, AWAY, "long") == before
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_reload_continues_with_the_current_threshold(tmp_path: Path) -> None:
    """A base threshold in the file replaces it; the log that begins with the reload replays to the same decisions."""
    log = tmp_path / "events.log"
    searched = OFFLOAD.replace("    threshold: 1000 tokens\n", "    long_term: {requests_min: 5, review: 50 ms}\n")
    section = f"  log: {{events: {log}}}\n"

    async def run() -> None:
        async with two_sites(searched + section) as gate:
            for n in range(8):
                assert (await gate.ask(f"{n} {LONG if n % 2 else SHORT}", stream=True)).status == 200
            await until(lambda: gate.gateway.runtime.control.offloading.last_review is not None)  # type: ignore[union-attr]
            before = await metric(gate, "kvroute_offload_threshold_tokens", site=AWAY)
            endpoints = gate.fleet.ready().instances
            text = TEXT + searched.replace("requests_min: 5", "requests_min: 1000") + section
            assert await gate.gateway.reload(lambda: Deployment.of(text, "new.yaml", endpoints=endpoints))
            assert await metric(gate, "kvroute_offload_threshold_tokens", site=AWAY) == before != 1e6
            assert (await gate.ask(f"later {LONG}", stream=True)).status == 200
            given = TEXT + OFFLOAD + section
            assert await gate.gateway.reload(lambda: Deployment.of(given, "new.yaml", endpoints=endpoints))
            assert await metric(gate, "kvroute_offload_base_tokens", site=AWAY) == 1_000

    uvloop.run(run())
    for path in (log, tmp_path / "events.log.1"):
        header, read = read_log(path)
        again = replay(header.spec.build(parse(TEXT)), read)
        assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)
