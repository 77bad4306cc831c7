"""Interface of a run to the control core: sends and logs events, reports cache changes, carries out role switches."""

from __future__ import annotations

from typing import Protocol

from kvroute.control.log import EventLog
from kvroute.control.offload.offloader import Offloader
from kvroute.prefix import Evicted
from kvroute.sim.agenda import Agenda
from kvroute.sim.fleet import Fleet
from kvroute.topology import Cluster
from kvroute.types import Decision, Event, KvCleared, KvEvicted, KvStored, RoleSwitched, SwitchRole


class Core(Protocol):
    """What decides: one core, or the cores of several gateways."""

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and not left."""

    @property
    def offloading(self) -> Offloader | None:
        """Sites and thresholds, if prefills may be offloaded."""

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Process one event; see `Control.handle`."""


class Router:
    """Sends events to Control and returns its decisions for requests."""

    def __init__(
        self,
        control: Core,
        cluster: Cluster,
        fleet: Fleet,
        agenda: Agenda,
        log: EventLog | None,
        *,
        role_switch_s: float,
    ) -> None:
        """`role_switch_s`: time from the end of an instance's last request to its new role."""
        self._control, self._cluster, self._fleet, self._agenda = control, cluster, fleet, agenda
        self._log, self._role_switch_s = log, role_switch_s

    @property
    def in_flight(self) -> int:
        """Number of requests that have arrived and have not ended."""
        return self._control.in_flight

    def threshold_tokens(self) -> float | None:
        """Lowest current routing threshold of all sites; None if nothing is offloaded."""
        offloading = self._control.offloading
        return (
            None
            if offloading is None
            else min((threshold.tokens for threshold in offloading.thresholds.values()), default=None)
        )

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Send an event and return the decisions for requests. Instances that switch their role start to drain at
        once."""
        decisions = self._control.handle(event)
        if self._log is not None:
            self._log.write(event, decisions)
        for decision in decisions:
            if isinstance(decision, SwitchRole):
                return self._drained(decisions)
        return decisions

    def _drained(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Start to drain the instances that switch their role; return the other decisions."""
        for decision in decisions:
            if isinstance(decision, SwitchRole):
                index = self._cluster.index(decision.instance)
                if self._fleet.drain(index, decision.role):
                    self._agenda.at(self._agenda.now + self._role_switch_s, self._switched, index)
        return tuple(decision for decision in decisions if not isinstance(decision, SwitchRole))

    def release(self, index: int) -> None:
        """Remove one request from an instance; if a drain ends, schedule the role switch."""
        if self._fleet.release(index):
            self._agenda.at(self._agenda.now + self._role_switch_s, self._switched, index)

    def _switched(self, index: int, _: int) -> None:
        now, name, role = self._agenda.now, self._cluster.instances[index].name, self._fleet.switch_role(index)
        self.handle(KvCleared(now, name))
        self.handle(RoleSwitched(now, name, role))

    def stored(self, index: int, blocks: tuple[int, ...], evicted: list[Evicted]) -> None:
        """Report a chain that is now cached, as far as it fits, and the blocks evicted for it."""
        memory, kept = self._fleet.memory, blocks
        if evicted or memory.index.used_blocks(index) >= memory.capacity_blocks[index]:
            # A full instance may have kept only the first blocks of the chain: the router must not count on the rest.
            kept = blocks[: memory.index.match_one(index, blocks)]
        # A hybrid model has no state at the point where a chain was cut, and a KvStored event would claim one.
        if kept == blocks or not self._fleet.keeps_states[index]:
            name = self._cluster.instances[index].name
            self.handle(KvStored(self._agenda.now, name, kept, self._fleet.block_tokens))
        self.evicted(evicted)

    def written_back(self, index: int, blocks: tuple[int, ...]) -> None:
        """Report that an instance has written this chain to the store."""
        name = self._cluster.instances[index].name
        self.handle(KvStored(self._agenda.now, name, blocks, self._fleet.block_tokens, "store"))

    def evicted(self, evicted: list[Evicted]) -> None:
        """Report evicted blocks."""
        for instance, blocks, keep in evicted:
            self.handle(KvEvicted(self._agenda.now, self._cluster.instances[instance].name, blocks, keep))
