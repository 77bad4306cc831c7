"""The admin port over real sockets: its pages, the requests that it rejects, and that it releases everything when
closed."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from tests.serve.every_setting import SECRETS, every_setting, read
from tests.waiting import HANGS_S, until

from kvroute.serve.observe.admin.connections import AdminConnections
from kvroute.serve.observe.admin.server import WATCHERS_MOST, Admin, AdminParts
from kvroute.serve.observe.admin.state import DashboardState
from kvroute.serve.observe.metrics.metrics import Metrics
from kvroute.serve.observe.view import GatewayStatus, InstanceLoad
from kvroute.topology import InstanceCounts, build, fat_tree
from kvroute.types import InputError, Reject

CLUSTER = build(
    fat_tree(
        pods=1,
        racks_per_pod=1,
        nodes_per_rack=2,
        oversubscription=(1.0, 1.0),
        instances=InstanceCounts(prefill=1, decode=3),
    )
)
TOKEN = "a token of the operator"


def _load() -> GatewayStatus:
    return GatewayStatus(
        in_flight=5, instances=tuple(InstanceLoad(name=instance.name) for instance in CLUSTER.instances)
    )


@dataclass
class Gateway:
    """The gateway behind the port: plain callables that record their calls."""

    why_not: str = ""
    pushed: list[bytes] = field(default_factory=list)
    drained: int = 0
    state: DashboardState = field(default_factory=lambda: DashboardState(CLUSTER, _load, policy="netkv", version="1.2"))

    async def push(self, body: bytes) -> None:
        if body == b"bad":
            raise InputError("1.5 is not a utilisation", where="per_tier.rack", hint="give a number in [0, 1)")
        self.pushed.append(body)

    def drain(self) -> None:
        self.drained += 1

    def parts(self, **changes: Any) -> AdminParts:
        return replace(
            AdminParts(
                state=self.state,
                page=Metrics(_load, {}, version="1.2", policy="netkv").whole_page,
                now=asyncio.get_running_loop().time,
                ready=lambda: self.why_not,
                version="1.2",
                config=lambda: {"listen": {"port": 8080}, "admin": {"push_token": TOKEN}},
                push=self.push,
                drain=self.drain,
            ),
            **changes,
        )


@dataclass
class Port:
    """The open port and a client of it."""

    admin: Admin
    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return await self._request("GET", path, b"", headers)

    async def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        return await self._request("POST", path, body, headers)

    async def _request(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        async with self.session.request(method, self.url + path, data=io.BytesIO(body), headers=headers) as response:
            return response.status, await response.read()


@asynccontextmanager
async def _open(gateway: Gateway, **changes: Any) -> AsyncIterator[Port]:
    admin = Admin(gateway.parts(**changes))
    try:
        number = await admin.start("127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:
            yield Port(admin, f"http://127.0.0.1:{number}", session)
    finally:
        await admin.close()


def _run(gateway: Gateway, drive: Callable[[Port], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(HANGS_S), _open(gateway, **changes) as port:
            await drive(port)

    asyncio.run(main())


async def _event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    kind = (await response.content.readline()).removeprefix(b"event: ").strip().decode()
    data = json.loads((await response.content.readline()).removeprefix(b"data: "))
    assert await response.content.readline() == b"\n"
    return kind, data


def test_all_files_of_the_page_are_served_and_no_other_origin_is_used() -> None:
    """Every file that the page names is served; the page forbids scripts of other origins and names none."""

    async def drive(port: Port) -> None:
        async with port.session.get(port.url + "/") as response:
            page = await response.text()
            policy = response.headers["Content-Security-Policy"]
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "Access-Control-Allow-Origin" not in response.headers
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in page.replace("http://www.w3.org/2000/svg", "")
        for name in ("dashboard.css", "dashboard.js", "map.js", "panels.js", "format.js"):
            status, body = await port.get(f"/{name}")
            assert status == 200
            assert b"innerHTML" not in body
            assert b"http:" not in body
            assert b"https:" not in body
        assert (await port.get("/admin.py"))[0] == 404

    _run(Gateway(), drive)


def test_state_events_and_snapshots_of_new_versions() -> None:
    """/state is one snapshot. /events sends a snapshot, then ticks, and another snapshot when the cluster has
    changed."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        gateway.state.decided(Reject(3, "no room"), 0.0)
        status, body = await port.get("/state")
        snapshot = json.loads(body)
        assert status == 200
        assert [instance["name"] for instance in snapshot["layout"]["instances"]] == [
            instance.name for instance in CLUSTER.instances
        ]
        assert snapshot["tick"]["load"]["in_flight"] == 5
        assert snapshot["tick"]["decisions"][0]["reason"] == "no room"
        assert json.loads((await port.get("/version"))[1]) == {"version": "1.2", "policy": "netkv"}
        async with port.session.get(port.url + "/events") as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            kinds = [(await _event(response))[0] for _ in range(3)]
            assert kinds == ["snapshot", "tick", "tick"]
            gateway.state.replace(CLUSTER)
            while (event := await _event(response))[0] == "tick":
                assert event[1]["layout_id"] == 1
            assert event[1]["layout"]["id"] == 2

    _run(gateway, drive)


