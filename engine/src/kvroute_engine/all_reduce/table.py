"""The scheduler's table on the ranks of a group: rank 0 reads it, commits it, and all ranks change at one operation.

`collective_table.py` has the protocol. The commits go over a channel between the ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from kvroute_engine.agent.files import GroupTraffic, replace_file, traffic_path
from kvroute_engine.all_reduce.channel import KEY_BYTES, Address, Channel, new_key
from kvroute_engine.all_reduce.collective_table import Acknowledged, Commit, Leader, Rank, TableEntry
from kvroute_engine.all_reduce.counters import AllReduceCounters
from kvroute_engine.all_reduce.rules import GroupRules
from kvroute_engine.all_reduce.settings import Settings
from kvroute_engine.all_reduce.table_source import SwitchReturn, TableSource
from kvroute_engine.switch import AggregationError

log = logging.getLogger("kvroute.connector")
EARLY = 16
"""Operations that a rank may have started on a GPU before they are complete."""
_POLL_S = 0.2
_TRAFFIC_S = 0.5
_LONG_S = 10.0
_WAIT_S = 600.0
_INCARNATION_BYTES = 8
Exchange = Callable[[bytes], Sequence[bytes]]
"""Returns the bytes of every rank, in their order; all ranks call it with equally many."""


class RuleTable(Protocol):
    """Rules of each operation of a rank."""

    def next(self) -> GroupRules:
        """Begin the next operation, and return its rules: the same on all ranks."""
        ...

    def failed(self, generation: int) -> None:
        """Take note that the group has given up the switch in this generation."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class _Failed(msgspec.Struct, frozen=True):
    """Rank to leader: its group at the switch has given it up."""

    generation: int


class FixedTable:
    """The rules of the settings, for ever."""

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules

    def next(self) -> GroupRules:
        """Return the rules."""
        return self._rules

    def failed(self, generation: int) -> None:
        """Do nothing: the group does not return."""

    def close(self) -> None:
        """Do nothing."""


class FollowedTable:
    """A rank that takes the commits of rank 0."""

    def __init__(self, rank: Rank[GroupRules], host: str, key: bytes) -> None:
        """`host`, `key`: see `Channel`."""
        self._rank, self._operation, self._lock = rank, 0, threading.Lock()
        self._leader: Address | None = None
        self.channel = Channel(host, key, self._answer)

    def connect(self, leader: Address) -> None:
        """Set the address of rank 0."""
        self._leader = leader

    def next(self) -> GroupRules:
        """Begin the next operation."""
        with self._lock:
            self._operation += 1
            return self._rank.option_of(self._operation - 1)

    def failed(self, generation: int) -> None:
        """Tell rank 0."""
        assert self._leader is not None, "the ranks are connected"
        self.channel.ask(self._leader, msgspec.msgpack.encode(_Failed(generation)))

    def _answer(self, request: bytes) -> bytes | None:
        commit = msgspec.msgpack.decode(request, type=Commit[GroupRules])
        with self._lock:
            known = self._rank.receive(commit)
        return None if known is None else msgspec.msgpack.encode(known)

    def close(self) -> None:
        """Answer no more commits."""
        self.channel.close()


@dataclass(frozen=True)
class Reporting:
    """What rank 0 reports to the server's agent."""

    folder: Path
    group: str
    incarnation: int
    counters: AllReduceCounters


