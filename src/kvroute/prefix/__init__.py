"""Block hashes, and which instance holds which prefix, how deep; knows nothing of bytes, time or the network."""

from kvroute.prefix.hashing import block_hashes, salt_seed
from kvroute.prefix.holdings import Evicted
from kvroute.prefix.index import PrefixIndex
from kvroute.prefix.states import StateIndex

__all__ = ["Evicted", "PrefixIndex", "StateIndex", "block_hashes", "salt_seed"]
