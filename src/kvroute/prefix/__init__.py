"""Block hashes, and which instance holds which prefix, how deep; knows nothing of bytes, time or the network."""

from kvroute.prefix.hashing import block_hashes
from kvroute.prefix.index import Evicted, PrefixIndex

__all__ = ["Evicted", "PrefixIndex", "block_hashes"]
