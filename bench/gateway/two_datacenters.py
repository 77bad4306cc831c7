"""The embedded two-datacenter example under load while the link between its sites is cut and restored.

`python -m bench.gateway.two_datacenters`. Requests arrive at a steady rate with the lengths of PrfaaS 4.1 (log-normal).
The same lengths repeat in another order, so that medians before and after the cut are comparable. Every client counts
its own tokens. `--speed 8` makes everything eight times as fast: engines, link, arrivals and reviews, but not the time
after which an engine aborts a transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from bench.gateway.program import Program, served
from bench.measurement import ROOT, Failed, Row, show

from kvroute import topology
from kvroute.load import ReplayedResponse, TimedRequest, replay_trace
from kvroute.topology.schema import PiecewisePrefillEntry
from kvroute_engine.files.units import Bandwidth, Duration

EXAMPLE = ROOT / "examples" / "two-datacenters.yaml"
MU, SIGMA, LEAST, MOST = 9.90, 1.00, 128, 131_072
"""Parameters of prompt lengths in tokens (PrfaaS 4.1)."""
GROUP = 12
"""Number of requests whose lengths represent the whole distribution, at equal steps of probability."""
TOKENS = 32
TARGET_S = 10.0
NEAR = 1.2
"""Recovery limit: a group's median TTFT is at most this multiple of the median before the cut."""
GAUGES = ("kvroute_requests_in_flight", "kvroute_transfers_in_flight", "kvroute_prefill_pending_seconds")


@dataclass(frozen=True, slots=True)
class Course:
    """Schedule of a run in seconds since the first request, at speed 1."""

    rate_per_s: float = 0.8
    warm_s: float = 40.0
    """Time by which a threshold has been found."""
    before_s: float = 30.0
    cut_s: float = 20.0
    after_s: float = 45.0
    speed: float = 1.0
    seed: int = 0
    layerwise: bool = False
    """True if KV is sent while the prefill site computes it."""

    @property
    def cut_at_s(self) -> float:
        """Wall time of the cut."""
        return (self.warm_s + self.before_s) / self.speed

    @property
    def restored_at_s(self) -> float:
        """Wall time of the repair; `speed` does not affect the cut, the engines' timeouts and the gateway's probes."""
        return self.cut_at_s + self.cut_s

    @property
    def end_s(self) -> float:
        """Time by which the last request has been sent."""
        return self.restored_at_s + self.after_s / self.speed

    @property
    def group_s(self) -> float:
        """Time in which every length occurs once."""
        return GROUP / (self.rate_per_s * self.speed)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run from clients and gateway."""

    requests: int
    lost: int
    errors: tuple[str, ...]
    """The first few errors."""
    before_s: float
    """Median TTFT before the cut, in seconds."""
    during_s: float
    shut_s: float | None
    """Time from the cut until nothing more is sent over the WAN path; None: never."""
    recovered_s: float | None
    """Time from the repair until a group's median is near the one before the cut; None: never."""
    offloaded_share: dict[str, float]
    """Offloaded share of the prefills sent before, during and after the cut."""
    fallen_back: float
    """Prefills that stayed at home because the WAN path was closed."""
    threshold_tokens: tuple[float, float]
    """Routing threshold before the cut and at the end."""
    role_switches: dict[str, float]
    left: dict[str, float]
    """Resources that the gateway still holds at the end."""


def lengths() -> list[int]:
    """Return GROUP prompt lengths, ascending, each in the middle of an equal part of the distribution."""
    normal = statistics.NormalDist(MU, SIGMA)
    first, last = normal.cdf(math.log(LEAST)), normal.cdf(math.log(MOST))
    return [round(math.exp(normal.inv_cdf(first + (k + 0.5) * (last - first) / GROUP))) for k in range(GROUP)]


