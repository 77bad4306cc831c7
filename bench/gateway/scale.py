"""kvroute with 500 emulated engines on one core: time of a decision inside the gateway, and CPU use when idle.

`python -m bench.gateway.scale`. All engines run in one process on the other core. Their metrics are scraped every
second, and each sends KV events over a socket. The gateway's own histogram of decision times is read before and after.
The cost of scraping is the difference from an idle gateway that scrapes once an hour.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from bench.gateway.clusters import reached, tree, write
from bench.gateway.contenders import OTHER_CPUS, PROXY_CPUS, fetch
from bench.gateway.mock_worker import MODEL
from bench.gateway.program import Program, free_ports
from bench.measurement import Failed, Row, show

from kvroute.load import ReplayedResponse, TimedRequest, replay_trace
from kvroute.topology import ClusterFile, TimingEntry
from kvroute.topology.schema import DecodeEntry, EndpointEntry, InstanceEntry, LinearPrefillEntry
from kvroute_engine.files.units import Duration

KVROUTE = str(Path(sys.executable).with_name("kvroute"))
TARGET_US = 300.0
IDLE_TARGET = 25.0
"""Percent of a core for scraping, health checks and KV event sockets of all engines."""
IDLE_S, SETTLE_S = 5.0, 3.0
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1_536, 512, 8
KV_EVENTS = "kvroute_kv_events_total"
FRESH_S = 2.5
"""Age at which a scrape is stale, in seconds: the last two scrapes have failed."""
GROUPS = 64
"""Number of prefixes that prompts share."""
FAST = TimingEntry(
    prefill=LinearPrefillEntry(per_token_s=Duration(5e-6), base_s=Duration(5e-3)),
    decode=DecodeEntry(base_s=Duration(10e-3), per_request_s=Duration(0.1e-3)),
)
"""Engines are so fast that a few of them carry the load, because the bench measures the gateway."""


@dataclass(frozen=True, slots=True)
class Load:
    """Number of engines, and the traffic."""

    prefill: int = 125
    decode: int = 375
    rate_per_s: float = 50.0
    seconds: float = 20.0
    policy: str = "foresight"

    def plays(self) -> Iterator[TimedRequest]:
        """Yield streamed completions of 2,048 token ids; three quarters are shared within a group."""
        for number in range(int(self.rate_per_s * self.seconds)):
            group = number * 7 % GROUPS
            shared = [(group * 131 + place * 17) % 32_000 for place in range(SHARED_TOKENS)]
            own = [(number * 101 + place * 13 + 7) % 32_000 for place in range(OWN_TOKENS)]
            body = {
                "model": MODEL,
                "prompt": shared + own,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            yield TimedRequest(number / self.rate_per_s, msgspec.json.encode(body))


@dataclass(frozen=True, slots=True)
class Seen:
    """Results of a run."""

    load: Load
    answers: list[ReplayedResponse]
    decisions: dict[str, dict[float, float]]
    """Count of decisions by kind and upper bound in seconds; cumulative as on the metrics page."""
    idle_share: float
    busy_share: float
    rss_mb: float
    start_s: float
    hit_share: float
    """Share of prompt tokens known to be cached on the chosen prefill instance."""
    ages_s: list[float]
    """Age of every instance's last good scrape at the end, in seconds."""
    batches: float
    """Number of batches of KV events processed during the load."""
    unscraped_share: float
    """CPU share of an idle gateway that does not scrape."""


def cluster(load: Load) -> ClusterFile:
    """Return the engines, without endpoints."""
    return msgspec.structs.replace(tree(load.prefill, load.decode), timing={"default": FAST})


def run(load: Load, folder: Path) -> Seen:
    """Run engines and gateway from start to end."""
    engines_file = write(cluster(load), folder)
    emulate = [KVROUTE, "emulate", str(engines_file), "--kv-scale", "1e-5"]
    with Program(emulate, name="engines", cpus=OTHER_CPUS) as engines:
        endpoints = engines.document()["instances"]

        def endpoint(instance: InstanceEntry) -> EndpointEntry:
            fields: Mapping[str, Any] = endpoints[instance.name]
            return EndpointEntry(url=fields["url"], kv_events=fields["kv_events"], kv_replay=fields["kv_replay"])

        def file(gateway: Mapping[str, Any]) -> Path:
            return write(reached(cluster(load), endpoint, gateway), Path(tempfile.mkdtemp(dir=folder)))

        policy = {"policy": load.policy}
        with served(file, {**policy, "scrape": {"interval": "1 h"}}) as running:
            unscraped_share = idle(running)
        with served(file, policy) as running:
            return observed(load, running, unscraped_share)


@dataclass(frozen=True, slots=True)
class Running:
    """A running gateway."""

    program: Program
    port: int
    admin_port: int
    start_s: float


@contextmanager
def served(file: Callable[[Mapping[str, Any]], Path], section: Mapping[str, Any]) -> Iterator[Running]:
    """Run a gateway of a cluster file with this section in addition to the common one."""
    port, admin_port = free_ports(2)
    # Only events: the gateway's information on caches then shows that the events have arrived.
    path = file({"listen": {"port": port}, "admin": {"port": admin_port}, "prefix": "events", **section})
    started = time.monotonic()
    with Program([KVROUTE, "serve", str(path)], cpus=PROXY_CPUS) as program:
        program.listens(port)
        yield Running(program, port, admin_port, time.monotonic() - started)


