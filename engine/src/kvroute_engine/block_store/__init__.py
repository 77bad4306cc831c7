"""The storage tier for KV blocks: full blocks of [layer, tokens, bytes] as extents, readable by layers.

`PosixStore` keeps them as files. `redis_backend` and `s3_backend` need the extra `store`.
"""

from kvroute_engine.block_store.format import BlockFormat
from kvroute_engine.block_store.interface import BlockStore, StoreError
from kvroute_engine.block_store.posix import PosixStore, PosixStoreSpec

__all__ = ["BlockFormat", "BlockStore", "PosixStore", "PosixStoreSpec", "StoreError"]
