"""The picker as Envoy sees it: what an endpoint picker of the Gateway API inference extension must do (v1.0.0)."""

from __future__ import annotations

import asyncio
import gzip
from functools import partial
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.epp.envoy_rig import (
    EnvoyStream,
    PickerRig,
    address,
    alone,
    completion_body,
    message_headers,
    picker,
)
from tests.serve.rig import MODEL
from tests.serve.stub_engines import failing, run
from tests.waiting import until

from kvroute.epp.envoy_pb2 import (
    BUFFERED,
    FULL_DUPLEX_STREAMED,
    NONE,
    STREAMED,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProtocolConfiguration,
)
from kvroute.epp.messages import DESTINATION, NAMESPACE
from kvroute.epp.server import PickerSpec
from kvroute.http.headers import Headers
from kvroute.serve.api.api_keys import hash_text

NOT_SERVING, SERVING, UNKNOWN = 2, 1, 3
READINESS = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


@st.composite
def requests_in_envoy(draw: st.DrawFn) -> dict[str, Any]:
    """One request and what Envoy does with it: how far it gets, which of its endpoints serves it."""
    return {
        "subset": draw(st.none() | st.sets(st.integers(0, 3), max_size=3)),
        "as_list": draw(st.booleans()),
        "completion": draw(st.booleans()),
        "served": draw(st.sampled_from(["first", "second", "any", "unknown", "none"])),
        "status": draw(st.sampled_from([200, 200, 200, 400, 429, 500, 503])),
        "ends": draw(st.sampled_from(["whole", "cancelled", "before the response", "unasked"])),
    }


async def play(rig: PickerRig, endpoints: list[str], what: dict[str, Any]) -> None:
    """Do what Envoy does, and check each answer."""
    subset = None
    if what["subset"] is not None:
        wanted = sorted([*endpoints, "192.0.2.1:80"][number] for number in what["subset"])
        subset = wanted if what["as_list"] else ", ".join(wanted)
    stream = rig.stream()
    body, path = (completion_body(), "/v1/completions") if what["completion"] else (None, "/v1/models")
    if what["ends"] == "unasked":
        await stream.ask_only(body, path=path, subset=subset)
        stream.call.cancel()
        return
    answer = await stream.ask(body, path=path, subset=subset)
    allowed = endpoints if what["subset"] is None else [endpoint for endpoint in endpoints if endpoint in wanted]
    if not allowed:
        assert answer.status == 503
        return
    assert answer.destination == answer.metadata
    assert set(answer.endpoints) <= set(allowed)
    assert len(answer.endpoints) == min(len(allowed), 3)
    assert answer.body == (body or b"")
    if what["ends"] != "before the response":
        served = {"first": answer.endpoints[0], "second": answer.endpoints[-1], "any": endpoints[-1]}
        await stream.respond(
            what["status"], served.get(what["served"], "192.0.2.9:1" if what["served"] != "none" else "")
        )
    if what["ends"] == "whole":
        await stream.end()
    else:
        stream.call.cancel()


@settings(max_examples=12, deadline=None)
@given(st.lists(requests_in_envoy(), max_size=12))
def test_whatever_envoy_does_a_choice_is_in_its_subset_and_everything_is_released(whats: list[dict[str, Any]]) -> None:
    """Requests overlap, end early, fail and are served by other endpoints than the chosen one."""

    async def main() -> None:
        engines = alone()
        # No breaker opens: every engine stays eligible.
        async with picker(engines, "  breaker: {failures: 10000}\n  health: {panic: 0}\n") as rig:
            endpoints = [address(engine) for engine in engines]
            await asyncio.gather(*(play(rig, endpoints, what) for what in whats))
            assert await rig.becomes_idle(), rig.held_resources()
            await until(lambda: rig.booked() == {})

    run(main())


def test_a_choice_is_a_header_and_the_same_metadata_and_the_body_is_unchanged() -> None:
    """A body of 300 KB arrives and leaves in several messages."""

    async def main() -> None:
        async with picker(alone()) as rig:
            body = completion_body(prompt="word " * 60_000)
            stream = rig.stream()
            answer = await stream.ask(body)
            assert len(answer.endpoints) == 3
            assert answer.destination == answer.metadata
            assert msgspec.json.decode(answer.body) == msgspec.json.decode(body)
            await stream.respond(200, answer.endpoints[0])
            await stream.end()

    run(main())