def test_event_streams_are_bounded_and_end_when_the_port_closes() -> None:
    """A stream beyond the limit is rejected; a stream that ends makes room; closing the port ends all other streams."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        responses = [await port.session.get(port.url + "/events") for _ in range(WATCHERS_MOST)]
        assert port.admin.watchers == WATCHERS_MOST
        status, body = await port.get("/events")
        assert (status, json.loads(body)) == (503, {"error": f"{WATCHERS_MOST} dashboards are open already"})
        responses.pop().close()
        while port.admin.watchers == WATCHERS_MOST:
            await asyncio.sleep(0)
        await port.admin.close()
        for response in responses:
            assert (await response.content.read()).endswith(b"\n\n")
        assert port.admin.watchers == 0

    _run(gateway, drive)


def test_health_ready_and_metrics() -> None:
    """/health and /ready differ; the Accept header selects the format of the metrics."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        assert (await port.get("/health"))[0] == 200
        assert (await port.get("/ready"))[0] == 200
        gateway.why_not = "draining"
        assert (await port.get("/health"))[0] == 200
        status, body = await port.get("/ready")
        assert (status, json.loads(body)["reason"]) == (503, "draining")
        assert b"kvroute_requests_in_flight 5\n" in (await port.get("/metrics"))[1]
        assert (await port.get("/metrics", Accept="application/openmetrics-text"))[1].endswith(b"# EOF\n")

    _run(gateway, drive)


def test_pushed_telemetry_is_forwarded_and_errors_are_reported() -> None:
    """The body is passed on unchanged; an InputError becomes a 400 that names the place of the error."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        assert (await port.post("/telemetry", b'{"per_tier": {"rack": 0.5}}'))[0] == 200
        status, body = await port.post("/telemetry", b"bad")
        assert status == 400
        assert json.loads(body)["where"] == "per_tier.rack"
        assert "[0, 1)" in json.loads(body)["error"]
        assert (await port.post("/telemetry", bytes(5 << 20)))[0] == 413
        assert (await port.get("/telemetry"))[0] == 405
        assert (await port.post("/drain"))[0] == 202

    _run(gateway, drive)
    assert gateway.pushed == [b'{"per_tier": {"rack": 0.5}}']
    assert gateway.drained == 1


def test_unavailable_features_are_reported() -> None:
    """A gateway without push and drain reports that they are not available."""

    async def drive(port: Port) -> None:
        assert (await port.post("/telemetry", b"{}"))[0] == 404
        assert (await port.post("/drain"))[0] == 404

    _run(Gateway(), drive, push=None, drain=None)


def test_a_configured_token_is_required_for_changes() -> None:
    """Reading needs no token; changing needs the right one."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        for wrong in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN}x"},
        ):
            assert (await port.post("/drain", b"", **wrong))[0] == 401
        assert (await port.get("/state"))[0] == 200
        assert gateway.drained == 0
        assert (await port.post("/drain", Authorization=f"Bearer {TOKEN}"))[0] == 202

    _run(gateway, drive, token=TOKEN)


def test_a_token_that_is_not_text_is_rejected() -> None:
    gateway = Gateway()

    async def drive(port: Port) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))
        writer.write(b"POST /drain HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        await writer.wait_closed()
        assert gateway.drained == 0

    _run(gateway, drive, token=TOKEN)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "[evil]", "127.0.0.1.evil.example:80"])
def test_dns_rebinding_is_rejected(host: str) -> None:
    """DNS rebinding: the browser takes the port for a server of the attacker's host name."""

    async def drive(port: Port) -> None:
        assert (await port.get("/state", Host=host))[0] == 403

    _run(Gateway(), drive)


@pytest.mark.parametrize(
    "host", ["localhost:9090", "LOCALHOST", "127.0.0.1", "10.1.2.3:9090", "[::1]:9090", "gw.cluster"]
)
def test_ip_addresses_and_configured_host_names_are_accepted(host: str) -> None:
    """An IP address cannot be rebound, and names in the settings are allowed."""

    async def drive(port: Port) -> None:
        assert (await port.get("/state", Host=host))[0] == 200

    _run(Gateway(), drive, host_names=frozenset({"GW.cluster"}))


def test_pages_of_other_origins_can_change_nothing() -> None:
    """A form or script of another origin is rejected before its body is read; the page of the port itself is
    accepted."""
    gateway = Gateway()

    async def drive(port: Port) -> None:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            assert (await port.post("/drain", Origin=origin))[0] == 403
        assert gateway.drained == 0
        assert (await port.post("/drain", Origin=port.url))[0] == 202

    _run(gateway, drive)


def test_settings_are_shown_without_secrets() -> None:
    """The port removes the secrets from the settings that its caller provides."""

    async def drive(port: Port) -> None:
        _, body = await port.get("/config")
        assert json.loads(body) == {"listen": {"port": 8080}, "admin": {"push_token": "***"}}

    _run(Gateway(), drive)


