"""The parameters of the foresight policy: for the price of a decision, and for the estimate of the network."""

from __future__ import annotations

import math

import msgspec

from kvroute.types import InputError

NO_BOUND = 1e9
"""Value of `token_delay_max` beyond which no delay is."""
TARGETS = ("tpot", "ttft")
"""Parameters that are times although their names have no unit."""
PAIRING_ONLY = frozenset(
    (
        "arrival_load_weight",
        "joint_width",
        "joint_reach",
        "aggregated",
        "delay_weight",
        "token_delay_max",
        "token_delay_price",
        "ttft",
    )
)
"""Parameters of the choice at arrival, which only `foresight-joint` makes."""
SIMULATION_ONLY = frozenset(("width", "near_max"))
"""Parameters of the fluid model, which `foresight-closed` does not use."""


class ForesightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the foresight policy; weights are plain numbers.

    The learning parameters are not sensitive: half or twice the value changes little. `answer_weight` trades time to
    first token for time between tokens, `answer_transfers` bounds that trade.
    """

    imposed_weight: float = 1.0
    """Weight of the delay that a transfer imposes on the transfers in flight (sum of their seconds)."""
    wait_weight: float = 1.0
    """Weight of the wait for a free slot, beyond the time of the KV transfer."""
    slot_weight: float = 1.0
    """Weight of a slot's price: the mean time between two releases, times the squared share of slots in use."""
    step_weight: float = 3.0
    """Weight of the time that one more request adds to a step, per request in the batch. About as many requests arrive
    during its response, and each waits longer for the end of a step and for its own first step."""
    answer_weight: float = 0.2
    """Weight of the time that one more request in the batch adds to the others' tokens over a mean response."""
    answer_transfers: float = 2.0
    """Upper bound of that price as a multiple of the transfer time: the policy does not leave a near instance for one
    whose transfer takes longer by more than this multiple, only to speed up other requests' tokens."""
    arrival_load_weight: float = 0.0
    """Weight of slot wait, first step and slot price while prefill and decode are chosen together at arrival. The load
    at arrival says little about the load when the prefill ends, and the decode instance is chosen again then."""
    step_floor_s: float = 1e-6
    """Minimum time of a decode step, in seconds. It gives load a price if no timing is known, and favours lower load on
    a tie."""
    output_tokens: float = 256.0
    """Assumed mean length of a response before any has finished."""
    output_window: int = 200
    """Number of responses in the mean; those not seen yet count as `output_tokens`."""
    width: int = 2
    """Number of best candidates by the closed form whose transfers the fluid model simulates; 0: none."""
    joint_width: int = 3
    """Number of best prefill instances by the closed form whose transfers the fluid model simulates."""
    joint_reach: int = 8
    """Maximum number of prefill instances that are evaluated, those with the earliest prefill end first."""
    aggregated: int = 2
    """Whether `foresight-joint` lets one instance serve a request if that costs less than the best pair. 0: never; 1: a
    decode instance may compute the prompt; 2: also, a prefill instance may go on to decode. It has no effect where the
    engines cannot do so."""
    delay_weight: float = 1.0
    """Weight of delays between requests while it is decided whether one instance serves a request: a prompt delays the
    requests on its instance by its time, later prompts delay its response, and it makes the steps of others longer."""
    token_delay_max: float = 0.05
    """What an aggregated request may add to the time between tokens without a further price, as a share of it: its
    prompt may delay a response in progress by this share of a mean response, and later prompts may delay its own
    response by as much."""
    token_delay_price: float = 0.25
    """Price of each second of delay beyond `token_delay_max`, in seconds: an aggregated request may exceed that share
    by the seconds that it is cheaper than the pair, divided by this price. 0: no price. It does not count if there is
    no pair."""
    tpot: float = 0.0
    """Target for the time per output token, in seconds; 0: none. A choice that is predicted to keep more targets is
    preferred, whatever it costs, to one that keeps fewer."""
    ttft: float = 0.0
    """Target for the time to the first token, in seconds; 0: none. See `tpot`."""
    near_max: int = 24
    """Number of transfers that a simulation may change, the nearest by shared links; the others keep their rates."""
    rival_weight: float = 1.0
    """Weight of other transfers' flows as rivals on a cable."""
    sibling_weight: float = 1.0
    """Weight of a transfer's own flows as rivals on a cable; 0: only other transfers are rivals."""
    source_nic_factor: float = 1.0
    target_nic_factor: float = 1.0
    """Factors on the map's speed of sending and of receiving NICs; 0: NICs are no limit."""
    uplink_factor: float = 1.0
    """Factor on the capacity of all cables of a rack or pod together; 0: only the tier of an uplink is used."""
    left_floor_share: float = 0.03
    """Minimum share of its bytes that a transfer has left in the model while its end is not observed."""
    surprise_max: float = 1.5
    """Upper bound of |ln(bytes sent / bytes predicted)| that one transfer may teach."""
    late_log: float = -0.2
    """A transfer with a lower log ratio (slower than predicted) teaches its tier, whatever limited it in the model."""
    path_limited_share: float = 0.5
    """A transfer that its path limited in the model for more than this share of its bytes also teaches its tier."""
    remembered: float = 0.9
    """Share of a tier's knowledge that remains after the next transfer: 1 minus the learning rate."""
    fading_s: float = 120.0
    """Time after which a tier's knowledge counts 1/e, in seconds. Without fading, a tier that once looked slow would be
    avoided for ever, because no transfer would use it and correct the estimate."""
    prior_transfers: float = 2.0
    """Weight of the mean of all tiers beside a tier's own transfers, as a number of transfers."""
    pooled_prior_transfers: float = 100.0
    """Weight of the map as given beside the transfers of all tiers, as a number of transfers."""
    factor_min: float = 0.05
    factor_max: float = 8.0
    """Bounds of the factor of measured over nominal capacity of a path."""

    @property
    def has_targets(self) -> bool:
        """Whether there is a target for TPOT or TTFT."""
        return bool(self.tpot or self.ttft)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "late_log" and not 0 <= value < math.inf:
                raise InputError(f"{value} is not a number of 0 or more", where=name, hint="see docs/policies.md")
        for name in ("output_window", "width", "joint_width", "joint_reach", "near_max", "aggregated"):
            if getattr(self, name) != int(getattr(self, name)):
                raise InputError(f"{getattr(self, name)} is not a whole number", where=name, hint="give a whole number")
        for name in (
            "output_tokens",
            "step_floor_s",
            "fading_s",
            "prior_transfers",
            "pooled_prior_transfers",
            "factor_min",
        ):
            if getattr(self, name) == 0:
                raise InputError("the value is zero", where=name, hint="use a positive number")
        if not self.factor_min <= 1 <= self.factor_max:
            raise InputError(
                "factor_min to factor_max does not include 1",
                where="factor_min",
                hint="use factor_min <= 1 <= factor_max",
            )
        shares = {
            "remembered": (self.remembered < 1, "below 1"),
            "left_floor_share": (0 < self.left_floor_share < 1, "above 0 and below 1"),
            "arrival_load_weight": (self.arrival_load_weight <= 1, "1 or less"),
        }
        for name, (fits, wanted) in shares.items():
            if not fits:
                raise InputError(f"{getattr(self, name)} is out of range", where=name, hint=f"use {wanted}")
        if self.aggregated > 2:
            raise InputError(f"{self.aggregated} is not 0, 1 or 2", where="aggregated", hint="see docs/policies.md")
        if not -math.inf < self.late_log <= 0:
            raise InputError(
                f"{self.late_log} is not a number of 0 or less", where="late_log", hint="use a negative number"
            )
        for name, least in (("output_window", 1), ("joint_width", 1), ("joint_reach", 1), ("near_max", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{getattr(self, name)} is too small", where=name, hint=f"use {least} or more")
