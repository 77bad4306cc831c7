"""kvroute before 500 emulated engines on one core: what a decision takes inside the gateway, and what idling costs.

`python -m bench.gateway.scale`. All engines live in one process on the other core, with metrics that are scraped every
second and KV events over a socket each. The gateway's own histogram of decision times is read before and after.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from bench.gateway.clusters import reached, tree, write
from bench.gateway.contenders import OTHER_CPUS, PROXY_CPUS, ask
from bench.gateway.mock_worker import MODEL
from bench.gateway.program import Program, free_ports
from bench.measurement import Failed, Row, show

from kvroute.emulator.player import Answer, Play, play
from kvroute.topology import ClusterFile, TimingEntry
from kvroute.topology.schema import DecodeEntry, EndpointEntry, InstanceEntry, LinearPrefillEntry
from kvroute.topology.units import Duration

TARGET_US = 300.0
IDLE_S, SETTLE_S = 5.0, 3.0
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1_536, 512, 8
GROUPS = 64
"""Prefixes that prompts share."""
FAST = TimingEntry(
    prefill=LinearPrefillEntry(per_token_s=Duration(5e-6), base_s=Duration(5e-3)),
    decode=DecodeEntry(base_s=Duration(10e-3), per_request_s=Duration(0.1e-3)),
)
"""Engines fast enough that a few of them carry the load: the bench is about the gateway."""


@dataclass(frozen=True, slots=True)
class Load:
    """How many engines, and what comes in."""

    prefill: int = 125
    decode: int = 375
    rate_per_s: float = 50.0
    seconds: float = 20.0

    def plays(self) -> Iterator[Play]:
        """Streamed completions of 2,048 token ids, three quarters of which are shared within a group."""
        for number in range(int(self.rate_per_s * self.seconds)):
            group = number * 7 % GROUPS
            shared = [(group * 131 + place * 17) % 32_000 for place in range(SHARED_TOKENS)]
            own = [(number * 101 + place * 13 + 7) % 32_000 for place in range(OWN_TOKENS)]
            asked = {"model": MODEL, "prompt": shared + own, "max_tokens": OUTPUT_TOKENS, "stream": True}
            yield Play(number / self.rate_per_s, msgspec.json.encode(asked))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run has shown."""

    load: Load
    answers: list[Answer]
    decisions: dict[str, dict[float, float]]
    """Count of decisions by kind and upper bound of their seconds; cumulative as on the page."""
    idle_share: float
    busy_share: float
    rss_mb: float
    start_s: float
    hit_share: float
    """Of prompt tokens, known to be cached on the prefill instance that was chosen."""
    stale: int
    """Instances whose last good scrape is older than five seconds."""


def cluster(load: Load) -> ClusterFile:
    """The engines, without endpoints."""
    return msgspec.structs.replace(tree(load.prefill, load.decode), timing={"default": FAST})


def run(load: Load, folder: Path) -> Seen:
    """Engines and gateway from start to end."""
    kvroute = str(Path(sys.executable).with_name("kvroute"))
    engines_file = write(cluster(load), folder)
    emulate = [kvroute, "emulate", str(engines_file), "--kv-scale", "1e-5"]
    with Program(emulate, name="engines", cpus=OTHER_CPUS) as engines:
        endpoints = engines.document()["instances"]
        port, admin_port = free_ports(2)

        def endpoint(instance: InstanceEntry) -> EndpointEntry:
            said: Mapping[str, Any] = endpoints[instance.name]
            return EndpointEntry(url=said["url"], kv_events=said["kv_events"], kv_replay=said["kv_replay"])

        # By events alone: what the gateway then knows of caches shows that they have come.
        gateway = {"listen": {"port": port}, "admin": {"port": admin_port}, "prefix": "events"}
        (folder / "live").mkdir()
        file = write(reached(cluster(load), endpoint, gateway), folder / "live")
        started = time.monotonic()
        with Program([kvroute, "serve", str(file)], cpus=PROXY_CPUS) as proxy:
            proxy.listens(port)
            return observed(load, proxy, port, admin_port, time.monotonic() - started)


def observed(load: Load, proxy: Program, port: int, admin_port: int, start_s: float) -> Seen:
    """Idle for a while, then under load."""
    url, metrics = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}/metrics"
    time.sleep(SETTLE_S)
    idle_s = -proxy.cpu_s()
    time.sleep(IDLE_S)
    idle_s += proxy.cpu_s()
    before = ask(metrics).decode()
    busy_s, began = -proxy.cpu_s(), time.monotonic()
    answers = uvloop.run(play(url, load.plays(), timeout_s=60.0))
    busy_s, wall_s = busy_s + proxy.cpu_s(), time.monotonic() - began
    after = ask(metrics).decode()
    first, last = histogram(before), histogram(after)
    return Seen(
        load=load,
        answers=answers,
        decisions={
            kind: {le: count - first.get(kind, {}).get(le, 0.0) for le, count in counts.items()}
            for kind, counts in last.items()
        },
        idle_share=idle_s / IDLE_S,
        busy_share=busy_s / wall_s,
        rss_mb=proxy.rss_bytes() / 1e6,
        start_s=start_s,
        hit_share=_hits(after) / max(1.0, sum(series(after, "kvroute_prompt_tokens_total"))),
        stale=sum(age > 5.0 for age in series(after, "kvroute_scrape_age_seconds")),
    )


def _hits(page: str) -> float:
    return sum(map(float, re.findall(r'^kvroute_prefix_hit_tokens_total\{leg="prefill"\} (\S+)', page, re.M)))


def series(page: str, name: str) -> list[float]:
    """Values of all series of one metric."""
    return [float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)", page, re.M)]


def histogram(page: str) -> dict[str, dict[float, float]]:
    """Cumulative counts of decisions by kind and upper bound."""
    found: dict[str, dict[float, float]] = {}
    for labels, value in re.findall(r"^kvroute_decision_seconds_bucket\{([^}]*)\} (\S+)", page, re.M):
        said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found.setdefault(said["kind"], {})[float(said["le"])] = float(value)
    return found


def quantile(cumulative: Mapping[float, float], share: float) -> float | None:
    """Seconds below which so many decisions were; linear within a bucket, None where there were none."""
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
    """Decision time by kind, CPU idle and busy, answers that failed."""
    size = f"{seen.load.prefill + seen.load.decode} instances"
    failed = [answer for answer in seen.answers if not answer.ok]
    note = (
        f"{size}: {len(seen.answers)} requests at {seen.load.rate_per_s:g}/s, KV events told of {seen.hit_share:.0%} of"
        f" their tokens, {seen.stale} scrapes older than 5 s, up after {seen.start_s:.1f} s, {seen.rss_mb:.0f} MB"
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
        row("CPU share without requests", "%", 100 * seen.idle_share),
        row(f"CPU share at {seen.load.rate_per_s:g} requests/s", "%", 100 * seen.busy_share),
        row("answers that failed", "", len(failed), 0),
    ]


def main() -> None:
    """Run it, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    for name, of in (("prefill", "engines"), ("decode", "engines"), ("rate_per_s", "requests"), ("seconds", "of load")):
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
