"""State that a reload carries over to the new cluster: breakers, health, load, cached prefixes. The new core receives
it as events, which are in its event log, so that a log that begins with a reload can be replayed too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kvroute.serve.proxy.runtime import ClusterRuntime, same_engine
from kvroute.types import (
    AdaptersMeasured,
    BandwidthLearned,
    CapacityLearned,
    Event,
    InstanceMeasured,
    KvCleared,
    KvEvicted,
    KvStored,
    PeerReported,
    ThresholdKnown,
)


class StateCarryOver:
    """Carries over the state of the instances that stay, from the old cluster to the new one.

    Call `at_once` before the new cluster serves requests, then `prefixes`. Meanwhile pass the events of the new core to
    `on_event`, and call `refresh` periodically until the requests of the old cluster are over.
    """

    def __init__(self, old: ClusterRuntime, new: ClusterRuntime, retired: Sequence[ClusterRuntime]) -> None:
        """Args: `retired` are all clusters before the new one that still have requests, including the old one."""
        self._old, self._new = old, new
        self._retained = [name for name in new.engines if same_engine(name, old, new)]
        self._retired = {
            name: [runtime for runtime in retired if same_engine(name, runtime, new)] for name in self._retained
        }
        self._to_tell = {name for name in self._retained if self._keeps_prefixes(name)}
        """Instances whose cached prefixes are not reported to the new core yet."""
        self._reported: dict[str, int] = {}
        """Number of old requests last reported to the core, by engine that does not report its load itself."""

    @property
    def over(self) -> bool:
        """Whether all state is carried over."""
        return not self._to_tell and not any(self._reported.values())

    def forget(self, names: Sequence[str]) -> None:
        """Carry over nothing more of instances that have left the new cluster."""
        self._retained = [name for name in self._retained if name not in names]
        for name in names:
            self._to_tell.discard(name)
            self._reported.pop(name, None)

    def reads(self, runtime: ClusterRuntime) -> bool:
        """Whether cached prefixes of this cluster are still to be carried over."""
        return runtime is self._old and bool(self._to_tell)

    def at_once(self) -> None:
        """Carry over all state except cached prefixes: network and WAN paths, health, who measures transfers, load."""
        old, new, now = self._old, self._new, self._new.now()
        telemetry = old.telemetry
        if telemetry is not None and [link.name for link in old.cluster.links] == [
            link.name for link in new.cluster.links
        ]:
            new.on_telemetry(telemetry)
        new.panics.inherit(old.panics)
        for name in self._retained:
            before, after = old.engines[name], new.engines[name]
            if old.settings.measure == new.settings.measure:
                after.measures = before.measures
            if old.settings.breaker == new.settings.breaker:
                after.availability.breaker = before.availability.breaker  # requests in flight still count in it
            after.availability.set_healthy(before.availability.healthy, now, present=before.availability.present)
            measured = old.measured.get(name)
            if measured is not None:
                new.measured[name] = measured
                running = max(measured.running, self._in_flight(name) - measured.waiting)
                new.notify(InstanceMeasured(now, name, running, measured.waiting, measured.kv_used_share))
        for name, (adapters, slots) in old.control.adapters.items():
            if name in self._retained:
                new.notify(AdaptersMeasured(now, name, adapters, slots))
        if old.wan_paths is not None and new.wan_paths is not None:
            new.wan_paths.inherit(old.wan_paths, now)
        for report in old.control.peers.known(now):
            new.notify(PeerReported(now, report))
        self._thresholds()
        self._knowledge()
        self.refresh()

    def _thresholds(self) -> None:
        """Carry over the offload thresholds of the sites in both clusters; base values in the file take precedence."""
        old, new = self._old.control.offloading, self._new.control.offloading
        if old is None or new is None:
            return
        there = {new.datacenters.names[site] for site in new.thresholds}
        for site, threshold in old.thresholds.items():
            name = old.datacenters.names[site]
            if name in there:
                self._new.notify(ThresholdKnown(self._new.now(), name, threshold.tokens, threshold.base_tokens))

    def _knowledge(self) -> None:
        """Carry over learned bandwidths, for tiers with the same bandwidth in both files and pairs in both clusters."""
        old, new, now = self._old.cluster, self._new.cluster, self._new.now()
        promised = zip(old.tier_bytes_per_s.tolist(), new.tier_bytes_per_s.tolist(), strict=True)
        same = [before == after for before, after in promised]
        for known in self._old.control.knowledge(now):
            match known:
                case BandwidthLearned(tiers=tiers, pairs=pairs):
                    kept = tuple(tier if same_engine else None for tier, same_engine in zip(tiers, same, strict=True))
                    both = tuple(pair for pair in pairs if self._same_path(pair[0], pair[1], same))
                    self._new.notify(BandwidthLearned(now, kept, both))
                case CapacityLearned(log_sums=sums, weights=weights):
                    sums = tuple(value * same_engine for value, same_engine in zip(sums, same, strict=True))
                    weights = tuple(value * same_engine for value, same_engine in zip(weights, same, strict=True))
                    self._new.notify(msgspec.structs.replace(known, log_sums=sums, weights=weights))

    def _same_path(self, source: str, target: str, same: Sequence[bool]) -> bool:
        """Whether both clusters have these instances, in the same tier with the same bandwidth."""
        if source not in self._retained or target not in self._retained:
            return False
        old, new = self._old.cluster, self._new.cluster
        tier = int(new.tier[new.index(source), new.index(target)])
        return same[tier] and int(old.tier[old.index(source), old.index(target)]) == tier

    def refresh(self) -> None:
        """Report old requests to the new core as external load, for engines that do not report their load."""
        for name in self._retained:
            if name in self._new.measured:
                self._reported.pop(name, None)
            elif (in_flight := self._in_flight(name)) != self._reported.get(name, 0):
                self._reported[name] = in_flight
                own = self._new.engines[name].in_flight
                self._new.notify(InstanceMeasured(self._new.now(), name, in_flight + own, 0))

    async def prefixes(self) -> None:
        """Carry over sessions and cached prefixes, one instance at a time in its present state; other tasks run in
        between."""
        for sessions in self._old.control.sessions(self._new.now()):
            self._new.notify(msgspec.structs.replace(sessions, at=self._new.now()))
            await asyncio.sleep(0)
        caches, cluster = self._old.control.caches, self._old.cluster
        block_tokens, models = self._new.settings.prompt.block_tokens, set[str]()
        for name in self._retained:
            if name in self._to_tell:
                self._to_tell.discard(name)
                now, index = self._new.now(), cluster.index(name)
                for tier, blocks in caches.chains(index):
                    self._new.notify(KvStored(now, name, blocks, block_tokens, tier))
                model = cluster.instances[index].model
                for blocks in caches.stored_chains(model) if model not in models else ():
                    self._new.notify(KvStored(now, name, blocks, block_tokens, "store"))
                models.add(model)
                await asyncio.sleep(0)

    def on_event(self, event: Event) -> None:
        """Apply an eviction that the new core received to the old core too, so that its blocks are not carried over."""
        if isinstance(event, KvEvicted | KvCleared) and event.instance in self._to_tell:
            self._old.notify(event)

    def _in_flight(self, name: str) -> int:
        return sum(runtime.engines[name].in_flight for runtime in self._retired[name])

    def _keeps_prefixes(self, name: str) -> bool:
        """Whether the prefixes stay valid: prompts hash as before, and the same side reports what is cached."""
        old, new = self._old, self._new
        return (
            old.settings.prompt == new.settings.prompt
            and old.engines[name].approximate == new.engines[name].approximate
        )
