"""Connectors that move KV caches between engines; the only room that imports vllm."""
