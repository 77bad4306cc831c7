"""Decisions of the core in known situations: concurrent legs, domains, other routers, several protocols."""

from __future__ import annotations

from typing import Any

import pytest
from tests.control.live_rig import TOKEN_BYTES, cluster_of, request

from kvroute.control import Control, ControlSpec
from kvroute.topology import Cluster
from kvroute.types import (
    Arrived,
    Decision,
    Decode,
    DecodeFailed,
    Finished,
    InstanceDown,
    InstanceMeasured,
    InstanceUp,
    Prefill,
    PrefillFinished,
    Reject,
    Request,
    Terms,
)


def core(cluster: Cluster, **spec: Any) -> Control:
    """Return a new core; its decode policy is NetKV, whose terms are known here."""
    return ControlSpec(**{"decode": "netkv", **spec}).build(cluster)


def terms_of(decision: Decision) -> Terms:
    """Return the terms of a decision, which must exist."""
    assert decision.terms is not None
    return decision.terms


def both_legs(decisions: tuple[Decision, ...]) -> tuple[Prefill, Decode]:
    """Return the legs of a joint decision."""
    prefill, decode = decisions
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    return prefill, decode


def decoded(control: Control, arrived: Request) -> Decision:
    """Let a request arrive and its prefill finish; return the decode decision."""
    assert len(control.handle(Arrived(0, arrived))) == 1
    (decision,) = control.handle(PrefillFinished(0, arrived.id))
    return decision


def test_concurrent_legs_use_the_pair_that_finishes_first() -> None:
    """sp0 would start at once, but must send 1 GB to the other rack in 168 ms; sp1 has 110 ms of work ahead and its
    decode instance on the same node."""
    control = core(cluster_of("sp0", "sp1", "sd1"))
    for number, name in enumerate(("sp0", "sp1")):
        control.handle(InstanceDown(0, "sp1" if name == "sp0" else "sp0"))
        prefill, _ = both_legs(control.handle(Arrived(0, request(number, 1_000 * (number + 1)))))
        assert prefill.instance == name
        control.handle(InstanceUp(0, "sp1" if name == "sp0" else "sp0"))
    control.handle(PrefillFinished(0, 0))
    control.handle(Finished(0, 0))
    prefill, decode = both_legs(control.handle(Arrived(0.1, request(2, 3_200))))
    terms = terms_of(prefill)
    assert terms.names == ("sp0", "sp1")
    assert terms.parts["finish_s"] == pytest.approx([0.330, 0.110 + 0.330])
    crossing_s = 3_200 * TOKEN_BYTES / 6.25e9
    assert terms.parts["decode_path_s"][0] == pytest.approx(crossing_s + 0.011, rel=0.01)
    assert (prefill.instance, decode.source, decode.target) == ("sp1", "sp1", "sd1")


def test_concurrent_legs_skip_a_prefill_instance_whose_partner_is_full() -> None:
    """Inside its rack sp0 has no decode instance with room, so sp1 takes the request, for any prefill policy."""
    for prefill_policy in ("least-loaded", "round-robin"):
        control = core(cluster_of("sp0", "sp1", "sd0", "sd1"), constraint="rack:fail", prefill=prefill_policy)
        control.handle(InstanceMeasured(0, "sd0", 9, 9, 1.0))
        prefill, decode = both_legs(control.handle(Arrived(0, request(1))))
        assert (prefill.instance, decode.target) == ("sp1", "sd1")
        control.handle(InstanceMeasured(0, "sd1", 9, 9, 1.0))
        (refused,) = control.handle(Arrived(0, request(2)))
        assert isinstance(refused, Reject)
        assert control.in_flight == 1


