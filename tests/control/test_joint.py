"""foresight-joint in the control core: the prefill goes to an instance from which its KV cache can be sent soon, within
constraints. Decode instances are not offered as aggregated here: see test_aggregated."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.control import Control, ControlSpec
from kvroute.topology import parse
from kvroute.types import (
    Arrived,
    Decision,
    Decode,
    InputError,
    InstanceDown,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Reject,
    Request,
)

TEXT = """
name: joint
pods: [{name: pod0}]
racks: [{name: rack0, pod: pod0, uplinks: {count: 4, capacity: 100 Gbps}}]
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 10 Gbps}}}
  - {name: node1, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 10 Gbps}}}
  - {name: node2, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 10 Gbps}}}
network: {tier_bandwidth: {rack: 20 Gbps}}
timing:
  default: {prefill: {kind: linear, per_token: 10 us, base: 10 ms}, decode: {base: 10 ms, per_request: 0.1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 8, kv_capacity: 100 GB}
instances:
  - {name: p0, role: prefill, gpus: "node0:0-1"}
  - {name: p1, role: prefill, gpus: "node1:0-1"}
  - {name: d0, role: decode, gpus: "node2:0-1"}
  - {name: d1, role: decode, gpus: "node2:2-3"}
"""
TOKENS = 10_000
"""Prefill takes 0.11 s, the transfer 1.3 s."""


def core(text: str = TEXT, **spec: Any) -> Control:
    return ControlSpec(decode="foresight-joint", parameters={"aggregated": 0}, **spec).build(parse(text))


def prefilled(control: Control, at: float, number: int) -> str:
    """Return the prefill instance of a new request; its prefill has ended on return, its transfer has not."""
    (prefill,) = arrive(control, at, number)
    assert isinstance(prefill, Prefill)
    (decode,) = control.handle(PrefillFinished(at + 0.11, number))
    assert isinstance(decode, Decode)
    assert decode.source == prefill.instance
    return prefill.instance


def arrive(control: Control, at: float, number: int, tokens: int = TOKENS) -> tuple[Decision, ...]:
    return control.handle(Arrived(at, Request(id=number, input_tokens=tokens, max_output_tokens=10)))


def test_prefill_avoids_an_instance_with_a_congested_nic() -> None:
    """Both prefill instances are idle, but one still sends over its whole NIC. Least-loaded would take the first of
    equals."""
    control = core()
    assert [prefilled(control, at, number) for number, at in enumerate((0.0, 0.2, 0.4))] == ["p0", "p1", "p0"]
    blind = ControlSpec(decode="foresight").build(parse(TEXT))
    assert [prefilled(blind, at, number) for number, at in enumerate((0.0, 0.2, 0.4))] == ["p0", "p0", "p0"]


def test_transfers_that_end_before_the_prefill_does_have_no_effect() -> None:
    """The prefill takes 2 s and the earlier transfer ends after 1.3 s, so the instances are equal and the first one is
    taken."""
    control = core()
    prefilled(control, 0.0, 0)
    (prefill,) = arrive(control, 0.2, 1, 200_000)
    assert isinstance(prefill, Prefill)
    assert prefill.instance == "p0"


def test_the_terms_contain_the_start_and_the_cost_of_the_transfer() -> None:
    control = core()
    prefilled(control, 0.0, 0)
    (prefill,) = arrive(control, 0.2, 1)
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    start_s, decode_s = prefill.terms.parts["start_s"], prefill.terms.parts["decode_s"]
    assert start_s.tolist() == pytest.approx([0.11, 0.11])
    assert decode_s[0] > decode_s[1] == pytest.approx(3.2768e9 / 2.5e9, rel=1e-3)
    assert prefill.terms.cost.tolist() == pytest.approx((start_s + decode_s).tolist())


def test_instances_that_are_down_or_have_failed_the_request_are_excluded() -> None:
    """A request whose prefill failed goes to the other instance, for any network cost."""
    control = core()
    control.handle(InstanceDown(0.0, "p1"))
    assert prefilled(control, 0.0, 0) == prefilled(control, 0.2, 1) == "p0"
    control = core()
    prefilled(control, 0.0, 0)
    (first,) = arrive(control, 0.2, 1)
    assert isinstance(first, Prefill)
    assert first.instance == "p1"
    (again,) = control.handle(PrefillFailed(0.25, 1))
    assert isinstance(again, Prefill)
    assert again.instance == "p0"


def test_a_constraint_holds_for_the_pair() -> None:
    """No decode instance is on a prefill instance's node: if that is required, the request is rejected after its
    prefill."""
    control = core(constraint="node:required")
    (prefill,) = arrive(control, 0.0, 0)
    assert isinstance(prefill, Prefill)
    (refused,) = control.handle(PrefillFinished(0.2, 0))
    assert isinstance(refused, Reject)
    assert prefilled(core(constraint="rack:required"), 0.0, 0) == "p0"


def test_where_no_decode_instance_has_room_the_prefill_policy_chooses() -> None:
    """There may be room once the prefill has ended."""
    control = core(TEXT.replace("kv_capacity: 100 GB", "kv_capacity: 1 GB"))
    (prefill,) = arrive(control, 0.0, 0)
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    assert "pending_s" in prefill.terms.parts


def test_the_prefill_policy_chooses_among_instances_with_both_roles() -> None:
    control = core(TEXT.replace("name: p1, role: prefill", "name: p1, role: both"))
    (prefill, *_) = arrive(control, 0.0, 0)
    assert isinstance(prefill, Prefill)
    assert prefill.terms is not None
    assert "start_s" not in prefill.terms.parts


def test_the_joint_policy_takes_the_parameters_of_foresight() -> None:
    ControlSpec(decode="foresight-joint", parameters={"joint_width": 1}).check()
    with pytest.raises(InputError, match="joint_reach"):
        ControlSpec(decode="foresight-joint", parameters={"joint_reach": 0}).check()
