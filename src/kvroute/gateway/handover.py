"""What a reloaded cluster keeps of the one before it: breakers, health, load, cached prefixes. All that the new core is
told goes into its event log, so that a log that begins with a reload replays too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from kvroute.gateway.serving import Serving
from kvroute.types import (
    BandwidthLearned,
    CapacityLearned,
    Event,
    InstanceMeasured,
    KvCleared,
    KvEvicted,
    KvStored,
    ThresholdKnown,
)


def stays(name: str, old: Serving, new: Serving) -> bool:
    """Whether an instance is in both clusters, and the same engine."""
    before, after = old.stations.get(name), new.stations.get(name)
    if before is None or after is None:
        return False
    return (before.instance.endpoint, before.instance.model) == (after.instance.endpoint, after.instance.model)


class Handover:
    """From the old cluster, which still has requests, to the new one, for the instances that stay.

    `at_once` before the new cluster takes requests, then `prefixes`; `heard` is told of what the new core hears
    meanwhile, and `look` is called now and then until the old requests have left.
    """

    def __init__(self, old: Serving, new: Serving, retired: Sequence[Serving]) -> None:
        """Args: `retired` are all clusters that still have requests, the old one among them."""
        self._old, self._new = old, new
        self._stay = [name for name in new.stations if stays(name, old, new)]
        self._retired = {name: [each for each in retired if stays(name, each, new)] for name in self._stay}
        self._to_tell = {name for name in self._stay if self._keeps_prefixes(name)}
        """Instances whose cached prefixes the new core has yet to be told of."""
        self._told: dict[str, int] = {}
        """The load that the core knows of old requests on engines that do not tell theirs."""

    @property
    def over(self) -> bool:
        """Whether nothing is left to hand over."""
        return not self._to_tell and not any(self._told.values())

    def reads(self, serving: Serving) -> bool:
        """Whether a cluster still has cached prefixes to be told of."""
        return serving is self._old and bool(self._to_tell)

    def at_once(self) -> None:
        """How network and ways are, who is up, whose transfers are measured by whom, and how much is under way."""
        old, new, now = self._old, self._new, self._new.now()
        telemetry = old.telemetry
        if telemetry is not None and [link.name for link in old.cluster.links] == [
            link.name for link in new.cluster.links
        ]:
            new.heard(telemetry)
        new.panics.inherit(old.panics)
        for name in self._stay:
            before, after = old.stations[name], new.stations[name]
            if old.settings.measure == new.settings.measure:
                after.measures = before.measures
            if old.settings.breaker == new.settings.breaker:
                after.guard.breaker = before.guard.breaker  # what is under way still counts in it
            after.guard.set_healthy(before.guard.healthy, now, present=before.guard.present)
            measured = old.measured.get(name)
            if measured is not None:
                new.measured[name] = measured
                running = max(measured.running, self._under_way(name) - measured.waiting)
                new.tell(InstanceMeasured(now, name, running, measured.waiting, measured.kv_used_share))
        if old.ways is not None and new.ways is not None:
            new.ways.inherit(old.ways, now)
        self._thresholds()
        self._knowledge()
        self.look()

    def _thresholds(self) -> None:
        """Of the sites that both have; a base that the file gives is the file's."""
        old, new = self._old.control.offloading, self._new.control.offloading
        if old is None or new is None:
            return
        there = {new.datacenters.names[site] for site in new.thresholds}
        for site, threshold in old.thresholds.items():
            name = old.datacenters.names[site]
            if name in there:
                self._new.tell(ThresholdKnown(self._new.now(), name, threshold.tokens, threshold.base_tokens))

    def _knowledge(self) -> None:
        """What transfers have taught, of tiers for which both files promise the same and of pairs that both have."""
        old, new, now = self._old.cluster, self._new.cluster, self._new.now()
        promised = zip(old.tier_bytes_per_s.tolist(), new.tier_bytes_per_s.tolist(), strict=True)
        same = [before == after for before, after in promised]
        for known in self._old.control.knowledge(now):
            match known:
                case BandwidthLearned(tiers=tiers, pairs=pairs):
                    kept = tuple(tier if stays else None for tier, stays in zip(tiers, same, strict=True))
                    both = tuple(pair for pair in pairs if self._same_path(pair[0], pair[1], same))
                    self._new.tell(BandwidthLearned(now, kept, both))
                case CapacityLearned(log_sums=sums, weights=weights):
                    sums = tuple(value * stays for value, stays in zip(sums, same, strict=True))
                    weights = tuple(value * stays for value, stays in zip(weights, same, strict=True))
                    self._new.tell(msgspec.structs.replace(known, log_sums=sums, weights=weights))

    def _same_path(self, source: str, target: str, same: Sequence[bool]) -> bool:
        """Whether both clusters have these instances, as far from each other, in a tier that is the same."""
        if source not in self._stay or target not in self._stay:
            return False
        old, new = self._old.cluster, self._new.cluster
        tier = int(new.tier[new.index(source), new.index(target)])
        return same[tier] and int(old.tier[old.index(source), old.index(target)]) == tier

    def look(self) -> None:
        """Where an engine does not tell its load, old requests there are to the core as those of others."""
        for name in self._stay:
            if name in self._new.measured:
                self._told.pop(name, None)
            elif (under_way := self._under_way(name)) != self._told.get(name, 0):
                self._told[name] = under_way
                own = self._new.stations[name].under_way
                self._new.tell(InstanceMeasured(self._new.now(), name, under_way + own, 0))

    async def prefixes(self) -> None:
        """What is cached where: an instance at a time, each as it is by then, others have their turn in between."""
        prefix, block_tokens = self._old.control.prefix, self._new.settings.prompt.block_tokens
        for name in self._stay:
            if name in self._to_tell:
                self._to_tell.discard(name)
                now = self._new.now()
                for blocks in prefix.chains(self._old.cluster.index(name)):
                    self._new.tell(KvStored(now, name, blocks, block_tokens))
                await asyncio.sleep(0)

    def heard(self, event: Event) -> None:
        """The new core was told this: what it takes away must not come back with the prefixes."""
        if isinstance(event, KvEvicted | KvCleared) and event.instance in self._to_tell:
            self._old.tell(event)

    def _under_way(self, name: str) -> int:
        return sum(each.stations[name].under_way for each in self._retired[name])

    def _keeps_prefixes(self, name: str) -> bool:
        """Whether prompts have the hashes that they had, and the same side tells what is cached."""
        old, new = self._old, self._new
        return (
            old.settings.prompt == new.settings.prompt
            and old.stations[name].approximate == new.stations[name].approximate
        )
