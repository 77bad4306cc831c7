"""The whole gateway in front of emulated engines: responses are correct, failures are retried, and no resource stays
held."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from tests.serve.rig import CHAT, CLUSTER, COMPLETIONS, MODEL, Rig, rig

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import Decode, KvCleared, Prefill, TransferMeasured

PROMPT = "The quick brown fox jumps over the lazy dog. " * 30


def test_a_response_over_two_legs_equals_that_of_one_engine() -> None:
    """The text is the same streamed or not, for every length of prompt, and the request ID is the client's."""

    async def run() -> None:
        async with rig() as gate:
            for prompt in ("hi", PROMPT, PROMPT * 40, [1, 2, 3] * 500):
                expected = await gate.direct("decode0", prompt, 6)
                whole = await gate.ask(prompt, tokens=6)
                streamed = await gate.ask(prompt, tokens=6, stream=True)
                assert whole.status == streamed.status == 200
                assert whole.text == streamed.text == expected
            named = await gate.post(
                {"model": MODEL, "prompt": "hi", "max_tokens": 2}, headers={"X-Request-Id": "mine-17"}
            )
            assert named.headers["x-request-id"] == "mine-17"
            chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
            assert (await gate.post(chat, CHAT)).json["choices"][0]["message"]["content"]
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_legs_go_to_prefill_and_decode_instances_and_the_log_replays(tmp_path: Path) -> None:
    """Every decision and failure of a live run is in the log, which replays bit for bit."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with rig(f"  log: {{events: {log}}}\n") as gate:
            await gate.command("prefill0", fail_next=2, status=500, leg="prefill")
            await gate.command("decode1", fail_next=2, status=503, leg="decode")
            responses = await asyncio.gather(*[gate.ask(f"{n} {PROMPT}", stream=n % 2 == 0) for n in range(20)])
            assert [response.status for response in responses] == [200] * 20
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster))
    kinds = set()
    for record, again in replay(control, records):
        kinds.add(type(record.event).__name__)
        assert decisions_equal(record.decisions, again)
        for decision in record.decisions:
            assert not isinstance(decision, Prefill) or decision.instance.startswith("prefill")
            assert not isinstance(decision, Decode) or decision.target.startswith("decode")
    assert control.in_flight == 0
    assert {"PrefillFailed", "DecodeFailed", "InstanceMeasured", "KvStored"} <= kinds


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("status", [500, 503, 429, "reset", "hang"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_leg_that_fails_before_the_first_token_is_retried(leg: str, status: Any, stream: bool) -> None:
    """The client does not notice it, whichever instance fails and however it fails."""

    async def run() -> None:
        # Timeouts are short only for an engine that hangs, because a busy machine may make others look the same.
        hangs = "  timeouts: {prefill: 1 s, first_token: 1 s, answer: 1 s}\n  retries: {attempts: 8}\n"
        async with rig(hangs if status == "hang" else "") as gate:
            expected = await gate.direct("decode0", PROMPT)
            for name in (f"{leg}0", f"{leg}1"):
                await gate.command(name, fail_next=1, status=status, leg=leg)
            response = await gate.ask(PROMPT, stream=stream)
            assert (response.status, response.text) == (200, expected)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_without_attempts_left_the_error_names_the_failed_leg() -> None:
    """The error has OpenAI's form and a gateway error status."""

    async def run() -> None:
        async with rig("  retries: {attempts: 2}\n") as gate:
            for name in ("prefill0", "prefill1"):
                await gate.command(name, fail_next=5, status=500, leg="prefill")
            response = await gate.ask(PROMPT)
            assert response.status == 502
            assert "prefill instance prefill" in response.json["error"]["message"]
            assert "returned status 500" in response.json["error"]["message"]
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_broken_stream_ends_with_an_error_event() -> None:
    """After the first token no retry is possible; the HTTP stream ends properly with an event that gives the reason."""

    async def run() -> None:
        async with rig() as gate:
            for name in ("decode0", "decode1"):
                await gate.command(name, fail_next=1, status="reset", leg="decode", after_tokens=3)
            response = await gate.ask(PROMPT, tokens=8, stream=True)
            assert response.status == 200
            *tokens, last = response.events
            assert 1 <= len(tokens) <= 3
            assert last["error"]["type"] == "upstream_error"
            assert "closed the connection" in last["error"]["message"]
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_broken_non_streaming_response_is_retried() -> None:
    """Nothing has been sent to the client yet, so a retry is invisible to it."""

    async def run() -> None:
        async with rig() as gate:
            expected = await gate.direct("decode0", PROMPT, 8)
            await gate.command("decode0", fail_next=1, status="reset", leg="decode", after_tokens=3)
            await gate.command("decode1", fail_next=1, status="reset", leg="decode", after_tokens=3)
            response = await gate.ask(PROMPT, tokens=8)
            assert (response.status, response.text) == (200, expected)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_client_that_disconnects_releases_all_resources(tokens: int) -> None:
    """The client leaves before the first token or during a stream, and the engines are notified."""

    async def leave(gate: Rig, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{number} {PROMPT * 20}",
            "max_tokens": 5_000,
            "ignore_eos": True,
            "stream": True,
        }
        async with gate.session.post(gate.url + COMPLETIONS, json=body) as response:
            for _ in range(tokens):
                await response.content.readuntil(b"\n\n")
            response.close()

    async def run() -> None:
        async with rig() as gate:
            if tokens:
                await asyncio.gather(*[leave(gate, number) for number in range(8)])
            else:
                gate.slow(100)
                tasks = [asyncio.create_task(gate.ask(f"{n} {PROMPT * 40}", tokens=5_000)) for n in range(8)]
                while gate.held_resources()["legs"] < 8:
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                gate.slow(1)
            assert await gate.becomes_idle(), gate.held_resources()
            assert (await gate.ask("hi")).status == 200

    uvloop.run(run())


