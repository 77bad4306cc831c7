"""Health checks: the state machine against its definition, and checks of a real server that fails and recovers."""

from __future__ import annotations

import asyncio

import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import HANGS_S

from kvroute.http.client.poller import PollSpec
from kvroute.http.client.pool import UpstreamPool
from kvroute.serve.engines.health import Health, HealthChecks


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, True, False]))
def test_health_changes_only_after_consecutive_opposite_checks(
    results: list[bool], failures: int, successes: int, known: bool | None
) -> None:
    """An instance is down after `failures` failed checks in a row and up after `successes` passed ones; each change is
    reported once. While nothing is known yet, one check decides."""
    health = Health(failures, successes, known)
    up = known is not False
    history: list[bool] = []
    for number, passed in enumerate(results):
        history.append(passed)
        needed = failures if up else successes
        if known is None and number == 0:
            needed = 1
        flips = len(history) >= needed and all(observed is not up for observed in history[-needed:])
        assert health.record(passed) is flips
        if flips:
            up, history = not up, []
        assert health.up is up
    assert health.checked == (bool(results) or known is not None)


def test_a_server_becomes_unhealthy_stops_and_recovers() -> None:
    """HTTP 503 and a closed port both count as failures; each change is reported once, and its reason is available."""

    async def scenario() -> None:
        status = "200 OK"
        paths = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                paths.add(head.split(b" ", 2)[1])
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = UpstreamPool(f"http://127.0.0.1:{port}")
        changes: asyncio.Queue[tuple[str, bool, float]] = asyncio.Queue()
        checks = HealthChecks(
            ["a"],
            {"a": pool}.get,
            lambda name, up, at: changes.put_nowait((name, up, at)),
            lambda: 3.0,
            PollSpec(path="/healthz", interval_s=0.01, timeout_s=30.0),
        )
        assert checks.up("a")
        assert not checks.all_checked
        checks.start()
        while not checks.all_checked:
            await asyncio.sleep(0.001)
        status = "503 Ill"
        assert await changes.get() == ("a", False, 3.0)
        assert not checks.up("a")
        assert checks.why("a") == "HTTP status 503"
        status = "204 Fine"
        assert await changes.get() == ("a", True, 3.0)
        server.close()
        await server.wait_closed()
        assert await changes.get() == ("a", False, 3.0)
        assert "cannot connect" in checks.why("a")
        server = await asyncio.start_server(serve, "127.0.0.1", port)
        assert await changes.get() == ("a", True, 3.0)
        assert checks.why("a") == ""
        checks.close()
        pool.close()
        server.close()
        await server.wait_closed()
        assert changes.empty()
        assert paths == {b"/healthz"}

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_S):
            await scenario()

    uvloop.run(bounded())
