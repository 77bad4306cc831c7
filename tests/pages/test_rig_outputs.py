"""Outputs in pages of commands that need engines, pods or a switch: run on stand-ins with the names of the page."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from tests.commands import kvroute_command
from tests.kube.inference_pool import POOLS, install, pool_document
from tests.kube.manifests import node_document
from tests.live.services import free_port, required
from tests.pages.page_blocks import ROOT, Command, Output, read_page
from tests.pages.page_output import difference
from tests.pages.page_runs import PageFolder
from tests.serve.discovery.kubernetes_rig import Rig, created, play
from tests.waiting import PATIENCE_S, until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.types import Endpoint

MERGE = "application/merge-patch+json"
CLINIC = """\
name: clinic
nodes:
  - {name: node0, nics: {compute: {count: 8, capacity: 100 Gbps}}}
  - {name: node1, nics: {compute: {count: 8, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 1 us, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
defaults: {model: llama-3-70b, tp: 2, kv_capacity: 60 GB}
instances:
"""


def shown(page: str, command: str, *, alone: str = "") -> Output:
    """Return the output of a command in a page, or the block that begins with the text `alone`."""
    commands, others = read_page((ROOT / page).read_text(encoding="utf-8"), page)
    outputs = (
        [page_command.output for page_command in commands if page_command.text == command] if not alone else others
    )
    [output] = [candidate for candidate in outputs if candidate and candidate.lines[0].startswith(alone)]
    return output


async def _place(rig: Rig, name: str, rack: str) -> None:
    """Create a node, or give node-1 its labels."""
    labels = {"nvidia.com/rack": rack, "topology.kubernetes.io/zone": "z1"}
    if name == "node-1":
        await rig.client.must("PATCH", f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}}, MERGE)
    else:
        await rig.client.must("POST", "/api/v1/nodes", created(node_document(name, labels)))


async def _pod(rig: Rig, name: str, address: str, node: str, **changes: Any) -> None:
    labels = {"app": "vllm", "kvroute.io/role": name.rpartition("-")[0]}
    await rig.put(name, labels=labels, podIP=address, node=node, **changes)


async def _two_racks(rig: Rig) -> None:
    await _place(rig, "node-1", "r1")
    await _place(rig, "node-2", "r2")
    await _pod(rig, "prefill-0", "10.0.1.1", "node-1")
    await _pod(rig, "decode-0", "10.0.1.2", "node-2")


async def _pool(rig: Rig) -> None:
    await install(rig.client)
    await _place(rig, "node-10", "r1")
    await _place(rig, "node-20", "r2")
    port = {"metadata": {"name": "epp"}, "spec": {"selector": {"app": "epp"}, "ports": [{"port": 9002}]}}
    await rig.client.must("POST", "/api/v1/namespaces/llm/services", port)
    reference = {"name": "epp", "port": {"number": 9003}}
    await rig.client.must(
        "POST", POOLS, pool_document("my-pool", {"app": "vllm"}, (8000,), endpointPickerRef=reference)
    )
    await _pod(rig, "prefill-0", "10.0.0.1", "node-10")
    await _pod(rig, "decode-0", "10.0.0.2", "node-20")
    await _pod(rig, "decode-1", "10.0.0.3", "node-20", ready=False)


@pytest.mark.parametrize(
    ("command", "cluster"),
    [
        ("kvroute kube check --namespace llm --constraint rack:required", _two_racks),
        ("kvroute kube check --pool llm/my-pool", _pool),
    ],
)
def test_the_check_of_a_kubernetes_cluster(
    command: str, cluster: Callable[[Rig], Awaitable[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes is an API server of the tests with the pods of the page."""
    monkeypatch.setenv("COLUMNS", "140")

    async def scenario(rig: Rig) -> None:
        await cluster(rig)
        code, out, err = await rig.kvroute(*command.split()[1:], "--kubeconfig", "kubeconfig")
        assert code == 1, err
        assert difference(shown("docs/kubernetes.md", command), out) is None

    play(scenario, tmp_path)


def _unmeasured(text: str) -> str:
    """Return the text without ports, numbers of batches, measured times and rates, and their units."""
    text = re.sub(r"\+[\d.]+\+-[\d.]+ s", "CLOCK", text)
    text = re.sub(r"\d+ batch(es)?", "BATCHES", text)
    text = re.sub(r"127.0.0.1:\d+", "ADDRESS", text)
    return re.sub(r"[\d.]+ [mu]?s +[\d.]+ /", "TIME RATE /", text)


def _clinic(endpoints: dict[str, Endpoint]) -> str:
    """Return the cluster file of the page."""
    lines = [CLINIC]
    for index, (name, endpoint) in enumerate(endpoints.items()):
        gpus = f"node{index // 2}:{2 * (index % 2)}-{2 * (index % 2) + 1}"
        address = msgspec.json.encode(endpoint).decode()
        lines.append(f'  - {{name: {name}, role: {name[:-1]}, gpus: "{gpus}", endpoint: {address}}}\n')
    return "".join(lines)


@pytest.mark.live
@pytest.mark.parametrize("broken", [False, True], ids=["healthy", "broken"])
def test_the_doctor_on_emulated_engines(broken: bool, tmp_path: Path) -> None:
    """Healthy, and with an engine that computes its prompts and one whose KV events have another port."""
    names = ("prefill0", "decode0", "prefill1", "decode1")
    placeholders = {name: Endpoint(url=f"http://127.0.0.1:{port}") for port, name in enumerate(names, start=1)}
    file = tmp_path / "my-cluster.yaml"

    async def scenario() -> subprocess.CompletedProcess[str]:
        async with EmulatedCluster(topology.parse(_clinic(placeholders)), EmulatedClusterSpec()) as engines:
            endpoints = {name: engines.ready().instances[name] for name in names}
            if broken:
                await _break(endpoints)
            file.write_text(_clinic(endpoints), encoding="utf-8")
            command = kvroute_command("doctor", str(file))
            environment = os.environ | {"COLUMNS": "80"}
            return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=environment)

    ended = asyncio.run(scenario())
    assert ended.returncode == int(broken), ended.stderr
    output = shown("docs/doctor.md", "kvroute doctor my-cluster.yaml", alone=" engine" if broken else "")
    shortened = replace(output, lines=tuple(_unmeasured("\n".join(output.lines)).split("\n")))
    assert difference(shortened, _unmeasured(ended.stdout)) is None


async def _break(endpoints: dict[str, Endpoint]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nothing = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    endpoints["prefill1"] = msgspec.structs.replace(endpoints["prefill1"], kv_events=nothing, kv_replay="")
    url = f"{endpoints['decode0'].url}/emulator/fault"
    fault = {"share": 1, "leg": "recompute"}
    async with aiohttp.ClientSession() as session, session.post(url, json=fault) as answer:
        assert answer.status == 200, await answer.text()


@contextmanager
def _running(*arguments: str) -> Iterator[str]:
    """Run a command of kvroute until the block ends; yield its first line."""
    with subprocess.Popen(kvroute_command(*arguments), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE_S)


def _same_document(page: str, command: str, printed: str) -> None:
    """Compare two lines of JSON but for numbers and addresses."""
    output = replace(shown(page, command), language="json")
    text = "\n".join(output.lines).replace("10.0.0.1:", "127.0.0.1:")
    found = difference(replace(output, lines=(text,)), printed, tolerance=inf)
    assert found is None
    assert json.loads(text).keys() == json.loads(printed).keys()


def test_the_first_line_and_the_status_of_a_switch(tmp_path: Path) -> None:
    path = tmp_path / "switch.json"
    with _running("switch", "--port", "0", "--slots", "4096", "--status-file", str(path)) as line:
        _same_document("docs/switch.md", "kvroute switch --host 10.0.0.1 --slots 4096", line)
        asyncio.run(until(path.exists))
        command = "kvroute switch --slots 4096 --status-file /run/kvroute/switch.json"
        _same_document("docs/switch.md", command, path.read_text(encoding="utf-8"))


def test_the_table_of_an_agent(tmp_path: Path) -> None:
    """The four commands of the page; the table has the switch when the scheduler has heard from it."""
    status, table = tmp_path / "switch.json", tmp_path / "table.json"
    with ExitStack() as running:
        cluster = str(ROOT / "examples" / "all-reduces.yaml")
        address = json.loads(running.enter_context(_running("scheduler", cluster, "--listen", "127.0.0.1:0")))[
            "address"
        ]
        running.enter_context(_running("switch", "--port", "0", "--slots", "4096", "--status-file", str(status)))
        agent = ("agent", "--scheduler", address)
        running.enter_context(_running(*agent, "--switch", "access", "--status-file", str(status)))
        running.enter_context(_running(*agent, "--node", "a0", "--folder", str(tmp_path)))
        asyncio.run(until(lambda: table.exists() and '"ina"' in table.read_text(encoding="utf-8")))
        command = "kvroute agent --scheduler 127.0.0.1:7400 --node a0 --folder /tmp/a0"
        _same_document("docs/agents.md", command, table.read_text(encoding="utf-8"))


def test_the_columns_of_a_custom_resource() -> None:
    """`kubectl get` shows the columns of priority 0 between the name and the age."""
    definition = yaml.safe_load((ROOT / "deploy" / "crds" / "kvrouters.kvroute.io.yaml").read_text(encoding="utf-8"))
    [version] = definition["spec"]["versions"]
    columns = [column["name"].upper() for column in version["additionalPrinterColumns"] if not column.get("priority")]
    output = shown("docs/kubernetes-operator.md", "kubectl --namespace serving get kvrouters")
    assert output.lines[0].split() == ["NAME", *columns]


@pytest.mark.live
def test_the_exchange_of_a_gateway(tmp_path: Path) -> None:
    """The metrics of one gateway with a Redis: those of the page, with other numbers."""
    port = free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    section = f'\ngateway: {{replication: {{redis: "redis://127.0.0.1:{port}/0"}}}}\n'
    text = (ROOT / "examples" / "small.yaml").read_text(encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(text + section, encoding="utf-8")
    folder = PageFolder(tmp_path)
    page = "docs/scale.md"
    command = "curl -s http://localhost:9090/metrics | grep -E '^kvroute_replication_(state|gateways)'"
    with subprocess.Popen([required("redis-server", "redis-server"), *options], stdout=subprocess.DEVNULL) as redis:
        try:
            serve = Command(page, 0, "kvroute serve --embedded cluster.yaml")
            with folder.service(serve, "--port 0 --admin-port 0", "dashboard and metrics: "):

                def printed() -> str:
                    return folder.run(Command(page, 0, command)).out

                asyncio.run(until(lambda: 'state="in_sync"} 1' in printed(), poll_s=0.2))
                assert difference(shown(page, command), printed(), tolerance=inf) is None
        finally:
            redis.terminate()
