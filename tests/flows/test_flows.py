"""The flow network and its scenarios: worked examples, stalls, limits, and error messages."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvroute.cli.inspect.flows import app
from kvroute.flows import (
    FlowNetwork,
    completion_times,
    connection_bytes_per_s,
    max_min_rates,
    parse_scenario,
    read_scenario,
)
from kvroute.types import InputError, InputErrors

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_two_flows_and_the_end_of_one_by_hand() -> None:
    """A and B share link 0 equally; B is limited to 2 by link 1, so A has 8; without B, A has 10."""
    net = FlowNetwork(np.array([10.0, 2.0]))
    net.start(1, [0], 24.0)
    net.start(2, [0, 1], 4.0)
    assert (net.rate(1), net.rate(2)) == (8.0, 2.0)
    assert net.link_rate_bytes_per_s.tolist() == [10.0, 2.0]
    assert net.next_finish() == (2.0, 2)
    assert net.advance(1.0) == []
    assert (net.sent_bytes(1), net.sent_bytes(2), net.link_bytes.tolist()) == (8.0, 2.0, [10.0, 2.0])
    assert net.advance(2.0) == [2]
    assert net.next_finish() == (2.8, 1)
    assert net.advance(5.0) == [1]
    assert (net.now, net.link_bytes.tolist(), net.next_finish()) == (5.0, [28.0, 4.0], None)


def test_one_advance_passes_several_finishes() -> None:
    """Three flows of 10, 20 and 30 bytes on a link of 30 bytes/s end at 1, 5/3 and 2 s."""
    net = FlowNetwork(np.array([30.0]))
    net.start_many([7, 8, 9], [[0]] * 3, [30.0, 10.0, 20.0])
    assert net.advance(3.0) == [8, 9, 7]
    assert net.link_bytes.tolist() == [60.0]


def test_equal_flows_finish_together_in_start_order() -> None:
    """Flows that tie end at one instant for any numbers, and the one started first is reported first."""
    net = FlowNetwork(np.array([3.0, 7.0]))
    net.start_many([5, 3, 4], [[0, 1], [0], [0]], [0.1, 0.1, 0.1])
    upcoming = net.next_finish()
    assert upcoming is not None
    assert upcoming[1] == 5
    assert net.advance(upcoming[0]) == [5, 3, 4]


def test_finish_times_equal_up_to_rounding_are_one_instant() -> None:
    """0.1 / 1 and 0.3 / 3 differ in the last bit; both end together, and the one started first is reported first."""
    net = FlowNetwork(np.array([1.0, 3.0]))
    net.start_many([1, 2], [[0], [1]], [0.1, 0.3])
    upcoming = net.next_finish()
    assert upcoming is not None
    assert upcoming[1] == 1
    assert net.advance(upcoming[0]) == [1, 2]


def test_a_flow_gets_its_share_of_the_bandwidth_that_a_neighbour_loses() -> None:
    """Flow 3 shares link 0 with flows limited to 3.0 and 3.4. Their limits become 50 and 0.4, so flows 2 and 3 share
    the other 9.6 equally."""
    net = FlowNetwork(np.array([10.0, 3.4, 3.0]))
    net.start_many([1, 2, 3], [[0, 1], [0, 2], [0]], [100.0, 100.0, 100.0])
    assert net.rate(3) == pytest.approx(3.6, rel=1e-12)
    net.set_capacities([1, 2], [0.4, 50.0])
    assert [net.rate(flow) for flow in (1, 2, 3)] == pytest.approx([0.4, 4.8, 4.8], rel=1e-12)


def test_a_flow_that_stalls_within_rounding_of_its_end_has_ended() -> None:
    """The rest is below rounding, so a capacity of 0 does not stall it for ever."""
    net = FlowNetwork(np.array([10.0]))
    net.start(1, [0], 100.0)
    net.advance(float(np.nextafter(10.0, 0.0)))
    net.set_capacity(0, 0.0)
    assert net.next_finish() == (net.now, 1)


def test_traffic_classes_weight_their_flows() -> None:
    """Traffic class and weight multiply: 3 x 2 against 1 x 2 on a link of 16 bytes/s."""
    net = FlowNetwork(np.array([16.0]), {"kv": 3.0, "storage": 1.0})
    net.start(1, [0], 100.0, weight=2.0, traffic_class="kv")
    net.start(2, [0], 100.0, weight=2.0, traffic_class="storage")
    assert (net.rate(1), net.rate(2)) == (12.0, 4.0)


def test_flows_on_a_link_without_capacity_stall_and_resume() -> None:
    """`next_finish` skips stalled flows; when capacity is back they continue."""
    net = FlowNetwork(np.array([10.0, 10.0]))
    net.start(1, [0], 100.0)
    net.start(2, [1], 1000.0)
    net.advance(5.0)
    net.set_capacity(0, 0.0)
    assert net.next_finish() == (100.0, 2)
    assert net.transfer_s([0], 1.0) == float("inf")
    assert net.advance(20.0) == []
    assert net.sent_bytes(1) == 50.0
    net.set_capacities([0, 1], [25.0, 10.0])
    assert net.next_finish() == (22.0, 1)


def test_a_flow_at_its_ceiling_leaves_the_rest_to_others() -> None:
    """On 10 bytes/s, a flow limited to 2 has 2 and the other one 8; without the limit both have 5; a limit of 0 stalls
    it."""
    net = FlowNetwork(np.array([10.0]))
    net.start(1, [0], 100.0, ceiling_bytes_per_s=2.0)
    net.start(2, [0], 100.0)
    assert (net.rate(1), net.rate(2)) == (2.0, 8.0)
    net.advance(5.0)
    net.set_ceiling(1, math.inf)
    assert (net.rate(1), net.rate(2), net.sent_bytes(1)) == (5.0, 5.0, 10.0)
    net.set_ceiling(1, 0.0)
    assert net.next_finish() == (11.0, 2)
    assert net.advance(20.0) == [2]
    assert net.next_finish() is None
    net.set_ceiling(1, 45.0)
    assert net.next_finish() == (29.0, 1)
    assert net.advance(29.0) == [1]
    assert net.link_bytes.tolist() == [200.0]


def test_a_flow_without_links_is_limited_only_by_its_ceiling() -> None:
    """100 bytes at 4 bytes/s take 25 s; without the limit after 5 s, the rest arrives at once."""
    net = FlowNetwork(np.array([], np.float64))
    net.start(1, [], 100.0, ceiling_bytes_per_s=4.0)
    assert net.next_finish() == (25.0, 1)
    assert net.transfer_s([], 100.0, ceiling_bytes_per_s=10.0) == 10.0
    net.advance(5.0)
    net.set_ceiling(1, math.inf)
    assert net.next_finish() == (5.0, 1)
    assert net.advance(5.0) == [1]


def test_sequential_capped_flows_reuse_memory() -> None:
    """The next flow reuses the private link of an ended one."""
    net = FlowNetwork(np.array([10.0]))

    def run_flows(flows: range) -> None:
        for flow in flows:
            net.start(flow, [0], 1.0, ceiling_bytes_per_s=5.0)
            net.advance(net.now + 1.0)

    run_flows(range(100))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run_flows(range(100, 2_100))
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("rtt_s", "window_bytes", "loss", "gbps"),
    [
        (0.02, 1_250_000.0, 0.0, 0.5),
        (0.02, 1e12, 0.001, 0.0225),
        (0.02, 1e12, 0.0, 400_000.0),
        (0.0, 1.0, 0.5, math.inf),
    ],
    ids=["window", "loss", "wide", "near"],
)
def test_throughput_of_one_connection_by_hand(rtt_s: float, window_bytes: float, loss: float, gbps: float) -> None:
    """By hand: 1.25 MB per 20 ms is 0.5 Gbps; 1460 bytes * 1.22 / sqrt(0.001) per 20 ms is 22.5 Mbps."""
    rate_bytes_per_s = connection_bytes_per_s(rtt_s, window_bytes, loss)
    assert rate_bytes_per_s * 8 / 1e9 == pytest.approx(gbps, rel=2e-3)


def test_a_flow_without_bytes_finishes_at_once() -> None:
    """A flow without bytes or without links ends at `now`, even beside a stalled link."""
    net = FlowNetwork(np.array([0.0]))
    net.start(1, [0], 0.0)
    net.start(2, [], 5.0)
    assert net.next_finish() == (0.0, 1)
    assert net.advance(0.0) == [1, 2]
    assert net.transfer_s([], 5.0) == 0.0


def test_the_network_grows_with_flows_and_paths() -> None:
    """Hundreds of flows, long paths and limits need no preparation: rates equal those of progressive filling, and the
    earlier bytes of links are kept."""
    draw = random.Random(5)
    capacities = [draw.uniform(1.0, 9.0) for _ in range(50)]
    net = FlowNetwork(np.array(capacities))
    net.start(1_000, range(50), 7.0)
    assert net.advance(10.0) == [1_000]
    paths = [draw.sample(range(50), draw.randint(1, 3 + flow // 8)) for flow in range(300)]
    ceilings = [draw.choice([math.inf, draw.uniform(0.001, 0.1)]) for _ in range(300)]
    for flow, path in enumerate(paths):
        net.start(flow, path, 1e6, ceiling_bytes_per_s=ceilings[flow])
        if flow % 50 == 0:
            net.next_finish()
    expected = max_min_rates(paths, [1.0] * 300, capacities, ceilings)
    assert [net.rate(flow) for flow in range(300)] == pytest.approx(expected, rel=1e-9)
    assert net.link_bytes.tolist() == [7.0] * 50


@pytest.mark.parametrize("nbytes", [1.0, 1e15])
def test_tiny_and_huge_transfers_end_at_large_times(nbytes: float) -> None:
    """A byte at 1e12 bytes/s is below the clock's resolution at 1e6 s and still ends; so does a petabyte."""
    net = FlowNetwork(np.array([1e12]))
    net.advance(1e6)
    net.start_many([1, 2], [[0], [0]], [nbytes, nbytes])
    upcoming = net.next_finish()
    assert upcoming is not None
    assert upcoming[0] == pytest.approx(1e6 + 2.0 * nbytes / 1e12, rel=1e-12)
    assert net.advance(upcoming[0]) == [1, 2]


