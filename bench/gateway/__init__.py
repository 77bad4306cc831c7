"""Benches of the live gateway: against Rust routers, under faults, with 500 instances, and against the simulator."""