def test_every_other_request_goes_to_the_instances_in_turn() -> None:
    """A GET has no body, and three of them go to three engines."""

    async def main() -> None:
        engines = alone()
        async with picker(engines) as rig:
            chosen = []
            for _ in engines:
                stream = rig.stream()
                answer = await stream.ask(None, path="/v1/models")
                chosen.append(answer.endpoints[0])
                await stream.respond(200, chosen[-1], ends=True)
                await stream.end()
            assert sorted(chosen) == sorted(address(engine) for engine in engines)
            assert await rig.becomes_idle()

    run(main())


@pytest.mark.parametrize("hint", ["127.0.0.1", ["127.0.0.1"], None], ids=["ip", "list", "unset"])
def test_a_subset_may_name_hosts(hint: Any) -> None:
    """Without a port, all endpoints of the host are meant."""

    async def main() -> None:
        async with picker(alone()) as rig:
            assert len((await rig.stream().ask(completion_body(), subset=hint)).endpoints) == 3

    run(main())


@pytest.mark.parametrize("hint", ["", [], "192.0.2.1:80"], ids=["empty", "empty list", "unknown"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_subset_without_an_eligible_endpoint_is_503(hint: Any, path: str) -> None:
    """Also if it is empty."""

    async def main() -> None:
        async with picker(alone()) as rig:
            answer = await rig.stream().ask(completion_body(), path=path, subset=hint)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    run(main())


def test_requests_beyond_the_limit_of_a_key_or_of_the_picker_are_429() -> None:
    """They are immediate responses of Envoy, with the time to wait."""

    async def main() -> None:
        section = f"  keys: {{known: {{a: '{hash_text('one')}', b: '{hash_text('two')}'}}, concurrency: {{a: 1}}}}\n"
        async with picker(alone(), section + "  limits: {in_flight: 2, queue: 0}\n") as rig:
            one, two = [("authorization", "Bearer one")], [("authorization", "Bearer two")]
            assert (await rig.stream().ask(completion_body())).status == 401
            assert (await rig.stream().ask(completion_body(), headers=one)).status == 0
            refused = await rig.stream().ask(completion_body(), headers=one)
            assert (refused.status, int(refused.headers["retry-after"]) >= 1) == (429, True)
            assert (await rig.stream().ask(completion_body(), headers=two)).status == 0
            full = await rig.stream().ask(completion_body(), headers=two)
            assert full.status == 429
            assert b"the gateway is full" in full.body

    run(main())


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (msgspec.json.encode({"model": "none", "prompt": "x"}), 503), (b'{"prompt":"' + b"x" * 2000, 413)],
    ids=["not JSON", "unknown model", "too large"],
)
def test_a_bad_request_is_answered_by_the_picker(body: bytes, status: int) -> None:
    """With the gateway's own checks and statuses."""

    async def main() -> None:
        async with picker(alone(), "  limits: {body: 1 KB}\n") as rig:
            expected = status if status != 503 else 0  # with one model, engines check its name
            assert (await rig.stream().ask(body)).status == expected

    run(main())


def only_on(rig: PickerRig, name: str) -> bool:
    """Return whether requests are booked on this instance and no other."""
    return set(rig.booked()) == {name}


def test_an_endpoint_that_refuses_is_skipped_and_counts_as_a_failure() -> None:
    """The decode is booked on the endpoint that served it, and the breaker of the first one opens."""

    async def main() -> None:
        engines = alone()
        async with picker(engines, "  breaker: {failures: 1}\n  health: {panic: 0}\n") as rig:
            names = {address(engine): engine.name for engine in engines}
            skipped = []
            for number in range(8):
                stream = rig.stream()
                answer = await stream.ask(completion_body(prompt=f"{number} word " * 20))
                first, second = (names[endpoint] for endpoint in answer.endpoints[:2])
                assert set(rig.booked()) == {first}
                await stream.respond(200, answer.endpoints[1])
                await until(partial(only_on, rig, second))
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
                skipped.append(first)
                if not rig.gateway.runtime.engines[first].availability.up:
                    break
            # As errors, of which four weigh as much as one connection that is refused.
            assert skipped == ["engine0"] * 4
            assert rig.gateway.runtime.engines[second].availability.up

    run(main())


class Recorder:
    """A tracer that counts what has begun and what has ended."""

    replaced: frozenset[bytes] = frozenset()
    trace_id = ""
    head = b"traceparent: 00-1-1-01\r\n"

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[Any] = []

    def request(self, headers: Headers, name: str, attributes: Any = None) -> Recorder:
        self.begun.append(name)
        return self

    def leg(self, name: str, attributes: Any = None) -> Recorder:
        self.begun.append(name)
        return self

    def end(self, *result: Any) -> None:
        self.ended.append(result)

    def close(self) -> None:
        """Do nothing: nothing is open."""


