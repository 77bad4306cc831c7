"""Searches the tensor and pipeline parallelism of both phases, the GPUs of each phase and their groups.

Every candidate has an upper bound of its rate: the best group of its size, as often as GPUs allow, without queues and
without network limits. Candidates are evaluated from the highest bound down, until no bound exceeds the best rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, TypeAlias

import numpy as np

from kvroute.planner.placement.all_reduce_times import AllReduceTimes
from kvroute.planner.placement.compute import Parallelism
from kvroute.planner.placement.evaluation import Evaluation, isolated_per_s
from kvroute.planner.placement.grouping import Grouper, Method, Pool
from kvroute.planner.placement.instances import Builder, PlacedInstance
from kvroute.planner.placement.problem import GpuKind, PlacementProblem
from kvroute.planner.placement.schema import Phase
from kvroute.topology.place import Shards
from kvroute.types import InputError

Use: TypeAlias = Literal["prefill", "decode", "split"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
_EVALUATED_MAX = 16
"""Candidates whose groups are formed; more than this only changes the rate in the last percent."""
_TRIMMED_SHARE = 0.995
"""Instances that are left out may cost together this share of the rate at most."""


@dataclass(frozen=True, slots=True)
class ParallelismChoice:
    """Parallelism of both phases, and the use of each GPU kind."""

    prefill: Parallelism
    decode: Parallelism
    uses: tuple[Use, ...]
    """[kind]."""
    counts: tuple[int, int]
    """Prefill and decode instances on the kind that is split; (0, 0) without one."""
    bound_per_s: float
    """Upper bound of the rate."""

    def split(self, phase: Phase) -> Parallelism:
        """Return the parallelism of a phase."""
        return self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True, slots=True)
class Placement:
    """Instances of both phases and the rate that they sustain together."""

    prefill: tuple[PlacedInstance, ...]
    decode: tuple[PlacedInstance, ...]
    evaluation: Evaluation
    rate_per_s: float

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(len(instance.gpus) for instance in (*self.prefill, *self.decode))

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second of one GPU."""
        return self.rate_per_s / self.gpus


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search."""

    best: Placement
    evaluated: tuple[Placement, ...]
    """Best placement of each candidate that was evaluated, the highest rate first."""
    candidates: int
    """Number of candidates, most of which were excluded by their bounds."""
    search: Search
    """The search, for further questions about the same problem."""


def search(problem: PlacementProblem, method: Method = "milp") -> Found:
    """Return the placement with the highest rate that uses no more GPUs than it needs.

    Raises:
        InputError: the weights fit into no group of the cluster's GPUs, or no placement meets the SLOs.
    """
    return Search(problem, method).run()


def possible_splits(problem: PlacementProblem, kind: GpuKind) -> list[Parallelism]:
    """Return every parallelism that the model's heads and layers and the number of GPUs allow.

    Query heads are split evenly; KV heads are split evenly or every rank holds a copy of one (vLLM's rule).
    """
    heads, kv_heads = problem.shape.heads, max(group.kv_heads for group in problem.model.layers)
    return [
        Parallelism(tp, pp)
        for tp in range(1, problem.tp_max + 1)
        for pp in range(1, min(problem.pp_max, problem.model.layer_count) + 1)
        if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and tp * pp <= len(kind.gpus)
    ]


@dataclass(slots=True)
class Search:
    """One search; it keeps the groups that it has formed."""

    problem: PlacementProblem
    method: Method
    builder: Builder = field(init=False)
    _groups: dict[tuple[Phase, str, int], list[Shards]] = field(default_factory=dict)
    _isolated: dict[tuple[Phase, str, Parallelism], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        times = AllReduceTimes(problem.cluster, problem.aggregation, problem.element_bytes, problem.schemes)
        self.builder = Builder(problem, times)

    def run(self) -> Found:
        """Return the best placement; see `search`."""
        candidates = sorted(self.candidates(), key=lambda candidate: -candidate.bound_per_s)
        if not candidates:
            raise self._impossible()
        found: list[Placement] = []
        best = 0.0
        for candidate in candidates[:_EVALUATED_MAX]:
            if candidate.bound_per_s <= best:
                break
            placed = max(self.placements(candidate), key=lambda placement: placement.rate_per_s, default=None)
            if placed is not None and placed.rate_per_s > 0.0:
                found.append(placed)
                best = max(best, placed.rate_per_s)
        if not found:
            raise self._impossible()
        found.sort(key=lambda placement: (-placement.rate_per_s, placement.gpus))
        return Found(self.refined(self._trimmed(found[0])), tuple(found), len(candidates), self)

    def of(self, prefill: Parallelism, decode: Parallelism) -> Placement | None:
        """Return the best placement with this parallelism; None if there is none."""
        chosen = [
            candidate for candidate in self.candidates() if (candidate.prefill, candidate.decode) == (prefill, decode)
        ]
        placed = [placement for choice in chosen for placement in self.placements(choice)]
        return max(placed, key=lambda placement: placement.rate_per_s, default=None)

    def candidates(self) -> Iterator[ParallelismChoice]:
        """Yield the candidates whose bound is above 0."""
        kinds = self.problem.kinds
        splits = {phase: sorted(self._useful(phase), key=lambda split: (split.tp, split.pp)) for phase in PHASES}
        for uses in product(*(self._uses(kind) for kind in kinds)):
            if uses.count("split") > 1:
                continue
            for prefill, decode in product(splits["prefill"], splits["decode"]):
                counts, bound = self._bound(uses, prefill, decode)
                if bound > 0.0:
                    yield ParallelismChoice(prefill, decode, uses, counts, bound)

    def _uses(self, kind: GpuKind) -> tuple[Use, ...]:
        if kind.role != "both":
            return (kind.role,)
        return ("split",) if len(self.problem.kinds) == 1 else ("prefill", "decode", "split")

    def _useful(self, phase: Phase) -> set[Parallelism]:
        """Return the parallelisms whose best group meets the phase's SLO on a kind that may be used for it."""
        return {
            split
            for kind in self.problem.kinds
            if kind.role in ("both", phase)
            for split in possible_splits(self.problem, kind)
            if self._isolated_per_s(phase, kind, split) > 0.0
        }

    def _bound(self, uses: Sequence[Use], prefill: Parallelism, decode: Parallelism) -> tuple[tuple[int, int], float]:
        """Return the instances on the kind that is split, and the upper bound of the rate."""
        fixed: dict[Use, float] = {"prefill": 0.0, "decode": 0.0}
        shared: GpuKind | None = None
        for kind, use in zip(self.problem.kinds, uses, strict=True):
            if use == "split":
                shared = kind
            else:
                split = prefill if use == "prefill" else decode
                fixed[use] += len(kind.gpus) // split.gpus * self._isolated_per_s(use, kind, split)
        if shared is None:
            return (0, 0), min(fixed.values())
        most = len(shared.gpus)
        isolated = [
            self._isolated_per_s(phase, shared, split) for phase, split in zip(PHASES, (prefill, decode), strict=True)
        ]
        several = len(self.problem.kinds) > 1  # then a kind without one of the phases is not split
        here = np.arange(several, most // prefill.gpus + 1)
        there = (most - here * prefill.gpus) // decode.gpus
        if several:
            here, there = here[there > 0], there[there > 0]
        if not len(here):
            return (0, 0), 0.0
        rates = np.minimum(fixed["prefill"] + here * isolated[0], fixed["decode"] + there * isolated[1])
        place = int(rates.argmax())
        return (int(here[place]), int(there[place])), float(rates[place])

    def _isolated_per_s(self, phase: Phase, kind: GpuKind, split: Parallelism) -> float:
        """Return the requests per second of the best instance of this parallelism; 0 if it cannot serve."""
        key = (phase, kind.name, split)
        if key not in self._isolated:
            if split.gpus > len(kind.gpus) or self.builder.roofline(kind, split).kv_tokens() <= 0.0:
                self._isolated[key] = 0.0
            else:
                chain = self.builder.chained(phase, kind, split, self.groups(phase, kind, split.tp)[: split.pp])
                self._isolated[key] = max((isolated_per_s(self.problem, instance) for instance in chain), default=0.0)
        return self._isolated[key]

    def groups(self, phase: Phase, kind: GpuKind, tp: int) -> list[Shards]:
        """Return groups of all free GPUs of a kind, the best first."""
        key = (phase, kind.name, tp)
        if key not in self._groups:
            pool = Pool.of(self.problem.cluster, kind.gpus)
            found = self._grouper(pool, phase, kind, tp).groups()
            self._groups[key] = sorted(found, key=lambda group: (-self.builder.price(phase, kind, group), group))
        return self._groups[key]

    def _grouper(self, pool: Pool, phase: Phase, kind: GpuKind, tp: int) -> Grouper:
        return Grouper(pool, tp, lambda group: self.builder.price(phase, kind, group), self.method)

    def placements(self, candidate: ParallelismChoice) -> Iterator[Placement]:
        """Yield the placements of a candidate: with the phases in separate racks and, if GPUs are split, mixed."""
        several_racks = (
            len({self.problem.cluster.places.domains[node][1] for kind in self.problem.kinds for node, _ in kind.gpus})
            > 1
        )
        for spread in (False, True) if "split" in candidate.uses and several_racks else (False,):
            sides: dict[Phase, list[PlacedInstance]] = {"prefill": [], "decode": []}
            for kind, use in zip(self.problem.kinds, candidate.uses, strict=True):
                if use == "split":
                    for phase, groups in self._split_groups(candidate, kind, spread=spread).items():
                        sides[phase] += self.builder.chained(phase, kind, candidate.split(phase), groups)
                else:
                    split = candidate.split(use)
                    groups = self.groups(use, kind, split.tp) if split.gpus <= len(kind.gpus) else []
                    sides[use] += self.builder.chained(use, kind, split, groups)
            placed = self.placement(sides["prefill"], sides["decode"])
            if placed is not None:
                yield placed

    def _split_groups(
        self, candidate: ParallelismChoice, kind: GpuKind, *, spread: bool
    ) -> Mapping[Phase, list[Shards]]:
        """Return groups of both phases on one kind; the phase with the larger groups chooses first."""
        pool = Pool.of(self.problem.cluster, kind.gpus)
        found: dict[Phase, list[Shards]] = {}
        for phase in sorted(PHASES, key=lambda side: -candidate.split(side).tp):
            split, count = candidate.split(phase), candidate.counts[PHASES.index(phase)]
            found[phase] = self._grouper(pool, phase, kind, split.tp).groups(count * split.pp, spread=spread)
        return found

    def placement(self, prefill: Sequence[PlacedInstance], decode: Sequence[PlacedInstance]) -> Placement | None:
        """Return the placement of the instances that meet the SLOs when idle; None if a phase has none."""
        sides = [
            tuple(instance for instance in side if isolated_per_s(self.problem, instance) > 0.0)
            for side in (prefill, decode)
        ]
        if not (sides[0] and sides[1]):
            return None
        evaluation = Evaluation(self.problem, *sides)
        return Placement(sides[0], sides[1], evaluation, evaluation.rate_per_s())

    def refined(self, placed: Placement) -> Placement:
        """Return the placement with the schemes that are fastest for the batches that it has at its rate, if it then
        sustains more. Groups are compared at a batch of `DESIGN_BATCH`."""
        tried = self.rechosen(placed, placed.rate_per_s)
        return placed if tried is None or tried.rate_per_s <= placed.rate_per_s else tried

    def rechosen(self, placed: Placement, rate_per_s: float) -> Placement | None:
        """Return the placement with the schemes that are fastest for the batches that it has at a rate; None if it then
        sustains no rate."""
        batch = placed.evaluation.operation(rate_per_s).decode_batch
        decode = [self.builder.rechosen(instance, batch / instance.split.pp) for instance in placed.decode]
        if [instance.schemes for instance in decode] == [instance.schemes for instance in placed.decode]:
            return placed
        return self.placement(placed.prefill, decode)

    def _trimmed(self, placed: Placement) -> Placement:
        """Return the placement without instances that the rate does not need, the slowest first."""
        least = placed.rate_per_s * _TRIMMED_SHARE
        for phase in PHASES:
            ranked = sorted(getattr(placed, phase), key=lambda instance: -isolated_per_s(self.problem, instance))
            low, high, kept = 1, len(ranked), placed
            while low < high:
                middle = (low + high) // 2
                fewer = ranked[:middle]
                tried = self.placement(*((fewer, placed.decode) if phase == "prefill" else (placed.prefill, fewer)))
                if tried is not None and tried.rate_per_s >= least:
                    high, kept = middle, tried
                else:
                    low = middle + 1
            placed = kept
        return placed

    def _impossible(self) -> InputError:
        """Return the reason why there is no placement."""
        problem = self.problem
        fits = [
            (kind, split)
            for kind in problem.kinds
            for split in possible_splits(problem, kind)
            if self.builder.roofline(kind, split).kv_tokens() > problem.lengths.mix.tokens[-1] + problem.output_tokens
        ]
        if not fits:
            kind = max(problem.kinds, key=lambda kind: kind.memory_bytes * len(kind.gpus))
            about = f"{problem.model.name} ({problem.weights_bytes / 1e9:,.0f} GB of weights)"
            what = f"{about} and the KV of one request fit into no group of GPUs"
            least = int(np.ceil(problem.weights_bytes / kind.memory_bytes))
            hint = (
                f"the weights alone need {least} GPUs of kind {kind.name}, which has {len(kind.gpus)}; add GPUs, or "
                "increase tp_max or pp_max"
            )
            return InputError(what, where=str(problem.path), hint=hint)
        for phase in PHASES:
            if not any(
                self._isolated_per_s(phase, kind, split) for kind, split in fits if kind.role in ("both", phase)
            ):
                slo = "TTFT" if phase == "prefill" else "TPOT"
                limit = problem.objective.ttft_s if phase == "prefill" else problem.objective.tpot_s
                what = f"no group of GPUs meets a {slo} of {limit:g} s, even for a single request"
                return InputError(what, where=f"--{slo.lower()}", hint="relax it, or use faster GPUs or links")
        what = "no placement has enough GPUs for prefill and decode instances under these SLOs"
        return InputError(what, where=str(problem.path), hint="relax --ttft or --tpot, or add GPUs")