def requests(course: Course) -> Iterator[TimedRequest]:
    """Yield requests in groups with all lengths, shuffled; no two prompts share a prefix."""
    draw, kinds, number = random.Random(course.seed), lengths(), 0
    while (at_s := number / (course.rate_per_s * course.speed)) < course.end_s:
        if number % GROUP == 0:
            draw.shuffle(kinds)
        prompt = (f"{number:07} " + "lorem ipsum dolor sit amet " * (kinds[number % GROUP] // 6))[
            : 4 * kinds[number % GROUP]
        ]
        body = {"model": "prfaas-1t-hybrid", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        yield TimedRequest(at_s, msgspec.json.encode(body))
        number += 1


def faster(speed: float, folder: Path, *, layerwise: bool = False) -> Path:
    """Write the example with all of its times divided; at speed 1, return the example itself unless `layerwise`."""
    if speed == 1.0 and not layerwise:
        return EXAMPLE
    file, replace = topology.load(EXAMPLE).file, msgspec.structs.replace
    timing = {}
    for name, entry in file.timing.items():
        prefill, decode = entry.prefill, entry.decode
        assert isinstance(prefill, PiecewisePrefillEntry)
        timing[name] = replace(
            entry,
            prefill=replace(prefill, times_s=[Duration(seconds / speed) for seconds in prefill.times_s]),
            decode=replace(
                decode, base_s=Duration(decode.base_s / speed), per_request_s=Duration(decode.per_request_s / speed)
            ),
        )
    wan = [replace(link, bytes_per_s=Bandwidth(link.bytes_per_s * speed)) for link in file.wan]
    offload = file.gateway["offload"]
    long_term = offload["long_term"] | {"review": f"{10 / speed:g} s", "window": f"{120 / speed:g} s"}
    gateway = file.gateway | {"offload": offload | {"long_term": long_term, "layerwise": layerwise}}
    path = folder / "faster.yaml"
    path.write_text(replace(file, timing=timing, wan=wan, gateway=gateway).to_yaml(), encoding="utf-8")
    return path


async def run(course: Course) -> Outcome:
    """Run one course against a separate gateway. Raises Failed if that does not start."""
    with tempfile.TemporaryDirectory() as folder:
        ready, file = Path(folder, "ready.json"), faster(course.speed, Path(folder), layerwise=course.layerwise)
        command = [str(Path(sys.executable).with_name("kvroute")), "serve", "--embedded", str(file)]
        command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready)]
        with Program(command, name="kvroute") as program:
            addresses = await served(ready, program)
            async with aiohttp.ClientSession() as session:
                return await _run_course(course, addresses["url"], addresses["admin"], session)


async def _run_course(course: Course, url: str, admin: str, session: aiohttp.ClientSession) -> Outcome:
    plays = list(requests(course))
    samples: list[dict[str, float]] = []
    async with asyncio.TaskGroup() as group:
        answering = group.create_task(replay_trace(url, plays, timeout_s=300.0))
        link_changes = group.create_task(_change_link(course, admin, session, samples))
    answers = answering.result()
    await asyncio.sleep(1.0)
    samples.append(await _sent(session, admin))
    incomplete = [answer.error or f"{len(answer.token_s)} tokens" for answer in answers if not _whole(answer)]
    state = await _json(session, f"{admin}/state")
    page = await _metrics(session, admin)
    before_s = _median_s(answers, course.cut_at_s - course.before_s / course.speed, course.cut_at_s)
    return Outcome(
        requests=len(answers),
        lost=len(incomplete),
        errors=tuple(error[:200] for error in incomplete[:3]),
        before_s=before_s,
        during_s=_median_s(answers, course.cut_at_s, course.restored_at_s),
        shut_s=link_changes.result(),
        recovered_s=_recovered_s(course, answers, before_s),
        offloaded_share={
            name: _away_share(first, last)
            for name, first, last in zip(("before", "during", "after"), samples, samples[1:], strict=False)
        },
        fallen_back=samples[-1].get("away_down", 0.0),
        threshold_tokens=(samples[1]["threshold"], state["tick"]["load"]["offload"]["sites"][0]["threshold_tokens"]),
        role_switches={name: value for name, value in page.items() if name.startswith("kvroute_role_switches_total")},
        left={name: value for name, value in page.items() if name.startswith(GAUGES) and value},
    )


async def _change_link(
    course: Course, admin: str, session: aiohttp.ClientSession, samples: list[dict[str, float]]
) -> float | None:
    """Cut and restore the link, and add prefill counts to `samples` at every change; return seconds to detection."""
    started, noticed_s = time.monotonic(), None
    engine = (await _json(session, f"{admin}/state"))["layout"]["instances"][0]["url"]
    for at_s, share in (
        (course.cut_at_s - course.before_s / course.speed, None),
        (course.cut_at_s, 0.0),
        (course.restored_at_s, 1.0),
    ):
        await asyncio.sleep(max(0.0, started + at_s - time.monotonic()))
        samples.append(await _sent(session, admin))
        if share is not None:
            async with session.post(f"{engine}/emulator/wan", json={"share": share}) as answer:
                if answer.status != 200:
                    raise Failed(f"the link cannot be changed: {await answer.text()}")
        if share == 0.0:
            noticed_s = await _shut_s(session, admin, course.cut_s)
    return noticed_s


