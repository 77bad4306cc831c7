"""vLLM's protocols and single instances through the whole gateway: what each engine receives, and which engine replaces
another."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from aiohttp import web
from tests.serve.rig import COMPLETIONS
from tests.serve.stub_engines import (
    Engine,
    Gate,
    ReceivedRequest,
    completion,
    engines_of,
    failing,
    run,
    sent_to_decode,
    stub_rig,
    tokens,
)
from tests.waiting import until

from kvroute.serve.api.api_keys import hash_text
from kvroute.types import KvProtocol

STREAMS = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
PARAMS = b'{"do_remote_prefill": true, "remote_block_ids":[[1, 2]],  "new":{"of": 2027}, "tp_size":1.0}'
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SENT = {"Authorization": "Bearer mine", "X-Request-Id": "my-17", "traceparent": CONTEXT, "X-Tenant": "a"}


def received_by(engines: list[Engine]) -> list[ReceivedRequest]:
    """Return all completion requests that the engines received."""
    return [received for engine in engines for received in engine.received]


# vLLM


@STREAMS
def test_legs_carry_client_headers_and_fields_and_the_kv_parameters(streams: bool) -> None:
    """Authorization, request ID and trace context are passed on, unknown fields unchanged, and kv_transfer_params
    verbatim."""
    flag = b"true" if streams else b"false"
    body = (
        b'{ "prompt":"%b", "temperature" :0.70,"max_tokens":3, "my_field": {"a":[1 ,2]},"stream":%b,'
        b'"stream_options":{"include_usage":true},"kv_transfer_params":{"remote_host":"evil"}}'
    ) % (b"word " * 50, flag)

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        for engine in prefill:
            engine.params = msgspec.Raw(PARAMS)
        async with stub_rig(prefill + decode, "  forward_headers: [X-Tenant]\n") as front:
            sent = SENT | {"Content-Type": "application/json"}
            async with front.session.post(front.url + COMPLETIONS, data=body, headers=sent) as response:
                assert response.status == 200
                assert response.headers["X-Request-Id"] == "my-17"
                await response.read()
            [first], [second] = received_by(prefill), received_by(decode)
            for leg in (first, second):
                assert {name: leg.headers[name.lower()] for name in SENT} == SENT
                assert leg.raw("temperature") == b"0.70"
                assert leg.raw("my_field") == b'{"a":[1 ,2]}'
            assert first.json["kv_transfer_params"]["do_remote_decode"] is True
            assert (first.json["stream"], first.json["max_tokens"]) == (False, 1)
            assert "stream_options" not in first.json
            assert second.raw("kv_transfer_params") == PARAMS
            assert (second.raw("stream"), second.json["max_tokens"]) == (flag, 3)
            assert second.json["stream_options"] == {"include_usage": True}
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_trace_context_is_forwarded_and_missing_request_ids_are_generated() -> None:
    """The ID is the same for both legs and the client, and a new one for the next request."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode) as front:
            names = [(await front.post(completion())).headers["x-request-id"] for _ in range(3)]
            assert len(set(names)) == 3
            for side in (prefill, decode):
                assert sorted(received.headers["x-request-id"] for received in received_by(side)) == sorted(names)
            assert all("authorization" not in received.headers for received in received_by(prefill + decode))

    run(main())


