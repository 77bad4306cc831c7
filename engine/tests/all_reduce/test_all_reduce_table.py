"""All ranks of a group use the same rules in every operation, while tables change, messages are lost and the switch
comes and goes."""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine.tests.all_reduce.table_group import (
    GROUP,
    PATIENCE_S,
    Meeting,
    group_settings,
    tables,
    together,
    write_table,
)

from kvroute_engine.agent.files import GroupTraffic, SchemeRule, read_file, traffic_path
from kvroute_engine.all_reduce.channel import new_key
from kvroute_engine.all_reduce.collective_table import Leader, Rank
from kvroute_engine.all_reduce.counters import AllReduceCounters
from kvroute_engine.all_reduce.peers import Operations, RankPeers
from kvroute_engine.all_reduce.rules import GroupRules, Rule
from kvroute_engine.all_reduce.settings import SizeRule
from kvroute_engine.all_reduce.switched import SwitchedSums
from kvroute_engine.all_reduce.table import EARLY, FollowedTable, LeadingTable, Reporting
from kvroute_engine.all_reduce.table_source import SwitchReturn, TableSource
from kvroute_engine.switch import AggregationClient, is_answering
from kvroute_engine.switch.udp import UdpSwitch

ANY = (SchemeRule("ring"),)
CHOICES = (
    ANY,
    (SchemeRule("ina"),),
    (SchemeRule("ina", 4_000), SchemeRule("multi-rail-ring")),
    (SchemeRule("ring", 4_000), SchemeRule("ina")),
    None,
)


def limit() -> float:
    """A time at which a test gives up."""
    return time.monotonic() + PATIENCE_S


@pytest.mark.parametrize(("ranks", "loss"), [(2, 0.0), (3, 0.3), (4, 0.7)])
def test_all_ranks_use_the_same_rules(tmp_path: Path, ranks: int, loss: float) -> None:
    """Every operation is a meeting of all ranks, which compare their rules; tables change until 12 were in use."""
    settings, meeting, drawn = group_settings(tmp_path, also=("ina",), switch="127.0.0.1:7300"), Meeting(ranks), {}
    ends_s, version = limit(), 0

    with tables(settings, ranks, loss) as (started, counters, _):

        def run(rank: int) -> set[int]:
            nonlocal version
            own, used = random.Random(rank), set[int]()
            operation = 0
            while True:
                rules = started[rank].next()
                counters[rank].table_version = rules.version
                if rank == 0 and operation % 50 == 0:
                    version += own.choice((1, 1, 3))
                    drawn[version] = own.choice(CHOICES)
                    write_table(tmp_path, version, drawn[version])
                if own.random() < 0.01:
                    time.sleep(own.random() * 0.01)
                found = meeting.exchange(rank, (operation, rules, time.monotonic() > ends_s))
                assert len({result[:2] for result in found}) == 1, found  # type: ignore[index]
                used.add(rules.version)
                operation += 1
                if len(used) >= 12 or any(result[2] for result in found):  # type: ignore[index]
                    return used

        used = together(ranks, run)
    assert all(scheme == used[0] for scheme in used)
    assert len(used[0]) >= 12, used  # type: ignore[arg-type]
    traffic = read_file(traffic_path(tmp_path, GROUP), GroupTraffic)
    assert traffic is not None
    assert traffic.table_version in used[0]  # type: ignore[operator]


def test_no_rank_acts_on_a_version_that_one_does_not_know(tmp_path: Path) -> None:
    """The leader stops early enough before it; when the last rank answers again, all change together."""
    write_table(tmp_path, 7, CHOICES[1])
    settings = group_settings(tmp_path, also=("ina",), switch="127.0.0.1:7300")
    with tables(settings, 3, 1.0) as (started, _, links):
        links[1].loss = 0.0  # one of the ranks knows the version, whichever it is
        leading = started[0]
        assert isinstance(leading, LeadingTable)
        leading.refresh()
        found: list[GroupRules] = []
        stopped = 64 - 1

        def lead() -> None:
            while len(found) < 200:
                found.append(leading.next())

        thread = threading.Thread(target=lead, daemon=True)
        thread.start()
        ends_s = limit()
        while len(found) < stopped and time.monotonic() < ends_s:
            time.sleep(0.001)
        assert len(found) == stopped
        others = [[table.next() for _ in range(stopped + EARLY + 1)] for table in started[1:]]
        assert {rules.version for rules_of_rank in (found, *others) for rules in rules_of_rank} == {0}
        assert len(found) == stopped, "the leader waits"
        for link in links:
            link.loss = 0.0
        thread.join(PATIENCE_S)
        assert len(found) == 200
        for table, seen in zip(started[1:], others, strict=True):
            seen += [table.next() for _ in range(200 - len(seen))]
        assert others == [found, found]
        assert [rules.version for rules in found].index(7) == 64 + EARLY


