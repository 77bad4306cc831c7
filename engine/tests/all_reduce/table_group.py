"""The ranks of a group in threads, with their real table and channels, and a ring that notices ranks that disagree."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from kvroute_engine.agent.files import TABLE, GroupEntry, SchemeRule, TableFile, replace_file
from kvroute_engine.all_reduce.channel import Address
from kvroute_engine.all_reduce.counters import AllReduceCounters
from kvroute_engine.all_reduce.settings import Settings
from kvroute_engine.all_reduce.table import RuleTable, packed, start_table, unpacked

GROUP = "decode-0"
PATIENCE_S = 120.0


class Meeting:
    """All ranks give something, and get what all have given."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self._given: list[object] = [None] * ranks

    def exchange(self, rank: int, own: object) -> list[object]:
        self._given[rank] = own
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class LossyLink:
    """A TCP proxy that cuts a share of the connections after a random number of answered bytes, so that requests and
    answers are lost."""

    def __init__(self, target: Address, loss: float, seed: int) -> None:
        self.loss = loss
        self._target, self._drawn = target, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> Address:
        host, port = self._listener.getsockname()
        return host, port

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            cut = self._drawn.randrange(250) if self._drawn.random() < self.loss else None
            cut = 0 if self.loss == 1.0 else cut
            threading.Thread(target=self._forward, args=(near, cut), daemon=True).start()

    def _forward(self, near: socket.socket, cut: int | None) -> None:
        with near, suppress(OSError), socket.create_connection(self._target) as far:
            threading.Thread(target=_copy, args=(near, far, None), daemon=True).start()
            _copy(far, near, cut)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket, most: int | None) -> None:
    """Copy until the end, or until `most` bytes."""
    with suppress(OSError):
        while content := source.recv(4096 if most is None else min(most, 4096)) if most != 0 else b"":
            target.sendall(content)
            most = None if most is None else most - len(content)
        target.shutdown(socket.SHUT_RDWR)


def together(ranks: int, call: Callable[[int], object]) -> list[object]:
    """Call on all ranks at the same time, and return their results."""
    with ThreadPoolExecutor(ranks) as pool:
        return [task.result(2 * PATIENCE_S) for task in [pool.submit(call, rank) for rank in range(ranks)]]


def group_settings(folder: Path, **more: object) -> Settings:
    """Return settings with an agent's folder."""
    return msgspec.structs.replace(Settings(agent=str(folder), group=GROUP, host="127.0.0.1"), **more)


@contextmanager
def tables(
    settings: Settings, ranks: int, loss: float = 0.0, is_answering: Callable[[], bool] = lambda: False
) -> Iterator[tuple[list[RuleTable], list[AllReduceCounters], list[LossyLink]]]:
    """Start the table of every rank; the commits of rank 0 pass links with losses."""
    meeting, counters = Meeting(ranks), [AllReduceCounters(rank) for rank in range(ranks)]
    links: dict[bytes, LossyLink] = {}

    def start(rank: int) -> RuleTable:
        def exchange(own: bytes) -> Sequence[bytes]:
            if len(own) == len(packed(("", 0))):
                link = LossyLink(unpacked(own), loss, rank)
                own = packed(link.address)
                links[own] = link
            return [bytes(message) for message in meeting.exchange(rank, own)]  # type: ignore[call-overload]

        return start_table(settings, rank, ranks, exchange, is_answering, counters[rank])

    started: list[RuleTable] = together(ranks, start)  # type: ignore[assignment]
    try:
        yield started, counters, list(links.values())
    finally:
        for table in started:
            table.close()
        for link in links.values():
            link.close()


def write_table(folder: Path, version: int, rules: Sequence[SchemeRule] | None, received_unix_s: float = 1.0) -> None:
    """Write the table of the scheduler. `rules` None: no entry for the group."""
    groups = {} if rules is None else {GROUP: GroupEntry(version, tuple(rules))}
    replace_file(folder / TABLE, TableFile(version, received_unix_s, groups))
