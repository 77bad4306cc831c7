"""The rate that a placement sustains under its SLOs, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvroute.planner.placement.instances import PlacedInstance
from kvroute.planner.placement.problem import PlacementProblem
from kvroute.planner.placement.transfers import all_reduce_load, kv_load, sample_transfers
from kvroute.timing.queueing import DecodeLoad, highest_rate, waiting
from kvroute.types import FloatArray

_UTILISATION_MAX = 0.999
"""Above this utilisation the times of a link are not increased any more; the attainment is 0 at 1."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A placement at one request rate."""

    rate_per_s: float
    ttft_attainment: float
    """Share of the requests that meet the TTFT."""
    tpot_attainment: float
    """Share of the requests that meet the TPOT, with room on a decode instance or not."""
    room: float
    """Share of the requests that find room on their decode instance on arrival."""
    prefill_utilisation: float
    """Highest utilisation of a prefill stage."""
    decode_batch: float
    """Highest mean number of requests of a decode instance."""
    link_utilisation: float
    """Highest utilisation of a link."""
    transfer_s: float
    """Mean time of a KV transfer."""

    @property
    def attainment(self) -> float:
        """Share of the requests that meet both SLOs; the phases are taken as independent."""
        return self.ttft_attainment * self.tpot_attainment * self.room


@dataclass(frozen=True, slots=True)
class _Class:
    """Equal instances: one of them, and what all have in common."""

    instance: PlacedInstance
    count: int
    share: float
    """Share of the requests of one instance."""
    kv_s: float
    """Utilisation by KV transfers of the busiest link of an instance's groups, at one request per second."""

    def slowdown(self, rate_per_s: float) -> float:
        return 1.0 / (1.0 - min(rate_per_s * self.kv_s, _UTILISATION_MAX))


class Evaluation:
    """Attainment of one placement as a function of the request rate.

    Requests are spread over instances in proportion to what each sustains alone. On a link with utilisation u an
    all-reduce or a KV transfer takes 1 / (1 - u) times as long as on an idle network (processor sharing).
    """

    def __init__(
        self, problem: PlacementProblem, prefill: Sequence[PlacedInstance], decode: Sequence[PlacedInstance]
    ) -> None:
        """Price a placement; both sides have an instance that meets the SLOs on an idle cluster."""
        self._problem, self._mix = problem, problem.lengths.mix
        rates = [np.array([isolated_per_s(problem, instance) for instance in side]) for side in (prefill, decode)]
        self._most_per_s = 2.0 * float(max(rates[0].sum(), rates[1].sum()))
        shares = rates[0] / rates[0].sum(), rates[1] / rates[1].sum()
        kv = kv_load(problem, prefill, decode, shares)
        reduced = [all_reduce_load(problem, side, share) for side, share in zip((prefill, decode), shares, strict=True)]
        capacity = problem.cluster.capacity_bytes_per_s
        self._link_s: FloatArray = (kv + reduced[0][0] + reduced[1][0]) / capacity
        kv_s = kv / capacity
        busiest = [[float(kv_s[links].max(initial=0.0)) for links in used] for _, used in reduced]
        self._prefill = _classes(prefill, shares[0], busiest[0])
        self._decode = _classes(decode, shares[1], busiest[1])
        transfers = sample_transfers(problem.cluster, prefill, decode)
        self._transfers = [(transfer.line, float(self._link_s[list(transfer.links)].max())) for transfer in transfers]
        nbytes = np.array([problem.model.kv_bytes(round(tokens)) for tokens in self._mix.tokens.tolist()])
        self._kv_bytes: FloatArray = nbytes

    @property
    def network_per_s(self) -> float:
        """Rate at which the busiest link is fully used; infinite if no link is used."""
        busy = float(self._link_s.max())
        return 1.0 / busy if busy > 0.0 else math.inf

    def busiest_link(self) -> str:
        """Return the name of the link with the highest utilisation."""
        return self._problem.cluster.links[int(self._link_s.argmax())].name

    def rate_per_s(self) -> float:
        """Return the highest rate at which enough requests meet both SLOs."""
        return self._highest(lambda at: self.operation(at).attainment)

    def bounds_per_s(self) -> dict[str, float]:
        """Return the rate that each constraint would allow alone, ascending: the phases on an idle network, and the
        network until a link is full."""
        found = {
            "prefill (TTFT)": self._highest(lambda at: self.operation(at, network=False).ttft_attainment),
            "decode (TPOT)": self._highest(lambda at: self.operation(at, network=False).tpot_attainment),
            "decode (KV memory and batch)": self._highest(lambda at: self.operation(at, network=False).room),
            f"network ({self.busiest_link()})": self.network_per_s,
        }
        return dict(sorted(found.items(), key=lambda bound: bound[1]))

    def _highest(self, attainment_of: Callable[[float], float]) -> float:
        return highest_rate(self._problem.objective.attainment, attainment_of, self._most_per_s)

    def operation(self, rate_per_s: float, *, network: bool = True) -> OperatingPoint:
        """Return the placement at a request rate; without `network`, as if its links were idle."""
        objective, network_per_s = self._problem.objective, rate_per_s if network else 0.0
        link = network_per_s * float(self._link_s.max())
        transfers = self._transfer_s(network_per_s)
        tpot = room = batch = step_s = 0.0
        for member in self._decode:
            load = decode_load(self._problem, member.instance, member.slowdown(network_per_s))
            share = member.count * member.share
            mean = load.mean_batch(rate_per_s * member.share)
            tpot += share * load.tpot_attainment(rate_per_s * member.share, objective.tpot_s)
            room += share * load.room(rate_per_s * member.share)
            batch = max(batch, mean)
            step_s += share * load.step_s(mean)
        # KV arrives in the middle of an iteration; the first token comes at the end of the next one.
        spare_s = objective.ttft_s - transfers - 1.5 * step_s
        ttft = utilisation = 0.0
        for member in self._prefill:
            prefill_s = member.instance.times(member.slowdown(network_per_s)).prefill_s(self._mix.tokens)
            stage_s = prefill_s * member.instance.roofline.stage_share
            queue = waiting(rate_per_s * member.share, stage_s, self._mix.share)
            within = queue.within(spare_s - prefill_s) @ self._mix.share
            ttft += member.count * member.share * float(within.mean())
            utilisation = max(utilisation, queue.utilisation)
        alive = 1.0 if link < 1.0 else 0.0
        return OperatingPoint(
            rate_per_s=rate_per_s,
            ttft_attainment=alive * ttft,
            tpot_attainment=alive * tpot,
            room=room,
            prefill_utilisation=utilisation,
            decode_batch=batch,
            link_utilisation=link,
            transfer_s=float((transfers @ self._mix.share).mean()),
        )

    def _transfer_s(self, rate_per_s: float) -> FloatArray:
        """Return the time of a transfer, [pair, length]."""
        rows = []
        for line, busy in self._transfers:
            slowdown = 1.0 / (1.0 - min(rate_per_s * busy, _UTILISATION_MAX))
            rows.append(line.latency_s + line.s_per_byte * self._kv_bytes * slowdown)
        return np.array(rows)


