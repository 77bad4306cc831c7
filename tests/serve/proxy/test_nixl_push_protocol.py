"""NIXL push through the whole gateway: the decode engine registers before the prompt is computed, once the prefill
engine's address is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.serve.proxy.test_abandoned_kv import RARE_CHECKS, client_that_leaves, outcomes
from tests.serve.rig import COMPLETIONS, RunningGateway
from tests.serve.stub_engines import (
    HEAD,
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
    serving,
    start_stream,
    stub_rig,
    tokens,
)
from tests.waiting import becomes_true

STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
PEER = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e-1", "remote_host": "10.0.0.1"}
PEER |= {"remote_port": 5600, "tp_size": 2, "pp_size": 1, "transfer_mode": "push"}


def params_of(engine_id: str, **changed: Any) -> msgspec.Raw:
    """Return transfer parameters as an engine with this id returns them."""
    own = {"remote_block_ids": [[4, 5]], "remote_request_id": "cmpl-7", "remote_num_tokens": 60}
    return msgspec.Raw(msgspec.json.encode({**PEER, "remote_engine_id": engine_id, **own, **changed}))


def pushing() -> tuple[Engine, list[Engine]]:
    """Return one prefill engine and two decode engines."""
    (prefill, _), decode = engines_of("nixl-push")
    prefill.params = params_of("e-1")
    return prefill, decode


def received_by(decode: list[Engine]) -> list[ReceivedRequest]:
    """Return the requests that the engines received."""
    return [received for engine in decode for received in engine.received]


async def learn(front: RunningGateway, prefill: Engine, decode: list[Engine]) -> None:
    """Let the gateway learn the prefill engine's address by a first request."""
    assert (await front.post(completion())).status == 200
    assert await front.becomes_idle(), front.held_resources()
    for engine in (prefill, *decode):
        engine.received.clear()


@STREAMS
def test_the_first_decode_leg_waits_for_the_prefill_and_the_next_one_does_not(streams: bool) -> None:
    """The later leg contains what is known of the prefill engine, without what belongs to another request."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = pushing()
        prefill.serve = gate.before(tokens)
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            first = asyncio.create_task(front.post(completion(stream=streams)))
            await gate.entered.wait()
            assert received_by(decode) == []
            gate.open.set()
            answer = await first
            assert answer.status == 200
            ((leg,), (sent,)) = (received_by(decode), prefill.received)
            assert leg.raw("kv_transfer_params") == bytes(prefill.params)
            assert sent.json["max_tokens"] == 1
            assert sent.json["kv_transfer_params"]["do_remote_decode"] is True
            assert await front.becomes_idle(), front.held_resources()

            for engine in (prefill, *decode):
                engine.received.clear()
            again = Gate()
            prefill.serve = again.before(tokens)
            second = asyncio.create_task(front.post(completion(stream=streams)))
            await again.entered.wait()
            assert await becomes_true(lambda: len(received_by(decode)) == 1)
            params = received_by(decode)[0].json["kv_transfer_params"]
            assert params.pop("remote_request_id")
            assert params == PEER
            again.open.set()
            assert (await second).status == 200
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_the_two_legs_of_an_attempt_have_an_id_of_their_own() -> None:
    """Two requests with the same X-Request-Id at the same time: engines find halves by it, clients get back theirs."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = pushing()
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            await learn(front, prefill, decode)
            prefill.serve = gate.before(tokens)

            async def ask() -> str:
                sent = {"X-Request-Id": "mine"}
                async with front.session.post(front.url + COMPLETIONS, json=completion(), headers=sent) as response:
                    assert response.status == 200
                    await response.read()
                    return response.headers["X-Request-Id"]

            asked = [asyncio.create_task(ask()) for _ in range(2)]
            assert await becomes_true(lambda: len(prefill.received) == len(received_by(decode)) == 2)
            gate.open.set()
            assert await asyncio.gather(*asked) == ["mine", "mine"]
            prefill_ids, decode_ids = (
                sorted(received.headers["x-request-id"] for received in side)
                for side in (prefill.received, received_by(decode))
            )
            assert prefill_ids == decode_ids
            assert len(set(prefill_ids)) == 2
            assert all(name.startswith("mine-") for name in prefill_ids)

    run(main())


