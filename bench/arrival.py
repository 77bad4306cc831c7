"""Time of a request's arrival at the core, under the default policy and `foresight`: `python -m bench.arrival`.

The timed call is `Control.handle(Arrived)` for a 32K-token prompt in a busy cluster: prefix match against every
instance, and the choice. Under `foresight` a prefill policy chooses the prefill instance. `foresight-joint` prices
pairs, and instances alone unless `aggregated` is 0. The decode decision at the end of a pair's prefill is not part of
it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque

from bench.decision import Driver
from bench.measurement import Row, fresh, show
from bench.prompts import BLOCK_TOKENS, LONG_BLOCKS, SHORT_BLOCKS, Chain, Prompts, copied, quantiles_us

from kvroute.types import (
    Admitted,
    Arrived,
    Decision,
    Decode,
    Finished,
    KvStored,
    Prefill,
    PrefillFinished,
    Request,
    TransferFinished,
)

SIZES = (12, 128, 1_024)
CALLS = 1_000
OPEN_REQUESTS = 16
"""Number of requests of the bench in flight at every arrival."""
POLICIES: dict[str, dict[str, float]] = {
    "foresight": {},
    "foresight-joint": {},
    "foresight-joint, pairs only": {"aggregated": 0.0},
}


class ArrivalDriver(Driver):
    """A busy cluster under one policy, whose requests one instance may serve."""

    def arrive(self, blocks: Chain, number: int) -> tuple[int, tuple[Decision, ...]]:
        """Let a request arrive; return the time in nanoseconds, and the decisions."""
        request = Request(id=number, input_tokens=len(blocks) * BLOCK_TOKENS, blocks=blocks, block_tokens=BLOCK_TOKENS)
        event = Arrived(self._tick(), request)
        start = time.perf_counter_ns()
        decisions = self.control.handle(event)
        return time.perf_counter_ns() - start, decisions

    def fill(self, prompts: Prompts) -> None:
        """Fill the decode instances with cached prefixes, and serve as many requests as half of them."""
        for position, chain in prompts.placed():
            self.handle(KvStored(self._tick(), self._decode[position], chain))
        for number in range(len(self._decode) // 2):
            self.settle(number, self.arrive(prompts.chain(number, SHORT_BLOCKS), number)[1])
        self.measure_congestion()

    def settle(self, number: int, decisions: tuple[Decision, ...]) -> bool:
        """Let a request decode; return whether one instance serves it."""
        aggregated = isinstance(decisions[-1], Decode)
        if isinstance(decisions[0], Prefill):
            decisions = self.control.handle(PrefillFinished(self._tick(), number))
        if not aggregated:
            assert isinstance(decisions[-1], Decode)
            self.handle(TransferFinished(self._tick(), number))
        self.handle(Admitted(self._tick(), number))
        return aggregated

    def end(self, number: int) -> None:
        """End a request."""
        self.handle(Finished(self._tick(), number))


def arrivals(decode: int, policy: str, calls: int) -> dict[str, object]:
    """Return the figures of one size and policy, measured in this process."""
    name = policy.partition(",")[0]
    driver, prompts = ArrivalDriver(decode, name, POLICIES[policy]), Prompts(decode)
    driver.fill(prompts)
    queries = [copied(chain) for chain in prompts.long]
    assert len(queries[0]) == LONG_BLOCKS
    taken_ns, in_flight, aggregated = [], deque[int](), 0
    for number in range(1_000_000, 1_000_000 + calls + OPEN_REQUESTS):
        taken, decisions = driver.arrive(queries[number % len(queries)], number)
        taken_ns.append(taken)
        aggregated += driver.settle(number, decisions)
        in_flight.append(number)
        if len(in_flight) > OPEN_REQUESTS:
            driver.end(in_flight.popleft())
    return {"arrive": quantiles_us(taken_ns[OPEN_REQUESTS:]), "aggregated": aggregated / len(taken_ns)}


def rows(calls: int) -> list[Row]:
    """Return the rows of every size and policy, each in a fresh process."""
    found = []
    for decode in SIZES:
        figures = {name: fresh("bench.arrival", "--one", decode, name, "--calls", calls) for name in POLICIES}
        for name in list(POLICIES)[1:]:
            where = f"arrival, {name}, {decode:,} decode instances, median"
            found.append(
                Row(
                    measure=where,
                    unit="us",
                    better="lower",
                    ours=figures[name]["arrive"]["p50_us"],
                    peer=figures["foresight"]["arrive"]["p50_us"],
                    peer_name="foresight",
                    note=f"{where}: {100 * figures[name]['aggregated']:.0f} % of the requests served by one instance",
                )
            )
    return found


def main() -> None:
    """Print the rows, or the figures of one size and policy for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--calls", type=int, default=CALLS, help="arrivals of each size and policy")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(arrivals(int(given.one[0]), given.one[1], given.calls)))
        return
    show(rows(given.calls), given.json)


if __name__ == "__main__":
    main()
