"""Instances of a placement: their stages, schemes and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvroute.planner.placement.all_reduce_times import NO_TIME, AllReduceTimes, gpus_of
from kvroute.planner.placement.compute import Communication, Parallelism, Roofline, Times
from kvroute.planner.placement.problem import GpuKind, PlacementProblem
from kvroute.planner.placement.schema import Phase
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards
from kvroute_engine.agent.schemes import Scheme

DESIGN_BATCH = 32
"""Requests of the decode iteration at whose size schemes and groups are compared."""


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance: tensor-parallel groups, one for each pipeline stage."""

    phase: Phase
    stages: tuple[Shards, ...]
    schemes: tuple[Scheme | None, ...]
    """[stage]; None: a single GPU."""
    roofline: Roofline
    communication: Communication

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, stage by stage."""
        return gpus_of(self.stages)

    @property
    def split(self) -> Parallelism:
        """Ranks and stages."""
        return self.roofline.split

    @property
    def servers(self) -> int:
        """Number of servers that it spans."""
        return len({node for node, _ in self.gpus})

    def times(self, slowdown: float = 1.0) -> Times:
        """Return its times if transmissions of its all-reduces take `slowdown` times as long as on an idle network."""
        return self.roofline.times(self.communication.slowed(slowdown))


@dataclass(slots=True)
class Builder:
    """Builds instances from groups, and prices groups, for one problem."""

    problem: PlacementProblem
    times: AllReduceTimes
    _prices: dict[tuple[object, ...], float] = field(default_factory=dict)

    def roofline(self, kind: GpuKind, split: Parallelism) -> Roofline:
        """Return the roofline of the problem's model on a kind of GPU."""
        return Roofline.of(self.problem, kind, split)

    def tokens(self, phase: Phase) -> float:
        """Return the tokens of an iteration at which schemes are compared."""
        return self.problem.lengths.mix.mean_tokens if phase == "prefill" else float(DESIGN_BATCH)

    def price(self, phase: Phase, kind: GpuKind, group: Shards) -> float:
        """Return the iterations per second of a group that is an instance of its own, at the size of `tokens`."""
        key = (phase, kind.name, len(group), self.times.form(group))
        if key not in self._prices:
            undivided = self._instance(phase, self.roofline(kind, Parallelism(len(group), 1)), (group,))
            self._prices[key] = 1.0 / self._iteration_s(phase, undivided.times())
        return self._prices[key]

    def _iteration_s(self, phase: Phase, times: Times) -> float:
        tokens = self.tokens(phase)
        if phase == "prefill":
            return times.prefill_at(tokens)
        return times.decode_s(tokens, self.problem.lengths.mix.mean_tokens + self.problem.output_tokens / 2)

    def chained(
        self, phase: Phase, kind: GpuKind, split: Parallelism, groups: Sequence[Shards]
    ) -> list[PlacedInstance]:
        """Return instances whose stages are groups of similar price that are near to each other; groups that are left
        over are not used."""
        ordered = sorted(groups, key=lambda group: (-round(self.price(phase, kind, group), 6), group))
        roofline = self.roofline(kind, split)
        chains = [tuple(ordered[first : first + split.pp]) for first in range(0, len(ordered), split.pp)]
        return [self._instance(phase, roofline, chain) for chain in chains if len(chain) == split.pp]

    def rechosen(self, instance: PlacedInstance, tokens: float) -> PlacedInstance:
        """Return an instance with the schemes that are fastest for iterations of `tokens`."""
        return self._instance(instance.phase, instance.roofline, instance.stages, tokens)

    def _instance(
        self, phase: Phase, roofline: Roofline, stages: tuple[Shards, ...], tokens: float | None = None
    ) -> PlacedInstance:
        nbytes = (self.tokens(phase) if tokens is None else tokens) * roofline.hidden_bytes
        chosen = [self.times.best(stage, nbytes) for stage in stages]
        sends = [self.times.send(here, there) for here, there in pairwise(stages)]
        slowest = max((line for _, line in chosen), key=lambda line: line.seconds(nbytes))
        send = max(sends, key=lambda line: line.seconds(nbytes), default=NO_TIME)
        communication = Communication(slowest, send)
        return PlacedInstance(phase, stages, tuple(scheme for scheme, _ in chosen), roofline, communication)
