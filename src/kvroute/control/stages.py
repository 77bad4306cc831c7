"""What prefill and decode of several datacenters can do now, and how busy they are: the figures behind a review."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvroute.control.datacenters import Datacenters
from kvroute.control.pool import DecodePool, PrefillPool
from kvroute.control.view import View
from kvroute.llm import Model
from kvroute.policies.allocation import Capacity, Home, Stage, StageLoad
from kvroute.policies.throughput import Curve, PrfaasCluster, kv_curve, prefill_curve
from kvroute.timing import IterationTime
from kvroute.types import IntArray


@dataclass(slots=True)
class Stages:
    """The pools of one model, by datacenter. A site computes as its first instance does."""

    view: View
    datacenters: Datacenters
    prefill: PrefillPool
    decode: DecodePool
    model: Model
    _prefill_at: dict[int, IntArray] = field(init=False)
    _decode_at: dict[int, IntArray] = field(init=False)

    def __post_init__(self) -> None:
        self._prefill_at = self.datacenters.members(self.prefill.ids)
        self._decode_at = self.datacenters.members(self.decode.ids)

    def capacity(self, at: float, egress_bytes_per_s: Mapping[int, float]) -> Capacity:
        """Instances that are up; of PrfaaS sites only those whose egress is given, bytes per second by site."""
        prfaas = tuple(
            PrfaasCluster(int(self.prefill.up[self._prefill_at[site]].sum()), self._curve(site), free_bytes_per_s)
            for site, free_bytes_per_s in sorted(egress_bytes_per_s.items())
        )
        return Capacity(kv_curve(self.model), prfaas, tuple(self._home(site, at) for site in self.datacenters.pd))

    def _home(self, site: int, at: float) -> Home:
        """The instances of a PD site, idle first."""
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
        """A home that has no prefill instance now computes as its decode instances would."""
        here = self._prefill_at[site]
        if len(here):
            return prefill_curve(self.prefill.times[self.prefill.timing[int(here[0])]])
        first = int(self.decode.ids[int(self._decode_at[site][0])])
        return prefill_curve(self.prefill.times[self.view.cluster.instances[first].timing])

    def loads(self, at: float, output_tokens: float) -> dict[Stage, StageLoad]:
        """The share of instances, or of decode slots, that are busy, and the work that waits. An answer has
        `output_tokens`."""
        loads: dict[Stage, StageLoad] = {}
        stages: tuple[tuple[Stage, Sequence[int]], ...] = (
            ("prfaas", self.datacenters.prfaas),
            ("prefill", self.datacenters.pd),
        )
        for stage, sites in stages:
            members = np.concatenate([self._prefill_at[site] for site in sites])
            up = members[self.prefill.up[members]]
            if len(up):
                busy = float((self.prefill.assigned[up] > 0).mean())
                loads[stage] = StageLoad(busy, float(self.prefill.pending_s(at)[up].min()))
        slots = int(self.decode.batch_max[self.decode.up].sum())
        if slots:
            taken = int((self.decode.batch + self.decode.queued)[self.decode.up].sum())
            answer_s = float(self.decode.iteration_base_s.mean()) * output_tokens
            loads["decode"] = StageLoad(min(taken / slots, 1.0), max(taken / slots - 1.0, 0.0) * answer_s)
        return loads
