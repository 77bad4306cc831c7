"""The API server as a process: HTTPS, tokens, SIGKILL during a watch, and a restart on its journal."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.kube import certificates
from tests.kube.client import ApiClient
from tests.kube.scenarios.definitions import STUCK, decided
from tests.waiting import HANGS_S, until

ROOT = Path(__file__).resolve().parents[2]
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Yield a server process and the file that gets its URL; kill it at the end."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.kube.apiserver", "--ready", str(ready), *arguments]
    running = subprocess.Popen(command, cwd=ROOT)
    try:
        yield running, ready
    finally:
        running.kill()
        running.wait()


async def url_of(ready: Path) -> str:
    """Return the URL once the server listens."""
    await until(ready.exists)
    return str(json.loads(ready.read_text(encoding="utf-8"))["url"])


def test_objects_survive_a_kill_and_watches_do_not(tmp_path: Path) -> None:
    """After SIGKILL and a restart the objects, their uids, tokens and custom resources are there; resuming is 410."""
    journal = str(tmp_path / "journal")

    async def before() -> dict[str, Any]:
        async with ApiClient(await url_of(tmp_path / "ready.json")) as client:
            made = await client.must("POST", CONFIG_MAPS, {"metadata": {"name": "c"}, "data": {"a": "1"}})
            await client.must("POST", CONFIG_MAPS, {"metadata": {"name": "gone"}})
            await client.must("DELETE", f"{CONFIG_MAPS}/gone")
            await client.must("POST", CRDS, STUCK)
            while not decided(await client.must("GET", f"{CRDS}/stucks.t.kvroute.dev")):
                await asyncio.sleep(0.01)
            answer = await client.must("POST", "/api/v1/namespaces/default/serviceaccounts/default/token", {})
            listed = await client.must("GET", CONFIG_MAPS)
            return {"made": made, "token": answer["status"]["token"], "version": listed["metadata"]["resourceVersion"]}

    async def cut(running: subprocess.Popen[bytes], version: str) -> None:
        async with ApiClient(await url_of(tmp_path / "ready.json")) as client:
            events = client.events(CONFIG_MAPS, f"resourceVersion={version}")
            await client.must("POST", CONFIG_MAPS, {"metadata": {"name": "last"}})
            assert (await anext(events))["object"]["metadata"]["name"] == "last"
            running.send_signal(signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await anext(events)

    async def after(found: dict[str, Any]) -> None:
        url = await url_of(tmp_path / "ready.json")
        async with ApiClient(url) as client:
            assert await client.must("GET", f"{CONFIG_MAPS}/c") == found["made"]
            names = [item["metadata"]["name"] for item in (await client.must("GET", CONFIG_MAPS))["items"]]
            assert names == ["c", "last"]
            events = [event async for event in client.events(CONFIG_MAPS, f"resourceVersion={found['version']}")]
            assert [(event["type"], event["object"]["code"]) for event in events] == [("ERROR", 410)]
            await client.must("GET", "/apis/t.kvroute.dev/v1/namespaces/default/stucks")
        async with ApiClient(url, found["token"]) as account:
            status, refusal = await account.send("GET", CONFIG_MAPS)
            assert status == 403
            assert "system:serviceaccount:default:default" in refusal["message"]

    with process(tmp_path, "--journal", journal) as (running, _):
        found = asyncio.run(asyncio.wait_for(before(), HANGS_S))
        asyncio.run(asyncio.wait_for(cut(running, found["version"]), HANGS_S))
    with process(tmp_path, "--journal", journal):
        asyncio.run(asyncio.wait_for(after(found), HANGS_S))


def test_the_server_speaks_https_and_knows_the_tokens_of_its_command_line(tmp_path: Path) -> None:
    """A client that trusts the certificate is served, as the user of its token; another one refuses it."""
    own = certificates.make(tmp_path)
    arguments = ("--certificate", str(own.certificate), "--key", str(own.key), "--token", "t=alice:team,system:masters")

    async def scenario() -> None:
        url = await url_of(tmp_path / "ready.json")
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=own.certificate)
        async with ApiClient(url, "t", context) as client:
            review = await client.must("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", {})
            groups = ["team", "system:masters", "system:authenticated"]
            assert review["status"]["userInfo"] == {"username": "alice", "groups": groups}
        async with ApiClient(url, "t") as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await stranger.send("GET", "/version")

    with process(tmp_path, *arguments):
        asyncio.run(asyncio.wait_for(scenario(), HANGS_S))
