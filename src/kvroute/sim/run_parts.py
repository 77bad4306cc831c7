"""The parts of a run that the steps of its requests share."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.sim.agenda import Agenda
from kvroute.sim.copies import SimulatedCopies
from kvroute.sim.delivery import Delivery
from kvroute.sim.fleet import Fleet
from kvroute.sim.groups.tensor_groups import TensorGroups
from kvroute.sim.metrics import Outcomes
from kvroute.sim.router import Router
from kvroute.sim.settings import SimSpec
from kvroute.sim.store import SimulatedStore
from kvroute.sim.workload import Trace
from kvroute.topology import Cluster


@dataclass(frozen=True, slots=True)
class RunParts:
    """One run: what it simulates, and the models of its instances and networks."""

    cluster: Cluster
    trace: Trace
    settings: SimSpec
    agenda: Agenda
    router: Router
    fleet: Fleet
    delivery: Delivery
    copies: SimulatedCopies
    outcomes: Outcomes
    groups: TensorGroups
    store: SimulatedStore | None
    """None: the cluster has no store."""
