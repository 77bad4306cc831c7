"""kvroute under faults: 10,000 requests, failing legs, clients that disconnect, instances that restart.

`python -m bench.gateway.chaos`. Engines return status 500, break the connection before or during a response, or send
nothing; every few seconds one of them restarts. Each client checks its response: every token once and in order, or an
error that reports the failure. Afterwards nothing may remain: no request in flight, no leg, no transfer, no connection,
no memory. A replay of the event log must give the same decisions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from bench.gateway.contenders import CONTENDERS, OTHER_CPUS, Place, answering, fetch, fetch_json, kvroute
from bench.gateway.load import Plan, bodies
from bench.gateway.program import Program
from bench.measurement import Failed, Row, show

from kvroute.control import decisions_equal
from kvroute.control import replay as replayed
from kvroute.control.log import read_log
from kvroute.load import LoadClient
from kvroute.topology import parse

CHAT = "/v1/chat/completions"
TOKENS = 16
GIVE_UP_S, SETTLE_S = 60.0, 10.0
PROPER = ("whole", "error", "cut short with an error event", "left")
WARM_SHARE = 0.3
"""Share of the requests after which memory is compared."""
FLAT_SHARE = 0.05
"""Memory is constant if it has grown by at most this share."""
GAUGES = {
    "requests in flight": "kvroute_requests_in_flight",
    "requests queued": "kvroute_requests_queued",
    "requests on instances": "kvroute_instance_requests",
    "transfers": "kvroute_transfers_in_flight",
    "client connections": "kvroute_client_connections",
    "prefill seconds booked": "kvroute_prefill_pending_seconds",
}
SECTION = {
    "timeouts": {"connect": "1 s", "prefill": "2 s", "first_token": "2 s", "between_tokens": "2 s", "answer": "2 s"},
    "health": {"interval": "500 ms", "timeout": "1 s"},
    "breaker": {"open": "1 s"},
    "log": {"events": "FOLDER/events.jsonl"},
}
"""Short timeouts, so that silent engines are detected within the duration of the bench."""
WATCHERS = 2
"""Maximum connections of an idle gateway to each engine: one for health checks, one for metrics."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Faults and load of a run."""

    requests: int = 10_000
    rate_per_s: float = 200.0
    fault_share: float = 0.01
    """Share of legs with a fault."""
    leave_share: float = 0.01
    """Share of clients that disconnect."""
    restart_every_s: float = 5.0
    down_s: float = 1.0
    reload_every_s: float = 0.0
    """Interval of SIGHUP, which reloads the cluster file; 0: never."""
    calm_s: float = 65.0
    """Idle time after the run, in which connections are closed; the gateway keeps them for a minute."""
    instances: int = 8
    """Number of instances of each role."""
    seed: int = 0
    through: str = "kvroute"
    """Name of the contender; for another one than kvroute only responses and legs are checked."""


@dataclass(slots=True)
class Outcome:
    """Number of requests by kind of end, and the first ten with an unexpected end."""

    kinds: Counter[str] = field(default_factory=Counter)
    improper: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, kind: str, detail: str = "") -> None:
        """Count one finished request."""
        self.kinds[kind] += 1
        if kind not in PROPER and len(self.improper) < 10:
            self.improper.append(f"request {number}: {kind}: {detail[:200]}")


def judged(status: int, data: bytes, number: int, streams: bool) -> tuple[str, str]:
    """Classify a complete HTTP response for its client: return a kind, and a description of the error."""
    if status != 200:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return ("error", "") if json.loads(data)["error"]["message"] else ("error without a message", "")
        return f"status {status} without OpenAI's error", data.decode(errors="replace")
    if not streams:
        answer = json.loads(data)
        return ("whole", "") if answer.get("r") == f"u{number}" else ("another's answer", data.decode())
    events = [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]
    tokens = [json.loads(event) for event in events if event.startswith("{") and not event.startswith('{"error"')]
    if [token["k"] for token in tokens] != list(range(len(tokens))):
        return "tokens lost or repeated", data.decode()
    if any(token["r"] != f"u{number}" for token in tokens):
        return "another's tokens", data.decode()
    if any(event.startswith('{"error"') for event in events):
        return "cut short with an error event", ""
    if len(tokens) == TOKENS and events[-1] == "[DONE]":
        return "whole", ""
    return "cut short without an error event", data.decode()


def request_bodies(scenario: Scenario) -> Iterator[tuple[bytes, bool, float]]:
    """Yield bodies, whether they stream, and after how many seconds their client disconnects (0: never), by seed."""
    draw, prompts = random.Random(scenario.seed), bodies(Plan())
    for number in range(scenario.requests):
        streams = draw.random() < 0.8
        fields = json.loads(prompts[number % len(prompts)])
        fields |= {"stream": streams, "max_tokens": TOKENS, "user": f"u{number}"}
        leaves_s = draw.uniform(0.001, 0.08) if draw.random() < scenario.leave_share else 0.0
        yield msgspec.json.encode(fields), streams, leaves_s