def test_requests_that_need_no_decision_are_traced_and_count_skipped_endpoints() -> None:
    """As requests with a decision do: the endpoints before the one that has served it have refused or were full."""

    async def main() -> None:
        engines = alone(2)
        async with picker(engines, "  breaker: {failures: 1}\n  health: {panic: 0}\n") as rig:
            tracer = rig.gateway.runtime.tracer = Recorder()
            skipped = 0
            for number in range(16):
                stream = rig.stream()
                answer = await stream.ask(completion_body(), path="/tokenize")
                assert answer.added["traceparent"] == "00-1-1-01"
                await stream.respond(200, address(engines[1]))
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
                assert tracer.begun == ["passthrough", "passthrough"] * (number + 1)
                assert tracer.ended[-2:] == [("",), (200, "")]
                skipped += answer.endpoints[0] == address(engines[0])
                if not rig.gateway.runtime.engines["engine0"].availability.up:
                    break
            assert skipped == 4  # as errors
            assert rig.gateway.runtime.engines["engine1"].availability.up

    run(main())


def test_an_endpoint_that_envoy_has_replaced_is_not_blamed() -> None:
    """Envoy replaces an endpoint that it does not know by another one; load is booked where the request is."""

    async def main() -> None:
        engines = alone()
        section = "  breaker: {failures: 1}\n  health: {panic: 0}\n  retries: {attempts: 1}\n"
        async with picker(engines, section) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            assert len(answer.endpoints) == 1
            other = next(engine for engine in engines if address(engine) != answer.destination)
            await stream.respond(200, address(other))
            await until(lambda: set(rig.booked()) == {other.name})
            assert all(engine.availability.up for engine in rig.gateway.runtime.engines.values())
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


@pytest.mark.parametrize(("status", "served"), [(500, True), (503, False)], ids=["error", "no endpoint"])
def test_failures_open_the_breaker_as_in_the_gateway(status: int, served: bool) -> None:
    """An error that two engines give to different requests, or an endpoint that Envoy cannot connect to."""

    async def main() -> None:
        async with picker(alone(1), "  breaker: {failures: 1}\n  health: {panic: 0}\n") as rig:
            for _ in range(4):
                stream = rig.stream()
                answer = await stream.ask(completion_body())
                if answer.status:
                    break
                await stream.respond(status, answer.endpoints[0] if served else "")
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
            assert not rig.gateway.runtime.engines["engine0"].availability.up
            assert (await rig.stream().ask(completion_body())).status == 503

    run(main())


@pytest.mark.parametrize(("status", "up"), [(404, True), (403, True), (503, False)])
def test_a_response_of_envoy_itself_blames_an_engine_only_if_it_reached_none(status: int, up: bool) -> None:
    """Its routes may lack the path, or a filter of its own may refuse the request."""

    async def main() -> None:
        async with picker(alone(1), "  breaker: {failures: 1}\n  health: {panic: 0}\n") as rig:
            for _ in range(4):
                stream = rig.stream()
                if (await stream.ask(completion_body(), path="/tokenize")).status:
                    break
                await stream.respond(status, ends=True)
                await stream.end()
                assert await rig.becomes_idle(), rig.held_resources()
            assert rig.gateway.runtime.engines["engine0"].availability.up == up

    run(main())


def test_health_is_that_of_the_picker_and_liveness_always_serves() -> None:
    """A picker without an instance that is up, or one that drains, is not ready."""

    async def main() -> None:
        engines = alone(1)
        async with picker(engines, "  health: {panic: 0}\n") as rig:
            await until(lambda: not rig.gateway.ready())
            assert [await rig.health(service) for service in READINESS] == [SERVING] * 3
            assert [await rig.health("liveness"), await rig.health("x")] == [SERVING, UNKNOWN]
            rig.gateway.runtime.engines["engine0"].availability.hold("test", rig.gateway.now())
            assert [await rig.health(service) for service in READINESS] == [NOT_SERVING] * 3
            assert await rig.health("liveness") == SERVING

    run(main())