def test_a_flow_id_can_be_reused_after_its_flow() -> None:
    """IDs are unique among active flows only; a second start of an active ID is rejected."""
    net = FlowNetwork(np.array([1.0]))
    net.start(1, [0], 1.0)
    with pytest.raises(InputError, match="flow 1 is already in flight"):
        net.start(1, [0], 1.0)
    net.cancel(1)
    net.start(1, [0], 1.0)
    assert net.advance(1.0) == [1]


def test_the_network_rejects_invalid_input() -> None:
    """A wrong number or name gives one sentence and leaves the network unchanged."""
    net = FlowNetwork(np.array([1.0]))
    for path, nbytes, weight, traffic_class, message in [
        ([1], 1.0, 1.0, "kv", "has a link outside 0 to 0"),
        ([-1], 1.0, 1.0, "kv", "has a link outside 0 to 0"),
        ([0], -1.0, 1.0, "kv", "a transfer of -1.0 bytes"),
        ([0], float("nan"), 1.0, "kv", "a transfer of nan bytes"),
        ([0], 1.0, 0.0, "kv", "weight 0.0 is not between"),
        ([0], 1.0, float("nan"), "kv", "weight nan is not between"),
        ([0], 1.0, 1.0, "video", "class 'video' is unknown; choose one of kv"),
    ]:
        with pytest.raises(InputError, match=message):
            net.start(1, path, nbytes, weight, traffic_class)
    with pytest.raises(InputError, match="flow 9 is not in flight"):
        net.rate(9)
    with pytest.raises(InputError, match=r"link 0: capacity -1\.0"):
        net.set_capacity(0, -1.0)
    with pytest.raises(InputError, match="flow 9 is not in flight"):
        net.set_ceiling(9, 1.0)
    for ceiling in (-1.0, math.nan):
        with pytest.raises(InputError, match=f"a ceiling of {ceiling} bytes"):
            net.start(1, [0], 1.0, ceiling_bytes_per_s=ceiling)
        with pytest.raises(InputError, match=f"a ceiling of {ceiling} bytes"):
            net.transfer_s([0], 1.0, ceiling_bytes_per_s=ceiling)
    with pytest.raises(InputError, match="a flow without links"):
        max_min_rates([[]], [1.0], [], [math.inf])
    with pytest.raises(InputError, match="not between 0 and 0"):
        net.set_capacity(3, 1.0)
    with pytest.raises(InputError, match="link 1: capacity nan"):
        FlowNetwork(np.array([1.0, float("nan")]))
    net.advance(1.0)
    for to in (0.5, float("inf"), float("nan")):
        with pytest.raises(InputError, match="time cannot advance"):
            net.advance(to)
    assert (net.active, net.now, net.next_finish()) == ((), 1.0, None)


