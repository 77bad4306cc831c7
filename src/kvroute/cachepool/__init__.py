"""The hybrid prefix cache pool: full-attention blocks, request-level states and transfer blocks in one memory.

It also has the view of all clusters' pools and plans copies between them. It has no clock, moves no bytes and does no
routing.
"""

from kvroute.cachepool.catalogue import Evicted
from kvroute.cachepool.clusters import CachePools, ClusterMatch, Copy, CopyInFlight, Place
from kvroute.cachepool.hotspots import CachedPrefixes, CopySpec, Hotspots, HotspotSpec
from kvroute.cachepool.layout import Layout, StateGroup
from kvroute.cachepool.lease import BlockNumbers, Lease
from kvroute.cachepool.pool import CachePool

__all__ = [
    "BlockNumbers",
    "CachePool",
    "CachePools",
    "CachedPrefixes",
    "ClusterMatch",
    "Copy",
    "CopyInFlight",
    "CopySpec",
    "Evicted",
    "HotspotSpec",
    "Hotspots",
    "Layout",
    "Lease",
    "Place",
    "StateGroup",
]
