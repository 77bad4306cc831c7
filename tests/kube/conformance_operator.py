"""Checks of `tests.kube.conformance` with the operator, which runs here with its own rights only."""

from __future__ import annotations

import base64
from functools import partial

from tests.kube.deploy.deployed import DEPLOY, read
from tests.kube.remote_cluster import RemoteCluster
from tests.kube.resources.router_examples import Manifest, constrained

from kvroute.kube.admission.certificates import read_secret
from kvroute.kube.operator.driver import OperatorDriver
from kvroute.kube.operator.gateway_workload import gateway_labels
from kvroute.kube.operator.pod_labels import WRITTEN
from kvroute.kube.operator.rights import MUTATING, PODS, ROUTERS, VALIDATING
from kvroute.kube.operator.role_switch import TARGET_ROLE

NODE = "kvroute-conformance-node"
GATEWAY = "chat-gateway"
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LABELS = {"kvroute.io/topology.zone": "z1", "kvroute.io/topology.rack": "r1"}


def engine_pod(cluster: RemoteCluster, name: str, role: str) -> Manifest:
    """Return an engine pod that a bare API server accepts."""
    container = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model=llama-3-70b", "--port=8000", '--kv-transfer-config={"kv_connector":"NixlConnector"}'],
    }
    labels = {"app": "engine", "kvroute.io/role": role}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": cluster.namespace, "labels": labels},
        "spec": {"containers": [container], "automountServiceAccountToken": False},
    }


def placed(cluster: RemoteCluster, obj: Manifest) -> Manifest:
    """Return an example as a user sends it, in the namespace of the checks if it has one."""
    kept = {key: value for key, value in obj["metadata"].items() if key not in ("uid", "generation")}
    return obj | {"metadata": kept | ({"namespace": cluster.namespace} if "namespace" in kept else {})}


def _gateway_pod(cluster: RemoteCluster) -> Manifest:
    """Return a gateway that is ready without its image. Controllers of Deployments neither count nor adopt it: it has
    no template hash. So the check is the same with and without them."""
    made = engine_pod(cluster, GATEWAY, "none")
    made["metadata"]["labels"] = gateway_labels("chat")
    return made


async def labels(cluster: RemoteCluster, _: str) -> None:
    """The operator, with its own rights only, labels engines, makes a gateway's objects, and writes the status."""
    for index, name in enumerate(("prefill-1", "decode-0", "decode-1")):
        await cluster.start(engine_pod(cluster, name, name[:-2]), NODE, f"10.99.0.{index + 2}")
    obj = constrained(clusterTopologyName="conformance")
    obj["spec"] |= {"drainSeconds": 1}
    async with cluster.operator("one") as operator:
        await cluster.until("the operator leads", partial(_leads, operator))
        await cluster.make(placed(cluster, obj))
        await cluster.until("all is made and labelled", partial(_serves, cluster))
        for kind in ("ConfigMap", "ServiceAccount", "RoleBinding", "Service", "NetworkPolicy", "PodDisruptionBudget"):
            owned = [made for made in await cluster.listed(kind) if made["metadata"].get("ownerReferences")]
            assert len(owned) == 1, (kind, owned)
        reasons = {event["reason"] for event in await cluster.listed("Event")}
        assert {"Serving", "Resolved", "Labelled"} <= reasons, reasons


async def _leads(operator: OperatorDriver) -> bool:
    return operator.leads


async def _serves(cluster: RemoteCluster) -> bool:
    if await cluster.get("Deployment", "chat") and not await cluster.get("Pod", GATEWAY):
        await cluster.start(_gateway_pod(cluster), NODE, "10.99.0.9")
    pods = [pod for pod in await cluster.listed("Pod") if pod["metadata"]["name"] in ENGINES]
    found = (await cluster.get("KvRouter", "chat")).get("status", {}).get("conditions", [])
    ready = any((condition["type"], condition["status"]) == ("Ready", "True") for condition in found)
    return ready and all(LABELS.items() <= pod["metadata"]["labels"].items() for pod in pods)


async def silence(cluster: RemoteCluster, _: str) -> None:
    """Another operator finds nothing to do: what it may write stays as it is."""
    async with cluster.operator("two") as operator:
        await cluster.until("the operator leads", partial(_leads, operator))
        before = await _written(cluster)
        lease = await cluster.get("Lease", "kvroute-operator")
        await cluster.until("twenty renewals", partial(_renewed, cluster, lease["spec"]["renewTime"], 4.0))
        assert await _written(cluster) == before


async def _written(cluster: RemoteCluster) -> dict[str, Manifest]:
    """Return the objects without what the controllers of Kubernetes write."""
    found = {}
    for kind in (
        "KvRouter",
        "Pod",
        "ConfigMap",
        "Service",
        "Deployment",
        "PodDisruptionBudget",
        "RoleBinding",
        "Event",
    ):
        for obj in await cluster.listed(kind):
            metadata = {key: obj["metadata"].get(key) for key in ("labels", "ownerReferences", "finalizers")}
            notes = obj["metadata"].get("annotations") or {}
            own = {key: value for key, value in notes.items() if key.startswith("kvroute.io/")}
            rest = {key: obj.get(key) for key in ("spec", "data", "subjects", "message")}
            status = obj.get("status") if kind == "KvRouter" else None
            found[f"{kind} {obj['metadata']['name']}"] = {**metadata, **rest, "annotations": own, "status": status}
    return found