def test_example_scenarios_by_hand() -> None:
    """The examples in the repository are computed by hand."""
    shared = completion_times(read_scenario(EXAMPLES / "flows-shared-uplink.json"))
    assert shared == pytest.approx([0.8, 0.8, 0.9], rel=1e-12)
    classes = completion_times(read_scenario(EXAMPLES / "flows-classes.json"))
    assert classes == pytest.approx([0.8, 1.2], rel=1e-12)


LINK = '"links": [{"id": "a", "capacity_Bps": 8}]'
FLOW = '{"id": 1, "links": ["a"], "size_B": 8, "start_s": 1}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{" + LINK + ',\n"flows": [,]}', "line 2: bad JSON"),
        ("", "the file is empty; give a JSON object with `links` and `flows`"),
        ("{", "line 1: bad JSON"),
        ("\xff", "bad JSON"),
        ("links: [{id: a}]", "this is YAML, not JSON; give a JSON object with `links` and `flows`"),
        (
            "name: x\nnodes: []\ninstances: []",
            "scenario: this looks like a cluster file; read it with `kvroute topology check FILE`",
        ),
        ("{" + LINK + "}", "`flows` is missing; give a JSON object"),
        ("{" + LINK + ', "flows": [{"id": 1.5}]}', r"flows\[0\].id: Expected `int`, got `float`"),
        ("{" + LINK + ', "flows": [' + FLOW.replace("size_B", "size") + "]}", "unknown field `size`; did you mean"),
        (
            '{"links": [{"id": "a", "capacity": 8}]}',
            r"links\[0\]: unknown field `capacity`; did you mean 'capacity_Bps'",
        ),
        ("{" + LINK + ', "flows": [' + FLOW.replace('["a"]', '["b"]') + "]}", "flow 1 crosses unknown link 'b'"),
        ("{" + LINK + ', "flows": [' + FLOW.replace('["a"]', "[]") + "]}", "flow 1 has an empty path"),
        ("{" + LINK + ', "flows": [' + FLOW.replace("8", "-8") + "]}", r"flows\[0\].size_B: flow 1 has size -8"),
        ("{" + LINK + ', "flows": [' + FLOW.replace("8", "NaN") + "]}", "line 1: bad JSON"),
        ("{" + LINK + ', "flows": [' + FLOW.replace("8", "1e999") + "]}", "out of range"),
        ("{" + LINK + ', "flows": [' + FLOW.replace(": 1}", ": -1}") + "]}", "flow 1 starts at -1 s"),
        ("{" + LINK + ', "flows": [' + FLOW.replace(": 1}", ': 1, "weight": 0}') + "]}", "weight 0, out of range"),
        ("{" + LINK + ', "flows": [' + FLOW + ", " + FLOW + "]}", "flow id 1 is not unique"),
        (
            "{" + LINK.replace("8", "0") + ', "flows": [' + FLOW + "]}",
            r"links\[0\].capacity_Bps: link 'a' has capacity 0",
        ),
        ("{" + LINK[:-1] + "," + LINK[10:] + ', "flows": []}', "link id 'a' is not unique"),
        ('{"classes": {"x": 1}, ' + LINK + ', "flows": [' + FLOW + "]}", "unknown class 'kv'; choose one of x"),
        ('{"classes": {"kv": -1}, ' + LINK + ', "flows": []}', "classes.kv: weight -1 is out of range"),
    ],
)
def test_a_scenario_rejects_invalid_input(text: str, message: str) -> None:
    """Every error of a scenario is reported with its place."""
    with pytest.raises(InputError, match=message):
        parse_scenario(text)


def test_all_errors_of_a_scenario_are_reported_at_once() -> None:
    """A user can fix a file in one pass."""
    flows = FLOW.replace("8", "-8") + "," + FLOW.replace('["a"]', '["b"]').replace('"id": 1', '"id": 2')
    with pytest.raises(InputErrors) as caught:
        parse_scenario("{" + LINK + ', "flows": [' + flows + "]}")
    assert len(caught.value.problems) == 2


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """The error for a missing file has its name and the reason."""
    with pytest.raises(InputError, match=r"none.json: cannot be read: No such file"):
        read_scenario(tmp_path / "none.json")


def test_command_prints_json_or_a_table() -> None:
    """The output is one document only, by name or without; with `--table` every flow has a row."""
    file = str(EXAMPLES / "flows-shared-uplink.json")
    for options in ([], ["--json"]):
        out = CliRunner().invoke(app, [file, *options])
        assert (out.exit_code, out.stderr) == (0, "")
        assert json.loads(out.stdout) == {"completion_times_s": pytest.approx([0.8, 0.8, 0.9])}
    table = CliRunner().invoke(app, [file, "--table"]).stdout
    assert "3 flows over 5 links" in table
    assert table.count("rack-up") == 3
