"""The core under random live histories: legs fail, instances go down and up, other routers share them, and one cluster
has several protocols. All resources that requests held are released, and every decision names an instance that can
serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.control.live_rig import BLOCK_TOKENS, TOKEN_BYTES, cluster_of, request

from kvroute.control import Control, ControlSpec, LogRecord, decisions_equal, replay
from kvroute.types import (
    SAME_RACK,
    Admitted,
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Event,
    Finished,
    InputError,
    Instance,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    KvCleared,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Request,
    Served,
    TransferFinished,
)

CHAIN = (11, 12, 13, 14)
UNITS_S = 1e-9


MIXED = cluster_of(
    *("vp0", "vp1", "vd0", "vd0b", "vd1", "sp0", "sp1", "sd0", "sd1", "mp1", "md0", "md1", "vb0", "sb1"),
    vd1="kv_capacity: 5 GB",
    sd1="kv_capacity: 6 GB",
    md0="kv_capacity: 3 GB",
)
PLACE = {instance.name: instance for instance in MIXED.instances}
NAMES = tuple(PLACE)


@dataclass
class RequestState:
    """The state of a request in flight, as the test tracks it."""

    request: Request
    prefill: str = ""
    """Instance where its prefill is booked. Empty: the prefill is over, or there is none."""
    booked_s: float = 0.0
    source: str = ""
    target: str = ""
    """Instance where its decode is booked."""
    crossing: bool = False
    admitted: bool = False
    failed: list[str] = field(default_factory=list)
    """Instances that failed the request, the latest one last."""
    only: tuple[str, ...] | None = None
    """Instances that may serve it; None: all."""
    both_on_arrival: bool = False
    """Both legs are chosen on arrival."""

    def fails(self, name: str) -> None:
        """Record a failure of this instance."""
        self.failed = [other for other in self.failed if other != name] + [name]

    def allows(self, able: list[str]) -> list[str]:
        """Return those of `able` that have not failed the request; if all have, the one that failed first."""
        able = [name for name in able if self.only is None or name in self.only]
        rounds = ([name for name in able if name not in self.failed[k:]] for k in range(len(self.failed) + 1))
        return next(filter(None, rounds), [])


@dataclass
class Others:
    """Requests of other routers on an instance, derived from its measured load."""

    prefills: int = 0
    batch: int = 0
    queued: int = 0
    kv_bytes: float = 0.0


class Histories(RuleBasedStateMachine):
    """Random histories against a model that counts. A second core receives all events except the impossible ones and
    must decide the same."""

    spec: ClassVar[dict[str, Any]] = {}
    inside_only = False
    """True if the KV cache may not leave its rack."""
    learns = False
    """True if the policy learns from transfers, so that it may decide differently from a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.control, self.reference = self.fresh(), self.fresh()
        self.records: list[LogRecord] = []
        self.now = 0.0
        self.states: dict[int, RequestState] = {}
        self.down: set[str] = set()
        self.others = {name: Others() for name in NAMES}
        self.count = 0

    def fresh(self) -> Control:
        """Return a core without any event."""
        return ControlSpec(**{"prefill": "cache-aware", "decode": "netkv", **self.spec}).build(MIXED)

    def notify(self, event: Event) -> tuple[Decision, ...]:
        """Advance the time and pass the event to both cores."""
        self.now += 0.125
        event = msgspec.structs.replace(event, at=self.now)
        decisions = self.control.handle(event)
        assert decisions_equal(decisions, self.reference.handle(event))
        self.records.append(LogRecord(event, decisions))
        return decisions

    # Events

    @rule(
        tokens=st.integers(1, 6_000),
        answer=st.integers(0, 3_000),
        one_leg=st.sampled_from([False, False, False, True]),
        depth=st.integers(0, len(CHAIN)),
        only=st.none() | st.lists(st.sampled_from((*NAMES, "unknown")), max_size=8, unique=True).map(tuple),
        both_on_arrival=st.sampled_from([False, False, True]),
    )
    def arrive(
        self, tokens: int, answer: int, one_leg: bool, depth: int, only: tuple[str, ...] | None, both_on_arrival: bool
    ) -> None:
        """A request arrives, possibly with the instances that may serve it, or with both legs to be chosen."""
        blocks = CHAIN[: min(depth, tokens // BLOCK_TOKENS)]
        state = RequestState(
            request(self.count, tokens, answer, one_leg=one_leg, blocks=blocks),
            only=only,
            both_on_arrival=both_on_arrival,
        )
        self.count += 1
        self.follow(state, self.notify(Arrived(0, state.request, only, both_on_arrival)))

    @precondition(lambda self: self.some_request_with(prefilling))
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        """The decode instance is chosen now, or the transfer to the one chosen before starts."""
        state = self.pick(data, prefilling)
        decisions = self.notify(PrefillFinished(0, state.request.id))
        state.prefill = ""
        if state.target:
            assert decisions == ()
            state.crossing = state.source != state.target
            return
        self.follow(state, decisions)

    @precondition(lambda self: self.some_request_with(prefilling))
    @rule(data=st.data())
    def prefill_fails(self, data: st.DataObject) -> None:
        """The prefill booking is released at once, for any decision that follows."""
        state = self.pick(data, prefilling)
        failed, booked_s = state.prefill, state.booked_s
        before_s = self.control.loads(self.now + 0.125)[failed].pending_s
        decisions = self.notify(PrefillFailed(0, state.request.id))
        state.fails(failed)
        self.clear(state)
        self.follow(state, decisions)
        after_s = before_s - booked_s
        if not any(other.prefill == failed for other in self.states.values() if other is not state):
            after_s = 0.0
        if state.prefill == failed:
            after_s = max(after_s, 0.0) + state.booked_s
        if not any(others.prefills for others in self.others.values()):
            assert self.control.loads(self.now)[failed].pending_s == pytest.approx(max(after_s, 0.0), abs=UNITS_S)

    @precondition(lambda self: self.some_request_with(placed))
    @rule(data=st.data(), kv_lost=st.booleans())
    def decode_fails(self, data: st.DataObject, kv_lost: bool) -> None:
        """The leg fails before its first token. KV that still exists is sent to another instance; otherwise the request
        restarts."""
        state = self.pick(data, placed)
        source, kept = state.source, not kv_lost and self.keeps_kv(state)
        decisions = self.notify(DecodeFailed(0, state.request.id, kv_lost))
        state.fails(state.target)
        self.clear(state)
        self.follow(state, decisions, source if kept else "")

    @precondition(lambda self: self.some_request_with(placed))
    @rule(data=st.data())
    def served_elsewhere(self, data: st.DataObject) -> None:
        """Another instance serves the decode, whatever the state of that instance: what was booked moves there."""
        state = self.pick(data, placed)
        protocol = PLACE[state.target].protocol
        partners = [name for name, place in PLACE.items() if place.role != "prefill" and place.protocol == protocol]
        served = data.draw(st.sampled_from(partners))
        decisions = self.notify(Served(0, state.request.id, served))
        if served == state.target:
            assert decisions == ()
            return
        (decode,) = decisions
        assert isinstance(decode, Decode)
        aggregated = state.source == state.target
        assert (decode.source, decode.target) == (served if aggregated else state.source, served)
        assert decode.kv_bytes == (
            0.0 if aggregated else (state.request.input_tokens - decode.hit_tokens) * TOKEN_BYTES
        )
        state.crossing = not aggregated and not state.prefill and not state.admitted
        if aggregated and state.prefill:
            state.prefill = served if PLACE[served].role == "both" else ""
        state.source, state.target = decode.source, decode.target

    @precondition(lambda self: self.some_request_with(crossing))
    @rule(data=st.data())
    def transfer_finished(self, data: st.DataObject) -> None:
        """The transfer is complete."""
        state = self.pick(data, crossing)
        assert self.notify(TransferFinished(0, state.request.id)) == ()
        state.crossing = False

    @precondition(lambda self: self.some_request_with(waiting))
    @rule(data=st.data())
    def admitted(self, data: st.DataObject) -> None:
        """The first token arrives."""
        state = self.pick(data, waiting)
        assert self.notify(Admitted(0, state.request.id)) == ()
        state.admitted = True

    @precondition(lambda self: bool(self.states))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request completes, fails finally or is cancelled at any step."""
        state = self.pick(data, every_request)
        assert self.notify(Finished(0, state.request.id)) == ()
        del self.states[state.request.id]

    @rule(name=st.sampled_from(NAMES))
    def instance_goes_down(self, name: str) -> None:
        """The instance may already be down, because the gateway may report it twice."""
        assert self.notify(InstanceDown(0, name)) == ()
        self.down.add(name)

    @precondition(lambda self: bool(self.down))
    @rule(data=st.data())
    def instance_comes_up(self, data: st.DataObject) -> None:
        """The instance is up again."""
        name = data.draw(st.sampled_from(sorted(self.down)))
        assert self.notify(InstanceUp(0, name)) == ()
        self.down.discard(name)

    @rule(
        name=st.sampled_from(NAMES),
        running=st.integers(0, 4),
        waits=st.integers(0, 3),
        share=st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]),
    )
    def measured(self, name: str, running: int, waits: int, share: float | None) -> None:
        """An engine reports its load: all load beyond this router's requests belongs to others."""
        assert self.notify(InstanceMeasured(0, name, running, waits, share)) == ()
        instance, others = PLACE[name], self.others[name]
        if instance.role != "decode":
            others.prefills = max(running + waits - self.prefills(name), 0)
        if instance.role != "prefill":
            batch, queued = self.decodes(name)
            beyond = max(running + waits - batch - queued, 0)
            others.batch = min(max(running - batch, 0), beyond)
            others.queued = beyond - others.batch
            if share is not None:
                others.kv_bytes = max(share * instance.kv_capacity_bytes - self.own_bytes(name), 0.0)

    @rule(name=st.sampled_from(NAMES), depth=st.integers(1, len(CHAIN)))
    def stored(self, name: str, depth: int) -> None:
        """An engine reports cached blocks."""
        assert self.notify(KvStored(0, name, CHAIN[:depth])) == ()

    @rule(data=st.data())
    def impossible_event_is_rejected(self, data: st.DataObject) -> None:
        """The event is rejected; the other core, which does not receive it, makes the same later decisions."""
        impossible: list[Event] = [InstanceUp(0, "no-such-instance"), InstanceMeasured(0, "no-such-instance", 1, 1)]
        for number, state in {**self.states, self.count: RequestState(request(self.count))}.items():
            here = number in self.states
            impossible += [Arrived(0, state.request)] if here else [Finished(0, number)]
            if not state.prefill:
                impossible += [PrefillFinished(0, number), PrefillFailed(0, number)]
            if not state.target:
                impossible += [DecodeFailed(0, number), DecodeFailed(0, number, kv_lost=True)]
                impossible.append(Served(0, number, "vd0"))
            if not state.crossing:
                impossible.append(TransferFinished(0, number))
            if not state.target or state.admitted:
                impossible.append(Admitted(0, number))
        event = msgspec.structs.replace(data.draw(st.sampled_from(impossible)), at=self.now)
        with pytest.raises(InputError):
            self.control.handle(event)

    # Conditions on decisions

    def follow(self, state: RequestState, decisions: tuple[Decision, ...], source: str = "") -> None:
        """Record the decisions and check that they are allowed; `source` holds the KV cache already."""
        source = source or (state.source if state.source and not state.prefill and not state.target else "")
        match decisions:
            case (Reject(),):
                self.check_reject(state, source)
                self.states.pop(state.request.id, None)
                return
            case (Prefill() as prefill, *rest):
                assert not source
                assert not state.request.one_leg
                self.check_prefill(state, prefill)
                state.prefill = state.source = prefill.instance
                state.booked_s = 0.010 + 100e-6 * (state.request.input_tokens - prefill.cached_tokens)
                instance = PLACE[prefill.instance]
                assert len(rest) == (state.both_on_arrival or instance.role == "both" or instance.protocol == "sglang")
                for decode in rest:
                    assert isinstance(decode, Decode)
                    self.check_decode(state, decode)
                    assert (decode.target == decode.source) == (instance.role == "both")
                    state.target = decode.target
            case (Decode() as decode,):
                assert decode.source == (decode.target if state.request.one_leg else source)
                self.check_decode(state, decode)
                state.source, state.target = decode.source, decode.target
                state.crossing = decode.source != decode.target
            case _:
                raise AssertionError(decisions)
        self.states[state.request.id] = state

    def check_prefill(self, state: RequestState, prefill: Prefill) -> None:
        """Check that the instance is up and can send its KV cache on, inside its rack if any instance can."""
        assert prefill.instance in state.allows(self.able_to_prefill())

    def check_decode(self, state: RequestState, decode: Decode) -> None:
        """Check that the target is up, uses the source's protocol, and has room; with `overcommit`, room is not
        required."""
        source, target, arrived = PLACE[decode.source], PLACE[decode.target], state.request
        tier = int(MIXED.tier[MIXED.index(source.name), MIXED.index(target.name)])
        assert decode.target not in self.down
        assert decode.tier == tier
        assert decode.need_bytes == (arrived.input_tokens + arrived.max_output_tokens) * TOKEN_BYTES
        overcommits = self.spec.get("overcommit", False)
        if source is target:
            assert decode.kv_bytes == 0.0
            if arrived.one_leg:
                able = [name for name in self.able_aggregated() if overcommits or self.has_room(arrived, name)]
                assert decode.target in state.allows(able)
            else:
                assert source.role == "both"
            return
        assert (target.role, target.protocol) == ("decode", source.protocol)
        assert decode.kv_bytes == (arrived.input_tokens - decode.hit_tokens) * TOKEN_BYTES
        assert decode.target in state.allows(self.targets_of(source))
        assert self.has_room(arrived, decode.target) or overcommits

    def check_reject(self, state: RequestState, source: str) -> None:
        """Check that no instance can serve: none is up, or none of those that are up has room."""
        if state.request.one_leg:
            able = [name for name in self.able_aggregated() if state.only is None or name in state.only]
        elif source:
            able = state.allows(self.targets_of(PLACE[source]))
        else:
            prefill = [PLACE[name] for name in state.allows(self.able_to_prefill())]
            # The core chooses any other prefill instance before it considers decode instances.
            assert all(
                place.role == "prefill" and (state.both_on_arrival or place.protocol == "sglang") for place in prefill
            )
            able = [taker for place in prefill for taker in state.allows(self.targets_of(place))]
        assert not any(self.has_room(state.request, name) for name in able)
        assert not able or not self.spec.get("overcommit")

    def able_to_prefill(self) -> list[str]:
        """Return the instances that are up and have a target for the KV cache; under a constraint those with one
        inside, if any."""
        prefill = [name for name in NAMES if PLACE[name].role != "decode" and name not in self.down]
        served = [name for name in prefill if PLACE[name].role == "both" or self.targets_of(PLACE[name], anywhere=True)]
        if not self.spec.get("constraint"):
            return served
        inside = [name for name in served if PLACE[name].role == "both" or self.targets_of(PLACE[name], inside=True)]
        return inside or served

    def targets_of(self, source: Instance, *, inside: bool = False, anywhere: bool = False) -> list[str]:
        """Return the decode instances that are up and use the protocol of `source`."""
        inside = (inside or self.inside_only) and not anywhere
        return [
            name
            for name, place in PLACE.items()
            if (place.role, place.protocol) == ("decode", source.protocol)
            and name not in self.down
            and (not inside or MIXED.tier[MIXED.index(source.name), MIXED.index(name)] <= SAME_RACK)
        ]

    def able_aggregated(self) -> list[str]:
        """Return the instances that can compute a prompt and its output; SGLang's decode engines cannot."""
        return [
            name
            for name, place in PLACE.items()
            if name not in self.down
            and (place.role == "both" or (place.role == "decode" and place.protocol != "sglang"))
        ]

    def has_room(self, arrived: Request, name: str) -> bool:
        """Return whether the instance has room, by the model."""
        need_bytes = (arrived.input_tokens + arrived.max_output_tokens) * TOKEN_BYTES
        free_bytes = PLACE[name].kv_capacity_bytes - self.own_bytes(name) - self.others[name].kv_bytes
        return need_bytes <= free_bytes

    # Invariants

    @invariant()
    def counts_are_the_models(self) -> None:
        """Requests in flight and the queue of every instance equal the model's."""
        assert self.control.in_flight == len(self.states)
        loads = self.control.loads(self.now)
        for name in NAMES:
            _, queued = self.decodes(name)
            assert loads[name].queued == self.prefills(name) + queued + self.others[name].queued, name
            if not self.prefills(name) and not any(others.prefills for others in self.others.values()):
                assert loads[name].pending_s == 0.0

    @invariant()
    def transfers_in_flight_are_the_models(self) -> None:
        """Transfers by source and tier, as the oracle counts them, equal the model's."""
        for index, name in enumerate(NAMES):
            tiers = [
                int(MIXED.tier[index, MIXED.index(state.target)])
                for state in self.states.values()
                if state.crossing and state.source == name
            ]
            counted = self.control.oracle.costs(index, np.array([index]), self.now).in_flight
            assert counted.tolist() == [min(tiers.count(tier), 16) for tier in range(len(counted))], name

    def teardown(self) -> None:
        """The records replay to the same decisions. When all requests have left and the engines are idle, the core
        decides exactly like a new one, up to the last free byte."""
        for record, again in replay(self.fresh(), self.records):
            assert decisions_equal(record.decisions, again)
        for number in list(self.states):
            self.notify(Finished(0, number))
        for name in NAMES:
            for event in (InstanceUp(0, name), InstanceMeasured(0, name, 0, 0, 0.0), KvCleared(0, name)):
                self.notify(event)
        if self.learns:
            return
        fresh = self.fresh()
        sizes = sorted({int(place.kv_capacity_bytes // TOKEN_BYTES) for place in PLACE.values()})
        for number, tokens in enumerate((1_000, *sizes), start=self.count):
            for one_leg in (False, True):
                arrived = request(number, tokens, one_leg=one_leg)
                steps: list[Event] = [Arrived(self.now, arrived), Finished(self.now, number)]
                if not one_leg:
                    steps.insert(1, PrefillFinished(self.now, number))
                for step in steps:
                    decisions = self.control.handle(step)
                    assert decisions_equal(decisions, fresh.handle(step))
                    if any(isinstance(decision, Reject) for decision in decisions):
                        break

    # Model

    def clear(self, state: RequestState) -> None:
        """Release all bookings of the request."""
        state.prefill = state.source = state.target = ""
        state.crossing = state.admitted = False

    def keeps_kv(self, state: RequestState) -> bool:
        """Return whether its KV cache survives a failed decode leg."""
        return state.source != state.target and PLACE[state.source].protocol != "sglang" and not state.both_on_arrival

    def pick(self, data: st.DataObject, fits: Any) -> RequestState:
        """Draw a request in flight that fits."""
        return self.states[data.draw(st.sampled_from([n for n, state in self.states.items() if fits(state)]))]

    def some_request_with(self, fits: Any) -> bool:
        """Return whether any request fits."""
        return any(fits(state) for state in self.states.values())

    def prefills(self, name: str) -> int:
        """Return the number of this router's prefills on an instance."""
        return sum(state.prefill == name for state in self.states.values())

    def decodes(self, name: str) -> tuple[int, int]:
        """Return how many of this router's requests are in the batch of an instance, and how many are not yet in it."""
        here = [state.admitted for state in self.states.values() if state.target == name]
        return sum(here), len(here) - sum(here)

    def own_bytes(self, name: str) -> float:
        """Return the KV memory that this router's requests hold on an instance, in bytes."""
        held = [state.request for state in self.states.values() if state.target == name]
        return sum(request.input_tokens + request.max_output_tokens for request in held) * TOKEN_BYTES


def every_request(state: RequestState) -> bool:
    """Match every request in flight."""
    return True


def prefilling(state: RequestState) -> bool:
    """Match requests whose prefill is in progress."""
    return bool(state.prefill)


def placed(state: RequestState) -> bool:
    """Match requests whose decode instance is chosen."""
    return bool(state.target)


def crossing(state: RequestState) -> bool:
    """Match requests whose KV cache is being transferred."""
    return state.crossing


def waiting(state: RequestState) -> bool:
    """Match requests that wait for their first token."""
    return bool(state.target) and not state.admitted


class RackHistories(Histories):
    """The KV cache must stay in its rack."""

    spec: ClassVar[dict[str, Any]] = {"constraint": "rack:fail"}
    inside_only = True


class GatewayHistories(Histories):
    """The settings of the gateway: if all instances are full by the core's count, one is chosen nevertheless."""

    spec: ClassVar[dict[str, Any]] = {"constraint": "rack:fallback", "overcommit": True}


class ForesightHistories(Histories):
    """With foresight, which also stores the transfers in flight and what it learned about each tier."""

    spec: ClassVar[dict[str, Any]] = {"decode": "foresight"}
    learns = True


MANY = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestHistories, TestRackHistories, TestGatewayHistories = (
    Histories.TestCase,
    RackHistories.TestCase,
    GatewayHistories.TestCase,
)
TestForesightHistories = ForesightHistories.TestCase
TestHistories.settings = TestRackHistories.settings = TestGatewayHistories.settings = (
    TestForesightHistories.settings
) = MANY