def test_the_leader_commits_without_its_thread(tmp_path: Path) -> None:
    """Its thread may have ended: the calls of all-reduces do its work."""
    first = GroupRules((Rule("ring"),))
    source = TableSource(tmp_path, GROUP, first, {"ring", "ina"})
    machine, key = Leader(Rank(1, 0, first), frozenset({1}), early=EARLY), new_key()
    reporting = Reporting(tmp_path, GROUP, 1, AllReduceCounters(0))
    leading = LeadingTable(machine, source, SwitchReturn(1.0, lambda: True), reporting, ("127.0.0.1", key))
    followed = FollowedTable(Rank(1, 1, first), "127.0.0.1", key)
    leading.connect({1: followed.channel.address})
    before = [leading.next() for _ in range(100)]
    write_table(tmp_path, 3, CHOICES[1])
    leading.connect({1: ("127.0.0.1", 1)})  # the commit does not arrive
    leading.refresh()
    leading.connect({1: followed.channel.address})
    found = before + [leading.next() for _ in range(200)]
    assert found == [followed.next() for _ in range(300)]
    assert [rules.version for rules in found] == [0] * 180 + [3] * 120
    leading.close()
    followed.close()


class Switch:
    """A switch that can be killed and started again on its port."""

    def __init__(self) -> None:
        self.address = ("127.0.0.1", 0)
        self.start()

    def start(self) -> None:
        switch = UdpSwitch("127.0.0.1", self.address[1], 256)
        self.address = switch.address
        self._stopped = threading.Event()

        def serve() -> None:
            switch.serve(self._stopped.is_set)
            switch.close()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def switched_group(ranks: int, address: tuple[str, int]) -> list[SwitchedSums]:
    """Return the ranks of a group at a switch, connected to each other."""
    key, operations = new_key(), [Operations() for _ in range(ranks)]
    peers = [RankPeers(operation, "127.0.0.1", key) for operation in operations]
    for rank, peer in enumerate(peers):
        peer.connect([other.address for number, other in enumerate(peers) if number != rank])
    clients = [AggregationClient(address, 1, rank, ranks, 8) for rank in range(ranks)]
    return [SwitchedSums(*parts, 0.2) for parts in zip(clients, operations, peers, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_tables_and_fallbacks_together(tmp_path: Path, seed: int) -> None:
    """The switch dies and comes back at random times while the table changes; all ranks have the exact sum of every
    operation, and the group returns to the switch at least twice."""
    ranks = 2 + seed % 2
    switch = Switch()
    settings = group_settings(tmp_path, also=("ina",), switch=f"127.0.0.1:{switch.address[1]}", rejoin=0.05)
    members, meeting, ends_s = switched_group(ranks, switch.address), Meeting(ranks), limit()
    outage, version = random.Random(seed), 0

    def alive() -> bool:
        return is_answering(switch.address, 127, 0.2)

    def reduce(rank: int, operation: int, rules: GroupRules) -> tuple[np.ndarray, bool]:
        tensor = np.random.default_rng([operation, rank]).normal(size=1 + 700 * (operation % 4)).astype(np.float32)
        if rules.scheme_of(tensor.nbytes) == "ina":
            total = members[rank].all_reduce(tensor, rules.generation)
            if total is not None:
                return total, True
            started[rank].failed(rules.generation)
        given = meeting.exchange(rank, (operation, tensor))
        assert {contribution[0] for contribution in given} == {operation}  # type: ignore[index]
        return np.sum([contribution[1] for contribution in given], axis=0), False  # type: ignore[index]

    with tables(settings, ranks, 0.2, alive) as (started, _, _):

        def run(rank: int) -> list[tuple[bytes, bool, int, int]]:
            nonlocal version
            own, found, returned, running = random.Random(ranks * seed + rank), [], set[int](), True
            operation = 0
            while True:
                rules = started[rank].next()
                if rank == 0:
                    if operation % 100 == 0:
                        version += 1
                        write_table(tmp_path, version, outage.choice(CHOICES[1:4]))
                    if outage.random() < (0.005 if running else 0.02):
                        (switch.stop if running else switch.start)()
                        running = not running
                if own.random() < 0.02:
                    time.sleep(own.random() * 0.01)
                total, through = reduce(rank, operation, rules)
                tensors = (np.random.default_rng([operation, number]) for number in range(ranks))
                exact = sum(tensor.normal(size=total.size).astype(np.float32).astype(np.float64) for tensor in tensors)
                assert np.allclose(total, exact, rtol=1e-5, atol=1e-5)
                found.append((total.tobytes(), through, rules.generation, rules.version))
                if through:
                    returned.add(rules.generation)
                operation += 1
                enough = len(returned) >= 3 or time.monotonic() > ends_s
                if operation % 20 == 0 and meeting.exchange(rank, enough)[0]:
                    if rank == 0 and running:
                        switch.stop()
                    return found

        results = together(ranks, run)
    for member in members:
        member.close()
    assert all(result == results[0] for result in results)
    assert len({result[2] for result in results[0] if result[1]}) >= 3  # type: ignore[attr-defined]


def test_schemes_that_are_not_prepared_are_a_ring(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning for each; the ring over several NICs is the backend's own."""
    settings = group_settings(tmp_path, schemes=(SizeRule("hierarchical-ring"),), ranks_per_server=(1, 1)).rules
    source = TableSource(tmp_path, GROUP, settings, {"ring", "hierarchical-ring"})
    assert source.poll() == settings, "there is no table"
    rules = (SchemeRule("ina", 10), SchemeRule("multi-rail-ring", 20), SchemeRule("hierarchical-ring"))
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            write_table(tmp_path, version, rules)
            expected = (Rule("ring", 10), Rule("ring", 20), Rule("hierarchical-ring"))
            assert source.poll() == GroupRules(expected, version)
    assert [record.getMessage().split(" for ")[0] for record in caplog.records] == ["the table names ina"]


def test_the_last_table_stays(tmp_path: Path) -> None:
    """A missing, damaged or older file changes nothing; a table without the group brings back the settings' rules."""
    settings = GroupRules((Rule("hierarchical-ring"),))
    source = TableSource(tmp_path, GROUP, settings, {"ring"})
    write_table(tmp_path, 5, ANY, 17.0)
    table = GroupRules((Rule("ring"),), 5)
    assert source.poll() == table
    assert source.received_unix_s == 17.0
    (tmp_path / "table.json").write_text("{")
    assert source.poll() == table
    (tmp_path / "table.json").unlink()
    assert source.poll() == table
    write_table(tmp_path, 4, None)
    assert source.poll() == table
    write_table(tmp_path, 6, None)
    assert source.poll() == settings
    write_table(tmp_path, 7, ANY)
    assert source.poll() == GroupRules((Rule("ring"),), 7)


def returns(answers: Callable[[], bool]) -> SwitchReturn:
    return SwitchReturn(10.0, answers)


def test_a_group_returns_when_the_switch_answers() -> None:
    """Not before some time after the failure, not without rules that need it; later if it fails again soon."""
    alive = False
    returning = returns(lambda: alive)
    assert [returning.update(-1, True, now) for now in (0.0, 50.0)] == [0, 0]
    assert [returning.update(0, True, now) for now in (100.0, 109.0, 111.0)] == [0, 0, 0], "it does not answer"
    alive = True
    assert returning.update(0, False, 112.0) == 0
    assert returning.update(0, True, 113.0) == 1
    assert returning.update(0, True, 200.0) == 1, "the failure of an older generation"
    assert [returning.update(1, True, now) for now in (201.0, 220.0, 221.0)] == [1, 1, 2]
    assert [returning.update(2, True, now) for now in (1000.0, 1009.0, 1010.0)] == [2, 2, 3], "it was up for long"


def test_the_table_in_the_text_format() -> None:
    counters = AllReduceCounters(0)
    assert "table" not in counters.text()
    counters.table_version, counters.received_unix_s = 4, time.time() - 100.0
    lines = counters.text().splitlines()
    assert 'kvroute_all_reduce_table_version{rank="0"} 4' in lines
    assert "# TYPE kvroute_all_reduce_table_age_seconds gauge" in lines
    assert float(lines[-1].split()[-1]) >= 100.0


def test_traffic_by_size() -> None:
    counters = AllReduceCounters(0)
    for scheme, nbytes in (("ring", 1000), ("ring", 1024), ("ina", 1025), ("ring", 1)):
        counters.add(scheme, nbytes)  # type: ignore[arg-type]
    found = counters.traffic("g", 3)
    assert found.calls == {"ring": {10: 2, 0: 1}, "ina": {11: 1}}
    assert found.nbytes == {"ring": {10: 2024, 0: 1}, "ina": {11: 1025}}
    assert (found.incarnation, found.table_version) == (3, 0)


def test_the_page_lists_exactly_the_metrics() -> None:
    counters = AllReduceCounters(0, table_version=0, received_unix_s=0.0)
    page = Path(__file__).parents[3] / "docs/switch.md"
    documented = re.findall(r"^\| `(kvroute_\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert documented == re.findall(r"^# HELP (\w+)", counters.text(), re.MULTILINE)
