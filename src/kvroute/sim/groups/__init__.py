"""Instances whose GPUs step together: all-reduces on shared links, pipelines, lock-step ranks."""