@STREAMS
def test_a_restarted_prefill_engine_is_noticed_by_its_response(streams: bool) -> None:
    """The decode engine has registered with the process before; its leg is aborted, and the request is sent again with
    the legs one after the other."""

    async def main() -> None:
        registered = Gate()
        prefill, decode = pushing()
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            await learn(front, prefill, decode)
            prefill.params = params_of("e-2")
            stale: list[Engine] = []

            async def decodes(
                engine: Engine, request: web.BaseRequest, received: ReceivedRequest
            ) -> web.StreamResponse:
                if received.json["kv_transfer_params"]["remote_engine_id"] == "e-1":
                    stale.append(engine)
                    await registered.wait()  # the KV cache never arrives
                return await tokens(engine, request, received)

            for engine in decode:
                engine.serve = decodes
            answer = await front.post(completion(stream=streams))
            assert answer.status == 200
            assert len(stale) == 1
            await registered.left.wait()
            assert registered.cancelled
            assert len(prefill.received) == 2
            last = [leg for leg in received_by(decode) if leg.raw("kv_transfer_params") == bytes(prefill.params)]
            assert len(last) == 1
            assert last[0].headers["x-request-id"] == prefill.received[1].headers["x-request-id"]
            assert prefill.received[0].headers["x-request-id"] != prefill.received[1].headers["x-request-id"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@STREAMS
def test_a_failed_prefill_aborts_the_registered_decode_leg(streams: bool) -> None:
    """Both legs are sent again."""

    async def main() -> None:
        registered = Gate()
        prefill, decode = pushing()
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            await learn(front, prefill, decode)

            async def fails(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
                await registered.entered.wait()
                engine.serve = tokens
                for decode_engine in decode:
                    decode_engine.serve = tokens
                return web.json_response({"error": {"message": "no", "type": "x"}}, status=500)

            prefill.serve = fails
            for engine in decode:
                engine.serve = registered.before(tokens)
            assert (await front.post(completion(stream=streams))).status == 200
            await registered.left.wait()
            assert registered.cancelled
            assert len(prefill.received) == len(received_by(decode)) == 2
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_failed_decode_leg_is_sent_again_with_a_new_prefill() -> None:
    """The KV cache was written into the memory of the engine that failed."""

    async def main() -> None:
        prefill, decode = pushing()
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            await learn(front, prefill, decode)
            once = failing(500, times=1)
            for engine in decode:
                engine.serve = once
            assert (await front.post(completion())).status == 200
            ids = [received.headers["x-request-id"] for received in prefill.received]
            assert len(ids) == len(set(ids)) == 2
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@STREAMS
def test_a_prefill_engine_that_ends_before_its_write_is_replaced(streams: bool) -> None:
    """The decode engine would wait for ever. A health check shows that the process is gone."""

    async def main() -> None:
        registered = Gate()
        prefill, decode = engines_of("nixl-push")
        for engine in prefill:
            engine.params = params_of(engine.name)
        for engine in decode:
            engine.serve = registered.before(tokens)
        async with AsyncExitStack() as stack:
            running = {engine.name: await stack.enter_async_context(stoppable(engine)) for engine in prefill}
            await stack.enter_async_context(listening(decode))
            quick = "  health: {interval: 50 ms}\n  scrape: {interval: 1 h}\n"
            front = await stack.enter_async_context(serving(deployment([*prefill, *decode], quick)))
            asked = asyncio.create_task(front.post(completion(stream=streams)))
            await registered.entered.wait()
            for engine in decode:
                engine.serve = tokens
            (used,) = (engine for engine in prefill if engine.received)
            await running[used.name].aclose()
            assert (await asked).status == 200
            await registered.left.wait()
            assert registered.cancelled
            assert [len(engine.received) for engine in prefill] == [1, 1]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_continued_stream_survives_the_end_of_a_prefill_engine_before_its_write() -> None:
    """The client has a part of the stream; the engines that were to go on with it are replaced, too."""

    async def main() -> None:
        registered, broken = Gate(), list[str]()
        prefill, decode = engines_of("nixl-push")
        for engine in prefill:
            engine.params = params_of(engine.name)

        async def numbered(engine: Engine, request: web.BaseRequest, received: ReceivedRequest) -> web.StreamResponse:
            """The first leg breaks off after a token, the second one waits, the third one ends the stream."""
            legs = len(received_by(decode))
            if legs == 2:
                await registered.wait()
            response = await start_stream(request)
            await response.write(token_event(legs, ended=legs > 1))
            if legs > 1:
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
            else:
                assert request.transport is not None
                broken.append(engine.name)
                request.transport.close()
            return response

        for engine in decode:
            engine.serve = numbered
        async with AsyncExitStack() as stack:
            running = {engine.name: await stack.enter_async_context(stoppable(engine)) for engine in prefill}
            await stack.enter_async_context(listening(decode))
            settings = "  health: {interval: 50 ms}\n  scrape: {interval: 1 h}\n"
            settings += "  retries: {continue_streams: true, attempts: 4}\n"
            front = await stack.enter_async_context(serving(deployment([*prefill, *decode], settings)))
            asked = asyncio.create_task(front.post(completion(stream=True)))
            await registered.entered.wait()
            (request,) = front.requests
            assert await becomes_true(lambda: request.state.prefill_done)
            assert request.state.exchange.started
            assert request.legs.prefill is not None
            await running[request.legs.prefill.engine.name].aclose()
            answer = await asked
            assert answer.status == 200
            assert [event["choices"][0]["text"] for event in answer.events] == ["t1 ", "t3 "]
            assert registered.cancelled
            assert len(broken) == 1
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def token_event(number: int, *, ended: bool) -> bytes:
    """Return an event with the ids of its tokens."""
    choice = {"index": 0, "text": f"t{number} ", "token_ids": [number], "prompt_token_ids": [1, 2, 3]}
    choice["finish_reason"] = "length" if ended else None
    return b"data: %b\n\n" % msgspec.json.encode({"id": "cmpl-1", "created": 1, "choices": [choice]})


@asynccontextmanager
async def stoppable(engine: Engine) -> AsyncIterator[AsyncExitStack]:
    """Let an engine listen until the yielded stack is closed, or the context ends."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(listening([engine]))
        yield stack


def test_a_prefill_response_without_an_address_is_an_error() -> None:
    """Both attempts fail; the error names what is missing."""

    async def main() -> None:
        prefill, decode = pushing()
        prefill.params = msgspec.Raw(b'{"remote_engine_id": "e-1", "remote_host": "10.0.0.1"}')
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            answer = await front.post(completion())
            assert answer.status == 502
            assert b"prefill0 sent kv_transfer_params without remote_port" in answer.body
            assert received_by(decode) == []
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@STREAMS
def test_a_client_that_leaves_does_not_abort_a_prefill_whose_write_is_awaited(streams: bool) -> None:
    """An aborted prefill writes nothing, and the decode engine would keep the blocks. Even a prefill that takes longer
    than `timeouts.abandoned` goes on; the decode leg ends with its first token."""

    async def main() -> None:
        gate, written, endless = Gate(), Gate(), Gate()
        prefill, decode = pushing()
        short, slow = RARE_CHECKS + "  timeouts: {abandoned: 1 ms}\n", HEAD.replace("per_token: 1 us", "per_token: 1 s")
        engines = [prefill, *decode]
        async with listening(engines), serving(deployment(engines, short, head=slow)) as front:
            await learn(front, prefill, decode)

            async def decodes(
                engine: Engine, request: web.BaseRequest, received: ReceivedRequest
            ) -> web.StreamResponse:
                await written.wait()
                if not streams:
                    return await tokens(engine, request, received)
                response = await start_stream(request)
                await response.write(event("a"))
                await endless.wait()
                return response

            prefill.serve = gate.before(tokens)
            for engine in decode:
                engine.serve = decodes
            async with client_that_leaves(front, gate, stream=streams, max_tokens=500):
                assert await becomes_true(lambda: len(received_by(decode)) == 1)
                assert not gate.cancelled
                assert not written.cancelled
                gate.open.set()
                written.open.set()
            assert not gate.cancelled
            assert not written.cancelled
            assert outcomes(front) == (1, 0)
            assert len(prefill.received) == len(received_by(decode)) == 1

    run(main())


def test_a_client_that_leaves_before_the_first_prefill_is_answered() -> None:
    """No decode engine has registered. One gets a request for one token, so that the prefill engine releases the KV
    cache."""

    async def main() -> None:
        gate = Gate()
        prefill, decode = pushing()
        prefill.serve = gate.before(tokens)
        async with stub_rig([prefill, *decode], RARE_CHECKS) as front:
            async with client_that_leaves(front, gate, stream=True, max_tokens=500):
                assert received_by(decode) == []
                gate.open.set()
            (leg,) = received_by(decode)
            assert (leg.json["max_tokens"], leg.json["stream"]) == (1, False)
            assert leg.raw("kv_transfer_params") == bytes(prefill.params)
            assert outcomes(front) == (1, 0)

    run(main())
