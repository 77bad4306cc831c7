"""Latency of one decode decision with a 32K-token prompt, compared with Dynamo in this run: `python -m bench.decision`.

The timed call is `Control.handle(PrefillFinished)`: prefix match of 2,048 blocks against every instance, congestion
lookup, NetKV's cost of every candidate with all its terms, and the bookings. Dynamo's figures cover parts of this work;
bench/README.md lists them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Mapping

from bench.measurement import Failed, Row, fresh, process_figures, show
from bench.peers.environment import WITHOUT_EVENTS, dynamo_python
from bench.prompts import BLOCK_TOKENS, LONG_BLOCKS, SHORT_BLOCKS, Chain, Prompts, copied, quantiles_us

from kvroute.types import (
    TIER_COUNT,
    Admitted,
    Arrived,
    CongestionMeasured,
    Decode,
    Event,
    Finished,
    KvStored,
    Prefill,
    PrefillFinished,
    Request,
    TransferFinished,
)

SIZES = (16, 128, 1_024, 10_000)
PEER_SIZES = (16, 128, 1_024)
TARGETS_US = {128: 100.0, 1_024: 300.0, 10_000: 2_000.0}
CALLS = 2_000
OPEN_TRANSFERS = 16
"""Number of our transfers in flight at every decision."""
MEASURED_EVERY = 10
"""Number of decisions between two telemetry events."""
MAX_OUTPUT_TOKENS = 512


class Driver:
    """Sends the events of a busy cluster to a control core; its clock is a counter."""

    def __init__(self, decode: int, policy: str = "netkv", parameters: Mapping[str, float] | None = None) -> None:
        from kvroute.control import ControlSpec
        from kvroute.topology import InstanceCounts, build, fat_tree

        prefill = max(4, min(decode // 3, 256))
        pods, nodes_per_rack = 8, 8
        racks_per_pod = -(-(decode + prefill) // (2 * nodes_per_rack * pods))
        self.cluster = build(
            fat_tree(
                pods=pods,
                racks_per_pod=racks_per_pod,
                nodes_per_rack=nodes_per_rack,
                oversubscription=(2.0, 4.0),
                instances=InstanceCounts(prefill=prefill, decode=decode, placement="spread"),
            )
        )
        self.control = ControlSpec(decode=policy, parameters=dict(parameters or {})).build(self.cluster)
        self._decode = [instance.name for instance in self.cluster.instances if instance.role == "decode"]
        self._next_id, self._now = 0, 0.0

    def handle(self, event: Event) -> tuple[object, ...]:
        """Handle one event, untimed."""
        return self.control.handle(event)

    def fill(self, prompts: Prompts) -> None:
        """Fill the decode instances with cached prefixes, and half of them with one running request each."""
        for position, chain in prompts.placed():
            self.handle(KvStored(self._tick(), self._decode[position], chain))
        for number in range(len(self._decode) // 2):
            request = self.prefilled(prompts.chain(number, SHORT_BLOCKS))
            (decision,) = self.handle(PrefillFinished(self._tick(), request))
            assert isinstance(decision, Decode)
            self.handle(TransferFinished(self._tick(), request))
            self.handle(Admitted(self._tick(), request))
        self.measure_congestion()

    def prefilled(self, blocks: Chain) -> int:
        """Start a request whose prefill is about to end; return its id."""
        self._next_id += 1
        request = Request(
            id=self._next_id,
            input_tokens=len(blocks) * BLOCK_TOKENS,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            max_output_tokens=MAX_OUTPUT_TOKENS,
        )
        (decision,) = self.handle(Arrived(self._tick(), request))
        assert isinstance(decision, Prefill)
        return request.id

    def measure_congestion(self) -> None:
        """Send telemetry that changes from time to time."""
        share = (self._next_id % 7) / 10
        self.handle(CongestionMeasured(self._tick(), (0.0,) + (share,) * (TIER_COUNT - 1)))

    def decide(self, request: int) -> int:
        """Make the measured decision; return its time in nanoseconds."""
        event = PrefillFinished(self._tick(), request)
        start = time.perf_counter_ns()
        (decision,) = self.control.handle(event)
        taken = time.perf_counter_ns() - start
        assert isinstance(decision, Decode), decision
        return taken

    def leave(self, request: int) -> None:
        """End the transfer and the request immediately."""
        self.handle(TransferFinished(self._tick(), request))
        self.handle(Finished(self._tick(), request))

    def _tick(self) -> float:
        self._now += 1e-3
        return self._now


def decisions(decode: int, calls: int) -> dict[str, object]:
    """Return the figures of one size, measured in this process."""
    driver, prompts = Driver(decode), Prompts(decode)
    driver.fill(prompts)
    queries = [copied(chain) for chain in prompts.long]
    taken_ns, in_flight = [], deque[int]()
    for call in range(calls + OPEN_TRANSFERS):
        if call % MEASURED_EVERY == 0:
            driver.measure_congestion()
        request = driver.prefilled(queries[call % len(queries)])
        taken_ns.append(driver.decide(request))
        in_flight.append(request)
        if len(in_flight) > OPEN_TRANSFERS:
            driver.leave(in_flight.popleft())
    index, match_ns = driver.control.prefix, []
    for call in range(calls):
        start = time.perf_counter_ns()
        index.match(queries[call % len(queries)])
        match_ns.append(time.perf_counter_ns() - start)
    return {
        "decide": quantiles_us(taken_ns[OPEN_TRANSFERS:]),
        "match": quantiles_us(match_ns),
        "rss_mb": process_figures()["rss_mb"],
    }


def rows(sizes: tuple[int, ...], calls: int, peer: bool) -> list[Row]:
    """Return the rows of every size, ours and the peer's in turn, each in a fresh process."""
    all_rows = []
    for size in sizes:
        ours = fresh("bench.decision", "--one", size, "--calls", calls)
        theirs, reason = None, "" if peer else "not requested"
        if peer and size in PEER_SIZES:
            try:
                theirs = fresh(
                    "bench.peers.dynamo_router", size, "--calls", calls, python=dynamo_python(), env=WITHOUT_EVENTS
                )
            except Failed as failed:
                reason = str(failed)
        elif peer:
            reason = f"Dynamo is run up to {max(PEER_SIZES):,} workers"
        all_rows += _rows(size, ours, theirs, reason)
    return all_rows


