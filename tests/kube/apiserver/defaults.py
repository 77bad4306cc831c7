"""Defaults that the API server fills into built-in objects when it decodes them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping

from tests.kube.apiserver.status import Object

PROBE = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}


def _put(found: Object, **defaults: object) -> None:
    """Set fields that are absent."""
    for name, value in defaults.items():
        if name not in found:
            found[name] = value


def _field_ref(source: Object) -> None:
    if "fieldRef" in source:
        _put(source["fieldRef"], apiVersion="v1")


def _volume(volume: Object) -> None:
    for kind in ("downwardAPI", "configMap", "secret", "projected"):
        if kind in volume:
            _put(volume[kind], defaultMode=420)
    for item in volume.get("downwardAPI", {}).get("items", []):
        _field_ref(item)
    for source in volume.get("projected", {}).get("sources", []):
        for item in source.get("downwardAPI", {}).get("items", []):
            _field_ref(item)
        if "serviceAccountToken" in source:
            _put(source["serviceAccountToken"], expirationSeconds=3600)
    if not volume.keys() - {"name"}:
        volume["emptyDir"] = {}


def _probe(probe: Object) -> None:
    _put(probe, **PROBE)
    if "httpGet" in probe:
        _put(probe["httpGet"], path="/", scheme="HTTP")


def _container(container: Object, pod: bool) -> None:
    tag = re.search(r":([^:/]+)$", container.get("image", ""))
    latest = tag is None or tag[1] == "latest"
    if "@" in container.get("image", ""):
        latest = False
    _put(
        container,
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        imagePullPolicy="Always" if latest else "IfNotPresent",
    )
    for port in container.get("ports", []):
        _put(port, protocol="TCP")
    for variable in container.get("env", []):
        _field_ref(variable.get("valueFrom", {}))
    for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
        if kind in container:
            _probe(container[kind])
    limits = container["resources"].get("limits", {})
    if pod and limits:
        requests = container["resources"].setdefault("requests", {})
        container["resources"]["requests"] = {**limits, **requests}


def pod_spec(spec: Object, pod: bool) -> None:
    """Fill a pod spec; a Pod gets more than a template."""
    _put(
        spec,
        restartPolicy="Always",
        terminationGracePeriodSeconds=30,
        dnsPolicy="ClusterFirst",
        securityContext={},
        schedulerName="default-scheduler",
    )
    if pod:
        _put(spec, enableServiceLinks=True)
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    for volume in spec.get("volumes") or []:
        _volume(volume)
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        _container(container, pod)
    for container in spec.get("ephemeralContainers") or []:
        _container(container, False)


def _pod(found: Object) -> None:
    pod_spec(found["spec"], pod=True)
    status = found["status"]
    addresses = status.get("podIPs") or [{}]
    if status.get("podIP") and addresses[0].get("ip") != status["podIP"]:
        status["podIPs"] = [{"ip": status["podIP"]}]


def _deployment(found: Object) -> None:
    spec = found["spec"]
    _put(spec, replicas=1, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    _put(spec["strategy"], type="RollingUpdate")
    if spec["strategy"]["type"] == "RollingUpdate":
        _put(spec["strategy"].setdefault("rollingUpdate", {}), maxUnavailable="25%", maxSurge="25%")
    pod_spec(spec["template"]["spec"], pod=False)


def _service(found: Object) -> None:
    spec = found["spec"]
    _put(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    for port in spec.get("ports") or []:
        _put(port, protocol="TCP")
        if port["targetPort"] in (0, ""):
            port["targetPort"] = port["port"]


def _endpoint_slice(found: Object) -> None:
    for port in found.get("ports") or []:
        _put(port, name="", protocol="TCP")


def _secret(found: Object) -> None:
    texts: Mapping[str, str] = found.pop("stringData", {})
    if texts:
        data = found.setdefault("data", {})
        data.update({name: base64.b64encode(text.encode()).decode() for name, text in texts.items()})
    _put(found, type="Opaque")


def _namespace(found: Object) -> None:
    name = found["metadata"].get("name")
    if name:
        found["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = name
    _put(found["status"], phase="Active")


def _node(found: Object) -> None:
    status = found["status"]
    if "capacity" in status:
        _put(status, allocatable=dict(status["capacity"]))


def _webhooks(found: Object) -> None:
    for webhook in found.get("webhooks") or []:
        _put(
            webhook,
            failurePolicy="Fail",
            matchPolicy="Equivalent",
            namespaceSelector={},
            objectSelector={},
            timeoutSeconds=10,
        )
        if found.get("kind") == "MutatingWebhookConfiguration":
            _put(webhook, reinvocationPolicy="Never")
        if "service" in webhook["clientConfig"]:
            _put(webhook["clientConfig"]["service"], port=443)
        for rule in webhook.get("rules") or []:
            _put(rule, scope="*")


def _definition(found: Object) -> None:
    spec = found["spec"]
    names = spec["names"]
    if names.get("kind"):
        _put(names, singular=names["kind"].lower(), listKind=f"{names['kind']}List")
    _put(spec, conversion={"strategy": "None"})
    for version in spec.get("versions") or []:
        scale = (version.get("subresources") or {}).get("scale")
        if scale is not None and not scale.get("labelSelectorPath"):
            scale.pop("labelSelectorPath", None)


def _binding(found: Object) -> None:
    for subject in found.get("subjects") or []:
        if subject.get("kind") in ("User", "Group"):
            _put(subject, apiGroup="rbac.authorization.k8s.io")
    if not found["roleRef"].get("apiGroup"):
        found["roleRef"]["apiGroup"] = "rbac.authorization.k8s.io"


BY_KIND: Mapping[str, Callable[[Object], None]] = {
    "Pod": _pod, "Deployment": _deployment, "Service": _service, "EndpointSlice": _endpoint_slice, "Secret": _secret,
    "Namespace": _namespace, "Node": _node, "ValidatingWebhookConfiguration": _webhooks,
    "MutatingWebhookConfiguration": _webhooks, "CustomResourceDefinition": _definition, "RoleBinding": _binding,
    "ClusterRoleBinding": _binding,
}  # fmt: skip


def fill(found: Object) -> None:
    """Fill the defaults of a decoded object in place."""
    if filler := BY_KIND.get(found.get("kind", "")):
        filler(found)
