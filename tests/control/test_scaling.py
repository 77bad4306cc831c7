"""Autoscaling in the core: demand from events, desired numbers, and which instances start, stop and switch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.live_rig import cluster_of, request

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
from kvroute.control.log.entries import decode_record, encode
from kvroute.control.scaling.demand import DemandWindow
from kvroute.policies.fleet.autoscaling import Manages, ScalingSpec
from kvroute.policies.fleet.replicas import ReplicaBounds, ReplicaTarget
from kvroute.types import (
    Admitted,
    Arrived,
    ClusterChanged,
    Decision,
    Decode,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceUp,
    PeerBooking,
    PeerReport,
    PeerReported,
    Prefill,
    PrefillFinished,
    Replicas,
    RoleSwitched,
    ScaleEnded,
    ScaleIn,
    ScaleOut,
    ScalingDue,
    SwitchRole,
    TransferFinished,
)

NAMES = ("vp0a", "vp0b", "vp0c", "vd1a", "vd1b", "vd1c")


def spec(manages: Manages = "instances", startup_s: float = 10.0) -> ControlSpec:
    """Return a core's settings with quick periods; a prefill of 1,000 tokens takes 0.11 s."""
    scaling = ScalingSpec(
        target=ReplicaTarget(ttft_s=2.0, attainment=0.9),
        manages=manages,
        window_s=80.0,
        startup_s=startup_s,
        scale_in_s=60.0,
    )
    return ControlSpec(decode="round-robin", overcommit=True, scaling=scaling)


class Driver:
    """Plays whole requests on a core, with a log of all events."""

    def __init__(self, core: Control) -> None:
        self.core, self.now, self.records = core, 0.0, list[LogRecord]()
        self._number = 0

    def send(self, event: Event) -> tuple[Decision, ...]:
        """Handle an event and record it."""
        decisions = self.core.handle(event)
        self.records.append(LogRecord(event, decisions))
        return decisions

    def play(self, rate_per_s: float, seconds: float, every_s: float = 15.0) -> list[Decision]:
        """Play requests at a constant rate; return the decisions of all reviews."""
        found: list[Decision] = []
        due, end = self.now + every_s, self.now + seconds
        while self.now < end:
            self.now += 1.0 / rate_per_s
            self._request()
            if self.now >= due:
                found += self.send(ScalingDue(self.now))
                due += every_s
        return found

    def _request(self) -> None:
        self._number += 1
        number, at = self._number, self.now
        decisions = self.send(Arrived(at, request(number)))
        assert isinstance(decisions[0], Prefill), decisions
        (decode,) = self.send(PrefillFinished(at, number))
        assert isinstance(decode, Decode)
        self.send(TransferFinished(at, number))
        self.send(Admitted(at, number))
        self.send(Finished(at, number, output_tokens=20))


def desired(decisions: list[Decision]) -> list[tuple[int, int]]:
    """Return the desired numbers of prefill and decode instances."""
    return [(decision.prefill, decision.decode) for decision in decisions if isinstance(decision, Replicas)]


def test_a_constant_rate_ends_at_one_number_and_stays_there() -> None:
    driver = Driver(spec("nothing").build(cluster_of(*NAMES)))
    numbers = desired(driver.play(5.0, 600.0))
    assert numbers[0] == (3, 3)  # what is there at the start is kept for a while
    assert len(set(numbers[-30:])) == 1
    assert numbers[-1][0] in (1, 2)


def test_a_rising_rate_adds_instances_at_once_and_a_falling_one_takes_them_away_later() -> None:
    driver = Driver(spec("nothing").build(cluster_of(*NAMES)))
    before = desired(driver.play(2.0, 300.0))[-1]
    rising = desired(driver.play(40.0, 60.0))
    assert rising[-1][0] > before[0] + 3
    falling = desired(driver.play(2.0, 300.0))
    assert falling[0] == rising[-1] or falling[0][0] >= rising[-1][0]
    assert falling[-1] == before


