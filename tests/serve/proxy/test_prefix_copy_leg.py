"""Cached prefixes that are copied from one datacenter to the other before the prompt is computed, through the whole
gateway: three legs, and the outcome for a request when the first leg, the transfer or the engines fail."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.serve.rig import GatewayResponse, Rig
from tests.serve.two_sites import AWAY, OFFLOAD, TEXT, metric, two_sites
from tests.waiting import until
from typer.testing import CliRunner

from kvroute.cli.app import app
from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.llm import model
from kvroute.topology import parse
from kvroute.types import CopyFinished, Prefill

SERIAL = OFFLOAD + "    rule: abundant\n    copy: {timeout: 10 s}\n"
EARLY = SERIAL + "    layerwise: true\n"
SHORT_COPY_TIMEOUT = SERIAL.replace("10 s", "100 ms")
REMOTE_INSTANCES = ("far0", "far1")
TOKENS = list(range(3_000))
SEEN, KEPT = 900, 896
"""Tokens that a first prompt leaves in a cache, and the number of them in whole blocks."""


def bytes_of(tokens: int, cached: int = 0) -> float:
    """Return the size of the KV cache of a prompt in bytes, without the cached part."""
    return float(model("llama-3-70b").kv_bytes(tokens, cached))


async def ask(gate: Rig, prompt: list[int], *, stream: bool = True) -> GatewayResponse:
    """Request a completion whose response reports its usage."""
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    return await gate.ask(prompt, stream=stream, **options)


def cached(response: GatewayResponse) -> int:
    """Return the number of cached prompt tokens that the response reports."""
    document = response.events[-1] if response.events else response.json
    return int(document["usage"]["prompt_tokens_details"]["cached_tokens"])


async def copies(gate: Rig) -> dict[str, float]:
    """Return the number of copies by outcome."""
    outcomes = ("landed", "missed", "failed", "given_up", "left_out")
    counts = {outcome: await metric(gate, "kvroute_copies_total", outcome=outcome) for outcome in outcomes}
    return {outcome: count for outcome, count in counts.items() if count}


async def check_nothing_held(gate: Rig) -> None:
    """Check that the gateway, the links of the core and the engines hold nothing."""
    assert await gate.becomes_idle(), gate.held_resources()
    assert backlog(gate) == [0.0, 0.0]
    assert await metric(gate, "kvroute_transfers_in_flight", tier="cross_datacenter") == 0
    assert not gate.gateway.state.snapshot(gate.gateway.now()).tick.transfers_in_flight
    servers = gate.fleet.servers.values()
    await until(lambda: not any(server.engine.waiting or server.engine.running for server in servers))


@pytest.mark.parametrize("section", [SERIAL, EARLY], ids=["serial", "layerwise"])
@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_the_home_prefix_of_an_offloaded_prompt_is_copied_first(tmp_path: Path, section: str, stream: bool) -> None:
    """896 of 3,000 tokens are fetched and 2,104 computed; the client, engines, metrics and log agree."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with two_sites(section + f"  log: {{events: {log}}}\n") as gate:
            first = await ask(gate, TOKENS[:SEEN], stream=stream)
            assert (first.status, cached(first), await copies(gate)) == (200, 0, {})
            second = await ask(gate, TOKENS, stream=stream)
            assert (second.status, cached(second), await copies(gate)) == (200, KEPT, {"landed": 1})
            assert second.text == await gate.direct("decode0", TOKENS)
            (engine,) = [
                s.engine
                for n, s in gate.fleet.servers.items()
                if n in REMOTE_INSTANCES and s.engine.counters.prompt_tokens
            ]
            pulled = engine.counters.pulled["prefill0"]
            assert (pulled.transfers, pulled.kv_bytes) == (1, bytes_of(KEPT))
            assert engine.counters.prefill_s.sum_s == pytest.approx(1e-3 + (3_000 - KEPT) * 2e-6)
            tier = {"tier": "cross_datacenter"}
            assert await metric(gate, "kvroute_copy_bytes_total", **tier) == bytes_of(KEPT)
            transferred = await metric(gate, "kvroute_transfer_bytes_total", **tier)
            assert transferred == bytes_of(KEPT) + bytes_of(3_000, KEPT)
            assert await metric(gate, "kvroute_copy_leg_seconds_count") == 1
            shown = gate.gateway.state.snapshot(gate.gateway.now()).tick.decisions
            assert [(d.source, d.kv_bytes) for d in shown if d.kind == "prefill"] == [
                ("", 0.0),
                ("prefill0", bytes_of(KEPT)),
            ]
            await check_nothing_held(gate)

    uvloop.run(main())
    header, read = read_log(log)
    records = list(read)
    assert all(
        decisions_equal(record.decisions, again)
        for record, again in replay(header.spec.build(parse(TEXT)), iter(records))
    )
    (prefill,) = [d for r in records for d in r.decisions if isinstance(d, Prefill) and d.copy_from]
    assert (prefill.copy_from, prefill.copy_tokens, prefill.copy_bytes) == ("prefill0", KEPT, bytes_of(KEPT))
    assert [r.event.landed for r in records if isinstance(r.event, CopyFinished)] == [True]
    check_explain(log, prefill)


