"""One prefill and one decode server of real vLLM, each on a core of its own; their measured timing as a cluster file;
and one trace, sent through a live gateway and simulated."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import uvloop
import yaml
from tests.live.vllm.conftest import BLOCK_TOKENS, ROOT, Server, start_member, wait_ready
from tests.live.vllm.gateway_rig import prompt, running, until

from kvroute.load import TimedRequest, replay_trace
from kvroute.serve.config.preflight import deployment_of
from kvroute.sim.run import simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.types import FloatArray
from kvroute_engine.files.units import duration_s

Timing: TypeAlias = dict[str, Any]
"""A timing of a cluster file."""
STEP_TOKENS = 512
"""max_num_batched_tokens of the servers: short prompts share steps, and the longest ones take three."""
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE = 300, 0.7, (32, 1500)
OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE = 64, 0.5, (8, 200)
TRANSFERS = (64, 512, 1408)
"""Prompt lengths of the transfers that are measured."""


@dataclass
class TimedPair:
    """Two running servers."""

    model: Path
    prefill: Server
    decode: Server

    @property
    def servers(self) -> list[Server]:
        """Both."""
        return [self.prefill, self.decode]


@dataclass(frozen=True)
class Link:
    """Time of a KV transfer: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Probe:
    """Mean seconds that the same work takes at one time: the speed of a machine that others share changes by the
    minute."""

    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, pair: TimedPair) -> Probe:
        """Take the time of some prompts, one after the other, and of a decode batch, on idle servers."""

        def posted(server: Server, prompt_tokens: int, output_tokens: int) -> float:
            ids = prompt(prompt_tokens, seed=random.getrandbits(40))
            body = {"model": "tiny", "prompt": ids, "max_tokens": output_tokens, "ignore_eos": True}
            began_s = time.monotonic()
            server.post("/v1/completions", body)
            return time.monotonic() - began_s

        prompts_s = [[posted(pair.prefill, tokens, 1) for tokens in (64, 256, 1024)] for _ in range(15)]
        batches = []
        with ThreadPoolExecutor(8) as threads:
            for _ in range(7):
                batch = [threads.submit(posted, pair.decode, 64, 48) for _ in range(8)]
                batches.append(max(task.result() for task in batch))
        return cls(float(np.sum(prompts_s)) / len(prompts_s), float(np.mean(batches)))


def mean_probe(probes: Sequence[Probe]) -> Probe:
    """Return the means."""
    return Probe(*(float(np.mean([getattr(probe, name) for probe in probes])) for name in ("prefill_s", "decode_s")))


@dataclass(frozen=True)
class Times:
    """Times of the requests of a trace, in seconds, [request]."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    """NaN for one output token."""
    tokens_per_s: float
    """Output tokens from the first arrival to the last token."""
    worst_late_s: float = 0.0
    """Longest time by which the client sent a request late."""
    busy_shares: tuple[float, float] = (math.nan, math.nan)
    """Share of the time in which the prefill server and the decode server compute, simulated."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Let processes that are started within run on one core; on a machine with fewer cores, on another one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def pinned(model: Path, folder: Path, dtype: str = "bfloat16") -> Iterator[TimedPair]:
    """Run a prefill server on the first core and a decode server on the second one."""
    servers = []
    try:
        for core, (role, name) in enumerate((("kv_producer", "prefill0"), ("kv_consumer", "decode0"))):
            with on_core(core):
                limit = ["--max-num-batched-tokens", str(STEP_TOKENS)]
                servers.append(
                    start_member(role, name, model, folder, dtype=dtype, options=limit, layerwise=False, hold_s=60.0)
                )
        wait_ready(servers)
        cores = [os.sched_getaffinity(server.process.pid) for server in servers]
        assert all(len(core) == 1 for core in cores), f"the servers run on the cores {cores}, and not on one each"
        assert cores[0] != cores[1] or len(os.sched_getaffinity(0)) == 1, f"both servers run on core {cores[0]}"
        yield TimedPair(model, *servers)
    finally:
        for server in servers:
            server.kill()


