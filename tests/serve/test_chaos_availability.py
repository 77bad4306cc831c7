"""Chaos tests of availability: all health checks fail at once, the event loop stalls; requests continue.

The event log replays to the same decisions, panics included.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import uvloop
from tests.serve.rig import Rig, rig
from tests.serve.test_chaos import (
    NAMES,
    TEXT,
    LoadGenerator,
    check_replay,
    expected_responses,
    metric_lines,
)
from tests.waiting import becomes_true

from kvroute.control.log import read_log
from kvroute.types import InstanceUp

FEW = "  health: {interval: 50 ms, timeout: 10 s, failures: 2%s}\n"


async def checks_fail(gate: Rig, share: int) -> None:
    """Let this share of the health checks of all engines fail from now on, while requests are served."""
    for name in NAMES:
        await gate.command(name, leg="health", share=share, status=503)


def panics(gate: Rig) -> list[str]:
    """Return the samples of the panic gauge."""
    return sorted(line.rsplit("role=", 1)[1] for line in metric_lines(gate, "kvroute_panic{"))


def test_if_all_health_checks_fail_no_request_is_rejected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engines work, so requests continue. The panic ends once the checks pass again. The log warns at the beginning
    of the panic and not at its end."""
    log = tmp_path / "events.log"
    caplog.set_level("INFO", logger="kvroute")

    async def run() -> None:
        async with rig(FEW % "" + f"  log: {{events: {log}}}\n", TEXT) as gate:
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(11))
            healthy = [gate.gateway.runtime.engines[name].availability for name in NAMES]
            await generator.send(requests=5, clients=2)
            await checks_fail(gate, 1)
            while any(availability.healthy for availability in healthy):
                await generator.send(requests=12, clients=4)
            await generator.send(requests=40, clients=8)
            assert set(generator.outcomes) == {"complete"}, generator.outcomes
            assert panics(gate) == ['"decode"} 1', '"prefill"} 1']
            assert all(line.endswith(" 1") for line in metric_lines(gate, "kvroute_panics_total{"))
            assert gate.gateway.ready() == ""
            assert gate.gateway.state.tick(gate.gateway.now()).load.panics[0].active
            await checks_fail(gate, 0)
            assert await becomes_true(lambda: panics(gate) == ['"decode"} 0', '"prefill"} 0'], poll_s=0.1)
            await generator.send(requests=12, clients=4)
            assert set(generator.outcomes) == {"complete"}, generator.outcomes
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    assert check_replay(log)["InstanceUp"] > 0
    levels = {record.message: record.levelname for record in caplog.records if record.message.startswith("panic_")}
    assert levels == {"panic_started": "WARNING", "panic_ended": "INFO"}


def test_without_the_panic_threshold_requests_are_rejected() -> None:
    """Shows what the panic threshold prevents, and that it can be turned off."""

    async def run() -> None:
        async with rig(FEW % ", panic: 0", TEXT) as gate:
            await checks_fail(gate, 1)
            for name in NAMES:
                assert await gate.becomes(name, False)
            assert (await gate.ask()).status == 503
            assert gate.gateway.ready() != ""

    uvloop.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_instances_without_a_process_get_no_request_in_a_panic(role: str) -> None:
    """Two of three processes are gone: the third one serves everything, and no dead instance is tried again."""

    async def run() -> None:
        async with rig(FEW % "", TEXT) as gate:
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(12))
            await generator.send(requests=5, clients=2)
            stopped = [f"{role}{number}" for number in range(2)]
            for name in stopped:
                gate.fleet.servers[name].restart(1e4)
            for name in stopped:
                assert await gate.becomes(name, False)
            retries = metric_lines(gate, "kvroute_retries_total")
            await generator.send(requests=30, clients=4)
            assert set(generator.outcomes) == {"complete"}, generator.outcomes
            assert metric_lines(gate, "kvroute_retries_total") == retries
            assert panics(gate) == ['"decode"} 0', '"prefill"} 0']

    uvloop.run(run())


def test_a_stalled_event_loop_marks_no_engine_as_down() -> None:
    """Every timeout is shorter than the stalls and one failure marks an instance as down, yet no instance goes down."""

    async def run() -> None:
        section = """
  timeouts: {connect: 1 s, prefill: 1 s, first_token: 1 s, answer: 1 s, between_tokens: 1 s}
  health: {interval: 20 ms, timeout: 1 s, failures: 1, panic: 0}
  breaker: {failures: 1, open: 1 h}
"""
        async with rig(section, TEXT) as gate:
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(13))

            def stall(ended: int) -> None:
                if ended in (10, 25):
                    until_s = time.monotonic() + 1.5
                    while time.monotonic() < until_s:
                        pass

            generator.on_request_end = stall
            await generator.send(requests=40, clients=6)
            assert set(generator.outcomes) == {"complete"}, generator.outcomes
            availabilities = [gate.gateway.runtime.engines[name].availability for name in NAMES]
            assert all(
                availability.healthy and availability.breaker.state(gate.gateway.now()) == "closed"
                for availability in availabilities
            )
            assert not metric_lines(gate, "kvroute_leg_failures_total{")
            lag = float(metric_lines(gate, "kvroute_event_loop_lag_seconds_sum")[0].split()[1])
            assert lag > 2.5

    uvloop.run(run())


def test_recovered_engines_get_a_slow_start_and_the_log_replays(tmp_path: Path) -> None:
    """One engine of each role restarts repeatedly: every response is complete, and each return begins a slow start."""
    log = tmp_path / "events.log"

    async def run() -> None:
        section = (
            f"  health: {{interval: 20 ms, timeout: 10 s, failures: 1, slow_start: 1 s}}\n  log: {{events: {log}}}\n"
        )
        async with rig(section, TEXT) as gate:
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(14))
            for name in ("prefill0", "decode0", "decode1"):
                gate.fleet.servers[name].restart(1e4)
                assert await gate.becomes(name, False)
                await generator.send(requests=10, clients=5)
                await gate.fleet.servers[name].come_back()
                assert await gate.becomes(name, True)
                await generator.send(requests=20, clients=5)
            assert set(generator.outcomes) <= {"complete", "incomplete"}, generator.outcomes
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    assert check_replay(log)["InstanceUp"] >= 3
    header, records = read_log(log)
    assert header.spec.slow_start_s == 1.0
    ups = [record.event for record in records if isinstance(record.event, InstanceUp)]
    assert all(event.returned for event in ups)
