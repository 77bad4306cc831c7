"""`kvroute topology new --kubernetes` against an API server: the file is checked and served as it is written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document
from tests.serve.discovery.kubernetes_rig import Rig, created, play

from kvroute.serve.config.preflight import deployment_of


def test_a_file_from_a_cluster(tmp_path: Path) -> None:
    """Two racks and two zones; a pod that is no engine is named, one that is not ready too."""

    async def scenario(rig: Rig) -> None:
        for number, (zone, rack) in enumerate((("a", "r"), ("a", "s"), ("b", "r"))):
            labels = {"topology.kubernetes.io/zone": zone, "topology.kubernetes.io/rack": rack}
            await rig.client.must("POST", "/api/v1/nodes", created(node_document(f"w{number}", labels)))
        await rig.put("p", node="w0", podIP="10.0.0.1")
        await rig.put("d", labels={"kvroute.io/role": "decode"}, node="w1", podIP="10.0.0.2")
        await rig.put("e", labels={"kvroute.io/role": "decode"}, node="w2", podIP="10.0.0.3", ready=False)
        await rig.put("x", labels={"kvroute.io/role": "decod"}, node="w2", podIP="10.0.0.4")
        options = ("--kubernetes", "--kubeconfig", "kubeconfig")
        code, out, err = await rig.kvroute("topology", "new", *options, "--out", "cluster.yaml")
        assert code == 0, err
        assert out.startswith("wrote cluster.yaml; next: ")
        assert "llm/x: kvroute.io/role: unknown role 'decod'; did you mean 'decode'?" in err
        assert "llm.e: it is not ready" in err
        code, out, err = await rig.kvroute("topology", "check", "cluster.yaml")
        assert (code, err) == (0, "")
        assert "OK: my-cluster: 2 datacenters, 0 pods, 3 racks, 3 nodes" in out
        cluster, _ = deployment_of((rig.folder / "cluster.yaml").read_text(), "cluster.yaml")
        assert [
            (instance.name, instance.role, instance.node, instance.datacenter) for instance in cluster.instances
        ] == [
            ("llm.d", "decode", "w1", "a"),
            ("llm.e", "decode", "w2", "b"),
            ("llm.p", "prefill", "w0", "a"),
        ]

    play(scenario, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "token", "error"),
    [
        ("--kubernetes", "admin", "no pod is an engine; `kvroute kube check` says why"),
        ("--kubernetes --namespace lmm", "admin", "there is no namespace 'lmm'"),
        ("--kubernetes --context other", "admin", "other"),
        ("--kubernetes", "stranger", 'User "stranger" cannot list resource "pods"'),
        ("--kubernetes --selector a,,b", "admin", "--selector: ',b' is no condition on a label; write conditions"),
        ("--kubernetes --both http://a:1", "admin", "--kubernetes finds the engines itself; leave out --prefill"),
        ("--namespace x", "admin", "--namespace has no effect without --kubernetes"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, arguments: str, token: str, error: str) -> None:
    """With exit code 2."""

    async def scenario(rig: Rig) -> None:
        kubeconfig(rig.folder, rig.server.url, {"token": token})
        more = ["--kubeconfig", "kubeconfig"] if "--kubernetes" in arguments else []
        code, out, err = await rig.kvroute("topology", "new", *arguments.split(), *more)
        assert (code, out) == (2, "")
        assert error in err
        assert err.count("\n") == 1

    play(scenario, tmp_path)


def test_a_wrong_namespace_is_noticed_by_the_check(tmp_path: Path) -> None:
    """`kvroute kube check` says so instead of finding no engine."""

    async def scenario(rig: Rig) -> None:
        options = ("--kubeconfig", "kubeconfig")
        code, _, err = await rig.kvroute("kube", "check", "--namespace", "lmm", *options)
        assert code == 2
        assert "there is no namespace 'lmm'; create it, or give another one" in err
        code, out, _ = await rig.kvroute("kube", "check", "--namespace", "llm", *options)
        assert code == 1
        assert "no pod is an engine" in out

    play(scenario, tmp_path)


def test_a_server_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    """A command that ends cannot go on trying."""
    kubeconfig(tmp_path, "http://127.0.0.1:1")
    command = kvroute_command("topology", "new", "--kubernetes", "--kubeconfig", "kubeconfig")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "the API server cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1
