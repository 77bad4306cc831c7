"""Latency of one foresight decision, compared with a what-if for every candidate: `python -m bench.foresight`.

The timed calls are `InFlight.network_view` and `choose`: advancing the model's bytes, the closed form of every
candidate, the what-if of the best, and all terms. Booking is a separate row: one transfer starts, one ends, and the
rates are solved after each. `foresight-joint` at arrival is another row: the closed form for every prefill instance
considered, in the most expensive case, in which all of them are idle. The upper bound is the same solver without closed
form, pruning and
neighbourhood: `FlowNetwork.transfer_s` of each candidate over all transfers in flight, without the delay imposed on
them.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import numpy as np
from bench.measurement import Row, fresh, show
from bench.prompts import quantiles_us

SIZES = ((128, 50), (1_024, 400))
"""Decode instances and transfers in flight."""
TARGETS_US = {128: 150.0, 1_024: 1_000.0}
CALLS, PLAIN_CALLS = 2_000, 3
ARRIVALS = 20
"""Ratio of the other measured decisions to those at an arrival, which take much longer."""
WARM = 50
POLICIES, JOINT = ("foresight", "foresight-closed"), "foresight-joint"


class Driver:
    """Keeps a table at a number of transfers and makes decisions over it; its clock is a counter."""

    def __init__(self, decode: int, in_flight: int) -> None:
        from kvroute.control.state.transfer_table import InFlight
        from kvroute.oracle import NetworkOracle
        from kvroute.policies.foresight.links import LinkModel
        from kvroute.topology import InstanceCounts, build, fat_tree

        prefill, pods, nodes_per_rack = max(4, min(decode // 3, 256)), 8, 8
        racks_per_pod = -(-(decode + prefill) // (2 * nodes_per_rack * pods))
        cluster = build(
            fat_tree(
                pods=pods,
                racks_per_pod=racks_per_pod,
                nodes_per_rack=nodes_per_rack,
                oversubscription=(2.0, 4.0),
                instances=InstanceCounts(prefill=prefill, decode=decode, placement="spread"),
            )
        )
        roles = [instance.role for instance in cluster.instances]
        self.sources = [index for index, role in enumerate(roles) if role == "prefill"]
        self.targets = np.array([index for index, role in enumerate(roles) if role == "decode"])
        self.names = tuple(cluster.instances[index].name for index in self.targets)
        self.oracle, self.links = NetworkOracle.of(cluster), LinkModel.of(cluster)
        self.table, self.in_flight, self.now, self.next = InFlight(self.links), in_flight, 0.0, 0
        self.draw, self.random = random.Random(decode), np.random.default_rng(decode)
        for _ in range(in_flight):
            self.start(self.draw.choice(self.sources), self.draw.randrange(decode), self.draw.uniform(1e9, 6e9))

    def start(self, source: int, position: int, kv_bytes: float) -> None:
        """Start one more transfer, one millisecond later."""
        self.now += 1e-3
        self.table.started(self.now, self.next, source, int(self.targets[position]), kv_bytes)
        self.next += 1

    def candidates(self) -> object:
        """Return half-full decode instances; some of them have a tenth of the prompt cached."""
        from kvroute.types import Candidates

        count = len(self.names)
        return Candidates(
            names=self.names,
            batch=self.random.integers(0, 40, count),
            queued=self.random.integers(0, 3, count),
            batch_max=np.full(count, 64),
            free_kv_bytes=np.full(count, 2e11),
            hit_tokens=np.zeros(count, dtype=np.int64),
            kv_bytes=4e9 * self.random.choice([1.0, 0.9], count),
            need_bytes=np.full(count, 5e9),
            iteration_base_s=np.full(count, 0.0125),
            iteration_per_request_s=np.full(count, 1e-4),
        )


def decisions(decode: int, in_flight: int, name: str, calls: int) -> dict[str, object]:
    """Return the figures of one size and policy, measured in this process."""
    from dataclasses import replace

    from kvroute.policies import foresight_policy
    from kvroute.types import Choice, Request

    driver, policy = Driver(decode, in_flight), foresight_policy(name)
    request, pools = Request(id=1, input_tokens=32_768), [driver.candidates() for _ in range(20)]
    choose_ns, book_ns, simulated = [], [], 0.0
    for call in range(calls + WARM):
        source, pool = driver.draw.choice(driver.sources), pools[call % len(pools)]
        costs = driver.oracle.costs(source, driver.targets, driver.now)
        start = time.perf_counter_ns()
        choice = replace(policy, network_view=driver.table.network_view(driver.now, source, driver.targets)).choose(
            request,
            pool,  # type: ignore[arg-type]
            costs,
            call,
        )
        choose_ns.append(time.perf_counter_ns() - start)
        assert isinstance(choice, Choice)
        simulated += float(choice.terms.parts["simulated"].sum())
        left = driver.table.left_bytes(driver.now)
        ended = min(left, key=lambda flow: (left[flow], flow))
        start = time.perf_counter_ns()
        driver.table.finished(driver.now, ended)
        driver.start(source, choice.index, float(pool.kv_bytes[choice.index]))  # type: ignore[attr-defined]
        book_ns.append(time.perf_counter_ns() - start)
        while len(driver.table.rates_bytes_per_s) < in_flight:  # the table does not keep transfers inside a node
            driver.start(driver.draw.choice(driver.sources), driver.draw.randrange(decode), 4e9)
    figures: dict[str, object] = {"choose": quantiles_us(choose_ns[WARM:]), "book": quantiles_us(book_ns[WARM:])}
    return figures | {"simulated": simulated / (calls + WARM), "plain": _plain_us(driver)}


def arrivals(decode: int, in_flight: int, calls: int) -> dict[str, object]:
    """Return the figures of `foresight-joint` at arrival, measured in this process."""
    from kvroute.policies import ForesightJoint, JointPath, Pair, PrefillCandidates
    from kvroute.types import Request

    driver, policy = Driver(decode, in_flight), ForesightJoint()
    count = len(driver.sources)
    none = np.zeros(count)
    prefill = PrefillCandidates(tuple(map(str, range(count))), none, none.astype(np.int64), none + 1.0, None)
    request, pools = Request(id=1, input_tokens=32_768), [driver.candidates() for _ in range(20)]
    taken_ns, looked_at = [], 0
    for call in range(calls + WARM):
        pool = pools[call % len(pools)]

        def joint_path(position: int, pool: object = pool) -> JointPath:
            source = driver.sources[position]
            costs = driver.oracle.costs(source, driver.targets, driver.now)
            return JointPath(pool, costs, driver.table.network_view(driver.now, source, driver.targets, 1.0))  # type: ignore[arg-type]

        start = time.perf_counter_ns()
        pair = policy.choose(request, prefill, joint_path, call)
        taken_ns.append(time.perf_counter_ns() - start)
        assert isinstance(pair, Pair)
        looked_at += int(pair.prefill.terms.feasible.sum())
        ended = min(driver.table.left_bytes(driver.now))
        driver.table.finished(driver.now, ended)
        while len(driver.table.rates_bytes_per_s) < in_flight:
            driver.start(driver.draw.choice(driver.sources), driver.draw.randrange(decode), 4e9)
    return {"choose": quantiles_us(taken_ns[WARM:]), "looked_at": looked_at / (calls + WARM), "prefill": count}


def _plain_us(driver: Driver) -> float:
    """Return the median microseconds of a what-if for every candidate in a network of all transfers."""
    from kvroute.flows import FlowNetwork
    from kvroute.policies.foresight.paths import HOPS_MAX, path_of

    links, scratch = driver.links, np.zeros(HOPS_MAX, dtype=np.int64)
    network = FlowNetwork(links.capacity_bytes_per_s)

    def path(source: int, target: int) -> list[int]:
        hops = path_of(source, target, int(links.tier[source, target]), links.attached, links.wan, scratch)
        return [int(link) for link in scratch[:hops]]

    for number in range(driver.in_flight):
        ends = driver.draw.choice(driver.sources), int(driver.draw.choice(driver.targets))
        network.start(number, path(*ends), driver.draw.uniform(1e9, 6e9))
    taken = []
    for _ in range(PLAIN_CALLS):
        source = driver.draw.choice(driver.sources)
        start = time.perf_counter_ns()
        for target in driver.targets.tolist():
            network.transfer_s(path(source, target), 4e9)
        taken.append((time.perf_counter_ns() - start) / 1e3)
    return sorted(taken)[PLAIN_CALLS // 2]


def rows(calls: int) -> list[Row]:
    """Return the rows of every size and policy, each in a fresh process."""
    all_rows = []
    for decode, in_flight in SIZES:
        for name in POLICIES:
            figures = fresh("bench.foresight", "--one", decode, in_flight, name, "--calls", calls)
            where = f"{name}, {decode:,} instances, {in_flight} in flight"

            def row(measure: str, ours: float, **more: float | str | None) -> Row:
                return Row(measure=measure, unit="us", better="lower", ours=ours, **more)  # type: ignore[arg-type]

            simulated = f"{figures['simulated']:.2f} candidates simulated in the mean" if figures["simulated"] else ""
            bound = {"peer": figures["plain"], "peer_name": "each candidate simulated"}
            target = TARGETS_US[decode] if name == "foresight" else None
            note = f"{where}: {simulated}" if simulated else ""
            all_rows.append(row(f"{where}, median", figures["choose"]["p50_us"], target=target, note=note, **bound))
            all_rows.append(row(f"{where}, p99", figures["choose"]["p99_us"]))
            if name == "foresight":
                all_rows.append(row(f"booking a start and an end, {in_flight} in flight", figures["book"]["p50_us"]))
    return [*all_rows, *(_arrival(decode, in_flight, calls) for decode, in_flight in SIZES)]


def _arrival(decode: int, in_flight: int, calls: int) -> Row:
    figures = fresh("bench.foresight", "--one", decode, in_flight, JOINT, "--calls", max(calls // ARRIVALS, 1))
    where = f"{JOINT} at arrival, {figures['prefill']} prefill, {decode:,} decode, {in_flight} in flight, median"
    note = f"{where}: {figures['looked_at']:.0f} prefill instances looked at, p99 {figures['choose']['p99_us']:,.0f} us"
    return Row(measure=where, unit="us", better="lower", ours=figures["choose"]["p50_us"], note=note)


def main() -> None:
    """Print the rows, or the figures of one size for the parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--calls", type=int, default=CALLS, help="decisions of each size")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        decode, in_flight, name = int(given.one[0]), int(given.one[1]), given.one[2]
        figures = (
            arrivals(decode, in_flight, given.calls)
            if name == JOINT
            else decisions(decode, in_flight, name, given.calls)
        )
        print(json.dumps(figures))
        return
    show(rows(given.calls), given.json)


if __name__ == "__main__":
    main()
