"""Prefill and decode through the picker: it runs the prefill leg itself, and Envoy sends the decode leg."""

from __future__ import annotations

import asyncio

import grpc
import msgspec
import pytest
from tests.epp.envoy_rig import EnvoyStream, address, completion_body, picker
from tests.serve.rig import MODEL
from tests.serve.stub_engines import Gate, engines_of, failing, run, tokens
from tests.waiting import until

PARAMS = b'{"do_remote_prefill": true, "remote_block_ids":[[1, 2]],  "new":{"of": 2027}}'
NO_PANIC = "  health: {panic: 0}\n"


def test_the_body_for_decode_has_the_transfer_parameters_of_the_prefill() -> None:
    """The prefill leg is the gateway's own; the parameters are those of its response, verbatim."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.params = msgspec.Raw(PARAMS)
        async with picker(prefill + decode) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body(stream=True, my_field=[1]))
            assert set(answer.endpoints) <= {address(engine) for engine in decode}
            [first] = [received for engine in prefill for received in engine.received]
            assert first.json["kv_transfer_params"]["do_remote_decode"] is True
            assert (first.json["stream"], first.json["max_tokens"]) == (False, 1)
            sent = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
            assert bytes(sent["kv_transfer_params"]) == PARAMS
            assert (bytes(sent["stream"]), bytes(sent["my_field"])) == (b"true", b"[1]")
            assert not any(engine.received for engine in decode)
            await stream.respond(200, answer.endpoints[0])
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


@pytest.mark.parametrize("protocol", ["vllm", "mooncake", "sglang"])
def test_a_whole_request_of_each_protocol(protocol: str) -> None:
    """The decode engine answers through Envoy."""

    async def main() -> None:
        prefill, decode = engines_of(protocol)  # type: ignore[arg-type]
        async with picker(prefill + decode) as rig:
            status, body = await rig.through({"model": MODEL, "prompt": "word " * 100, "max_tokens": 2})
            assert status == 200, body
            assert b"decode" in body
            assert sum(len(engine.received) for engine in prefill) == 1
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_both_legs_of_nixl_push_have_one_request_id() -> None:
    """Envoy sets it in the request that it sends. The first decode leg waits for the prefill's response, the second one
    does not."""

    async def main() -> None:
        (prefill, _), decode = engines_of("nixl-push")
        shared = {"remote_engine_id": "e-1", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1}
        prefill.params = msgspec.Raw(msgspec.json.encode({**shared, "remote_block_ids": [[7]]}))
        async with picker([prefill, *decode]) as rig:
            ids = []
            for expected in ([[7]], None):
                stream = rig.stream()
                answer = await stream.ask(completion_body())
                ids.append(answer.added["x-request-id"])
                params = msgspec.json.decode(answer.body)["kv_transfer_params"]
                assert params.get("remote_block_ids") == expected
                assert params["remote_engine_id"] == "e-1"
                await stream.respond(200, answer.endpoints[0])
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
            assert ids == [received.headers["x-request-id"] for received in prefill.received]
            assert len(set(ids)) == 2

    run(main())


def test_a_failed_prefill_is_retried_before_envoy_sends_anything() -> None:
    """By the gateway's own rules for retries."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = failing(500, times=1)
        prefill[0].serve = failing(500)
        async with picker(prefill + decode, "  retries: {attempts: 4}\n") as rig:
            answer = await rig.stream().ask(completion_body())
            assert answer.status == 0
            assert sum(len(engine.received) for engine in prefill) >= 2

    run(main())


def test_without_a_prefill_instance_the_answer_is_the_gateways_error() -> None:
    """Status 502 after all attempts."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.serve = failing(500)
        async with picker(prefill + decode) as rig:
            answer = await rig.stream().ask(completion_body())
            assert answer.status == 502
            assert b"returned status 500" in answer.body
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_a_client_that_leaves_during_the_prefill_frees_everything() -> None:
    """Envoy sends no decode leg then, so the picker lets a decode engine fetch the KV cache."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        gate = Gate()
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with picker(prefill + decode) as rig:
            stream = rig.stream()
            await stream.ask_only(completion_body())
            await asyncio.wait_for(gate.entered.wait(), 60)
            assert rig.booked()
            stream.call.cancel()
            while "kvroute_client_disconnects_total 1" not in await rig.metrics():
                await asyncio.sleep(0.02)
            assert not gate.cancelled
            gate.open.set()
            assert await rig.becomes_idle(), rig.held_resources()
            assert [request.json["max_tokens"] for engine in decode for request in engine.received] == [1]
            assert 'kvroute_abandoned_kv_total{outcome="fetched"} 1' in await rig.metrics()

    run(main())


