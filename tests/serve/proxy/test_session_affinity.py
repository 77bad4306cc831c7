"""Session affinity of the gateway: a header names the session, whose requests return to the same instances."""

from __future__ import annotations

from pathlib import Path

import uvloop
from tests.serve.rig import COMPLETIONS, MODEL, Rig, rig
from tests.serve.test_chaos import check_replay

from kvroute.http.headers import session_of

AFFINE = "  session_affinity: {header: X-Chat, bonus: 10 s}\n"


async def instances(gate: Rig, chat: str, number: int) -> tuple[str, ...]:
    """Send a request of a session (empty: none); return the instances that have served it."""
    before = {
        name: server.engine.counters.queries + server.engine.counters.finished
        for name, server in gate.fleet.servers.items()
    }
    body = {"model": MODEL, "prompt": f"{number} " * 100, "max_tokens": 1}
    response = await gate.post(body, COMPLETIONS, {"x-chat": chat} if chat else {})
    assert response.status == 200
    after = {
        name: server.engine.counters.queries + server.engine.counters.finished
        for name, server in gate.fleet.servers.items()
    }
    assert await gate.becomes_idle()
    return tuple(name for name in sorted(after) if after[name] != before[name])


def test_requests_of_a_session_return_to_its_instances(tmp_path: Path) -> None:
    """Other instances are chosen first while those of the session were down. The log replays, and does not contain the
    name of the session."""
    log = tmp_path / "log.jsonl"

    async def main() -> None:
        section = (
            AFFINE + f"  policy: load-aware\n  health: {{slow_start: 0 s, interval: 10 ms}}\n  log: {{events: {log}}}\n"
        )
        async with rig(section) as gate:
            first = ("decode0", "prefill0")
            assert await instances(gate, "", 1) == first
            for name in first:
                await gate.stop_engine(name)
                assert await gate.becomes(name, False)
            other = await instances(gate, "secret-chat", 2)
            assert other == ("decode1", "prefill1")
            for name in first:
                await gate.restart_engine(name)
                assert await gate.becomes(name, True)
            assert await instances(gate, "secret-chat", 3) == other
            assert await instances(gate, "", 4) == first
            assert await instances(gate, "another", 5) == first

    uvloop.run(main())
    assert check_replay(log)["Arrived"] == 5
    assert "secret-chat" not in log.read_text()


def test_the_hash_of_a_session_is_that_of_its_header() -> None:
    headers = [(b"x-other", b"a"), (b"x-chat", b"a"), (b"x-chat", b"b")]
    assert session_of(headers, b"x-chat") == session_of([(b"x-chat", b"a")], b"x-chat") != 0
    assert session_of(headers, b"x-chat") != session_of([(b"x-chat", b"b")], b"x-chat")
    assert session_of(headers, b"x-session-id") == session_of([(b"x-chat", b"")], b"x-chat") == 0
