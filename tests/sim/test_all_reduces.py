"""Groups that reduce tensors on shared links: times by hand, and what schedulers and other traffic change."""

from __future__ import annotations

import numpy as np
import pytest

from kvroute.collectives import CollectiveFlow
from kvroute.collectives.policy import CollectiveScheduler
from kvroute.sim.groups.all_reduces import (
    AllReduceSimulation,
    PricedOption,
    Reduced,
    SchedulerReplicas,
    TensorTraffic,
)

CAPACITY = np.full(2, 1e10)
QUIET = TensorTraffic(large_bytes=1e6, small_bytes=1e6, large_pause_s=1e-4, small_pause_s=1e-4)


def two_links(groups: int) -> list[list[PricedOption]]:
    """Every group may use either of two links."""
    return [[PricedOption.of(f"link {link}", [CollectiveFlow((link,), 1.0)]) for link in (0, 1)] for _ in range(groups)]


def run(
    groups: int, policy: str = "outstanding", traffic: TensorTraffic = QUIET, seed: int = 1, end_s: float = 0.05
) -> Reduced:
    priced_options = two_links(groups)
    scheduler = CollectiveScheduler(
        [[priced.option for priced in choices] for choices in priced_options], CAPACITY, policy, seed
    )
    return AllReduceSimulation(priced_options, [1e-10] * groups, CAPACITY, scheduler, traffic, seed, (0, 1)).run(end_s)


def test_a_lonely_group_is_never_slowed() -> None:
    """1 MB over 10 GB/s takes 0.1 ms."""
    found = run(1)
    assert len(found.seconds) > 100
    assert found.seconds == pytest.approx([1e-4] * len(found.seconds))
    assert found.slowdown == pytest.approx([1.0] * len(found.slowdown))
    assert found.nbytes == 1e6 * len(found.seconds)


def test_two_groups_on_one_link_share_it() -> None:
    """Always the same link: times lie between one and two times the idle one; with two links nobody waits."""
    priced_options = [[choices[0]] for choices in two_links(2)]
    scheduler = CollectiveScheduler([[priced.option for priced in choices] for choices in priced_options], CAPACITY)
    shared = AllReduceSimulation(priced_options, [1e-10] * 2, CAPACITY, scheduler, QUIET, 1, (0,)).run(0.05)
    assert max(shared.slowdown) <= 2.0 + 1e-9
    assert np.mean(shared.slowdown) > 1.1
    assert run(2).slowdown == pytest.approx([1.0] * len(run(2).slowdown))


def test_the_same_arguments_give_the_same_run() -> None:
    assert run(4, "ecmp") == run(4, "ecmp")
    assert run(4, "ecmp", seed=2) != run(4, "ecmp")


def test_other_traffic_slows_and_the_default_avoids_it() -> None:
    """Bursts take three quarters of a link: a choice by load is faster than always the same link."""
    traffic = TensorTraffic(large_bytes=1e6, small_bytes=1e6, background=0.5)
    static, chosen = run(2, "static", traffic, end_s=0.3), run(2, "outstanding", traffic, end_s=0.3)
    assert max(static.slowdown) == pytest.approx(4.0, abs=0.2)
    assert np.mean(chosen.slowdown) < np.mean(static.slowdown)


def test_old_knowledge_makes_groups_choose_alike() -> None:
    """Eight selectors that synchronise every 32 decisions are slower than one scheduler."""
    priced_options = two_links(8)
    options = [[priced.option for priced in choices] for choices in priced_options]
    replicas = SchedulerReplicas([CollectiveScheduler(options, CAPACITY) for _ in range(8)], 32)
    stale = AllReduceSimulation(priced_options, [1e-10] * 8, CAPACITY, replicas, QUIET, 1, (0, 1)).run(0.05)
    assert np.mean(stale.slowdown) > 1.1 * np.mean(run(8).slowdown)


def test_replicas_forget_what_has_ended() -> None:
    """When all tensors are reduced and all schedulers have synchronised, no byte is outstanding."""
    options = [[priced.option for priced in choices] for choices in two_links(2)]
    schedulers = [CollectiveScheduler(options, CAPACITY) for _ in range(2)]
    replicas = SchedulerReplicas(schedulers, 4)
    tickets = [replicas.start(0.0, number % 2, 1e6)[0] for number in range(7)]
    for ticket in tickets:
        replicas.finish(ticket)
    replicas.finish(replicas.start(0.0, 0, 0.0)[0])
    assert [float(scheduler.loads.outstanding_bytes.max()) for scheduler in schedulers] == [0.0, 0.0]
