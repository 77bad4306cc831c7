"""Paths between datacenters: availability, telemetry and TCP counters."""
