"""Decode instances chosen with knowledge of all random draws and future requests, by trying every choice.

The result is a bound for comparison and not a policy: each step is a complete run.
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
    """Decode policy that follows a script: each request gets the scripted candidate, or the next one with room."""

    script: tuple[int, ...]

    def choose(self, request: Request, candidates: Candidates, costs: NetworkCosts, turn: int) -> Choice | Reject:
        """Implement DecodePolicy; the cost is a candidate's distance behind the scripted one, in positions."""
        feasible, count = feasible_mask(candidates), len(candidates.names)
        if not feasible.any():
            return no_room(request, candidates)
        behind = (np.arange(count, dtype=np.float64) - self.script[request.id]) % count
        index = int(np.where(feasible, behind, np.inf).argmin())
        return Choice(index, Terms(candidates.names, behind, feasible, {}, "places"))


class ScriptedSpec(ControlSpec, frozen=True, kw_only=True):
    """Specification of a control core whose decode policy follows a script."""

    script: tuple[int, ...]

    def build(self, cluster: Cluster) -> Control:
        """Build as ControlSpec does, with the scripted decode policy."""
        settings = replace(self._settings(frozenset()), decode_policy=Scripted(self.script))
        return Control(cluster, settings, NetworkOracle.of(cluster, self.oracle))


Play = Callable[[ControlSpec], Run]
"""A function that runs the simulation with the given control specification."""


def descend(play: Play, starts: Sequence[ControlSpec], places: Sequence[int], rounds_max: int = ROUNDS_MAX) -> Run:
    """Start from the best policy's run. For each request in turn, take the candidate that gives the lowest mean TTFT of
    all requests, until a round changes nothing; return the best run.

    The result is a local optimum: moving any single request does not lower the mean (unless `rounds_max` ended the
    search).

    Args:
        play: runs a specification; it returns the same run for the same specification.
        starts: specifications of the policies; the descent keeps the prefill policy and all other fields of the best
            one.
        places: index in the cluster of each candidate, in the order of the candidates.
    """
    runs = [play(spec) for spec in starts]
    least = min(range(len(runs)), key=lambda number: (_mean_s(runs[number]), number))
    best = runs[least]
    position = {index: place for place, index in enumerate(places)}
    script = [position.get(int(index), 0) for index in best.outcomes.target]
    settled, spec_fields = 0, msgspec.structs.asdict(starts[least]) | {"decode": "round-robin", "parameters": {}}
    for request in list(range(len(script))) * rounds_max:
        for place in range(len(places)):
            moved = (*script[:request], place, *script[request + 1 :])
            if place == script[request]:
                continue
            run = play(ScriptedSpec(**spec_fields, script=moved))
            if _mean_s(run) < _mean_s(best):
                best, script, settled = run, list(moved), 0
        settled += 1
        if settled == len(script):
            break
    return best


def _mean_s(run: Run) -> float:
    mean_s = run.summary.ttft_s.mean
    return float("inf") if mean_s is None else mean_s
