"""The conformance script against the tests' own API server: every check passes, and nothing remains."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx2
from tests.kube.apiserver.access import ADMIN
from tests.kube.apiserver.server import Server, Settings
from tests.kube.conformance_checks import CHECKS
from tests.kube.operator.operator_rig import open_definition
from tests.waiting import HANGS_S

from kvroute.kube.operator.rights import NODES, RIGHTS, Kind

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)

UNUSED = {"servicemonitors", "clustertopologybindings", "clustertopologies", "poddisruptionbudgets"}
"""Resources of which the checks do not use every right: their definition is not installed, or nothing is to delete. The
right to create comes with a patch that creates, by server-side apply."""


def test_every_check_passes_and_nothing_remains() -> None:
    """As a process, as it is run against a real server."""

    async def run() -> None:
        server = Server(Settings(tokens={"admin": ADMIN}))
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
                    ((each["group"], each["resource"]), each["verb"])
                    for each in server.audit
                    if each["user"].endswith(":kvroute-operator") and "accessreviews" not in each["resource"]
                }
                assert (await admin.get(NODES.path())).json()["items"] == []
                names = [each["metadata"]["name"] for each in (await admin.get(DEFINITIONS.path())).json()["items"]]
                assert names == ["networkpolicies.networking.k8s.io"]
                granted = {(key, verb) for key, verbs in RIGHTS.items() for verb in verbs}
                assert used <= granted
                assert {key[1] for key, verb in granted - used if verb != "create"} <= UNUSED
        finally:
            await server.stop()

    asyncio.run(run())


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


async def conformance(*arguments: str) -> tuple[int, list[str]]:
    """Run the script; return its exit code and the lines that it prints."""
    command = [sys.executable, "-m", "tests.kube.conformance", *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(HANGS_S):
        stdout, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode().splitlines()
