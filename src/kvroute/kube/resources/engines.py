"""Engine pods: their role by label, and the KvRouters that select them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast, get_args

from kvroute.kube.discovery.labels import NOT_AN_ENGINE, ROLE, ROLE_ALIASES
from kvroute.kube.resources.fields import Object, name_of
from kvroute.types import Role

ROLES: tuple[str, ...] = (*get_args(Role), NOT_AN_ENGINE)
"""Values of the label of the role."""


def role_of(labels: Mapping[str, str]) -> Role | None:
    """Return the role that the labels of a pod give; None: it is no engine. kvroute's own label counts first."""
    own = labels.get(ROLE)
    if own is not None:
        return cast(Role, own) if own in get_args(Role) else None
    for key, values in ROLE_ALIASES.items():
        found = values.get(labels.get(key, ""))
        if found is not None:
            return None if found == NOT_AN_ENGINE else found
    return None


def selects(router: Object, namespace: str, labels: Mapping[str, str]) -> bool:
    """Return True if a KvRouter selects pods with these labels in this namespace."""
    selector = ((router.get("spec") or {}).get("engines") or {}).get("selector") or {}
    wanted = (selector.get("matchLabels") or {}).items()
    return router["metadata"].get("namespace") == namespace and bool(wanted) and wanted <= labels.items()


def selecting_routers(namespace: str, labels: Mapping[str, str], routers: Sequence[Object]) -> Iterator[Object]:
    """Yield the KvRouters that select such a pod, in the order of their names."""
    return (router for router in sorted(routers, key=name_of) if selects(router, namespace, labels))
