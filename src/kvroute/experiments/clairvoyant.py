"""Decode instances as chosen by somebody who knows all draws and the future: each request is played everywhere.

A bound to compare with, not a policy: each step is a whole run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from kvroute.control import Control, ControlSpec
from kvroute.oracle import NetworkOracle
from kvroute.policies.decode import feasible_mask, no_room
from kvroute.sim.run import Run
from kvroute.topology import Cluster
from kvroute.types import Candidates, Choice, NetworkCosts, Reject, Request, Terms

ROUNDS_MAX = 3


@dataclass(frozen=True, slots=True)
class Scripted:
    """The decode policy that does as it is told: for each request a candidate, or the next one with room."""

    script: tuple[int, ...]

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """See DecodePolicy; the cost is how far a candidate is behind the one that the script names."""
        feasible, count = feasible_mask(candidates), len(candidates.names)
        if not feasible.any():
            return no_room(request, candidates)
        behind = (np.arange(count, dtype=np.float64) - self.script[request.id]) % count
        index = int(np.where(feasible, behind, np.inf).argmin())
        return Choice(index, Terms(candidates.names, behind, feasible, {}, "places"))


class ScriptedSpec(ControlSpec, frozen=True, kw_only=True):
    """A control core that decodes by script."""

    script: tuple[int, ...]

    def build(self, cluster: Cluster) -> Control:
        """As ControlSpec's, with the script in the place of its policy."""
        settings = replace(self._settings(frozenset()), decode_policy=Scripted(self.script))
        return Control(cluster, settings, NetworkOracle.of(cluster, self.oracle))


Play = Callable[[ControlSpec], Run]
"""One run, decided by what is given."""


def descend(play: Play, starts: Sequence[ControlSpec], places: Sequence[int], rounds_max: int = ROUNDS_MAX) -> Run:
    """From the best of some policies' runs on, each request in turn goes wherever the mean TTFT of all is least, until
    a round changes nothing; the best run.

    A local optimum: no single request could be sent elsewhere to the good of the mean (unless `rounds_max` stopped it).

    Args:
        play: the run of a spec, the same for the same spec.
        starts: policies; the descent keeps the prefill policy and all else of the best one.
        places: index in the cluster of the candidates, in their order.
    """
    runs = [play(spec) for spec in starts]
    least = min(range(len(runs)), key=lambda number: (_mean_s(runs[number]), number))
    best = runs[least]
    position = {index: place for place, index in enumerate(places)}
    script = [position.get(int(index), 0) for index in best.outcomes.target]
    settled, said = 0, msgspec.structs.asdict(starts[least]) | {"decode": "round-robin", "parameters": {}}
    for request in list(range(len(script))) * rounds_max:
        for place in range(len(places)):
            moved = (*script[:request], place, *script[request + 1 :])
            if place == script[request]:
                continue
            run = play(ScriptedSpec(**said, script=moved))
            if _mean_s(run) < _mean_s(best):
                best, script, settled = run, list(moved), 0
        settled += 1
        if settled == len(script):
            break
    return best


def _mean_s(run: Run) -> float:
    mean_s = run.summary.ttft_s.mean
    return float("inf") if mean_s is None else mean_s
