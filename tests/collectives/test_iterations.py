"""All-reduces of instances in a cluster file: what they cost by token, which share links, and faults of the file."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from kvroute.collectives import AllReduce, all_reduce, instance_traffic, link_bytes, seconds, unshared_links
from kvroute.topology import Cluster, FileError, parse
from kvroute.types import InputErrors

TEXT = """
name: groups
racks: [{name: r0}, {name: r1}]
nodes:
  - {name: a, rack: r0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: b, rack: r0, gpus: 8, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default:
    prefill: {kind: linear, per_token: 900 us, base: 40 ms}
    decode: {base: 40 ms, per_request: 900 us}
defaults: {model: llama-3-70b, tp: 4, kv_capacity: 180 GB}
instances:
  - {name: z, role: prefill, gpus: "GPUS", ALL}
  - {name: d, role: decode, gpus: "a:4-7"}
"""
ACROSS, INSIDE = "a:0-1,b:0-1", "b:0-3"


def text(settings: str, gpus: str = ACROSS) -> str:
    return TEXT.replace("GPUS", gpus).replace("ALL", f"all_reduce: {{{settings}}}")


def cluster(settings: str, gpus: str = ACROSS) -> Cluster:
    return parse(text(settings, gpus))


GOOD = "scheme: hierarchical-ring, per_iteration: 160, token_bytes: 16 KB"


def test_the_time_of_an_iteration_is_that_of_its_all_reduces_one_after_another() -> None:
    """160 all-reduces of 100 tokens: transmission and latency; without tokens there is none."""
    known = cluster(GOOD)
    (index,) = instance_traffic(known)
    traffic = instance_traffic(known)[index]
    single = all_reduce("hierarchical-ring", AllReduce(known.shards[index], 100 * 16e3), known)
    assert single is not None
    wanted_s = 160 * seconds(single, known.capacity_bytes_per_s)
    assert traffic.together.idle_s(100) == pytest.approx(wanted_s)
    assert traffic.stages[0].idle_s(100) == pytest.approx(wanted_s)
    assert traffic.together.idle_s(0) == 0.0
    carried = dict(zip(traffic.together.links.tolist(), traffic.together.link_bytes * 100, strict=True))
    assert carried == pytest.approx({link: 160 * nbytes for link, nbytes in link_bytes(single).items()})


def test_only_links_that_others_may_use_have_flows() -> None:
    """Node `a` has GPUs of two instances, node `b` of one; NICs are always shared."""
    known = cluster(GOOD)
    (traffic,) = instance_traffic(known).values()
    names = {known.links[link].name for flow in traffic.together.flows for link in flow.links}
    assert {name.split()[1] for name in names} >= {"nvlink", "nic0"}
    assert all(name.startswith(("a/", "a ", "b nic")) for name in names)
    assert {known.links[link].name[:2] for link in unshared_links(known)} == {"b/"}
    assert not instance_traffic(cluster(GOOD, INSIDE))


def test_stages_reduce_at_the_same_time_in_decode() -> None:
    """Each stage has half of the all-reduces, so half of the time of a prompt; a token of a batch crosses both."""
    wide = TEXT.replace("tp: 4,", "tp: 4, pp: 2,").replace('"a:4-7"', '"a:4-7,b:4-7"')
    gpus = '"a:0-1,b:0-1,a:2-3,b:2-3"'
    known = parse(wide.replace('"GPUS"', gpus).replace("ALL", f"all_reduce: {{{GOOD}}}"))
    (traffic,) = instance_traffic(known).values()
    one, two = traffic.stages
    assert one.idle_s(64) == pytest.approx(two.idle_s(64))
    assert traffic.together.s_per_token == pytest.approx(one.s_per_token)
    assert traffic.together.latency_s == pytest.approx(2 * one.latency_s)
    assert traffic.together.link_bytes.sum() == pytest.approx(one.link_bytes.sum() + two.link_bytes.sum())
    assert np.intersect1d(one.links, two.links).size == 0


SMALL = "per_iteration: 160, token_bytes: 16 KB"
FAULTS = {
    "no aggregation": (f"scheme: ina, {SMALL}", ACROSS, ".scheme: z cannot use ina: no switch aggregates; add"),
    "too many bytes": (
        "scheme: ring, per_iteration: 160, token_bytes: 200 KB",
        ACROSS,
        "all-reduces of a prefill of 16 tokens take",
    ),
    "too many latencies": ("scheme: ring, per_iteration: 9000, token_bytes: 16 B", ACROSS, "prefill of 1 token take"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_has_line_and_field(fault: str) -> None:
    """It survives the way from a worker process."""
    settings, gpus, sentence = FAULTS[fault]
    with pytest.raises(InputErrors) as raised:
        instance_traffic(cluster(settings, gpus))
    (problem,) = raised.value.problems
    assert isinstance(problem, FileError)
    assert str(problem).startswith("<text>:13: instances[0].all_reduce")
    assert sentence in str(problem)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_group_on_one_server_cannot_aggregate() -> None:
    aggregating = text(f"scheme: ina, {SMALL}", INSIDE).replace("timing:", "collectives: {aggregation: {}}\ntiming:", 1)
    with pytest.raises(InputErrors, match="its group is on one server"):
        instance_traffic(parse(aggregating))
