"""Rates and SLO attainment of prefill and decode instances by queueing formulas: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvroute.types import FloatArray


@dataclass(frozen=True, slots=True)
class WaitingTimes:
    """Waiting times of a queue in front of one or several equal servers."""

    utilisation: float
    mean_s: float
    """Mean over all requests; infinite at a utilisation of 1 or more."""
    waits: float
    """Share of the requests that wait."""

    def within(self, limit_s: FloatArray) -> FloatArray:
        """Return the share of requests that wait at most `limit_s`, shape of `limit_s`; 0 for limits below 0.

        The tail is exponential: those that wait have an exponential time with the exact mean.
        """
        if self.utilisation >= 1.0:
            return np.zeros_like(limit_s)
        if self.mean_s == 0.0:
            return np.where(limit_s >= 0.0, 1.0, 0.0)
        tail = self.waits * np.exp(-np.maximum(limit_s, 0.0) * self.waits / self.mean_s)
        return np.where(limit_s >= 0.0, 1.0 - tail, 0.0)


def waiting(
    rate_per_s: float, service_s: FloatArray, share: FloatArray, *, servers: int = 1, arrival_cv2: float = 1.0
) -> WaitingTimes:
    """Return the waiting times of a queue.

    With one server and Poisson arrivals they are those of M/G/1 (Pollaczek-Khinchine). Otherwise they are the
    approximation of Allen and Cunneen for G/G/m, which is exact for M/M/m.

    Args:
        rate_per_s: arrivals.
        service_s: times of the bottleneck stage, [n].
        share: share of the requests with each of these times, [n].
        servers: number of servers that take requests from the queue, 1 or more.
        arrival_cv2: squared coefficient of variation of the times between arrivals; 1: Poisson.
    """
    mean_s, square_s2 = float(share @ service_s), float(share @ service_s**2)
    utilisation = rate_per_s * mean_s / servers
    if utilisation >= 1.0:
        return WaitingTimes(utilisation, math.inf, 1.0)
    if servers == 1 and arrival_cv2 == 1.0:
        return WaitingTimes(utilisation, rate_per_s * square_s2 / (2.0 * (1.0 - utilisation)), utilisation)
    if mean_s <= 0.0 or rate_per_s <= 0.0:
        return WaitingTimes(0.0, 0.0, 0.0)
    waits = erlang_c(servers, rate_per_s * mean_s)
    service_cv2 = max(square_s2 / mean_s**2 - 1.0, 0.0)
    markovian_s = waits * mean_s / (servers * (1.0 - utilisation))
    return WaitingTimes(utilisation, markovian_s * (arrival_cv2 + service_cv2) / 2.0, waits)


def erlang_c(servers: int, load: float) -> float:
    """Return the share of requests that wait in M/M/m. Args: `load` in servers, below `servers`."""
    blocked = 1.0  # Erlang B by its recursion over the number of servers, which is stable
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
        if blocked < 1e-18:
            return 0.0  # it only falls from here on
    return blocked / (1.0 - load / servers * (1.0 - blocked))


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode instance: times of its iterations, and the requests that fit."""

    base_s: float
    """Iteration without requests."""
    per_request_s: float
    """Time that a request adds to an iteration, at its mean context."""
    output_tokens: float
    batch_max: int
    """Largest batch."""
    kv_tokens: float
    """Tokens for whose KV there is memory."""
    request_tokens: float
    """Mean tokens of a request, prompt and output."""
    request_tokens2: float
    """Mean of the squares of the tokens of a request."""
    peakedness: float = 1.0
    """Variance of the number of requests relative to its mean: 1 with Poisson arrivals, more if they come in bursts."""

    def step_s(self, batch: float) -> float:
        """Return the time of an iteration of `batch` requests."""
        return self.base_s + self.per_request_s * batch

    def mean_batch(self, rate_per_s: float) -> float:
        """Return the mean number of requests by Little's law: Q = rate * output * step(Q); infinite without
        balance."""
        load = rate_per_s * self.output_tokens
        left = 1.0 - load * self.per_request_s
        return load * self.base_s / left if left > 0.0 else math.inf

    def room(self, rate_per_s: float) -> float:
        """Return the share of requests that find room on arrival.

        The number of requests is Poisson (M/G/infinity), or normal with another peakedness. Their KV is a compound
        sum, taken as normal. Memory for all tokens of a request is reserved when it arrives.
        """
        batch = self.mean_batch(rate_per_s)
        if not math.isfinite(batch):
            return 0.0
        spare = self.kv_tokens - self.request_tokens - batch * self.request_tokens
        if batch < 1e-9:
            return 1.0 if spare >= 0.0 else 0.0
        if self.peakedness == 1.0:
            slots = poisson_share(self.batch_max - 1, batch)
        else:
            slots = normal_share((self.batch_max - 0.5 - batch) / math.sqrt(self.peakedness * batch))
        bursts2 = (self.peakedness - 1.0) * self.request_tokens**2
        return slots * normal_share(spare / math.sqrt(batch * (self.request_tokens2 + bursts2)))

    def tpot_attainment(self, rate_per_s: float, tpot_s: float) -> float:
        """Return the share of requests whose mean iteration takes at most `tpot_s`.

        A request sees itself and the mean number of others over its own residence. Their number is Poisson, and the
        variance of its mean over a residence is 2/3 of its mean if residences are equally long.
        """
        batch = self.mean_batch(rate_per_s)
        if not math.isfinite(batch) or self.step_s(1.0) > tpot_s:
            return 0.0
        if self.per_request_s == 0.0 or batch < 1e-9:
            return 1.0
        others = (tpot_s - self.base_s) / self.per_request_s - 1.0
        return normal_share((others - batch) / math.sqrt(2.0 / 3.0 * self.peakedness * batch))

    def rate_bound_per_s(self, tpot_s: float) -> float:
        """Return the rate at which a constant batch is as large as TPOT and room allow."""
        allowed = (tpot_s - self.base_s) / self.per_request_s if self.per_request_s else math.inf
        batch = min(self.batch_max, self.kv_tokens / self.request_tokens, allowed)
        return batch / (self.output_tokens * self.step_s(batch)) if batch > 0.0 else 0.0


def normal_share(deviations: float) -> float:
    """Return the share of a normal distribution below its mean plus this many standard deviations."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2.0))


def poisson_share(count: int, mean: float) -> float:
    """Return the probability that a Poisson number is at most `count`, 0 or more. Args: `mean` above 0.

    The probabilities are added from `count` away from the mean, so that they fall and the sum converges.
    """
    likely = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1.0))
    total, term = 0.0, likely
    if count < mean:
        for number in range(count, -1, -1):
            total += term
            term *= number / mean
            if term <= total * 1e-17:
                break
        return total
    number = count + 1
    term *= mean / number
    while term > total * 1e-17:
        total += term
        number += 1
        term *= mean / number
    return 1.0 - total


def token_s(step_s: float, once_s: float, output_tokens: int) -> float:
    """Return the time per output token if the first token comes from the prefill: the transfer and the wait for the
    decode batch happen once per request, not once per token."""
    return step_s + once_s / (output_tokens - 1)


def highest_rate(attained: float, attainment_of: Callable[[float], float], bound_per_s: float) -> float:
    """Return the highest rate up to `bound_per_s` whose attainment is at least `attained`, by bisection; 0 if there is
    none. `attainment_of` must not increase with the rate."""
    low, high = 0.0, bound_per_s
    if attainment_of(bound_per_s * 1e-6) < attained:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if attainment_of(middle) >= attained:
            low = middle
        else:
            high = middle
    return low
