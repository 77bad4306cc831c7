"""Execution of a reconcile's actions: one by one, with a count of those that have to be tried again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from kvroute.kube.api.requests import ApiRefused
from kvroute.kube.operator.actions import Action, Apply, Delete, Emit, PatchMetadata, SetStatus
from kvroute.kube.operator.api_calls import ApiCalls
from kvroute.kube.operator.election import micro_time
from kvroute.kube.operator.observed import MANAGED_BY, Ref, ref_of
from kvroute.kube.operator.rights import BINDINGS, EVENTS, OWNED, PODS, ROUTERS, ResourceKind

_KINDS = {(kind.api_version, kind.kind): kind for kind in (*OWNED, BINDINGS, PODS, ROUTERS)}
_LOGGER = logging.getLogger("kvroute.operator")
_GONE = 404
_NEVER = (403, 404, 422)
"""Statuses of Events that will never be accepted, such as those in a namespace that ends. The status of the object must
not wait for them."""


class Execution:
    """Executes actions and remembers whose object has refused one."""

    def __init__(
        self, calls: ApiCalls, identity: str, clock: float, allowed: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Args:
            identity, clock: written into Events; Unix seconds.
            allowed: whether this operator still leads; asked before each action.
        """
        self._calls, self._identity, self._clock, self._allowed = calls, identity, clock, allowed
        self._failed: set[Ref] = set()
        self.retry_after_s = 0.0
        """Longest pause that the server has asked for."""

    @property
    def failures(self) -> int:
        """Number of objects for which an action has failed."""
        return len(self._failed)

    async def run(self, actions: Sequence[Action]) -> None:
        """Execute actions in order. After a failure the other actions of that object are left out; they come again with
        the next snapshot. An object that has gone is no failure.

        Raises:
            httpx2.HTTPError: the server does not answer.
        """
        for action in actions:
            ref = ref_of(action.obj) if isinstance(action, Apply) else action.ref
            if not self._allowed():
                return
            if ref in self._failed:
                continue
            try:
                await self._execute(action)
            except ApiRefused as refused:
                if refused.status == _GONE and isinstance(action, (PatchMetadata, SetStatus)):
                    continue
                if refused.status in _NEVER and isinstance(action, Emit):
                    _LOGGER.warning("%s has no Event: %s", ref, refused)
                    continue
                self._failed.add(ref)
                self.retry_after_s = max(self.retry_after_s, refused.retry_after_s)
                level = logging.INFO if refused.status == 409 else logging.WARNING
                _LOGGER.log(level, "%s of %s is refused: %s", type(action).__name__, ref, refused)

    async def _execute(self, action: Action) -> None:
        match action:
            case Apply(obj):
                await self._calls.apply(_kind(ref_of(obj)), obj)
                _LOGGER.info("applied %s", ref_of(obj))
            case Delete(ref, uid):
                await self._calls.delete(_kind(ref), ref.namespace, ref.name, uid)
                _LOGGER.info("deleted %s", ref)
            case PatchMetadata(ref=ref):
                await self._calls.patch(_kind(ref), ref.namespace, ref.name, merge_patch(action))
                _LOGGER.info("patched metadata of %s", ref)
            case SetStatus(ref, status):
                metadata = {"name": ref.name, "namespace": ref.namespace}
                obj = {"apiVersion": ref.api_version, "kind": ref.kind, "metadata": metadata, "status": dict(status)}
                await self._calls.apply(_kind(ref), obj, "status")
            case Emit():
                event = event_object(action, self._identity, self._clock)
                await self._calls.create(EVENTS, event["metadata"]["namespace"], event)


def merge_patch(action: PatchMetadata) -> dict[str, Any]:
    """Return the body of a patch; the resourceVersion makes the server refuse it if the object has changed."""
    metadata: dict[str, Any] = {"resourceVersion": action.resource_version}
    if action.labels:
        metadata["labels"] = dict(action.labels)
    if action.annotations:
        metadata["annotations"] = dict(action.annotations)
    if action.finalizers is not None:
        metadata["finalizers"] = list(action.finalizers)
    return {"metadata": metadata}


def event_object(action: Emit, identity: str, clock: float) -> dict[str, Any]:
    """Return an Event of the core API; those about objects without a namespace are in `default`."""
    ref = action.ref
    namespace = ref.namespace or "default"
    seconds = micro_time(clock)[:19] + "Z"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": action.name, "namespace": namespace},
        "involvedObject": {
            "apiVersion": ref.api_version,
            "kind": ref.kind,
            "namespace": ref.namespace,
            "name": ref.name,
            "uid": action.uid,
        },
        "type": action.type,
        "reason": action.reason,
        "message": action.message[:1000],
        "source": {"component": MANAGED_BY, "host": identity},
        "firstTimestamp": seconds,
        "lastTimestamp": seconds,
        "count": 1,
    }


def _kind(ref: Ref) -> ResourceKind:
    return _KINDS[ref.api_version, ref.kind]


FAILURES = (httpx2.HTTPError, OSError)
"""What a call raises if the server does not answer."""
