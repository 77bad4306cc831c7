"""Requests that one decode engine serves aggregated because that is cheaper than a pair, through the whole gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.serve.rig import CLUSTER, rig
from tests.serve.stub_engines import (
    Engine,
    Gate,
    completion,
    failing,
    run,
    sent_to_decode,
    stub_rig,
    tokens,
)

from kvroute.control import decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.topology import parse
from kvroute.types import Decode, Prefill

JOINT = "  policy: foresight-joint\n  parameters: {aggregated: 1}\n"
SLOW = (
    CLUSTER.replace("base: 1 ms", "base: 50 ms")
    .replace(
        "timing:\n",
        """timing:
  slow: {prefill: {kind: linear, per_token: 1 ms, base: 1 ms}, decode: {base: 2 ms, per_request: 10 us}}
""",
    )
    .replace("role: decode, gpus", "role: decode, timing: slow, gpus")
)
"""Decode instances take 1 ms per token of a prompt, prefill instances 50 ms for any prompt."""
SHORT, LONG = "a", "What is a KV cache? " * 200


@pytest.mark.parametrize("streams", [True, False])
def test_a_short_prompt_goes_to_a_decode_instance_and_a_long_one_to_a_pair(tmp_path: Path, streams: bool) -> None:
    """The responses are those of the engine itself. The log has one decision for the one and two for the other, and
    replays bit for bit."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with rig(f"{JOINT}  log: {{events: {log}}}\n", SLOW) as gate:
            prefills = [gate.fleet.servers[name].engine.counters for name in ("prefill0", "prefill1")]
            response = await gate.ask(SHORT, stream=streams)
            assert (response.status, response.text) == (200, await gate.direct("decode0", SHORT))
            assert sum(counters.prompt_tokens for counters in prefills) == 0
            response = await gate.ask(LONG, stream=streams)
            assert (response.status, response.text) == (200, await gate.direct("prefill0", LONG))
            assert sum(counters.prompt_tokens for counters in prefills) >= 200
            assert await gate.becomes_idle(), gate.held_resources()
            page = await gate.metrics()
            assert ('aggregated"' in page) is streams

    uvloop.run(main())
    header, records = read_log(log)
    kept = list(records)
    made = [tuple(type(decision) for decision in record.decisions) for record in kept if record.decisions]
    assert made == [(Decode,), (Prefill,), (Decode,)]
    again = replay(header.spec.build(parse(SLOW)), kept)
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)


def test_the_cached_prefix_of_a_decode_instance_is_used() -> None:
    """The second request with a long prompt goes to the decode instance that has it from the first one."""

    async def main() -> None:
        async with rig(JOINT, SLOW) as gate:
            prefills = [gate.fleet.servers[name].engine.counters for name in ("prefill0", "prefill1")]
            first = await gate.ask(LONG)
            computed = sum(counters.prompt_tokens for counters in prefills)
            assert computed > 0
            assert (await gate.ask(LONG)).text == first.text
            assert sum(counters.prompt_tokens for counters in prefills) == computed
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())


def test_no_request_is_aggregated_if_that_is_switched_off() -> None:
    async def main() -> None:
        async with rig("  policy: foresight-joint\n  parameters: {aggregated: 0}\n", SLOW) as gate:
            assert (await gate.ask(SHORT)).status == 200
            assert sum(gate.fleet.servers[f"prefill{n}"].engine.counters.prompt_tokens for n in (0, 1)) > 0

    uvloop.run(main())


def engines() -> tuple[list[Engine], list[Engine]]:
    """Return a prefill engine and two decode engines."""
    return [Engine("prefill0", "prefill")], [Engine(f"decode{n}", "decode") for n in (0, 1)]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fault", [500, 503])
def test_another_decode_instance_replaces_one_that_fails(streams: bool, fault: int) -> None:
    """Both get the client's request unchanged; the prefill instance gets nothing."""

    async def main() -> None:
        prefill, decode = engines()
        decode[0].serve = failing(fault)
        async with stub_rig([*prefill, *decode], JOINT) as front:
            body = completion(prompt="a", stream=streams)
            assert (await front.post(body)).status == 200
            assert [received.json for engine in decode for received in engine.received] == [sent_to_decode(body)] * 2
            assert not prefill[0].received
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_disconnects_releases_the_decode_instance(streams: bool) -> None:
    async def main() -> None:
        prefill, decode = engines()
        gate = Gate()
        for engine in decode:
            engine.serve = gate.before(tokens)
        async with stub_rig([*prefill, *decode], JOINT) as front:
            task = asyncio.create_task(front.post(completion(prompt="a", stream=streams)))
            await gate.entered.wait()
            pending: Any = front.gateway.runtime.control.loads(front.gateway.now())
            assert sum(load.queued for load in pending.values()) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await gate.left.wait()
            assert gate.cancelled
            assert await front.becomes_idle(), front.held_resources()
            assert not prefill[0].received

    run(main())


def test_requests_are_served_without_a_prefill_instance() -> None:
    """The only prefill instance fails: requests go to decode instances alone."""

    async def main() -> None:
        prefill, decode = engines()
        prefill[0].serve = failing(500)
        async with stub_rig([*prefill, *decode], f"{JOINT}  breaker: {{failures: 1}}\n") as front:
            statuses = [(await front.post(completion(prompt=f"{n} " * 2_000))).status for n in range(6)]
            assert statuses == [200] * 6
            assert await front.becomes_idle(), front.held_resources()

    run(main())


@pytest.mark.parametrize("streams", [True, False])
def test_a_prefill_instance_goes_on_to_decode(tmp_path: Path, streams: bool) -> None:
    """Without load, a transfer is never worth it. The decode instances, whose prompts take longer, get nothing."""
    log = tmp_path / "events.log"

    async def main() -> None:
        async with rig(f"  policy: foresight-joint\n  log: {{events: {log}}}\n", SLOW) as gate:
            assert (await gate.ask(LONG, stream=streams)).text == await gate.direct("prefill0", LONG)
            decodes = [gate.fleet.servers[name].engine.counters for name in ("decode0", "decode1")]
            assert sum(counters.prompt_tokens for counters in decodes) == 0
            assert await gate.becomes_idle(), gate.held_resources()

    uvloop.run(main())
    header, records = read_log(log)
    kept = list(records)
    (made,) = [record.decisions for record in kept if record.decisions]
    prefill, decode = made
    assert isinstance(prefill, Prefill)
    assert isinstance(decode, Decode)
    assert decode.source == decode.target == prefill.instance
    again = replay(header.spec.build(parse(SLOW)), kept)
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)
