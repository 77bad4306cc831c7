"""Arbitration tables of an InfiniBand port (InfiniBand specification 7.6.9): weights from shares, shares from weights.

A port serves virtual lanes from two tables by weighted round robin. The table of low priority sends one packet after
the table of high priority has sent `high_limit` times 4,096 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest

_UNIT_BYTES = 64
"""Unit of a weight."""
_LIMIT_BYTES = 4096
"""Unit of the high limit."""
_WEIGHT_MAX, _LIMIT_MAX = 255, 254
"""A high limit of 255 means that the table of low priority may never send."""

Table = tuple[tuple[int, int], ...]
"""Entries of virtual lane and weight, in the order in which they are served."""


@dataclass(frozen=True, slots=True)
class Arbitration:
    """Both tables of a port."""

    high_limit: int
    """Units of 4,096 bytes that the table of high priority sends before one packet of the other; 0: one packet."""
    high: Table
    low: Table


def arbitration(high: Mapping[int, int], low: Mapping[int, int], mtu: int) -> Arbitration:
    """Return tables in which every lane gets its share while all send packets of `mtu` bytes.

    The lanes of low priority together get their shares or more, because the high limit is a whole number; see
    `guaranteed_shares`.

    Args:
        high: percentages of the lanes in the table of high priority; at least one.
        low: percentages of the others; at least one. All are above 0, and they add up to 100.
        mtu: bytes of a full packet.
    """
    others = sum(low.values())
    limit = min(mtu * sum(high.values()) // (_LIMIT_BYTES * others), _LIMIT_MAX)
    return Arbitration(limit, _table(high, mtu), _table(low, mtu))


def _table(shares: Mapping[int, int], mtu: int) -> Table:
    """Return weights in whole packets, because a smaller weight lets a packet pass nevertheless. A lane whose weight is
    too large for one entry has several, between those of other lanes."""
    unit, most = math.gcd(*shares.values()), _WEIGHT_MAX * _UNIT_BYTES // mtu
    columns = []
    for lane, share in sorted(shares.items()):
        full, rest = divmod(share // unit, most)
        packets = [most] * full + ([rest] if rest else [])
        columns.append([(lane, count * mtu // _UNIT_BYTES) for count in packets])
    return tuple(entry for entry in chain(*zip_longest(*columns)) if entry is not None)


def guaranteed_shares(found: Arbitration, mtu: int) -> dict[int, float]:
    """Return the share of the link that each lane has while all lanes send packets of `mtu` bytes."""
    before = found.high_limit * _LIMIT_BYTES or mtu
    low_part = mtu / (before + mtu)
    shares: dict[int, float] = {}
    for table, part in ((found.high, 1.0 - low_part), (found.low, low_part)):
        whole = sum(weight for _, weight in table)
        for lane, weight in table:
            shares[lane] = shares.get(lane, 0.0) + part * weight / whole
    return shares
