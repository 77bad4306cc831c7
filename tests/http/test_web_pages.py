"""Web pages of other sites cannot use a port without API keys, and clients that are not browsers are not affected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER, COMPLETIONS, Rig, rig
from tests.serve.stub_engines import completion, engines_of, run, stub_rig

from kvroute.http.server.web_pages import WebPages
from kvroute.serve.api.api_keys import hash_text
from kvroute.serve.lifecycle.deployment import Deployment
from kvroute_engine.origins import is_loopback, is_own_name, refusal

LISTEN = "  listen: {port: 0}\n"
KEY = "kvr_alice"
KEYS = f"  keys: {{known: {{alice: '{hash_text(KEY)}'}}}}\n"
REBOUND = "evil.example:8080"
PAGES = ("/v1/models", "/metrics", "/openapi.json", "/health", "/ready")
OWN_NAMES = (
    "localhost",
    "localhost:8080",
    "LOCALHOST",
    "api.localhost",
    "127.0.0.1:8080",
    "10.1.2.3",
    "[::1]:8080",
    "kvroute",
    "kvroute:8080",
    "kvroute.team.svc",
    "kvroute.team.svc.cluster.local:8080",
    "gateway.internal",
    socket.gethostname(),
)


async def status_of(port: int, host: str, *, method: str = "GET", path: str = "/v1/models", **headers: str) -> int:
    """Send a request that names `host`; return the status of the response."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    length = "Content-Length: 2\r\n" if method == "POST" else ""
    data = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{length}{lines}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data.encode() + (b"{}" if method == "POST" else b""))
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(response[9:12])


def listening(settings: str, section: str = "") -> tuple[str, str]:
    """Return the arguments of `rig` for a port with these settings."""
    return section, CLUSTER.replace(LISTEN, f"  listen: {{port: 0, {settings}}}\n")


@pytest.mark.parametrize("path", PAGES)
def test_a_rebound_host_name_is_rejected_on_loopback(path: str) -> None:
    async def main() -> None:
        async with rig() as gate:
            port = gate.gateway.port
            assert await status_of(port, REBOUND, path=path) == 403
            for name in OWN_NAMES:
                assert await status_of(port, name, path=path) == 200

    run(main())