def test_a_picker_that_drains_is_not_ready_and_waits_for_its_requests() -> None:
    """The stream in progress ends normally, and a new one is refused."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream = rig.stream()
            answer = await stream.ask(completion_body())
            draining = asyncio.ensure_future(rig.gateway.drain())
            await until(lambda: "draining" in rig.gateway.ready())
            assert [await rig.health(service) for service in READINESS] == [NOT_SERVING] * 3
            assert await rig.health("liveness") == SERVING
            await stream.respond(200, answer.endpoints[0])
            await stream.end()
            await draining
            with pytest.raises(grpc.aio.AioRpcError):
                await rig.stream().ask(completion_body())

    run(main())


def test_the_engine_gets_the_headers_that_the_gateway_would_send() -> None:
    """Headers on which engines act are removed, and the engines' own key replaces the client's."""

    async def main() -> None:
        async with picker(alone(1), "  forward_headers: [X-Tenant]\n") as rig:
            sent = [("x-tenant", "a"), ("x-data-parallel-rank", "3"), ("x-request-id", "my-17"), ("cookie", "c")]
            answer = await rig.stream().ask(completion_body(), headers=[*sent, ("content-length", "17")])
            assert answer.removed == ["content-length", "cookie", "x-data-parallel-rank"]
            assert answer.added == {"content-type": "application/json"}

    run(main())


def test_a_buffered_body_is_answered_in_one_message() -> None:
    """Envoy waits for the answer to the headers before it sends the body."""

    async def main() -> None:
        async with picker(alone()) as rig:
            stream, body = EnvoyStream(rig.channel, BUFFERED), completion_body()
            config = ProtocolConfiguration(request_body_mode=BUFFERED, response_body_mode=NONE)
            head = message_headers([(":method", "POST"), (":path", "/v1/completions")])
            await stream.send(request_headers=HttpHeaders(headers=head), protocol_config=config)
            assert (await stream.read()).HasField("request_headers")
            await stream.send(request_body=HttpBody(body=body, end_of_stream=True))
            reply = await stream.read()
            changed = reply.request_body.response
            chosen = changed.header_mutation.set_headers[0].header
            assert chosen.key == DESTINATION
            assert msgspec.json.decode(changed.body_mutation.body) == msgspec.json.decode(body)
            inner = reply.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION]
            assert inner.string_value == chosen.raw_value.decode() != ""

    run(main())


def test_trailers_of_a_request_come_back_after_its_body() -> None:
    """Envoy then says with them, and not with the last part of the body, that the request is whole."""

    async def main() -> None:
        async with picker(alone()) as rig:
            stream, body = rig.stream(), completion_body()
            head = message_headers([(":method", "POST"), (":path", "/v1/completions")])
            await stream.send(request_headers=HttpHeaders(headers=head))
            await stream.send(request_body=HttpBody(body=body))
            await stream.send(request_trailers=HttpTrailers())
            [chosen, *_] = (await stream.read()).request_headers.response.header_mutation.set_headers
            piece = (await stream.read()).request_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (body, False)
            assert (await stream.read()).HasField("request_trailers")
            await stream.respond(200, chosen.header.raw_value.decode().partition(",")[0])
            await stream.end()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_the_endpoint_that_a_client_names_is_replaced(path: str) -> None:
    """Its header of that name has no effect. It is set and not removed, whatever a gateway does first."""

    async def main() -> None:
        async with picker(alone()) as rig:
            named = [(DESTINATION, "192.0.2.1:80")]
            answer = await rig.stream().ask(completion_body(), path=path, headers=named)
            assert "192.0.2.1:80" not in answer.endpoints
            assert answer.destination == answer.metadata
            assert DESTINATION not in answer.removed

    run(main())


def test_response_bodies_and_trailers_come_back_unchanged() -> None:
    """A gateway may stream the response through the picker, too."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream = rig.stream()
            config = ProtocolConfiguration(
                request_body_mode=FULL_DUPLEX_STREAMED, response_body_mode=FULL_DUPLEX_STREAMED
            )
            head = message_headers([(":method", "GET"), (":path", "/v1/models")])
            await stream.send(request_headers=HttpHeaders(headers=head, end_of_stream=True), protocol_config=config)
            answer = await stream.answer(False)
            await stream.respond(200, answer.endpoints[0])
            for body, ends in ((b"x" * 100_000, False), (b"y", True)):
                await stream.send(response_body=HttpBody(body=body, end_of_stream=ends))
                back, ended = b"", False
                while len(back) < len(body):
                    piece = (await stream.read()).response_body.response.body_mutation.streamed_response
                    back, ended = back + piece.body, piece.end_of_stream
                assert (back, ended) == (body, ends)
            await stream.end()
            assert await rig.becomes_idle()

    run(main())


