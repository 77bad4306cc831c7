"""From a path and a method to a resource, an object and a verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.kube.apiserver.requests import Request
from tests.kube.apiserver.resources import Resource
from tests.kube.apiserver.status import not_allowed

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete", "GET": "get"}


@dataclass(frozen=True, slots=True)
class Target:
    """What a path is about."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    watching: bool = False


def parse_path(parts: list[str]) -> Target | None:
    """Return what the parts of a path are about, or None if it is no resource."""
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    watching = rest[0] == "watch" and len(rest) > 1
    rest = rest[1:] if watching else rest
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    name = rest[1] if len(rest) > 1 else ""
    return Target(group, version, rest[0], namespace, name, "/".join(rest[2:]), watching)


def verb_of(method: str, target: Target, query: Mapping[str, list[str]]) -> str:
    """Return the verb of a request as RBAC names it."""
    if method == "GET" and not target.name:
        watch = target.watching or (bool(query.get("watch")) and query["watch"][0].lower() not in ("0", "false", ""))
        return "watch" if watch else "list"
    if method == "DELETE" and not target.name:
        return "deletecollection"
    return VERBS.get(method, method.lower())


def right_scope(resource: Resource, target: Target) -> bool:
    """Return whether a path with or without a namespace fits a resource."""
    if target.namespace and not resource.namespaced:
        return False
    if resource.namespaced and not target.namespace and target.name:
        return False
    return not target.subresource or resource.sub(target.subresource) is not None or resource.custom


def check_method(request: Request) -> None:
    """Raise ApiError 405 for a method that the resource does not have, 404 for a subresource that it lacks."""
    resource = request.resource
    if request.subresource:
        sub = resource.sub(request.subresource)
        if sub is not None and request.verb not in sub.verbs:
            raise not_allowed()
        return
    if request.verb not in resource.verbs or (request.method == "POST" and request.name):
        raise not_allowed()
    if request.method in ("PUT", "PATCH") and not request.name:
        raise not_allowed()
    if resource.namespaced and not request.namespace and request.method != "GET":
        raise not_allowed()