def test_a_client_error_does_not_count_against_an_instance() -> None:
    """An engine's 4xx is passed on unchanged, without a retry, and does not count against the engine."""

    async def run() -> None:
        async with rig("  breaker: {failures: 1}\n") as gate:
            for _ in range(3):
                response = await gate.ask(PROMPT, tokens=10**9)
                assert response.status == 400
                assert response.json["error"]["message"]
            assert all(engine.availability.up for engine in gate.gateway.runtime.engines.values())
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"model": MODEL}, "prompt"),
        ({"model": MODEL, "prompt": 5}, "prompt"),
        ({"model": MODEL, "prompt": "x", "stream": "yes"}, "stream"),
        ({"model": MODEL, "prompt": "x", "max_tokens": -1}, "max_tokens"),
        ([], "object"),
    ],
)
def test_an_invalid_request_is_rejected_with_one_sentence(body: Any, text: str) -> None:
    """The request is rejected before anything is booked or sent."""

    async def run() -> None:
        async with rig() as gate:
            response = await gate.post(body)
            assert response.status == 400
            assert text in response.json["error"]["message"]
            assert not any(gate.held_resources().values())

    uvloop.run(run())


def test_a_request_for_several_choices_is_computed_by_one_instance() -> None:
    """The KV of several sequences cannot be transferred, so a decode instance computes the prompt itself."""

    async def run() -> None:
        async with rig() as gate:
            response = await gate.ask(PROMPT, n=2)
            assert response.status == 200
            assert len(response.json["choices"]) == 2
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_kv_events_make_later_requests_prefix_hits() -> None:
    """The prompts are token IDs; engines and gateway compute the same block hashes."""

    async def run() -> None:
        async with rig("  prefix: events\n") as gate:
            prompt = list(range(1_000, 2_600))
            assert (await gate.ask(prompt)).status == 200
            hit_tokens = 0.0
            # Events published before the gateway subscribes become known only with the next event.
            while hit_tokens < 1_584:
                again = await gate.ask(prompt)
                page = (await gate.get("/metrics")).body.decode()
                hits = [line for line in page.splitlines() if line.startswith("kvroute_prefix_hit_tokens_total")]
                hit_tokens = sum(float(line.rpartition(" ")[2]) for line in hits)
            assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1_584

    uvloop.run(run())


def test_a_dead_instance_is_excluded_until_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    """Health checks cause both log lines; only the first one is a warning."""
    caplog.set_level("INFO", logger="kvroute")

    async def run() -> None:
        section = "  health: {interval: 20 ms, failures: 1}\n  breaker: {open: 50 ms}\n"
        async with rig(section) as gate:
            await gate.stop_engine("decode0")
            assert await gate.becomes("decode0", False)
            responses = await asyncio.gather(*[gate.ask(f"{n} {PROMPT}") for n in range(6)])
            assert [response.status for response in responses] == [200] * 6
            await gate.restart_engine("decode0")
            assert await gate.becomes("decode0", True)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
    levels = {record.message: record.levelname for record in caplog.records if record.message.startswith("instance_")}
    assert levels == {"instance_down": "WARNING", "instance_up": "INFO"}


def test_without_any_decode_instance_the_response_is_503_at_once() -> None:
    """No prefill is done without a decode instance."""

    async def run() -> None:
        async with rig("  health: {interval: 20 ms, failures: 1}\n") as gate:
            for name in ("decode0", "decode1"):
                await gate.stop_engine(name)
            assert await gate.becomes("decode0", False)
            assert await gate.becomes("decode1", False)
            response = await gate.ask(PROMPT)
            assert response.status == 503
            assert "no decode instance is up" in response.json["error"]["message"]
            assert response.headers["retry-after"]
            assert (await gate.get("/ready")).status == 503
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_a_constraint_keeps_transfers_inside_its_domain_or_rejects(caplog: pytest.LogCaptureFixture) -> None:
    """`fail` rejects the request when the domain's decode instance is down; `fallback` uses another one and logs it."""

    async def run(constraint: str) -> list[int]:
        section = f"  constraint: {constraint}\n  health: {{interval: 20 ms, failures: 1}}\n"
        text = CLUSTER.replace('  - {name: prefill1, role: prefill, gpus: "node1:0-1"}\n', "")
        async with rig(section, text) as gate:
            for n in range(6):
                assert (await gate.ask(f"{n} {PROMPT}")).status == 200
            page = (await gate.get("/metrics")).body.decode()
            assert 'kind="decode",engine="decode0"} 6\n' in page
            await gate.stop_engine("decode0")
            assert await gate.becomes("decode0", False)
            return [(await gate.ask(f"again {n} {PROMPT}")).status for n in range(3)]

    def logged() -> list[dict[str, Any]]:
        return [record.__dict__["fields"] for record in caplog.records if record.message == "constraint_fallback"]

    assert uvloop.run(run("pod:fail")) == [503] * 3
    assert not logged()
    assert uvloop.run(run("pod:fallback")) == [200] * 3
    assert (logged()[0]["source"], logged()[0]["target"], logged()[0]["count"]) == ("prefill0", "decode1", 1)
    assert len(logged()) <= 2  # at most once a second
    caplog.clear()
    assert uvloop.run(run("pod:preferred:0.5")) == [200] * 3
    assert logged()[0]["target"] == "decode1"


