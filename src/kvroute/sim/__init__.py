"""Discrete-event simulator: the event loop, prefill and decode instances, workloads and one run."""