async def _renewed(cluster: RemoteCluster, since: str, seconds: float) -> bool:
    """Return whether the Lease was renewed this much later."""
    now = (await cluster.get("Lease", "kvroute-operator"))["spec"]["renewTime"]
    minutes = [float(text[14:16]) * 60 + float(text[17:26]) for text in (since, now)]
    return (minutes[1] - minutes[0]) % 3600 >= seconds


async def role_switch(cluster: RemoteCluster, _: str) -> None:
    """A label asks for a role: the engine is drained, gets its role, and the label goes."""
    async with cluster.operator("three"):
        await cluster.patch("Pod", "prefill-1", {"metadata": {"labels": {TARGET_ROLE: "decode"}}})
        await cluster.until("prefill-1 is a decode engine", partial(_switched, cluster, "prefill-1"))


async def _switched(cluster: RemoteCluster, name: str) -> bool:
    metadata = (await cluster.get("Pod", name))["metadata"]
    notes = set(metadata.get("annotations", {})) - {WRITTEN}
    done = metadata["labels"]["kvroute.io/role"] == "decode" and TARGET_ROLE not in metadata["labels"]
    return done and not any(key.startswith("kvroute.io/") for key in notes)


async def election(cluster: RemoteCluster, _: str) -> None:
    """The second operator waits while the first one renews, and leads when it has ended."""
    async with cluster.operator("four") as first:
        await cluster.until("the first leads", partial(_leads, first))
        async with cluster.operator("five") as second:
            since = (await cluster.get("Lease", "kvroute-operator"))["spec"]["renewTime"]
            await cluster.until("renewals", partial(_renewed, cluster, since, 1.0))
            assert (first.leads, second.leads) == (True, False)
    async with cluster.operator("six") as third:
        await cluster.until("the third leads", partial(_leads, third))
        assert (await cluster.get("Lease", "kvroute-operator"))["spec"]["holderIdentity"] == "six"


async def webhook(cluster: RemoteCluster, host: str) -> None:
    """The server calls the operator over HTTPS, and trusts it by the CA bundle that the operator has written."""
    if not host:
        return
    settings = {"port": 0, "host": "0.0.0.0", "names": (host,), "certificates_s": 0.2}
    async with cluster.operator("seven", **settings) as operator:
        await cluster.until("the webhook listens", partial(_listens, operator))
        for obj in read(DEPLOY / "kustomize/base/kvroute.yaml"):
            if obj["kind"].endswith("WebhookConfiguration"):
                await cluster.make(_pointed(obj, cluster.namespace, f"https://{host}:{operator.webhook_port}"))
        await cluster.until("the CA bundle is written", partial(_trusted, cluster))
        wrong = placed(cluster, constrained("rak", clusterTopologyName="conformance"))
        wrong["metadata"]["name"] = "wrong"
        await cluster.until("a wrong level is refused", partial(_refused, cluster, wrong, "did you mean 'rack'?"))
        await cluster.until("a pod gets its topology files", partial(_injected, cluster))
        for kind in (VALIDATING, MUTATING):
            await cluster.delete(kind, "", "kvroute")


async def _listens(operator: OperatorDriver) -> bool:
    return operator.webhook_port > 0


def _pointed(obj: Manifest, namespace: str, url: str) -> Manifest:
    """Return a webhook configuration with a URL, for the namespace of the checks alone."""
    only = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    hooks = []
    for hook in obj["webhooks"]:
        path = hook["clientConfig"]["service"]["path"]
        scoped = {} if hook["name"] == "kvrouters.kvroute.io" else {"namespaceSelector": only}
        hooks.append(hook | {"clientConfig": {"url": f"{url}{path}"}, "failurePolicy": "Fail"} | scoped)
    return obj | {"webhooks": hooks}


async def _trusted(cluster: RemoteCluster) -> bool:
    stored = read_secret((await cluster.get("Secret", "kvroute-webhook")).get("data") or {})
    if stored is None:
        return False
    bundle = base64.b64encode(stored.ca_bundle).decode()
    kinds = ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")
    found = [await cluster.get(kind, "kvroute", "") for kind in kinds]
    return all(
        hook["clientConfig"].get("caBundle") == bundle for configuration in found for hook in configuration["webhooks"]
    )


async def _refused(cluster: RemoteCluster, obj: Manifest, text: str) -> bool:
    response = await cluster.admin.post(ROUTERS.path(cluster.namespace), json=obj, params={"dryRun": "All"})
    return response.status_code == 422 and text in response.json()["message"]


async def _injected(cluster: RemoteCluster) -> bool:
    path = PODS.path(cluster.namespace)
    made = await cluster.admin.post(path, json=engine_pod(cluster, "new", "decode"), params={"dryRun": "All"})
    return "kvroute-topology" in [
        container["name"] for container in made.json().get("spec", {}).get("initContainers", [])
    ]


async def deletion(cluster: RemoteCluster, _: str) -> None:
    """The finalizer waits until the labels of engines are removed."""
    async with cluster.operator("eight"):
        await cluster.delete(ROUTERS, cluster.namespace, "chat")
        await cluster.until("the KvRouter is gone", partial(_gone, cluster))
        for pod in await cluster.listed("Pod"):
            assert not LABELS.keys() & pod["metadata"]["labels"].keys(), pod["metadata"]


async def _gone(cluster: RemoteCluster) -> bool:
    return not await cluster.get("KvRouter", "chat")
