"""Requests that make every engine return 500, together with other clients' requests: `python -m bench.gateway.poison`.

The gateway has its default settings and four emulated engines (2 prefill, 2 decode). Every second a number of poison
requests is sent at once, while other clients send ordinary requests at a steady rate. The bench counts the failed
requests of the other clients: a request that no engine can process must not make engines unavailable to others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from bench.gateway.program import Program, served
from bench.measurement import ROOT, Failed, Row, show

from kvroute.load import ReplayedResponse, TimedRequest, replay_trace

EXAMPLE = ROOT / "examples" / "small.yaml"
MARKER = "POISON"
TOKENS = 8
POISON_PER_S = (10, 3, 2)


@dataclass(frozen=True, slots=True)
class Mix:
    """The load and its duration."""

    poison_per_s: int = 10
    normal_per_s: int = 20
    seconds: int = 15
    leg: str = "any"
    """Leg of a poison request that the engines fail: `prefill`, `decode` or `any`."""
    spread: bool = False
    """Poison requests are sent evenly over each second, not all at its start."""
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Number of requests by HTTP status; 0: the connection broke or the stream ended with an error."""

    mix: Mix
    normal: Counter[int]
    poison: Counter[int]
    breaker_openings: int

    @property
    def failed_share(self) -> float:
        """Share of the other clients' requests without a successful response."""
        return 1.0 - self.normal[200] / self.normal.total()


def requests(mix: Mix) -> Iterator[tuple[TimedRequest, bool]]:
    """Yield all requests in order of time, and whether each is poison."""
    for second in range(mix.seconds):
        due = [(second + number / mix.normal_per_s, False) for number in range(mix.normal_per_s)]
        poison = range(mix.poison_per_s)
        due += [(second + number / mix.poison_per_s if mix.spread else float(second), True) for number in poison]
        for at_s, poisoned in sorted(due):
            text = f"{MARKER if poisoned else 'plain'} {at_s} " + "What is a KV cache? " * 10
            fields = {
                "model": "llama-3-70b",
                "prompt": text,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": mix.stream,
            }
            yield TimedRequest(at_s, msgspec.json.encode(fields)), poisoned


async def run(mix: Mix) -> Outcome:
    """Run one mix against a separate gateway. Raises Failed if that does not start."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.json")
        command = [str(Path(sys.executable).with_name("kvroute")), "serve", "--embedded", str(EXAMPLE)]
        command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        with Program(command, name="kvroute") as program:
            addresses = await served(ready, program)
            async with aiohttp.ClientSession() as session:
                await _order(mix, addresses["admin"], session)
                sampling = asyncio.create_task(_openings(addresses["admin"], session))
                planned = list(requests(mix))
                answers = await replay_trace(addresses["url"], [request for request, _ in planned], timeout_s=60.0)
                sampling.cancel()
                (openings,) = await asyncio.gather(sampling)
    counts: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for answer, (_, poisoned) in zip(answers, planned, strict=True):
        counts[poisoned][_status(answer, mix)] += 1
    return Outcome(mix, counts[False], counts[True], openings)


def _status(answer: ReplayedResponse, mix: Mix) -> int:
    if answer.status == 200 and mix.stream:
        return 200 if answer.ok else 0
    return answer.status or 0


async def _order(mix: Mix, admin: str, session: aiohttp.ClientSession) -> None:
    """Make every engine fail the requests with the marker."""
    async with session.get(f"{admin}/state") as answer:
        engines = [instance["url"] for instance in (await answer.json())["layout"]["instances"]]
    for engine in engines:
        fault = {"prompt_contains": MARKER, "status": 500, "leg": mix.leg}
        async with session.post(f"{engine}/emulator/fault", json=fault) as answer:
            if answer.status != 200:
                raise Failed(f"the fault was not taken: {await answer.text()}")


async def _openings(admin: str, session: aiohttp.ClientSession) -> int:
    """Count the openings of circuit breakers until cancelled; polls ten times a second."""
    before: set[str] = set()
    count = 0
    try:
        while True:
            async with session.get(f"{admin}/metrics") as answer:
                page = await answer.text()
            states = [line for line in page.splitlines() if line.startswith("kvroute_breaker_state{")]
            now = {line.split("}")[0] for line in states if line.endswith((" 2", " 2.0"))}
            count += len(now - before)
            before = now
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return count


def rows(outcome: Outcome) -> list[Row]:
    """Return the figures of one mix."""
    mix = outcome.mix
    return [
        Row(
            measure=f"{mix.poison_per_s} poison requests/s ({mix.leg}): share of other clients' requests that failed",
            unit="%",
            better="lower",
            ours=100 * outcome.failed_share,
            target=0.0,
            note=f"others {dict(outcome.normal)}, poison {dict(outcome.poison)}; "
            f"breakers opened {outcome.breaker_openings} times",
        )
    ]


def main() -> None:
    """Run one mix for each poison rate; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    mix = Mix()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--poison-per-s", type=int, nargs="+", default=POISON_PER_S)
    parser.add_argument("--normal-per-s", type=int, default=mix.normal_per_s)
    parser.add_argument("--seconds", type=int, default=mix.seconds)
    parser.add_argument("--leg", choices=("any", "prefill", "decode"), default=mix.leg)
    parser.add_argument("--spread", action="store_true", help="poison requests evenly over each second, not at once")
    parser.add_argument("--whole", action="store_true", help="whole answers, no streams")
    given = parser.parse_args()
    all_rows: list[Row] = []
    for rate in given.poison_per_s:
        mix = Mix(rate, given.normal_per_s, given.seconds, given.leg, given.spread, not given.whole)
        all_rows += rows(uvloop.run(run(mix)))
    show(all_rows, given.json)


if __name__ == "__main__":
    main()
