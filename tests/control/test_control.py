"""The control core: for every history of requests, all resources that they held are released, and every decision can be
replayed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.control import Control, ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.topology import parse
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    Event,
    Finished,
    InputError,
    KvEvicted,
    KvStored,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    Terms,
    TransferFinished,
)

TEXT = """
name: core
pods: [{name: pod0}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node2, rack: rack1, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node3, rack: rack1, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
network: {tier_bandwidth: {pod: 50 Gbps}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 2, kv_capacity: 4 GB}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-1"}
  - {name: p1, role: prefill, gpus: "node1:0-1"}
  - {name: d0, role: decode, gpus: "node0:2-3"}
  - {name: d1, role: decode, gpus: "node2:0-1"}
  - {name: d2, role: decode, gpus: "node3:0-1", kv_capacity: 6 GB, batch_max: 1}
"""
TOKEN_BYTES = 327_680.0
CAPACITY_BYTES = {"d0": 4e9, "d1": 4e9, "d2": 6e9}
BATCH_MAX = {"d0": 2, "d1": 2, "d2": 1}


def core(text: str = TEXT, **spec: Any) -> Control:
    """Return a new core on the cluster above; its decode policy is NetKV, whose terms are known here."""
    return ControlSpec(**{"decode": "netkv", **spec}).build(parse(text))


def request(number: int, tokens: int = 1_000, answer: int = 0, **more: Any) -> Request:
    """Return a request, by default with unknown content."""
    return Request(id=number, input_tokens=tokens, max_output_tokens=answer, **more)


def one(decisions: tuple[Decision, ...]) -> Decision:
    """Return the only decision."""
    (decision,) = decisions
    return decision


def terms_of(decision: Decision) -> Terms:
    """Return the terms of a decision, which must exist."""
    assert decision.terms is not None
    return decision.terms


def placed(control: Control, arrived: Request, at: float = 0.0) -> Decode:
    """Let a request arrive and its prefill finish; return the decode decision."""
    assert isinstance(one(control.handle(Arrived(at, arrived))), Prefill)
    decision = one(control.handle(PrefillFinished(at, arrived.id)))
    assert isinstance(decision, Decode)
    return decision


@dataclass
class RequestState:
    """The state of a request in flight, as the test tracks it."""

    request: Request
    step: str
    source: str
    target: str = ""


class Histories(RuleBasedStateMachine):
    """Random valid request histories against a model that counts; every decode decision must be priced from the model's
    counts."""

    def __init__(self) -> None:
        super().__init__()
        self.control = core()
        self.now = 0.0
        self.states: dict[int, RequestState] = {}
        self.count = 0

    def notify(self, event: Event) -> tuple[Decision, ...]:
        """Advance the time and pass the event to the core."""
        self.now += 0.25
        return self.control.handle(msgspec.structs.replace(event, at=self.now))

    def pick(self, data: st.DataObject, *steps: str) -> int:
        """Draw a request at one of these steps."""
        return data.draw(st.sampled_from([number for number, state in self.states.items() if state.step in steps]))

    def some_request_in(self, *steps: str) -> bool:
        """Return whether a request is at one of these steps."""
        return any(state.step in steps for state in self.states.values())

    @rule(tokens=st.integers(1, 6_000), answer=st.integers(0, 3_000))
    def arrive(self, tokens: int, answer: int) -> None:
        """Every request gets a prefill instance."""
        arrived = request(self.count, tokens, answer)
        self.count += 1
        decision = one(self.notify(Arrived(0, arrived)))
        assert isinstance(decision, Prefill)
        assert terms_of(decision).names == ("p0", "p1")
        self.states[arrived.id] = RequestState(arrived, "prefill", decision.instance)

    @precondition(lambda self: self.some_request_in("prefill"))
    @rule(data=st.data())
    def prefilled(self, data: st.DataObject) -> None:
        """The decode target has room and is priced with all requests in flight; a reject occurs only if no instance has
        room."""
        number = self.pick(data, "prefill")
        state = self.states[number]
        need_bytes = (state.request.input_tokens + state.request.max_output_tokens) * TOKEN_BYTES
        decision = one(self.notify(PrefillFinished(0, number)))
        if isinstance(decision, Reject):
            assert all(need_bytes > self.free_bytes(name) for name in CAPACITY_BYTES)
            del self.states[number]
            return
        assert isinstance(decision, Decode)
        terms = terms_of(decision)
        for index, name in enumerate(terms.names):
            batch, queued, limit = self.at(name, "decode"), self.at(name, "transfer", "landed"), BATCH_MAX[name]
            assert terms.feasible[index] == (need_bytes <= self.free_bytes(name))
            assert terms.parts["decode_s"][index] == pytest.approx(0.010 + 0.001 * (batch + 1))
            waits = max(queued + batch - limit, 0) * (0.010 + 0.001 * batch)
            assert terms.parts["queue_s"][index] == pytest.approx(waits)
        rates = dict(zip(terms.names, terms.parts["effective_bytes_per_s"], strict=True))
        assert rates["d1"] == rates["d2"] == pytest.approx(6.25e9 / (1 + self.crossing(state.source)))
        assert terms.feasible[terms.names.index(decision.target)]
        state.step, state.target = "transfer", decision.target

    @precondition(lambda self: self.some_request_in("transfer"))
    @rule(data=st.data(), reports=st.booleans())
    def transfer_finished(self, data: st.DataObject, reports: bool) -> None:
        """The target's own report of its free memory, equal to the model's, is included or not."""
        number = self.pick(data, "transfer")
        report = self.free_bytes(self.states[number].target) if reports else None
        assert self.notify(TransferFinished(0, number, report)) == ()
        self.states[number].step = "landed"

    @precondition(lambda self: self.some_request_in("landed"))
    @rule(data=st.data())
    def admitted(self, data: st.DataObject) -> None:
        """The request enters the batch even beyond its limit, because the engine decides about it."""
        number = self.pick(data, "landed")
        assert self.notify(Admitted(0, number)) == ()
        self.states[number].step = "decode"

    @precondition(lambda self: bool(self.states))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request completes, fails or is cancelled at any step."""
        number = self.pick(data, "prefill", "transfer", "landed", "decode")
        assert self.notify(Finished(0, number)) == ()
        del self.states[number]

    @invariant()
    def transfers_in_flight_are_counted(self) -> None:
        """The core's own count equals the model's."""
        assert self.control.in_flight == len(self.states)

    def teardown(self) -> None:
        """When all requests have left, the core decides exactly like a new one, up to the last free byte."""
        for number in list(self.states):
            self.notify(Finished(0, number))
        fresh = core()
        for number, tokens in enumerate((1_000, int(6e9 // TOKEN_BYTES)), start=self.count):
            for event in (Arrived(self.now, request(number, tokens)), PrefillFinished(self.now, number)):
                assert decisions_equal(self.control.handle(event), fresh.handle(event))
            for control in (self.control, fresh):
                control.handle(Finished(self.now, number))

    def at(self, target: str, *steps: str) -> int:
        """Return the number of requests on a decode instance at these steps."""
        return sum(state.target == target and state.step in steps for state in self.states.values())

    def crossing(self, source: str) -> int:
        """Return the number of transfers in flight from `source` to the other rack."""
        return sum(
            state.source == source and state.step == "transfer" and state.target in ("d1", "d2")
            for state in self.states.values()
        )

    def free_bytes(self, target: str) -> float:
        """Return the free memory of a decode instance, by the model."""
        held = [state.request for state in self.states.values() if state.target == target]
        tokens = sum(request.input_tokens + request.max_output_tokens for request in held)
        return CAPACITY_BYTES[target] - tokens * TOKEN_BYTES


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([Arrived(0, request(1)), Arrived(0, request(1))], "has already arrived"),
        ([PrefillFinished(0, 1)], "is not in flight"),
        ([Finished(0, 1)], "is not in flight"),
        ([Arrived(0, request(1)), TransferFinished(0, 1)], "has no transfer in progress"),
        ([Arrived(0, request(1)), Admitted(0, 1)], "does not wait for a decode slot"),
        ([Arrived(0, request(1)), PrefillFinished(0, 1), PrefillFinished(0, 1)], "has already finished"),
        ([Arrived(0, request(1)), PrefillFinished(0, 1), Admitted(0, 1), Admitted(0, 1)], "does not wait"),
        ([KvStored(0, "d9", (1,))], "no instance 'd9'"),
        ([KvEvicted(0, "d9", (1,))], "no instance 'd9'"),
    ],
)
def test_an_impossible_event_is_rejected_and_changes_nothing(history: list[Event], problem: str) -> None:
    """The last event of each history is rejected; the next request is then decided as if that event had not
    occurred."""
    control, reference = core(), core()
    for event in history[:-1]:
        control.handle(event)
        reference.handle(event)
    with pytest.raises(InputError, match=problem):
        control.handle(history[-1])
    for event in (Arrived(1, request(2)), PrefillFinished(2, 2)):
        assert decisions_equal(control.handle(event), reference.handle(event))


def test_an_unknown_model_is_rejected_by_name() -> None:
    """The rejection is a value and not an exception, because it is normal in operation; nothing of the request
    remains."""
    control = core()
    decision = one(control.handle(Arrived(0, request(1, model="gpt-5"))))
    assert isinstance(decision, Reject)
    assert "'gpt-5'" in decision.reason
    assert control.in_flight == 0


def test_a_request_must_name_its_model_if_there_are_several() -> None:
    """Each model has its own instances; a request without a model is rejected with that reason."""
    text = TEXT.replace("{name: p1,", "{name: p1, model: qwen3-32b,").replace(
        "{name: d1,", "{name: d1, model: qwen3-32b,"
    )
    control = core(text)
    assert placed(control, request(1, model="qwen3-32b")).target == "d1"
    assert placed(control, request(2, model="llama-3-70b")).target == "d0"
    refused = one(control.handle(Arrived(0, request(3))))
    assert isinstance(refused, Reject)
    assert "several" in refused.reason


def test_required_keeps_the_domain_and_its_prefill_instances() -> None:
    """node0 alone has both roles: only p0 prefills, only d0 decodes, and a full d0 causes a reject."""
    control = core(constraint="node:fail")
    first = one(control.handle(Arrived(0, request(1, tokens=12_000))))
    assert isinstance(first, Prefill)
    assert (first.instance, terms_of(first).feasible.tolist()) == ("p0", [True, False])
    second = one(control.handle(Arrived(0, request(2, tokens=12_000))))
    assert isinstance(second, Prefill)
    assert second.instance == "p0"
    taken = one(control.handle(PrefillFinished(1, 1)))
    assert isinstance(taken, Decode)
    assert (taken.target, taken.tier) == ("d0", 0)
    assert isinstance(one(control.handle(PrefillFinished(2, 2))), Reject)
    assert control.in_flight == 1


def test_fallback_leaves_the_domain_only_when_it_is_full() -> None:
    """The second request finds no room on d0 and goes to the other rack."""
    control = core(constraint="node:fallback")
    assert [placed(control, request(number, tokens=12_000)).target for number in (1, 2)] == ["d0", "d1"]


def test_a_constraint_without_any_domain_rejects_after_prefill_with_a_reason() -> None:
    """No rack has both roles without d0: prefill is done anyway, because `fallback` needs it, and `fail` rejects
    the decode."""
    text = TEXT.replace('  - {name: d0, role: decode, gpus: "node0:2-3"}\n', "")
    control = core(text, constraint="rack:fail")
    assert isinstance(one(control.handle(Arrived(0, request(1)))), Prefill)
    refused = one(control.handle(PrefillFinished(0, 1)))
    assert isinstance(refused, Reject)
    assert "rack" in refused.reason
    assert core(text, constraint="rack:fallback").in_flight == 0
    assert placed(core(text, constraint="rack:fallback"), request(1)).target == "d1"


def test_dualpath_fills_groups_equally_and_not_instances() -> None:
    """d0 is a group of its own; d1 and d2 are another one with 2.5 times its memory. A request of 0.4 GB fills 10 % of
    d0, or 4 % of the other group, which therefore takes three requests before d0 takes its second."""
    text = TEXT.replace('"node2:0-1"', '"node2:0-1", group: g').replace('"node3:0-1"', '"node3:0-1", group: g')
    for cluster, targets in ((text, ["d0", "d1", "d2", "d1", "d0"]), (TEXT, ["d0", "d1", "d2", "d0", "d1"])):
        control = core(cluster, decode="dualpath")
        chosen = [placed(control, request(number, tokens=1_220)) for number in range(1, 6)]
        assert [decision.target for decision in chosen] == targets
        assert ("group_used_share" in terms_of(chosen[0]).parts) == (cluster is text)


@pytest.mark.parametrize("step", ["transferred", "leaving"])
def test_a_report_of_memory_overrides_the_estimate(step: str) -> None:
    """d0 reports no free memory: the next request goes elsewhere, although by the estimate there is room."""
    control = core()
    assert placed(control, request(1)).target == "d0"
    if step == "transferred":
        control.handle(TransferFinished(1, 1, 0.0))
    else:
        control.handle(Finished(1, 1, 0.0))
    decision = placed(control, request(2), at=2.0)
    assert decision.target == "d1"
    assert terms_of(decision).feasible.tolist() == [False, True, True]


def test_cache_hits_reduce_the_transfer_but_not_the_reserved_memory() -> None:
    """Two of three blocks are cached on d0 and one is evicted; the need remains the size of the whole prompt."""
    control = core()
    arrived = request(1, tokens=48, answer=16, blocks=(7, 8, 9), block_tokens=16)
    control.handle(KvStored(0, "d0", (7, 8, 5)))
    first = placed(control, arrived)
    assert (first.target, first.hit_tokens, first.kv_bytes) == ("d0", 32, 16 * TOKEN_BYTES)
    assert first.need_bytes == 64 * TOKEN_BYTES
    control.handle(Finished(1, 1))
    control.handle(KvEvicted(1, "d0", (7, 8, 5), keep=1))
    assert placed(control, arrived, at=2.0).hit_tokens == 16


def test_the_last_prompt_token_is_always_computed() -> None:
    """p1 has the whole prompt cached. The last token is still computed, because its output gives the first logits."""
    control = core(prefill="cache-aware")
    control.handle(KvStored(0, "p1", (7, 8), 16))
    decision = one(control.handle(Arrived(0, request(1, tokens=32, blocks=(7, 8), block_tokens=16))))
    assert isinstance(decision, Prefill)
    assert (decision.instance, decision.cached_tokens) == ("p1", 31)


def test_the_memory_reserve_is_withheld_and_not_lost() -> None:
    """1 GB of 4 GB is reserved, so 3 GB can be used repeatedly."""
    tokens = int(3e9 // TOKEN_BYTES)
    control = core(TEXT.replace("6 GB", "4 GB"), reserve_bytes=1e9)
    for turn in range(3):
        decision = placed(control, request(turn, tokens), at=float(turn))
        assert (decision.target, decision.need_bytes) == ("d0", tokens * TOKEN_BYTES)
        control.handle(Finished(turn + 0.5, turn))
    control.handle(Arrived(9, request(9, tokens + 1)))
    assert isinstance(one(control.handle(PrefillFinished(9, 9))), Reject)


def test_a_log_reads_back_equal_and_replays(tmp_path: Path) -> None:
    """The history has every kind of end. The log returns the same records, and a new core makes the same decisions."""
    path, spec = tmp_path / "core.log", ControlSpec(decode="cla", parameters={"cache_weight": 0.5})
    control = spec.build(parse(TEXT))
    history: list[Event] = [
        KvStored(0, "d1", (1, 2)),
        Arrived(0, request(1, 32, blocks=(1, 2))),
        Arrived(0.5, request(2, model="other")),
        PrefillFinished(1, 1),
        TransferFinished(2, 1, 3e9),
        Admitted(3, 1),
        Finished(4, 1),
    ]
    handled: list[tuple[Event, tuple[Decision, ...]]] = []
    with EventLog(path, LogHeader(cluster=TEXT, spec=spec)) as log:
        for event in history:
            handled.append((event, control.handle(event)))
            log.write(*handled[-1])
    header, records = read_log(path)
    again = list(replay(header.spec.build(parse(header.cluster)), records))
    assert (header.spec, [record.event for record, _ in again]) == (spec, history)
    for (_, decisions), (record, replayed) in zip(handled, again, strict=True):
        assert decisions_equal(decisions, record.decisions)
        assert decisions_equal(decisions, replayed)
    names = [decision.terms.names for _, made in handled for decision in made if decision.terms]
    assert names == [("p0", "p1"), ("d0", "d1", "d2")]


def test_the_error_for_a_log_that_cannot_be_written_names_it(tmp_path: Path) -> None:
    """The folder does not exist, or the path is a folder."""
    for path in (tmp_path / "missing" / "run.log", tmp_path):
        with pytest.raises(InputError, match="cannot be written"):
            EventLog(path, LogHeader(cluster=TEXT, spec=ControlSpec()))