def idle(running: Running) -> float:
    """Return the CPU share without requests."""
    time.sleep(SETTLE_S)
    used_s = -running.program.cpu_s()
    time.sleep(IDLE_S)
    return (used_s + running.program.cpu_s()) / IDLE_S


def observed(load: Load, running: Running, unscraped_share: float) -> Seen:
    """Measure the gateway idle, then under load."""
    proxy, idle_share = running.program, idle(running)
    url, metrics = f"http://127.0.0.1:{running.port}", f"http://127.0.0.1:{running.admin_port}/metrics"
    before = fetch(metrics).decode()
    busy_s, began = -proxy.cpu_s(), time.monotonic()
    answers = uvloop.run(replay_trace(url, load.plays(), timeout_s=60.0))
    busy_s, wall_s = busy_s + proxy.cpu_s(), time.monotonic() - began
    after = fetch(metrics).decode()
    first, last = histogram(before), histogram(after)
    return Seen(
        load=load,
        answers=answers,
        decisions={
            kind: {le: count - first.get(kind, {}).get(le, 0.0) for le, count in counts.items()}
            for kind, counts in last.items()
        },
        idle_share=idle_share,
        busy_share=busy_s / wall_s,
        rss_mb=proxy.rss_bytes() / 1e6,
        start_s=running.start_s,
        hit_share=_hits(after) / max(1.0, sum(series(after, "kvroute_prompt_tokens_total"))),
        ages_s=series(after, "kvroute_scrape_age_seconds"),
        batches=sum(series(after, KV_EVENTS)) - sum(series(before, KV_EVENTS)),
        unscraped_share=unscraped_share,
    )


def _hits(page: str) -> float:
    return sum(map(float, re.findall(r'^kvroute_prefix_hit_tokens_total\{leg="prefill"\} (\S+)', page, re.M)))


def series(page: str, name: str) -> list[float]:
    """Return the values of all series of one metric."""
    return [float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", page, re.M)]


def histogram(page: str) -> dict[str, dict[float, float]]:
    """Return cumulative counts of decisions by kind and upper bound."""
    counts: dict[str, dict[float, float]] = {}
    for labels, value in re.findall(r"^kvroute_decision_seconds_bucket\{([^}]*)\} (\S+)", page, re.M):
        fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts.setdefault(fields["kind"], {})[float(fields["le"])] = float(value)
    return counts


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Return the quantile in seconds, linear within a bucket; None if there are no decisions."""
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]] if bounds else 0.0
    low, below = 0.0, 0.0
    for bound in bounds:
        count = cumulative[bound]
        if total and count >= share * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (share * total - below) / (count - below) if count > below else bound
        low, below = bound, count
    return None


def rows(seen: Seen) -> list[Row]:
    """Return decision times by kind, CPU idle and busy, and failed responses."""
    instances = seen.load.prefill + seen.load.decode
    size = f"{instances} instances, {seen.load.policy}"
    failed = [answer for answer in seen.answers if not answer.ok]
    note = (
        f"{size}: {len(seen.answers)} requests at {seen.load.rate_per_s:g}/s, {seen.batches:.0f} batches of KV events,"
        f" {seen.hit_share:.0%} of prompt tokens known as cached, up after {seen.start_s:.1f} s, {seen.rss_mb:.0f} MB"
    )

    def row(measure: str, unit: str, ours: float | None, target: float | None = None) -> Row:
        return Row(measure=f"{measure}, {size}", unit=unit, better="lower", ours=ours, target=target, note=note)

    made = []
    for kind, counts in sorted(seen.decisions.items()):
        for share, name, target in ((0.5, "median", TARGET_US), (0.99, "p99", None)):
            seconds = quantile(counts, share)
            made.append(row(f"{kind} decision inside the gateway, {name}", "us", seconds and seconds * 1e6, target))
    return [
        *made,
        row("CPU share without requests", "%", 100 * seen.idle_share, IDLE_TARGET),
        row("of it scraping", "%", 100 * (seen.idle_share - seen.unscraped_share)),
        row(f"scrapes older than {FRESH_S:g} s", "", instances - sum(age <= FRESH_S for age in seen.ages_s), 0),
        row(f"CPU share at {seen.load.rate_per_s:g} requests/s", "%", 100 * seen.busy_share),
        row("answers that failed", "", len(failed), 0),
    ]


def main() -> None:
    """Run the bench and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = {
        "prefill": "engines",
        "decode": "engines",
        "rate_per_s": "requests",
        "seconds": "of load",
        "policy": "decode",
    }
    for name, of in options.items():
        default = getattr(Load(), name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default, help=of)
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            seen = run(Load(**given), Path(scratch))
    except Failed as failed:
        sys.exit(str(failed))
    errors = sorted({answer.error for answer in seen.answers if answer.error})
    show(rows(seen), as_json, {"errors": json.dumps(errors[:5])} if errors else {})


if __name__ == "__main__":
    main()