def test_a_mode_that_the_picker_cannot_use_ends_the_stream() -> None:
    """The message says what to change in Envoy's configuration."""

    async def main() -> None:
        async with picker(alone(1)) as rig:
            stream, config = rig.stream(), ProtocolConfiguration(request_body_mode=STREAMED)
            head = message_headers([(":method", "POST"), (":path", "/v1/completions")])
            await stream.send(request_headers=HttpHeaders(headers=head), protocol_config=config)
            with pytest.raises(grpc.aio.AioRpcError, match="FULL_DUPLEX_STREAMED") as caught:
                await stream.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert (await rig.stream().ask(completion_body())).status == 0

    run(main())


def test_conformance_headers_select_an_endpoint_and_show_it() -> None:
    """They have an effect only with `--conformance`: a client could otherwise choose its engine."""

    async def main() -> None:
        engines = alone()
        async with picker(engines, settings=PickerSpec(conformance=True)) as rig:
            wanted = [("test-epp-endpoint-selection", address(engines[2]))]
            stream = rig.stream()
            answer = await stream.ask(completion_body(), headers=wanted)
            assert answer.endpoints == [address(engines[2])], answer
            assert answer.added["x-echo-set-header"].endswith(address(engines[2]))
            shown = (await stream.respond(200, answer.destination)).response_headers.response.header_mutation
            assert shown.set_headers[0].header.raw_value.decode() == address(engines[2])
        async with picker(engines) as rig:
            assert len((await rig.stream().ask(completion_body(), headers=wanted)).endpoints) == 3

    run(main())


def test_whole_requests_reach_the_engines() -> None:
    """A hundred requests, ten at a time, as in the conformance test GatewayFollowingEPPRouting."""

    async def main() -> None:
        engines = alone()
        async with picker(engines) as rig:
            limit = asyncio.Semaphore(10)

            async def one(number: int) -> int:
                async with limit:
                    status, _ = await rig.through({"model": MODEL, "prompt": f"{number} " * 50, "max_tokens": 1})
                    return status

            assert await asyncio.gather(*(one(number) for number in range(100))) == [200] * 100
            assert await rig.becomes_idle()
            assert rig.booked() == {}
            assert sum(len(engine.received) for engine in engines) == 100

    run(main())


def test_a_failing_engine_is_tried_by_envoy_alone() -> None:
    """The picker reports the error once; it sends nothing to the engine itself."""

    async def main() -> None:
        engines = alone(1)
        engines[0].serve = failing(500, times=1)
        async with picker(engines) as rig:
            status, _ = await rig.through({"model": MODEL, "prompt": "x", "max_tokens": 1})
            assert status == 500
            assert len(engines[0].received) == 1
            assert 'leg_failures_total{leg="decode"' in await rig.metrics()
            assert await rig.becomes_idle()

    run(main())


def test_refusals_have_the_id_of_their_request_and_the_format_of_their_path() -> None:
    """Also those that are made before the body has arrived."""

    async def main() -> None:
        async with picker(alone(), "  limits: {body: 1000 B}\n") as rig:
            for body, status in ((b"{", 400), (b"x" * 2000, 413)):
                for sent in ([("x-request-id", "my-1")], []):
                    answer = await rig.stream().ask(body, headers=sent, path="/v1/messages")
                    assert answer.status == status
                    assert answer.headers["x-request-id"] == answer.headers["request-id"]
                    assert (answer.headers["x-request-id"] == "my-1") == bool(sent)
                    assert msgspec.json.decode(answer.body)["type"] == "error"
                    plain = await rig.stream().ask(body, headers=sent)
                    assert plain.status == status
                    assert "request-id" not in plain.headers

    run(main())


def test_encoded_bodies_are_decoded_for_engines() -> None:
    """Within the limits of the picker."""

    async def main() -> None:
        async with picker(alone(), "  limits: {body: 100 KB, bodies: 300 KB}\n") as rig:
            body, coding = completion_body(), [("content-encoding", "gzip")]
            answer = await rig.stream().ask(gzip.compress(body), headers=coding)
            assert msgspec.json.decode(answer.body) == msgspec.json.decode(body)
            assert "content-encoding" in answer.removed
            for nbytes, status in ((200_000, 413), (90_000, 503)):
                large = msgspec.json.encode({"model": MODEL, "prompt": "x" * nbytes})
                assert (await rig.stream().ask(gzip.compress(large), headers=coding)).status == status
            assert (await rig.stream().ask(body, headers=[("content-encoding", "br")])).status == 415

    run(main())
