"""KV blocks between an engine and the store, through the buffer server of its node."""
