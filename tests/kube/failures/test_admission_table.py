"""The proposal's table of admission errors, through the API server: what `kubectl apply` prints for each row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kube.event_loop import scenario
from tests.kube.failures.chain_rig import Chain, chain, engine_pod, refused
from tests.kube.operator.operator_rig import open_definition, plain
from tests.kube.resources.router_examples import Manifest, constrained, router

from kvroute.kube.admission.validation import CONSTRAINT_ANNOTATION

FIELD = "spec.kvCacheTransferTopology"
DENIED = 'admission webhook "kvrouters.kvroute.io" denied the request: '
GROVE: Manifest = {"apiVersion": "grove.io/v1alpha1", "kind": "ClusterTopologyBinding", "metadata": {"name": "fabric"}}


def explicit(**spec: Any) -> Manifest:
    """Return a KvRouter whose level is a label of nodes."""
    return constrained("zone", clusterTopologyName=None, label="topology.kubernetes.io/zone", **spec)


async def applied(made: Chain, obj: Manifest) -> Any:
    """Create an object as kubectl does, which has the server refuse unknown fields."""
    return await made.rig.create(plain(obj), fieldValidation="Strict")


async def eventually(made: Chain, obj: Manifest, holds: Callable[[Any], bool]) -> Any:
    """Create an object until the answer is as wanted: the webhook's cache follows the server a moment later."""
    answer: list[Any] = []

    async def as_wanted() -> bool:
        answer[:] = [await applied(made, obj)]
        return holds(answer[0])

    await made.rig.until(as_wanted)
    return answer[0]


def test_row_grove_is_not_installed(tmp_path: Path) -> None:
    """Neither kvroute's nor Grove's ClusterTopology exists; an explicit label needs neither."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            await made.rig.delete("ClusterTopology", "cluster", "")
            await made.rig.delete("CustomResourceDefinition", "clustertopologies.kvroute.io", "")
            response = await eventually(
                made, constrained(), lambda found: found.status_code != 201 and "no resource" in found.text
            )
            assert refused(response) == (
                f"{DENIED}{FIELD}.clusterTopologyName: the cluster has no resource ClusterTopology, neither kvroute's "
                "nor Grove's; install the CustomResourceDefinitions of kvroute or Grove, or use label instead"
            )
            assert (await applied(made, explicit())).status_code == 201

    scenario(run())


def test_row_grove_is_installed(tmp_path: Path) -> None:
    """Its topology is read as kvroute's own, and the labels that it names are copied."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            await made.rig.make(open_definition("grove.io", "v1alpha1", "ClusterTopologyBinding", scope="Cluster"))
            levels = {"levels": [{"domain": "zone", "key": "topology.kubernetes.io/zone"}]}
            await made.rig.until(lambda: _created(made, GROVE | {"spec": levels}))
            wanted = constrained("zone", clusterTopologyName="fabric")
            wrong = constrained("rack", clusterTopologyName="fabric")
            response = await eventually(made, wrong, lambda found: "is no domain" in found.text)
            what = f"{FIELD}.level: 'rack' is no domain of the ClusterTopology 'fabric'; known: zone"
            assert refused(response) == DENIED + what
            assert (await applied(made, wanted)).status_code == 201
            await made.nodes(n1="r1")
            machine = await made.start("decode-0", "decode", "n1")
            await made.engines("decode-0")
            pod = await made.rig.get("Pod", "decode-0") or {}
            assert pod["metadata"]["labels"]["kvroute.io/topology.zone"] == "z1"
            if machine.environment:  # the webhook knew the KvRouter
                assert (machine.folder / "zone").read_text() == "z1"

    async def _created(made: Chain, obj: Manifest) -> bool:
        path = "apis/grove.io/v1alpha1/clustertopologybindings"
        return (await made.rig.admin.post(path, json=obj)).status_code in (201, 409)

    scenario(run())


def _annotated(obj: Manifest) -> Manifest:
    return obj | {"metadata": obj["metadata"] | {"annotations": {CONSTRAINT_ANNOTATION: "rack"}}}


