"""The proposal's table of worker startup, with the real wrapper: an engine starts with its topology labels or not at
all."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.commands import kvroute_command
from tests.kube.event_loop import scenario
from tests.kube.failures.chain_rig import Chain, chain
from tests.kube.label_volume import Volume
from tests.kube.resources.router_examples import constrained

from kvroute_engine.topology_labels.worker import ENABLED, LEVEL, MOUNT_PATH, POLICY


def test_the_labels_of_the_node_reach_the_engine(tmp_path: Path) -> None:
    """Label of the node, label of the pod, file of the volume, and the engine's environment with all three names."""

    async def run() -> None:
        async with chain(tmp_path) as made:
            await made.nodes(n1="r1")
            await made.route(constrained(mismatchPolicy="fallback"))
            machine = await made.start("decode-0", "decode", "n1")
            await made.engines("decode-0")
            pod = await made.rig.get("Pod", "decode-0") or {}
            assert pod["metadata"]["labels"]["kvroute.io/topology.rack"] == "r1"
            assert (machine.folder / "rack").read_text() == "r1"
            assert (machine.folder / "zone").read_text() == "z1"
            given = machine.environment
            assert {given[name] for name in ENABLED} == {"true"}
            assert {given[name] for name in LEVEL} == {"rack"}
            assert {given[name] for name in POLICY} == {"fallback", "preferred"}
            assert {given[name] for name in MOUNT_PATH} == {str(machine.folder)}
            assert machine.stderr == []

    scenario(run())


def test_row_files_not_present(tmp_path: Path) -> None:
    """After the retry period the wrapper ends with an error, again and again, and the engine does not start before the
    node has its label."""

    async def run() -> None:
        async with chain(tmp_path, wait_s=0.2) as made:
            await made.nodes(n1="")
            await made.route(constrained())
            machine = await made.start("decode-0", "decode", "n1")
            await made.rig.until(lambda: _failed_twice(made, "decode-0"))
            sentence = f"{machine.folder / 'rack'} is empty after 0.2 s, so this worker's rack is not known"
            assert all(sentence in text and text.count("\n") == 1 for text in machine.stderr)
            assert machine.engine is None
            found = await made.rig.get("KvRouter", "chat") or {}
            [labelled] = [
                condition for condition in found["status"]["conditions"] if condition["type"] == "EnginesLabelled"
            ]
            assert labelled["reason"] == "NodeLabelMissing"
            assert "the node of decode-0 has no label example.com/rack" in labelled["message"]
            await made.rig.patch("Node", "n1", {"metadata": {"labels": {"example.com/rack": "r7"}}}, namespace="")
            await made.engines("decode-0")
            assert (machine.folder / "rack").read_text() == "r7"

    scenario(run())


async def _failed_twice(made: Chain, name: str) -> bool:
    return len(made.machines[name].stderr) >= 2


@pytest.mark.parametrize("present", [True, False])
def test_row_files_not_present_for_an_engine_below_the_wrapper(tmp_path: Path, present: bool) -> None:
    """`run-worker -- COMMAND`, without an init container: exit code 1 and no engine, or the engine with its labels."""

    async def run() -> None:
        volume = Volume(tmp_path / "labels")
        volume.write(rack="r1" if present else "", zone="z1")
        program = "import os; print(os.environ['KVROUTE_TOPOLOGY'])"
        environment = {
            ENABLED[1]: "true",
            MOUNT_PATH[1]: str(volume.folder),
            LEVEL[1]: "rack",
            "KVROUTE_TOPOLOGY_WAIT_S": "0",
        }
        command = ["kube", "run-worker", "--", sys.executable, "-c", program]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *kvroute_command(*command), env=environment, stdout=pipe, stderr=pipe
        )
        stdout, stderr = await process.communicate()
        if present:
            assert (process.returncode, json.loads(stdout)) == (0, {"rack": "r1", "zone": "z1"})
        else:
            assert (process.returncode, stdout) == (1, b"")
            assert b"so this worker's rack is not known (the volume has zone)" in stderr

    scenario(run())
