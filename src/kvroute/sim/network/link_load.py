"""Traffic of the links over a run, as a share of their capacity."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvroute.topology import Cluster
from kvroute.types import FloatArray, IntArray

BUSIEST_SHOWN = 10


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Own traffic on the links of a tier, as a share of their nominal capacity over the run."""

    mean: float
    busiest: float
    busiest_link: str


class LinkShare(msgspec.Struct, frozen=True, kw_only=True):
    """Own traffic on one link, as a share of its nominal capacity over the run."""

    link: str
    share: float


def link_load(
    cluster: Cluster, tier_links: Sequence[IntArray], carried_bytes: FloatArray, end_s: float
) -> dict[str, LinkLoad]:
    """Return the load of each tier that has links; `carried_bytes` is indexed by link, `end_s` is the length of the
    run."""
    loads = {}
    whole = cluster.capacity_bytes_per_s * max(end_s, 1e-9)
    for tier, links in enumerate(tier_links):
        if len(links):
            shares = carried_bytes[links] / whole[links]
            busiest = int(np.argmax(shares))
            loads[str(tier)] = LinkLoad(
                mean=float(carried_bytes[links].sum() / whole[links].sum()),
                busiest=float(shares[busiest]),
                busiest_link=cluster.links[int(links[busiest])].name,
            )
    return loads


def busiest_links(cluster: Cluster, carried_bytes: FloatArray, end_s: float) -> tuple[LinkShare, ...]:
    """Return the links with the highest share; ties in the cluster's order."""
    shares = carried_bytes / (cluster.capacity_bytes_per_s * max(end_s, 1e-9))
    order = np.lexsort((np.arange(len(shares)), -shares))[:BUSIEST_SHOWN]
    return tuple(LinkShare(link=cluster.links[index].name, share=float(shares[index])) for index in order.tolist())
