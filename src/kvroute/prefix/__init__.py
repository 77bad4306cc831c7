"""Block hashes, and an index of the prefixes that each instance holds. It handles no bytes, time or network."""

from kvroute.prefix.hashing import block_hashes, prompt_seed, salt_seed
from kvroute.prefix.holdings import Evicted
from kvroute.prefix.index import PrefixIndex
from kvroute.prefix.states import StateIndex

__all__ = ["Evicted", "PrefixIndex", "StateIndex", "block_hashes", "prompt_seed", "salt_seed"]
