"""Limits of admission over several workers: together they keep to them, also in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.serve.proxy.admission.admission import (
    Accepted,
    AdmissionController,
    AdmissionLimits,
    Queued,
    Refused,
)
from kvroute.serve.proxy.other_workers import OtherWorkers, release_worker

KEYS = (None, "alice", "bob")
steps = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["enter", "leave", "look"]), st.sampled_from(KEYS)))


@contextmanager
def counted(workers: int) -> Iterator[list[OtherWorkers]]:
    """The counts of several workers of one machine."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "counts")
        OtherWorkers.create(path, workers)
        counts = [OtherWorkers(path, number, workers) for number in range(1, 1 + workers)]
        try:
            yield counts
        finally:
            for count in counts:
                count.close()


@settings(max_examples=100, deadline=None)
@given(steps, st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_workers_keep_the_limits_together(
    taken: list[tuple[int, str, str | None]], in_flight: int, queue: int, per_key: int
) -> None:
    """In any order of requests: neither the requests in flight, nor those that wait, nor those of a key exceed their
    limit over all workers, and a request is turned away only at a limit."""
    limits = AdmissionLimits(in_flight=in_flight, queue=queue, per_key=per_key)
    with counted(3) as counts:
        workers = [AdmissionController(limits, peers=count) for count in counts]
        present: list[list[int]] = [[], [], []]
        for ticket, (number, step, key) in enumerate(taken):
            worker = workers[number]
            if step == "enter":
                held = sum(sharing.held_by(key or "") for sharing in workers)
                running, waiting = (
                    sum(sharing.in_flight for sharing in workers),
                    sum(sharing.queued for sharing in workers),
                )
                entry = worker.acquire(ticket, key, 0.0)
                assert isinstance(entry, Accepted) == (
                    (key is None or held < per_key) and running < in_flight and not worker.queued
                )
                if isinstance(entry, Refused):
                    assert (key is not None and held >= per_key) or waiting >= queue
                else:
                    present[number].append(ticket)
                    assert isinstance(entry, Accepted | Queued)
            elif step == "leave" and present[number]:
                worker.release(present[number].pop(0), 0.0)
            elif step == "look":
                worker.admit()
                assert not worker.queued or sum(sharing.in_flight for sharing in workers) >= in_flight
            assert sum(sharing.in_flight for sharing in workers) <= in_flight
            assert sum(sharing.queued for sharing in workers) <= queue
            assert all(sum(sharing.held_by(name) for sharing in workers) <= per_key for name in ("alice", "bob"))
        for worker, tickets in zip(workers, present, strict=True):
            for ticket in tickets:
                worker.release(ticket, 0.0)
            worker.admit()
        assert all(count.in_flight == count.queued == 0 for count in counts)


def test_a_worker_that_died_holds_nothing(tmp_path: Path) -> None:
    """The parent process releases what it held, and what the others hold stays."""
    path = tmp_path / "counts"
    OtherWorkers.create(path, 2)
    limits = AdmissionLimits(in_flight=2, queue=0, per_key=1)
    with closing(OtherWorkers(path, 1, 2)) as one, closing(OtherWorkers(path, 2, 2)) as two:
        first, second = AdmissionController(limits, peers=one), AdmissionController(limits, peers=two)
        assert first.acquire(1, "alice", 0.0) == second.acquire(1, "bob", 0.0) == Accepted()
        assert isinstance(second.acquire(2, "alice", 0.0), Refused)
        release_worker(path, 1, 2)
        assert second.acquire(3, "alice", 0.0) == Accepted()
        assert isinstance(second.acquire(4, None, 0.0), Refused)
        again = AdmissionController(limits, peers=one)
        assert isinstance(again.acquire(1, None, 0.0), Refused)


HAMMER = """
import sys
from pathlib import Path
from kvroute.serve.proxy.admission.admission import Accepted, AdmissionController, AdmissionLimits
from kvroute.serve.proxy.other_workers import OtherWorkers
counts = OtherWorkers(Path(sys.argv[1]), int(sys.argv[2]), 3)
worker = AdmissionController(AdmissionLimits(in_flight=2, queue=0), peers=counts)
admitted = 0
for ticket in range(20_000):
    if worker.acquire(ticket, "key", 0.0) == Accepted():
        admitted += 1
        with counts.locked():
            assert worker.in_flight + counts.in_flight <= 2, "over the limit"
        worker.release(ticket, 0.0)
print(admitted)
"""


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    """Three processes admit requests as fast as they can, and never more than two at a time."""
    path = tmp_path / "counts"
    OtherWorkers.create(path, 3)
    command = [sys.executable, "-c", HAMMER, str(path)]
    running = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in (1, 2, 3)
    ]
    ended = [process.communicate(timeout=200) for process in running]
    assert [error for _, error in ended] == [""] * 3
    assert all(int(output) > 0 for output, _ in ended)