def _rows(
    size: int, ours: dict[str, dict[str, float]], theirs: dict[str, dict[str, float]] | None, reason: str
) -> list[Row]:
    def row(measure: str, part: str, quantile: str, peer_part: str, peer_name: str, target: float | None = None) -> Row:
        return Row(
            measure=f"{measure}, {size:,} instances",
            unit="us",
            better="lower",
            ours=ours[part][quantile],
            peer=theirs[peer_part][quantile] if theirs else None,
            peer_name=peer_name if theirs else "not available",
            target=target,
            note=f"Dynamo, {size:,} workers: {reason}" if reason else "",
        )

    selection, tree = "Dynamo select (no prefix held)", "Dynamo RadixTree"
    return [
        row("decode decision, 32K tokens, median", "decide", "p50_us", "select", selection, TARGETS_US.get(size)),
        row("decode decision, 32K tokens, p99", "decide", "p99_us", "select", selection),
        row(f"of it prefix match, {LONG_BLOCKS:,} blocks, median", "match", "p50_us", "match", tree),
    ]


def main() -> None:
    """Print the rows, or the figures of one size for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--size", type=int, action="append", help=f"decode instances; repeat; default {SIZES}")
    parser.add_argument("--calls", type=int, default=CALLS, help="decisions of each size")
    parser.add_argument("--no-peer", action="store_true", help="leave Dynamo out")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(decisions(given.one, given.calls)))
        return
    show(rows(tuple(given.size or SIZES), given.calls, not given.no_peer), given.json)


if __name__ == "__main__":
    main()
