"""A core whose cluster changes: no booking is lost or doubled, the log replays bit for bit, and the state of instances
that stay is that of a core that was created with the final cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.control.churn_rig import base, engine, join, joining
from tests.control.live_rig import BLOCK_TOKENS, request

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
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
    InputError,
    InstanceDown,
    InstanceUp,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    TransferFinished,
    TransferMeasured,
)

SPEC = ControlSpec(decode="foresight", shadow="netkv", oracle=OracleSpec(self_measured=True))
AGGREGATED = msgspec.structs.replace(SPEC, decode="foresight-joint", parameters={"token_delay_max": NO_BOUND})
"""It lets one instance serve a request."""
ROLES = ("prefill", "decode", "prefill", "decode", "prefill", "decode", "both")
CHAINS = tuple(tuple(range(start, start + 40)) for start in (100, 200, 300))


@dataclass
class Step:
    """How far a request is, and where."""

    source: str = ""
    target: str = ""
    stage: str = "prefill"


class Churn(RuleBasedStateMachine):
    """Random requests on engines that join and leave at random."""

    spec: ClassVar[ControlSpec] = SPEC
    apart_s: ClassVar[float] = 0.0
    """Time before each price that is compared with a new core's, which does not know the prompts of the past."""

    def __init__(self) -> None:
        super().__init__()
        self.control = self.spec.build(base())
        self.log: list[LogRecord] = []
        self.now, self.next, self.uid = 1.0, 0, 0
        self.steps: dict[int, Step] = {}
        self.up: set[str] = set()
        self.stored: dict[str, list[tuple[int, ...]]] = {}

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Give an event to the core and record it."""
        decisions = self.control.handle(event)
        self.log.append(LogRecord(event, decisions))
        return decisions

    @rule(step=st.floats(0.001, 3.0))
    def time_passes(self, step: float) -> None:
        """Events come later."""
        self.now += step

    @rule(slots=st.sets(st.integers(0, 6), min_size=1, max_size=3), prepared=st.booleans())
    def engines_join(self, slots: set[int], prepared: bool) -> None:
        """Engines of free names join; what a thread has prepared makes no difference."""
        free = [slot for slot in sorted(slots) if f"e{slot}" not in self.control.members]
        self.uid += 1
        found = [engine(f"e{k}", ROLES[k], node=k % 4, uid=str(self.uid)) for k in free]  # type: ignore[arg-type]
        joined = joining(self.control, found)
        if prepared:
            self.control.expect(self.control.prepare(joined, ()))
        self.handle(ClusterChanged(self.now, joined))
        self.stored |= {instance.name: [] for instance in found}

    @precondition(lambda self: self.control.members)
    @rule(data=st.data(), replaced=st.booleans())
    def an_engine_leaves(self, data: st.DataObject, replaced: bool) -> None:
        """An engine leaves, or another one replaces it, unless a leg of a request is in progress there."""
        name = data.draw(st.sampled_from(sorted(self.control.members)))
        joined = ()
        if replaced:
            self.uid += 1
            old = self.control.members[name].engine
            found = engine(name, old.role, node=int(old.place.node[-1]), uid=str(self.uid))
            joined = joining_without(self.control, name, found)
        event = ClusterChanged(self.now, joined, (name,))
        busy = any(
            (step.stage == "prefill" and step.source == name) or (step.stage != "prefill" and step.target == name)
            for step in self.steps.values()
        )
        if busy:
            before = self.control.loads(self.now)
            with pytest.raises(InputError, match="cannot leave"):
                self.control.handle(event)
            assert self.control.loads(self.now) == before
            return
        self.handle(event)
        self.up.discard(name)
        self.stored.pop(name)
        for step in self.steps.values():
            step.source = "" if step.source == name else step.source
        if replaced:
            self.stored[name] = []
            load = self.control.loads(self.now)[name]
            assert (load.queued, load.pending_s) == (0, 0.0)
            index = self.control.cluster.index(name)
            assert not any(True for _ in self.control.caches.chains(index))

    @precondition(lambda self: self.control.members)
    @rule(data=st.data(), up=st.booleans())
    def health_changes(self, data: st.DataObject, up: bool) -> None:
        """An engine goes up or down."""
        name = data.draw(st.sampled_from(sorted(self.control.members)))
        self.handle(InstanceUp(self.now, name) if up else InstanceDown(self.now, name))
        (self.up.add if up else self.up.discard)(name)

    @rule(tokens=st.integers(16, 2000), chain=st.sampled_from((*CHAINS, ())))
    def a_request_arrives(self, tokens: int, chain: tuple[int, ...]) -> None:
        """The core chooses a prefill instance that is up."""
        self.next += 1
        step = self.steps[self.next] = Step()
        blocks = chain[: tokens // BLOCK_TOKENS]
        self.follow(self.next, step, self.handle(Arrived(self.now, request(self.next, tokens, 16, blocks=blocks))))

    def follow(self, number: int, step: Step, decisions: tuple[Decision, ...]) -> None:
        """Record where a request goes."""
        for decision in decisions:
            match decision:
                case Prefill(instance=name):
                    assert name in self.up
                    step.source, step.stage = name, "prefill"
                case Decode(source=source, target=target):
                    assert target in self.up
                    step.source, step.target = source, target
                    # Prefill and decode of an instance that does both are over at once.
                    step.stage = "decode" if source != target else "aggregated" if len(decisions) == 1 else "both"
                case Reject():
                    del self.steps[number]

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), what=st.sampled_from(("next", "next", "next", "fail", "end")))
    def a_request_goes_on(self, data: st.DataObject, what: str) -> None:
        """A step of a request ends well or badly, or its client leaves."""
        number = data.draw(st.sampled_from(sorted(self.steps)))
        step = self.steps[number]
        if what == "end":
            self.end(number)
        elif step.stage == "prefill":
            event = PrefillFailed(self.now, number) if what == "fail" else PrefillFinished(self.now, number)
            self.follow(number, step, self.handle(event))
        elif what == "fail" and step.stage in ("decode", "aggregated"):
            self.follow(number, step, self.handle(DecodeFailed(self.now, number)))
        elif step.stage == "aggregated":
            self.handle(Admitted(self.now, number))
            step.stage = "answer"
        elif step.stage == "decode":
            self.handle(TransferFinished(self.now, number))
            if step.source:
                self.handle(TransferMeasured(self.now, step.source, step.target, 3e8, 0.5))
            self.handle(Admitted(self.now, number))
            step.stage = "answer"
        else:
            self.end(number)

    def end(self, number: int) -> None:
        """End a request."""
        del self.steps[number]
        self.handle(Finished(self.now, number, output_tokens=8))

    @precondition(lambda self: self.control.members)
    @rule(data=st.data(), chain=st.sampled_from(CHAINS), length=st.integers(1, 40))
    def a_prefix_is_stored(self, data: st.DataObject, chain: tuple[int, ...], length: int) -> None:
        """An engine reports what it has cached."""
        name = data.draw(st.sampled_from(sorted(self.control.members)))
        self.handle(KvStored(self.now, name, chain[:length], BLOCK_TOKENS))
        self.stored[name].append(chain[:length])

    @rule(share=st.floats(0.0, 0.9))
    def the_network_is_measured(self, share: float) -> None:
        """Other traffic uses a share of some tiers."""
        self.handle(CongestionMeasured(self.now, (0.0, 0.0, share, share / 2, 0.0)))

    @invariant()
    def each_booking_counts_once(self) -> None:
        """The core counts exactly the requests that are in flight, on the instances where they are."""
        assert self.control.in_flight == len(self.steps)
        queued = dict.fromkeys(self.control.members, 0)
        for step in self.steps.values():
            if step.stage in ("prefill", "both"):
                queued[step.source] += 1
            if step.stage in ("decode", "aggregated", "both"):
                queued[step.target] += 1
        assert {name: load.queued for name, load in self.control.loads(self.now).items()} == queued

    def teardown(self) -> None:
        """After the last request all load is gone, and the log gives the same decisions again."""
        for number in sorted(self.steps):
            self.end(number)
        assert not any(load.queued or load.pending_s for load in self.control.loads(self.now).values())
        records = replay(self.spec.build(base()), self.log)
        assert all(decisions_equal(record.decisions, again) for record, again in records)
        self.prices_are_those_of_a_new_core()

    def prices_are_those_of_a_new_core(self) -> None:
        """A core that starts with the final cluster and learns what is known prices every candidate equally."""
        new = self.spec.build(base())
        new.handle(ClusterChanged(self.now, tuple(self.control.members[name] for name in sorted(self.control.members))))
        congestion = [r.event for r in self.log if isinstance(r.event, CongestionMeasured)]
        known = self.control.knowledge(self.now)
        events: list[Event] = [*congestion[-1:], *(InstanceUp(self.now, name) for name in sorted(self.up)), *known]
        for name, chains in self.stored.items():
            events += [KvStored(self.now, name, blocks, BLOCK_TOKENS) for blocks in chains]
        for event in events:
            new.handle(event)
        for chain in CHAINS:
            self.now += self.apart_s
            asked = Arrived(self.now, request(10**6, 640, 16, blocks=chain))
            ours, theirs = (self.first(control, asked) for control in (self.control, new))
            assert [type(decision) for decision in ours] == [type(decision) for decision in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_terms(mine, other)

    @staticmethod
    def first(control: Control, asked: Arrived) -> list[Any]:
        """Return the decisions for a request that then leaves."""
        decisions = list(control.handle(asked))
        if not isinstance(decisions[-1], Reject):
            if isinstance(decisions[-1], Prefill):
                decisions += control.handle(PrefillFinished(asked.at, asked.request.id))
            if not isinstance(decisions[-1], Reject):
                control.handle(Finished(asked.at, asked.request.id))
        return decisions


def joining_without(control: Control, name: str, found: Any) -> Any:
    """Return how an engine joins that replaces the one of this name."""
    (member,) = (joined for joined in control.members.values() if joined.engine.name == name)
    return (type(member)(found, member.gpus),)


def assert_same_terms(mine: Any, other: Any) -> None:
    """Assert that two decisions priced the same candidates equally. Ties may be decided in turn."""
    if mine.terms is None or other.terms is None:
        assert mine.terms is other.terms
        return
    assert mine.terms.names == other.terms.names
    np.testing.assert_array_equal(mine.terms.feasible, other.terms.feasible)
    able = mine.terms.feasible
    np.testing.assert_allclose(mine.terms.cost[able], other.terms.cost[able], rtol=1e-9)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_request_outlives_its_prefill_instance(ends: str) -> None:
    """Its decode instance may have the KV cache already; if not, the request begins again on the engines that are
    left."""
    control = SPEC.build(base())
    join(control, 0.0, engine("p0", "prefill"), engine("d0", node=2))
    assert isinstance(control.handle(Arrived(1.0, request(1, 640, 16)))[0], Prefill)
    assert isinstance(control.handle(PrefillFinished(1.1, 1))[0], Decode)
    join(control, 1.2, engine("a0", "prefill", uid="2"), engine("a1", uid="2", node=1))
    control.handle(ClusterChanged(1.3, (), ("p0",)))
    if ends == "well":
        assert control.handle(TransferFinished(1.4, 1)) == ()
        control.handle(Admitted(1.5, 1))
    else:
        (again,) = control.handle(DecodeFailed(1.4, 1))
        assert isinstance(again, Prefill)
        assert again.instance == "a0"
        (decode,) = control.handle(PrefillFinished(1.5, 1))
        assert isinstance(decode, Decode)
        assert (decode.source, decode.target) == ("a0", "a1")
    control.handle(Finished(1.6, 1))
    assert not any(load.queued or load.pending_s for load in control.loads(2.0).values())


Churn.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestChurn = Churn.TestCase


class ChurnAggregated(Churn):
    """The same where one instance may serve a request."""

    spec: ClassVar[ControlSpec] = AGGREGATED
    apart_s: ClassVar[float] = 1e5


ChurnAggregated.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestChurnAggregated = ChurnAggregated.TestCase