def test_idle_instances_stop_and_start_again_under_load() -> None:
    driver = Driver(spec().build(cluster_of(*NAMES)))
    found = driver.play(2.0, 200.0)
    stopping = [decision for decision in found if isinstance(decision, ScaleIn)]
    assert {decision.instance[1] for decision in stopping} == {"p", "d"}
    assert len({decision.instance for decision in stopping}) == len(stopping)
    for decision in stopping:
        driver.send(InstanceDown(driver.now, decision.instance))
        driver.send(ScaleEnded(driver.now, decision.instance, serves=False))
    starting = [decision for decision in driver.play(12.0, 100.0) if isinstance(decision, ScaleOut)]
    named = {decision.instance for decision in starting if decision.instance}
    assert named <= {decision.instance for decision in stopping}
    assert named
    for name in sorted(named):
        driver.send(ScaleEnded(driver.now, name, serves=True))
        driver.send(InstanceUp(driver.now, name))
    assert not driver.core.scaling.stopped & named  # type: ignore[union-attr]


def test_more_instances_than_exist_are_ordered_without_a_name_once_for_each_number() -> None:
    driver = Driver(spec(startup_s=600.0).build(cluster_of("vp0a", "vd1a")))
    found = driver.play(20.0, 120.0)
    orders = [decision for decision in found if isinstance(decision, ScaleOut)]
    assert orders
    assert all(decision.instance == "" for decision in orders)
    assert len({(decision.role, decision.replicas) for decision in orders}) == len(orders)


def test_the_role_that_lacks_instances_gets_one_of_the_other() -> None:
    names = ("vp0a", "vd1a", "vd1b", "vd1c")
    cluster = cluster_of(*names, **dict.fromkeys(names, "batch_max: 64"))
    driver = Driver(spec("roles").build(cluster))
    (switch,) = [decision for decision in driver.play(14.0, 60.0) if isinstance(decision, SwitchRole)]
    assert switch.role == "prefill"
    assert driver.core.roles == {}
    driver.send(RoleSwitched(driver.now, switch.instance, "prefill"))
    assert driver.core.roles == {switch.instance: "prefill"}
    last = driver.play(14.0, 15.0)
    assert [decision.serving for decision in last if isinstance(decision, Replicas)] == [(2, 2)]


def test_a_log_with_scaling_replays_bit_for_bit() -> None:
    cluster = cluster_of(*NAMES)
    driver = Driver(spec().build(cluster))
    driver.play(3.0, 120.0)
    driver.play(30.0, 60.0)
    records = [decode_record(encode(record)) for record in driver.records]
    assert any(isinstance(decision, ScaleIn | ScaleOut) for record in records for decision in record.decisions)
    assert all(decisions_equal(record.decisions, again) for record, again in replay(spec().build(cluster), records))


def test_requests_of_other_gateways_count() -> None:
    alone, both = (Driver(spec("nothing").build(cluster_of(*NAMES))) for _ in range(2))
    both.send(PeerReported(0.0, PeerReport("other", 1, 0.0, whole=True)))
    sequence = 1
    for _ in range(20):
        alone.play(10.0, 5.0)
        both.play(10.0, 5.0)
        sequence += 1
        ids = range(sequence * 100, sequence * 100 + 50)
        booked = tuple(PeerBooking(number, prefill="vp0a", prefill_s=0.1) for number in ids)
        both.send(PeerReported(both.now, PeerReport("other", sequence, both.now, booked)))
        sequence += 1
        ended = tuple(PeerBooking(number) for number in ids)
        both.send(PeerReported(both.now, PeerReport("other", sequence, both.now, ended)))
    rates = [driver.play(10.0, 16.0) for driver in (alone, both)]
    own, total = (next(decision.rate_per_s for decision in rate if isinstance(decision, Replicas)) for rate in rates)
    assert total > 1.5 * own


