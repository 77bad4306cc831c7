"""Instances that start and stop during a simulated run."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.control import ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.policies.fleet.autoscaling import ScalingSpec
from kvroute.policies.fleet.replicas import ReplicaBounds, ReplicaTarget
from kvroute.sim.run import Run, simulate
from kvroute.sim.scaling import QueueScaler
from kvroute.sim.settings import QueueRule, ScalingRun, SimSpec, Slo
from kvroute.sim.workload import Trace, generate
from kvroute.sim.workload.diurnal import with_rates
from kvroute.topology import load
from kvroute.types import InputError, Replicas, ScaleIn, ScaleOut

FILE = Path(__file__).resolve().parents[2] / "examples" / "fat-tree-64gpu.yaml"
TEXT = FILE.read_text()
CLUSTER = load(FILE)
SLO = Slo(ttft_s=5.0, tpot_s=0.03)
TARGET = ReplicaTarget(ttft_s=5.0, tpot_s=0.03, attainment=0.85, prefill=ReplicaBounds(most=4))


def requests(seed: int = 0) -> Trace:
    """Return requests whose rate rises and falls."""
    return with_rates(generate(1_000, rate_per_s=2.0, seed=seed), (0.5, 2.5, 0.3, 0.3), 200.0)


def spec() -> ControlSpec:
    scaling = ScalingSpec(target=TARGET, manages="instances", window_s=80.0, scale_in_s=60.0)
    return ControlSpec(overcommit=True, scaling=scaling)


def simulated(first: tuple[int, int] = (1, 1), queue: QueueRule | None = None, seed: int = 0, **more: object) -> Run:
    scaling = ScalingRun(prefill=first[0], decode=first[1], queue=queue, startup_s=30.0)
    core = ControlSpec(overcommit=True) if queue is not None else spec()
    return simulate(CLUSTER, requests(seed), core, SimSpec(slo=SLO, scaling=scaling), seed=seed, **more)  # type: ignore[arg-type]


def test_instances_follow_the_rate_and_every_request_ends() -> None:
    run = simulated()
    assert run.summary.requests.finished == run.summary.requests.arrived
    prefill = [count for _, count, _ in run.instances]
    assert max(prefill) > 1
    assert prefill[-1] < max(prefill)
    assert min(min(p, d) for _, p, d in run.instances) >= 1


def test_gpu_hours_are_those_of_the_instances_that_run() -> None:
    run = simulated()
    last_s = float(run.outcomes.arrived_s.max())
    ends = [at for at, *_ in run.instances[1:]] + [last_s]
    serving_s = sum(
        (min(end, last_s) - at) * (p + d) for (at, p, d), end in zip(run.instances, ends, strict=True) if at < last_s
    )
    assert run.gpu_hours >= serving_s * 4 / 3600 * 0.999
    assert run.gpu_hours < 16 * 4 * last_s / 3600


def test_the_same_seed_gives_the_same_run_and_its_log_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with EventLog(path, LogHeader(cluster=TEXT, spec=spec())) as log:
        first = simulated(log=log)
    again = simulated()
    assert (first.gpu_hours, first.instances) == (again.gpu_hours, again.instances)
    header, found_records = read_log(path)
    records = list(found_records)
    kinds = {type(decision) for record in records for decision in record.decisions}
    assert {Replicas, ScaleIn, ScaleOut} <= kinds
    replayed = replay(header.spec.build(CLUSTER), records)
    assert all(decisions_equal(record.decisions, now) for record, now in replayed)


def test_the_queue_rule_follows_the_rate_too() -> None:
    run = simulated(queue=QueueRule(prefill=2.0, decode=20.0))
    assert run.summary.requests.finished == run.summary.requests.arrived
    assert max(count for _, count, _ in run.instances) > 1


def test_a_fixed_number_stays() -> None:
    scaling = ScalingRun(prefill=3, decode=2)
    run = simulate(CLUSTER, requests(), ControlSpec(overcommit=True), SimSpec(slo=SLO, scaling=scaling), seed=0)
    assert run.instances == ((0.0, 3, 2),)
    assert run.gpu_hours == pytest.approx(5 * 4 * float(run.outcomes.arrived_s.max()) / 3600)


def test_a_number_that_the_cluster_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="5 prefill instances serve at the start"):
        simulated((5, 1))
    with pytest.raises(InputError, match="gateways"):
        SimSpec(gateways=2, scaling=ScalingRun(prefill=1, decode=1))
    with pytest.raises(InputError, match="queue length"):
        ScalingRun(prefill=1, decode=1, queue=QueueRule(prefill=0.0, decode=1.0))


@settings(max_examples=60)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40))
def test_the_queue_rule_takes_away_only_after_the_stabilisation(queues: list[int]) -> None:
    rule = QueueRule(prefill=2.0, decode=2.0)
    scaler, present, advised = QueueScaler(rule, 2.0, 20), 1, list[tuple[float, int]]()
    for step, requests_now in enumerate(queues):
        at = 15.0 * step
        before, present = present, scaler.desired(at, present, requests_now)
        ratio = requests_now / before / 2.0
        advice = before if abs(ratio - 1.0) <= 0.1 else min(max(-(-requests_now // 2), 1), 20)
        advised.append((at, advice))
        assert 1 <= present <= 20
        assert present >= advice
        if present < before:
            assert present == max(count for when, count in advised if when >= at - 300.0)
