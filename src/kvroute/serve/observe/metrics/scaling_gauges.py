"""Gauges of autoscaling: the desired, needed and serving numbers of instances, by model and role."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvroute.serve.observe.metrics.exposition import Family, Key
from kvroute.serve.observe.view import ScalingLoad

_DESIRED = Family("gauge", "kvroute_desired_replicas", "Instances that there should be now.", ("model", "role"))
_NEEDED = Family(
    "gauge",
    "kvroute_needed_replicas",
    "Instances that the present traffic needs; reason: what sets their number.",
    ("model", "role", "reason"),
)
_SERVING = Family("gauge", "kvroute_serving_replicas", "Instances that serve, or are about to.", ("model", "role"))
_RATE = Family(
    "gauge", "kvroute_expected_requests_per_second", "Request rate that the numbers are computed for.", ("model",)
)
_ATTAINMENT = Family(
    "gauge", "kvroute_predicted_slo_ratio", "Predicted share of requests in time with the needed instances.", ("model",)
)
_MOVING = Family("gauge", "kvroute_scaling_in_progress", "Instances that start or stop.", ("action",))


def scaling_gauges(scaling: ScalingLoad | None) -> Iterator[tuple[Family, Iterable[tuple[Key, float]]]]:
    """Yield families with their samples; no samples if the settings have no `autoscaling` section."""
    models = scaling.models if scaling is not None else ()
    desired = [((each.model, "prefill"), each.prefill) for each in models]
    yield _DESIRED, [*desired, *(((each.model, "decode"), each.decode) for each in models)]
    pairs = [(each, k, role) for each in models for k, role in enumerate(("prefill", "decode"))]
    yield _NEEDED, [((each.model, role, each.reasons[k]), each.needed[k]) for each, k, role in pairs]
    yield _SERVING, [((each.model, role), each.serving[k]) for each, k, role in pairs]
    yield _RATE, [((each.model,), each.rate_per_s) for each in models]
    yield _ATTAINMENT, [((each.model,), each.attainment) for each in models]
    moving = (("start", scaling.starting), ("stop", scaling.stopping)) if scaling is not None else ()
    yield _MOVING, [((action,), len(names)) for action, names in moving]
