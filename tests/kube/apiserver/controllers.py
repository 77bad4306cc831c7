"""The controller of Deployments, as far as clients see it: it overwrites the status with what it counts."""

from __future__ import annotations

import asyncio

from tests.kube.apiserver.resources import Key
from tests.kube.apiserver.status import Object
from tests.kube.apiserver.store import Change, Store

DEPLOYMENTS = ("apps", "deployments")
PODS = ("", "pods")
HASH = "pod-template-hash"
"""Label of the pods that a ReplicaSet of a Deployment makes; others do not count."""


class DeploymentController:
    """Keeps `status` of each Deployment equal to its pods, whatever others write there. It makes no pods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        store.listen(self._changed)

    def _changed(self, change: Change) -> None:
        if change.key[:2] in (DEPLOYMENTS, PODS):
            asyncio.get_running_loop().call_soon(self._count, change.key[2])

    def _count(self, namespace: str) -> None:
        for key, deployment in list(self._store.select(DEPLOYMENTS, namespace)):
            counted = self._status(key, deployment)
            if deployment.get("status") != counted:
                self._store.write(key, {**deployment, "status": counted})

    def _status(self, key: Key, deployment: Object) -> Object:
        wanted = {*deployment["spec"]["selector"]["matchLabels"].items()}
        labels = [(pod, pod["metadata"].get("labels") or {}) for _, pod in self._store.select(PODS, key[2])]
        pods = [pod for pod, own in labels if wanted <= {*own.items()} and HASH in own]
        ready = sum(
            (condition["type"], condition["status"]) == ("Ready", "True")
            for pod in pods
            for condition in pod["status"].get("conditions") or ()
        )
        status: Object = {"observedGeneration": deployment["metadata"]["generation"]}
        status |= {"replicas": len(pods), "updatedReplicas": len(pods)} if pods else {}
        status |= {"readyReplicas": ready, "availableReplicas": ready} if ready else {}
        missing = deployment["spec"]["replicas"] - ready
        return status | ({"unavailableReplicas": missing} if missing > 0 else {})