class LeadingTable:
    """Rank 0: a thread reads the table, commits it, and writes the traffic."""

    def __init__(
        self,
        leader: Leader[GroupRules],
        source: TableSource,
        returning: SwitchReturn,
        reporting: Reporting,
        channel_at: tuple[str, bytes],
    ) -> None:
        """`channel_at`: host and key of the channel."""
        self._leader, self._source, self._returning, self._reporting = leader, source, returning, reporting
        self._changed = threading.Condition()
        self._committed, self._version = source.settings, 0
        self._failed_generation = -1
        self._others: Mapping[int, Address] = {}
        self._written: GroupTraffic | None = None
        self._written_s, self._warned = 0.0, False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvroute-all-reduce-table")
        self.channel = Channel(*channel_at, self._answer)

    def connect(self, others: Mapping[int, Address]) -> None:
        """Set the addresses of the other ranks by their numbers."""
        self._others = others

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def next(self) -> GroupRules:
        """Begin the next operation; wait first for acknowledgements that it needs.

        Raises:
            AggregationError: a rank did not acknowledge for a long time.
        """
        with self._changed:
            if self._leader.may_start():
                return self._leader.start()[1]
        return self._wait()

    def _wait(self) -> GroupRules:
        began_s, logged = time.monotonic(), False
        while True:
            self._deliver()  # here, too: the thread may wait for another rank, or have ended
            with self._changed:
                if self._leader.may_start() or self._changed.wait_for(self._leader.may_start, _POLL_S):
                    return self._leader.start()[1]
                missing = ", ".join(str(rank) for rank, _ in self._leader.pending())
            waited_s = time.monotonic() - began_s
            if waited_s > _WAIT_S:
                raise AggregationError(f"ranks did not acknowledge a table for {_WAIT_S:.0f} s: {missing}")
            if waited_s > _LONG_S and not logged:
                logged = True
                log.warning("rank 0 waits for the acknowledgement of a table by ranks %s", missing)

    def failed(self, generation: int) -> None:
        """Take note of a failure."""
        self._failed_generation = max(self._failed_generation, generation)

    def _answer(self, request: bytes) -> bytes:
        self.failed(msgspec.msgpack.decode(request, type=_Failed).generation)
        return b"\0"

    def refresh(self) -> None:
        """Read the table, begin a commit if it has changed, and send what is not acknowledged."""
        rules = self._source.poll()
        self._reporting.counters.received_unix_s = self._source.received_unix_s
        generation = self._returning.update(self._failed_generation, rules.switched)
        wanted = msgspec.structs.replace(rules, generation=generation)
        with self._changed:
            if wanted != self._committed:
                self._committed, self._version = wanted, self._version + 1
                self._leader.receive_entry(TableEntry(self._version, wanted))
        self._deliver()

    def _deliver(self) -> None:
        with self._changed:
            pending = list(self._leader.pending())
        for rank, commit in pending:
            answer = self.channel.ask(self._others[rank], msgspec.msgpack.encode(commit))
            if answer is None:
                continue
            with self._changed:
                self._leader.receive(msgspec.msgpack.decode(answer, type=Acknowledged))
                self._changed.notify_all()

    def report(self) -> None:
        """Write the traffic, if it has changed."""
        own = self._reporting
        traffic = own.counters.traffic(own.group, own.incarnation)
        self._written_s = time.monotonic()
        if traffic == self._written:
            return
        try:
            replace_file(traffic_path(own.folder, own.group), traffic)
            self._written, self._warned = traffic, False
        except OSError as error:
            if not self._warned:
                log.warning("the traffic of group %s cannot be written to %s: %s", own.group, own.folder, error)
            self._warned = True

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                self.refresh()
                self._reporting.counters.write_if_due()
                if time.monotonic() >= self._written_s + _TRAFFIC_S:
                    self.report()
            except Exception:  # the group goes on with the rules that it has
                log.exception("the table of group %s is not read any more", self._reporting.group)
                return

    def close(self) -> None:
        """Stop reading, and write the traffic for the last time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * _POLL_S)
        self.channel.close()
        self.report()


def start_table(
    settings: Settings,
    rank: int,
    ranks: int,
    exchange: Exchange,
    is_answering: Callable[[], bool],
    counters: AllReduceCounters,
) -> RuleTable:
    """Return the table of a rank. All ranks call it at the same time, with the same `agent`.

    Args:
        settings: those of the group; with an `agent`, `host` is set.
        rank, ranks: number of this rank, and of ranks.
        exchange: of small messages between the ranks.
        is_answering: whether the switch answers.
        counters: of this rank.
    """
    if not settings.agent or ranks == 1:
        return FixedTable(settings.rules)
    own = new_key() + time.time_ns().to_bytes(_INCARNATION_BYTES, "big")
    first = exchange(own)[0]
    key, incarnation = first[:KEY_BYTES], int.from_bytes(first[KEY_BYTES:], "big")
    machine = Rank(incarnation, rank, settings.rules)
    counters.table_version = 0
    if rank:
        followed = FollowedTable(machine, settings.host, key)
        followed.connect(_addresses(exchange, followed.channel.address)[0])
        return followed
    folder = Path(settings.agent)
    source = TableSource(folder, settings.group, settings.rules, settings.prepared)
    leading = LeadingTable(
        Leader(machine, frozenset(range(1, ranks)), early=EARLY),
        source,
        SwitchReturn(float(settings.rejoin), is_answering),
        Reporting(folder, settings.group, incarnation, counters),
        (settings.host, key),
    )
    addresses = _addresses(exchange, leading.channel.address)
    leading.connect({number: address for number, address in enumerate(addresses) if number})
    leading.start()
    return leading


def _addresses(exchange: Exchange, own: Address) -> list[Address]:
    return [unpacked(address) for address in exchange(packed(own))]


def packed(address: Address) -> bytes:
    """Return an address as 64 bytes."""
    return f"{address[0]}:{address[1]}".encode().ljust(64)


def unpacked(content: bytes) -> Address:
    """Return the address of these bytes."""
    host, _, port = content.decode().strip().rpartition(":")
    return host, int(port)
