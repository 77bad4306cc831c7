"""`kvroute kube` against a small API server in a thread, and as the start of an engine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.cli_rig import Kvroute
from tests.commands import kvroute_command
from tests.kube.kubeconfigs import kubeconfig
from tests.kube.manifests import node_document, pod_document
from tests.kube.scripted_api import ScriptedApi, answer, status


@pytest.fixture
def api() -> Iterator[ScriptedApi]:
    """A server with a prefill and a decode pod in two racks, on a loop of its own."""
    server, loop = ScriptedApi(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def fill() -> None:
        await server.start()
        for number, role in enumerate(("prefill", "decode")):
            await server.put("nodes", node_document(f"node-{number}", {"nvidia.com/rack": f"r{number}"}))
            pod = pod_document(role, labels={"kvroute.io/role": role}, node=f"node-{number}", podIP=f"10.0.0.{number}")
            await server.put("pods", pod)

    asyncio.run_coroutine_threadsafe(fill(), loop).result()
    yield server
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_check_shows_engines_and_levels(kvroute: Kvroute, api: ScriptedApi, tmp_path: Path) -> None:
    """Exit code 0 without findings."""
    ended = kvroute("kube", "check", "--kubeconfig", str(kubeconfig(tmp_path, api.url)))
    assert ended.code == 0, ended.err
    assert "llm.decode" in ended.out
    assert "http://10.0.0.1:8000" in ended.out
    assert "No findings." in ended.out
    assert "/api/v1/namespaces/llm/pods?limit=500" in api.requests


def test_check_says_whom_a_constraint_excludes(kvroute: Kvroute, api: ScriptedApi, tmp_path: Path) -> None:
    """Exit code 1; the JSON document has the same findings."""
    config = str(kubeconfig(tmp_path, api.url))
    ended = kvroute("kube", "check", "--kubeconfig", config, "--constraint", "rack:fail")
    assert ended.code == 1
    sentence = "llm.prefill: no decode engine is in its rack, so rack:required gives it no requests"
    assert f"1 finding:\n1. {sentence}\n" in ended.out
    document = kvroute("kube", "check", "--kubeconfig", config, "--constraint", "rack", "--json", "--all-namespaces")
    assert document.code == 1
    report = json.loads(document.out)
    assert (report["ok"], report["faults"]) == (False, [sentence])
    assert [engine["place"]["rack"] for engine in report["engines"]] == ["r1", "r0"]
    assert "/api/v1/pods?limit=500" in api.requests


def test_check_with_other_labels(kvroute: Kvroute, api: ScriptedApi, tmp_path: Path) -> None:
    """And with a selector and a namespace."""
    arguments = ("kube", "check", "--kubeconfig", str(kubeconfig(tmp_path, api.url)), "--json")
    ended = kvroute(*arguments, "--level", "rack=example.com/rack", "--namespace", "other", "--selector", "app=a")
    assert [engine["place"]["rack"] for engine in json.loads(ended.out)["engines"]] == ["", ""]
    assert "/api/v1/namespaces/other/pods?labelSelector=app%3Da&limit=500" in api.requests


def test_wrong_options_and_servers(kvroute: Kvroute, api: ScriptedApi, tmp_path: Path) -> None:
    """Exit code 2 and one sentence."""
    config = kubeconfig(tmp_path, api.url)

    def sentence(*arguments: str) -> str:
        ended = kvroute("kube", "check", "--kubeconfig", str(config), *arguments)
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.count("\n") == 1
        return ended.err

    assert "unknown level 'rak'" in sentence("--constraint", "rak:required")
    assert "write LEVEL=LABEL" in sentence("--level", "row=x")
    assert "exclude each other" in sentence("--namespace", "a", "--all-namespaces")
    assert "Context 'none' not found" in sentence("--context", "none")
    api.refusals["pods"] = answer(403, json.dumps(status(403, "Forbidden", "pods is forbidden")).encode())
    assert "refuses to list pods: 403: pods is forbidden" in sentence()
    config.unlink()
    assert "not found" in sentence()


def test_nodes_that_may_not_be_listed_are_a_finding(kvroute: Kvroute, api: ScriptedApi, tmp_path: Path) -> None:
    """The engines are shown all the same."""
    api.refusals["nodes"] = answer(403, json.dumps(status(403, "Forbidden", "nodes is forbidden")).encode())
    ended = kvroute("kube", "check", "--kubeconfig", str(kubeconfig(tmp_path, api.url)))
    assert ended.code == 1
    assert "llm.decode" in ended.out
    assert "nodes is forbidden" in ended.out


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `kvroute kube run-worker` in a process of its own, which it may replace."""
    command = kvroute_command("kube", "run-worker", *arguments)
    variables = {**os.environ, "KVROUTE_TOPOLOGY_MOUNT_PATH": str(folder), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


SHOW = [sys.executable, "-c", "import os, sys; print(os.environ.get('KVROUTE_TOPOLOGY'), sys.argv[1:])"]


def test_run_worker_becomes_the_engine(tmp_path: Path) -> None:
    """With the labels, the engine's own options, and its exit code."""
    (tmp_path / "zone").write_text("z1")
    on = {"DYN_TOPOLOGY_ENABLED": "true", "DYN_KV_TRANSFER_DOMAIN": "zone"}
    assert (
        started(tmp_path, "--", *SHOW, "--port", "1", "-x", **on).stdout == "{\"zone\":\"z1\"} ['--port', '1', '-x']\n"
    )
    assert started(tmp_path, "--", *SHOW).stdout == "None []\n"
    assert started(tmp_path, "--", sys.executable, "-c", "raise SystemExit(7)", **on).returncode == 7
    waited = started(tmp_path, "--wait", **on)
    assert (waited.returncode, waited.stdout, waited.stderr) == (0, "", "")


def test_run_worker_starts_nothing_without_the_level(tmp_path: Path) -> None:
    """Exit code 1 and one sentence."""
    on = {"KVROUTE_TOPOLOGY_ENABLED": "true", "KVROUTE_TOPOLOGY_WAIT_S": "0"}
    for arguments in (("--", *SHOW), ("--wait",)):
        ended = started(tmp_path, *arguments, KVROUTE_KV_TRANSFER_TOPOLOGY_LEVEL="rack", **on)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert ended.stderr.startswith(f"kvroute: {tmp_path / 'rack'} does not exist after 0 s")
        assert ended.stderr.count("\n") == 1


def test_run_worker_with_wrong_arguments(tmp_path: Path) -> None:
    """Exit code 2, and 127 for a command that does not exist."""
    assert "give either a command or --wait" in started(tmp_path).stderr
    assert started(tmp_path, "--wait", "--", "true").returncode == 2
    assert started(tmp_path, "--wait", KVROUTE_TOPOLOGY_ENABLED="maybe").returncode == 2
    missing = started(tmp_path, "--", "no-such-engine")
    assert (missing.returncode, missing.stderr.count("\n")) == (127, 1)
    nameless = started(tmp_path, "--", "")
    assert (nameless.returncode, nameless.stderr.count("\n")) == (127, 1)
    assert "cannot be started (it has no name)" in nameless.stderr
