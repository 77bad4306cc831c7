"""What is booked for a request in flight, and the instances that it must not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvroute.control.state.pool import DecodePool
from kvroute.types import Decode, Instance, PeerBooking, Request


class Avoided(NamedTuple):
    """Indices of the instances that a request should not or must not use."""

    failed: Sequence[int] = ()
    """They have failed the request, the latest last."""
    barred: Sequence[int] = ()
    """They must not serve it (`Arrived.only`)."""

    def __bool__(self) -> bool:
        return bool(self.failed or self.barred)

    def rounds(self) -> Iterator[Sequence[int]]:
        """Instances to exclude in each round: all, then all but the one that failed first, and so on; those that must
        not serve it in each. An instance that is dead but not detected as down has no load, so it would otherwise be
        chosen again and again."""
        return ([*self.failed[first:], *self.barred] for first in range(len(self.failed) + 1))


NOTHING_AVOIDED = Avoided()


class Booking(msgspec.Struct, gc=False):
    """What is booked for a request and must be released when it leaves."""

    request: Request
    model: str
    prefill: int = -1
    """Position in the prefill pool, -1 once prefill is over."""
    prefill_s: float = 0.0
    """Prefill time booked there."""
    wait_s: float = 0.0
    """Predicted wait for the start of the prefill of a pair."""
    transfer_s: float = 0.0
    """Transfer time predicted at arrival; 0: none was predicted."""
    began_s: float = 0.0
    """Time at which the prefill was booked, and then at which the transfer started."""
    source: int = -1
    target: int = -1
    """`source` and `target` are indices in the cluster."""
    pool: DecodePool | None = None
    position: int = -1
    """Position in the decode pool, -1 before the decision."""
    need_bytes: float = 0.0
    prompt_s: float = 0.0
    """Time of the prompt that is booked on the decode instance, which computes it itself; 0: nothing is booked."""
    in_transfer: bool = False
    admitted: bool = False
    kv_bytes: float = 0.0
    """KV bytes that cross the network for the request."""
    copy_id: int = 0
    """Number of the copy that brings a cached prefix to the prefill instance; 0: there is none."""
    early: bool = False
    """True if its KV cache is sent layer by layer while the prefill runs."""
    read_id: int = 0
    """Id of the read from the store; 0: there is none."""
    decode_read_at: int = 0
    """Position of the first token that the decode node reads."""
    planned: Decode | None = None
    """Decode decision that was made on arrival, because the read path depends on it, and is due after the prefill."""
    at_home: bool = False
    """True if the transfer from another datacenter failed: the request is not offloaded again."""
    both_on_arrival: bool = False
    """True if both legs must be chosen on arrival."""
    only: tuple[str, ...] | None = None
    """Names of the instances that may serve it; None: all."""
    avoid: Avoided = NOTHING_AVOIDED
    """Instances that have failed this request or must not serve it."""
    ttft_max_s: float | None = None
    """See `Arrived`; None once the request is placed."""
    ttft_s: float | None = None
    """Predicted time to the first token; None: not predicted."""

    def exclude(self, index: int) -> None:
        """Record that this instance has failed the request."""
        failed = [instance for instance in self.avoid.failed if instance != index]
        self.avoid = self.avoid._replace(failed=[*failed, index])

    def restrict_to(self, instances: Sequence[Instance]) -> None:
        """Exclude the instances of the cluster that are not in `only`."""
        if self.only is not None:
            others = [index for index, instance in enumerate(instances) if instance.name not in self.only]
            self.avoid = self.avoid._replace(barred=others)

    def for_peers(self, instances: Sequence[Instance], *, sessions: bool) -> PeerBooking:
        """Return what is booked as other gateways count it. Args: `sessions`: whether they get its session, too."""
        decodes, aggregated = self.pool is not None and self.position >= 0, self.prompt_s > 0.0
        sends, prefills = self.in_transfer and self.source >= 0, self.prefill >= 0 or aggregated
        prefill_s = self.prompt_s if aggregated else self.prefill_s
        return PeerBooking(
            self.request.id,
            prefill=instances[self.source].name if prefills else "",
            prefill_s=prefill_s if prefills else 0.0,
            target=instances[self.target].name if decodes else "",
            need_bytes=self.need_bytes if decodes else 0.0,
            admitted=decodes and self.admitted,
            source=instances[self.source].name if decodes and sends else "",
            kv_bytes=self.kv_bytes if decodes and sends else 0.0,
            session=self.request.session if sessions else 0,
        )
