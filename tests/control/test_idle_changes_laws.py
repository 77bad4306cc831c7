"""Engines that join and leave without serving a request change no decision: a core with such changes and one without
them decide alike, with requests, transfers, slow starts and learned bandwidths in progress."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.churn_rig import base, engine, joining
from tests.control.live_rig import BLOCK_TOKENS, request

from kvroute.control import Control, ControlSpec
from kvroute.oracle import OracleSpec
from kvroute.policies import NO_BOUND
from kvroute.types import (
    Admitted,
    Arrived,
    ClusterChanged,
    CongestionMeasured,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvStored,
    LinksMeasured,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Role,
    TransferFinished,
    TransferMeasured,
)

SPECS = (
    ControlSpec(
        decode="foresight",
        shadow="netkv",
        slow_start_s=4.0,
        oracle=OracleSpec(self_measured=True, stale_after_s=20.0),
    ),
    ControlSpec(decode="netkv", overcommit=True, slow_start_s=4.0, oracle=OracleSpec(self_measured=True)),
    ControlSpec(decode="round-robin", prefill="round-robin"),
    ControlSpec(decode="foresight-joint", parameters={"token_delay_max": NO_BOUND}, slow_start_s=4.0),
)
SERVING: tuple[tuple[str, Role, int], ...] = (
    ("b1", "prefill", 0),
    ("b2", "decode", 0),
    ("d1", "prefill", 1),
    ("d2", "decode", 2),
    ("f1", "prefill", 3),
    ("f2", "decode", 3),
)
NAMES = tuple(name for name, _, _ in SERVING)
CHAIN = tuple(range(100, 160))
IDLE = st.tuples(st.sampled_from("aceg"), st.sampled_from(("prefill", "decode")), st.integers(0, 4))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.lists(IDLE, min_size=1, max_size=4, unique_by=lambda idle: idle[0])),
        st.tuples(st.just("change"), st.just([])),
        st.tuples(st.just("arrive"), st.integers(16, 3000)),
        st.tuples(st.just("arrive"), st.integers(16, 3000)),
        st.tuples(st.just("go on"), st.integers(0, 30)),
        st.tuples(st.just("go on"), st.integers(0, 30)),
        st.tuples(st.just("fail"), st.integers(0, 30)),
        st.tuples(st.just("down"), st.sampled_from(NAMES)),
        st.tuples(st.just("up"), st.sampled_from(NAMES)),
        st.tuples(st.just("others"), st.tuples(st.sampled_from(NAMES), st.integers(0, 4))),
        st.tuples(st.just("stored"), st.tuples(st.sampled_from(NAMES), st.integers(1, 60))),
        st.tuples(st.just("congestion"), st.floats(0, 0.9)),
        st.tuples(st.just("wait"), st.floats(0.001, 8)),
    ),
    max_size=45,
)


class Twins:
    """Two cores that get the same events, except that only the first one gets idle engines."""

    def __init__(self, spec: ControlSpec) -> None:
        self.cores = spec.build(base()), spec.build(base())
        self.now, self.next, self.uid = 1.0, 0, 0
        self.stage: dict[int, str] = {}
        self.route: dict[int, tuple[str, str]] = {}
        for core in self.cores:
            core.handle(ClusterChanged(0.0, joining(core, [engine(name, role, node) for name, role, node in SERVING])))
        for name in NAMES:
            self.both(InstanceUp(0.0, name))

    def both(self, event: Event) -> tuple[Decision, ...]:
        """Give an event to both cores and compare their decisions."""
        changed, plain = (core.handle(event) for core in self.cores)
        assert [type(decision) for decision in changed] == [type(decision) for decision in plain]
        for first, other in zip(changed, plain, strict=True):
            assert_equal(first, other)
        return plain

    def change(self, idle: list[tuple[str, Role, int]]) -> None:
        """Replace all idle engines of the first core."""
        core = self.cores[0]
        left = tuple(sorted(core.members.keys() - set(NAMES)))
        core.handle(ClusterChanged(self.now, (), left))
        self.uid += 1
        found = [engine(f"{name}{node}", role, node, uid=str(self.uid)) for name, role, node in idle]
        core.handle(ClusterChanged(self.now, joining(core, found)))

    def arrive(self, tokens: int) -> None:
        """Send a request to both."""
        self.next += 1
        blocks = CHAIN[: tokens // BLOCK_TOKENS]
        self.follow(self.next, self.both(Arrived(self.now, request(self.next, tokens, 16, blocks=blocks))))

    def follow(self, number: int, decisions: tuple[Decision, ...]) -> None:
        """Record where a request is."""
        for decision in decisions:
            match decision:
                case Prefill():
                    self.stage[number] = "prefill"
                case Decode(source=source, target=target) if source == target:
                    self.stage[number] = "aggregated" if len(decisions) == 1 else "kept"
                case Decode(source=source, target=target):
                    self.stage[number], self.route[number] = "decode", (source, target)
                case Reject():
                    self.stage.pop(number, None)

    def go_on(self, pick: int, fail: bool) -> None:
        """Let one request take its next step."""
        if not self.stage:
            return
        number = sorted(self.stage)[pick % len(self.stage)]
        match self.stage[number]:
            case "prefill":
                event = PrefillFailed(self.now, number) if fail else PrefillFinished(self.now, number)
                self.follow(number, self.both(event))
            case "kept":
                self.both(PrefillFinished(self.now, number))
                self.stage[number] = "aggregated"
            case "aggregated" if fail:
                self.follow(number, self.both(DecodeFailed(self.now, number, kv_lost=True)))
            case "aggregated":
                self.both(Admitted(self.now, number))
                self.stage[number] = "answer"
            case "decode":
                self.both(TransferFinished(self.now, number))
                self.both(TransferMeasured(self.now, *self.route[number], 2e8, 0.3 + pick / 100))
                self.both(Admitted(self.now, number))
                self.stage[number] = "answer"
            case _:
                del self.stage[number]
                self.both(Finished(self.now, number, output_tokens=9))


def assert_equal(one: Any, other: Any) -> None:
    """Assert that both decisions choose the same, for the same cost of each candidate that both have."""
    if isinstance(other, Reject):
        return
    chosen = "target" if isinstance(other, Decode) else "instance"
    assert getattr(one, chosen) == getattr(other, chosen)
    if isinstance(other, Decode):
        assert one.kv_bytes == other.kv_bytes
        assert (one.shadow.target if one.shadow else "") == (other.shadow.target if other.shadow else "")
    if other.terms is None:
        return
    cost = dict(zip(one.terms.names, one.terms.cost.tolist(), strict=True))
    able = dict(zip(one.terms.names, one.terms.feasible.tolist(), strict=True))
    assert [able.get(name) for name in other.terms.names] == other.terms.feasible.tolist()
    ours = [cost[name] for name in other.terms.names if able[name]]
    np.testing.assert_allclose(ours, other.terms.cost[other.terms.feasible], rtol=1e-9)
    assert not any(able[name] for name in set(able) - set(other.terms.names))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.decode)
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_engines_that_never_serve_change_no_decision(spec: ControlSpec, steps: list[tuple[str, Any]]) -> None:
    """Whatever is in progress at a change."""
    twins = Twins(spec)
    for what, value in steps:
        match what:
            case "change":
                twins.change(value)
            case "arrive":
                twins.arrive(value)
            case "go on" | "fail":
                twins.go_on(value, what == "fail")
            case "down":
                twins.both(InstanceDown(twins.now, value))
            case "up":
                twins.both(InstanceUp(twins.now, value, returned=True))
            case "others":
                twins.both(InstanceMeasured(twins.now, value[0], value[1], value[1], 0.1 * value[1]))
            case "stored":
                twins.both(KvStored(twins.now, value[0], CHAIN[: value[1]], BLOCK_TOKENS))
            case "congestion":
                twins.both(CongestionMeasured(twins.now, (0.0, 0.0, value, value / 2, 0.0)))
            case _:
                twins.now += value
    for number in sorted(twins.stage):
        twins.both(Finished(twins.now, number))
    loads = [core.loads(twins.now) for core in twins.cores]
    assert {name: loads[0][name] for name in NAMES} == loads[1]


def test_slow_start_continues_after_a_change() -> None:
    """An instance that has just returned gets a tenth of its share, also after another engine has joined before it."""
    twins = Twins(SPECS[0])
    twins.both(InstanceDown(1.0, "f1"))
    twins.both(InstanceUp(1.0, "f1", returned=True))
    twins.change([("a", "prefill", 0)])
    for _ in range(12):
        twins.arrive(3000)


@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: spec.decode)
def test_transfers_in_flight_continue_on_their_links(spec: ControlSpec) -> None:
    """They slow new ones down as before, although the numbers of the links have changed, and free their links at the
    end."""
    twins = Twins(spec)
    for round_of_ten in range(3):
        for _ in range(10):
            twins.arrive(3000)
        for number in list(twins.stage)[-10:]:
            twins.follow(number, twins.both(PrefillFinished(twins.now, number)))
        twins.now += 0.01
        twins.change([("a", "prefill", 4), ("c", "decode", 0)] if round_of_ten != 1 else [])
        twins.now += 0.05
    for number in list(twins.stage)[:15]:
        twins.both(TransferFinished(twins.now, number))
    for _ in range(10):
        twins.arrive(2000)
    for number in list(twins.stage)[-10:]:
        twins.follow(number, twins.both(PrefillFinished(twins.now, number)))


def measured(core: Control, busy: str) -> None:
    """Report that the uplinks of one rack are busy."""
    core.handle(
        LinksMeasured(
            2.0, tuple(0.9 if busy in link.name and "to" in link.name else 0.0 for link in core.cluster.links)
        )
    )


def test_telemetry_by_link_follows_the_links() -> None:
    """A measurement counts for the same links after a change, although their numbers change."""
    twins = Twins(ControlSpec())
    for core in twins.cores:
        measured(core, "rack1")
    twins.change([("a", "prefill", 4)])
    changed, plain = twins.cores
    for source in NAMES[::2]:
        rates = [
            core.oracle.residual_bytes_per_s(
                core.cluster.index(source), np.array([core.cluster.index(name) for name in NAMES[1::2]]), 2.0
            )
            for core in (changed, plain)
        ]
        np.testing.assert_array_equal(rates[0], rates[1])