@pytest.mark.parametrize("policy", ["fail", "fallback"])
def test_an_instance_without_a_label_is_in_no_domain(policy: str) -> None:
    """vp2 and vd3 are in no rack: vp2 gets no prefill; vd3 is excluded under `fail` and the last choice under
    `fallback`."""
    control = core(cluster_of("vp0", "vp2", "vd0", "vd3"), constraint=f"rack:{policy}")
    for number in range(2):
        (prefill,) = control.handle(Arrived(0, request(number)))
        assert isinstance(prefill, Prefill)
        assert prefill.instance == "vp0"
    (near,) = control.handle(PrefillFinished(0, 0))
    control.handle(InstanceDown(0, "vd0"))
    (far,) = control.handle(PrefillFinished(0, 1))
    assert isinstance(near, Decode)
    assert near.target == "vd0"
    if policy == "fail":
        assert isinstance(far, Reject)
        assert "no decode instance in the prefill instance's rack is up" in far.reason
    else:
        assert isinstance(far, Decode)
        assert far.target == "vd3"


def test_external_load_shifts_the_choice_until_it_ends() -> None:
    """vd0 is nearer; a report of 40 running requests there makes the next request wait."""
    control = core(cluster_of("vp0", "vd0", "vd1"))
    for number, (running, target) in enumerate(((0, "vd0"), (40, "vd1"), (0, "vd0"))):
        control.handle(InstanceMeasured(0, "vd0", running, 0))
        decision = decoded(control, request(number))
        assert isinstance(decision, Decode)
        assert decision.target == target
        assert terms_of(decision).parts["queue_s"][0] == pytest.approx(0.010 * 38 + 0.001 * 40 * 38 if running else 0.0)
        control.handle(Finished(0, number))


def test_external_prefills_count_like_own_ones() -> None:
    """Two requests of others on vp0 count with the mean of this router's prefills, so vp1 is free earlier."""
    control = core(cluster_of("vp0", "vp1", "vd0"))
    control.handle(Arrived(0, request(1, 1_000)))
    control.handle(Finished(0, 1))
    control.handle(InstanceMeasured(0, "vp0", 1, 1))
    (prefill,) = control.handle(Arrived(0, request(2)))
    assert isinstance(prefill, Prefill)
    assert prefill.instance == "vp1"
    assert terms_of(prefill).parts["pending_s"] == pytest.approx([0.220, 0.0])


def test_a_single_leg_request_falls_back_to_the_next_protocol() -> None:
    """Mooncake's instance comes first by name, then vLLM's; then Mooncake's is tried again."""
    cluster = cluster_of("mp0", "md0", "vp0", "vd0")
    targets = []
    control = core(cluster)
    for event in (
        Arrived(0, request(1, one_leg=True)),
        DecodeFailed(0, 1),
        DecodeFailed(0, 1),
        InstanceMeasured(0, "md0", 0, 0, 1.0),
        Arrived(0, request(2, one_leg=True)),
    ):
        targets += [decision.target for decision in control.handle(event) if isinstance(decision, Decode)]
    assert targets == ["md0", "vd0", "md0", "vd0"]


def test_a_failed_instance_is_retried_if_its_domain_has_no_other() -> None:
    """`fail` forbids vd1, and vd0 may have been busy only for a moment; `fallback` goes to vd1."""
    for policy, target in (("fail", "vd0"), ("fallback", "vd1")):
        control = core(cluster_of("vp0", "vd0", "vd1"), constraint=f"rack:{policy}")
        first = decoded(control, request(1))
        (second,) = control.handle(DecodeFailed(0, 1))
        assert isinstance(first, Decode)
        assert isinstance(second, Decode)
        assert (first.target, second.target) == ("vd0", target)


def test_fallback_queues_outside_its_domain_at_a_full_instance() -> None:
    """With the gateway's settings: vd0 is down and vd1 is full by the core's count, so the request queues at vd1."""
    control = core(cluster_of("vp0", "vd0", "vd1"), constraint="rack:fallback", overcommit=True)
    control.handle(InstanceMeasured(0, "vd1", 9, 9, 1.0))
    control.handle(InstanceDown(0, "vd0"))
    decision = decoded(control, request(1))
    assert isinstance(decision, Decode)
    assert decision.target == "vd1"
