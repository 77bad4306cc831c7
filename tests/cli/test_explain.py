"""`kvroute explain` on a log with foresight decisions: the values learned at that time, and when they cannot be
given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from kvroute.cli.app import app
from kvroute.control import ControlSpec, LogHeader
from kvroute.control.log import EventLog, read_log
from kvroute.policies import TierLearned
from kvroute.topology import parse
from kvroute.types import (
    SAME_POD,
    Arrived,
    Decode,
    Event,
    Finished,
    PrefillFinished,
    Request,
    TransferFinished,
    TransferMeasured,
)

CLUSTER = """
name: two-racks
pods: [{name: pod0}]
racks:
  - {name: rack0, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
  - {name: rack1, pod: pod0, uplinks: {count: 2, capacity: 50 Gbps}}
nodes:
  - {name: node0, rack: rack0, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
  - {name: node1, rack: rack1, gpus: 4, nics: {compute: {count: 4, capacity: 100 Gbps}}}
timing:
  default: {prefill: {kind: linear, per_token: 100 us, base: 10 ms}, decode: {base: 10 ms, per_request: 1 ms}}
defaults: {model: llama-3-70b, tp: 2, batch_max: 2, kv_capacity: 40 GB}
instances:
  - {name: prefill0, role: prefill, gpus: "node0:0-1"}
  - {name: decode0, role: decode, gpus: "node1:0-1"}
  - {name: decode1, role: decode, gpus: "node1:2-3"}
"""


def explain(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})


def learned_of(ended: Result) -> list[Any]:
    """Return the learned values of each decision."""
    assert ended.exit_code == 0, ended.stderr
    return [decision["learned"] for decision in json.loads(ended.stdout)["decisions"]]


def recorded(path: Path, decode: str) -> None:
    """Record six requests one after the other; each transfer takes two seconds, more than the topology predicts."""
    spec = ControlSpec(decode=decode)
    control = spec.build(parse(CLUSTER))
    with EventLog(path, LogHeader(cluster=CLUSTER, spec=spec)) as log:

        def notify(event: Event) -> None:
            log.write(event, control.handle(event))

        for number in range(6):
            at = 10.0 * number
            notify(Arrived(at, Request(id=number, input_tokens=8_000)))
            notify(PrefillFinished(at + 1, number))
            notify(TransferFinished(at + 3, number))
            notify(Finished(at + 9, number))


@pytest.fixture
def foreseen(tmp_path: Path) -> str:
    """A log with decisions of foresight."""
    recorded(tmp_path / "foreseen.log", "foresight")
    return str(tmp_path / "foreseen.log")


def test_explain_shows_the_values_learned_before_the_decision(foreseen: str) -> None:
    """Later values have no effect: a core with the same events up to the decision has the same values."""
    header, records = read_log(Path(foreseen))
    control, expected = header.spec.build(parse(CLUSTER)), list[TierLearned]()
    for record in records:
        for made in record.decisions:
            if isinstance(made, Decode):
                learned = control.learned(record.event.at)
                assert learned is not None
                expected.append(learned[SAME_POD])
        control.handle(record.event)
    assert [tier.transfers for tier in expected] == [0, 1, 2, 3, 4, 5]
    for number in (0, 5):
        shown = explain(foreseen, str(number), "--json")
        prefill, decode = learned_of(shown)
        assert prefill["policy"] == decode["policy"] == "foresight"
        (tier,) = decode["tiers"]
        assert tier == {"tier": SAME_POD, "name": "same pod"} | msgspec.to_builtins(expected[number])
    spoken = explain(foreseen, "5").stdout
    assert "foresight had learned by then" in spoken
    (row,) = [line.split() for line in spoken.splitlines() if "same pod" in line]
    tier = expected[5]
    assert tier.bytes_per_s is not None
    speed = f"{tier.bytes_per_s * 8e-9:.3g}"
    assert row == [
        "2",
        "(same",
        "pod)",
        f"{tier.factor:.3f}",
        speed,
        "Gbps",
        "5",
        f"{tier.weight:.1f}",
        "8",
        "s",
        "ago",
    ]
    assert all(part in spoken for part in ("transfer", "imposed", "wait", "step", "slot"))


def test_explain_omits_learned_values_that_it_cannot_reproduce(foreseen: str, tmp_path: Path) -> None:
    """If this version decides differently, the log is explained without these values; a log of NetKV has none."""
    lines = Path(foreseen).read_text().splitlines(keepends=True)
    number = next(index for index, line in enumerate(lines) if '"type":"decode"' in line)
    lines[number] = lines[number].replace('"hit_tokens":0', '"hit_tokens":1')
    other = tmp_path / "other.log"
    other.write_text("".join(lines))
    ended = explain(str(other), "0", "--json")
    assert [learned is None for learned in learned_of(ended)] == [False, True]
    assert f"other.log:{number + 1}: this version decides differently" in ended.stderr
    assert explain(str(other), "5").stderr == ""
    arrival = next(index for index, line in enumerate(lines) if '"type":"arrived"' in line)
    other.write_text("".join(lines[:arrival] + lines[arrival + 1 :]))
    ended = explain(str(other), "5", "--json")
    assert learned_of(ended) == [None, None]
    assert "this version decides differently" in ended.stderr
    assert "had learned" not in explain(str(other), "5").stdout
    recorded(other, "netkv")
    shown = explain(str(other), "3", "--json")
    assert (learned_of(shown), shown.stderr) == ([None, None], "")


def test_explain_says_how_fast_the_transfer_was_and_what_has_measured_it(tmp_path: Path) -> None:
    """The first measurement after the decision counts; without one, the last one before it."""
    spec, path = ControlSpec(decode="netkv"), tmp_path / "measured.log"
    control = spec.build(parse(CLUSTER))
    targets: list[str] = []
    with EventLog(path, LogHeader(cluster=CLUSTER, spec=spec)) as log:

        def notify(event: Event) -> None:
            decisions = control.handle(event)
            log.write(event, decisions)
            targets.extend(decision.target for decision in decisions if isinstance(decision, Decode))

        for number in range(3):
            at = 10.0 * number
            notify(Arrived(at, Request(id=number, input_tokens=8_000)))
            notify(PrefillFinished(at + 1, number))
            if number < 2:
                for target in ("decode0", "decode1"):
                    notify(TransferMeasured(at + 2, "prefill0", target, 1e9 * (number + 1), 1.0, 1, "nixl"))
            notify(TransferFinished(at + 3, number))
            notify(Finished(at + 9, number))
    for number, rate, later in ((0, 1e9, True), (1, 2e9, True), (2, 2e9, False)):
        ended = explain(str(path), str(number), "--json")
        assert ended.exit_code == 0, ended.stderr
        prefill, decode = json.loads(ended.stdout)["decisions"]
        assert prefill["measured"] is None
        assert (decode["measured"]["by"], decode["measured"]["later"]) == ("nixl", later)
        assert decode["measured"]["bytes_per_s"] == rate
        assert decode["measured"]["ratio"] == pytest.approx(rate / decode["measured"]["map_bytes_per_s"])
        spoken = " ".join(explain(str(path), str(number)).stdout.split())
        assert f"KV transfer prefill0 to {targets[number]}, counted by NIXL" in spoken
        assert f"{rate * 8e-9:.3g} Gbps, {decode['measured']['ratio']:.0%} of the cluster file's" in spoken


def test_explain_says_nothing_about_transfers_that_nothing_has_measured(foreseen: str) -> None:
    ended = explain(foreseen, "0", "--json")
    assert [decision["measured"] for decision in json.loads(ended.stdout)["decisions"]] == [None, None]
    assert "KV transfer" not in explain(foreseen, "0").stdout