def check_explain(log: Path, prefill: Prefill) -> None:
    """`kvroute explain` shows the copy, as text and as JSON."""
    result = CliRunner().invoke(app, ["explain", str(log), "1"])
    assert f"prefill on {prefill.instance} with 896 cached tokens from prefill0, by" in result.stdout
    (first, *others) = msgspec.json.decode(CliRunner().invoke(app, ["explain", str(log), "1", "--json"]).stdout)[
        "decisions"
    ]
    expected = {"id": prefill.copy_id, "from": "prefill0", "tokens": KEPT, "bytes": bytes_of(KEPT), "landed": True}
    assert first["copy"] == expected
    assert first["offload"]["terms"]["copied_tokens"] == KEPT
    assert [other["copy"] for other in others] == [None] * len(others)


def test_the_remote_prefix_of_a_local_prompt_is_copied_to_the_home_site() -> None:
    """The conversation was prefilled at the remote site. Its next turn is short, so the home site fetches the 3,000
    earlier tokens. The turn after that finds them at home, and nothing is fetched."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            assert (await ask(gate, TOKENS)).status == 200
            for turn, ends in ((1, {"landed": 1}), (2, {"landed": 1})):
                response = await ask(gate, [*TOKENS, *range(100 * turn)])
                assert (response.status, cached(response) >= 2_992, await copies(gate)) == (200, True, ends)
            home = gate.fleet.servers["prefill0"].engine.counters
            assert [pulled.kv_bytes for pulled in home.pulled.values()] == [bytes_of(2_992)]
            await check_nothing_held(gate)

    uvloop.run(main())


def test_the_link_booking_of_a_copy_ends_at_its_expected_time() -> None:
    """The link's booking ends at the expected time of the copy, not when the prefill ends, so that later requests see a
    free link."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            await ask(gate, TOKENS[:SEEN])
            for name in REMOTE_INSTANCES:
                await gate.command(name, "slow", factor=1_000)
            request = asyncio.create_task(ask(gate, TOKENS))
            await until(lambda: sum(backlog(gate)) == bytes_of(KEPT))
            await until(lambda: sum(backlog(gate)) == 0.0)
            assert not request.done()
            assert any(gate.fleet.servers[name].engine.running for name in REMOTE_INSTANCES) or _at_target(gate)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


def backlog(gate: Rig) -> list[float]:
    """Return the bytes that the core counts as backlog on each link between the sites."""
    offloading = gate.gateway.runtime.control.offloading
    assert offloading is not None
    sites = range(len(offloading.datacenters.names))
    return [link.backlog_bytes for a in sites for b in sites for link in offloading.wan_links(a, b)]


def test_two_requests_can_copy_the_same_prefix_concurrently() -> None:
    """Each request has its own legs. A later request may find the whole prefix on the engine already; this also counts
    as a copy."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            await ask(gate, TOKENS[:SEEN])
            prompts = [[*TOKENS[:SEEN], *range(5_000 * n, 5_000 * n + 2_000)] for n in range(1, 5)]
            responses = await asyncio.gather(*[ask(gate, prompt) for prompt in prompts])
            assert [(response.status, cached(response)) for response in responses] == [(200, KEPT)] * 4
            assert list(await copies(gate)) == ["landed"]
            await check_nothing_held(gate)

    uvloop.run(main())


def test_a_prompt_with_unknown_tokens_is_computed_without_a_copy() -> None:
    """Without a tokenizer the token IDs of a text are unknown: the core is informed and decides by the cache of each
    site."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            text = "word " * 800
            assert [(await gate.ask(prompt)).status for prompt in (text, text + "more " * 2_000)] == [200, 200]
            assert await copies(gate) == {}
            assert await metric(gate, "kvroute_offload_decisions_total", site=AWAY, reason="long") == 1
            await check_nothing_held(gate)

    uvloop.run(main())


