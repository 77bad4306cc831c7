"""Attribution of what an engine counts to the pairs of instances between which the gateway has moved KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.serve.proxy.own_transfers import Counted, OwnTransfers
from kvroute.types import Decode, TransferMeasured

RANKS = {"p0": 1, "p1": 1, "d0": 1, "p4": 4, "d4": 4}
UNCONTENDED_S = {0: 1e-9, 1: 1e-8}
"""Seconds per byte, by tier."""


def own() -> OwnTransfers:
    return OwnTransfers(lambda tier, nbytes: nbytes * UNCONTENDED_S[tier], lambda name: RANKS[name])


def decode(number: int, source: str, target: str, kv_bytes: float = 1e9, tier: int = 0) -> Decode:
    return Decode(number, source, target, tier, kv_bytes, kv_bytes, 0)


def moved(transfers: OwnTransfers, *decisions: Decode, seconds: float | None = None) -> None:
    """Start and end these transfers."""
    for decision in decisions:
        transfers.started(decision)
        transfers.ended(decision, seconds, now=0.0)


def counted(kv_bytes: float, seconds: float, transfers: int) -> Counted:
    return Counted("nixl", kv_bytes, seconds, transfers)


def test_everything_belongs_to_the_only_pair() -> None:
    """The engine counts at the target (a pull) or at the source (a push)."""
    for engine in ("p0", "d0"):
        transfers = own()
        moved(transfers, decode(1, "p0", "d0"), decode(2, "p0", "d0"))
        expected = [TransferMeasured(5.0, "p0", "d0", 1.9e9, 3.0, 2, "nixl")]
        assert transfers.measured(5.0, engine, counted(1.9e9, 3.0, 2)) == expected
        assert transfers.measured(6.0, engine, counted(1.9e9, 3.0, 2)) == [], "they were attributed already"


def test_ranks_of_one_transfer_count_once() -> None:
    """Four ranks move a quarter each at the same time: one transfer of all bytes in the time of one rank."""
    transfers = own()
    moved(transfers, decode(1, "p4", "d4"), decode(2, "p4", "d4"))
    assert transfers.measured(5.0, "d4", counted(2e9, 8 * 0.5, 8)) == [
        TransferMeasured(5.0, "p4", "d4", 2e9, 2 * 0.5, 2, "nixl")
    ]


def test_several_sources_share_the_time_as_the_gateway_has_observed_it() -> None:
    """The slow source gets its own time even though the engine counts one sum."""
    transfers = own()
    moved(transfers, decode(1, "p0", "d0", 1e9), seconds=0.3)
    moved(transfers, decode(2, "p1", "d0", 3e9), seconds=2.7)
    fast, slow = transfers.measured(5.0, "d0", counted(4e9, 2.0, 2))
    assert (fast.source, fast.transfers, slow.source, slow.transfers) == ("p0", 1, "p1", 1)
    assert (fast.kv_bytes, slow.kv_bytes) == (1e9, 3e9)
    assert (fast.seconds, slow.seconds) == pytest.approx((0.2, 1.8))


def test_without_observation_several_sources_share_the_time_as_expected() -> None:
    """One unobserved duration is enough, because observed and expected ones are not comparable."""
    transfers = own()
    moved(transfers, decode(1, "p0", "d0", 1e9, tier=0), seconds=9.0)
    moved(transfers, decode(2, "p1", "d0", 1e9, tier=1))
    near, far = transfers.measured(5.0, "d0", counted(2e9, 22.0, 2))
    assert (near.seconds, far.seconds) == pytest.approx((2.0, 20.0))


def test_transfers_of_others_are_not_attributed() -> None:
    """A router beside this one, or `kvroute doctor`, uses the same engines."""
    transfers = own()
    assert transfers.measured(5.0, "d0", counted(1e9, 1.0, 1)) == []
    moved(transfers, decode(1, "p0", "d0"))
    assert transfers.measured(6.0, "d0", counted(2e9, 2.0, 2)) == []
    moved(transfers, decode(2, "p0", "d0"))
    assert len(transfers.measured(7.0, "d0", counted(1e9, 1.0, 1))) == 1


def test_a_transfer_may_be_counted_before_its_first_token() -> None:
    """The gateway still sees it in progress then. At its end it waits for the next page, which does not count it."""
    transfers = own()
    transfers.started(decode(1, "p0", "d0"))
    (measured,) = transfers.measured(5.0, "d0", counted(1e9, 1.0, 1))
    assert (measured.source, measured.target) == ("p0", "d0")


def test_the_engine_at_the_other_end_is_not_credited_later() -> None:
    """Only one of the two engines counts a transfer. What the other one counts much later is another one's."""
    transfers = own()
    moved(transfers, decode(1, "p0", "d0"))
    assert transfers.measured(61.0, "p0", counted(1e9, 1.0, 1)) == []


def test_the_transfers_of_an_instance_that_has_left_are_forgotten() -> None:
    transfers = own()
    moved(transfers, decode(1, "p0", "d0"))
    transfers.forget("d0")
    assert transfers.measured(5.0, "d0", counted(1e9, 1.0, 1)) == []


OWN = st.lists(
    st.tuples(st.sampled_from(["p0", "p1"]), st.floats(1e6, 1e9), st.none() | st.floats(1e-3, 10.0)), min_size=1
)


@given(OWN, st.floats(1e3, 1e12), st.floats(1e-3, 1e3), st.integers(1, 50))
def test_nothing_is_lost_or_counted_twice(
    made: list[tuple[str, float, float | None]], kv_bytes: float, seconds: float, transfers: int
) -> None:
    """All measurements together have the engine's bytes and seconds, whatever the gateway has observed."""
    kept = own()
    for number, (source, nbytes, took_s) in enumerate(made):
        moved(kept, decode(number, source, "d0", nbytes), seconds=took_s)
    measured = kept.measured(1.0, "d0", counted(kv_bytes, seconds, transfers))
    if transfers > len(made):
        assert measured == []
        return
    assert sum(transfer.kv_bytes for transfer in measured) == pytest.approx(kv_bytes)
    assert sum(transfer.seconds for transfer in measured) == pytest.approx(seconds)
    assert [transfer.source for transfer in measured] == sorted({source for source, _, _ in made})
