"""Cached prefixes in the core: fetched from a sibling instance if that is faster, and copied ahead to where they are
read most."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.control import Control, ControlSpec
from kvroute.control.state.hotspots import CopySpec, HotspotSpec
from kvroute.policies.fleet.offload import OffloadSpec
from kvroute.topology import Cluster, parse
from kvroute.types import (
    Arrived,
    CongestionMeasured,
    CopyFinished,
    CopyPrefix,
    Decision,
    Event,
    Finished,
    InputError,
    InstanceDown,
    InstanceUp,
    KvStored,
    Prefill,
    PrefillFailed,
    PrefillFinished,
    Request,
    ReviewDue,
)

TEXT = """
name: two
datacenters: [{name: away}, {name: home}]
nodes:
  - {name: node0, datacenter: away, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, datacenter: home, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node2, datacenter: home, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
wan: [{from: away, to: home, capacity: 8 Gbps, latency: 5 ms}]
network: {latency: {datacenter: 1 ms}, tier_bandwidth: {datacenter: LOCAL, wan: 8 Gbps}}
timing: {default: {prefill: {kind: linear, per_token: 100 us}, decode: {base: 10 ms}}}
defaults: {model: MODEL, tp: 4, kv_capacity: 50 GB}
instances:
  - {name: f0, role: prefill, gpus: "node0:0-3"}
  - {name: p0, role: prefill, gpus: "node1:0-3"}
  - {name: p1, role: prefill, gpus: "node2:0-3"}
  - {name: d0, role: decode, gpus: "node1:4-7"}
"""
BLOCK, TOKEN_BYTES = 1_000, 131_072
CHAIN = tuple(range(1, 21))
EAGER = CopySpec(review_s=10.0, hotspots=HotspotSpec(window_reads=64, factor=1.1), budget_s=60.0)


def sites(local: str = "8 Gbps", model: str = "llama-3-8b") -> Cluster:
    """Return one prefill instance at the remote site and two at home on separate servers; networks carry 1 GB/s by
    default."""
    return parse(TEXT.replace("LOCAL", local).replace("MODEL", model))


def core(cluster: Cluster | None = None, **settings: Any) -> Control:
    """Return a core that prefills on the instance that finishes first."""
    return ControlSpec(decode="foresight", prefill="cache-aware", **settings).build(cluster or sites())


def arrive(control: Control, number: int, tokens: int, blocks: tuple[int, ...] = CHAIN, at: float = 0.0) -> Prefill:
    """Let one request arrive; return its prefill."""
    request = Request(id=number, input_tokens=tokens, blocks=blocks, block_tokens=BLOCK, max_output_tokens=10)
    prefill = control.handle(Arrived(at, request))[0]
    assert isinstance(prefill, Prefill)
    return prefill


def busy(control: Control, instance: str, number: int) -> None:
    """Give an instance 30 s of other work: a prompt whose prefix is cached on this instance only."""
    own = tuple(range(number * 1_000, number * 1_000 + 300))
    control.handle(KvStored(0.0, instance, own, BLOCK))
    assert arrive(control, number, 600_000, own).instance == instance


def test_a_prefix_is_fetched_from_a_sibling_if_that_is_faster_than_prefill() -> None:
    """20,000 tokens take 2 s of prefill on an idle instance and 2.62 s on the network, so there is no fetch. With a
    network that is twice as fast there is one."""
    slow, fast = core(prefix_pool=True), core(sites("16 Gbps"), prefix_pool=True)
    for control in (slow, fast):
        control.handle(InstanceDown(0.0, "f0"))
        busy(control, "p0", 9)
        control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    alone = arrive(slow, 1, 25_000)
    assert (alone.instance, alone.cached_tokens, alone.copy_from) == ("p1", 0, "")
    fetched = arrive(fast, 1, 25_000)
    assert (fetched.instance, fetched.cached_tokens, fetched.copy_from) == ("p1", 20_000, "p0")
    assert (fetched.copy_tokens, fetched.copy_bytes) == (20_000, 20_000 * TOKEN_BYTES)
    assert fetched.terms is not None
    fetch_s = 20_000 * TOKEN_BYTES / 2e9 + 1e-3
    assert fetched.terms.parts["fetch_s"].tolist() == pytest.approx([0.0, 0.0, fetch_s])
    assert fetched.terms.parts["prefill_s"][2] == pytest.approx(0.5 + fetch_s)


def test_a_fetch_overlaps_the_wait_in_the_queue() -> None:
    """The network is as slow as above, but with 30 s of work ahead the prefix arrives long before the prefill
    starts."""
    control = core(prefix_pool=True)
    for number, instance in ((8, "p1"), (9, "p0"), (10, "f0")):
        busy(control, instance, number)
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    busy(control, "p0", 11)
    fetched = arrive(control, 1, 25_000)
    assert (fetched.instance, fetched.copy_from) == ("p1", "p0")
    assert fetched.terms is not None
    assert fetched.terms.parts["prefill_s"][2] == pytest.approx(0.5)


def test_no_fetch_from_another_datacenter_or_an_instance_that_is_down() -> None:
    """There is no such fetch even if every network is fast."""
    fast = parse(
        TEXT.replace("LOCAL", "400 Gbps").replace("wan: 8 Gbps}", "wan: 400 Gbps}").replace("MODEL", "llama-3-8b")
    )
    for down in ("", "p0"):
        control = core(fast, prefix_pool=True)
        busy(control, "p0", 9)
        control.handle(KvStored(0.0, "p0" if down else "f0", CHAIN, BLOCK))
        if down:
            control.handle(InstanceDown(0.0, down))
            control.handle(InstanceDown(0.0, "f0"))
        else:
            busy(control, "f0", 10)
            busy(control, "f0", 11)
        assert arrive(control, 1, 25_000).copy_from == ""


def test_a_hybrid_model_fetches_only_prefixes_it_can_continue_from() -> None:
    """A hybrid model can continue only from the end of a cached prompt, where the state is stored; a prompt that shares
    only a part fetches nothing."""
    control = core(sites("400 Gbps", "prfaas-1t-hybrid"), prefix_pool=True)
    control.handle(InstanceDown(0.0, "f0"))
    busy(control, "p0", 9)
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    branch = arrive(control, 1, 25_000, (*CHAIN[:15], 99, 98, 97, 96, 95))
    assert (branch.cached_tokens, branch.copy_from) == (0, "")
    control.handle(Finished(0.0, 1))
    later = arrive(control, 2, 60_000, (*CHAIN, *range(500, 540)))
    assert (later.cached_tokens, later.copy_from) == (20_000, "p0")
    assert later.copy_bytes == 20_000 * 17_280 + 173.9 * 2**20


def offloading(**settings: Any) -> Control:
    """Return settings that offload prompts above 30,000 new tokens and copy prefixes without limit."""
    spec = OffloadSpec(threshold_tokens=30_000.0, rule="abundant", layerwise=False)
    return core(offload=spec, **settings)


def test_a_prefix_is_copied_to_another_site_from_an_instance_that_has_it() -> None:
    """p0, the first one by name, could fetch it from p1 at once."""
    spec = OffloadSpec(threshold_tokens=30_000.0, rule="abundant", layerwise=False)
    control = core(sites("400 Gbps"), offload=spec, prefix_pool=True)
    control.handle(KvStored(0.0, "p1", CHAIN, BLOCK))
    prefill = arrive(control, 1, 60_000, (*CHAIN, *range(100, 140)))
    assert (prefill.instance, prefill.copy_from, prefill.copy_tokens) == ("f0", "p1", 20_000)


def test_copies_are_queued_on_the_link() -> None:
    """Each copy sends 2.62 GB from home to the remote site at 1 GB/s: the second one waits until the first one is
    complete."""
    control = offloading()
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    once_s = 20_000 * TOKEN_BYTES / 1e9
    seen: list[float] = []
    for number in range(1, 5):
        prefill = arrive(control, number, 60_000, (*CHAIN, *range(number * 100, number * 100 + 40)))
        assert (prefill.instance, prefill.copy_from, prefill.copy_id) == ("f0", "p0", number)
        assert prefill.offload is not None
        seen.append(prefill.offload.terms["away.copy_s"])
        if number == 2:
            control.handle(CopyFinished(0.0, 1))
            control.handle(CopyFinished(0.0, 2, landed=False))
    assert seen == pytest.approx([once_s, 2 * once_s, once_s, 2 * once_s])


def test_a_source_that_queues_copies_like_prompts_delays_them() -> None:
    """p0 has 30 s of other work before the 2.62 s on the network; the base time of a prefill is 0 here."""
    spec = OffloadSpec(threshold_tokens=30_000.0, rule="abundant", layerwise=False, copy_queues=True)
    control = core(offload=spec)
    control.handle(InstanceDown(0.0, "f0"))
    busy(control, "p0", 9)
    control.handle(InstanceUp(0.0, "f0"))
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    prefill = arrive(control, 1, 60_000, (*CHAIN, *range(100, 140)))
    assert (prefill.instance, prefill.copy_from) == ("f0", "p0")
    assert prefill.offload is not None
    once_s = 20_000 * TOKEN_BYTES / 1e9
    assert prefill.offload.terms["away.copy_s"] == pytest.approx(30.0 + once_s)
    assert "home.copy_s" not in prefill.offload.terms


@pytest.mark.parametrize("ending", ["prefilled", "failed", "finished"])
def test_the_end_of_a_request_releases_its_copy(ending: str) -> None:
    """For any end of the request, the link is as free as before for the next one."""
    control = offloading()
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    first = arrive(control, 1, 60_000, (*CHAIN, *range(100, 140)))
    if ending == "failed":
        control.handle(InstanceDown(0.0, "f0"))
    events: dict[str, Event] = {
        "prefilled": PrefillFinished(1.0, 1),
        "failed": PrefillFailed(1.0, 1),
        "finished": Finished(1.0, 1),
    }
    control.handle(events[ending])
    with pytest.raises(InputError, match="copy 1 is not in progress"):
        control.handle(CopyFinished(1.0, first.copy_id))
    if ending == "finished":
        again = arrive(control, 2, 60_000, (*CHAIN, *range(200, 240)))
        assert again.offload is not None
        assert again.offload.terms["away.copy_s"] == pytest.approx(20_000 * TOKEN_BYTES / 1e9)


def test_a_prefix_copy_home_is_queued_behind_kv_transfers() -> None:
    """Prefix and KV cache use the link from the other site: 5 GB of a KV cache are ahead of the prefix."""
    control = offloading()
    assert arrive(control, 1, 40_000, ()).instance == "f0"
    control.handle(PrefillFinished(4.0, 1))
    control.handle(KvStored(4.0, "f0", CHAIN, BLOCK))
    prefill = arrive(control, 2, 25_000, at=4.0)
    assert prefill.copy_from == "f0"
    assert prefill.offload is not None
    assert prefill.offload.site == "home"
    assert prefill.offload.terms["home.copy_s"] == pytest.approx(60_000 * TOKEN_BYTES / 1e9)


def read_often(control: Control, times: int = 8, first: int = 100) -> None:
    """Read the same prefix on p0 repeatedly; each request completes."""
    control.handle(KvStored(0.0, "p0", CHAIN, BLOCK))
    for number in range(first, first + times):
        assert arrive(control, number, 21_000).instance == "p0"
        control.handle(Finished(0.0, number))


def copies(decisions: tuple[Decision, ...]) -> list[CopyPrefix]:
    """Return the decisions, which must all be copies."""
    copy_decisions = [decision for decision in decisions if isinstance(decision, CopyPrefix)]
    assert len(copy_decisions) == len(decisions)
    return copy_decisions


def test_a_hot_prefix_is_copied_to_near_peers_first() -> None:
    control = core(copies=EAGER)
    read_often(control)
    first, second = copies(control.handle(ReviewDue(1.0)))
    assert (first.source, first.target, first.blocks, first.block_tokens) == ("p0", "p1", CHAIN, BLOCK)
    assert first.kv_bytes == 20_000 * TOKEN_BYTES
    assert first.terms is not None
    assert dict(zip(first.terms.names, first.terms.cost.tolist(), strict=True)) == {"f0": 0, "p0": 160_000, "p1": 0}
    assert (second.source, second.target) == ("p0", "f0")
    assert control.handle(ReviewDue(5.0)) == (), "no review is due"
    assert control.handle(ReviewDue(20.0)) == (), "the copies are in progress"


def test_only_a_failed_copy_is_repeated() -> None:
    control = core(copies=EAGER)
    read_often(control)
    first, second = copies(control.handle(ReviewDue(1.0)))
    control.handle(CopyFinished(2.0, first.copy_id, landed=False))
    control.handle(KvStored(2.0, second.target, CHAIN, BLOCK))
    control.handle(CopyFinished(2.0, second.copy_id))
    assert [copy.target for copy in copies(control.handle(ReviewDue(20.0)))] == [first.target]
    with pytest.raises(InputError, match=f"copy {first.copy_id} is not in progress; report the end of every copy once"):
        control.handle(CopyFinished(21.0, first.copy_id))


def test_a_copy_sends_only_blocks_that_the_target_lacks() -> None:
    control = core(copies=EAGER)
    control.handle(KvStored(0.0, "p1", CHAIN[:5], BLOCK))
    read_often(control)
    assert copies(control.handle(ReviewDue(1.0)))[0].kv_bytes == 15_000 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("used", "offload", "targets"),
    [
        (0.0, None, ["p1", "f0"]),
        (0.6, None, ["p1"]),
        (0.0, OffloadSpec(rule="abundant"), ["p1", "f0"]),
        (0.0, OffloadSpec(rule="scarce"), ["p1"]),
        (0.6, OffloadSpec(rule="abundant"), ["p1"]),
    ],
    ids=["idle", "half full", "abundant", "scarce", "abundant by rule, half full"],
)
def test_copies_between_datacenters_need_spare_bandwidth(
    used: float, offload: OffloadSpec | None, targets: list[str]
) -> None:
    control = core(copies=EAGER, offload=offload)
    control.handle(CongestionMeasured(0.0, (0.0, 0.0, 0.0, 0.0, used)))
    read_often(control)
    assert [copy.target for copy in copies(control.handle(ReviewDue(0.5)))] == targets
    near = core(copies=CopySpec(hotspots=EAGER.hotspots, across=False), offload=offload)
    read_often(near)
    assert [copy.target for copy in copies(near.handle(ReviewDue(0.5)))] == ["p1"]


@pytest.mark.parametrize(("budget_s", "targets"), [(2.6, []), (2.7, ["p1"]), (5.3, ["p1", "f0"])])
def test_copies_in_flight_stay_within_the_free_bandwidth(budget_s: float, targets: list[str]) -> None:
    """Each copy is 2.62 GB at 1 GB/s; copies in flight also count at the next review."""
    spec = CopySpec(hotspots=EAGER.hotspots, review_s=1.0, budget_s=budget_s)
    control = core(copies=spec)
    read_often(control)
    assert [copy.target for copy in copies(control.handle(ReviewDue(0.5)))] == targets
    if budget_s == 2.7:
        assert control.handle(ReviewDue(2.0)) == ()
        control.handle(CopyFinished(2.5, 1, landed=False))
        assert [copy.target for copy in copies(control.handle(ReviewDue(3.5)))] == ["p1"]


def test_an_instance_that_is_down_is_neither_source_nor_target() -> None:
    control = core(copies=EAGER)
    read_often(control)
    control.handle(InstanceDown(0.0, "p1"))
    assert [copy.target for copy in copies(control.handle(ReviewDue(1.0)))] == ["f0"]
    control = core(copies=EAGER)
    read_often(control)
    control.handle(InstanceDown(0.0, "p0"))
    assert control.handle(ReviewDue(1.0)) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"review_s": 0.0}, r"copies.review_s: 0.0 s; give finite seconds above 0"),
        ({"budget_s": float("inf")}, r"copies.budget_s: inf s"),
        ({"abundant_below": 1.5}, r"copies.abundant_below: a utilisation of 1.5; give a share"),
    ],
)
def test_invalid_numbers_are_rejected(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CopySpec(**settings)  # type: ignore[arg-type]