FAULTS = {
    "refused": {"status": 503, "fail_next": 1},
    "broken": {"status": 500, "fail_next": 1},
    "bad request": {"status": 400, "fail_next": 1},
    "reset": {"status": "reset", "fail_next": 2},
    "late": {"status": "hang", "fail_next": 1},
}
"""A kept-alive connection that is reset at once is retried on a new connection, so two faults are needed."""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_if_the_source_does_not_offer_the_prefix_the_whole_prompt_is_computed(fault: dict[str, Any]) -> None:
    """The request gets the right response at the first attempt; a late or malformed copy response does not count
    against the health of any instance."""

    async def main() -> None:
        async with two_sites(SHORT_COPY_TIMEOUT) as gate:
            await ask(gate, TOKENS[:SEEN])
            await gate.command("prefill0", leg="prefill", **fault)
            response = await ask(gate, TOKENS)
            assert (response.status, cached(response), await copies(gate)) == (200, 0, {"failed": 1})
            assert response.text == await gate.direct("decode0", TOKENS)
            assert await metric(gate, "kvroute_retries_total", leg="prefill") is None
            failures = [line for line in await page(gate) if line.startswith('kvroute_leg_failures_total{leg="copy"')]
            assert len(failures) == 1
            await check_nothing_held(gate)

    uvloop.run(main())


async def page(gate: Rig) -> list[str]:
    """Return the lines of the gateway's metrics page."""
    return (await gate.get("/metrics")).body.decode().splitlines()


def test_late_copy_responses_open_no_breaker() -> None:
    """An instance whose queue is too long for copies is healthy: its own prompts are still routed to it."""

    async def main() -> None:
        async with two_sites(SHORT_COPY_TIMEOUT + "  breaker: {failures: 1, share: 0.01}\n") as gate:
            await ask(gate, TOKENS[:SEEN])
            await gate.command("prefill0", leg="prefill", fail_next=1, status="hang")
            assert ((await ask(gate, TOKENS)).status, await copies(gate)) == (200, {"failed": 1})
            assert gate.gateway.runtime.engines["prefill0"].availability.up
            await check_nothing_held(gate)

    uvloop.run(main())


def test_a_dead_copy_source_only_loses_the_copy() -> None:
    """The source goes down after it was chosen; the prompt is computed on the instance to which it was routed."""

    async def main() -> None:
        async with two_sites(SERIAL + "  health: {interval: 60 s}\n") as gate:
            await ask(gate, TOKENS[:SEEN])
            await gate.stop_engine("prefill0")
            await wait_until_closed(gate.fleet.ready().instances["prefill0"].url)
            response = await ask(gate, TOKENS)
            assert (response.status, cached(response), await copies(gate)) == (200, 0, {"failed": 1})
            assert response.text == await gate.direct("decode0", TOKENS)
            await check_nothing_held(gate)

    uvloop.run(main())


async def wait_until_closed(url: str) -> None:
    """Wait until the port is closed."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.005)


def test_after_an_incomplete_copy_the_whole_prompt_is_computed() -> None:
    """The source held the prefix but its transfer broke off: the prefill engine computes everything, and the copy
    counts as missed."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            await ask(gate, TOKENS[:SEEN])
            await gate.command("prefill0", leg="transfer", fail_next=1)
            response = await ask(gate, TOKENS)
            assert (response.status, cached(response), await copies(gate)) == (200, 0, {"missed": 1})
            assert await metric(gate, "kvroute_copy_bytes_total", tier="cross_datacenter") is None
            await check_nothing_held(gate)

    uvloop.run(main())


