"""SGLang's protocol through the whole gateway: two concurrent legs that succeed or fail together until the first
token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs
from tests.serve.rig import COMPLETIONS, RunningGateway
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    completion,
    deployment,
    engines_of,
    event,
    failing,
    listening,
    run,
    sent_to_decode,
    serving,
    start_stream,
    stub_rig,
    tokens,
)
from tests.waiting import becomes_true

from kvroute.types import Instance

BOOTSTRAP_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


async def read_stream(front: RunningGateway, **fields: Any) -> bytes:
    """Read the body of a streamed response to its end or until it breaks off."""
    async with front.session.post(front.url + COMPLETIONS, json=completion(stream=True, **fields)) as response:
        assert response.status == 200
        return await response.read()


def _without_bootstrap(instance: Instance, names: set[str]) -> Instance:
    if instance.name not in names:
        return instance
    assert instance.endpoint is not None
    return structs.replace(instance, endpoint=structs.replace(instance.endpoint, bootstrap=""))


def rooms(received: ReceivedRequest) -> dict[str, Any]:
    return {name: received.json[name] for name in BOOTSTRAP_FIELDS}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_the_response_does_not_wait_for_the_prefill_response(streams: bool) -> None:
    """The response is complete before the prefill engine has answered; both engines received the same request and
    bootstrap room."""

    async def main() -> None:
        gate = Gate()
        (prefill, spare), decode = engines_of("sglang")
        prefill.serve = spare.serve = gate.before(tokens)
        async with stub_rig([prefill, spare, *decode]) as front:
            sent = completion(stream=streams, stream_options=None, unknown={"a": [1]})
            response = await front.post(sent)
            assert response.status == 200
            assert (
                response.text.split() == [decode_engine.name for decode_engine in decode if decode_engine.received] * 3
            )
            await gate.entered.wait()
            [first], [second] = prefill.received + spare.received, decode[0].received + decode[1].received
            assert sent_to_decode(first.json) == second.json
            assert {name: value for name, value in first.json.items() if name not in BOOTSTRAP_FIELDS} == sent
            chosen = prefill if prefill.received else spare
            assert (first.json["bootstrap_host"], first.json["bootstrap_port"]) == ("127.0.0.1", chosen.port)
            assert 0 <= first.json["bootstrap_room"] < 2**63
            gate.open.set()
            assert await front.becomes_idle(), front.held_resources()
            assert not gate.cancelled

    run(main())


def test_each_sequence_of_a_request_has_its_own_room() -> None:
    """Two prompts with two choices each use four rooms."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        async with stub_rig(prefill + decode) as front:
            seen: list[int] = []
            for fields, count in (({}, 1), ({"n": 2}, 2), ({"prompt": ["a", "b"]}, 2), ({"prompt": ["a"], "n": 1}, 1)):
                assert (await front.post(completion(**fields))).status == 200
                [first], [second] = ([*side[0].received, *side[1].received] for side in (prefill, decode))
                assert first.body == second.body
                bootstrap = rooms(first)
                assert all(isinstance(value, list) is (count > 1) for value in bootstrap.values())
                numbers = bootstrap["bootstrap_room"] if count > 1 else [bootstrap["bootstrap_room"]]
                assert len(numbers) == count
                seen += numbers
                for engine in prefill + decode:
                    engine.received.clear()
            both = completion(n=2, prompt=["a", "b"])
            assert (await front.post(both)).status == 200
            [last] = prefill[0].received + prefill[1].received
            seen += last.json["bootstrap_room"]
            assert last.json["bootstrap_host"] == ["127.0.0.1"] * 4
            assert len(seen) == len(set(seen)) == 10
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("slow", [False, True], ids=["at-once", "later-than-expected"])
def test_a_failed_prefill_cancels_the_decode_leg_and_both_are_retried(streams: bool, slow: bool) -> None:
    """The decode engine would wait for KV that never arrives, even long after the expected time."""

    async def main() -> None:
        waits = Gate()
        prefill, decode = engines_of("sglang")

        async def fails_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if sum(len(prefill_engine.received) for prefill_engine in prefill) > 1:
                return await tokens(engine, request, received)
            await waits.entered.wait()
            if slow:
                await asyncio.sleep(0.2)
            return web.json_response({"error": {"message": "out of memory"}}, status=500)

        async def hangs_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if sum(len(decode_engine.received) for decode_engine in decode) == 1:
                if streams:
                    await start_stream(request)
                await waits.wait()
            return await tokens(engine, request, received)

        for engine in prefill:
            engine.serve = fails_once
        for engine in decode:
            engine.serve = hangs_once
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion(stream=streams))
            assert response.status == 200
            assert len(response.text.split()) == 3
            await waits.left.wait()
            assert waits.cancelled
            assert [len(engine.received) for engine in prefill] == [1, 1]
            first, second = (engine.received[0] for engine in prefill)
            assert rooms(first)["bootstrap_room"] != rooms(second)["bootstrap_room"]
            sent = [sent_to_decode(first.json), sent_to_decode(second.json)]
            decoded = [received.json for engine in decode for received in engine.received]
            assert all(body in sent for body in decoded)
            assert all(body in decoded for body in sent)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("status", [400, 429, 500])
