"""The live gateway: beside the Rust routers, under faults, with 500 instances, and against the simulator."""
