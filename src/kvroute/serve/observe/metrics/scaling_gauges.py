"""Gauges of autoscaling: the desired, needed and serving numbers of instances, by model and role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvroute.serve.observe.metrics.exposition import Key, MetricFamily
from kvroute.serve.observe.view import ScalingLoad

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


def scaling_gauges(scaling: ScalingLoad | None) -> Iterator[tuple[MetricFamily, Iterable[tuple[Key, float]]]]:
    """Yield families with their samples; no samples if the settings have no `autoscaling` section."""
    models = scaling.models if scaling is not None else ()
    desired = [((model.model, "prefill"), model.prefill) for model in models]
    yield _DESIRED, [*desired, *(((model.model, "decode"), model.decode) for model in models)]
    pairs = [(model, k, role) for model in models for k, role in enumerate(("prefill", "decode"))]
    yield _NEEDED, [((each.model, role, each.reasons[k]), each.needed[k]) for each, k, role in pairs]
    yield _SERVING, [((each.model, role), each.serving[k]) for each, k, role in pairs]
    yield _RATE, [((model.model,), model.rate_per_s) for model in models]
    yield _ATTAINMENT, [((model.model,), model.attainment) for model in models]
    moving = (("start", scaling.starting), ("stop", scaling.stopping)) if scaling is not None else ()
    yield _MOVING, [((action,), len(names)) for action, names in moving]
