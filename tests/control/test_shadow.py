"""A shadow policy: it never changes the decisions, and its recorded choice is what it would have decided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import Control, ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.policies import DECODE_POLICIES
from kvroute.topology import parse
from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    Event,
    Finished,
    InstanceDown,
    PrefillFinished,
    Request,
    Shadowed,
    TransferFinished,
)

TEXT = """
name: shadow
pods: [{name: pod0}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node2, rack: rack1, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 2, kv_capacity: 40 GB}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-1"}
  - {name: p1, role: prefill, gpus: "node2:0-1"}
  - {name: d0, role: decode, gpus: "node0:2-3"}
  - {name: d1, role: decode, gpus: "node1:0-1"}
  - {name: d2, role: decode, gpus: "node2:2-3"}
"""
POLICIES = st.sampled_from(sorted(DECODE_POLICIES))
SIZES = st.lists(st.integers(100, 20_000), min_size=1, max_size=12)


def core(**spec: Any) -> Control:
    """Return a new core on the cluster above, in which every request has two legs."""
    if spec.get("decode") == "foresight-joint":
        spec.setdefault("parameters", {"aggregated": 0})
    return ControlSpec(**spec).build(parse(TEXT))


def run_requests(control: Control, sizes: list[int]) -> list[tuple[Event, tuple[Decision, ...]]]:
    """Run requests one second apart. Each is prefilled at once, its transfer ends after the arrival of the second next
    request, and every third one is finished by then."""
    handled: list[tuple[Event, tuple[Decision, ...]]] = []

    def notify(event: Event) -> None:
        handled.append((event, control.handle(event)))

    for number, tokens in enumerate(sizes):
        at = float(number)
        notify(Arrived(at, Request(id=number, input_tokens=tokens, blocks=(tokens // 512,), block_tokens=512)))
        notify(PrefillFinished(at, number))
        if number >= 2:
            notify(TransferFinished(at + 0.5, number - 2))
            if number % 3 == 0:
                notify(Admitted(at + 0.5, number - 2))
                notify(Finished(at + 0.75, number - 2, output_tokens=100))
    return handled


def shadow_of(decision: Decode) -> Shadowed:
    """Return the record of the shadow policy, which must exist."""
    assert decision.shadow is not None
    return decision.shadow


def decodes(handled: list[tuple[Event, tuple[Decision, ...]]]) -> list[Decode]:
    """Return the decode decisions in order."""
    return [decision for _, made in handled for decision in made if isinstance(decision, Decode)]


@settings(max_examples=60, deadline=None)
@given(acting=POLICIES, shadow=POLICIES, sizes=SIZES)
def test_a_shadow_policy_changes_no_decision(acting: str, shadow: str, sizes: list[int]) -> None:
    alone = decodes(run_requests(core(decode=acting), sizes))
    beside = decodes(run_requests(core(decode=acting, shadow=shadow), sizes))
    assert all(decision.shadow is not None for decision in beside)
    assert decisions_equal(tuple(alone), tuple(msgspec.structs.replace(decision, shadow=None) for decision in beside))


@settings(max_examples=40, deadline=None)
@given(policy=POLICIES, sizes=SIZES)
def test_a_policy_compared_with_itself_never_differs(policy: str, sizes: list[int]) -> None:
    for decision in decodes(run_requests(core(decode=policy, shadow=policy), sizes)):
        shadow = shadow_of(decision)
        assert shadow.target == decision.target
        assert shadow.loss_s in (0.0, None)
        assert shadow.gain_s in (0.0, None)


@settings(max_examples=40, deadline=None)
@given(acting=POLICIES, shadow=POLICIES, sizes=SIZES)
def test_each_policy_rates_its_own_choice_cheapest(acting: str, shadow: str, sizes: list[int]) -> None:
    for decision in decodes(run_requests(core(decode=acting, shadow=shadow), sizes)):
        record, terms = shadow_of(decision), decision.terms
        assert terms is not None
        assert record.loss_s is None or record.loss_s >= 0.0
        assert record.gain_s is None or record.gain_s >= 0.0
        if record.loss_s is not None:
            there, here = terms.names.index(record.target), terms.names.index(decision.target)
            assert record.loss_s == float(terms.cost[there] - terms.cost[here])


@given(acting=POLICIES, shadow=POLICIES, tokens=st.integers(100, 20_000))
@settings(max_examples=40, deadline=None)
def test_the_shadow_policy_reports_what_it_would_choose(acting: str, shadow: str, tokens: int) -> None:
    """The first request is compared, before the two policies lead to different states."""
    (acted,) = decodes(run_requests(core(decode=acting, shadow=shadow), [tokens]))
    (would,) = decodes(run_requests(core(decode=shadow), [tokens]))
    assert acted.shadow is not None
    assert acted.shadow.target == would.target


def test_learned_values_of_foresight_are_reported() -> None:
    """The learned values are those of the acting policy or of the shadow policy. Every second transfer goes to another
    rack and takes longer than the topology predicts, and there is no tier beyond the pod."""
    sizes = [9_000] * 12
    for spec in ({"decode": "netkv", "shadow": "foresight"}, {"decode": "foresight", "shadow": "netkv"}):
        control = core(**spec, prefill="round-robin")
        for near in ("d0", "d1"):
            control.handle(InstanceDown(0.0, near))
        before = control.learned(0.0)
        assert before is not None
        assert {tier.factor for tier in before} == {1.0}
        assert [tier.bytes_per_s is not None for tier in before] == [True, True, True, False, False]
        crossed = sum(decision.tier == 2 for decision in decodes(run_requests(control, sizes)))
        assert crossed == 6
        learned = control.learned(13.0)
        assert learned is not None
        assert 0 < learned[2].transfers <= crossed
        assert learned[2].factor < 1.0
        slow, fast = learned[2].bytes_per_s, before[2].bytes_per_s
        assert slow is not None
        assert fast is not None
        assert slow == pytest.approx(fast * learned[2].factor)
    assert core(decode="netkv", shadow="cla").learned(1.0) is None


def test_the_learned_values_reported_are_those_of_the_acting_policy() -> None:
    """The shadow does not change its values: with a strong prior the same transfers have less effect."""
    learned = []
    for parameters, shadow in (({"prior_transfers": 50.0}, ""), ({"prior_transfers": 50.0}, "foresight"), ({}, "")):
        control = core(decode="foresight", parameters=parameters, shadow=shadow, prefill="round-robin")
        for near in ("d0", "d1"):
            control.handle(InstanceDown(0.0, near))
        run_requests(control, [9_000] * 12)
        learned.append(control.learned(13.0))
    assert learned[0] == learned[1] != learned[2]


def test_a_log_with_a_shadow_replays(tmp_path: Path) -> None:
    spec = ControlSpec(decode="netkv", shadow="foresight")
    path = tmp_path / "run.log"
    with EventLog(path, LogHeader(cluster=TEXT, spec=spec)) as log:
        for event, made in run_requests(spec.build(parse(TEXT)), [9_000, 12_000, 300, 7_000, 15_000, 2_000]):
            log.write(event, made)
    header, records = read_log(path)
    assert header.spec.shadow == "foresight"
    assert all(
        decisions_equal(record.decisions, again) for record, again in replay(header.spec.build(parse(TEXT)), records)
    )


def test_the_first_difference_between_two_policies() -> None:
    """Round-robin takes d0 and then d1; NetKV stays on the node of p0 while there is room."""
    handled = run_requests(core(decode="round-robin", shadow="netkv"), [9_000, 9_000])
    first, second = decodes(handled)
    assert [first.target, second.target] == ["d0", "d1"]
    assert shadow_of(first).loss_s is None  # Round-robin has no cost in seconds.
    assert shadow_of(second).target == "d0"
    assert (shadow_of(second).gain_s or 0.0) > 0.0
