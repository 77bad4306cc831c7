"""Requests of the PrfaaS experiments: arrivals and lengths with as much randomness as a cell specifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
import numpy as np

from kvroute.policies.fleet.throughput import Cut
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.types import FloatArray, IntArray
from kvroute_studies.prfaas.case_study import LEAST, MOST, MU, OUTPUT_TOKENS, SIGMA

Warp = Callable[[FloatArray], FloatArray]


def made(name: str, at_s: FloatArray, input_tokens: IntArray, output_tokens: int = OUTPUT_TOKENS) -> Trace:
    """Build a trace of requests without shared prefixes, ascending by time."""
    pairs = zip(at_s.tolist(), input_tokens.tolist(), strict=True)
    return Trace(name, tuple(TracedRequest(at, tokens, output_tokens, (), 16) for at, tokens in pairs))


def even(count: int, rate_per_s: float) -> FloatArray:
    """Return arrivals at equal distances."""
    return np.arange(count) / rate_per_s


def poisson(count: int, rate_per_s: float, draw: np.random.Generator) -> FloatArray:
    """Return independent arrivals (a Poisson process)."""
    return np.cumsum(draw.exponential(1.0 / rate_per_s, count))


def two_lengths(count: int, cut: Cut) -> IntArray:
    """Return the two representative lengths of PrfaaS 3.4.1, E[L | L > t] and E[L | L <= t] at the one threshold of
    `cut`, mixed as evenly as whole requests allow."""
    share = float(cut.long_share[0])
    is_long = np.diff(np.floor(np.arange(count + 1) * share + 0.5)) > 0
    lengths: IntArray = np.where(is_long, cut.long_tokens[0], cut.short_tokens[0]).round().astype(np.int64)
    return np.maximum(lengths, 1)


def spread_lengths(count: int, draw: np.random.Generator, mu: float = MU) -> IntArray:
    """Return `count` equally likely quantiles of the log-normal in random order: the order is random, the mix is
    not."""
    unit = NormalDist(mu, SIGMA)
    low, high = unit.cdf(np.log(LEAST)), unit.cdf(np.log(MOST))
    shares = low + (high - low) * (np.arange(count) + 0.5) / count
    lengths = np.exp([unit.inv_cdf(share) for share in shares.tolist()])
    whole: IntArray = np.clip(lengths.round(), LEAST, MOST).astype(np.int64)
    return whole[draw.permutation(count)]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A period with more requests or longer prompts."""

    from_s: float
    to_s: float
    rate_factor: float = 1.0
    mu: float = MU
    """mu of the prompts' log-normal distribution during the period."""

    def requests(self, rate_per_s: float, end_s: float, seed: int) -> Trace:
        """Return Poisson arrivals until `end_s` with log-normal lengths.

        The same seed gives the same random draws for every disturbance, which then stretches times and shifts lengths.
        """
        arrivals, sizes = (np.random.default_rng([seed, part]) for part in (0, 1))
        whole = self._clock(np.array([end_s]), rate_per_s)[0]
        due = np.cumsum(arrivals.exponential(1.0, int(whole + 10 * np.sqrt(whole) + 50)))
        at_s = self.unwound(due[due < whole], rate_per_s)
        unit = NormalDist()
        low, high = (unit.cdf((np.log(bound) - MU) / SIGMA) for bound in (LEAST, MOST))
        z = np.array([unit.inv_cdf(low + (high - low) * share) for share in sizes.random(len(at_s)).tolist()])
        mu = np.where((at_s >= self.from_s) & (at_s < self.to_s), self.mu, MU)
        lengths = np.clip(np.exp(mu + SIGMA * z).round(), LEAST, MOST).astype(np.int64)
        return made("disturbed", at_s, lengths)

    def of_trace(self, trace: Trace, rate_per_s: float, end_s: float) -> Trace:
        """Return a trace's requests up to `end_s` at a mean rate of `rate_per_s`, multiplied by `rate_factor` during
        the period."""
        first_s = trace.requests[0].at_s
        due = np.array([request.at_s - first_s for request in trace.requests]) * trace.rate_per_s
        at_s = self.unwound(due, rate_per_s)
        kept = zip(at_s.tolist(), trace.requests, strict=True)
        return Trace(trace.name, tuple(msgspec.structs.replace(request, at_s=at) for at, request in kept if at < end_s))

    def _clock(self, at_s: FloatArray, rate_per_s: float) -> FloatArray:
        """Return the number of requests expected until each time."""
        inside = np.clip(at_s, self.from_s, self.to_s) - self.from_s
        return rate_per_s * (at_s + (self.rate_factor - 1.0) * inside)

    def unwound(self, due: FloatArray, rate_per_s: float) -> FloatArray:
        """Return the time at which each number of requests is expected: the inverse of `_clock`."""
        marks_s = np.array([0.0, self.from_s, self.to_s, self.to_s + 1.0])
        clock = self._clock(marks_s, rate_per_s)
        after = self.to_s + (due - clock[2]) / rate_per_s
        return np.asarray(np.where(due > clock[2], after, np.interp(due, clock[:3], marks_s[:3])))
