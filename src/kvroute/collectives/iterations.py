"""All-reduces in the iterations of a cluster's instances: their flows and their time on an idle network, by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.collectives.costs import link_bytes, seconds
from kvroute.collectives.schemes import Aggregation, AllReduce, Collective, CollectiveFlow, all_reduce
from kvroute.timing import IterationTime, prefill_time
from kvroute.topology import Cluster, InstanceEntry
from kvroute.topology.place import Shards
from kvroute.types import FloatArray, InputError, InputErrors, IntArray, TimingSpec
from kvroute_engine.files.form import FileError, Key

_PROMPTS = tuple(2**power for power in range(21))
"""Prompt lengths at which the time of the all-reduces is compared with the timing model."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class IterationTraffic:
    """All-reduces of one iteration by the groups that reduce at the same time. Sizes are for one token of the
    iteration."""

    flows: tuple[CollectiveFlow, ...]
    """Flows over links that other traffic may use."""
    links: IntArray
    """All links that its all-reduces use, ascending."""
    link_bytes: FloatArray
    """Bytes on each of `links`."""
    count: float
    """All-reduces one after another."""
    latency_s: float
    """Latency of all of them."""
    s_per_token: float
    """Transmission time on an idle network."""

    def idle_s(self, tokens: int) -> float:
        """Return the time of its all-reduces on an idle network; an iteration without tokens has none."""
        return self.latency_s + self.s_per_token * tokens if tokens else 0.0


@dataclass(frozen=True, slots=True)
class InstanceTraffic:
    """All-reduces of one instance."""

    stages: tuple[IterationTraffic, ...]
    """Traffic of a prompt in each pipeline stage."""
    together: IterationTraffic
    """Traffic of a decode iteration: all stages work at the same time, each on its part of the batch."""


def instance_traffic(cluster: Cluster) -> dict[int, InstanceTraffic]:
    """Return the all-reduces of each instance with `all_reduce` in the cluster file that share links with other
    traffic, by index.

    NVLink of a node is shared if GPUs of several instances are on it; all other links are shared.

    Raises:
        InputErrors: a group cannot use its scheme, or its all-reduces alone take longer than an iteration of the timing
            model.
    """
    found: dict[int, InstanceTraffic] = {}
    faults: list[FileError] = []
    own = unshared_links(cluster)
    for position, entry, index in _reducing(cluster):
        key: Key = ("instances", position, "all_reduce")
        try:
            traffic = _traffic(cluster, index, entry, own)
        except InputError as error:
            faults.append(cluster.lines.error(error.what, (*key, "scheme"), error.hint))
            continue
        fault = _longer_than_iteration(cluster, index, traffic)
        if fault is not None:
            faults.append(cluster.lines.error(fault.what, key, fault.hint))
        elif traffic.together.flows:
            found[index] = traffic
    if faults:
        raise InputErrors(faults)
    return found


def unshared_links(cluster: Cluster) -> frozenset[int]:
    """Return the NVLink links of the nodes whose GPUs belong to one instance: no other instance sends over them."""
    users: dict[int, set[int]] = {}
    for index, gpus in enumerate(cluster.shards):
        for node, _ in gpus:
            users.setdefault(node, set()).add(index)
    nvlink = cluster.cables.nvlink
    return frozenset(link for node, used in users.items() if len(used) == 1 for pair in nvlink[node] for link in pair)


def _reducing(cluster: Cluster) -> Iterator[tuple[int, InstanceEntry, int]]:
    """Yield the position in the file, the entry and the index of each instance with `all_reduce`."""
    entries = cluster.file.instances
    assert isinstance(entries, list), "the cluster's file is expanded"
    for position, entry in enumerate(entries):
        if entry.all_reduce is not None:
            yield position, entry, cluster.index(entry.name)


