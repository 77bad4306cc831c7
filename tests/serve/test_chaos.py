"""Chaos test in one event loop: legs fail, clients disconnect, instances restart, cluster files are reloaded.

Every client gets its own complete response, or an error that reports the failure, exactly once. A retry saves every
request that it can save. Nothing remains held in the gateway, the core or the engines. The event log replays to the
same decisions.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.rig import CLUSTER, COMPLETIONS, MODEL, Rig, rig, with_section
from tests.waiting import becomes_true

from kvroute.control import ControlSpec, decisions_equal, replay
from kvroute.control.log import read_log
from kvroute.emulator.engine.faults import Fault, Where
from kvroute.http.client.call import Call
from kvroute.http.server.exchange import Exchange
from kvroute.serve.assembly import Deployment
from kvroute.serve.proxy.completion.request import ProxiedRequest
from kvroute.serve.proxy.legs.leg import Leg
from kvroute.topology import parse
from kvroute.types import Arrived, Decode, DecodeFailed, Prefill, PrefillFailed, PrefillFinished, Request

TEXT = CLUSTER.replace(
    "gateway:",
    '  - {name: prefill2, role: prefill, gpus: "node1:4-5"}\n  - {name: decode2, role: decode, gpus: "node1:6-7"}\n'
    "gateway:",
)
"""Three instances of each role, so that one may be down while another one fails."""
NAMES = tuple(f"{role}{number}" for role in ("prefill", "decode") for number in range(3))
SHORT_TIMEOUTS = """
  timeouts: {connect: 1 s, prefill: 1 s, first_token: 1 s, answer: 1 s, between_tokens: 1 s}
  health: {interval: 50 ms, timeout: 5 s, failures: 2}
  breaker: {failures: 50, open: 100 ms}
  retries: {attempts: 30, floor_per_s: 1000}
