"""Discovery, health and version: what the server tells about itself."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

from tests.kube.apiserver.requests import Answer
from tests.kube.apiserver.resources import Catalogue, Resource
from tests.kube.apiserver.status import Object, not_allowed, unknown_path
from tests.kube.apiserver.views import Form

VERSION = {
    "major": "1", "minor": "36", "emulationMajor": "1", "emulationMinor": "36", "minCompatibilityMajor": "1",
    "minCompatibilityMinor": "35", "gitVersion": "v1.36.2", "gitCommit": "$Format:%H$", "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z", "goVersion": "go1.26.6", "compiler": "gc", "platform": "linux/amd64",
}  # fmt: skip
AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
TEXT = "text/plain; charset=utf-8"
GROUP_ORDER = (
    "apps", "events.k8s.io", "authentication.k8s.io", "authorization.k8s.io", "autoscaling", "policy",
    "rbac.authorization.k8s.io", "admissionregistration.k8s.io", "apiextensions.k8s.io", "coordination.k8s.io",
    "discovery.k8s.io", "flowcontrol.apiserver.k8s.io",
)  # fmt: skip
HOOKS = (
    "start-apiserver-admission-initializer", "generic-apiserver-start-informers",
    "priority-and-fairness-config-consumer", "priority-and-fairness-filter", "storage-object-count-tracker-hook",
    "start-apiextensions-informers", "start-apiextensions-controllers", "crd-informer-synced",
    "start-system-namespaces-controller", "peer-endpoint-reconciler-controller",
    "start-cluster-authentication-info-controller", "start-kube-apiserver-identity-lease-controller",
    "start-kube-apiserver-identity-lease-garbage-collector", "storage-readiness",
    "start-legacy-token-tracking-controller", "start-service-ip-repair-controllers", "rbac/bootstrap-roles",
    "scheduling/bootstrap-system-priority-classes", "priority-and-fairness-config-producer", "bootstrap-controller",
    "start-kubernetes-service-cidr-controller", "start-kube-aggregator-informers",
    "apiservice-status-local-available-controller", "apiservice-status-remote-available-controller",
    "apiservice-registration-controller", "apiservice-wait-for-first-sync", "apiservice-discovery-controller",
    "kube-apiserver-autoregistration",
)  # fmt: skip
CHECKS = (
    "ping", "log", "etcd", "etcd-readiness", "informer-sync", *(f"poststarthook/{hook}" for hook in HOOKS),
    "autoregister-completion", "poststarthook/apiservice-openapi-controller",
    "poststarthook/apiservice-openapiv3-controller", "shutdown",
)  # fmt: skip
STORAGE_CHECKS = ("etcd", "etcd-readiness")


def page_not_found() -> Answer:
    """Return the text of a path that nothing serves."""
    return Answer(404, "404 page not found\n", content_type=TEXT)


def resource_entries(resource: Resource) -> list[Object]:
    """Return a resource and its subresources as an APIResourceList has them."""
    made: Object = {
        "name": resource.plural, "singularName": resource.singular or resource.kind.lower(),
        "namespaced": resource.namespaced, "kind": resource.kind, "verbs": list(resource.verbs),
    }  # fmt: skip
    if resource.short_names:
        made["shortNames"] = list(resource.short_names)
    if resource.categories:
        made["categories"] = list(resource.categories)
    storage_hash = resource.storage_hash or _hash(f"{resource.group}/{resource.version}/{resource.kind}")
    if resource.verbs != ("create",):
        made["storageVersionHash"] = storage_hash
    listed = [made]
    for sub in resource.subresources:
        part: Object = {"name": f"{resource.plural}/{sub.name}", "singularName": "", "namespaced": resource.namespaced}
        if sub.group:
            part |= {"group": sub.group, "version": sub.version}
        listed.append({**part, "kind": sub.kind, "verbs": list(sub.verbs)})
    return listed


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()[:8]).decode()


def _group(catalogue: Catalogue, group: str) -> Object:
    versions = [{"groupVersion": f"{group}/{version}", "version": version} for version in catalogue.versions(group)]
    return {"name": group, "versions": versions, "preferredVersion": versions[0]}


def groups(catalogue: Catalogue) -> list[str]:
    """Return the names of the served groups, in the order of discovery."""
    custom = sorted({resource.group for resource in catalogue.custom.values()} - set(GROUP_ORDER))
    return [*(name for name in GROUP_ORDER if catalogue.has_built_in_group(name)), *custom]


class Discovery:
    """Answers the paths above resources."""

    def __init__(self, catalogue: Catalogue, address: str = "127.0.0.1") -> None:
        self._catalogue = catalogue
        self._address = address
        self.healthy = True

    def answer(
        self, method: str, parts: list[str], form: Form, etag: str, query: Mapping[str, Sequence[str]]
    ) -> Answer:
        """Answer a path that is no resource; raise ApiError."""
        if method not in ("GET", "HEAD"):
            raise not_allowed()
        match parts:
            case []:
                return Answer(200, {"paths": ["/api", "/api/v1", "/apis", "/healthz", "/livez", "/readyz", "/version"]})
            case ["version"]:
                return Answer(200, dict(VERSION))
            case ["healthz" | "readyz" | "livez", *check]:
                return self._health(parts[0], check, query)
            case ["api" | "apis"] if form.wanted == "APIGroupDiscoveryList":
                return self._aggregated(parts[0], etag)
            case ["api"]:
                clients = [{"clientCIDR": "0.0.0.0/0", "serverAddress": self._address}]
                return Answer(200, {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": clients})
            case ["apis"]:
                listed = [_group(self._catalogue, name) for name in groups(self._catalogue)]
                return Answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})
            case ["api", version]:
                return self._resources("", version)
            case ["apis", group]:
                if not self._catalogue.versions(group):
                    return page_not_found()
                return Answer(200, {"kind": "APIGroup", "apiVersion": "v1", **_group(self._catalogue, group)})
            case ["apis", group, version]:
                return self._resources(group, version)
        return page_not_found()

    def _health(self, name: str, check: list[str], query: Mapping[str, Sequence[str]]) -> Answer:
        if check and "/".join(check) not in CHECKS:
            return page_not_found()
        excluded = query.get("exclude", ())
        failing = [check_name for check_name in STORAGE_CHECKS if not self.healthy and check_name not in excluded]
        headers = {"X-Content-Type-Options": "nosniff"}
        if not failing and "verbose" not in query:
            return Answer(200, "ok", headers, TEXT)
        lines = []
        for check_name in CHECKS:
            if check_name in excluded:
                lines.append(f"[+]{check_name} excluded: ok")
            else:
                lines.append(
                    f"[-]{check_name} failed: reason withheld" if check_name in failing else f"[+]{check_name} ok"
                )
        unknown = [check_name for check_name in excluded if check_name not in CHECKS]
        if unknown:
            listed = ", ".join(f'"{check_name}"' for check_name in unknown)
            lines.append(f"warn: some health checks cannot be excluded: no matches for {listed}")
        lines.append(f"{name} check {'failed' if failing else 'passed'}")
        return Answer(500 if failing else 200, "\n".join(lines) + "\n", headers, TEXT)

    def _resources(self, group: str, version: str) -> Answer:
        if version not in self._catalogue.versions(group):
            if group == "" or self._catalogue.has_built_in_group(group):
                raise unknown_path()
            return page_not_found()
        found = [r for r in self._catalogue if (r.group, r.version) == (group, version)]
        if not found[0].custom:
            found.sort(key=lambda resource: resource.plural)
        listed = [entry for resource in found for entry in resource_entries(resource)]
        made: Object = {"kind": "APIResourceList"}
        if group:
            made["apiVersion"] = "v1"
        group_version = f"{group}/{version}" if group else version
        return Answer(200, {**made, "groupVersion": group_version, "resources": listed})

    def _aggregated(self, root: str, etag: str) -> Answer:
        names = [""] if root == "api" else groups(self._catalogue)
        items = []
        for name in names:
            metadata: Object = {"name": name} if name else {}
            versions = [
                {"version": version, "resources": self._version(name, version), "freshness": "Current"}
                for version in self._catalogue.versions(name)
            ]
            items.append({"metadata": metadata, "versions": versions})
        body: Object = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}}
        body["items"] = items
        digest = hashlib.sha512(json.dumps(body, sort_keys=True).encode()).hexdigest().upper()
        headers = {"ETag": f'"{digest}"', "Vary": "Accept"}
        if etag == headers["ETag"]:
            return Answer(304, None, headers)
        if root == "apis":
            headers["Cache-Control"] = "public"
        return Answer(200, body, headers, AGGREGATED)

    def _version(self, group: str, version: str) -> list[Object]:
        found = [r for r in self._catalogue if (r.group, r.version) == (group, version)]
        return [_aggregated_resource(resource) for resource in sorted(found, key=lambda resource: resource.plural)]


def _aggregated_resource(resource: Resource) -> Object:
    made: Object = {
        "resource": resource.plural, "responseKind": _response_kind("", "", resource.kind),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular or resource.kind.lower(), "verbs": list(resource.verbs),
    }  # fmt: skip
    if resource.short_names:
        made["shortNames"] = list(resource.short_names)
    if resource.categories:
        made["categories"] = list(resource.categories)
    if resource.subresources:
        made["subresources"] = [
            {
                "subresource": sub.name, "responseKind": _response_kind(sub.group, sub.version, sub.kind),
                "verbs": list(sub.verbs),
            }
            for sub in resource.subresources
        ]  # fmt: skip
    return made


def _response_kind(group: str, version: str, kind: str) -> Object:
    return {"group": group, "version": version, "kind": kind}
