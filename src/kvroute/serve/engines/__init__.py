"""Engines: client, prefill/decode protocols, and availability (circuit breaker, health checks, panic threshold)."""