"""
"""A silent engine times out soon, retries are almost unlimited, and an instance is down only when its port is closed:
all components share one loop, so that a busy machine makes all of them slow."""
TOKENS = 10
PROMPTS = tuple(f"{number} " + "What goes up must come down. " * (2 + 9 * number) for number in range(12))


@dataclass(slots=True)
class LoadGenerator:
    """Clients that send one request after the other and check the responses; random choices come from a seeded
    generator."""

    gate: Rig
    expected: Sequence[str]
    """The response of a single engine to each prompt."""
    draw: random.Random
    disconnect_share: float = 0.0
    """Share of clients that disconnect before the end."""
    outcomes: Counter[str] = field(default_factory=Counter)
    on_request_end: Callable[[int], None] | None = None
    """Called after each request with the number of requests that have ended."""

    async def send(self, requests: int, clients: int) -> None:
        """Send this number of requests from this number of concurrent clients."""
        turns = iter(range(requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(turns))

    async def _client(self, turns: Any) -> None:
        for _ in turns:
            await self._send_one()
            if self.on_request_end is not None:
                self.on_request_end(self.outcomes.total())

    async def _send_one(self) -> None:
        number, streams = self.draw.randrange(len(PROMPTS)), self.draw.random() < 0.7
        disconnects = self.draw.random() < self.disconnect_share
        body = {"model": MODEL, "prompt": PROMPTS[number], "max_tokens": TOKENS, "stream": streams}
        if disconnects:
            body |= {"prompt": PROMPTS[number] * 5, "max_tokens": 2_000, "ignore_eos": True}
            await self._disconnect(body, self.draw.randrange(4) if streams else 0)
            self.outcomes["disconnected"] += 1
            return
        response = await self.gate.post(body)
        if response.status != 200:
            self.outcomes[f"error {response.status}: {response.json['error']['message']}"] += 1
            return
        events = response.events or [response.json]
        text = "".join(choice["text"] for event in events for choice in event.get("choices", []))
        if "error" in events[-1]:
            assert streams
            assert 0 < len(text) < len(self.expected[number])
            assert self.expected[number].startswith(text)
            self.outcomes["incomplete"] += 1
        else:
            assert text == self.expected[number]
            assert response.body.endswith(b"data: [DONE]\n\n") is streams
            self.outcomes["complete"] += 1

    async def _disconnect(self, body: Any, events: int) -> None:
        """Disconnect after this number of events; if 0, as soon as the first leg or the transfer has started."""
        if events:
            async with self.gate.session.post(self.gate.url + COMPLETIONS, json=body) as response:
                for _ in range(events):
                    if not response.content.at_eof():
                        await response.content.readline()
                response.close()
            return
        gateway, transfers = self.gate.gateway, self.draw.random() < 0.7
        proxied_requests = gateway.runtime.requests
        before = set(proxied_requests)
        request = asyncio.create_task(self.gate.post(body))
        while not request.done() and before.issuperset(proxied_requests):
            await asyncio.sleep(0)
        own_requests = set(proxied_requests) - before

        def is_transferring() -> bool:
            moving = gateway.state.tick(gateway.now(), 0).transfers
            return any(transfer.request_id in own_requests and transfer.took_s is None for transfer in moving)

        while transfers and not request.done() and not is_transferring():
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def expected_responses(gate: Rig) -> list[str]:
    """Return the response of one engine to each prompt, without the gateway."""
    return [await gate.direct("decode0", prompt, TOKENS) for prompt in PROMPTS]


async def check_nothing_held(gate: Rig) -> None:
    """Check that nothing is held in the gateway, in the core or in the engines, client connections included."""
    assert await gate.becomes_idle(), gate.held_resources()
    await gate.session.close()
    assert await becomes_true(lambda: not any(gate.counted_loads(gate.fleet))), gate.counted_loads(gate.fleet)
    assert all(line.endswith(" 0") for line in metric_lines(gate, "kvroute_transfers_in_flight"))
    gc.collect()
    kept = Counter(type(obj).__name__ for obj in gc.get_objects() if isinstance(obj, ProxiedRequest | Leg | Exchange))
    assert not kept
    # Health checks and scrapes continue, at most one of each per instance.
    assert sum(isinstance(obj, Call) for obj in gc.get_objects()) <= 2 * len(NAMES)


def metric_lines(gate: Rig, name: str) -> list[str]:
    """Return the lines of one metric."""
    text = "".join(gate.gateway.metrics.page("")[1])
    return [line for line in text.splitlines() if line.startswith(name)]


def check_replay(log: Path) -> Counter[str]:
    """Replay the log, check each decision, and return the number of events by kind."""
    header, records = read_log(log)
    control = header.spec.build(parse(header.cluster))
    kinds: Counter[str] = Counter()
    at = 0.0
    for record, again in replay(control, records):
        kinds[type(record.event).__name__] += 1
        at = record.event.at
        assert decisions_equal(record.decisions, again)
    assert control.in_flight == 0
    assert all(load.pending_s == load.queued == 0 for load in control.loads(at).values())
    return kinds


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@given(policy=st.sampled_from(["netkv", "round-robin"]), turns=st.integers(4, 9))
def test_instances_that_failed_a_request_are_retried_last(leg: str, policy: str, turns: int) -> None:
    """A dead instance that is still marked up is idle, and without this rule it would be chosen again in the second
    round."""
    control = ControlSpec(decode=policy).build(parse(TEXT))
    decisions = control.handle(Arrived(0.0, Request(id=0, input_tokens=1000, max_output_tokens=16)))
    tried = []
    if leg == "decode":
        decisions = control.handle(PrefillFinished(0.1, 0))
    for turn in range(turns):
        match decisions:
            case (Prefill(instance=name),) if leg == "prefill":
                tried.append(name)
                decisions = control.handle(PrefillFailed(0.2 + turn, 0))
            case (Decode(target=name),):
                tried.append(name)
                decisions = control.handle(DecodeFailed(0.2 + turn, 0))
    assert len(tried) == turns
    assert all(len(set(tried[first : first + 3])) == 3 for first in range(turns - 2))


@pytest.mark.slow
def test_chaos_no_request_is_lost_and_nothing_leaks(tmp_path: Path) -> None:
    """Each leg may fail with every kind of fault, engines restart, and one client in ten disconnects."""
    log = tmp_path / "events.log"

    async def run() -> None:
        async with rig(f"{SHORT_TIMEOUTS}  log: {{events: {log}}}\n", TEXT) as gate:
            draw = random.Random(7)
            generator = LoadGenerator(gate, await expected_responses(gate), draw, disconnect_share=0.1)
            legs: list[Where] = ["prefill", "decode", "decode", "transfer"]
            failures: list[int | Literal["reset", "hang"]] = [500, 503, 429, "reset", "reset", "hang"]

            def inject_faults(ended: int) -> None:
                if ended % 4 == 0:
                    leg, status, tokens = draw.choice(legs), draw.choice(failures), draw.choice([0, 0, 2, 5])
                    # KV is sent by the engine that computed it.
                    name = f"{'decode' if leg == 'decode' else 'prefill'}{draw.randrange(3)}"
                    fault = Fault(fail_next=1, leg=leg, status=status, after_tokens=tokens)
                    gate.fleet.servers[name].faults.schedule(fault)
                if ended % 50 == 0:
                    due.release()

            async def restarts() -> None:
                # The next restart waits for the end of the one before: however fast the machine is, no two instances
                # of a role are down at the same time.
                for name in draw.sample(NAMES, 4):
                    await due.acquire()
                    gate.fleet.servers[name].restart(1e4)
                    assert await gate.becomes(name, up=False)
                    await gate.fleet.servers[name].come_back()
                    assert await gate.becomes(name, up=True)

            due = asyncio.Semaphore(0)
            generator.on_request_end = inject_faults
            await asyncio.gather(generator.send(requests=220, clients=12), restarts())
            assert generator.outcomes.total() == 220
            assert set(generator.outcomes) <= {"complete", "incomplete", "disconnected"}, generator.outcomes
            assert generator.outcomes["complete"] > 150
            await check_nothing_held(gate)

    uvloop.run(run())
    kinds = check_replay(log)
    assert 200 < kinds["Arrived"] == kinds["Finished"]
    assert min(kinds["PrefillFailed"], kinds["DecodeFailed"], kinds["InstanceDown"], kinds["InstanceUp"]) > 0


def test_chaos_reloads_under_load_fail_no_request() -> None:
    """Each policy becomes active while requests of the previous one are in flight; an instance is removed and added
    again."""

    async def run() -> None:
        async with rig(SHORT_TIMEOUTS, TEXT) as gate:
            endpoints = gate.fleet.ready().instances
            smaller = TEXT.replace('  - {name: decode2, role: decode, gpus: "node1:6-7"}\n', "")
            texts = (with_section(SHORT_TIMEOUTS + "  policy: round-robin\n", smaller), TEXT + SHORT_TIMEOUTS)
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(3))
            reloads: set[asyncio.Task[bool]] = set()
            retired = [gate.gateway.runtime]

            async def read(text: str) -> bool:
                taken = await gate.gateway.reload(lambda: Deployment.of(text, "new.yaml", endpoints=endpoints))
                retired.append(gate.gateway.runtime)
                return taken

            def schedule_reload(ended: int) -> None:
                if ended % 15 == 0:
                    reloads.add(asyncio.create_task(read(texts[ended // 15 % 2])))

            generator.on_request_end = schedule_reload
            await generator.send(requests=100, clients=10)
            assert generator.outcomes == {"complete": 100}
            assert [await task for task in reloads] == [True] * 6
            for runtime in retired:
                assert not runtime.requests
                assert runtime.control.in_flight == 0
                assert all(engine.in_flight == 0 for engine in runtime.engines.values())
            await check_nothing_held(gate)

    uvloop.run(run())


def test_chaos_a_drain_answers_all_admitted_requests() -> None:
    """Queued requests are answered too, while legs fail."""

    async def run() -> None:
        section = "  retries: {attempts: 8, floor_per_s: 1000}\n  limits: {in_flight: 4, queue: 40}\n"
        async with rig(section, TEXT) as gate:
            generator = LoadGenerator(gate, await expected_responses(gate), random.Random(5))
            for name in NAMES:
                gate.fleet.servers[name].faults.schedule(Fault(fail_next=1, status="reset"))
            gate.slow(20)
            sending = asyncio.create_task(generator.send(requests=24, clients=24))
            while gate.gateway.state.tick(gate.gateway.now()).load.queued < 20:
                await asyncio.sleep(0)
            gate.slow(1)
            await gate.gateway.drain()
            await sending
            assert generator.outcomes == {"complete": 24}
            await check_nothing_held(gate)

    uvloop.run(run())