def test_bodies_take_a_bounded_memory_until_envoy_has_them_back() -> None:
    """The second long body is rejected while the first one waits for its prefill, and accepted afterwards."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        gate, long = Gate(), completion_body(prompt="word " * 40_000)
        for engine in prefill:
            engine.serve = gate.before(tokens)
        async with picker(prefill + decode, "  limits: {bodies: 1 MB}\n") as rig:
            first = rig.stream()
            await first.ask_only(long)
            await gate.entered.wait()
            refused = await rig.stream().ask(long)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            gate.open.set()
            assert (await first.answer(True)).status == 0
            assert (await rig.stream().ask(long)).status == 0

    run(main())


def test_a_subset_restricts_both_legs() -> None:
    """With one instance of each role, only these two are used; without one that prefills, nothing can be."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker(prefill + decode) as rig:
            subset = [address(prefill[1]), address(decode[1])]
            for _ in range(3):
                stream = rig.stream()
                assert (await stream.ask(completion_body(), subset=subset)).endpoints == [address(decode[1])]
                await stream.respond(200, address(decode[1]))
                await stream.end()
            assert (len(prefill[0].received), len(prefill[1].received)) == (0, 3)
            refused = await rig.stream().ask(completion_body(), subset=[address(decode[1])])
            assert refused.status == 503
            assert b"among those that may serve the request" in refused.body

    run(main())


def test_another_decode_instance_fetches_the_kv_if_the_first_refuses() -> None:
    """The booking and the transfer move to the endpoint that has served the request."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker(prefill + decode, NO_PANIC) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            names = {address(engine): engine.name for engine in decode}
            assert set(rig.booked()) == {names[answer.endpoints[0]]}
            await stream.respond(200, answer.endpoints[1])
            await until(lambda: set(rig.booked()) == {names[answer.endpoints[1]]})
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()
            page = await rig.metrics()
            assert 'kvroute_leg_failures_total{leg="decode",' in page

    run(main())


def test_the_prefill_of_a_joint_protocol_fails_after_envoy_has_the_request() -> None:
    """Envoy gets a response for the client, with which it withdraws the decode leg; no other prefill is begun."""

    async def main() -> None:
        (prefill, decode), gate = engines_of("sglang"), Gate()
        for engine in prefill:
            engine.serve = gate.before(failing(500))
        async with picker(prefill + decode) as rig:
            stream = rig.stream()
            await stream.ask(completion_body())
            gate.open.set()
            answer = await stream.answer(False)
            assert (answer.status, b"returned status 500" in answer.body) == (502, True)
            await stream.end()
            assert await stream.call.code() == grpc.StatusCode.OK
            received = [request for engine in prefill for request in engine.received]
            assert len(received) == 1, received
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_a_prefill_that_fails_after_the_response_has_begun_ends_the_stream() -> None:
    """The client has a part of the response, so Envoy can only break it off."""

    async def main() -> None:
        (prefill, decode), gate = engines_of("sglang"), Gate()
        for engine in prefill:
            engine.serve = gate.before(failing(500))
        async with picker(prefill + decode) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            await stream.respond(200, answer.endpoints[0])
            gate.open.set()
            assert await stream.call.code() == grpc.StatusCode.ABORTED
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


async def immediate(stream: EnvoyStream) -> int:
    """Read to the immediate response, and return its status."""
    while not (message := await stream.read()).HasField("immediate_response"):
        pass
    return int(message.immediate_response.status.code)


def test_a_request_that_fails_while_its_choice_is_being_sent_is_withdrawn() -> None:
    """Envoy gets the response, also if part of the choice was not sent yet."""

    async def main() -> None:
        prefill, decode = engines_of("sglang")
        for engine in prefill:
            engine.serve = failing(500)
        async with picker(prefill + decode) as rig:
            for number in range(10):
                stream = rig.stream()
                await stream.ask_only(completion_body(user=str(number), prompt="word " * 60_000))
                assert await immediate(stream) == 502
                await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_one_instance_serves_a_request_and_the_others_of_its_role_are_fallbacks(role: str) -> None:
    """No pair is among the endpoints that Envoy allows. The picker sends no leg, and the body has no transfer
    parameters."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker([*prefill, *decode], "  policy: foresight-joint\n") as rig:
            able = [address(engine) for engine in (decode if role == "decode" else prefill)]
            for served in (0, -1):
                stream = rig.stream()
                answer = await stream.ask(completion_body(), subset=able)
                assert sorted(answer.endpoints) == sorted(able)
                assert b"kv_transfer_params" not in answer.body
                await stream.respond(200, answer.endpoints[served])
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
            assert not any(engine.received for engine in (*prefill, *decode))

    run(main())


def test_a_pair_among_the_candidates_of_an_instance_alone_is_no_fallback() -> None:
    """The terms of the decision name the pair that the instance was compared with."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with picker([*prefill, *decode], "  policy: foresight-joint\n  parameters: {aggregated: 1}\n") as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            assert sorted(answer.endpoints) == sorted(map(address, decode))
            await stream.respond(200, answer.endpoints[0])
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()
            assert not any(engine.received for engine in prefill)

    run(main())
