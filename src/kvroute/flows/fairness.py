"""Weighted max-min fairness by its definition, in simple and slow Python: the reference for the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvroute.types import InputError


def max_min_rates(
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    capacities: Sequence[float],
    ceilings: Sequence[float] | None = None,
) -> list[float]:
    """Return the weighted max-min rates of flows over links, in bytes per second, in the order of `paths`.

    Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): every rate rises in proportion to its weight.
    The flows of a link stop when the link is full, and a flow stops at its ceiling. `paths` holds link numbers (a
    repeated link counts once), `capacities` bytes per second by link number, `ceilings` by flow (inf: none). Raises
    InputError for a flow with neither links nor a ceiling: its rate would be infinite.
    """
    links = [frozenset(path) for path in paths]
    at_most = [math.inf] * len(links) if ceilings is None else ceilings
    for flow, path in enumerate(links):
        if not path and at_most[flow] == math.inf:
            raise InputError("a flow without links has no rate", where=f"paths[{flow}]", hint="name at least one link")
    rates = [0.0] * len(paths)
    room = list(capacities)
    rising: dict[int, set[int]] = {link: set() for link in sorted(set().union(*links))}
    for flow, path in enumerate(links):
        for link in path:
            rising[link].add(flow)
    going = set(range(len(links)))
    while going:
        shares = {
            link: max(room[link], 0.0) / math.fsum(weights[flow] for flow in flows) for link, flows in rising.items()
        }
        full = min(shares, key=lambda link: (shares[link], link), default=-1)
        first = min(going, key=lambda flow: (at_most[flow] / weights[flow], flow))
        share, stopped = at_most[first] / weights[first], [first]
        if shares and shares[full] <= share:
            share, stopped = shares[full], sorted(rising[full])
        for flow in stopped:
            rates[flow] = weights[flow] * share
            for link in links[flow]:
                room[link] -= rates[flow]
                rising[link].remove(flow)
        going.difference_update(stopped)
        rising = {link: flows for link, flows in rising.items() if flows}
    return rates


def fill_to_the_end(
    paths: Sequence[Sequence[int]],
    weights: Sequence[float],
    capacities: Sequence[float],
    sizes_bytes: Sequence[float],
    starts_s: Sequence[float],
    ceilings: Sequence[float] | None = None,
) -> list[float]:
    """Return finish times in seconds of flows that start at `starts_s`; `max_min_rates` runs at each start and finish.

    Capacities must be positive: a stalled flow raises InputError.
    """
    left = list(sizes_bytes)
    finish_s = [0.0] * len(paths)
    waiting = sorted(range(len(paths)), key=lambda flow: (starts_s[flow], flow), reverse=True)
    active: list[int] = []
    now = 0.0
    while waiting or active:
        held = None if ceilings is None else [ceilings[flow] for flow in active]
        rates = max_min_rates([paths[flow] for flow in active], [weights[flow] for flow in active], capacities, held)
        if active and not min(rates) > 0.0:
            raise InputError("a flow has no bandwidth and never finishes", hint="give every link a capacity above zero")
        ends = [now + left[flow] / rate for flow, rate in zip(active, rates, strict=True)]
        to = min(ends + [starts_s[flow] for flow in waiting[-1:]])
        for flow, rate, end in list(zip(active, rates, ends, strict=True)):
            left[flow] = max(left[flow] - rate * (to - now), 0.0)
            if end - to <= 1e-12 * (to - starts_s[flow]):
                finish_s[flow] = to
                active.remove(flow)
        now = to
        while waiting and starts_s[waiting[-1]] <= now:
            flow = waiting.pop()
            finish_s[flow] = now
            if left[flow] > 0.0:
                active.append(flow)
    return finish_s
