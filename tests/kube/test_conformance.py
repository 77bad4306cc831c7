"""The conformance script against the tests' own API server: every check passes, and nothing remains."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.kube.apiserver.access import ADMIN
from tests.kube.apiserver.server import Server, Settings
from tests.kube.conformance_checks import CHECKS
from tests.kube.operator.operator_rig import open_definition
from tests.waiting import HANGS_S

from kvroute.kube.admission.certificates import issue
from kvroute.kube.operator.rights import NODES, RIGHTS, ResourceKind

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = ResourceKind(
    "apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False
)

UNUSED = {"servicemonitors", "clustertopologybindings", "clustertopologies", "poddisruptionbudgets"}
"""Resources of which the checks do not use every right: their definition is not installed, or nothing is to delete. The
right to create comes with a patch that creates, by server-side apply."""


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"cleanup_s": 1.0, "controllers": True}])
def test_every_check_passes_and_nothing_remains(given: dict[str, Any]) -> None:
    """As a process, as it is run against a real server; also where definitions end later and a controller writes the
    status of Deployments."""

    async def run() -> None:
        server = Server(Settings(tokens={"admin": ADMIN}, **given))
        await server.start()
        try:
            async with httpx2.AsyncClient(base_url=server.url, headers={"Authorization": "Bearer admin"}) as admin:
                policies = open_definition("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
                assert (await admin.post(DEFINITIONS.path(), json=policies)).status_code == 201
                code, lines = await conformance("--server", server.url, "--token", "admin")
                assert [line for line in lines if line.startswith("FAIL")] == []
                titles = [line.removeprefix("ok    ") for line in lines[1:]]
                assert titles == [*(title for title, _ in CHECKS), "everything is removed"]
                assert code == 0
                used = {
                    ((call["group"], call["resource"]), call["verb"])
                    for call in server.audit
                    if call["user"].endswith(":kvroute-operator") and "accessreviews" not in call["resource"]
                }
                assert (await admin.get(NODES.path())).json()["items"] == []
                names = [
                    definition["metadata"]["name"]
                    for definition in (await admin.get(DEFINITIONS.path())).json()["items"]
                ]
                assert names == ["networkpolicies.networking.k8s.io"]
                granted = {(key, verb) for key, verbs in RIGHTS.items() for verb in verbs}
                assert used <= granted
                assert {key[1] for key, verb in granted - used if verb != "create"} <= UNUSED
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_what_it_says_about_a_server_that_cannot_be_used() -> None:
    """One sentence, exit code 2."""

    async def run() -> None:
        code, lines = await conformance("--server", "http://127.0.0.1:1", "--token", "x")
        assert (code, lines) == (2, [])
        server = Server(Settings(tokens={"admin": ADMIN}))
        await server.start()
        try:
            assert await conformance("--server", server.url, "--token", "wrong") == (2, [])
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_a_relative_path_of_the_ca_is_resolved(tmp_path: Path) -> None:
    """The check of discovery writes a kubeconfig into another folder, which names the file."""
    pair = issue(["localhost"], time.time())
    for name, text in (("tls.crt", pair.certificate), ("tls.key", pair.key), ("ca.crt", pair.ca)):
        (tmp_path / name).write_bytes(text)

    async def run() -> None:
        certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
        server = Server(Settings(host="localhost", tokens={"admin": ADMIN}, certificate=certificate, key=key))
        url = (await server.start()).replace("127.0.0.1", "localhost")
        try:
            headers = {"Authorization": "Bearer admin"}
            trust = ssl.create_default_context(cafile=tmp_path / "ca.crt")
            async with httpx2.AsyncClient(base_url=url, headers=headers, verify=trust) as admin:
                policies = open_definition("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
                assert (await admin.post(DEFINITIONS.path(), json=policies)).status_code == 201
            arguments = ("--server", url, "--token", "admin", "--ca", "ca.crt", "--webhook-host", "")
            code, lines = await conformance(*arguments, folder=tmp_path)
            assert [line for line in lines if line.startswith("FAIL")] == []
            assert code == 0
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_what_it_needs_is_named_in_one_sentence(tmp_path: Path) -> None:
    """A missing package and a missing file: exit code 2, and what to do."""
    script = "import sys; sys.modules['lightkube'] = None; import tests.kube.conformance"
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    absent = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.startswith("error: the module lightkube is missing; `make .venv/.dev` in a checkout")
    assert absent.stderr.count("\n") == 1
    arguments = ["--server", "https://127.0.0.1:1", "--token", "x", "--ca", "absent.crt"]
    command = [sys.executable, "-m", "tests.kube.conformance", *arguments]
    wrong = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].endswith("absent.crt is no file; give the PEM file with the CA of the server")


async def conformance(*arguments: str, folder: Path = ROOT) -> tuple[int, list[str]]:
    """Run the script in a folder; return its exit code and the lines that it prints."""
    command = [sys.executable, "-m", "tests.kube.conformance", *arguments]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(HANGS_S):
        stdout, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode().splitlines()
