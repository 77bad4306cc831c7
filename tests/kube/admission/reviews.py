"""AdmissionReviews in the form that kube-apiserver 1.36 sends, and a client that sends them over HTTPS as it does."""

from __future__ import annotations

import base64
import json
import ssl
import time
from typing import Any

import aiohttp
from tests.kube.resources.router_examples import Manifest

from kvroute.kube.admission.certificates import CertificatePair, issue
from kvroute.kube.admission.injection import InjectionSpec
from kvroute.kube.admission.server import WebhookServer
from kvroute.kube.admission.validation import AdmissionView

PLURALS = {"KvRouter": "kvrouters", "ClusterTopology": "clustertopologies", "Pod": "pods", "Deployment": "deployments"}
SETTINGS = InjectionSpec(image="registry.example/kvroute:1")
NAME = "localhost"


def review(operation: str, obj: Manifest, old: Manifest | None = None, **request: Any) -> Manifest:
    """Return a review of a new object (of the deleted one for DELETE), with every field that the API server sends."""
    group, _, version = obj["apiVersion"].rpartition("/")
    kind = {"group": group, "version": version, "kind": obj["kind"]}
    resource = {"group": group, "version": version, "resource": PLURALS[obj["kind"]]}
    body: Manifest = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": kind,
        "resource": resource,
        "requestKind": kind,
        "requestResource": resource,
        "name": obj["metadata"].get("name", ""),
        "operation": operation,
        "userInfo": {"username": "admin", "uid": "u1", "groups": ["system:masters", "system:authenticated"]},
        "object": None if operation == "DELETE" else obj,
        "oldObject": obj if operation == "DELETE" else old,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
    }
    if "namespace" in obj["metadata"]:
        body["namespace"] = obj["metadata"]["namespace"]
    return {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": body | request}


def engine_pod(role: str = "prefill", namespace: str = "serving", **metadata: Any) -> Manifest:
    """Return an engine pod with the fields that the API server has filled in before a review."""
    labels = {"app": "engine", "kvroute.io/role": role}
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": f"{role}-0", "namespace": namespace, "labels": labels} | metadata,
        "spec": {
            "containers": [
                {"name": "engine", "image": "vllm:1", "env": [{"name": "A", "value": "b"}], "resources": {}},
                {"name": "sidecar", "image": "logs:1", "resources": {}},
            ],
            "restartPolicy": "Always",
        },
        "status": {"phase": "Pending"},
    }


def patched(obj: Manifest, patch: list[Manifest]) -> Manifest:
    """Apply the operation `add` of RFC 6902, the only one that the webhook uses."""
    result: Manifest = json.loads(json.dumps(obj))
    for operation in patch:
        assert operation["op"] == "add"
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = result
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            place[last] = operation["value"]
    return result


async def answers(view: AdmissionView | None, *calls: tuple[str, Manifest]) -> list[Manifest]:
    """Send reviews to a server that has this view; return each `response`, or the status and text of an error."""
    pair = issue([NAME], time.time())
    server = WebhookServer(lambda: view, SETTINGS, pair)
    port = await server.start("127.0.0.1", 0)
    found = []
    try:
        async with trusting(pair) as client:
            for path, body in calls:
                url = f"https://{NAME}:{port}/{path}?timeout=10s"
                async with client.post(url, json=body, headers={"Accept": "application/json, */*"}) as response:
                    found.append(await _response(response))
    finally:
        await server.stop()
    return found


def trusting(pair: CertificatePair) -> aiohttp.ClientSession:
    """Return a client that trusts only the CA of this certificate."""
    context = ssl.create_default_context(cadata=pair.ca.decode())
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


def message(response: Manifest) -> str:
    """Return what a user reads about a rejected object."""
    assert response["allowed"] is False
    assert response["status"]["code"] == 422
    text: str = response["status"]["message"]
    return text


def patch_of(response: Manifest) -> list[Manifest]:
    """Return the operations of the patch in a response."""
    assert response["allowed"] is True
    if "patch" not in response:
        return []
    assert response["patchType"] == "JSONPatch"
    operations: list[Manifest] = json.loads(base64.b64decode(response["patch"]))
    return operations


async def _response(response: aiohttp.ClientResponse) -> Manifest:
    if response.status != 200:
        return {"http": response.status, "text": await response.text()}
    body = await response.json()
    assert (body["apiVersion"], body["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    result: Manifest = body["response"]
    assert result["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
    return result
