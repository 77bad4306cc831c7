"""Counters of an engine, and its /metrics page with vLLM's metric names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvroute.emulator.kv.storage import StorageNode

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


@dataclass(slots=True)
class DurationHistogram:
    """Prometheus histogram of durations in seconds, by upper bound."""

    bounds_s: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds_s) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        """Add `times` observations of `seconds`."""
        self.counts[bisect_left(self.bounds_s, seconds)] += times
        self.sum_s += seconds * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Return the samples in Prometheus text format."""
        total, lines = 0, [f"# TYPE {name} histogram"]
        for bound, count in zip((*self.bounds_s, "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}.0')
        return [*lines, f"{name}_count{{{labels}}} {total}.0", f"{name}_sum{{{labels}}} {self.sum_s!r}"]


@dataclass(slots=True)
class Pulled:
    """KV fetched from one source."""

    kv_bytes: float = 0.0
    seconds: float = 0.0
    transfers: int = 0


@dataclass(slots=True)
class SentKv:
    """KV sent to one target: modelled bytes, and the total time that its connections were busy with it, in seconds."""

    nbytes: float = 0.0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetConnections:
    """Connections to one target at one moment that have more to send than the network accepts."""

    connections: int
    latency_s: float
    queue_bytes: float
    bytes_per_s: float

    def beside(self, other: TargetConnections) -> TargetConnections:
        """Return the combination of two links to the same target."""
        return TargetConnections(
            self.connections + other.connections,
            max(self.latency_s, other.latency_s),
            self.queue_bytes + other.queue_bytes,
            self.bytes_per_s + other.bytes_per_s,
        )


@dataclass(slots=True)
class EngineCounters:
    """Counters since the engine's start."""

    queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: int = 0
    kv_expired: int = 0
    kv_failed: int = 0
    ttft_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(TTFT_S))
    token_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(TOKEN_S))
    queue_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(REQUEST_S))
    prefill_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(REQUEST_S))
    request_s: DurationHistogram = field(default_factory=lambda: DurationHistogram(REQUEST_S))
    pulled: dict[str, Pulled] = field(default_factory=dict)
    """Fetched KV, by name of the source."""
    early: dict[str, Pulled] = field(default_factory=dict)
    """Same for KV that was requested before it was computed. Its seconds include the wait for the prefill."""
    sent: dict[str, SentKv] = field(default_factory=dict)
    """Sent KV, by name of the target."""

    def looked_up(self, tokens: int, hit_tokens: int) -> None:
        """Record the prefix cache lookup of one prompt."""
        self.queries += tokens
        self.hits += hit_tokens

    def iteration(self, iteration_s: float, batch: int) -> None:
        """Record the start of an iteration of this length: once per change of the batch's members, not per token."""
        if batch:
            self.token_s.add(iteration_s, batch)

    def answered(self, tokens: int, request_s: float) -> None:
        """Record one complete answer."""
        self.generation_tokens += tokens
        self.finished += 1
        self.request_s.add(request_s)

    def transferred(self, source: str, kv_bytes: float, seconds: float, *, early: bool = False) -> None:
        """Record one KV transfer from `source`: modelled bytes, and seconds from the request to the last byte."""
        pulled = (self.early if early else self.pulled).setdefault(source, Pulled())
        pulled.kv_bytes += kv_bytes
        pulled.seconds += seconds
        pulled.transfers += 1

    def sends(self, target: str, nbytes: float, busy_s: float) -> None:
        """Record bytes sent to `target` over a connection that was busy with them for `busy_s` seconds."""
        sent = self.sent.setdefault(target, SentKv())
        sent.nbytes += max(nbytes, 0.0)
        sent.busy_s += busy_s


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """An engine's gauges at one moment."""

    running: int
    waiting: int
    kv_used_share: float
    block_tokens: int
    capacity_blocks: int
    started_s: float
    """Start time of the process, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """What one data-parallel rank of a server shows on the page."""

    rank: int
    load: EngineGauges
    counters: EngineCounters
    links: Mapping[str, TargetConnections]
    """Transfers in progress at time `now`, by target."""
    now: float


def metrics_page(model: str, ranks: Sequence[RankMetrics]) -> bytes:
    """Return the page that Prometheus scrapes, with a label `engine` for the rank."""
    families: dict[str, dict[str, None]] = {}
    for rank in ranks:
        family: dict[str, None] = {}
        for line in _rank_lines(model, rank, sum(other.load.capacity_blocks for other in ranks)):
            if line.startswith("# TYPE"):
                family = families.setdefault(line, {})
            else:
                family[line] = None  # the line with the start of the process is the same for all ranks
    return ("\n".join(line for head, lines in families.items() for line in (head, *lines)) + "\n").encode()


def _rank_lines(model: str, metrics: RankMetrics, server_blocks: int) -> list[str]:
    """Return the lines of one rank; kvroute's own counters, which vLLM lacks, come last.

    Args:
        model: name of the model.
        metrics: those of the rank.
        server_blocks: KV blocks of all ranks, which vLLM gives for each of them.
    """
    load, counters, engine = metrics.load, metrics.counters, f'engine="{metrics.rank}"'
    labels = f'{engine},model_name="{model}"'
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {load.started_s!r}",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{load.block_tokens}",enable_prefix_caching="True",{engine},'
        f'num_gpu_blocks="{server_blocks}"}} 1.0',
    ]
    gauges = {
        "vllm:num_requests_running": load.running,
        "vllm:num_requests_waiting": load.waiting,
        "vllm:kv_cache_usage_perc": load.kv_used_share,
    }
    for name, value in gauges.items():
        lines += [f"# TYPE {name} gauge", f"{name}{{{labels}}} {float(value)!r}"]
    lines += _counter_lines(labels, counters)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", counters.ttft_s),
        ("vllm:inter_token_latency_seconds", counters.token_s),
        ("vllm:request_queue_time_seconds", counters.queue_s),
        ("vllm:request_prefill_time_seconds", counters.prefill_s),
        ("vllm:e2e_request_latency_seconds", counters.request_s),
    ):
        lines += histogram.lines(name, labels)
    return [*lines, *_pulled_lines(counters, engine), *_sent_lines(metrics, engine)]


def storage_lines(model: str, node: StorageNode) -> bytes:
    """Return the samples of an instance's storage node; all instances of a node return the same."""
    labels, lines = f'model_name="{model}"', []
    for name, kind, value in (
        ("kvroute:storage_queued_bytes", "gauge", node.queued_bytes),
        ("kvroute:storage_buffered_bytes", "gauge", node.buffered_bytes),
        ("kvroute:storage_read_bytes_total", "counter", node.read_bytes),
        ("kvroute:storage_written_bytes_total", "counter", node.written_bytes),
    ):
        lines += [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)!r}"]
    return ("\n".join(lines) + "\n").encode()


