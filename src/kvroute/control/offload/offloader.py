"""Chooses the datacenter that prefills each request: runs the offload policy with the core's view of sites and links.

It books nothing in the pools. It holds the thresholds, the traffic statistics behind them, and the bytes in transfer
between datacenters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvroute.control.booking import Booking
from kvroute.control.offers import BOTH_LEGS, Feature, Offer, Placed
from kvroute.control.offload.allocation import Allocation, Review, SiteCapacity
from kvroute.control.offload.stages import Stages
from kvroute.control.offload.threshold import scarcity_of, threshold_of
from kvroute.control.state.datacenters import Datacenters, Egress
from kvroute.control.state.pool import PrefillPool
from kvroute.control.view import ClusterView
from kvroute.policies import PrefillCandidates
from kvroute.policies.fleet.offload import HOME, OffloadSpec, SiteCandidates, choose_site, longest
from kvroute.policies.fleet.role_switch import PlannedSwitch
from kvroute.types import (
    CROSS_DATACENTER,
    BoolArray,
    Decode,
    FloatArray,
    InputError,
    IntArray,
    Offload,
    Request,
)

_DOWN_SHARE = 0.985
"""Share of a link used by others above which it counts as down; telemetry reports a cut link as full."""
_RATE_MEMORY_S = 5.0


class Offloader(Feature[Offload]):
    """Thresholds and traffic of one model's requests over several datacenters."""

    legs = BOTH_LEGS

    def __init__(self, spec: OffloadSpec, view: ClusterView) -> None:
        """Raises InputError if the cluster serves several models or KV protocols, or has no site to offload to."""
        if len(view.models) > 1:
            what = f"offloading supports one model, but the cluster serves {', '.join(view.models)}"
            raise InputError(what, where=view.cluster.name, hint="use one cluster file per model")
        if len(view.decode) > 1:
            what = "offloading supports one KV protocol, but the instances use several"
            raise InputError(what, where=view.cluster.name, hint="use one cluster file per protocol")
        self.spec, self._view = spec, view
        ((served, self._model),) = view.models.items()
        self.datacenters = Datacenters.of_cluster(view.cluster)
        self.thresholds = {site: threshold_of(spec) for site in self.datacenters.prfaas}
        self._scarcity = {site: scarcity_of(spec) for site in self.datacenters.prfaas}
        self.egress = {
            site: Egress(self.datacenters.egress_bytes_per_s[site], _RATE_MEMORY_S) for site in self.datacenters.prfaas
        }
        self._ingress = {
            site: Egress(self.datacenters.egress_bytes_per_s[site], _RATE_MEMORY_S) for site in self.datacenters.prfaas
        }
        """The same links in the other direction, used only by copies of prefixes. Their bandwidth is the same."""
        self.allocation = Allocation(spec.long_term)
        self.last_review: Review | None = None
        self.switching = 0
        self._searched = spec.threshold_tokens is not None
        self._pool: PrefillPool = view.prefill[served]
        self._members = self.datacenters.members(self._pool.ids)
        self._stages = Stages(
            view, self.datacenters, self._pool, next(iter(view.decode.values())), self._model, spec.long_term.window_s
        )

    def site_of(self, instance: int) -> int:
        """Site of an instance of the cluster."""
        return int(self.datacenters.of[instance])

    def may_switch(self, instance: int) -> bool:
        """Whether an instance of the cluster may change its role."""
        return instance in self._view.settings.switchable

    def utilisation(self, site: int, at: float) -> tuple[float, float]:
        """Utilisation of a PrfaaS site's egress, by others and in total, each 0 to 1. If the telemetry cannot separate
        own traffic, it reports the total; the recent rate of own transfers is then subtracted."""
        measured, own = float(self._view.oracle.congestion(at)[CROSS_DATACENTER]), self.egress[site].own_share(at)
        if self._view.oracle.separates_own_traffic:
            return measured, min(measured + own, 1.0)
        return max(measured - own, 0.0), measured

    def wan_links(self, source: int, target: int) -> tuple[Egress, ...]:
        """The links that own bytes pass from one site to another: one link group, two between two PrfaaS sites, none
        within a site or between home (PD) sites."""
        if source == target:
            return ()
        links = self.egress.get(source), self._ingress.get(target)
        return tuple(link for link in links if link is not None)

    def abundant(self, at: float, most: float) -> tuple[str, ...]:
        """Names of the sites that may exchange prefixes freely: the home sites, and each PrfaaS site that is up, has no
        scarce bandwidth, and uses at most a share `most` of its links in both directions together."""
        joined = [self.datacenters.names[site] for site in self.datacenters.pd]
        for site, threshold in self.thresholds.items():
            busy = self.utilisation(site, at)[1] + self._ingress[site].own_share(at)
            if threshold.up and not self._scarcity[site].scarce and busy <= most:
                joined.append(self.datacenters.names[site])
        return tuple(sorted(joined))

    def free_bytes_per_s(self, at: float, names: Sequence[str]) -> float | None:
        """Free bandwidth of the narrowest link of these sites; None if none of them has a link."""
        sites = [site for site in self.datacenters.prfaas if self.datacenters.names[site] in names]
        left = [self.egress[site].bytes_per_s * (1.0 - self.utilisation(site, at)[1]) for site in sites]
        return min(left, default=None)

    def observe(self, at: float) -> None:
        """Update the thresholds and the scarcity of bandwidth to the state at this time."""
        self._stages.observe(at)
        pending_s = self._pool.pending_s(at)
        home_queue_s = min((self._least(pending_s, self._members[site]) for site in self.datacenters.pd), default=0.0)
        surges = home_queue_s >= self.spec.short_term.queue_high_s  # the median is used only in a surge
        keep_tokens = self.allocation.traffic.median_tokens(at) if surges else math.inf
        back = False
        for site, threshold in self.thresholds.items():
            others, utilisation = self.utilisation(site, at)
            queue_s = max(self._least(pending_s, self._members[site]), self.egress[site].queue_s(others))
            carries = self._carries(site, others)
            back = back or (carries and not threshold.up)
            threshold.set_up(carries)
            threshold.observe(at, utilisation, queue_s, home_queue_s, keep_tokens)
            self._scarcity[site].observe(utilisation)
        if back:
            self._search(at)

    def _carries(self, site: int, others: float) -> bool:
        if not self._pool.up[self._members[site]].any():
            return False
        # Telemetry that includes our own bytes cannot distinguish a link that we fill from a link that is cut.
        return not (self._view.oracle.separates_own_traffic and others >= _DOWN_SHARE)

    def _least(self, pending_s: FloatArray, members: IntArray) -> float:
        up = members[self._pool.up[members]]
        return float(pending_s[up].min()) if len(up) else 0.0

    def offer(self, offer: Offer) -> Offload | None:
        """Choose the site for a request, whose instances are then the only candidates; their times include a copied
        prefix. Return the reason; None if no instance is up at any site. A request stays at home if its offload has
        failed once over the WAN path."""
        at, at_home, request, candidates = offer.at, offer.booking.at_home, offer.booking.request, offer.candidates
        self.observe(at)
        allowed = np.ones(len(candidates.names), dtype=np.bool_) if candidates.allowed is None else candidates.allowed
        home = self._home(candidates, allowed)
        order = (home, *self.datacenters.prfaas)
        sites, holders = self._sites(request, candidates, allowed, order, at, at_home)
        choice = choose_site(self.spec, request.input_tokens, sites)
        if choice.reason == "no_instance_up":
            return None
        if not at_home:
            self.allocation.traffic.arrived(at, choice.incremental_tokens)
            if self.spec.threshold_tokens is None and self.allocation.start_due(at):
                self._search(at)
        chosen = order[choice.index]
        members = np.zeros(len(candidates.names), dtype=np.bool_)
        members[self._members[chosen]] = True
        offer.candidates = msgspec.structs.replace(candidates, allowed=members & allowed)
        if choice.copy_from is not None:
            copies = np.maximum(candidates.hit_tokens, choice.cached_tokens)
            warm_s = self._pool.prefill_s(request.input_tokens, copies)
            offer.candidates = msgspec.structs.replace(offer.candidates, prefill_s=warm_s)
            offer.copy_source, offer.prefix_tokens = holders[choice.copy_from], choice.cached_tokens
        offer.layerwise = offer.layerwise or (chosen != home and self.spec.layerwise)
        return choice.offload()

    def attach(self, booking: Booking, placed: Placed, offload: Offload | None) -> None:
        """See Feature. Count the time that cached tokens save where the leg is computed."""
        request, position, hit_tokens = booking.request, placed.position, placed.hit_tokens
        if isinstance(placed.decision, Decode):
            if hit_tokens:
                whole, rest = (self._model.kv_bytes(request.input_tokens, hit) for hit in (0, hit_tokens))
                saved_s = float(whole - rest) / float(self._view.cluster.tier_bytes_per_s[placed.decision.tier])
                self._stages.decoded(placed.at, position, request, hit_tokens, saved_s)
            return
        self._stages.prefilled(placed.at, position, request, hit_tokens)
        if offload is not None:
            placed.decision = msgspec.structs.replace(placed.decision, offload=offload)

    def _home(self, candidates: PrefillCandidates, allowed: BoolArray) -> int:
        """The PD site that would finish the prefill first without offloading; ties by name."""
        pd = self.datacenters.pd
        if len(pd) == 1:
            return pd[0]
        finish_s = np.where(allowed, candidates.pending_s + candidates.prefill_s, np.inf)
        return min(pd, key=lambda site: float(finish_s[self._members[site]].min(initial=np.inf)))

    def _sites(
        self,
        request: Request,
        candidates: PrefillCandidates,
        allowed: BoolArray,
        order: Sequence[int],
        at: float,
        at_home: bool,
    ) -> tuple[SiteCandidates, list[int]]:
        """The sites as the policy's input, and the instance with the longest cached prefix at each of them."""
        count = len(order)
        up, queue_s, prefill_s = np.zeros(count, dtype=np.bool_), np.zeros(count), np.zeros(count)
        cached, holders = np.zeros(count, dtype=np.int64), [-1] * count
        finish_s = np.where(allowed, candidates.pending_s + candidates.prefill_s, np.inf)
        for position, site in enumerate(order):
            members = self._members[site]
            here = members[allowed[members]]
            if not len(here):
                continue
            up[position] = position == HOME or (self.thresholds[site].up and not at_home)
            soonest = int(here[finish_s[here].argmin()])
            longest_here = int(here[candidates.hit_tokens[here].argmax()])
            queue_s[position], prefill_s[position] = candidates.pending_s[soonest], candidates.prefill_s[soonest]
            cached[position] = candidates.hit_tokens[longest_here]
            holders[position] = int(self._pool.ids[longest_here])
        away = order[1:]
        scarce = np.array([True, *(self._scarcity[site].scarce or not request.copyable for site in away)])
        holder, prefix_tokens = longest(up, scarce, cached)
        warm_s = self._warm_s(request, prefix_tokens, cached, prefill_s, order)
        transfer_s = self._transfer_s(request, cached, away, at)
        copy_s = self._copy_s(order[holder], prefix_tokens, cached, order, at)
        if self.spec.copy_queues and holders[holder] >= 0:
            copy_s[copy_s > 0.0] += self._offer_s(holders[holder], prefix_tokens, candidates)
        return SiteCandidates(
            names=tuple(self.datacenters.names[site] for site in order),
            up=up,
            scarce=scarce,
            threshold_tokens=np.array([0.0, *(self.thresholds[site].tokens for site in away)]),
            utilisation=np.array([0.0, *(self.utilisation(site, at)[1] for site in away)]),
            cached_tokens=cached,
            queue_s=queue_s,
            prefill_s=prefill_s,
            warm_prefill_s=warm_s,
            transfer_s=transfer_s,
            copy_s=copy_s,
        ), holders

    def _warm_s(
        self, request: Request, prefix_tokens: int, cached: IntArray, prefill_s: FloatArray, order: Sequence[int]
    ) -> FloatArray:
        if prefix_tokens <= int(cached.min()):
            return prefill_s
        everywhere = np.full(len(self._pool.ids), prefix_tokens, dtype=np.int64)
        seconds = self._pool.prefill_s(request.input_tokens, everywhere)
        return np.array([float(seconds[self._members[site]].min(initial=np.inf)) for site in order])

    def _transfer_s(self, request: Request, cached: IntArray, away: Sequence[int], at: float) -> FloatArray:
        """Seconds to bring the KV that home lacks from each site to home, behind the bytes already in transfer."""
        kv_bytes = float(self._model.kv_bytes(request.input_tokens, int(cached[HOME])))
        return np.array([0.0, *(self._link_s(self.egress[site], kv_bytes, at) for site in away)])

    def _copy_s(self, source: int, prefix_tokens: int, cached: IntArray, order: Sequence[int], at: float) -> FloatArray:
        """Seconds to copy the part of the longest prefix that each site lacks, behind the bytes already in transfer. A
        path between two PrfaaS sites takes as long as its slower half; copies between home sites take no time."""
        seconds = np.zeros(len(order))
        for position, site in enumerate(order):
            own_tokens = int(cached[position])
            if own_tokens < prefix_tokens:
                nbytes = self.copy_bytes(prefix_tokens, own_tokens)
                seconds[position] = max(
                    (self._link_s(link, nbytes, at) for link in self.wan_links(source, site)), default=0.0
                )
        return seconds

    def _offer_s(self, holder: int, prefix_tokens: int, candidates: PrefillCandidates) -> float:
        """Seconds until an instance offers its cached prefix: its queue and a prefill of zero tokens."""
        position = self._pool.position[holder]
        time = self._pool.times[self._pool.timing[position]]
        return float(candidates.pending_s[position]) + time.seconds(prefix_tokens, prefix_tokens)

    def _link_s(self, link: Egress, nbytes: float, at: float) -> float:
        others = float(self._view.oracle.congestion(at)[CROSS_DATACENTER])
        return link.queue_s(others) + nbytes / (link.bytes_per_s * max(1.0 - others, 0.01))

    def copy_bytes(self, prefix_tokens: int, hit_tokens: int) -> float:
        """KV bytes of a prefix beyond `hit_tokens`."""
        return float(self._model.kv_bytes(prefix_tokens, hit_tokens))

    def answered(self, at: float, output_tokens: int) -> None:
        """Record the length of a response for the reviews."""
        self.allocation.traffic.answered(at, output_tokens)

    def role_switched(self, at: float) -> None:
        """A role switch is complete: search the best threshold again."""
        self.switching -= 1
        self._search(at)

    def restore_threshold(self, site: str, tokens: float, base_tokens: float) -> bool:
        """Restore a site's threshold from another core, except a base set in the spec. Return False if no such site."""
        for number in self.datacenters.prfaas:
            if self.datacenters.names[number] == site:
                self._searched = self._searched or base_tokens < self.spec.short_term.threshold_max_tokens
                self.thresholds[number].resume(tokens, base_tokens if self.spec.threshold_tokens is None else None)
                return True
        return False

    def review(self, at: float) -> tuple[PlannedSwitch, ...]:
        """Search thresholds and roles again if a review is due; return the role switches to start now."""
        self.observe(at)
        limit_tokens = self.allocation.limit_tokens(at, self._capacity(at))
        for threshold in self.thresholds.values():
            threshold.limit(limit_tokens)
        if not self.allocation.due(at):
            return ()
        traffic = self.allocation.traffic
        output_tokens = traffic.output_tokens(at) or 0.0
        loads = self._stages.loads(at, output_tokens)
        costs_s = self._stages.costs_s(at, output_tokens, traffic.longest_tokens(at))
        review = self.allocation.review(at, self._capacity(at), loads, self.switching, self._base_tokens(), costs_s)
        if review is None:
            return ()
        self.last_review = review
        self._rebase(review.threshold_tokens)
        return review.role_switches

    def _search(self, at: float) -> None:
        """Search the best threshold for the present capacity, between reviews."""
        self._rebase(self.allocation.threshold_tokens(at, self._capacity(at), self._base_tokens()))

    def _rebase(self, tokens: float | None) -> None:
        if tokens is not None and self.spec.threshold_tokens is None:
            self._searched = True
            for threshold in self.thresholds.values():
                threshold.rebase(tokens)

    def _base_tokens(self) -> float | None:
        """Base threshold in use; None if no search has been made yet."""
        return min(threshold.base_tokens for threshold in self.thresholds.values()) if self._searched else None

    def _capacity(self, at: float) -> SiteCapacity:
        free_bytes_per_s = {
            site: self.egress[site].bytes_per_s * max(1.0 - self.utilisation(site, at)[0], 0.0)
            for site, threshold in self.thresholds.items()
            if threshold.up
        }
        return self._stages.capacity(at, free_bytes_per_s)
