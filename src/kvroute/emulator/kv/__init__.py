"""KV transfers, events and storage of emulated engines."""
