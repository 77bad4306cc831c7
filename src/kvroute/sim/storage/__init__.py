"""Agents that read their cached KV from storage through prefill and decode nodes (DualPath), on thousands of GPUs."""
