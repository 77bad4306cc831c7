"""Prefill in another datacenter: thresholds, sites and allocation."""
