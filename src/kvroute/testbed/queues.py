"""Queues in front of a link: they set its rate and the order of its connections. `tc` commands as text.

`fair` serves all connections in turn (max-min over a path, as in the cost model): deficit round-robin among the leaves
of an htb tree, to which a classic BPF program assigns connections by addresses and ports. It requires only htb and
cls_bpf, because many kernels have neither fq nor fq_codel. `fifo` is one queue, first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvroute.types import InputError

Discipline: TypeAlias = Literal["fair", "fifo"]
SEGMENT_BYTES, FRAME_BYTES = 1448, 1514
"""Payload of a full segment (MTU 1500, timestamps), and the bytes that a queue counts for it."""
LEAVES_MAX, LEAVES_MIN = 256, 32
"""More leaves separate more connections, but the kernel's time for each leaf grows with their number."""
QUEUE_BYTES = 256 << 10
"""Minimum queue in front of a link, in bytes: per connection if queues are fair, otherwise for all connections."""
RATE_MIN_BITS_PER_S, RATE_MAX_BITS_PER_S = 1e6, 1e9
_BURST_BYTES = 16 << 10
_BURST_S = 1e-3
_FIRST_LEAF = 0x10
_OTHERS = 0x2
_ELSE = 0x3
_UDP = 17
_GOLDEN = 2_654_435_761
"""2^32 divided by the golden ratio. Multiplying by it spreads small differences over the upper bits (Knuth, TAOCP
6.4)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Rate of one link on the wire, and the share of it that background traffic uses."""

    bits_per_s: float
    others: float = 0.0
    """Share in [0, 1) of background UDP, which does not wait for its turn."""

    @classmethod
    def of(cls, bytes_per_s: float, scale: float, others: float = 0.0) -> Limit:
        """Return a limit that carries `scale` times `bytes_per_s` of TCP payload. The model's rates do not include
        headers.

        Raises:
            InputError: the link is too slow or too fast for one machine to shape.
        """
        bits = bytes_per_s * scale * 8 * FRAME_BYTES / SEGMENT_BYTES
        if not RATE_MIN_BITS_PER_S <= bits <= RATE_MAX_BITS_PER_S:
            what = f"a link of {bytes_per_s * 8e-9:g} Gbps would have {bits * 1e-6:.3g} Mbit/s at a scale of {scale:g}"
            raise InputError(what, where="--scale", hint="choose a scale with 1 to 1000 Mbit/s for every link")
        return cls(bits, others)


def packets(queue_bytes: float) -> int:
    """Return the length of a queue in packets, for `txqueuelen`. Leaves without a queue of their own use it."""
    return math.ceil(queue_bytes / FRAME_BYTES)


def leaves_of(equal_links: int) -> int:
    """Return the number of leaves of each of `equal_links` links that share their connections: a power of two."""
    return max(LEAVES_MIN, 1 << (LEAVES_MAX // equal_links).bit_length() - 1)


def lines(
    device: str,
    limit: Limit,
    discipline: Discipline,
    queue_bytes: float = QUEUE_BYTES,
    leaves: int = LEAVES_MAX,
) -> Iterator[str]:
    """Yield lines for `tc -batch` in the link's namespace. With fair queues, the device's length applies to each."""
    rate, burst = f"{round(limit.bits_per_s)}bit", max(_BURST_BYTES, math.ceil(limit.bits_per_s / 8 * _BURST_S))
    whole = f"rate {rate} ceil {rate} burst {burst} cburst {burst} quantum 60000"
    yield f"qdisc add dev {device} root handle 1: htb default {_ELSE:x}"
    yield f"class add dev {device} parent 1: classid 1:1 htb {whole}"
    if discipline == "fifo":
        yield f"class add dev {device} parent 1:1 classid 1:{_ELSE:x} htb {whole}"
        yield f"qdisc add dev {device} parent 1:{_ELSE:x} bfifo limit {round(queue_bytes)}"
        return
    others = max(round(limit.bits_per_s * limit.others), 8000)
    share = f"rate {max(round(limit.bits_per_s * (1 - limit.others) / (leaves + 1)), 8)}bit ceil {rate}"
    yield f"class add dev {device} parent 1:1 classid 1:{_OTHERS:x} htb rate {others}bit ceil {others}bit quantum 1514"
    yield f"qdisc add dev {device} parent 1:{_OTHERS:x} bfifo limit {QUEUE_BYTES}"
    for leaf in (_ELSE, *range(_FIRST_LEAF, _FIRST_LEAF + leaves)):
        leafs = f"parent 1:1 classid 1:{leaf:x} htb {share} burst 1600 cburst {burst} quantum {FRAME_BYTES}"
        yield f"class add dev {device} {leafs}"
    yield f"filter add dev {device} parent 1: protocol ip prio 1 bpf bytecode '{classifier(leaves)}'"


def leaf_of(source: int, target: int, ports: int, leaves: int = LEAVES_MAX) -> int:
    """Return the leaf of a connection. Addresses are numbers; `ports` is both ports as one, source in the upper
    half."""
    mixed = (source ^ ports) * _GOLDEN & 0xFFFF_FFFF
    return ((target ^ mixed) * _GOLDEN & 0xFFFF_FFFF) >> (33 - leaves.bit_length())


def classifier(leaves: int = LEAVES_MAX) -> str:
    """Return `leaf_of` as classic BPF over an Ethernet frame with IPv4 without options. UDP is background traffic."""
    code = [
        (0x30, 0, 0, 23),  # ldb [23]: protocol
        (0x15, 0, 1, _UDP),  # jeq
        (0x06, 0, 0, 0x1_0000 | _OTHERS),  # ret
        (0x20, 0, 0, 34),  # ld [34]: both ports
        (0x07, 0, 0, 0),  # tax
        (0x20, 0, 0, 26),  # ld [26]: source
        (0xAC, 0, 0, 0),  # xor x
        (0x24, 0, 0, _GOLDEN),  # mul
        (0x07, 0, 0, 0),
        (0x20, 0, 0, 30),  # ld [30]: target
        (0xAC, 0, 0, 0),
        (0x24, 0, 0, _GOLDEN),
        (0x74, 0, 0, 33 - leaves.bit_length()),  # rsh
        (0x04, 0, 0, 0x1_0000 | _FIRST_LEAF),  # add
        (0x16, 0, 0, 0),  # ret a
    ]
    return f"{len(code)}," + ",".join(" ".join(map(str, step)) for step in code)
