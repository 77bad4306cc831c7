"""The scheduler's state: reports in, tables out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.collectives.scheduler.agent_clusters import cluster_of

from kvroute.collectives import INA_SCHEMES
from kvroute.collectives.scheduler.groups import port_links
from kvroute.collectives.scheduler.tables import Tables
from kvroute.topology import Cluster
from kvroute.types import InputError
from kvroute_engine.agent.files import GroupEntry, GroupTraffic, SchemeRule
from kvroute_engine.agent.reports import AgentName, CounterReport
from kvroute_engine.agent.schemes import Scheme

CLUSTER = cluster_of(groups=2)
"""Two groups, each with two GPUs on each of three servers; together they need all 2,048 slots."""
SWITCH, SERVER = AgentName("switch", "access"), AgentName("server", "a0")
SLOTS = 2048


def traffic(
    group: str, nbytes: int, calls: int, scheme: Scheme = "ring", exponent: int = 23, incarnation: int = 1
) -> GroupTraffic:
    return GroupTraffic(group, incarnation, 0, {scheme: {exponent: calls}}, {scheme: {exponent: nbytes}})


def schemes(tables: Tables, group: str) -> set[Scheme]:
    return {rule.scheme for rule in tables.entries[group].rules}


def with_switch(cluster: Cluster = CLUSTER, slots: tuple[int, int] = (SLOTS, SLOTS)) -> Tables:
    """Return tables after a first derivation at 1 s with a switch."""
    tables = Tables(cluster, 1000)
    tables.report(1.0, SWITCH, CounterReport(1.0, slots=slots))
    tables.derive(1.0)
    return tables


steps = st.lists(
    st.tuples(
        st.sampled_from(["decode-0", "decode-1"]),
        st.integers(0, 10**11),
        st.integers(10, 28),
        st.sampled_from([None, (0, 0), (512, 512), (SLOTS, SLOTS), (SLOTS, 0), (SLOTS, 1024)]),
        st.integers(0, 10**11),
        st.floats(0.1, 9.0),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40)
@given(steps)
def test_versions_increase_exactly_when_entries_change_and_all_entries_can_be_used(
    steps: Sequence[tuple[str, int, int, tuple[int, int] | None, int, float]],
) -> None:
    """Any reports: no entry has a scheme of a switch that is silent or has no slots, rules ascend, and the last one has
    no limit."""
    tables, now_s, counted = Tables(CLUSTER, 1000), 0.0, 0
    switch_s, slots = -99.0, None
    done: dict[tuple[str, int], int] = {}
    for group, nbytes, exponent, reported, port_bytes, later_s in steps:
        now_s += later_s
        counted += port_bytes
        done[group, exponent] = done.get((group, exponent), 0) + nbytes
        sizes = {e: n for (name, e), n in done.items() if name == group}
        all_of_it = GroupTraffic(group, 1, 0, {"ring": {e: n >> e for e, n in sizes.items()}}, {"ring": sizes})
        tables.report(now_s, SERVER, CounterReport(now_s, {0: (counted, 0)}, traffic=(all_of_it,)))
        if reported is not None:
            switch_s, slots = now_s, reported
            tables.report(now_s, SWITCH, CounterReport(now_s, slots=reported))
        before = dict(tables.entries)
        changed = tables.derive(now_s)
        assert changed == (tables.entries != before)
        newest = max((entry.version for entry in before.values()), default=1000)
        for name, entry in tables.entries.items():
            same = name in before and before[name].rules == entry.rules
            assert entry.version == before[name].version if same else entry.version > newest
            assert entry.rules[-1].up_to_bytes is None
            limits = [rule.up_to_bytes or 0 for rule in entry.rules[:-1]]
            assert limits == sorted(set(limits))
            assert 0 not in limits
            assert all(a.scheme != b.scheme for a, b in zip(entry.rules, entry.rules[1:], strict=False))
        assert set(tables.entries) == {"decode-0", "decode-1"}
        if slots is None or slots[0] == 0 or now_s - switch_s > tables.silent_s:
            assert not any(schemes(tables, name) & set(INA_SCHEMES) for name in tables.entries)


def test_a_switch_brings_aggregation_and_its_silence_ends_it() -> None:
    tables = with_switch()
    assert schemes(tables, "decode-0") & set(INA_SCHEMES)
    version = tables.entries["decode-0"].version
    assert not tables.derive(1.0 + tables.silent_s)
    assert tables.derive(1.1 + tables.silent_s)
    assert not any(schemes(tables, name) & set(INA_SCHEMES) for name in tables.entries)
    assert tables.entries["decode-0"].version > version


def test_a_switch_that_does_not_answer_is_not_used() -> None:
    """Its agent is there, but has no status of the switch."""
    tables = with_switch()
    tables.report(2.0, SWITCH, CounterReport(2.0, slots=None))
    assert tables.derive(2.0)
    assert not any(schemes(tables, name) & set(INA_SCHEMES) for name in tables.entries)


def test_slots_of_others_are_not_given_to_groups() -> None:
    """Both groups have the slots that they may use; another user takes all but 1,024, which is enough for one."""
    tables = with_switch(slots=(1024, 1024))
    users = [name for name in tables.entries if "hierarchical-ina" in schemes(tables, name)]
    assert users == ["decode-0"]
    alone = Tables(CLUSTER, 1000)
    alone.report(1.0, SWITCH, CounterReport(1.0, slots=(SLOTS, 1024)))
    alone.derive(1.0)
    assert [name for name in alone.entries if "hierarchical-ina" in schemes(alone, name)] == ["decode-0"]
    none = Tables(CLUSTER, 1000)
    none.report(1.0, SWITCH, CounterReport(1.0, slots=(SLOTS, 0)))
    none.derive(1.0)
    assert not any(schemes(none, name) & set(INA_SCHEMES) for name in none.entries)


def test_groups_that_have_joined_keep_their_slots_over_a_restart_of_the_scheduler() -> None:
    """A new scheduler learns from the traffic who has the slots that are not free."""
    tables = Tables(CLUSTER, 1000)
    for now_s, count in ((1.0, 0), (2.0, 5)):
        own = traffic("decode-1", count << 23, 10 + count, "hierarchical-ina")
        tables.report(now_s, SERVER, CounterReport(now_s, traffic=(own,)))
        tables.report(now_s, SWITCH, CounterReport(now_s, slots=(1024, 0)))
    tables.derive(2.0)
    assert "hierarchical-ina" in schemes(tables, "decode-1")
    assert not schemes(tables, "decode-0") & set(INA_SCHEMES)


def test_background_is_what_counters_show_beyond_own_traffic() -> None:
    """Port 1 of a0, by which the ring leaves it, sends 5 GB/s, of which the ring accounts for its share."""
    tables = Tables(CLUSTER, 1000)
    out, into = port_links(CLUSTER, "a0", switch=False)[1]
    ring = next(choice.option for choice in tables.groups[0].choices if choice.option.name == "ring")
    share = dict(zip(ring.links.tolist(), ring.share.tolist(), strict=True))[out]
    for now_s in (1.0, 2.0):
        sent = int(5e9 * now_s)
        own = traffic("decode-0", int(1e9 * now_s), int(100 * now_s))
        tables.report(now_s, SERVER, CounterReport(now_s, {1: (sent, 0)}, traffic=(own,)))
    tables.derive(2.0)
    capacity = CLUSTER.capacity_bytes_per_s[out]
    assert tables.background[out] == pytest.approx((5e9 - share * 1e9) / capacity)
    assert tables.background[into] == 0.0
    assert share > 1.0


def test_rates_of_nvlink_are_background_as_they_are() -> None:
    """250 of 300 GB/s; a later report replaces them."""
    tables = Tables(CLUSTER, 1000)
    tables.report(1.0, SERVER, CounterReport(1.0, nvlinks={2: (2.5e11, 0.0)}))
    tables.derive(1.0)
    assert tables.background.max() == pytest.approx(2.5 / 3)
    assert (tables.background > 0).sum() == 1
    tables.report(2.0, SERVER, CounterReport(2.0))
    tables.derive(2.0)
    assert tables.background.max() == 0.0


def test_other_traffic_on_nvlink_moves_a_group_to_the_scheme_that_uses_it_less() -> None:
    """All NVLinks of a0 are busy: flat aggregation needs none."""
    tables = with_switch(cluster_of())
    assert tables.entries["decode-0"].rules[-1].scheme == "hierarchical-ina"
    busy = dict.fromkeys((0, 1, 2, 3), (290000000000.0, 290000000000.0))
    tables.report(2.0, SERVER, CounterReport(2.0, nvlinks=busy))
    tables.report(2.0, SWITCH, CounterReport(2.0, slots=(SLOTS, SLOTS)))
    tables.derive(2.0)
    assert tables.entries["decode-0"].rules == (SchemeRule("ina"),)


def test_silent_servers_have_neither_demand_nor_background() -> None:
    tables = Tables(CLUSTER, 1000)
    for now_s in (1.0, 2.0):
        tables.report(now_s, SERVER, CounterReport(now_s, {0: (int(5e9 * now_s), 0)}))
    tables.derive(2.0)
    assert tables.background.max() > 0.3
    tables.derive(2.1 + tables.silent_s)
    assert tables.background.max() == 0.0


def test_traffic_counts_only_from_the_server_of_rank_0() -> None:
    """Old files on other servers, and groups that the cluster does not have, are ignored."""
    tables = Tables(CLUSTER, 1000)
    old = GroupTraffic("decode-0", 1, 77, {}, {})
    tables.report(1.0, AgentName("server", "a1"), CounterReport(1.0, traffic=(old,)))
    tables.report(1.0, SERVER, CounterReport(1.0, traffic=(GroupTraffic("gone", 1, 78, {}, {}),)))
    assert tables.versions_in_use() == {}
    tables.report(2.0, SERVER, CounterReport(2.0, traffic=(old,)))
    assert tables.versions_in_use() == {"decode-0": 77}


def test_servers_get_the_entries_of_their_groups() -> None:
    tables = with_switch()
    table = tables.table(SERVER)
    assert table.groups == tables.entries
    assert table.version == max(entry.version for entry in table.groups.values())
    assert tables.table(SWITCH).groups == {}
    assert tables.table(SWITCH).version == 0


def test_an_agent_with_a_newer_table_gets_a_newer_one() -> None:
    """The clock of the scheduler's machine went back between two starts."""
    tables = with_switch()
    before = tables.entries
    tables.hello(before["decode-0"].version)
    assert tables.entries == before
    tables.hello(5000)
    assert tables.entries == {name: GroupEntry(5001, entry.rules) for name, entry in before.items()}


def test_names_and_ports_that_the_cluster_does_not_have_are_errors() -> None:
    tables = Tables(CLUSTER, 1000)
    with pytest.raises(InputError, match="rack-of-3 has no node 'b7'; use one of: a0, a1, a2"):
        tables.check(AgentName("server", "b7"))
    with pytest.raises(InputError, match="rack-of-3 has no rack, pod or datacenter 'a0'; use one of: access"):
        tables.check(AgentName("switch", "a0"))
    with pytest.raises(InputError, match="server a0: port 4 is not in the cluster file; it has 4; change --nic"):
        tables.report(1.0, SERVER, CounterReport(1.0, {4: (1, 1)}))
    with pytest.raises(InputError, match="server a0: GPU 9 is not in the cluster file"):
        tables.report(1.0, SERVER, CounterReport(1.0, nvlinks={9: (1.0, 1.0)}))