def _deployment() -> Manifest:
    pod = engine_pod("x", "decode")
    labels = pod["metadata"]["labels"]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode", "namespace": "serving"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
        },
    }


PLACE = f"metadata.annotations[{CONSTRAINT_ANNOTATION}]"
FIX = f"remove it, and set {FIELD} of the KvRouter that selects these engines"
REFUSED: dict[str, tuple[Manifest, str]] = {
    "the ClusterTopology does not exist": (
        constrained(clusterTopologyName="clusters"),
        f"{DENIED}{FIELD}.clusterTopologyName: the ClusterTopology 'clusters' does not exist; did you mean 'cluster'?",
    ),
    "the level is no domain of the ClusterTopology": (
        constrained("rak"),
        f"{DENIED}{FIELD}.level: 'rak' is no domain of the ClusterTopology 'cluster'; did you mean 'rack'?",
    ),
    "a constraint on an engine pod": (
        _annotated(engine_pod("decode-0", "decode")),
        'admission webhook "engines.kvroute.io" denied the request: '
        f"{PLACE}: a constraint belongs to a gateway, not to the decode pod 'serving/decode-0'; {FIX}",
    ),
    "a constraint on a Deployment of engines": (
        _annotated(_deployment()),
        'admission webhook "workloads.kvroute.io" denied the request: '
        f"{PLACE}: a constraint belongs to a gateway, not to the Deployment 'serving/decode'; {FIX}",
    ),
    "both label and ClusterTopology": (
        constrained(label="example.com/rack"),
        'KvRouter.kvroute.io "chat" is invalid: spec.kvCacheTransferTopology: Invalid value: label and '
        "clusterTopologyName exclude each other; remove one of them",
    ),
    "a negative weight": (
        constrained(kvTransferWeight=-1),
        'KvRouter.kvroute.io "chat" is invalid: spec.kvCacheTransferTopology.kvTransferWeight: Invalid value: -1: '
        "spec.kvCacheTransferTopology.kvTransferWeight in body should be greater than or equal to 0",
    ),
    "an unknown field": (
        router(kvCacheTransferTopolgy={"level": "rack"}),
        'KvRouter in version "v1alpha1" cannot be handled as a KvRouter: strict decoding error: unknown field '
        '"spec.kvCacheTransferTopolgy"',
    ),
    "an unknown mismatch policy": (
        constrained(mismatchPolicy="faill"),
        'KvRouter.kvroute.io "chat" is invalid: [spec.kvCacheTransferTopology.mismatchPolicy: Unsupported value: '
        '"faill": supported values: "fail", "fallback", "preferred", "required", <nil>: Invalid value: null: some '
        "validation rules were not checked because the object was invalid; correct the existing errors to complete "
        "validation]",
    ),
    "a model that the gateway does not know": (
        router(model="llama-3-70c"),
        f"{DENIED}spec.model: there is no model 'llama-3-70c'; did you mean llama-3-70b? `kvroute llm` lists the "
        "presets; or give a config.json",
    ),
    "a name that no Service can have": (
        router("2chat"),
        'KvRouter.kvroute.io "2chat" is invalid: <nil>: Invalid value: the name also names a Service; begin '
        "it with a letter, and use at most 55 letters, digits and -",
    ),
}


def test_what_is_refused(tmp_path: Path) -> None:
    """One sentence each, which names the field and what it may be."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            messages = {row: refused(await applied(made, obj)) for row, (obj, _) in REFUSED.items()}
            assert messages == {row: message for row, (_, message) in REFUSED.items()}

    scenario(run())


def test_row_an_explicit_label_skips_the_checks(tmp_path: Path) -> None:
    """The label is copied from the node; no topology is asked."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            hall = constrained("hall", clusterTopologyName=None, label="example.com/rack", place="rack")
            assert (await applied(made, hall)).status_code == 201
            await made.rig.until(lambda: made.rig.get("ConfigMap", "chat-cluster"))
            await made.nodes(n1="r1")
            machine = await made.start("decode-0", "decode", "n1")
            await made.engines("decode-0")
            assert (machine.folder / "hall").read_text() == "r1"

    scenario(run())
