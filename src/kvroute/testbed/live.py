"""Compare the simulator with real time: one trace, predicted for a cluster and sent to a live gateway on emulated
engines. Neither side is adjusted to the other."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import uvloop

from kvroute.load import (
    LEAD_S,
    ReplayedResponse,
    prompt_tokens,
    replay_trace,
    timed_requests,
)
from kvroute.planner.comparison.served import served_file
from kvroute.prefix import block_hashes
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import Background
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.types import TIER_COUNT, FloatArray, InputError

BLOCK_TOKENS = 16
"""Block size of the emulated engines; both sides use the trace's prompts in blocks of this size."""
READY_S = 90.0
END_S = 15.0
"""Seconds between stop signals: the first lets requests in flight finish, the second ends the gateway at once."""
PARTS = {
    "admission": (),
    "prefill": ("prefill_wait", "prefill"),
    "transfer": ("transfer", "queue"),
    "step": ("first_step",),
}
"""Parts of TTFT by gateway name, each with the simulator's parts that it consists of."""
_GATEWAY_PARTS = {"queue": "admission", "prefill": "prefill", "transfer": "transfer", "first_step": "step"}
_TIERS = ("node", "rack", "pod", "datacenter", "cross_datacenter")


class Half(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT and transfers of one trace under one policy, measured or predicted."""

    answered: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_mean_s: float
    parts_s: dict[str, float]
    """Mean of each of PARTS, in seconds."""
    tier_share: tuple[float, ...]
    """Share of requests whose KV cache was sent, by tier, [TIER_COUNT]. One instance served the others."""
    ttft_s: tuple[float | None, ...]
    """TTFT by request; None if there was no response."""
    errors: tuple[str, ...] = ()
    """Distinct error messages."""


@dataclass(frozen=True, slots=True)
class LiveComparisonSpec:
    """The input of a comparison: cluster, trace, policies and seed."""

    cluster: Path
    trace: Trace
    policy: str
    prefill: str
    seed: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured and the predicted result of one policy."""

    policy: str
    live: Half
    predicted: Half

    @property
    def off(self) -> float:
        """Relative difference of the live median TTFT from the predicted one."""
        return self.live.ttft_p50_s / self.predicted.ttft_p50_s - 1.0

    @property
    def apart(self) -> float:
        """Median over the requests of the relative difference between live and predicted TTFT of the same request."""
        pairs = zip(self.live.ttft_s, self.predicted.ttft_s, strict=True)
        return statistics.median(abs(a / b - 1.0) for a, b in pairs if a is not None and b is not None)


@dataclass(frozen=True, slots=True)
class ServedGateway:
    """Addresses of a running gateway with emulated engines."""

    url: str
    admin: str

    def page(self, path: str) -> bytes:
        """Return the response of the admin port for this path."""
        return _page(self.admin + path)


def playable(trace: Trace, output_max: int) -> Trace:
    """Return the trace in the form that both sides use: prompts in the engines' blocks, responses of 1 to `output_max`
    tokens, and distinct arrival times.

    Published traces have timestamps in steps of seconds. The order in which requests sent at the same moment reach a
    gateway is random, so the requests of a step are spread evenly up to the next step.
    """
    wanted = [request for request in trace.requests if request.output_tokens]
    made: list[TracedRequest] = []
    for at_s, request in zip(_apart([request.at_s for request in wanted]), wanted, strict=True):
        made.append(
            msgspec.structs.replace(
                request,
                at_s=at_s,
                blocks=block_hashes(prompt_tokens(request, len(made)), BLOCK_TOKENS),
                block_tokens=BLOCK_TOKENS,
                output_tokens=min(request.output_tokens, output_max),
            )
        )
    return Trace(trace.name, tuple(made))


def _apart(times_s: Sequence[float]) -> list[float]:
    """Spread equal times of an ascending list evenly up to the next greater time; the last step has mean length."""
    if not times_s:
        return []
    steps, counts = np.unique(times_s, return_counts=True)
    mean_s = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    lengths_s = np.append(np.diff(steps), mean_s)
    within = np.concatenate([np.arange(count) / count for count in counts])
    spread: list[float] = (np.repeat(steps, counts) + within * np.repeat(lengths_s, counts)).tolist()
    return spread


def predict(live_spec: LiveComparisonSpec) -> Half:
    """Simulate a gateway with the settings of the file, including its measurements of its own transfers."""
    return predicted(simulated(live_spec, Background()))


def simulated(live_spec: LiveComparisonSpec, background: Background) -> Run:
    """Simulate the gateway of a comparison, with traffic on the links that is not reported to it."""
    served = served_file(str(live_spec.cluster))
    spec = msgspec.structs.replace(served.spec.with_policy(live_spec.policy), prefill=live_spec.prefill)
    settings = msgspec.structs.replace(served.settings, telemetry="none", background=background)
    tenancy = served.service.tenancy(len(live_spec.trace.requests))
    return simulate(served.cluster, live_spec.trace, spec, settings, seed=live_spec.seed, tenancy=tenancy)


def predicted(run: Run) -> Half:
    """Reduce a run to the values that a gateway's clients and metrics provide."""
    means = msgspec.to_builtins(run.summary.ttft_parts_s)
    parts_s = {name: sum(means[part] or 0.0 for part in of) for name, of in PARTS.items()}
    tiers, sent = run.outcomes.tier, run.outcomes.source != run.outcomes.target
    answered = int((tiers >= 0).sum())
    share = _share(np.bincount(tiers[(tiers >= 0) & sent], minlength=TIER_COUNT).astype(np.float64), answered)
    ttft_s = [second if np.isfinite(second) else None for second in run.outcomes.ttft_s.tolist()]
    return _half(ttft_s, parts_s, share)


def observed(answers: Sequence[ReplayedResponse], metrics: str) -> Half:
    """Summarize the clients' measurements, and the parts and tiers in the gateway's metrics page."""
    transfers = _by_label(metrics, "kvroute_transfer_seconds_count", "tier")
    counts_by_tier = np.array([transfers.get(tier, 0.0) for tier in _TIERS])
    share = _share(counts_by_tier, sum(answer.ok for answer in answers))
    sums, counts = (_by_label(metrics, f"kvroute_ttft_part_seconds_{which}", "part") for which in ("sum", "count"))
    parts_s = {name: sums.get(part, 0.0) / max(counts.get(part, 0.0), 1.0) for part, name in _GATEWAY_PARTS.items()}
    errors = tuple(sorted({answer.error for answer in answers if answer.error}))
    return _half([answer.ttft_s if answer.ok else None for answer in answers], parts_s, share, errors)


def send_trace(
    served: ServedGateway, trace: Trace, on_answer: Callable[[], None] = lambda: None
) -> tuple[list[ReplayedResponse], bytes]:
    """Send the trace's requests at their times and wait for all responses. Return them with the gateway's state right
    after the last request was sent, when the gateway is busiest."""
    model = json.loads(_page(served.url + "/v1/models"))["data"][0]["id"]
    requests = list(timed_requests(trace.requests, model))
    last_s = LEAD_S + max((request.at_s for request in requests), default=0.0)

    async def run() -> tuple[list[ReplayedResponse], bytes]:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(replay_trace(served.url, requests, on_answer=lambda _: on_answer()))
            await asyncio.sleep(last_s)
            looking = group.create_task(asyncio.to_thread(served.page, "/state"))
        return playing.result(), looking.result()

    return uvloop.run(run())


@contextmanager
def embedded(live_spec: LiveComparisonSpec) -> Iterator[Callable[[], ServedGateway]]:
    """Run `kvroute serve --embedded` on free ports and stop it at the end. It yields a function that waits until the
    gateway is ready.

    Raises:
        InputError: raised by the yielded function if the gateway does not become ready.
    """
    command = [sys.executable, "-m", "kvroute.cli.app", "serve", "--embedded", str(live_spec.cluster)]
    command += ["--policy", live_spec.policy, "--prefill", live_spec.prefill, "--seed", str(live_spec.seed)]
    with tempfile.TemporaryDirectory(prefix="kvroute-") as folder, tempfile.TemporaryFile() as stderr_file:
        ready = Path(folder, "ready.json")
        command += ["--port", "0", "--admin-port", "0", "--ready-file", str(ready), "--until-eof"]
        # The new session keeps Ctrl-C from reaching the gateway; this process stops it. The closed pipe stops it in any
        # case.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=stderr_file, start_new_session=True
        )
        try:
            yield partial(_ready, process, ready, stderr_file)
        finally:
            _end(process)