async def clients(url: str, scenario: Scenario, outcome: Outcome) -> None:
    """Send all requests, each at its time regardless of the others."""
    client, started = LoadClient(url), time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for number, (body, streams, leaves_s) in enumerate(request_bodies(scenario)):
                await asyncio.sleep(max(0.0, started + number / scenario.rate_per_s - time.monotonic()))
                group.create_task(_one(client, number, body, streams, leaves_s, outcome))
    finally:
        client.close()


async def _one(client: LoadClient, number: int, body: bytes, streams: bool, leaves_s: float, outcome: Outcome) -> None:
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(leaves_s or GIVE_UP_S):
            status = await client.post(CHAT, body, pieces.append)
    except TimeoutError:
        outcome.add(number, "left" if leaves_s else "no answer")
    except OSError as error:
        outcome.add(number, "broken connection", f"{error}; {len(pieces)} pieces")
    else:
        outcome.statuses[str(status)] += 1
        outcome.add(number, *judged(status, b"".join(pieces), number, streams))


class Observer:
    """Monitors the gateway from outside during the run, and restarts engines."""

    def __init__(self, gateway: Program, workers: Mapping[str, Any], scenario: Scenario) -> None:
        self._gateway, self._scenario = gateway, scenario
        self._control = f"http://127.0.0.1:{workers['control']}"
        self._ports = [*workers["prefill"], *workers["decode"]]
        self._draw = random.Random(scenario.seed + 1)
        self.rss_mb: list[float] = []
        self.sockets_max = 0
        self.restarts = 0

    async def watch(self) -> None:
        """Sample memory and sockets once a second."""
        while True:
            self.rss_mb.append(self._gateway.rss_bytes() / 1e6)
            self.sockets_max = max(self.sockets_max, self._gateway.sockets())
            await asyncio.sleep(1.0)

    async def reload(self) -> None:
        """Send SIGHUP periodically, if enabled."""
        while self._scenario.reload_every_s:
            await asyncio.sleep(self._scenario.reload_every_s)
            self._gateway.send_signal(signal.SIGHUP)

    async def restart(self) -> None:
        """Restart one random engine after the other."""
        while True:
            await asyncio.sleep(self._scenario.restart_every_s)
            port = self._draw.choice(self._ports)
            query = f"port={port}&down_s={self._scenario.down_s}"
            await asyncio.to_thread(fetch_json, f"{self._control}/restart?{query}", "POST")
            self.restarts += 1

    def stats(self) -> dict[str, Any]:
        """Return the engines' counters."""
        counters: dict[str, Any] = fetch_json(self._control + "/stats")
        return counters

    def other_sockets(self) -> int:
        """Return the number of the gateway's sockets, except those to engines."""
        return self._gateway.sockets() - int(self.stats()["connections"])

    def growth_mb(self) -> float:
        """Return resident memory at the end minus that after the warm-up, in MB; means over three seconds each."""
        warm = int(len(self.rss_mb) * WARM_SHARE)
        first, last = self.rss_mb[warm : warm + 3], self.rss_mb[-3:]
        return sum(last) / len(last) - sum(first) / len(first)


async def run_load(url: str, scenario: Scenario, observer: Observer) -> Outcome:
    """Run all requests and faults; return the clients' results."""
    outcome = Outcome()
    beside = [asyncio.ensure_future(work) for work in (observer.watch(), observer.restart(), observer.reload())]
    try:
        await clients(url, scenario, outcome)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return outcome