def prefer(servers: Sequence[Server], nice: int) -> None:
    """Set the nice value of this session and of those of the servers, as the kernel's scheduling groups have it.

    Raises:
        OSError: this user may not, or the kernel has no such groups.
    """
    for pid in (os.getpid(), *(server.process.pid for server in servers)):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


@contextmanager
def busy(server: Server, streams: int, prompt_tokens: int, output_tokens: int) -> Iterator[None]:
    """Keep a server busy with this number of requests at a time, all with other prompts."""
    over = threading.Event()

    def ask() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            ids = prompt(prompt_tokens, seed=random.getrandbits(40) + number)
            body = {"model": "tiny", "prompt": ids, "max_tokens": output_tokens, "ignore_eos": True}
            server.post("/v1/completions", body)

    with ThreadPoolExecutor(streams) as threads:
        asking = [threads.submit(ask) for _ in range(streams)]
        try:
            yield
        finally:
            over.set()
    for task in asking:
        task.result()


def measured_timing(pair: TimedPair, *options: str, both_busy: bool) -> tuple[Timing, str]:
    """Return the timing that `kvroute timing measure` prints, and its remarks.

    Args:
        pair: idle servers.
        options: more options of the command.
        both_busy: measure each server while the other one is busy, as they are under load: they share the memory and
            the caches of one machine.
    """
    if not both_busy:
        return _measured(pair.prefill.url, "--decode", pair.decode.url, *options)
    with busy(pair.decode, 6, 64, 200):
        prefill, remarks = _measured(pair.prefill.url, "--max-batch", "2", *options)
    with busy(pair.prefill, 1, PROMPT_MEDIAN, 1):
        decode, more = _measured(pair.decode.url, *options)
    scheduler = {**prefill["scheduler"], "decode_request": decode["scheduler"]["decode_request"]}
    return {"prefill": prefill["prefill"], "decode": decode["decode"], "scheduler": scheduler}, remarks + more


