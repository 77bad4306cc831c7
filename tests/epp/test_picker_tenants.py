"""Rates, turns and deadlines of requests that Envoy relays."""

from __future__ import annotations

import asyncio

from tests.epp.envoy_rig import alone, completion_body, picker
from tests.serve.stub_engines import run
from tests.waiting import becomes_true

from kvroute.serve.api.api_keys import hash_text


def test_rejections_are_429_with_the_time_to_wait() -> None:
    """Above the rate of its key, and if the first token would come too late; both are immediate responses."""

    async def main() -> None:
        section = f"  keys: {{known: {{a: '{hash_text('one')}', b: '{hash_text('two')}'}}, classes: {{a: small}}}}\n"
        section += "  classes: {small: {requests_per_minute: 1}, default: {slo: {header: true}}}\n"
        async with picker(alone(), section) as rig:
            one, two = [("authorization", "Bearer one")], [("authorization", "Bearer two")]
            assert (await rig.through({"model": "llama-3-70b", "prompt": "hello", "max_tokens": 3}, headers=one))[
                0
            ] == 200
            refused = await rig.stream().ask(completion_body(), headers=one)
            assert refused.status == 429
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            assert int(refused.headers["retry-after"]) >= 1
            late = await rig.stream().ask(completion_body(), headers=[*two, ("x-slo-ttft-ms", "0.001")])
            assert late.status == 429
            assert b"first token is expected" in late.body
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())


def test_a_key_pays_the_reserve_for_an_output_that_the_picker_does_not_see() -> None:
    async def main() -> None:
        section = f"  keys: {{known: {{a: '{hash_text('one')}'}}}}\n  classes: {{default: {{tokens_per_minute: 60}}}}\n"
        async with picker(alone(), section) as rig:
            one, body = [("authorization", "Bearer one")], {"model": "llama-3-70b", "prompt": "hello", "max_tokens": 50}
            assert (await rig.through(body, headers=one))[0] == 200
            assert await rig.becomes_idle(), rig.held_resources()
            refused = await rig.stream().ask(completion_body(prompt="hello", max_tokens=50), headers=one)
            assert refused.status == 429
            assert b"tokens" in refused.body

    run(main())


def test_a_waiting_request_is_picked_in_its_turn() -> None:
    """Envoy gets the endpoint when the request before it has ended; one that Envoy ends while it waits is forgotten."""

    async def main() -> None:
        async with picker(alone(), "  fair_queue: {running: 1}\n") as rig:
            first = rig.stream()
            assert (await first.ask(completion_body())).destination
            gone, second = rig.stream(), rig.stream()
            await gone.ask_only(completion_body())
            placement = rig.gateway.runtime.placement
            assert placement is not None
            assert await becomes_true(lambda: placement.depths() == {0: 1})
            await second.ask_only(completion_body())
            assert await becomes_true(lambda: placement.depths() == {0: 2})
            gone.call.cancel()
            assert await becomes_true(lambda: placement.depths() == {0: 1})
            answer = asyncio.ensure_future(second.answer(True))
            await first.respond(200)
            await first.end()
            assert (await answer).destination
            second.call.cancel()
            assert await rig.becomes_idle(), rig.held_resources()

    run(main())
