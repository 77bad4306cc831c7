"""The control core as a run talks to it: events told and logged, caches reported, changes of role carried out."""

from __future__ import annotations

from kvroute.control import Control, EventLog
from kvroute.prefix import Evicted
from kvroute.sim.agenda import Agenda
from kvroute.sim.fleet import Fleet
from kvroute.topology import Cluster
from kvroute.types import Convert, Decision, Event, InstanceConverted, KvCleared, KvEvicted, KvStored


class Router:
    """Tells Control what is true; hands back what it decides for requests."""

    def __init__(
        self,
        control: Control,
        cluster: Cluster,
        fleet: Fleet,
        agenda: Agenda,
        log: EventLog | None,
        *,
        convert_s: float,
    ) -> None:
        """`convert_s`: from the end of an instance's last request to its new role."""
        self._control, self._cluster, self._fleet, self._agenda = control, cluster, fleet, agenda
        self._log, self._convert_s = log, convert_s

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not left."""
        return self._control.in_flight

    def threshold_tokens(self) -> float | None:
        """The lowest routing threshold of all sites now; None: nothing is offloaded."""
        offloading = self._control.offloading
        return (
            None if offloading is None else min((each.tokens for each in offloading.thresholds.values()), default=None)
        )

    def tell(self, event: Event) -> tuple[Decision, ...]:
        """What is decided for requests; instances that are to change their role begin to drain at once."""
        decisions = self._control.handle(event)
        if self._log is not None:
            self._log.write(event, decisions)
        for decision in decisions:
            if isinstance(decision, Convert):
                return self._drained(decisions)
        return decisions

    def _drained(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Begin to drain whoever is to change its role; the other decisions."""
        for decision in decisions:
            if isinstance(decision, Convert):
                index = self._cluster.index(decision.instance)
                if self._fleet.drain(index, decision.role):
                    self._agenda.at(self._agenda.now + self._convert_s, self._converted, index)
        return tuple(decision for decision in decisions if not isinstance(decision, Convert))

    def give_back(self, index: int) -> None:
        """An instance has one request less to do with."""
        if self._fleet.give_back(index):
            self._agenda.at(self._agenda.now + self._convert_s, self._converted, index)

    def _converted(self, index: int, _: int) -> None:
        now, name, role = self._agenda.now, self._cluster.instances[index].name, self._fleet.convert(index)
        self.tell(KvCleared(now, name))
        self.tell(InstanceConverted(now, name, role))

    def stored(self, index: int, blocks: tuple[int, ...], evicted: list[Evicted]) -> None:
        """Tell of a chain that is now cached, as far as it fits, and of what had to go for it."""
        memory, kept = self._fleet.memory, blocks
        if evicted or memory.index.used_blocks(index) >= memory.capacity_blocks[index]:
            # A full instance may have kept the front alone: a router that counts on the rest would be wrong.
            kept = blocks[: memory.index.match_one(index, blocks)]
        # Where a chain is cut, a hybrid model has no state to go on from: a KvStored would claim one.
        if kept == blocks or not self._fleet.keeps_states[index]:
            name = self._cluster.instances[index].name
            self.tell(KvStored(self._agenda.now, name, kept, self._fleet.block_tokens))
        self.evicted(evicted)

    def evicted(self, evicted: list[Evicted]) -> None:
        """Tell of blocks that are gone."""
        for instance, blocks, keep in evicted:
            self.tell(KvEvicted(self._agenda.now, self._cluster.instances[instance].name, blocks, keep))
