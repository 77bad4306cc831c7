"""Paths through a real Envoy: its routes and the picker let only listed ones pass, in every spelling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tests.epp.envoy_rig import alone, completion_body
from tests.epp.test_picker_paths import TRANSFER, UNLISTED
from tests.live.envoy import EnvoyRig, envoy_rig, released
from tests.serve.stub_engines import Engine, run
from tests.waiting import becomes_true

pytestmark = pytest.mark.live
SECTION = "  passthrough: [/inference/*, /v2/embed]\n  limits: {body_time: 0.3 s}\n"
CLOSED_OR_OPEN = pytest.mark.parametrize("gone", [False, True], ids=["picker", "no picker, fails open"])
LISTED = {
    "/v1/completions": "/v1/completions",
    "/v1/%63ompletions": "/v1/completions",
    "//v1//completions": "/v1/completions",
    "/x/../v1/./completions": "/v1/completions",
    "/x/%2e%2e/v1/completions": "/v1/completions",
    "/v1%2Fcompletions?a=b": "/v1/completions?a=b",
    "http://llm/v1/completions": "/v1/completions",
    "/inference/v1/generate": "/inference/v1/generate",
    "/v2/embed": "/v2/embed",
    "/v1/audio/transcriptions": "/v1/audio/transcriptions",
}
"""Targets, and the path that the engine gets."""
SAME_AS_LISTED = {
    "/v1/./completions",
    "/x/../v1/completions",
    "//v1/completions",
    "/v1//completions",
    "/v1/%63ompletions",
}
SAME_AS_LISTED |= {"http://llm/v1/completions", "/inference//generate"}
"""Paths of `UNLISTED` that the picker refuses if Envoy has not normalized them."""


async def send(rig: EnvoyRig, target: str, method: str = "POST", body: bytes = b"") -> tuple[int, bytes]:
    """Send a request with exactly this target; return status and body of the response. The status is 0 if there is
    none: Envoy closes the connection of a request that its parser refuses."""
    port = int(rig.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {target} HTTP/1.1\r\nhost: llm\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    response = await reader.read()
    writer.close()
    return int(response.split(b" ")[1]) if response else 0, response.partition(b"\r\n\r\n")[2]


@asynccontextmanager
async def paths_rig(engines: list[Engine], folder: Path, *, gone: bool) -> AsyncIterator[EnvoyRig]:
    """Run an Envoy whose picker responds, or one that fails open."""
    async with envoy_rig(engines, folder, SECTION, fail_open=gone) as rig:
        if gone:
            await rig.picker.gateway.close()
            await rig.picker_gone()
        yield rig


@CLOSED_OR_OPEN
def test_a_path_that_is_not_listed_reaches_no_engine(tmp_path: Path, gone: bool) -> None:
    """However it is written."""

    async def main() -> None:
        engines = alone(1)
        async with paths_rig(engines, tmp_path, gone=gone) as rig:
            for target in [path for path in UNLISTED if path not in SAME_AS_LISTED]:
                for method in ("POST", "GET", "DELETE"):
                    status, body = await send(
                        rig, target, method, completion_body(**TRANSFER) if method == "POST" else b""
                    )
                    assert status in (0, 400, 404), (method, target)
                    if status == 404:
                        assert json.loads(body)["error"]["code"] == "not_found"
            for target in ("/v1/models%2f..%2f..%2fsleep", "/v1/models/..\\..\\sleep", "/v1/audio/x/..;/sleep"):
                assert (await send(rig, target, "GET"))[0] in (400, 404, 405)
            assert engines[0].received == []

    run(main())


@CLOSED_OR_OPEN
def test_a_listed_path_reaches_an_engine_as_envoy_has_normalized_it(tmp_path: Path, gone: bool) -> None:
    """So that routes, picker and engine see the same path; without a picker nothing removes fields."""

    async def main() -> None:
        engines = alone(1)
        async with paths_rig(engines, tmp_path, gone=gone) as rig:
            for target, expected in LISTED.items():
                assert (await send(rig, target, body=completion_body(**TRANSFER)))[0] == 200, target
                received = engines[0].received.pop()
                assert received.path == expected
                assert gone or received.json == json.loads(completion_body())
            assert (await send(rig, "/v1/models/org%2Fname", "GET"))[0] in (200, 500)
            assert engines[0].received.pop().path == "/v1/models/org/name"
            status, body = await send(rig, "/health", "GET")
            assert (status, json.loads(body)) == (200, {"status": "ok"})

    run(main())


def test_too_many_headers_and_a_slow_body_are_refused(tmp_path: Path) -> None:
    """No engine sees them."""

    async def main() -> None:
        engines = alone(1)
        async with envoy_rig(engines, tmp_path, SECTION) as rig:
            many = {f"x-{number}": "y" for number in range(200)}
            with pytest.raises(aiohttp.ServerDisconnectedError):
                await rig.post(json.loads(completion_body()), headers=many)
            fitting = {f"x-{number}": "y" for number in range(110)}
            assert (await rig.post(json.loads(completion_body()), headers=fitting)).status == 200
            reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: llm\r\ncontent-length: 100\r\n\r\n{")
            assert (await reader.readline()).split()[1] == b"408"
            writer.close()
            assert await released(rig)
            assert await becomes_true(
                lambda: rig.picker.gateway.state.tick(rig.picker.gateway.now()).load.connections == 0
            )

    run(main())


def test_the_log_has_the_client_that_envoy_sees(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not the address that the client claims."""

    async def main() -> None:
        async with envoy_rig(alone(1), tmp_path, "  log: {access: true}\n") as rig:
            claim = {"x-forwarded-for": "198.51.100.7"}
            assert (await rig.post(json.loads(completion_body()), headers=claim)).status == 200
            assert await released(rig)
            lines = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
            (client,) = [line["client"] for line in lines]
            assert client not in ("", "198.51.100.7")

    with caplog.at_level("INFO"):
        run(main())