def test_a_prefill_that_fails_after_the_first_token_breaks_no_stream(status: int) -> None:
    """The KV has been transferred: the stream continues to its end, and the client does not notice."""

    async def main() -> None:
        relayed, resumed = Gate(), Gate()
        prefill, decode = engines_of("sglang")

        async def in_two_parts(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(event("one "))
            await resumed.wait()
            await response.write(event("two ") + b"data: [DONE]\n\n")
            await response.write_eof()
            return response

        for engine in prefill:
            engine.serve = relayed.before(failing(status))
        for engine in decode:
            engine.serve = in_two_parts
        async with stub_rig(prefill + decode) as front:
            async with front.session.post(front.url + COMPLETIONS, json=completion(stream=True)) as response:
                assert b"one" in await response.content.readuntil(b"\n\n")
                relayed.open.set()
                assert await becomes_true(lambda: front.held_resources()["legs"] == 1)
                resumed.open.set()
                rest = await response.read()
            assert rest == event("two ") + b"data: [DONE]\n\n"
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_decode_leg_that_fails_before_the_first_token_restarts_both_legs(streams: bool) -> None:
    """A room is used once: both legs restart, with another decode engine."""

    async def main() -> None:
        waits = Gate()
        prefill, decode = engines_of("sglang")

        async def hangs_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if sum(len(prefill_engine.received) for prefill_engine in prefill) == 1:
                await waits.wait()
            return await tokens(engine, request, received)

        async def fails_once(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            if sum(len(decode_engine.received) for decode_engine in decode) == 1:
                await waits.entered.wait()
                return web.json_response({"error": {}}, status=500)
            return await tokens(engine, request, received)

        for engine in prefill:
            engine.serve = hangs_once
        for engine in decode:
            engine.serve = fails_once
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion(stream=streams))
            assert (response.status, len(response.text.split())) == (200, 3)
            await waits.left.wait()
            assert waits.cancelled
            assert [len(engine.received) for engine in decode] == [1, 1]
            first, second = (rooms(engine.received[0])["bootstrap_room"] for engine in decode)
            assert first != second
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_broken_stream_cancels_its_prefill_leg() -> None:
    """The prefill leg is cancelled, because its KV is not needed any more."""

    async def main() -> None:
        waits = Gate()
        prefill, decode = engines_of("sglang")

        async def breaks(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            await response.write(event("one "))
            await waits.entered.wait()
            assert request.transport is not None
            request.transport.abort()
            return response

        for engine in prefill:
            engine.serve = waits.before(tokens)
        for engine in decode:
            engine.serve = breaks
        async with stub_rig(prefill + decode) as front:
            body = await read_stream(front)
            assert body.startswith(event("one "))
            assert b"closed the connection" in body
            await waits.left.wait()
            assert waits.cancelled
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("token", [False, True], ids=["before-a-token", "in-the-stream"])
def test_a_client_that_disconnects_releases_both_engines(token: bool) -> None:
    """The connection to each of them is closed."""

    async def main() -> None:
        prefill_gate, decode_gate = Gate(), Gate()
        prefill, decode = engines_of("sglang")

        async def send_one_and_wait(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
            response = await start_stream(request)
            if token:
                await response.write(event("one "))
            await decode_gate.wait()
            return response

        for engine in prefill:
            engine.serve = prefill_gate.before(tokens)
        for engine in decode:
            engine.serve = send_one_and_wait
        async with stub_rig(prefill + decode) as front:
            task = asyncio.create_task(read_stream(front))
            await prefill_gate.entered.wait()
            await decode_gate.entered.wait()
            if token:
                assert await becomes_true(lambda: not front.held_resources()["slots"])
                await asyncio.sleep(0.6)  # closing the sending side within half a second does not count as leaving
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await prefill_gate.left.wait()
            await decode_gate.left.wait()
            assert prefill_gate.cancelled
            assert decode_gate.cancelled
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_prefill_engine_without_a_bootstrap_address_is_skipped(lost: int) -> None:
    """The decode leg is never sent; without another prefill engine the client receives the reason."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        async with listening(prefill + decode):
            original = deployment(prefill + decode, "  breaker: {failures: 1000}\n")
            names = {engine.name for engine in prefill[:lost]}
            engines = tuple(_without_bootstrap(instance, names) for instance in original.cluster.instances)
            async with serving(replace(original, cluster=replace(original.cluster, instances=engines))) as front:
                responses = [await front.post(completion(prompt=f"{n} " * 100)) for n in range(4)]
                if lost == 1:
                    assert [response.status for response in responses] == [200] * 4
                    assert len(prefill[1].received) == sum(len(engine.received) for engine in decode) == 4
                else:
                    assert [response.status for response in responses] == [502] * 4
                    assert "host:port" in responses[0].json["error"]["message"]
                    assert not any(engine.received for engine in prefill + decode)
                assert not prefill[0].received
                assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_requests_for_several_choices_go_to_engines_that_can_transfer_them() -> None:
    """Engines of another protocol serve the same model, but they cannot transfer the KV of several choices."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        other = [Engine("other-prefill", "prefill"), Engine("other-decode", "decode")]
        async with stub_rig([*prefill, *decode, *other]) as front:
            for number in range(6):
                assert (await front.post(completion(n=2, prompt=f"{number}" * 400))).status == 200
            assert await front.becomes_idle(), front.held_resources()
        for engine in prefill + decode:
            assert all(isinstance(received.json["bootstrap_room"], list) for received in engine.received)
        assert not other[0].received
        assert all("kv_transfer_params" not in received.json for received in other[1].received)

    run(main())