def test_web_pages_of_other_sites_cannot_send_completions() -> None:
    """A cross-site request with plain text, which needs no preflight, is rejected, and so is a request by a rebound
    host name. No engine receives the request, and the connection ends before the body."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            port = front.gateway.port
            own = f"localhost:{port}"
            for origin, host in (
                ("https://evil.example", own),
                ("http://localhost:1", own),
                ("null", own),
                ("", own),
                (f"http://{REBOUND}", REBOUND),
            ):
                assert await status_of(port, host, method="POST", path=COMPLETIONS, Origin=origin) == 403
            assert not any(engine.received for engine in prefill + decode)
            page = (await front.get("/metrics")).body.decode()
            assert 'kvroute_rejects_total{reason="web_page"} 5\n' in page
            # A page of the gateway's own origin, and a client without a browser.
            for headers in ({"Origin": front.url}, {}):
                assert (await front.post(completion(), headers=headers)).status == 200

    run(main())


@pytest.mark.slow
def test_the_cache_of_host_names_takes_bounded_memory() -> None:
    """Beyond loopback any number of names is accepted, of any length."""
    pages = WebPages()
    pages.change(checked=True, listen_host="0.0.0.0", hosts=[], origins=[])
    for number in range(1500):
        assert pages.refusal(b"%d.example" % number, None) == ""
        assert pages.refusal(b"x" * 60_000 + b"%d.example" % number, None) == ""
        assert len(pages.passed) <= 1024
    assert b"1499.example" in pages.passed
    assert sum(map(len, pages.passed)) <= 1024 * 300


def test_beyond_loopback_any_host_name_is_accepted_without_an_origin() -> None:
    """Clients that reach the port may use any host name; a browser's request that may change something has an Origin
    header."""

    async def main() -> None:
        async with rig(*listening("host: 0.0.0.0")) as gate:
            port = gate.gateway.port
            assert await status_of(port, "gateway.example") == 200
            assert await status_of(port, REBOUND, method="POST", path=COMPLETIONS, Origin=f"http://{REBOUND}") == 403

    run(main())


def test_host_names_and_origins_can_be_allowed() -> None:
    async def main() -> None:
        listed = "hosts: [Gateway.Example], origins: ['https://app.example']"
        async with rig(*listening(listed)) as gate:
            port = gate.gateway.port
            assert await status_of(port, "gateway.example:8080") == 200
            assert await status_of(port, "other.example") == 403
            preflight_headers = {
                "Origin": "https://app.example",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            }
            async with gate.session.options(gate.url + COMPLETIONS, headers=preflight_headers) as preflight_response:
                assert preflight_response.status == 204
                assert preflight_response.headers["Access-Control-Allow-Origin"] == "https://app.example"
                assert preflight_response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
                assert "POST" in preflight_response.headers["Access-Control-Allow-Methods"]
            response = await gate.post(completion(stream=True), headers={"Origin": "https://app.example"})
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == "https://app.example"
            assert (await gate.post(completion(), headers={"Origin": "https://other.example"})).status == 403
            assert "access-control-allow-origin" not in (await gate.post(completion())).headers

    run(main())


def test_with_api_keys_hosts_and_origins_are_not_checked_and_metrics_are_closed() -> None:
    """Web pages do not have a key. The metrics are on the admin port."""

    async def main() -> None:
        async with rig(KEYS) as gate:
            port = gate.gateway.port
            bearer = f"Bearer {KEY}"
            assert await status_of(port, REBOUND, Authorization=bearer, Origin="https://a.example") == 200
            assert await status_of(port, "localhost", path="/metrics") == 404
            assert await status_of(port, "localhost", path="/metrics", Authorization=bearer) == 404
            async with gate.session.get(f"{gate.admin}/metrics") as response:
                assert response.status == 200
        async with rig(*listening("metrics: true", KEYS)) as gate:
            assert await status_of(gate.gateway.port, "localhost", path="/metrics") == 200

    run(main())


def test_a_reload_that_adds_keys_closes_metrics_and_accepts_all_host_names() -> None:
    """The reverse holds too, also on connections that were open before."""

    async def statuses(gate: Rig) -> Sequence[int]:
        codes = []
        for path, host in (("/metrics", "localhost"), ("/health", REBOUND)):
            async with gate.session.get(gate.url + path, headers={"Host": host}) as response:
                codes.append(response.status)
        return codes

    async def main() -> None:
        async with rig() as gate:
            endpoints = gate.fleet.ready().instances
            for section, expected in (("", [200, 403]), (KEYS, [404, 200]), ("", [200, 403])):
                deployment = Deployment.of(CLUSTER + section, "test.yaml", endpoints=endpoints)
                assert await gate.gateway.reload(lambda deployment=deployment: deployment)  # type: ignore[misc]
                assert await statuses(gate) == expected

    run(main())


@pytest.mark.parametrize("path", ["/emulator/restart", "/emulator/fault", "/reset_prefix_cache", COMPLETIONS])
def test_web_pages_cannot_control_an_emulated_engine(path: str) -> None:
    async def main() -> None:
        async with rig() as gate:
            engine = gate.fleet.servers["prefill0"]
            for origin, host in (("https://evil.example", f"127.0.0.1:{engine.port}"), (f"http://{REBOUND}", REBOUND)):
                assert await status_of(engine.port, host, method="POST", path=path, Origin=origin) == 403
            assert await status_of(engine.port, REBOUND, path="/metrics") == 403
            assert await status_of(engine.port, f"127.0.0.1:{engine.port}", path="/metrics") == 200

    run(main())


LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
PUBLIC = st.tuples(LABEL, LABEL, st.sampled_from(["com", "example", "dev", "local", "io"])).map(".".join)


@given(PUBLIC, st.sampled_from(["", ":80", ":8080", "."]), st.booleans())
def test_an_unlisted_public_name_is_rejected_in_every_spelling(name: str, port: str, same: bool) -> None:
    """A public name is accepted only if it is listed, also together with an Origin of its own."""
    origin = f"http://{name}{port}" if same else None
    for suffix in ("", ".evil.com"):
        for prefix in ("", "localhost.", "127.0.0.1.", "a.svc."):
            host = f"{prefix}{name}{suffix}{port}"
            assert refusal(host, origin, known=())
    assert not is_own_name(name) or name == socket.gethostname().lower()
    assert not refusal(f"{name}{port}", origin, known={name})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "a.localhost"])
def test_which_host_names_mean_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", "localhost.example"])
def test_which_listening_hosts_other_machines_can_reach(host: str) -> None:
    assert not is_loopback(host)


def test_the_sources_use_no_parser_that_can_run_code() -> None:
    """Input from any port is treated as data: no pickle, eval, exec or full YAML."""
    forbidden = [
        *("import pickle", "pickle.load", "import marshal", "import shelve", "import dill", "yaml.load("),
        *("yaml.unsafe_load", "yaml.full_load", "allow_pickle=True", "torch.load("),
    ]
    for path in [*Path("src").rglob("*.py"), *Path("engine/src").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not [pattern for pattern in forbidden if pattern in text], path
        assert not [line for line in text.splitlines() if line.lstrip().startswith(("eval(", "exec("))], path
        assert " eval(" not in text, path
        assert "=exec(" not in text.replace(" ", ""), path