def test_requests_that_wait_for_admission_count_as_backlog() -> None:
    driver = Driver(spec("nothing").build(cluster_of(*NAMES)))
    driver.play(2.0, 100.0)
    (calm,) = driver.send(ScalingDue(driver.now))
    (busy,) = driver.send(ScalingDue(driver.now, queued=2_000))
    assert isinstance(calm, Replicas)
    assert isinstance(busy, Replicas)
    assert busy.needed[0] > calm.needed[0]
    assert "backlog" in busy.reasons


def test_a_core_without_autoscaling_ignores_its_events() -> None:
    core = ControlSpec(decode="round-robin").build(cluster_of(*NAMES))
    assert core.handle(ScalingDue(0.0)) == ()
    assert core.handle(ScaleEnded(0.0, "vp0a", serves=False)) == ()
    with pytest.raises(InputError, match="vp9z"):
        core.handle(ScaleEnded(0.0, "vp9z", serves=False))
    assert core.handle(ClusterChanged(0.0)) == ()


def test_an_engine_with_the_name_of_a_stopped_one_is_another_engine() -> None:
    core = spec().build(cluster_of(*NAMES))
    core.handle(ScaleEnded(0.0, "vp0a", serves=False))
    assert core.scaling is not None
    assert core.scaling.stopped == {"vp0a"}
    core.scaling.changed(1.0, core.parts.view, ["vp0a"])
    assert core.scaling.stopped == frozenset()


def test_an_idle_cluster_keeps_the_least_number() -> None:
    bounds = ReplicaTarget(prefill=ReplicaBounds(least=2), decode=ReplicaBounds(least=1))
    settings = spec("nothing")
    assert settings.scaling is not None
    quick = msgspec.structs.replace(settings.scaling, target=bounds, scale_in_s=0.0)
    core = msgspec.structs.replace(settings, scaling=quick).build(cluster_of(*NAMES))
    (first,) = core.handle(ScalingDue(0.0))
    (later,) = core.handle(ScalingDue(1.0))
    assert isinstance(first, Replicas)
    assert isinstance(later, Replicas)
    assert (later.prefill, later.decode) == (2, 1)


@given(st.floats(0.2, 40.0), st.floats(40.0, 400.0))
def test_a_constant_rate_is_measured_as_it_is(rate_per_s: float, seconds: float) -> None:
    window = DemandWindow(80.0)
    times = np.arange(0.0, seconds, 1.0 / rate_per_s)
    for at in times.tolist():
        window.arrived(at, 0.25, 1_000, 1e8)
    found = window.demand(seconds, 60.0, 0.0)
    assert found is not None
    assert found.rate_per_s == pytest.approx(rate_per_s, rel=0.25, abs=2.0 / 10.0)
    assert found.service_s.tolist() == pytest.approx([0.25])
    assert found.arrival_cv2 == pytest.approx(1.0)


def test_a_rise_is_extrapolated_over_the_start_up_time_and_a_fall_is_not() -> None:
    rising, falling = DemandWindow(80.0), DemandWindow(80.0)
    for window, rates in ((rising, range(10, 90)), (falling, range(90, 10, -1))):
        for second, rate in enumerate(rates):
            for k in range(rate):
                window.arrived(second + k / rate, 0.1, 100, 1e6)
    up, down = rising.demand(80.0, 60.0, 0.0), falling.demand(80.0, 60.0, 0.0)
    assert up is not None
    assert down is not None
    assert 120.0 < up.rate_per_s < 155.0
    assert 45.0 < down.rate_per_s <= 51.0


def test_bursts_raise_the_variation_of_arrivals() -> None:
    window = DemandWindow(300.0)
    for batch in range(100):
        for _ in range(10):
            window.arrived(3.0 * batch, 0.1, 100, 1e6)
    found = window.demand(300.0, 0.0, 0.0)
    assert found is not None
    assert 8.0 < found.arrival_cv2 < 10.5