@STREAMS
@pytest.mark.parametrize("reply", [b"{}", b'{"kv_transfer_params":null}', b"[]", b"no JSON"], ids=range(4))
def test_a_prefill_response_without_kv_parameters_is_a_failure(reply: bytes, streams: bool) -> None:
    """Another engine prefills; the decode engine gets one request, with the parameters of that other engine."""

    async def main() -> None:
        prefill, decode = engines_of("vllm")

        async def no_connector(
            engine: Engine, request: web.BaseRequest, received: ReceivedRequest
        ) -> web.StreamResponse:
            if len(received_by(prefill)) == 1:
                return web.Response(body=reply, content_type="application/json")
            return await tokens(engine, request, received)

        for engine in prefill:
            engine.serve = no_connector
        async with stub_rig(prefill + decode) as front:
            response = await front.post(completion(stream=streams))
            assert (response.status, len(response.text.split())) == (200, 3)
            assert [len(engine.received) for engine in prefill] == [1, 1]
            assert len(received_by(decode)) == 1
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("own", [False, True], ids=["without-own", "with-own"])
def test_api_keys_of_the_gateway_are_not_sent_to_engines(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's key is not sent to engines; their own key, if configured, replaces it."""
    section = f"  keys: {{known: {{alice: '{hash_text('kvr_mine')}'}}}}\n"
    if own:
        monkeypatch.setenv("KVROUTE_TEST_ENGINE_KEY", "engines-own")
        section += "  upstream_key_env: KVROUTE_TEST_ENGINE_KEY\n"

    async def main() -> None:
        prefill, decode = engines_of("vllm")
        async with stub_rig(prefill + decode, section) as front:
            assert (await front.post(completion())).status == 401
            assert not received_by(prefill + decode)
            sent = {"Authorization": "Bearer kvr_mine"}
            assert (await front.post(completion(), headers=sent)).status == 200
            assert (await front.post({"input": "a"}, "/v1/embeddings", headers=sent)).status == 200
            received = received_by(prefill + decode)
            assert len(received) >= 3
            for request in received:
                assert request.headers.get("authorization") == ("Bearer engines-own" if own else None)
                assert "kvr_mine" not in json.dumps(request.headers)

    run(main())


# Mooncake


def test_mooncake_legs_share_a_transfer_id_and_the_engine_id_is_queried_once() -> None:
    """There is one query also if many requests arrive before the first response of the bootstrap server."""

    async def main() -> None:
        prefill, decode = engines_of("mooncake")
        async with stub_rig(prefill + decode) as front:
            bodies = [completion(prompt=f"{n} " * 200, stream=n % 2 == 0) for n in range(12)]
            responses = await asyncio.gather(*[front.post(body) for body in bodies])
            assert [(response.status, len(response.text.split())) for response in responses] == [(200, 3)] * 12
            assert [engine.queries for engine in prefill] == [1, 1]
            sources = {
                received.json["kv_transfer_params"]["transfer_id"]: (engine, received)
                for engine in prefill
                for received in engine.received
            }
            assert len(sources) == 12
            for received in received_by(decode):
                params = received.json["kv_transfer_params"]
                source, first = sources.pop(params["transfer_id"])
                assert params == {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": params["transfer_id"],
                    "remote_bootstrap_addr": f"http://127.0.0.1:{source.port}",
                    "remote_engine_id": source.engine_id,
                }
                assert first.json["prompt"] == received.json["prompt"]
            assert not sources
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_the_engine_id_is_queried_again_after_a_restart() -> None:
    """The engine's metrics reveal a new process."""

    async def main() -> None:
        prefill, decode = engines_of("mooncake")
        source = prefill[0]
        async with stub_rig([source, *decode], "  scrape: {interval: 20 ms}\n") as front:
            assert (await front.post(completion())).status == 200
            await until(lambda: source.name in front.gateway.runtime.measured)
            source.engine_id, source.started_s = "id-new", 2.0
            while source.queries < 2:
                assert (await front.post(completion())).status == 200
            last = max(
                received_by(decode), key=lambda received: received.json["kv_transfer_params"]["remote_engine_id"]
            )
            assert last.json["kv_transfer_params"]["remote_engine_id"] == "id-new"
            assert source.queries == 2
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_the_engine_id_is_queried_again_after_a_failure(leg: str) -> None:
    """The engine may have restarted with another engine ID."""

    async def main() -> None:
        prefill, decode = engines_of("mooncake")
        source = prefill[0]

        async def restarts(_: Engine, request: web.BaseRequest, __: ReceivedRequest) -> web.StreamResponse:
            source.engine_id = "id-new"
            for engine in (source, *decode):
                engine.serve = tokens
            return web.json_response({}, status=500)

        async with stub_rig([source, *decode]) as front:
            assert (await front.post(completion())).status == 200
            for engine in [source] if leg == "prefill" else decode:
                engine.serve = restarts
            assert (await front.post(completion())).status == 200
            assert source.queries == 2
            ids = [received.json["kv_transfer_params"]["remote_engine_id"] for received in received_by(decode)]
            assert ids.count("id-new") == 1
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("silent", [1, 2])
def test_an_engine_without_an_engine_id_is_skipped(silent: int) -> None:
    """If no engine has an ID, the client receives the reason."""

    async def main() -> None:
        prefill, decode = engines_of("mooncake")
        for engine in prefill[:silent]:
            engine.engine_id = ""
        async with stub_rig(prefill + decode, "  breaker: {failures: 1000}\n") as front:
            responses = [await front.post(completion(prompt=f"{n} " * 100)) for n in range(4)]
            if silent == 1:
                assert [response.status for response in responses] == [200] * 4
                assert not prefill[0].received
            else:
                assert [response.status for response in responses] == [502] * 4
                assert "bootstrap server of prefill instance" in responses[0].json["error"]["message"]
                assert not received_by(prefill + decode)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


# Instances that do both


@STREAMS
@pytest.mark.parametrize("protocol", ["vllm", "mooncake", "sglang"])
def test_an_instance_with_both_roles_gets_the_unchanged_request(protocol: KvProtocol, streams: bool) -> None:
    """The instance gets one request, without transfer parameters."""

    async def main() -> None:
        engines = [Engine(f"engine{n}", "both", protocol) for n in range(2)]
        async with stub_rig(engines) as front:
            sent = [completion(stream=streams, n=n, prompt=f"{n}" * 300, more={"b": n}) for n in (1, 1, 2)]
            for body in sent:
                assert (await front.post(body)).status == 200
            bodies = sorted((received.json for received in received_by(engines)), key=json.dumps)
            assert bodies == sorted(map(sent_to_decode, sent), key=json.dumps)
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@STREAMS
def test_an_instance_with_both_roles_is_replaced_after_a_failure(streams: bool) -> None:
    """Another instance replaces it; without another one, the error names the instance that failed."""

    async def main() -> None:
        engines = [Engine(f"engine{n}", "both") for n in range(2)]
        engines[0].serve = failing(500)
        async with stub_rig(engines, "  breaker: {failures: 1000}\n") as front:
            bodies = [completion(stream=streams, prompt=f"{n}" * 300) for n in range(4)]
            assert [(await front.post(body)).status for body in bodies] == [200] * 4
            assert engines[0].received
            assert len(engines[1].received) == 4
            engines[1].serve = failing(503)
            response = await front.post(bodies[0])
            assert response.status in (502, 503)
            assert "instance engine" in response.json["error"]["message"]
            assert await front.becomes_idle(), front.held_resources()

    run(main())


def test_a_client_that_disconnects_releases_an_instance_with_both_roles() -> None:
    """The connection to the engine is closed."""

    async def main() -> None:
        gate, engine = Gate(), Engine("engine", "both")
        engine.serve = gate.before(tokens)
        async with stub_rig([engine]) as front:
            task = asyncio.create_task(front.post(completion()))
            await gate.entered.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await gate.left.wait()
            assert gate.cancelled
            assert await front.becomes_idle(), front.held_resources()

    run(main())
