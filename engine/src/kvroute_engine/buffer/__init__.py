"""The buffer server of a node: reads KV blocks from the store into host memory, from which engines fetch them, and
writes the blocks that engines send to the store."""

from kvroute_engine.buffer.server import BufferServer, BufferSpec

__all__ = ["BufferServer", "BufferSpec"]
