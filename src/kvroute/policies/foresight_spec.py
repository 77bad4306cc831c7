"""The numbers of foresight, each with what it means: how a decision is priced, and how the network is estimated."""

from __future__ import annotations

import math

import msgspec

from kvroute.types import InputError


class ForesightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Weights are pure numbers. What is learned and how fast sits on a plateau: halving or doubling changes little;
    `answer_weight` trades the time to the first token for the time between tokens, `answer_transfers` says how far."""

    imposed_weight: float = 1.0
    """Of the seconds by which a transfer delays those in flight (their sum)."""
    wait_weight: float = 1.0
    """Of the seconds until a slot is free, beyond those in which the KV cache is on its way."""
    slot_weight: float = 1.0
    """Of a slot's price: the mean gap between two releases, times the squared share of slots taken."""
    landing_weight: float = 3.0
    """Of what one request more adds to a step, for each in the batch: about as many will land beside it while it
    answers, and wait longer for the end of a step and for their own first one."""
    answer_weight: float = 0.2
    """Of what one request more in the batch costs the others' tokens over a mean answer."""
    answer_transfers: float = 2.0
    """That price is at most so many times the transfer itself: for the sake of others' tokens a near place is not left
    for one that is farther than one more than that."""
    arrival_load_weight: float = 0.0
    """Of slot wait, first step and slot price while prefill and decode are chosen together: the load at arrival says
    little of the load when the prefill ends, and the decode instance is chosen again then."""
    step_floor_s: float = 1e-6
    """A decode step takes at least so long: load has a price where no timing is known, and ties go to the less
    loaded."""
    output_tokens: float = 256.0
    """Mean answer before any has been seen."""
    output_window: int = 200
    """Answers that the mean looks back on; those not seen yet count as `output_tokens`."""
    width: int = 2
    """Candidates, best by the closed form, whose transfer is played through in the fluid model; 0: none is."""
    joint_width: int = 3
    """Prefill instances, best by the closed form, whose transfers are played through."""
    joint_reach: int = 64
    """Prefill instances that are looked at, those that would have prefilled soonest."""
    near_max: int = 24
    """Transfers that a what-if may move, the nearest ones by shared links; farther ones keep their rates. All are in
    it where no more are in flight."""
    rival_weight: float = 1.0
    """Of other transfers' flows as rivals on the cables that each draws."""
    sibling_weight: float = 1.0
    """Of a transfer's own flows as rivals on the cables that each draws; 0: only other transfers are rivals."""
    source_nic_factor: float = 1.0
    target_nic_factor: float = 1.0
    """On the speed that the map gives the NICs of those who send, and of those who receive; 0: they limit nobody."""
    uplink_factor: float = 1.0
    """On the capacity of all cables of a rack or pod together; 0: nothing is known of uplinks but their tier."""
    left_floor_share: float = 0.03
    """A transfer whose end has not been seen has at least this share of its bytes left."""
    surprise_max: float = 1.5
    """Bound of |ln(bytes sent / bytes predicted)| that one transfer may teach."""
    late_log: float = -0.2
    """A transfer that is slower than this log ratio teaches its tier, whatever limited it in the model."""
    path_limited_share: float = 0.5
    """One that its path limited in the model for more than this share of its bytes teaches its tier, too."""
    remembered: float = 0.9
    """Share of what a tier has learned that the next transfer leaves: the learning rate is one less this."""
    fading_s: float = 120.0
    """Time after which what a tier has learned counts 1/e. A tier that one bad moment made look slow is avoided, and
    with nobody there to teach it better would be avoided for ever."""
    prior_transfers: float = 2.0
    """Transfers that the mean of all tiers counts as, beside a tier's own."""
    pooled_prior_transfers: float = 100.0
    """Transfers that the map as given counts as, beside those of all tiers."""
    factor_min: float = 0.05
    factor_max: float = 8.0
    """Bounds of measured over promised capacity of a path."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "late_log" and not 0 <= value < math.inf:
                raise InputError(f"{value} is not a number of zero or more", where=name, mend="see docs/policies.md")
        for name in ("output_window", "width", "joint_width", "joint_reach", "near_max"):
            if getattr(self, name) != int(getattr(self, name)):
                raise InputError(f"{getattr(self, name)} is not a whole number", where=name, mend="drop the fraction")
        for name in (
            "output_tokens",
            "step_floor_s",
            "fading_s",
            "prior_transfers",
            "pooled_prior_transfers",
            "factor_min",
        ):
            if getattr(self, name) == 0:
                raise InputError("zero would divide by nothing", where=name, mend="use a small positive number")
        if not self.factor_min <= 1 <= self.factor_max:
            raise InputError("the bounds leave out 1, the map as given", where="factor_min", mend="enclose 1")
        if not (self.remembered < 1 and 0 < self.left_floor_share < 1 and self.arrival_load_weight <= 1):
            raise InputError(
                "remembered, left_floor_share or arrival_load_weight is not a share",
                where="foresight",
                mend="use below 1",
            )
        if not -math.inf < self.late_log <= 0:
            raise InputError(f"{self.late_log} is not late", where="late_log", mend="use a negative number")
        for name, least in (("output_window", 1), ("joint_width", 1), ("joint_reach", 1), ("near_max", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{getattr(self, name)} is too few", where=name, mend=f"use {least} or more")