@pytest.mark.parametrize("measure", ["auto", "first-byte", "engine"])
def test_which_source_measures_transfer_times(measure: str) -> None:
    """Transfers are timed by the engines' counters if available, unless `first-byte` is set; a pushed transfer has no
    effect."""

    async def run() -> None:
        async with rig(f"  measure: {measure}\n  oracle: {{source: push}}\n  scrape: {{interval: 1 h}}\n") as gate:
            runtime, at = gate.gateway.runtime, gate.gateway.now()
            engines = runtime.engines
            assert {engine.measures for engine in engines.values()} == {measure != "engine"}
            pushed = {"source": "prefill0", "target": "decode0", "kv_bytes": 1e9, "seconds": 100.0, "transfers": 9}
            url = f"{gate.admin}/telemetry"
            async with gate.session.post(url, data=msgspec.json.encode({"transfers": [pushed]})) as response:
                assert response.status == 200
            assert engines["decode0"].measures == (measure != "engine")
            runtime.on_telemetry(TransferMeasured(at, "prefill0", "decode0", 1e9, 1e-3, 9))
            assert engines["decode0"].measures == (measure == "first-byte")
            runtime.on_telemetry(KvCleared(at, "decode0"))
            assert engines["decode0"].measures == (measure != "engine")

    uvloop.run(run())


def test_a_drain_loses_no_request() -> None:
    """Requests in flight are answered; afterwards the port is closed."""

    async def run() -> None:
        async with rig() as gate:
            gate.slow(100)
            tasks = [asyncio.create_task(gate.ask(f"{n} {PROMPT}", tokens=60, stream=True)) for n in range(12)]
            while gate.held_resources()["requests"] < 12:
                await asyncio.sleep(0)
            gate.slow(1)
            await gate.gateway.drain()
            responses = [await task for task in tasks]
            assert [(response.status, len(response.events)) for response in responses] == [(200, 60)] * 12
            with pytest.raises(OSError, match="onnect"):
                await gate.ask("late")

    uvloop.run(run())


def test_api_keys_and_limits_are_applied() -> None:
    """Without a key: 401; above the limit of a key: 429; above the limit of the gateway: 503; the last two with
    Retry-After."""
    key = "kvr_" + "a" * 43
    hashed = "sha256:" + __import__("hashlib").sha256(key.encode()).hexdigest()
    section = f"  keys: {{known: {{alice: '{hashed}'}}}}\n  limits: {{in_flight: 2, queue: 1, per_key: 3}}\n"

    async def run() -> None:
        async with rig(section) as gate:
            assert (await gate.ask("hi")).status == 401
            assert [(await gate.get(path)).status for path in ("/v1/models", f"/v1/models/{MODEL}")] == [401, 401]
            async with gate.session.get(f"{gate.admin}/metrics") as response:
                assert 'kvroute_requests_total{endpoint="models",code="401"} 2' in await response.text()
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
            gate.slow(100)
            tasks = [asyncio.create_task(gate.post(body, headers=headers)) for _ in range(3)]
            while gate.gateway.state.tick(gate.gateway.now()).load.queued < 1:
                await asyncio.sleep(0)
            refused = await gate.post(body, headers=headers)
            assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
            assert int(refused.headers["retry-after"]) >= 1
            gate.slow(1)
            assert [(await task).status for task in tasks] == [200] * 3
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())


def test_which_endpoints_are_passed_through() -> None:
    """Models, tokens and embeddings come from an engine; the gateway serves its own pages itself."""

    async def run() -> None:
        async with rig() as gate:
            assert (await gate.get("/v1/models")).json["data"][0]["id"] == MODEL
            assert (await gate.post({"model": MODEL, "prompt": "hi there"}, "/tokenize")).json["count"] == 2
            assert (await gate.post({"model": MODEL, "input": "hi"}, "/v1/embeddings")).json["data"]
            assert (await gate.get("/health")).status == (await gate.get("/ready")).status == 200
            assert (await gate.get("/nowhere")).status == 404
            assert (await gate.get(COMPLETIONS)).status == 405
            assert msgspec.json.decode((await gate.get("/openapi.json")).body)["openapi"].startswith("3.1")
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(run())
