"""`kvroute plan replicas`: its numbers, JSON, report and one sentence for wrong input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvroute.cli.app import main
from kvroute.planner.replicas import FACTORS, ReplicaPlan, plan_replicas
from kvroute.policies.fleet.replicas import ReplicaTarget
from kvroute.sim.workload import generate
from kvroute.sim.workload.diurnal import DIURNAL, hourly_rates, shape_of, with_rates
from kvroute.topology import load
from kvroute.types import InputError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLUSTER = str(EXAMPLES / "fat-tree-64gpu.yaml")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command; it returns exit code, stdout and stderr."""

    def started(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvroute", "plan", "replicas", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return started


def plan(rate_per_s: float = 6.0, attainment: float = 0.9) -> ReplicaPlan:
    target = ReplicaTarget(ttft_s=5.0, tpot_s=0.03, attainment=attainment)
    return plan_replicas(load(Path(CLUSTER)), generate(2_000, seed=0), target, rate_per_s=rate_per_s, hourly=DIURNAL)


def test_numbers_rise_with_the_rate_and_a_day_costs_less_than_its_peak() -> None:
    found = plan()
    assert [row.rate_per_s for row in found.rates] == [6.0 * factor for factor in FACTORS]
    gpus = [row.gpus for row in found.rates]
    assert gpus == sorted(gpus)
    assert len(found.day.hours) == 24
    assert found.day.gpu_hours == sum(row.gpus for row in found.day.hours)
    assert found.day.gpu_hours < found.day.static_gpu_hours
    assert sum(row.rate_per_s for row in found.day.hours) / 24 == pytest.approx(6.0)
    assert all(row.need.attainment >= 0.88 for row in found.day.hours)


def test_json_is_the_whole_plan(run: Run) -> None:
    code, out, err = run(CLUSTER, "--rate", "6/s", "--ttft", "5s", "--json")
    assert (code, err) == (0, "")
    found = msgspec.convert(json.loads(out), ReplicaPlan)
    assert found.present == (4, 12)
    assert found.gpus_each == (4, 4)
    assert found.target.ttft_s == 5.0


def test_the_table_names_what_limits_and_the_report_has_every_number(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(CLUSTER, "--rate", "6/s", "--ttft", "5s", "--out", str(tmp_path / "plan"))
    assert code == 0
    assert "6 requests/s need" in out
    assert "GPU-hours" in out
    assert "14:00" in out
    page = (tmp_path / "plan" / "report.html").read_text()
    assert "Instances over the day" in page
    numbers = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert len(numbers["day"]["hours"]) == 24


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((CLUSTER,), "no request rate is given"),
        ((CLUSTER, "--rate", "0/s"), "above 0"),
        ((CLUSTER, "--rate", "6/s", "--attainment", "1.5"), "attainment"),
        ((CLUSTER, "--rate", "6/s", "--hourly", "1,2,3"), "24"),
        ((CLUSTER, "--rate", "6/s", "--model", "nothing"), "there is no model"),
        ((str(EXAMPLES / "nothing.yaml"), "--rate", "6/s"), "nothing.yaml"),
    ],
)
def test_wrong_input_gives_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.split())


def test_rates_that_are_no_day_are_refused() -> None:
    with pytest.raises(InputError, match="hourly"):
        plan_replicas(load(Path(CLUSTER)), generate(200, seed=0), ReplicaTarget(), rate_per_s=1.0, hourly=(1.0, 2.0))


def test_a_trace_is_moved_to_given_rates() -> None:
    trace = generate(3_000, rate_per_s=2.0, seed=1)
    moved = with_rates(trace, (1.0, 4.0, 2.0), 200.0)
    counts = [sum(k * 200 <= r.at_s < (k + 1) * 200 for r in moved.requests) for k in range(3)]
    assert counts == pytest.approx([200, 800, 400], rel=0.15)
    times = [request.at_s for request in moved.requests]
    assert times == sorted(times)
    assert [r.blocks for r in moved.requests] == [r.blocks for r in trace.requests[: len(moved.requests)]]
    with pytest.raises(InputError, match="too few"):
        with_rates(trace, (10.0,), 1_000.0)
    with pytest.raises(InputError, match="above 0"):
        with_rates(trace, (0.0,), 1_000.0)
    assert sum(hourly_rates(3.0)) / 24 == pytest.approx(3.0)
    assert sum(shape_of(trace)) == 3_000


def test_the_target_is_that_of_the_files_autoscaling(run: Run, tmp_path: Path) -> None:
    """A gateway with the file would compute the same; options replace single values and say so."""
    file = tmp_path / "mine.yaml"
    section = "{ttft: 5 s, tpot: 30 ms, attainment: 0.95, utilisation: 0.7, prefill: {min: 3}}"
    file.write_text(Path(CLUSTER).read_text() + f"gateway: {{autoscaling: {section}}}\n")
    code, out, err = run(str(file), "--rate", "1/s", "--json")
    assert (code, err) == (0, "")
    target = msgspec.convert(json.loads(out), ReplicaPlan).target
    assert target == msgspec.structs.replace(
        ReplicaTarget(ttft_s=5.0, tpot_s=0.03, attainment=0.95, utilisation_max=0.7), prefill=target.prefill
    )
    assert target.prefill.least == 3
    code, out, err = run(str(file), "--rate", "1/s", "--ttft", "2s", "--attainment", "0.95", "--json")
    assert (code, err) == (0, "--ttft 2 s replaces gateway.autoscaling.ttft: 5 s\n")
    assert msgspec.convert(json.loads(out), ReplicaPlan).target == msgspec.structs.replace(target, ttft_s=2.0)
    file.write_text(Path(CLUSTER).read_text() + "gateway: {policy: {ttft: 3 s, tpot: 40 ms}}\n")
    code, out, err = run(str(file), "--rate", "1/s", "--json")
    assert msgspec.convert(json.loads(out), ReplicaPlan).target == ReplicaTarget(ttft_s=3.0, tpot_s=0.04)
    file.write_text(Path(CLUSTER).read_text() + "gateway: {autoscaling: {attainment: 2}}\n")
    code, out, err = run(str(file), "--rate", "1/s")
    assert (code, out) == (2, "")
    assert "gateway.autoscaling.attainment" in err