def _traffic(cluster: Cluster, index: int, entry: InstanceEntry, own: frozenset[int]) -> InstanceTraffic:
    instance, gpus, settings = cluster.instances[index], cluster.shards[index], entry.all_reduce
    assert settings is not None
    tp, pp = instance.tp, instance.pp
    aggregation = Aggregation.of(cluster.file.collectives.aggregation)
    nbytes = settings.per_iteration / pp * float(settings.token_bytes)
    stages = []
    for number, scheme in enumerate(settings.schemes(pp)):
        group: Shards = gpus[number * tp : (number + 1) * tp]
        reduced = all_reduce(scheme, AllReduce(group, nbytes, settings.element_bytes), cluster, aggregation)
        if reduced is None:
            raise _unusable(scheme, entry.name, aggregation)
        stages.append(reduced)
    count = settings.per_iteration / pp
    slowest = max(stages, key=lambda stage: stage.latency_s)
    whole = Collective(slowest.scheme, tuple(flow for stage in stages for flow in stage.flows), slowest.latency_s)
    by_stage = tuple(_iteration(cluster, stage, count, own) for stage in stages)
    return InstanceTraffic(by_stage, _iteration(cluster, whole, settings.per_iteration, own))


def _unusable(scheme: str, name: str, aggregation: Aggregation | None) -> InputError:
    what = f"{name} cannot use {scheme}"
    if aggregation is None:
        return InputError(f"{what}: no switch aggregates", hint="add `collectives: {aggregation: {}}`, or use a ring")
    levels = ", ".join(sorted(aggregation.levels))
    reason = f"its group is on one server, or the switch that joins it does not aggregate (levels: {levels})"
    return InputError(f"{what}: {reason}", hint="use a ring, or change `collectives.aggregation.levels`")


def _iteration(cluster: Cluster, reduced: Collective, count: float, own: frozenset[int]) -> IterationTraffic:
    """Args: `reduced`: flows with the bytes of all-reduces of one token; `count`: number of them one after another."""
    carried = link_bytes(reduced)
    without_latency = Collective(reduced.scheme, reduced.flows, 0.0)
    return IterationTraffic(
        flows=tuple(flow for flow in reduced.flows if not own.issuperset(flow.links)),
        links=np.array(list(carried), dtype=np.int64),
        link_bytes=np.array(list(carried.values())),
        count=count,
        latency_s=count * reduced.latency_s,
        s_per_token=seconds(without_latency, cluster.capacity_bytes_per_s),
    )


def _longer_than_iteration(cluster: Cluster, index: int, traffic: InstanceTraffic) -> InputError | None:
    instance = cluster.instances[index]
    spec = cluster.timing[instance.timing]
    rows: list[tuple[str, int, float, float]] = []
    if instance.role in ("prefill", "both"):
        rows += _prefill_rows(spec, instance.pp, traffic.stages)
    if instance.role in ("decode", "both"):
        time = IterationTime.of(spec.decode)
        batches = (1, instance.batch_max)
        rows += [("decode iteration", batch, traffic.together.idle_s(batch), time.seconds(batch)) for batch in batches]
    for what, tokens, reduced_s, whole_s in rows:
        if reduced_s > whole_s * (1 + _ROUNDING) or not math.isfinite(reduced_s):
            noun = f"{tokens} token{'s' if tokens > 1 else ''}"
            times = f"{reduced_s * 1e3:.3g} ms on an idle network, more than {whole_s * 1e3:.3g} ms"
            return InputError(
                f"the all-reduces of a {what} of {noun} take {times} by timing {instance.timing!r}",
                hint="`timing` includes the all-reduces: raise its times, or correct per_iteration and token_bytes",
            )
    return None


def _prefill_rows(spec: TimingSpec, pp: int, stages: Sequence[IterationTraffic]) -> list[tuple[str, int, float, float]]:
    time = prefill_time(spec.prefill)
    return [
        ("prefill", tokens, pp * max(stage.idle_s(tokens) for stage in stages), time.seconds(tokens))
        for tokens in _PROMPTS
    ]