def test_a_copy_over_a_cut_link_times_out() -> None:
    """The transfer from the other site stalls; the home instance stops waiting after its timeout and computes the
    prompt."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            await ask(gate, TOKENS)
            await gate.command("far0", "wan", share=0)
            response = await ask(gate, [*TOKENS, 1, 2, 3])
            assert (response.status, cached(response), await copies(gate)) == (200, 0, {"missed": 1})
            await check_nothing_held(gate)

    uvloop.run(main())


def test_a_failed_prefill_with_a_copy_is_retried_without_it() -> None:
    """The core orders a copy for the second instance too; the gateway does not carry it out."""

    async def main() -> None:
        async with two_sites(SERIAL) as gate:
            await ask(gate, TOKENS[:SEEN])
            await gate.command("far0", leg="prefill", fail_next=1, status=500)
            response = await ask(gate, TOKENS)
            assert (response.status, cached(response)) == (200, 0)
            assert await copies(gate) == {"given_up": 1, "left_out": 1}
            await check_nothing_held(gate)

    uvloop.run(main())


def _at_source(gate: Rig) -> bool:
    return gate.gateway.runtime.engines["prefill0"].in_flight > 0


def _at_target(gate: Rig) -> bool:
    return any(gate.fleet.servers[name].engine.waiting for name in REMOTE_INSTANCES)


@pytest.mark.parametrize(
    "reached", [_at_source, pytest.param(_at_target, marks=pytest.mark.slow)], ids=["first leg", "in transfer"]
)
def test_a_client_that_disconnects_ends_the_copy(reached: Callable[[Rig], bool]) -> None:
    """Nothing stays booked, both while the prefix is requested and while it is transferred."""

    async def main() -> None:
        async with two_sites(SERIAL, kv_timeout_s=30.0) as gate:
            await ask(gate, TOKENS[:SEEN])
            if reached is _at_source:
                await gate.command("prefill0", leg="prefill", fail_next=1, status="hang")
            else:
                await gate.command("far0", "wan", share=0)
            request = asyncio.create_task(ask(gate, TOKENS))
            await until(lambda: reached(gate))
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            await check_nothing_held(gate)
            assert await copies(gate) == {"given_up": 1}
            held = [server.engine.held for server in gate.fleet.servers.values()]
            assert sum(map(len, held)) == (reached is _at_target), "KV that was offered is held until it expires"

    uvloop.run(main())


FAULT_PLANS = st.fixed_dictionaries(
    {
        "leg": st.sampled_from(["prefill", "decode", "transfer"]),
        "fail_next": st.integers(1, 2),
        "status": st.sampled_from([400, 500, 503, "reset"]),
    }
)


@settings(max_examples=8, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*REMOTE_INSTANCES, "prefill0", "decode0"]), FAULT_PLANS, max_size=3),
    st.booleans(),
    st.booleans(),
)
@example({"prefill0": {"leg": "transfer", "fail_next": 2, "status": 500}}, True, False)
def test_after_any_failures_every_request_ends_once_and_nothing_is_booked(
    faults: dict[str, Any], stream: bool, early: bool
) -> None:
    """Each request gets a correct response or an error; links and engines are as free as before, and each copy has one
    outcome."""

    async def main(log: str) -> None:
        async with two_sites(f"{EARLY if early else SERIAL}  log: {{events: {log}}}\n") as gate:
            await ask(gate, TOKENS[:SEEN])
            await ask(gate, [7, *TOKENS])
            for name, fault in faults.items():
                await gate.command(name, **fault)
            starts = (TOKENS[:SEEN], [7, *TOKENS])
            prompts = [[*starts[n % 2], *range(9_000, 9_000 + 20 * n + 1_500 * (n % 3))] for n in range(6)]
            responses = await asyncio.gather(*[ask(gate, prompt, stream=stream) for prompt in prompts])
            await check_nothing_held(gate)
            for prompt, response in zip(prompts, responses, strict=True):
                assert response.status in (200, 400, 502, 503, 504)
                if response.status == 200 and not any("error" in event for event in response.events):
                    assert response.text == await gate.direct("decode1", prompt)
            ends = await copies(gate)
        ordered = [
            d.copy_id for r in read_log(Path(log))[1] for d in r.decisions if isinstance(d, Prefill) and d.copy_from
        ]
        assert sum(ends.values()) == len(ordered) == len(set(ordered))

    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(main(f"{folder}/events.log"))