def _measured(*words: str) -> tuple[Timing, str]:
    command = [sys.executable, "-m", "kvroute.cli.app", "timing", "measure", *words, "--kind", "quadratic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    timing: Timing = yaml.safe_load(done.stdout)["timing"]["default"]
    return timing, done.stderr


def measured_link(pair: TimedPair, repeats: int = 3) -> Link:
    """Return the time of transfers, by the decode server's own counters."""
    sizes, seconds = [], []
    for tokens in TRANSFERS:
        for repeat in range(repeats):
            ids = prompt(tokens, seed=90_000 + 100 * tokens + repeat)
            before = _transfers(pair.decode)
            body: dict[str, Any] = {"model": "tiny", "prompt": ids, "temperature": 0, "ignore_eos": True}
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            held = pair.prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": asked})
            params = held["kv_transfer_params"]
            pair.decode.post("/v1/completions", {**body, "max_tokens": 2, "kv_transfer_params": params})
            # An idle engine reports its counts with its next request.
            pair.decode.post("/v1/completions", {**body, "prompt": ids[:8], "max_tokens": 1})
            until(lambda before=before: _transfers(pair.decode)[0] > before[0])  # type: ignore[misc]
            after = _transfers(pair.decode)
            sizes.append(after[1] - before[1])
            seconds.append(after[2] - before[2])
    by_size = {size: float(np.median([s for b, s in zip(sizes, seconds, strict=True) if b == size])) for size in sizes}
    slope, latency_s = np.polyfit(list(by_size), list(by_size.values()), 1)
    return Link(max(float(latency_s), 1e-6), 1.0 / max(float(slope), 1e-12))


def _transfers(server: Server) -> tuple[float, float, float]:
    """Return number, bytes and seconds of a server's transfers so far."""
    names = ("kv_transfers_total", "kv_transfer_bytes_total", "kv_transfer_seconds_total")
    number, nbytes, seconds = (server.metric(f"kvroute:{name}") for name in names)
    return number, nbytes, seconds


def cluster_text(pair: TimedPair, timing: Timing, link: Link) -> str:
    """Return the cluster file of both servers, on a node each."""
    config = str(pair.model / "config.json")
    nic = {"compute": {"capacity": f"{link.bytes_per_s * 8 / 1e6:.6g} Mbps"}}
    document = {
        "name": "timed",
        "racks": [{"name": "rack0"}],
        "nodes": [{"name": f"node{index}", "rack": "rack0", "gpus": 1, "nics": nic} for index in range(2)],
        "network": {"latency": {"rack": f"{link.latency_s * 1e3:.6g} ms"}},
        "timing": {"default": timing},
        "defaults": {"model": config, "tp": 1, "batch_max": 32, "kv_capacity": "200 MB"},
        "instances": [
            {
                "name": server.name,
                "role": role,
                "gpus": f"node{index}:0",
                "endpoint": {
                    "url": server.url,
                    "protocol": "vllm",
                    "kv_events": server.events,
                    "kv_replay": server.replay,
                },
            }
            for index, (role, server) in enumerate(zip(("prefill", "decode"), pair.servers, strict=True))
        ],
        "gateway": {
            "models": {"tiny": config},
            "prompt": {"tokenizer": str(pair.model / "tokenizer.json"), "block_tokens": BLOCK_TOKENS},
            "health": {"interval": "2 s"},
            "policy": "foresight",  # a pair for every request
        },
    }
    return json.dumps(document)  # YAML includes JSON


def trace_of(requests: int, rate_per_s: float, seed: int) -> Trace:
    """Return Poisson arrivals with log-normal lengths; the lengths do not depend on the rate."""
    draw, at_s, made = random.Random(seed), 0.0, []
    for _ in range(requests):
        at_s += draw.expovariate(1.0) / rate_per_s
        tokens = [
            min(max(int(draw.lognormvariate(math.log(median), sigma)), low), high)
            for median, sigma, (low, high) in (
                (PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_RANGE),
                (OUTPUT_MEDIAN, OUTPUT_SIGMA, OUTPUT_RANGE),
            )
        ]
        made.append(TracedRequest(at_s, tokens[0], tokens[1], (), BLOCK_TOKENS))
    return Trace("timed", tuple(made))


def predicted(text: str, trace: Trace) -> Times:
    """Simulate the trace on a cluster file, with the router of its gateway."""
    cluster, settings = deployment_of(text, "timed", embedded=False)
    spec = msgspec.structs.replace(settings.control_spec(), cache_block_tokens=0)
    outcomes = simulate(cluster, trace, spec, SimSpec(telemetry="none")).outcomes
    steps = outcomes.output_tokens - 1
    tpot_s = (outcomes.finished_s - outcomes.first_token_s) / np.where(steps > 0, steps, np.nan)
    seconds = float(outcomes.finished_s.max()) - trace.requests[0].at_s
    prefill = _covered_s(outcomes.prefill_started_s, outcomes.prefill_finished_s) / seconds
    decode = _covered_s(outcomes.admitted_s, outcomes.finished_s) / seconds
    rate = float(outcomes.output_tokens.sum()) / seconds
    return Times(outcomes.ttft_s, tpot_s, rate, busy_shares=(prefill, decode))


def _covered_s(starts: FloatArray, ends: FloatArray) -> float:
    """Return the length of the union of intervals."""
    total, until_s = 0.0, -math.inf
    for start, end in sorted(zip(starts.tolist(), ends.tolist(), strict=True)):
        total += max(end - max(start, until_s), 0.0)
        until_s = max(until_s, end)
    return total


def between(idle: Timing, loaded: Timing, shares: tuple[float, float]) -> Timing:
    """Return the timing of servers that are slowed by each other for a part of the time.

    Args:
        idle: measured while the other server was idle.
        loaded: measured while the other server was busy.
        shares: share of the time in which the prefill server and the decode server compute.
    """

    def mixed(one: Mapping[str, Any], other: Mapping[str, Any], share: float) -> dict[str, Any]:
        return {name: _mean(value, other[name], share) for name, value in one.items()}

    prefill, decode = shares
    scheduler = mixed(idle["scheduler"], loaded["scheduler"], decode)
    request = _mean(idle["scheduler"]["decode_request"], loaded["scheduler"]["decode_request"], prefill)
    return {
        "prefill": mixed(idle["prefill"], loaded["prefill"], decode),
        "decode": mixed(idle["decode"], loaded["decode"], prefill),
        "scheduler": {**scheduler, "decode_request": request},
    }


def scaled(timing: Timing, prefill: float, decode: float) -> Timing:
    """Return a timing whose times of the prefill and of the decode server are multiplied by these factors."""

    def times(part: Mapping[str, Any], factor: float) -> dict[str, Any]:
        return {name: _times(value, factor) for name, value in part.items()}

    scheduler = times(timing["scheduler"], prefill)
    scheduler["decode_request"] = _times(timing["scheduler"]["decode_request"], decode)
    return {
        "prefill": times(timing["prefill"], prefill),
        "decode": times(timing["decode"], decode),
        "scheduler": scheduler,
    }


def _times(value: Any, factor: float) -> Any:
    """Multiply a duration; other values are kept."""
    if not isinstance(value, str) or " " not in value:
        return value
    return f"{duration_s(value) * factor * 1e6:.9g} us"


def _mean(one: Any, other: Any, share: float) -> Any:
    """Return the weighted mean of two durations; other values are equal in both and kept."""
    if not isinstance(one, str) or " " not in one:
        return one
    seconds = (1 - share) * duration_s(one) + share * duration_s(other)
    return f"{seconds * 1e6:.9g} us"


def send_trace(url: str, trace: Trace, seed: int) -> Times:
    """Send the trace to a gateway and wait for all responses. Args: `seed` is for the prompts."""
    requests = [_request(traced, seed + number) for number, traced in enumerate(trace.requests)]
    answers = uvloop.run(replay_trace(url, requests))
    errors = [answer.error for answer in answers if not answer.ok]
    assert not errors, errors[0]
    times = [np.array(answer.token_s) for answer in answers]
    outputs = np.array([traced.output_tokens for traced in trace.requests])
    assert all(len(arrived) > 0 for arrived in times)
    ttft_s = np.array([answer.token_s[0] - answer.due_s for answer in answers])
    spans_s = np.array([arrived[-1] - arrived[0] for arrived in times])
    seconds = max(arrived[-1] for arrived in times) - trace.requests[0].at_s
    late_s = max((answer.sent_s or 0.0) - answer.due_s for answer in answers)
    tpot_s = spans_s / np.where(outputs > 1, outputs - 1, np.nan)
    return Times(ttft_s, tpot_s, float(outputs.sum()) / float(seconds), late_s)


def _request(traced: TracedRequest, seed: int) -> TimedRequest:
    fields = {
        "model": "tiny",
        "prompt": prompt(traced.input_tokens, seed),
        "max_tokens": traced.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    return TimedRequest(traced.at_s, msgspec.json.encode(fields))


def capacity_per_s(text: str, requests: int = 200, seed: int = 0) -> float:
    """Return the requests per second that the simulated cluster completes if all are there from the start."""
    trace = trace_of(requests, 1e6, seed)
    outputs = sum(traced.output_tokens for traced in trace.requests)
    return requests * predicted(text, trace).tokens_per_s / outputs


@contextmanager
def gateway_of(text: str, folder: Path) -> Iterator[str]:
    """Run `kvroute serve` with a cluster file, on the first core; yield its URL."""
    with on_core(0), running("serve", text, folder, "--port", "0") as (_, addresses):
        send_trace(addresses["url"], trace_of(4, 4.0, seed=77), seed=77_000)
        yield addresses["url"]
