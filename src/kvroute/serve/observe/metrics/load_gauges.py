"""Gauges of the gateway's current load: requests, transfers, the network as the oracle estimates it, instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

from kvroute.control import SyncState
from kvroute.policies import TierLearned
from kvroute.serve.observe.metrics.exposition import Key, MetricFamily
from kvroute.serve.observe.metrics.offload_gauges import offload_gauges
from kvroute.serve.observe.view import (
    BreakerState,
    DiscoveryLoad,
    ForesightLoad,
    GatewayStatus,
    InstanceLoad,
    ScalingLoad,
)
from kvroute.types import SAME_RACK, Role
from kvroute_engine import renamed

TIER_LABELS = ("node", "rack", "pod", "datacenter", "cross_datacenter")
"""Values of the label `tier`, by tier."""
_BREAKER: dict[BreakerState, int] = {"closed": 0, "half-open": 1, "open": 2}
_INFO = MetricFamily("gauge", "kvroute_info", "Always 1; version and policy are labels.", ("version", "policy"))
_READY = MetricFamily("gauge", "kvroute_ready", "1 while the gateway accepts requests.")
_IN_FLIGHT = MetricFamily("gauge", "kvroute_requests_in_flight", "Requests admitted and not finished.")
_QUEUED = MetricFamily("gauge", "kvroute_requests_queued", "Requests in the admission queue.")
_WAITING = MetricFamily(
    "gauge", "kvroute_placement_queue_requests", "Requests that wait for their turn to be placed.", ("priority",)
)
_DEFERRED = MetricFamily("gauge", "kvroute_deferred_requests", "Requests that wait because they would be too late.")
_CONNECTIONS = MetricFamily("gauge", "kvroute_client_connections", "Open client connections.")
_FORWARDED = MetricFamily("gauge", "kvroute_forwarded_streams", "Streams whose chunks a thread forwards now.")
_PANIC = MetricFamily("gauge", "kvroute_panic", "1 while health checks and breakers are ignored.", ("model", "role"))
_TRANSFERRING = MetricFamily("gauge", "kvroute_transfers_in_flight", "Own KV transfers in flight.", ("tier",))
_ORACLE_AGE = MetricFamily("gauge", "kvroute_oracle_age_seconds", "Age of the last telemetry.", ("source",))
_CONGESTION = MetricFamily("gauge", "kvroute_oracle_congestion_ratio", "Current estimate of congestion.", ("tier",))
_LEARNED = MetricFamily("gauge", "kvroute_learned_bandwidth_ratio", "Measured over static bandwidth.", ("tier",))
_PATHS = MetricFamily(
    "gauge", "kvroute_slowest_path_ratio", "Lowest measured rate of a pair over the map's.", ("tier",)
)
_DISCOVERED = MetricFamily("gauge", "kvroute_discovered_engines", "Discovered engines, by state.", ("state",))
_DISCOVERY_AGE = MetricFamily("gauge", "kvroute_discovery_age_seconds", "Time since the last report of the source.")
_DISCOVERY_FAILING = MetricFamily(
    "gauge", "kvroute_discovery_failing", "Parts of the source that do not answer, or are invalid."
)
_DISCOVERY_FINDINGS = MetricFamily(
    "gauge", "kvroute_discovery_findings", "Pods with a finding, by effect.", ("effect",)
)
_SYNC_STATE = MetricFamily(
    "gauge",
    "kvroute_replication_state",
    "1 for the present state. Deprecated: "
    + ", ".join(f"{old} for {name}" for old, name in renamed.REPLICATION_STATES.items())
    + ".",
    ("state",),
)
_GATEWAYS = MetricFamily("gauge", "kvroute_replication_gateways", "Other gateways of the cluster that report.")
_BOOKINGS = MetricFamily("gauge", "kvroute_replication_bookings", "Requests of other gateways that the view counts.")
_FORESIGHT_GAUGES: tuple[tuple[MetricFamily, Callable[[TierLearned], float]], ...] = (
    (
        MetricFamily("gauge", "kvroute_foresight_learned_ratio", "Measured over static capacity.", ("policy", "tier")),
        lambda tier: tier.factor,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_foresight_bytes_per_second", "Estimated rate of a single transfer.", ("policy", "tier")
        ),
        lambda tier: tier.bytes_per_s or 0.0,
    ),
    (
        MetricFamily(
            "gauge",
            "kvroute_foresight_learned_transfers",
            "Recent transfers that the ratio counts; older ones fade.",
            ("policy", "tier"),
        ),
        lambda tier: round(tier.weight, 6),  # a weight that decays ends at 0
    ),
)
_INSTANCE_GAUGES: tuple[tuple[MetricFamily, Callable[[InstanceLoad], float | None]], ...] = (
    (
        MetricFamily("gauge", "kvroute_instance_up", "1 while the health check passes.", ("engine", "role")),
        lambda instance: int(instance.up),
    ),
    (
        MetricFamily("gauge", "kvroute_breaker_state", "0 closed, 1 half-open, 2 open.", ("engine",)),
        lambda instance: _BREAKER[instance.breaker],
    ),
    (
        MetricFamily("gauge", "kvroute_instance_requests", "Own requests on the instance.", ("engine", "role")),
        lambda instance: instance.requests,
    ),
    (
        MetricFamily("gauge", "kvroute_instance_running", "Running requests, as reported by the engine.", ("engine",)),
        lambda instance: None if instance.scrape_age_s is None else instance.running,
    ),
    (
        MetricFamily("gauge", "kvroute_instance_waiting", "Waiting requests, as reported by the engine.", ("engine",)),
        lambda instance: None if instance.scrape_age_s is None else instance.waiting,
    ),
    (
        MetricFamily("gauge", "kvroute_instance_kv_used_ratio", "KV memory in use.", ("engine",)),
        lambda instance: instance.kv_used_share,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_prefill_pending_seconds", "Assigned prefill work that is not done.", ("engine",)
        ),
        lambda instance: instance.prefill_pending_s,
    ),
    (
        MetricFamily(
            "gauge", "kvroute_storage_queue_seconds", "Storage read queue of the node, own reads.", ("engine",)
        ),
        lambda instance: instance.storage_queue_s,
    ),
    (
        MetricFamily("gauge", "kvroute_scrape_age_seconds", "Age of the last successful scrape.", ("engine",)),
        lambda instance: instance.scrape_age_s,
    ),
)
_DESIRED = MetricFamily("gauge", "kvroute_desired_replicas", "Instances that there should be now.", ("model", "role"))
_NEEDED = MetricFamily(
    "gauge",
    "kvroute_needed_replicas",
    "Instances that the present traffic needs; reason: what sets their number.",
    ("model", "role", "reason"),
)
_SERVING = MetricFamily(
    "gauge", "kvroute_serving_replicas", "Instances that serve, or are about to.", ("model", "role")
)
_RATE = MetricFamily(
    "gauge", "kvroute_expected_requests_per_second", "Request rate that the numbers are computed for.", ("model",)
)
_ATTAINMENT = MetricFamily(
    "gauge", "kvroute_predicted_slo_ratio", "Predicted share of requests in time with the needed instances.", ("model",)
)
_MOVING = MetricFamily("gauge", "kvroute_scaling_in_progress", "Instances that start or stop.", ("action",))


def load_gauges(
    load: GatewayStatus, transferring: Sequence[int], roles: Mapping[str, Role], *, version: str, policy: str
) -> Iterator[tuple[MetricFamily, Iterable[tuple[Key, float]]]]:
    """Yield families with their samples; an unknown value has no sample.

    Args:
        load: the current load.
        transferring: own transfers in progress, by tier.
        roles: roles by instance, for instances whose load has none.
        version, policy: labels of `kvroute_info`.
    """
    yield _INFO, [((version, policy), 1)]
    yield _READY, [((), int(load.ready))]
    yield _IN_FLIGHT, [((), load.in_flight)]
    yield _QUEUED, [((), load.queued)]
    waiting = load.waiting
    yield _WAITING, [((str(band),), count) for band, count in waiting.items()] if waiting is not None else []
    yield _DEFERRED, [((), load.deferred)] if waiting is not None else []
    yield _CONNECTIONS, [((), load.connections)]
    yield _FORWARDED, [((), load.forwarded)]
    yield _TRANSFERRING, [((label,), count) for label, count in zip(TIER_LABELS, transferring, strict=True)]
    yield _PANIC, [((panic.model, panic.role), int(panic.active)) for panic in load.panics]
    oracle = load.oracle
    yield _ORACLE_AGE, [((oracle.source,), oracle.age_s)] if oracle.age_s is not None else []
    yield _CONGESTION, [((label,), share) for label, share in zip(TIER_LABELS, oracle.congestion, strict=True)]
    ratios = zip(TIER_LABELS, oracle.learned_ratio, strict=True)
    yield _LEARNED, [((label,), ratio) for label, ratio in ratios if ratio is not None]
    lowest = zip(TIER_LABELS, load.path_ratios, strict=False)
    yield _PATHS, [((label,), ratio) for label, ratio in lowest if ratio is not None]
    for foreseen, learned in _FORESIGHT_GAUGES:
        yield foreseen, _per_tier(load.foresight, learned)
    yield from offload_gauges(load.offload)
    yield from _scaling_gauges(load.scaling)
    yield _DISCOVERED, _discovered(load.discovery)
    found = load.discovery
    yield _DISCOVERY_AGE, [((), found.age_s)] if found is not None and found.age_s is not None else []
    yield _DISCOVERY_FAILING, [((), len(found.failures))] if found is not None else []
    findings = found.findings.items() if found is not None else ()
    yield _DISCOVERY_FINDINGS, [((effect.replace(" ", "_"),), count) for effect, count in findings]
    shared = load.replication
    states = get_args(SyncState) if shared is not None else ()
    named = [(state, state) for state in states]
    named += [entry for entry in renamed.REPLICATION_STATES.items() if entry[1] in states]
    yield _SYNC_STATE, [((label,), int(shared is not None and shared.state == state)) for label, state in named]
    yield _GATEWAYS, [((), shared.gateways)] if shared is not None else []
    yield _BOOKINGS, [((), shared.bookings)] if shared is not None else []
    for family, value in _INSTANCE_GAUGES:
        yield family, _per_instance(family, value, load.instances, roles)


def _discovered(load: DiscoveryLoad | None) -> Iterator[tuple[Key, float]]:
    if load is not None:
        yield ("member",), load.members
        yield ("draining",), load.draining
        yield ("refused",), len(load.refused)


def _per_tier(foresight: ForesightLoad | None, value: Callable[[TierLearned], float]) -> Iterator[tuple[Key, float]]:
    """Yield samples of the tiers that the cluster has and that transfers calibrate; inside a rack the factor is that of
    the NICs."""
    if foresight is None:
        return
    for label, tier in list(zip(TIER_LABELS, foresight.tiers, strict=True))[SAME_RACK:]:
        if tier.bytes_per_s is not None:
            yield (foresight.policy, label), value(tier)


def _per_instance(
    family: MetricFamily,
    value: Callable[[InstanceLoad], float | None],
    instances: Iterable[InstanceLoad],
    roles: Mapping[str, Role],
) -> Iterator[tuple[Key, float]]:
    with_role = "role" in family.labels
    for instance in instances:
        sample = value(instance)
        if sample is not None:
            name = instance.name
            role = instance.role or roles.get(name) or ""
            yield ((name, role) if with_role else (name,)), sample


def _scaling_gauges(scaling: ScalingLoad | None) -> Iterator[tuple[MetricFamily, Iterable[tuple[Key, float]]]]:
    """Yield families with their samples; no samples if the settings have no `autoscaling` section."""
    models = scaling.models if scaling is not None else ()
    desired = [((model.model, "prefill"), model.prefill) for model in models]
    yield _DESIRED, [*desired, *(((model.model, "decode"), model.decode) for model in models)]
    pairs = [(model, k, role) for model in models for k, role in enumerate(("prefill", "decode"))]
    yield _NEEDED, [((scaled.model, role, scaled.reasons[k]), scaled.needed[k]) for scaled, k, role in pairs]
    yield _SERVING, [((scaled.model, role), scaled.serving[k]) for scaled, k, role in pairs]
    yield _RATE, [((model.model,), model.rate_per_s) for model in models]
    yield _ATTAINMENT, [((model.model,), model.attainment) for model in models]
    moving = (("start", scaling.starting), ("stop", scaling.stopping)) if scaling is not None else ()
    yield _MOVING, [((action,), len(names)) for action, names in moving]
