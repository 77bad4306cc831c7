"""Prefills ordered by sidecars of the decode instances: the picker names both instances at arrival."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from tests.epp.envoy_rig import PickerRig, address, completion_body, picker, picking
from tests.epp.sidecar import HEADER, Sidecar, sidecar
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL
from tests.serve.stub_engines import engines_of, run
from tests.waiting import until

from kvroute import topology
from kvroute.emulator import EmulatedCluster, EmulatedClusterSpec
from kvroute.epp.server import PickerSpec
from kvroute.serve.lifecycle.deployment import Deployment

SIDECAR = PickerSpec(sidecar=True)


def test_both_instances_are_named_and_the_picker_sends_no_prefill() -> None:
    """The body is the client's, without fields by which it could direct engines."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker(prefill + decode, settings=SIDECAR) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body(kv_transfer_params={"remote_host": "evil"}))
            assert set(answer.endpoints) == {address(engine) for engine in decode}
            assert answer.added[HEADER] in {address(engine) for engine in prefill}
            assert "kv_transfer_params" not in msgspec.json.decode(answer.body)
            assert not any(engine.received for engine in prefill + decode)
            names = {address(engine): engine.name for engine in prefill + decode}
            assert set(rig.booked()) >= {names[answer.endpoints[0]]}
            await stream.respond(200, answer.endpoints[0])
            await until(lambda: names[answer.added[HEADER]] not in rig.booked())
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_sidecar_gets_no_prefill_to_order_for_other_apis(path: str) -> None:
    """It knows completions and chats only; one instance serves others alone."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker(prefill + decode, settings=SIDECAR) as rig:
            turns = [{"role": "user", "content": "What is a KV cache? " * 20}]
            body = msgspec.json.encode({"model": MODEL, "max_tokens": 3, "input": turns, "messages": turns})
            answer = await rig.stream().ask(body, path=path)
            assert (bool(answer.destination), HEADER in answer.added) == (True, False)

    run(main())


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
def test_everything_is_released_whatever_happens(ends: str) -> None:
    """Also before the prefill is expected to end."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker(prefill + decode, settings=SIDECAR) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            if ends == "cancelled":
                stream.call.cancel()
            else:
                await stream.respond(500, answer.endpoints[0])
                await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()
            assert rig.booked() == {}

    run(main())


@asynccontextmanager
async def emulated() -> AsyncIterator[tuple[PickerRig, EmulatedCluster, dict[str, Sidecar]]]:
    """Run emulated engines, a sidecar of each decode instance, and a picker in front of the sidecars."""
    async with EmulatedCluster(topology.parse(CLUSTER), EmulatedClusterSpec()) as fleet, AsyncExitStack() as stack:
        endpoints = dict(fleet.ready().instances)
        sidecars = {}
        for name in ("decode0", "decode1"):
            made = sidecars[name] = await stack.enter_async_context(sidecar(endpoints[name].url))
            endpoints[name] = msgspec.structs.replace(endpoints[name], url=f"http://127.0.0.1:{made.port}")
        deployment = Deployment.of(CLUSTER, "test.yaml", endpoints=endpoints)
        yield await stack.enter_async_context(picking(deployment, SIDECAR)), fleet, sidecars


def test_emulated_engines_behind_sidecars_move_the_kv() -> None:
    """The text is that of an engine which does both."""

    async def main() -> None:
        async with emulated() as (rig, fleet, sidecars):
            expected = {}
            for number in range(4):
                prompt = f"question {number} " * 40
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
                async with rig.session.post(fleet.ready().instances["decode0"].url + COMPLETIONS, json=body) as direct:
                    expected[number] = (await direct.json())["choices"][0]["text"]
                stream = rig.stream()
                answer = await stream.ask(msgspec.json.encode(body))
                url = f"http://{answer.endpoints[0]}{COMPLETIONS}"
                async with rig.session.post(url, data=answer.body, headers={HEADER: answer.added[HEADER]}) as response:
                    await stream.respond(response.status, answer.endpoints[0])
                    assert (await response.json())["choices"][0]["text"] == expected[number]
                await stream.end()
            used = [prefiller for sidecar in sidecars.values() for prefiller in sidecar.prefillers]
            assert len(used) == 4
            assert all(used)
            assert await rig.becomes_idle(), rig.held_resources()

    run(asyncio.wait_for(main(), 200))
