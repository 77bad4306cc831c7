"""Load generator for one server with a time limit: response times, response rate, and delays of streamed chunks.

Closed loop: each connection has one request in flight. `python -m bench.gateway.load URL` prints one line of JSON.
`--weigh PID` adds the CPU time that this session used, sampled at the exact ends of the measured time; of several
sessions, each one's and the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop
from bench.gateway.mock_worker import MODEL
from bench.gateway.program import session_cpu_s

from kvroute.load import LoadClient

CHAT = "/v1/chat/completions"
WARMUP_S = 1.0
ANSWER_S = 30.0
PROMPTS, GROUPS = 512, 16
"""Number of different prompts, and of the prefixes that they share."""
SHARED = 0.75
"""Shared part of a prompt's characters."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load: a number of connections, each at a given rate or as fast as possible."""

    connections: int = 1
    seconds: float = 5.0
    rate_per_s: float = 0.0
    """Rate of all connections together; 0: each connection sends the next request after the response."""
    stream_tokens: int = 0
    """Number of chunks of a streamed response; 0: responses are not streamed."""
    prompt_chars: int = 2_000


@dataclass(slots=True)
class Tally:
    """Figures of one measured interval, in nanoseconds."""

    answer_ns: list[int] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)
    chunk_ns: list[int] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    def fail(self, why: str) -> None:
        """Count one invalid response."""
        self.failed[why] = self.failed.get(why, 0) + 1


def bodies(plan: Plan, seed: int = 0) -> list[bytes]:
    """Return chat requests of `prompt_chars` characters; three quarters are shared with others of their group."""
    draw = random.Random(seed)
    shared = [_words(draw, int(plan.prompt_chars * SHARED)) for _ in range(GROUPS)]
    made = []
    for number in range(PROMPTS):
        prefix = shared[number % GROUPS]
        text = prefix + _words(draw, plan.prompt_chars - len(prefix))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": plan.stream_tokens or 16,
            "ignore_eos": True,  # engines that end by themselves would send fewer tokens
            "stream": bool(plan.stream_tokens),
        }
        made.append(msgspec.json.encode(body))
    draw.shuffle(made)
    return made


def _words(draw: random.Random, size: int) -> str:
    return " ".join("".join(draw.choices("etaoinshrdlu", k=5)) for _ in range(size // 6 + 1))[:size]


class Loop:
    """The load of one connection."""

    def __init__(self, client: LoadClient, plan: Plan, requests: Sequence[bytes], number: int) -> None:
        self._client, self._plan, self._requests, self._number = client, plan, requests, number
        self._tally, self._written_ns, self._first = Tally(), 0, False

    async def run(self, tally: Tally, until: float) -> None:
        """Send requests until this time; add the figures to `tally`."""
        plan, self._tally = self._plan, tally
        every_s = plan.connections / plan.rate_per_s if plan.rate_per_s else 0.0
        due = time.monotonic() + every_s * (self._number % plan.connections) / plan.connections
        while time.monotonic() < until:
            if every_s:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += every_s
            body = self._requests[self._number % len(self._requests)]
            self._number += plan.connections
            await self._one(body)

    async def _one(self, body: bytes) -> None:
        self._first = True
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._client.post(CHAT, body, self._feed, self._sent)
        except (OSError, TimeoutError) as error:
            self._tally.fail(type(error).__name__)
            await asyncio.sleep(0.05)
            return
        if status == 200:
            self._tally.answer_ns.append(time.monotonic_ns() - self._written_ns)
        else:
            self._tally.fail(f"status {status}")
            await asyncio.sleep(0.05)

    def _sent(self) -> None:
        self._written_ns = time.monotonic_ns()

    def _feed(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._first:
            self._first = False
            self._tally.first_ns.append(now - self._written_ns)
        at = data.find(b'"t":')
        while at >= 0 and (end := data.find(b"}", at)) >= 0:
            self._tally.chunk_ns.append(now - int(data[at + 4 : end]))
            at = data.find(b'"t":', end)


async def measure(url: str, plan: Plan, weigh: Sequence[int]) -> dict[str, object]:
    """Return the figures of one load, with times in microseconds."""
    client, requests = LoadClient(url), bodies(plan)
    loops = [Loop(client, plan, requests, number) for number in range(plan.connections)]
    await _together(loops, Tally(), WARMUP_S)
    tally = Tally()
    before_s = [session_cpu_s(leader) for leader in weigh]
    own_s, started = time.process_time(), time.monotonic()
    await _together(loops, tally, plan.seconds)
    wall_s = time.monotonic() - started
    each_s = [session_cpu_s(leader) - before for leader, before in zip(weigh, before_s, strict=True)]
    cpu_s = sum(each_s)
    own_s = time.process_time() - own_s
    client.close()
    answers, chunks = len(tally.answer_ns), len(tally.chunk_ns)
    return {
        "answers": answers,
        "failed": tally.failed,
        "answers_per_s": answers / wall_s,
        "answer_us": quantiles_us(tally.answer_ns),
        "first_us": quantiles_us(tally.first_ns),
        "chunk_us": quantiles_us(tally.chunk_ns),
        "chunks_per_s": chunks / wall_s,
        "cpu_us_per_answer": cpu_s / answers * 1e6 if answers else None,
        "cpu_us_of_each": [used_s / answers * 1e6 for used_s in each_s] if answers else None,
        "cpu_us_per_chunk": cpu_s / chunks * 1e6 if chunks else None,
        "cpu_share": cpu_s / wall_s,
        "client_cpu_share": own_s / wall_s,
    }


async def _together(loops: Sequence[Loop], tally: Tally, seconds: float) -> None:
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for loop in loops:
            group.create_task(loop.run(tally, until))


def quantiles_us(values_ns: Sequence[int]) -> dict[str, float] | None:
    """Return median and 99th percentile in microseconds; None for fewer than two values."""
    if len(values_ns) < 2:
        return None
    cuts = statistics.quantiles(values_ns, n=100, method="inclusive")
    return {"p50": cuts[49] / 1e3, "p99": cuts[98] / 1e3}


def main() -> None:
    """Measure once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second of all; 0: as fast as they come")
    parser.add_argument("--stream-tokens", type=int, default=0)
    parser.add_argument("--prompt-chars", type=int, default=2_000)
    parser.add_argument("--weigh", type=int, action="append", default=[], help="session whose CPU time is taken")
    given = parser.parse_args()
    plan = Plan(given.connections, given.seconds, given.rate, given.stream_tokens, given.prompt_chars)
    print(json.dumps(uvloop.run(measure(given.url, plan, given.weigh))))


if __name__ == "__main__":
    main()
