"""The storage tier for KV blocks: full blocks of [layer, tokens, bytes] as extents, readable by layers.

`PosixStore` keeps them as files. `redis_backend` and `s3_backend` need the extra `store`.
"""

from kvroute.cachepool.store.format import BlockFormat
from kvroute.cachepool.store.interface import BlockStore, StoreError
from kvroute.cachepool.store.posix import PosixSettings, PosixStore

__all__ = ["BlockFormat", "BlockStore", "PosixSettings", "PosixStore", "StoreError"]
