"""Collectors: engine metrics, Prometheus, pushed telemetry and KV events, turned into events for `Control`."""
