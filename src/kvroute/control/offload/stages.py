"""Capacity and utilisation of prefill and decode in several datacenters: the input of a review."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from kvroute.control.offload.allocation import SiteCapacity
from kvroute.control.state.datacenters import Datacenters
from kvroute.control.state.pool import DecodePool, PrefillPool
from kvroute.control.state.traffic import Tally
from kvroute.control.view import ClusterView
from kvroute.llm import Model
from kvroute.policies.fleet.role_switch import Home, Stage, StageLoad
from kvroute.policies.fleet.throughput import Curve, PrfaasCluster, kv_curve, prefill_curve
from kvroute.timing import IterationTime
from kvroute.types import FloatArray, IntArray, Request

_STAGES: tuple[Stage, ...] = get_args(Stage)
_SAMPLES = len(_STAGES)
"""The column after those of the stages: number of samples."""
_CHECKS = 300
"""Maximum number of utilisation samples in a window."""


@dataclass(slots=True)
class Stages:
    """The pools of one model, by datacenter. All instances of a site are assumed as fast as its first one."""

    view: ClusterView
    datacenters: Datacenters
    prefill: PrefillPool
    decode: DecodePool
    model: Model
    window_s: float
    """Length of the window that a review considers."""
    _prefill_at: dict[int, IntArray] = field(init=False)
    _decode_at: dict[int, IntArray] = field(init=False)
    _busy: Tally = field(init=False)
    """Busy instances at each stage, summed over samples."""
    _saved_s: Tally = field(init=False)
    """Time that cached prefixes have saved, in seconds of one instance, by index in the cluster."""
    _hits: Tally = field(init=False)
    """Number of cached blocks that were found, by index in the cluster."""
    _check_at: float = 0.0

    def __post_init__(self) -> None:
        self._prefill_at = self.datacenters.members(self.prefill.ids)
        self._decode_at = self.datacenters.members(self.decode.ids)
        self._busy = Tally(self.window_s, len(_STAGES) + 1)
        self._saved_s = Tally(self.window_s, len(self.view.cluster.instances))
        self._hits = Tally(self.window_s, len(self.view.cluster.instances))

    def capacity(self, at: float, egress_bytes_per_s: Mapping[int, float]) -> SiteCapacity:
        """Capacity of the instances that are up; a PrfaaS site counts only if `egress_bytes_per_s` lists it."""
        prfaas = tuple(
            PrfaasCluster(int(self.prefill.up[self._prefill_at[site]].sum()), self._curve(site), free_bytes_per_s)
            for site, free_bytes_per_s in sorted(egress_bytes_per_s.items())
        )
        return SiteCapacity(kv_curve(self.model), prfaas, tuple(self._home(site, at) for site in self.datacenters.pd))

    def _home(self, site: int, at: float) -> Home:
        """The instances of a PD site, least loaded first."""
        here, decoders = self._prefill_at[site], self._decode_at[site]
        prefill = here[self.prefill.up[here]]
        prefill = prefill[np.argsort(self.prefill.pending_s(at)[prefill], kind="stable")]
        decode = decoders[self.decode.up[decoders]]
        decode = decode[np.argsort((self.decode.batch + self.decode.queued)[decode], kind="stable")]
        cluster, first = self.view.cluster, int(decoders[0])
        spec = cluster.timing[cluster.instances[int(self.decode.ids[first])].timing].decode
        batch_max = int(self.decode.batch_max[first])
        return Home(
            prefill=[self.prefill.names[position] for position in prefill.tolist()],
            decode=[self.decode.names[position] for position in decode.tolist()],
            prefill_s=self._curve(site),
            batch_max=batch_max,
            iteration_s=IterationTime.of(spec).seconds(batch_max),
        )

    def _curve(self, site: int) -> Curve:
        """Prefill curve of a site. A home without a prefill instance uses the timing of its decode instances."""
        here = self._prefill_at[site]
        if len(here):
            return prefill_curve(self.prefill.times[self.prefill.timing[int(here[0])]])
        first = int(self.decode.ids[int(self._decode_at[site][0])])
        return prefill_curve(self.prefill.times[self.view.cluster.instances[first].timing])

    def observe(self, at: float) -> None:
        """Sample the utilisation of the stages if the last sample is old enough."""
        if at < self._check_at:
            return
        self._check_at = at + self.window_s / _CHECKS
        works = self.prefill.assigned > 0
        slots = np.minimum(self.decode.batch + self.decode.queued, self.decode.batch_max) / self.decode.batch_max
        work = [float(works[self._members(sites)].sum()) for sites in (self.datacenters.prfaas, self.datacenters.pd)]
        self._busy.add(at, np.array([*work, float(slots.sum()), 1.0]))

    def prefilled(self, at: float, position: int, request: Request, hit_tokens: int) -> None:
        """Record that a prompt with `hit_tokens` cached tokens goes to this position of the prefill pool."""
        if hit_tokens:
            time = self.prefill.times[self.prefill.timing[position]]
            saved_s = time.seconds(request.input_tokens) - time.seconds(request.input_tokens, hit_tokens)
            self._saved(at, int(self.prefill.ids[position]), saved_s, hit_tokens / request.block_tokens)

    def decoded(self, at: float, position: int, request: Request, hit_tokens: int, saved_s: float) -> None:
        """Record that a request with `hit_tokens` cached tokens goes to this position of the decode pool. Its transfer
        takes `saved_s` less, and one slot of the batch waits that much less."""
        if hit_tokens:
            slot_s = saved_s / float(self.decode.batch_max[position])
            self._saved(at, int(self.decode.ids[position]), slot_s, hit_tokens / request.block_tokens)

    def _saved(self, at: float, index: int, saved_s: float, blocks: float) -> None:
        self._saved_s.add_one(at, index, saved_s)
        self._hits.add_one(at, index, blocks)

    def costs_s(self, at: float, output_tokens: float, longest_tokens: float) -> dict[str, float]:
        """Cost of a role switch of each instance that is up, in seconds of one instance.

        It counts the time that cached prefixes saved in the window, but each block once, however often it was found:
        once another instance has computed it, it is cached there. A decode instance with requests adds the slots that
        stay empty until its last request ends; a prefill instance is busy until its end. A response has `output_tokens`
        tokens on average and at most `longest_tokens`.
        """
        saved_s, hits, decode = self._saved_s.window(at), self._hits.window(at), self.decode
        costs = dict[str, float]()
        for k, name in enumerate(self.prefill.names):
            if self.prefill.up[k]:
                costs[name] = self._lost_s(int(self.prefill.ids[k]), saved_s, hits)
        idle_tokens = max(longest_tokens - output_tokens / 2, 0.0)  # requests in progress are on average half done
        drain_s = np.where(decode.batch + decode.queued > 0, decode.iteration_base_s * idle_tokens, 0.0)
        for k, name in enumerate(decode.names):
            if decode.up[k]:
                costs[name] = self._lost_s(int(decode.ids[k]), saved_s, hits) + float(drain_s[k])
        return costs

    def _lost_s(self, index: int, saved_s: FloatArray, hits: FloatArray) -> float:
        held = self.view.caches.prefix.used_blocks(index)
        return float(saved_s[index]) * min(held / float(hits[index]), 1.0) if hits[index] else 0.0

    def loads(self, at: float, output_tokens: float) -> dict[Stage, StageLoad]:
        """Busy share and queue of each stage, of instances or of decode slots. Args: `output_tokens`: mean response."""
        pending_s, loads = self.prefill.pending_s(at), dict[Stage, StageLoad]()
        stages: tuple[tuple[Stage, Sequence[int]], ...] = (
            ("prfaas", self.datacenters.prfaas),
            ("prefill", self.datacenters.pd),
        )
        for stage, sites in stages:
            members = self._members(sites)
            up = members[self.prefill.up[members]]
            if len(up):
                loads[stage] = StageLoad(*self._shares(at, stage, len(up), float(pending_s[up].min())))
        slots, count = int(self.decode.batch_max[self.decode.up].sum()), int(self.decode.up.sum())
        if slots:
            taken = int((self.decode.batch + self.decode.queued)[self.decode.up].sum())
            answer_s = float(self.decode.iteration_base_s.mean()) * output_tokens
            queue_s = max(taken / slots - 1.0, 0.0) * answer_s
            loads["decode"] = StageLoad(*self._shares(at, "decode", count, queue_s))
        return loads

    def _shares(self, at: float, stage: Stage, instances: int, queue_s: float) -> tuple[float, float, float]:
        """Recent utilisation, queue in seconds, and utilisation in the busiest part of the window."""
        column, parts = _STAGES.index(stage), self._busy.parts(at)
        seen = parts[parts[:, _SAMPLES] > 0]
        late = self._busy.recent(at)
        recent = float(late[column] / late[_SAMPLES]) if late[_SAMPLES] else 0.0
        peak = max(recent, float((seen[:, column] / seen[:, _SAMPLES]).max(initial=0.0)))
        return min(recent / instances, 1.0), queue_s, peak / instances

    def _members(self, sites: Sequence[int]) -> IntArray:
        """Positions in the prefill pool of the instances at these sites."""
        return np.concatenate([self._prefill_at[site] for site in sites])
