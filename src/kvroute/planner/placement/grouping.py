"""Groups GPUs for tensor parallelism: rack by rack with a mixed-integer program over equal chunks, then leftovers, then
swaps between groups.

A group's price is the value per second that it adds; all methods maximise the sum over groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from kvroute.planner.placement.published_choices import from_studies
from kvroute.planner.placement.swaps import Price, Swaps
from kvroute.topology import Cluster
from kvroute.topology.gpu_paths import Gpu
from kvroute.topology.place import Shards

Method: TypeAlias = Literal["milp", "greedy", "paper"]
Grouping: TypeAlias = Callable[[Cluster, Sequence[Gpu], int, Price], list[Shards]]
"""Returns groups of one size: of a cluster, its free GPUs, the size of a group, and the price of a group."""
Chunks: TypeAlias = tuple[tuple[int, ...], ...]
"""[group][chunk]: position of a server in its rack; every chunk of a group has the same number of GPUs."""
_SOLVER_S = 10.0
_SMALL_GPUS = 256
"""Up to this number of GPUs, swaps between racks and swaps that first cost something are tried, too."""
_TOLERANCE = 0.1


@dataclass(slots=True)
class Pool:
    """Free GPUs of one kind by node, ascending."""

    cluster: Cluster
    free: dict[int, list[Gpu]]

    @classmethod
    def of(cls, cluster: Cluster, gpus: Iterable[Gpu]) -> Pool:
        """Return a pool of these GPUs."""
        free: dict[int, list[Gpu]] = {}
        for gpu in gpus:
            free.setdefault(gpu[0], []).append(gpu)
        return cls(cluster, free)

    def racks(self) -> list[list[int]]:
        """Return the nodes of each rack."""
        return list(self.domains(1).values())

    def domains(self, tier: int) -> dict[int, list[int]]:
        """Return the nodes by their domain of a tier: 1 rack, 2 pod, 3 datacenter."""
        found: dict[int, list[int]] = {}
        for node in self.free:
            found.setdefault(self.cluster.places.domains[node][tier], []).append(node)
        return found

    def take(self, node: int, count: int) -> list[Gpu]:
        """Remove the first `count` free GPUs of a node."""
        taken, self.free[node] = self.free[node][:count], self.free[node][count:]
        return taken

    def left(self) -> list[Gpu]:
        """Return the GPUs that are still free."""
        return [gpu for gpus in self.free.values() for gpu in gpus]


@dataclass(slots=True)
class Grouper:
    """Forms groups of one size in a pool."""

    pool: Pool
    size: int
    price: Price
    method: Method = "milp"
    _plans: dict[tuple[object, ...], tuple[int, Chunks]] = field(default_factory=dict)
    """Chunks of racks with these numbers of free GPUs."""

    def groups(self, limit: int | None = None, *, spread: bool = False) -> list[Shards]:
        """Return groups and remove their GPUs from the pool.

        Args:
            limit: maximum number of groups; None: as many as there are GPUs for.
            spread: with a limit, take as many groups from every rack, instead of one rack after the other.
        """
        wanted = len(self.pool.left()) // self.size if limit is None else limit
        if self.method == "paper":
            return self._as_published(wanted)
        best = self._best_price()
        found = self._from_racks(wanted, spread=spread)
        found += self._irregular(wanted - len(found))
        left = self.pool.left()
        tier = 3 if len(found) * self.size + len(left) <= _SMALL_GPUS else 1
        domains = self.pool.cluster.places.domains
        swaps = Swaps(found, left, self.price, lambda node: domains[node][tier], best)
        swaps.run(tolerance=_TOLERANCE if tier == 3 else 0.0)
        self.pool.free = Pool.of(self.pool.cluster, sorted(swaps.free)).free
        return swaps.groups

    def _best_price(self) -> float:
        """Return the highest price of a group of whole servers, free or not, as even as possible, in the racks of the
        pool."""
        nodes, best = self.pool.cluster.places.nodes, 0.0
        for rack in self.pool.racks():
            for used in range(1, len(rack) + 1):
                share = -(-self.size // used)
                if all(nodes[node].gpus >= share for node in rack[:used]):
                    gpus = [(node, gpu) for node in rack[:used] for gpu in range(share)]
                    best = max(best, self.price(tuple(gpus[: self.size])))
                    break
        return best or math.inf

    def _as_published(self, wanted: int) -> list[Shards]:
        found = published_grouping()(self.pool.cluster, self.pool.left(), self.size, self.price)
        for node, gpu in (gpu for group in found[:wanted] for gpu in group):
            self.pool.free[node].remove((node, gpu))
        return found[:wanted]

    def _from_racks(self, wanted: int, *, spread: bool) -> list[Shards]:
        planned = [(nodes, self._chunks(nodes)) for nodes in self.pool.racks()]
        turns = [(turn, number) for number, (_, chunks) in enumerate(planned) for turn in range(len(chunks))]
        if spread:
            turns.sort()
        return [self._taken(planned[number][0], planned[number][1][turn]) for turn, number in turns[:wanted]]

    def _taken(self, nodes: Sequence[int], chunks: tuple[int, ...]) -> Shards:
        return tuple(gpu for place in chunks for gpu in self.pool.take(nodes[place], self.size // len(chunks)))

    def _chunks(self, nodes: Sequence[int]) -> Chunks:
        """Return the groups of one rack as servers of their chunks, most valuable first."""
        counts = tuple(len(self.pool.free[node]) for node in nodes)
        values = self._values(nodes)
        key = (counts, tuple(values.items()))
        if key not in self._plans:
            found = greedy_chunks(counts, self.size, values)
            if self.method == "milp":
                solved = milp_chunks(counts, self.size, values)
                found = max((found, solved), key=lambda plan: sum(values[self.size // len(group)] for group in plan))
            self._plans[key] = (len(found), found)
        return self._plans[key][1]

    def _values(self, nodes: Sequence[int]) -> dict[int, float]:
        """Return the price of a group of equal chunks by the GPUs in a chunk, for chunks that the rack can hold."""
        by_count = sorted(nodes, key=lambda node: -len(self.pool.free[node]))
        found = {}
        for parts in range(1, min(self.size, len(nodes)) + 1):
            chunk = self.size // parts
            if self.size % parts == 0 and len(self.pool.free[by_count[parts - 1]]) >= chunk:
                group = tuple(gpu for node in by_count[:parts] for gpu in self.pool.free[node][:chunk])
                found[chunk] = self.price(group)
        return found

    def _irregular(self, wanted: int) -> list[Shards]:
        """Return groups of what is left: inside a rack first, then inside a pod, then anywhere in a datacenter."""
        found: list[Shards] = []
        for tier in (1, 2, 3):
            for nodes in self.pool.domains(tier).values():
                while len(found) < wanted and sum(len(self.pool.free[node]) for node in nodes) >= self.size:
                    shares = max(self._even_shares(nodes), key=lambda split: self.price(self._first(split)))
                    found.append(tuple(gpu for node, count in shares.items() for gpu in self.pool.take(node, count)))
        return found

    def _even_shares(self, nodes: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yield GPUs by node for one group: from the first m servers with the most free GPUs, as evenly as possible,
        for every m that suffices."""
        ordered = sorted((node for node in nodes if self.pool.free[node]), key=lambda node: -len(self.pool.free[node]))
        for used in range(1, min(len(ordered), self.size) + 1):
            shares, left = dict[int, int](), self.size
            for place, node in enumerate(reversed(ordered[:used])):
                shares[node] = min(len(self.pool.free[node]), left // (used - place))
                left -= shares[node]
            if not left:
                yield shares

    def _first(self, shares: dict[int, int]) -> Shards:
        return tuple(gpu for node, count in shares.items() for gpu in self.pool.free[node][:count])


def published_grouping() -> Grouping:
    """Return the method `paper`. Raises InputError if kvroute-studies is not installed."""
    found: Grouping = from_studies("grouping", "--grouping")
    return found


def greedy_chunks(counts: Sequence[int], size: int, values: dict[int, float]) -> Chunks:
    """Return groups of equal chunks, the most valuable form first, from the servers with the fewest sufficient GPUs."""
    left, found = list(counts), list[tuple[int, ...]]()
    for chunk in sorted(values, key=lambda gpus: (-values[gpus], -gpus)):
        parts = size // chunk
        while True:
            fitting = sorted((count, place) for place, count in enumerate(left) if count >= chunk)[:parts]
            if len(fitting) < parts:
                break
            found.append(tuple(place for _, place in fitting))
            for _, place in fitting:
                left[place] -= chunk
    return tuple(found)


def milp_chunks(counts: Sequence[int], size: int, values: dict[int, float]) -> Chunks:
    """Return the most valuable set of groups of equal chunks of one rack; empty if the solver finds none in time.

    Variables: y[q], groups of chunks of q GPUs, and z[s, q], chunks of server s. A server holds at most one chunk of a
    group, so z[s, q] <= y[q]; then chunks can be dealt to the groups in turn.
    """
    chunks = sorted(values, reverse=True)
    if not chunks:
        return ()
    servers, kinds = len(counts), len(chunks)
    columns, rows = kinds + servers * kinds, servers * (1 + kinds) + kinds
    matrix, low, high = np.zeros((rows, columns)), np.full(rows, -np.inf), np.zeros(rows)
    row = 0
    for server, count in enumerate(counts):
        here = kinds + server * kinds
        matrix[row, here : here + kinds] = chunks
        high[row] = count
        row += 1
        for kind in range(kinds):
            matrix[row, [here + kind, kind]] = 1.0, -1.0
            row += 1
    for kind, chunk in enumerate(chunks):
        matrix[row, kind] = -(size // chunk)
        matrix[row, kinds + kind :: kinds] = 1.0
        low[row] = 0.0
        row += 1
    cost = np.zeros(columns)
    cost[:kinds] = [-values[chunk] for chunk in chunks]
    scale = max(values.values())
    solved = milp(
        cost / scale,
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.ones(columns),
        bounds=Bounds(0, np.concatenate((np.full(kinds, sum(counts) // size), np.repeat(counts, kinds)))),
        options={"time_limit": _SOLVER_S, "mip_rel_gap": 1e-4},
    )
    if solved.x is None:
        return ()
    return _dealt(np.rint(solved.x).astype(int), chunks, servers, size)


def _dealt(solution: np.ndarray[tuple[int], np.dtype[np.int_]], chunks: list[int], servers: int, size: int) -> Chunks:
    """Return the groups of a solution: each takes the servers that have the most chunks left."""
    kinds, found = len(chunks), list[tuple[int, ...]]()
    for kind, chunk in enumerate(chunks):
        left = {server: int(solution[kinds + server * kinds + kind]) for server in range(servers)}
        for _ in range(int(solution[kind])):
            used = sorted(left, key=lambda server: (-left[server], server))[: size // chunk]
            found.append(tuple(sorted(used)))
            for server in used:
                left[server] -= 1
    return tuple(found)
