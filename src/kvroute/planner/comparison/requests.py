"""The requests of a comparison: read from a trace or generated for each seed, then shaped by the user's options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvroute.sim.workload import (
    PROFILES,
    THINK_MAX_S,
    Agents,
    Trace,
    apply_profile,
    generate,
    read_any,
    rescale_if_spread,
    share_prefixes,
    take,
    with_lengths,
)
from kvroute.types import InputError


@dataclass(frozen=True, slots=True)
class Workload:
    """Source of the requests, and changes made to them before they arrive."""

    trace: str = ""
    """Path of a trace; empty to generate one, different for every seed."""
    generated_requests: int = 2_000
    generated_rate_per_s: float = 3.4
    skip_bad: bool = False
    profile: str = ""
    rate_per_s: float | None = None
    input_tokens: int | None = None
    p_share: float | None = None
    """Share of groups that share half a prompt; replaces the trace's own prefixes."""
    requests: int | None = None
    """Maximum number of requests, taken from the start."""
    agents: int | None = None
    """Number of concurrent agent sessions, each turn after the previous response; None: open loop."""
    think_max_s: float = THINK_MAX_S
    """Maximum pause of an agent between turns, in seconds; longer pauses are shortened."""

    def of_seed(self, seed: int) -> Trace:
        """Return the requests of one seed.

        Raises:
            InputError: an option does not fit the trace, or a closed loop.
        """
        found = _read(self.trace, self.skip_bad) if self.trace else self._generated(seed)
        if isinstance(found, Agents):
            trace = self._of_agents(found, seed)
        elif self.agents is not None:
            what = "the trace has no sessions of agents"
            raise InputError(what, where=found.name, hint="omit --agents, or give a trace with sessions")
        else:
            trace = self._shaped(found)
        if self.input_tokens is not None:
            trace = with_lengths(trace, input_tokens=self.input_tokens)
        if self.p_share is not None:
            trace = share_prefixes(trace, self.p_share, seed=seed)
        return trace

    def _shaped(self, trace: Trace) -> Trace:
        if self.profile:
            trace = apply_profile(trace, PROFILES[self.profile])
        most = self.requests if self.trace else self.generated_requests
        if most is not None:
            trace = take(trace, most)
        return trace if self.rate_per_s is None else rescale_if_spread(trace, self.rate_per_s)

    def _of_agents(self, agents: Agents, seed: int) -> Trace:
        """Play the sessions in another order and with other start times for every seed."""
        if self.profile:
            what = "a profile would remove single turns from sessions"
            raise InputError(what, where="--profile", hint="omit it for sessions of agents")
        if self.agents is None:
            return agents.open_loop(
                seed=seed, rate_per_s=self.rate_per_s, think_max_s=self.think_max_s, turns=self.requests
            )
        if self.rate_per_s is not None:
            what = "--rate and --agents exclude each other: in a closed loop, responses set the rate"
            raise InputError(what, where="--rate", hint="omit --rate or --agents")
        return agents.closed_loop(self.agents, seed=seed, think_max_s=self.think_max_s, turns=self.requests)

    def remarks(self, seed: int) -> tuple[str, ...]:
        """Return the corrections made while reading and shaping the requests of a seed, as sentences for the user."""
        return self.of_seed(seed).remarks

    def _generated(self, seed: int) -> Trace:
        # A profile keeps only a part of the requests, the smallest more than a fifth; `take` then limits the number.
        wanted = self.generated_requests * (6 if self.profile else 1)
        return _generate(wanted, self.generated_rate_per_s, seed)


@lru_cache(maxsize=2)
def _read(path: str, skip_bad: bool) -> Trace | Agents:
    return read_any(Path(path), skip_bad=skip_bad)


@lru_cache(maxsize=2)
def _generate(requests: int, rate_per_s: float, seed: int) -> Trace:
    return generate(requests, rate_per_s=rate_per_s, seed=seed)
