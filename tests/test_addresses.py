"""Addresses with ports, of both kinds of IP: how they are written, and that what listens there is reached."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from ipaddress import IPv4Address, IPv6Address
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL
from tests.serve.stub_engines import completion, engines_of, run, stub_rig
from tests.waiting import PATIENCE_S, becomes_true

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.serve.assembly import Deployment, Gateway
from kvroute_engine.addresses import bound, host_port


def has_ipv6() -> bool:
    """Whether this machine has the address ::1."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@given(st.ip_addresses() | st.sampled_from(["localhost", "gpu-1.example"]), st.integers(1, 65535))
def test_a_url_has_the_host_and_the_port(host: IPv4Address | IPv6Address | str, port: int) -> None:
    found = urlsplit(f"http://{host_port(str(host), port)}/x")
    assert (found.hostname, found.port) == (str(host), port)
    assert host_port(f"[{host}]", port) == f"[{host}]:{port}"


@IPV6
def test_all_addresses_are_those_of_both_kinds() -> None:
    """Any single IPv6 address is that alone."""
    for host, reached in (("::", ("127.0.0.1", "::1")), ("::1", ("::1",)), ("127.0.0.1", ("127.0.0.1",))):
        own = bound(host, 0)
        assert own is not None
        with own:
            own.listen()
            for place in ("127.0.0.1", "::1"):
                try:
                    socket.create_connection((place, own.getsockname()[1])).close()
                except ConnectionRefusedError:
                    assert place not in reached
                else:
                    assert place in reached
    assert bound("localhost", 0) is None


@IPV6
def test_a_gateway_at_all_addresses_serves_clients_of_both_kinds() -> None:
    """So does its admin port."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        everywhere = "{host: '::', port: 0}"
        async with stub_rig(prefill + decode, "", everywhere, everywhere) as front:
            for place in ("127.0.0.1", "[::1]"):
                async with aiohttp.ClientSession() as session:
                    url = f"http://{place}:{front.gateway.port}{COMPLETIONS}"
                    async with session.post(url, json=completion()) as response:
                        assert response.status == 200
                    async with session.get(f"http://{place}:{front.gateway.admin_port}/ready") as response:
                        assert response.status in (200, 503)

    run(main())


@IPV6
def test_emulated_engines_on_ipv6_are_reached_with_their_events_and_caches() -> None:
    async def main() -> None:
        text = CLUSTER + "  scrape: {interval: 50 ms}\n"
        settings = EmulatedClusterSpec(host="::1")
        async with EmulatedCluster(topology.parse(text), settings) as fleet:
            endpoints = fleet.ready().instances
            assert all("[::1]:" in endpoint.url and "[::1]:" in endpoint.kv_events for endpoint in endpoints.values())
            gateway = Gateway(Deployment.of(text, "test.yaml", endpoints=endpoints))
            try:
                await gateway.start()
                async with aiohttp.ClientSession() as session:
                    url = f"http://127.0.0.1:{gateway.port}{COMPLETIONS}"

                    def heard() -> bool:
                        page = "".join(gateway.metrics.page("")[1])
                        return re.search(r'kvroute_kv_events_total\{engine="prefill\d"\} [1-9]', page) is not None

                    limit = time.monotonic() + PATIENCE_S
                    for number in count():  # batches sent before the subscription are replayed once one follows
                        body = {"model": MODEL, "prompt": f"{number}" * 4000, "max_tokens": 4}
                        async with session.post(url, json=body) as response:
                            assert response.status == 200
                        if await becomes_true(heard, patience_s=0.5):
                            break
                        assert time.monotonic() < limit
            finally:
                await gateway.close()

    run(main())


@IPV6
@pytest.mark.parametrize(
    "command", [("serve", "--embedded", "--port", "0", "--admin-port", "0"), ("emulate",)], ids=["serve", "emulate"]
)
def test_printed_addresses_are_urls(command: tuple[str, ...], tmp_path: Path) -> None:
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(CLUSTER)
    name, *options = command
    line = [sys.executable, "-m", "kvroute.cli.app", name, str(file), *options, "--host", "::1", "--until-eof"]
    with subprocess.Popen(
        [*line, "--ready-file", str(ready)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            written = json.loads(ready.read_text())
            urls = (
                [written["url"]] if name == "serve" else [instance["url"] for instance in written["instances"].values()]
            )
            for url in urls:
                assert url.startswith("http://[::1]:")
                with urllib.request.urlopen(f"{url}/health") as response:
                    assert response.status == 200
            printed, _ = process.communicate(b"")
        finally:
            process.kill()
    assert (b"http://[::1]:" in printed) == (name == "serve")
