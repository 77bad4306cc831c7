"""`kvroute plan qos`: laws of shares and mappings, the lines to paste, and contradictions between classes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from math import lcm
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.cli.app import main
from kvroute.planner.qos.plan import QosPlan, plan_qos, qos_plan
from kvroute.planner.qos.schema import QosEntry, TrafficClassEntry
from kvroute.planner.qos.vl_arbitration import Arbitration, Table, arbitration, guaranteed_shares
from kvroute.report.plans.qos_config import configurations
from kvroute.types import InputErrors
from kvroute_engine.files.form import Lines

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "superpod.yaml"
LINK = "qos: {link: infiniband}"
MTUS = st.sampled_from([256, 512, 1024, 2048, 4096])
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command as a user starts it: exit code, stdout, stderr."""

    monkeypatch.setenv("COLUMNS", "80")

    def started(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return started


@st.composite
def percentages(draw: st.DrawFn, most: int = 5) -> list[int]:
    """Shares above 0 that add up to 100."""
    cuts = sorted(draw(st.sets(st.integers(1, 99), min_size=1, max_size=most - 1)))
    return [high - low for low, high in zip([0, *cuts], [*cuts, 100], strict=True)]


def packets(table: Table, mtu: int) -> Iterator[int]:
    """The lanes of the packets that a table sends, by weighted round robin."""
    for lane, weight in cycle(table):
        yield from [lane] * (weight * 64 // mtu)


def sent(found: Arbitration, mtu: int) -> dict[int, float]:
    """Share of each lane, by sending packets until both tables have gone round."""
    before = found.high_limit * 4096 // mtu or 1
    high, low = packets(found.high, mtu), packets(found.low, mtu)
    sizes = [sum(weight for _, weight in table) * 64 // mtu for table in (found.high, found.low)]
    rounds = lcm(lcm(sizes[0], before) // before, sizes[1])
    counts: Counter[int] = Counter()
    for _ in range(rounds):
        counts.update(islice(high, before))
        counts.update(islice(low, 1))
    return {lane: count / counts.total() for lane, count in counts.items()}


@settings(deadline=None)
@given(percentages(), MTUS, st.integers(1, 4))
def test_every_lane_gets_its_share_in_one_round(shares: list[int], mtu: int, many: int) -> None:
    """Lanes of low priority get their share or more; those of high priority get what is left, in their proportions."""
    shares = sorted(shares, reverse=True)
    high = dict(enumerate(shares[: min(many, len(shares) - 1)]))
    low = {lane: share for lane, share in enumerate(shares) if lane not in high}
    found = arbitration(high, low, mtu)
    guaranteed = sent(found, mtu)
    assert guaranteed == pytest.approx(guaranteed_shares(found, mtu))
    assert sum(guaranteed.values()) == pytest.approx(1.0)
    left = sum(guaranteed[lane] for lane in high)
    for lane, share in high.items():
        assert guaranteed[lane] == pytest.approx(left * share / sum(high.values()))
    if sum(high.values()) * mtu >= 4096 * sum(low.values()):  # else even a single packet is too much
        for lane, share in low.items():
            assert guaranteed[lane] >= share / 100 * (1 - 1e-9)
    assert all(0 < weight <= 255 and weight % (mtu // 64) == 0 for _, weight in (*found.high, *found.low))


def test_the_published_tables() -> None:
    """DualPath A.1: lane 2 sends one of 241 packets at best, and a tenth of these while lanes 0, 1 and 3 send too."""
    high, low = ((0, 192), (1, 192), (2, 0), (3, 192)), ((0, 192), (1, 192), (2, 64), (3, 192))
    guaranteed = guaranteed_shares(Arbitration(240, high, low), 4096)
    assert guaranteed[2] == pytest.approx(0.1 / 241)
    assert guaranteed[0] == guaranteed[1] == guaranteed[3] == pytest.approx((1 - guaranteed[2]) / 3)


@st.composite
def roce_classes(draw: st.DrawFn) -> list[TrafficClassEntry]:
    """Classes with DSCP values and priorities of their own; one is the default."""
    shares = draw(percentages())
    priorities = draw(st.permutations(range(8)))
    values = draw(st.permutations(range(64)))
    default = draw(st.integers(0, len(shares) - 1))
    return [
        TrafficClassEntry(
            name=f"class-{index}",
            share=share,
            default=index == default,
            lossless=draw(st.booleans()),
            dscp=sorted(values[3 * index : 3 * index + draw(st.integers(index != default, 3))]),
            priority=priorities[index],
        )
        for index, share in enumerate(shares)
    ]


def planned(classes: list[TrafficClassEntry], link: Literal["infiniband", "roce"]) -> QosPlan:
    """The plan for some classes."""
    return qos_plan("some", link, QosEntry(classes=classes, vls=8), Lines("some"))


@settings(deadline=None)
@given(roce_classes())
def test_every_dscp_value_is_in_exactly_one_class(classes: list[TrafficClassEntry]) -> None:
    """Listed values are in the class that lists them, all others in the default."""
    plan = planned(classes, "roce")
    assert plan.roce is not None
    listed = {value: traffic_class.name for traffic_class in classes for value in traffic_class.dscp}
    default = next(traffic_class.name for traffic_class in classes if traffic_class.default)
    queues = {traffic_class.priority: traffic_class.name for traffic_class in classes}
    for value in range(64):
        queue = plan.roce.priority_class[plan.roce.dscp_priority[value]]
        assert queues[queue] == listed.get(value, default)


@settings(deadline=None)
@given(roce_classes())
def test_weights_add_up_to_100_and_lossless_classes_are_paused(classes: list[TrafficClassEntry]) -> None:
    plan = planned(classes, "roce")
    assert plan.roce is not None
    assert sum(plan.roce.weights) == 100
    for traffic_class in classes:
        assert traffic_class.priority is not None
        assert plan.roce.weights[traffic_class.priority] == traffic_class.share
        assert plan.roce.pfc[traffic_class.priority] == traffic_class.lossless
    assert sum(plan.roce.pfc) == sum(traffic_class.lossless for traffic_class in classes)


@settings(deadline=None)
@given(roce_classes())
def test_the_printed_commands_set_what_the_plan_says(classes: list[TrafficClassEntry]) -> None:
    """Read back from the lines for mlnx_qos, over the usual mapping of a NIC."""
    plan = planned(classes, "roce")
    assert plan.roce is not None
    text = configurations(plan)["Each NIC, with NVIDIA's mlnx_qos"].replace("\\\n", "")
    dscp_priority = [value // 8 for value in range(64)]
    values: list[int] = []
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if "--dscp2prio" in words and "$d" not in line:
            dscp_priority[int(words[-1].split(",")[1])] = int(words[-1].split(",")[2])
        elif words[0] == "for":
            values = [int(word.rstrip(";")) for word in words[3:-1]]
        elif "--dscp2prio" in words:
            for value in values:
                dscp_priority[value] = int(words[-1].rpartition(",")[2])
        else:
            found |= {word: words[at + 1].split(",") for at, word in enumerate(words) if word.startswith("--")}
    assert tuple(dscp_priority) == plan.roce.dscp_priority
    assert tuple(map(int, found["--prio_tc"])) == plan.roce.priority_class
    assert tuple(map(int, found["--tcbw"])) == plan.roce.weights
    assert [word == "ets" for word in found["--tsa"]] == [weight > 0 for weight in plan.roce.weights]
    assert tuple(word == "1" for word in found["--pfc"]) == plan.roce.pfc


def test_the_defaults_on_infiniband(run: Run) -> None:
    """49 units of 4,096 bytes before one packet of low priority: 2 % for KV transfers and other traffic."""
    code, out, err = run("plan", "qos", str(EXAMPLE))
    assert (code, err) == (0, "")
    assert "shared as model 98%, kv 1%, other 1%." in " ".join(out.split())
    lines = out.splitlines()
    for line in (
        "qos_max_vls 4",
        "qos_high_limit 49",
        "qos_vlarb_high 1:64",
        "qos_vlarb_low 0:64,2:64",
        "qos_sl2vl 0,1,2,0,0,0,0,0,0,0,0,0,0,0,0,0",
        "export NCCL_IB_SL=1  # model",
        "export UCX_IB_SL=2  # kv",
    ):
        assert line in lines


def test_the_defaults_on_roce(run: Run) -> None:
    """DSCP 26 and 18 are in lossless classes; the other values of their priorities are moved to the default."""
    code, out, err = run("plan", "qos", str(EXAMPLE), "--link", "roce")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for line in (
        "mlnx_qos -i eth0 --trust dscp",
        "mlnx_qos -i eth0 --pfc 0,0,1,1,0,0,0,0",
        "  --tcbw 1,0,1,98,0,0,0,0",
        "  tc-bw all:0 0:1 2:1 3:98",
        "dcb pfc set dev eth0 prio-pfc all:off 2:on 3:on",
        "nv set qos egress-scheduler default-global traffic-class 3 bw-percent 98",
        "nv set qos mapping default-global dscp 26 switch-priority 3",
        "nv set qos pfc default-global switch-priority 2,3",
        "export NCCL_IB_TC=106  # model",
        "export UCX_IB_TRAFFIC_CLASS=74  # kv",
    ):
        assert line in lines
    assert max(map(len, lines)) <= 80


def test_json_has_the_plan_and_its_configurations(run: Run) -> None:
    code, out, err = run("plan", "qos", str(EXAMPLE), "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert found["link"] == "infiniband"
    assert [traffic_class["name"] for traffic_class in found["classes"]] == ["model", "kv", "other"]
    assert found["infiniband"]["arbitration"] == {"high_limit": 49, "high": [[1, 64]], "low": [[0, 64], [2, 64]]}
    assert found["roce"] is None
    assert "qos_high_limit 49" in found["configurations"]["Subnet manager, opensm.conf"].splitlines()


def changed(folder: Path, section: str) -> Path:
    """Write the example with another section; return its path."""
    text = EXAMPLE.read_text(encoding="utf-8")
    assert LINK in text
    path = folder / "cluster.yaml"
    path.write_text(text.replace(LINK, section), encoding="utf-8")
    return path


MODEL, KV = "name: model, share: 98, high: true, dscp: [26]", "name: kv, share: 1, dscp: [18]"
OTHER = "name: other, share: 1, default: true"


@pytest.mark.parametrize(
    ("link", "classes", "sentence"),
    [
        ("infiniband", (MODEL, KV), "no classes are the default"),
        ("infiniband", (MODEL, OTHER, f"{KV}, default: true"), "2 classes are the default"),
        ("infiniband", (MODEL, OTHER), "add up to 99, not to 100"),
        ("infiniband", (MODEL.replace("98", "99"), KV.replace("1,", "0,"), OTHER), "class kv has a share of 0"),
        ("infiniband", (MODEL, KV, OTHER.replace("other", "kv")), "name kv is used by two classes"),
        ("infiniband", (f"{MODEL}, vl: 4", KV, OTHER), r"virtual lane 4, and ports have 4 \(0 to 3\)"),
        ("infiniband", (f"{MODEL}, vl: 1", f"{KV}, vl: 1", OTHER), "virtual lane 1 is used by two classes"),
        ("infiniband", (f"{MODEL}, service_level: 0", KV, OTHER), "service level 0 is used by two classes"),
        ("infiniband", (MODEL.replace(" high: true,", ""), KV, OTHER), "none of the classes are `high`"),
        ("infiniband", (MODEL, f"{KV}, high: true", f"{OTHER}, high: true"), "all of the classes are `high`"),
        (
            "infiniband",
            (MODEL.replace("98", "30"), KV, OTHER.replace("1,", "69,")),
            "class other would be guaranteed 49.3% instead of 69%",
        ),
        ("infiniband", (MODEL.replace("98", "75"), KV, OTHER.replace("1,", "24,")), "table needs 9 entries"),
        ("infiniband", (MODEL.replace("98", "one"), KV, OTHER), "share"),
        ("roce", (MODEL, f"{KV[:-1]}, 26]", OTHER), "DSCP 26 is in class model and in class kv"),
        ("roce", (MODEL, KV.replace("[18]", "[64]"), OTHER), "dscp"),
        ("roce", (MODEL, KV.replace(", dscp: [18]", ""), OTHER), "class kv has no DSCP value"),
        ("roce", (MODEL, KV.replace("[18]", "[27]"), OTHER), "priority 3 is used by two classes"),
        ("roce", (MODEL, f"{KV}, pfc: false", OTHER), "class kv is lossless without PFC"),
        ("roce", (MODEL, KV, f"{OTHER}, lossless: false, pfc: true"), "class other is not lossless but has PFC"),
    ],
)
def test_contradictions_end_with_one_sentence_and_a_line(
    link: str, classes: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    section = "\n".join(
        [f"qos:\n  link: {link}\n  classes:", *(f"    - {{{traffic_class}}}" for traffic_class in classes)]
    )
    path = changed(tmp_path, section)
    with pytest.raises(InputErrors, match=rf"(?m)^{path}:\d+: .*{sentence}") as found:
        plan_qos(path)
    assert len(found.value.problems) <= 2


def test_the_link_type_must_be_known(run: Run, tmp_path: Path) -> None:
    path = changed(tmp_path, "")
    code, out, err = run("plan", "qos", str(path))
    assert (code, out) == (2, "")
    assert "the type of the compute network is not known; give --link roce" in err
    assert run("plan", "qos", str(path), "--link", "roce")[0] == 0
    code, out, err = run("plan", "qos", str(path), "--link", "token-ring")
    assert (code, out) == (2, "")
    assert "there is no link type 'token-ring'" in err


def test_topology_check_reports_the_section(run: Run, tmp_path: Path) -> None:
    """Together with faults elsewhere in the file."""
    path = changed(tmp_path, "qos: {link: roce, vls: 5}\nnetwork2: {}")
    code, _, err = run("topology", "check", str(path))
    assert code == 2
    assert "vls" in err
    assert "network2" in err
    assert run("topology", "check", str(EXAMPLE))[0] == 0
