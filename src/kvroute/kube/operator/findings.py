"""The conditions of a KvRouter: whether it serves, whether its level is known, and whether its engines are labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.kube.operator.conditions import Finding, engine_counts, ready_replicas
from kvroute.kube.operator.observed import Ref
from kvroute.kube.operator.routers import RouterView
from kvroute.kube.resources import Object


def router_readiness(router: RouterView, deployment: Object | None, taken: Sequence[Ref]) -> Finding:
    """Return the condition `Ready`; `taken` are names of objects that belong to others."""
    if router.spec is None:
        return Finding("Ready", "False", "InvalidSpec", router.problem)
    if router.problem:
        return Finding("Ready", "False", "TopologyUnresolved", "The gateway stays as it is until the level is known.")
    if taken:
        what = f"{taken[0]} belongs to another owner; delete it, or give the KvRouter another name."
        return Finding("Ready", "False", "NameTaken", what)
    if not ready_replicas(deployment):
        return Finding("Ready", "False", "NoGateway", "No gateway pod is ready.")
    engines = engine_counts(router.pods)
    if not engines.both and not (engines.prefill and engines.decode):
        absent = "prefill" if not engines.prefill else "decode"
        return Finding("Ready", "False", "NoEngines", f"No {absent} engine is ready.")
    return Finding("Ready", "True", "Serving", "A gateway and engines of both phases are ready.")


def resolution(router: RouterView) -> Finding:
    """Return the condition `TopologyResolved`."""
    if router.spec is None:
        return Finding("TopologyResolved", "Unknown", "InvalidSpec", "The spec cannot be read.")
    if router.problem:
        return Finding("TopologyResolved", "False", "TopologyUnresolved", router.problem)
    if router.resolved is None:
        return Finding("TopologyResolved", "True", "NoConstraint", "KV transfers have no boundary.")
    level = router.resolved.level
    what = f"The level {level.domain} is the node label {level.label_key}."
    return Finding("TopologyResolved", "True", "Resolved", what)


def labelling(router: RouterView, missing: Mapping[str, Sequence[str]]) -> Finding:
    """Return the condition `EnginesLabelled`; `missing` has the levels that each engine pod lacks, by its name."""
    if router.resolved is None:
        reason = "TopologyUnresolved" if router.problem else "NoConstraint"
        return Finding("EnginesLabelled", "Unknown", reason, "Engines get no topology labels.")
    without = {name: levels for name, levels in missing.items() if levels}
    if without:
        name, (first, *_) = next(iter(without.items()))
        key = next((level.label_key for level in router.resolved.levels if level.domain == first), first)
        what = f"{len(without)} engine pods lack a level: the node of {name} has no label {key}."
        return Finding("EnginesLabelled", "False", "NodeLabelMissing", what)
    return Finding("EnginesLabelled", "True", "Labelled", "Every scheduled engine pod has its topology labels.")
