"""The process may open enough files for the number of connections in its settings."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.serve.rig import CLUSTER, RunningGateway
from tests.serve.stub_engines import Engine, Gate, completion, run, stub_rig, tokens
from tests.waiting import becomes_true, until

from kvroute.http.forwarding.stream_forwarder import STREAMS_MAX
from kvroute.http.open_files import exhausted
from kvroute.serve.observe.admin.connections import CONNECTIONS_MOST as ADMIN_CONNECTIONS_MOST
from kvroute.serve.observe.file_descriptors import LOG_EVERY_S, streams_to_forward, wanted, warn_if_too_low

LIMIT = 700
RARE_CHECKS = "  health: {interval: 1 h}\n  scrape: {interval: 1 h}\n"


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="limits are read from /proc")
def test_serve_raises_the_limit_of_open_files(tmp_path: Path) -> None:
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(f"{CLUSTER}  limits: {{connections: 200}}\n")
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--ready-file", str(ready)]
    limited = ["sh", "-c", f'ulimit -Sn {LIMIT}; exec "$@"', "sh", *command, "--until-eof"]
    with subprocess.Popen(limited, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.01)
            [line] = [row for row in limits_of(process.pid) if row.startswith("Max open files")]
            soft, hard = line.split()[3:5]
            assert int(soft) == min(int(hard), 1 << 20) >= 3 * 200
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def limits_of(pid: int) -> list[str]:
    """Return one line for each limit, soft before hard."""
    return Path(f"/proc/{pid}/limits").read_text().splitlines()


@pytest.mark.slow
def test_serve_warns_where_the_hard_limit_is_too_low(tmp_path: Path) -> None:
    """The log line gives the limit, the number that the settings need, and a number of connections that fits."""
    file, ready = tmp_path / "cluster.yaml", tmp_path / "ready.json"
    file.write_text(f"{CLUSTER}  limits: {{connections: 200}}\n")
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", str(file), "--embedded", "--ready-file", str(ready)]
    limited = ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *command, "--until-eof"]
    with subprocess.Popen(limited, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.stdin.close()
        [line] = [row for row in process.stderr.read().decode().splitlines() if "open_files_limit" in row]
        process.wait()
    assert f"is {LIMIT}, but limits.connections: 200 and 4 engines may need {wanted(200, 4)}" in line
    assert f"set limits.connections to {(LIMIT - wanted(0, 4)) // 3}" in line
    assert wanted((LIMIT - wanted(0, 4)) // 3, 4) <= LIMIT


def test_connections_of_the_admin_port_count_towards_the_limit() -> None:
    assert wanted(0, 0) > ADMIN_CONNECTIONS_MOST + len(os.listdir("/dev/fd"))


def test_a_limit_below_the_needs_of_the_engines_must_be_raised(caplog: pytest.LogCaptureFixture) -> None:
    """If the engines alone need more than the limit, the message does not suggest fewer connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for connections, instances in ((soft, 1), (1, soft)):
        warn_if_too_low(connections, instances)
    few_engines, many_engines = [str(record.__dict__["fields"]["reason"]) for record in caplog.records]
    assert "or set limits.connections to" in few_engines
    assert many_engines.endswith("raise it (ulimit -Hn, LimitNOFILE= of systemd)")


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Use up all file descriptors of the process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, before[1]))
        while exhausted() is None:
            opened.append(os.dup(opened[0]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in opened:
            os.close(number)


async def send_request(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter], path: str, number: int
) -> tuple[bytes, bytes]:
    """Send one request over an open connection; return the status line and the body."""
    body = msgspec.json.encode(completion(prompt=f"{number}") | {"input": f"{number}"})
    head = f"POST {path} HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client[1].write(head.encode() + body)
    status = await client[0].readline()
    length = 0
    while (line := await client[0].readline()) != b"\r\n":
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return status, await client[0].readexactly(length)


async def occupy_connections(front: RunningGateway, engine: Engine, path: str) -> list[asyncio.Task[int]]:
    """Start requests that occupy every idle connection to the engine."""

    async def one(number: int) -> int:
        return (await front.post(completion(prompt=f"held {number}") | {"input": f"{number}"}, path)).status

    pool = front.gateway.runtime.engines[engine.name].pool
    held: list[asyncio.Task[int]] = []
    while pool.idle:
        held.append(asyncio.create_task(one(len(held))))
        await until(lambda: len(engine.received) >= len(held))
    return held


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_running_out_of_file_descriptors_is_reported_and_blames_no_engine(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The response is a 503 with the cause, many requests cause one log line, and requests succeed once descriptors are
    free."""

    async def main() -> None:
        gate = Gate()
        engine = Engine("engine", "both", serve=gate.before(tokens))
        async with stub_rig([engine], RARE_CHECKS + "  breaker: {failures: 1}\n") as front:
            availability = front.gateway.runtime.engines["engine"].availability
            assert await becomes_true(lambda: front.gateway.ready() == "")
            client = await asyncio.open_connection("127.0.0.1", front.gateway.port)
            held = await occupy_connections(front, engine, path)
            assert 'use="engine"' not in page(front)  # this page also loads what it needs
            with no_descriptor_left():
                for number in range(5):
                    status, body = await send_request(client, path, number)
                    assert b" 503 " in status
                    assert b"no file descriptor left" in body
                assert await becomes_true(lambda: 'use="client"' in page(front))
            assert 'kvroute_file_descriptors_exhausted_total{use="engine"} 5' in page(front)
            assert availability.up
            assert availability.breaker.state(front.gateway.now()) == "closed"
            lines = [record.__dict__["fields"] for record in caplog.records if record.message == "out_of_files"]
            assert len(lines) == 1 + int(front.gateway.now() / LOG_EVERY_S) * (len(lines) > 1)
            assert "open files of this process" in lines[0]["reason"]
            assert not [record for record in caplog.records if record.message == "leg_failed"]
            gate.open.set()
            assert set(await asyncio.gather(*held)) <= {200}
            assert b" 200 " in (await send_request(client, path, 99))[0]
            client[1].close()
            assert await front.becomes_idle(), front.held_resources()

    def page(front: RunningGateway) -> str:
        return "".join(front.gateway.metrics.page()[1])

    run(main())


@pytest.mark.parametrize(
    ("soft", "connections", "streams"),
    [(16_000, 100, STREAMS_MAX), (wanted(1_000, 4) + 500, 1_000, 500), (1_024, 10_000, 64)],
    ids=["ample", "what-is-left", "scarce"],
)
def test_streams_are_forwarded_with_descriptors_that_the_settings_do_not_need(
    soft: int, connections: int, streams: int
) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert streams_to_forward(connections, 4) == streams
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