def test_every_setting_can_be_shown() -> None:
    """Sizes and durations are texts with a unit, as in the file; secrets are absent."""
    section = every_setting()
    given = read(section)

    async def drive(port: Port) -> None:
        status, body = await port.get("/config")
        assert status == 200
        assert not any(secret.encode() in body for secret in SECRETS)
        shown = json.loads(body)
        assert shown["limits"] == section["limits"]
        assert shown["timeouts"] == section["timeouts"]
        assert shown["admin"]["push_token"] == shown["keys"]["known"]["example"] == "***"
        assert set(_paths(shown)) <= set(_paths(section))
        assert all(value == "***" or value == _paths(section)[path] for path, value in _paths(shown).items())

    _run(Gateway(), drive, config=lambda: given)


def _paths(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return every leaf by its path."""
    if not isinstance(value, dict):
        return {path: value}
    return {place: held for name, inside in value.items() for place, held in _paths(inside, (*path, name)).items()}


def test_a_port_in_use_is_reported() -> None:
    """The InputError names the address."""

    async def main() -> None:
        async with _open(Gateway()) as port:
            other = Admin(Gateway().parts())
            taken = int(port.url.rpartition(":")[2])
            with pytest.raises(InputError, match=rf"cannot listen on 127\.0\.0\.1:{taken}"):
                await other.start("127.0.0.1", taken)
            await other.close()

    asyncio.run(main())


READ = "a token for readers of it"


def _basic(name: str, password: str) -> str:
    return "Basic " + b64encode(f"{name}:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/state", "/events", "/metrics", "/config", "/version", "/dashboard.js"])
def test_a_configured_token_is_required_for_reading(path: str) -> None:
    """The token is accepted as a bearer token and as the password of a browser's login; the token for writing also
    reads."""

    async def drive(port: Port) -> None:
        wrong = ("", "Bearer ", f"Bearer {READ}x", READ, _basic("a", "b"), _basic(READ, ""), "Basic ???", "Basic")
        for shown in wrong:
            async with port.session.get(port.url + path, headers={"Authorization": shown} if shown else {}) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"].startswith("Basic ")
        for shown in (f"Bearer {READ}", f"Bearer {TOKEN}", _basic("any", READ), _basic("", TOKEN)):
            async with port.session.get(port.url + path, headers={"Authorization": shown}) as response:
                assert response.status == 200

    _run(Gateway(), drive, token=TOKEN, read_token=READ)


def test_a_read_token_cannot_change_anything_and_health_needs_no_token() -> None:
    gateway = Gateway()

    async def drive(port: Port) -> None:
        assert (await port.get("/health"))[0] == (await port.get("/ready"))[0] == 200
        assert (await port.post("/drain", Authorization=f"Bearer {READ}"))[0] == 401
        assert (await port.post("/drain", Authorization=_basic("", TOKEN)))[0] == 401
        assert (await port.post("/drain", Authorization=f"Bearer {TOKEN}"))[0] == 202

    _run(gateway, drive, token=TOKEN, read_token=READ)
    assert gateway.drained == 1


@asynccontextmanager
async def _limited(**limits: Any) -> AsyncIterator[tuple[AdminConnections, int]]:
    connections = AdminConnections(**limits)
    admin = Admin(Gateway().parts(), connections)
    try:
        yield connections, await admin.start("127.0.0.1", 0)
    finally:
        await admin.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "], ids=["nothing", "incomplete-head"])
def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    """The deadline holds however slowly the headers arrive."""

    async def main() -> None:
        async with asyncio.timeout(HANGS_S), _limited(head_s=0.1) as (connections, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await until(lambda: len(connections) == 1)
            reading = asyncio.create_task(reader.read())
            while not reading.done():
                writer.write(b"a" if sent else b"")
                await asyncio.sleep(0.001)
            with suppress(ConnectionError):
                await reading
            writer.close()
            await until(lambda: not len(connections))

    asyncio.run(main())


def test_idle_connections_block_no_operator_and_dashboards_stay_connected() -> None:
    async def main() -> None:
        async with asyncio.timeout(HANGS_S), _limited(most=5) as (connections, port):
            watching, watcher = await asyncio.open_connection("127.0.0.1", port)
            watcher.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await watching.readline()).startswith(b"HTTP/1.1 200 ")
            await until(lambda: len(connections) == 1)
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            async with aiohttp.ClientSession() as session:
                while True:  # the flood may not have been accepted yet
                    try:
                        async with session.get(f"http://127.0.0.1:{port}/state") as response:
                            if response.status == 200:
                                break
                    except aiohttp.ClientError:
                        continue
            await until(lambda: 1 < len(connections) <= 5)
            await watching.readuntil(b"event: tick")
            for _, writer in [*idle, (watching, watcher)]:
                writer.close()

    asyncio.run(main())


def test_a_client_that_half_closes_gets_its_page() -> None:
    async def drive(port: Port) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port.url.rpartition(":")[2]))
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writer.write_eof()
        response = await reader.read()
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"kvroute_requests_in_flight" in response
        writer.close()
        await writer.wait_closed()

    _run(Gateway(), drive)
