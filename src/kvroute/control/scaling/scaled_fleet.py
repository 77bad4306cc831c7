"""The instances of one model as autoscaling counts them: which serve, which could stop first, which could start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvroute.control.view import ClusterView
from kvroute.policies.fleet.replicas import SCALED_ROLES, ReplicaModel, ScaledRole
from kvroute.timing import prefill_time
from kvroute.topology import Cluster
from kvroute.topology.place import card_of
from kvroute.types import Request


@dataclass(frozen=True, slots=True)
class ScaledFleet:
    """The instances of one model."""

    model: ReplicaModel
    serving: dict[ScaledRole, list[str]]
    """Instances that serve, or will after their start."""
    removable: dict[ScaledRole, list[str]]
    """Those of them that serve, in the order in which they would stop: least work first, then least cached."""
    startable: dict[ScaledRole, list[str]]
    """Instances that do not serve, those first that were stopped on purpose."""
    pending_s: float
    """Prefill work that waits, in seconds of one instance."""
    queued: int
    """Requests that wait for a decode slot."""

    @classmethod
    def of(
        cls, at: float, view: ClusterView, model: str, leaving: set[str], starting: set[str], stopped: set[str]
    ) -> ScaledFleet | None:
        """Return the instances of a model; None if it lacks one of the two roles, or has neither timing nor decode."""
        instances, prefill = view.cluster.instances, view.prefill[model]
        pools = [pool for key, pool in sorted(view.decode.items()) if key[0] == model]
        serving: dict[ScaledRole, list[str]] = {role: [] for role in SCALED_ROLES}
        removable: dict[ScaledRole, list[tuple[float, int, str]]] = {role: [] for role in SCALED_ROLES}
        startable: dict[ScaledRole, list[tuple[bool, str]]] = {role: [] for role in SCALED_ROLES}
        members = [
            (index, instance)
            for index, instance in enumerate(instances)
            if instance.model == model and instance.role != "both"
        ]
        for index, instance in members:
            role = view.roles[index] or instance.role
            if role == "both" or view.roles[index] is None or instance.name in leaving:
                continue
            if view.healthy(index) and instance.name not in stopped:
                serving[role].append(instance.name)
                work, cached = _work(view, model, index), int(view.caches.prefix.used_blocks(index))
                removable[role].append((work, cached, instance.name))
            elif instance.name in starting:
                serving[role].append(instance.name)
            else:
                startable[role].append((instance.name not in stopped, instance.name))
        if not members or not pools or not len(prefill.ids):
            return None
        return cls(
            model=replica_model(view.cluster, model, overlaps=view.options.layerwise),
            serving=serving,
            removable={role: [name for *_, name in sorted(some)] for role, some in removable.items()},
            startable={role: [name for _, name in sorted(some)] for role, some in startable.items()},
            pending_s=float(prefill.pending_s(at)[prefill.up].sum()),
            queued=sum(int(pool.queued[pool.up].sum()) for pool in pools),
        )


def _work(view: ClusterView, model: str, index: int) -> float:
    pool, prefill = view.decode_pool_of(index), view.prefill[model]
    decodes = 0 if pool is None else int(pool.batch[pool.position[index]] + pool.queued[pool.position[index]])
    prefills = int(prefill.assigned[prefill.position[index]]) if index in prefill.position else 0
    return float(decodes + prefills)


def replica_model(cluster: Cluster, model: str, *, overlaps: bool = False) -> ReplicaModel:
    """Return what instances of a model are able to do. All decode instances are assumed to be like the first one, and
    all transfers to cross the tier of the median pair of a prefill and a decode instance.

    Args: `overlaps`: KV caches are sent while they are computed.
    """
    members = [
        (i, instance)
        for i, instance in enumerate(cluster.instances)
        if instance.model == model and instance.role != "both"
    ]
    sources = [i for i, instance in members if instance.role == "prefill"] or [members[0][0]]
    targets = [i for i, instance in members if instance.role == "decode"] or [members[0][0]]
    first = cluster.instances[targets[0]]
    tier = int(np.median(cluster.tier[np.ix_(sources, targets)]))
    return ReplicaModel(
        bytes_per_s=min(_card_bytes_per_s(cluster, sources[0]), _card_bytes_per_s(cluster, targets[0])),
        transfer_bytes_per_s=float(cluster.tier_bytes_per_s[tier]),
        latency_s=float(cluster.tier_latency_s[tier]),
        decode=cluster.timing[first.timing].decode,
        batch_max=first.batch_max,
        kv_bytes=first.kv_capacity_bytes,
        stages=min(cluster.instances[i].pp for i in sources),
        overlaps=overlaps,
    )


def _card_bytes_per_s(cluster: Cluster, index: int) -> float:
    """Return what all network cards of an instance send per second."""
    shards = cluster.shards[index]
    cards = {
        cluster.cables.nic[node][card_of(cluster.places, shards, position)][0]
        for position, (node, _) in enumerate(shards)
    }
    return float(cluster.capacity_bytes_per_s[sorted(cards)].sum())


def uncached_s(view: ClusterView, model: str, request: Request) -> float:
    first = next(instance for instance in view.cluster.instances if instance.model == model)
    return prefill_time(view.cluster.timing[first.timing].prefill).seconds(request.input_tokens)
