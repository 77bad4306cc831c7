"""The conditions of a KvRouter: whether it serves, whether its level is known, and whether its engines are labelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvroute.kube.admission.injection import INIT_CONTAINER
from kvroute.kube.operator.conditions import ConditionFinding, engine_counts
from kvroute.kube.operator.gateway_workload import GATEWAY_CONTAINER, used_pull_secrets
from kvroute.kube.operator.observed import OperatorSpec, Ref, is_ready, lacks_image
from kvroute.kube.operator.routers import RouterView
from kvroute.kube.resources import Object, name_of


def router_readiness(
    router: RouterView, gateways: Sequence[Object], settings: OperatorSpec, taken: Sequence[Ref]
) -> ConditionFinding:
    """Return the condition `Ready`.

    Args:
        gateways: the pods of the gateway.
        taken: names of objects that belong to others.
    """
    if router.spec is None:
        return ConditionFinding("Ready", "False", "InvalidSpec", router.problem)
    if router.problem:
        return ConditionFinding(
            "Ready", "False", "TopologyUnresolved", "The gateway stays as it is until the level is known."
        )
    if taken:
        return ConditionFinding("Ready", "False", "NameTaken", _taken(taken))
    if not any(map(is_ready, gateways)):
        secrets = used_pull_secrets(router.spec, settings)
        missing = _missing_image(gateways, GATEWAY_CONTAINER, secrets, "spec.imagePullSecrets")
        return ConditionFinding("Ready", "False", "NoGateway", f"No gateway pod is ready{missing}.")
    engines = engine_counts(router.pods)
    if not engines.both and not (engines.prefill and engines.decode):
        absent = "prefill" if not engines.prefill else "decode"
        missing = _missing_image(
            router.pods, INIT_CONTAINER, settings.pull_secrets, "imagePullSecrets of the chart (--image-pull-secret)"
        )
        return ConditionFinding("Ready", "False", "NoEngines", f"No {absent} engine is ready{missing}.")
    return ConditionFinding("Ready", "True", "Serving", "A gateway and engines of both phases are ready.")


def _missing_image(pods: Sequence[Object], container: str, secrets: Sequence[str], setting: str) -> str:
    """Return the reason why the first of these pods does not start, if its image cannot be pulled."""
    pod = next((pod for pod in pods if lacks_image(pod.get("status") or {}, container)), None)
    if pod is None:
        return ""
    fix = f"set {setting} if the registry needs credentials"
    if secrets:
        names = ", ".join(f"the Secret {name}" for name in secrets)
        fix = f"create {names} with credentials of its registry in the namespace {pod['metadata']['namespace']}"
    return f": the image of the container {container} of the pod {name_of(pod)} cannot be pulled; {fix}"


def _taken(taken: Sequence[Ref]) -> str:
    names = ", ".join(map(str, taken))
    belongs, fix = "belong" if len(taken) > 1 else "belongs", "delete what is not in use"
    if all(ref.namespace for ref in taken):
        fix += ", or give the KvRouter another name"
    return f"{names} {belongs} to another owner, so the objects of this KvRouter are not made or changed; {fix}."


def resolution(router: RouterView) -> ConditionFinding:
    """Return the condition `TopologyResolved`."""
    if router.spec is None:
        return ConditionFinding("TopologyResolved", "Unknown", "InvalidSpec", "The spec cannot be read.")
    if router.problem:
        return ConditionFinding("TopologyResolved", "False", "TopologyUnresolved", router.problem)
    if router.resolved is None:
        return ConditionFinding("TopologyResolved", "True", "NoConstraint", "KV transfers have no boundary.")
    level = router.resolved.level
    what = f"The level {level.domain} is the node label {level.label_key}."
    return ConditionFinding("TopologyResolved", "True", "Resolved", what)


def labelling(router: RouterView, missing: Mapping[str, Sequence[str]]) -> ConditionFinding:
    """Return the condition `EnginesLabelled`; `missing` has the levels that each engine pod lacks, by its name."""
    if router.resolved is None:
        reason = "TopologyUnresolved" if router.problem else "NoConstraint"
        return ConditionFinding("EnginesLabelled", "Unknown", reason, "Engines get no topology labels.")
    without = {name: levels for name, levels in missing.items() if levels}
    if without:
        name, (first, *_) = next(iter(without.items()))
        key = next((level.label_key for level in router.resolved.levels if level.domain == first), first)
        what = f"{len(without)} engine pods lack a level: the node of {name} has no label {key}."
        return ConditionFinding("EnginesLabelled", "False", "NodeLabelMissing", what)
    return ConditionFinding(
        "EnginesLabelled", "True", "Labelled", "Every scheduled engine pod has its topology labels."
    )
