"""Turns and deadlines in simulated time: work conserving, fair to a small tenant, exact in its log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.examples import EXAMPLES

from kvroute.control import ControlSpec, LogHeader, decisions_equal, replay
from kvroute.control.log import EventLog, read_log
from kvroute.sim.placement import SimulatedTenancy, Tenant
from kvroute.sim.run import Run, simulate
from kvroute.sim.settings import SimSpec
from kvroute.sim.workload import Trace, TracedRequest
from kvroute.topology import load, parse
from kvroute.types import Arrived, Decode, Finished, InputError, Prefill, Reject, Request

CLUSTER = load(EXAMPLES / "fat-tree-64gpu.yaml")
SECONDS = 30.0


def trace(flood_per_s: float, small_per_s: float = 0.0) -> tuple[Trace, list[int]]:
    """Prompts of 10,000 tokens (0.92 s of prefill on one of four instances) and, of the second tenant, 1,000."""
    found = [(place / flood_per_s, 0, 10_000) for place in range(int(flood_per_s * SECONDS))]
    found += [(0.013 + place / small_per_s, 1, 1_000) for place in range(int(small_per_s * SECONDS))]
    found.sort()
    requests = tuple(TracedRequest(at, tokens, 20, (), 16) for at, _, tokens in found)
    return Trace("test", requests), [tenant for _, tenant, _ in found]


PAIRS = ControlSpec(decode="foresight", predicts=True)
CHOICE = ControlSpec(decode="foresight-joint", predicts=True)


def ran(
    found: tuple[Trace, list[int]],
    work_s: float | None,
    *,
    spec: ControlSpec = PAIRS,
    slo_s: float | None = None,
    log: EventLog | None = None,
) -> Run:
    """Simulate two tenants of equal weight."""
    tenants = tuple(Tenant(name, ttft_max_s=slo_s) for name in ("flood", "small"))
    tenancy = SimulatedTenancy(tenants, found[1], work_s=work_s)
    return simulate(CLUSTER, found[0], spec, SimSpec(), tenancy=tenancy, log=log)


def test_a_queue_for_one_tenant_changes_no_time() -> None:
    """The first in the queue goes to the instance that would have computed it next anyway."""
    found = trace(flood_per_s=6.0)
    direct, queued = ran(found, None), ran(found, 1.0)
    assert queued.summary.requests == direct.summary.requests
    assert np.nanmax(queued.outcomes.finished_s) == pytest.approx(np.nanmax(direct.outcomes.finished_s), rel=0.01)
    assert np.nanmean(queued.outcomes.ttft_s) == pytest.approx(np.nanmean(direct.outcomes.ttft_s), rel=0.02)


def test_a_small_tenant_waits_for_its_turn_and_not_for_the_flood() -> None:
    """At 140 % load its TTFT is bounded by the work in the instances; the flood loses only what the other one gets."""
    found = trace(flood_per_s=6.0, small_per_s=1.0)
    direct, fair = ran(found, None), ran(found, 1.0)
    small = np.array(found[1]) == 1
    assert np.nanmax(direct.outcomes.ttft_s[small]) > 8.0
    assert np.nanmax(fair.outcomes.ttft_s[small]) < 3.0
    assert fair.summary.requests.finished == direct.summary.requests.finished == len(found[1])
    assert np.nanmax(fair.outcomes.finished_s) < 1.05 * np.nanmax(direct.outcomes.finished_s)


@pytest.mark.parametrize(
    ("spec", "flood_per_s", "gain"), [(PAIRS, 6.0, 3.0), (CHOICE, 18.0, 1.5)], ids=["pairs", "choice"]
)
def test_requests_that_would_be_late_are_refused_and_the_others_are_in_time(
    tmp_path: Path, spec: ControlSpec, flood_per_s: float, gain: float
) -> None:
    """At 140 % load and more most accepted requests meet the limit, the others nearly do. The log repeats all
    decisions."""
    found, path = trace(flood_per_s=flood_per_s), tmp_path / "run.log"
    header = LogHeader(cluster=(EXAMPLES / "fat-tree-64gpu.yaml").read_text(), spec=spec)
    log = EventLog(path, header)
    refusing = ran(found, None, spec=spec, slo_s=2.0, log=log)
    log.close()
    direct = ran(found, None, spec=spec)
    counts = refusing.summary.requests
    assert counts.finished + counts.rejected == counts.arrived == len(found[1])
    in_time = int((refusing.outcomes.ttft_s <= 2.0).sum())
    assert in_time > 0.75 * counts.finished, "later transfers delay some that were just in time"
    assert np.nanmax(refusing.outcomes.ttft_s) < 1.4 * 2.0
    assert in_time > gain * int((direct.outcomes.ttft_s <= 2.0).sum())
    records = list(read_log(path)[1])
    decided = [decision for record in records for decision in record.decisions]
    assert sum(isinstance(decision, Reject) and decision.ttft_s is not None for decision in decided) == counts.rejected
    placed = [
        decision for decision in decided if isinstance(decision, Prefill | Decode) and decision.ttft_s is not None
    ]
    predicted = {decision.request_id: decision.ttft_s for decision in placed}
    actual = {e.event.request_id: e.event.ttft_s for e in records if isinstance(e.event, Finished)}
    ratios = [seconds / (predicted[number] or 1.0) for number, seconds in actual.items() if seconds is not None]
    assert len(ratios) == counts.finished
    assert 0.9 < float(np.median(ratios)) < 1.1
    again = replay(header.spec.build(parse(header.cluster)), iter(records))
    assert all(decisions_equal(record.decisions, decisions) for record, decisions in again)


def test_a_refused_request_leaves_no_booking() -> None:
    """The next decision is the same, with all its terms, whether or not a request was refused before."""
    plain, refused = PAIRS.build(CLUSTER), PAIRS.build(CLUSTER)
    for number in range(5):
        late = Request(id=100 + number, input_tokens=50_000)
        assert isinstance(refused.handle(Arrived(float(number), late, ttft_max_s=0.5))[0], Reject)
        request = Request(id=number, input_tokens=3_000 * (number + 1), max_output_tokens=10)
        decisions = [core.handle(Arrived(float(number), request)) for core in (plain, refused)]
        assert decisions_equal(*decisions)
    assert plain.loads(9.0) == refused.loads(9.0)


def test_tenants_need_one_gateway() -> None:
    """A queue asks the view of one core."""
    found = trace(flood_per_s=1.0)
    tenancy = SimulatedTenancy((Tenant("one"), Tenant("two")), found[1])
    with pytest.raises(InputError, match="one gateway"):
        simulate(CLUSTER, found[0], ControlSpec(), SimSpec(gateways=2), tenancy=tenancy)
