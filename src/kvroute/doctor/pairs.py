"""Selection of the prefill/decode pairs to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvroute.doctor.report import PairReport
from kvroute.topology import Cluster
from kvroute.topology.tree import TIER_NAMES
from kvroute.types import Instance

PAIRS_MAX = 16
"""Default of the maximum number of pairs."""
_RANKED_MAX = 512
"""Maximum number of pairs that are ranked, because ranking all pairs of a large cluster takes minutes. The order of
later pairs has no meaning."""


def possible_pairs(cluster: Cluster) -> int:
    """Return the number of pairs between which the gateway may send KV."""
    return sum(len(_partners(cluster, prefill)) for prefill in _of_role(cluster, "prefill"))


def chosen_pairs(cluster: Cluster, most: int | None) -> list[PairReport]:
    """Return pairs in the order in which they are tried, `most` of them at most (None: all).

    Every prefill engine is used once before any is used twice. Its partner is the decode engine that has been used
    least, and among those the one whose tier has been used least. So the first pairs cover as many engines and tiers as
    possible.
    """
    remaining = {prefill.name: _partners(cluster, prefill) for prefill in _of_role(cluster, "prefill")}
    decodes: Counter[str] = Counter()
    tiers: Counter[int] = Counter()
    chosen: list[PairReport] = []
    while any(remaining.values()):
        for prefill, partners in remaining.items():
            if not partners:
                continue
            if most is not None and len(chosen) >= most:
                return chosen
            source = cluster.index(prefill)
            row = cluster.tier[source]

            def rank(partner: Instance, row: Sequence[int] = row) -> tuple[int, int, str]:
                return decodes[partner.name], tiers[int(row[cluster.index(partner.name)])], partner.name

            decode = min(partners, key=rank) if len(chosen) < _RANKED_MAX else partners[0]
            partners.remove(decode)
            pair = _pair(cluster, prefill, decode.name)
            decodes[decode.name] += 1
            tiers[pair.tier] += 1
            chosen.append(pair)
    return chosen


def _of_role(cluster: Cluster, role: str) -> list[Instance]:
    return [instance for instance in cluster.instances if instance.role == role]


def _partners(cluster: Cluster, prefill: Instance) -> list[Instance]:
    return [
        decode
        for decode in _of_role(cluster, "decode")
        if decode.model == prefill.model and decode.protocol == prefill.protocol
    ]


def _pair(cluster: Cluster, prefill: str, decode: str) -> PairReport:
    source, target = cluster.index(prefill), cluster.index(decode)
    tier = int(cluster.tier[source, target])
    return PairReport(
        prefill=prefill,
        decode=decode,
        tier=tier,
        tier_name=TIER_NAMES[tier],
        promised_bytes_per_s=float(cluster.tier_bytes_per_s[tier]),
        promised_latency_s=cluster.latency_s(source, target),
    )
