"""Results of a run: one row per request, and the summary behind tables, figures and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from kvroute.sim.network.link_load import LinkLoad, LinkShare
from kvroute.sim.network.transfers import MovedBytes
from kvroute.sim.settings import SimSpec
from kvroute.types import TIER_COUNT, FloatArray, IntArray

IN_FLIGHT, FINISHED, REJECTED, NOT_ARRIVED = 0, 1, 2, 3
NOTHING = MovedBytes()


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Columns of length n in the trace's order. Times are absolute seconds, NaN where the step was not reached."""

    arrived_s: FloatArray
    prefill_started_s: FloatArray
    prefill_finished_s: FloatArray
    landed_s: FloatArray
    admitted_s: FloatArray
    first_token_s: FloatArray
    finished_s: FloatArray
    entry_iteration_s: FloatArray
    """Duration of the iteration in which the request joined the batch: NetKV's TBT."""
    kv_bytes: FloatArray
    state: IntArray
    tier: IntArray
    source: IntArray
    target: IntArray
    """Cluster index of the instances, -1 if none was chosen."""
    hit_tokens: IntArray
    cached_tokens: IntArray
    """Prompt tokens that prefill did not have to compute."""
    input_tokens: IntArray
    output_tokens: IntArray

    @classmethod
    def empty(cls, count: int) -> Outcomes:
        """Return rows for `count` requests that have not arrived."""
        whole = {"state", "tier", "source", "target", "hit_tokens", "cached_tokens", "input_tokens", "output_tokens"}
        columns = {
            field.name: np.zeros(count, dtype=np.int64) if field.name in whole else np.full(count, np.nan)
            for field in fields(cls)
        }
        for name in ("tier", "source", "target"):
            columns[name] -= 1
        columns["state"] += NOT_ARRIVED
        return cls(**columns)  # type: ignore[arg-type]  # float and int columns by name

    @property
    def ttft_s(self) -> FloatArray:
        """Time from arrival to first token, transfer included."""
        ttft: FloatArray = self.first_token_s - self.arrived_s
        return ttft


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and quantiles in seconds; None where nothing was measured."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: FloatArray) -> Spread:
        """Summarise the finite values."""
        values = values[np.isfinite(values)]
        if not values.size:
            return cls()
        p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99)).tolist()
        return cls(mean=float(values.mean()), p50=p50, p95=p95, p99=p99)


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of requests of the whole run, each counted once: arrived = finished + rejected + in_flight."""

    arrived: int
    finished: int
    rejected: int
    in_flight: int


class TtftParts(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of each part; they add up to the mean TTFT of the requests that got a first token."""

    prefill_wait: float | None = None
    prefill: float | None = None
    transfer: float | None = None
    queue: float | None = None
    first_step: float | None = None


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Own traffic per tier over time: mean share of the tier's capacity used since the previous refresh."""

    at_s: tuple[float, ...]
    tier: dict[str, tuple[float, ...]]
    threshold_tokens: tuple[float, ...] = ()
    """Lowest routing threshold at each refresh; empty if nothing is offloaded."""


class StoreTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What the storage NICs have carried in the whole run."""

    reads: int = 0
    """Requests with a read."""
    prefill_bytes: float = 0.0
    """Bytes read by prefill nodes."""
    decode_bytes: float = 0.0
    """Bytes read by decode nodes."""
    written_bytes: float = 0.0
    balance: float | None = None
    """Bytes read by the busiest node divided by the mean of all nodes with a storage NIC; None: nothing was read."""


class AllReduceCost(msgspec.Struct, frozen=True, kw_only=True):
    """All-reduces on shared links in the iterations of one phase that have ended in the whole run."""

    iterations: int = 0
    """Decode iterations, or prompts in one pipeline stage."""
    share: float | None = None
    """Share of the time of these iterations that all-reduces took; None: they took no time."""
    slowdown: float | None = None
    """Time of the all-reduces divided by that on an idle network; None: there was no all-reduce."""
    network_bytes: float = 0.0
    """Bytes of the all-reduces, summed over all links."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one run. Counts cover the whole run, all other values the measurement window."""

    policy: str
    seed: int
    requests: RequestCounts
    measured: int
    ttft_s: Spread
    ttft_parts_s: TtftParts
    transfer_s: Spread
    tbt_s: Spread
    tpot_s: Spread
    slo_attainment: float | None
    """Share of the requests for output tokens that got the first token in time; a rejected request did not."""
    goodput_per_s: float | None
    throughput_per_s: float | None
    reject_reason: str | None = None
    """Reason for the first rejection of the run."""
    tier_share: dict[str, float]
    """Share of the KV transfers by tier."""
    aggregated_share: float = 0.0
    """Share of the requests that one instance served, without a transfer."""
    cache_hit: float | None
    """Share of prompt tokens found on the chosen decode instance."""
    prefill_cache_hit: float | None
    kv_bytes: float
    link_load: dict[str, LinkLoad]
    busiest_links: tuple[LinkShare, ...] = ()
    """The ten links with the highest share of capacity used."""
    failed_transfers: MovedBytes = NOTHING
    """Bytes sent by failed transfers in the whole run; their requests started again."""
    copied_prefixes: MovedBytes = NOTHING
    """Cached prefixes copied between instances for a prefill in the whole run."""
    copied_ahead: MovedBytes = NOTHING
    """Cached prefixes copied in the whole run before a request needed them at the target."""
    store: StoreTotals | None = None
    """Reads and writes of the store; None without one."""
    all_reduces: dict[str, AllReduceCost] = {}
    """By phase, `prefill` and `decode`, if it had iterations whose all-reduces share links with other traffic."""
    role_switches: int = 0
    """Completed role switches in the whole run."""
    threshold_tokens: float | None = None
    """Median of the lowest routing threshold over the whole run; None if nothing is offloaded."""
    decision_s: float | None = None
    """Median wall time of one decode decision."""
    wall_s: float
    cpu_s: float


def window(outcomes: Outcomes, settings: SimSpec) -> npt.NDArray[np.bool_]:
    """Return the mask of the requests that count: those that arrived inside the measurement window."""
    inside = outcomes.arrived_s >= settings.warmup_s
    if settings.measure_s is not None:
        inside &= outcomes.arrived_s < settings.warmup_s + settings.measure_s
    mask: npt.NDArray[np.bool_] = inside & (outcomes.state != NOT_ARRIVED)
    return mask