def _ready(process: subprocess.Popen[bytes], ready: Path, stderr_file: IO[bytes]) -> ServedGateway:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        if ready.exists() and (text := ready.read_bytes()).endswith(b"}"):
            return msgspec.json.decode(text, type=ServedGateway)
        time.sleep(0.02)
    stderr_file.seek(0)
    why = stderr_file.read().decode(errors="replace").strip().removeprefix("kvroute: ")
    if "Traceback" in why:
        why = why.splitlines()[-1]
    raise InputError(f"the gateway did not start: {why or f'no output for {READY_S:g} s'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to finish, a second SIGTERM to stop at once, then SIGKILL; the gateway stops its engines."""
    assert process.stdin is not None
    try:
        for end in (process.terminate, process.terminate, process.kill):
            end()
            try:
                process.wait(END_S)
                return
            except subprocess.TimeoutExpired:
                continue
    finally:
        process.stdin.close()


def _page(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            body: bytes = answer.read()
            return body
    except OSError as error:  # urllib's exceptions are subclasses of OSError
        raise InputError(f"the gateway did not respond ({error})", where=url) from None


def _by_label(page: str, name: str, label: str) -> dict[str, float]:
    found = re.findall(rf'^{name}\{{{label}="(\w+)"\}} (\S+)', page, re.MULTILINE)
    return {value: float(number) for value, number in found}


def _share(counts: FloatArray, requests: int) -> tuple[float, ...]:
    return tuple((counts / max(requests, 1)).tolist())


def _half(
    ttft_s: Sequence[float | None],
    parts_s: Mapping[str, float],
    tier_share: tuple[float, ...],
    errors: tuple[str, ...] = (),
) -> Half:
    known = np.array([second for second in ttft_s if second is not None])
    p50_s, p90_s, mean_s = (*np.percentile(known, (50, 90)).tolist(), float(known.mean())) if known.size else (0.0,) * 3
    return Half(
        answered=int(known.size),
        ttft_p50_s=p50_s,
        ttft_p90_s=p90_s,
        ttft_mean_s=mean_s,
        parts_s=dict(parts_s),
        tier_share=tier_share,
        ttft_s=tuple(ttft_s),
        errors=errors,
    )