def _classes(instances: Sequence[PlacedInstance], shares: FloatArray, kv_s: Sequence[float]) -> list[_Class]:
    """Return the instances by their times and loads; loads that differ by less than a thousandth are equal."""
    found: dict[tuple[object, ...], _Class] = {}
    for instance, share, busy in zip(instances, shares.tolist(), kv_s, strict=True):
        key = (instance.roofline.kind.name, instance.split, instance.communication, f"{busy:.3g}")
        count = found[key].count + 1 if key in found else 1
        found[key] = _Class(found[key].instance if key in found else instance, count, share, float(f"{busy:.3g}"))
    return list(found.values())


def decode_load(problem: PlacementProblem, instance: PlacedInstance, slowdown: float = 1.0) -> DecodeLoad:
    """Return the decode times and the room of an instance for the problem's mean request."""
    form = instance.times(slowdown).decode
    mean, output = problem.lengths.mix.mean_tokens, problem.output_tokens
    return DecodeLoad(
        base_s=form.base_s,
        per_request_s=form.per_request_s + form.per_context_token_s * (mean + output / 2),
        output_tokens=output,
        batch_max=problem.batch_max * instance.split.pp,
        kv_tokens=instance.roofline.kv_tokens(),
        request_tokens=mean + output,
        request_tokens2=float((problem.lengths.mix.tokens + output) ** 2 @ problem.lengths.mix.share),
    )


def isolated_per_s(problem: PlacementProblem, instance: PlacedInstance) -> float:
    """Return the requests per second of an instance without queues; 0 if its memory is too small, or if even a lonely
    request of mean length misses the SLO."""
    objective, mix = problem.objective, problem.lengths.mix
    longest = float(mix.tokens[-1])
    if instance.roofline.kv_tokens() < longest + (problem.output_tokens if instance.phase == "decode" else 0):
        return 0.0
    if instance.phase == "decode":
        return decode_load(problem, instance).rate_bound_per_s(objective.tpot_s)
    seconds = instance.times().prefill_s(mix.tokens)
    if float((seconds <= objective.ttft_s) @ mix.share) < objective.attainment:
        return 0.0
    return 1.0 / (instance.roofline.stage_share * float(seconds @ mix.share))
