"""KV blocks between two engines, over TCP or a NIXL data plane: connections, leases, writes and reads."""
