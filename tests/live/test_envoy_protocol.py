"""The endpoint picker protocol between a real Envoy and the picker, beyond a request that goes well: endpoints in the
order to try, headers of clients, response bodies through the picker, and a picker that has just gone."""

from __future__ import annotations

import copy
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.epp.envoy_rig import address, alone, picking
from tests.live.envoy import envoy, envoy_rig, released
from tests.serve.rig import COMPLETIONS, MODEL
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    Serve,
    deployment,
    event,
    failing,
    listening,
    run,
    start_stream,
)
from tests.waiting import until

from kvroute.epp.messages import DESTINATION
from kvroute.epp.server import PickerSpec

pytestmark = pytest.mark.live
BODY = {"model": MODEL, "prompt": "What is a KV cache? " * 20, "max_tokens": 3}


def with_response_bodies(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration in which response bodies pass through the picker, too."""
    config = copy.deepcopy(config)
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (processor,) = (http_filter for http_filter in manager["http_filters"] if http_filter["name"].endswith("ext_proc"))
    processor["typed_config"]["processing_mode"]["response_body_mode"] = "FULL_DUPLEX_STREAMED"
    return config


def in_two_parts(gate: Gate, second: bytes) -> Serve:
    """Return a handler that streams one event, waits at the gate, and streams the rest."""

    async def serve(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("one"))
        await gate.wait()
        await response.write(second)
        await response.write_eof()
        return response

    return serve


def test_a_stream_through_the_picker_arrives_event_by_event(tmp_path: Path) -> None:
    """In full duplex in both directions: the client has the first event before the engine sends the rest."""
    gate, rest = Gate(), event("x" * 200_000) + b"data: [DONE]\n\n"

    async def main() -> None:
        engines = alone(1)
        engines[0].serve = in_two_parts(gate, rest)
        async with envoy_rig(engines, tmp_path, change=with_response_bodies) as rig:
            async with rig.session.post(rig.url + COMPLETIONS, json=BODY | {"stream": True}) as response:
                assert await response.content.readuntil(b"\n\n") == event("one")
                assert response.status == 200
                gate.open.set()
                assert await response.read() == rest
            assert await released(rig)

    run(main())


@pytest.mark.parametrize("picker_runs", [True, False], ids=["picker", "no picker"])
def test_a_client_cannot_choose_its_endpoint(tmp_path: Path, picker_runs: bool) -> None:
    """Its header of the protocol's name has no effect, neither on the picker nor on an Envoy that fails open."""

    async def main() -> None:
        prefill, decode = Engine("prefill0", "prefill"), Engine("decode0", "decode")
        async with envoy_rig([prefill, decode], tmp_path, fail_open=True) as rig:
            if not picker_runs:
                await rig.picker.gateway.close()
                await rig.picker_gone()
            response = await rig.post(BODY, headers={DESTINATION: address(prefill)})
            assert response.status == 200
            assert b"decode0" in response.body
            [received] = decode.received
            if picker_runs:
                assert received.headers[DESTINATION] == address(decode)

    run(main())


@pytest.mark.parametrize("full", [False, True], ids=["two refuse", "two are full"])
def test_endpoints_are_tried_in_the_order_of_the_choice(tmp_path: Path, full: bool) -> None:
    """Each once, until one serves the request. The picker learns which one, and that the others did not."""

    async def main() -> None:
        engines = alone(3)
        for engine in engines[:2]:
            engine.serve = failing(503)
        # No health check tells: a check every hour.
        section = "  health: {panic: 0, interval: 3600 s, slow_start: 0 s}\n  retries: {attempts: 3}\n"
        async with listening(engines[2:]), AsyncExitStack() as first:
            await first.enter_async_context(listening(engines[:2]))
            made = deployment(engines, section)
            if not full:
                await first.aclose()
            async with picking(made) as picker, envoy(picker, made, tmp_path) as rig:
                await until(lambda: not picker.gateway.ready())
                for client in picker.gateway.runtime.engines.values():
                    client.availability.set_healthy(True, picker.gateway.now())
                response = await rig.post(BODY)
                assert (response.status, b"engine2" in response.body) == (200, True)
                assert [len(engine.received) for engine in engines] == [full, full, True]
                assert await released(rig)
                page = await picker.metrics()
                for name, failures in (("engine0", 1), ("engine1", 1), ("engine2", 0)):
                    line = f'kvroute_leg_failures_total{{leg="decode",engine="{name}",kind="refused"}} 1'
                    assert (line in page) == bool(failures)

    run(main())


def test_the_headers_of_the_conformance_tests_choose_and_show_an_endpoint(tmp_path: Path) -> None:
    """The engine gets the header that the test's echo server turns into a response header; so does the client."""

    async def main() -> None:
        engines = alone(3)
        async with listening(engines):
            made = deployment(engines)
            async with picking(made, PickerSpec(conformance=True)) as picker, envoy(picker, made, tmp_path) as rig:
                wanted = address(engines[2])
                response = await rig.post(BODY, headers={"test-epp-endpoint-selection": wanted})
                assert response.status == 200
                assert response.headers["x-conformance-test-served-endpoint"] == wanted
                [received] = engines[2].received
                assert received.headers["x-echo-set-header"] == f"x-conformance-test-served-endpoint:{wanted}"
                assert await released(rig)

    run(main())


@pytest.mark.parametrize(
    ("fail_open", "buffered", "statuses"),
    [(False, False, {503}), (False, True, {503}), (True, False, {200, 503}), (True, True, {200})],
    ids=["closed-streamed", "closed-buffered", "open-streamed", "open-buffered"],
)
def test_the_first_request_after_a_picker_has_gone(
    tmp_path: Path, fail_open: bool, buffered: bool, statuses: set[int]
) -> None:
    """No health check has noticed yet. Only a buffered body lets Envoy fail open then: it may have sent a part of a
    streamed one already, and its own status would be 500."""

    async def main() -> None:
        engines = alone(1)
        async with envoy_rig(engines, tmp_path, fail_open=fail_open, buffered=buffered) as rig:
            assert (await rig.post(BODY)).status == 200
            await rig.picker.gateway.close()
            response = await rig.post(BODY)
            assert response.status in statuses
            assert len(engines[0].received) == 1 + (response.status == 200)

    run(main())


@pytest.mark.parametrize("fail_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("buffered", [False, True], ids=["streamed", "buffered"])
def test_a_response_in_progress_when_its_picker_goes(tmp_path: Path, fail_open: bool, buffered: bool) -> None:
    """Envoy breaks it off, unless it may fail open and has not streamed the body of the request to the picker."""
    gate = Gate()

    async def main() -> None:
        engines = alone(1)
        engines[0].serve = in_two_parts(gate, event("two"))
        async with (
            envoy_rig(engines, tmp_path, fail_open=fail_open, buffered=buffered) as rig,
            rig.session.post(rig.url + COMPLETIONS, json=BODY | {"stream": True}) as response,
        ):
            assert await response.content.readuntil(b"\n\n") == event("one")
            await rig.picker.gateway.close()
            if fail_open and buffered:
                await rig.picker_gone()
                gate.open.set()
                assert await response.read() == event("two")
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
                await gate.left.wait()
                assert gate.cancelled, "Envoy closes the connection to the engine, too"

    run(main())