def summarise(
    outcomes: Outcomes,
    settings: SimSpec,
    *,
    policy: str,
    seed: int,
    link_load: dict[str, LinkLoad],
    busiest_links: tuple[LinkShare, ...],
    reject_reason: str | None = None,
    failed: MovedBytes = NOTHING,
    copied: MovedBytes = NOTHING,
    copied_ahead: MovedBytes = NOTHING,
    store: StoreTotals | None = None,
    all_reduces: dict[str, AllReduceCost] | None = None,
    role_switches: int = 0,
    thresholds: Sequence[float] = (),
    decision_s: float | None,
    wall_s: float,
    cpu_s: float,
) -> Summary:
    """Compute the summary of a run."""
    inside = window(outcomes, settings)
    measured = int(inside.sum())
    seconds = _window_s(outcomes, settings, inside)
    good = _good(outcomes, settings)[inside & (outcomes.output_tokens > 0)]
    sent = inside & np.isfinite(outcomes.landed_s)
    aggregated = sent & (outcomes.source == outcomes.target) & (outcomes.source >= 0)
    moved = sent & ~aggregated
    tiers = np.bincount(outcomes.tier[moved], minlength=TIER_COUNT) / max(int(moved.sum()), 1)
    shown = TIER_COUNT if tiers[-1] else TIER_COUNT - 1
    first = inside & np.isfinite(outcomes.first_token_s)
    tpot_s = (outcomes.finished_s - outcomes.first_token_s)[inside] / np.maximum(outcomes.output_tokens[inside] - 1, 1)
    finished = int((outcomes.state[inside] == FINISHED).sum())
    return Summary(
        policy=policy,
        seed=seed,
        requests=_counts(outcomes),
        measured=measured,
        ttft_s=Spread.of(outcomes.ttft_s[inside]),
        ttft_parts_s=_parts(outcomes, first),
        transfer_s=Spread.of((outcomes.landed_s - outcomes.prefill_finished_s)[moved]),
        tbt_s=Spread.of(outcomes.entry_iteration_s[inside]),
        tpot_s=Spread.of(tpot_s[outcomes.output_tokens[inside] > 1]),
        slo_attainment=float(good.mean()) if good.size else None,
        goodput_per_s=float(good.sum() / seconds) if seconds else None,
        throughput_per_s=finished / seconds if seconds else None,
        tier_share={str(tier): float(tiers[tier]) for tier in range(shown)},
        aggregated_share=float(aggregated.sum()) / max(int(sent.sum()), 1),
        cache_hit=_share(outcomes.hit_tokens[sent], outcomes.input_tokens[sent]),
        prefill_cache_hit=_share(outcomes.cached_tokens[inside], outcomes.input_tokens[inside]),
        kv_bytes=float(np.nansum(outcomes.kv_bytes[inside])),
        link_load=link_load,
        busiest_links=busiest_links,
        reject_reason=reject_reason,
        failed_transfers=failed,
        copied_prefixes=copied,
        copied_ahead=copied_ahead,
        store=store,
        all_reduces=all_reduces or {},
        role_switches=role_switches,
        threshold_tokens=float(np.median(thresholds)) if thresholds else None,
        decision_s=decision_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
    )


def _counts(outcomes: Outcomes) -> RequestCounts:
    by_state = np.bincount(outcomes.state, minlength=4)
    return RequestCounts(
        arrived=int(by_state[:NOT_ARRIVED].sum()),
        finished=int(by_state[FINISHED]),
        rejected=int(by_state[REJECTED]),
        in_flight=int(by_state[IN_FLIGHT]),
    )


def _window_s(outcomes: Outcomes, settings: SimSpec, inside: npt.NDArray[np.bool_]) -> float:
    """Length of the measurement window in seconds; without one, the time from first arrival to last finish."""
    if settings.measure_s is not None:
        return settings.measure_s
    finished = outcomes.finished_s[inside & np.isfinite(outcomes.finished_s)]
    return float(finished.max() - outcomes.arrived_s[inside].min()) if finished.size else 0.0


def _good(outcomes: Outcomes, settings: SimSpec) -> npt.NDArray[np.bool_]:
    good: npt.NDArray[np.bool_] = outcomes.ttft_s <= settings.slo.ttft_s  # NaN (no first token) counts as not good
    if settings.slo.tpot_s is not None:
        steps = np.maximum(outcomes.output_tokens - 1, 1)
        good &= (outcomes.finished_s - outcomes.first_token_s) / steps <= settings.slo.tpot_s
    return good


def _parts(outcomes: Outcomes, first: npt.NDArray[np.bool_]) -> TtftParts:
    if not first.any():
        return TtftParts()
    marks = (
        outcomes.arrived_s,
        outcomes.prefill_started_s,
        outcomes.prefill_finished_s,
        outcomes.landed_s,
        np.fmin(outcomes.admitted_s, outcomes.first_token_s),  # the end of a prompt may give the first token
        outcomes.first_token_s,
    )
    means = [float((later - earlier)[first].mean()) for earlier, later in pairwise(marks)]
    return TtftParts(prefill_wait=means[0], prefill=means[1], transfer=means[2], queue=means[3], first_step=means[4])


def _share(part: IntArray, whole: IntArray) -> float | None:
    total = int(whole.sum())
    return int(part.sum()) / total if total else None