async def _shut_s(session: aiohttp.ClientSession, admin: str, most_s: float) -> float | None:
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < most_s:
        state = await _json(session, f"{admin}/state")
        if state["tick"]["load"]["offload"]["sites"][0]["wan_path"] != "closed":
            return waited_s
        await asyncio.sleep(0.1)
    return None


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as answer:
        return await answer.json()


async def _metrics(session: aiohttp.ClientSession, admin: str) -> dict[str, float]:
    async with session.get(f"{admin}/metrics") as answer:
        text = await answer.text()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


async def _sent(session: aiohttp.ClientSession, admin: str) -> dict[str, float]:
    """Return the prefills so far by datacenter, those kept at home by a closed WAN path, and the threshold."""
    sent: dict[str, float] = {}
    page = await _metrics(session, admin)
    for name, value in page.items():
        if name.startswith("kvroute_offload_decisions_total"):
            site = name.partition('site="')[2].partition('"')[0]
            sent[site] = sent.get(site, 0.0) + value
            if 'reason="away_down"' in name:
                sent["away_down"] = value
        elif name.startswith("kvroute_offload_threshold_tokens"):
            sent["threshold"] = value
    return sent


def _away_share(first: dict[str, float], last: dict[str, float]) -> float:
    made = {site: last[site] - first.get(site, 0.0) for site in last if site.endswith("-site")}
    return made.get("prefill-site", 0.0) / max(sum(made.values()), 1.0)


def _whole(answer: ReplayedResponse) -> bool:
    return answer.ok and len(answer.token_s) == TOKENS


def _median_s(answers: Sequence[ReplayedResponse], start_s: float, end_s: float) -> float:
    """Return the median TTFT of requests due in an interval; lost ones count as infinite."""
    times = [
        answer.ttft_s if answer.ttft_s is not None else math.inf
        for answer in answers
        if start_s <= answer.due_s < end_s
    ]
    return statistics.median(times) if times else math.inf


def _recovered_s(course: Course, answers: Sequence[ReplayedResponse], before_s: float) -> float | None:
    for answer in answers:
        since_s = answer.due_s - course.restored_at_s
        whole_group = answer.due_s + course.group_s <= course.end_s
        if (
            since_s >= 0
            and whole_group
            and _median_s(answers, answer.due_s, answer.due_s + course.group_s) <= NEAR * before_s
        ):
            return since_s
    return None


def rows(outcome: Outcome) -> list[Row]:
    """Return the figures of the bench."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in outcome.offloaded_share.items())
    thresholds = " then ".join(f"{tokens:,.0f}" for tokens in outcome.threshold_tokens)
    switched = f"{sum(outcome.role_switches.values()):g} role switches"
    stayed = f"{outcome.fallen_back:g} prefills kept at home"
    return [
        Row(
            measure=f"link cut under load: requests lost of {outcome.requests}",
            unit="requests",
            better="lower",
            ours=outcome.lost,
            target=0,
            note="; ".join(outcome.errors),
        ),
        Row(
            measure="link cut under load: until nothing is sent over the link any more",
            unit="s",
            better="lower",
            ours=outcome.shut_s,
        ),
        Row(
            measure="link cut under load: until the median TTFT is back within 20 %",
            unit="s",
            better="lower",
            ours=outcome.recovered_s,
            target=TARGET_S,
            note=f"median TTFT {outcome.before_s:.2f} s before, {outcome.during_s:.2f} s during the cut",
        ),
        Row(
            measure="link cut under load: offloaded share before the cut",
            unit="of prefills",
            better="higher",
            ours=outcome.offloaded_share.get("before"),
            note=f"{shares}; {stayed}; threshold {thresholds} tokens; {switched}",
        ),
        Row(
            measure="link cut under load: held afterwards",
            unit="gauges above 0",
            better="lower",
            ours=len(outcome.left),
            target=0,
            note=", ".join(outcome.left),
        ),
    ]


def main() -> None:
    """Run one course; print rows or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    course = Course()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rate", type=float, default=course.rate_per_s, help="requests per second at speed 1")
    parser.add_argument("--cut-s", type=float, default=course.cut_s)
    parser.add_argument("--speed", type=float, default=course.speed)
    parser.add_argument("--seed", type=int, default=course.seed)
    parser.add_argument("--layerwise", action="store_true", help="KV leaves while it is computed")
    given = parser.parse_args()
    course = Course(
        rate_per_s=given.rate, cut_s=given.cut_s, speed=given.speed, seed=given.seed, layerwise=given.layerwise
    )
    show(rows(uvloop.run(run(course))), given.json)


if __name__ == "__main__":
    main()