def left(admin: str, observer: Observer, sockets: int) -> dict[str, float]:
    """Return the resources that the gateway and the engines still hold, after a limited time for releasing them.

    Args:
        admin: the gateway's admin address; empty if it has none that we can read.
        observer: reads the engines' counters.
        sockets: number of the gateway's sockets before the run, except those to engines.
    """
    deadline = time.monotonic() + SETTLE_S
    while any((held := _held(admin, observer, sockets)).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def _held(admin: str, observer: Observer, sockets: int) -> dict[str, float]:
    legs = {"legs in the engines": float(observer.stats()["open"])}
    if not admin:
        return legs
    gauges: defaultdict[str, float] = defaultdict(float)
    for line in fetch(admin + "/metrics").decode().splitlines():
        if line and not line.startswith("#"):
            series, value = line.split("#")[0].split()[:2]
            gauges[series.split("{")[0]] += float(value)
    if missing := GAUGES.values() - gauges.keys():
        raise Failed(f"the gateway does not show {', '.join(sorted(missing))}")
    legs["sockets"] = max(0, observer.other_sockets() - sockets)
    return legs | {what: round(gauges[name], 6) for what, name in GAUGES.items()}


def decided_otherwise(logs: Iterable[Path]) -> int:
    """Count the events of the logs for which a fresh core makes other decisions than the gateway did."""
    count = 0
    for log in logs:
        header, records = read_log(log)
        again = replayed(header.spec.build(parse(header.cluster)), records)
        count += sum(not decisions_equal(record.decisions, decisions) for record, decisions in again)
    return count


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a run."""

    scenario: Scenario
    outcome: Outcome
    held: dict[str, float]
    engines: dict[str, Any]
    sockets: dict[str, int]
    kept: int | None
    """Number of connections to engines after the idle time."""
    rss_mb: float
    growth_mb: float
    restarts: int
    decided_otherwise: int | None

    def rows(self) -> list[Row]:
        """Return the checks: every request ends once, nothing is held, memory is constant."""
        outcome, scenario, sent = self.outcome, self.scenario, self.scenario.requests
        improper = sent - sum(outcome.kinds[kind] for kind in PROPER)
        stayed = max(1, sent - outcome.kinds["left"])
        note = f"{self.scenario.through}: memory at the end {self.rss_mb:.0f} MB; {self.restarts} restarts"

        def row(measure: str, ours: float | None, target: float | None, unit: str = "") -> Row:
            return Row(measure=measure, unit=unit, better="lower", ours=ours, target=target, note=note)

        return [
            row(f"requests not answered exactly once, of {sent:,}", improper, 0),
            row("errors in place of an answer, which another try could have saved", outcome.kinds["error"], 0),
            row(
                "streams that broke off after their first token, of clients that stayed",
                100 * outcome.kinds["cut short with an error event"] / stayed,
                None,
                "%",
            ),
            row("held afterwards: requests, legs, transfers, connections", sum(self.held.values()), 0),
            row(f"connections to engines {scenario.calm_s:g} s later", self.kept, WATCHERS * 2 * scenario.instances),
            row("growth of memory after the warm-up", self.growth_mb, FLAT_SHARE * self.rss_mb, "MB"),
            row("events that a replay of the log decides otherwise", self.decided_otherwise, 0),
        ]

    def texts(self) -> dict[str, str]:
        """Return details on the rows."""
        figures_by_name = {
            "answers": dict(self.outcome.kinds),
            "statuses": dict(self.outcome.statuses),
            "improper": self.outcome.improper,
            "held": self.held,
            "engines": self.engines,
            "sockets": self.sockets,
        }
        return {name: json.dumps(value) for name, value in figures_by_name.items()}


def run(scenario: Scenario) -> Result:
    """Start engines and gateway, run all requests and faults, and wait for the idle time."""
    worker = [sys.executable, "-m", "bench.gateway.mock_worker", "--fault-share", str(scenario.fault_share)]
    worker += ["--prefill", str(scenario.instances), "--decode", str(scenario.instances), "--seed", str(scenario.seed)]
    ours = scenario.through == "kvroute"
    command = kvroute(SECTION) if ours else CONTENDERS[scenario.through]
    with tempfile.TemporaryDirectory() as scratch, Program(worker, cpus=OTHER_CPUS) as mock:
        workers = mock.document()
        place = Place.of(workers, Path(scratch))
        with answering(command(place), scenario.through, place) as gateway:
            seen = measured(scenario, place, gateway, Observer(gateway, workers, scenario))
        logs = sorted(place.folder.glob("events.jsonl*"))
        return replace(seen, decided_otherwise=decided_otherwise(logs)) if ours else seen


def measured(scenario: Scenario, place: Place, gateway: Program, observer: Observer) -> Result:
    """Run all requests and faults, and measure what remains."""
    ours = scenario.through == "kvroute"
    before, others = gateway.sockets(), observer.other_sockets()
    outcome = uvloop.run(run_load(f"http://127.0.0.1:{place.port}", scenario, observer))
    held = left(f"http://127.0.0.1:{place.second_port}" if ours else "", observer, others)
    engines, after = observer.stats(), gateway.sockets()
    if ours:
        time.sleep(scenario.calm_s)
    return Result(
        scenario=scenario,
        outcome=outcome,
        held=held,
        engines=engines,
        sockets={"before": before, "most": observer.sockets_max, "after": after, "calm": gateway.sockets()},
        kept=observer.stats()["connections"] if ours and scenario.calm_s else None,
        rss_mb=gateway.rss_bytes() / 1e6,
        growth_mb=observer.growth_mb(),
        restarts=observer.restarts,
        decided_otherwise=None,
    )


def main() -> None:
    """Run the bench and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    for name in ("requests", "rate_per_s", "fault_share", "leave_share", "reload_every_s", "calm_s", "seed", "through"):
        default = getattr(Scenario(), name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        result = run(Scenario(**given))
    except Failed as failed:
        sys.exit(str(failed))
    show(result.rows(), as_json, result.texts())


if __name__ == "__main__":
    main()
