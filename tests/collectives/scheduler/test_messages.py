"""Messages between agents and scheduler: what is sent arrives, and wrong content is rejected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.types import InputError
from kvroute_engine.agent.agents_pb2 import (
    FromAgent,
    FromScheduler,
    Hello,
    NvlinkRate,
    Rule,
    Slots,
    Traffic,
)
from kvroute_engine.agent.agents_pb2 import Report as ReportMessage
from kvroute_engine.agent.agents_pb2 import Table as TableMessage
from kvroute_engine.agent.files import GroupEntry, GroupTraffic, SchemeRule
from kvroute_engine.agent.messages import (
    agent_of,
    hello_message,
    report_message,
    report_of,
    table_message,
    table_of,
)
from kvroute_engine.agent.reports import AgentKind, AgentName, AgentTable, CounterReport
from kvroute_engine.agent.schemes import SCHEMES

numbers = st.integers(0, 2**63)
small = st.integers(0, 2**31)
counts = st.dictionaries(st.sampled_from(SCHEMES), st.dictionaries(st.integers(0, 63), numbers, min_size=1, max_size=3))
rules = st.builds(SchemeRule, st.sampled_from(SCHEMES), st.none() | numbers)
tables = st.builds(
    AgentTable,
    numbers,
    st.dictionaries(st.text(max_size=5), st.builds(GroupEntry, numbers, st.lists(rules).map(tuple))),
)
reports = st.builds(
    CounterReport,
    clock_s=st.floats(0, 1e9),
    ports=st.dictionaries(small, st.tuples(numbers, numbers), max_size=3),
    nvlinks=st.dictionaries(small, st.tuples(st.floats(0, 1e12), st.floats(0, 1e12)), max_size=3),
    traffic=st.lists(
        counts.flatmap(
            lambda calls: st.builds(GroupTraffic, st.text(max_size=5), numbers, numbers, st.just(calls), st.just(calls))
        ),
        max_size=2,
    ).map(tuple),
    slots=st.none() | st.tuples(small, small).map(lambda pair: (max(pair), min(pair))),
    incarnation=numbers,
)


@given(reports)
def test_reports_arrive_as_they_were_sent(report: CounterReport) -> None:
    content = report_message(report).SerializeToString()
    assert report_of(FromAgent.FromString(content).report) == report


@given(tables)
def test_tables_arrive_as_they_were_sent(table: AgentTable) -> None:
    content = table_message(table).SerializeToString()
    assert table_of(FromScheduler.FromString(content).table) == table


@pytest.mark.parametrize("kind", ["server", "switch"])
def test_names_arrive_as_they_were_sent(kind: AgentKind) -> None:
    name = AgentName(kind, "a0")
    assert agent_of(hello_message(name, 5, "0.2.0").hello) == name


def test_messages_that_cannot_be_are_errors() -> None:
    with pytest.raises(InputError, match="kind 0 of an agent is unknown"):
        agent_of(Hello(name="a0"))
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(InputError, match="negative or not finite"):
            report_of(ReportMessage(clock_s=value))
        with pytest.raises(InputError, match="negative or not finite"):
            report_of(ReportMessage(nvlinks=[NvlinkRate(gpu=0, tx_bytes_per_s=0.0, rx_bytes_per_s=value)]))
    with pytest.raises(InputError, match="9 of 8 slots are free"):
        report_of(ReportMessage(slots=Slots(total=8, free=9)))
    for scheme, exponent in (("tree", 20), ("ring", 64)):
        traffic = Traffic(group="decode-0")
        traffic.counts.add(scheme=scheme, size_exponent=exponent)
        with pytest.raises(InputError, match="group 'decode-0' has counted"):
            report_of(ReportMessage(traffic=[traffic]))
    table = TableMessage(version=1)
    table.groups["decode-0"].rules.append(Rule(scheme="tree"))
    with pytest.raises(InputError, match="the table has the unknown scheme 'tree' for decode-0"):
        table_of(table)