def _counter_lines(labels: str, counters: EngineCounters) -> list[str]:
    totals = {
        "vllm:prefix_cache_queries": counters.queries,
        "vllm:prefix_cache_hits": counters.hits,
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
        "vllm:nixl_num_failed_transfers": counters.kv_failed,
        "vllm:nixl_num_kv_expired_reqs": counters.kv_expired,
    }
    lines = []
    for name, value in totals.items():
        lines += [f"# TYPE {name} counter", f"{name}_total{{{labels}}} {value}.0"]
    finished = f'{labels},finished_reason="length"'
    return [
        *lines,
        "# TYPE vllm:request_success counter",
        f"vllm:request_success_total{{{finished}}} {counters.finished}.0",
    ]


def _pulled_lines(counters: EngineCounters, engine: str) -> list[str]:
    lines = []
    for name, attribute in (("bytes", "kv_bytes"), ("seconds", "seconds"), ("", "transfers")):
        full = f"kvroute:kv_transfer_{name}" if name else "kvroute:kv_transfers"
        lines.append(f"# TYPE {full} counter")
        lines += [
            f'{full}_total{{source="{source}",{engine}}} {float(getattr(pulled, attribute))!r}'
            for source, pulled in counters.pulled.items()
        ]
    for name, attribute in (("kv_early", "transfers"), ("kv_early_bytes", "kv_bytes")):
        lines.append(f"# TYPE kvroute:{name} counter")
        lines += [
            f'kvroute:{name}_total{{source="{source}",{engine}}} {float(getattr(pulled, attribute))!r}'
            for source, pulled in counters.early.items()
        ]
    return lines


def _sent_lines(metrics: RankMetrics, engine: str) -> list[str]:
    """Return the lines about sent KV, with the connector's names for kernel statistics.

    There are no retransmissions here. A full link of the path adds a queueing delay of one round trip, so the
    round-trip time doubles.
    """
    rest = TargetConnections(0, 0.0, 0.0, 0.0)
    rows = [(target, sent, metrics.links.get(target, rest)) for target, sent in metrics.counters.sent.items()]
    families: dict[str, list[float]] = {
        "kv_sent_bytes_total": [sent.nbytes for _, sent, _ in rows],
        "kv_sent_again_bytes_total": [0.0 for _ in rows],
        "kv_sent_busy_seconds_total": [sent.busy_s for _, sent, _ in rows],
        "kv_link_connections": [link.connections for _, _, link in rows],
        "kv_link_rtt_seconds": [4.0 * link.latency_s for _, _, link in rows],
        "kv_link_min_rtt_seconds": [2.0 * link.latency_s for _, _, link in rows],
        "kv_link_queue_bytes": [link.queue_bytes for _, _, link in rows],
        "kv_link_unsent_bytes": [link.queue_bytes for _, _, link in rows],
        "kv_link_delivery_bytes_per_second": [link.bytes_per_s for _, _, link in rows],
        "kv_link_looked_seconds": [metrics.now for _ in rows],
    }
    lines = []
    for name, values in families.items():
        lines.append(
            f"# TYPE kvroute:{name.removesuffix('_total')} {'counter' if name.endswith('_total') else 'gauge'}"
        )
        lines += [
            f'kvroute:{name}{{target="{target}",{engine}}} {float(value)!r}'
            for (target, _, _), value in zip(rows, values, strict=True)
        ]
    return lines
