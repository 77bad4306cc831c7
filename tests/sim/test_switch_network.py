"""The switch and its workers in virtual time: exact sums, packets, times of windows, retransmissions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.sim.groups.switch_network import SwitchLinks, SwitchNetwork, SwitchRun, random_values

PACKET_BYTES = 1000.0


def run(workers: int, slots: int, chunks: int, *, loss: float = 0.0, rate: float = 1e9, seed: int = 0) -> SwitchRun:
    links = SwitchLinks(rate, 5e-6, loss, PACKET_BYTES, 1e-6)
    return SwitchNetwork(links, workers, slots, 1e-3, seed).run(random_values(workers, chunks, seed))


shapes = st.tuples(st.integers(2, 5), st.integers(1, 16), st.integers(1, 40))


@given(shapes, st.sampled_from([0.0, 0.05]), st.integers(0, 3))
def test_every_worker_has_the_sum_and_every_run_is_repeated_alike(
    shape: tuple[int, int, int], loss: float, seed: int
) -> None:
    first, second = (run(*shape, loss=loss, seed=seed) for _ in range(2))
    total = sum(random_values(shape[0], shape[2], seed))
    assert all((result == total).all() for result in first.results)
    assert (first.seconds, first.packets, first.sent_again) == (second.seconds, second.packets, second.sent_again)


@given(shapes)
def test_without_loss_every_packet_is_sent_once(shape: tuple[int, int, int]) -> None:
    workers, _, chunks = shape
    found = run(*shape)
    assert (found.packets, found.sent_again) == (workers * chunks, 0)


@given(shapes)
def test_a_run_takes_at_least_the_bytes_and_the_windows(shape: tuple[int, int, int]) -> None:
    """A link needs 1 us for each packet; a window waits for the round trip of 2 * 5 us + 1 us."""
    _, slots, chunks = shape
    found = run(*shape)
    windows = -(-chunks // slots)
    assert found.seconds >= max(chunks * 1e-6, windows * 11e-6)
    assert found.seconds >= run(*shape, rate=2e9).seconds


def test_worked_example_of_one_slot() -> None:
    """Ten chunks one after the other: each takes 1 us up, 5 us, 1 us in the switch, 1 us down and 5 us."""
    assert run(2, 1, 10).seconds == pytest.approx(10 * 13e-6)


def test_a_lost_packet_without_later_ones_costs_at_least_the_least_wait() -> None:
    lossless, lossy = run(3, 2, 100), run(3, 2, 100, loss=0.02, seed=1)
    assert lossy.sent_again > 0
    assert lossy.seconds > lossless.seconds + 1e-3 - 13e-6


def test_results_of_later_packets_make_a_worker_send_again_at_once() -> None:
    """One of 40 packets is lost, and later ones of its window are not: no worker waits for its timer of 1 ms."""
    lossless = run(3, 16, 40)
    found = [outcome for outcome in (run(3, 16, 40, loss=0.005, seed=seed) for seed in range(20)) if outcome.sent_again]
    assert found
    soon = [outcome for outcome in found if outcome.seconds < lossless.seconds + 0.5e-3]
    assert len(soon) > len(found) / 2


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_waits_do_not_grow_with_the_waits_of_others(workers: int) -> None:
    """1,000 chunks and 1 % loss: the run takes less than one wait of 1 ms for each lost packet."""
    for seed in range(3):
        found = run(workers, 32, 1_000, loss=0.01, seed=seed)
        assert found.seconds < found.sent_again * 1e-3
